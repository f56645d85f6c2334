"""The second half of `prepare`: the chosen examples, gathered from the parts, become shards."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import webdataset

EXAMPLE_DTYPE = np.dtype(
    [
        ("part", np.int32),
        ("start", np.int64),  # place of its first token among the part's tokens
        ("prompt_length", np.int32),
        ("length", np.int32),
        ("digest", np.uint64),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A finished shard.

    Args:
        name: file name.
        num_bytes: its size.
        sha256: its checksum.
        offsets: [num_examples] byte offset of each example's array data.
        token_counts: [V] occurrences of each token id.
    """

    name: str
    num_bytes: int
    sha256: str
    offsets: np.ndarray
    token_counts: np.ndarray


def write_shard(
    number: int, first: int, examples: np.ndarray, parts: Sequence[Path], dtype: str, num_ids: int, out: str, work: str
) -> Shard:
    """Write shard `number`, or take what an earlier run finished: the work of a process.

    Args:
        number: number of the shard.
        first: number of its first example.
        examples: [num_examples] EXAMPLE_DTYPE, in order.
        parts: token files of the parts.
        dtype: type of the stored tokens.
        num_ids: V, rows of the token counts.
        out: folder of the shards.
        work: folder for a note of what is finished, so that a resumed run need not write it again.
    """
    path = Path(out) / f"shard-{number:05d}.tar"
    identity = hashlib.sha256(repr((first, dtype, num_ids)).encode() + examples[["digest", "length"]].tobytes())
    note = Path(work) / f"{path.stem}-{identity.hexdigest()[:24]}.npz"
    if note.is_file():
        shard = _read_note(note, path.name)
        if path.is_file() and path.stat().st_size == shard.num_bytes:
            return shard
    for other in Path(work).glob(f"{path.stem}-*.npz"):  # of other settings; its shard is about to go
        other.unlink()
    token_counts = np.zeros(num_ids, np.int64)
    temporary = path.with_suffix(".partial")
    with temporary.open("wb") as file, webdataset.TarWriter(file, mtime=0) as writer:
        for place, tokens in enumerate(gather(examples, parts, np.dtype(dtype))):
            token_counts += np.bincount(tokens, minlength=num_ids)
            array = np.concatenate([examples["prompt_length"][place : place + 1].astype(dtype), tokens])
            writer.write({"__key__": f"{first + place:09d}", "npy": array})
    shard = Shard(
        name=path.name,
        num_bytes=temporary.stat().st_size,
        sha256=file_sha256(temporary),
        offsets=np.array(array_offsets(temporary), np.int64),
        token_counts=token_counts,
    )
    temporary.replace(path)
    _write_note(note, shard)
    return shard


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe(path: Path, folder: Path) -> dict[str, Any]:
    """A file's entry in the manifest: name, size and checksum."""
    name = path.relative_to(folder).as_posix()
    return {"name": name, "num_bytes": path.stat().st_size, "sha256": file_sha256(path)}


def array_offsets(path: Path) -> list[int]:
    """Byte offset of each member's array data in a finished shard, in order."""
    offsets = []
    with tarfile.open(path, "r:") as archive, path.open("rb") as raw:
        for member in archive:
            raw.seek(member.offset_data)
            header = io.BytesIO(raw.read(256))
            np.lib.format.read_magic(header)
            np.lib.format.read_array_header_1_0(header)
            offsets.append(member.offset_data + header.tell())
    return offsets


def gather(examples: np.ndarray, parts: Sequence[Path], dtype: np.dtype) -> list[np.ndarray]:
    """The tokens of each example, read part by part."""
    tokens: list[np.ndarray] = [np.empty(0, dtype)] * len(examples)
    for part in np.unique(examples["part"]):
        with parts[part].open("rb") as file:
            for place in np.flatnonzero(examples["part"] == part):
                file.seek(int(examples["start"][place]) * dtype.itemsize)
                tokens[place] = np.frombuffer(file.read(int(examples["length"][place]) * dtype.itemsize), dtype)
                assert len(tokens[place]) == examples["length"][place], f"{parts[part]} is cut off"
    return tokens


def _write_note(note: Path, shard: Shard) -> None:
    temporary = note.with_suffix(".partial")
    ids = np.flatnonzero(shard.token_counts)
    with temporary.open("wb") as file:
        np.savez(
            file,
            sha256=shard.sha256,
            num_bytes=shard.num_bytes,
            offsets=shard.offsets,
            ids=ids,
            counts=shard.token_counts[ids],
            num_ids=len(shard.token_counts),
        )
    temporary.replace(note)


def _read_note(note: Path, name: str) -> Shard:
    with np.load(note) as saved:
        token_counts = np.zeros(int(saved["num_ids"]), np.int64)
        token_counts[saved["ids"]] = saved["counts"]
        return Shard(
            name=name,
            num_bytes=int(saved["num_bytes"]),
            sha256=str(saved["sha256"]),
            offsets=saved["offsets"],
            token_counts=token_counts,
        )
