"""A run that is stopped ends at a step boundary with a loadable checkpoint."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import lightning as L

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
INTERRUPTED = 130
"""Exit code of a run that a signal has stopped."""


def is_validated(trainer: L.Trainer, validate_every: int | None) -> bool:
    """Whether the step just made is followed by a validation: one in `validate_every`, and the last; None for never."""
    step = trainer.global_step
    return validate_every is not None and (step % validate_every == 0 or step >= trainer.max_steps)


class StopGracefully(L.Callback):
    """On the first Ctrl-C, SIGTERM or SIGUSR1 (Slurm's) finish the step and stop; the second interrupts at once.

    A validation that is due at that step is still made, so that a run that goes on misses none. The state that training
    ends in is saved by `SaveLast`.

    Args:
        validate_every: steps between validations; None for a run without.
    """

    def __init__(self, validate_every: int | None) -> None:
        self.validate_every = validate_every
        self.was_stopped = False
        self._previous: dict[int, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take over the signals."""
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._request)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Stop at the end of the step that was under way, on all ranks if a signal reached one."""
        if trainer.fit_loop._should_accumulate():
            return
        if trainer.world_size > 1:
            self.was_stopped = trainer.strategy.reduce_boolean_decision(self.was_stopped, all=False)
        if self.was_stopped and not is_validated(trainer, self.validate_every):
            trainer.limit_val_batches = 0  # Lightning validates whenever it stops, but the machine may be going away
        if self.was_stopped or trainer.global_step >= trainer.max_steps:
            trainer.should_stop = True  # so the final state is validated, whatever the interval

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the signals back."""
        self._restore()
        if self.was_stopped and trainer.is_global_zero:
            print(f"stopped at step {trainer.global_step}; continue with resume=auto", flush=True)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Give the signals back."""
        self._restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.was_stopped:
            raise SystemExit(INTERRUPTED)  # Lightning would end a KeyboardInterrupt with exit code 1
        self.was_stopped = True

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
