"""The state to resume from, saved along the run and at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from lit_refusion.callbacks.interrupt import is_validated


class SaveLast(Checkpoint):
    """Saves the state every few steps, and the one that training ends in.

    Where a step is validated as well, it is saved behind the validation: a run that is killed in between resumes
    before it and validates again, so no figure is missing. A `Checkpoint`, so that Lightning calls it after all other
    callbacks, in the order given.

    Args:
        path: the checkpoint.
        every: steps between saves.
        validate_every: steps between validations; None for a run without.
    """

    def __init__(self, path: Path, *, every: int, validate_every: int | None) -> None:
        self.path, self.every, self.validate_every = path, every, validate_every
        self._saved_step = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The step that a run resumes from is saved already."""
        self._saved_step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Save at the end of a step."""
        if not trainer.fit_loop._should_accumulate() and not is_validated(trainer, self.validate_every):
            self._save_if_due(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save behind the validation of a step."""
        self._save_if_due(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the state that training ended in."""
        self._save(trainer)

    def _save_if_due(self, trainer: L.Trainer) -> None:
        if trainer.global_step % self.every == 0:
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        if trainer.global_step != self._saved_step:
            trainer.save_checkpoint(self.path)
            self._saved_step = trainer.global_step
