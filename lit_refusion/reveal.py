"""Which hidden tokens to reveal after a forward pass: a ranking and a rule. Shapes: r candidates.

Every rule reveals at least one candidate, so decoding always ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from lit_refusion.engine.request import Reply
from lit_refusion.errors import UserError
from lit_refusion.generation import Generation, Step

Ranking = Literal["confidence", "margin", "entropy", "random"]


def rank(reply: Reply, ranking: Ranking, rng: np.random.Generator) -> np.ndarray:
    """[r] score of each candidate, larger = reveal earlier.

    confidence: probability of the candidate token; margin: difference of the two largest probabilities; entropy:
    negative entropy; random.
    """
    if ranking == "confidence":
        return reply.p_token
    if ranking == "margin":
        return reply.margin
    if ranking == "entropy":
        return -reply.entropy
    return rng.random(len(reply.tokens))


def perturb(score: np.ndarray, temperature: float, rng: np.random.Generator) -> np.ndarray:
    """Scores whose order is a draw without replacement from softmax(score / temperature)."""
    return score / temperature + rng.gumbel(size=len(score)) if temperature > 0 else score


def reveal_quota(score: np.ndarray, count: int) -> np.ndarray:
    """[r] bool: the `count` best."""
    chosen = np.zeros(len(score), bool)
    chosen[np.argsort(-score, kind="stable")[: max(1, count)]] = True
    return chosen


def reveal_threshold(score: np.ndarray, threshold: float, *, minimum: int = 1, strict: bool = False) -> np.ndarray:
    """[r] bool: all that reach the threshold (exceed it, if strict), and the `minimum` best in any case."""
    reached = score > threshold if strict else score >= threshold
    return reached | reveal_quota(score, minimum)


def reveal_factor(score: np.ndarray, factor: float) -> np.ndarray:
    """[r] bool: the n best, n the largest with (i + 1)(1 - c_i) <= factor for all i <= n (arXiv 2505.22618)."""
    ordered = np.sort(score)[::-1]
    holds = (np.arange(len(score)) + 2) * (1 - ordered) <= factor
    return reveal_quota(score, int(np.cumprod(holds).sum()))


def reveal_entropy_bound(score: np.ndarray, entropy: np.ndarray, bound: float) -> np.ndarray:
    """[r] bool: the longest prefix in score order whose entropies sum, less the largest, to at most `bound`.

    EB-Sampler (arXiv 2505.24857): the sum less the maximum bounds the error of drawing the tokens independently.
    """
    ordered = entropy[np.argsort(-score, kind="stable")]
    error = np.cumsum(ordered) - np.maximum.accumulate(ordered)
    return reveal_quota(score, int((error <= bound).sum()))


def quotas(num_hidden: int, num_steps: int) -> np.ndarray:
    """[num_steps] tokens to reveal in each step: an equal split, the remainder first (arXiv 2502.09992)."""
    base, rest = divmod(num_hidden, num_steps)
    return base + (np.arange(num_steps) < rest)


def time_quota(num_hidden: int, step: int, num_steps: int, *, eps: float = 1e-3) -> int:
    """Tokens to reveal in step `step`: int(n (1 - s/t)) on a linear time grid, all in the last (arXiv 2508.15487)."""
    if step >= num_steps - 1:
        return num_hidden
    grid = np.linspace(1, eps, num_steps + 1)
    return int(num_hidden * (1 - grid[step + 1] / grid[step]))


def leading(flags: np.ndarray) -> int:
    """Length of the leading run of True."""
    return len(flags) if flags.all() else int(flags.argmin())


def ended_at(response: np.ndarray, eos_token_id: int, hidden: int) -> int | None:
    """Place of the first end-of-sequence token once nothing before it is hidden, else None."""
    ends = np.flatnonzero(response == eos_token_id)
    if len(ends) == 0 or (response[: ends[0]] == hidden).any():
        return None
    return int(ends[0])


def finish(response: np.ndarray, end: int | None, steps: Sequence[Step], *, hidden: int) -> Generation:
    """The Generation of a canvas, cut at `end`; only a response that ended may have left something hidden behind."""
    assert end is not None or (response != hidden).all(), "a token was left hidden"
    revealed = response[response != hidden]
    return Generation(
        tokens=tuple((revealed if end is None else response[: end + 1]).tolist()),
        uncut_tokens=tuple(revealed.tolist()),
        forward_passes=len(steps),
        stop="length" if end is None else "eos",
        steps=tuple(steps),
    )


def check_threshold(threshold: float | None, ranking: Ranking) -> None:
    """Refuse a threshold that no score of this ranking can be compared with."""
    if threshold is not None and not (0 <= threshold <= 1 and ranking in ("confidence", "margin")):
        raise UserError(
            f"decoder.threshold={threshold}: must lie in [0, 1], with ranking confidence or margin, found "
            f"ranking={ranking}"
        )
