"""ReFusion decoding: select slots, verify their drafts, complete what failed (arXiv 2512.13586, Appendix A.3).

Shapes: P prompt tokens, L response positions, k tokens of a slot, m slots at hand, n committed buffer places.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import numpy as np

from lit_refusion import reveal
from lit_refusion.decoder import Decoder
from lit_refusion.engine.request import Reply, Request, Row, Sampling, visible
from lit_refusion.errors import UserError
from lit_refusion.generation import Generation, Step
from lit_refusion.spec import DiffusionSpec
from lit_refusion.views import MASK

Certainty = Literal["first_token", "mean_probability", "mean_entropy"]

T = TypeVar("T")
Part: TypeAlias = Generator[Request, Reply, T]
"""A stretch of a row that ends with a value of type T."""


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

    @property
    def canvas(self) -> int:
        """L: the budget rounded up to whole slots."""
        return -(-self.max_new_tokens // self.slot_size) * self.slot_size

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
    the order of acceptance. Everything behind it is scratch.
    """

    settings: ReFusionDecoder
    prompt: np.ndarray  # [P]
    eos: int
    num_committed: int = 0
    is_over: bool = False
    response: np.ndarray = field(init=False)  # [L] token, or MASK
    steps: list[Step] = field(default_factory=list)
    round_rates: list[float] = field(default_factory=list)
    is_verified: list[bool] = field(default_factory=list)  # of each accepted slot: as it was drafted, or completed

    def __post_init__(self) -> None:
        self.response = np.full(self.settings.canvas, MASK, np.int64)

    def decode(self) -> Row:
        """Decode block by block."""
        k, b = self.settings.slot_size, self.settings.block_size
        for start in range(0, self.settings.canvas, b):
            todo = np.arange(start // k, min(start + b, self.settings.canvas) // k)  # slot numbers, left to right
            while len(todo):
                todo = yield from self._round(todo)
            if self.is_over:
                break
        return self._finish()

    def _round(self, todo: np.ndarray) -> Part[np.ndarray]:
        """Select, verify and, where needed, complete; returns the slots still masked."""
        k, passes = self.settings.slot_size, len(self.steps)
        drafts, certainty = yield from self._select(todo)
        chosen = certainty > self.settings.slot_threshold
        if not chosen.any():
            chosen[certainty.argmax()] = True
        slots, drafts = todo[chosen], drafts[chosen]
        accepted = yield from self._verify(slots, drafts)  # [m, k] bool

        run = reveal.leading(accepted.ravel())
        end = _first(drafts.ravel()[:run] == self.eos)
        count = run // k if end is None else end // k + 1
        if count:
            self._commit(slots[:count], drafts.ravel()[: count * k if end is None else end + 1])
            ends_at = None if end is None else slots[count - 1]
            self.is_verified += [True] * count
        else:
            count = len(slots)
            self.is_verified += [False] * count
            ends_at = yield from self._complete(slots, drafts, accepted)
            if ends_at is not None and self.settings.as_released:
                # The fault: a place among the selected slots, used as a place among all masked ones.
                todo = todo[: np.flatnonzero(slots == ends_at)[0]]
        self.round_rates.append(k * count / (len(self.steps) - passes))
        if ends_at is not None:
            self.is_over = True
            todo = todo[todo < ends_at]
        return todo[~np.isin(todo, slots[:count])]

    def _select(self, slots: np.ndarray) -> Part[tuple[np.ndarray, np.ndarray]]:
        """Stage I: drafts [m, k] and certainty [m] of all masked slots; the first pass carries the prompt."""
        k = self.settings.slot_size
        prompt = self.prompt[self.num_committed :]  # empty once the prompt's keys are there
        where = len(self.prompt) + (slots[:, None] * k + np.arange(k)).ravel()
        places = self.num_committed + np.arange(len(prompt) + len(where))
        reply = yield self._request(
            tokens=np.concatenate([prompt, np.full(len(where), MASK)]),
            positions=np.concatenate([np.arange(len(prompt)), where]),
            places=places,
            intervals=visible((0, places + 1)),
            num_replies=len(where),
            sampling=Sampling(temperature=self.settings.temperature),
            entropy=self.settings.certainty == "mean_entropy",
        )
        self.steps.append(Step("select", (), ()))
        self.num_committed += len(prompt)
        p_draft, entropy = reply.p_token.reshape(-1, k), reply.entropy.reshape(-1, k)
        certainty = {
            "first_token": p_draft[:, 0],
            "mean_probability": p_draft.mean(1),
            "mean_entropy": np.exp(-entropy.mean(1)),
        }[self.settings.certainty]
        return reply.tokens.reshape(-1, k), certainty

    def _verify(self, slots: np.ndarray, drafts: np.ndarray) -> Part[np.ndarray]:
        """Stage II: [m, k] whether each draft passes, all slots in one causal row."""
        k = self.settings.slot_size
        places = self.num_committed + np.arange(drafts.size)
        following = np.roll(drafts, -1, axis=1)  # token j + 1 of the slot; nothing is read of the last column
        reply = yield self._request(
            tokens=drafts.ravel(),
            positions=len(self.prompt) + (slots[:, None] * k + np.arange(k)).ravel(),
            places=places,
            intervals=visible((0, places + 1)),
            num_replies=drafts.size,
            targets=following.ravel(),
        )
        self.steps.append(Step("verify", (), ()))
        accepted = np.ones(drafts.shape, bool)
        accepted[:, 1:] = reply.p_target.reshape(-1, k)[:, :-1] > self.settings.token_threshold
        return accepted

    def _complete(self, slots: np.ndarray, tokens: np.ndarray, accepted: np.ndarray) -> Part[int | None]:
        """Parallel iterative completion; returns the slot that ended the response, if one did.

        Every slot sees the committed buffer and itself. What verification accepted stays accepted, but the keys of
        all slots but the first were computed with other slots in sight, so they are computed anew.
        """
        k = self.settings.slot_size
        tokens = tokens.copy()  # [m, k]
        done = np.array([reveal.leading(row) for row in accepted])  # [m] accepted tokens of each slot
        keyed = np.where(np.arange(len(slots)) == 0, done, 0)  # [m] of those, how many have their final keys
        ends_at = None
        column = np.arange(k)
        while (done < k).any():
            known = (column >= keyed[:, None]) & (column < done[:, None])
            is_open = column >= done[:, None]  # [m, k]
            reply = yield self._slot_request(slots, np.where(is_open, MASK, tokens), first=known, then=is_open)
            self.steps.append(Step("predict", (), ()))
            tokens[is_open] = reply.tokens

            # Row j scores token j + 1, so the last column is run for its keys only.
            scoring = is_open & (column < k - 1)
            reply = yield self._slot_request(slots, tokens, first=is_open & ~scoring, then=scoring, scored=True)
            self.steps.append(Step("verify", (), ()))
            passes = column < done[:, None] + 1  # the first open token is accepted without a test
            passes[:, 1:][scoring[:, :-1]] |= reply.p_target > self.settings.token_threshold
            done = np.array([reveal.leading(row) for row in passes])
            keyed = done.copy()

            ended = ((tokens == self.eos) & (column < done[:, None])).any(1)
            if ended.any():
                count = int(ended.argmax()) + 1
                slots, tokens, done, keyed = slots[:count], tokens[:count], done[:count], keyed[:count]
                done[-1] = k
                ends_at = int(slots[-1])
        flat = tokens.ravel()
        end = _first(tokens[-1] == self.eos) if ends_at is not None else None
        if end is not None:
            flat = flat[: len(flat) - k + end + 1]
        if self.settings.recompute_kv:
            yield from self._recompute(slots, flat)
        self._commit(slots, flat)
        return ends_at

    def _slot_request(
        self,
        slots: np.ndarray,
        tokens: np.ndarray,
        *,
        first: np.ndarray,
        then: np.ndarray,
        scored: bool = False,
    ) -> Request:
        """Queries for the cells `first` and `then` ([m, k] bool) of the slots; those of `then` are answered.

        With `scored`, each answer gives the probability of the next token of its slot.
        """
        k = self.settings.slot_size
        s, j = (np.concatenate(pair) for pair in zip(np.nonzero(first), np.nonzero(then)))
        base = self.num_committed + s * k
        following = np.roll(tokens, -1, axis=1)[then]
        return self._request(
            tokens=tokens[s, j],
            positions=len(self.prompt) + slots[s] * k + j,
            places=base + j,
            intervals=visible((0, self.num_committed), (base, base + j + 1)),
            num_replies=int(then.sum()),
            targets=following if scored else np.zeros(0, np.int64),
        )

    def _recompute(self, slots: np.ndarray, flat: np.ndarray) -> Part[None]:
        """Run completed slots once more as one causal row, so that later ones see earlier ones."""
        k = self.settings.slot_size
        places = self.num_committed + np.arange(len(flat))
        where = (slots[:, None] * k + np.arange(k)).ravel()[: len(flat)]
        yield self._request(
            tokens=flat,
            positions=len(self.prompt) + where,
            places=places,
            intervals=visible((0, places + 1)),
            num_replies=0,
        )
        self.steps.append(Step("recompute", (), ()))

    def _request(self, **fields: Any) -> Request:
        return Request(steps=self.steps, **fields)

    def _commit(self, slots: np.ndarray, flat: np.ndarray) -> None:
        """Make the first places of the scratch final; the last slot may be cut short by end-of-sequence."""
        k = self.settings.slot_size
        where = (slots[:, None] * k + np.arange(k)).ravel()[: len(flat)]
        self.response[where] = flat
        self.num_committed += len(flat)
        self.steps[-1] = Step(self.steps[-1].kind, tuple(where.tolist()), tuple(flat.tolist()))

    def _finish(self) -> Generation:
        assert self.is_over or (self.response != MASK).all(), "a slot was left undecoded"
        uncut = self.response[self.response != MASK]
        end = _first(uncut == self.eos)
        kept = uncut[: end + 1] if self.settings.stop_at_eos and end is not None else uncut
        rate, verified = np.mean(self.round_rates), np.mean(self.is_verified)
        return Generation(
            tokens=tuple(kept[: self.settings.max_new_tokens].tolist()),
            uncut_tokens=tuple(uncut.tolist()),
            forward_passes=len(self.steps),
            stop="length" if end is None else "eos",
            steps=tuple(self.steps),
            statistics={"official_tpf": float(rate), "verified_slots": float(verified)},
        )


def _first(flags: np.ndarray) -> int | None:
    """Place of the first True."""
    return int(flags.argmax()) if flags.any() else None
