"""The split and subsets by hash: ranges of a sorted data set, the same whatever else is in it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_refusion.data.shards import Manifest, Shards
from lit_refusion.data.split import Range, num_examples, numbers, smallest_keys, split
from tests.data.test_shards import ADDITIONS, OTHERS, ids, prepare_folder, sparse_folder

PROPERTY = settings(deadline=None, database=None, derandomize=True, max_examples=100)
TOP = 2**64 - 1
FEW_KEYS = st.sampled_from([0, 1, 5, 2**63 - 1, 2**63, TOP - 1, TOP])
"""Ties are frequent, and the ends of the range are among them."""
SOURCES = st.lists(st.lists(st.one_of(FEW_KEYS, st.integers(0, TOP)), max_size=8), min_size=1, max_size=4)


def keyed(sources: Sequence[Sequence[int]]) -> Any:
    """As much of a data set as the split looks at: the keys of each source, in order."""
    keys = [key for source in sources for key in sorted(source)]
    manifest = Manifest(sources=[{"name": str(place), "kept": len(source)} for place, source in enumerate(sources)])
    return SimpleNamespace(keys=np.array(keys, np.uint64), manifest=manifest)


def random_keys(*sizes: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, TOP, size, dtype=np.uint64, endpoint=True).tolist() for size in sizes]


def keys_of(shards: Any, ranges: Sequence[Range]) -> list[list[int]]:
    return [shards.keys[start:stop].tolist() for start, stop in ranges]


def slow_smallest(shards: Any, ranges: Sequence[Range], count: int) -> list[int]:
    """The numbers of the examples with the smallest keys; where keys are equal, of those that come first."""
    everything = [number for start, stop in ranges for number in range(start, stop)]
    return sorted(sorted(everything, key=lambda number: (int(shards.keys[number]), number))[:count])


# Split


@PROPERTY
@given(sources=SOURCES, fraction=st.floats(0, 1, exclude_max=True))
def test_sides_are_disjoint_complete_and_cut_by_key(sources: list[list[int]], fraction: float) -> None:
    shards = keyed(sources)
    train, validation = split(shards, fraction)
    assert len(train) == len(validation) == len(sources)
    assert sorted([*numbers(train), *numbers(validation)]) == list(range(len(shards.keys)))
    for source, trained, held_out in zip(sources, keys_of(shards, train), keys_of(shards, validation), strict=True):
        assert held_out == sorted(key for key in source if key < int(fraction * 2.0**64))
        assert sorted([*held_out, *trained]) == sorted(source)


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_the_share_held_out_is_near_the_fraction(fraction: float) -> None:
    sources = random_keys(20_000, 5_000)
    train, validation = split(keyed(sources), fraction)
    for held_out, trained, size in zip(validation, train, (20_000, 5_000)):
        assert num_examples([held_out]) + num_examples([trained]) == size
        assert abs(num_examples([held_out]) - fraction * size) <= 4 * np.sqrt(size * fraction * (1 - fraction))


def test_what_is_held_out_grows_with_the_fraction() -> None:
    shards = keyed(random_keys(300, 200))
    held_out = [set(numbers(split(shards, fraction)[1]).tolist()) for fraction in (0.0, 0.1, 0.3, 0.6, 1 - 2**-53)]
    assert held_out[0] == set()
    assert all(smaller < larger for smaller, larger in pairwise(held_out))
    assert len(held_out[-1]) == 500  # every key but the very largest 2048


def test_the_split_of_a_source_does_not_depend_on_the_other_sources() -> None:
    first, second, third = random_keys(50, 60, 70)
    alone = keyed([second])
    together = keyed([first, second, third])
    for one, all_ in zip(split(alone, 0.3), split(together, 0.3)):
        assert keys_of(alone, one)[0] == keys_of(together, all_)[1]


def test_the_smallest_positive_fraction_and_the_largest_one_do_not_overflow() -> None:
    shards = keyed([[0, TOP]])
    assert split(shards, 5e-324) == ([(0, 2)], [(0, 0)])
    assert split(shards, float(np.nextafter(1, 0))) == ([(1, 2)], [(0, 1)])


# Split of prepared texts


@pytest.fixture(scope="module")
def additions(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_folder(tmp_path_factory.mktemp("split") / "data", tokenizer_folder, records=ADDITIONS)


def split_texts(folder: Path, fraction: float) -> tuple[list[str], list[str]]:
    shards = Shards(folder)
    train, validation = split(shards, fraction)
    return tuple(sorted(str(ids(shards[int(i)])) for i in numbers(side)) for side in (train, validation))  # type: ignore[return-value]


def test_split_does_not_move_when_texts_are_added_or_reordered(
    additions: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    train, validation = map(set, split_texts(additions, 0.3))
    assert 10 <= len(validation) <= 26  # 18 expected, three standard deviations
    extra = [{"query": f"Name {n}", "response": "no"} for n in range(40)]
    shuffled = [*extra[:20], *ADDITIONS[::-1], *extra[20:]]
    grown = prepare_folder(tmp_path / "grown", tokenizer_folder, new=OTHERS, records=shuffled)
    grown_train, grown_validation = map(set, split_texts(grown, 0.3))
    assert train < grown_train
    assert validation < grown_validation


def test_split_does_not_depend_on_the_order_of_the_records(
    additions: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    mixed = [ADDITIONS[place] for place in np.random.default_rng(0).permutation(len(ADDITIONS))]
    assert split_texts(prepare_folder(tmp_path / "mixed", tokenizer_folder, a=mixed), 0.3) == split_texts(
        additions, 0.3
    )


def test_equal_texts_fall_on_the_same_side(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = prepare_folder(tmp_path / "twice", tokenizer_folder, a=ADDITIONS, b=[*ADDITIONS[::-1], *ADDITIONS[:7]])
    train, validation = split_texts(folder, 0.3)
    assert not set(train) & set(validation)
    assert len(set(train)) + len(set(validation)) == 60
    assert len(train) + len(validation) == 127
    assert min(len(train), len(validation)) > 0


# Subsets


@PROPERTY
@given(sources=SOURCES)
def test_subsets_are_exact_for_every_count(sources: list[list[int]]) -> None:
    shards = keyed(sources)
    ranges = shards.manifest.bounds()
    for count in range(len(shards.keys) + 2):
        cut = smallest_keys(shards, ranges, count)
        assert num_examples(cut) == min(count, len(shards.keys))
        assert numbers(cut).tolist() == slow_smallest(shards, ranges, count)


@PROPERTY
@given(sources=SOURCES, fraction=st.sampled_from([0.1, 0.5, 0.9]), count=st.integers(0, 20))
def test_subsets_of_a_side_stay_on_it(sources: list[list[int]], fraction: float, count: int) -> None:
    shards = keyed(sources)
    for side in split(shards, fraction):
        assert numbers(smallest_keys(shards, side, count)).tolist() == slow_smallest(shards, side, count)


@pytest.mark.parametrize("count", [1, 999, 1000, 1001, 2999, 3000])
def test_subsets_of_many_random_keys_are_exact(count: int) -> None:
    shards = keyed(random_keys(1000, 1, 2000, seed=3))
    ranges = shards.manifest.bounds()
    assert numbers(smallest_keys(shards, ranges, count)).tolist() == slow_smallest(shards, ranges, count)


def test_equal_keys_are_taken_from_the_earlier_source_first() -> None:
    shards = keyed([[5, 5], [3, 5, 5], [5]])
    cuts = [smallest_keys(shards, shards.manifest.bounds(), count) for count in range(7)]
    assert [[stop - start for start, stop in cut] for cut in cuts] == [
        [0, 0, 0],
        [0, 1, 0],
        [1, 1, 0],
        [2, 1, 0],
        [2, 2, 0],
        [2, 3, 0],
        [2, 3, 1],
    ]


def test_a_larger_subset_holds_the_smaller_ones() -> None:
    shards = keyed([[*random_keys(40)[0], 7, 7, 7], [*random_keys(30, seed=1)[0], 7, 7]])
    subsets = [set(numbers(smallest_keys(shards, shards.manifest.bounds(), count)).tolist()) for count in range(76)]
    assert all(smaller < larger for smaller, larger in pairwise(subsets))


def test_no_count_keeps_everything() -> None:
    shards = keyed(random_keys(10, 0, 5))
    assert smallest_keys(shards, [(2, 6), (10, 10), (11, 15)], None) == [(2, 6), (10, 10), (11, 15)]


def test_splits_and_subsets_of_a_large_data_set_look_at_few_keys(tmp_path: Path) -> None:
    shards = Shards(sparse_folder(tmp_path / "data", num_examples=10**7, num_shards=4))
    looked_at = 0

    class Counted(np.ndarray):
        __array_ufunc__ = None  # comparisons and sums would read the whole file

        def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
            nonlocal looked_at
            assert function is np.searchsorted, function
            looked_at += 1
            return super().__array_function__(function, types, args, kwargs)

    shards.keys = shards.keys.view(Counted)
    train, validation = split(shards, 0.0)
    assert (num_examples(train), num_examples(validation)) == (10**7, 0)
    assert smallest_keys(shards, train, 12345) == [(0, 12345)]  # all keys are equal here
    assert 0 < looked_at < 100
