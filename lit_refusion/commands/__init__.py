"""One thin file per command: compose, build, run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lit_refusion.config import load_config


def compose(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The command's config; None where `--show-config` only asked to see it."""
    config = load_config(arguments.command, arguments.overrides, extra_folder=arguments.config_dir)
    if arguments.show_config:
        print(OmegaConf.to_yaml(config), end="")
        return None
    return config


@contextmanager
def counting(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, in a terminal only; what this yields is told how many of `total` are done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TextColumn("eta"), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=total)
        yield lambda done: progress.update(task, completed=done)
