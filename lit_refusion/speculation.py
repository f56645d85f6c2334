"""Asking, in one forward pass, also what will probably be asked next. Shapes: q queries, m slots, k tokens of a slot.

A guess is the next request, run under an assumed outcome of the current one. It computes just what the request itself
would, because it sees just the same keys: when the request is made, and what it sees has not been written since, the
reply is there already and the pass is saved. What was guessed wrong is forgotten, and no result depends on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, TypeAlias, TypeVar

import numpy as np

from lit_refusion.engine.request import FIGURES, NUM_INTERVALS, Reply, Request
from lit_refusion.generation import Step
from lit_refusion.views import MASK

LEAST_ODDS = 0.01
"""Outcomes less probable than this share of the likeliest are not worth a guess."""

T = TypeVar("T")
Part: TypeAlias = Generator[Request, Reply, T]
"""A stretch of a row that ends with a value of type T."""


@dataclass(frozen=True)
class Question:
    """Queries that see a part of the buffer and, causally, each other: what a row needs to know at a time.

    Equal questions get equal replies, wherever their own keys are written, as long as what they see stays the same.

    Args:
        tokens: [q] ids, or MASK.
        positions: [q] position ids (RoPE).
        sees: one or two half-open intervals of the buffer; unless they are guesses, their keys go right behind them.
        num_replies: the last r are answered; the target of a reply is the token that follows in `tokens`.
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    sees: tuple[tuple[int, int], ...]
    num_replies: int

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass
class Passes:
    """The forward passes of one row: its requests, and the guesses that they carry."""

    steps: list[Step] = field(default_factory=list)  # one per pass
    num_requests: int = 0  # the passes that there would be without guesses
    replies: dict[Question, Reply] = field(default_factory=dict)  # to the guesses of the last pass

    def ask(
        self,
        kind: str,
        asked: Sequence[Question],
        *,
        guesses: Sequence[Question] = (),
        free: int = 0,
        **options: Any,
    ) -> Part[list[Reply]]:
        """A reply to each of `asked`, from the last pass if all of them were guessed there, else from a new one.

        Args:
            kind: what the pass is for.
            asked: what the row needs to know.
            guesses: what it may ask next.
            free: the first place of the buffer, behind all that is of use, where guesses may write.
            options: fields of the request.
        """
        assert asked, "nothing is asked"
        self.num_requests += 1
        if all(queries in self.replies for queries in asked):
            replies = [self.replies[queries] for queries in asked]
            last = self.steps[-1]
            self.steps[-1] = dataclasses.replace(last, kind=f"{last.kind}+{kind}")
            return replies
        places = [queries.sees[-1][1] for queries in asked]
        places += list(accumulate(map(len, guesses), initial=free))[:-1]
        reply = yield join([*asked, *guesses], places, steps=self.steps, **options)
        self.steps.append(Step(kind, (), ()))
        replies = split(reply, [queries.num_replies for queries in [*asked, *guesses]])
        self.replies = dict(zip(guesses, replies[len(asked) :], strict=True))
        return replies[: len(asked)]

    def commit(self, where: np.ndarray, tokens: np.ndarray) -> None:
        """Tokens that became final in the last pass."""
        self.steps[-1] = Step(self.steps[-1].kind, tuple(where.tolist()), tuple(tokens.tolist()))


def join(parts: Sequence[Question], places: Sequence[int], **options: Any) -> Request:
    """One request for all parts, the keys of each written from its place on; replies come part by part."""
    length = sum(map(len, parts))
    is_answered, targets, tokens, positions, own = np.zeros((5, length), np.int64)
    intervals = np.zeros((length, NUM_INTERVALS, 2), np.int64)
    stop = 0
    for part, place in zip(parts, places, strict=True):
        start, stop = stop, stop + len(part)
        is_answered[stop - part.num_replies : stop] = 1
        tokens[start:stop], positions[start:stop] = part.tokens, part.positions
        targets[start : stop - 1] = tokens[start + 1 : stop]
        own[start:stop] = np.arange(place, place + len(part))
        *others, (first, last) = part.sees
        if last != place:  # the queries' own keys, and those before them, are an interval by themselves
            others, first = list(part.sees), place
        for number, interval in enumerate(others):
            intervals[start:stop, number] = interval
        intervals[start:stop, len(others), 0] = first
        intervals[start:stop, len(others), 1] = own[start:stop] + 1
    order = np.argsort(is_answered, kind="stable")  # those without an answer first
    num_replies = sum(part.num_replies for part in parts)
    targets = targets[order[length - num_replies :]]
    return Request(
        tokens=tokens[order],
        positions=positions[order],
        places=own[order],
        intervals=intervals[order],
        num_replies=num_replies,
        targets=np.where(targets == MASK, 0, targets),  # nobody asks for it
        **options,
    )


def split(reply: Reply, counts: Sequence[int]) -> list[Reply]:
    """The reply of each part, `counts` being their numbers of replies."""
    if len(counts) == 1:
        return [reply]
    columns = [getattr(reply, name) for name in FIGURES]
    stops = list(accumulate(counts))
    return [Reply(*[column[stop - count : stop] for column in columns]) for count, stop in zip(counts, stops)]


def acceptance(p_draft: np.ndarray, threshold: float) -> np.ndarray:
    """Estimate of P(p > threshold), p the verified probability of a draft and `p_draft` that at its [MASK].

    The log-odds of p are taken to be those of `p_draft` plus logistic noise of scale 1.
    """
    for_it, against = p_draft * (1 - threshold), threshold * (1 - p_draft)
    return np.divide(for_it, for_it + against, out=np.zeros_like(p_draft), where=for_it > 0)


def likely_runs(p_accept: np.ndarray) -> list[tuple[float, np.ndarray]]:
    """Probabilities, and accepted leading tokens [m] of each slot, of the outcomes of a verification.

    Every slot has the length that is likeliest for it, and one slot any other length.

    Args:
        p_accept: [m, k] probability that a token is accepted once those before it in its slot are.
    """
    m, k = p_accept.shape
    reached = np.zeros((m, k + 2))  # P(run >= length)
    reached[:, 0] = 1
    np.cumprod(p_accept, axis=1, out=reached[:, 1:-1])
    chance = reached[:, :-1] - reached[:, 1:]  # [m, k + 1], P(run = length)
    likeliest = chance.argmax(1)
    best = chance.max(1)
    together = float(best.prod())
    joint = together / best[:, None] * chance
    runs = [(together, likeliest)]
    for slot, length in np.argwhere(joint >= LEAST_ODDS * together).tolist():
        if length != likeliest[slot]:
            other = likeliest.copy()
            other[slot] = length
            runs.append((float(joint[slot, length]), other))
    return runs


def choose(outcomes: Iterable[tuple[float, Sequence[Question]]], budget: int) -> list[Question]:
    """The guesses to make: in turn, those of the outcome with the most probability per query that is still to be added.

    Args:
        outcomes: probability of each, and all that would then be asked next.
        budget: queries in all.
    """
    if not budget:
        return []
    probabilities: dict[tuple[Question, ...], float] = {}
    for probability, asked in outcomes:
        probabilities[tuple(asked)] = probabilities.get(tuple(asked), 0.0) + probability
    queries = list(dict.fromkeys(chain.from_iterable(probabilities)))
    numbers = {each: number for number, each in enumerate(queries)}
    needs = np.zeros((len(probabilities), len(queries)), bool)
    for row, asked in zip(needs, probabilities):
        row[[numbers[each] for each in asked]] = True
    lengths, gains = np.array([len(each) for each in queries]), np.array([*probabilities.values()])
    is_chosen = np.zeros(len(queries), bool)
    while True:
        costs = (needs & ~is_chosen) @ lengths
        rates = np.where((costs > 0) & (costs <= budget), gains / np.maximum(costs, 1), 0)
        if not rates.any():
            return [queries[number] for number in np.flatnonzero(is_chosen)]
        best = rates.argmax()
        budget -= costs[best]
        is_chosen |= needs[best]
