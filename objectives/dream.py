"""Dream: masked diffusion for causal backbones (arXiv 2508.15487). Shapes: P prompt tokens, R response tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from lit_refusion.any_order import MEANING, any_order_row
from lit_refusion.attention import FULL, Attention, annealed
from lit_refusion.errors import UserError
from lit_refusion.examples import Example
from lit_refusion.masking import bernoulli_masks, mask_response
from lit_refusion.objective import Objective
from lit_refusion.spec import DiffusionSpec
from lit_refusion.views import View


@dataclass(frozen=True, kw_only=True)
class Dream(Objective):
    """Masked diffusion with the shift of causal models and context-adaptive token weights (CART).

    A hidden token is predicted by the row before it. With t ~ U(0, 1), p = (1 - eps) t + eps and iid masking,

        L = E_t [ 1/R  sum over hidden tokens n of  w_n (- log P(r_n | prompt, visible tokens)) ],
        w_n = 1/2 sum over visible tokens i, the prompt's included, of  q (1 - q)^(|n - i| - 1)   (geometric)

    so tokens with visible neighbours count more. Dream publishes no training code; the weights follow the
    implementation in dLLM, the normaliser 1/R is LLaDA's.

    Args:
        eps: smallest mask rate.
        weighting: "cart", or "inverse_rate" for 1/p (as in DiffuLLaMA, up to its normaliser).
        geometric_p: q of the CART weights; 0.3 in Dream.
        complementary: make two rows of half weight, hiding a set of tokens and its complement (variance).
        attention_annealing_steps: steps over which the causal mask opens to full attention; 0 for full from the start.
    """

    name: ClassVar[str] = "dream"
    terms: ClassVar[tuple[str, ...]] = ("mdm",)
    needs_mask_token: ClassVar[bool] = True

    eps: float
    weighting: Literal["cart", "inverse_rate"]
    geometric_p: float
    complementary: bool
    attention_annealing_steps: int

    def __post_init__(self) -> None:
        for name in ("eps", "geometric_p"):
            if not 0 < getattr(self, name) < 1:
                raise UserError(f"objective.{name}={getattr(self, name)}: must lie between 0 and 1")
        if self.attention_annealing_steps < 0:
            raise UserError(
                f"objective.attention_annealing_steps={self.attention_annealing_steps}: must not be negative"
            )

    def view(self, example: Example, rng: np.random.Generator) -> View:
        """The first of `views`."""
        return self.views(example, rng)[0]

    def arrange(self, example: Example, is_masked: np.ndarray, *, p_mask: float, share: float = 1.0) -> View:
        """The row for a given [R] mask; pure. `share` is the row's part of the example's loss."""
        if self.weighting == "cart":
            weights = self.cart_weights(is_masked, num_prompt=len(example.prompt_ids))
        else:
            weights = np.full(len(is_masked), 1 / p_mask)
        return mask_response(example, is_masked, share * weights / len(is_masked), shift=True, mask_rate=p_mask)

    def cart_weights(self, is_masked: np.ndarray, *, num_prompt: int) -> np.ndarray:
        """[R] CART weights."""
        is_visible = np.concatenate([np.ones(num_prompt), ~is_masked])
        total = _decayed_sum(is_visible, self.geometric_p) + _decayed_sum(is_visible[::-1], self.geometric_p)[::-1]
        return 0.5 * total[num_prompt:]

    def views(self, example: Example, rng: np.random.Generator) -> list[View]:
        """One row, or two that complement each other."""
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
        """A row with l hidden tokens of weight R / l, shifted; CART weights are not those of a likelihood."""
        return [any_order_row(example, u, rng, shift=True)]

    def masked_view(self, example: Example, is_masked: np.ndarray) -> View:
        """The response hidden in these places."""
        return self.arrange(example, is_masked, p_mask=max(self.eps, float(is_masked.mean())))

    def attention(self, step: int) -> Attention:
        """Full, or on the way there."""
        return annealed(FULL, step=step, num_steps=self.attention_annealing_steps)

    def spec(self, mask_token_id: int | None) -> DiffusionSpec:
        """Full attention, shifted."""
        return DiffusionSpec(objective=self.name, mask_token_id=mask_token_id, shift="all", attention=FULL.name)


def _decayed_sum(is_visible: np.ndarray, q: float) -> np.ndarray:
    """At n: sum over visible i < n of q (1 - q)^(n - i - 1), as a convolution cut where its terms fall below 1e-12."""
    reach = min(len(is_visible), int(np.ceil(np.log(1e-12) / np.log(1 - q))))
    kernel = q * (1 - q) ** np.arange(reach)
    return np.concatenate([[0.0], np.convolve(is_visible, kernel)[: len(is_visible) - 1]])
