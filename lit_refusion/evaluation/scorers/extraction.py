"""Where in a completion the answer stands."""

from __future__ import annotations

import re

from lit_refusion.errors import UserError
from lit_refusion.evaluation.problem import Problem

ANSWER_IS = re.compile(r"answer\s*(?:is|:)[\s:]*", re.IGNORECASE)


def compiled(pattern: str) -> re.Pattern[str]:
    """A setting `pattern` as a regular expression.

    Raises:
        UserError: it is malformed, or has no group.
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UserError(f"scorer.pattern={pattern!r}: not a regular expression ({error})") from error
    if expression.groups == 0:
        raise UserError(f"scorer.pattern={pattern!r}: put the answer in a group, as in 'answer is (.*)'")
    return expression


def last_match(pattern: str, text: str) -> str | None:
    """The first group of the last match; None without a match."""
    matches = list(compiled(pattern).finditer(text))
    return matches[-1].group(1) if matches else None


def last_boxed(text: str) -> str | None:
    r"""What the last complete `\boxed{...}` or `\fbox{...}` holds, braces balanced; None without one."""
    for start in reversed([match.end() for match in re.finditer(r"\\f?boxed\s*\{|\\fbox\s*\{", text)]):
        depth = 1
        for place in range(start, len(text)):
            is_escaped = text[place - 1] == "\\" and text[place - 2] != "\\"
            if text[place] in "{}" and not is_escaped:
                depth += 1 if text[place] == "{" else -1
            if depth == 0:
                return text[start:place].strip()
    return None


def after_answer_is(text: str) -> str | None:
    """The rest of the line after the last "answer is" or "answer:", without the full stop; None without one."""
    matches = list(ANSWER_IS.finditer(text))
    if not matches:
        return None
    rest = text[matches[-1].end() :].splitlines()
    return rest[0].strip().removesuffix(".").strip() or None if rest else None


def required_answer(problem: Problem) -> str:
    """The answer of a problem.

    Raises:
        UserError: it has none.
    """
    if problem.answer is None or not problem.answer.strip():
        raise UserError(f"problem {problem.id}: answer={problem.answer!r}: this scorer compares with it; give one")
    return problem.answer
