"""Pictures, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def pyplot() -> Any | None:
    """matplotlib's pyplot without a display, in colours that the colour-blind can tell apart; None where it is not."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.style.use("tableau-colorblind10")
    return plt


def reach(value: float, low: float, high: float) -> tuple[float, float]:
    """How far an interval of a share reaches down and up, in percent, as error bars want it."""
    return 100 * max(0.0, value - low), 100 * max(0.0, high - value)


def save(figure: Any, path: Path) -> Path:
    """Write a PNG in one rename, and close the figure."""
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(path)
    plt.close(figure)
    return path
