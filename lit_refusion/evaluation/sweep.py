"""The result of a sweep over a decoder's settings: one table, and the trade-offs as plots."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_refusion.new_file import write_file
from lit_refusion.pictures import pyplot, reach, save

MARKERS = "os^Dv<>P"
ACCURACY, SPEED, PASSES = "accuracy", "tokens_per_second", "tokens_per_forward"


def write_sweep(folder: Path, names: Sequence[str], results: Sequence[dict[str, Any]]) -> Path:
    """`sweep.csv`: the swept settings and all figures of each evaluation, one a row.

    Args:
        folder: of the sweep.
        names: swept settings.
        results: what `Evaluation.run` returned.
    """
    figures = sorted({name for result in results for name in result["figures"]})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, *figures])
    for result in results:
        values = [result["decoder"][name] for name in names]
        writer.writerow([*values, *(result["figures"].get(name, "") for name in figures)])
    return write_file(folder / "sweep.csv", text.getvalue(), name="")


def draw_sweep(folder: Path, names: Sequence[str], results: Sequence[dict[str, Any]]) -> list[Path]:
    """Accuracy and speed over each setting (Fig. 4 of arXiv 2512.13586), and accuracy over tokens per pass (Fig. 7).

    Returns:
        The pictures; none without matplotlib.
    """
    if pyplot() is None:
        return []
    pictures = [save(_draw_setting(name, names, results), folder / f"{name}.png") for name in names]
    return [*pictures, save(_draw_frontier(names, results), folder / "frontier.png")]


def _draw_setting(name: str, names: Sequence[str], results: Sequence[dict[str, Any]]) -> Any:
    """Accuracy and speed over one setting, a line for each combination of the others."""
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for number, (label, group) in enumerate(_groups(name, names, results)):
        values = [result["decoder"][name] for result in group]
        left.errorbar(values, *_accuracy(group), elinewidth=0.8, capsize=3, **_look(number, label))
        right.plot(values, [_speed(result) for result in group], **_look(number, label))
    left.set_ylabel("accuracy (%), 95% intervals")
    left.set_ylim(top=min(102.0, left.get_ylim()[1]))
    right.set_ylabel("tokens per second")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel(name.replace("_", " "))
    if len(names) > 1:
        left.legend(fontsize="small")
    return figure


def _draw_frontier(names: Sequence[str], results: Sequence[dict[str, Any]]) -> Any:
    """Accuracy over tokens per pass; the last setting is written at the points."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for number, (label, group) in enumerate(_groups(names[-1], names, results)):
        passes, look = [result["figures"][PASSES] for result in group], _look(number, label)
        axes.errorbar(passes, *_accuracy(group), elinewidth=0.8, capsize=3, **look)
        for result, place in zip(group, passes, strict=True):
            point = (place, 100 * result["figures"][ACCURACY])
            offset: dict[str, Any] = {"textcoords": "offset points", "xytext": (5, 5 + 9 * number)}
            axes.annotate(str(result["decoder"][names[-1]]), point, fontsize="small", color=look["color"], **offset)
    axes.set_xlabel("tokens per forward pass")
    axes.set_ylabel("accuracy (%), 95% intervals")
    axes.set_title(f"at the points: {names[-1].replace('_', ' ')}", fontsize="medium")
    if len(names) > 1:
        axes.legend(fontsize="small")
    axes.margins(x=0.12, y=0.12)
    return figure


def _look(number: int, label: str) -> dict[str, Any]:
    """Of a line; its open markers show points that coincide."""
    marker = MARKERS[number % len(MARKERS)]
    return {"label": label, "color": f"C{number}", "marker": marker, "fillstyle": "none"}


def _groups(
    name: str, names: Sequence[str], results: Sequence[dict[str, Any]]
) -> list[tuple[str, list[dict[str, Any]]]]:
    """The results of one line each: those that differ in `name` only, with the other settings as the label."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        others = [f"{other.replace('_', ' ')} {result['decoder'][other]}" for other in names if other != name]
        groups.setdefault(", ".join(others), []).append(result)
    return list(groups.items())


def _accuracy(group: Sequence[dict[str, Any]]) -> tuple[list[float], list[tuple[float, ...]]]:
    """Accuracies in percent, and how far their intervals reach down and up."""
    figures = [result["figures"] for result in group]
    bars = zip(*(reach(item[ACCURACY], item[f"{ACCURACY}_low"], item[f"{ACCURACY}_high"]) for item in figures))
    return [100 * item[ACCURACY] for item in figures], list(bars)


def _speed(result: dict[str, Any]) -> float:
    """At batch 1 where it was measured, else in batches."""
    figures = result["figures"]
    batched = next(value for key, value in figures.items() if key.startswith(f"{SPEED}_batch"))
    return figures.get(f"{SPEED}_batch_1", batched)
