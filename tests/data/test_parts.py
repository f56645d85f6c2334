"""Blocks of records and the parts made of them: sizes, tokens, and what is not done twice."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from pyarrow import Table, parquet
from transformers import PreTrainedTokenizerBase

from lit_refusion.chat import PromptFormat
from lit_refusion.data import parts
from lit_refusion.data.formats import BadRecordError
from lit_refusion.data.parts import Block, Part, Tokenizing, blocks, make_part, packed
from lit_refusion.data.records import Fields
from lit_refusion.errors import UserError
from lit_refusion.examples import token_digest
from lit_refusion.tokenizer import tokenizer_fingerprint
from tests.conftest import make_source as source
from tests.conftest import make_tokenizer

FIELDS = Fields(source="mine", query="query", response="response", messages="messages")
CHAT = PromptFormat(style="chat", template_kwargs={})
PLAIN = PromptFormat(style="plain", template_kwargs={})


def pairs(count: int) -> list[dict[str, str]]:
    return [{"query": f"{number} + 1?", "response": f"It is {number + 1}."} for number in range(count)]


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def numbers(found: list[Block]) -> list[list[int]]:
    return [[number for number, _ in block.records] for block in found]


# Blocks


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "BLOCK_SIZE", 2)


@pytest.mark.usefixtures("small_blocks")
def test_blocks_hold_consecutive_records_and_say_where_they_end(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", pairs(5))
    lines = path.read_bytes().splitlines(keepends=True)
    found = list(blocks(source(path, query="question")))
    assert [block.records for block in found] == [
        [(1, lines[0]), (2, lines[1])],
        [(3, lines[2]), (4, lines[3])],
        [(5, lines[4])],
    ]
    assert [block.position for block in found] == [sum(map(len, lines[:end])) for end in (2, 4, 5)]
    for block in found:
        assert (block.origin, block.total) == (str(path), path.stat().st_size)
        assert block.fields == replace(FIELDS, query="question")


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json"])
def test_positions_of_buffered_files_rise_to_the_total(name: str, tmp_path: Path) -> None:
    records = [{"query": number, "response": np.random.default_rng(number).bytes(9000).hex()} for number in range(30)]
    text = json.dumps(records) if name == "a.json" else "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    found = list(blocks(source(tmp_path / name)))
    positions = [block.position for block in found]
    assert positions == sorted(positions)
    assert positions[0] < positions[len(positions) // 2] < positions[-1] == found[0].total
    assert found[0].total == (tmp_path / name).stat().st_size


@pytest.mark.usefixtures("small_blocks")
def test_positions_of_parquet_rise_to_the_total(tmp_path: Path) -> None:
    parquet.write_table(Table.from_pylist(pairs(2000)), tmp_path / "a.parquet", row_group_size=100)
    found = list(blocks(source(tmp_path / "a.parquet")))
    assert found[0].position < found[len(found) // 2].position < found[-1].position == found[0].total


@pytest.mark.parametrize(("count", "expected"), [(1, [[1]]), (2, [[1, 2]]), (4, [[1, 2], [3, 4]])])
@pytest.mark.usefixtures("small_blocks")
def test_a_full_block_has_no_empty_one_behind_it(count: int, expected: list[list[int]], tmp_path: Path) -> None:
    assert numbers(list(blocks(source(write(tmp_path / "a.jsonl", pairs(count)))))) == expected


@pytest.mark.parametrize("content", ["", "\n \n\n"])
def test_a_file_without_records_gives_one_empty_block(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    [block] = blocks(source(tmp_path / "a.jsonl"))
    assert (block.records, block.origin) == ([], str(tmp_path / "a.jsonl"))
    assert block.position == block.total == len(content)


@pytest.mark.usefixtures("small_blocks")
def test_blocks_follow_the_order_of_the_files_and_never_span_two(tmp_path: Path) -> None:
    b, a, c = (write(tmp_path / f"{name}.jsonl", pairs(count)) for name, count in (("b", 3), ("a", 0), ("c", 1)))
    found = list(blocks(source(b, a, c)))
    assert [block.origin for block in found] == [str(b), str(b), str(a), str(c)]
    assert numbers(found) == [[1, 2], [3], [], [1]]


def test_many_bytes_end_a_block_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", pairs(1) * 7)
    monkeypatch.setattr(parts, "BLOCK_BYTES", 2 * path.stat().st_size // 7 + 1)  # a bit more than two lines
    assert numbers(list(blocks(source(path)))) == [[1, 2, 3], [4, 5, 6], [7]]


@pytest.mark.usefixtures("small_blocks")
def test_blocks_come_before_the_rest_of_the_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"query": 1}, {"query": 2}, {"query": oops}]')
    reading = blocks(source(tmp_path / "a.json"))
    assert next(reading).records == [(1, {"query": 1}), (2, {"query": 2})]
    with pytest.raises(UserError, match="not valid JSON behind record 2"):
        next(reading)


def test_a_file_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, mode: str) -> None:  # chmod does not keep root out
        raise PermissionError(13, "Permission denied", str(self))

    path = write(tmp_path / "a.jsonl", pairs(1))
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=rf"^{path}: no permission to read it; chmod it"):
        list(blocks(source(path)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.sources\[mine\]\.files=.*none\.jsonl: no such file"):
        list(blocks(source(tmp_path / "none.jsonl")))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_blocks_are_the_same_bytes_each_time_and_whatever_is_kept_of_them(name: str, tmp_path: Path) -> None:
    path = tmp_path / name  # parts of an interrupted run are found again by these bytes
    if name == "a.parquet":
        parquet.write_table(Table.from_pylist(pairs(50)), path)
    else:
        path.write_text(json.dumps(pairs(50)) if name == "a.json" else "".join(f"{json.dumps(p)}\n" for p in pairs(50)))
    first, second = source(path), source(path, weight=2.5, max_examples=3, max_tokens=20, deduplicate=True)
    contents = [[packed(block) for block in blocks(one)] for one in (first, first, second)]
    assert contents[0] == contents[1] == contents[2]


def test_a_packed_block_depends_on_its_content_alone() -> None:
    name = "".join(["que", "ry"])  # equal to the literal, but another object, which a pickle tells apart
    one, other = (
        Block(fields=FIELDS, origin="a", records=[(1, {"query": "q"}), (2, {key: "q"})], position=1, total=1)
        for key in ("query", name)
    )
    assert one == other
    assert packed(one) == packed(other)
    longer = replace(one, position=5, total=9)  # the file has grown behind the block
    assert packed(longer) == packed(one)
    assert pickle.loads(packed(longer)) == replace(one, position=0, total=0)


def test_an_error_survives_the_packing() -> None:
    record = (1, BadRecordError("a.jsonl: record 1: too long"))
    block = pickle.loads(packed(Block(fields=FIELDS, origin="a", records=[record], position=1, total=1)))
    [(number, error)] = block.records
    assert (number, type(error), str(error)) == (1, BadRecordError, "a.jsonl: record 1: too long")


@pytest.mark.usefixtures("small_blocks")
def test_a_hub_data_set_is_counted_in_records(tmp_path: Path) -> None:
    datasets.Dataset.from_list(pairs(3)).save_to_disk(tmp_path / "saved")
    found = list(blocks(source(hub=str(tmp_path / "saved"))))
    assert [record for block in found for record in block.records] == list(enumerate(pairs(3), start=1))
    assert [(block.position, block.total, block.origin) for block in found] == [
        (2, 3, str(tmp_path / "saved")),
        (3, 3, str(tmp_path / "saved")),
    ]


@pytest.mark.usefixtures("small_blocks")
def test_subsets_follow_one_another_in_the_order_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, count in (("de", 1), ("fr", 3)):
        write(folder / f"{name}.jsonl", [{"query": name, "response": str(number)} for number in range(count)])
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("de", "fr"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    found = list(blocks(source(hub=str(folder), subsets=("fr", "de"))))
    assert [block.origin for block in found] == [f"{folder}/fr", f"{folder}/fr", f"{folder}/de"]
    assert [(block.position, block.total) for block in found] == [(2, 3), (3, 3), (1, 1)]
    records = [(number, raw["query"], raw["response"]) for block in found for number, raw in block.records]
    assert records == [(1, "fr", "0"), (2, "fr", "1"), (3, "fr", "2"), (1, "de", "0")]


# Parts

Make = Callable[..., Part]


@pytest.fixture
def settings(tokenizer: PreTrainedTokenizerBase, tokenizer_folder: Path) -> Tokenizing:
    fingerprint = tokenizer_fingerprint(tokenizer)
    return Tokenizing(tokenizer=str(tokenizer_folder), fingerprint=fingerprint, prompt_format=CHAT, dtype="uint16")


@pytest.fixture
def make(settings: Tokenizing, tmp_path: Path) -> Make:
    """The part of some records, with other settings or another block where wanted."""
    folder = tmp_path / "parts"
    folder.mkdir()

    def make(records: list[Any], *, block: dict[str, Any] | None = None, **changes: Any) -> Part:
        lines = [raw if isinstance(raw, bytes) else json.dumps(raw).encode() for raw in records]
        values = {"fields": FIELDS, "origin": "a.jsonl", "records": list(enumerate(lines, start=1))}
        made = Block(**{**values, "position": 9, "total": 9, **(block or {})})
        return make_part(packed(made), replace(settings, **changes), str(folder))

    return make


def examples(part: Part, dtype: str = "uint16") -> Iterator[tuple[list[int], list[int]]]:
    """The token ids of every prompt and response."""
    tokens = np.fromfile(part.tokens_path, dtype)
    entries = part.entries()
    assert len(tokens) == entries["length"].sum()
    for entry, end in zip(entries, np.cumsum(entries["length"]), strict=True):
        own = tokens[end - entry["length"] : end].tolist()
        yield own[: entry["prompt_length"]], own[entry["prompt_length"] :]


def keys(part: Part) -> list[int]:
    return part.entries()["key"].tolist()


def files(part: Part) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(part.folder).iterdir()}


def chat_prompt(query: str) -> str:
    return f"<|im_start|>user\n{query}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("batch", [1, 3, 256])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_are_those_of_the_prompt_then_of_the_response_and_its_end(
    batch: int, dtype: str, make: Make, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "TOKENIZE_BATCH", batch)
    part = make(pairs(7), dtype=dtype)
    encode = tokenizer.backend_tokenizer.encode
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert list(examples(part, dtype)) == [
        (encode(chat_prompt(pair["query"])).ids, [*encode(pair["response"]).ids, end]) for pair in pairs(7)
    ]
    assert (part.read, part.bad, part.errors) == (7, 0, ())


def test_digests_are_those_of_the_tokens(make: Make) -> None:
    part = make(pairs(3))
    expected = [token_digest(np.array([*prompt, *response]), len(prompt)) for prompt, response in examples(part)]
    assert part.entries()["digest"].tolist() == expected
    assert make(pairs(3), dtype="uint32").entries()["digest"].tolist() == expected  # whatever they are written as


def test_chats_and_pairs_are_written_out_by_the_format(make: Make, tokenizer: PreTrainedTokenizerBase) -> None:
    turns = [("system", "Short."), ("user", "Où?"), ("assistant", "Là."), ("user", "When?"), ("assistant", "Now.")]
    chat = {"messages": [{"role": role, "content": text} for role, text in turns]}
    records = [chat, *pairs(1)]

    def prompts(part: Part) -> list[str]:
        return [tokenizer.decode(prompt) for prompt, _ in examples(part)]

    written = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns[:-1])
    assert prompts(make(records)) == [f"{written}<|im_start|>assistant\n", chat_prompt("0 + 1?")]
    assert prompts(make(records, prompt_format=PLAIN)) == ["Short.Où?Là.When?", "0 + 1?"]


def test_bad_records_are_counted_and_the_first_ten_are_listed(make: Make) -> None:
    bad = [{"query": "q"}, b"{oops", *[{"query": "", "response": "r"}] * 10]
    part = make([*pairs(1), *bad, *pairs(2)])
    assert (part.read, part.bad, len(part.entries())) == (15, 12, 3)
    assert [error.split(":")[:2] for error in part.errors] == [["a.jsonl", f" record {n}"] for n in range(2, 12)]
    assert "field 'response' is missing" in part.errors[0]
    assert "not valid JSON" in part.errors[1]


def test_an_error_in_a_records_place_is_a_bad_record(make: Make) -> None:
    line = json.dumps(pairs(1)[0]).encode()
    part = make([], block={"records": [(1, line), (2, BadRecordError("a.jsonl: record 2: too long")), (3, line)]})
    assert (part.read, part.bad, part.errors, len(part.entries())) == (3, 1, ("a.jsonl: record 2: too long",), 2)


@pytest.mark.parametrize("records", [[], [b"{oops"]], ids=["none", "only_bad_ones"])
def test_a_part_may_hold_no_example(records: list[bytes], make: Make) -> None:
    part = make(records)
    assert part.entries().dtype == parts.PART_DTYPE
    assert (len(part.entries()), part.tokens_path.read_bytes()) == (0, b"")
    assert (part.read, part.bad) == (len(records), len(records))


@pytest.mark.parametrize("token", ["<|im_end|>", "<|mask|>", "<|endoftext|>"])
@pytest.mark.parametrize("place", ["query", "response"])
def test_special_tokens_in_a_text_make_a_bad_record(token: str, place: str, make: Make) -> None:
    part = make([{"query": "q", "response": "r", place: f"a{token}b"}, *pairs(1)])
    assert (part.bad, len(part.entries())) == (1, 1)
    assert f"a.jsonl: record 1: its text holds the special token {token}; remove it" in part.errors[0]


@pytest.fixture
def templated(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """The settings of a tokenizer with another chat template."""

    def save(template: str) -> dict[str, str]:
        tokenizer = make_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "templated")
        return {"tokenizer": str(tmp_path / "templated"), "fingerprint": tokenizer_fingerprint(tokenizer)}

    return save


def test_what_the_template_refuses_is_a_bad_record(make: Make, templated: Callable[[str], dict[str, str]]) -> None:
    template = "{% if 'x' in messages[0].content %}{{ raise_exception('no x') }}{% endif %}{{ messages[0].content }}"
    part = make([*pairs(1), {"query": "x", "response": "r"}], **templated(template))
    assert (part.bad, len(part.entries())) == (1, 1)
    assert part.errors == ("a.jsonl: record 2: the tokenizer's chat template refuses it: no x",)


def test_variables_that_the_template_cannot_use_stop_the_work(
    make: Make, templated: Callable[[str], dict[str, str]]
) -> None:
    changes: dict[str, Any] = templated("{{ messages[0].content + count }}")
    with pytest.raises(UserError, match=r"^data\.prompt_format\.template_kwargs: the chat template") as caught:
        make(pairs(1), prompt_format=PromptFormat(style="chat", template_kwargs={"count": 3}), **changes)
    assert not isinstance(caught.value, BadRecordError)  # it would be the same for every record


def test_a_tokenizer_that_changed_in_its_place_is_loaded_again(
    make: Make, templated: Callable[[str], dict[str, str]], tokenizer: PreTrainedTokenizerBase
) -> None:
    for word in ("one", "two"):  # in one folder, within one process
        part = make(pairs(1), **templated(word))
        assert [tokenizer.decode(prompt) for prompt, _ in examples(part)] == [word]


# Keys


def test_the_same_text_has_the_same_key_wherever_it_comes_from(make: Make) -> None:
    other = Fields(source="other", query="question", response="answer", messages="chat")
    renamed = [{"question": pair["query"], "answer": pair["response"]} for pair in reversed(pairs(3))]
    chats = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": r}]}
        for q, r in (pair.values() for pair in pairs(3))
    ]
    expected = keys(make(pairs(3)))
    assert keys(make(renamed, block={"fields": other, "origin": "b.jsonl"})) == expected[::-1]
    assert keys(make(chats)) == expected
    assert keys(make(pairs(3), prompt_format=PLAIN, dtype="uint32")) == expected


def test_other_texts_have_other_keys(make: Make) -> None:
    texts = [("ab", "c"), ("a", "bc"), ("c", "ab"), ("abc", " c"), ("ab", "c ")]
    found = keys(make([{"query": query, "response": response} for query, response in texts]))
    assert len(set(found)) == len(texts)


def test_other_roles_make_other_keys(make: Make) -> None:
    answer = {"role": "assistant", "content": "a"}
    records = [{"messages": [{"role": role, "content": "q"}, answer]} for role in ("user", "system")]
    first, second = keys(make(records))
    assert first != second


# Made once


def refuse_to_tokenize(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(parts, "encode", fail)
    monkeypatch.setattr(parts, "encode_responses", fail)


def test_the_same_block_is_not_tokenised_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [*pairs(3), b"{oops"]
    first = make(records)
    before = files(first)
    refuse_to_tokenize(monkeypatch)
    assert make(records) == first
    assert files(first) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_format": PLAIN},
        {"prompt_format": PromptFormat(style="chat", template_kwargs={"enable_thinking": False})},
        {"dtype": "uint32"},
        {"fingerprint": "another"},
        {"block": {"fields": replace(FIELDS, messages="chat")}},
        {"block": {"origin": "b.jsonl"}},
        {"records": pairs(2)},
        {"records": pairs(3)[::-1]},
        {"records": [*pairs(2), {**pairs(3)[2], "id": 1}]},
    ],
    ids=str,
)
def test_other_settings_and_other_content_make_another_part(changes: dict[str, Any], make: Make) -> None:
    first = make(pairs(3))
    before = files(first)
    second = make(**{"records": pairs(3), **changes})
    assert second.name != first.name
    after = files(first)
    assert {name: after[name] for name in before} == before  # the first part still stands
    assert len(after) == 2 * len(before)


def test_parts_of_another_format_are_not_used(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make(pairs(3))
    monkeypatch.setattr(parts, "FORMAT", parts.FORMAT + 1)
    assert make(pairs(3)).name != first.name


def test_what_is_kept_of_a_source_does_not_change_its_parts(
    settings: Tokenizing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", pairs(3))
    plain, filtered = source(path), source(path, weight=0.5, max_examples=2, max_tokens=9, deduplicate=True)
    [block] = blocks(plain)
    first = make_part(packed(block), settings, str(tmp_path))
    refuse_to_tokenize(monkeypatch)
    [block] = blocks(filtered)
    assert make_part(packed(block), settings, str(tmp_path)) == first


class KilledError(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize(("module", "name", "call"), [(np, "save", 1), *((Path, "replace", n) for n in (1, 2, 3))])
def test_a_part_that_was_cut_short_is_made_anew(
    module: Any, name: str, call: int, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    work = getattr(module, name)

    def die(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KilledError
        return work(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, die)
        with pytest.raises(KilledError):
            make(pairs(3))
    for path in (tmp_path / "parts").iterdir():
        path.write_bytes(path.read_bytes()[:-5])  # and what was written did not all reach the disk
    part = make(pairs(3))
    again = files(part)
    for path in (tmp_path / "parts").iterdir():
        path.unlink()
    assert files(make(pairs(3))) == again


def test_without_its_report_a_part_is_made_anew(make: Make) -> None:
    part = make(pairs(3))
    whole = files(part)
    (Path(part.folder) / f"{part.name}.json").unlink()
    part.tokens_path.write_bytes(b"cut")
    assert make(pairs(3)) == part
    assert files(part) == whole


@pytest.mark.parametrize(("module", "name", "call"), [(np, "save", 1), *((Path, "replace", n) for n in (1, 2, 3))])
def test_two_processes_may_make_the_same_part(
    module: Any, name: str, call: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As happens where two patterns match the same file."""
    calls = 0
    work = getattr(module, name)

    def work_after_the_other(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            with monkeypatch.context() as patch:
                patch.setattr(module, name, work)
                patch.setattr(os, "getpid", lambda: 1)
                others.append(make(pairs(3)))
        return work(*arguments)

    others: list[Part] = []
    monkeypatch.setattr(module, name, work_after_the_other)
    part = make(pairs(3))
    assert others == [part]
    assert len(list(examples(part))) == 3
    assert len(files(part)) == 3  # nothing is left of either but the part
