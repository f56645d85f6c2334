"""`lit-refusion train`: one training run."""

from __future__ import annotations

import argparse

from lit_refusion.callbacks.interrupt import INTERRUPTED
from lit_refusion.commands import compose
from lit_refusion.schema import build
from lit_refusion.training import TrainConfig, train


def run(arguments: argparse.Namespace) -> int:
    """Train as `objective=... backbone=... data=...` say."""
    config = compose(arguments)
    if config is None:
        return 0
    settings = build({**config, "data": config["data"]["folder"]}, TrainConfig)
    result = train(settings, resolved=config)
    score = "" if result.validation_loss is None else f", validation loss {result.validation_loss:.4f}"
    if result.is_main:
        print(f"{result.run}: step {result.step}{score}; checkpoints in {result.run / 'checkpoints'}")
    return INTERRUPTED if result.was_stopped else 0
