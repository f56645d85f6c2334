"""What runs a forward pass: the module, or the lean forward on its weights. Shapes: b rows, Q queries, D width."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from lit_refusion.backbone import Backbone
from lit_refusion.engine.cache import BufferCache
from lit_refusion.engine.graphs import GraphedForward
from lit_refusion.engine.lean import LeanForward
from lit_refusion.engine.obstacles import obstacle
from lit_refusion.engine.queries import ALL, INTERVALS, PLACE, POSITION, TOKEN, Queries, hidden_keys, starts_of
from lit_refusion.errors import UserError

Forward: TypeAlias = Callable[[Queries, list[int]], tuple[Tensor, np.ndarray]]
"""Queries and their rows of the buffer, to hidden states [M, D] and [b] where each row's begin."""


class ModuleForward:
    """The module's own forward, which takes any model."""

    def __init__(self, backbone: Backbone, cache: BufferCache, *, adapted: bool = False) -> None:
        self.backbone, self.cache = backbone, cache
        self.extra = {"adapted": True} if adapted else {}

    def __call__(self, queries: Queries, rows: list[int]) -> tuple[Tensor, np.ndarray]:
        """One forward pass; the padding is run as well."""
        table = torch.from_numpy(queries.table).to(self.backbone.device, non_blocking=True)  # [b, Q, 9]
        self.cache.aim(table[:, :, PLACE], rows=rows, visible=queries.visible)
        hidden_from = hidden_keys(table[:, :, INTERVALS], queries.visible, used=queries.used_intervals() or ALL)
        hidden = self.backbone.model.base_model(
            input_ids=table[:, :, TOKEN],
            position_ids=table[:, :, POSITION],
            attention_mask=hidden_from.logical_not_(),
            cache=self.cache,
            use_cache=True,
            **self.extra,
        ).last_hidden_state
        return hidden.flatten(0, 1), starts_of(np.full(*queries.table.shape[:2]))


def fastest_forward(backbone: Backbone, cache: BufferCache, *, is_shared: bool, adapted: bool = False) -> Forward:
    """What runs the passes of a decoding.

    Args:
        backbone: the model, with its `forward_choice`.
        cache: the buffer.
        is_shared: whether ranks share the model out, so that weights are whole inside its own forward only.
        adapted: whether they go through an adapter.

    Raises:
        UserError: the lean forward was asked for and cannot be had.
    """
    if not runs_lean(backbone, is_shared=is_shared, adapted=adapted):
        return ModuleForward(backbone, cache, adapted=adapted)
    lean = LeanForward(backbone, cache, adapted=adapted)
    return GraphedForward(lean) if backbone.device.type == "cuda" else lean


def runs_lean(backbone: Backbone, *, is_shared: bool = False, adapted: bool | None = None) -> bool:
    """Whether passes would go through the lean forward, as things are; both kinds of them where `adapted` is None.

    Raises:
        UserError: it was asked for and cannot be had.
    """
    if backbone.forward_choice == "module":
        return False
    if is_shared:
        reason: str | None = "ranks share the model out"
    elif torch.is_autocast_enabled(backbone.device.type):
        reason = "autocast is on"
    else:
        kinds = (False, True) if adapted is None else (adapted,)
        reason = next(filter(None, (obstacle(backbone, adapted=kind) for kind in kinds)), None)
    if reason is not None and backbone.forward_choice == "lean":
        raise UserError(f"forward=lean: it would not do what the module does: {reason}; use forward=auto")
    return reason is None
