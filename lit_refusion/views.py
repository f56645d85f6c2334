"""Views of examples and the batches made of them. Shapes: N tokens of a view, B rows, T row length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

IGNORE = -100
"""Target of a row that is not supervised."""
MASK = -1
"""Stands for [MASK] in a View; `collate` puts the backbone's own id in its place."""


@dataclass(frozen=True, kw_only=True)
class View:
    """What an objective makes of one example: numpy arrays of one length N, in buffer order.

    Args:
        input_ids: [N] int64; `MASK` where the token is hidden.
        position_ids: [N] int64, index in the original prompt + response.
        targets: [N] int64, the token that this row predicts; -100 where the row is not supervised.
        weights: [N] float32, coefficient of the row's cross-entropy.
        term: [N] int64, index into `Objective.terms`; -1 where the row is not supervised.
        block: [N] int64, block number, read by block-wise attention rules.
        noisy: [N] bool, whether the token belongs to the noisy copy, read by two-copy attention rules.
        mask_rate: the example's noise level in [0, 1]; NaN where the objective has none.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    term: np.ndarray
    block: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    noisy: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    mask_rate: float = float("nan")

    def __post_init__(self) -> None:
        for name in ("block", "noisy"):
            if len(getattr(self, name)) == 0:
                empty = np.zeros(len(self), np.int64 if name == "block" else bool)
                object.__setattr__(self, name, empty)
        for item in fields(self):
            if item.name != "mask_rate":
                length = len(getattr(self, item.name))
                assert length == len(self), f"View.{item.name} has {length} tokens, input_ids has {len(self)}"

    def __len__(self) -> int:
        return len(self.input_ids)


_FILL: dict[str, tuple[Any, Any]] = {
    "input_ids": (np.int64, 0),
    "position_ids": (np.int64, 0),
    "targets": (np.int64, IGNORE),
    "weights": (np.float32, 0.0),
    "term": (np.int64, -1),
    "block": (np.int64, 0),
    "noisy": (bool, False),
    "mask_rate": (np.float32, np.nan),
    "segment_ids": (np.int64, 0),
}


class Batch:
    """Views padded or packed into rows; all tensors [B, T].

    A plain class rather than a dataclass: precision plugins rebuild dataclasses and would round `weights` to bf16.

    Args:
        segment_ids: int64; 0 = padding, 1.. = document of a packed row. The only source of token validity.
        mask_rate: float32, noise level of the token's example, NaN where undefined.
        num_examples: examples of the whole optimizer step (or of the whole validation set): a denominator.
        num_response_tokens: response tokens of the same: the other denominator.
    The remaining tensors are the fields of `View`.
    """

    def __init__(
        self,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor,
        term: torch.Tensor,
        block: torch.Tensor,
        noisy: torch.Tensor,
        mask_rate: torch.Tensor,
        segment_ids: torch.Tensor,
        num_examples: int,
        num_response_tokens: int,
    ) -> None:
        self.input_ids, self.position_ids, self.targets = input_ids, position_ids, targets
        self.weights, self.term, self.mask_rate = weights, term, mask_rate
        self.block, self.noisy, self.segment_ids = block, noisy, segment_ids
        self.num_examples, self.num_response_tokens = num_examples, num_response_tokens

    def replace(self, **changes: Any) -> Batch:
        """The same batch with some fields changed."""
        return Batch(**{**vars(self), **changes})

    def take(self, is_taken: torch.Tensor, *, pad_to_multiple: int = 1) -> Batch:
        """The tokens of each row where `is_taken` [B, T] holds, in their order; rows are padded to the longest."""
        counts = is_taken.sum(dim=1, keepdim=True)
        length = -(-max(1, int(counts.max())) // pad_to_multiple) * pad_to_multiple
        places = torch.argsort((~is_taken).to(torch.int8), dim=1, stable=True)[:, :length]
        is_padding = torch.arange(places.shape[1], device=places.device) >= counts
        missing = (0, length - places.shape[1])
        tensors = {}
        for name, tensor in self._tensors().items():
            fill = _FILL[name][1]
            tensors[name] = F.pad(tensor.gather(1, places).masked_fill(is_padding, fill), missing, value=fill)
        return self.replace(**tensors)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""
        return self.replace(**{k: v.to(device, non_blocking=non_blocking) for k, v in self._tensors().items()})

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory (called by the DataLoader)."""
        return self.replace(**{k: v.pin_memory() for k, v in self._tensors().items()})

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in _FILL}


def collate(
    rows: Sequence[Sequence[View]],
    *,
    mask_token_id: int | None,
    pad_to_multiple: int,
    num_examples: int,
    num_response_tokens: int,
) -> Batch:
    """Lay rows of views out as one Batch; a row with several views is a packed row.

    Args:
        rows: B sequences of views, each laid end to end in its row.
        mask_token_id: the backbone's [MASK]; None is enough for objectives that hide nothing.
        pad_to_multiple: T is rounded up to a multiple of this.
        num_examples: see `Batch`.
        num_response_tokens: see `Batch`.
    """
    longest = max(sum(len(view) for view in row) for row in rows)
    length = -(-max(longest, 1) // pad_to_multiple) * pad_to_multiple
    arrays = {name: np.full((len(rows), length), fill, dtype) for name, (dtype, fill) in _FILL.items()}
    for b, row in enumerate(rows):
        start = 0
        for segment, view in enumerate(row, start=1):
            stop = start + len(view)
            for name, array in arrays.items():
                array[b, start:stop] = segment if name == "segment_ids" else getattr(view, name)
            start = stop
    is_masked = arrays["input_ids"] == MASK
    if is_masked.any():
        assert mask_token_id is not None, "a view hides tokens, but the backbone has no mask token"
        arrays["input_ids"][is_masked] = mask_token_id
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Batch(**tensors, num_examples=num_examples, num_response_tokens=num_response_tokens)


def pack(views: Sequence[View], *, max_length: int) -> list[list[View]]:
    """Rows of at most `max_length` tokens, as few as first-fit decreasing needs; a longer view gets a row of its own.

    The rows are then evened out, since all are padded to the longest.
    """
    ordered = sorted(views, key=len, reverse=True)  # stable: ties keep their order
    rows: list[list[View]] = []
    for view in ordered:
        fitting = (row for row in rows if sum(map(len, row)) + len(view) <= max_length)
        row = next(fitting, None)
        if row is None:
            rows.append([view])
        else:
            row.append(view)
    even: list[list[View]] = [[] for _ in rows]
    for view in ordered:
        min(even, key=lambda row: sum(map(len, row))).append(view)
    return even if all(len(row) == 1 or sum(map(len, row)) <= max_length for row in even) else rows
