"""Permutations and hashes that are computed where they are needed: exact, well mixed, and the same for ever."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_refusion.data.permutation import Permutation, mix

PROPERTY = settings(deadline=None, database=None, derandomize=True, max_examples=30)
SEEDS = st.integers(0, 2**32)
WORD = 2**64


def draw(size: int, seed: int = 0) -> Permutation:
    return Permutation.draw(size, np.random.default_rng(seed))


def values(permutation: Permutation) -> list[int]:
    return permutation(np.arange(permutation.size)).tolist()


# Permutations


@PROPERTY
@given(size=st.integers(1, 3000), seed=SEEDS)
def test_every_value_comes_exactly_once(size: int, seed: int) -> None:
    assert sorted(values(draw(size, seed))) == list(range(size))


# The network covers a power of four; its edges are where an off-by-one would lose or double a value.
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097, 2**16 + 1])
def test_every_value_comes_exactly_once_at_the_edges_of_the_powers_of_two(size: int) -> None:
    for seed in range(3):
        found = draw(size, seed)(np.arange(size))
        assert (np.bincount(found, minlength=size) == 1).all()
        assert found.dtype == np.int64


@PROPERTY
@given(size=st.integers(1, 3000), seed=SEEDS, data=st.data())
def test_any_places_can_be_asked_for_in_any_order(size: int, seed: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    whole = values(draw(size, seed))
    assert draw(size, seed)(np.array(places, np.int64)).tolist() == [whole[place] for place in places]


def test_the_places_asked_for_are_left_alone() -> None:
    places = np.arange(100)
    draw(100)(places)
    assert places.tolist() == list(range(100))


def test_other_keys_give_another_permutation() -> None:
    assert len({tuple(values(draw(100, seed))) for seed in range(50)}) == 50
    keys = draw(100).keys
    for place in range(len(keys)):  # each round's key matters
        changed = keys.copy()
        changed[place] += np.uint64(1)
        assert values(Permutation(100, changed)) != values(Permutation(100, keys))


def test_all_orders_of_four_values_are_about_equally_likely() -> None:
    rng = np.random.default_rng(0)
    found = Counter(tuple(values(Permutation.draw(4, rng))) for _ in range(960))
    assert set(found) == set(itertools.permutations(range(4)))
    chi_square = sum((count - 40) ** 2 / 40 for count in found.values())
    assert chi_square < 60  # 23 expected, with a standard deviation of 7


def test_neighbours_are_scattered() -> None:
    """As far apart on average as two random values: a third of the size."""
    found = draw(100_000)(np.arange(100_000))
    assert abs(np.abs(np.diff(found)).mean() / 100_000 - 1 / 3) < 0.01
    assert abs(np.corrcoef(np.arange(100_000), found)[0, 1]) < 0.02
    firsts = np.array([draw(1000, seed)(np.arange(1))[0] for seed in range(2000)])
    assert np.bincount(firsts // 100).min() > 140  # 200 expected in each tenth


def test_a_huge_permutation_takes_no_memory() -> None:
    size = 3 * 10**12
    tracemalloc.start()
    found = draw(size)(np.arange(size - 1000, size))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(np.unique(found)) == 1000
    assert 0 <= found.min() < found.max() < size
    assert peak < 2**20


def test_permutations_never_change() -> None:
    """A change here would train every published run on another order."""
    keys = np.arange(8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert values(Permutation(10, keys)) == [6, 4, 5, 1, 9, 7, 2, 0, 8, 3]
    places = np.array([0, 1, 2, 10**9 - 1])
    assert Permutation(10**9, keys)(places).tolist() == [97001043, 321764588, 170071154, 248284466]
    drawn = Permutation.draw(10, np.random.Generator(np.random.Philox(key=5)))
    assert values(drawn) == [2, 4, 7, 1, 3, 5, 8, 0, 9, 6]


# Hashes


def reference_mix(key: int, seed: int) -> int:
    """`mix` with Python's integers, after the paper."""

    def finalise(word: int) -> int:
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
        return word ^ (word >> 31)

    return finalise(key ^ finalise((seed + 1) * 0x9E3779B97F4A7C15 % WORD))


@PROPERTY
@given(keys=st.lists(st.integers(0, WORD - 1), max_size=10), seed=st.integers(0, WORD))
def test_mix_is_the_published_finaliser(keys: list[int], seed: int) -> None:
    assert mix(np.array(keys, np.uint64), seed).tolist() == [reference_mix(key, seed) for key in keys]


def test_mix_never_changes() -> None:
    """A change here would choose other examples for every prepared subset."""
    keys = np.array([0, 1, 2**63, WORD - 1], np.uint64)
    assert [mix(keys, seed).tolist() for seed in (0, 1)] == [
        [5197578548964807871, 11385487063155714807, 4825662605679656087, 17492683508065611904],
        [14804455941960215590, 658006869215568080, 2914570993430457566, 11305189083003979001],
    ]


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_mix_keeps_different_keys_apart(seed: int) -> None:
    keys = np.concatenate([np.arange(50_000, dtype=np.uint64), np.arange(50_000, dtype=np.uint64) << np.uint64(40)])
    assert len(np.unique(mix(keys, seed))) == len(np.unique(keys))


def test_every_bit_of_mix_depends_on_every_bit_of_the_key() -> None:
    keys = np.random.default_rng(0).integers(0, WORD, 1000, dtype=np.uint64)
    bits = np.arange(64, dtype=np.uint64)
    for bit in bits:
        changed = mix(keys, 7) ^ mix(keys ^ (np.uint64(1) << bit), 7)
        flipped = ((changed[:, None] >> bits) & np.uint64(1)).mean(axis=0)
        assert 0.4 < flipped.min() < flipped.max() < 0.6


def test_seeds_order_the_keys_independently() -> None:
    keys = np.random.default_rng(0).integers(0, WORD, 10_000, dtype=np.uint64)
    ranks = np.array([np.argsort(np.argsort(mix(keys, seed))) for seed in range(4)] + [np.argsort(np.argsort(keys))])
    assert np.abs(np.corrcoef(ranks) - np.eye(5)).max() < 0.05
