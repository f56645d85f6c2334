"""Which of the tokenised examples a data set is made of, and in which order: a pure function of their figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lit_refusion.data.permutation import mix
from lit_refusion.data.sources import Source

DUPLICATE = "duplicate"


@dataclass(kw_only=True)
class SourceCounts:
    """What became of one source: read - bad - dropped + repeats = kept.

    Args:
        name: the source.
        read: records read.
        kept: examples of the data set, repeats included.
        repeats: further copies that its weight asked for.
        duplicates: examples that passed the filters and whose text was kept before, in this source or an earlier one.
        dropped: examples lost to the first rule that refused them.
        refused: examples that each filter would refuse, whatever the others do.
    """

    name: str
    read: int = 0
    kept: int = 0
    repeats: int = 0
    duplicates: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str, number: int) -> None:
        """Count `number` more examples lost for `reason`."""
        if number:
            self.dropped[reason] = self.dropped.get(reason, 0) + number


def filters(entries: np.ndarray, source: Source, *, max_length: int) -> dict[str, np.ndarray]:
    """[num_examples] bool of what each filter refuses, by its name, in the order in which they apply."""
    prompt, total = entries["prompt_length"], entries["length"]
    refused = {
        "prompt without tokens": prompt == 0,
        f"longer than max_length {max_length}": total > max_length,
    }
    if source.max_prompt_tokens is not None:
        refused[f"prompt over {source.max_prompt_tokens} tokens"] = prompt > source.max_prompt_tokens
    if source.max_tokens is not None:
        refused[f"over {source.max_tokens} tokens"] = total > source.max_tokens
    if source.min_response_tokens > 1:
        name = f"response under {source.min_response_tokens} tokens"
        refused[name] = total - prompt < source.min_response_tokens
    return refused


def select(
    entries: np.ndarray,
    bounds: Sequence[tuple[int, int]],
    sources: Sequence[Source],
    counts: Sequence[SourceCounts],
    *,
    max_length: int,
    num_examples: int | None,
    seed: int,
) -> np.ndarray:
    """[num_kept] numbers into `entries`, sorted by source and then by key; copies stand together.

    Order of the rules: filters, duplicates, `max_examples`, weight, and at last `num_examples` over all sources.
    Where a number of examples is asked for, those with the smallest hash(seed, key) are taken: an exact number, and
    the same ones whatever the order of the records.

    Args:
        entries: [N] PART_DTYPE of all sources, in the order read.
        bounds: first and last + 1 entry of each source.
        sources: the sources.
        counts: get what becomes of each; `read` and the bad records are in already.
        max_length: see `PrepareConfig`.
        num_examples: size of the subset over all sources; None for everything.
        seed: keys the hash.
    """
    ranks = mix(entries["key"], seed)
    chosen: list[np.ndarray] = []
    for source, (start, stop), count in zip(sources, bounds, counts, strict=True):
        numbers = np.arange(start, stop)
        refused = filters(entries[start:stop], source, max_length=max_length)
        count.refused = {name: int(flags.sum()) for name, flags in refused.items()}
        is_left = np.ones(len(numbers), bool)
        for name, flags in refused.items():
            count.drop(name, int((is_left & flags).sum()))
            is_left &= ~flags
        numbers = numbers[is_left]
        is_new = _is_new(entries["key"][numbers], [entries["key"][earlier] for earlier in chosen])
        count.duplicates = int((~is_new).sum())
        if source.deduplicate:
            count.refused[DUPLICATE] = count.duplicates
            count.drop(DUPLICATE, count.duplicates)
            numbers = numbers[is_new]
        if source.max_examples is not None:
            kept = smallest(ranks[numbers], source.max_examples)
            count.drop(f"beyond max_examples {source.max_examples}", len(numbers) - len(kept))
            numbers = numbers[kept]
        chosen.append(_weighted(numbers, ranks, source, count))
    rows = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
    source_of = np.repeat(np.arange(len(chosen)), [len(numbers) for numbers in chosen])
    if num_examples is not None:
        kept = smallest(ranks[rows], num_examples)
        for number, count in enumerate(counts):
            count.drop(f"beyond num_examples {num_examples}", int((np.delete(source_of, kept) == number).sum()))
        rows, source_of = rows[kept], source_of[kept]
    for number, count in enumerate(counts):
        count.kept = int((source_of == number).sum())
    return rows[np.lexsort((rows, entries["key"][rows], source_of))]


def _is_new(keys: np.ndarray, earlier: Sequence[np.ndarray]) -> np.ndarray:
    """[N] bool: whether a key is the first of its kind, here and among those that earlier sources have kept."""
    is_new = np.zeros(len(keys), bool)
    is_new[np.unique(keys, return_index=True)[1]] = True
    for kept in earlier:
        is_new &= ~np.isin(keys, kept)
    return is_new


def _weighted(numbers: np.ndarray, ranks: np.ndarray, source: Source, count: SourceCounts) -> np.ndarray:
    """Each example as often as the weight says: round(weight x number) in all."""
    if len(numbers) == 0:
        return numbers
    copies, rest = divmod(round(source.weight * len(numbers)), len(numbers))
    times = np.full(len(numbers), copies)
    times[smallest(ranks[numbers], rest)] += 1
    count.repeats = int((times - 1).clip(0).sum())
    count.drop(f"left out by weight {source.weight:g}", int((times == 0).sum()))
    return np.repeat(numbers, times)


def smallest(ranks: np.ndarray, count: int) -> np.ndarray:
    """Places of the `count` smallest values, in rising order of place; ties go to the earlier place."""
    if count >= len(ranks):
        return np.arange(len(ranks))
    return np.sort(np.argsort(ranks, kind="stable")[:count])
