"""`lit-refusion compare`: its files, what it prints, and its exit code."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from lit_refusion.cli import main
from lit_refusion.comparison import compare as module
from tests.comparison.folders import make_ablation, make_arm, make_evaluation, make_run, make_trained

pytestmark = pytest.mark.usefixtures("few_resamples")


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "draw", lambda *_: [])


def compare(*arguments: str | Path) -> int:
    return main(["compare", *map(str, arguments), "measure.num_problems=0"])


def pair(tmp_path: Path, **other: Any) -> list[Path]:
    return [make_trained(tmp_path / "base"), make_trained(tmp_path / "other", **other)]


def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def test_a_controlled_comparison_writes_everything_and_ends_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, out = pair(tmp_path, evaluation={"correct": [True] * 3}), tmp_path / "report"
    assert compare(*runs, f"out={out}") == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "loss.png", "report.html", "report.md", "results.json", "scores.csv", "words-frontier.png",
    ]  # fmt: skip
    printed = capsys.readouterr().out
    assert "controlled: the arms differ only in nothing" in printed
    assert f"report: {out}/report.html and {out}/report.md" in printed
    assert "WARNING" not in printed
    page = (out / "report.html").read_text()
    assert page.count('src="data:image/png;base64,') == 2
    assert "http" not in page
    with (out / "scores.csv").open() as file:
        base, other = csv.DictReader(file)
    assert (base["arm"], base["problems"], base["gain"]) == ("base", "3", "")
    assert float(other["score"]) == 1
    assert float(other["gain"]) == pytest.approx(1 / 3)
    assert float(other["p_value"]) == 1
    found = results(out)
    assert [score["arm"] for score in found["scores"]] == ["base", "other"]
    assert found["control"]["violations"] == []
    assert found["costs"][0]["row_tokens"] == 2700


@pytest.mark.usefixtures("no_pictures")
def test_a_doctored_run_ends_with_1_unless_it_is_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, out = pair(tmp_path, origin={"example_order": "o1"}), tmp_path / "report"
    assert compare(*runs, f"out={out}") == 1
    printed = capsys.readouterr().out
    assert "WARNING: this comparison is not controlled." in printed
    assert "example_order (order of the examples): o0 in the baseline, o1 in other" in " ".join(printed.split())
    assert [item["key"] for item in results(out)["control"]["violations"]] == ["example_order"]
    assert compare(*runs, f"out={out}", "allow=[example_orde]") == 1
    capsys.readouterr()
    assert compare(*runs, f"out={out}", "allow=[example_order]") == 0
    assert "WARNING" not in capsys.readouterr().out


@pytest.mark.usefixtures("no_pictures")
def test_an_arm_without_a_result_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_ablation(tmp_path / "out", ["base", "broken"])
    make_arm(folder, "base", run=make_run(tmp_path / "run"), words={})
    make_arm(folder, "broken", failure="it broke")
    assert compare(folder, f"out={tmp_path}/report") == 1
    assert "broken-seed0: it broke" in capsys.readouterr().out
    found = results(tmp_path / "report")
    assert found["failures"] == {"broken-seed0": "it broke"}
    assert found["control"]["violations"] == []


def test_a_comparison_of_nothing_but_failures_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_ablation(tmp_path / "out", ["base", "other"])
    make_arm(folder, "base", failure="it broke")
    assert compare(folder, f"out={tmp_path}/report") == 2
    reasons = "every arm failed (base-seed0: it broke; other-seed0: it has not been run)"
    assert f"{folder}: nothing has been evaluated there; {reasons}" in capsys.readouterr().err


@pytest.mark.usefixtures("no_pictures")
def test_another_arm_can_be_the_baseline(tmp_path: Path) -> None:
    runs, out = pair(tmp_path, evaluation={"correct": [True] * 3}), tmp_path / "report"
    assert compare(*runs, f"out={out}", "baseline=other") == 0
    base, other = results(out)["scores"]
    assert base["against"]["gain"]["value"] == pytest.approx(-1 / 3)
    assert other["against"] is None


@pytest.mark.usefixtures("no_pictures")
def test_settings_and_folders_may_stand_in_any_order(tmp_path: Path) -> None:
    one, two = pair(tmp_path)
    assert compare(f"out={tmp_path}/report", one, "num_samples=0", two) == 0


@pytest.mark.usefixtures("no_pictures")
def test_an_ablations_command_is_in_its_report(tmp_path: Path) -> None:
    folder = make_ablation(tmp_path / "out", ["base"])
    make_arm(folder, "base", words={})
    assert compare(folder, f"out={tmp_path}/report") == 0
    assert "```\nlit-refusion ablate\n```" in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["{base}"], "out: missing; give out=..."),
        (["out={tmp}/report"], "compare: give the folders of the runs"),
        (["{base}", "out={tmp}/report", "baseline=x"], "baseline=x: no such arm; there are base"),
        (["{base}", "out={tmp}/report", "num_samples=-1"], "num_samples=-1"),
        (["{base}", "out={tmp}/report", "seed=-1"], "seed=-1"),
        (["{base}", "out={tmp}/report", "measure.repeats=0"], "repeats=0"),
        (["{base}", "{base}", "out={tmp}/report"], "base-seed0: two of the runs are called so"),
        (["{tmp}/x", "out={tmp}/report"], "{tmp}/x: not the folder of an ablation"),
        (["{tmp}/bare", "out={tmp}/report"], "{tmp}/bare: nothing has been evaluated there"),
    ],
)
def test_wrong_input_is_one_line(
    settings: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trained(tmp_path / "base")
    make_run(tmp_path / "bare")
    places = {"base": tmp_path / "base", "tmp": tmp_path}
    assert main(["compare", *(text.format(**places) for text in settings)]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert told.format(**places) in error[0]
    assert not (tmp_path / "report").exists()


STUDIES: dict[str, tuple[list[dict[str, Any]], tuple[str, dict[str, float]] | None]] = {
    "one number": (
        [{"top_k": 0}, {"top_k": 5}, {"top_k": 9}],
        ("top k", {"base": 0, "one": 5, "two": 9}),
    ),
    "two numbers": ([{"top_k": 0}, {"top_k": 5}, {"top_k": 9, "temperature": 1.0}], None),
    "no number": ([{"stop_at_eos": True}, {"stop_at_eos": False}, {"stop_at_eos": False}], None),
    "two arms": ([{"top_k": 0}, {"top_k": 5}], None),
    "two arms alike": ([{"top_k": 0}, {"top_k": 0}, {"top_k": 9}], None),
}


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_of_one_number_is_drawn_over_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(module, "draw", lambda *arguments: drawn.append(arguments[3]) or [])
    decoders, expected = STUDIES[name]
    arms = ["base", "one", "two"][: len(decoders)]
    folder = make_ablation(tmp_path / "out", arms)
    for arm, decoder in zip(arms, decoders):
        make_arm(folder, arm, words={"decoder": decoder}, more={"decoder": decoder})
    assert compare(folder, f"out={tmp_path}/report") == 0
    assert drawn == [expected]


def test_a_picture_can_be_drawn_whatever_a_task_is_called(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine")
    make_evaluation(folder / "evaluations" / "my task")
    assert compare(folder, f"out={tmp_path}/report") == 0
    assert (tmp_path / "report" / "report.html").read_text().count('src="data:image/png;base64,') == 2
