"""Folders that are either complete or not there."""

from __future__ import annotations

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
    if target.exists():
        raise UserError(f"{setting}={target}: it exists already; remove it or choose another folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    except OSError as error:
        raise UserError(f"{setting}={target}: cannot write it: {error}") from error
    try:
        temporary.chmod(0o755)
        yield temporary
        temporary.rename(target)
    except OSError as error:
        raise UserError(f"{setting}={target}: cannot write it: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
