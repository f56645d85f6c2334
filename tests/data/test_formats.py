"""Raw records out of files of every kind and hub data sets, and what is said about files that cannot be read."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import Table, parquet

from lit_refusion.data import formats
from lit_refusion.data.formats import SUFFIXES, BadRecordError, read_hub, read_raw
from lit_refusion.data.records import Conversation, Fields, parse_record
from lit_refusion.errors import UserError

FIELDS = Fields(source="mine", query="query", response="response", messages="messages")
RECORDS = [
    {"query": "Où est\u2028Zoë?", "response": "Là.\nIci."},  # U+2028 and a line feed inside a text end no record
    {"query": "1 + 1?", "response": "2"},
    {"query": "\U0001f600", "response": " spaces \t"},
]
BOM = b"\xef\xbb\xbf"


def raw_records(path: Path) -> list[tuple[int, Any]]:
    with path.open("rb") as file:
        return list(read_raw(path, file))


def conversations(path: Path) -> list[Conversation]:
    return [parse_record(raw, FIELDS, where=f"{path}: record {number}") for number, raw in raw_records(path)]


def read_until_error(path: Path) -> tuple[list[int], UserError]:
    """The numbers of the records before the file turned out to be unreadable, and what was said then."""
    numbers: list[int] = []
    with path.open("rb") as file, pytest.raises(UserError) as caught:
        numbers.extend(number for number, _ in read_raw(path, file))
    return numbers, caught.value


def conversation(record: dict[str, str]) -> Conversation:
    return Conversation(({"role": "user", "content": record["query"]},), record["response"])


def lines(records: list[Any]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def json_list(records: list[Any], **style: Any) -> bytes:
    return json.dumps(records, ensure_ascii=False, **style).encode()


def tar(members: list[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def json_members(records: list[Any]) -> bytes:
    return tar([(f"{number:06}.json", json.dumps(record).encode()) for number, record in enumerate(records)])


def text_members(records: list[Any]) -> bytes:
    return tar(
        [
            (f"folder/{number:06}.{field}.txt", record[field].encode())
            for number, record in enumerate(records)
            for field in ("response", "query")
        ]
    )


def rows(records: list[Any]) -> bytes:
    buffer = io.BytesIO()
    parquet.write_table(Table.from_pylist(records), buffer)
    return buffer.getvalue()


PLAIN = {".json": json_list, ".jsonl": lines, ".ndjson": lines, ".parquet": rows, ".tar": json_members}
PACKED = {".gz": gzip.compress, ".zst": zstandard.compress}


def content(suffix: str, records: list[Any]) -> bytes:
    """A file of the kind that the suffix names."""
    for packed, pack in PACKED.items():
        if suffix.endswith(packed):
            return pack(content(suffix.removesuffix(packed), records))
    return PLAIN[suffix](records)


# Every kind gives the same


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_kind_of_file_gives_the_same_conversations(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content(suffix, RECORDS))
    assert conversations(path) == [conversation(record) for record in RECORDS]
    assert [number for number, _ in raw_records(path)] == [1, 2, 3]


VARIANTS: dict[str, Callable[[list[Any]], bytes]] = {
    "bom.json": lambda records: BOM + json_list(records),
    "bom.jsonl": lambda records: BOM + lines(records),
    "bom.json.gz": lambda records: gzip.compress(BOM + json_list(records)),
    "bom.jsonl.zst": lambda records: zstandard.compress(BOM + lines(records)),
    "crlf.jsonl": lambda records: lines(records).replace(b"\n", b"\r\n"),
    "no_last_newline.jsonl": lambda records: lines(records)[:-1],
    "indented.json": lambda records: json_list(records, indent=2),
    "crlf.json": lambda records: json_list(records, indent=2).replace(b"\n", b"\r\n"),
    "space_first.json": lambda records: b"\n  " + json_list(records) + b"\n",
    "escapes.json": lambda records: json.dumps(records, ensure_ascii=True).encode(),
    "two_members.jsonl.gz": lambda records: b"".join(gzip.compress(lines([record])) for record in records),
    "two_frames.jsonl.zst": lambda records: b"".join(zstandard.compress(lines([record])) for record in records),
    "texts.tar": text_members,
    "texts.tar.gz": lambda records: gzip.compress(text_members(records)),
}
VARIANTS["other_members.tar"] = (
    lambda records: tar(
        [("README", b"no sample"), ("a/1.JSON", json.dumps(records[0]).encode())]  # suffixes are written in any case
        + [(f"b/{number}.json", json.dumps(record).encode()) for number, record in enumerate(records[1:])]
    )
)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_variants_of_a_kind_give_the_same_conversations(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(VARIANTS[name](RECORDS))
    assert conversations(tmp_path / name) == [conversation(record) for record in RECORDS]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files_of_many_records_keep_their_order(suffix: str, tmp_path: Path) -> None:
    records = [{"query": f"{number}?", "response": "é" * 50} for number in range(2500)]  # batches, chunks, buffers
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content(suffix, records))
    assert conversations(path) == [conversation(record) for record in records]
    assert [number for number, _ in raw_records(path)] == list(range(1, 2501))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_may_mix_chats_and_pairs(suffix: str, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    records: list[Any] = [{"messages": messages}, {"query": "q", "response": "r"}]
    if suffix == ".parquet":  # has every column in every row, and takes the columns from the first one
        records = [{"query": None, "response": None, "messages": None, **record} for record in records]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content(suffix, records))
    assert conversations(path) == [
        Conversation(({"role": "user", "content": "hi"},), "hello"),
        Conversation(({"role": "user", "content": "q"},), "r"),
    ]


@pytest.mark.parametrize("shift", [0, 1])
def test_a_letter_of_two_bytes_may_lie_across_chunks(shift: int, tmp_path: Path) -> None:
    record = {"query": "x" * shift + "é" * 100_000, "response": "r"}
    (tmp_path / "a.json").write_bytes(json_list([record]))
    assert conversations(tmp_path / "a.json") == [conversation(record)]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_without_records_gives_none(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"a{suffix}").write_bytes(content(suffix, []))
    assert raw_records(tmp_path / f"a{suffix}") == []


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".tar", ".tar.gz"])
def test_memory_does_not_grow_with_the_file(suffix: str, tmp_path: Path) -> None:
    letters = np.random.default_rng(0).integers(97, 123, (10_000, 300)).astype(np.uint8)  # hard to compress
    records = [{"query": row.tobytes().decode(), "response": "It depends." * 20} for row in letters]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content(suffix, records))
    size = len(lines(records))
    del records
    tracemalloc.start()
    try:
        with path.open("rb") as file:
            count = sum(1 for _ in read_raw(path, file))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 10_000
    assert peak < size / 3  # all of it is 6 MB, more as objects; buffers take up to 1 MB


# Record numbers and bad records


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson.gz", ".jsonl.zst"])
def test_record_numbers_are_line_numbers(suffix: str, tmp_path: Path) -> None:
    content = b'{"a": 1}\n\n   \r\n{"a": 2}\n\n'
    (tmp_path / f"a{suffix}").write_bytes(PACKED.get(Path(suffix).suffix, bytes)(content))
    assert raw_records(tmp_path / f"a{suffix}") == [(1, b'{"a": 1}\n'), (4, b'{"a": 2}\n')]


def test_record_numbers_of_a_list_count_its_items(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'[{"a": [1.5, {"b": null}]},\n\n null, "text", []]')
    expected = [(1, {"a": [1.5, {"b": None}]}), (2, None), (3, "text"), (4, [])]
    assert repr(raw_records(tmp_path / "a.json")) == repr(expected)  # a Decimal would be equal to 1.5


GOOD = b'{"query": "q", "response": "r"}'
BAD_LINES = {
    "broken": (b'{"query": oops}', "record 2: not valid JSON"),
    "cut": (b'{"query": "q", "resp', "record 2: not valid JSON"),
    "latin-1": ('{"query": "é"}'.encode("latin-1"), r"record 2: not UTF-8 text \(byte 0xe9 at 11\)"),
    "deep": (b"[" * 100_000, "record 2: not valid JSON"),
    "no object": (b"17", "record 2: expected an object"),
    "null byte": (b'{"query": "\0", "response": "r"}', "record 2: not valid JSON"),
}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize("kind", sorted(BAD_LINES))
def test_a_bad_line_is_one_bad_record_and_the_others_are_read(kind: str, suffix: str, tmp_path: Path) -> None:
    line, message = BAD_LINES[kind]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(PACKED.get(Path(suffix).suffix, bytes)(GOOD + b"\n" + line + b"\n" + GOOD))
    (_, first), (number, bad), (_, last) = raw_records(path)
    assert parse_record(first, FIELDS, where="") == parse_record(last, FIELDS, where="")
    with pytest.raises(BadRecordError, match=message):
        parse_record(bad, FIELDS, where=f"{path}: record {number}")


@pytest.mark.parametrize(
    "end", [b"\n" + GOOD, b"\n", b""], ids=["record_follows", "newline_follows", "nothing_follows"]
)
@pytest.mark.parametrize("length", [101, 199, 200, 201, 1000])  # around multiples of the limit too
def test_a_line_beyond_the_limit_is_one_bad_record(
    length: int, end: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "MAX_LINE", 100)
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b"\n" + b"x" * length + end)
    (first, second, *rest) = raw_records(path)
    assert first == (1, GOOD + b"\n")
    assert second[0] == 2
    with pytest.raises(BadRecordError, match=rf"^{path}: record 2: a line of more than .* MB; split or remove it"):
        parse_record(second[1], FIELDS, where="")
    assert rest == ([(3, GOOD)] if end.endswith(GOOD) else [])


def test_a_line_at_the_limit_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MAX_LINE", len(GOOD) + 1)
    (tmp_path / "a.jsonl").write_bytes((GOOD + b"\n") * 2)
    assert raw_records(tmp_path / "a.jsonl") == [(1, GOOD + b"\n"), (2, GOOD + b"\n")]


def test_an_overlong_line_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MAX_LINE", 2**16)
    (tmp_path / "a.jsonl").write_bytes(b"x" * 2**22)
    tracemalloc.start()
    try:
        assert len(raw_records(tmp_path / "a.jsonl")) == 1
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_a_bad_sample_is_one_bad_record_and_the_others_are_read(name: str, tmp_path: Path) -> None:
    archive = tar([("1.json", GOOD), ("2.json", b"{oops"), ("3.query.txt", b"\xe9"), ("4.json", GOOD)])
    (tmp_path / name).write_bytes(gzip.compress(archive) if name.endswith(".gz") else archive)
    raws = dict(raw_records(tmp_path / name))
    assert sorted(raws) == [1, 2, 3, 4]
    assert parse_record(raws[1], FIELDS, where="") == parse_record(raws[4], FIELDS, where="")
    with pytest.raises(BadRecordError, match=r"a\.tar: record 2 \(2\): not valid JSON"):
        parse_record(raws[2], FIELDS, where="a.tar: record 2")
    with pytest.raises(BadRecordError, match=r"a\.tar: record 3 \(3\): not UTF-8 text"):
        parse_record(raws[3], FIELDS, where="a.tar: record 3")


def test_half_a_surrogate_pair_in_a_list_becomes_a_question_mark(tmp_path: Path) -> None:
    """yajl, behind ijson, replaces it; in JSON lines it is a bad record."""
    (tmp_path / "a.json").write_bytes(b'[{"query": "\\ud83d", "response": "r"}]')
    [conversation] = conversations(tmp_path / "a.json")
    assert conversation.prompt[0]["content"] == "?"


def test_a_list_may_hold_a_record_that_is_nested_too_deep(tmp_path: Path) -> None:
    deep = b"[" * 3000 + b"]" * 3000  # ijson takes memory as the square of the depth: 25 GB at 100 000
    (tmp_path / "a.json").write_bytes(b"[" + deep + b"]")
    with pytest.raises(UserError):
        conversations(tmp_path / "a.json")


def test_parquet_text_that_is_not_utf_8_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    buffers = [None, pyarrow.py_buffer(np.array([0, 1, 2], np.int32).tobytes()), pyarrow.py_buffer(b"q\xe9")]
    query = pyarrow.Array.from_buffers(pyarrow.string(), 2, buffers)
    parquet.write_table(pyarrow.table({"query": query, "response": ["r", "r"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet"):
        conversations(tmp_path / "a.parquet")


# Files that cannot be read

UNREADABLE = {
    "lines.json": (lines(RECORDS), "expected a JSON list of records; if it holds one object a line, name it .jsonl"),
    "object.json": (b'{"query": "a", "response": "b"}', "expected a JSON list of records"),
    "text.json": (b'"text"', "expected a JSON list of records"),
    "empty.json": (b"", "expected a JSON list of records"),
    "utf16.json": (json.dumps(RECORDS).encode("utf-16"), "it is UTF-16 text; save it again as UTF-8"),
    "utf16.jsonl": (lines(RECORDS).decode().encode("utf-16"), "it is UTF-16 text; save it again as UTF-8"),
    "utf16be.jsonl": (b"\xfe\xff" + "{}\n".encode("utf-16-be"), "it is UTF-16 text; save it again as UTF-8"),
    "utf16.jsonl.gz": (gzip.compress("{}\n".encode("utf-16")), "it is UTF-16 text; save it again as UTF-8"),
    "plain.jsonl.gz": (lines(RECORDS), "cannot read it: Not a gzipped file"),
    "plain.jsonl.zst": (lines(RECORDS), "cannot read it: zstd decompressor error"),
    "plain.json.zst": (json_list(RECORDS), "cannot read it: zstd decompressor error"),
    "tar.tar.gz": (json_members(RECORDS), "cannot read it: Not a gzipped file"),
    "text.parquet": (b"PAR1 but not really", "not a readable Parquet file"),
    "cut.parquet": (rows(RECORDS)[:-20], "not a readable Parquet file"),
    "empty.parquet": (b"", "not a readable Parquet file"),
    "text.tar": (b"no tar" * 1000, "cannot read it: damaged or cut off at byte 0 (invalid header)"),
    "empty.tar": (b"", "cannot read it: damaged or cut off at byte 0"),
}


@pytest.mark.parametrize("name", sorted(UNREADABLE))
def test_unreadable_file_is_named_with_its_remedy(name: str, tmp_path: Path) -> None:
    content, message = UNREADABLE[name]
    (tmp_path / name).write_bytes(content)
    numbers, error = read_until_error(tmp_path / name)
    assert numbers == []
    assert str(error).startswith(f"{tmp_path / name}: {message}")
    assert "\n" not in str(error)
    assert not isinstance(error, BadRecordError)  # `on_error: skip` must not skip a whole file


BROKEN_LISTS = {
    "broken": (b'[{"a": 1}, {"a": 2}, {"a": oops}, {"a": 4}]', 2),
    "broken at once": (b"[oops]", 0),
    "cut in a record": (b'[{"a": 1}, {"a": 2}, {"a": 3}, {"a"', 3),
    "cut behind a record": (b'[{"a": 1}, {"a": 2}', 2),
    "cut at once": (b"[", 0),
    "cut after a comma": (b'[{"a": 1},', 1),
    "no comma": (b'[{"a": 1} {"a": 2}]', 1),
    "more behind it": (b'[{"a": 1}] [{"a": 2}]', 1),
    "latin-1": ('[{"a": 1}, {"a": "é"}]'.encode("latin-1"), 1),
}


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".json.zst"])
@pytest.mark.parametrize("kind", sorted(BROKEN_LISTS))
def test_broken_list_says_how_far_it_is_good(kind: str, suffix: str, tmp_path: Path) -> None:
    content, good = BROKEN_LISTS[kind]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(PACKED.get(Path(suffix).suffix, bytes)(content))
    numbers, error = read_until_error(path)
    assert numbers == list(range(1, good + 1))
    assert str(error).startswith(f"{path}: not valid JSON behind record {good} (")
    assert "save it as UTF-8 .jsonl, where on_error=skip passes over bad records" in str(error)
    assert "\n" not in str(error)
    assert not isinstance(error, BadRecordError)


def many_records() -> list[dict[str, str]]:
    letters = np.random.default_rng(0).integers(97, 123, (2000, 100)).astype(np.uint8)  # hard to compress
    return [{"query": "q", "response": row.tobytes().decode()} for row in letters]


@pytest.mark.parametrize(
    "suffix",
    [
        suffix
        for suffix in SUFFIXES
        if suffix not in (".jsonl", ".ndjson")  # one whole line less looks like any other file
    ],
)
@pytest.mark.parametrize("share", [0.01, 0.5, 0.95])
def test_a_cut_file_is_never_taken_for_a_whole_one(share: float, suffix: str, tmp_path: Path) -> None:
    whole = content(suffix, many_records())
    end = int(len(whole) * share)
    if suffix == ".tar":
        end = end // 1024 * 1024 + 600  # in the content of a member, which lies behind its header of 512 bytes
    (tmp_path / f"a{suffix}").write_bytes(whole[:end])
    numbers, error = read_until_error(tmp_path / f"a{suffix}")
    assert len(numbers) < 2000
    assert str(error).startswith(f"{tmp_path / f'a{suffix}'}: ")
    assert not isinstance(error, BadRecordError)


def test_a_gzip_file_without_its_last_bytes_is_not_whole(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(RECORDS))[:-1])
    _, error = read_until_error(tmp_path / "a.jsonl.gz")
    assert "cannot read it: Compressed file ended before the end-of-stream marker was reached; is it whole?" in str(
        error
    )


def test_damaged_gzip_stream_is_named(tmp_path: Path) -> None:
    damaged = bytearray(gzip.compress(lines(RECORDS)))
    damaged[10] ^= 0xFF  # first byte behind the header: an invalid block type
    (tmp_path / "a.jsonl.gz").write_bytes(damaged)
    _, error = read_until_error(tmp_path / "a.jsonl.gz")
    assert str(error).startswith(f"{tmp_path / 'a.jsonl.gz'}: cannot read it: ")


@pytest.mark.parametrize("kind", [".gz", ".zst"])
def test_a_wrong_checksum_is_noticed(kind: str, tmp_path: Path) -> None:
    if kind == ".gz":
        damaged = bytearray(gzip.compress(lines(RECORDS)))
        damaged[-8] ^= 0xFF  # the checksum, before the four bytes of the length
    else:
        damaged = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(lines(RECORDS)))
        damaged[-1] ^= 0xFF
    (tmp_path / f"a.jsonl{kind}").write_bytes(damaged)
    _, error = read_until_error(tmp_path / f"a.jsonl{kind}")
    assert "cannot read it: " in str(error)


def test_damaged_parquet_page_is_named(tmp_path: Path) -> None:
    damaged = bytearray(rows(many_records()))
    damaged[20_000:20_100] = b"\xff" * 100
    (tmp_path / "a.parquet").write_bytes(damaged)
    _, error = read_until_error(tmp_path / "a.parquet")
    assert str(error).startswith(f"{tmp_path / 'a.parquet'}: ")


@pytest.mark.parametrize("damage", ["header", "cut_header"])
def test_a_tar_that_breaks_off_at_a_header_is_not_whole(damage: str, tmp_path: Path) -> None:
    whole = bytearray(json_members(RECORDS))  # a header and a content of 512 bytes each
    if damage == "header":
        whole[1024:1536] = b"x" * 512
    else:
        del whole[1100:]
    (tmp_path / "a.tar").write_bytes(whole)
    _, error = read_until_error(tmp_path / "a.tar")
    assert "a.tar: cannot read it: damaged or cut off at byte 1024" in str(error)


def test_members_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar([("1.json", GOOD), ("2.json", GOOD), ("2.json", GOOD), ("3.json", GOOD)]))
    numbers, error = read_until_error(tmp_path / "a.tar")
    assert numbers == [1]
    assert str(error).startswith(f"{tmp_path / 'a.tar'}: behind sample 1: ")
    assert "2.json: duplicate file name" in str(error)
    assert str(error).endswith("keys must be unique")
    assert not isinstance(error, BadRecordError)


@pytest.mark.parametrize(
    ("module", "extra", "suffix"),
    [("zstandard", "zstd", ".jsonl.zst"), ("zstandard", "zstd", ".json.zst"), ("pyarrow", "parquet", ".parquet")],
)
def test_a_missing_extra_is_named(
    module: str, extra: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"a{suffix}").write_bytes(content(suffix, RECORDS))
    monkeypatch.setitem(sys.modules, module, None)
    _, error = read_until_error(tmp_path / f"a{suffix}")
    assert str(error).startswith(f"{tmp_path / f'a{suffix}'}: reading ")
    assert f"pip install 'lit-refusion[{extra}]'" in str(error)


def test_records_come_before_the_rest_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(json_list(many_records()) + b"garbage")
    with (tmp_path / "a.json").open("rb") as file:
        reading = read_raw(tmp_path / "a.json", file)
        assert next(reading)[0] == 1
        assert file.tell() < (tmp_path / "a.json").stat().st_size  # `blocks` asks the file how far the reading has come


# Hugging Face data sets


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def hub(folder: Path, *, subset: str | None = None, split: str = "train") -> list[tuple[int, Any]]:
    records, total = read_hub(str(folder), subset, split)
    found = list(records)
    assert len(found) == total
    return found


def write_lines(path: Path, records: list[Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(lines(records))


def test_a_saved_data_set_is_read(tmp_path: Path) -> None:
    datasets.Dataset.from_list(RECORDS).save_to_disk(tmp_path / "saved")
    assert hub(tmp_path / "saved") == [(1, RECORDS[0]), (2, RECORDS[1]), (3, RECORDS[2])]


@pytest.mark.parametrize(("split", "records"), [("train", RECORDS), ("test", RECORDS[:1])])
def test_the_split_of_a_saved_collection_is_chosen(split: str, records: list[Any], tmp_path: Path) -> None:
    splits = {"train": RECORDS, "test": RECORDS[:1]}
    collection = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()})
    collection.save_to_disk(tmp_path / "saved")
    assert hub(tmp_path / "saved", split=split) == list(enumerate(records, start=1))


@pytest.mark.parametrize(("split", "records"), [("train", RECORDS), ("test", RECORDS[:1]), ("train[1:]", RECORDS[1:])])
def test_the_split_of_a_folder_of_files_is_chosen(split: str, records: list[Any], tmp_path: Path) -> None:
    write_lines(tmp_path / "folder" / "train.jsonl", RECORDS)
    write_lines(tmp_path / "folder" / "test.jsonl", RECORDS[:1])
    assert hub(tmp_path / "folder", split=split) == list(enumerate(records, start=1))


def test_the_records_of_the_hub_parse_like_others(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    both: list[Any] = [{"messages": messages}, {"query": "q", "response": "r"}]
    rows = [{"query": None, "response": None, "messages": None, **record} for record in both]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    assert [parse_record(raw, FIELDS, where="") for _, raw in hub(tmp_path / "saved")] == [
        Conversation(({"role": "user", "content": "hi"},), "hello"),
        Conversation(({"role": "user", "content": "q"},), "r"),
    ]


def test_the_subset_is_chosen(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for name, record in zip(("de", "fr"), RECORDS):
        write_lines(folder / f"{name}.jsonl", [record])
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("de", "fr"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert hub(folder, subset="fr") == [(1, RECORDS[1])]
    with pytest.raises(UserError, match=r"folder, subset default, split train: cannot load it: Config name is missing"):
        hub(folder)


@pytest.mark.parametrize(
    ("name", "subset", "split", "message"),
    [
        ("collection", None, "dev", "subset default, split dev: cannot load it: 'dev'"),
        ("folder", None, "dev", r'cannot load it: Unknown split "dev"\. Should be one of'),
        ("folder", "fr", "train", "subset fr, split train: cannot load it: BuilderConfig 'fr' not found"),
        ("none", None, "train", "cannot load it: Couldn't find any data file"),
        ("empty", None, "train", "cannot load it: "),
    ],
)
def test_what_cannot_be_loaded_is_named_in_one_line(
    name: str, subset: str | None, split: str, message: str, tmp_path: Path
) -> None:
    write_lines(tmp_path / "folder" / "train.jsonl", RECORDS)
    datasets.DatasetDict({"train": datasets.Dataset.from_list(RECORDS)}).save_to_disk(tmp_path / "collection")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=message) as caught:
        hub(tmp_path / name, subset=subset, split=split)
    assert str(caught.value).startswith(f"data.sources.hub={tmp_path / name}, subset ")
    assert "\n" not in str(caught.value)


def test_a_set_that_the_hub_cannot_give_is_named_in_one_line() -> None:
    with pytest.raises(UserError, match=r"^data\.sources\.hub=no/such-set, subset .*: cannot load it: ") as caught:
        read_hub("no/such-set", None, "train")
    assert "\n" not in str(caught.value)


def test_a_long_error_of_the_library_is_quoted_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("\nIt broke\nbecause of this\n")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match=r"^data\.sources\.hub=x/y, .*: cannot load it: It broke$"):
        read_hub("x/y", None, "train")


def test_a_saved_data_set_has_no_subsets(tmp_path: Path) -> None:
    """Two subsets would give every record twice."""
    datasets.Dataset.from_list(RECORDS).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match="subset"):
        read_hub(str(tmp_path / "saved"), "fr", "train")


def test_without_the_hub_extra_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"^data\.sources\.hub=x/y: needs an extra: pip install 'lit-refusion\[hub\]'"):
        read_hub("x/y", None, "train")
