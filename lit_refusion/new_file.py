"""Files that are either complete or not there, and what is in them."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from lit_refusion.errors import UserError


def write_file(path: Path, text: str, *, name: str) -> Path:
    """Write UTF-8 text in one rename, in the place of a file that is there.

    Args:
        path: of the file; missing folders are made.
        text: its content.
        name: what the user calls it, for errors: "out=" or "--html ".

    Raises:
        UserError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise UserError(f"{name}{path}: cannot write it: {error.strerror}; choose another file") from error
    return path


def read_json(path: Path, *, remedy: str) -> Any:
    """What a JSON file holds.

    Raises:
        UserError: it cannot be read; the message ends with the remedy.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot read it: {error}; {remedy}") from error
