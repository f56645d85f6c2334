"""Progress: a bar in a terminal, plain lines in logs and pipes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import lightning as L
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import Logger

MEASURED = ("nelbo", "accuracy", "tokens_per_forward")
"""Figures of validation callbacks that are shown."""


class ProgressBar(RichProgressBar):
    """Lightning's rich bar over the micro-batches of the whole run, with short names and no epochs."""

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """The figures beside the bar, training first."""
        figures = {name.removeprefix("train/"): float(value) for name, value in trainer.progress_bar_metrics.items()}
        speed = figures.pop("tokens_per_second", None)
        texts = {name: f"{value:.4g}" for name, value in figures.items()}
        return dict(texts) if speed is None else {**texts, "tokens/s": f"{speed:,.0f}"}

    def _get_train_description(self, current_epoch: int) -> str:
        return "training"


class LineLogger(Logger):
    """Prints what is logged, with the time left: one line per logged step, one per validation.

    Args:
        max_steps: optimizer steps of the whole run.
        shown: names of the figures to print, in order.
    """

    name = "lines"
    version = ""

    def __init__(self, max_steps: int, shown: tuple[str, ...]) -> None:
        super().__init__()
        self.max_steps, self.shown = max_steps, shown
        self._first: tuple[int, float] | None = None

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Print one line."""
        step = step or 0
        first = next(iter(metrics))
        stage = first.rpartition("/")[0] if first.startswith("decode/") else first.partition("/")[0]
        figures = {name: metrics.get(f"{stage}/{name}") for name in (*self.shown, *MEASURED)}
        text = "  ".join(f"{name} {value:,.4g}" for name, value in figures.items() if value is not None)
        print(f"{stage:5} step {step}/{self.max_steps}  {text}{self._time_left(step)}", flush=True)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run folder has the config."""

    def _time_left(self, step: int) -> str:
        now = time.perf_counter()
        if self._first is None or step <= self._first[0]:
            self._first = self._first or (step, now)
            return ""
        seconds = (now - self._first[1]) / (step - self._first[0]) * (self.max_steps - step)
        return f"  eta {timedelta(seconds=round(seconds))}"
