"""Every format, field mapping, chats, globs, and what is said about bad records."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyarrow import Table, parquet

from lit_refusion.data.records import BadRecordError, Conversation, Source, parse_record, read_records
from lit_refusion.errors import UserError

RECORDS = [
    {"query": "Où est\u2028Zoë?", "response": "Là.\nIci."},  # U+2028 and a line feed inside a text end no record
    {"query": "1 + 1?", "response": "2"},
]


def source(*files: Path | str, **names: str) -> Source:
    fields = {"query": "query", "response": "response", "messages": "messages", **names}
    return Source(name="mine", files=tuple(map(str, files)), **fields)


def conversation(record: dict[str, str]) -> Conversation:
    return Conversation(({"role": "user", "content": record["query"]},), record["response"])


def parse_all(path: Path, **names: str) -> list[Conversation]:
    return [parse_record(item, source(**names), path=path, number=n) for n, item in read_records(path)]


def parse_one(record: Any) -> Conversation:
    return parse_record(record, source(), path=Path("some/file.jsonl"), number=7)


def lines(records: list[Any]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def json_list(records: list[Any]) -> bytes:
    return json.dumps(records, ensure_ascii=False).encode()


BOM = b"\xef\xbb\xbf"
FORMATS: dict[str, Callable[[list[Any]], bytes]] = {
    "a.json": json_list,
    "a.jsonl": lines,
    "a.ndjson": lines,
    "a.jsonl.gz": lambda records: gzip.compress(lines(records)),
    "a.ndjson.gz": lambda records: gzip.compress(lines(records)),
    "bom.json": lambda records: BOM + json_list(records),
    "bom.jsonl": lambda records: BOM + lines(records),
    "bom.jsonl.gz": lambda records: gzip.compress(BOM + lines(records)),
    "crlf.jsonl": lambda records: lines(records).replace(b"\n", b"\r\n"),
    "no_last_newline.jsonl": lambda records: lines(records)[:-1],
}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_text_formats_give_the_same_conversations(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(FORMATS[name](RECORDS))
    assert parse_all(path) == [conversation(record) for record in RECORDS]


def test_parquet_gives_the_same_conversations(tmp_path: Path) -> None:
    records = RECORDS * 600  # more than one batch of rows
    parquet.write_table(Table.from_pylist(records), tmp_path / "a.parquet")
    assert parse_all(tmp_path / "a.parquet") == [conversation(record) for record in records]


def test_parquet_holds_chats_too(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    rows = [{"messages": messages, "query": None, "response": None}, {"messages": None, "query": "q", "response": "r"}]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "a.parquet")
    assert parse_all(tmp_path / "a.parquet") == [
        Conversation(({"role": "user", "content": "hi"},), "hello"),
        conversation(rows[1]),
    ]


def test_parquet_without_the_extra_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"a\.parquet: .*pip install 'lit-refusion\[parquet\]'"):
        list(read_records(tmp_path / "a.parquet"))


def test_record_numbers_are_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n   \n{"a": 2}\n')
    assert list(read_records(path)) == [(1, {"a": 1}), (4, {"a": 2})]


def test_fields_are_mapped(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    path.write_bytes(json_list([{"question": "q", "answer": "r", "query": "not this"}, {"chat": turns}]))
    assert parse_all(path, query="question", response="answer", messages="chat") == [
        Conversation(({"role": "user", "content": "q"},), "r"),
        Conversation(({"role": "user", "content": "u"},), "a"),
    ]


def test_chat_keeps_system_and_all_turns() -> None:
    texts = [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": text, "id": 3} for role, text in texts]
    expected = tuple({"role": role, "content": text} for role, text in texts[:-1])
    assert parse_one({"messages": messages, "query": "x", "response": "y"}) == Conversation(expected, "d")


def test_an_empty_chat_falls_back_to_query_and_response() -> None:
    assert parse_one({"messages": [], "query": "q", "response": "r"}) == conversation({"query": "q", "response": "r"})


def test_globs_are_sorted_within_a_pattern_and_patterns_keep_their_order(tmp_path: Path) -> None:
    for name in ("b/2.jsonl", "b/10.jsonl", "a/9.jsonl", "b/c/1.jsonl", "z.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.jsonl").mkdir()  # not a file
    paths = source(tmp_path / "z.json", tmp_path / "**" / "*.jsonl").paths()
    found = [path.relative_to(tmp_path).as_posix() for path in paths]
    assert found == ["z.json", "a/9.jsonl", "b/10.jsonl", "b/2.jsonl", "b/c/1.jsonl"]


@pytest.mark.parametrize("pattern", ["none.jsonl", "none-*.jsonl"])
def test_missing_file_names_source_and_pattern(pattern: str, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").touch()
    with pytest.raises(UserError, match="no such file") as caught:
        source(tmp_path / "there.jsonl", tmp_path / pattern).paths()
    assert f"data.sources[mine].files={tmp_path / pattern}" in str(caught.value)


@pytest.mark.parametrize("name", ["a.csv", "a.json.gz", "jsonl"])
def test_unknown_suffix_names_the_file_and_the_choices(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"unknown kind of file; supported: \.json, .*\.parquet") as caught:
        source(tmp_path / name).paths()
    assert str(tmp_path / name) in str(caught.value)


USER, ASSISTANT = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
BAD_RECORDS = [
    ({"response": "r"}, r"field 'query' is missing; it has \['response'\], set data\.sources\[mine\]\.query"),
    ({"query": "q"}, r"field 'response' is missing; it has \['query'\], set data\.sources\[mine\]\.response"),
    ({"messages": [], "response": "r"}, "field 'query' is missing"),
    ({"query": "", "response": "r"}, "field 'query' is empty"),
    ({"query": "q", "response": " \n\t"}, "field 'response' is empty"),
    ({"query": 3, "response": "r"}, "field 'query' must be text, found int 3"),
    ({"query": "q", "response": None}, "field 'response' must be text, found NoneType None"),
    ({"query": ["q"] * 50, "response": "r"}, r"field 'query' must be text, found list \['q', .*\.\.\."),
    (["q", "r"], r"expected an object with fields, found list \['q', 'r'\]"),
    ("text", "expected an object with fields, found str 'text'"),
    (None, "expected an object with fields, found NoneType None"),
    ({"messages": "hi"}, "field 'messages' must be a list of messages, found str 'hi'"),
    ({"messages": {"role": "user"}}, "field 'messages' must be a list of messages, found dict"),
    ({"messages": [USER, "hi"]}, r"messages\[2\] must have role and content, found str 'hi'"),
    ({"messages": [{"role": "user"}, ASSISTANT]}, r"messages\[1\]: field 'content' is missing"),
    ({"messages": [{"content": "u"}, ASSISTANT]}, r"messages\[1\]: field 'role' is missing"),
    ({"messages": [USER, {"role": "assistant", "content": ""}]}, r"messages\[2\]: field 'content' is empty"),
    ({"messages": [USER, {"role": "assistant", "content": [1]}]}, r"messages\[2\]: field 'content' must be text"),
    ({"messages": [USER, ASSISTANT, USER]}, "field 'messages' must end with an assistant message"),
    ({"messages": [ASSISTANT]}, "field 'messages' must end with an assistant message that answers another message"),
]


@pytest.mark.parametrize(("record", "message"), BAD_RECORDS, ids=range(len(BAD_RECORDS)))
def test_bad_record_names_file_record_and_field(record: Any, message: str) -> None:
    with pytest.raises(BadRecordError, match=rf"^some/file\.jsonl: record 7: {message}"):
        parse_one(record)


def test_invalid_json_line_is_one_bad_record_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"query": "a"}\n{"query": oops}\n{"query": "c"}\n')
    found = dict(read_records(path))
    assert (found[1], found[3]) == ({"query": "a"}, {"query": "c"})
    with pytest.raises(BadRecordError, match=r"a\.jsonl: record 2: not valid JSON \(Expecting value, column 11\)"):
        parse_record(found[2], source(), path=path, number=2)


UNREADABLE = {
    "lines.json": (lines(RECORDS), r"not valid JSON \(line 2: Extra data\); .*name it \.jsonl"),
    "broken.json": (b'[{"query": "a"', r"not valid JSON \(line 1: "),
    "object.json": (b'{"query": "a", "response": "b"}', "expected a JSON list of records, found dict"),
    "latin.jsonl": ('{"query": "caf\u00e9"}\n'.encode("latin-1"), "cannot read it: .*byte 0xe9.* UTF-8"),
    "latin.json": ('[{"query": "caf\u00e9"}]'.encode("latin-1"), "cannot read it: .*byte 0xe9.* UTF-8"),
    "latin.jsonl.gz": (gzip.compress('{"query": "caf\u00e9"}\n'.encode("latin-1")), "cannot read it: .*byte 0xe9"),
    "plain.jsonl.gz": (lines(RECORDS), "cannot read it: Not a gzipped file"),
    "cut.jsonl.gz": (gzip.compress(lines(RECORDS))[:-20], "cannot read it: Compressed file ended"),
    "text.parquet": (b"PAR1 but not really", "not a readable Parquet file"),
    "empty.json": (b"", "not valid JSON"),
}


@pytest.mark.parametrize("name", sorted(UNREADABLE))
def test_unreadable_file_is_named(name: str, tmp_path: Path) -> None:
    content, message = UNREADABLE[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        list(read_records(tmp_path / name))
    assert str(caught.value).startswith(f"{tmp_path / name}: ")
    assert not isinstance(caught.value, BadRecordError)  # `on_error: skip` must not skip a whole file


def test_damaged_gzip_stream_is_named(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(lines(RECORDS)))
    content[10] ^= 0xFF  # first byte behind the header: an invalid block type
    (tmp_path / "damaged.jsonl.gz").write_bytes(content)
    with pytest.raises(UserError, match=r"damaged\.jsonl\.gz: cannot read it"):
        list(read_records(tmp_path / "damaged.jsonl.gz"))


def test_half_a_surrogate_pair_is_a_bad_record() -> None:
    with pytest.raises(BadRecordError, match=r"record 7: field 'query'"):
        parse_one(json.loads('{"query": "\\ud83d", "response": "r"}'))


@pytest.mark.parametrize("line", ["[" * 100_000, "1" * 5000], ids=["deep", "long_number"])
def test_json_beyond_the_parsers_limits_is_a_bad_record(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n")
    [(_, found)] = list(read_records(tmp_path / "a.jsonl"))
    assert isinstance(found, BadRecordError)
