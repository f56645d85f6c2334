"""Programs, decided by running their tests."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from lit_refusion.errors import UserError
from lit_refusion.evaluation.problem import Problem, Verdict
from lit_refusion.evaluation.sandbox import Limits, Program, run_program
from lit_refusion.evaluation.scorer import Scorer

BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class UnitTests(Scorer):
    """A program is right if its tests run to their end, in the sandbox.

    The program is the last ```python block that defines the entry point, else the last such block, else the last
    block of any language, else the whole completion. A block that was cut off counts to its end.

    Args:
        program: completion = it is all of the program; prompt_and_completion = the question is code that the
            completion continues (HumanEval). A completion that defines the entry point itself replaces that of the
            question, whose imports and other functions stay.
        limits: what the program may use.
    """

    executes_code: ClassVar[bool] = True

    program: Literal["completion", "prompt_and_completion"]
    limits: Limits

    def score(self, completion: str, problem: Problem) -> Verdict:
        """Invalid where there is no code; the note says how a wrong program ended."""
        code = extract_code(completion, problem.entry_point)
        if not code.strip():
            return Verdict(is_correct=False, answer=None, note="no code")
        outcome = run_program(self.assemble(code, problem), self.limits)
        is_correct = outcome.status == "passed"
        note = "" if is_correct else f"{outcome.status}: {outcome.message}".rstrip(": ")
        return Verdict(is_correct=is_correct, answer=code, note=note)

    def assemble(self, code: str, problem: Problem) -> Program:
        """The program as it is run."""
        if self.program == "prompt_and_completion":
            code = _continued(problem.question, code, problem.entry_point)
        tests = problem.tests or ""
        if problem.entry_point is not None:
            tests = f"{tests}\ncheck({problem.entry_point})\n"
        return Program(source=code, setup=problem.setup, tests=tests, entry_point=problem.entry_point)

    def check(self, problem: Problem) -> None:
        """It needs tests that parse, and with an entry point a function `check` among them."""
        where = f"problem {problem.id}"
        if problem.tests is None or not problem.tests.strip():
            raise UserError(f"{where}: tests={problem.tests!r}: this scorer runs them; give some")
        for field, text in (("tests", problem.tests), ("setup", problem.setup)):
            if not _parses(text):
                raise UserError(f"{where}: {field}={text[:60]!r}: not Python; mend it")
        if problem.entry_point is None:
            return
        if not problem.entry_point.isidentifier():
            raise UserError(f"{where}: entry_point={problem.entry_point!r}: not the name of a function")
        if not _defines(problem.tests, "check"):
            raise UserError(f"{where}: tests define no function check(candidate); add it, or leave out entry_point")


def extract_code(completion: str, entry_point: str | None) -> str:
    """The program of a completion; the completion as it is where no block is marked."""
    blocks = [(language.lower(), code) for language, code in BLOCK.findall(completion)]
    python = [code for language, code in blocks if language in ("python", "python3", "py")]
    defining = [code for code in python if entry_point is not None and _defines(code, entry_point)]
    for candidates in (defining, python, [code for _, code in blocks]):
        if candidates:
            return candidates[-1]
    return completion


def _continued(prompt: str, code: str, entry_point: str | None) -> str:
    """The code after its prompt; with the prompt's own start of the function where the code has a whole one."""
    if entry_point is None or not _defines(code, entry_point):
        return prompt + code
    head = prompt if _parses(prompt) else "\n".join(re.findall(r"^(?:import|from) .*$", prompt, re.MULTILINE))
    future = "".join(line.rstrip() + "\n" for line in FUTURE.findall(code))
    return f"{future}{head.rstrip()}\n\n\n{FUTURE.sub('', code)}"


def _defines(code: str, name: str) -> bool:
    """Whether a function, class or variable of this name starts at the left margin."""
    start = rf"^(?:(?:async[ \t]+)?def[ \t]+|class[ \t]+){re.escape(name)}\b|^{re.escape(name)}[ \t]*="
    return re.search(start, code, re.MULTILINE) is not None


def _parses(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
