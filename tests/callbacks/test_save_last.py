"""When the state to resume from is saved: every few steps, behind a validation of the same step, and at the end."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lit_refusion.callbacks.save_last import SaveLast
from lit_refusion.cli import main
from lit_refusion.module import TrainingModule
from lit_refusion.run_folder import AtomicCheckpointIO
from tests.children import checkpoint, command, prepared_data

Events = list[tuple[str, int]]


@pytest.fixture(scope="module")
def data(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_data(tmp_path_factory.mktemp("data"), tokenizer_folder)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """What a run does and the step it does it at: "validated", and the names of the checkpoints that it saves."""
    found: Events = []
    validate, save = TrainingModule.on_validation_epoch_end, AtomicCheckpointIO.save_checkpoint

    def validated(self: TrainingModule) -> None:
        found.append(("validated", self.global_step))
        validate(self)

    def saved(self: AtomicCheckpointIO, state: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        found.append((Path(path).stem, state["global_step"]))
        save(self, state, path, storage_options)

    monkeypatch.setattr(TrainingModule, "on_validation_epoch_end", validated)
    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", saved)
    return found


def settings(*, save: int, validate: int, micro: int = 4, steps: int = 8) -> list[str]:
    return [
        f"trainer.checkpoint_every={save}", f"trainer.validate_every={validate}", f"loader.micro_batch_size={micro}",
        f"trainer.max_steps={steps}", "trainer.loggers=[csv]",
    ]  # fmt: skip


def stop_in_step(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM in the step that follows `step` others."""
    original = TrainingModule.training_step

    def stopping(self: TrainingModule, batch: Any, batch_idx: int) -> Any:
        if (self.global_step, batch_idx % 2) == (step, 0):
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch, batch_idx)

    monkeypatch.setattr(TrainingModule, "training_step", stopping)


@pytest.mark.parametrize("micro", [8, 2])
@pytest.mark.parametrize(
    ("save", "validate", "expected"),
    [
        (2, 3, "last2 validated3 best3 last4 validated6 best6 last6 validated8 best8 last8"),
        (3, 3, "validated3 best3 last3 validated6 best6 last6 validated8 best8 last8"),
        (3, 4, "last3 validated4 best4 last6 validated8 best8 last8"),
        (5, 100, "last5 validated8 best8 last8"),
        (100, 4, "validated4 best4 validated8 best8 last8"),
        (4, 1, " ".join(f"validated{i} best{i}" + f" last{i}" * (i % 4 == 0) for i in range(1, 9))),
    ],
)
def test_a_step_is_saved_once_and_behind_its_validation(
    save: int, validate: int, expected: str, micro: int, data: Path, tmp_path: Path, events: Events
) -> None:
    """And behind the best state, so that the last one knows it; every validation of this run is the best so far."""
    assert main(command(data, tmp_path / "run", "ar", *settings(save=save, validate=validate, micro=micro))) == 0
    assert " ".join(f"{name}{step}" for name, step in events) == expected


@pytest.mark.parametrize(("save", "expected"), [(2, [2, 4, 6, 8]), (3, [3, 6, 8]), (100, [8])])
def test_a_run_without_validation_is_saved_at_the_end_of_steps(
    save: int, expected: list[int], data: Path, tmp_path: Path, events: Events
) -> None:
    without = [*settings(save=save, validate=2), "loader.validation_fraction=0"]
    assert main(command(data, tmp_path / "run", "ar", *without)) == 0
    assert events == [("last", step) for step in expected]


@pytest.mark.parametrize(("step", "validated"), [(2, [3]), (3, [3]), (4, [3]), (5, [3, 6])])
def test_the_state_that_a_stopped_run_ends_in_is_saved_once(
    step: int, validated: list[int], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: Events
) -> None:
    """Steps 3 and 6 are validated, 2, 4 and 6 saved; a stop waits only for a validation that is due."""
    stop_in_step(step, monkeypatch)
    assert main(command(data, tmp_path / "run", "ar", *settings(save=2, validate=3))) == 130
    assert [saved for name, saved in events if name == "last"] == sorted({*range(2, step + 2, 2), step + 1})
    assert [at for name, at in events if name == "validated"] == validated
    assert checkpoint(tmp_path / "run")["global_step"] == step + 1


def test_a_resumed_run_does_not_save_the_step_that_it_begins_with(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: Events
) -> None:
    arguments = command(data, tmp_path / "run", "ar", *settings(save=2, validate=3), "resume=auto")
    with monkeypatch.context() as patch:
        stop_in_step(3, patch)
        assert main(arguments) == 130
    assert events[-1] == ("last", 4)
    events.clear()
    assert main(arguments) == 0
    assert events == [("validated", 6), ("best", 6), ("last", 6), ("validated", 8), ("best", 8), ("last", 8)]
    events.clear()
    assert main(arguments) == 0
    assert events == []


def test_a_run_that_ends_at_the_step_that_it_begins_with_saves_nothing(tmp_path: Path) -> None:
    saved: list[Path] = []
    trainer: Any = SimpleNamespace(global_step=4, save_checkpoint=saved.append)
    callback = SaveLast(tmp_path / "last.ckpt", every=2, validate_every=None)
    module: Any = None
    callback.on_train_start(trainer, module)
    callback.on_train_end(trainer, module)
    assert saved == []
    trainer.global_step = 5
    callback.on_train_end(trainer, module)
    assert saved == [tmp_path / "last.ckpt"]


def test_the_saved_state_knows_the_best_one(data: Path, tmp_path: Path) -> None:
    """What is saved behind a validation has its figure: a resumed run replaces the best state only by a better one."""
    assert main(command(data, tmp_path / "run", "ar", *settings(save=3, validate=3, steps=6))) == 0
    for name in ("last", "previous"):
        saved = checkpoint(tmp_path / "run", name)
        [best] = [value for key, value in saved["callbacks"].items() if key.startswith("ModelCheckpoint")]
        assert best["best_model_path"].endswith("best.ckpt")
        rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
        column = rows[0].split(",").index("val/loss")
        logged = {row.split(",")[0]: row.split(",")[column] for row in rows[1:] if row.split(",")[column]}
        assert float(best["best_model_score"]) == pytest.approx(float(logged[str(saved["global_step"])]))
