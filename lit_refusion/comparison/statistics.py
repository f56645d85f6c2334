"""Uncertainty of scores: intervals over prompts and seeds, and paired tests on the same prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lit_refusion.evaluation.meter import wilson

RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate with the bounds of its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """An arm against the baseline on the same prompts.

    Args:
        gain: score of the arm less that of the baseline, with its interval.
        p_value: of no difference, two-sided.
        test: how it was found.
    """

    gain: Interval
    p_value: float
    test: str


def score_interval(correct: np.ndarray, *, seed: int) -> Interval:
    """Mean score of [S, N] outcomes, of S seeds on the same N prompts.

    Of one seed the interval is Wilson's (1927). Of several it is a percentile bootstrap that draws both seeds and
    prompts anew, so it holds the spread of training as well; of few seeds it tends to be too narrow. Where all seeds
    have the same outcomes there is nothing to draw from, and Wilson's interval stands in.
    """
    value = float(correct.mean())
    if (correct == correct[0]).all():
        return Interval(value, *wilson(float(correct[0].sum()), correct.shape[1]))
    return Interval(value, *_bounds(_resampled(correct, seed=seed)))


def difference(own: np.ndarray, baseline: np.ndarray, *, seed: int) -> Difference:
    """Compare [S, N] outcomes with the baseline's, pair by pair.

    Of one seed: the exact McNemar test (1947), and a bootstrap interval over prompts. Of several: a bootstrap over
    seeds and prompts for both.
    """
    pairs = own.astype(np.float64) - baseline
    means = _resampled(pairs, seed=seed)
    gain = Interval(float(pairs.mean()), *_bounds(means))
    if len(pairs) == 1:
        return Difference(gain, mcnemar(int((pairs > 0).sum()), int((pairs < 0).sum())), "exact McNemar")
    below, above = float((means <= 0).mean()), float((means >= 0).mean())
    least = 1 / RESAMPLES  # what so many resamples can tell
    return Difference(gain, min(1.0, max(least, 2 * min(below, above))), "bootstrap over seeds and prompts")


def mcnemar(wins: int, losses: int) -> float:
    """Two-sided p-value of the exact McNemar test: how odd the split of the discordant pairs is for a fair coin."""
    total, fewer = wins + losses, min(wins, losses)
    if total == 0:
        return 1.0
    logs = [math.lgamma(total + 1) - math.lgamma(i + 1) - math.lgamma(total - i + 1) for i in range(fewer + 1)]
    tail = math.fsum(math.exp(log - total * math.log(2)) for log in logs)
    return min(1.0, 2 * tail)


def _resampled(values: np.ndarray, *, seed: int) -> np.ndarray:
    """[RESAMPLES] means of [S, N] values with seeds and prompts drawn with replacement."""
    rng = np.random.default_rng(seed)
    num_seeds, num_prompts = values.shape
    means = np.empty(RESAMPLES)
    for number in range(RESAMPLES):
        prompts = np.bincount(rng.integers(num_prompts, size=num_prompts), minlength=num_prompts)
        drawn = values if num_seeds == 1 else values[rng.integers(num_seeds, size=num_seeds)]
        means[number] = (drawn @ prompts).mean() / num_prompts
    return means


def _bounds(means: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
