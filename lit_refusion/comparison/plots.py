"""The pictures of a comparison: loss curves, the frontier of accuracy and speed, and a study's one setting."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_refusion.comparison.arm import ArmRun
from lit_refusion.comparison.figures import Score, arms, tasks
from lit_refusion.pictures import pyplot, reach, save

MARKERS = "os^Dv<>Pp*"
DASHES = ("-", "--", ":", "-.")


def draw(
    folder: Path, runs: Sequence[ArmRun], scores: Sequence[Score], setting: tuple[str, dict[str, float]] | None
) -> list[tuple[Path, str]]:
    """All pictures that there is something to draw of, each with its caption; none without matplotlib.

    Args:
        folder: where they go.
        runs: the arms.
        scores: their figures.
        setting: what the arms of a study differ in, and its value for each arm; None if it is not one number.
    """
    if pyplot() is None:
        return []
    looks = {arm: _look(number) for number, arm in enumerate(arms(runs))}
    found = []
    if any(run.metrics for run in runs):
        found.append((save(_draw_losses(runs, looks), folder / "loss.png"), _loss_caption(runs)))
    for task in tasks(runs):
        own = [score for score in scores if score.task == task]
        name = re.sub(r"[^\w.-]", "_", task, flags=re.ASCII)
        if setting is not None:
            found.append((save(_draw_setting(own, setting), folder / f"{name}-setting.png"), f"{task}: {setting[0]}"))
        caption = f"{task}: accuracy against speed. Bars are 95% intervals."
        found.append((save(_draw_frontier(own, looks), folder / f"{name}-frontier.png"), caption))
    return found


def _look(number: int) -> dict[str, Any]:
    return {"color": f"C{number % 10}", "marker": MARKERS[number % len(MARKERS)]}


def _draw_losses(runs: Sequence[ArmRun], looks: dict[str, dict[str, Any]]) -> Any:
    """Validation: unweighted loss by term, and beside it the bound of the likelihood where it was measured."""
    from matplotlib import pyplot as plt

    has_bound = any(run.curve("val/nelbo")[0] for run in runs)
    figure, axes = plt.subplots(
        1, 1 + has_bound, figsize=(5.6 * (1 + has_bound), 4), layout="constrained", squeeze=False
    )
    left = axes[0][0]
    drawn: set[tuple[str, str]] = set()
    for run in _trained_once(runs):
        for number, term in enumerate(_terms(run)):
            label = None if (run.arm, term) in drawn else f"{run.arm}: {term}"
            drawn.add((run.arm, term))
            color = looks[run.arm]["color"]
            left.plot(*run.curve(f"val/{term}"), color=color, ls=DASHES[number % len(DASHES)], label=label, lw=1.5)
        if has_bound:
            axes[0][1].plot(*run.curve("val/nelbo"), color=looks[run.arm]["color"], label=run.arm, lw=1.5)
    left.set(title="unweighted loss of supervised tokens", ylabel="nats per token")
    if has_bound:
        handles, labels = axes[0][1].get_legend_handles_labels()
        unique = dict(zip(labels, handles))
        axes[0][1].set(title="negative log-likelihood, or its bound (NELBO)", ylabel="nats per response token")
        axes[0][1].legend(unique.values(), unique.keys(), fontsize="small")
    left.legend(fontsize="small")
    for axis in axes[0]:
        axis.set(xlabel="optimizer step")
        axis.grid(alpha=0.3, which="both")
        _spread(axis, "y")
    return figure


def _trained_once(runs: Sequence[ArmRun]) -> list[ArmRun]:
    """One arm of each training: decoding a model in two ways draws its curve once."""
    return list({run.run: run for run in reversed(runs) if run.metrics}.values())[::-1]


def _terms(run: ArmRun) -> list[str]:
    """Names of the unweighted losses in the metrics, as ce/TERM."""
    names = {name for row in run.metrics for name in row if name.startswith("val/") and name.count("/") == 2}
    return sorted(name.removeprefix("val/") for name in names if not name.startswith("val/loss/"))


def _loss_caption(runs: Sequence[ArmRun]) -> str:
    return (
        "Held-out loss along training. The left curves are of different tasks (a masked token with little in sight is "
        "harder than the next one) and compare within a term only; the right ones are comparable across objectives."
        if any(run.curve("val/nelbo")[0] for run in runs)
        else "Held-out loss along training; curves of different terms are of different tasks."
    )


def _draw_frontier(scores: Sequence[Score], looks: dict[str, dict[str, Any]]) -> Any:
    """Accuracy over tokens per second (Fig. 1 of arXiv 2512.13586) and over tokens per forward pass (Fig. 7)."""
    from matplotlib import pyplot as plt

    has_speed = all(score.tokens_per_second for score in scores)
    figure, axes = plt.subplots(
        1, 1 + has_speed, figsize=(5.2 * (1 + has_speed), 4), layout="constrained", squeeze=False, sharey=True
    )
    size = min(scores[0].tokens_per_second) if has_speed else 0
    for score in scores:
        places = [score.tokens_per_second[size]] if has_speed else []
        for axis, place in zip(axes[0], [*places, score.tokens_per_forward], strict=True):
            _point(axis, place, score, looks[score.arm])
    titles = [f"tokens per second, batch {size}"] if has_speed else []
    for axis, title in zip(axes[0], [*titles, "tokens per forward pass"], strict=True):
        axis.set(xlabel=title)
        axis.margins(x=0.15, y=0.12)
        axis.grid(alpha=0.3, which="both")
        _spread(axis, "x")
    axes[0][0].set_ylabel("accuracy (%)")
    axes[0][-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure


def _spread(axes: Any, which: str) -> None:
    """A logarithmic scale with plain numbers, where the values spread over more than a factor of four."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis = getattr(axes, f"{which}axis")
    low, high = getattr(axes.dataLim, f"interval{which}")
    if not 0 < 4 * low < high:
        return
    getattr(axes, f"set_{which}scale")("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _point(axis: Any, place: float, score: Score, look: dict[str, Any]) -> None:
    value = score.score
    down, up = reach(value.value, value.low, value.high)
    axis.errorbar(
        [place], [100 * value.value], [[down], [up]], label=score.arm, capsize=3, ls="none", markersize=7, **look
    )


def _draw_setting(scores: Sequence[Score], setting: tuple[str, dict[str, float]]) -> Any:
    """Accuracy and speed over the one setting that the arms differ in (Figs. 4, 8 and 9 of arXiv 2512.13586)."""
    from matplotlib import pyplot as plt

    name, values = setting
    own = sorted((score for score in scores if score.arm in values), key=lambda score: values[score.arm])
    places = [values[score.arm] for score in own]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.8), layout="constrained")
    means = [100 * score.score.value for score in own]
    bars = zip(*(reach(score.score.value, score.score.low, score.score.high) for score in own))
    left.errorbar(places, means, list(bars), marker="o", capsize=3)
    left.set_ylabel("accuracy (%), 95% intervals")
    has_speed = all(score.tokens_per_second for score in own)
    if has_speed:
        size = min(own[0].tokens_per_second)
        right.plot(places, [score.tokens_per_second[size] for score in own], marker="s", color="C1")
        right.set_ylabel(f"tokens per second, batch {size}")
    else:
        right.plot(places, [score.tokens_per_forward for score in own], marker="s", color="C1")
        right.set_ylabel("tokens per forward pass")
    right.set_ylim(bottom=0)
    for axis in (left, right):
        axis.set_xlabel(name)
        if min(places) > 0 and max(places) / min(places) >= 8:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
    return figure
