"""ReFusion: slots decoded in any order, tokens in a slot left to right (arXiv 2512.13586).

Shapes: P prompt tokens, R response tokens, N = P + R, K slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from lit_refusion.attention import CAUSAL, Attention
from lit_refusion.errors import UserError
from lit_refusion.examples import Example
from lit_refusion.objective import Objective
from lit_refusion.spec import DiffusionSpec
from lit_refusion.views import IGNORE, MASK, View

AR, MDM = 0, 1  # indices into ReFusion.terms


@dataclass(frozen=True, kw_only=True)
class ReFusion(Objective):
    """Hybrid of autoregression on clean slots and masked prediction on the others (arXiv 2512.13586, Eqs. 2-4).

    The response is cut into K = ceil(R / k) slots. The row is: prompt, clean slots in random order, masked slots in
    their own order; every token keeps its original position id; attention is causal over the row. With lambda =
    `mdm_weight`,

        L = L_AR + lambda L_MDM,    t ~ U(0, 1)
        L_AR  = mean over the clean slots' tokens j >= 2 of  - log P(v_ij | what stands before it in the row)
        L_MDM = mean over masked tokens of                   - log P(v_ij | what stands before it in the row)

    Clean tokens are predicted by their predecessor in the slot (shifted by one); [MASK] inputs predict themselves.
    The first token of a clean slot is never an AR target, since an unrelated slot stands before it.

    Args:
        slot_sizes: slot sizes in tokens; each example draws one.
        masking: "bernoulli" (official code): each slot is masked with p = (1 - eps) t + eps, and a masked token
            weighs 1 / (p R). "exact" (paper): floor(t K) slots are masked, and a masked token weighs 1 / num_masked.
        mdm_weight: lambda.
        eps: smallest mask rate of "bernoulli".
        complementary: make two rows of half weight, one's masked slots being the other's clean ones (variance).
    """

    name: ClassVar[str] = "refusion"
    terms: ClassVar[tuple[str, ...]] = ("ar", "mdm")
    needs_mask_token: ClassVar[bool] = True

    slot_sizes: tuple[int, ...]
    masking: Literal["bernoulli", "exact"]
    mdm_weight: float
    eps: float
    complementary: bool

    def __post_init__(self) -> None:
        if not self.slot_sizes or min(self.slot_sizes) < 1:
            raise UserError(f"objective.slot_sizes={list(self.slot_sizes)}: give at least one size, each at least 1")
        if not 0 < self.eps < 1:
            raise UserError(f"objective.eps={self.eps}: must lie between 0 and 1")
        if self.mdm_weight < 0:
            raise UserError(f"objective.mdm_weight={self.mdm_weight}: must not be negative")

    def view(self, example: Example, rng: np.random.Generator) -> View:
        """The first of `views`."""
        return self.views(example, rng)[0]

    def views(self, example: Example, rng: np.random.Generator) -> list[View]:
        """One row, or two that complement each other."""
        t = rng.random()
        slot_size = self.slot_sizes[rng.integers(len(self.slot_sizes))]
        num_slots = -(-len(example.response_ids) // slot_size)
        p_mask = (1 - self.eps) * t + self.eps
        if self.masking == "bernoulli":
            is_masked = rng.random(num_slots) < p_mask
        else:
            is_masked = np.zeros(num_slots, bool)
            is_masked[rng.permutation(num_slots)[: int(t * num_slots)]] = True
        choices = [(is_masked, p_mask)]
        if self.complementary:
            choices.append((~is_masked, 1 - p_mask))
        return [
            self.arrange(
                example,
                slot_size=slot_size,
                masked_slots=np.flatnonzero(masked),
                clean_slot_order=rng.permutation(np.flatnonzero(~masked)),
                p_mask=p,
                share=1 / len(choices),
            )
            for masked, p in choices
        ]

    def arrange(
        self,
        example: Example,
        *,
        slot_size: int,
        masked_slots: Sequence[int] | np.ndarray,
        clean_slot_order: Sequence[int] | np.ndarray,
        p_mask: float,
        share: float = 1.0,
    ) -> View:
        """The row for given choices; pure.

        Args:
            example: prompt and response.
            slot_size: k; the last slot may be shorter.
            masked_slots: numbers of the masked slots.
            clean_slot_order: numbers of all other slots, in generation order.
            p_mask: probability with which a slot was masked (read by "bernoulli" weights only).
            share: the row's part of the example's loss.

        Example terms with no target (no clean slot, or no masked one) contribute 0.
        Differs from the official code, which averages the AR term over the tokens of a micro-batch: that depends
        on the other examples, and is NaN where no slot is clean.
        """
        num_prompt, num_response = len(example.prompt_ids), len(example.response_ids)
        clean = _slot_places(clean_slot_order, slot_size, num_response)
        masked = _slot_places(sorted(masked_slots), slot_size, num_response)
        order = np.concatenate([clean, masked])  # [R] place in the response of each row after the prompt
        assert len(order) == num_response, f"slots cover {len(order)} of {num_response} response tokens"

        tokens = example.response_ids[order]
        is_mask = np.arange(num_response) >= len(clean)
        # Row i predicts its neighbour i + 1 where that is the next token of the same slot.
        follows = np.zeros(num_response, bool)
        follows[:-1] = (order[1:] == order[:-1] + 1) & (order[1:] % slot_size != 0)
        is_ar = follows & ~is_mask & ~np.roll(is_mask, -1)
        targets = np.where(is_mask, tokens, np.where(is_ar, np.roll(tokens, -1), IGNORE))
        term = np.where(is_mask, MDM, np.where(is_ar, AR, -1))

        num_masked, num_ar = len(masked), max(1, is_ar.sum())
        mdm = 1 / (p_mask * num_response) if self.masking == "bernoulli" else 1 / max(1, num_masked)
        weights = np.where(is_mask, self.mdm_weight * mdm, np.where(is_ar, 1 / num_ar, 0))
        weights = share * weights

        prompt = np.zeros(num_prompt, np.int64)
        return View(
            input_ids=np.concatenate([example.prompt_ids, np.where(is_mask, MASK, tokens)]),
            position_ids=np.concatenate([np.arange(num_prompt), num_prompt + order]),
            targets=np.concatenate([prompt + IGNORE, targets]),
            weights=np.concatenate([prompt, weights]).astype(np.float32),
            term=np.concatenate([prompt - 1, term]),
            mask_rate=p_mask if self.masking == "bernoulli" else num_masked / num_response,
        )

    @property
    def likelihood_kind(self) -> Literal["exact", "bound"]:
        """A bound: the order of the slots is averaged over, outside the logarithm."""
        return "bound"

    @property
    def likelihood_meaning(self) -> str:
        """The bound over orders of slots."""
        return (
            f"upper bound of -log p(response | prompt, number of slots): mean over all orders of slots of "
            f"{min(self.slot_sizes)} tokens, the first token of a slot from its [MASK], which sees the decoded slots "
            "and the [MASK]s of open slots on its left, and the others by the chain rule"
        )

    def likelihood_views(self, example: Example, u: float, rng: np.random.Generator) -> list[View]:
        """Two rows of training for a random order sigma of the slots, with other weights.

        (a) The first s = floor(u K) slots of sigma are clean and the others masked; the first token of each masked
            slot is a target, of weight K / (K - s).
        (b) All slots are clean, in the order sigma; the AR targets of training have weight 1. Where all slots have one
            token there are none, and no row.

        The process that they score draws sigma uniformly, and takes the open slots in that order: a slot's first token
        is drawn from its [MASK], behind the slots decoded so far and the [MASK]s of the open slots on its left, and
        its other tokens follow one by one, behind the decoded slots alone. The number of slots is given, and so is the
        length of a short last one. With Jensen's inequality, as the logarithm is concave,

            - log p(v) = - log E_sigma[p(v | sigma)] <= E_sigma[- log p(v | sigma)]
                       = E_sigma[- sum_s log P(first token of slot sigma_s+1 | sigma_1 .. sigma_s, [MASK]s on its left)
                                 - sum_i sum_(j >= 2) log P(v_ij | slots before slot i in sigma, v_i1 .. v_i,j-1)],

        everything given the prompt. The mean over `u` and `rng` is the last line: with s slots clean, sigma is as
        likely to go on with any of the K - s open ones, and K times the mean over s is the sum over s. Slots have the
        smallest of `slot_sizes`.
        """
        size, num_prompt = min(self.slot_sizes), len(example.prompt_ids)
        order = rng.permutation(-(-len(example.response_ids) // size))
        num_slots = len(order)
        num_clean = min(num_slots - 1, int(u * num_slots))  # u may have been rounded up to 1
        num_open = num_slots - num_clean
        first = self.arrange(
            example, slot_size=size, masked_slots=order[num_clean:], clean_slot_order=order[:num_clean], p_mask=1.0
        )
        is_first = (first.term == MDM) & ((first.position_ids - num_prompt) % size == 0)
        rest = self.arrange(example, slot_size=size, masked_slots=[], clean_slot_order=order, p_mask=1.0)
        rows = [
            _weigh(first, is_first * num_slots / num_open, mask_rate=num_open / num_slots),
            _weigh(rest, (rest.term == AR) * 1.0, mask_rate=0.0),
        ]
        return [row for row in rows if row.weights.any()]

    def masked_view(self, example: Example, is_masked: np.ndarray) -> View:
        """Slots of one token, the clean ones in reading order in front of the masked ones."""
        return self.arrange(
            example,
            slot_size=1,
            masked_slots=np.flatnonzero(is_masked),
            clean_slot_order=np.flatnonzero(~is_masked),
            p_mask=max(self.eps, float(is_masked.mean())),
        )

    def attention(self, step: int) -> Attention:
        """Causal over the row as arranged, not over original positions."""
        return CAUSAL

    def spec(self, mask_token_id: int | None) -> DiffusionSpec:
        """[MASK] inputs predict themselves, clean inputs the next token."""
        return DiffusionSpec(
            objective=self.name,
            mask_token_id=mask_token_id,
            shift="clean",
            attention=CAUSAL.name,
            slot_sizes=self.slot_sizes,
        )


def _slot_places(slots: Sequence[int] | np.ndarray, slot_size: int, num_response: int) -> np.ndarray:
    """Places in the response of the tokens of `slots`, slot by slot; the last slot may be short."""
    starts = np.asarray(slots, np.int64) * slot_size
    places = (starts[:, None] + np.arange(slot_size)).ravel()
    return places[places < num_response]


def _weigh(row: View, weights: np.ndarray, *, mask_rate: float) -> View:
    """The same row with these weights, and no targets but those that have one."""
    return replace(
        row,
        targets=np.where(weights > 0, row.targets, IGNORE),
        weights=weights.astype(np.float32),
        term=np.where(weights > 0, row.term, -1),
        mask_rate=mask_rate,
    )
