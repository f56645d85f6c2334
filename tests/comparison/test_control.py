"""Whether a comparison is controlled: every doctored run is caught under its right name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lit_refusion.comparison.arm import read_all
from lit_refusion.comparison.control import FACTS, Control, check
from tests.comparison.folders import make_ablation, make_arm, make_evaluation, make_run, make_trained

OTHER_OBJECTIVE = {"objective": {"_target_": "objectives.llada.LLaDA", "eps": 0.001}}
OTHER_DECODER = {"decoder": {"_target_": "decoders.masked.MaskedDecoder", "max_new_tokens": 16, "steps": 8}}


def control(tmp_path: Path, *names: str, baseline: str = "base", allow: Sequence[str] = ()) -> Control:
    return check(read_all([str(tmp_path / name) for name in names]), baseline=baseline, allow=allow)


def keys(found: Sequence[Any]) -> list[str]:
    return sorted(item.key for item in found)


def compared(tmp_path: Path, *, allow: Sequence[str] = (), **other: Any) -> Control:
    """A run against one that differs in objective, decoder and `other`."""
    make_trained(tmp_path / "base")
    evaluation: dict[str, Any] = {"result": OTHER_DECODER, **other.pop("evaluation", {})}
    config = {**OTHER_OBJECTIVE, **other.pop("config", {})}
    make_trained(tmp_path / "other", config=config, evaluation=evaluation, **other)
    return control(tmp_path, "base", "other", allow=allow)


def test_objective_and_decoder_may_differ(tmp_path: Path) -> None:
    found = compared(tmp_path)
    assert not found.violations
    assert not found.allowed
    assert {item.key.split(".")[0] for item in found.intended} == {"objective", "decoder"}
    target = next(item for item in found.intended if item.key == "objective._target_")
    assert target.arm == "other"
    assert (target.reference, target.own) == (
        "objectives.autoregressive.Autoregressive",
        "objectives.llada.LLaDA",
    )


DOCTORED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "another order": ({"origin": {"example_order": "o1"}}, ["example_order"]),
    "other initial weights": (
        {"config": {"backbone.init_seed": 1}, "origin": {"initial_weights": "w1"}},
        ["backbone.init_seed", "initial_weights"],
    ),
    "other weights under the same settings": ({"origin": {"initial_weights": "w1"}}, ["initial_weights"]),
    "other data": ({"origin": {"data": "d1"}}, ["data"]),
    "other files": (
        {"config": {"data.sources": [{"name": "mine", "files": ["b.jsonl"], "subsets": []}]}},
        ["data.sources"],
    ),
    "other held-out examples": ({"origin": {"held_out": "h1"}}, ["held_out"]),
    "another tokenizer": ({"origin": {"tokenizer": "t1"}}, ["tokenizer"]),
    "another learning rate": ({"config": {"optimizer.learning_rate": 0.1}}, ["optimizer.learning_rate"]),
    "other betas": ({"config": {"optimizer.betas": [0.9, 0.95]}}, ["optimizer.betas"]),
    "another schedule": ({"config": {"optimizer.schedule": "linear"}}, ["optimizer.schedule"]),
    "another batch": ({"config": {"loader.micro_batch_size": 4}}, ["loader.micro_batch_size"]),
    "a smaller budget": (
        {"config": {"trainer.max_steps": 4}, "origin": {"steps": 4, "examples": 32, "tokens": 1600}, "last_step": 4},
        ["examples", "steps", "tokens", "trainer.max_steps"],
    ),
    "a larger model": ({"origin": {"parameters": 1400}}, ["parameters"]),
    "another machine": ({"origin": {"software.machine": "a GPU"}}, ["software.machine"]),
    "an unfinished training": ({"last_step": 4}, ["last_step"]),
    "other prompts": (
        {"evaluation": {"result": {"problems_fingerprint": "p1"}}},
        ["evaluation.words.problems_fingerprint"],
    ),
    "fewer prompts": (
        {"evaluation": {"correct": [True, False], "result": {"problems_fingerprint": "p1"}}},
        ["evaluation.words.num_problems", "evaluation.words.problems_fingerprint"],
    ),
    "another prompt format": (
        {"evaluation": {"result": {"prompt_format.style": "plain"}}},
        ["evaluation.words.prompt_format.style"],
    ),
    "another template": (
        {"evaluation": {"result": {"task.template": "Q: {question}"}}},
        ["evaluation.words.task.template"],
    ),
    "another scorer": (
        {"evaluation": {"result": {"task.scorer.tolerance": 0.1}}},
        ["evaluation.words.task.scorer.tolerance"],
    ),
    "another precision": ({"evaluation": {"result": {"dtype": "bfloat16"}}}, ["evaluation.words.dtype"]),
    "another device": ({"evaluation": {"result": {"device": "cuda"}}}, ["evaluation.words.device"]),
    "longer answers": ({"evaluation": {"decoder": {"max_new_tokens": 32}}}, ["decoder.words.max_new_tokens"]),
}


@pytest.mark.parametrize("name", DOCTORED)
def test_a_doctored_run_is_caught_under_its_name_and_can_be_allowed(name: str, tmp_path: Path) -> None:
    changes, expected = DOCTORED[name]
    if "decoder" in changes.get("evaluation", {}):
        changes = {**changes, "evaluation": {**changes["evaluation"], "result": {}}}
    found = compared(tmp_path, **changes)
    assert keys(found.violations) == expected
    allowed = control(tmp_path, "base", "other", allow=expected)
    assert keys(allowed.allowed) == expected
    assert not allowed.violations


def test_every_fact_is_compared(tmp_path: Path) -> None:
    """Those that a comparison has to know of are typed out here: dropping one from FACTS must not go unnoticed."""
    assert set(FACTS) == {
        "data", "held_out", "tokenizer", "initial_weights", "example_order", "steps", "examples", "tokens",
        "parameters", "software",
    }  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        {"run": "elsewhere"},
        {"resume": None},
        {"launcher": {"_target_": "lit_refusion.launcher.Slurm", "time": "1:00"}},
        {"trainer.progress": "none"},
        {"trainer.loggers": []},
    ],
    ids=lambda config: next(iter(config)),
)
def test_where_a_run_lies_and_what_it_prints_do_not_count(config: Mapping[str, Any], tmp_path: Path) -> None:
    assert not compared(tmp_path, config=config).violations


@pytest.mark.parametrize(
    ("allow", "is_allowed"),
    [
        (["optimizer.learning_rate"], True),
        (["optimizer"], True),
        (["data", "optimizer"], True),
        (["optim"], False),
        (["optimizer.learning"], False),
        (["learning_rate"], False),
        (["optimizer.learning_rate.x"], False),
        ([""], False),
    ],
)
def test_allow_takes_whole_names_and_whole_groups(allow: list[str], is_allowed: bool, tmp_path: Path) -> None:
    found = compared(tmp_path, config={"optimizer.learning_rate": 0.1}, allow=allow)
    assert keys(found.allowed if is_allowed else found.violations) == ["optimizer.learning_rate"]
    assert keys(found.violations if is_allowed else found.allowed) == []


def test_what_all_arms_share_is_listed_with_its_value(tmp_path: Path) -> None:
    found = compared(tmp_path, origin={"tokens": 1})
    assert found.shared["initial weights"] == "w0"
    assert found.shared["optimizer steps"] == 6
    assert FACTS["tokens"] not in found.shared
    assert FACTS["software"] not in found.shared


def test_arms_are_paired_by_seed(tmp_path: Path) -> None:
    out = make_ablation(tmp_path / "out", ["base", "other"], seeds=[0, 1])
    for arm in ("base", "other"):
        for seed in (0, 1):
            origin = {"example_order": f"o{seed}"}
            run = make_run(tmp_path / f"{arm}{seed}", config={"seed": seed}, origin=origin)
            make_arm(out, arm, seed, run=run, words={})
    found = control(tmp_path, "out")
    assert not found.violations
    assert found.shared["order of the examples"] == "another for each seed, the same in all arms"
    assert found.shared["training data"] == "d0"


def test_a_seed_that_the_baseline_does_not_have_is_caught(tmp_path: Path) -> None:
    make_trained(tmp_path / "base")
    make_trained(tmp_path / "other", config={"seed": 3})
    found = control(tmp_path, "base", "other")
    assert keys(found.violations) == ["seed"]
    assert keys(control(tmp_path, "base", "other", allow=["seed"]).allowed) == ["seed"]


def test_the_run_of_an_arm_must_have_the_seed_that_the_arm_claims(tmp_path: Path) -> None:
    out = make_ablation(tmp_path / "out", ["base", "other"])
    make_arm(out, "base", run=make_run(tmp_path / "0"), words={})
    run = make_run(tmp_path / "1", config={"seed": 9}, origin={"example_order": "o9"})
    make_arm(out, "other", run=run, words={})
    assert keys(control(tmp_path, "out").violations) == ["example_order", "seed"]


def test_given_models_must_be_the_same(tmp_path: Path) -> None:
    out = make_ablation(tmp_path / "out", ["base", "same", "other"])
    make_arm(out, "base", words={})
    make_arm(out, "same", words={"decoder": {"temperature": 0.5}})
    make_arm(out, "other", words={"result": {"weights_fingerprint": "m1"}})
    found = control(tmp_path, "out")
    assert [(item.arm, item.key) for item in found.violations] == [("other", "model")]
    assert [(item.arm, item.key) for item in found.intended] == [("same", "decoder.words.temperature")]


def test_a_task_that_one_arm_lacks_is_caught(tmp_path: Path) -> None:
    make_trained(tmp_path / "base")
    make_trained(tmp_path / "other")
    make_evaluation(tmp_path / "base" / "evaluations" / "more")
    found = control(tmp_path, "base", "other")
    tasks = next(item for item in found.violations if item.key == "tasks")
    assert (tasks.reference, tasks.own) == ("more, words", "words")


def test_the_baselines_own_unfinished_training_is_caught(tmp_path: Path) -> None:
    make_trained(tmp_path / "base", last_step=4)
    make_trained(tmp_path / "other")
    (item,) = control(tmp_path, "base", "other").violations
    assert (item.arm, item.key, item.reference, item.own) == ("base-seed0", "last_step", 6, 4)


def test_an_arm_that_failed_is_not_compared(tmp_path: Path) -> None:
    """It has no result, which is said elsewhere; that is no difference in its conditions."""
    out = make_ablation(tmp_path / "out", ["base", "broken", "half", "not_run"])
    make_arm(out, "base", run=make_run(tmp_path / "0"), words={}, more={})
    make_arm(out, "broken", failure="it broke")
    make_arm(out, "half", run=make_run(tmp_path / "1", last_step=4), words={}, failure="the other task broke")
    assert not control(tmp_path, "out").violations


def test_the_first_arm_stands_in_for_a_baseline_that_failed(tmp_path: Path) -> None:
    out = make_ablation(tmp_path / "out", ["base", "one", "two"])
    make_arm(out, "base", failure="it broke")
    make_arm(out, "one", run=make_run(tmp_path / "1"), words={})
    make_arm(out, "two", run=make_run(tmp_path / "2", config={"optimizer.schedule": "linear"}), words={})
    (item,) = control(tmp_path, "out").violations
    assert str(item) == "optimizer.schedule: cosine in one, linear in two"


def test_an_unfinished_training_is_told_from_its_settings(tmp_path: Path) -> None:
    found = compared(tmp_path, last_step=4)
    assert list(map(str, found.violations)) == ["last_step: 6 in its settings, 4 in other-seed0"]


def test_a_difference_is_written_out_with_both_values_on_one_line(tmp_path: Path) -> None:
    found = compared(
        tmp_path,
        origin={"example_order": "o1"},
        evaluation={"result": {"task.template": "Q: {question}\nA: " + "long " * 40}},
    )
    texts = {item.key: str(item) for item in found.violations}
    assert texts["example_order"] == "example_order (order of the examples): o0 in the baseline, o1 in other"
    template = texts["evaluation.words.task.template"]
    assert "{question} in the baseline, Q: {question} A: long" in template
    assert "\n" not in template
    assert len(template) < 200
