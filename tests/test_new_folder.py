"""Folders that appear whole or not at all, and what is kept of long work that was stopped."""

from __future__ import annotations

import errno
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_refusion import new_folder as module
from lit_refusion.errors import UserError
from lit_refusion.new_folder import finish, new_folder, partial_folder, resumable_folder

Manager = Callable[..., Any]
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "er" / "data"


def beside(target: Path) -> list[str]:
    return sorted(os.listdir(target.parent)) if target.parent.exists() else []


def content(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


# Both kinds


@pytest.mark.parametrize("manager", [new_folder, resumable_folder])
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_an_existing_target_is_refused_and_left_alone(kind: str, manager: Manager, target: Path) -> None:
    path = target / "mine.txt" if kind == "folder" else target
    path.parent.mkdir(parents=True)
    path.write_text("keep")
    with pytest.raises(UserError, match=r"^out=.*data: it exists already; remove it"), manager(target, setting="out"):
        pytest.fail("it let us in")
    assert path.read_text() == "keep"
    assert beside(target) == ["data"]


@pytest.mark.parametrize("manager", [new_folder, resumable_folder])
def test_a_place_that_cannot_hold_a_folder_is_a_user_error(manager: Manager, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^out=.*: cannot write it: "), manager(tmp_path / "file" / "x", setting="out"):
        pytest.fail("it let us in")


# new_folder


def test_a_new_folder_appears_whole(target: Path) -> None:
    with new_folder(target, setting="out") as folder:
        (folder / "a.txt").write_text("a")
        assert not target.exists()
    assert content(target) == {"a.txt": "a"}
    assert beside(target) == ["data"]
    assert target.stat().st_mode & 0o777 == 0o755  # not the private mode of a temporary folder


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_new_folder_vanishes_if_anything_goes_wrong(error: type[BaseException], target: Path) -> None:
    with pytest.raises(error, match="stopped"), new_folder(target, setting="out") as folder:  # noqa: PT012
        (folder / "a.txt").write_text("a")
        raise error("stopped")
    assert beside(target) == []


def fill_the_disk(target: Path) -> None:
    with new_folder(target, setting="out") as folder:
        (folder / "a.txt").write_text("a")
        raise FULL


def test_a_full_disk_is_a_user_error_and_a_new_folder_vanishes(target: Path) -> None:
    with pytest.raises(UserError, match=r"^out=.*: cannot write it: .*No space left") as caught:
        fill_the_disk(target)
    assert "kept" not in str(caught.value)
    assert beside(target) == []


def test_two_new_folders_of_one_name_do_not_mix(target: Path) -> None:
    with pytest.raises(UserError, match="cannot write it"), new_folder(target, setting="out") as first:  # noqa: PT012
        (first / "first.txt").write_text("1")
        with new_folder(target, setting="out") as second:
            (second / "second.txt").write_text("2")
    assert content(target) == {"second.txt": "2"}
    assert beside(target) == ["data"]


# resumable_folder


def test_a_resumable_folder_appears_whole_and_its_work_vanishes(target: Path) -> None:
    with resumable_folder(target, setting="out") as (out, work):
        (out / "a.txt").write_text("a")
        (work / "b.txt").write_text("b")
        assert not target.exists()
        finish(target)
    assert content(target) == {"a.txt": "a"}
    assert beside(target) == ["data"]


def test_without_finish_the_target_does_not_appear(target: Path) -> None:
    with resumable_folder(target, setting="out") as (out, _):
        (out / "a.txt").write_text("a")
    assert not target.exists()
    assert content(partial_folder(target) / "out") == {"a.txt": "a"}


def write_and_stop(target: Path, error: BaseException) -> None:
    with resumable_folder(target, setting="out") as (out, work):
        (out / "a.txt").write_text("a")
        (work / "b.txt").write_text("b")
        raise error


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, UserError])
def test_what_was_written_waits_for_the_next_time(error: type[BaseException], target: Path) -> None:
    with pytest.raises(error, match="stopped"):
        write_and_stop(target, error("stopped"))
    assert not target.exists()
    assert beside(target) == [partial_folder(target).name]
    with resumable_folder(target, setting="out") as (out, work):
        assert (content(out), content(work)) == ({"a.txt": "a"}, {"b.txt": "b"})
        finish(target)
    assert content(target) == {"a.txt": "a"}


def test_a_full_disk_keeps_what_is_finished_and_says_so(target: Path) -> None:
    kept = partial_folder(target)
    with pytest.raises(UserError, match=r"^out=.*: cannot write it: .*No space left.*; mend it and run") as caught:
        write_and_stop(target, FULL)
    assert str(caught.value).endswith(f"run the command again, what is finished is kept in {kept}")
    assert content(kept / "out") == {"a.txt": "a"}
    assert content(kept / "work") == {"b.txt": "b"}


def write_late(target: Path) -> None:
    with resumable_folder(target, setting="out"):
        target.mkdir()
        (target / "other.txt").write_text("other")
        finish(target)


def test_a_target_that_appears_meanwhile_is_not_overwritten(target: Path) -> None:
    with resumable_folder(target, setting="out") as (out, _):
        (out / "a.txt").write_text("a")
    with pytest.raises(UserError, match=r"cannot write it.*what is finished is kept"):
        write_late(target)
    assert content(target) == {"other.txt": "other"}
    assert content(partial_folder(target) / "out") == {"a.txt": "a"}


def try_to_work(target: Path, report: Any) -> None:
    try:
        with resumable_folder(target, setting="out"):
            report.send("it let us in")
    except UserError as error:
        report.send(str(error))


def attempt(target: Path) -> str:
    """What another process hears that wants to work on the target."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=try_to_work, args=(target, sender))
    process.start()
    sender.close()  # so that `recv` ends if the process dies
    answer = receiver.recv()
    process.join()
    return answer


def test_one_process_at_a_time_works_on_a_target(target: Path) -> None:
    with resumable_folder(target, setting="out") as (out, _):
        (out / "a.txt").write_text("a")
        assert attempt(target) == f"out={target}: another process is writing it; wait for it"
        assert content(out) == {"a.txt": "a"}  # the refused one touched nothing
    assert attempt(target) == "it let us in"


def test_two_targets_do_not_wait_for_each_other(target: Path) -> None:
    with resumable_folder(target, setting="out"):
        assert attempt(target.with_name("other")) == "it let us in"


def test_a_process_that_waited_for_the_lock_sees_that_the_work_is_done(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = module.fcntl.flock

    def finish_first(descriptor: int, operation: int) -> None:
        (partial_folder(target) / "out").mkdir(exist_ok=True)
        (partial_folder(target) / "out" / "a.txt").write_text("of the other process")
        finish(target)  # between our look at the target and our lock
        lock(descriptor, operation)

    monkeypatch.setattr(module.fcntl, "flock", finish_first)
    with pytest.raises(UserError, match="it exists already"), resumable_folder(target, setting="out"):
        pass
