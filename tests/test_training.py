"""Training as a whole: the same numbers however a step is cut up, resumed equals uninterrupted, clean stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_refusion.cli import main
from lit_refusion.module import TrainingModule
from lit_refusion.run_folder import RECORD_KEY, load_checkpoint
from tests.conftest import ARCHITECTURES, REPOSITORY

OBJECTIVES = ["refusion", "ar"]


@pytest.fixture(scope="module")
def data(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    records = [
        {"query": f"What is {a} + {b}?", "response": f"The answer is {a + b}." + " Yes." * (a % 4)}
        for a in range(12)
        for b in range(5)
    ]
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    run("prepare", "data=files", f"data.sources.0.files=[{folder}/records.jsonl]", f"data.folder={folder}/data",
        f"data.tokenizer={tokenizer_folder}")  # fmt: skip
    return folder / "data"


def run(*arguments: str) -> None:
    assert main(arguments) == 0, arguments


def command(data: Path, folder: Path, objective: str, *extra: str) -> list[str]:
    architecture = [f"++backbone.architecture.{name}={value}" for name, value in ARCHITECTURES["qwen3"].items()]
    return [
        "train", f"objective={objective}", "data=prepared", f"data.folder={data}", f"run={folder}",
        *architecture, "loader.micro_batch_size=8",
        "loader.validation_fraction=0.2", "trainer.global_batch_size=8", "trainer.max_steps=6",
        "trainer.validate_every=3", "trainer.checkpoint_every=2", "trainer.log_every=1", "trainer.progress=none",
        "trainer.accelerator=cpu", "optimizer.warmup_steps=2", "optimizer.eps=1e-4", "seed=3", *extra,
    ]  # fmt: skip


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]


def metrics(folder: Path) -> list[dict[str, str]]:
    lines = (folder / "metrics.csv").read_text().splitlines()
    return [dict(zip(lines[0].split(","), line.split(","))) for line in lines[1:]]


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
        ["loader=packed", "loader.micro_batch_size=8", "loader.max_row_length=120", "loader.validation_fraction=0.2"],
        ["loader.num_workers=2"],
        ["backbone.gradient_checkpointing=true"],
    ],
    ids=["accumulate2", "accumulate8", "packed", "workers", "checkpointing"],
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


def test_two_ranks_equal_one(reference: tuple[str, Path], data: Path, tmp_path: Path) -> None:
    """DDP over gloo with two processes, two accumulated micro-batches each."""
    objective, folder = reference
    extra = ["trainer.devices=2", "trainer.strategy=ddp", "loader.micro_batch_size=2"]
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


def interrupt_in_step(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during the first micro-batch of a step (counted from 0)."""
    original = TrainingModule.training_step
    steps_left = [step]

    def interrupting(self: TrainingModule, batch: Any, batch_idx: int) -> Any:
        if [self.global_step] == steps_left:
            steps_left.clear()
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, batch, batch_idx)

    monkeypatch.setattr(TrainingModule, "training_step", interrupting)


@pytest.mark.parametrize("stop_after", [1, 3, 4])
def test_interrupted_and_resumed_equals_uninterrupted(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stop_after: int
) -> None:
    """Ctrl-C in the middle of a step: the run ends behind that step, loadable, and continues bit for bit."""
    accumulated = ["loader.micro_batch_size=4"]
    run(*command(data, tmp_path / "whole", "refusion", *accumulated))
    interrupt_in_step(stop_after - 1, monkeypatch)
    assert main(command(data, tmp_path / "run", "refusion", *accumulated)) == 130
    assert f"stopped at step {stop_after}" in capsys.readouterr().out
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")["global_step"] == stop_after

    monkeypatch.undo()
    run(*command(data, tmp_path / "run", "refusion", *accumulated, "resume=auto"))
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "run")[name], value), name
    whole, resumed = metrics(tmp_path / "whole"), metrics(tmp_path / "run")
    for row in [*whole, *resumed]:
        row.pop("train/tokens_per_second")
    # Every row once, those from before the interruption included; a stop does not wait for a validation that is due.
    assert resumed == [row for row in whole if row["train/loss"] or int(row["step"]) != stop_after]


def test_resume_with_another_accumulation(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(*command(data, tmp_path / "whole", "refusion"))
    interrupt_in_step(2, monkeypatch)
    assert main(command(data, tmp_path / "run", "refusion", "loader.micro_batch_size=2")) == 130
    monkeypatch.undo()
    run(*command(data, tmp_path / "run", "refusion", "loader.micro_batch_size=4", "resume=auto"))
    for name, value in weights(tmp_path / "whole").items():
        torch.testing.assert_close(weights(tmp_path / "run")[name], value, atol=2e-5, rtol=1e-4)


def test_resuming_a_finished_run_changes_nothing(data: Path, tmp_path: Path) -> None:
    run(*command(data, tmp_path / "run", "ar"))
    before = weights(tmp_path / "run")
    run(*command(data, tmp_path / "run", "ar", "resume=auto"))
    for name, value in weights(tmp_path / "run").items():
        assert torch.equal(before[name], value)


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
    }
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    assert (folder / "tokenizer" / "tokenizer.json").is_file()
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))


def test_logged_figures(reference: tuple[str, Path]) -> None:
    objective, folder = reference
    rows = metrics(folder)
    train = [row for row in rows if row.get("train/loss")]
    assert [int(row["step"]) for row in train] == [1, 2, 3, 4, 5, 6]
    assert [int(row["step"]) for row in rows if row.get("val/loss")] == [3, 6]
    for name in ("loss", "supervised_tokens", "gradient_norm", "tokens_per_second", "learning_rate", "ce/ar"):
        assert all(float(row[f"train/{name}"]) > 0 for row in train), name
    if objective == "refusion":
        assert all(float(row["val/ce/mdm"]) > 0 for row in rows if row.get("val/loss"))
        assert any(name.startswith("val/ce/mdm/rate_") for name in rows[0])
    assert float(train[-1]["train/ce/ar"]) < float(train[0]["train/ce/ar"])


def test_validation_noise_is_fixed(data: Path, tmp_path: Path) -> None:
    """Two validations of the same weights give the same number."""
    run(*command(data, tmp_path / "run", "refusion", "optimizer.learning_rate=1e-20", "optimizer.final_ratio=1.0"))
    losses = {row["val/loss"] for row in metrics(tmp_path / "run") if row.get("val/loss")}
    assert len(losses) == 1


def start(*arguments: str) -> subprocess.Popen[str]:
    """A run of its own process group, its output to be read."""
    return subprocess.Popen(
        [sys.executable, "-m", "lit_refusion.cli", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_a_group_interrupt_with_workers_leaves_a_checkpoint(data: Path, tmp_path: Path) -> None:
    """A terminal's Ctrl-C reaches the loader's workers as well; they must serve the step to its end."""
    extra = ["loader.num_workers=2", "loader.micro_batch_size=1", "trainer.max_steps=100000", "trainer.progress=lines"]
    process = start(*command(data, tmp_path / "run", "refusion", *extra))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("train step 2/"):
            os.killpg(process.pid, signal.SIGINT)
            break
    rest = process.stdout.read()
    assert process.wait() == 130, rest
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")["global_step"] >= 2


def test_a_signal_to_one_rank_stops_all(data: Path, tmp_path: Path) -> None:
    extra = ["trainer.devices=2", "trainer.strategy=ddp", "trainer.max_steps=100000", "trainer.progress=lines"]
    arguments = command(data, tmp_path / "run", "refusion", *extra, "loader.micro_batch_size=4")
    process = start(*arguments)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("train step 2/"):
                process.send_signal(signal.SIGTERM)  # rank 0 alone
                break
        output, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, output
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")["global_step"] >= 2


def test_the_final_state_is_validated(data: Path, tmp_path: Path) -> None:
    run(*command(data, tmp_path / "run", "ar", "trainer.max_steps=5", "trainer.validate_every=3"))
    assert [int(row["step"]) for row in metrics(tmp_path / "run") if row["val/loss"]] == [3, 5]


@pytest.mark.parametrize("change", ["seed=4", "optimizer.learning_rate=0.5", "trainer.global_batch_size=16"])
def test_resume_refuses_another_run(
    reference: tuple[str, Path], data: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    objective, folder = reference
    assert main(command(data, folder, objective, "resume=auto", "trainer.max_steps=8", change)) == 2
    assert f"setting {change.split('=')[0].split('.l')[0]}" in capsys.readouterr().err


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
