"""Checkpoints that are folders, with a share of every rank: complete under their name, or not there."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lit_refusion.errors import UserError, first_line
from lit_refusion.run_folder import FILES, LAST, PREVIOUS, RECORD_FILE, RECORD_KEY, STEP, is_whole

MODEL_STATE = "state_dict."
"""What Lightning puts before the names of parameters in a distributed checkpoint."""
ZERO_TAG = "checkpoint"
"""The folder inside a DeepSpeed checkpoint, as Lightning names it."""


@contextmanager
def replacing(target: Path, strategy: Strategy, *, saved: dict[str, Any]) -> Iterator[Path]:
    """A folder for all ranks to write into; it takes `target`'s name when every rank has left the block.

    The last state but one stays as `previous`. Record and step of what is `saved` are written as JSON as well, so that
    they can be read without the engine that wrote the rest.
    """
    folder, record, step = target.with_name(f".{target.name}.partial"), saved[RECORD_KEY], saved[STEP]
    if strategy.is_global_zero:
        shutil.rmtree(folder, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
    strategy.barrier()
    yield folder
    strategy.barrier()
    if strategy.is_global_zero:
        files = {
            path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()
        }
        _write_durably(folder / RECORD_FILE, json.dumps({RECORD_KEY: record, STEP: step, FILES: files}))
        if target.exists():
            is_previous = target.stem == LAST and is_whole(target)  # else the previous one is better
            aside = target.with_stem(PREVIOUS) if is_previous else target.with_name(f".{target.name}.old")
            _remove(aside)
            target.rename(aside)
        folder.rename(target)
        _remove(target.with_name(f".{target.name}.old"))
    strategy.barrier()


def load_whole(folder: Path) -> dict[str, Any]:
    """A sharded checkpoint as one: `state_dict` with whole fp32 parameters on the CPU, and our record.

    Raises:
        UserError: not such a checkpoint, or damaged.
    """
    try:
        record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))[RECORD_KEY]
        if not is_whole(folder):
            raise ValueError("files are missing or cut off")
        state = _from_dcp(folder) if (folder / ".metadata").is_file() else _from_zero(folder)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, CheckpointException) as error:
        raise UserError(
            f"{folder}: damaged or not a checkpoint ({first_line(error)}); choose the run's other"
        ) from error
    return {"state_dict": state, RECORD_KEY: record}


def _from_dcp(folder: Path) -> dict[str, Tensor]:
    """torch's distributed checkpoint, as FSDP2 writes it."""
    reader = dcp.FileSystemReader(folder)
    found = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in found.items()
        if name.startswith(MODEL_STATE) and isinstance(item, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return {name.removeprefix(MODEL_STATE): tensor for name, tensor in state.items()}


def _from_zero(folder: Path) -> dict[str, Tensor]:
    """DeepSpeed's checkpoint, of any stage."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
    try:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    except ImportError as error:
        raise UserError(f"{folder}: a DeepSpeed checkpoint; pip install 'lit-refusion[deepspeed]'") from error
    with contextlib.redirect_stdout(io.StringIO()):
        return get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=ZERO_TAG, exclude_frozen_parameters=True)


def _write_durably(path: Path, text: str) -> None:
    """Write a file, behind everything that was written before, to the disk itself."""
    os.sync()
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
