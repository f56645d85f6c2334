"""Likelihoods that can be compared across training methods.

Shapes: B rows, T row length, M supervised rows, n draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lit_refusion.attention import BLOCK, Attention
from lit_refusion.backbone import Backbone
from lit_refusion.errors import UserError
from lit_refusion.examples import Example
from lit_refusion.losses import MAX_LOGITS
from lit_refusion.noise import Stream, noise
from lit_refusion.objective import Objective
from lit_refusion.spec import DiffusionSpec
from lit_refusion.views import IGNORE, View, collate

Row = tuple[int, int, View]
"""Number of an example, number of a draw, and one of the rows of it."""


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """What was found for one response.

    Args:
        index: of the example.
        nats: -log p(response | prompt), or the estimate of its bound: the mean over the draws, over all tokens.
        standard_error: of `nats`, from the noise of the draws; 0 where it is exact, NaN for a bound of one draw.
        tokens: response tokens.
        num_draws: rows that were averaged.
        is_greedy: whether each token is the likeliest, [MASK] apart; None where that was not asked for, or where the
            likelihood is a bound and so no single way of decoding.
    """

    index: int
    nats: float
    standard_error: float
    tokens: int
    num_draws: int
    is_greedy: bool | None = None


@torch.no_grad()
def negative_log_likelihood(
    backbone: Backbone,
    objective: Objective,
    examples: Sequence[Example],
    *,
    num_draws: int,
    seed: int,
    max_tokens_per_batch: int,
    check_greedy: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> list[Likelihood]:
    """Measure -log p(response | prompt) of each example, or the bound that the objective has for it.

    Noise is keyed by (seed, example, draw), and the uniform of draw m lies in [m / n, (m + 1) / n): the figures depend
    neither on the batches nor on the other examples.

    Args:
        backbone: the model, `prepare`d if the objective adds parameters.
        objective: what it was trained with.
        examples: prompts and responses of at least one token each.
        num_draws: n, of each example; one is taken where the likelihood is exact.
        seed: of the draws.
        max_tokens_per_batch: B x T of a forward pass; a longer row has a pass of its own.
        check_greedy: find out whether the responses are the greedy ones, where the likelihood is exact.
        on_progress: told how many examples are done.

    Returns:
        One result for each example, in their order.

    Raises:
        UserError: the objective has no likelihood, or an example is empty or does not fit into the model's window.
    """
    kind = objective.likelihood_kind
    if kind is None:
        raise UserError(f"objective={objective.name}: it has no likelihood; choose an objective that has one")
    if num_draws < 1 or max_tokens_per_batch < 1:
        raise UserError(f"num_draws={num_draws}, max_tokens_per_batch={max_tokens_per_batch}: must be at least 1")
    for example in examples:
        _check(example, window=backbone.max_length)
    num_draws, check_greedy = (1, check_greedy) if kind == "exact" else (num_draws, False)
    order = sorted(range(len(examples)), key=lambda number: -len(examples[number]))
    done = {number: count for count, number in enumerate(order)}
    draws, misses = np.zeros((len(examples), num_draws)), np.zeros(len(examples), np.int64)
    was_training = backbone.training
    backbone.eval()
    try:
        rows = _rows(objective, examples, order, num_draws=num_draws, seed=seed)
        for batch in _batches(rows, max_tokens=max_tokens_per_batch):
            found = _measure(backbone, [row[2] for row in batch], objective.likelihood_attention(), check_greedy)
            for (number, draw, _), (nats, num_missed) in zip(batch, found, strict=True):
                draws[number, draw] += nats
                misses[number] += num_missed
            if on_progress:
                on_progress(done[batch[-1][0]])
    finally:
        backbone.train(was_training)
    if on_progress:
        on_progress(len(examples))
    return [
        Likelihood(
            index=example.index,
            nats=float(own.mean()),
            standard_error=0.0 if kind == "exact" else standard_error(own),
            tokens=len(example.response_ids),
            num_draws=num_draws,
            is_greedy=bool(missed == 0) if check_greedy else None,
        )
        for example, own, missed in zip(examples, draws, misses, strict=True)
    ]


def _check(example: Example, *, window: int | None) -> None:
    """Refuse what cannot be measured."""
    if not len(example.prompt_ids) or not len(example.response_ids):
        raise UserError(
            f"example {example.index}: {len(example.prompt_ids)} prompt and {len(example.response_ids)} response "
            "tokens; a likelihood needs one of each at least (an end-of-sequence token can stand for the prompt)"
        )
    if window is not None and len(example) > window:
        raise UserError(
            f"example {example.index}: {len(example)} tokens exceed the model's window of {window}; leave it out"
        )


def _rows(
    objective: Objective, examples: Sequence[Example], order: Sequence[int], *, num_draws: int, seed: int
) -> Iterator[Row]:
    """The rows of all draws, example by example, made as they are needed."""
    for number in order:
        example = examples[number]
        for draw in range(num_draws):
            rng = noise(seed, index=example.index, epoch=draw, stream=Stream.LIKELIHOOD)
            u = (draw + rng.random()) / num_draws
            yield from ((number, draw, view) for view in objective.likelihood_views(example, u, rng))


def _batches(rows: Iterator[Row], *, max_tokens: int) -> Iterator[list[Row]]:
    """Rows in their order, as many together as the padded batch may hold."""
    batch: list[Row] = []
    longest = 0
    for row in rows:
        length = max(longest, len(row[2]))
        if batch and length * (len(batch) + 1) > max_tokens:
            yield batch
            batch, length = [], len(row[2])
        batch.append(row)
        longest = length
    if batch:
        yield batch


def _measure(
    backbone: Backbone, views: Sequence[View], attention: Attention, check_greedy: bool
) -> list[tuple[float, int]]:
    """(weighted sum of the cross-entropies, number of tokens that are not the likeliest) of each row."""
    batch = collate(
        [[view] for view in views],
        mask_token_id=backbone.mask_token_id,
        pad_to_multiple=BLOCK if backbone.attention_backend == "flex_attention" else 1,
        num_examples=len(views),
        num_response_tokens=1,
    ).to(backbone.device)
    hidden = backbone(batch, attention)  # [B, T, D]
    is_supervised = batch.targets != IGNORE
    rows, targets = hidden[is_supervised], batch.targets[is_supervised]
    losses = (backbone.token_cross_entropy(rows, targets) * batch.weights[is_supervised]).double()
    missed = _misses(backbone, rows, targets) if check_greedy else torch.zeros_like(losses)
    owner = is_supervised.nonzero()[:, 0]  # [M]
    sums = losses.new_zeros(len(views), 2).index_add(0, owner, torch.stack([losses, missed], dim=1))
    return [(nats, int(count)) for nats, count in sums.tolist()]


def _misses(backbone: Backbone, rows: Tensor, targets: Tensor) -> Tensor:
    """[M] 1.0 where another token than the target is the likeliest; [MASK] is none that may be decoded."""
    size = max(1, MAX_LOGITS // backbone.vocab_size)
    best = []
    for part in rows.split(size):
        logits = backbone.logits(part)
        logits[:, backbone.mask_token_id] = -torch.inf
        best.append(logits.argmax(-1))
    return (torch.cat(best) != targets).double()


def standard_error(draws: np.ndarray) -> float:
    """Standard error of the mean of [n] draws, each from its own slice of the unit interval, in order.

    From the squared differences of neighbours, sum_m (x_m - x_(m-1))^2 / (2 n (n - 1)): neighbours differ by noise, and
    little by their slices, whereas the spread of all draws holds what stratification has removed. For independent
    draws it is unbiased as well. NaN for one draw.
    """
    count = len(draws)
    return math.sqrt((np.diff(draws) ** 2).sum() / (2 * count * (count - 1))) if count > 1 else math.nan


def figures(likelihoods: Sequence[Likelihood]) -> dict[str, float]:
    """Sums over examples, and what follows from them; errors are those of the draws, independent across examples.

    Bits per token and perplexity are over all response tokens, and not means of examples' ratios.
    """
    nats, tokens = sum(found.nats for found in likelihoods), sum(found.tokens for found in likelihoods)
    error = math.sqrt(sum(found.standard_error**2 for found in likelihoods))
    perplexity = math.exp(min(nats / tokens, 700.0))  # e^700 is near the largest float
    return {
        "examples": len(likelihoods),
        "tokens": tokens,
        "nats": nats,
        "nats_error": error,
        "nats_per_token": nats / tokens,
        "nats_per_token_error": error / tokens,
        "bits_per_token": nats / tokens / math.log(2),
        "bits_per_token_error": error / tokens / math.log(2),
        "perplexity": perplexity,
        "perplexity_error": perplexity * error / tokens,
    }


def check_conventions(objective: Objective, spec: DiffusionSpec, *, model: str) -> None:
    """Refuse an objective whose conventions are not those that a model was trained with.

    Raises:
        UserError: names the first convention that differs, both values, and the setting.
    """
    own, trained = objective.spec(spec.mask_token_id).to_dict(), spec.to_dict()
    for name, value in trained.items():
        if own[name] != value:
            raise UserError(
                f"objective: {name} is {own[name]}, but model={model} was trained with {value}; give the settings of "
                "its training (objective.NAME=VALUE), which its run folder has"
            )
