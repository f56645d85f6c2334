"""`lit-refusion ablate`: train, evaluate and compare the arms of an experiment."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lit_refusion.ablation.plan import REPORT, AblateConfig, chosen, groups
from lit_refusion.ablation.slurm import submit
from lit_refusion.ablation.work import Work, run_all, write_plan
from lit_refusion.callbacks.interrupt import INTERRUPTED
from lit_refusion.commands import compose
from lit_refusion.comparison.arm import ABLATION
from lit_refusion.comparison.compare import CompareConfig, compare
from lit_refusion.config import load_config
from lit_refusion.schema import build

FAILED = 1


def run(arguments: argparse.Namespace) -> int:
    """Run what is missing, and write the report; 1 where an arm failed or the comparison is not controlled."""
    if arguments.show_config:
        compose(arguments)
        return 0
    return start(arguments.overrides, config_dir=arguments.config_dir)


def start(overrides: list[str], *, config_dir: str | None) -> int:
    """The same from the settings of the command."""
    settings = build(load_config("ablate", overrides, extra_folder=config_dir), AblateConfig)
    config_dir = str(Path(config_dir).resolve()) if config_dir else None
    work = Work(config=settings, config_dir=config_dir)
    found = chosen(groups(settings), settings.only)

    def note() -> None:
        if not settings.only or not (Path(settings.out) / ABLATION).exists():
            write_plan(settings, overrides)

    if settings.launcher.submits:
        note()
        for line in submit(work, found, overrides):
            print(line)
        return 0
    failures: dict[str, str] = {}
    try:
        if {"train", "evaluate"} & set(settings.stages):
            failures = run_all(work, found, on_start=note)
        else:
            note()
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return INTERRUPTED
    for name, reason in failures.items():
        print(f"{name} failed: {reason}", file=sys.stderr)
    if "compare" not in settings.stages:
        return FAILED if failures else 0
    outcome = compare(
        CompareConfig(
            runs=(settings.out,),
            out=str(Path(settings.out) / REPORT),
            baseline=settings.baseline or next(iter(settings.arms)),
            allow=settings.allow,
            measure=settings.measure,
            num_samples=5,
            seed=0,
        )
    )
    is_whole = not failures if settings.only else outcome.has_all
    return 0 if outcome.is_controlled and is_whole else FAILED
