"""From raw records to shards, in two passes: tokenise everything, then write what was chosen.

    blocks of records -> parts (processes, any order) -> select (numbers only) -> shards (processes) -> one rename

Both passes leave finished files beside the target, so an interrupted run goes on where it was, and every file is a
function of the records and the settings alone: neither the number of processes nor an interruption changes a byte.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

from lit_refusion.chat import PromptFormat
from lit_refusion.data import lengths
from lit_refusion.data.answers import Answering, answer_all, check_answering
from lit_refusion.data.parts import LISTED_ERRORS, PART_DTYPE, Part, Tokenizing, blocks, make_part, packed
from lit_refusion.data.selection import SourceCounts, select
from lit_refusion.data.shard_writing import EXAMPLE_DTYPE, Shard, describe, write_shard
from lit_refusion.data.shards import INDEX, INDEX_DTYPE, KEYS, PICTURE, TOKEN_COUNTS, Manifest, index_figures
from lit_refusion.data.sources import Source
from lit_refusion.errors import UserError
from lit_refusion.new_folder import finish, resumable_folder
from lit_refusion.processes import in_order
from lit_refusion.tokenizer import load_tokenizer, num_token_ids, tokenizer_fingerprint

PRELOAD = "lit_refusion.data.prepare"


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """What to prepare, and where to.

    Args:
        folder: output folder; must not exist yet.
        tokenizer: folder or hub id of the tokenizer.
        sources: where the records come from.
        prompt_format: how prompts are written out.
        max_length: longer examples (prompt and response with EOS) are dropped, never truncated.
        num_examples: exactly this many examples over all sources, those with the smallest hash(seed, text); null for
            all.
        seed: keys the hashes that choose examples (num_examples, max_examples, weights).
        examples_per_shard: examples in a tar.
        on_error: "raise" stops at the first bad record; "skip" counts them and lists the first ten.
    """

    folder: str
    tokenizer: str
    sources: tuple[Source, ...]
    prompt_format: PromptFormat
    max_length: int
    num_examples: int | None
    seed: int
    examples_per_shard: int
    on_error: Literal["raise", "skip"]

    def __post_init__(self) -> None:
        for name in ("max_length", "examples_per_shard", "num_examples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"data.{name}={value}: must be at least 1")
        if self.seed < 0:
            raise UserError(f"data.seed={self.seed}: must not be negative")
        names = [source.name for source in self.sources]
        if not any(source.weight for source in self.sources):
            raise UserError("data.sources: give at least one source with a weight above 0")
        if len(set(names)) < len(names):
            raise UserError(f"data.sources: the names {names} must differ")


@dataclass
class Prepared:
    """What came of it.

    Args:
        counts: per source.
        errors: the first bad records of `on_error: skip`.
        manifest: of the written data set; None after a dry run.
    """

    counts: list[SourceCounts]
    errors: list[str] = field(default_factory=list)
    manifest: Manifest | None = None


def prepare(
    config: PrepareConfig,
    *,
    answering: Answering | None = None,
    num_workers: int = 0,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Prepared:
    """Write the data set that `config` describes.

    Everything is written beside the target and renamed at the end: a folder that exists is complete.

    Args:
        config: the data set.
        answering: the model whose answers take the place of the responses; None to keep these.
        num_workers: processes; 0 does the work in this one.
        dry_run: count only. The tokenised parts stay for the run that follows.
        progress: shows how far it is.

    Raises:
        UserError: bad config or input, a bad record with `on_error: raise`, or nothing left after the drops.
    """
    if num_workers < 0:
        raise UserError(f"num_workers={num_workers}: must not be negative")
    tokenizer = load_tokenizer(config.tokenizer)
    config.prompt_format.check(tokenizer)
    if answering is not None:
        check_answering(answering)
    target = Path(config.folder)
    with resumable_folder(target, setting="data.folder") as (out, work):
        run = _Preparation(config, tokenizer, out, work, num_workers, progress)
        prepared = run.select()
        if not dry_run:
            if answering is not None:
                run.answer(answering)
            prepared.manifest = run.write(prepared.counts)
            finish(target)
    return prepared


class _Preparation:
    """One run: settings, the parts of each source, and what was chosen of them."""

    def __init__(
        self,
        config: PrepareConfig,
        tokenizer: PreTrainedTokenizerBase,
        out: Path,
        work: Path,
        num_workers: int,
        progress: Progress | None,
    ) -> None:
        self.config, self.tokenizer, self.out, self.work = config, tokenizer, out, work
        self.num_workers, self.progress = num_workers, progress
        self.num_ids = num_token_ids(tokenizer)
        self.dtype = np.dtype(np.uint16 if max(self.num_ids - 1, config.max_length) < 2**16 else np.uint32)
        self.fingerprint = tokenizer_fingerprint(tokenizer)
        self.parts: list[Part] = []
        self.answered_by: dict[str, Any] | None = None
        self.examples = np.empty(0, EXAMPLE_DTYPE)
        self.keys = np.empty(0, np.uint64)

    def select(self) -> Prepared:
        """Tokenise the records and choose the examples."""
        prepared = Prepared([])
        sources = [source for source in self.config.sources if source.weight]
        entries, bounds = [np.empty(0, PART_DTYPE)], []
        for source in sources:
            counts = SourceCounts(name=source.name)
            start = sum(map(len, entries))
            for part in self._tokenize(source):
                self._note_errors(part, prepared)
                counts.read += part.read
                counts.drop("bad record", part.bad)
                entries.append(part.entries())
                self.parts.append(part)
            bounds.append((start, sum(map(len, entries))))
            prepared.counts.append(counts)
        joined = np.concatenate(entries)
        rows = select(
            joined,
            bounds,
            sources,
            prepared.counts,
            max_length=self.config.max_length,
            num_examples=self.config.num_examples,
            seed=self.config.seed,
        )
        self._check_number(len(rows), prepared.counts)
        self._locate(joined, rows, [len(part) for part in entries[1:]])
        return prepared

    def answer(self, settings: Answering) -> None:
        """Put a model's answers in the place of the chosen examples' responses."""
        settings = replace(settings, token_dtype=self.dtype.name)
        paths, folder = [part.tokens_path for part in self.parts], self.work / "answers"
        folder.mkdir(exist_ok=True)
        self.parts = answer_all(self.examples, self.keys, paths, settings, folder, progress=self.progress)
        self.answered_by = {"model": settings.model, "weights": settings.weights, "decoder": settings.decoder}
        entries = np.concatenate([part.entries() for part in self.parts])
        self._locate(entries, np.arange(len(entries)), [part.read for part in self.parts])

    def write(self, counts: list[SourceCounts]) -> Manifest:
        """Write shards, index, counts, tokenizer and, last, the manifest."""
        index = np.zeros(len(self.examples), INDEX_DTYPE)
        for name in ("prompt_length", "length", "digest"):
            index[name] = self.examples[name]
        token_counts = np.zeros(self.num_ids, np.int64)
        shards = []
        written = 0
        for shard in self._shards():
            index["offset"][written : written + len(shard.offsets)] = shard.offsets
            token_counts += shard.token_counts
            written += len(shard.offsets)
            shards.append({"name": shard.name, "num_bytes": shard.num_bytes, "sha256": shard.sha256})
        for path in self.out.glob("*"):  # of an interrupted run with other settings
            if path.is_file() and path.name not in {shard["name"] for shard in shards}:
                path.unlink()
        np.save(self.out / INDEX, index)
        np.save(self.out / KEYS, self.keys)
        np.save(self.out / TOKEN_COUNTS, token_counts)
        shutil.rmtree(self.out / "tokenizer", ignore_errors=True)  # of an interrupted run with another one
        self.tokenizer.save_pretrained(self.out / "tokenizer")
        manifest = self._manifest(index, counts)
        with suppress(ImportError):  # without matplotlib the numbers are in the manifest
            lengths.draw(manifest.lengths, self.out / PICTURE)
        others = sorted(path for path in self.out.rglob("*") if path.is_file() and path.suffix != ".tar")
        manifest.shards, manifest.files = shards, [describe(path, self.out) for path in others]
        manifest.save(self.out)
        return manifest

    def _tokenize(self, source: Source) -> Iterator[Part]:
        """The parts of a source, in order, made by the workers."""
        settings = Tokenizing(
            tokenizer=self.config.tokenizer,
            fingerprint=self.fingerprint,
            prompt_format=self.config.prompt_format,
            dtype=self.dtype.name,
        )
        folder = self.work / "parts"
        folder.mkdir(exist_ok=True)
        tasks = self._tasks(source, settings, str(folder))
        yield from in_order(make_part, tasks, num_workers=self.num_workers, preload=PRELOAD)

    def _tasks(self, source: Source, settings: Tokenizing, folder: str) -> Iterator[tuple[bytes, Tokenizing, str]]:
        """The arguments of `make_part`, block by block, moving the progress bar on."""
        task = self.progress.add_task(f"tokenise {source.name}", total=None) if self.progress else None
        size = sum(path.stat().st_size for path in source.paths())
        before, last = 0, None  # size of the finished files, and the block read last
        for block in blocks(source):
            if self.config.on_error == "raise" and not block.records:
                raise UserError(f"{block.origin}: no record in it; remove it from data.sources[{source.name}]")
            before += last.total if last is not None and last.origin != block.origin else 0
            last = block
            yield packed(block), settings, folder
            if self.progress and task is not None:
                self.progress.update(task, completed=before + block.position, total=size or before + block.total)

    def _note_errors(self, part: Part, prepared: Prepared) -> None:
        if part.bad and self.config.on_error == "raise":
            raise UserError(part.errors[0])
        prepared.errors += part.errors[: LISTED_ERRORS - len(prepared.errors)]

    def _locate(self, entries: np.ndarray, rows: np.ndarray, part_sizes: list[int]) -> None:
        """Where the tokens of the chosen examples lie."""
        part = np.repeat(np.arange(len(part_sizes)), part_sizes)
        ends = np.cumsum(entries["length"], dtype=np.int64)
        before = np.concatenate([[0], ends])[np.concatenate([[0], np.cumsum(part_sizes)[:-1]]).astype(int)]
        self.examples = np.zeros(len(rows), EXAMPLE_DTYPE)
        self.examples["part"] = part[rows]
        self.examples["start"] = ends[rows] - entries["length"][rows] - before[part[rows]]
        for name in ("prompt_length", "length", "digest"):
            self.examples[name] = entries[name][rows]
        self.keys = entries["key"][rows]

    def _check_number(self, found: int, counts: list[SourceCounts]) -> None:
        if found == 0:
            dropped = {count.name: count.dropped for count in counts}
            raise UserError(
                f"data.sources: no example is left (dropped: {dropped}); check the files and data.max_length"
            )
        wanted = self.config.num_examples
        if wanted is not None and found < wanted:
            raise UserError(f"data.num_examples={wanted}: only {found} examples are left; lower it or add sources")

    def _shards(self) -> Iterator[Shard]:
        size = self.config.examples_per_shard
        (self.work / "shards").mkdir(exist_ok=True)
        paths = [part.tokens_path for part in self.parts]
        tasks = (
            (
                *(number, first, self.examples[first : first + size], paths, self.dtype.name, self.num_ids),
                *(str(self.out), str(self.work / "shards")),
            )
            for number, first in enumerate(range(0, len(self.examples), size))
        )
        total = -(-len(self.examples) // size)
        task = self.progress.add_task("write shards", total=total) if self.progress else None
        for shard in in_order(write_shard, tasks, num_workers=self.num_workers, preload=PRELOAD):
            if self.progress and task is not None:
                self.progress.advance(task)
            yield shard

    def _manifest(self, index: np.ndarray, counts: list[SourceCounts]) -> Manifest:
        return Manifest(
            **index_figures(index),
            num_examples=len(index),
            max_length=self.config.max_length,
            examples_per_shard=self.config.examples_per_shard,
            dtype=self.dtype.name,
            tokenizer_fingerprint=self.fingerprint,
            prompt_format=asdict(self.config.prompt_format),
            answered_by=self.answered_by,
            sources=[asdict(count) for count in counts],
        )
