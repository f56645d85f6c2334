"""Medians, spreads and ratios of interleaved repeats; Markdown tables; files that benchmarks read and write."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_refusion.origin import software


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratio(values: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """The same for the ratio to another contender within each repeat."""
    return spread([value / other for value, other in zip(values, others, strict=True)])


def shown(figures: dict[str, float], form: str = ",.0f") -> str:
    """`median (min-max)`, or the one figure where they are equal."""
    median, least, most = (format(figures[name], form) for name in ("median", "min", "max"))
    return median if least == most else f"{median} ({least}-{most})"


def table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Markdown; the first column is text, the others figures."""
    lines = [titles, ["---", *["--:"] * (len(titles) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def environment() -> dict[str, Any]:
    """Versions, machine, and how busy it is."""
    return {**software(), "load": os.getloadavg(), "command": sys.argv}


def write(path: str | None, results: dict[str, Any], started: dict[str, Any]) -> None:
    """The results with what they were measured on; nothing where no file was asked for."""
    if path:
        content = {"environment": started, "load at the end": os.getloadavg(), **results}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def existing(path: str) -> str:
    """A path that is given to a benchmark."""
    if not Path(path).exists():
        raise argparse.ArgumentTypeError(f"{path}: no such file or folder")
    return path


def turns(names: Sequence[str], repeat: int) -> list[str]:
    """All contenders, from another one on in every repeat, so that none always follows the same neighbour first."""
    first = repeat % len(names)
    return [*names[first:], *names[:first]]
