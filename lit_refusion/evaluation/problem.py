"""A problem of a task, and what a scorer says of an answer to it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One record of a task.

    Args:
        id: names the record.
        question: as it stands in the record.
        answer: the right answer; None for problems that tests decide.
        choices: what may be chosen, in order; empty where the answer is free.
        tests: code that fails for a wrong program; None for problems without.
        setup: code that comes before the tests.
        entry_point: name of the function that the tests call; None where they say it themselves.
    """

    id: str
    question: str
    answer: str | None = None
    choices: tuple[str, ...] = ()
    tests: str | None = None
    setup: str = ""
    entry_point: str | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a scorer says of a completion.

    Args:
        is_correct: whether it is right.
        answer: what was taken for the answer; None where none could be found, which makes the output invalid.
        note: why it is wrong, where more can be said: the outcome of tests, a parser's message.
    """

    is_correct: bool
    answer: str | None
    note: str = ""
