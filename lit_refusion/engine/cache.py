"""A key-value buffer that is written by place and never copied. Shapes: B rows, S places, H heads, Q queries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig


class BufferCache(Cache):
    """One buffer [B, S + 1, H, head_dim] per layer and kind; the last place is trash for padded queries.

    Positions and places are separate: keys carry their RoPE positions, so where they lie does not matter, and
    tokens that a row accepts are committed without moving anything. The buffer starts as zeros, because a masked
    NaN is still NaN. In memory a place's keys and values lie side by side, so that both are written at once.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        num_rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(layers=[])
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, num_rows, capacity + 1, 2, heads, head_dim)
        self._memory = torch.zeros(shape, dtype=dtype, device=device)
        self.buffer = self._memory.permute(0, 3, 1, 2, 4, 5)  # [layers, 2, B, S + 1, H, head_dim]
        self.trash = capacity
        self._by_place = self._memory.flatten(3, 4).flatten(1, 2).unbind(0)  # per layer [B x (S + 1), 2 x H, head_dim]
        self._starts = torch.arange(num_rows, device=device)[:, None] * (capacity + 1)  # of the rows, among all places
        self._index = self._starts[:0]  # of the queries, among B x (S + 1) places
        self._visible = 0
        self._others: Tensor | None = None  # rows that are not neighbours
        self._views: tuple[Tensor, ...] = ()  # per layer [2, b, H, visible, head_dim]

    def aim(self, places: Tensor, *, rows: list[int], visible: int) -> None:
        """Say where the next forward pass writes.

        Args:
            places: [b, Q] place of every query.
            rows: the b rows of the buffer that the queries belong to, ascending.
            visible: the keys at places [0, visible) are returned to the attention.
        """
        own = slice(rows[0], rows[-1] + 1)
        is_run = own.stop - own.start == len(rows)
        # Neighbouring rows are returned as they lie, others as a copy.
        self._others = None if is_run else torch.tensor(rows, device=places.device)
        self._views = self._memory[:, own, :visible].permute(0, 3, 1, 4, 2, 5).unbind(0) if is_run else ()
        self._index = (places + self._starts[own if self._others is None else self._others]).flatten()
        self._visible = visible

    def keep(self, slots: Tensor) -> None:
        """Write [N] of the b x Q queries only."""
        self._index = self._index[slots]

    def move_row(self, source: int, target: int) -> None:
        """Copy a row over another, so that the live rows stay in front."""
        self._memory[:, target] = self._memory[:, source]

    def write(self, states: Tensor, layer_idx: int) -> None:
        """Write the queries' keys and values, [N, 2 x H, head_dim], the keys first."""
        self._by_place[layer_idx].index_copy_(0, self._index, states)

    def read(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """The visible keys and values, [b, H, visible, head_dim] each."""
        if self._others is None:
            keys, values = self._views[layer_idx].unbind(0)
        else:
            keys, values = self._memory[layer_idx, self._others, : self._visible].permute(2, 0, 3, 1, 4).unbind(0)
        return keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [b, H, Q, head_dim] keys and values; return the visible part, [b, H, visible, head_dim]."""
        states = torch.cat([key_states, value_states], dim=1).transpose(1, 2).flatten(0, 1)
        self.write(states.to(self.buffer.dtype), layer_idx)
        keys, values = self.read(layer_idx)
        return keys.to(key_states.dtype), values.to(value_states.dtype)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Unused by the models, which get their positions and mask explicitly."""
        return self._visible
