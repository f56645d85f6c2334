"""What a set of answers says of a model and its decoder."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_refusion.evaluation.answers import Answer

COUNTED = (
    "problems", "correct", "invalid", "tokens", "forward_passes", "no_eos", "early_eos", "repeated_eos",
    "text_after_eos",
)  # fmt: skip
CONFIDENCE = 1.959963984540054
"""Standard deviations of a 95% interval."""


class AnswerMeter(Metric):
    """Sums over answers; reduced over ranks when computed.

    Tokens per forward pass is all tokens / all passes, and not a mean of ratios. `early_eos` counts answers that are
    nothing but an end of sequence.
    """

    full_state_update = False
    sums: Tensor

    def __init__(self, *, sync_on_compute: bool = True) -> None:
        super().__init__(sync_on_compute=sync_on_compute)
        self.add_state("sums", torch.zeros(len(COUNTED), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, answer: Answer) -> None:
        """Add an answer."""
        values = (
            1, answer.is_correct, answer.answer is None, answer.tokens, answer.forward_passes, answer.stop != "eos",
            answer.stop == "eos" and answer.tokens <= 1, answer.repeats_eos, answer.goes_on,
        )  # fmt: skip
        self.sums += torch.tensor(values, dtype=torch.float64, device=self.sums.device)

    def compute(self) -> dict[str, float]:
        """Figures by name; shares are of all problems."""
        sums = dict(zip(COUNTED, self.sums.tolist(), strict=True))
        count = sums["problems"]
        low, high = wilson(sums["correct"], count)
        shares = {name: sums[name] / max(1, count) for name in ("invalid", *COUNTED[5:])}
        return {
            "problems": count,
            "accuracy": sums["correct"] / max(1, count),
            "accuracy_low": low,
            "accuracy_high": high,
            "tokens_per_forward": sums["tokens"] / max(1, sums["forward_passes"]),
            "tokens_per_answer": sums["tokens"] / max(1, count),
            "forward_passes_per_answer": sums["forward_passes"] / max(1, count),
            **shares,
        }


def wilson(correct: float, count: float) -> tuple[float, float]:
    """Bounds of a 95% interval of a share (Wilson 1927); (0, 1) where nothing was counted."""
    if count == 0:
        return 0.0, 1.0
    share, z2 = correct / count, CONFIDENCE**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = CONFIDENCE / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def figures(answers: Iterable[Answer]) -> dict[str, float]:
    """The figures of answers in one process, with the means of the decoder's own statistics."""
    answers, meter = list(answers), AnswerMeter(sync_on_compute=False)
    for answer in answers:
        meter.update(answer)
    names = sorted({name for answer in answers for name in answer.statistics})
    means = {name: sum(answer.statistics.get(name, 0.0) for answer in answers) / max(1, len(answers)) for name in names}
    return {**meter.compute(), **means}
