"""The seam of a training method. Shapes: B rows, T row length, M supervised rows, D width."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from lit_refusion.attention import Attention
from lit_refusion.backbone import Backbone
from lit_refusion.errors import UserError
from lit_refusion.examples import Example
from lit_refusion.spec import DiffusionSpec
from lit_refusion.views import IGNORE, Batch, View

LAST_STEP = 2**62
"""An optimizer step at which every schedule is at its end."""


@dataclass(frozen=True)
class Loss:
    """Sums, not means: only the trainer divides, by the count of the whole optimizer step.

    Args:
        total: scalar, sum over supervised rows of weight x token loss.
        token_loss: [M] unweighted loss of each supervised row, detached.
        token_weight: [M] its weight.
        token_term: [M] index into `Objective.terms`.
        token_mask_rate: [M] noise level of its example, NaN where undefined.
    """

    total: Tensor
    token_loss: Tensor
    token_weight: Tensor
    token_term: Tensor
    token_mask_rate: Tensor

    @classmethod
    def of(cls, batch: Batch, is_supervised: Tensor, token_loss: Tensor) -> Loss:
        """From the [M] losses of the rows of a batch where `is_supervised` [B, T] holds."""
        weight = batch.weights[is_supervised]
        return cls(
            total=(weight * token_loss).sum(),
            token_loss=token_loss.detach(),
            token_weight=weight,
            token_term=batch.term[is_supervised],
            token_mask_rate=batch.mask_rate[is_supervised],
        )


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """A training method: a frozen dataclass of hyperparameters, without defaults and without parameters.

    A subclass says what a row looks like (`view`), what it attends to (`attention`) and how its terms are
    called (`terms`). It never divides by a batch size: `weights` of a view sum one example's terms, and
    `normalizer` says what the trainer divides the sum over the whole optimizer step by.
    """

    name: ClassVar[str]
    terms: ClassVar[tuple[str, ...]]
    needs_mask_token: ClassVar[bool]

    @property
    def normalizer(self) -> Literal["examples", "response_tokens"]:
        """Denominator of the loss; known from the clean batch, never from the noise."""
        return "examples"

    @property
    def measure(self) -> str:
        """What the loss of a single row is, as the figures name it: "ce" for cross-entropy."""
        return "ce"

    @abstractmethod
    def view(self, example: Example, rng: np.random.Generator) -> View:
        """What one example looks like in training; `rng` is the only randomness, its first draw the mask rate."""

    def views(self, example: Example, rng: np.random.Generator) -> list[View]:
        """All rows made of one example; the weights of all of them together sum its terms. Default: one view."""
        return [self.view(example, rng)]

    @abstractmethod
    def attention(self, step: int) -> Attention:
        """The attention rule at an optimizer step (only schedules read it)."""

    @abstractmethod
    def spec(self, mask_token_id: int | None) -> DiffusionSpec:
        """The conventions that a decoder must share."""

    @property
    def likelihood_kind(self) -> Literal["exact", "bound"] | None:
        """What `likelihood_views` estimate: -log p ("exact", by any one draw), an upper bound of it, or nothing."""
        return None

    @property
    def likelihood_meaning(self) -> str:
        """What the estimate is, in a sentence for the result file."""
        return "none"

    def likelihood_views(self, example: Example, u: float, rng: np.random.Generator) -> list[View]:
        """Rows whose weighted cross-entropies sum to an estimate of -log p(response | prompt), in nats, not per token.

        The mean over `u` and `rng` is the figure that `likelihood_kind` names. They may differ from the rows of
        training, and see what `likelihood_attention` says.

        Args:
            example: with at least one prompt token, from which the first response token can be predicted.
            u: uniform on [0, 1), in the place of the noise level, so that the draws of an example can be stratified.
            rng: all other randomness.

        Raises:
            UserError: the objective has no likelihood.
        """
        raise UserError(f"objective={self.name}: it has no likelihood; it would have to define likelihood_views")

    def likelihood_attention(self) -> Attention:
        """The attention rule of `likelihood_views`: that of training, its schedule at the end."""
        return self.attention(LAST_STEP)

    def prepare(self, backbone: Backbone) -> None:  # noqa: B027 - a hook, not a duty
        """Change the backbone before training, for example freeze it and add parameters. Default: nothing."""

    def loss(self, backbone: Backbone, batch: Batch, *, step: int) -> Loss:
        """Weighted cross-entropy on the supervised rows.

        A batch without supervised rows still reaches every parameter, with weight 0, so that no rank of a
        distributed run waits for its gradient.
        """
        hidden = backbone(batch, self.attention(step))  # [B, T, D]
        is_supervised = supervised_rows(batch)
        targets = batch.targets[is_supervised].clamp(min=0)
        return Loss.of(batch, is_supervised, backbone.token_cross_entropy(hidden[is_supervised], targets))

    def masked_view(self, example: Example, is_masked: np.ndarray) -> View:
        """The row in which just the response tokens of `is_masked` ([R] bool) are hidden, for studies of a model.

        Nothing in it is random. Its supervised rows predict the hidden tokens, one each, in reading order.

        Raises:
            UserError: the objective has no row for any set of hidden tokens.
        """
        raise UserError(
            f"objective={self.name}: it hides no free choice of tokens; it would have to define masked_view"
        )


def supervised_rows(batch: Batch) -> Tensor:
    """[B, T] bool: the rows with a loss; where there is none, one of weight 0."""
    is_supervised = batch.targets != IGNORE
    if not is_supervised.any():
        is_supervised = is_supervised.clone()
        is_supervised[0, 0] = True
    return is_supervised
