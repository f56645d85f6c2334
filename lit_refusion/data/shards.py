"""Prepared data on disk: WebDataset tar shards, an index for random access, and a manifest.

    folder/manifest.json      counts, lengths, fingerprints, checksums
    folder/keys.npy           [N] uint64, hash of each example's text
    folder/index.npy          [N] INDEX_DTYPE
    folder/token_counts.npy   [V] int64, occurrences of each token id
    folder/lengths.png        histogram of the lengths (where matplotlib is installed)
    folder/tokenizer/         the tokenizer that made the tokens
    folder/shard-00000.tar    members `000000000.npy`: 1-D array [P, prompt ids (P), response ids (R)]

The shards are plain WebDataset tars (one member per example, its first entry the prompt length), so other tools can
stream them. Examples are sorted by source, and by key within a source: a split or a subset by hash is a range, and
nothing needs to be read to find it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from lit_refusion.data.lengths import histogram
from lit_refusion.data.remote import CacheConfig, RemoteFolder, is_remote
from lit_refusion.errors import UserError
from lit_refusion.examples import Example, token_digest

FORMAT_VERSION = 2
MANIFEST, INDEX, KEYS, TOKEN_COUNTS = "manifest.json", "index.npy", "keys.npy", "token_counts.npy"
PICTURE = "lengths.png"
MAX_OPEN = 128
"""Shards kept open by one process."""
INDEX_DTYPE = np.dtype(
    [
        ("offset", np.int64),  # byte offset of the array's data in its shard
        ("prompt_length", np.int32),
        ("length", np.int32),  # prompt and response
        ("digest", np.uint64),  # hash of the tokens, checked at every read
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
    examples_per_shard: int = 0
    dtype: str = "uint16"
    tokenizer_fingerprint: str = ""
    content_fingerprint: str = ""
    prompt_format: dict[str, Any] = field(default_factory=dict)
    answered_by: dict[str, Any] | None = None  # the model and decoder that wrote the responses anew
    sources: list[dict[str, Any]] = field(default_factory=list)  # see SourceCounts
    lengths: dict[str, list[int]] = field(default_factory=dict)  # see lengths.histogram
    shards: list[dict[str, Any]] = field(default_factory=list)  # name, num_bytes, sha256
    files: list[dict[str, Any]] = field(default_factory=list)  # the same of every other file but this one

    def save(self, folder: Path) -> None:
        """Write `manifest.json`."""
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read it back."""
        path = folder / MANIFEST
        if not path.is_file():
            raise UserError(f"{path}: no prepared data here; run `lit-refusion prepare data=...` first")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data.get("version", FORMAT_VERSION) != FORMAT_VERSION:
                raise UserError(
                    f"{path}: format version {data['version']}, expected {FORMAT_VERSION}; prepare the data again"
                )
            manifest = cls(**data)
            manifest._check()
        except UserError:
            raise
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise UserError(f"{path}: not a manifest of this version ({error}); prepare the data again") from error
        return manifest

    def bounds(self) -> list[tuple[int, int]]:
        """First and last + 1 example of each source."""
        stops = np.cumsum([source["kept"] for source in self.sources]).tolist()
        return list(zip([0, *stops], stops))

    def _check(self) -> None:
        np.dtype(self.dtype)
        counts = [source["kept"] for source in self.sources]
        num_shards = -(-self.num_examples // self.examples_per_shard) if self.examples_per_shard > 0 else -1
        if sum(counts) != self.num_examples or len(self.shards) != num_shards:
            raise ValueError("its counts contradict each other")
        for file in (*self.shards, *self.files):
            if not {"name", "num_bytes", "sha256"} <= file.keys():
                raise ValueError(f"a file lacks its name, size or checksum: {file}")
            name = PurePosixPath(file["name"])
            if name.is_absolute() or ".." in name.parts:
                raise ValueError(f"{name} lies outside the folder")


def index_figures(index: np.ndarray) -> dict[str, Any]:
    """What a manifest says of its index [N] INDEX_DTYPE."""
    num_prompt_tokens = int(index["prompt_length"].sum(dtype=np.int64))
    return {
        "num_prompt_tokens": num_prompt_tokens,
        "num_response_tokens": int(index["length"].sum(dtype=np.int64)) - num_prompt_tokens,
        "longest": int(index["length"].max()),
        "content_fingerprint": hashlib.sha256(index["digest"].tobytes()).hexdigest()[:32],
        "lengths": histogram(index["prompt_length"], index["length"]),
    }


class Shards:
    """Random access to prepared examples; nothing is read before it is asked for.

    Args:
        folder: folder of prepared data, or a URL of one (http, https, s3, ... through fsspec).
        cache: where the files of a URL are kept; not used for a local folder.

    Raises:
        UserError: a file is missing, cut off, or from another version; names it.
    """

    def __init__(self, folder: str | Path, *, cache: CacheConfig | None = None) -> None:
        self.origin = str(folder)
        self._remote: RemoteFolder | None = None
        if is_remote(self.origin):
            self._remote = RemoteFolder.open(self.origin, cache, manifest=MANIFEST)
        self.folder = self._remote.folder if self._remote else Path(folder)
        self.manifest = Manifest.load(self.folder)
        if self._remote:
            self._remote.fetch_all(self._needed(), shards=self.manifest.shards)
        self._check_sizes()
        self._open()

    def _open(self) -> None:
        self._files: OrderedDict[int, int] = OrderedDict()  # shard -> file descriptor, least recently used first
        self._stops = [stop for _, stop in self.manifest.bounds()]
        self.index = self._array(INDEX, INDEX_DTYPE)
        self.keys = self._array(KEYS, np.dtype(np.uint64))

    def __len__(self) -> int:
        return self.manifest.num_examples

    def __getstate__(self) -> dict[str, Any]:
        """Without memory maps and open files, which each process opens for itself."""
        return {key: value for key, value in self.__dict__.items() if key not in ("index", "keys", "_files")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        self._open()

    def __getitem__(self, number: int) -> Example:
        if not 0 <= number < len(self):
            raise IndexError(f"example {number} of {len(self)}")
        try:
            return self._example(number)
        except UserError:
            if self._remote is None:
                raise
            self._forget(number // self.manifest.examples_per_shard)  # the copy is damaged: fetch it once more
            return self._example(number)

    def _example(self, number: int) -> Example:
        entry = self.index[number]
        dtype = np.dtype(self.manifest.dtype)
        num_prompt, num_bytes = int(entry["prompt_length"]), (int(entry["length"]) + 1) * dtype.itemsize
        shard = number // self.manifest.examples_per_shard
        data = self._read(shard, num_bytes, int(entry["offset"])) if num_bytes > 0 else b""
        tokens = np.frombuffer(data, dtype).astype(np.int64) if len(data) == num_bytes else np.zeros(0, np.int64)
        if len(tokens) == 0 or tokens[0] != num_prompt or token_digest(tokens[1:], num_prompt) != entry["digest"]:
            raise UserError(
                f"{self.folder / self.manifest.shards[shard]['name']}: example {number} is damaged (its checksum "
                "differs from the index); run `lit-refusion prepare verify`, or prepare the data again"
            )
        return Example(
            index=number,
            prompt_ids=tokens[1 : num_prompt + 1],
            response_ids=tokens[num_prompt + 1 :],
            source=self._source(number),
        )

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        """[N] tokens of these examples."""
        return self.index["length"][numbers]

    def response_lengths(self, numbers: np.ndarray) -> np.ndarray:
        """[N] response tokens of these examples."""
        return self.index["length"][numbers] - self.index["prompt_length"][numbers]

    def token_counts(self) -> np.ndarray:
        """[V] occurrences of each token id."""
        return self._array(TOKEN_COUNTS, np.dtype(np.int64), length=None)

    def _forget(self, shard: int) -> None:
        """Remove the local copy of a remote shard."""
        if shard in self._files:
            os.close(self._files.pop(shard))
        (self.folder / self.manifest.shards[shard]["name"]).unlink(missing_ok=True)

    def _needed(self) -> list[dict[str, Any]]:
        """The files beside the shards that reading takes: all but the picture."""
        return [file for file in self.manifest.files if file["name"] != PICTURE]

    def _source(self, number: int) -> str:
        return self.manifest.sources[int(np.searchsorted(self._stops, number, side="right"))]["name"]

    def __del__(self) -> None:
        for descriptor in self.__dict__.get("_files", {}).values():
            os.close(descriptor)

    def _read(self, shard: int, num_bytes: int, offset: int) -> bytes:
        """Bytes of a shard; `pread` cannot crash where a file is cut off, as a memory map does."""
        try:
            return os.pread(self._descriptor(shard), num_bytes, offset)
        except OSError as error:
            path = self.folder / self.manifest.shards[shard]["name"]
            raise UserError(f"{path}: cannot read it: {error.strerror}; prepare the data again") from error

    def _descriptor(self, shard: int) -> int:
        """An open file of the shard."""
        if shard not in self._files:
            if len(self._files) >= MAX_OPEN:
                os.close(self._files.popitem(last=False)[1])
            file = self.manifest.shards[shard]
            if self._remote:
                self._files[shard] = self._remote.open_shard(file)
            else:
                self._files[shard] = os.open(self.folder / file["name"], os.O_RDONLY)
        self._files.move_to_end(shard)
        return self._files[shard]

    def _array(self, name: str, dtype: np.dtype, *, length: int | None = -1) -> np.ndarray:
        """A memory-mapped array of the folder, after a look at its header."""
        path = self.folder / name
        try:
            array = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{path}: cannot read it: {error}; prepare the data again") from error
        if array.dtype != dtype or array.ndim != 1 or (length is not None and len(array) != len(self)):
            raise UserError(f"{path} does not match manifest.json; prepare the data again")
        return array

    def _check_sizes(self) -> None:
        """Whether every file is there, and as long as it should be: cheap, before anything is read."""
        if len(self) == 0:
            raise UserError(f"{self.folder}: the data set is empty; look at `dropped` in manifest.json")
        for file in (*self._needed(), *([] if self._remote else self.manifest.shards)):
            path = self.folder / file["name"]
            found = path.stat().st_size if path.is_file() else None
            if found != file["num_bytes"]:
                what = "missing" if found is None else f"cut off or changed ({found} of {file['num_bytes']} bytes)"
                raise UserError(f"{path}: {what}; put it back, or prepare the data again")
