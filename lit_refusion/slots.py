"""Slots of tokens on their way to acceptance. Shapes: m slots at hand, k tokens of a slot."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lit_refusion import reveal


@dataclass(frozen=True, kw_only=True)
class DraftedSlots:
    """Slots with drafted tokens, some leading ones of which are accepted.

    Args:
        numbers: [m] of the slots in the response, left to right.
        tokens: [m, k].
        p_draft: [m, k] probability of each token when it was drafted.
        done: [m] accepted leading tokens.
        keyed: [m] of those, how many have their final keys.
        is_verified: whether they were accepted as drafted, and not completed.
        ends_at: the slot that ended the response, which is the last one then.
    """

    numbers: np.ndarray
    tokens: np.ndarray
    p_draft: np.ndarray
    done: np.ndarray
    keyed: np.ndarray
    is_verified: bool = False
    ends_at: int | None = None

    @property
    def is_open(self) -> np.ndarray:
        """[m, k] whether a token is still to be accepted."""
        return np.arange(self.tokens.shape[1]) >= self.done[:, None]

    def text(self, eos: int) -> np.ndarray:
        """Tokens of complete slots, cut after end-of-sequence in the slot that ended the response."""
        flat = self.tokens.ravel()
        end = first_true(self.tokens[-1] == eos) if self.ends_at is not None else None
        return flat if end is None else flat[: len(flat) - self.tokens.shape[1] + end + 1]

    def head(self, count: int, *, ends: bool) -> DraftedSlots:
        """The first slots; a slot that ends the response is complete."""
        arrays = {name: getattr(self, name)[:count] for name in ("numbers", "tokens", "p_draft", "done", "keyed")}
        if not ends:
            return replace(self, **arrays)
        arrays["done"] = np.append(arrays["done"][:-1], self.tokens.shape[1])
        return replace(self, **arrays, ends_at=int(self.numbers[count - 1]))


def accept_together(slots: DraftedSlots, runs: np.ndarray, eos: int) -> DraftedSlots:
    """Accept what verification of all slots in one causal row passed (arXiv 2512.13586, Eq. 7).

    Whole slots are accepted, up to the first token that fails, or up to end-of-sequence before it. If not even one
    is, all stay, each with its own accepted tokens.

    Args:
        slots: as they were drafted.
        runs: [m] leading tokens of each slot that pass.
        eos: end-of-sequence token.
    """
    k = slots.tokens.shape[1]
    count = reveal.leading(runs == k)
    run = count * k + (runs[count] if count < len(runs) else 0)
    end = first_true(slots.tokens.ravel()[:run] == eos)
    count = count if end is None else end // k + 1
    # The keys of all slots but the first were computed with other slots in sight.
    keyed = np.where(np.arange(len(runs)) == 0, runs, 0)
    slots = replace(slots, done=runs, keyed=keyed, is_verified=count > 0)
    return slots.head(count, ends=end is not None) if count else slots


def accept_alone(slots: DraftedSlots, runs: np.ndarray, eos: int) -> DraftedSlots:
    """Accept what verification of each slot by itself passed (arXiv 2512.13586, Eq. 8); arguments as above."""
    slots = replace(slots, done=runs, keyed=runs)
    end = first_true(((slots.tokens == eos) & ~slots.is_open).any(1))
    return slots if end is None else slots.head(end + 1, ends=True)


def first_true(flags: np.ndarray) -> int | None:
    """Place of the first True."""
    return int(flags.argmax()) if flags.any() else None
