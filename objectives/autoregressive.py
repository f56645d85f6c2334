"""Next-token prediction on the response. Shapes: P prompt tokens, R response tokens, N = P + R."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from lit_refusion.attention import CAUSAL, Attention
from lit_refusion.examples import Example
from lit_refusion.objective import Objective
from lit_refusion.spec import DiffusionSpec
from lit_refusion.views import IGNORE, View


@dataclass(frozen=True, kw_only=True)
class Autoregressive(Objective):
    """Plain causal language modelling: L = - sum_i log P(r_i | p, r_<i), over response tokens only.

    The prompt's last token predicts the first response token.

    Args:
        average: "example" for the mean over an example's tokens, then over examples; "token" for the mean over
            all response tokens of the batch, in which long responses count more.
    """

    name: ClassVar[str] = "autoregressive"
    terms: ClassVar[tuple[str, ...]] = ("ar",)
    needs_mask_token: ClassVar[bool] = False

    average: Literal["example", "token"]

    @property
    def normalizer(self) -> Literal["examples", "response_tokens"]:
        """Examples or response tokens, as `average` says."""
        return "examples" if self.average == "example" else "response_tokens"

    def view(self, example: Example, rng: np.random.Generator) -> View:
        """The example as it stands; row i predicts token i + 1."""
        input_ids = np.concatenate([example.prompt_ids, example.response_ids])
        num_prompt, num_response = len(example.prompt_ids), len(example.response_ids)
        supervised = slice(num_prompt - 1, len(input_ids) - 1)
        targets = np.full(len(input_ids), IGNORE, np.int64)
        targets[supervised] = example.response_ids
        weights = np.zeros(len(input_ids), np.float32)
        weights[supervised] = 1 / num_response if self.average == "example" else 1
        return View(
            input_ids=input_ids,
            position_ids=np.arange(len(input_ids)),
            targets=targets,
            weights=weights,
            term=np.where(targets == IGNORE, -1, 0),
        )

    @property
    def likelihood_kind(self) -> Literal["exact", "bound"]:
        """The chain rule."""
        return "exact"

    @property
    def likelihood_meaning(self) -> str:
        """The chain rule."""
        return "-log p(response | prompt) by the chain rule"

    def likelihood_views(self, example: Example, u: float, rng: np.random.Generator) -> list[View]:
        """The row of training, every response token with weight 1."""
        return [replace(self, average="token").view(example, rng)]

    def attention(self, step: int) -> Attention:
        """Causal."""
        return CAUSAL

    def spec(self, mask_token_id: int | None) -> DiffusionSpec:
        """Shift by one everywhere; no [MASK]."""
        return DiffusionSpec(objective=self.name, mask_token_id=None, shift="all", attention=CAUSAL.name)
