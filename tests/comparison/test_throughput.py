"""Measuring speed: whose turn it is, what counts, and what is kept."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lit_refusion.comparison import throughput
from lit_refusion.comparison.arm import ArmRun, read_all
from lit_refusion.comparison.throughput import MeasureConfig, measure
from lit_refusion.errors import UserError
from tests.comparison.folders import make_ablation, make_arm

CONFIG = MeasureConfig(num_problems=2, repeats=3, batch_sizes=(1, 4), threads=None)


@dataclass
class Stopwatch:
    """Stands in for models: every call is noted, and has the speed of its number."""

    calls: list[tuple[str, str, int]] = field(default_factory=list)
    loads: list[tuple[str, str]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def subject(self, run: ArmRun, task: str, config: MeasureConfig, models: Any) -> Any:
        watch = self
        watch.loads.append((run.name, task))

        class Subject:
            def tokens_per_second(self, size: int) -> float:
                watch.calls.append((run.arm, task, size))
                return float(len(watch.calls))

        return Subject()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    watch = Stopwatch()
    monkeypatch.setattr(throughput, "_subject", watch.subject)
    return watch


def runs(tmp_path: Path) -> list[ArmRun]:
    out = tmp_path / "out"
    if not out.exists():
        make_ablation(out, ["one", "two"], seeds=[0, 1])
        for arm in ("one", "two"):
            for seed in (0, 1):
                make_arm(out, arm, seed, words={})
    return read_all([str(out)])


def measured(tmp_path: Path, watch: Stopwatch, config: MeasureConfig = CONFIG) -> Any:
    return measure(runs(tmp_path), config, path=tmp_path / "throughput.json", told=watch.told.append)


def test_arms_take_turns_and_the_first_round_warms_up(tmp_path: Path, watch: Stopwatch) -> None:
    found = measured(tmp_path, watch)["tasks"]["words"]
    assert watch.calls == [(arm, "words", size) for size in (1, 4) for _ in range(4) for arm in ("one", "two")]
    assert found["1"]["one"] == {"tokens_per_second": 5, "repeats": [3, 5, 7]}
    assert found["1"]["two"] == {"tokens_per_second": 6, "repeats": [4, 6, 8]}
    assert found["4"]["one"] == {"tokens_per_second": 13, "repeats": [11, 13, 15]}


def test_the_first_seed_of_each_arm_is_measured(tmp_path: Path, watch: Stopwatch) -> None:
    measured(tmp_path, watch)
    assert watch.loads == [("one-seed0", "words"), ("two-seed0", "words")]


def test_nothing_is_measured_twice(tmp_path: Path, watch: Stopwatch) -> None:
    first = measured(tmp_path, watch)
    count = len(watch.calls)
    assert measured(tmp_path, watch) == first
    assert len(watch.calls) == count


@pytest.mark.parametrize("what", ["settings", "weights", "machine"])
def test_what_has_changed_is_measured_again(
    what: str, tmp_path: Path, watch: Stopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(tmp_path, watch)
    count, config = len(watch.calls), CONFIG
    if what == "settings":
        config = MeasureConfig(num_problems=3, repeats=3, batch_sizes=(1, 4), threads=None)
    elif what == "weights":
        path = tmp_path / "out" / "arms" / "two-seed0" / "words" / "result.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "weights_fingerprint": "m1"}))
    else:
        monkeypatch.setattr(throughput, "software", lambda: {"machine": "another"})
    measured(tmp_path, watch, config)
    assert len(watch.calls) == 2 * count


def test_a_damaged_file_is_measured_again(tmp_path: Path, watch: Stopwatch) -> None:
    first = measured(tmp_path, watch)
    (tmp_path / "throughput.json").write_text("{")
    assert measured(tmp_path, watch)["arms"] == first["arms"]


def test_tasks_that_an_arm_lacks_are_left_out(tmp_path: Path, watch: Stopwatch) -> None:
    out = make_ablation(tmp_path / "out", ["one", "two", "failed"], seeds=[0])
    make_arm(out, "one", words={}, more={})
    make_arm(out, "two", words={})
    make_arm(out, "failed", failure="it broke")
    found = measured(tmp_path, watch)
    assert list(found["tasks"]) == ["words"]
    assert list(found["arms"]) == ["one", "two"]
    assert watch.told == ["measuring throughput: words, 2 arms in turn, 3 times"]


def test_nothing_is_measured_where_nothing_is_asked_for(tmp_path: Path, watch: Stopwatch) -> None:
    config = MeasureConfig(num_problems=0, repeats=1, batch_sizes=(1,), threads=None)
    assert measured(tmp_path, watch, config) is None
    assert not watch.calls
    assert not (tmp_path / "throughput.json").exists()


@pytest.mark.parametrize(
    "wrong", [{"num_problems": -1}, {"repeats": 0}, {"batch_sizes": ()}, {"batch_sizes": (1, 0)}, {"threads": 0}]
)
def test_wrong_numbers_are_named(wrong: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"num_problems": 2, "repeats": 3, "batch_sizes": (1,), "threads": None, **wrong}
    name, value = next(iter(wrong.items()))
    shown = list(value) if isinstance(value, tuple) else value
    with pytest.raises(UserError) as caught:
        MeasureConfig(**settings)
    assert f"{name}={shown}" in str(caught.value)
