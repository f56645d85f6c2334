"""Slow Orthrus (arXiv 2605.12825, methods B): both views layer by layer from the weights, nothing kept between passes.

The frozen view is the model itself, causal over the text. The block view goes through the twins: its tokens see the
frozen view's keys of the same layer at places before the anchor, and each other. Row i of either view predicts the
token at the place behind it.

Shapes: N tokens of a text, K tokens of a block, S keys, D width, H heads, G heads of keys, d width of a head,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Keys = list[tuple[Tensor, Tensor]]  # of each layer: keys [S, G, d] with their rotation, values [S, G, d]


@dataclass(frozen=True)
class SupervisedRow:
    """One term of the loss."""

    block: int
    i: int  # row in the block; it predicts token anchor + i + 1
    kl: Tensor  # scalar, KL(frozen || twins)
    ce: Tensor  # scalar, cross-entropy on the text's token


@dataclass(frozen=True)
class ReferenceDecode:
    """What one prompt was decoded to."""

    tokens: list[int]
    kinds: list[str]  # of the passes, in order
    kept: list[int]  # of each cycle: drafts that the frozen view agrees with


def frozen_view(model: Any, ids: list[int]) -> tuple[Tensor, Keys]:
    """Hidden states [N, D] behind the final norm, and the keys of every layer."""
    places = list(range(len(ids)))
    allowed = torch.tensor([[k <= q for k in places] for q in places])
    x, recorded = model.model.embed_tokens(torch.tensor(ids)), []
    for layer in model.model.layers:
        h = layer.input_layernorm(x)
        queries, keys, values = project(model, layer.self_attn, h, places)
        recorded.append((keys, values))
        x = finish(layer, x, layer.self_attn.o_proj(attend(queries, keys, values, allowed)))
    return model.model.norm(x), recorded


def block_view(model: Any, ids: list[int], anchor: int, context: Keys) -> Tensor:
    """Hidden states [K, D] of one block, whose first token stands at place `anchor`."""
    x = model.model.embed_tokens(torch.tensor(ids))
    for layer, (old_keys, old_values) in zip(model.model.layers, context, strict=True):
        h = layer.input_layernorm(x)
        queries, keys, values = project(model, layer.self_attn.twin, h, list(range(anchor, anchor + len(ids))))
        keys = torch.cat([old_keys[:anchor].detach(), keys])
        values = torch.cat([old_values[:anchor].detach(), values])
        allowed = torch.ones(len(ids), len(keys), dtype=torch.bool)
        x = finish(layer, x, layer.self_attn.twin.o_proj(attend(queries, keys, values, allowed)))
    return model.model.norm(x)


def project(model: Any, attention: Any, h: Tensor, places: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [N, H, d], keys and values [N, G, d] of tokens at these places."""
    size = model.config.head_dim
    queries, keys, values = (
        getattr(attention, name)(h).unflatten(-1, (-1, size)) for name in ("q_proj", "k_proj", "v_proj")
    )
    if hasattr(attention, "q_norm"):
        queries, keys = attention.q_norm(queries), attention.k_norm(keys)
    cos, sin = (table[0, :, None] for table in model.model.rotary_emb(h, torch.tensor([places])))
    return rotate(queries, cos, sin), rotate(keys, cos, sin), values


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: component j is paired with j + d/2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def attend(queries: Tensor, keys: Tensor, values: Tensor, allowed: Tensor) -> Tensor:
    """[N, H d] from queries [N, H, d] and keys [S, G, d], where `allowed` [N, S]."""
    repeats = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeats, dim=1), values.repeat_interleave(repeats, dim=1)
    rows = []
    for query, seen in zip(queries, allowed, strict=True):
        score = torch.einsum("hd,shd->hs", query, keys[seen]) / queries.shape[-1] ** 0.5
        rows.append(torch.einsum("hs,shd->hd", score.softmax(-1), values[seen]).flatten())
    return torch.stack(rows)


def finish(layer: Any, x: Tensor, attended: Tensor) -> Tensor:
    """The residual sums of a layer."""
    x = x + attended
    return x + layer.mlp(layer.post_attention_layernorm(x))


def loss_rows(
    model: Any, ids: list[int], *, anchors: list[int], hidden: list[list[bool]], block_size: int, mask_id: int
) -> list[SupervisedRow]:
    """The terms of one example; `hidden[b][j]` says whether block b hides the token at anchor + 1 + j."""
    states, context = frozen_view(model, ids)
    rows = []
    for number, anchor in enumerate(anchors):
        block = [ids[anchor]]
        for j in range(block_size - 1):
            place = anchor + 1 + j
            block.append(mask_id if place >= len(ids) or hidden[number][j] else ids[place])
        drafted = block_view(model, block, anchor, context)
        for i in range(block_size - 1):
            place = anchor + i + 1
            if place < len(ids) and hidden[number][i]:
                log_p = model.lm_head(states[place - 1]).log_softmax(-1).detach()
                log_q = model.lm_head(drafted[i]).log_softmax(-1)
                kl = sum_over_vocabulary(log_p.exp() * (log_p - log_q))
                rows.append(SupervisedRow(number, i, kl, -log_q[ids[place]]))
    return rows


def sum_over_vocabulary(terms: Tensor) -> Tensor:
    """Scalar, in float64 so that the order of the terms does not matter."""
    return terms.double().sum().float()


@torch.no_grad()
def decode(
    model: Any,
    prompt: list[int],
    *,
    block_size: int,
    max_new_tokens: int,
    mask_id: int,
    eos_id: int | None,
    num_steps: int = 1,
) -> ReferenceDecode:
    """Greedy decoding of one prompt; `eos_id` None for no stop. [MASK] is never said."""
    text, kinds, kept = list(prompt), ["prefill"], []
    text.append(best_tokens(model, frozen_view(model, text)[0][-1:], mask_id)[0][0])
    longest = len(prompt) + max_new_tokens
    while len(text) < longest and text[-1] != eos_id:
        anchor = len(text) - 1
        num_drafts = min(block_size, longest - anchor) - 1
        drafts = draft(model, text, num_drafts, num_steps, mask_id, kinds)
        kinds.append("verify")
        said, _ = best_tokens(model, frozen_view(model, text + drafts)[0][anchor:], mask_id)
        num_kept = 0
        while num_kept < num_drafts and drafts[num_kept] == said[num_kept]:
            num_kept += 1
        kept.append(num_kept)
        for token in said[: num_kept + 1]:
            if len(text) < longest and text[-1] != eos_id:
                text.append(token)
    return ReferenceDecode(text[len(prompt) :], kinds, kept)


def draft(model: Any, text: list[int], num_drafts: int, num_steps: int, mask_id: int, kinds: list[str]) -> list[int]:
    """The tokens behind `text`: each step fixes the likeliest of the hidden ones, its share of them."""
    anchor = len(text) - 1
    drafts: list[int | None] = [None] * num_drafts
    num_steps = min(num_steps, num_drafts)
    for step in range(num_steps):
        block = [text[anchor], *[mask_id if token is None else token for token in drafts]]
        context = frozen_view(model, text)[1]
        tokens, probabilities = best_tokens(model, block_view(model, block, anchor, context), mask_id)
        kinds.append("block")
        open_places = [j for j in range(num_drafts) if drafts[j] is None]
        open_places.sort(key=lambda j: -probabilities[j])
        share = num_drafts // num_steps + (step < num_drafts % num_steps)
        for j in open_places[:share]:
            drafts[j] = tokens[j]
    return [token for token in drafts if token is not None]


def best_tokens(model: Any, states: Tensor, mask_id: int) -> tuple[list[int], list[float]]:
    """The likeliest token of each row but [MASK], and its probability."""
    probabilities = model.lm_head(states).softmax(-1)
    probabilities[:, mask_id] = -1
    best = probabilities.max(-1)
    return best.indices.tolist(), best.values.tolist()
