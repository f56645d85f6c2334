"""The likelihood along training is that of the saved model, and measuring it changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lit_refusion.callbacks.likelihood import LikelihoodCallback, LikelihoodConfig, likelihood_callbacks
from lit_refusion.cli import main
from lit_refusion.data.loader import DataModule, LoaderConfig
from lit_refusion.data.shards import Shards
from lit_refusion.errors import UserError
from lit_refusion.evaluation.likelihood import figures, negative_log_likelihood
from lit_refusion.export import load_model
from lit_refusion.objective import Objective
from lit_refusion.schema import build
from tests.children import assert_same_state, command, metrics, prepared_data, run
from tests.children import figures as logged

MEASURED = ["likelihood.num_examples=5", "likelihood.num_draws=3"]
OBJECTIVES = ("ar", "refusion")


@pytest.fixture(scope="module")
def data(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_data(tmp_path_factory.mktemp("data"), tokenizer_folder)


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each objective with the likelihood measured and without, logged every second step."""
    folder = tmp_path_factory.mktemp("runs")
    for name in OBJECTIVES:
        short = ["trainer.loggers=[csv]", "trainer.max_steps=5", "trainer.log_every=2"]
        run(*command(data, folder / f"{name}-measured", name, *short, *MEASURED))
        run(*command(data, folder / f"{name}-plain", name, *short))
    run(*command(data, folder / "ar-every_step", "ar", *short, "trainer.log_every=1"))
    return folder


def bounds(folder: Path) -> dict[int, float]:
    return {int(row["step"]): float(row["val/nelbo"]) for row in metrics(folder) if row.get("val/nelbo")}


def total(figure: str, folder: Path) -> float:
    return sum(float(row[figure]) for row in metrics(folder) if row.get(figure))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_it_is_the_likelihood_of_the_saved_model(name: str, data: Path, runs: Path, tmp_path: Path) -> None:
    """The first held-out examples, with the noise of the run's seed."""
    folder = runs / f"{name}-measured"
    config = json.loads((folder / "config.json").read_text())
    objective = build(config["objective"], Objective)
    held_out = DataModule(
        Shards(data),
        objective,
        config=build(config["loader"], LoaderConfig),
        mask_token_id=None,
        seed=3,
        global_batch_size=8,
    ).validation_indices
    run("export", f"run={folder}", f"out={tmp_path}/model", "checkpoint=last")
    model = load_model(str(tmp_path / "model"), objective=None, device="cpu", dtype="float32")
    examples = [Shards(data)[int(number)] for number in held_out[:5]]
    found = negative_log_likelihood(model.backbone, objective, examples, num_draws=3, seed=3, max_tokens_per_batch=64)
    assert [item.num_draws for item in found] == [1 if name == "ar" else 3] * 5
    assert list(bounds(folder)) == [3, 5]
    assert bounds(folder)[5] == pytest.approx(figures(found)["nats_per_token"], rel=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_training_is_the_same_to_the_bit_without_it(name: str, runs: Path) -> None:
    measured, plain = runs / f"{name}-measured", runs / f"{name}-plain"
    assert_same_state(measured, plain)
    rows = [{key: x for key, x in row.items() if key != "val/nelbo"} for row in logged(measured)]
    assert [row for row in rows if any(row[key] for key in row if key != "step")] == logged(plain)
    assert bounds(plain) == {}


def test_an_objectives_bound_is_not_its_loss(runs: Path) -> None:
    """The validation loss of ReFusion is a mean over masked tokens and slots, the bound that of the whole response."""
    folder = runs / "refusion-measured"
    losses = {int(row["step"]): float(row["val/loss"]) for row in metrics(folder) if row.get("val/loss")}
    assert all(abs(losses[step] - bound) > 0.01 for step, bound in bounds(folder).items())


@pytest.mark.parametrize("figure", ["train/tokens", "train/supervised_tokens"])
def test_figures_sum_up_to_the_same_however_seldom_they_are_logged(figure: str, runs: Path) -> None:
    seldom, often = runs / "ar-plain", runs / "ar-every_step"
    assert [int(row["step"]) for row in metrics(seldom) if row.get(figure)] == [2, 4, 5]
    assert total(figure, seldom) == total(figure, often) > 0


def test_every_logged_row_has_the_time_since_the_one_before(runs: Path) -> None:
    rows = [row for row in metrics(runs / "ar-plain") if row.get("train/seconds")]
    for row in rows:
        speed = float(row["train/tokens"]) / float(row["train/seconds"])
        assert speed == pytest.approx(float(row["train/tokens_per_second"]))
    assert len(rows) == 3


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["likelihood.num_examples=-1"], "likelihood.num_examples=-1, num_draws=16: num_examples must not be negative"),
        (["likelihood.num_examples=1", "likelihood.num_draws=0"], "num_draws=0"),
        (["likelihood.num_examples=1", "loader.validation_fraction=0"], "no example is held out; raise loader.valid"),
    ],
)
def test_wrong_settings_are_one_line(
    settings: list[str], told: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(data, tmp_path / "run", "ar", *settings)) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert told in error


def stub(*, kind: str | None = "exact", held_out: int = 3) -> Any:
    objective = SimpleNamespace(likelihood_kind=kind, name="mine")
    return SimpleNamespace(objective=objective, validation_indices=list(range(held_out)))


def test_an_objective_without_a_likelihood_is_refused() -> None:
    config = LikelihoodConfig(num_examples=2, num_draws=1)
    with pytest.raises(UserError, match="objective=mine has no likelihood; give 0"):
        likelihood_callbacks(config, stub(kind=None))
    assert isinstance(likelihood_callbacks(config, stub())[0], LikelihoodCallback)


def test_nothing_is_measured_where_nothing_is_asked_for() -> None:
    config = LikelihoodConfig(num_examples=0, num_draws=1)
    assert likelihood_callbacks(config, stub(kind=None, held_out=0)) == []
