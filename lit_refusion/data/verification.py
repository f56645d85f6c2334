"""Whether a prepared data set is still what was written: every byte is read."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.progress import Progress

from lit_refusion.data.shard_writing import array_offsets, file_sha256
from lit_refusion.data.shards import INDEX, KEYS, TOKEN_COUNTS, Manifest, Shards, index_figures
from lit_refusion.errors import UserError, first_line
from lit_refusion.tokenizer import load_tokenizer, tokenizer_fingerprint


def verify(folder: Path, *, progress: Progress | None = None) -> Iterator[str]:
    """Yield what is wrong with the data set, file by file; nothing if it is whole.

    Checks sizes and checksums of all files; that the index finds every example in its shard, with the right tokens;
    that keys are in order; that counts and fingerprints are those of the content.

    Raises:
        UserError: the manifest cannot be read, or there is no data.
    """
    problems = list(_files(folder, progress))
    yield from problems
    if not problems:
        yield from _content(Shards(folder), progress)


def _files(folder: Path, progress: Progress | None) -> Iterator[str]:
    manifest = Manifest.load(folder)
    files = [*manifest.files, *manifest.shards]
    for file in progress.track(files, description="checksums") if progress else files:
        path = folder / file["name"]
        if not path.is_file():
            yield f"{path}: missing"
        elif path.stat().st_size != file["num_bytes"]:
            yield f"{path}: {path.stat().st_size} bytes, not {file['num_bytes']}"
        elif file_sha256(path) != file["sha256"]:
            yield f"{path}: its content has changed (SHA-256)"


def _content(shards: Shards, progress: Progress | None) -> Iterator[str]:
    manifest, index = shards.manifest, shards.index
    counts = np.zeros(0, np.int64)
    size = manifest.examples_per_shard
    numbered = list(enumerate(manifest.shards))
    for number, shard in progress.track(numbered, description="examples") if progress else numbered:
        path = shards.folder / shard["name"]
        numbers = range(number * size, min((number + 1) * size, len(shards)))
        try:
            if array_offsets(path) != index["offset"][numbers.start : numbers.stop].tolist():
                yield f"{path}: its members do not lie where {shards.folder}/index.npy says"
                continue
            for example in map(shards.__getitem__, numbers):
                tokens = np.bincount(np.concatenate([example.prompt_ids, example.response_ids]))
                counts = _sum(counts, tokens)
        except UserError as error:
            yield str(error)
        except (tarfile.TarError, ValueError, OSError) as error:
            yield f"{path}: not a WebDataset of arrays: {first_line(error)}"
    for start, stop in manifest.bounds():
        keys = shards.keys[start:stop]
        if (keys[:-1] > keys[1:]).any():
            yield f"{shards.folder}/keys.npy: keys {start} to {stop - 1} are not in order"
    yield from _contradictions(shards, counts)


def _sum(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """The sum of two counts of different length."""
    total = np.zeros(max(len(one), len(two)), np.int64)
    total[: len(one)] += one
    total[: len(two)] += two
    return total


def _contradictions(shards: Shards, counts: np.ndarray) -> Iterator[str]:
    manifest = shards.manifest
    fingerprint = tokenizer_fingerprint(load_tokenizer(shards.folder / "tokenizer"))
    for name, found in {**index_figures(shards.index), "tokenizer_fingerprint": fingerprint}.items():
        if getattr(manifest, name) != found:
            yield f"{shards.folder}/manifest.json: {name} is {getattr(manifest, name)}, the content has {found}"
    if manifest.longest > manifest.max_length:
        yield f"{shards.folder}/manifest.json: longest {manifest.longest} is over max_length {manifest.max_length}"
    for source in manifest.sources:
        if source["read"] - sum(source["dropped"].values()) + source["repeats"] != source["kept"]:
            yield f"{shards.folder}/manifest.json: the counts of source {source['name']} do not add up"
    if missing := {INDEX, KEYS, TOKEN_COUNTS} - {file["name"] for file in manifest.files}:
        yield f"{shards.folder}/manifest.json: no checksum of {', '.join(sorted(missing))}"
    if (_sum(counts, -shards.token_counts()) != 0).any():
        yield f"{shards.folder}/token_counts.npy: not the counts of the tokens in the shards"
