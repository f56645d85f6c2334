"""From raw records to conversations: field mapping, chats, and what is said about bad records."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import pytest

from lit_refusion.data.formats import BadRecordError, Sample
from lit_refusion.data.records import Conversation, Fields, parse_record

WHERE = "some/file.jsonl: record 7"
USER, ASSISTANT = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
QUESTION = Conversation(({"role": "user", "content": "q"},), "r")
CHAT = Conversation((USER,), "a")


def parse(raw: Any, **names: str) -> Conversation:
    fields = {"query": "query", "response": "response", "messages": "messages", **names}
    return parse_record(raw, Fields(source="mine", **fields), where=WHERE)


def line(record: Any) -> bytes:
    return json.dumps(record).encode()


RAW = {
    "object": {"query": "q", "response": "r"},
    "line": line({"query": "q", "response": "r"}),
    "line_with_its_end": line({"query": "q", "response": "r"}) + b"\r\n",
    "sample_with_json": Sample("001", {"json": line({"query": "q", "response": "r"})}),
    "sample_with_texts": Sample("001", {"query.txt": b"q", "response.txt": b"r"}),
    "sample_without_suffixes": Sample("001", {"query": b"q", "response": b"r"}),
}


@pytest.mark.parametrize("kind", sorted(RAW))
def test_every_kind_of_raw_record_gives_the_same_conversation(kind: str) -> None:
    assert parse(RAW[kind]) == QUESTION


def test_text_is_kept_as_it_is() -> None:
    record = {"query": " Où est\u2028Zoë?\n", "response": "\t\U0001f600 "}
    expected = Conversation(({"role": "user", "content": record["query"]},), record["response"])
    assert parse(record) == expected
    assert parse(json.dumps(record, ensure_ascii=True).encode()) == expected  # the emoji is a surrogate pair here
    assert parse(json.dumps(record, ensure_ascii=False).encode()) == expected


# Fields


def test_fields_are_mapped() -> None:
    names = {"query": "question", "response": "answer", "messages": "chat"}
    assert parse({"question": "q", "answer": "r", "query": "not this", "messages": "nor this"}, **names) == QUESTION
    assert parse({"chat": [USER, ASSISTANT], "messages": "not this"}, **names) == CHAT


def test_one_source_may_hold_chats_and_pairs() -> None:
    mixed = [{"messages": [USER, ASSISTANT]}, {"query": "q", "response": "r"}]
    assert [parse(line(record)) for record in mixed] == [CHAT, QUESTION]


@pytest.mark.parametrize("chat", [None, []], ids=["null", "empty"])
def test_without_a_chat_query_and_response_are_used(chat: Any) -> None:
    assert parse({"messages": chat, "query": "q", "response": "r"}) == QUESTION


def test_a_chat_is_used_instead_of_query_and_response() -> None:
    assert parse({"messages": [USER, ASSISTANT], "query": None, "response": None}) == CHAT
    assert parse({"messages": [USER, ASSISTANT], "query": "q", "response": "r"}) == CHAT


def test_chat_keeps_system_and_all_turns() -> None:
    texts = [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": text, "id": 3} for role, text in texts]
    expected = tuple({"role": role, "content": text} for role, text in texts[:-1])
    assert parse({"messages": messages}) == Conversation(expected, "d")


def test_a_chat_may_be_any_sequence_of_mappings() -> None:  # data sets on the hub give such ones
    assert parse({"messages": (MappingProxyType(USER), MappingProxyType(ASSISTANT))}) == CHAT


# Bad records

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
    (b"null", "expected an object with fields, found NoneType None"),
    (b"[1]", r"expected an object with fields, found list \[1\]"),
    ({"messages": "hi"}, "field 'messages' must be a list of messages, found str 'hi'"),
    ({"messages": {"role": "user"}}, "field 'messages' must be a list of messages, found dict"),
    ({"messages": [USER, "hi"]}, r"messages\[2\] must have role and content, found str 'hi'"),
    ({"messages": [{"role": "user"}, ASSISTANT]}, r"messages\[1\]: field 'content' is missing"),
    ({"messages": [{"content": "u"}, ASSISTANT]}, r"messages\[1\]: field 'role' is missing"),
    ({"messages": [{"role": None, "content": "u"}, ASSISTANT]}, r"messages\[1\]: field 'role' must be text"),
    ({"messages": [USER, {"role": "assistant", "content": ""}]}, r"messages\[2\]: field 'content' is empty"),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, r"messages\[2\]: field 'content' must be text"),
    ({"messages": [USER, {"role": "assistant", "content": [1]}]}, r"messages\[2\]: field 'content' must be text"),
    ({"messages": [USER, ASSISTANT, USER]}, "field 'messages' must end with an assistant message"),
    ({"messages": [ASSISTANT]}, "field 'messages' must end with an assistant message that answers another message"),
]


@pytest.mark.parametrize(("raw", "message"), BAD_RECORDS, ids=range(len(BAD_RECORDS)))
def test_bad_record_names_file_record_and_field(raw: Any, message: str) -> None:
    with pytest.raises(BadRecordError, match=rf"^some/file\.jsonl: record 7: {message}"):
        parse(raw)


def test_fields_are_named_as_the_source_calls_them() -> None:
    with pytest.raises(BadRecordError, match=r"field 'question' is missing; it has \['query', 'response'\]"):
        parse({"response": "r", "query": "q"}, query="question")
    with pytest.raises(BadRecordError, match=r"chat\[1\]: field 'content' is missing"):
        parse({"chat": [{"role": "user"}, ASSISTANT]}, messages="chat")


def test_the_error_that_stands_in_a_records_place_comes_out() -> None:
    with pytest.raises(BadRecordError, match=r"^as it was$"):
        parse(BadRecordError("as it was"))


@pytest.mark.parametrize("escape", [b"\\ud83d", b"\\ude00"], ids=["first_half", "second_half"])
def test_half_a_surrogate_pair_is_a_bad_record(escape: bytes) -> None:
    with pytest.raises(BadRecordError, match="record 7: field 'query' has half a surrogate pair"):
        parse(b'{"query": "' + escape + b'", "response": "r"}')


BAD_LINES = {
    "word": (b'{"query": oops}', r"not valid JSON \(Expecting value, column 11\)"),
    "cut": (b'{"query": "q', r"not valid JSON \(Unterminated string starting at, column 11\)"),
    "two": (b"{} {}", r"not valid JSON \(Extra data, column 4\)"),
    "deep": (b"[" * 100_000, r"not valid JSON \(maximum recursion depth"),
    "long_number": (b"1" * 5000, r"not valid JSON \(Exceeds the limit"),
    "latin": (
        '{"query": "café"}'.encode("latin-1"),
        r"not UTF-8 text \(byte 0xe9 at 14\); save the file again as UTF-8",
    ),
}


@pytest.mark.parametrize("name", sorted(BAD_LINES))
def test_a_line_that_is_no_json_is_a_bad_record(name: str) -> None:
    content, message = BAD_LINES[name]
    with pytest.raises(BadRecordError, match=rf"^some/file\.jsonl: record 7: {message}") as caught:
        parse(content)
    assert "\n" not in str(caught.value)


# WebDataset samples


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"json": b"{oops"}, "not valid JSON"),
        ({"json": b"\xe9"}, "not UTF-8 text"),
        ({"query.txt": b"q\xe9", "response.txt": b"r"}, r"not UTF-8 text \(byte 0xe9 at 1\)"),
    ],
)
def test_bad_members_name_the_sample(members: dict[str, bytes], message: str) -> None:
    with pytest.raises(BadRecordError, match=rf"^some/file\.jsonl: record 7 \(folder/001\): {message}"):
        parse(Sample("folder/001", {**members}))


def test_the_json_member_wins_over_others() -> None:
    sample = Sample("1", {"json": line({"query": "q", "response": "r"}), "query.txt": b"x", "jpg": b"\xff\xd8"})
    assert parse(sample) == QUESTION


@pytest.mark.parametrize("member", ["query.txt", "query"])
def test_members_are_mapped_to_fields_too(member: str) -> None:
    name = member.replace("query", "question")
    assert parse(Sample("1", {name: b"q", "answer.txt": b"r"}), query="question", response="answer") == QUESTION


def test_other_members_may_hold_anything() -> None:
    assert parse(Sample("1", {"query.txt": b"q", "response.txt": b"r", "jpg": b"\xff\xd8"})) == QUESTION


def test_a_record_of_another_kind_may_have_a_key() -> None:
    """As the rows have that `datasets` makes of a WebDataset, and any JSON list or Parquet file may."""
    assert parse({"__key__": "001", "__url__": "a.tar", "query": "q", "response": "r"}) == QUESTION
