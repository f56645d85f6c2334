"""Answers that must be the same text."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

from lit_refusion.evaluation.problem import Problem, Verdict
from lit_refusion.evaluation.scorer import Scorer
from lit_refusion.evaluation.scorers.extraction import compiled, last_match, required_answer


@dataclass(frozen=True, kw_only=True)
class Exact(Scorer):
    """The same text as the record's answer, but for white space around it.

    Args:
        ignore_case: compare without regard to case.
        ignore_punctuation: compare without punctuation and with single spaces.
        pattern: regular expression whose last match's first group is the answer; None for the whole completion.
    """

    ignore_case: bool
    ignore_punctuation: bool
    pattern: str | None

    def __post_init__(self) -> None:
        if self.pattern is not None:
            compiled(self.pattern)

    def score(self, completion: str, problem: Problem) -> Verdict:
        """Invalid where the pattern finds nothing, or nothing but white space is left."""
        found = completion if self.pattern is None else last_match(self.pattern, completion)
        answer = (found or "").strip() or None
        is_correct = answer is not None and self._normal(answer) == self._normal(problem.answer or "")
        return Verdict(is_correct=is_correct, answer=answer)

    def check(self, problem: Problem) -> None:
        """It needs an answer."""
        required_answer(problem)

    def _normal(self, text: str) -> str:
        text = text.strip()
        if self.ignore_case:
            text = text.casefold()
        if self.ignore_punctuation:
            text = " ".join("".join(" " if _is_punctuation(letter) else letter for letter in text).split())
        return text


def _is_punctuation(letter: str) -> bool:
    return unicodedata.category(letter).startswith("P")
