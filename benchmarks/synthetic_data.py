"""Prepared data of any size, with the lengths of a real data set and random tokens, without a tokenizer run."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from rich.progress import track

from lit_refusion.data.shard_writing import EXAMPLE_DTYPE, describe, write_shard
from lit_refusion.data.shards import INDEX, INDEX_DTYPE, KEYS, TOKEN_COUNTS, Manifest, Shards, index_figures
from lit_refusion.examples import token_digest
from lit_refusion.processes import in_order, num_cores

POOL = 2**20
"""Random tokens that the examples are cut from."""


def write(folder: Path, model: Shards, *, num_examples: int) -> None:
    """Write `num_examples` examples whose lengths are drawn from those of `model`, which also gives the tokenizer."""
    rng = np.random.default_rng(0)
    size, num_ids = model.manifest.examples_per_shard, len(model.token_counts())
    dtype = np.dtype(model.manifest.dtype)
    work = folder.with_name(f".{folder.name}.work")
    for path in (folder, work):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    pool = rng.integers(10, num_ids, POOL).astype(dtype)
    pool.tofile(work / "pool.tokens")
    chosen = rng.integers(0, len(model), num_examples)
    examples = np.zeros(num_examples, EXAMPLE_DTYPE)
    for name in ("prompt_length", "length"):
        examples[name] = model.index[name][chosen]
    examples["start"] = rng.integers(0, POOL - model.manifest.longest, num_examples)
    starts = range(0, num_examples, size)
    tasks = (
        (number, first, examples[first : first + size], work / "pool.tokens", dtype.name, num_ids, folder, work)
        for number, first in enumerate(starts)
    )
    index, token_counts, shards = np.zeros(num_examples, INDEX_DTYPE), np.zeros(num_ids, np.int64), []
    written = in_order(_write, tasks, num_workers=num_cores(), preload="benchmarks.synthetic_data")
    for first, (shard, digests) in zip(starts, track(written, "synthetic data", total=len(starts))):
        part = index[first : first + size]
        part["offset"], part["digest"] = shard.offsets, digests
        token_counts += shard.token_counts
        shards.append({"name": shard.name, "num_bytes": shard.num_bytes, "sha256": shard.sha256})
    for name in ("prompt_length", "length"):
        index[name] = examples[name]
    np.save(folder / INDEX, index)
    np.save(folder / KEYS, np.sort(rng.integers(0, 2**64, num_examples, dtype=np.uint64)))
    np.save(folder / TOKEN_COUNTS, token_counts)
    shutil.copytree(model.folder / "tokenizer", folder / "tokenizer")
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".tar")
    Manifest(
        **index_figures(index),
        num_examples=num_examples,
        max_length=model.manifest.max_length,
        examples_per_shard=size,
        dtype=dtype.name,
        tokenizer_fingerprint=model.manifest.tokenizer_fingerprint,
        prompt_format=model.manifest.prompt_format,
        sources=[{**model.manifest.sources[0], "kept": num_examples}],
        shards=shards,
        files=[describe(path, folder) for path in files],
    ).save(folder)
    shutil.rmtree(work)


def _write(
    number: int, first: int, examples: np.ndarray, pool: Path, dtype: str, num_ids: int, folder: Path, work: Path
) -> tuple:
    tokens = np.fromfile(pool, dtype)
    for example in examples:
        start, length = int(example["start"]), int(example["length"])
        example["digest"] = token_digest(tokens[start : start + length], int(example["prompt_length"]))
    shard = write_shard(number, first, examples, [pool], dtype, num_ids, str(folder), str(work))
    return shard, examples["digest"]
