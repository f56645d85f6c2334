"""How much masked tokens depend on each other, over their distance.

Shapes: R response tokens, H hidden tokens, n pairs, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lit_refusion.backbone import Backbone
from lit_refusion.errors import UserError
from lit_refusion.examples import Example
from lit_refusion.losses import MAX_LOGITS
from lit_refusion.noise import Stream, noise
from lit_refusion.objective import LAST_STEP, Objective
from lit_refusion.views import IGNORE, View, collate

LN2 = math.log(2)
Z_95 = 1.959964
"""Standard deviations on either side that hold 95% of a normal distribution."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """The mean divergence of pairs at one distance.

    Args:
        ratio: share of the response that is hidden.
        distance: |i - j|, in tokens.
        jsd: mean Jensen-Shannon divergence in nats, between 0 and ln 2.
        low: lower end of the 95% interval; None with a single example.
        high: upper end.
        pairs: pairs (i, j) in the mean.
        examples: examples that they come from.
    """

    ratio: float
    distance: int
    jsd: float
    low: float | None
    high: float | None
    pairs: int
    examples: int


@dataclass(frozen=True, kw_only=True)
class Dependency:
    """The study of arXiv 2512.13586 (Appendix A.2), which motivates slots: dependency decays with distance.

    In an example a share of the response is hidden, at random. For two hidden tokens i and j,

        JSD( p_i(. | the tokens that are shown) || p_i(. | the same and the true token j) )

    says how much a prediction at i made without j differs from one made with it. It is 0 where deciding both in one
    pass loses nothing. [MASK] itself is left out of both distributions, as in decoding.

    The choice of pairs is our own. They are drawn so that all distances up to `max_distance` that occur in an example
    are equally likely; their mean is taken over all examples; the interval is that of a ratio of sums over examples
    (linearised, normal), since the pairs of one example are not independent.

    Args:
        ratios: shares of the response that are hidden, each in (0, 1].
        num_pairs: pairs of an example at each ratio, or all that there are.
        max_distance: largest distance of a pair.
        run_length: tokens that are hidden together, counted from the start of the response; 1 for single tokens.
        batch_size: rows of a forward pass.
        seed: of the choice of tokens, which is keyed by the example and the ratio.
    """

    ratios: tuple[float, ...]
    num_pairs: int
    max_distance: int
    run_length: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("num_pairs", "max_distance", "run_length", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be at least 1")
        if not self.ratios or not all(0 < ratio <= 1 for ratio in self.ratios):
            raise UserError(f"ratios={list(self.ratios)}: give at least one, each above 0 and at most 1")
        if self.seed < 0:
            raise UserError(f"seed={self.seed}: must not be negative")

    def measure(
        self,
        backbone: Backbone,
        objective: Objective,
        examples: Sequence[Example],
        *,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Point]:
        """The mean divergence at every ratio and distance that occurs.

        Args:
            backbone: the model.
            objective: what it was trained with: it lays out the rows and says what they attend to.
            examples: to hide tokens of.
            on_progress: told how many examples are done.

        Raises:
            UserError: the objective has no row for a free choice of hidden tokens, or no example has two of them.
        """
        shape = (len(self.ratios), len(examples), self.max_distance + 1)
        sums, counts = np.zeros(shape), np.zeros(shape, np.int64)
        was_training = backbone.training
        backbone.eval()
        try:
            for number, example in enumerate(examples):
                for place, ratio in enumerate(self.ratios):
                    pairs, divergence = self.divergences(backbone, objective, example, ratio)
                    distance = np.abs(pairs[:, 0] - pairs[:, 1])
                    np.add.at(sums[place, number], distance, divergence)
                    np.add.at(counts[place, number], distance, 1)
                if on_progress:
                    on_progress(number + 1)
        finally:
            backbone.train(was_training)
        if not counts.any():
            raise UserError(
                "no example has two hidden tokens within max_distance; give longer responses or more ratios"
            )
        return [
            _point(ratio, distance, sums[place, :, distance], counts[place, :, distance])
            for place, ratio in enumerate(self.ratios)
            for distance in np.flatnonzero(counts[place].sum(axis=0)).tolist()
        ]

    def divergences(
        self, backbone: Backbone, objective: Objective, example: Example, ratio: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """[n, 2] pairs (i, j) of response tokens, and [n] the divergence at i that revealing j makes."""
        rng = noise(self.seed, index=example.index, epoch=round(ratio * 10**6), stream=Stream.DEPENDENCY)
        is_masked = draw_mask(len(example.response_ids), ratio, self.run_length, rng)
        pairs = draw_pairs(np.flatnonzero(is_masked), self.num_pairs, self.max_distance, rng)
        if len(pairs) == 0:
            return pairs, np.zeros(0)
        revealed, starts = np.unique(pairs[:, 1], return_index=True)  # pairs are sorted by j
        masks = np.repeat(is_masked[None], len(revealed), axis=0)
        masks[np.arange(len(revealed)), revealed] = False
        with torch.inference_mode(), backbone.using_sdpa():
            without = self._states(backbone, objective, example, is_masked[None], [pairs[:, 0]])
            given = self._states(backbone, objective, example, masks, np.split(pairs[:, 0], starts[1:]))
            return pairs, compare(backbone, without, given)

    def _states(
        self,
        backbone: Backbone,
        objective: Objective,
        example: Example,
        masks: np.ndarray,
        wanted: Sequence[np.ndarray],
    ) -> Tensor:
        """[n, D] final states of the rows that predict the `wanted` hidden tokens under each of the masks."""
        attention = objective.attention(LAST_STEP)
        parts = []
        for start in range(0, len(masks), self.batch_size):
            chunk = slice(start, start + self.batch_size)
            views = [objective.masked_view(example, is_masked) for is_masked in masks[chunk]]
            batch = collate(
                [[view] for view in views],
                mask_token_id=backbone.mask_token_id,
                pad_to_multiple=1,
                num_examples=1,
                num_response_tokens=1,
            ).to(backbone.device)
            states = backbone(batch, attention)  # [B, T, D]
            rows = [predicting_rows(*item) for item in zip(views, masks[chunk], wanted[chunk], strict=True)]
            owner = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
            places = torch.from_numpy(np.stack([owner, np.concatenate(rows)])).to(backbone.device)
            parts.append(states[places[0], places[1]])
        return torch.cat(parts)


def predicting_rows(view: View, is_masked: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Rows of a `masked_view` that predict these response tokens, all of them hidden."""
    rows, hidden = np.flatnonzero(view.targets != IGNORE), np.flatnonzero(is_masked)
    assert len(rows) == len(hidden), f"{len(rows)} supervised rows for {len(hidden)} hidden tokens"
    return rows[np.searchsorted(hidden, wanted)]


def compare(backbone: Backbone, one: Tensor, two: Tensor) -> np.ndarray:
    """[n] divergences between the predictions of two [n, D] stacks of final states."""
    limit = max(1, MAX_LOGITS // backbone.vocab_size)
    parts = []
    for rows in zip(one.split(limit), two.split(limit), strict=True):
        logits = [backbone.logits(states).double() for states in rows]
        for table in logits:
            table[:, backbone.mask_token_id] = -torch.inf
        parts.append(jensen_shannon(*(table.log_softmax(-1) for table in logits)))
    return torch.cat(parts).cpu().numpy()


def jensen_shannon(log_p: Tensor, log_q: Tensor) -> Tensor:
    """[n] Jensen-Shannon divergences in nats of [n, V] log-probabilities, symmetric and between 0 and ln 2.

    The mean of KL(p || m) and KL(q || m), with m = (p + q) / 2.
    """
    log_m = torch.logaddexp(log_p, log_q) - LN2
    terms = [torch.where(x > -torch.inf, x.exp() * (x - log_m), 0).sum(-1) for x in (log_p, log_q)]
    return ((terms[0] + terms[1]) / 2).clamp(0, LN2)


def draw_mask(num_tokens: int, ratio: float, run_length: int, rng: np.random.Generator) -> np.ndarray:
    """[R] bool: a share of the tokens in whole runs, at least one run, and at least two of single tokens."""
    num_runs = -(-num_tokens // run_length)
    count = min(num_runs, max(round(ratio * num_runs), 2 if run_length == 1 else 1))
    chosen = rng.permutation(num_runs)[:count]
    return np.isin(np.arange(num_tokens) // run_length, chosen)


def draw_pairs(hidden: np.ndarray, num_pairs: int, max_distance: int, rng: np.random.Generator) -> np.ndarray:
    """[n, 2] ordered pairs (i, j) of different hidden tokens, without repeats, sorted by j.

    All distances that occur are equally likely, whatever the number of their pairs.
    """
    i, j = (places.ravel() for places in np.meshgrid(hidden, hidden))
    distance = np.abs(i - j)
    is_near = (distance > 0) & (distance <= max_distance)
    i, j, distance = i[is_near], j[is_near], distance[is_near]
    frequency = np.bincount(distance, minlength=1)[distance]
    # The smallest of exponential draws over weights: a draw without replacement in proportion to the weights.
    chosen = np.argsort(rng.exponential(size=len(i)) * frequency, kind="stable")[:num_pairs]
    chosen = chosen[np.lexsort((i[chosen], j[chosen]))]
    return np.stack([i[chosen], j[chosen]], axis=1)


def _point(ratio: float, distance: int, sums: np.ndarray, counts: np.ndarray) -> Point:
    """The mean over all pairs of [E] examples, and its interval."""
    total, num_examples = int(counts.sum()), int((counts > 0).sum())
    mean = float(sums.sum() / total)
    low = high = None
    if num_examples > 1:
        residual = sums - mean * counts
        spread = Z_95 * math.sqrt(num_examples / (num_examples - 1) * float((residual**2).sum())) / total
        low, high = max(0.0, mean - spread), min(LN2, mean + spread)
    return Point(ratio=ratio, distance=distance, jsd=mean, low=low, high=high, pairs=total, examples=num_examples)
