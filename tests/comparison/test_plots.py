"""Pictures of a comparison: which are drawn, and that the points are where the figures are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from lit_refusion.comparison import plots
from lit_refusion.comparison.arm import ArmRun, read_all
from lit_refusion.comparison.figures import Score, scores
from tests.comparison.folders import make_ablation, make_arm, make_run

pytestmark = pytest.mark.usefixtures("few_resamples")
SETTING = ("slot size", {"base": 4.0, "other": 8.0, "third": 32.0})


@pytest.fixture
def runs(tmp_path: Path) -> list[ArmRun]:
    """Two decodings of one training, and one of another."""
    out = make_ablation(tmp_path / "out", ["base", "other", "third"])
    first, second = make_run(tmp_path / "0"), make_run(tmp_path / "1", term="ce/masked")
    make_arm(out, "base", run=first, words={"passes": 8}, more={})
    make_arm(out, "other", run=first, words={"passes": 4}, more={})
    make_arm(out, "third", run=second, words={"passes": 1, "correct": [True] * 3}, more={})
    return read_all([str(out)])


def rows(runs: list[ArmRun], *, with_speed: bool = False) -> list[Score]:
    speeds = {
        arm: {"tokens_per_second": speed, "repeats": [speed]} for arm, speed in zip(SETTING[1], (10.0, 30.0, 90.0))
    }
    tasks = {"words": {"1": speeds}} if with_speed else {}
    return scores(runs, baseline="base", throughput={"tasks": tasks}, seed=0)


def words(runs: list[ArmRun], **settings: Any) -> list[Score]:
    return [score for score in rows(runs, **settings) if score.task == "words"]


@pytest.fixture
def looks(runs: list[ArmRun]) -> dict[str, dict[str, Any]]:
    return {arm: plots._look(number) for number, arm in enumerate(SETTING[1])}


def points(axes: Any) -> list[tuple[str, float, float]]:
    """(label, x, y) of the single points."""
    found = [(bar.get_label(), *bar.lines[0].get_xydata()[0]) for bar in axes.containers]
    return [(label, float(x), float(y)) for label, x, y in found]


def test_every_picture_is_a_file_with_a_caption(runs: list[ArmRun], tmp_path: Path) -> None:
    found = plots.draw(tmp_path / "report", runs, rows(runs, with_speed=True), SETTING)
    assert [path.name for path, _ in found] == [
        "loss.png", "more-setting.png", "more-frontier.png", "words-setting.png", "words-frontier.png",
    ]  # fmt: skip
    for path, caption in found:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5000
        assert caption
    assert len(list((tmp_path / "report").iterdir())) == len(found)


def test_a_comparison_without_training_has_no_losses(tmp_path: Path) -> None:
    make_arm(make_ablation(tmp_path / "out", ["base"]), "base", words={})
    runs = read_all([str(tmp_path / "out")])
    found = plots.draw(tmp_path, runs, scores(runs, baseline="base", throughput=None, seed=0), None)
    assert [path.name for path, _ in found] == ["words-frontier.png"]


def test_without_matplotlib_there_are_no_pictures(
    runs: list[ArmRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plots.draw(tmp_path / "report", runs, rows(runs), None) == []


def test_each_training_is_drawn_once_with_its_terms_and_its_bound(
    runs: list[ArmRun], looks: dict[str, dict[str, Any]]
) -> None:
    left, right = plots._draw_losses(runs, looks).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in left.lines}
    assert set(lines) == {"base: ce/ar", "third: ce/masked"}
    assert lines["base: ce/ar"] == [[3, 5 / 3], [6, 5 / 6]]
    assert {line.get_label() for line in right.lines} == {"base", "third"}
    assert right.lines[0].get_xydata().tolist() == [[3, 3], [6, 1.5]]


def test_the_frontier_has_a_point_for_every_arm(runs: list[ArmRun], looks: dict[str, dict[str, Any]]) -> None:
    speed, passes = plots._draw_frontier(words(runs, with_speed=True), looks).axes
    two_thirds = pytest.approx(200 / 3)
    assert points(speed) == [("base", 10, two_thirds), ("other", 30, two_thirds), ("third", 90, 100)]
    assert points(passes) == [("base", 1, two_thirds), ("other", 2, two_thirds), ("third", 8, 100)]
    assert (speed.get_xlabel(), passes.get_xlabel()) == ("tokens per second, batch 1", "tokens per forward pass")


def test_the_frontier_without_speed_has_passes_only(runs: list[ArmRun], looks: dict[str, dict[str, Any]]) -> None:
    (passes,) = plots._draw_frontier(words(runs), looks).axes
    assert [label for label, *_ in points(passes)] == ["base", "other", "third"]


def test_a_study_is_drawn_over_its_setting_from_the_smallest(runs: list[ArmRun]) -> None:
    own = words(runs, with_speed=True)[::-1]
    left, right = plots._draw_setting(own, SETTING).axes
    assert left.containers[0].lines[0].get_xdata().tolist() == [4, 8, 32]
    assert right.lines[0].get_xydata().tolist() == [[4, 10], [8, 30], [32, 90]]
    assert left.get_xlabel() == "slot size"
