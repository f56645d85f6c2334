"""The report as Markdown and as a page: what it says, and that no text of a model can break out of its place."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lit_refusion.comparison.arm import read_all
from lit_refusion.comparison.control import check
from lit_refusion.comparison.figures import costs, scores
from lit_refusion.comparison.page import render
from lit_refusion.comparison.report import markdown, warnings, write_out
from tests.comparison.folders import make_ablation, make_arm, make_run, make_task

pytestmark = pytest.mark.usefixtures("few_resamples")
PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII=")
NASTY = [
    "<script>alert(1)</script>",
    "a | b || c \\| d",
    "one\n\ntwo\r\n| three |\n# four",
    "`code` ``two`` ```",
    "![x](http://example.com/x.png) [y](http://example.com) <http://example.com>",
    "</code></td></table><img src=x onerror=y>",
    "&lt;b&gt; &amp; \\",
    "",
    " `",
]
VOID = {"meta", "img", "br", "hr"}


@dataclass
class Page(HTMLParser):
    """A page that was read by a strict parser: tables as rows of texts, sources, and elements."""

    html: str
    tables: list[list[list[str]]] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    elements: set[str] = field(default_factory=set)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.feed(self.html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data


def written(
    tmp_path: Path, arms: Sequence[str] = ("base", "other"), *, allow: Sequence[str] = (), **changes: Any
) -> str:
    """The report on an ablation in `tmp_path/out`, of which every arm has its folder."""
    runs = read_all([str(tmp_path / "out")])
    settings: dict[str, Any] = {
        "runs": runs,
        "control": check(runs, baseline="base", allow=allow),
        "scores": scores(runs, baseline="base", throughput=None, seed=0),
        "costs": costs(runs),
        "throughput": None,
        "pictures": [],
        "baseline": "base",
        "num_samples": 20,
        "command": ["lit-refusion", "ablate", "arms={a: b}"],
    }
    return write_out(**{**settings, **changes})


def page(report: str, folder: Path) -> Page:
    return Page(render(report, folder=folder, title="a <b>"))


@pytest.fixture
def nasty(tmp_path: Path) -> Path:
    """Answers, questions, settings and failures full of characters that mean something in Markdown and HTML."""
    problems = str(make_task(tmp_path / "problems.jsonl", [f"Say {text}" for text in NASTY]))
    out = make_ablation(tmp_path / "out", ["base", "other", "broken"])
    same: dict[str, Any] = {"correct": [False] * len(NASTY), "problems": problems}
    make_arm(out, "base", run=make_run(tmp_path / "0"), words={**same, "texts": NASTY})
    doctored = {"task.template": "Q: {question}\n\n| <i>A</i>:\n# x", "task.prefix": "<script>"}
    make_arm(out, "other", run=make_run(tmp_path / "1"), words={**same, "texts": NASTY[::-1], "result": doctored})
    make_arm(out, "broken", failure="it broke\n\n> <script>x</script> | `y ![x](http://example.com/x.png)")
    return tmp_path


def test_no_text_of_a_model_or_a_setting_becomes_an_element(nasty: Path) -> None:
    found = page(written(nasty), nasty)
    assert not found.elements & {"script", "i", "img", "a", "h4"}
    assert found.sources == []
    assert "it broke > <script>x</script> | `y ![x](http://example.com/x.png)" in found.text


def test_every_answer_stands_in_its_cell_as_it_was_written(nasty: Path) -> None:
    found = page(written(nasty), nasty)
    answers = [rows for rows in found.tables if rows[0] == ["arm", "right", "passes", "answer"]]
    assert len(answers) == len(NASTY)
    for number, rows in enumerate(answers):
        assert [row[:3] for row in rows[1:]] == [["base", "no", "8"], ["other", "no", "8"]]
        expected = [NASTY[number], NASTY[::-1][number]]
        assert [row[3].strip() for row in rows[1:]] == [" ".join(text.split()) for text in expected]


def test_all_tables_have_equally_long_rows(nasty: Path) -> None:
    for rows in page(written(nasty), nasty).tables:
        assert len({len(row) for row in rows}) == 1


def test_warnings_stand_above_everything_but_the_title(nasty: Path) -> None:
    report = written(nasty)
    title, warning, failure = report.split("\n\n")[:3]
    assert title == "# Comparison of base, other, broken"
    assert warning.startswith("> **WARNING: this comparison is not controlled.**")
    assert "evaluation.words.task.template" in warning
    assert failure.startswith("> **WARNING: some arms have no result.**")
    assert "broken-seed0: it broke" in failure


def test_a_controlled_comparison_has_no_warning_and_says_what_differs(tmp_path: Path) -> None:
    out = make_ablation(tmp_path / "out", ["base", "other"])
    make_arm(out, "base", run=make_run(tmp_path / "0"), words={})
    make_arm(out, "other", run=make_run(tmp_path / "1", config={"objective.average": "token"}), words={})
    report = written(tmp_path)
    assert "WARNING" not in report
    assert "The arms differ only in: objective." in report
    tables = page(report, tmp_path).tables
    assert ["objective.average", "example", "token"] in [row for rows in tables for row in rows]
    shared = next(rows for rows in tables if rows[0] == ["what", "value"])
    assert ["initial weights", "w0"] in shared
    assert ["optimizer steps", "6"] in shared


def test_differences_that_were_allowed_are_listed_without_a_warning(tmp_path: Path) -> None:
    out = make_ablation(tmp_path / "out", ["base", "other"])
    make_arm(out, "base", run=make_run(tmp_path / "0"), words={})
    make_arm(out, "other", run=make_run(tmp_path / "1", origin={"tokens": 9}), words={})
    assert "WARNING" in written(tmp_path)
    report = written(tmp_path, allow=["tokens"])
    assert "WARNING" not in report
    assert "Allowed to differ:\n\n- tokens (token budget" in report


def test_problems_that_the_arms_disagree_on_come_first(tmp_path: Path) -> None:
    problems = str(make_task(tmp_path / "problems.jsonl"))
    out = make_ablation(tmp_path / "out", ["base", "other"])
    make_arm(out, "base", words={"correct": [True, True, True], "problems": problems})
    make_arm(out, "other", words={"correct": [True, True, False], "problems": problems})
    report = written(tmp_path, num_samples=2)
    assert re.findall(r"\*\*words, (\d)\*\*", report) == ["2", "0"]
    assert "`What is 3 + 3?` (answer: `3`)" in report
    assert "Answers side by side" not in written(tmp_path, num_samples=0)


def test_a_task_whose_file_is_gone_is_reported_without_answers(tmp_path: Path) -> None:
    out = make_ablation(tmp_path / "out", ["base"])
    make_arm(out, "base", words={})
    report = written(tmp_path)
    assert "Answers side by side" not in report
    assert "| base | 66.7% (" in report


def test_figures_are_written_with_their_intervals(tmp_path: Path) -> None:
    out = make_ablation(tmp_path / "out", ["base", "other"])
    make_arm(out, "base", run=make_run(tmp_path / "0"), words={"correct": [True] * 2 + [False] * 12})
    make_arm(out, "other", words={"correct": [True] * 14, "passes": 3})
    tables = page(written(tmp_path), tmp_path).tables
    head, base, other = tables[0]
    assert head == [
        "arm",
        "score (95% interval)",
        "against baseline",
        "p",
        "tokens/pass",
        "tokens/answer",
        "unreadable",
    ]
    assert base == ["base", "14.3% (4.0% to 39.9%)", "", "", "1.00", "8.0", "42.9%"]
    assert other[1:5] == ["100.0% (78.5% to 100.0%)", "+85.7 (+64.3 to +100.0)", "<0.001", "2.67"]
    cost = next(rows for rows in tables if rows[0][:2] == ["arm", "steps"])
    assert cost[1][:2] == ["base", "6"]


def test_the_command_is_quoted_for_a_shell(tmp_path: Path) -> None:
    make_arm(make_ablation(tmp_path / "out", ["base"]), "base", words={})
    assert "```\nlit-refusion ablate 'arms={a: b}'\n```" in written(tmp_path)
    assert "## Command" not in written(tmp_path, command=[])


def test_pictures_are_put_into_the_page(tmp_path: Path) -> None:
    (tmp_path / "words-frontier.png").write_bytes(PNG)
    problems = str(make_task(tmp_path / "problems.jsonl"))
    texts = ['<img src="words-frontier.png">', "![a](words-frontier.png)", "![a](missing.png)"]
    make_arm(make_ablation(tmp_path / "out", ["base"]), "base", words={"texts": texts, "problems": problems})
    found = page(written(tmp_path, pictures=[(tmp_path / "words-frontier.png", "accuracy <i>")]), tmp_path)
    (source,) = found.sources
    assert source.startswith("data:image/png;base64,")
    assert base64.b64decode(source.partition(",")[2]) == PNG
    assert "accuracy <i>" in found.text
    assert "i" not in found.elements
    assert all(text in found.text for text in texts)


def test_cells_of_a_table_may_hold_anything() -> None:
    rows = [["a", "b"], ["x | y", "one\ntwo"]]
    assert markdown(rows) == "| a | b |\n|---|---|\n| x \\| y | one two |"


def test_nothing_is_warned_of_where_all_is_well(tmp_path: Path) -> None:
    make_arm(make_ablation(tmp_path / "out", ["base"]), "base", words={})
    runs = read_all([str(tmp_path / "out")])
    assert warnings(runs, check(runs, baseline="base", allow=())) == []
