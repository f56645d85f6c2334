"""BD3-LM: diffusion inside blocks, autoregression over blocks (arXiv 2503.09573).

Shapes: P prompt tokens, R response tokens, N = P + R, C tokens of the noisy copies, K noisy blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from lit_refusion.any_order import hide_some
from lit_refusion.attention import BLOCK_CAUSAL, Attention
from lit_refusion.errors import UserError
from lit_refusion.examples import Example
from lit_refusion.masking import pad_with_eos
from lit_refusion.objective import Objective
from lit_refusion.spec import DiffusionSpec
from lit_refusion.views import IGNORE, MASK, View


@dataclass(frozen=True, kw_only=True)
class BD3(Objective):
    """Each block of the response is denoised given the clean blocks before it, all in one row.

    The row is [prompt and response, clean ; noisy copies of the blocks that hold response tokens], about P + 2 R
    tokens; copies keep the positions of their originals. With t_b ~ U(t_min, t_max) for each block b and iid masking
    of its response tokens with probability t_b (log-linear schedule),

        L = E [ 1/R  sum over blocks b, hidden tokens i in b, of  1/t_b (- log P(x_i | clean blocks < b, noisy b)) ].

    Settings turn it into SDAR (one t per example, conf/objective/sdar.yaml) and Fast-dLLM v2 (uniform weights,
    complementary rows, shift: conf/objective/fast_dllm_v2.yaml).

    Args:
        block_size: tokens of a block.
        block_origin: blocks are counted from the first token of the "sequence" or of the "response"; in the latter
            the whole prompt is one block.
        t_min: smallest noise level (beta).
        t_max: largest (omega).
        t_per: "block" (BD3-LM) or "example" (SDAR).
        stratify_blocks: spread the noise levels of an example's blocks evenly: one uniform, turned by b / K.
            (The official antithetic sampling spreads them over the blocks of a whole batch: loader.mask_rates.)
        weighting: "inverse_t", or "uniform" for 1/R.
        complementary: make two rows, hiding a set of tokens and its complement; of half weight with inverse_t, of
            full weight with uniform, where every token is then supervised once.
        force_mask: hide at least one token of every example.
        shift: predict a token from the row before it, for backbones that were causal.
        pad_policy: what fills the last block: "none" leaves it short; "mask" fills it with [MASK]s that carry no loss
            (Fast-dLLM v2); "eos" continues the response with end-of-sequence tokens that are learned (dLLM).
        average: "example" for the mean over an example's tokens, then over examples, as all objectives here do in a
            comparison; "token" for the mean over all response tokens of the batch, as the published codes do.

    Differs from BD3-LM's SUBS parameterisation in that [MASK]'s own logit stays in the softmax of the loss.
    """

    name: ClassVar[str] = "bd3"
    terms: ClassVar[tuple[str, ...]] = ("mdm",)
    needs_mask_token: ClassVar[bool] = True

    block_size: int
    block_origin: Literal["sequence", "response"]
    t_min: float
    t_max: float
    t_per: Literal["block", "example"]
    stratify_blocks: bool
    weighting: Literal["inverse_t", "uniform"]
    complementary: bool
    force_mask: bool
    shift: bool
    pad_policy: Literal["none", "mask", "eos"]
    average: Literal["example", "token"]

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise UserError(f"objective.block_size={self.block_size}: must be at least 1")
        if not 0 < self.t_min <= self.t_max <= 1:
            raise UserError(f"objective.t_min={self.t_min}, t_max={self.t_max}: need 0 < t_min <= t_max <= 1")
        if self.t_per == "example" and self.stratify_blocks:
            raise UserError("objective.stratify_blocks=true needs objective.t_per=block; an example has one level here")

    @property
    def normalizer(self) -> Literal["examples", "response_tokens"]:
        """Examples or response tokens, as `average` says."""
        return "examples" if self.average == "example" else "response_tokens"

    def view(self, example: Example, rng: np.random.Generator) -> View:
        """The first of `views`."""
        return self.views(example, rng)[0]

    def arrange(self, example: Example, is_masked: np.ndarray, *, t: np.ndarray, share: float = 1.0) -> View:
        """The row for given choices; pure.

        Args:
            example: prompt and response.
            is_masked: [R] bool.
            t: [R] noise level of each token's block.
            share: the row's part of the example's loss.
        """
        ids = np.concatenate([example.prompt_ids, example.response_ids])
        num_prompt, num_response, length = len(example.prompt_ids), len(is_masked), len(ids)
        num_filled = self._num_missing(example) if self.pad_policy == "mask" else 0
        ids = np.concatenate([ids, np.full(num_filled, MASK)])
        length += num_filled
        block = self._blocks(num_prompt, num_response + num_filled)
        copied = np.flatnonzero(block >= block[num_prompt])  # [C] positions that get a noisy copy
        hidden = np.concatenate([np.zeros(num_prompt, bool), is_masked, np.zeros(num_filled, bool)])
        weights = np.zeros(length)
        response = slice(num_prompt, num_prompt + num_response)
        weights[response] = share / (num_response if self.average == "example" else 1)
        if self.weighting == "inverse_t":
            weights[response] /= t

        row = np.arange(length)  # row that predicts each position: its noisy copy, or the clean row where none is
        row[copied] = length + np.arange(len(copied))
        predicted = np.flatnonzero(hidden)
        predicting = row[predicted - 1] if self.shift else row[predicted]
        targets = np.full(length + len(copied), IGNORE, np.int64)
        row_weights = np.zeros(len(targets), np.float32)
        targets[predicting], row_weights[predicting] = ids[predicted], weights[predicted]
        return View(
            input_ids=np.concatenate([ids, np.where(hidden, MASK, ids)[copied]]),
            position_ids=np.concatenate([np.arange(length), copied]),
            targets=targets,
            weights=row_weights,
            term=np.where(targets == IGNORE, -1, 0),
            block=np.concatenate([block, block[copied]]),
            noisy=np.arange(len(targets)) >= length,
            mask_rate=float(t.mean()),
        )

    def _num_missing(self, example: Example) -> int:
        """Tokens that the last block lacks."""
        counted = len(example) if self.block_origin == "sequence" else len(example.response_ids)
        return -counted % self.block_size

    def _blocks(self, num_prompt: int, num_response: int) -> np.ndarray:
        """[N] block number of every position."""
        if self.block_origin == "sequence":
            return np.arange(num_prompt + num_response) // self.block_size
        return np.concatenate([np.zeros(num_prompt, np.int64), 1 + np.arange(num_response) // self.block_size])

    def views(self, example: Example, rng: np.random.Generator) -> list[View]:
        """One row, or two that complement each other."""
        if self.pad_policy == "eos":
            example = pad_with_eos(example, self._num_missing(example))
        num_prompt, num_response = len(example.prompt_ids), len(example.response_ids)
        block = self._blocks(num_prompt, num_response)[num_prompt:]
        block = block - block[0]  # [R] number among the noisy blocks
        count = int(block[-1]) + 1
        if self.stratify_blocks:
            u = (rng.random() + np.arange(count) / count) % 1
        else:
            u = rng.random(count) if self.t_per == "block" else np.full(count, rng.random())
        t = (self.t_min + (self.t_max - self.t_min) * u)[block]
        is_masked = rng.random(num_response) < t
        if self.force_mask and not is_masked.any():
            is_masked[rng.integers(num_response)] = True
        if not self.complementary:
            return [self.arrange(example, is_masked, t=t)]
        share = 0.5 if self.weighting == "inverse_t" else 1.0
        return [
            self.arrange(example, is_masked, t=t, share=share),
            self.arrange(example, ~is_masked, t=1 - t, share=share),
        ]

    @property
    def likelihood_kind(self) -> Literal["exact", "bound"]:
        """The bound is exact where a block has one token."""
        return "exact" if self.block_size == 1 else "bound"

    @property
    def likelihood_meaning(self) -> str:
        """The chain rule over blocks, and the any-order bound inside them."""
        if self.block_size == 1:
            return "-log p(response | prompt) by the chain rule over blocks of one token"
        given = ", tokens of its last block" if self.pad_policy == "none" else ""
        return (
            f"upper bound of -log p(response | prompt{given}): chain rule over blocks of {self.block_size}, inside a "
            "block the mean over all orders of decoding one token at a time"
        )

    def likelihood_views(self, example: Example, u: float, rng: np.random.Generator) -> list[View]:
        """A row in which every block has l of its L response tokens hidden, with weight L / l, l uniform in 1 .. L.

        Block b takes (u + b / K) mod 1 for its l. The settings of noise and weights play no part. What lacks in the
        last block is left out, or filled with [MASK]s that are not counted where training filled it.

        With `shift` the first token of a block is predicted by the clean row before it, and then seen by the others:
        so the decoder has it. In training it is predicted by the noisy row before it, which sees less.
        """
        num_prompt, num_response = len(example.prompt_ids), len(example.response_ids)
        block = self._blocks(num_prompt, num_response)
        is_opening = np.zeros(num_response, bool)
        if self.shift:
            is_opening = np.diff(block)[num_prompt - 1 :] > 0
        block = block[num_prompt:] - block[num_prompt]
        is_masked, t = np.zeros(num_response, bool), np.ones(num_response)
        for number in range(count := int(block[-1]) + 1):
            places = np.flatnonzero((block == number) & ~is_opening)
            if len(places):
                is_hidden = hide_some(len(places), (u + number / count) % 1, rng)
                is_masked[places], t[places] = is_hidden, is_hidden.mean()
        settings = replace(
            self, weighting="inverse_t", average="token", pad_policy="none" if self.pad_policy == "none" else "mask"
        )
        return [_with_openings(settings.arrange(example, is_masked, t=t), example, np.flatnonzero(is_opening))]

    def attention(self, step: int) -> Attention:
        """Block-causal over clean and noisy copies."""
        return BLOCK_CAUSAL

    def spec(self, mask_token_id: int | None) -> DiffusionSpec:
        """Block size and origin are part of the model's conventions."""
        return DiffusionSpec(
            objective=self.name,
            mask_token_id=mask_token_id,
            shift="all" if self.shift else "none",
            attention=BLOCK_CAUSAL.name,
            block_size=self.block_size,
            block_origin=self.block_origin,
            pad_policy=self.pad_policy,
        )


def _with_openings(view: View, example: Example, openings: np.ndarray) -> View:
    """The row with these response tokens predicted by the clean row before them, with weight 1."""
    rows = len(example.prompt_ids) + openings - 1
    targets, weights, term = view.targets.copy(), view.weights.copy(), view.term.copy()
    targets[rows], weights[rows], term[rows] = example.response_ids[openings], 1, 0
    return replace(view, targets=targets, weights=weights, term=term)
