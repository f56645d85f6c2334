"""Padding and packing of views. Shapes: N tokens of a view, B rows, T row length."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_refusion.views import IGNORE, MASK, Batch, View, collate, pack

TENSORS = [*(item.name for item in fields(View)), "segment_ids"]


def view(length: int, *, start: int = 10, **changes: object) -> View:
    """A view of `length` tokens start, start + 1, ... with every field set to something that padding is not."""
    ids = np.arange(start, start + length)
    values = {
        "input_ids": ids,
        "position_ids": ids + 100,
        "targets": ids + 200,
        "weights": np.full(length, 0.5, np.float32),
        "term": np.ones(length, np.int64),
        "block": np.full(length, 3),
        "noisy": np.ones(length, bool),
        "mask_rate": 0.25,
    }
    return View(**{**values, **changes})


def lay_out(rows: list[list[View]], *, mask_token_id: int | None = 99, pad_to_multiple: int = 1) -> Batch:
    return collate(
        rows, mask_token_id=mask_token_id, pad_to_multiple=pad_to_multiple, num_examples=5, num_response_tokens=17
    )


def test_collate_pads_every_field_with_its_own_value() -> None:
    batch = lay_out([[view(2)], [view(1, start=30)]])
    assert batch.input_ids.tolist() == [[10, 11], [30, 0]]
    assert batch.position_ids.tolist() == [[110, 111], [130, 0]]
    assert batch.targets.tolist() == [[210, 211], [230, IGNORE]]
    assert batch.weights.tolist() == [[0.5, 0.5], [0.5, 0.0]]
    assert batch.term.tolist() == [[1, 1], [1, -1]]
    assert batch.block.tolist() == [[3, 3], [3, 0]]
    assert batch.noisy.tolist() == [[True, True], [True, False]]
    assert batch.segment_ids.tolist() == [[1, 1], [1, 0]]
    assert batch.mask_rate[:, 0].tolist() == [0.25, 0.25]
    assert batch.mask_rate.isnan().tolist() == [[False, False], [False, True]]
    assert (batch.num_examples, batch.num_response_tokens) == (5, 17)


def test_collate_lays_the_views_of_a_row_end_to_end() -> None:
    batch = lay_out([[view(2), view(1, start=30), view(3, start=40, mask_rate=0.75)], [view(4, start=50)]])
    assert batch.segment_ids.tolist() == [[1, 1, 2, 3, 3, 3], [1, 1, 1, 1, 0, 0]]
    assert batch.input_ids.tolist() == [[10, 11, 30, 40, 41, 42], [50, 51, 52, 53, 0, 0]]
    assert batch.mask_rate[0].tolist() == [0.25, 0.25, 0.25, 0.75, 0.75, 0.75]


def test_collate_gives_the_types_that_the_model_reads() -> None:
    batch = lay_out([[view(2, weights=np.full(2, 0.5, np.float64), input_ids=np.array([1, 2], np.int32))]])
    types = {name: getattr(batch, name).dtype for name in TENSORS}
    floats = {"weights": torch.float32, "mask_rate": torch.float32, "noisy": torch.bool}
    assert types == {name: floats.get(name, torch.int64) for name in TENSORS}


@pytest.mark.parametrize(("multiple", "length"), [(1, 5), (4, 8), (5, 5), (64, 64)])
def test_collate_rounds_the_row_length_up(multiple: int, length: int) -> None:
    batch = lay_out([[view(5)], [view(3)]], pad_to_multiple=multiple)
    assert {name: tuple(getattr(batch, name).shape) for name in TENSORS} == dict.fromkeys(TENSORS, (2, length))
    assert (batch.segment_ids != 0).sum(dim=1).tolist() == [5, 3]


def test_collate_puts_the_backbones_id_in_place_of_mask() -> None:
    hidden = view(3, input_ids=np.array([5, MASK, MASK]))
    assert lay_out([[hidden], [view(1)]]).input_ids.tolist() == [[5, 99, 99], [10, 0, 0]]
    assert hidden.input_ids.tolist() == [5, MASK, MASK]  # the view itself stays as it was


def test_collate_needs_a_mask_token_only_where_something_is_hidden() -> None:
    assert lay_out([[view(1)]], mask_token_id=None).input_ids.tolist() == [[10]]
    with pytest.raises(AssertionError, match="no mask token"):
        lay_out([[view(2, input_ids=np.array([5, MASK]))]], mask_token_id=None)


def test_batch_moves_every_tensor_and_keeps_the_counts() -> None:
    moved = lay_out([[view(2)]]).to("meta")
    assert {getattr(moved, name).device.type for name in TENSORS} == {"meta"}
    assert (moved.num_examples, moved.num_response_tokens) == (5, 17)


def test_view_fills_in_block_and_noisy() -> None:
    plain = View(
        input_ids=np.arange(3), position_ids=np.arange(3), targets=np.arange(3), weights=np.ones(3), term=np.zeros(3)
    )
    assert (plain.block.tolist(), plain.noisy.tolist()) == ([0, 0, 0], [False, False, False])
    assert (plain.block.dtype, plain.noisy.dtype, len(plain)) == (np.int64, np.bool_, 3)
    assert np.isnan(plain.mask_rate)


@pytest.mark.parametrize("name", ["position_ids", "targets", "weights", "term", "block", "noisy"])
def test_view_refuses_fields_of_another_length(name: str) -> None:
    with pytest.raises(AssertionError, match=rf"View\.{name} has 2 tokens, input_ids has 3"):
        view(3, **{name: np.zeros(2, np.int64)})


def test_pack_evens_out_the_rows_that_first_fit_needs() -> None:
    views = [view(length) for length in (3, 6, 5, 2, 7, 4)]
    packed = pack(views, max_length=10)
    assert [[len(item) for item in row] for row in packed] == [[7, 2], [6, 3], [5, 4]]


def test_pack_stays_with_first_fit_where_even_rows_would_be_too_long() -> None:
    views = [view(length) for length in (3, 3, 2, 2, 2)]  # evenly: 3 + 2 + 2 and 3 + 2
    packed = pack(views, max_length=6)
    assert [[len(item) for item in row] for row in packed] == [[3, 3], [2, 2, 2]]


def test_pack_keeps_the_order_of_equally_long_views() -> None:
    views = [view(2, start=start) for start in (10, 20, 30, 40)]
    assert [[item.input_ids[0] for item in row] for row in pack(views, max_length=4)] == [[10, 30], [20, 40]]


def test_pack_gives_a_longer_view_a_row_of_its_own() -> None:
    packed = pack([view(1), view(12), view(1), view(9)], max_length=10)
    assert [[len(item) for item in row] for row in packed] == [[12], [9], [1, 1]]


@settings(deadline=None, database=None, derandomize=True, max_examples=100)
@given(lengths=st.lists(st.integers(1, 20), max_size=20), max_length=st.integers(1, 30))
def test_pack_loses_nothing_and_keeps_to_its_capacity(lengths: list[int], max_length: int) -> None:
    views = [view(length) for length in lengths]
    rows = pack(views, max_length=max_length)
    assert sorted(id(item) for row in rows for item in row) == sorted(map(id, views))
    assert all(rows)
    assert all(len(row) == 1 or sum(map(len, row)) <= max_length for row in rows)
    assert rows == pack(views, max_length=max_length)
    first_fit: list[int] = []
    for length in sorted(lengths, reverse=True):
        spot = next((i for i, total in enumerate(first_fit) if total + length <= max_length), None)
        if spot is None:
            first_fit.append(length)
        else:
            first_fit[spot] += length
    assert len(rows) == len(first_fit)
