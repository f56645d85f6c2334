"""Checkpoints that are folders, with a share of every rank: complete under their name, or not there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import Strategy

from lit_refusion.run_folder import LAST, PREVIOUS, RECORD_FILE


@contextmanager
def replacing(target: Path, strategy: Strategy, *, record: dict[str, Any]) -> Iterator[Path]:
    """A folder for all ranks to write into; it takes `target`'s name when every rank has left the block.

    The last state but one stays as `previous`. The record is written as JSON as well, so that it can be read without
    the engine that wrote the rest.
    """
    folder = target.with_name(f".{target.name}.partial")
    if strategy.is_global_zero:
        shutil.rmtree(folder, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
    strategy.barrier()
    yield folder
    strategy.barrier()
    if strategy.is_global_zero:
        (folder / RECORD_FILE).write_text(json.dumps(record), encoding="utf-8")
        if target.exists():
            aside = target.with_stem(PREVIOUS) if target.stem == LAST else target.with_name(f".{target.name}.old")
            _remove(aside)
            target.rename(aside)
        folder.rename(target)
        _remove(target.with_name(f".{target.name}.old"))
    strategy.barrier()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
