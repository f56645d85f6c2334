"""The [MASK] token: a dedicated row of the embedding table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_refusion.errors import UserError
from lit_refusion.tokenizer import num_token_ids

TABLE_MULTIPLE = 64
"""Embedding tables are kept at a multiple of this many rows (tensor cores, sharding)."""


def choose_mask_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, requested: int | None) -> int:
    """The id of [MASK], growing the embedding table only where it has no row to spare.

    Order: the id asked for; `mask_token_id` of the model's config (a model trained before); the tokenizer's own
    mask token; the first spare row of a padded table (Qwen3 has 267); else the table grows to the next multiple
    of 64 and the new rows start at the mean of the old ones.
    """
    rows = len(_tables(model)[0])
    candidate = _known(model, tokenizer, requested)
    if candidate is not None:
        check_mask_token(candidate, num_rows=rows, reserved=_reserved(model, tokenizer))
        return candidate
    if tokenizer is None:
        raise UserError("backbone.mask_token_id: the model has no tokenizer and no mask token; give its id")
    spare = num_token_ids(tokenizer)
    if spare >= rows:
        _grow(model, spare + 1)
    return spare


def must_grow(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, requested: int | None) -> bool:
    """Whether `choose_mask_token` would grow the table."""
    return _known(model, tokenizer, requested) is None and num_token_ids(tokenizer) >= len(_tables(model)[0])


def _known(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, requested: int | None) -> int | None:
    """The id that somebody has chosen already."""
    known = (
        requested,
        getattr(model.config, "mask_token_id", None),
        None if tokenizer is None else tokenizer.mask_token_id,
    )
    return next((candidate for candidate in known if candidate is not None), None)


def check_mask_token(mask_token_id: int, *, num_rows: int, reserved: Mapping[str, int]) -> None:
    """Refuse an id that lies outside the table or means something else."""
    if not 0 <= mask_token_id < num_rows:
        raise UserError(
            f"backbone.mask_token_id={mask_token_id} lies outside the embedding table of {num_rows} rows; "
            "leave it null to use the tokenizer's mask token or a spare row"
        )
    for name, token_id in reserved.items():
        if token_id == mask_token_id:
            raise UserError(
                f"backbone.mask_token_id={mask_token_id} is the {name} token; [MASK] needs a row of its own, "
                "leave it null to have one chosen"
            )


def check_mask_not_in_data(mask_token_id: int, token_counts: np.ndarray, *, origin: str) -> None:
    """Refuse data in which [MASK] occurs (`token_counts`: [V] occurrences of each id)."""
    if mask_token_id < len(token_counts) and token_counts[mask_token_id] > 0:
        raise UserError(
            f"{origin}: the mask token {mask_token_id} occurs {token_counts[mask_token_id]} times in the data; "
            "choose another backbone.mask_token_id or prepare the data without it"
        )


def _reserved(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, int]:
    reserved: dict[str, int] = {}
    for name in ("unk", "bos", "pad", "eos"):
        sources: tuple[Any, ...] = (model.config, tokenizer)
        for source in sources:
            token_id = getattr(source, f"{name}_token_id", None)
            for item in token_id if isinstance(token_id, (list, tuple)) else [token_id]:
                if item is not None:
                    reserved[f"{name} ({item})"] = item
    return reserved


def _grow(model: PreTrainedModel, num_tokens: int) -> None:
    old = len(_tables(model)[0])
    model.resize_token_embeddings(num_tokens, pad_to_multiple_of=TABLE_MULTIPLE, mean_resizing=False)
    with torch.no_grad():
        for table in _tables(model):
            table[old:] = table[:old].mean(dim=0)


def _tables(model: PreTrainedModel) -> list[torch.Tensor]:
    """Input and output embeddings, [V, D] each; the same tensor where they are tied."""
    layers: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [layer.weight for layer in layers]
