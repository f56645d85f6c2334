"""The result of the dependency study: JSON, CSV and a plot."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.table import Table

from lit_refusion.analysis.dependency import LN2, Point

NAME = "dependency"
SHOWN = (1, 2, 4, 8, 16, 32, 64)
"""Distances of the printed table."""


def write_report(folder: Path, points: Sequence[Point], settings: dict[str, Any]) -> None:
    """`dependency.json` with the settings, and `dependency.csv`.

    Args:
        folder: an existing folder.
        points: what `Dependency.measure` returned.
        settings: plain data that says how it was measured.
    """
    rows = [asdict(point) for point in points]
    content = {"settings": settings, "unit": "nats", "largest_possible": LN2, "points": rows}
    (folder / f"{NAME}.json").write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    with (folder / f"{NAME}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Point)])
        writer.writeheader()
        writer.writerows(rows)


def draw_report(folder: Path, points: Sequence[Point], *, log_x: bool) -> Path | None:
    """`dependency.png`: divergence over distance, a line with its interval for each ratio; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for ratio, style in zip(sorted({point.ratio for point in points}), _styles()):
        line = [point for point in points if point.ratio == ratio]
        distance = [point.distance for point in line]
        axes.plot(distance, [point.jsd for point in line], label=f"{ratio:.0%} hidden", markersize=3, **style)
        band = [(point.distance, point.low, point.high) for point in line if point.low is not None]
        if band:
            places, low, high = zip(*band)
            axes.fill_between(places, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.set_xlabel("distance (tokens)")
    axes.set_ylabel("Jensen-Shannon divergence (nats)")
    if log_x:
        axes.set_xscale("log", base=2)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    path = folder / f"{NAME}.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _styles() -> list[dict[str, Any]]:
    """Colours that the colour-blind can tell apart (Okabe and Ito), with markers."""
    colours = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#000000")
    return [{"color": colour, "marker": marker} for marker in "osv^Dx" for colour in colours]


def table(points: Sequence[Point]) -> Table:
    """Some distances, a row for each ratio."""
    found = {(point.ratio, point.distance): point for point in points}
    distances = [distance for distance in SHOWN if any((ratio, distance) in found for ratio, _ in found)]
    result = Table("hidden", *map(str, distances), title="Jensen-Shannon divergence (nats) by distance")
    for ratio in sorted({point.ratio for point in points}):
        cells = [found.get((ratio, distance)) for distance in distances]
        result.add_row(f"{ratio:.0%}", *("" if cell is None else f"{cell.jsd:.4f}" for cell in cells))
    return result
