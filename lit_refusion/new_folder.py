"""Folders that are either complete or not there."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lit_refusion.errors import UserError


@contextmanager
def new_folder(target: Path, *, setting: str) -> Iterator[Path]:
    """Write into the folder this yields; it becomes `target` in one rename, or vanishes if anything goes wrong.

    Args:
        target: must not exist yet.
        setting: name of the setting that gave it, for errors.
    """
    _refuse_existing(target, setting)
    with _os_errors(target, setting):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        with _os_errors(target, setting):
            temporary.chmod(0o755)
            yield temporary
            temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def resumable_folder(target: Path, *, setting: str) -> Iterator[tuple[Path, Path]]:
    """Like `new_folder` for long work: what was written stays beside `target` if anything goes wrong.

    Yields (the folder that becomes `target`, a folder for intermediate files that is removed at the end); both hold
    what an interrupted run left. One process at a time may work on a target.

    Args:
        target: must not exist yet.
        setting: name of the setting that gave it, for errors.
    """
    _refuse_existing(target, setting)
    partial = partial_folder(target)
    with _os_errors(target, setting):
        partial.mkdir(parents=True, exist_ok=True)
        lock = os.open(partial / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{setting}={target}: another process is writing it; wait for it") from error
        _refuse_existing(target, setting)  # the other process may have finished meanwhile
        with _os_errors(target, setting, kept=partial):
            folders = partial / "out", partial / "work"
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
            yield folders
    finally:
        os.close(lock)


def finish(target: Path) -> None:
    """Give a resumable folder its name, and remove the intermediate files."""
    partial = partial_folder(target)
    (partial / "out").rename(target)
    shutil.rmtree(partial, ignore_errors=True)


def partial_folder(target: Path) -> Path:
    """Where the unfinished work on a resumable folder is."""
    return target.parent / f".{target.name}.partial"


def _refuse_existing(target: Path, setting: str) -> None:
    if target.exists():
        raise UserError(f"{setting}={target}: it exists already; remove it or choose another folder")


@contextmanager
def _os_errors(target: Path, setting: str, *, kept: Path | None = None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = f"; mend it and run the command again, what is finished is kept in {kept}" if kept else ""
        raise UserError(f"{setting}={target}: cannot write it: {error}{remedy}") from error
