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
    NaN is still NaN.
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
        shape = (config.num_hidden_layers, 2, num_rows, capacity + 1, heads, head_dim)
        self.buffer = torch.zeros(shape, dtype=dtype, device=device)
        self.trash = capacity
        self._rows = torch.zeros(0, 1, dtype=torch.long, device=device)
        self._places = self._rows
        self._visible = 0
        self._returned: slice | Tensor = slice(0)

    def aim(self, places: Tensor, *, rows: list[int], visible: int) -> None:
        """Say where the next forward pass writes.

        Args:
            places: [b, Q] place of every query.
            rows: the b rows of the buffer that the queries belong to, ascending.
            visible: the keys at places [0, visible) are returned to the attention.
        """
        self._rows = torch.tensor(rows, device=places.device)[:, None]
        self._places, self._visible = places, visible
        # Neighbouring rows are returned as they lie, others as a copy.
        is_run = rows == list(range(rows[0], rows[0] + len(rows)))
        self._returned = slice(rows[0], rows[0] + len(rows)) if is_run else self._rows[:, 0]

    def move_row(self, source: int, target: int) -> None:
        """Copy a row over another, so that the live rows stay in front."""
        self.buffer[:, :, target] = self.buffer[:, :, source]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [b, H, Q, head_dim] keys and values; return the visible part, [b, H, visible, head_dim]."""
        returned = []
        for kind, states in enumerate((key_states, value_states)):
            buffer = self.buffer[layer_idx, kind]
            buffer[self._rows, self._places] = states.transpose(1, 2).to(buffer.dtype)
            returned.append(buffer[self._returned, : self._visible].transpose(1, 2).to(states.dtype))
        return returned[0], returned[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Unused by the models, which get their positions and mask explicitly."""
        return self._visible
