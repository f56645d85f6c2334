"""What lies where in the folder of a training run, and how checkpoints get there."""

from __future__ import annotations

import json
import os
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lit_refusion.errors import UserError, first_line

LAST, PREVIOUS, BEST, TOKENIZER, LOGS = "last", "previous", "best", "tokenizer", "logs"
CHECKPOINTS = "checkpoints"
RECORD_KEY = "lit_refusion"
"""Key of our record in a checkpoint: resolved config, DiffusionSpec, fingerprints, model config, prompt format."""


RECORD_FILE = "lit_refusion.json"
"""The same record as a file, in checkpoints that are folders; written last, with the sizes of the other files."""
FILES, STEP = "files", "global_step"


def checkpoint_path(run: Path, name: str) -> Path:
    """Where a run's `last` or `best` checkpoint is; a folder where a sharded strategy wrote it."""
    return run / CHECKPOINTS / f"{name}.ckpt"


def resume_point(run: Path, resume: str | None) -> Path | None:
    """The checkpoint to continue from, None for a fresh start: the last one, or the one before if it is damaged.

    Raises:
        UserError: the run exists already and is not to be continued, or all of its checkpoints are damaged.
    """
    if run.exists() and not run.is_dir():
        raise UserError(f"run={run}: it is a file; choose a folder")
    found = [path for name in (LAST, PREVIOUS) if (path := checkpoint_path(run, name)).exists()]
    if not found:
        return None
    if resume is None:
        raise UserError(
            f"run={run}: it holds a checkpoint already; continue it with resume=auto, or choose another run"
        )
    whole = next((path for path in found if is_whole(path)), None)
    if whole is None:
        names = " and ".join(map(str, found))
        raise UserError(f"{names}: damaged; put another checkpoint in its place, or choose another run folder")
    if whole != found[0]:
        _warn(f"warning: {found[0]} is damaged; going on from the one before it, {whole}")
    return whole


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint file can be read to its end: its checksums are compared, nothing is loaded.

    Of a folder, as sharded strategies write it, the sizes of the files are compared.
    """
    if checkpoint.is_dir():
        return _has_all_files(checkpoint)
    try:
        with zipfile.ZipFile(checkpoint) as archive:
            plain = all(
                entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1 and not entry.external_attr & 16
                for entry in archive.infolist()
            )
            return plain and archive.testzip() is None
    except Exception:  # whatever damaged bytes make of it
        return False


def _has_all_files(folder: Path) -> bool:
    try:
        files = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))[FILES]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _partial(checkpoint: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return checkpoint.with_name(f".{checkpoint.name}.partial")


@rank_zero_only
def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its target and renames it: what stands under the name is always whole.

    The last state but one stays as `previous`, in case the disk damages the last. Lightning's own writer goes through
    memory and the temporary folder, which may lie on another file system, where the last step is a copy that can be
    cut off.
    """

    def __init__(self) -> None:
        self._resumed_from: Path | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write, flush to disk, rename."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = _partial(target)
        try:
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            if target.stem == LAST:
                self._keep_previous(target)
            temporary.replace(target)
        except (OSError, RuntimeError) as error:  # torch's writer has its own error for a full disk
            reason = first_line(error.__context__ if isinstance(error.__context__, OSError) else error)
            raise UserError(
                f"{target}: cannot write the checkpoint: {reason}; the one before it is untouched: mend the disk and "
                "go on with resume=auto"
            ) from error
        finally:
            temporary.unlink(missing_ok=True)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read, and note where from."""
        self._resumed_from = Path(path)
        return super().load_checkpoint(path, *args, **kwargs)

    def _keep_previous(self, last: Path) -> None:
        previous = last.with_stem(PREVIOUS)
        resumed_from, self._resumed_from = self._resumed_from, None
        if not last.exists() or resumed_from == previous:  # then the last one is damaged
            return
        link = _partial(previous)
        link.unlink(missing_ok=True)
        try:
            os.link(last, link)  # so that there is a last one at every moment
            link.replace(previous)
        except OSError:  # a file system without links
            last.replace(previous)


def step_of(checkpoint: Path) -> int:
    """The optimizer step that a whole checkpoint was saved at; no tensor is read."""
    if checkpoint.is_dir():
        return json.loads((checkpoint / RECORD_FILE).read_text(encoding="utf-8"))[STEP]
    return torch.load(checkpoint, map_location="meta", mmap=True, weights_only=True)[STEP]


def load_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint as plain data (tensors and containers only: nothing in it is run).

    Raises:
        UserError: missing, damaged, or not from this project.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint; is run=... the folder of a training run?")
    try:
        if zipfile.is_zipfile(path) and not is_whole(path):
            raise ValueError("its checksums differ")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
        raise UserError(f"{path}: damaged or not a checkpoint; choose the run's other checkpoint") from error
    if not isinstance(checkpoint, dict) or RECORD_KEY not in checkpoint:
        raise UserError(f"{path}: not a checkpoint of this project (it has no '{RECORD_KEY}' record)")
    return checkpoint
