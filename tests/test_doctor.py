"""`lit-refusion doctor`: one check a line, and an exit code that says whether something is wrong."""

from __future__ import annotations

import importlib.util
import operator
import resource
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_refusion import doctor
from lit_refusion.cli import main
from lit_refusion.doctor import Finding

CHECKS = ["versions", "devices", "deepspeed", "flash_attn", "liger_kernel", "flex_attention", "compiler", "sandbox",
          "shared memory", "open files", "all-reduce", "run folder"]  # fmt: skip


@pytest.fixture(autouse=True)
def generous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits and disks of a good machine, whatever the tests run on."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**40))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the two processes, which take seconds."""
    monkeypatch.setattr(doctor, "all_reduce", lambda: Finding("all-reduce", "two processes over gloo"))


def examined(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Exit code and lines."""
    capsys.readouterr()
    code = main(["doctor", f"run={run}"])
    return code, capsys.readouterr().out.splitlines()


def failures(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("FAIL")]


def test_this_machine_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With two real processes over gloo."""
    code, lines = examined(tmp_path / "runs" / "new", capsys)
    assert failures(lines) == []
    assert code == 0
    assert [line[6:].split(": ")[0] for line in lines] == CHECKS
    assert all(line.startswith("ok    ") for line in lines)
    assert torch.__version__ in lines[0]
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


@pytest.mark.usefixtures("quick")
def test_a_tiny_shared_memory_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**26))  # docker's default
    is_dir = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: str(path) == "/dev/shm" or is_dir(path))
    code, lines = examined(tmp_path, capsys)
    assert code == 1
    assert len(failures(lines)) == 1
    assert failures(lines)[0].startswith("FAIL  shared memory: 64 MiB free in /dev/shm; ")
    assert "--shm-size=8g" in failures(lines)[0]


@pytest.mark.usefixtures("quick")
def test_a_low_limit_of_open_files_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    code, lines = examined(tmp_path, capsys)
    assert (code, failures(lines)) == (1, ["FAIL  open files: 256 (at most 4,096); ulimit -n 4096"])


def test_the_limit_that_is_looked_at_is_the_one_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (asked.append(which), (1024, 2**20))[1])
    assert not doctor.open_files().is_problem
    assert asked == [resource.RLIMIT_NOFILE]


def test_an_all_reduce_that_fails_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_reduce", operator.index)  # two arguments are one too many for it
    code, lines = examined(tmp_path, capsys)
    assert code == 1
    assert len(failures(lines)) == 1
    assert "two processes over gloo failed (exit codes [1, 1])" in failures(lines)[0]
    assert "GLOO_SOCKET_IFNAME" in failures(lines)[0]


@pytest.mark.usefixtures("quick")
def test_an_unwritable_folder_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    code, lines = examined(tmp_path / "run", capsys)
    assert (code, failures(lines)) == (1, [f"FAIL  run folder: {tmp_path}: cannot write there: Permission denied"])


@pytest.mark.usefixtures("quick")
def test_missing_optional_packages_are_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    missing = ("deepspeed", "flash_attn", "liger_kernel", "torch.nn.attention.flex_attention")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in missing else real(name, *rest))
    code, lines = examined(tmp_path, capsys)
    assert (code, failures(lines)) == (0, [])
    assert (
        lines[2] == "ok    deepspeed: not installed; strategy=deepspeed_... needs pip install 'lit-refusion[deepspeed]'"
    )
    assert "pip install 'lit-refusion[flash]'" in lines[3]
    assert "pip install 'lit-refusion[liger]'" in lines[4]
    assert "backbone.attention=sdpa" in lines[5]


def test_a_system_without_dev_shm_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda path: False)
    assert doctor.shared_memory() == Finding("shared memory", "no /dev/shm on this system")


def test_a_problem_says_fail_and_the_rest_ok() -> None:
    assert str(Finding("disk", "full", is_problem=True)) == "FAIL  disk: full"
    assert str(Finding("disk", "fine")) == "ok    disk: fine"


def test_show_config_examines_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "examine", lambda run: pytest.fail("it examines"))
    assert main(["doctor", "run=here", "--show-config"]) == 0
    assert capsys.readouterr().out == "run: here\n"
