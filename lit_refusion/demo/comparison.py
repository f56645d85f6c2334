"""Decoding held-out problems with several models, and the table and plot that come of it."""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from lit_refusion.decoder import Decoder
from lit_refusion.export import LoadedModel
from lit_refusion.generation import Generation

LAST_NUMBER = re.compile(r"-?\d+(?!.*\d)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Score:
    """What one model did on the held-out problems.

    Args:
        arm: name of the arm.
        num_problems: problems decoded.
        num_right: problems whose last number is the answer.
        tokens_per_second: by batch size; total tokens / total seconds.
        tokens_per_forward: total tokens / total forward passes.
        texts: decoded responses.
    """

    arm: str
    num_problems: int
    num_right: int
    tokens_per_second: dict[int, float]
    tokens_per_forward: float
    texts: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def score(
    arm: str,
    model: LoadedModel,
    decoder: Decoder,
    problems: Sequence[dict[str, str]],
    *,
    num_singles: int,
) -> Score:
    """Decode all problems in batches, and the first `num_singles` of them one by one to time batch 1."""
    decoder = decoder.fit_to(model.spec)
    conversations = [[{"role": "user", "content": problem["query"]}] for problem in problems]
    prompts = model.prompt_format.encode_prompts(model.tokenizer, conversations)
    decoder.generate(model.backbone, prompts[:1])  # first calls are slower
    together, batch_speed = _timed(decoder, model, prompts)
    _, single_speed = _timed(replace(decoder, batch_size=1), model, prompts[:num_singles])
    texts = [str(model.tokenizer.decode(list(g.tokens), skip_special_tokens=True)) for g in together]
    return Score(
        arm=arm,
        num_problems=len(problems),
        num_right=sum(is_right(text, problem["answer"]) for text, problem in zip(texts, problems)),
        tokens_per_second={1: single_speed, decoder.batch_size: batch_speed},
        tokens_per_forward=sum(len(g.tokens) for g in together) / sum(g.forward_passes for g in together),
        texts=texts,
    )


def is_right(text: str, answer: str) -> bool:
    """Whether the last number in the text is the answer."""
    found = LAST_NUMBER.search(text)
    return found is not None and found.group() == answer


def _timed(decoder: Decoder, model: LoadedModel, prompts: list[list[int]]) -> tuple[list[Generation], float]:
    start = time.perf_counter()
    generations = decoder.generate(model.backbone, prompts)
    return generations, sum(len(g.tokens) for g in generations) / (time.perf_counter() - start)


def table(scores: Sequence[Score]) -> Table:
    """The scores side by side."""
    result = Table(title=f"{scores[0].num_problems} held-out problems")
    result.add_column("arm")
    sizes = list(scores[0].tokens_per_second)
    for heading in ("exact match", *(f"tokens/s, batch {size}" for size in sizes), "tokens per forward pass"):
        result.add_column(heading, justify="right")
    for item in scores:
        result.add_row(
            item.arm,
            f"{item.num_right / item.num_problems:.1%}",
            *(f"{item.tokens_per_second[size]:.0f}" for size in sizes),
            f"{item.tokens_per_forward:.2f}",
        )
    return result


def plot_losses(runs: dict[str, Path], path: Path) -> None:
    """Unweighted cross-entropy per term over training steps, one panel per arm, as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(runs), figsize=(5 * len(runs), 3.6), sharey=True, squeeze=False)
    for axis, (arm, run) in zip(axes[0], runs.items()):
        with (run / "metrics.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        for color, name in enumerate(sorted(name for name in rows[0] if re.fullmatch(r"val/ce/\w+", name))):
            for stage, style in (("train", {"alpha": 0.35, "lw": 1}), ("val", {"lw": 2})):
                points = [(int(row["step"]), float(row[key])) for row in rows if row.get(key := stage + name[3:])]
                axis.plot(*zip(*points), color=f"C{color}", label=f"{name[7:]}, {stage}", **style)
        axis.set(title=arm, xlabel="optimizer step", yscale="log")
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize="small")
    axes[0][0].set_ylabel("cross-entropy per token (nats)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
