"""From a raw record to a conversation, or to an error that names the record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lit_refusion.data.formats import BadRecordError, Sample


@dataclass(frozen=True, kw_only=True)
class Fields:
    """What the fields of a source's records are called; `source` is its name, for errors."""

    source: str
    query: str
    response: str
    messages: str


@dataclass(frozen=True)
class Conversation:
    """One record: the messages of the prompt and the response that follows them."""

    prompt: tuple[dict[str, str], ...]
    response: str


def parse_record(raw: Any, fields: Fields, *, where: str) -> Conversation:
    """The conversation in a raw record.

    Args:
        raw: what `read_raw` or `read_hub` gave.
        fields: names of the fields.
        where: the file and the record's number, for errors.

    Raises:
        BadRecordError: names the record and the field.
    """
    record = _decoded(raw, fields, where)
    if not isinstance(record, dict):
        raise BadRecordError(f"{where}: expected an object with fields, found {_brief(record)}")
    if record.get(fields.messages):
        return _parse_messages(record[fields.messages], field=fields.messages, where=where)
    query = _text(record, fields.query, where=where, setting=f"data.sources[{fields.source}].query")
    response = _text(record, fields.response, where=where, setting=f"data.sources[{fields.source}].response")
    return Conversation(({"role": "user", "content": query},), response)


def _decoded(raw: Any, fields: Fields, where: str) -> Any:
    if isinstance(raw, BadRecordError):
        raise raw
    if isinstance(raw, bytes):
        return _json(raw, where)
    if isinstance(raw, Sample):
        where = f"{where} ({raw.key})"
        if "json" in raw.members:
            return _json(raw.members["json"], where)
        members = {name.removesuffix(".txt"): value for name, value in raw.members.items()}
        wanted = (fields.query, fields.response)
        return {name: _decode(value, where) if name in wanted else None for name, value in members.items()}
    return raw


def _json(line: bytes, where: str) -> Any:
    try:
        return json.loads(_decode(line, where))
    except (ValueError, RecursionError) as error:  # also numbers and nesting beyond what Python reads
        if isinstance(error, BadRecordError):
            raise
        reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise BadRecordError(f"{where}: not valid JSON ({reason})") from error


def _decode(text: bytes, where: str) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        found = f"byte 0x{text[error.start]:02x} at {error.start}"
        raise BadRecordError(f"{where}: not UTF-8 text ({found}); save the file again as UTF-8") from error


def _parse_messages(messages: Any, *, field: str, where: str) -> Conversation:
    if not isinstance(messages, (list, tuple)):
        raise BadRecordError(f"{where}: field '{field}' must be a list of messages, found {_brief(messages)}")
    turns = []
    for turn, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            raise BadRecordError(f"{where}: {field}[{turn}] must have role and content, found {_brief(message)}")
        turns.append({name: _text(message, name, where=f"{where}: {field}[{turn}]") for name in ("role", "content")})
    if len(turns) < 2 or turns[-1]["role"] != "assistant":
        raise BadRecordError(
            f"{where}: field '{field}' must end with an assistant message that answers another message"
        )
    return Conversation(tuple(turns[:-1]), turns[-1]["content"])


def _text(record: Mapping[str, Any], field: str, *, where: str, setting: str = "") -> str:
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
    try:
        text = repr(value)
    except RecursionError:
        text = "nested too deep to show"
    return f"{type(value).__name__} {text[:60]}{'...' if len(text) > 60 else ''}"
