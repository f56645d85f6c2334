"""Reading records from JSON lists, JSON lines and Parquet, and naming the record that is wrong."""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_refusion.errors import UserError

SUFFIXES = (".json", ".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".parquet")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where records come from and what their fields are called.

    Args:
        name: name used in counts and reports.
        files: paths or glob patterns.
        query: field with the question.
        response: field with the answer.
        messages: field with a chat (list of role and content); where a record has it, it is used instead.
    """

    name: str
    files: tuple[str, ...]
    query: str
    response: str
    messages: str

    def paths(self) -> list[Path]:
        """The files behind the patterns, sorted, so that the order never depends on the disk."""
        found: list[Path] = []
        for pattern in self.files:
            matches = sorted(Path(match) for match in glob.glob(pattern, recursive=True) if Path(match).is_file())
            if not matches:
                raise UserError(
                    f"data.sources[{self.name}].files={pattern}: no such file; check the path or the pattern"
                )
            found += matches
        for path in found:
            if not path.name.endswith(SUFFIXES):
                raise UserError(f"{path}: unknown kind of file; supported: {', '.join(SUFFIXES)}")
        return found


class BadRecordError(UserError):
    """A record that cannot be used; `prepare` raises it or counts it, as `on_error` says."""


@dataclass(frozen=True)
class Conversation:
    """One record: the messages of the prompt and the response that follows them."""

    prompt: tuple[dict[str, str], ...]
    response: str


def read_records(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (record number from 1, record or BadRecordError) of one file, in order.

    Raises:
        UserError: the file as a whole cannot be read.
    """
    try:
        if path.name.endswith(".parquet"):
            yield from enumerate(_parquet(path), start=1)
        elif path.name.endswith(".json"):
            yield from enumerate(_json_list(path), start=1)
        else:
            yield from _json_lines(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot read it: {error}; save it again as UTF-8 text") from error
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot read it: {error}; is the file whole?") from error


def parse_record(record: Any, source: Source, *, path: Path, number: int) -> Conversation:
    """The conversation in a record.

    Raises:
        BadRecordError: names the file, the record's number and the field.
    """
    where = f"{path}: record {number}"
    if isinstance(record, BadRecordError):
        raise record
    if not isinstance(record, dict):
        raise BadRecordError(f"{where}: expected an object with fields, found {_brief(record)}")
    if record.get(source.messages):
        return _parse_messages(record[source.messages], field=source.messages, where=where)
    query = _text(record, source.query, where=where, setting=f"data.sources[{source.name}].query")
    response = _text(record, source.response, where=where, setting=f"data.sources[{source.name}].response")
    return Conversation(({"role": "user", "content": query},), response)


def _parse_messages(messages: Any, *, field: str, where: str) -> Conversation:
    if not isinstance(messages, (list, tuple)):
        raise BadRecordError(f"{where}: field '{field}' must be a list of messages, found {_brief(messages)}")
    turns = []
    for turn, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise BadRecordError(f"{where}: {field}[{turn}] must have role and content, found {_brief(message)}")
        turns.append({name: _text(message, name, where=f"{where}: {field}[{turn}]") for name in ("role", "content")})
    if len(turns) < 2 or turns[-1]["role"] != "assistant":
        raise BadRecordError(
            f"{where}: field '{field}' must end with an assistant message that answers another message"
        )
    return Conversation(tuple(turns[:-1]), turns[-1]["content"])


def _text(record: dict[str, Any], field: str, *, where: str, setting: str = "") -> str:
    if field not in record:
        remedy = f"; it has {sorted(record)}, set {setting} if the field has another name" if setting else ""
        raise BadRecordError(f"{where}: field '{field}' is missing{remedy}")
    value = record[field]
    if not isinstance(value, str):
        raise BadRecordError(f"{where}: field '{field}' must be text, found {_brief(value)}")
    if not value.strip():
        raise BadRecordError(f"{where}: field '{field}' is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRecordError(
            f"{where}: field '{field}' has half a surrogate pair, which is not text; repair the escape"
        ) from error
    return value


def _brief(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text[:60]}{'...' if len(text) > 60 else ''}"


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    opener = gzip.open if path.name.endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:  # also numbers and nesting beyond what Python reads
                reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
                yield number, BadRecordError(f"{path}: record {number}: not valid JSON ({reason})")


def _json_list(path: Path) -> list[Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}: not valid JSON (line {error.lineno}: {error.msg}); if it holds one object a line, name it .jsonl"
        ) from error
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON that can be read ({error}); save it as .jsonl, one record a line") from error
    if not isinstance(data, list):
        raise UserError(f"{path}: expected a JSON list of records, found {_brief(data)}")
    return data


def _parquet(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UserError(f"{path}: reading Parquet needs an extra: pip install 'lit-refusion[parquet]'") from error
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=1024):
            yield from batch.to_pylist()
    except ArrowException as error:
        raise UserError(f"{path}: not a readable Parquet file: {error}") from error
