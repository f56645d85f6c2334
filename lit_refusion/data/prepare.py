"""From raw records to shards: chat template, tokens, drops with reasons, one rename at the end."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import webdataset
from jinja2 import TemplateError
from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

from lit_refusion.chat import PromptFormat, encode, encode_responses
from lit_refusion.data.records import BadRecordError, Conversation, Source, parse_record, read_records
from lit_refusion.data.shards import INDEX_DTYPE, Manifest, array_offsets
from lit_refusion.errors import UserError
from lit_refusion.new_folder import new_folder
from lit_refusion.tokenizer import load_tokenizer, num_token_ids, tokenizer_fingerprint

TOKENIZE_BATCH = 256
LISTED_ERRORS = 10


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """What to prepare, and where to.

    Args:
        folder: output folder; must not exist yet.
        tokenizer: folder or hub id of the tokenizer.
        sources: where the records come from.
        prompt_format: how prompts are written out.
        max_length: longer examples (prompt and response with EOS) are dropped, never truncated.
        examples_per_shard: examples in a tar.
        on_error: "raise" stops at the first bad record; "skip" counts them and lists the first ten.
    """

    folder: str
    tokenizer: str
    sources: tuple[Source, ...]
    prompt_format: PromptFormat
    max_length: int
    examples_per_shard: int
    on_error: Literal["raise", "skip"]


@dataclass
class Prepared:
    """The manifest, and the first errors of `on_error: skip`."""

    manifest: Manifest
    errors: list[str] = field(default_factory=list)


def prepare(config: PrepareConfig, *, progress: Progress | None = None) -> Prepared:
    """Write the data set that `config` describes.

    Everything is written to a temporary folder beside the target and renamed at the end: a folder that exists
    is complete.

    Raises:
        UserError: bad config or input, a bad record with `on_error: raise`, or nothing left after the drops.
    """
    for name in ("max_length", "examples_per_shard"):
        if getattr(config, name) < 1:
            raise UserError(f"data.{name}={getattr(config, name)}: must be at least 1")
    if not config.sources or not all(source.files for source in config.sources):
        raise UserError("data.sources: give at least one source, and at least one file for each")
    names = [source.name for source in config.sources]
    if len(set(names)) < len(names):
        raise UserError(f"data.sources: the names {names} must differ")
    tokenizer = load_tokenizer(config.tokenizer)
    config.prompt_format.check(tokenizer)
    with new_folder(Path(config.folder), setting="data.folder") as folder:
        return _Writer(config, tokenizer, folder).run(progress)


@dataclass(frozen=True)
class _Text:
    """One example as text: the prompt written out, the response, and the hash of both."""

    key: int
    prompt: str
    response: str


@dataclass(frozen=True)
class _Tokens:
    """One tokenised example on its way to a shard."""

    key: int
    prompt: list[int]
    response: list[int]


class _Writer:
    """State of one preparation: open shard, index so far, counts."""

    def __init__(self, config: PrepareConfig, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        self.config, self.tokenizer, self.folder = config, tokenizer, folder
        num_ids = num_token_ids(tokenizer)
        self.dtype = np.dtype(np.uint16 if max(num_ids - 1, config.max_length) < 2**16 else np.uint32)
        self.token_counts = np.zeros(num_ids, np.int64)
        self.content = hashlib.sha256()
        self.special_tokens = tokenizer.all_special_tokens
        self.rows: list[tuple[int, int, int, int, int, int]] = []
        self.prepared = Prepared(
            Manifest(
                max_length=config.max_length,
                dtype=self.dtype.name,
                tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
                prompt_format=asdict(config.prompt_format),
            )
        )

    def run(self, progress: Progress | None) -> Prepared:
        """Write shards, index, counts, tokenizer and manifest."""
        manifest = self.prepared.manifest
        examples = self._examples(progress)
        while shard := list(islice(examples, self.config.examples_per_shard)):
            self._write_shard(shard)
        if not self.rows:
            raise UserError(
                f"data.sources: no example is left (dropped: {self._dropped()}); check the files and data.max_length"
            )
        index = np.array(self.rows, INDEX_DTYPE)
        np.save(self.folder / "index.npy", index)
        np.save(self.folder / "token_counts.npy", self.token_counts)
        self.tokenizer.save_pretrained(self.folder / "tokenizer")
        manifest.num_examples = len(index)
        manifest.num_prompt_tokens = int(index["prompt_length"].sum())
        manifest.num_response_tokens = int(index["length"].sum()) - manifest.num_prompt_tokens
        manifest.longest = int(index["length"].max())
        manifest.content_fingerprint = self.content.hexdigest()[:32]
        manifest.save(self.folder)
        return self.prepared

    def _dropped(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for source in self.prepared.manifest.sources:
            total.update(source["dropped"])
        return dict(total)

    def _examples(self, progress: Progress | None) -> Iterator[tuple[int, _Tokens]]:
        """(source number, tokens) of every example that is kept, in the order of the files."""
        for number, source in enumerate(self.config.sources):
            entry: dict[str, Any] = {"name": source.name, "read": 0, "kept": 0, "dropped": {}}
            self.prepared.manifest.sources.append(entry)
            texts = self._texts(source, entry, progress)
            while batch := list(islice(texts, TOKENIZE_BATCH)):
                for tokens in self._tokenize(batch):
                    if len(tokens.prompt) + len(tokens.response) > self.config.max_length:
                        _drop(entry, "longer than max_length")
                    elif not tokens.prompt:
                        _drop(entry, "prompt without tokens")
                    else:
                        entry["kept"] += 1
                        yield number, tokens

    def _texts(self, source: Source, entry: dict[str, Any], progress: Progress | None) -> Iterator[_Text]:
        paths = source.paths()
        task = progress.add_task(f"prepare {source.name}", total=len(paths)) if progress else None
        for path in paths:
            for number, record in read_records(path):
                entry["read"] += 1
                try:
                    yield self._text(parse_record(record, source, path=path, number=number), f"{path}: record {number}")
                except BadRecordError as error:
                    if self.config.on_error == "raise":
                        raise
                    _drop(entry, "bad record")
                    if len(self.prepared.errors) < LISTED_ERRORS:
                        self.prepared.errors.append(str(error))
            if progress and task is not None:
                progress.advance(task)

    def _text(self, conversation: Conversation, where: str) -> _Text:
        try:
            prompt = self.config.prompt_format.prompt_text(self.tokenizer, conversation.prompt)
        except TemplateError as error:
            raise BadRecordError(f"{where}: the tokenizer's chat template refuses it: {error}") from error
        except (TypeError, ValueError) as error:
            raise UserError(
                f"data.prompt_format.template_kwargs: the chat template cannot use them: {error}"
            ) from error
        for text in (conversation.response, *(message["content"] for message in conversation.prompt)):
            for token in self.special_tokens:
                if token in text:
                    raise BadRecordError(f"{where}: its text holds the special token {token}; remove it")
        return _Text(_text_key(conversation), prompt, conversation.response)

    def _tokenize(self, batch: list[_Text]) -> Iterator[_Tokens]:
        prompts = encode([text.prompt for text in batch], self.tokenizer)
        responses = encode_responses([text.response for text in batch], self.tokenizer)
        for text, prompt, response in zip(batch, prompts, responses, strict=True):
            yield _Tokens(text.key, prompt, response)

    def _write_shard(self, examples: list[tuple[int, _Tokens]]) -> None:
        number = len(self.prepared.manifest.shards)
        path = self.folder / f"shard-{number:05d}.tar"
        first = len(self.rows)
        with path.open("wb") as file, webdataset.TarWriter(file, mtime=0) as writer:
            for place, (_, tokens) in enumerate(examples):
                array = np.array([len(tokens.prompt), *tokens.prompt, *tokens.response], self.dtype)
                self.content.update(len(array).to_bytes(8, "little") + array.astype("<u4").tobytes())
                self.token_counts += np.bincount(array[1:], minlength=len(self.token_counts))
                writer.write({"__key__": f"{first + place:09d}", "npy": array})
        for offset, (source, tokens) in zip(array_offsets(path), examples, strict=True):
            length = len(tokens.prompt) + len(tokens.response)
            self.rows.append((number, offset, len(tokens.prompt), length, source, tokens.key))
        self.prepared.manifest.shards.append(
            {
                "name": path.name,
                "num_examples": len(examples),
                "num_bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
        )


def _drop(entry: dict[str, Any], reason: str) -> None:
    entry["dropped"][reason] = entry["dropped"].get(reason, 0) + 1


def _text_key(conversation: Conversation) -> int:
    """64-bit hash of the text, the example's identity across data sets."""
    texts = [message["content"] for message in conversation.prompt] + [conversation.response]
    digest = hashlib.blake2b("\x1f".join(texts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
