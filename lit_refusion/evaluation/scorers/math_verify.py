"""Answers in mathematical notation, compared by math-verify in a process that can be ended."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field

from lit_refusion.errors import UserError
from lit_refusion.evaluation.judge import Judge
from lit_refusion.evaluation.problem import Problem, Verdict
from lit_refusion.evaluation.scorer import Scorer
from lit_refusion.evaluation.scorers.extraction import after_answer_is, last_boxed, required_answer


@dataclass(frozen=True, kw_only=True)
class MathVerify(Scorer):
    r"""Equal in value to the record's answer, by math-verify (extra `eval`).

    The answer is the last `\boxed{...}`, else what follows the last "answer is", else what math-verify finds in the
    whole completion.

    Args:
        timeout_seconds: longest time for one comparison; beyond it the answer counts as wrong.
    """

    timeout_seconds: float
    _judge: Judge = field(default_factory=Judge, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.timeout_seconds <= 0:
            raise UserError(f"scorer.timeout_seconds={self.timeout_seconds}: must be positive")

    def score(self, completion: str, problem: Problem) -> Verdict:
        """Invalid where nothing that math-verify can read is found."""
        answer = last_boxed(completion) or after_answer_is(completion)
        right = problem.answer or ""
        if answer is not None and _normal(answer) == _normal(right):
            return Verdict(is_correct=True, answer=answer)
        is_marked = answer is not None
        ruling = self._judge.compare(answer or completion, right, is_marked=is_marked, seconds=self.timeout_seconds)
        return Verdict(is_correct=ruling.is_equal, answer=answer or ruling.answer, note=ruling.note)

    def check(self, problem: Problem) -> None:
        """It needs an answer, and the package."""
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("scorer=math_verify needs math-verify: pip install 'lit-refusion[eval]'")
        required_answer(problem)


def _normal(text: str) -> str:
    return "".join(text.strip().strip("$").split())
