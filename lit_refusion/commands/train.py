"""`lit-refusion train`: one training run, here or as a job."""

from __future__ import annotations

import argparse
from pathlib import Path

from lit_refusion.callbacks.interrupt import INTERRUPTED
from lit_refusion.commands import compose
from lit_refusion.dry_run import report
from lit_refusion.errors import UserError
from lit_refusion.schema import build
from lit_refusion.training import TrainConfig, train


def run(arguments: argparse.Namespace) -> int:
    """Train as `objective=... backbone=... data=...` say."""
    config = compose(arguments)
    if config is None:
        return 0
    if "arms" in config:
        raise UserError("experiment: this one has several arms; run it with lit-refusion ablate")
    settings = build({**config, "data": config["data"]["folder"]}, TrainConfig)
    world = settings.trainer.world
    options = ["--config-dir", str(Path(arguments.config_dir).resolve())] if arguments.config_dir else []
    job = settings.launcher.job([*options, *arguments.overrides], Path(settings.run), world)
    if settings.dry_run:
        print("\n".join(report(settings, world, job=job)))
        return 0
    if job is not None:
        print(settings.launcher.submit(job, Path(settings.run)))
        return 0
    result = train(settings, resolved=config)
    score = "" if result.validation_loss is None else f", validation loss {result.validation_loss:.4f}"
    if result.is_main:
        print(f"{result.run}: step {result.step}{score}; checkpoints in {result.run / 'checkpoints'}")
    return INTERRUPTED if result.was_stopped else 0
