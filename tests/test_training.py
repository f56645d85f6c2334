"""Training as a whole: the same numbers however a step is cut up, and what is logged and kept of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_refusion.cli import main
from lit_refusion.data.plan import Plan
from lit_refusion.data.shards import Shards
from lit_refusion.data.split import split
from lit_refusion.module import TrainingModule
from lit_refusion.run_folder import RECORD_KEY, load_checkpoint
from tests.children import PACKED, command, metrics, prepared_data, run, weights
from tests.conftest import REPOSITORY

OBJECTIVES = ["refusion", "ar"]


@pytest.fixture(scope="module")
def data(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_data(tmp_path_factory.mktemp("training"), tokenizer_folder)


@pytest.fixture(scope="module", params=OBJECTIVES)
def reference(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """An uninterrupted run on one device without accumulation."""
    folder = tmp_path_factory.mktemp("reference") / request.param
    run(*command(data, folder, request.param))
    return request.param, folder


@pytest.mark.parametrize(
    "layout",
    [
        ["loader.micro_batch_size=4"],
        ["loader.micro_batch_size=1", "loader.pad_to_multiple=1"],
        PACKED,
        ["loader.num_workers=2"],
        ["backbone.gradient_checkpointing=true"],
        ["backbone.cross_entropy=torch"],
    ],
    ids=["accumulate2", "accumulate8", "packed", "workers", "checkpointing", "fused_loss"],
)
def test_same_weights_however_the_step_is_cut_up(
    reference: tuple[str, Path], data: Path, tmp_path: Path, layout: list[str]
) -> None:
    """fp32 sums in another order: after 6 AdamW steps weights agree to 2e-5 (eps 1e-4 keeps AdamW smooth at 0)."""
    objective, folder = reference
    run(*command(data, tmp_path / "run", objective, *layout))
    for name, value in weights(folder).items():
        torch.testing.assert_close(weights(tmp_path / "run")[name], value, atol=2e-5, rtol=1e-4)
    for one, two in zip(metrics(folder), metrics(tmp_path / "run"), strict=True):
        for name in ("train/loss", "val/loss", "train/gradient_norm"):
            if one.get(name):
                assert float(two[name]) == pytest.approx(float(one[name]), rel=1e-3)


@pytest.mark.parametrize("reference", ["refusion"], indirect=True)
def test_compiled_layers_train_as_they_are(
    reference: tuple[str, Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced, forward and backward, without the minute that the default backend takes to write code."""
    compiled, real = [], torch.compile

    def traced(function: Any, **options: Any) -> Any:
        compiled.append(function)
        return real(function, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", traced)
    objective, folder = reference
    run(*command(data, tmp_path / "run", objective, "backbone.compile=true", "backbone.gradient_checkpointing=true"))
    assert len(compiled) == 2  # layers
    assert set(weights(folder)) == set(weights(tmp_path / "run"))
    for name, value in weights(folder).items():
        torch.testing.assert_close(weights(tmp_path / "run")[name], value, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("reference", ["refusion"], indirect=True)
def test_two_ranks_that_lightning_starts_equal_one(reference: tuple[str, Path], data: Path, tmp_path: Path) -> None:
    """DDP over gloo with two processes, two accumulated micro-batches each."""
    objective, folder = reference
    extra = ["trainer.devices=2", "strategy=ddp", "loader.micro_batch_size=2"]
    arguments = command(data, tmp_path / "run", objective, *extra)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-m", "lit_refusion.cli", *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name, value in weights(folder).items():
        torch.testing.assert_close(weights(tmp_path / "run")[name], value, atol=2e-5, rtol=1e-4)
    for one, two in zip(metrics(folder), metrics(tmp_path / "run"), strict=True):
        for name in ("train/loss", "val/loss"):
            if one.get(name):
                assert float(two[name]) == pytest.approx(float(one[name]), rel=1e-3)


def test_fresh_weights_are_the_same_for_every_objective(data: Path, tmp_path: Path) -> None:
    """Two arms of a comparison start from the same weights: after one step at learning rate ~0 they still agree."""
    for objective in OBJECTIVES:
        run(*command(data, tmp_path / objective, objective, "trainer.max_steps=1", "optimizer.learning_rate=1e-12"))
    for name, value in weights(tmp_path / "ar").items():
        torch.testing.assert_close(weights(tmp_path / "refusion")[name], value, atol=1e-9, rtol=0)


def test_checkpoint_and_run_folder_tell_how_they_were_made(reference: tuple[str, Path]) -> None:
    objective, folder = reference
    checkpoint = load_checkpoint(folder / "checkpoints" / "best.ckpt")
    record = checkpoint[RECORD_KEY]
    assert record["config"] == json.loads((folder / "config.json").read_text())
    assert record["config"]["seed"] == 3
    assert record["spec"]["objective"] == {"ar": "autoregressive"}.get(objective, objective)
    assert set(record) == {
        "config",
        "spec",
        "data_fingerprint",
        "tokenizer_fingerprint",
        "model_config",
        "prompt_format",
        "base",
        "trained_shapes",
    }
    assert record["base"] is None
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "best.ckpt",
        "last.ckpt",
        "previous.ckpt",
    ]
    assert (folder / "tokenizer" / "tokenizer.json").is_file()
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))


def test_logged_figures(reference: tuple[str, Path]) -> None:
    objective, folder = reference
    rows = metrics(folder)
    train = [row for row in rows if row.get("train/loss")]
    assert [int(row["step"]) for row in train] == [1, 2, 3, 4, 5, 6]
    assert [int(row["step"]) for row in rows if row.get("val/loss")] == [3, 6]
    for name in (
        "loss",
        "supervised_tokens",
        "gradient_norm",
        "tokens_per_second",
        "learning_rate",
        "ce/ar",
        "padding",
    ):
        assert all(float(row[f"train/{name}"]) > 0 for row in train), name
    if objective == "refusion":
        assert all(float(row["val/ce/mdm"]) > 0 for row in rows if row.get("val/loss"))
        assert any(name.startswith("val/ce/mdm/rate_") for name in rows[0])
    assert float(train[-1]["train/ce/ar"]) < float(train[0]["train/ce/ar"])


def test_padding_of_padded_rows_is_what_is_missing_to_the_longest_example(data: Path, tmp_path: Path) -> None:
    """Rows of a multiple of 8 tokens, one for each of the step's examples."""
    run(*command(data, tmp_path / "run", "ar", "loader.pad_to_multiple=8"))
    shards = Shards(str(data))
    plan = Plan(split(shards, 0.2)[0], seed=3, global_batch_size=8)
    for step, row in enumerate(row for row in metrics(tmp_path / "run") if row["train/loss"]):
        lengths = [len(example.prompt_ids) + len(example.response_ids) for example in
                   (shards[visit.index] for visit in plan.step(step))]  # fmt: skip
        width = -(-max(lengths) // 8) * 8
        assert float(row["train/padding"]) == pytest.approx(1 - sum(lengths) / (8 * width))


@pytest.mark.parametrize("log_every", [1, 3])
@pytest.mark.parametrize("layout", [[], PACKED], ids=["padded", "packed"])
def test_logged_padding_is_the_share_of_empty_places_in_all_batches_since_the_last_figures(
    layout: list[str], log_every: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[torch.Tensor] = []
    original = TrainingModule.training_step

    def recording(self: TrainingModule, batch: Any, batch_idx: int) -> Any:
        batches.append(batch.segment_ids)
        return original(self, batch, batch_idx)

    monkeypatch.setattr(TrainingModule, "training_step", recording)
    extra = [*layout, "loader.micro_batch_size=4", f"trainer.log_every={log_every}"]
    run(*command(data, tmp_path / "run", "refusion", *extra))
    logged = [float(row["train/padding"]) for row in metrics(tmp_path / "run") if row["train/loss"]]
    assert len(batches) == 12
    count = 2 * log_every
    for number, padding in enumerate(logged):
        since = batches[number * count : (number + 1) * count]
        empty = sum(int((segments == 0).sum()) for segments in since)
        assert padding == pytest.approx(empty / sum(segments.numel() for segments in since))
    assert len(logged) == 6 // log_every


def test_packed_rows_are_padded_less(data: Path, tmp_path: Path) -> None:
    shares = {}
    for name, layout in {"padded": [], "packed": PACKED}.items():
        run(*command(data, tmp_path / name, "refusion", *layout, "trainer.log_every=6"))
        [shares[name]] = [float(row["train/padding"]) for row in metrics(tmp_path / name) if row["train/loss"]]
    assert 0 < shares["packed"] < shares["padded"] < 1


def test_validation_noise_is_fixed(data: Path, tmp_path: Path) -> None:
    """Two validations of the same weights give the same number."""
    run(*command(data, tmp_path / "run", "refusion", "optimizer.learning_rate=1e-20", "optimizer.final_ratio=1.0"))
    losses = {row["val/loss"] for row in metrics(tmp_path / "run") if row.get("val/loss")}
    assert len(losses) == 1


def test_the_final_state_is_validated(data: Path, tmp_path: Path) -> None:
    run(*command(data, tmp_path / "run", "ar", "trainer.max_steps=5", "trainer.validate_every=3"))
    assert [int(row["step"]) for row in metrics(tmp_path / "run") if row["val/loss"]] == [3, 5]


def test_a_loss_that_is_not_finite_stops_the_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = TrainingModule.training_step
    monkeypatch.setattr(
        TrainingModule,
        "training_step",
        lambda self, batch, number: original(self, batch.replace(weights=batch.weights * float("nan")), number),
    )
    assert main(command(data, tmp_path / "run", "ar")) == 2
    assert "the training loss is nan at step 1" in capsys.readouterr().err


def test_deepspeed_divides_by_the_accumulation_once_more(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A strategy that accumulates by itself gets a loss that is larger by the accumulation."""
    losses: dict[bool, float] = {}
    original = TrainingModule.training_step

    def recording(self: TrainingModule, batch: Any, batch_idx: int) -> Any:
        for handles in (False, True):
            with monkeypatch.context() as patch:
                patch.setattr(
                    type(self.trainer.strategy),
                    "handles_gradient_accumulation",
                    property(lambda _, value=handles: value),
                )
                losses.setdefault(handles, float(original(self, batch, batch_idx)))
        return original(self, batch, batch_idx)

    monkeypatch.setattr(TrainingModule, "training_step", recording)
    run(*command(data, tmp_path / "run", "ar", "loader.micro_batch_size=2", "trainer.max_steps=1"))
    assert losses[True] == pytest.approx(4 * losses[False])
