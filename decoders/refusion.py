"""ReFusion decoding: select slots, verify their drafts, complete what failed (arXiv 2512.13586, Appendix A.3).

Shapes: P prompt tokens, L response positions, k tokens of a slot, m slots at hand, n committed buffer places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias

import numpy as np

from lit_refusion.decoder import Decoder
from lit_refusion.engine.request import Reply, Row, Sampling
from lit_refusion.errors import UserError
from lit_refusion.generation import Generation
from lit_refusion.slots import DraftedSlots, accept_alone, accept_together, first_true
from lit_refusion.spec import DiffusionSpec
from lit_refusion.speculation import Part, Passes, Question, acceptance, choose, likely_runs
from lit_refusion.views import MASK

Certainty = Literal["first_token", "mean_probability", "mean_entropy"]
Accept: TypeAlias = Callable[[DraftedSlots, np.ndarray, int], DraftedSlots]


@dataclass(frozen=True, kw_only=True)
class ReFusionDecoder(Decoder):
    """Slots of a block in any order, tokens of a slot left to right, every key reused.

    One round: a forward pass over the block's [MASK]s drafts every slot and scores it; slots with certainty above
    `slot_threshold` (or the best one) are selected (Eqs. 5-6). A second pass over the selected drafts verifies them:
    with l leading tokens of probability above `token_threshold`, floor(l / k) slots are accepted (Eq. 7). Where not
    even one is, the selected slots are completed in parallel, each by itself, verifying and predicting in turn
    (Eqs. 8-9).

    Differs from the paper, as the official code does: the first open token of a slot is accepted without a test,
    which is what makes every round end; comparisons are strict; an end-of-sequence token inside the verified prefix
    ends the response there.

    Args:
        slot_size: k, tokens of a slot.
        block_size: b, tokens decoded before moving right; a multiple of k.
        slot_threshold: certainty above which a slot is selected; 1 selects one slot at a time.
        token_threshold: probability above which a drafted token is accepted.
        temperature: of the first draft only; probabilities are always those at temperature 1.
        certainty: score of a slot: probability of its first draft, or the mean over the slot of the drafts'
            probabilities or of exp(-entropy) (geometric), the paper's Table 7.
        recompute_kv: after a completion, run its tokens once more so that their keys see each other (Table 8).
        as_released: reproduce the released code's fault: when a completed slot ends the response, masked slots
            before it can be deleted undecoded.
        stop_at_eos: cut `tokens` after the first end-of-sequence token (`uncut_tokens` has the rest).
        speculation_budget: queries that a verifying pass of a row may carry beside its own, to ask already what will
            probably be asked next; the tokens stay the same, with fewer passes. 0 for none. Needs temperature 0:
            guesses would use up sampling noise.
    """

    objectives: ClassVar[frozenset[str]] = frozenset({"refusion"})

    slot_size: int
    block_size: int
    slot_threshold: float
    token_threshold: float
    temperature: float
    certainty: Certainty
    recompute_kv: bool
    as_released: bool
    stop_at_eos: bool
    speculation_budget: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slot_size < 1 or self.block_size < 1 or self.block_size % self.slot_size:
            raise UserError(
                f"decoder.slot_size={self.slot_size} does not divide decoder.block_size={self.block_size}; "
                "choose a block of whole slots"
            )
        for name in ("slot_threshold", "token_threshold"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"decoder.{name}={getattr(self, name)}: must lie in [0, 1]")
        if self.temperature < 0:
            raise UserError(f"decoder.temperature={self.temperature}: must not be negative")
        if self.speculation_budget < 0:
            raise UserError(f"decoder.speculation_budget={self.speculation_budget}: must not be negative")
        if self.speculation_budget and self.temperature > 0:
            raise UserError(
                f"decoder.speculation_budget={self.speculation_budget}: needs temperature 0, found "
                f"decoder.temperature={self.temperature}; set one of them to 0"
            )

    @property
    def canvas(self) -> int:
        """L: the budget rounded up to whole slots."""
        return -(-self.max_new_tokens // self.slot_size) * self.slot_size

    def capacity(self, longest_prompt: int) -> int:
        """Guesses are written behind everything else."""
        return super().capacity(longest_prompt) + self.speculation_budget

    def fit_to(self, spec: DiffusionSpec, *, force: bool = False) -> Decoder:
        """Refuses slot sizes that the model was not trained with."""
        if spec.slot_sizes and self.slot_size not in spec.slot_sizes and not force:
            raise UserError(
                f"decoder.slot_size={self.slot_size}: it was trained with slots of {list(spec.slot_sizes)}; choose "
                "one of them, or pass force=true"
            )
        return super().fit_to(spec, force=force)

    def row(self, prompt: np.ndarray, eos_token_id: int, rng: np.random.Generator) -> Row:
        """Block by block, round by round."""
        return _Response(self, prompt, eos_token_id).decode()


@dataclass
class _Response:
    """The state of one row.

    `num_committed` (n) is the number of buffer places whose keys are final: the prompt, then the accepted slots in
    the order of acceptance. Everything behind it is scratch: selected slots from n on, slot s of them from n + s k on,
    and guesses behind them.
    """

    settings: ReFusionDecoder
    prompt: np.ndarray  # [P]
    eos: int
    num_committed: int = 0
    is_over: bool = False
    todo: np.ndarray = field(init=False)  # masked slots that the round is about, left to right
    response: np.ndarray = field(init=False)  # [L] token, or MASK
    passes: Passes = field(default_factory=Passes)
    round_rates: list[float] = field(default_factory=list)
    is_verified: list[bool] = field(default_factory=list)  # of each accepted slot: as it was drafted, or completed

    def decode(self) -> Row:
        """Decode block by block, round by round."""
        self.response = np.full(self.settings.canvas, MASK, np.int64)
        self.todo = self._block(0)
        while len(self.todo):
            yield from self._round()
        return self._finish()

    def _block(self, number: int) -> np.ndarray:
        """Numbers of its slots; none behind the last block."""
        k, b = self.settings.slot_size, self.settings.block_size
        return np.arange(number * b // k, min((number + 1) * b, self.settings.canvas) // k)

    def _round(self) -> Part[None]:
        """Select, verify and, where needed, complete."""
        k, num_requests = self.settings.slot_size, self.passes.num_requests
        draft = yield from self._select()
        num_selected = len(draft.numbers)
        together = self._row(draft.numbers, draft.tokens.ravel(), n=self.num_committed)
        draft = yield from self._verify(draft, [together], accept_together)
        while draft.is_open.any():
            draft = yield from self._predict(draft)
            draft = yield from self._verify(draft, self._each(draft, draft.keyed), accept_alone)
        text = draft.text(self.eos)
        if self._is_recomputed(draft):
            again = self._row(draft.numbers, text, n=self.num_committed, is_answered=False)
            yield from self._ask("recompute", [again], draft, outcomes=[(1.0, self._next_selection(draft))])

        where = self._where(draft.numbers)[: len(text)]
        self.response[where] = text
        self.passes.commit(where, text)
        self.todo = self._remaining(draft)
        self.num_committed += len(text)
        self.is_over |= draft.ends_at is not None
        num_decided = len(draft.numbers) if draft.is_verified else num_selected
        self.is_verified += [draft.is_verified] * num_decided
        self.round_rates.append(k * num_decided / (self.passes.num_requests - num_requests))

    def _select(self) -> Part[DraftedSlots]:
        """Stage I: draft and score all masked slots; the first pass carries the prompt."""
        k, settings = self.settings.slot_size, self.settings
        [reply] = yield from self.passes.ask(
            "select",
            self._selection(self.todo, n=self.num_committed),
            sampling=Sampling(temperature=settings.temperature),
            entropy=settings.certainty == "mean_entropy",
        )
        self.num_committed = max(self.num_committed, len(self.prompt))
        tokens, p_draft = reply.tokens.reshape(-1, k), reply.p_token.reshape(-1, k)
        chosen = (certainty := self._certainty(reply)) > settings.slot_threshold
        if not chosen.any():
            chosen[certainty.argmax()] = True
        none = np.zeros(chosen.sum(), np.int64)
        return DraftedSlots(
            numbers=self.todo[chosen], tokens=tokens[chosen], p_draft=p_draft[chosen], done=none, keyed=none
        )

    def _certainty(self, reply: Reply) -> np.ndarray:
        """[m] of each slot."""
        k, kind = self.settings.slot_size, self.settings.certainty
        if kind == "first_token":
            return reply.p_token[::k]
        if kind == "mean_probability":
            return reply.p_token.reshape(-1, k).mean(1)
        return np.exp(-reply.entropy.reshape(-1, k).mean(1))

    def _verify(self, draft: DraftedSlots, asked: list[Question], accept: Accept) -> Part[DraftedSlots]:
        """Run drafts and accept the leading ones that pass; the first open token of a slot does without a test."""
        threshold, is_forced = self.settings.token_threshold, np.arange(self.settings.slot_size) <= draft.done[:, None]
        outcomes = []
        if self.settings.speculation_budget:
            runs = likely_runs(np.where(is_forced, 1, acceptance(draft.p_draft, threshold)))
            outcomes = [(p, self._following(accept(draft, run, self.eos))) for p, run in runs]
        replies = yield from self._ask("verify", asked, draft, outcomes=outcomes)
        p_next = np.zeros(draft.tokens.shape)  # of column j: the probability of token j + 1
        p_next[draft.is_open] = np.concatenate([reply.p_target for reply in replies])
        passes = is_forced.copy()
        passes[:, 1:] |= p_next[:, :-1] > threshold
        return accept(draft, np.logical_and.accumulate(passes, axis=1).sum(1), self.eos)

    def _predict(self, draft: DraftedSlots) -> Part[DraftedSlots]:
        """Draft the open tokens of every slot anew, behind its accepted ones (Eq. 9)."""
        num_passes = len(self.passes.steps)
        replies = yield from self.passes.ask("predict", self._predictions(draft))
        tokens, p_draft, is_open = draft.tokens.copy(), draft.p_draft.copy(), draft.is_open
        tokens[is_open] = np.concatenate([reply.tokens for reply in replies])
        p_draft[is_open] = np.concatenate([reply.p_token for reply in replies])
        was_run = len(self.passes.steps) > num_passes  # the keys of guesses are not where they should be
        keyed = np.where(was_run & is_open.any(1), draft.done, draft.keyed)
        return replace(draft, tokens=tokens, p_draft=p_draft, keyed=keyed)

    def _ask(
        self, kind: str, asked: list[Question], draft: DraftedSlots, *, outcomes: list[tuple[float, list[Question]]]
    ) -> Part[list[Reply]]:
        """Ask, and guess what is asked next."""
        guesses = choose(outcomes, self.settings.speculation_budget)
        return self.passes.ask(
            kind,
            asked,
            guesses=guesses,
            free=self.num_committed + draft.tokens.size,
            entropy=bool(guesses) and self.settings.certainty == "mean_entropy",
        )

    def _following(self, draft: DraftedSlots) -> list[Question]:
        """What is asked after this outcome of a verification."""
        if draft.is_open.any():
            return self._predictions(draft)
        return [] if self._is_recomputed(draft) else self._next_selection(draft)

    def _is_recomputed(self, draft: DraftedSlots) -> bool:
        return self.settings.recompute_kv and not draft.is_verified

    def _next_selection(self, draft: DraftedSlots) -> list[Question]:
        return self._selection(self._remaining(draft), n=self.num_committed + len(draft.text(self.eos)))

    def _remaining(self, draft: DraftedSlots) -> np.ndarray:
        """The slots to be decoded after a complete draft, of this block or the next."""
        todo = self.todo
        if draft.ends_at is not None:
            if self.settings.as_released and not draft.is_verified:
                # The fault: a place among the selected slots, used as a place among all masked ones.
                todo = todo[: len(draft.numbers) - 1]
            todo = todo[todo < draft.ends_at]
        todo = todo[(todo[:, None] != draft.numbers).all(1)]
        if len(todo) or self.is_over or draft.ends_at is not None:
            return todo
        return self._block(int(draft.numbers[0]) * self.settings.slot_size // self.settings.block_size + 1)

    def _selection(self, slots: np.ndarray, *, n: int) -> list[Question]:
        masks = np.full(len(slots) * self.settings.slot_size, MASK)
        return [self._row(slots, masks, n=n)] if len(slots) else []

    def _predictions(self, draft: DraftedSlots) -> list[Question]:
        return self._each(replace(draft, tokens=np.where(draft.is_open, MASK, draft.tokens)), draft.done)

    def _row(self, slots: np.ndarray, tokens: np.ndarray, *, n: int, is_answered: bool = True) -> Question:
        """Slots in one causal row behind n committed places, and behind the prompt where it is not committed yet."""
        where = len(self.prompt) + self._where(slots)[: len(tokens)]
        return Question(
            tokens=(*self.prompt[n:].tolist(), *tokens.tolist()),
            positions=(*range(n, len(self.prompt)), *where.tolist()),
            sees=((0, n),),
            num_replies=len(tokens) if is_answered else 0,
        )

    def _each(self, draft: DraftedSlots, known: np.ndarray) -> list[Question]:
        """Slots of fewer than k known tokens, each by itself from its first token without keys on; open ones reply."""
        k, n = self.settings.slot_size, self.num_committed
        asked = []
        for s in np.flatnonzero(known < k).tolist():
            base, keyed = n + s * k, int(draft.keyed[s])
            start = len(self.prompt) + int(draft.numbers[s]) * k
            asked.append(
                Question(
                    tokens=tuple(draft.tokens[s, keyed:].tolist()),
                    positions=tuple(range(start + keyed, start + k)),
                    sees=((0, n), (base, base + keyed)),
                    num_replies=k - int(draft.done[s]),
                )
            )
        return asked

    def _where(self, slots: np.ndarray) -> np.ndarray:
        """Response positions of whole slots."""
        k = self.settings.slot_size
        return (slots[:, None] * k + np.arange(k)).ravel()

    def _finish(self) -> Generation:
        assert self.is_over or (self.response != MASK).all(), "a slot was left undecoded"
        uncut = self.response[self.response != MASK]
        end = first_true(uncut == self.eos)
        kept = uncut[: end + 1] if self.settings.stop_at_eos and end is not None else uncut
        return Generation(
            tokens=tuple(kept[: self.settings.max_new_tokens].tolist()),
            uncut_tokens=tuple(uncut.tolist()),
            forward_passes=len(self.passes.steps),
            stop="length" if end is None else "eos",
            steps=tuple(self.passes.steps),
            statistics={
                "official_tpf": float(np.mean(self.round_rates)),
                "official_passes": self.passes.num_requests,
                "verified_slots": float(np.mean(self.is_verified)),
            },
        )
