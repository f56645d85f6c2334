"""The first half of `prepare`: blocks of raw records become parts, files of tokens on the disk.

A part is named by the content that it was made from and by the settings that shape its tokens, so whatever an
interrupted run finished serves the next one, and filters, weights and shard sizes can change without tokenising again.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lit_refusion.chat import PromptFormat, encode, encode_responses
from lit_refusion.data.formats import BadRecordError, Sample, num_rows, read_hub, read_raw
from lit_refusion.data.records import Conversation, Fields, parse_record
from lit_refusion.data.sources import Source
from lit_refusion.errors import UserError
from lit_refusion.examples import token_digest
from lit_refusion.tokenizer import load_tokenizer

BLOCK_SIZE = 8192
"""Records of a block. Memory and lost work are bounded by it."""
BLOCK_BYTES = 2**26
"""Bytes of records, about, that end a block early (64 MB)."""
TOKENIZE_BATCH = 256
LISTED_ERRORS = 10
FORMAT = 1
"""Raised whenever parts come out differently, so that old ones are not used."""

PART_DTYPE = np.dtype(
    [
        ("key", np.uint64),  # hash of the text: the example's identity across data sets
        ("digest", np.uint64),  # hash of the tokens: tells whether they were damaged
        ("prompt_length", np.int32),
        ("length", np.int32),  # prompt and response
    ]
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive records of one file or hub data set, on their way to a worker.

    Args:
        fields: names of their fields.
        origin: the file's path, or the data set's id.
        records: (number, raw record).
        position: how far into `total` this block ends, in bytes, or records of a hub data set.
        total: size of the file or hub data set.
    """

    fields: Fields
    origin: str
    records: list[tuple[int, Any]]
    position: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Tokenizing:
    """What, beside the records, the tokens depend on."""

    tokenizer: str
    fingerprint: str
    prompt_format: PromptFormat
    dtype: str


def blocks(source: Source) -> Iterator[Block]:
    """All records of a source, in the order of its files; a file without records gives one empty block."""
    if source.hub is not None:
        for subset in source.subsets or (None,):
            records, total = read_hub(source.hub, subset, source.split)
            origin = source.hub if subset is None else f"{source.hub}/{subset}"
            for records_of_block in _chunks(records):
                last = records_of_block[-1][0] if records_of_block else 0
                yield Block(fields=source.fields, origin=origin, records=records_of_block, position=last, total=total)
        return
    for path in source.paths():
        try:
            with path.open("rb") as file:
                total = path.stat().st_size
                rows = num_rows(path)
                for records_of_block in _chunks(read_raw(path, file)):
                    position = min(file.tell(), total)
                    if rows and records_of_block:
                        position = total * records_of_block[-1][0] // rows
                    yield Block(
                        fields=source.fields, origin=str(path), records=records_of_block, position=position, total=total
                    )
        except PermissionError as error:
            raise UserError(f"{path}: no permission to read it; chmod it, or run as its owner") from error


def _chunks(records: Iterator[tuple[int, Any]]) -> Iterator[list[tuple[int, Any]]]:
    """Lists of at most BLOCK_SIZE records and about BLOCK_BYTES of lines; one empty list if there are none."""
    chunk: list[tuple[int, Any]] = []
    size = 0
    is_empty = True
    for number, raw in records:
        chunk.append((number, raw))
        size += _num_bytes(raw)
        if len(chunk) == BLOCK_SIZE or size >= BLOCK_BYTES:
            yield chunk
            chunk, size, is_empty = [], 0, False
    if chunk or is_empty:
        yield chunk


def _num_bytes(raw: Any) -> int:
    """Bytes of text in a raw record, without the overhead of objects."""
    if isinstance(raw, (bytes, str)):
        return len(raw)
    if isinstance(raw, Sample):
        return sum(map(len, raw.members.values()))
    if isinstance(raw, dict):
        return sum(map(_num_bytes, raw.values()))
    return sum(map(_num_bytes, raw)) if isinstance(raw, (list, tuple)) else 0


@dataclass(frozen=True, kw_only=True)
class Part:
    """A finished part: `NAME.tokens` and `NAME.npy` in `folder`.

    Args:
        read: records read.
        bad: records that could not be used.
        errors: what was wrong with the first of them.
    """

    folder: str
    name: str
    read: int
    bad: int
    errors: tuple[str, ...]

    def entries(self) -> np.ndarray:
        """[num_examples] PART_DTYPE."""
        return np.load(Path(self.folder) / f"{self.name}.npy")

    @property
    def tokens_path(self) -> Path:
        """All tokens, example after example, prompt before response."""
        return Path(self.folder) / f"{self.name}.tokens"


def make_part(block: bytes, settings: Tokenizing, folder: str) -> Part:
    """The part of a packed Block, from an earlier run where that finished it: the work of a process.

    Raises:
        UserError: the chat template cannot use its variables.
    """
    identity = json.dumps([FORMAT, asdict(settings)], sort_keys=True).encode()
    name = hashlib.blake2b(block, digest_size=12, key=hashlib.sha256(identity).digest()).hexdigest()
    report = Path(folder) / f"{name}.json"
    if report.is_file():
        return Part(folder=folder, name=name, **read_report(report))
    content: Block = pickle.loads(block)
    tokenizer = _tokenizer(settings.tokenizer, settings.fingerprint)
    errors: list[str] = []
    arrays, entries = [], []
    texts = _texts(content, settings, tokenizer, errors)
    while batch := list(islice(texts, TOKENIZE_BATCH)):
        prompts = encode([prompt for _, prompt, _ in batch], tokenizer)
        responses = encode_responses([response for _, _, response in batch], tokenizer)
        for (key, _, _), prompt, response in zip(batch, prompts, responses, strict=True):
            tokens = np.array([*prompt, *response], np.uint32)
            arrays.append(tokens.astype(settings.dtype))
            entries.append((key, token_digest(tokens, len(prompt)), len(prompt), len(tokens)))
    figures = {"read": len(content.records), "bad": len(errors), "errors": errors[:LISTED_ERRORS]}
    return write_part(Path(folder), name, arrays, np.array(entries, PART_DTYPE), figures)


def write_part(
    folder: Path, name: str, arrays: Sequence[np.ndarray], entries: np.ndarray, figures: dict[str, Any]
) -> Part:
    """Write a part's files.

    Args:
        folder: of the parts.
        name: of this one.
        arrays: tokens of each example, prompt and response.
        entries: [num_examples] PART_DTYPE.
        figures: `read`, `bad` and `errors`, see `Part`.
    """
    report = folder / f"{name}.json"
    with _written_whole(report.with_suffix(".tokens")) as file:
        for array in arrays:
            file.write(array.tobytes())
    with _written_whole(report.with_suffix(".npy")) as file:
        np.save(file, entries)
    with _written_whole(report) as file:  # last, so a part with a report is whole
        file.write(json.dumps(figures).encode())
    return Part(folder=str(folder), name=name, **read_report(report))


@contextmanager
def _written_whole(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes its name when it is whole; two processes may make the same part of equal blocks."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        yield file
    temporary.replace(path)


def packed(block: Block) -> bytes:
    """A block as bytes that depend on its records and fields alone.

    Not on which of its strings are one object, and not on how long the file has become behind it.
    """
    content = io.BytesIO()
    pickler = pickle.Pickler(content, protocol=5)
    pickler.fast = True  # without the memo of objects seen before
    try:
        pickler.dump(replace(block, position=0, total=0))
    except RecursionError as error:
        first, last = block.records[0][0], block.records[-1][0]
        raise UserError(f"{block.origin}: one of records {first} to {last} is nested too deep; remove it") from error
    return content.getvalue()


def read_report(path: Path) -> dict[str, Any]:
    """The figures of a finished part."""
    figures = json.loads(path.read_text(encoding="utf-8"))
    return {**figures, "errors": tuple(figures["errors"])}


@lru_cache(maxsize=1)
def _tokenizer(path: str, fingerprint: str) -> PreTrainedTokenizerBase:
    """One tokenizer per process; the fingerprint only keeps two at the same path apart."""
    return load_tokenizer(path)


def _texts(
    block: Block, settings: Tokenizing, tokenizer: PreTrainedTokenizerBase, errors: list[str]
) -> Iterator[tuple[int, str, str]]:
    """(key, prompt as written out, response) of every good record; `errors` gets the bad ones."""
    special_tokens = tokenizer.all_special_tokens
    for number, raw in block.records:
        where = f"{block.origin}: record {number}"
        try:
            conversation = parse_record(raw, block.fields, where=where)
            _refuse_special_tokens(conversation, special_tokens, where)
            prompt = _prompt_text(conversation, settings.prompt_format, tokenizer, where)
        except BadRecordError as error:
            errors.append(str(error))
        else:
            yield _text_key(conversation), prompt, conversation.response


def _prompt_text(
    conversation: Conversation, prompt_format: PromptFormat, tokenizer: PreTrainedTokenizerBase, where: str
) -> str:
    try:
        return prompt_format.prompt_text(tokenizer, conversation.prompt)
    except TemplateError as error:
        raise BadRecordError(f"{where}: the tokenizer's chat template refuses it: {error}") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"data.prompt_format.template_kwargs: the chat template cannot use them: {error}") from error


def _refuse_special_tokens(conversation: Conversation, special_tokens: list[str], where: str) -> None:
    for text in (conversation.response, *(message["content"] for message in conversation.prompt)):
        for token in special_tokens:
            if token in text:
                raise BadRecordError(f"{where}: its text holds the special token {token}; remove it")


def _text_key(conversation: Conversation) -> int:
    """64-bit hash of the text and its roles, the example's identity across data sets."""
    texts = [text for message in conversation.prompt for text in (message["role"], message["content"])]
    digest = hashlib.blake2b("\x1f".join([*texts, conversation.response]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
