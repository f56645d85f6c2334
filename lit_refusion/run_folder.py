"""What lies where in the folder of a training run, and how checkpoints get there."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from lit_refusion.errors import UserError

LAST, BEST, TOKENIZER = "last", "best", "tokenizer"
RECORD_KEY = "lit_refusion"
"""Key of our record in a checkpoint: resolved config, DiffusionSpec, fingerprints, model config, prompt format."""


def checkpoint_path(run: Path, name: str) -> Path:
    """Where a run's `last` or `best` checkpoint is; a folder where a sharded strategy wrote it."""
    return run / "checkpoints" / f"{name}.ckpt"


def resume_point(run: Path, resume: str | None) -> Path | None:
    """The checkpoint to continue from, None for a fresh start.

    Raises:
        UserError: the run exists already and is not to be continued, or its checkpoint is damaged.
    """
    if run.exists() and not run.is_dir():
        raise UserError(f"run={run}: it is a file; choose a folder")
    last = checkpoint_path(run, LAST)
    if not last.exists():
        return None
    if resume is None:
        raise UserError(
            f"run={run}: it holds a checkpoint already; continue it with resume=auto, or choose another run"
        )
    if last.is_file() and not zipfile.is_zipfile(last):
        raise UserError(f"{last}: damaged; put another checkpoint in its place, or choose another run folder")
    return last


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its target and renames it: what stands under the name is always whole.

    Lightning's own writer goes through memory and the temporary folder, which may lie on another file system, where
    the last step is a copy that can be cut off.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write, flush to disk, rename."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.partial")
        try:
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint as plain data (tensors and containers only: nothing in it is run).

    Raises:
        UserError: missing, damaged, sharded, or not from this project.
    """
    if path.is_dir():
        raise UserError(
            f"{path}: a sharded checkpoint; make one file of it with "
            "lightning.pytorch.utilities.deepspeed.convert_zero_checkpoint_to_fp32_state_dict"
        )
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint; is run=... the folder of a training run?")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
        raise UserError(f"{path}: damaged or not a checkpoint; choose the run's other checkpoint") from error
    if not isinstance(checkpoint, dict) or RECORD_KEY not in checkpoint:
        raise UserError(f"{path}: not a checkpoint of this project (it has no '{RECORD_KEY}' record)")
    return checkpoint
