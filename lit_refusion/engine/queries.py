"""The requests of some rows as the queries of one forward pass. Shapes: b rows, Q queries of the longest, S places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from lit_refusion.engine.request import NUM_INTERVALS, Request
from lit_refusion.errors import UserError
from lit_refusion.views import MASK

TOKEN, POSITION, PLACE, INTERVALS = 0, 1, 2, slice(3, 9)
"""Columns of the table."""


Used: TypeAlias = tuple[tuple[int, bool], ...]
"""Intervals that are not empty everywhere, and whether any begins behind place 0."""

ALL: Used = ((0, True), (1, True), (2, True))


@dataclass(frozen=True)
class Queries:
    """One row of queries for each request, right-padded.

    Args:
        table: [b, Q, 9] token, position, place, and three intervals as (start, stop).
        lengths: [b] queries of each row.
        slots: [N] places of the true queries among all b x Q; None where all are true.
        visible: the keys at places [0, visible) are seen by some query.
    """

    table: np.ndarray
    lengths: np.ndarray
    slots: np.ndarray | None
    visible: int

    @classmethod
    def joined(cls, requests: Sequence[Request], *, mask_token_id: int, capacity: int) -> Queries:
        """The queries of these requests; padding is written to the place behind the last.

        Raises:
            UserError: a request reaches beyond the buffer.
        """
        lengths = np.array([len(request.tokens) for request in requests])
        longest = int(lengths.max())
        table = blank(len(requests), longest, trash=capacity)
        for row, length, request in zip(table, lengths.tolist(), requests):
            row[:length, TOKEN] = np.where(request.tokens == MASK, mask_token_id, request.tokens)
            row[:length, POSITION], row[:length, PLACE] = request.positions, request.places
            row[:length, INTERVALS] = request.intervals.reshape(length, 6)
            if request.num_replies and request.places.max() >= capacity:
                raise UserError(
                    f"a row needs place {request.places.max()} of a buffer of {capacity}; raise the capacity"
                )
        is_full = lengths.min() == longest
        slots = None if is_full else np.flatnonzero(np.arange(longest) < lengths[:, None])
        return cls(table, lengths, slots, int(table[:, :, INTERVALS].max()))

    @classmethod
    def end_to_end(cls, rows: Sequence[Queries]) -> Queries:
        """Rows without padding as one."""
        table = np.concatenate([row.table for row in rows], axis=1)
        return cls(table, np.array([table.shape[1]]), None, max(row.visible for row in rows))

    def row(self, number: int) -> Queries:
        """One row without its padding."""
        length = self.lengths[number]
        table = self.table[number : number + 1, :length]
        return Queries(table, self.lengths[number : number + 1], None, int(table[:, :, INTERVALS].max()))

    @property
    def is_causal(self) -> bool:
        """Whether query i of each row sees just the places [0, i], and all places that are visible."""
        length = self.table.shape[1]
        if self.visible != length:
            return False
        bounds = self.table[:, :, INTERVALS]
        wanted = np.zeros((length, 2 * NUM_INTERVALS), np.int64)
        wanted[:, 1] = np.arange(1, length + 1)
        is_true = np.arange(length)[:, None] < self.lengths[:, None, None]
        return bool(((bounds == wanted) | ~is_true).all())

    def padded(self, length: int, *, trash: int) -> np.ndarray:
        """[b, Q, 9] the table with room for `length` queries a row."""
        table = blank(len(self.table), length, trash=trash)
        table[:, : self.table.shape[1]] = self.table
        return table

    def used_intervals(self) -> Used:
        """What of the intervals a mask has to look at; nothing where every query sees every visible key."""
        table = self.table.reshape(-1, self.table.shape[2])
        bounds = (table if self.slots is None else table[self.slots])[:, INTERVALS]
        starts, stops = bounds[:, ::2], bounds[:, 1::2]  # [N, 3]
        is_used: list[bool] = np.any(stops > starts, axis=0).tolist()
        latest: list[int] = starts.max(0).tolist()
        if not any(is_used[1:]) and not latest[0] and stops[:, 0].min() == self.visible:
            return ()
        return tuple((i, latest[i] > 0) for i in range(NUM_INTERVALS) if i == 0 or is_used[i])  # padding uses the first


def blank(num_rows: int, length: int, *, trash: int) -> np.ndarray:
    """[b, Q, 9] padding: it is written to the trash, and sees place 0 so that its row of the mask is not empty."""
    table = np.zeros((num_rows, length, 9), np.int64)
    table[:, :, PLACE], table[:, :, INTERVALS.start + 1] = trash, 1
    return table


def starts_of(lengths: np.ndarray) -> np.ndarray:
    """[b] where each row begins when rows of these lengths lie end to end."""
    return np.cumsum(lengths) - lengths


def hidden_keys(intervals: Tensor, visible: int, *, used: Used = ALL) -> Tensor:
    """[b, 1, Q, visible] bool from [b, Q, 6] interval bounds: a key is hidden where no interval holds its place.

    Args:
        intervals: (start, stop) three times.
        visible: number of keys.
        used: the intervals to look at, one at least.
    """
    key = torch.arange(visible, device=intervals.device)
    bounds = intervals[:, None, :, :, None]  # [b, 1, Q, 6, 1]
    hidden: list[Tensor] = []
    for number, has_start in used:
        outside = key >= bounds[:, :, :, 2 * number + 1]
        hidden.append(outside.logical_or_(key < bounds[:, :, :, 2 * number]) if has_start else outside)
    for other in hidden[1:]:
        hidden[0].logical_and_(other)
    return hidden[0]
