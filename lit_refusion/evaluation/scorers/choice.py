"""Answers that are one of several choices, by letter."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass

from lit_refusion.errors import UserError
from lit_refusion.evaluation.problem import Problem, Verdict
from lit_refusion.evaluation.scorer import Scorer
from lit_refusion.evaluation.scorers.extraction import (
    after_answer_is,
    compiled,
    last_boxed,
    last_match,
    required_answer,
)

LETTERS = string.ascii_uppercase
EDGES = " .,;:!?\"'`*()[]"
END = r"(?=\s*(?:[.,;:)\]}*$]|$))"
STATED = re.compile(
    r"(?i:(?:answer|correct\s+(?:option|choice|letter))\s*(?:is|:)[\s:*$]*(?:(?:option|choice|letter)\s+)?)"
    rf"(?:\(([A-Za-z])\)|([A-Z])(?![\w'])|([a-z]){END})"
    r"|\\f?boxed\s*\{\s*(?:\\text(?:bf)?\s*\{)?\s*\(?([A-Za-z])\)?\s*\}",
    re.MULTILINE,
)
"""A letter that is said to be the answer; a small one only where nothing follows ("the answer is a planet")."""
LONE = re.compile(
    rf"\(([A-Za-z])\)|^\W*([A-Z])(?:[.):]|\W*$)|^\W*([a-z])\W*$|(?<![\w'°])([B-Z]){END}\W*\Z", re.MULTILINE
)
"""A letter in brackets, at the start of a line with a mark after it, alone on a line, or at the very end."""


@dataclass(frozen=True, kw_only=True)
class Choice(Scorer):
    r"""The right letter: A for the first choice, and so on.

    Found as the last "answer is (X)" or `\boxed{X}`, where X may be the text of a choice; else as a last line, or a
    completion, that is such a text; else as a letter that stands alone.

    Args:
        pattern: regular expression whose last match's first group is the letter, or the text of a choice; None for
            the forms above.
    """

    pattern: str | None

    def __post_init__(self) -> None:
        if self.pattern is not None:
            compiled(self.pattern)

    def score(self, completion: str, problem: Problem) -> Verdict:
        """Invalid where no letter is found, or one that is not among the choices."""
        if self.pattern is not None:
            found = last_match(self.pattern, completion)
            letter = None if found is None else _letter(found, problem.choices)
        else:
            letter = _found(completion, problem.choices)
        if letter is None or LETTERS.index(letter) >= len(problem.choices):
            note = f"{letter} is not one of {len(problem.choices)} choices" if letter else ""
            return Verdict(is_correct=False, answer=None, note=note)
        return Verdict(is_correct=letter == _letter(problem.answer or "", problem.choices), answer=letter)

    def check(self, problem: Problem) -> None:
        """It needs 2 to 26 choices, and an answer that is the letter or the text of one."""
        where = f"problem {problem.id}"
        if not 2 <= len(problem.choices) <= len(LETTERS):
            raise UserError(f"{where}: choices has {len(problem.choices)} entries; give 2 to {len(LETTERS)}")
        letter = _letter(required_answer(problem), problem.choices)
        if letter is None or LETTERS.index(letter) >= len(problem.choices):
            last = LETTERS[len(problem.choices) - 1]
            raise UserError(f"{where}: answer={problem.answer!r}: give a letter from A to {last}, or a choice's text")


def _last_letter(pattern: re.Pattern[str], text: str, allowed: str) -> str | None:
    letters = [next(filter(None, found.groups())).upper() for found in pattern.finditer(text)]
    return next((letter for letter in reversed(letters) if letter in allowed), None)


def _letter(text: str, choices: tuple[str, ...]) -> str | None:
    """The letter that a short text is, or that of the choice whose text it is."""
    bare = text.strip(EDGES + string.whitespace).upper()
    if len(bare) == 1 and bare in LETTERS:
        return bare
    return _by_text([text], choices)


def _found(completion: str, choices: tuple[str, ...]) -> str | None:
    """The letter of a completion, by the surest form that it has; what it states may be out of range."""
    lines = completion.strip().splitlines()
    return (
        _by_text([last_boxed(completion), after_answer_is(completion)], choices)
        or _last_letter(STATED, completion, LETTERS)
        or _by_text([lines[-1] if lines else None, completion], choices)
        or _last_letter(LONE, completion, LETTERS[: len(choices)])
    )


def _by_text(texts: list[str | None], choices: tuple[str, ...]) -> str | None:
    """The letter of the first choice that a text spells out, in the same case if there is one.

    A letter that names a choice is no text.
    """
    letters = LETTERS[: len(choices)]
    for text in filter(None, texts):
        for normal in (_trimmed, _normal):
            for letter, choice in zip(letters, choices):
                if normal(choice) == normal(text) and (len(normal(text)) > 1 or normal(text).upper() not in letters):
                    return letter
    return None


def _trimmed(text: str) -> str:
    return " ".join(text.split()).strip(EDGES)


def _normal(text: str) -> str:
    return _trimmed(text).casefold()
