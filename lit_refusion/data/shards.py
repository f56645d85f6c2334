"""Prepared data on disk: WebDataset tar shards, an index for random access, and a manifest.

    folder/manifest.json      counts, lengths, fingerprints, shard checksums
    folder/index.npy          one INDEX_DTYPE entry per example
    folder/token_counts.npy   [V] int64, occurrences of each token id
    folder/tokenizer/         the tokenizer that made the tokens
    folder/shard-00000.tar    members `000000000.npy`: 1-D array [P, prompt ids (P), response ids (R)]

The shards are plain WebDataset tars (one member per example, its first entry the prompt length), so other
tools can stream them; the index holds the byte offset of each array, so that an example is one slice of a
memory map.
"""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lit_refusion.errors import UserError
from lit_refusion.examples import Example

FORMAT_VERSION = 1
INDEX_DTYPE = np.dtype(
    [
        ("shard", np.int32),
        ("offset", np.int64),  # byte offset of the array's data in the shard
        ("prompt_length", np.int32),
        ("length", np.int32),  # prompt and response
        ("source", np.int16),
        ("key", np.uint64),  # hash of the text: the same example has the same key in any data set
    ]
)


@dataclass(kw_only=True)
class Manifest:
    """What `manifest.json` holds."""

    version: int = FORMAT_VERSION
    num_examples: int = 0
    num_prompt_tokens: int = 0
    num_response_tokens: int = 0
    longest: int = 0
    max_length: int = 0
    dtype: str = "uint16"
    tokenizer_fingerprint: str = ""
    content_fingerprint: str = ""
    prompt_format: dict[str, Any] = field(default_factory=dict)
    sources: list[dict[str, Any]] = field(default_factory=list)  # name, read, kept, dropped: {reason: count}
    shards: list[dict[str, Any]] = field(default_factory=list)  # name, num_examples, num_bytes, sha256

    def save(self, folder: Path) -> None:
        """Write `manifest.json`."""
        (folder / "manifest.json").write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read it back."""
        path = folder / "manifest.json"
        if not path.is_file():
            raise UserError(f"{path}: no prepared data here; run `lit-refusion prepare data=...` first")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            manifest = cls(**data)
            np.dtype(manifest.dtype)
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}: not a manifest of this version ({error}); prepare the data again") from error
        if manifest.version != FORMAT_VERSION:
            raise UserError(f"{path}: format version {manifest.version}, expected {FORMAT_VERSION}; prepare it again")
        return manifest


class Shards:
    """Random access to prepared examples; nothing is read before it is asked for."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = Manifest.load(self.folder)
        index_path = self.folder / "index.npy"
        try:
            self.index = np.load(index_path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{index_path}: cannot read it: {error}; prepare the data again") from error
        self._maps: dict[int, np.memmap] = {}
        self._check()

    def __len__(self) -> int:
        return len(self.index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}  # memory maps are opened again in each worker

    def __getitem__(self, number: int) -> Example:
        entry = self.index[number]
        shard, length = int(entry["shard"]), int(entry["length"])
        if shard not in self._maps:
            self._maps[shard] = np.memmap(self.folder / self.manifest.shards[shard]["name"], np.uint8, mode="r")
        dtype = np.dtype(self.manifest.dtype)
        start = int(entry["offset"])
        data = self._maps[shard][start : start + (length + 1) * dtype.itemsize].view(dtype).astype(np.int64)
        num_prompt = int(entry["prompt_length"])
        if data[0] != num_prompt:
            raise UserError(
                f"{self.folder / self.manifest.shards[shard]['name']}: example {number} does not match the index; "
                "the shard was changed, prepare the data again"
            )
        return Example(
            index=number,
            prompt_ids=data[1 : num_prompt + 1],
            response_ids=data[num_prompt + 1 :],
            source=self.manifest.sources[int(entry["source"])]["name"],
        )

    def lengths(self) -> np.ndarray:
        """[num_examples] tokens per example."""
        return np.asarray(self.index["length"])

    def response_lengths(self) -> np.ndarray:
        """[num_examples] response tokens per example."""
        return np.asarray(self.index["length"] - self.index["prompt_length"])

    def token_counts(self) -> np.ndarray:
        """[V] occurrences of each token id."""
        path = self.folder / "token_counts.npy"
        try:
            return np.load(path)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{path}: cannot read it: {error}; prepare the data again") from error

    def split(self, validation_fraction: float) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the training and of the validation examples.

        An example is held out where the hash of its text falls below the fraction: equal texts fall on the same
        side, and growing the data set moves nothing across.
        """
        is_validation = self.index["key"] / 2.0**64 < validation_fraction
        return np.flatnonzero(~is_validation), np.flatnonzero(is_validation)

    def _check(self) -> None:
        """Compare index, manifest and files: cheap, before anything is read."""
        manifest, index = self.manifest, self.index
        if index.dtype != INDEX_DTYPE or len(index) != manifest.num_examples:
            raise UserError(f"{self.folder}/index.npy does not match manifest.json; prepare the data again")
        if len(index) == 0:
            raise UserError(f"{self.folder}: the data set is empty; look at `dropped` in manifest.json")
        try:
            sizes = {shard["name"]: shard["num_bytes"] for shard in manifest.shards}
            names = [source["name"] for source in manifest.sources]
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{self.folder}/manifest.json: a shard or source lacks {error}; prepare it again"
            ) from error
        for name, size in sizes.items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != size:
                found = path.stat().st_size if path.is_file() else "no file"
                raise UserError(f"{path}: missing or cut off ({found}, expected {size} bytes); prepare the data again")
        num_tokens = manifest.num_prompt_tokens + manifest.num_response_tokens
        ends = index["offset"] + (index["length"] + 1).astype(np.int64) * np.dtype(manifest.dtype).itemsize
        is_consistent = (
            index["shard"].min() >= 0
            and index["shard"].max() < len(sizes)
            and 0 <= index["source"].min() <= index["source"].max() < len(names)
            and index["offset"].min() >= 0
            and (ends <= np.array(list(sizes.values()))[index["shard"].clip(0, len(sizes) - 1)]).all()
            and int(index["length"].sum(dtype=np.int64)) == num_tokens
            and int(index["prompt_length"].sum(dtype=np.int64)) == manifest.num_prompt_tokens
        )
        if not is_consistent:
            raise UserError(f"{self.folder}/index.npy does not match manifest.json; prepare the data again")


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
