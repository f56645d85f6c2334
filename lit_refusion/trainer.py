"""From settings to a Lightning Trainer: devices, strategy, callbacks, loggers."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_refusion.callbacks.save_last import SaveLast
from lit_refusion.data.loader import DataModule
from lit_refusion.errors import UserError, first_line
from lit_refusion.metrics_file import CsvMetrics
from lit_refusion.module import TrainingModule
from lit_refusion.progress import LineLogger, ProgressBar
from lit_refusion.run_folder import BEST, LAST, AtomicCheckpointIO, checkpoint_path, step_of
from lit_refusion.strategy import Layout, StrategyConfig
from lit_refusion.world import World, find_world

POSITIVE_SETTINGS = ("max_steps", "epochs", "global_batch_size", "gradient_clip", "validate_every", "log_every",
                     "checkpoint_every")  # fmt: skip
PRECISIONS = ("auto", "32-true", "bf16-mixed")


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How long to train and on what.

    Args:
        max_steps: optimizer steps; null where `epochs` is given.
        epochs: passes over the training examples; null where `max_steps` is given.
        global_batch_size: examples per optimizer step, over all devices and accumulated micro-batches.
        gradient_clip: largest gradient norm; null for none.
        validate_every: steps between validations.
        log_every: steps between logged figures.
        checkpoint_every: steps between saves of the last state; the one before it is kept as well.
        monitor: figure of validation that the best checkpoint is chosen by, as val/loss or decode/NAME/accuracy.
        monitor_mode: whether the best is the "min" or the "max" of it.
        precision: "auto" is fp32 on CPU and bf16 on CUDA.
        accelerator: "auto", "cpu" or "gpu".
        devices: devices per node, or "auto".
        num_nodes: machines, or "auto".
        loggers: any of csv, tensorboard, wandb.
        progress: "auto" is a bar in a terminal and lines elsewhere.
    """

    max_steps: int | None
    epochs: float | None
    global_batch_size: int
    gradient_clip: float | None
    validate_every: int
    log_every: int
    checkpoint_every: int
    monitor: str
    monitor_mode: Literal["min", "max"]
    precision: str
    accelerator: Literal["auto", "cpu", "gpu"]
    devices: int | str
    num_nodes: int | str
    loggers: tuple[Literal["csv", "tensorboard", "wandb"], ...]
    progress: Literal["auto", "rich", "lines", "none"]

    def __post_init__(self) -> None:
        if (self.max_steps is None) == (self.epochs is None):
            raise UserError(
                f"trainer: give exactly one of trainer.max_steps={self.max_steps} and trainer.epochs={self.epochs}"
            )
        for name in ("devices", "num_nodes"):
            value = getattr(self, name)
            if value != "auto" and not (isinstance(value, int) and value > 0):
                raise UserError(f"trainer.{name}={value}: give a number, at least 1, or auto")
        if self.precision.startswith("16"):
            raise UserError(
                f"trainer.precision={self.precision}: fp16 overflows (under ZeRO-3 parameters are NaN after one "
                "step, Lightning issue 20534); use bf16-mixed or 32-true"
            )
        if self.precision not in PRECISIONS:
            raise UserError(f"trainer.precision={self.precision}: unknown choice; it takes {', '.join(PRECISIONS)}")
        for name in POSITIVE_SETTINGS:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"trainer.{name}={value}: must be positive")

    @property
    def on_cuda(self) -> bool:
        """Whether training runs on GPUs."""
        return torch.cuda.is_available() and self.accelerator != "cpu"

    @property
    def chosen_precision(self) -> str:
        """The precision, with "auto" resolved."""
        return ("bf16-mixed" if self.on_cuda else "32-true") if self.precision == "auto" else self.precision

    @property
    def world(self) -> World:
        """The processes of the run."""
        return find_world(self.devices, self.num_nodes, on_cuda=self.on_cuda)


def make_trainer(
    config: TrainerConfig,
    strategy: StrategyConfig,
    data: DataModule,
    *,
    run: Path,
    max_steps: int,
    resume_from: Path | None,
    callbacks: Sequence[Callback],
) -> L.Trainer:
    """The Trainer of one run, with accumulation derived from the global batch.

    Raises:
        UserError: the batch does not divide, or Lightning refuses the settings.
    """
    if config.accelerator == "gpu" and not config.on_cuda:
        raise UserError("trainer.accelerator=gpu: no CUDA device here; use auto or cpu")
    world = config.world
    micro_batches = data.num_micro_batches(world.size)
    layout = Layout(
        world_size=world.size,
        on_cuda=config.on_cuda,
        precision=config.chosen_precision,
        micro_batch_size=data.config.micro_batch_size,
        resume_from=resume_from,
    )
    has_validation = len(data.validation_indices) > 0
    progress = ("rich" if sys.stdout.isatty() else "lines") if config.progress == "auto" else config.progress
    loggers = [_logger(name, run, resume_from) for name in config.loggers]
    if progress == "lines":
        loggers.append(LineLogger(max_steps, TrainingModule.shown_figures(data.objective)))
    try:
        return L.Trainer(
            max_steps=max_steps,
            accumulate_grad_batches=micro_batches,
            gradient_clip_val=config.gradient_clip,
            val_check_interval=min(config.validate_every, max_steps) * micro_batches if has_validation else None,
            check_val_every_n_epoch=None,
            limit_val_batches=None if has_validation else 0,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            precision=strategy.lightning_precision(config.chosen_precision),
            accelerator="gpu" if config.on_cuda else "cpu",
            devices=world.devices,
            num_nodes=world.num_nodes,
            strategy=strategy.make(layout),
            plugins=[] if strategy.shards_checkpoints else [AtomicCheckpointIO()],
            use_distributed_sampler=False,
            logger=loggers,
            callbacks=[
                *_checkpoints(config, run, has_validation=has_validation),
                *callbacks,
                *([ProgressBar()] if progress == "rich" else []),
            ],
            enable_progress_bar=progress == "rich",
            enable_model_summary=False,
            default_root_dir=run,
        )
    except (ValueError, MisconfigurationException) as error:
        names = ("accelerator", "devices", "num_nodes", "precision")
        given = ", ".join(f"trainer.{name}={getattr(config, name)}" for name in names)
        raise UserError(f"{given}: Lightning refuses these settings: {first_line(error)}") from error


def _checkpoints(config: TrainerConfig, run: Path, *, has_validation: bool) -> list[Callback]:
    folder = run / "checkpoints"
    last = SaveLast(
        checkpoint_path(run, LAST),
        every=config.checkpoint_every,
        validate_every=config.validate_every if has_validation else None,
    )
    if not has_validation:
        return [last]
    best = ModelCheckpoint(
        folder,
        BEST,
        monitor=config.monitor,
        mode=config.monitor_mode,
        enable_version_counter=False,
        save_on_train_epoch_end=False,
    )
    return [best, last]  # the saved state knows the best one


def _logger(name: str, run: Path, resume_from: Path | None) -> Logger:
    if name == "csv":
        return CsvMetrics(run / "metrics.csv")
    if name == "tensorboard":
        # What was logged behind the checkpoint is trained, and logged, again.
        purge_step: Any = None if resume_from is None else step_of(resume_from) + 1
        return TensorBoardLogger(run, name="", version="tensorboard", purge_step=purge_step)
    try:
        import wandb  # noqa: F401
        from lightning.pytorch.loggers import WandbLogger
    except ImportError as error:
        raise UserError("trainer.loggers: wandb needs an extra: pip install 'lit-refusion[wandb]'") from error
    return WandbLogger(save_dir=run, name=run.name, id=_stable_id(run), resume="allow")


def _stable_id(run: Path) -> str:
    """The name under which wandb goes on with a run that is resumed."""
    return hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]
