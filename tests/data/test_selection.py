"""The choice of examples: every rule with exact counts, and all of them against a slow reference."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_refusion.data.parts import PART_DTYPE
from lit_refusion.data.permutation import mix
from lit_refusion.data.selection import SourceCounts, filters, select, smallest
from lit_refusion.data.sources import Source
from tests.conftest import make_source

MAX_LENGTH = 12
KEEP_ALL = make_source("a.jsonl")
Entry = tuple[int, int, int]  # key, prompt tokens, response tokens


def arrays(sources: list[list[Entry]]) -> tuple[np.ndarray, list[tuple[int, int]]]:
    rows = [(key, 0, prompt, prompt + response) for entries in sources for key, prompt, response in entries]
    ends = np.cumsum([len(entries) for entries in sources]).tolist()
    return np.array(rows, PART_DTYPE), list(zip([0, *ends], ends))


def run(
    entries: list[list[Entry]], sources: list[Source], *, num_examples: int | None = None, seed: int = 0
) -> tuple[list[int], list[SourceCounts]]:
    joined, bounds = arrays(entries)
    counts = [SourceCounts(name=source.name, read=len(own)) for source, own in zip(sources, entries, strict=True)]
    rows = select(joined, bounds, sources, counts, max_length=MAX_LENGTH, num_examples=num_examples, seed=seed)
    return rows.tolist(), counts


def run_one(
    entries: list[Entry], *, num_examples: int | None = None, seed: int = 0, **changes: Any
) -> tuple[list[int], SourceCounts]:
    """Keys chosen of one source, and its counts."""
    rows, [count] = run([entries], [replace(KEEP_ALL, **changes)], num_examples=num_examples, seed=seed)
    return [entries[row][0] for row in rows], count


def different(number: int) -> list[Entry]:
    """Examples of different texts, in no order of their keys."""
    return [(key * 7919 % 10_007, 2, 3) for key in range(1, number + 1)]


def by_rank(keys: list[int], seed: int) -> list[int]:
    return sorted(keys, key=lambda key: int(mix(np.array([key], np.uint64), seed)[0]))


# Filters

LENGTHS = [(1, 0, 3), (2, 1, 11), (3, 1, 12), (4, 5, 1), (5, 6, 2), (6, 6, 1), (7, 2, 2), (8, 0, 13)]


@pytest.mark.parametrize(
    ("changes", "name", "refused", "dropped"),
    [
        ({}, "prompt without tokens", {1, 8}, {1, 8}),
        ({}, "longer than max_length 12", {3, 8}, {3}),  # 8 has no prompt either, and that rule comes first
        ({"max_prompt_tokens": 5}, "prompt over 5 tokens", {5, 6}, {5, 6}),
        ({"max_tokens": 7}, "over 7 tokens", {2, 3, 5, 8}, {2, 5}),
        ({"min_response_tokens": 2}, "response under 2 tokens", {4, 6}, {4, 6}),
    ],
)
def test_each_filter_refuses_exactly_what_it_names(
    changes: dict[str, int], name: str, refused: set[int], dropped: set[int]
) -> None:
    joined, _ = arrays([LENGTHS])
    flags = filters(joined, replace(KEEP_ALL, **changes), max_length=MAX_LENGTH)[name]
    assert set(joined["key"][flags].tolist()) == refused

    kept, count = run_one(LENGTHS, **changes)

    assert count.refused[name] == len(refused)
    assert count.dropped[name] == len(dropped)
    assert not refused & set(kept)


def test_limits_let_what_just_fits_pass() -> None:
    kept, count = run_one([(1, 4, 3)], max_prompt_tokens=4, max_tokens=7, min_response_tokens=3)
    assert (kept, count.dropped) == ([1], {})


def test_an_example_is_counted_for_the_first_filter_that_refuses_it() -> None:
    limits = {"max_prompt_tokens": 5, "max_tokens": 6, "min_response_tokens": 2}
    kept, count = run_one([(1, 9, 1), (2, 2, 6), (3, 3, 1), (4, 2, 2), (4, 2, 2)], **limits, deduplicate=True)
    assert kept == [4]
    assert count.refused == {
        "prompt without tokens": 0,
        "longer than max_length 12": 0,
        "prompt over 5 tokens": 1,
        "over 6 tokens": 2,
        "response under 2 tokens": 2,
        "duplicate": 1,
    }
    assert count.dropped == {
        "prompt over 5 tokens": 1,
        "over 6 tokens": 1,
        "response under 2 tokens": 1,
        "duplicate": 1,
    }


def test_a_filter_that_is_off_is_not_listed() -> None:
    assert list(run_one(LENGTHS)[1].refused) == ["prompt without tokens", "longer than max_length 12"]


# Duplicates


def test_duplicates_within_a_source_are_dropped_but_for_the_first() -> None:
    kept, count = run_one([(3, 2, 3), (1, 2, 3), (3, 2, 3), (3, 2, 3)], deduplicate=True)
    assert kept == [1, 3]
    assert (count.kept, count.duplicates, count.dropped) == (2, 2, {"duplicate": 2})


def test_duplicates_are_kept_and_still_reported_without_deduplicate() -> None:
    kept, count = run_one([(3, 2, 3), (1, 2, 3), (3, 2, 3), (3, 2, 3)])
    assert kept == [1, 3, 3, 3]
    assert (count.kept, count.duplicates, count.dropped) == (4, 2, {})


def test_duplicates_of_an_earlier_source_are_dropped_where_the_later_one_says_so() -> None:
    entries = [[(1, 2, 3), (1, 2, 3), (2, 2, 3)], [(2, 2, 3), (5, 2, 3)], [(2, 2, 3), (5, 2, 3), (0, 2, 3)]]
    sources = [KEEP_ALL, replace(KEEP_ALL, name="strict", deduplicate=True), replace(KEEP_ALL, name="lax")]
    rows, counts = run(entries, sources)
    assert rows == [0, 1, 2, 4, 7, 5, 6]  # by source, and by key within one
    assert [count.duplicates for count in counts] == [1, 1, 2]
    assert [count.dropped for count in counts] == [{}, {"duplicate": 1}, {}]
    assert [count.kept for count in counts] == [2 + 1, 1, 3]


# Numbers of examples


@pytest.mark.parametrize(("wanted", "kept"), [(1, 1), (7, 7), (20, 20), (21, 20)])
def test_max_examples_keeps_those_with_the_smallest_hashes(wanted: int, kept: int) -> None:
    entries = different(20)
    found, count = run_one(entries, max_examples=wanted, seed=3)
    assert found == sorted(by_rank([key for key, _, _ in entries], 3)[:wanted])
    assert count.kept == kept
    assert count.dropped == ({f"beyond max_examples {wanted}": 20 - kept} if kept < 20 else {})


@pytest.mark.parametrize(
    ("weight", "times"), [(0.5, {1: 5}), (1.0, {1: 10}), (2.5, {2: 5, 3: 5}), (3.0, {3: 10}), (0.31, {1: 3})]
)
def test_a_weight_gives_an_exact_number_of_copies(weight: float, times: dict[int, int]) -> None:
    entries = different(10)
    found, count = run_one(entries, weight=weight, seed=1)
    copies = Counter(found)
    assert Counter(copies.values()) == times
    assert found == sorted(found)  # copies stand together
    preferred = by_rank([key for key, _, _ in entries], 1)[: times[max(times)]]
    assert {key for key in copies if copies[key] == max(times)} == set(preferred)
    left_out = 10 - len(copies)
    assert (count.kept, count.repeats) == (len(found), max(0, len(found) - 10))
    assert count.dropped == ({f"left out by weight {weight:g}": left_out} if left_out else {})


def test_a_weight_too_small_for_one_example_leaves_none() -> None:
    found, count = run_one(different(3), weight=0.1)
    assert (found, count.kept, count.dropped) == ([], 0, {"left out by weight 0.1": 3})


def test_the_weight_counts_what_max_examples_and_filters_left() -> None:
    entries = [*different(10), (20_000, 2, 99)]
    found, count = run_one(entries, weight=2.5, max_examples=4)
    assert (len(found), count.repeats) == (10, 6)
    assert count.dropped == {"longer than max_length 12": 1, "beyond max_examples 4": 6}


def test_num_examples_is_taken_over_all_sources_by_hash() -> None:
    keys = [key for key, _, _ in different(30)]
    entries = [[(key, 2, 3) for key in keys[:20]], [(key, 2, 3) for key in keys[20:]]]
    rows, counts = run(entries, [KEEP_ALL, replace(KEEP_ALL, name="second")], num_examples=12, seed=5)
    expected = set(by_rank(keys, 5)[:12])
    assert {keys[row] for row in rows} == expected
    kept = [len(expected & set(keys[:20])), len(expected & set(keys[20:]))]
    assert [count.kept for count in counts] == kept
    assert [count.dropped for count in counts] == [
        {"beyond num_examples 12": 20 - kept[0]},
        {"beyond num_examples 12": 10 - kept[1]},
    ]


def test_a_larger_subset_holds_the_smaller_one_and_another_seed_gives_another() -> None:
    small, large = (set(run_one(different(50), num_examples=number)[0]) for number in (10, 25))
    assert small < large
    assert set(run_one(different(50), num_examples=10, seed=1)[0]) != small


def test_ties_go_to_the_earlier_place() -> None:
    assert smallest(np.array([5, 1, 5, 1, 5], np.uint64), 3).tolist() == [0, 1, 3]
    assert smallest(np.array([5, 1], np.uint64), 0).tolist() == []


# All rules together


def slow_rank(key: int, seed: int) -> int:
    """hash(seed, key), written anew with whole numbers of Python."""

    def finalise(word: int) -> int:
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
        return word ^ (word >> 31)

    return finalise(key ^ finalise((seed + 1) * 0x9E3779B97F4A7C15 % 2**64))


def slow_reasons(entry: Entry, source: Source) -> list[str]:
    _, prompt, response = entry
    reasons = []
    if prompt == 0:
        reasons.append("prompt without tokens")
    if prompt + response > MAX_LENGTH:
        reasons.append(f"longer than max_length {MAX_LENGTH}")
    if source.max_prompt_tokens is not None and prompt > source.max_prompt_tokens:
        reasons.append(f"prompt over {source.max_prompt_tokens} tokens")
    if source.max_tokens is not None and prompt + response > source.max_tokens:
        reasons.append(f"over {source.max_tokens} tokens")
    if response < source.min_response_tokens:
        reasons.append(f"response under {source.min_response_tokens} tokens")
    return reasons


def slow_select(
    entries: list[list[Entry]], sources: list[Source], num_examples: int | None, seed: int
) -> tuple[list[int], list[dict[str, Any]]]:
    chosen: list[tuple[int, int, int]] = []  # source, key, number
    figures = []
    number = 0
    for place, (own, source) in enumerate(zip(entries, sources, strict=True)):
        dropped: Counter[str] = Counter()
        refused: Counter[str] = Counter()
        duplicates, left = 0, []
        seen = {key for _, key, _ in chosen}  # what earlier sources have kept, and what this one lets pass
        for entry in own:
            reasons = slow_reasons(entry, source)
            refused.update(reasons)
            if reasons:
                dropped[reasons[0]] += 1
            else:
                is_duplicate = entry[0] in seen
                seen.add(entry[0])
                duplicates += is_duplicate
                if is_duplicate and source.deduplicate:
                    refused["duplicate"] += 1
                    dropped["duplicate"] += 1
                else:
                    left.append((slow_rank(entry[0], seed), number, entry[0]))
            number += 1
        left.sort()
        if source.max_examples is not None:
            dropped[f"beyond max_examples {source.max_examples}"] += len(left[source.max_examples :])
            left = left[: source.max_examples]
        total = round(source.weight * len(left))
        copies = [left[turn % len(left)] for turn in range(total)]  # round after round, smallest hash first
        dropped[f"left out by weight {source.weight:g}"] += max(0, len(left) - total)
        chosen += [(place, key, its_number) for _, its_number, key in copies]
        figures.append({"dropped": dropped, "refused": refused, "duplicates": duplicates})
        figures[-1]["repeats"] = max(0, total - len(left))
    if num_examples is not None:
        chosen.sort(key=lambda example: (slow_rank(example[1], seed), example[2]))
        for place, _, _ in chosen[num_examples:]:
            figures[place]["dropped"][f"beyond num_examples {num_examples}"] += 1
        chosen = chosen[:num_examples]
    for place, figure in enumerate(figures):
        figure["kept"] = sum(example[0] == place for example in chosen)
    return [its_number for _, _, its_number in sorted(chosen)], figures


LIMIT = st.none() | st.integers(1, 8)
ENTRIES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 8), st.integers(1, 8)), max_size=12)
SOURCES = st.builds(
    lambda **changes: replace(KEEP_ALL, **changes),
    weight=st.sampled_from([0.1, 0.3, 0.5, 1.0, 1.5, 2.0, 2.5]),
    max_examples=LIMIT,
    max_prompt_tokens=LIMIT,
    max_tokens=LIMIT,
    min_response_tokens=st.integers(1, 4),
    deduplicate=st.booleans(),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(ENTRIES, SOURCES), min_size=1, max_size=3), st.none() | st.integers(1, 20), st.integers(0, 9))
def test_selection_is_that_of_a_slow_reference(
    given_sources: list[tuple[list[Entry], Source]], num_examples: int | None, seed: int
) -> None:
    entries, sources = [own for own, _ in given_sources], [source for _, source in given_sources]

    rows, counts = run(entries, sources, num_examples=num_examples, seed=seed)

    expected, figures = slow_select(entries, sources, num_examples, seed)
    assert rows == expected
    for count, figure in zip(counts, figures, strict=True):
        assert count.dropped == {name: number for name, number in figure["dropped"].items() if number}
        assert {name: number for name, number in count.refused.items() if number} == figure["refused"]
        assert (count.kept, count.repeats, count.duplicates) == (
            *(figure["kept"], figure["repeats"]),
            figure["duplicates"],
        )
        assert count.read - sum(count.dropped.values()) + count.repeats == count.kept


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_the_order_of_the_records_does_not_matter(data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=20))
    entries = [(text, 1 + text % 3, 1 + text % 5) for text in texts]  # equal texts have equal lengths
    source = data.draw(SOURCES)
    wanted = data.draw(st.none() | st.integers(1, 20))
    shuffled = data.draw(st.permutations(entries))

    results = [run([order], [source], num_examples=wanted) for order in (entries, shuffled)]

    keys = [[order[row][0] for row in rows] for order, (rows, _) in zip((entries, shuffled), results, strict=True)]
    assert keys[0] == keys[1]
    assert results[0][1] == results[1][1]
