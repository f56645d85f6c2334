"""Putting one training run together."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from transformers import PreTrainedTokenizerBase

from lit_refusion.adapter import Base, base_fingerprint, shape_fingerprint
from lit_refusion.attention import BLOCK
from lit_refusion.backbone import Backbone, BackboneConfig
from lit_refusion.callbacks.decoding import DecodingCallback, DecodingConfig, check_decodings
from lit_refusion.callbacks.interrupt import StopGracefully
from lit_refusion.callbacks.likelihood import LikelihoodConfig, likelihood_callbacks
from lit_refusion.chat import PromptFormat
from lit_refusion.data.loader import DataModule, LoaderConfig
from lit_refusion.data.remote import CacheConfig
from lit_refusion.data.shards import Shards
from lit_refusion.data.workers import plain_worker_errors
from lit_refusion.errors import UserError
from lit_refusion.launcher import Launcher
from lit_refusion.mask_token import check_mask_not_in_data
from lit_refusion.module import TrainingModule
from lit_refusion.objective import Objective
from lit_refusion.optimizer import OptimizerConfig
from lit_refusion.origin import initial, order, software, write_origin
from lit_refusion.ranks import rank_log
from lit_refusion.run_folder import LOGS, TOKENIZER, resume_point
from lit_refusion.schema import build
from lit_refusion.strategy import StrategyConfig
from lit_refusion.tokenizer import load_tokenizer, tokenizer_fingerprint
from lit_refusion.trainer import TrainerConfig, make_trainer


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    Args:
        run: folder of the run.
        resume: null starts afresh; "auto" continues from the run's last checkpoint where there is one; "force" does so
            although settings or data have changed.
        seed: keys order and noise.
        data: folder of the prepared data, or a URL of one.
        cache: where the files of a URL are kept.
        objective: the training method.
        backbone: the model.
        loader: how examples become batches.
        optimizer: AdamW.
        trainer: how long, on what.
        strategy: how the model lies on the devices.
        decoding: decoders that run in validation, by name.
        likelihood: how much of it is measured in validation.
        launcher: where the processes are started.
        dry_run: only say what would be done.
    """

    run: str
    resume: Literal["auto", "force"] | None
    seed: int
    data: str
    cache: CacheConfig
    objective: Objective
    backbone: BackboneConfig
    loader: LoaderConfig
    optimizer: OptimizerConfig
    trainer: TrainerConfig
    strategy: StrategyConfig
    decoding: dict[str, DecodingConfig]
    likelihood: LikelihoodConfig
    launcher: Launcher
    dry_run: bool


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
    if not config.run or config.seed < 0:
        raise UserError(f"run={config.run!r}, seed={config.seed}: give a folder, and a seed that is not negative")
    run = Path(config.run)
    resume_from = resume_point(run, config.resume)
    shards = Shards(config.data, cache=config.cache)
    tokenizer, backbone = _load_fitting(config, shards)
    start = initial(backbone)
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
    spec = config.objective.spec(backbone.mask_token_id).to_dict()
    module = TrainingModule(
        backbone,
        config.objective,
        optimizer=config.optimizer,
        max_steps=max_steps,
        log_every=config.trainer.log_every,
        record=_record(resolved, spec, shards, backbone),
        force_resume=config.resume == "force",
    )
    run.mkdir(parents=True, exist_ok=True)
    validates = len(data.validation_indices) > 0
    decodings = _decodings(config, shards, tokenizer, has_validation=validates)
    stop = StopGracefully(config.trainer.validate_every if validates else None)
    facts = {
        "data": shards.manifest.content_fingerprint,
        "tokenizer": shards.manifest.tokenizer_fingerprint,
        **start,
        **order(data, max_steps),
        "software": software(),
    }
    origin = LambdaCallback(on_train_start=lambda *_: _write_start(run, resolved, tokenizer, facts))
    trainer = make_trainer(
        config.trainer,
        config.strategy,
        data,
        run=run,
        max_steps=max_steps,
        resume_from=resume_from,
        callbacks=[origin, stop, *decodings, *likelihood_callbacks(config.likelihood, data)],
    )
    if trainer.is_global_zero:
        print(_header(config, spec=spec, backbone=backbone, data=data, max_steps=max_steps), flush=True)
    _fit(trainer, module, data, run=run, resume_from=resume_from)
    score = trainer.callback_metrics.get("val/loss")
    loss = None if score is None else float(score)
    return TrainResult(run, trainer.global_step, stop.was_stopped, loss, trainer.is_global_zero)


def _decodings(
    config: TrainConfig, shards: Shards, tokenizer: PreTrainedTokenizerBase, *, has_validation: bool
) -> list[DecodingCallback]:
    """The decoders that run in validation."""
    check_decodings(
        config.decoding,
        validate_every=config.trainer.validate_every,
        has_validation=has_validation,
        monitor=config.trainer.monitor,
    )
    return [
        DecodingCallback(
            name,
            settings,
            tokenizer=tokenizer,
            prompt_format=build(shards.manifest.prompt_format, PromptFormat, key="prompt_format"),
            spec=config.objective.spec(None),
            folder=Path(config.run) / "decoding",
        )
        for name, settings in config.decoding.items()
    ]


def _record(resolved: dict[str, Any], spec: dict[str, Any], shards: Shards, backbone: Backbone) -> dict[str, Any]:
    """What every checkpoint says of its origin."""
    return {
        "config": resolved,
        "spec": spec,
        "data_fingerprint": shards.manifest.content_fingerprint,
        "tokenizer_fingerprint": shards.manifest.tokenizer_fingerprint,
        "model_config": backbone.model.config.to_dict(),
        "prompt_format": shards.manifest.prompt_format,
        "base": _base(resolved["backbone"], backbone),
        "trained_shapes": shape_fingerprint(backbone),
    }


def _base(settings: dict[str, Any], backbone: Backbone) -> dict[str, Any] | None:
    """The frozen model that training adds to; None where all of it trains."""
    fingerprint = base_fingerprint(backbone)
    if fingerprint is None:
        return None
    path = settings["path"]
    if path is not None and Path(path).is_dir():
        path = str(Path(path).resolve())
    names = ("gguf_file", "mask_token_id")
    return asdict(Base(path=path, fingerprint=fingerprint, **{name: settings[name] for name in names}))


def _fit(trainer: L.Trainer, module: TrainingModule, data: DataModule, *, run: Path, resume_from: Path | None) -> None:
    """Train, without the warnings that do not concern us, with a log of this rank."""
    with warnings.catch_warnings():
        # The loader resumes from the step by itself; Lightning cannot know.
        warnings.filterwarnings("ignore", ".*resuming from a checkpoint that ended.*")
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        warnings.filterwarnings("ignore", ".*exists and is not empty.*")
        warnings.filterwarnings("ignore", ".*sync_dist=True.*")  # what is logged is reduced already
        warnings.filterwarnings("ignore", ".*isinstance\\(treespec, LeafSpec\\).*")
        try:
            with plain_worker_errors(), rank_log(run / LOGS, trainer.global_rank):
                trainer.fit(module, data, ckpt_path=resume_from, weights_only=True)
        except MisconfigurationException as error:
            if "monitor" not in str(error):
                raise
            known = ", ".join(sorted(map(str, trainer.callback_metrics)))
            raise UserError(f"trainer.monitor: no such figure; there are {known}") from error
        finally:
            data.release_workers()


@rank_zero_only
def _write_start(
    run: Path, resolved: dict[str, Any], tokenizer: PreTrainedTokenizerBase, facts: dict[str, Any]
) -> None:
    """What the run was made of; written when it really starts, so that one that is refused changes nothing."""
    (run / "config.json").write_text(json.dumps(resolved, indent=2) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(run / TOKENIZER)
    write_origin(run, facts)


def _load_fitting(config: TrainConfig, shards: Shards) -> tuple[PreTrainedTokenizerBase, Backbone]:
    """Tokenizer and backbone, after checking that data, model and settings fit together."""
    tokenizer_path = config.backbone.path or shards.folder / TOKENIZER
    if config.backbone.path is None and not Path(tokenizer_path).is_dir():
        raise UserError(f"{tokenizer_path}: missing; prepare the data again")
    tokenizer = load_tokenizer(
        tokenizer_path,
        gguf_file=config.backbone.gguf_file,
        trust_remote_code=config.backbone.trust_remote_code,
    )
    _check_tokenizer(tokenizer_fingerprint(tokenizer), shards, tokenizer_path)
    backbone = config.backbone.load(tokenizer, in_shares=config.strategy.shards_parameters)
    if config.objective.needs_mask_token:
        check_mask_not_in_data(backbone.mask_token_id, shards.token_counts(), origin=config.data)
    _check_window(shards, backbone.max_length, config.loader)
    if config.backbone.attention != "sdpa" and not torch.cuda.is_available():
        raise UserError(f"backbone.attention={config.backbone.attention}: trains on CUDA only; use sdpa here")
    rule = config.objective.attention(0)
    if config.backbone.attention == "flash_attention_2" and rule.varlen is None:
        raise UserError(
            f"backbone.attention=flash_attention_2: it cannot express the attention rule '{rule.name}' of "
            f"objective={config.objective.name}; use flex_attention or sdpa"
        )
    if config.backbone.attention == "flex_attention" and config.loader.pad_to_multiple % BLOCK:
        raise UserError(
            f"loader.pad_to_multiple={config.loader.pad_to_multiple}: with flex_attention give a multiple of {BLOCK}, "
            "or its kernels are compiled anew for every row length"
        )
    return tokenizer, backbone


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


def _header(config: TrainConfig, *, spec: dict[str, Any], backbone: Any, data: DataModule, max_steps: int) -> str:
    parameters = sum(p.numel() for p in backbone.parameters())
    trainable = sum(p.numel() for p in backbone.parameters() if p.requires_grad)
    share = "" if trainable == parameters else f" ({trainable:,} of them train, {trainable / parameters:.1%})"
    return (
        f"{config.objective.name}: {parameters:,} parameters{share}, {data.plan.epoch_size:,} training and "
        f"{len(data.validation_indices):,} validation examples, {max_steps:,} steps of "
        f"{config.trainer.global_batch_size}\n"
        f"conventions: " + ", ".join(f"{name} {value}" for name, value in spec.items() if name != "objective")
    )
