"""The plan: every epoch exact, every step full, and a pure function of (ranges, weights, seed, batch)."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import lcm

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_refusion.data.plan import Plan, Visit, accumulation, deal_by_length, deal_by_tokens, sequential
from lit_refusion.data.split import Range
from lit_refusion.errors import UserError

PROPERTY = settings(deadline=None, database=None, derandomize=True, max_examples=20)
SEEDS = st.integers(0, 2**32)
SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any)
MIXTURE = {"sizes": [10, 6, 8, 10], "weights": [0.0, 0.5, 2.0, 1.3]}
"""Epochs of 0 + 3 + 16 + 13 examples."""


def ranges(sizes: Sequence[int]) -> list[Range]:
    """Sources of these sizes, with a gap before each, where the held-out examples lie."""
    starts = np.cumsum([3, *(size + 3 for size in sizes)])
    return [(int(start), int(start) + size) for start, size in zip(starts, sizes)]


def make_plan(
    sizes: Sequence[int], weights: Sequence[float] | None = None, *, seed: int = 5, batch: int | None = None
) -> Plan:
    """A plan; by default a step is an epoch."""
    counts = [round(weight * size) for weight, size in zip(weights or [1.0] * len(sizes), sizes)]
    return Plan(ranges(sizes), weights=weights, seed=seed, global_batch_size=batch or sum(counts))


def numbers(sizes: Sequence[int]) -> list[int]:
    return [number for start, stop in ranges(sizes) for number in range(start, stop)]


def epochs(plan: Plan, count: int) -> list[list[Visit]]:
    """The first `count` epochs, whatever the steps."""
    flat = [visit for step in range(plan.num_steps(count)) for visit in plan.step(step)]
    return [flat[epoch * plan.epoch_size : (epoch + 1) * plan.epoch_size] for epoch in range(count)]


def pairs(visits: Sequence[Visit]) -> list[tuple[int, int]]:
    return [(visit.index, visit.epoch) for visit in visits]


# Epochs


@PROPERTY
@given(sizes=SIZES, seed=SEEDS, data=st.data())
def test_every_epoch_visits_every_example_once_and_every_step_is_full(
    sizes: list[int], seed: int, data: st.DataObject
) -> None:
    plan = make_plan(sizes, seed=seed, batch=data.draw(st.integers(1, sum(sizes))))
    assert {len(plan.step(number)) for number in range(plan.num_steps(3))} == {plan.global_batch_size}
    for epoch, visits in enumerate(epochs(plan, 3)):
        assert sorted(pairs(visits)) == [(number, epoch) for number in numbers(sizes)]


def test_weights_give_exact_counts_in_every_epoch() -> None:
    plan = make_plan(**MIXTURE, batch=5)
    assert plan.epoch_size == 32
    for visits in epochs(plan, 12):
        seen = Counter(visit.index for visit in visits)
        by_source = [
            [seen[number] for number in range(start, stop)] for start, stop in ranges([10, 6, 8, 10])
        ]  # how often each example of each source came
        assert [sum(times) for times in by_source] == [0, 3, 16, 13]
        assert all(max(times) - min(times) <= 1 for times in by_source[:3])  # two passes or half of one
        assert sum(seen.values()) == 32  # and nothing besides


@pytest.mark.parametrize(("weights", "period"), [([1.0, 1.0], 1), ([0.5, 2.0], 2), ([1.3, 0.5], 10), ([0.2, 0.3], 10)])
def test_all_examples_are_seen_equally_often_once_the_weights_come_out_even(weights: list[float], period: int) -> None:
    plan = make_plan([10, 20], weights, batch=3)
    counts = [round(weight * size) for weight, size in zip(weights, [10, 20])]
    # The period at which each source has gone through all of its examples
    assert lcm(*(Fraction(count, size).denominator for count, size in zip(counts, [10, 20]))) == period
    seen = Counter(visit.index for visits in epochs(plan, period) for visit in visits)
    for (start, stop), count, size in zip(ranges([10, 20]), counts, [10, 20]):
        assert {seen[number] for number in range(start, stop)} == {count * period // size}


def test_a_source_goes_on_where_it_stopped_in_the_epoch_before() -> None:
    """Half of a source an epoch: the two halves of a pass share no example."""
    first, second, third, fourth = ({v.index for v in visits} for visits in epochs(make_plan([20], [0.5]), 4))
    assert first | second == third | fourth == set(numbers([20]))
    assert not first & second
    assert first != third  # the halves are drawn anew


@PROPERTY
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    weights=st.lists(st.sampled_from([0.5, 1.0, 1.3, 2.0, 3.7]), min_size=3, max_size=3),
    seed=SEEDS,
)
def test_epoch_of_a_visit_says_how_often_the_example_was_seen_before(
    sizes: list[int], weights: list[float], seed: int
) -> None:
    sizes = [size + 1 for size in sizes]  # half of a single example rounds to none
    plan = make_plan(sizes, weights[: len(sizes)], seed=seed)
    passes: dict[int, list[int]] = {}
    for visits in epochs(plan, 5):
        for visit in visits:
            passes.setdefault(visit.index, []).append(visit.epoch)
    # Sorted, since the order within an epoch mixes its passes: no (example, epoch) twice, so no noise twice.
    assert all(sorted(found) == list(range(len(found))) for found in passes.values())
    assert sorted(passes) == numbers(sizes)


def test_weight_zero_never_shows_a_source_and_sources_without_examples_are_allowed() -> None:
    plan = make_plan([4, 5, 0], [0.0, 1.0, 2.0])
    start, stop = ranges([4, 5, 0])[1]
    assert sorted(pairs(plan.step(0))) == [(number, 0) for number in range(start, stop)]


def test_sources_are_mixed_over_the_epoch() -> None:
    """Each tenth of an epoch holds about the same share of either source."""
    plan = make_plan([1000, 3000])
    [visits] = epochs(plan, 1)
    border = ranges([1000, 3000])[1][0]
    shares = (np.array([visit.index for visit in visits]) < border).reshape(10, 400).mean(axis=1)
    assert np.abs(shares - 0.25).max() < 0.09  # four standard deviations


def test_steps_span_epochs() -> None:
    plan = make_plan([5], batch=4)
    assert [[visit.epoch for visit in plan.step(number)] for number in range(3)] == [
        [0, 0, 0, 0],
        [0, 1, 1, 1],
        [1, 1, 2, 2],
    ]


def test_order_is_shuffled_anew_by_epoch_and_by_seed() -> None:
    orders = [[visit.index for visit in visits] for visits in epochs(make_plan([50]), 3)]
    orders.append([visit.index for visit in make_plan([50], seed=6).step(0)])
    orders.append(numbers([50]))
    assert len({tuple(order) for order in orders}) == 5


# A pure function


@PROPERTY
@given(sizes=SIZES, seed=SEEDS, steps=st.permutations(range(4)), data=st.data())
def test_a_step_depends_on_its_number_alone(sizes: list[int], seed: int, steps: list[int], data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, sum(sizes)))
    plan = make_plan(sizes, seed=seed, batch=batch)
    in_order = [plan.step(number) for number in range(4)]
    assert [plan.step(number) for number in steps] == [in_order[number] for number in steps]
    assert [make_plan(sizes, seed=seed, batch=batch).step(number) for number in steps] == [in_order[n] for n in steps]


@pytest.mark.parametrize("batch", [1, 3, 12, 20, 32])
def test_sequence_does_not_depend_on_the_batch_size(batch: int) -> None:
    whole = [pair for visits in epochs(make_plan(**MIXTURE), 5) for pair in pairs(visits)]
    assert [pair for visits in epochs(make_plan(**MIXTURE, batch=batch), 5) for pair in pairs(visits)] == whole


def test_visits_know_their_step_and_place() -> None:
    plan = make_plan([9], batch=4)
    assert [(v.step, v.place) for n in (0, 7) for v in plan.step(n)] == [(n, p) for n in (0, 7) for p in range(4)]


def test_sequence_never_changes() -> None:
    """A change here would train every published run on another order."""
    plan = Plan([(2, 5), (7, 10)], weights=[1.0, 0.7], seed=5, global_batch_size=5)
    assert [pairs(plan.step(number)) for number in range(3)] == [
        [(3, 0), (4, 0), (9, 0), (2, 0), (8, 0)],
        [(4, 1), (2, 1), (8, 1), (7, 0), (3, 1)],
        [(3, 2), (2, 2), (9, 1), (7, 1), (4, 2)],
    ]
    plan = Plan([(0, 10**9), (10**9, 10**9 + 10**6)], weights=None, seed=2**63, global_batch_size=4)
    assert pairs(plan.step(10**9)) == [(536541015, 3), (989282356, 3), (957341488, 3), (590568511, 3)]


def test_a_plan_over_a_billion_examples_takes_no_memory() -> None:
    tracemalloc.start()
    plan = Plan([(0, 6 * 10**8), (7 * 10**8, 10**9)], weights=[1.5, 0.3], seed=0, global_batch_size=256)
    seen: list[Visit] = []
    for number in (0, 1, 10**6, 4 * 10**6, 10**9):
        seen = plan.step(number)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len({visit.index for visit in seen}) == 256
    # 256 x 10^9 places are 258.6 epochs of 990 million: 387.9 passes of the first source, 77.6 of the second
    assert {visit.epoch for visit in seen} == {387, 388, 77}
    assert peak < 2**20


# Sizes


@pytest.mark.parametrize(("epochs", "steps"), [(1, 2), (2, 3), (0.1, 1), (4, 5), (4.1, 6)])
def test_num_steps_is_rounded_up(epochs: float, steps: int) -> None:
    assert make_plan([4, 6], batch=8).num_steps(epochs) == steps


def test_num_steps_counts_weighted_epochs() -> None:
    assert make_plan(**MIXTURE, batch=8).num_steps(3) == 3 * 32 // 8


@pytest.mark.parametrize(("sizes", "weights"), [([], []), ([0, 0], None), ([4, 0], [0.0, 1.0])])
def test_no_training_examples_is_an_error(sizes: list[int], weights: list[float] | None) -> None:
    with pytest.raises(UserError, match=r"no training examples are left; lower loader\.validation_fraction"):
        make_plan(sizes, weights, batch=1)


@pytest.mark.parametrize(("sizes", "weights", "size"), [([4, 6], None, 10), ([10, 6, 8, 10], MIXTURE["weights"], 32)])
def test_a_step_larger_than_an_epoch_is_refused(sizes: list[int], weights: list[float] | None, size: int) -> None:
    assert len(make_plan(sizes, weights, batch=size).step(0)) == size
    message = rf"trainer\.global_batch_size={size + 1}: larger than the {size} training examples of an epoch"
    with pytest.raises(UserError, match=message):
        make_plan(sizes, weights, batch=size + 1)


# Micro-batches


def by_length(visits: Sequence[Visit], lengths: np.ndarray, *, count: int) -> list[list[Visit]]:
    """`deal_by_length` on the most ranks that divide the micro-batches and accumulate two or more."""
    return deal_by_length(visits, lengths, count=count, world_size=max(1, count // 2))


def lengths_of(hands: Sequence[Sequence[Visit]], lengths: np.ndarray) -> list[list[int]]:
    return [[int(lengths[visit.place]) for visit in hand] for hand in hands]


def visits_of(lengths: np.ndarray) -> list[Visit]:
    return [Visit(10 + place, 0, 0, place) for place in range(len(lengths))]


@pytest.mark.parametrize("deal", [deal_by_tokens, by_length])
@PROPERTY
@given(per_hand=st.integers(1, 4), count=st.sampled_from([1, 2, 4, 8]), number=st.integers(0, 5), data=st.data())
def test_each_micro_batch_gets_as_many_examples_and_none_is_lost(
    deal: Callable[..., list[list[Visit]]], per_hand: int, count: int, number: int, data: st.DataObject
) -> None:
    size = per_hand * count
    lengths = np.array(data.draw(st.lists(st.integers(1, 300), min_size=size, max_size=size)))
    step = make_plan([size, 5], batch=size).step(number)
    hands = deal(step, lengths, count=count)
    assert [len(hand) for hand in hands] == [per_hand] * count
    assert sorted((visit for hand in hands for visit in hand), key=lambda visit: visit.place) == step
    assert deal(step, lengths, count=count) == hands


@pytest.mark.parametrize("deal", [deal_by_tokens, by_length])
@pytest.mark.parametrize("count", [3, 5, 16])
def test_micro_batches_refuse_an_uneven_deal(deal: Callable[..., list[list[Visit]]], count: int) -> None:
    with pytest.raises(AssertionError, match=f"8 examples do not divide into {count} micro-batches"):
        deal(make_plan([10], batch=8).step(0), np.ones(8, np.int64), count=count)


@PROPERTY
@given(per_hand=st.integers(1, 4), count=st.sampled_from([1, 2, 3, 4, 8]), data=st.data())
def test_dealing_by_tokens_shares_them_out_evenly(per_hand: int, count: int, data: st.DataObject) -> None:
    size = per_hand * count
    lengths = np.array(data.draw(st.lists(st.integers(1, 300), min_size=size, max_size=size)))
    sums = [sum(hand) for hand in lengths_of(deal_by_tokens(visits_of(lengths), lengths, count=count), lengths)]
    assert max(sums) - min(sums) <= lengths.max()


def test_dealing_by_tokens_gives_the_longest_to_the_lightest_micro_batch_with_room() -> None:
    lengths = np.array([4, 8, 1, 7, 2, 6, 3, 5])
    hands = deal_by_tokens(visits_of(lengths), lengths, count=2)
    assert lengths_of(hands, lengths) == [[8, 5, 4, 1], [7, 6, 3, 2]]
    lengths[1] = 100  # the other micro-batch fills up, and the rest must go to the heavy one
    hands = deal_by_tokens(visits_of(lengths), lengths, count=2)
    assert lengths_of(hands, lengths) == [[100, 3, 2, 1], [7, 6, 5, 4]]


@PROPERTY
@given(per_hand=st.integers(1, 4), turns=st.integers(1, 4), world_size=st.integers(1, 4), data=st.data())
def test_dealing_by_length_keeps_like_lengths_together(
    per_hand: int, turns: int, world_size: int, data: st.DataObject
) -> None:
    size = per_hand * turns * world_size
    lengths = np.array(data.draw(st.lists(st.integers(1, 300), min_size=size, max_size=size)))
    hands = deal_by_length(visits_of(lengths), lengths, count=turns * world_size, world_size=world_size)
    falling = sorted(lengths.tolist(), reverse=True)
    cut = [falling[first : first + per_hand] for first in range(0, size, per_hand)]  # the least padding there is
    dealt = lengths_of(hands, lengths)
    assert sorted(dealt) == sorted(cut)
    for turn in range(turns):  # those that run at the same time are neighbours
        at_once = slice(turn * world_size, (turn + 1) * world_size)
        assert sorted(dealt[at_once]) == sorted(cut[at_once])


def test_dealing_by_length_runs_through_the_ranks_to_and_fro() -> None:
    lengths = np.array([4, 8, 1, 7, 2, 6, 3, 5, 9, 10, 11, 12])
    hands = lengths_of(deal_by_length(visits_of(lengths), lengths, count=6, world_size=2), lengths)
    turns = [hands[:2], hands[2:4], hands[4:]]
    assert turns == [[[12, 11], [10, 9]], [[6, 5], [8, 7]], [[4, 3], [2, 1]]]


@pytest.mark.parametrize(("deal", "hands"), [(deal_by_tokens, [[9, 7], [4, 1]]), (by_length, [[9, 4], [7, 1]])])
def test_equal_lengths_are_dealt_in_plan_order(deal: Callable[..., list[list[Visit]]], hands: list[list[int]]) -> None:
    visits = [Visit(index, 0) for index in (9, 4, 7, 1)]
    assert [[visit.index for visit in hand] for hand in deal(visits, np.full(4, 3), count=2)] == hands


@pytest.mark.parametrize(("batch", "micro", "world", "expected"), [(8, 1, 1, 8), (8, 2, 4, 1), (48, 4, 3, 4)])
def test_accumulation_is_what_is_left_of_the_global_batch(batch: int, micro: int, world: int, expected: int) -> None:
    assert accumulation(global_batch_size=batch, micro_batch_size=micro, world_size=world) == expected


@pytest.mark.parametrize(("batch", "micro", "world"), [(8, 3, 1), (8, 2, 3), (8, 16, 1), (4, 2, 4), (0, 2, 1)])
def test_accumulation_refuses_a_global_batch_that_does_not_divide(batch: int, micro: int, world: int) -> None:
    message = (
        rf"trainer\.global_batch_size={batch} is not a multiple of loader\.micro_batch_size={micro} x {world} "
        rf"devices = {micro * world}; change one of them"
    )
    with pytest.raises(UserError, match=message):
        accumulation(global_batch_size=batch, micro_batch_size=micro, world_size=world)


def test_sequential_keeps_the_order_and_every_example() -> None:
    found = sequential(np.array([7, 3, 9, 1, 4]), size=2)
    assert found == [[Visit(7, 0), Visit(3, 0)], [Visit(9, 0), Visit(1, 0)], [Visit(4, 0)]]
