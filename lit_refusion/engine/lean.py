"""A forward pass on the module's own weights, without the module around them.

The module is made for training and for every caller: for a model of a few layers, or a few queries, most of a pass is
Python between kernels. Shapes: b rows, Q queries of the longest, N queries in all, D width, H query heads, K key heads,
d head_dim, G = H / K.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lit_refusion.backbone import Backbone
from lit_refusion.engine.cache import BufferCache
from lit_refusion.engine.queries import ALL, INTERVALS, PLACE, POSITION, Queries, Used, hidden_keys, starts_of
from lit_refusion.engine.weights import Layer, norm_of

CALL_FLOPS = {"cpu": 5e5}
"""By kind of device: the operations that could be done while attention is called once more, some 10 us."""

OTHER_CALL_FLOPS = 5e8
"""The same on any other device, an estimate."""


class Sight(NamedTuple):
    """What the queries of some rows see of their rows of the buffer, and how attention is told."""

    rows: slice | None  # of those that take part in the pass; None for all, with padding
    own: slice | None  # their queries; None for all
    visible: int
    mask: Tensor | None  # see `additive_mask`; None where all is seen, or causal attention is meant
    is_causal: bool


class _Workspace(NamedTuple):
    """What the layers of one pass share: rotations, sights, and memory that each fills anew."""

    cos: Tensor  # [N, 1, d]
    sin: Tensor  # [N, 1, d]
    query: Tensor  # [N, H x d]; this and the next five are views of one [N, H + 2 x K, d]
    key: Tensor  # [N, K x d]
    value: Tensor  # [N, K x d]
    query_heads: Tensor  # [N, H, d]
    query_key: Tensor  # [N, H + K, d]
    key_value: Tensor  # [N, 2 x K, d]
    padding: tuple[Tensor, Tensor] | None  # [N] slots of the queries in [b x Q, H, d] with padding
    groups: list[tuple[Sight, Tensor]]  # sights, and [b, H, Q, d] views of their queries


class LeanForward:
    """The final hidden states of queries, with keys and values in the buffer, as the module would give them.

    Made anew for every decoding: it holds views of the weights as they are, and training may replace them.

    Args:
        backbone: a model for which `obstacle` is None.
        cache: the buffer.
        adapted: whether it runs the passes of an adapter.
    """

    def __init__(self, backbone: Backbone, cache: BufferCache, *, adapted: bool = False) -> None:
        base: Any = backbone.model.base_model
        attention, config = base.layers[0].self_attn, base.config
        self.cache = cache
        self.heads, self.key_heads, self.head_dim = (
            config.num_attention_heads, config.num_key_value_heads, attention.head_dim
        )  # fmt: skip
        self.groups = self.heads // self.key_heads
        self.scaling = attention.scaling
        self.embedding, self.norm = base.embed_tokens.weight.detach(), norm_of(base.norm)
        self.layers = [
            Layer.of(layer, heads=self.heads, key_heads=self.key_heads, adapted=adapted)
            for layer in base.layers[: config.num_hidden_layers]
        ]
        self.zero, self.minus_infinity = self.embedding.new_tensor([0.0, -torch.inf]).unbind()
        self.rotary = base.rotary_emb
        self.rotations = self._rotations(torch.arange(cache.trash + 1, device=self.embedding.device))
        # Masked attention with grouped heads has no fast kernel on CUDA; the heads of a group can go as queries.
        self.joins_groups = self.embedding.is_cuda and self.groups > 1

    def __call__(self, queries: Queries, rows: list[int]) -> tuple[Tensor, np.ndarray]:
        """One forward pass for these rows of the buffer.

        Returns:
            [N, D] hidden states of the true queries, and [b] where each row's begin.
        """
        device = self.embedding.device
        table = torch.from_numpy(queries.table).to(device, non_blocking=True)
        slots = None if queries.slots is None else torch.from_numpy(queries.slots).to(device, non_blocking=True)
        self.cache.aim(table[:, :, PLACE], rows=rows, visible=queries.visible)
        is_far = queries.table[:, :, POSITION].max() >= len(self.rotations)
        return self.run(table, self._sights(queries, table), slots=slots, is_far=is_far), starts_of(queries.lengths)

    def _sights(self, queries: Queries, table: Tensor) -> list[Sight]:
        """One for all rows; one for each where padding would cost more than calls do, as beside a long prompt."""
        if len(table) > 1 and self._padding_costs_more(queries):
            return self._sights_by_row(queries)
        if queries.is_causal:
            return [Sight(None, None, queries.visible, None, True)]
        used = queries.used_intervals()
        mask = self.additive_mask(table[:, :, INTERVALS], queries.visible, used=used) if used else None
        return [Sight(None, None, queries.visible, mask, False)]

    def _padding_costs_more(self, queries: Queries) -> bool:
        b, longest = queries.table.shape[:2]
        pairs = b * longest * queries.visible - queries.lengths @ queries.table[:, :, INTERVALS].max((1, 2))
        return pairs * 4 * self.heads * self.head_dim > b * CALL_FLOPS.get(self.embedding.device.type, OTHER_CALL_FLOPS)

    def _sights_by_row(self, queries: Queries) -> list[Sight]:
        rows = [queries.row(number) for number in range(len(queries.table))]
        is_causal = [row.is_causal for row in rows]
        masks = self._masks([row for row, causal in zip(rows, is_causal) if not causal])
        starts = starts_of(queries.lengths).tolist()
        return [
            Sight(
                rows=slice(number, number + 1),
                own=slice(start, start + row.table.shape[1]),
                visible=row.visible,
                mask=None if causal else next(masks),
                is_causal=causal,
            )
            for number, (row, start, causal) in enumerate(zip(rows, starts, is_causal))
        ]

    def _masks(self, rows: list[Queries]) -> Iterator[Tensor]:
        """[1, 1, Q or G x Q, visible] of each row, made together."""
        if rows:
            joined = Queries.end_to_end(rows)
            bounds = torch.from_numpy(joined.table[:, :, INTERVALS]).to(self.embedding.device, non_blocking=True)
            mask = self._mask(bounds, joined.visible, used=joined.used_intervals() or ALL)
            for row, part in zip(rows, mask.split([row.table.shape[1] for row in rows], dim=2)):
                yield self._for_groups(part[..., : row.visible])

    def additive_mask(self, intervals: Tensor, visible: int, *, used: Used = ALL) -> Tensor:
        """[b, 1, Q or G x Q, visible] zeros where a key is seen, else -inf: SDPA would make it in every layer."""
        return self._for_groups(self._mask(intervals, visible, used=used))

    def _mask(self, intervals: Tensor, visible: int, *, used: Used) -> Tensor:
        """[b, 1, Q, visible]."""
        return torch.where(hidden_keys(intervals, visible, used=used), self.minus_infinity, self.zero)

    def _for_groups(self, mask: Tensor) -> Tensor:
        """[b, 1, G x Q, visible] where the heads of a group go as queries."""
        return mask.repeat(1, 1, self.groups, 1) if self.joins_groups else mask

    def run(self, table: Tensor, sights: list[Sight], *, slots: Tensor | None, is_far: bool = False) -> Tensor:
        """[N, D] hidden states of queries, whose keys and values go to the buffer as it is aimed.

        Args:
            table: [b, Q, 9] the queries.
            sights: what they see, for all rows together or for each.
            slots: [N] numbers among b x Q of those that count; None where all do.
            is_far: whether a position lies beyond the table of rotations.
        """
        columns = table[:, :, :PLACE].flatten(0, 1)
        if slots is not None:
            columns = columns[slots]
            self.cache.keep(slots)
        tokens, positions = columns.unbind(1)
        rotation = self._rotations(positions) if is_far else self.rotations.index_select(0, positions)  # [N, 2, d]
        x = self.embedding.index_select(0, tokens)
        work = self._workspace(rotation, sights, slots, shape=table.shape[:2])
        for number, layer in enumerate(self.layers):
            x = self._layer(x, number, layer, work)
        return self.norm(x)

    def _workspace(
        self, rotation: Tensor, sights: list[Sight], slots: Tensor | None, *, shape: torch.Size
    ) -> _Workspace:
        h, k, d = self.heads, self.key_heads, self.head_dim
        memory = rotation.new_empty(len(rotation), h + 2 * k, d)
        queries = memory[:, :h]
        query, key, value = memory.flatten(1).split_with_sizes([h * d, k * d, k * d], dim=1)
        padding = None
        if len(sights) > 1:
            groups = [(sight, queries[sight.own].transpose(0, 1)[None]) for sight in sights]
        else:
            padding = None if slots is None else (slots, memory.new_zeros(shape.numel(), h, d))
            groups = [(sights[0], (padding[1] if padding else queries).view(*shape, h, d).transpose(1, 2))]
        cos, sin = rotation.split(1, dim=1)
        return _Workspace(cos, sin, query, key, value, queries, memory[:, : h + k], memory[:, h:], padding, groups)

    def _layer(self, x: Tensor, number: int, layer: Layer, work: _Workspace) -> Tensor:
        """[N, D] to [N, D]."""
        self._project(layer.attention_norm(x), layer, work)
        self.cache.write(work.key_value, number)
        x = layer.output.added_to(x, self._attend(*self.cache.read(number), work))
        y = layer.mlp_norm(x)
        return layer.down.added_to(x, F.silu(layer.gate(y), inplace=True).mul_(layer.up(y)))

    def _project(self, x: Tensor, layer: Layer, work: _Workspace) -> None:
        """Fill the workspace with the heads of [N, D] normalised states; queries and keys are rotated."""
        layer.query(x, out=work.query)
        layer.key(x, out=work.key)
        layer.value(x, out=work.value)
        heads = work.query_key if layer.head_norm is None else layer.head_norm(work.query_key)
        torch.addcmul(heads * work.cos, heads.roll(self.head_dim // 2, -1), work.sin, out=work.query_key)

    def _attend(self, keys: Tensor, values: Tensor, work: _Workspace) -> Tensor:
        """[N, H x d] what the queries find in [b, K, visible, d] keys and values."""
        if work.padding is not None:
            slots, padded = work.padding
            padded.index_copy_(0, slots, work.query_heads)
        found = [self._attend_group(sight, queries, keys, values) for sight, queries in work.groups]
        if work.padding is not None:
            return found[0].index_select(0, slots)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _attend_group(self, sight: Sight, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[b x Q, H x d] what [b, H, Q, d] queries find."""
        if sight.rows is not None:
            keys, values = keys[sight.rows, :, : sight.visible], values[sight.rows, :, : sight.visible]
        if self.joins_groups and sight.mask is not None:
            b, _, length, d = queries.shape
            joined = queries.reshape(b, self.key_heads, self.groups * length, d)  # heads of a group are neighbours
            found = F.scaled_dot_product_attention(joined, keys, values, sight.mask, scale=self.scaling)
            found = found.unflatten(2, (self.groups, length)).permute(0, 3, 1, 2, 4)  # [b, Q, K, G, d]
        else:
            found = F.scaled_dot_product_attention(
                queries, keys, values, sight.mask, is_causal=sight.is_causal, scale=self.scaling, enable_gqa=True
            ).transpose(1, 2)  # [b, Q, H, d]
        return found.reshape(-1, self.heads * self.head_dim)

    def _rotations(self, positions: Tensor) -> Tensor:
        """[N, 2, d] cosine and sine of RoPE at [N] positions, the sine with the signs of the rotated halves."""
        cos, sin = self.rotary(self.embedding, positions[None])
        sign = torch.ones_like(sin)
        sign[..., : self.head_dim // 2] = -1
        return torch.stack([cos[0], (sign * sin)[0]], dim=1)
