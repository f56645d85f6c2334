"""The plan: every epoch whole, every step full, and a pure function of (indices, lengths, seed, batch)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_refusion.data.plan import Plan, Visit, accumulation, sequential
from lit_refusion.errors import UserError

PROPERTY = settings(deadline=None, database=None, derandomize=True, max_examples=60)
SEEDS = st.integers(0, 2**32)


def make_plan(num_examples: int, *, seed: int = 5, batch: int = 8, first: int = 0) -> Plan:
    """A plan over every third example from `first` on, with lengths from 1 to 50."""
    indices = first + 3 * np.arange(num_examples)
    lengths = np.random.default_rng(1).integers(1, 51, size=int(indices[-1]) + 1)
    return Plan(indices, lengths, seed=seed, global_batch_size=batch)


def visits(plan: Plan, num_steps: int) -> list[Visit]:
    return [visit for number in range(num_steps) for visit in plan.step(number)]


@PROPERTY
@given(num_examples=st.integers(1, 30), batch=st.integers(1, 40), seed=SEEDS)
def test_every_epoch_visits_every_example_once_and_every_step_is_full(num_examples: int, batch: int, seed: int) -> None:
    plan = make_plan(num_examples, seed=seed, batch=batch, first=2)
    steps = [plan.step(number) for number in range(plan.num_steps(3))]
    assert {len(step) for step in steps} == {batch}
    flat = [visit for step in steps for visit in step]
    assert len(flat) >= 3 * num_examples
    for epoch in range(3):
        seen = flat[epoch * num_examples : (epoch + 1) * num_examples]
        assert sorted(visit.index for visit in seen) == plan.indices.tolist()
        assert {visit.epoch for visit in seen} == {epoch}


@PROPERTY
@given(num_examples=st.integers(1, 30), batch=st.integers(1, 40), seed=SEEDS, numbers=st.permutations(range(8)))
def test_a_step_depends_on_its_number_alone(num_examples: int, batch: int, seed: int, numbers: list[int]) -> None:
    plan = make_plan(num_examples, seed=seed, batch=batch)
    in_order = [plan.step(number) for number in range(8)]
    assert {number: make_plan(num_examples, seed=seed, batch=batch).step(number) for number in numbers} == dict(
        enumerate(in_order)
    )
    assert [plan.step(number) for number in numbers] == [in_order[number] for number in numbers]


def test_steps_span_epochs() -> None:
    plan = make_plan(5, batch=4)
    assert [[visit.epoch for visit in plan.step(number)] for number in range(3)] == [
        [0, 0, 0, 0],
        [0, 1, 1, 1],
        [1, 1, 2, 2],
    ]


def test_order_is_shuffled_anew_by_epoch_and_by_seed() -> None:
    plan = make_plan(50, batch=50)
    orders = [[visit.index for visit in plan.step(epoch)] for epoch in range(3)]
    orders.append([visit.index for visit in make_plan(50, batch=50, seed=6).step(0)])
    orders.append(plan.indices.tolist())
    assert len({tuple(order) for order in orders}) == 5


def test_order_does_not_depend_on_the_batch_size() -> None:
    small, large = visits(make_plan(10, batch=4), 15), visits(make_plan(10, batch=12), 5)
    assert [(v.index, v.epoch) for v in small] == [(v.index, v.epoch) for v in large]


def test_order_never_changes() -> None:
    """A change here would train every published run on another order."""
    plan = Plan(np.arange(6), np.ones(6, np.int64), seed=5, global_batch_size=6)
    assert [[visit.index for visit in plan.step(epoch)] for epoch in (0, 1)] == [
        [3, 0, 5, 2, 4, 1],
        [0, 3, 5, 4, 1, 2],
    ]


@pytest.mark.parametrize(("epochs", "steps"), [(1, 2), (2, 3), (0.1, 1), (4, 5), (4.1, 6)])
def test_num_steps_is_rounded_up(epochs: float, steps: int) -> None:
    assert make_plan(10, batch=8).num_steps(epochs) == steps


def test_no_training_examples_is_an_error() -> None:
    with pytest.raises(UserError, match=r"no training examples are left; lower loader\.validation_fraction"):
        Plan(np.zeros(0, np.int64), np.ones(3), seed=0, global_batch_size=1)


# Micro-batches


@PROPERTY
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=30),
    per_hand=st.integers(1, 4),
    count=st.sampled_from([1, 2, 4, 8]),
    number=st.integers(0, 5),
)
def test_micro_batches_share_a_step_out_evenly(lengths: list[int], per_hand: int, count: int, number: int) -> None:
    tokens = np.array(lengths)
    plan = Plan(np.arange(len(lengths)), tokens, seed=3, global_batch_size=per_hand * count)
    hands = plan.micro_batches(number, count=count)
    assert [len(hand) for hand in hands] == [per_hand] * count
    step = plan.step(number)

    def key(visit: Visit) -> tuple[int, int]:
        return visit.epoch, visit.index

    assert sorted((visit for hand in hands for visit in hand), key=key) == sorted(step, key=key)
    sums = [sum(int(tokens[visit.index]) for visit in hand) for hand in hands]
    assert max(sums) - min(sums) <= max(int(tokens[visit.index]) for visit in step)
    fresh = Plan(np.arange(len(lengths)), tokens, seed=3, global_batch_size=per_hand * count)
    assert fresh.micro_batches(number, count=count) == hands


def test_longest_goes_first_to_the_lightest_micro_batch_with_room() -> None:
    lengths = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8])
    plan = Plan(np.arange(1, 9), lengths, seed=0, global_batch_size=8)
    dealt = [[visit.index for visit in hand] for hand in plan.micro_batches(0, count=2)]
    assert dealt == [[8, 5, 4, 1], [7, 6, 3, 2]]
    lengths[8] = 100  # the other micro-batch fills up, and the rest must go to the heavy one
    dealt = [[visit.index for visit in hand] for hand in plan.micro_batches(0, count=2)]
    assert dealt == [[8, 3, 2, 1], [7, 6, 5, 4]]


@pytest.mark.parametrize("count", [3, 5, 16])
def test_micro_batches_refuse_an_uneven_deal(count: int) -> None:
    with pytest.raises(AssertionError, match=f"8 examples do not divide into {count} micro-batches"):
        make_plan(10, batch=8).micro_batches(0, count=count)


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
