"""Keys and values of tokens that went through the model before. Shapes: B rows, H heads, T and C tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from lit_refusion.views import Batch


@dataclass(frozen=True)
class Context:
    """What a second forward pass may attend to beside its own tokens.

    Args:
        batch: the C tokens of each row, whose fields the attention rule reads.
        layers: keys and values of each layer, [B, H, C, head_dim] each; filled by a forward pass that records.
    """

    batch: Batch
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Recording(Cache):
    """Notes the keys and values of every layer, and returns them as they are."""

    def __init__(self, context: Context) -> None:
        super().__init__(layers=[])
        self._context = context

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """[B, H, T, head_dim] keys and values of one layer; the layers come in order."""
        self._context.layers.append((key_states, value_states))
        return key_states, value_states


class Prefix(Cache):
    """Puts a context before the keys and values of every layer; it only reads, so a pass may be repeated."""

    def __init__(self, context: Context) -> None:
        super().__init__(layers=[])
        self._context = context

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """[B, H, T, head_dim] keys and values of one layer to [B, H, C + T, head_dim]."""
        keys, values = self._context.layers[layer_idx]
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)
