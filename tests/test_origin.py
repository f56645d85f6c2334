"""What a run writes of its origin: equal where a comparison is controlled, different where it is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_refusion import origin
from lit_refusion.backbone import Backbone
from lit_refusion.cli import main
from lit_refusion.comparison.arm import read_all
from lit_refusion.comparison.control import check
from lit_refusion.data.loader import DataModule
from lit_refusion.data.shards import Shards
from lit_refusion.errors import UserError
from lit_refusion.objective import Objective
from lit_refusion.origin import has_ended, initial, order, read_origin, software
from objectives.autoregressive import Autoregressive
from tests.children import PACKED, command, metrics, prepared_data, run
from tests.comparison.folders import make_evaluation
from tests.conftest import ARCHITECTURES
from tests.data.test_loader import OBJECTIVE, loader_config

AR = Autoregressive(average="example")


@pytest.fixture(scope="module")
def data(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_data(tmp_path_factory.mktemp("data"), tokenizer_folder)


@pytest.fixture(scope="module")
def other_data(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_data(tmp_path_factory.mktemp("other"), tokenizer_folder, answer="It is {}.")


def module(data: Path, *, objective: Objective = AR, seed: int = 0, batch: int = 8, **loader: Any) -> DataModule:
    return DataModule(
        Shards(data), objective, config=loader_config(**loader), mask_token_id=300, seed=seed, global_batch_size=batch
    )


# Weights


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_initial_weights_depend_on_their_seed_alone(architecture: str, tokenizer: Any) -> None:
    def made(seed: int) -> dict[str, Any]:
        return initial(Backbone.from_architecture(ARCHITECTURES[architecture], tokenizer=tokenizer, seed=seed))

    assert made(1) == made(1)
    one, two = made(1), made(2)
    assert one.pop("initial_weights") != two.pop("initial_weights")
    assert one == two


def test_every_weight_counts(tokenizer: Any) -> None:
    backbone = Backbone.from_architecture(ARCHITECTURES["qwen3"], tokenizer=tokenizer, seed=1)
    found = [initial(backbone)["initial_weights"]]
    for parameter in backbone.parameters():
        with torch.no_grad():
            parameter *= 1.5
        found.append(initial(backbone)["initial_weights"])
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_parameters_are_counted_in_layers_and_head(architecture: str, tokenizer: Any) -> None:
    """Qwen3's tables are tied here and Llama's are not; tables multiply nothing, the head does."""
    backbone = Backbone.from_architecture(ARCHITECTURES[architecture], tokenizer=tokenizer, seed=1)
    found = initial(backbone)
    names = {name: p.numel() for name, p in backbone.named_parameters()}
    table = backbone.vocab_size * 32
    assert found["parameters"] == sum(names.values())
    assert found["head_parameters"] == table
    assert found["layer_parameters"] == sum(
        n for name, n in names.items() if "embed" not in name and "lm_head" not in name
    )
    assert found["parameters"] - found["layer_parameters"] == table * (2 if architecture == "llama" else 1)


# Order


def test_the_order_does_not_depend_on_objective_and_layout(data: Path) -> None:
    expected = order(module(data), 10)
    for other in (
        module(data, objective=OBJECTIVE),
        module(data, layout="packed"),
        module(data, micro_batch_size=8),
        module(data, num_workers=2),
        module(data, mask_rates="stratified"),
    ):
        assert order(other, 10) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"batch": 4},
        {"max_training_examples": 20},
        {"validation_fraction": 0.1},
        {"mixture": {"files": 0.5}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_changes_the_order_is_seen(changes: dict[str, Any], data: Path) -> None:
    assert order(module(data, **changes), 10)["example_order"] != order(module(data), 10)["example_order"]


def test_other_data_and_more_steps_are_seen(data: Path, other_data: Path) -> None:
    expected = order(module(data), 10)
    other, longer = order(module(other_data), 10), order(module(data), 11)
    assert other["example_order"] != expected["example_order"] != longer["example_order"]
    assert other["held_out"] != expected["held_out"] == longer["held_out"]


def test_the_last_step_is_seen(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that only differ there are not the same."""
    plain, other = module(data), module(data)
    step = other.plan.step
    monkeypatch.setattr(other.plan, "step", lambda number: step(number)[:: -1 if number == 9 else 1])
    assert order(other, 10)["example_order"] != order(plain, 10)["example_order"]


def test_tokens_are_those_of_the_examples_one_by_one(data: Path) -> None:
    made = module(data)
    examples = [made.shards[visit.index] for step in range(10) for visit in made.plan.step(step)]
    found = order(made, 10)
    assert (found["steps"], found["examples"]) == (10, 80)
    assert found["tokens"] == sum(len(example) for example in examples)
    assert found["response_tokens"] == sum(len(example.response_ids) for example in examples)


def test_tokens_of_a_long_run_are_scaled_up_from_evenly_spaced_steps(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "SAMPLED_STEPS", 3)
    made = module(data)
    numbers = [visit.index for step in (0, 4, 9) for visit in made.plan.step(step)]
    assert order(made, 10)["tokens"] == round(int(made.shards.lengths(np.array(numbers)).sum()) * 10 / 3)


# The file


@pytest.fixture(scope="module")
def runs(data: Path, other_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of 2 steps; each of the later ones is doctored in one thing."""
    folder = tmp_path_factory.mktemp("runs")
    short = ["trainer.max_steps=2", "trainer.loggers=[csv]"]
    run(*command(data, folder / "ar", "ar", *short))
    run(*command(data, folder / "refusion", "refusion", *PACKED, *short))
    run(*command(data, folder / "twins", "orthrus", *short))
    run(*command(data, folder / "weights", "ar", *short, "backbone.init_seed=1"))
    run(*command(data, folder / "order", "ar", *short, "seed=4"))
    run(*command(other_data, folder / "data", "ar", *short))
    return folder


def differing(one: Path, two: Path) -> set[str]:
    first, second = read_origin(one), read_origin(two)
    assert first.keys() == second.keys()
    return {name for name in first if first[name] != second[name]}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("refusion", set()),
        ("twins", set()),
        ("weights", {"initial_weights"}),
        ("order", {"example_order", "tokens", "response_tokens"}),
        ("data", {"data", "example_order", "held_out", "tokens", "response_tokens"}),
    ],
)
def test_runs_differ_in_what_was_doctored_and_nothing_else(name: str, expected: set[str], runs: Path) -> None:
    assert differing(runs / "ar", runs / name) - {"tokens", "response_tokens"} == expected - {
        "tokens",
        "response_tokens",
    }
    assert differing(runs / "ar", runs / name) <= expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("weights", {"backbone.init_seed", "initial_weights"}),
        ("order", {"seed"}),
        ("data", {"data", "data.folder", "example_order", "held_out", "tokens"}),
    ],
)
def test_a_comparison_of_real_runs_catches_what_was_doctored(
    name: str, expected: set[str], runs: Path, tmp_path: Path
) -> None:
    for run_name in ("ar", name):
        shutil.copytree(runs / run_name, tmp_path / run_name)
        make_evaluation(tmp_path / run_name / "evaluations" / "words")
    found = check(read_all([str(tmp_path / "ar"), str(tmp_path / name)]), baseline="ar", allow=())
    assert {item.key for item in found.violations} | {"tokens"} == expected | {"tokens"}
    assert not found.intended


def test_the_budget_is_what_the_run_has_trained_on(runs: Path) -> None:
    """A causal model makes one row of each example, and supervises its response."""
    found = read_origin(runs / "ar")
    rows = metrics(runs / "ar")
    assert found["tokens"] == sum(float(row["train/tokens"] or 0) for row in rows)
    assert found["response_tokens"] == sum(float(row["train/supervised_tokens"] or 0) for row in rows)
    assert (found["steps"], found["examples"]) == (2, 16)


def test_the_machine_and_the_versions_are_noted(runs: Path) -> None:
    assert read_origin(runs / "ar")["software"] == software()
    assert software()["torch"] == torch.__version__
    assert software()["threads"] == str(torch.get_num_threads())


def test_a_run_has_ended_when_its_last_checkpoint_is_of_its_last_step(runs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs / "ar", tmp_path / "run"))
    assert has_ended(folder)
    content = json.loads((folder / "origin.json").read_text())
    (folder / "origin.json").write_text(json.dumps({**content, "steps": 3}))
    assert not has_ended(folder)
    (folder / "origin.json").write_text(json.dumps(content))
    last = folder / "checkpoints" / "last.ckpt"
    whole = last.read_bytes()
    last.write_bytes(whole[:-100])
    assert not has_ended(folder)
    last.unlink()
    assert not has_ended(folder)
    last.write_bytes(whole)
    assert has_ended(folder)
    (folder / "origin.json").unlink()
    assert not has_ended(folder)
    assert not has_ended(tmp_path / "nowhere")


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"it has no origin\.json, so nobody can tell what it was made of"):
        read_origin(tmp_path)
    (tmp_path / "origin.json").write_text("{")
    with pytest.raises(UserError, match=r"origin\.json: cannot read it"):
        read_origin(tmp_path)


def test_a_run_that_is_refused_leaves_the_origin_alone(data: Path, runs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs / "ar", tmp_path / "run"))
    before = (folder / "origin.json").read_bytes()
    assert main(command(data, folder, "ar", "trainer.max_steps=4", "seed=9", "resume=auto")) == 2
    assert (folder / "origin.json").read_bytes() == before
