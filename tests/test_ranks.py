"""Logs of every rank, and the check that all ranks are about the same thing."""

from __future__ import annotations

import faulthandler
import logging
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from lit_refusion import ranks
from lit_refusion.errors import UserError
from lit_refusion.ranks import check_ranks_agree, rank_log

NAMES = ["lit_refusion", "lightning.pytorch", "py.warnings"]


def log(folder: Path, rank: int = 0) -> str:
    return (folder / f"rank-{rank}.log").read_text()


# Logs


def test_the_log_begins_with_who_writes_and_ends_with_the_end(tmp_path: Path) -> None:
    with rank_log(tmp_path / "new" / "logs", 3):
        pass
    first, last = log(tmp_path / "new" / "logs", 3).splitlines()
    assert re.search(r"INFO lit_refusion: rank 3 on \S+, process \d+, torch \d", first)
    assert last.endswith("INFO lit_refusion: end")


def test_warnings_of_python_and_of_lightning_are_kept(tmp_path: Path) -> None:
    full = "the disk is nearly full"
    with rank_log(tmp_path, 0):
        warnings.warn(full, stacklevel=1)
        logging.getLogger("lightning.pytorch.utilities").warning("a worker is slow")
        logging.getLogger("lit_refusion.data").warning("a record is odd")
    text = log(tmp_path)
    for message in (full, "a worker is slow", "a record is odd"):
        assert text.count(message) == 1


@pytest.mark.parametrize("error", [ValueError("no such shard"), KeyboardInterrupt(), SystemExit(130)])
def test_the_traceback_of_an_error_is_kept_and_the_error_goes_on(error: BaseException, tmp_path: Path) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught, rank_log(tmp_path, 1):
        fail()
    assert caught.value is error
    text = log(tmp_path, 1)
    assert "Traceback (most recent call last)" in text
    assert "in fail" in text
    assert f"{type(error).__name__}" in text.splitlines()[-2] + text.splitlines()[-1]
    assert "lit_refusion: end" not in text


def test_a_run_that_goes_on_appends_to_its_log(tmp_path: Path) -> None:
    for _ in range(2):
        with rank_log(tmp_path, 0):
            pass
    assert log(tmp_path).count("rank 0 on") == 2


@pytest.mark.parametrize("fails", [False, True])
def test_handlers_and_warnings_are_left_as_they_were(fails: bool, tmp_path: Path) -> None:
    before = [list(logging.getLogger(name).handlers) for name in NAMES]
    show = warnings.showwarning
    try:
        with rank_log(tmp_path, 0):
            assert [list(logging.getLogger(name).handlers) for name in NAMES] != before
            if fails:
                raise ValueError
    except ValueError:
        pass
    assert [[item for item in logging.getLogger(name).handlers if type(item) is not logging.NullHandler]
            for name in NAMES] == [[item for item in handlers if type(item) is not logging.NullHandler]
                                   for handlers in before]  # fmt: skip
    assert warnings.showwarning is show
    logging.getLogger("lit_refusion").warning("late")
    assert "late" not in log(tmp_path)


def test_the_level_of_the_logger_is_left_as_it_was(tmp_path: Path) -> None:
    logger = logging.getLogger("lit_refusion")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with rank_log(tmp_path, 0):
            pass
        assert logger.level == logging.ERROR
    finally:
        logger.setLevel(before)


def test_a_fault_handler_that_was_on_stays_on(tmp_path: Path) -> None:
    before = faulthandler.is_enabled()
    with (tmp_path / "faults").open("w") as file:
        faulthandler.enable(file)
        try:
            with rank_log(tmp_path, 0):
                assert faulthandler.is_enabled()
            assert faulthandler.is_enabled()
        finally:
            faulthandler.enable() if before else faulthandler.disable()


# Agreement


def test_without_a_process_group_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_gather", lambda value: pytest.fail("it talks to other ranks"))
    assert not distributed.is_initialized()
    check_ranks_agree({"config": {"seed": 1}})


def test_a_group_of_one_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_gather", lambda value: pytest.fail("it talks to other ranks"))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        check_ranks_agree({"config": {"seed": 1}})
    finally:
        distributed.destroy_process_group()


def with_others(monkeypatch: pytest.MonkeyPatch, *others: dict[str, Any]) -> None:
    """Pretend that rank 0 gathers these records of the others."""

    def gather(value: Any) -> list[Any]:
        if isinstance(value, str):  # the digest
            return [value, *(value if other == own else "another" for other in others)]
        return [value, *others]

    own = {"config": {"seed": 1, "trainer": {"max_steps": 5}}, "data_fingerprint": "abc"}
    monkeypatch.setattr(ranks, "_gather", gather)
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 1 + len(others))
    check_ranks_agree(own)


SAME: dict[str, Any] = {"config": {"seed": 1, "trainer": {"max_steps": 5}}, "data_fingerprint": "abc"}


def test_ranks_that_agree_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with_others(monkeypatch, SAME, SAME)


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ({**SAME, "data_fingerprint": "xyz"}, "data_fingerprint has 'abc', on rank 2 'xyz'"),
        ({**SAME, "config": {"seed": 2, "trainer": {"max_steps": 5}}}, "config.seed has 1, on rank 2 2"),
        ({**SAME, "config": {"seed": 1, "trainer": {}}}, "config.trainer.max_steps has 5, on rank 2 None"),
    ],
)
def test_a_rank_that_differs_is_named_with_the_setting(
    other: dict[str, Any], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="rank 2 runs with other settings or data than rank 0") as caught:
        with_others(monkeypatch, SAME, other)
    assert found in str(caught.value)
