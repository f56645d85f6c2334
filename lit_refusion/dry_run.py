"""What a run would do, before it does it: where it runs, how a step is cut up, and what memory it needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from lit_refusion.backbone import Backbone
from lit_refusion.data.plan import accumulation
from lit_refusion.data.shards import Shards
from lit_refusion.errors import UserError, first_line
from lit_refusion.memory import Shape, estimate
from lit_refusion.model_loading import check_architecture, fresh_config
from lit_refusion.noise import Stream, noise
from lit_refusion.tokenizer import load_tokenizer
from lit_refusion.training import TrainConfig
from lit_refusion.views import IGNORE, pack
from lit_refusion.world import World


def report(config: TrainConfig, world: World, *, job: str | None) -> list[str]:
    """Lines to print.

    Args:
        config: the run.
        world: its processes.
        job: the script that would be submitted.
    """
    trainer, loader = config.trainer, config.loader
    turns = accumulation(
        global_batch_size=trainer.global_batch_size,
        micro_batch_size=loader.micro_batch_size,
        world_size=world.size,
    )
    shards = _shards(config)
    model = _model_config(config, shards)
    shape = Shape.of(model)
    tokens, supervised, origin = _largest_batch(config, shards)
    added, trainable = _counts(config, model)
    is_bf16 = trainer.chosen_precision == "bf16-mixed"
    parts = estimate(
        shape,
        config.strategy.placement(world.size),
        is_bf16=is_bf16,
        checkpointing=config.backbone.gradient_checkpointing,
        tokens=tokens,
        supervised=supervised,
        added=added,
        trainable=trainable,
    )
    share = "" if trainable is None else f", {trainable / 1e6:,.1f} M train beside them"
    lines = [
        f"world: {world.num_nodes} nodes x {world.devices} devices = {world.size} processes, "
        f"{type(config.strategy).__name__}",
        f"step: {trainer.global_batch_size} examples = {world.size} processes x {turns} micro-batches x "
        f"{loader.micro_batch_size} examples",
        f"model: {model.model_type}, {shape.parameters / 1e6:,.1f} M parameters{share}, "
        f"{'bf16' if is_bf16 else 'fp32'}",
        f"largest micro-batch: {tokens:,} tokens, {supervised:,} with a loss ({origin})",
        "memory of a device, estimated:",
        *(f"  {name:12} {num_bytes / 2**20:12,.1f} MiB" for name, num_bytes in parts.items()),
    ]
    return lines if job is None else [*lines, "would submit:", *job.splitlines()]


def _shards(config: TrainConfig) -> Shards | None:
    try:
        return Shards(config.data, cache=config.cache)
    except UserError:
        return None  # not prepared yet; the settings have to do


def _model_config(config: TrainConfig, shards: Shards | None) -> PretrainedConfig:
    backbone = config.backbone
    if backbone.architecture is not None:
        tokenizer = None if shards is None else load_tokenizer(shards.folder / "tokenizer")
        return fresh_config(backbone.architecture, tokenizer)
    assert backbone.path is not None
    try:
        found = AutoConfig.from_pretrained(backbone.path, trust_remote_code=backbone.trust_remote_code)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"backbone.path={backbone.path}: cannot read its config: {first_line(error)}") from error
    check_architecture(found)
    return found


def _counts(config: TrainConfig, model_config: PretrainedConfig) -> tuple[int, int | None]:
    """(parameters that the objective adds, those that train or None for all), from a model without storage."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=config.backbone.trust_remote_code)
    backbone = Backbone(model, mask_token_id=0, eos_token_id=None, attention="sdpa")
    before = sum(parameter.numel() for parameter in backbone.parameters())
    config.objective.prepare(backbone)
    after = sum(parameter.numel() for parameter in backbone.parameters())
    trainable = sum(parameter.numel() for parameter in backbone.parameters() if parameter.requires_grad)
    return after - before, None if trainable == after else trainable


def _largest_batch(config: TrainConfig, shards: Shards | None) -> tuple[int, int, str]:
    """(places in the rows, rows with a loss, where that is known from) of the largest micro-batch."""
    size, loader = config.loader.micro_batch_size, config.loader
    if shards is None:
        length = loader.max_row_length
        return size * length, size * length, f"all rows of loader.max_row_length={length}; the data is not there yet"
    longest = np.argsort(-shards.index["length"], kind="stable")[:size]
    views = [view for number in longest for view in config.objective.views(shards[int(number)], _rng(config, number))]
    supervised = sum(int((view.targets != IGNORE).sum()) for view in views)
    rows = pack(views, max_length=loader.max_row_length) if loader.layout == "packed" else [[view] for view in views]
    longest_row = max(sum(map(len, row)) for row in rows)
    places = len(rows) * -(-longest_row // loader.pad_to_multiple) * loader.pad_to_multiple
    return places, supervised, f"the {size} longest examples"


def _rng(config: TrainConfig, number: Any) -> np.random.Generator:
    return noise(config.seed, index=int(number), epoch=0, stream=Stream.TRAIN_NOISE)
