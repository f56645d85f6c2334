"""Hiding tokens of a response: the row that every masked objective is made of. Shapes: P prompt, R response tokens."""

from __future__ import annotations

import numpy as np

from lit_refusion.examples import Example
from lit_refusion.views import IGNORE, MASK, View


def mask_response(
    example: Example, is_masked: np.ndarray, weights: np.ndarray, *, shift: bool, mask_rate: float
) -> View:
    """Prompt and response in their own order, some response tokens hidden and supervised.

    Args:
        example: the example.
        is_masked: [R] bool.
        weights: [R] weight of each token's cross-entropy; read where it is masked.
        shift: a hidden token is predicted by the row before it, as a causal model does, instead of its own row.
        mask_rate: noise level of the example.
    """
    num_prompt = len(example.prompt_ids)
    ids = np.concatenate([example.prompt_ids, example.response_ids])
    hidden = np.concatenate([np.zeros(num_prompt, bool), is_masked])
    row_weights = np.concatenate([np.zeros(num_prompt), np.where(is_masked, weights, 0)])
    targets = np.where(hidden, ids, IGNORE)
    if shift:
        targets, row_weights = np.roll(targets, -1), np.roll(row_weights, -1)
    return View(
        input_ids=np.where(hidden, MASK, ids),
        position_ids=np.arange(len(ids)),
        targets=targets,
        weights=row_weights.astype(np.float32),
        term=np.where(targets == IGNORE, -1, 0),
        mask_rate=mask_rate,
    )


def bernoulli_masks(
    num_tokens: int, rng: np.random.Generator, *, eps: float, complementary: bool
) -> list[tuple[np.ndarray, float]]:
    """An iid mask ([num_tokens] bool) and its rate p = (1 - eps) t + eps, t ~ U(0, 1); its complement too, if asked.

    Either way each mask's 1/p weighting is unbiased: a token is hidden in it with just that probability.
    """
    p_mask = (1 - eps) * rng.random() + eps
    is_masked = rng.random(num_tokens) < p_mask
    return [(is_masked, p_mask), (~is_masked, 1 - p_mask)][: 2 if complementary else 1]


def pad_with_eos(example: Example, count: int) -> Example:
    """The response continued by `count` copies of its last token, the end-of-sequence token."""
    padding = np.full(count, example.response_ids[-1])
    return Example(
        index=example.index,
        prompt_ids=example.prompt_ids,
        response_ids=np.concatenate([example.response_ids, padding]),
        source=example.source,
    )
