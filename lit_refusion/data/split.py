"""Training and validation examples, and subsets of them, as ranges of a data set sorted by key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lit_refusion.data.shards import Shards

Range = tuple[int, int]
"""First and last + 1 example; of one source, so its keys rise."""


def split(shards: Shards, validation_fraction: float) -> tuple[list[Range], list[Range]]:
    """The training and the validation examples of each source.

    An example is held out where the hash of its text falls below the fraction: equal texts fall on the same side, and
    growing the data set moves nothing across.
    """
    limit = np.uint64(validation_fraction * 2.0**64)
    train, validation = [], []
    for start, stop in shards.manifest.bounds():
        cut = start + _num_below(shards, (start, stop), limit)
        train.append((cut, stop))
        validation.append((start, cut))
    return train, validation


def smallest_keys(shards: Shards, ranges: Sequence[Range], count: int | None) -> list[Range]:
    """The ranges cut to the `count` examples with the smallest keys over all of them; all for None."""
    if count is None or count >= num_examples(ranges):
        return list(ranges)
    low, high = 0, 2**64 - 1  # bisection: at most `count` keys are smaller than `low`
    while low < high:
        middle = (low + high + 1) // 2
        if sum(_num_below(shards, item, np.uint64(middle)) for item in ranges) <= count:
            low = middle
        else:
            high = middle - 1
    stops = [start + _num_below(shards, (start, stop), np.uint64(low)) for start, stop in ranges]
    rest = count - sum(stop - start for (start, _), stop in zip(ranges, stops))
    cut = []
    for (start, last), stop in zip(ranges, stops):  # examples with the same key: those of the earlier source
        num_equal = int(np.searchsorted(shards.keys[stop:last], np.uint64(low), side="right"))
        taken = min(rest, num_equal)
        rest -= taken
        cut.append((start, stop + taken))
    return cut


def num_examples(ranges: Sequence[Range]) -> int:
    """Examples in all ranges."""
    return sum(stop - start for start, stop in ranges)


def numbers(ranges: Sequence[Range]) -> np.ndarray:
    """[num_examples] the examples' numbers, in order."""
    return np.concatenate([np.arange(start, stop) for start, stop in ranges])


def _num_below(shards: Shards, item: Range, key: np.uint64) -> int:
    return int(np.searchsorted(shards.keys[item[0] : item[1]], key, side="left"))
