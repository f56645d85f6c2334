"""Figures of answers."""

from __future__ import annotations

from typing import Any

import pytest

from lit_refusion.evaluation.answers import Answer
from lit_refusion.evaluation.meter import AnswerMeter, figures, wilson


def answer(**changes: Any) -> Answer:
    values: dict[str, Any] = {
        "id": "0", "prompt_tokens": 3, "text": "t", "tokens": 10, "forward_passes": 5, "stop": "eos",
        "is_correct": True, "answer": "1", "note": "", "statistics": {}, "repeats_eos": False, "goes_on": False,
    }  # fmt: skip
    return Answer(**{**values, **changes})


def test_totals_are_divided_and_not_ratios_averaged() -> None:
    found = figures([answer(tokens=30, forward_passes=3), answer(tokens=2, forward_passes=5)])
    assert found["tokens_per_forward"] == 32 / 8
    assert (found["tokens_per_answer"], found["forward_passes_per_answer"]) == (16, 4)


def test_shares_are_of_all_problems() -> None:
    found = figures([
        answer(), answer(is_correct=False, answer=None), answer(is_correct=False, stop="length"),
        answer(is_correct=False, tokens=1), answer(repeats_eos=True, goes_on=True),
    ])  # fmt: skip
    assert found["problems"] == 5
    assert found["accuracy"] == 2 / 5
    for name in ("invalid", "no_eos", "early_eos", "repeated_eos", "text_after_eos"):
        assert found[name] == pytest.approx(1 / 5), name


def test_one_token_without_an_end_is_not_an_early_end() -> None:
    assert figures([answer(tokens=1, stop="length")])["early_eos"] == 0


def test_the_decoders_own_figures_are_averaged() -> None:
    assert figures([answer(statistics={"x": 1.0}), answer(statistics={"x": 2.0, "y": 4.0})])["x"] == 1.5


def test_nothing_has_figures_too() -> None:
    found = figures([])
    assert (found["problems"], found["accuracy"], found["accuracy_low"], found["accuracy_high"]) == (0, 0, 0, 1)


@pytest.mark.parametrize(
    ("correct", "count", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_the_interval_is_wilsons(correct: int, count: int, low: float, high: float) -> None:
    """The last case is Newcombe's (1998), Table I."""
    assert wilson(correct, count) == pytest.approx((low, high), abs=1e-4)


def test_meters_of_parts_add_up() -> None:
    parts = [[answer(tokens=3)], [answer(is_correct=False), answer(tokens=7)]]
    meter = AnswerMeter()
    for part in parts:
        for item in part:
            meter.update(item)
    assert meter.compute() == figures(item for part in parts for item in part)
