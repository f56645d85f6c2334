"""The seam of scoring: a completion and its problem, to a verdict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from lit_refusion.evaluation.problem import Problem, Verdict


@dataclass(frozen=True, kw_only=True)
class Scorer(ABC):
    """Decides whether a completion is right; a frozen dataclass of settings, without defaults."""

    executes_code: ClassVar[bool] = False
    """Whether it runs what a model wrote: only with `allow_code_execution=true`."""

    @abstractmethod
    def score(self, completion: str, problem: Problem) -> Verdict:
        """The verdict on one completion, cut at its end of sequence; never raises for what a model may write."""

    @abstractmethod
    def check(self, problem: Problem) -> None:
        """Refuse a problem that this scorer cannot decide, before anything is decoded.

        Raises:
            UserError: names the problem and the field that is missing or malformed.
        """
