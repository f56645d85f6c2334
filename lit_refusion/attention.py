"""Which key a query may see: one rule, three realisations. Shapes: B rows, T row length.

A rule reads per-token fields and nothing else, so training, evaluation and decoding cannot disagree:

    dense_mask     [B, 1, T, T] bool for SDPA (any device; the reference), or [B, 1, T, C + T] with a context
    block_mask     a FlexAttention BlockMask (CUDA; on CPU forward only)
    varlen_args    cu_seqlens for FlashAttention, where the rule is causal or full within a segment
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_refusion.errors import UserError
from lit_refusion.views import Batch

AttentionBackend = Literal["sdpa", "flex_attention", "flash_attention_2"]

BLOCK = 128
"""Tokens of a FlexAttention block, each way."""


class TokenFields(NamedTuple):
    """What a rule may read of a token; tensors that broadcast against each other."""

    segment: Tensor  # document in the row, 0 = padding
    place: Tensor  # index in the row
    position: Tensor  # index in the original prompt + response
    block: Tensor  # View.block
    noisy: Tensor  # View.noisy


@dataclass(frozen=True)
class Attention:
    """An immutable attention rule.

    Args:
        name: name stored in the DiffusionSpec.
        rule: (query fields, key fields) -> bool tensor; the segment test is added to every rule.
        varlen: "causal" or "full" where the rule is just that within a segment, else None.
    """

    name: str
    rule: Callable[[TokenFields, TokenFields], Tensor]
    varlen: str | None = None

    def allows(self, query: TokenFields, key: TokenFields) -> Tensor:
        """Whether the query sees the key. Padding (segment 0) sees padding only, so no row is empty."""
        return (query.segment == key.segment) & self.rule(query, key)


CAUSAL = Attention("causal", lambda q, k: q.place >= k.place, varlen="causal")
FULL = Attention("full", lambda q, k: q.segment == k.segment, varlen="full")

BLOCK_CAUSAL = Attention(
    "block_causal",
    # A token sees its own block in its own copy, and the clean copy of all earlier blocks (the three-part mask).
    lambda q, k: ((q.block == k.block) & (q.noisy == k.noisy)) | (~k.noisy & (q.block > k.block)),
)


def annealed(attention: Attention, *, step: int, num_steps: int) -> Attention:
    """From causal to `attention` over `num_steps`: an allowed future key is visible with probability step / num_steps.

    Which ones is a hash of (query position, key position, step): the same on every rank and in every layout. This is
    the attention-mask annealing of DiffuLLaMA (arXiv 2410.17891), where it tames the first steps of a causal model.
    """
    if step >= num_steps:
        return attention
    limit = int(step / num_steps * 2**32)

    def rule(query: TokenFields, key: TokenFields) -> Tensor:
        is_open = _scramble(query.position + _scramble(key.position + _scramble(step))) < limit
        return attention.rule(query, key) & ((query.place >= key.place) | is_open)

    return Attention(f"{attention.name}, annealed", rule)


def _scramble(x: Any) -> Any:
    """A 32-bit integer hash of a non-negative integer or tensor (multiply and xor-shift, twice)."""
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def token_fields(batch: Batch, *, first_place: int = 0) -> TokenFields:
    """[B, T] fields of a batch, whose places are counted from `first_place`."""
    place = first_place + torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
    return TokenFields(
        batch.segment_ids, place.expand_as(batch.input_ids), batch.position_ids, batch.block, batch.noisy
    )


def query_and_key_fields(batch: Batch, context: Batch | None) -> tuple[TokenFields, TokenFields]:
    """[B, T] fields of the queries and [B, C + T] of the keys, which are the context's tokens and then the queries."""
    if context is None:
        fields = token_fields(batch)
        return fields, fields
    query = token_fields(batch, first_place=context.input_ids.shape[1])
    pairs = zip(token_fields(context), query, strict=True)
    return query, TokenFields(*(torch.cat(pair, dim=1) for pair in pairs))


def dense_mask(attention: Attention, batch: Batch, *, context: Batch | None = None) -> Tensor:
    """[B, 1, T, C + T] bool, True = may see; the keys are the context's C tokens and the row's own T."""
    query, key = query_and_key_fields(batch, context)
    return attention.allows(
        TokenFields(*(field[:, :, None] for field in query)), TokenFields(*(field[:, None, :] for field in key))
    )[:, None]


def block_mask(attention: Attention, batch: Batch, *, context: Batch | None = None) -> Any:
    """FlexAttention BlockMask of the same rule (one mask for all heads), built from the blocks that hold a pair.

    `create_block_mask` evaluates the rule under vmap at every call, for 0.15 to 0.3 s; reducing the dense mask takes
    B T^2 bytes for a moment and a few kernels. Row lengths in multiples of BLOCK keep compiled kernels in use.
    """
    from torch.nn.attention.flex_attention import BlockMask

    queries, keys = query_and_key_fields(batch, context)
    lengths = queries.place.shape[1], keys.place.shape[1]
    # As tensors: a kernel that has numbers built in would be compiled anew for every row length.
    last_query, last_key = (torch.tensor(length - 1, device=batch.input_ids.device) for length in lengths)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # Whole blocks are asked for, beyond the end of the row too.
        query = TokenFields(*(field[b, q.clamp(max=last_query)] for field in queries))
        key = TokenFields(*(field[b, k.clamp(max=last_key)] for field in keys))
        return attention.allows(query, key) & (q <= last_query) & (k <= last_key)

    pairs = dense_mask(attention, batch, context=context)[:, 0]  # [B, T, C + T]
    pairs = F.pad(pairs, (0, -lengths[1] % BLOCK, 0, -lengths[0] % BLOCK))
    blocks = pairs.view(len(pairs), pairs.shape[1] // BLOCK, BLOCK, pairs.shape[2] // BLOCK, BLOCK)
    some, whole = blocks.any(dim=4).any(dim=2), blocks.all(dim=4).all(dim=2)  # [B, T / BLOCK, (C + T) / BLOCK]
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=lengths
    )


def kernel_arguments(
    kernel: AttentionBackend, attention: Attention, batch: Batch, *, context: Batch | None
) -> dict[str, Any]:
    """What a Hugging Face model takes for a rule under a kernel."""
    if kernel == "sdpa":
        return {"attention_mask": dense_mask(attention, batch, context=context)}
    if kernel == "flex_attention":
        return {"attention_mask": block_mask(attention, batch, context=context)}
    if context is not None:
        raise UserError(
            "backbone.attention=flash_attention_2 has no second keys to attend to; use flex_attention or sdpa"
        )
    return {"attention_mask": None, **varlen_args(attention, batch)}


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[B, 1, Q] number of blocks of each block row, and [B, 1, Q, K] their numbers, those of the others behind."""
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return blocks.sum(dim=-1, dtype=torch.int32)[:, None].contiguous(), order[:, None].contiguous()


def varlen_args(attention: Attention, batch: Batch) -> dict[str, Any]:
    """FlashAttention arguments: every run of one segment, padding included, is a sequence of its own.

    They are always passed explicitly: left to itself the FlashAttention path reads non-consecutive
    `position_ids` as document borders and attends wrongly without a word.
    """
    if attention.varlen is None:
        raise UserError(
            f"backbone.attention=flash_attention_2 cannot express the attention rule '{attention.name}'; "
            "use backbone.attention=flex_attention (CUDA) or sdpa"
        )
    segments = batch.segment_ids
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    ends = torch.tensor([segments.numel()], device=segments.device)
    cu_seqlens = torch.cat([starts.flatten().nonzero().flatten(), ends]).to(torch.int32)
    longest = int(cu_seqlens.diff().max())
    return {
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
        "is_causal": attention.varlen == "causal",
    }
