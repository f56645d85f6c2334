"""Intervals and tests against slow references, and against what they promise on simulated answers."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from lit_refusion.comparison.statistics import RESAMPLES, difference, mcnemar, score_interval


def outcomes(*rows: str) -> np.ndarray:
    """[S, N] from rows like "+-+"."""
    return np.array([[sign == "+" for sign in row] for row in rows], np.float64)


def counted_mcnemar(wins: int, losses: int) -> Fraction:
    """The share of all splits of the discordant pairs that are at least as uneven, each coin thrown out in full."""
    total = wins + losses
    splits = [sum(coins) for coins in itertools.product((0, 1), repeat=total)]
    return Fraction(sum(abs(2 * heads - total) >= abs(wins - losses) for heads in splits), len(splits))


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (1, 0), (0, 1), (3, 3), (4, 3), (0, 7), (9, 2), (5, 6), (12, 1)])
def test_mcnemar_is_the_share_of_splits_at_least_as_uneven(wins: int, losses: int) -> None:
    assert mcnemar(wins, losses) == pytest.approx(float(counted_mcnemar(wins, losses)), abs=1e-12)


@pytest.mark.parametrize(("wins", "losses"), [(700, 600), (40, 0), (300, 300), (1, 900)])
def test_mcnemar_of_many_pairs_is_the_exact_sum(wins: int, losses: int) -> None:
    total = wins + losses
    tail = Fraction(2 * sum(math.comb(total, count) for count in range(min(wins, losses) + 1)), 2**total)
    assert mcnemar(wins, losses) == pytest.approx(float(min(tail, Fraction(1))), rel=1e-9)


def test_the_interval_of_one_seed_is_wilsons() -> None:
    """Wilson (1927): the shares p that lie within z standard errors, of p itself, of what was found."""
    found = score_interval(outcomes("+++-++-+++--+"), seed=0)
    assert found.value == 9 / 13
    for bound in (found.low, found.high):
        assert abs(9 / 13 - bound) == pytest.approx(1.959963984540054 * math.sqrt(bound * (1 - bound) / 13))


@pytest.mark.parametrize("row", ["++++++++", "--------"])
def test_seeds_that_all_agree_have_wilsons_interval(row: str) -> None:
    one, three = score_interval(outcomes(row), seed=0), score_interval(outcomes(row, row, row), seed=0)
    assert one == three
    assert three.high - three.low > 0.3


def slow_means(values: np.ndarray, *, count: int, seed: int) -> list[float]:
    """Means of resampled outcomes: draw seeds, draw prompts, add one outcome after the other."""
    rng = np.random.default_rng(seed)
    num_seeds, num_prompts = values.shape
    means = []
    for _ in range(count):
        seeds = [rng.integers(num_seeds) for _ in range(num_seeds)]
        prompts = [rng.integers(num_prompts) for _ in range(num_prompts)]
        means.append(sum(values[s, n] for s in seeds for n in prompts) / values.size)
    return means


def test_the_interval_of_several_seeds_is_a_bootstrap_over_seeds_and_prompts() -> None:
    values = outcomes("++++++++++", "+++++-----", "+--+-+-+--")
    found, slow = score_interval(values, seed=0), slow_means(values, count=3000, seed=1)
    assert found.value == values.mean()
    assert found.low == pytest.approx(np.quantile(slow, 0.025), abs=0.04)
    assert found.high == pytest.approx(np.quantile(slow, 0.975), abs=0.04)


def test_a_gain_has_the_bootstrap_interval_and_p_value_of_its_pairs() -> None:
    own, baseline = outcomes("++++++--++", "+++-++++-+"), outcomes("+-+-+---++", "++----+-++")
    found, slow = difference(own, baseline, seed=0), np.array(slow_means(own - baseline, count=3000, seed=1))
    assert found.gain.value == pytest.approx((own - baseline).mean())
    assert found.gain.low == pytest.approx(np.quantile(slow, 0.025), abs=0.04)
    assert found.gain.high == pytest.approx(np.quantile(slow, 0.975), abs=0.04)
    assert found.p_value == pytest.approx(2 * min((slow <= 0).mean(), (slow >= 0).mean()), abs=0.02)
    assert found.test == "bootstrap over seeds and prompts"


def test_the_gain_of_one_seed_is_tested_by_its_wins_and_losses() -> None:
    found = difference(outcomes("+++++++-+-"), outcomes("---+--++--"), seed=0)
    assert found.test == "exact McNemar"
    assert found.p_value == pytest.approx(float(counted_mcnemar(6, 1)))
    assert found.gain.value == pytest.approx(0.5)
    assert 0 < found.gain.low < found.gain.value < found.gain.high < 1


@pytest.mark.usefixtures("few_resamples")
@pytest.mark.parametrize("seeds", [1, 2])
def test_exchanging_the_arms_turns_the_gain_around(seeds: int) -> None:
    own, baseline = outcomes(*["+++++-+-"] * seeds), outcomes(*["-+--+-+-"] * seeds)
    one, two = difference(own, baseline, seed=3), difference(baseline, own, seed=3)
    assert one.gain.value == -two.gain.value > 0
    assert (one.gain.low, one.gain.high) == pytest.approx((-two.gain.high, -two.gain.low))
    assert one.p_value == two.p_value


@pytest.mark.usefixtures("few_resamples")
@pytest.mark.parametrize("seeds", [1, 3])
def test_arms_with_the_same_answers_do_not_differ(seeds: int) -> None:
    same = outcomes(*["++-+-"] * seeds)
    found = difference(same, same, seed=0)
    assert (found.gain.value, found.gain.low, found.gain.high, found.p_value) == (0, 0, 0, 1)


def test_a_bootstrap_does_not_claim_less_than_one_resample_in_all() -> None:
    found = difference(outcomes("+" * 40, "+" * 40), outcomes("-" * 40, "-" * 40), seed=0)
    assert found.p_value == 1 / RESAMPLES


@pytest.mark.usefixtures("few_resamples")
def test_the_same_seed_gives_the_same_figures() -> None:
    own, baseline = outcomes("++-+-+++", "+-++--++"), outcomes("-+-+-++-", "--++--+-")
    assert difference(own, baseline, seed=7) == difference(own, baseline, seed=7)
    assert score_interval(own, seed=7) == score_interval(own, seed=7)


@pytest.mark.usefixtures("few_resamples")
def test_19_of_20_intervals_hold_the_true_gain_and_1_of_20_equal_arms_looks_different() -> None:
    """Arms that share half of their luck, on 60 prompts, with a true gain of 0.2, then of 0."""
    rng, rounds, held, false_alarms = np.random.default_rng(0), 150, 0, 0
    for number in range(rounds):
        luck = rng.random((3, 60))
        drawn = [np.where(rng.random(60) < 0.5, luck[0], own)[None] for own in luck[1:]]
        found = difference((drawn[0] < 0.7).astype(float), (drawn[1] < 0.5).astype(float), seed=number)
        held += found.gain.low <= 0.2 <= found.gain.high
        false_alarms += difference((drawn[0] < 0.5) * 1.0, (drawn[1] < 0.5) * 1.0, seed=number).p_value < 0.05
    assert 0.89 <= held / rounds <= 0.99
    assert false_alarms / rounds <= 0.08


@pytest.mark.usefixtures("few_resamples")
def test_intervals_over_seeds_are_wider_than_over_prompts_where_seeds_differ() -> None:
    rng = np.random.default_rng(0)
    values = (rng.random((4, 200)) < np.array([[0.3], [0.5], [0.7], [0.9]])).astype(float)
    found, pooled = score_interval(values, seed=0), score_interval(values.reshape(1, -1), seed=0)
    assert found.high - found.low > 2 * (pooled.high - pooled.low)
