"""Histogram of the lengths of a data set, as numbers and as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np

NUM_BINS = 64


def histogram(prompt_lengths: np.ndarray, lengths: np.ndarray) -> dict[str, list[int]]:
    """Edges of the bins in tokens, and examples in each bin by prompt, response and whole length.

    Args:
        prompt_lengths: [N] tokens of each prompt.
        lengths: [N] tokens of each example, prompt and response.
    """
    width = max(1, -(-(int(lengths.max()) + 1) // NUM_BINS))
    edges = np.arange(NUM_BINS + 1) * width
    counts = {"prompt": prompt_lengths, "response": lengths - prompt_lengths, "total": lengths}
    return {"edges": edges.tolist(), **{name: np.histogram(of, edges)[0].tolist() for name, of in counts.items()}}


def draw(lengths: dict[str, list[int]], path: Path) -> None:
    """Write the histogram as a PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    edges = np.array(lengths["edges"])
    centres = (edges[:-1] + edges[1:]) / 2
    figure = Figure(figsize=(9, 6), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    for axes, name in zip(panels, ("prompt", "response", "total"), strict=True):
        counts = np.array(lengths[name])
        axes.bar(centres, counts, width=np.diff(edges), color="tab:blue")
        axes.set_ylabel(f"{name}\nexamples")
        mean = (counts * centres).sum() / max(1, counts.sum())
        axes.axvline(mean, color="tab:orange", label=f"mean about {mean:.0f} tokens")
        axes.legend(frameon=False)
    panels[-1].set_xlabel("tokens")
    panels[-1].set_xlim(0, max(edges[-1], 1))
    figure.savefig(path, dpi=120, metadata={"Software": None})
