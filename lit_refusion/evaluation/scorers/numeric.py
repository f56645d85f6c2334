"""Answers that are numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from lit_refusion.errors import UserError
from lit_refusion.evaluation.problem import Problem, Verdict
from lit_refusion.evaluation.scorer import Scorer
from lit_refusion.evaluation.scorers.extraction import compiled, last_match, required_answer

DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
NUMBER = re.compile(
    rf"""
    (?<![\w.])                        # not the 2 of CO2, nor a part of a longer number
    (?:(?<![\d)\]])(?P<sign>[-+]))?   # 5-3 ends in 3, not in -3
    (?:[$€£]\s?(?P<inner_sign>-?))?
    (?P<top>{DIGITS})
    (?:[eE](?P<exponent>[-+]?\d+)(?!\w))?
    (?:/(?P<bottom>{DIGITS}))?
    """,
    re.VERBOSE | re.ASCII,
)
LONGEST, LARGEST_EXPONENT = 1000, 400
"""Digits and power of ten beyond which a number is not one: a model may write what takes hours to compute."""


@dataclass(frozen=True, kw_only=True)
class Numeric(Scorer):
    r"""The last number is the record's, compared as exact fractions.

    It reads `1,234`, `$5`, `-3`, `3.0`, `72.`, `1e3`, `1/2` and `\frac{1}{2}`. A percent sign says nothing: 50% is 50.

    Args:
        pattern: regular expression; the number is the last one in the first group of its last match. None: the last
            number of the completion.
        tolerance: largest difference that is still right; 0 for none.
    """

    pattern: str | None
    tolerance: float

    def __post_init__(self) -> None:
        if self.pattern is not None:
            compiled(self.pattern)
        if self.tolerance < 0:
            raise UserError(f"scorer.tolerance={self.tolerance}: must not be negative")

    def score(self, completion: str, problem: Problem) -> Verdict:
        """Invalid where there is no number."""
        found = completion if self.pattern is None else last_match(self.pattern, completion)
        number = last_number(found or "")
        if number is None:
            return Verdict(is_correct=False, answer=None)
        right = last_number(problem.answer or "")
        is_correct = right is not None and abs(number[1] - right[1]) <= Fraction(str(self.tolerance))
        return Verdict(is_correct=is_correct, answer=number[0])

    def check(self, problem: Problem) -> None:
        """The answer must hold a number."""
        if last_number(required_answer(problem)) is None:
            raise UserError(f"problem {problem.id}: answer={problem.answer!r}: no number in it; use another scorer")


def last_number(text: str) -> tuple[str, Fraction] | None:
    """The last number of a text, as it stands there and as a fraction; None without one."""
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\,", "").replace("\\!", "").replace("\\$", "$")
    text = re.sub(r"\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\}", r"\1/\2", text)
    matches = list(NUMBER.finditer(text))
    if not matches or len(matches[-1].group()) > LONGEST:
        return None
    found = matches[-1]
    exponent, bottom = int(found["exponent"] or 0), _plain(found["bottom"] or "1")
    if abs(exponent) > LARGEST_EXPONENT or bottom == 0:
        return None
    value = _plain(found["top"]) * Fraction(10) ** exponent / bottom
    is_negative = (found["sign"] == "-") != (found["inner_sign"] == "-")
    return found.group().strip(), -value if is_negative else value


def _plain(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))
