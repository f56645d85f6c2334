"""Cross-entropy at supervised rows only. Shapes: M supervised rows, D width, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

MAX_LOGITS = 2**24
"""Logit elements that exist at a time (fp32: 64 MiB); a chunk has MAX_LOGITS // V rows."""


def token_cross_entropy(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, *, vocab_size: int
) -> Tensor:
    """Cross-entropy of each row in fp32, [M], without ever holding [M, V].

    The rows go through the head in chunks and each chunk's logits are computed again in the backward pass:
    a third more head arithmetic for memory that does not grow with M. Checkpointed chunks were chosen over
    `torch.nn.functional.linear_cross_entropy`, which saves as much but took four times as long on CPU; the head
    must also be called as a module, where sharded strategies gather its weight.

    Args:
        logits_of: maps [m, D] to [m, V]; called as a module so that sharded strategies can gather its weight.
        hidden: [M, D].
        targets: [M] int64.
    """

    def chunk_loss(rows: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits_of(rows).float(), labels, reduction="none")

    rows_per_chunk = max(1, MAX_LOGITS // vocab_size)
    chunks = zip(hidden.split(rows_per_chunk), targets.split(rows_per_chunk))
    if len(hidden) <= rows_per_chunk:
        return chunk_loss(hidden, targets)
    return torch.cat([checkpoint(chunk_loss, rows, labels, use_reentrant=False) for rows, labels in chunks])
