"""Putting one training run together."""

from __future__ import annotations

import json
import sys
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_refusion.backbone import BackboneConfig
from lit_refusion.callbacks.interrupt import StopGracefully
from lit_refusion.data.loader import DataModule, LoaderConfig
from lit_refusion.data.shards import Shards
from lit_refusion.errors import UserError, first_line
from lit_refusion.mask_token import check_mask_not_in_data
from lit_refusion.metrics_file import CsvMetrics
from lit_refusion.module import TrainingModule
from lit_refusion.objective import Objective
from lit_refusion.optimizer import OptimizerConfig
from lit_refusion.progress import LineLogger, ProgressBar
from lit_refusion.tokenizer import load_tokenizer, tokenizer_fingerprint

LAST, BEST, TOKENIZER = "last", "best", "tokenizer"
POSITIVE_SETTINGS = ("max_steps", "epochs", "global_batch_size", "gradient_clip", "validate_every", "log_every",
                     "checkpoint_every", "num_nodes")  # fmt: skip


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
        checkpoint_every: steps between saves of the last state.
        precision: "auto" is fp32 on CPU and bf16 on CUDA.
        accelerator: "auto", "cpu" or "gpu".
        devices: devices per node, or "auto".
        num_nodes: machines.
        strategy: a Lightning strategy, for example ddp or deepspeed_stage_2.
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
    precision: Literal["auto", "32-true", "bf16-mixed", "bf16-true"]
    accelerator: Literal["auto", "cpu", "gpu"]
    devices: int | str
    num_nodes: int
    strategy: str
    loggers: tuple[Literal["csv", "tensorboard", "wandb"], ...]
    progress: Literal["auto", "rich", "lines", "none"]

    def __post_init__(self) -> None:
        if (self.max_steps is None) == (self.epochs is None):
            raise UserError(
                f"trainer: give exactly one of trainer.max_steps={self.max_steps} and trainer.epochs={self.epochs}"
            )
        if self.devices != "auto" and not (isinstance(self.devices, int) and self.devices > 0):
            raise UserError(f"trainer.devices={self.devices}: give a number of devices, at least 1, or auto")
        for name in POSITIVE_SETTINGS:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"trainer.{name}={value}: must be positive")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    Args:
        run: folder of the run.
        resume: null starts afresh; "auto" continues from the run's last checkpoint where there is one.
        seed: keys order and noise.
        data: folder of the prepared data.
        objective: the training method.
        backbone: the model.
        loader: how examples become batches.
        optimizer: AdamW.
        trainer: how long, on what.
    """

    run: str
    resume: Literal["auto"] | None
    seed: int
    data: str
    objective: Objective
    backbone: BackboneConfig
    loader: LoaderConfig
    optimizer: OptimizerConfig
    trainer: TrainerConfig


@dataclass(frozen=True)
class TrainResult:
    """Where a run ended; `is_main` on the one process that should speak of it."""

    run: Path
    step: int
    was_stopped: bool
    validation_loss: float | None
    is_main: bool


def train(config: TrainConfig, *, resolved: dict[str, Any]) -> TrainResult:
    """Run training; `resolved` is the plain config that is saved with the run and its checkpoints.

    Raises:
        UserError: config, data and model do not fit together.
    """
    run = Path(config.run)
    resume_from = _resume_point(run, config.resume)
    shards = Shards(config.data)
    tokenizer_path = config.backbone.path or shards.folder / "tokenizer"
    tokenizer = load_tokenizer(
        tokenizer_path,
        gguf_file=config.backbone.gguf_file,
        trust_remote_code=config.backbone.trust_remote_code,
    )
    _check_tokenizer(tokenizer_fingerprint(tokenizer), shards, tokenizer_path)
    backbone = config.backbone.load(tokenizer)
    if config.objective.needs_mask_token:
        check_mask_not_in_data(backbone.mask_token_id, shards.token_counts(), origin=config.data)
    _check_window(shards, backbone.max_length, config.loader)
    if config.backbone.attention != "sdpa" and not torch.cuda.is_available():
        raise UserError(f"backbone.attention={config.backbone.attention}: trains on CUDA only; use sdpa here")
    config.objective.prepare(backbone)

    data = DataModule(
        shards,
        config.objective,
        config=config.loader,
        mask_token_id=backbone.mask_token_id,
        seed=config.seed,
        global_batch_size=config.trainer.global_batch_size,
    )
    max_steps = config.trainer.max_steps or data.plan.num_steps(config.trainer.epochs or 0)
    spec = config.objective.spec(backbone.mask_token_id)
    record = {
        "config": resolved,
        "spec": spec.to_dict(),
        "data_fingerprint": shards.manifest.content_fingerprint,
        "tokenizer_fingerprint": shards.manifest.tokenizer_fingerprint,
        "model_config": backbone.model.config.to_dict(),
    }
    module = TrainingModule(
        backbone,
        config.objective,
        optimizer=config.optimizer,
        max_steps=max_steps,
        log_every=config.trainer.log_every,
        record=record,
    )
    run.mkdir(parents=True, exist_ok=True)
    stop = StopGracefully(run / "checkpoints" / f"{LAST}.ckpt")
    trainer = _trainer(config.trainer, data, run=run, max_steps=max_steps, stop=stop)
    if trainer.is_global_zero:
        (run / "config.json").write_text(json.dumps(resolved, indent=2) + "\n", encoding="utf-8")
        tokenizer.save_pretrained(run / TOKENIZER)
        print(
            _header(config, spec=spec.to_dict(), backbone=backbone, data=data, max_steps=max_steps),
            flush=True,
        )
    with warnings.catch_warnings():
        # The loader resumes from the step by itself; Lightning cannot know.
        warnings.filterwarnings("ignore", ".*resuming from a checkpoint that ended.*")
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        warnings.filterwarnings("ignore", ".*exists and is not empty.*")
        warnings.filterwarnings("ignore", ".*isinstance\\(treespec, LeafSpec\\).*")
        trainer.fit(module, data, ckpt_path=resume_from, weights_only=True)
    score = trainer.callback_metrics.get("val/loss")
    loss = None if score is None else float(score)
    return TrainResult(run, trainer.global_step, stop.was_stopped, loss, trainer.is_global_zero)


def _resume_point(run: Path, resume: str | None) -> Path | None:
    if run.exists() and not run.is_dir():
        raise UserError(f"run={run}: it is a file; choose a folder")
    last = run / "checkpoints" / f"{LAST}.ckpt"
    if resume == "auto" and last.exists() and not zipfile.is_zipfile(last):
        raise UserError(f"{last}: damaged; put another checkpoint in its place, or choose another run folder")
    if resume is None and last.exists():
        raise UserError(
            f"run={run}: it holds a checkpoint already; continue it with resume=auto, or choose another run"
        )
    return last if resume == "auto" and last.exists() else None


def _check_tokenizer(fingerprint: str, shards: Shards, tokenizer_path: str | Path) -> None:
    if fingerprint != shards.manifest.tokenizer_fingerprint:
        raise UserError(
            f"backbone.path={tokenizer_path}: its tokenizer (fingerprint {fingerprint}) is not the one that prepared "
            f"{shards.folder} ({shards.manifest.tokenizer_fingerprint}); prepare it again with this tokenizer"
        )


def _check_window(shards: Shards, max_length: int | None, loader: LoaderConfig) -> None:
    longest = shards.manifest.longest
    if max_length is not None and longest > max_length:
        raise UserError(
            f"{shards.folder}: its longest example has {longest} tokens, the backbone's window is {max_length}; "
            f"prepare the data with data.max_length={max_length}"
        )
    if loader.layout == "packed" and longest > loader.max_row_length:
        raise UserError(
            f"loader.max_row_length={loader.max_row_length} is shorter than the longest example ({longest} tokens); "
            "raise it"
        )


def _trainer(config: TrainerConfig, data: DataModule, *, run: Path, max_steps: int, stop: StopGracefully) -> L.Trainer:
    on_cuda = torch.cuda.is_available() and config.accelerator != "cpu"
    precision = ("bf16-mixed" if on_cuda else "32-true") if config.precision == "auto" else config.precision
    devices: Any = config.devices
    world_size = config.num_nodes * _devices_per_node(config, on_cuda)
    micro_batches = data.num_micro_batches(world_size)
    has_validation = len(data.validation_indices) > 0
    progress = ("rich" if sys.stdout.isatty() else "lines") if config.progress == "auto" else config.progress
    loggers = [_logger(name, run) for name in config.loggers]
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
            precision=precision,
            accelerator=config.accelerator,
            devices=1 if devices == "auto" and not on_cuda else devices,
            num_nodes=config.num_nodes,
            strategy=config.strategy,
            use_distributed_sampler=False,
            logger=loggers,
            callbacks=[
                *_checkpoints(config, run, has_validation=has_validation),
                stop,
                *([ProgressBar()] if progress == "rich" else []),
            ],
            enable_progress_bar=progress == "rich",
            enable_model_summary=False,
            default_root_dir=run,
        )
    except (ValueError, MisconfigurationException) as error:
        names = ("strategy", "accelerator", "devices", "num_nodes", "precision")
        given = ", ".join(f"trainer.{name}={getattr(config, name)}" for name in names)
        raise UserError(f"{given}: Lightning refuses these settings: {first_line(error)}") from error


def _devices_per_node(config: TrainerConfig, on_cuda: bool) -> int:
    if isinstance(config.devices, int):
        return config.devices
    return torch.cuda.device_count() if on_cuda else 1


def _checkpoints(config: TrainerConfig, run: Path, *, has_validation: bool) -> list[Callback]:
    folder = run / "checkpoints"
    last = ModelCheckpoint(
        folder, LAST, every_n_train_steps=config.checkpoint_every, enable_version_counter=False, save_top_k=1
    )
    if not has_validation:
        return [last]
    best = ModelCheckpoint(
        folder, BEST, monitor="val/loss", enable_version_counter=False, save_on_train_epoch_end=False
    )
    return [last, best]


def _logger(name: str, run: Path) -> Logger:
    if name == "csv":
        return CsvMetrics(run / "metrics.csv")
    if name == "tensorboard":
        return TensorBoardLogger(run, name="", version="tensorboard")
    try:
        import wandb  # noqa: F401
        from lightning.pytorch.loggers import WandbLogger
    except ImportError as error:
        raise UserError("trainer.loggers: wandb needs an extra: pip install 'lit-refusion[wandb]'") from error
    return WandbLogger(save_dir=run, name=run.name)


def _header(config: TrainConfig, *, spec: dict[str, Any], backbone: Any, data: DataModule, max_steps: int) -> str:
    parameters = sum(p.numel() for p in backbone.parameters())
    return (
        f"{config.objective.name}: {parameters:,} parameters, {len(data.plan.indices):,} training and "
        f"{len(data.validation_indices):,} validation examples, {max_steps:,} steps of "
        f"{config.trainer.global_batch_size}\n"
        f"conventions: " + ", ".join(f"{name} {value}" for name, value in spec.items() if name != "objective")
    )
