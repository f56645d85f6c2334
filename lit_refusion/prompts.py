"""Prompts in a file: lines of text, or records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_refusion.errors import UserError

Messages = list[dict[str, str]]
TEXT, RECORDS = (".txt",), (".jsonl", ".ndjson")


def read_prompts(path: Path) -> list[Messages]:
    """The messages of each prompt.

    A `.txt` holds one prompt a line. A `.jsonl` holds one object a line: `prompt` or `query` is the user's message, or
    `messages` is a conversation; a last message of the assistant is left out, since it is what is to be written.
    Blank lines count as lines and give no prompt.

    Args:
        path: of the file.

    Raises:
        UserError: names the file, the line and the field.
    """
    if not path.name.endswith((*TEXT, *RECORDS)):
        raise UserError(f"prompts={path}: unknown kind of file; name it {' or '.join((*TEXT, *RECORDS))}")
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"prompts={path}: not UTF-8 text ({error.reason}); save it again as UTF-8") from error
    except OSError as error:
        raise UserError(f"prompts={path}: cannot read it: {error.strerror}; check the path") from error
    lines = [(number, line) for number, line in enumerate(content.split("\n"), start=1) if line.strip()]
    if not lines:
        raise UserError(f"prompts={path}: no prompt in it; write one a line")
    if path.name.endswith(TEXT):
        return [[{"role": "user", "content": line.rstrip("\r")}] for _, line in lines]
    return [_messages(line, where=f"prompts={path}: line {number}") for number, line in lines]


def _messages(line: str, *, where: str) -> Messages:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error}); repair it, or name the file .txt") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected an object with fields, found {type(record).__name__}; use .txt for text")
    if record.get("messages"):
        return _conversation(record["messages"], where=where)
    name = next((name for name in ("prompt", "query") if name in record), None)
    if name is None:
        raise UserError(f"{where}: it has {sorted(record)}; give prompt, query or messages")
    return [{"role": "user", "content": _text(record[name], where=f"{where}: field '{name}'")}]


def _conversation(messages: Any, *, where: str) -> Messages:
    if not isinstance(messages, list):
        raise UserError(
            f"{where}: field 'messages' must be a list of role and content, found {type(messages).__name__}"
        )
    turns = []
    for turn, message in enumerate(messages, start=1):
        place = f"{where}: messages[{turn}]"
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise UserError(f"{place}: must have role and content; add what is missing")
        turns.append({name: _text(message[name], where=f"{place}: field '{name}'") for name in ("role", "content")})
    if turns[-1]["role"] == "assistant":
        turns.pop()
    if not turns:
        raise UserError(f"{where}: field 'messages' has the assistant's message alone; add the user's")
    return turns


def _text(value: Any, *, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where} must be text that is not empty, found {str(value)[:60]!r}; mend the record")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where} has half a surrogate pair, which is not text; repair the escape") from error
    return value


def with_system(messages: Sequence[dict[str, str]], system: str | None) -> Messages:
    """The messages behind a system prompt, unless they bring their own."""
    if system is None or messages[0]["role"] == "system":
        return list(messages)
    return [{"role": "system", "content": system}, *messages]


def shown(messages: Sequence[dict[str, str]]) -> str:
    """Messages as a person reads them: a single one as it is, several with their roles."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
