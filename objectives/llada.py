"""LLaDA: masked diffusion over the whole response (arXiv 2502.09992). Shapes: P prompt tokens, R response tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from lit_refusion.any_order import MEANING, any_order_row
from lit_refusion.attention import FULL, Attention, annealed
from lit_refusion.errors import UserError
from lit_refusion.examples import Example
from lit_refusion.masking import bernoulli_masks, mask_response, pad_with_eos
from lit_refusion.objective import Objective
from lit_refusion.spec import DiffusionSpec
from lit_refusion.views import View


@dataclass(frozen=True, kw_only=True)
class LLaDA(Objective):
    """Every response token is hidden with the same probability and predicted with full attention.

    With t ~ U(0, 1), p = (1 - eps) t + eps and iid masking of the response (supervised fine-tuning, Eq. 5),

        L = E_t [ 1/R  sum over hidden tokens i of  1/p  (- log P(r_i | prompt, visible tokens)) ],

    an upper bound of the negative log-likelihood per token.

    Args:
        eps: smallest mask rate.
        shift: false in the paper; true predicts a token from the row before it, for backbones that were causal.
        pad_policy: "eos" continues the response with end-of-sequence tokens, which are hidden, supervised and counted
            in R like any other (the official convention, so that a fixed canvas can end early).
        pad_multiple: with "eos", padding goes up to a multiple of this many tokens.
        pad_scope: what becomes a multiple: the "response", or the "row" with its prompt (set pad_multiple to the row
            length to fill every row). Padding to the longest row of a batch, as the official collator does, would
            make an example's loss depend on its neighbours.
        complementary: make two rows of half weight, hiding a set of tokens and its complement (variance).
        attention_annealing_steps: steps over which the causal mask opens to full attention; 0 for full from the start.
    """

    name: ClassVar[str] = "llada"
    terms: ClassVar[tuple[str, ...]] = ("mdm",)
    needs_mask_token: ClassVar[bool] = True

    eps: float
    shift: bool
    pad_policy: Literal["none", "eos"]
    pad_multiple: int
    pad_scope: Literal["response", "row"]
    complementary: bool
    attention_annealing_steps: int

    def __post_init__(self) -> None:
        if not 0 < self.eps < 1:
            raise UserError(f"objective.eps={self.eps}: must lie between 0 and 1")
        if self.pad_multiple < 1:
            raise UserError(f"objective.pad_multiple={self.pad_multiple}: must be at least 1")
        if self.attention_annealing_steps < 0:
            raise UserError(
                f"objective.attention_annealing_steps={self.attention_annealing_steps}: must not be negative"
            )

    def view(self, example: Example, rng: np.random.Generator) -> View:
        """The first of `views`."""
        return self.views(example, rng)[0]

    def arrange(self, example: Example, is_masked: np.ndarray, *, p_mask: float, share: float = 1.0) -> View:
        """The row for a given [R] mask; pure. `share` is the row's part of the example's loss."""
        weights = np.full(len(is_masked), share / (p_mask * len(is_masked)))
        return mask_response(example, is_masked, weights, shift=self.shift, mask_rate=p_mask)

    def views(self, example: Example, rng: np.random.Generator) -> list[View]:
        """One row, or two that complement each other."""
        if self.pad_policy == "eos":
            length = len(example) if self.pad_scope == "row" else len(example.response_ids)
            example = pad_with_eos(example, -length % self.pad_multiple)
        masks = bernoulli_masks(len(example.response_ids), rng, eps=self.eps, complementary=self.complementary)
        return [self.arrange(example, is_masked, p_mask=p, share=1 / len(masks)) for is_masked, p in masks]

    @property
    def likelihood_kind(self) -> Literal["exact", "bound"]:
        """The negative evidence lower bound."""
        return "bound"

    @property
    def likelihood_meaning(self) -> str:
        """The any-order bound."""
        return MEANING

    def likelihood_views(self, example: Example, u: float, rng: np.random.Generator) -> list[View]:
        """A row with l hidden tokens of weight R / l (Eq. 6); padding is left out, whatever `pad_policy`."""
        return [any_order_row(example, u, rng, shift=self.shift)]

    def masked_view(self, example: Example, is_masked: np.ndarray) -> View:
        """The response hidden in these places, without padding."""
        return self.arrange(example, is_masked, p_mask=max(self.eps, float(is_masked.mean())))

    def attention(self, step: int) -> Attention:
        """Full, or on the way there."""
        return annealed(FULL, step=step, num_steps=self.attention_annealing_steps)

    def spec(self, mask_token_id: int | None) -> DiffusionSpec:
        """Full attention; the shift as set."""
        return DiffusionSpec(
            objective=self.name,
            mask_token_id=mask_token_id,
            shift="all" if self.shift else "none",
            attention=FULL.name,
            pad_policy=self.pad_policy,
        )
