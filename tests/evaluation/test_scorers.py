"""Every scorer: right, wrong, malformed and invalid answers; benchmarks' own solutions where their data is at hand."""

from __future__ import annotations

import ast
import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lit_refusion.errors import UserError
from lit_refusion.evaluation.problem import Problem, Verdict
from lit_refusion.evaluation.sandbox import Limits
from lit_refusion.evaluation.scorer import Scorer
from lit_refusion.evaluation.scorers import Choice, Exact, MathVerify, Numeric, UnitTests
from lit_refusion.evaluation.scorers.extraction import after_answer_is, last_boxed
from lit_refusion.evaluation.scorers.numeric import last_number
from lit_refusion.evaluation.scorers.unit_tests import extract_code
from lit_refusion.schema import build
from tests.conftest import REPOSITORY, shared_folder

EXACT = Exact(ignore_case=True, ignore_punctuation=True, pattern=None)
NUMERIC = Numeric(pattern=None, tolerance=0.0)
CHOICE = Choice(pattern=None)
LIMITS = Limits(wall_seconds=30.0, cpu_seconds=30, memory_bytes=2**30, file_bytes=2**20, processes=8, output_bytes=4096)
WHOLE = UnitTests(program="completion", limits=LIMITS)
CONTINUED = UnitTests(program="prompt_and_completion", limits=LIMITS)


def problem(answer: str | None = None, **fields: Any) -> Problem:
    return Problem(**{"id": "p-1", "question": "?", "answer": answer, **fields})


def refusal(scorer: Scorer, bad: Problem) -> str:
    with pytest.raises(UserError) as error:
        scorer.check(bad)
    return str(error.value)


@pytest.mark.parametrize("path", sorted((REPOSITORY / "conf" / "scorer").glob("*.yaml")), ids=lambda path: path.stem)
def test_presets_build(path: Path) -> None:
    scorer = build(yaml.safe_load(path.read_text()), Scorer)  # type: ignore[type-abstract]
    assert scorer.executes_code == (path.stem == "unit_tests")


# Where the answer stands


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed {\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{a{b}c}", "a{b}c"),
        (r"\boxed{1} and \boxed{2", "1"),  # cut off
        (r"\boxed{", None),
        ("5", None),
    ],
)
def test_last_boxed(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


@given(
    st.recursive(st.text("ab ", max_size=3), lambda inner: st.lists(inner).map(lambda parts: f"{{{''.join(parts)}}}"))
)
def test_boxed_contents_come_back_whole(content: str) -> None:
    assert last_boxed(rf"first \boxed{{x}}, then \boxed{{{content}}} and {{}} }}") == content.strip()


def test_after_answer_is() -> None:
    assert after_answer_is("The answer is 3. No.\nThe final answer is: x + 1.\nBye") == "x + 1"
    assert after_answer_is("Answer: $5$") == "$5$"
    assert after_answer_is("The answer is") is None
    assert after_answer_is("nothing") is None


# Exact


@pytest.mark.parametrize(
    ("completion", "answer", "is_correct"),
    [
        (" Paris \n", "paris", True),
        ("Paris!", "Paris", True),
        ("New  York, N.Y.", "new york n y", True),
        ("Parish", "Paris", False),
        ("It is Paris", "Paris", False),
    ],
)
def test_exact(completion: str, answer: str, is_correct: bool) -> None:
    assert EXACT.score(completion, problem(answer)).is_correct == is_correct


def test_exact_without_leniency() -> None:
    strict = Exact(ignore_case=False, ignore_punctuation=False, pattern=None)
    assert [strict.score(text, problem("Yes.")).is_correct for text in ("Yes.", " Yes.\n", "yes.", "Yes")] == [
        True, True, False, False,
    ]  # fmt: skip
    assert strict.score("  \n", problem("Yes.")) == Verdict(is_correct=False, answer=None)


def test_exact_takes_the_last_match() -> None:
    marked = Exact(ignore_case=False, ignore_punctuation=False, pattern="<a>(.*?)</a>")
    assert marked.score("<a>1</a> <a> 2 </a>", problem("2")) == Verdict(is_correct=True, answer="2")
    assert marked.score("2", problem("2")).answer is None


@given(st.text())
def test_exact_accepts_the_answer_itself(text: str) -> None:
    assert EXACT.score(text, problem(text)).is_correct == bool(text.strip())


@pytest.mark.parametrize("make", [EXACT.__class__, Numeric, Choice])
def test_patterns_are_checked(make: Callable[..., Scorer]) -> None:
    others = {Exact: {"ignore_case": True, "ignore_punctuation": True}, Numeric: {"tolerance": 0.0}, Choice: {}}[make]  # type: ignore[index]
    with pytest.raises(UserError, match=r"scorer.pattern='\(': not a regular expression"):
        make(pattern="(", **others)
    with pytest.raises(UserError, match="put the answer in a group"):
        make(pattern="answer", **others)


# Numeric


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("The answer is 18.", "18"),
        ("#### 18", "18"),
        ("5 + 13 = 18 apples", "18"),
        ("1,234", "1234"),
        ("1,234,567.50", "1234567.5"),
        ("1,2", "2"),  # a list
        ("$5", "5"),
        ("-$5", "-5"),
        ("$-5.25", "-5.25"),
        (r"\$1{,}000", "1000"),
        ("-3", "-3"),
        ("\u22123", "-3"),
        ("+3", "3"),
        ("8-3", "3"),
        ("x=-3", "-3"),
        ("(4)-3", "3"),
        ("3.0", "3"),
        (".5", "1/2"),
        ("72.", "72"),
        ("1e3", "1000"),
        ("2.5E-2", "1/40"),
        ("1/2", "1/2"),
        ("-1/3", "-1/3"),
        (r"\boxed{\frac{3}{4}}", "3/4"),
        ("50%", "50"),
        (r"50\%", "50"),
        ("**72**", "72"),
        ("72 grams of CO2", "72"),
        ("007", "7"),
        ("9" * 200, "9" * 200),
    ],
)
def test_numbers(completion: str, value: str) -> None:
    found = last_number(completion)
    assert found is not None
    assert found[1] == Fraction(value)
    assert NUMERIC.score(completion, problem(value)).is_correct
    assert not NUMERIC.score(completion, problem(str(Fraction(value) + 1))).is_correct


@pytest.mark.parametrize(
    "text", ["", "none", "...", "CO2", "1/0", "1e999999999", "1e" + "9" * 50, "9" * 5000, "-", "$"]
)
def test_what_is_no_number(text: str) -> None:
    start = time.monotonic()
    assert NUMERIC.score(text, problem("1")) == Verdict(is_correct=False, answer=None)
    assert time.monotonic() - start < 5


@given(st.fractions(), st.sampled_from(["{}", "The answer is {}.", "#### {}", "so x = {} dollars", "**{}**", "${}$"]))
def test_fractions_are_read_exactly(value: Fraction, form: str) -> None:
    found = last_number(form.format(value))
    assert found is not None
    assert found[1] == value


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9))
def test_separators_do_not_matter(value: Any) -> None:
    assert NUMERIC.score(f"It costs ${value:,} in all.", problem(str(value))).is_correct


@given(st.text())
def test_numbers_in_any_text_raise_nothing(text: str) -> None:
    NUMERIC.score(text, problem("1"))


def test_tolerance_and_pattern() -> None:
    lenient = Numeric(pattern=r"answer is ([^\n]*)", tolerance=0.01)
    verdicts = [lenient.score(f"The answer is {text}\nThen 7", problem("3")) for text in ("3.01", "2.99", "3.0101")]
    assert [verdict.is_correct for verdict in verdicts] == [True, True, False]
    assert lenient.score("3", problem("3")).answer is None
    with pytest.raises(UserError, match=r"scorer.tolerance=-1: must not be negative"):
        Numeric(pattern=None, tolerance=-1)


def test_numeric_refuses_problems_without_a_number() -> None:
    assert refusal(NUMERIC, problem()) == "problem p-1: answer=None: this scorer compares with it; give one"
    assert refusal(NUMERIC, problem("many")) == "problem p-1: answer='many': no number in it; use another scorer"
    NUMERIC.check(problem("1,000"))


# Choice

PLANETS = ("Mercury", "Venus", "A red planet", "Jupiter")


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        ("The answer is (C).", "C"),
        ("The answer is C because A is not.", "C"),
        ("the correct option is: b", "B"),
        ("**Answer:** D", "D"),
        ("Answer: **(D)**", "D"),
        ("The answer is (A). No, the answer is (B).", "B"),
        ("The answer is option B. Option A is too hot.", "B"),
        (r"\boxed{C}", "C"),
        (r"\boxed{\text{(c)}}", "C"),
        (r"The answer is \boxed{D}.", "D"),
        ("C", "C"),
        ("c", "C"),
        ("(b)", "B"),
        ("B.", "B"),
        ("B) Venus", "B"),
        ("B: Venus\nIt is hot.", "B"),
        ("I think it must be D", "D"),
        ("Venus", "B"),
        ("venus.", "B"),
        ("The answer is Venus.", "B"),
        ("The answer is a red planet.", "C"),
        ("The answer is A red planet", "C"),
        ("Let me think.\nJupiter", "D"),
        ("(A) is too hot, (B) too.\n(D)", "D"),
    ],
)
def test_choices(completion: str, letter: str) -> None:
    asked = problem(letter, choices=PLANETS)
    assert CHOICE.score(completion, asked) == Verdict(is_correct=True, answer=letter)
    assert not CHOICE.score(completion, problem("A" if letter != "A" else "B", choices=PLANETS)).is_correct


@pytest.mark.parametrize(
    "completion",
    ["", "The answer is (E).", r"\boxed{X}", "A planet", "The answer is a planet.", "It is 21°C", "None.", "Mars"],
)
def test_invalid_choices(completion: str) -> None:
    verdict = CHOICE.score(completion, problem("A", choices=PLANETS))
    assert (verdict.is_correct, verdict.answer) == (False, None)


def test_choice_texts_that_look_alike() -> None:
    genes = ("R", "rr", "Rr", "RR")
    assert CHOICE.score("The answer is Rr", problem("C", choices=genes)).is_correct
    assert CHOICE.score("(C)", problem("C", choices=("C", "NO", "CO", "OO"))).answer == "C"
    assert CHOICE.score("-5", problem("B", choices=("5", "-5"))).is_correct
    assert CHOICE.score("The answer is R.", problem("A", choices=genes)).is_correct
    assert CHOICE.score("The answer is 4.", problem("A", choices=("4", "3", "2"))).is_correct


def test_choice_by_pattern() -> None:
    marked = Choice(pattern="<a>(.*?)</a>")
    assert marked.score("<a>A</a> <a>(b)</a>", problem("B", choices=PLANETS)).is_correct
    assert marked.score("<a>Venus</a>", problem("B", choices=PLANETS)).is_correct
    assert marked.score("<a>Mars</a>", problem("B", choices=PLANETS)).answer is None
    assert marked.score("The answer is B", problem("B", choices=PLANETS)).answer is None


@given(st.text())
def test_choice_raises_nothing(text: str) -> None:
    verdict = CHOICE.score(text, problem("A", choices=PLANETS))
    assert verdict.answer in (None, *"ABCD")


def test_choice_refuses_what_it_cannot_decide() -> None:
    assert "choices has 0 entries; give 2 to 26" in refusal(CHOICE, problem("A"))
    assert "give a letter from A to D" in refusal(CHOICE, problem("E", choices=PLANETS))
    assert "answer=None" in refusal(CHOICE, problem(choices=PLANETS))
    CHOICE.check(problem("Venus", choices=PLANETS))


# MathVerify


@pytest.fixture(scope="module")
def math() -> MathVerify:
    pytest.importorskip("math_verify", reason="the eval extra is not installed")
    return MathVerify(timeout_seconds=20.0)


@pytest.mark.parametrize(
    ("completion", "answer", "is_correct"),
    [
        (r"So \boxed{\frac{1}{2}}.", "0.5", True),
        (r"\boxed{3} hence \boxed{\dfrac12}", r"\frac{1}{2}", True),
        (r"\boxed{\frac12} hence \boxed{3}", r"\frac{1}{2}", False),
        ("The answer is $2x + 1$.", "1+2x", True),
        ("The answer is 7", "7", True),
        ("It follows that $x=5$.", "5", True),
        (r"\boxed{\left(3, \frac{\pi}{2}\right)}", r"(3, \frac{\pi}{2})", True),
        (r"\boxed{(3, 4)}", "(4, 3)", False),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", True),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", True),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", True),
        (r"\boxed{\text{Anna}}", r"\text{Evelyn}", False),
        (r"\boxed{10\%}", r"10\%", True),
    ],
)
def test_math(math: MathVerify, completion: str, answer: str, is_correct: bool) -> None:
    math.check(problem(answer))
    verdict = math.score(completion, problem(answer))
    assert verdict.is_correct == is_correct
    assert verdict.answer is not None


@pytest.mark.parametrize("completion", ["", "no idea", r"\boxed{", "{" * 50])
def test_invalid_math(math: MathVerify, completion: str) -> None:
    verdict = math.score(completion, problem("5"))
    assert (verdict.is_correct, verdict.answer) == (False, None)


@pytest.mark.parametrize("is_main_thread", [True, False])
def test_math_that_never_ends_is_wrong(math: MathVerify, is_main_thread: bool) -> None:
    hasty = MathVerify(timeout_seconds=1.0)
    verdicts: list[Verdict] = []

    def ask() -> None:
        verdicts.append(hasty.score(r"\boxed{9^{9^{9^{9^9}}}}", problem("5")))
        verdicts.append(MathVerify.score(math, r"\boxed{5.0}", problem("5")))

    if is_main_thread:
        ask()
    else:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert verdicts[0].note == "math-verify: not done after 1 s"
    assert [verdict.is_correct for verdict in verdicts] == [False, True]


def test_math_goes_on_after_a_timeout(math: MathVerify) -> None:
    short = MathVerify(timeout_seconds=1.0)
    assert not short.score(r"\boxed{9^{9^{9^{9^9}}}}", problem("5")).is_correct
    object.__setattr__(short, "timeout_seconds", 20.0)
    assert short.score(r"\boxed{5.0}", problem("5")).is_correct
    process = short._judge._process
    assert process is not None
    del short
    process.wait(20)  # it ends with its scorer


def test_math_from_several_threads(math: MathVerify) -> None:
    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(lambda n: math.score(rf"\boxed{{\frac{{{n}}}{{2}}}}", problem(str(n / 2))), range(20)))
    assert all(verdict.is_correct for verdict in verdicts)


def test_math_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = refusal(MathVerify(timeout_seconds=1.0), problem("5"))
    assert message == "scorer=math_verify needs math-verify: pip install 'lit-refusion[eval]'"
    with pytest.raises(UserError, match="must be positive"):
        MathVerify(timeout_seconds=0.0)


def test_math500_solutions_are_right(math: MathVerify) -> None:
    for record in records("math500", "test.jsonl")[::5]:
        asked = problem(record["answer"], id=record["id"])
        math.check(asked)
        assert math.score(record["solution"], asked).is_correct, record["id"]
        assert math._judge.compare(record["answer"], record["answer"], is_marked=True, seconds=20).is_equal


# UnitTests

ADD = problem(tests="assert add(1, 2) == 3\nassert add(0, 0) == 0", question="Write add.")
DOUBLE = problem(
    question="from typing import List\n\ndef halve(x):\n    return x / 2\n\n"
    'def double(x: int) -> List[int]:\n    """Two x."""\n',
    tests="def check(candidate):\n    assert candidate(1) == [1, 1]\n    assert halve(2) == 1",
    entry_point="double",
)

needs_sandbox = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("x = 1", "x = 1"),
        ("    return 1\n", "    return 1\n"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```\n```\noutput\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n```python\nx = 2\n```", "x = 2\n"),
        ("```python\ndef f(): pass\n```\n```python\nf()\n```", "def f(): pass\n"),
        ("```python\nx = 1", "x = 1"),  # cut off
        ("```python\nx = '```'\n```", "x = '```'\n"),
        ("1.\n  ```Python3\n  x = 1\n  ```", "  x = 1\n"),
        ("```bash\npip\n```", "pip\n"),
    ],
)
def test_code_is_found(completion: str, code: str) -> None:
    assert extract_code(completion, "f") == code


@needs_sandbox
@pytest.mark.parametrize(
    ("completion", "note"),
    [
        ("def add(a, b):\n    return a + b", ""),
        ("```python\ndef add(a, b):\n    return a + b\n```", ""),
        ("def add(a, b):\n    return a - b", "failed: AssertionError (line 1 of the tests)"),
        ("def add(a, b): return", "failed: AssertionError (line 1 of the tests)"),
        ("def plus(a, b): return a + b", "failed: NameError: name 'add' is not defined (line 1 of the tests)"),
        ("I would add them.", "failed: SyntaxError: invalid syntax (line 1 of the program)"),
        ("exit()", "failed: NameError: name 'exit' is not defined (line 1 of the program)"),
        ("raise SystemExit", "exited: SystemExit (line 1 of the program)"),
        ("import os\nos._exit(3)", "exited: ended with exit code 3 before its tests did"),
        ("x = [0] * 10**12", "memory"),
        ("def add(a, b):\n    return input()", "failed: EOFError: EOF when reading a line (line 1 of the tests)"),
    ],
)
def test_programs(completion: str, note: str) -> None:
    WHOLE.check(ADD)
    verdict = WHOLE.score(completion, ADD)
    assert verdict.is_correct == (note == "")
    assert verdict.note.replace(" (line 2 of the program)", " (line 1 of the tests)") == note
    assert verdict.answer is not None


@needs_sandbox
def test_a_program_that_never_ends_is_wrong() -> None:
    hasty = UnitTests(program="completion", limits=build({**vars(LIMITS), "wall_seconds": 1.0}, Limits))
    assert hasty.score("while True: pass", ADD).note == "timeout: not done after 1 s"


def test_no_code_is_invalid() -> None:
    assert WHOLE.score(" \n", ADD) == Verdict(is_correct=False, answer=None, note="no code")


@needs_sandbox
@pytest.mark.parametrize(
    ("completion", "is_correct"),
    [
        ("    return [x, x]\n", True),
        ("    return [x]\n", False),
        ("    return [x, x]\n\ndef other(): pass\n", True),
        ("def double(x: int) -> List[int]:\n    return [x, x]", True),  # typing and halve are the prompt's
        ("```python\ndef double(x: int) -> List[int]:\n    return [x, x]\n```", True),
        ("from __future__ import annotations\ndef double(x: Nothing):\n    return [x, x]", True),
        ("```python\n    return [x, x]\n```", True),
        ("def double(x):\n    return 2 * x", False),
        ("```python\nprint('hello')\n```", False),
        ("def check(candidate): pass\n" * 2, False),
        ("    return [x, x]\n\nif __name__ == '__main__':\n    print(input())\n", True),
    ],
)
def test_programs_that_continue_their_prompt(completion: str, is_correct: bool) -> None:
    CONTINUED.check(DOUBLE)
    assert CONTINUED.score(completion, DOUBLE).is_correct == is_correct


def test_unit_tests_refuse_what_they_cannot_decide() -> None:
    assert "tests=None: this scorer runs them; give some" in refusal(WHOLE, problem("5"))
    assert "tests='assert (': not Python" in refusal(WHOLE, problem(tests="assert ("))
    assert "setup='import': not Python" in refusal(WHOLE, problem(tests="assert 1", setup="import"))
    assert "entry_point='a b': not the name of a function" in refusal(WHOLE, problem(tests="1", entry_point="a b"))
    assert "tests define no function check(candidate)" in refusal(WHOLE, problem(tests="assert f()", entry_point="f"))


# The benchmarks' own solutions


def records(*parts: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in shared_folder("data", *parts).read_text().splitlines()]


class WrongReturns(ast.NodeTransformer):
    """Every function returns something else."""

    def visit_Return(self, node: ast.Return) -> ast.Return:
        return ast.Return(ast.Tuple([ast.Constant("wrong"), node.value or ast.Constant(None)], ast.Load()))


def altered(code: str) -> str:
    return ast.unparse(ast.fix_missing_locations(WrongReturns().visit(ast.parse(code))))


def all_scored(scorer: UnitTests, pairs: list[tuple[str, Problem]]) -> list[tuple[str, str]]:
    """Ids and notes of those that are not right."""
    for _, asked in pairs:
        scorer.check(asked)
    with ThreadPoolExecutor(2) as pool:
        verdicts = pool.map(lambda pair: scorer.score(*pair), pairs)
        return [(asked.id, verdict.note) for (_, asked), verdict in zip(pairs, verdicts) if not verdict.is_correct]


def humaneval() -> list[tuple[dict[str, Any], Problem]]:
    keep = ("id", "question", "tests", "entry_point")
    found = records("humaneval", "test.jsonl")
    return [(record, problem(**{name: record[name] for name in keep})) for record in found]


def mbpp(name: str) -> list[tuple[dict[str, Any], Problem]]:
    return [
        (record, problem(id=record["id"], tests="\n".join(record["tests"]), setup=record.get("test_setup", "")))
        for record in records("mbpp", name)
    ]


@needs_sandbox
def test_humaneval_solutions_pass() -> None:
    assert all_scored(CONTINUED, [(record["answer"], asked) for record, asked in humaneval()]) == []


@needs_sandbox
def test_altered_humaneval_solutions_fail() -> None:
    pairs = [(altered(record["question"] + record["answer"]), asked) for record, asked in humaneval()[::4]]
    failures = all_scored(CONTINUED, pairs)
    assert len(failures) == len(pairs)
    assert {note.split(":")[0] for _, note in failures} == {"failed"}


@needs_sandbox
@pytest.mark.parametrize(
    ("name", "step"),
    [("test.jsonl", 16), pytest.param("test.jsonl", 1, marks=pytest.mark.slow), ("sanitized.jsonl", 40)],
)
def test_mbpp_solutions_pass_and_altered_ones_fail(name: str, step: int) -> None:
    found = mbpp(name)[356 % step :: step]  # with mbpp-367, whose setup defines what its program uses
    assert all_scored(WHOLE, [(record["answer"], asked) for record, asked in found]) == []
    pairs = [(altered(record["answer"]), asked) for record, asked in found]
    missed = {asked.id for _, asked in pairs} - {id for id, _ in all_scored(WHOLE, pairs)}
    assert missed == set()


@pytest.mark.parametrize("name", ["gsm8k/test.jsonl", "svamp/all.jsonl"])
def test_number_answers_are_right(name: str) -> None:
    for record in records(*name.split("/")):
        asked = problem(record["answer"])
        NUMERIC.check(asked)
        assert NUMERIC.score(f"6 - 2 = 4. The answer is {record['answer']}.", asked).is_correct
        if "solution" in record:
            assert NUMERIC.score(f"{record['solution']}\n#### {record['answer']}", asked).is_correct


def test_arc_answers_are_right() -> None:
    for record in records("arc_challenge", "test.jsonl"):
        letter, asked = record["answer"], problem(record["answer"], choices=tuple(record["choices"]))
        text = record["choices"][ord(letter) - ord("A")]
        CHOICE.check(asked)
        for form in ("The answer is {0}.", "The answer is ({0}) {1}", "The answer is {1}", "{0}. {1}", "{1}?\n({0})"):
            assert CHOICE.score(form.format(letter, text), asked).is_correct, (record["id"], form)
