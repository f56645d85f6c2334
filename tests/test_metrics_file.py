"""The CSV of logged figures."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from lit_refusion.metrics_file import CsvMetrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.csv"


def log(path: Path, *rows: dict[str, float]) -> CsvMetrics:
    """Rows of one process, each with its step."""
    logger = CsvMetrics(path)
    for row in rows:
        logger.log_metrics({name: x for name, x in row.items() if name != "step"}, step=int(row["step"]))
    return logger


def read(path: Path) -> list[dict[str, float]]:
    """The rows, without what is empty in them."""
    with path.open(newline="") as file:
        return [{name: float(x) for name, x in row.items() if x} for row in csv.DictReader(file)]


TRAIN = [{"step": step, "train/loss": 4.0 - step} for step in range(1, 5)]
VALIDATION = {"step": 2, "val/loss": 2.5}


def test_a_row_for_every_step_and_a_column_for_every_figure(path: Path) -> None:
    log(path, TRAIN[0], TRAIN[1], VALIDATION, TRAIN[2])
    assert path.read_text() == "step,train/loss,val/loss\n1,3.0,\n2,2.0,\n2,,2.5\n3,1.0,\n"
    assert [item.name for item in path.parent.iterdir()] == ["metrics.csv"]


def test_figures_may_come_later(path: Path) -> None:
    log(path, TRAIN[0], {"step": 2, "train/loss": 2.0, "train/new": 7.0, "train/also": 8.0}, TRAIN[2])
    assert read(path) == [TRAIN[0], {"step": 2, "train/loss": 2.0, "train/new": 7.0, "train/also": 8.0}, TRAIN[2]]


def test_a_resumed_run_keeps_the_rows_before_its_first(path: Path) -> None:
    log(path, TRAIN[0], TRAIN[1], VALIDATION, TRAIN[2], TRAIN[3])
    again = [{"step": 3, "train/loss": 1.5, "train/new": 7.0}, {"step": 4, "train/loss": 0.5}]
    log(path, *again)
    assert read(path) == [TRAIN[0], TRAIN[1], VALIDATION, *again]


def test_a_resumed_run_whose_first_row_is_a_validation_drops_what_stands_at_that_step(path: Path) -> None:
    log(path, TRAIN[0], TRAIN[1], VALIDATION, TRAIN[2])
    again = {"step": 2, "val/loss": 2.25}
    log(path, again)
    assert read(path) == [TRAIN[0], again]


def test_a_run_that_starts_afresh_drops_all_rows(path: Path) -> None:
    log(path, *TRAIN, VALIDATION)
    log(path, TRAIN[0])
    assert read(path) == TRAIN[:1]


def test_a_resumed_run_that_logs_nothing_leaves_the_file(path: Path) -> None:
    log(path, *TRAIN)
    before = path.read_bytes()
    log(path)
    assert path.read_bytes() == before


def test_rows_stay_where_a_rewriting_was_cut_off(path: Path) -> None:
    """A kill leaves half of the new file beside the old one."""
    log(path, *TRAIN[:2])
    path.with_suffix(".partial").write_text("step,train/lo")
    log(path, TRAIN[2])
    assert read(path) == TRAIN[:3]
    assert [item.name for item in path.parent.iterdir()] == ["metrics.csv"]


def test_a_row_that_was_cut_off_is_dropped(path: Path) -> None:
    log(path, *TRAIN[:3])
    text = path.read_text()
    path.write_text(text[: text.rindex("3,1.0") + 3])  # "3,1"
    log(path, TRAIN[2])
    assert read(path) == TRAIN[:3]
