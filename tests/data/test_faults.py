"""What a user sees when data, disk or network are at fault: one line that names the culprit and the remedy.

Each fault is one entry of a table: how to bring it about, the command, and what the line must hold.
`docs/data.md` shows the same table in words.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from lit_refusion.cli import main
from lit_refusion.data import formats, remote
from lit_refusion.new_folder import resumable_folder
from tests.conftest import ARCHITECTURES, make_tokenizer

RECORDS = [{"query": f"What is {a} + 1?", "response": f"The answer is {a + 1}."} for a in range(40)]
LINES = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)
TINY = [f"++backbone.architecture.{name}={value}" for name, value in ARCHITECTURES["qwen3"].items()]

Fault = tuple[Callable[["Place"], list[str]], list[str]]
FAULTS: dict[str, Fault] = {}
"""name: (brings the fault about and returns further settings, what the line must hold)."""


class Place:
    """The folder of one test: good records, a tokenizer, prepared data, and commands over them."""

    def __init__(self, folder: Path, tokenizer: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.tokenizer, self.data, self.monkeypatch = folder, tokenizer, folder / "data", monkeypatch
        shutil.copytree(data, self.data)
        self.out = folder / "out"

    def file(self, name: str, content: bytes) -> list[str]:
        """Settings that read a file of this content."""
        (self.folder / name).write_bytes(content)
        return [f"data.sources.0.files=[{self.folder / name}]"]

    def records(self, *records: Any) -> list[str]:
        return self.file("r.jsonl", LINES + b"".join(json.dumps(record).encode() + b"\n" for record in records))

    def prepare(self, *settings: str) -> list[str]:
        (self.folder / "good.jsonl").write_bytes(LINES)
        good = f"data.sources.0.files=[{self.folder}/good.jsonl]"
        where = [f"data.folder={self.out}", f"data.tokenizer={self.tokenizer}", "num_workers=0"]
        return ["prepare", "data=files", good, *where, *settings]

    def train(self, *settings: str) -> list[str]:
        where = ["data=prepared", f"data.folder={self.data}", f"run={self.folder}/run", *TINY]
        size = ["trainer.max_steps=1", "trainer.global_batch_size=8", "loader.micro_batch_size=8"]
        quiet = ["trainer.loggers=[]", "trainer.progress=none", "trainer.accelerator=cpu"]
        return ["train", *where, *size, *quiet, "loader.validation_fraction=0", *settings]


def fault(name: str, *parts: str) -> Callable[[Callable[[Place], list[str]]], Callable[[Place], list[str]]]:
    def add(make: Callable[[Place], list[str]]) -> Callable[[Place], list[str]]:
        FAULTS[name] = (make, list(parts))
        return make

    return add


def tar(*members: tuple[str, bytes]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return content.getvalue()


def edit(path: Path, change: Callable[[bytearray], Any]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


# Files of records

FILES: dict[str, tuple[str, bytes, list[str]]] = {
    "broken JSON line": ("r.jsonl", LINES + b'{"query": \n', ["r.jsonl: record 41", "not valid JSON"]),
    "line of the wrong encoding": (
        "r.jsonl",
        LINES + '{"query": "ü"}'.encode("latin-1"),
        ["record 41", "0xfc", "UTF-8"],
    ),
    "UTF-16 file": ("r.jsonl", LINES.decode().encode("utf-16"), ["r.jsonl", "UTF-16", "save it again as UTF-8"]),
    "empty file": ("r.jsonl", b"", ["r.jsonl", "no record in it", "remove it from data.sources[files]"]),
    "object instead of a list": ("r.json", b'{"query": "q"}', ["r.json", "expected a JSON list", ".jsonl"]),
    "list cut off": ("r.json", json.dumps(RECORDS).encode()[:-20], ["r.json", "not valid JSON behind record 39"]),
    "gzip cut off": ("r.jsonl.gz", gzip.compress(LINES)[:-20], ["r.jsonl.gz", "is it whole?"]),
    "zstd damaged": ("r.jsonl.zst", b"no zstd" * 40, ["r.jsonl.zst", "is it whole?"]),
    "zstd cut off": ("r.jsonl.zst", zstandard.compress(LINES)[:-20], ["r.jsonl.zst"]),
    "Parquet damaged": ("r.parquet", b"PAR1" + bytes(100), ["r.parquet", "not a readable Parquet file"]),
    "tar cut off": ("r.tar", tar(*((f"{i}.json", LINES[:60]) for i in range(9)))[:2000], ["r.tar", "is it whole?"]),
    "duplicate ids in a tar": (
        "r.tar",
        tar(("0.json", b"{}"), ("0.json", b"{}")),
        ["r.tar: behind sample 0", "duplicate", "keys must be unique"],
    ),
    "unknown kind of file": ("r.csv", b"query,response\n", ["r.csv", "unknown kind of file", ".jsonl"]),
}
for file_name, (file_kind, file_content, file_parts) in FILES.items():
    FAULTS[file_name] = (
        lambda place, kind=file_kind, content=file_content: place.prepare(*place.file(kind, content)),
        file_parts,
    )

# Records

BAD_RECORDS: dict[str, tuple[Any, list[str]]] = {
    "null field": ({"query": "q", "response": None}, ["record 41", "'response' must be text", "NoneType"]),
    "missing field": ({"question": "q", "response": "r"}, ["record 41", "'query' is missing", "question", ".query"]),
    "neither of two schemas": ({"text": "t"}, ["record 41", "'query' is missing", "it has ['text']"]),
    "record that is no object": ([1, 2], ["record 41", "expected an object"]),
    "chat without an answer": (
        {"messages": [{"role": "user", "content": "q"}]},
        ["record 41", "'messages'", "end with an assistant message"],
    ),
    "special token in the text": (
        {"query": "q", "response": "<|im_end|>"},
        ["record 41", "special token <|im_end|>", "remove it"],
    ),
}
for record_name, (record, record_parts) in BAD_RECORDS.items():
    FAULTS[record_name] = (lambda place, bad=record: place.prepare(*place.records(bad)), record_parts)


@fault("gigantic record", "record 41", "more than 0 MB", "split or remove it")
def _(place: Place) -> list[str]:
    place.monkeypatch.setattr(formats, "MAX_LINE", 1000)
    return place.prepare(*place.records({"query": "q" * 2000, "response": "r"}))


# Settings of prepare

SETTINGS: dict[str, tuple[list[str], list[str]]] = {
    "no such file": (["data.sources.0.files=[nowhere/*.jsonl]"], ["nowhere/*.jsonl", "no such file"]),
    "no such tokenizer": (["data.tokenizer=nowhere"], ["tokenizer=nowhere", "give a folder or a hub id"]),
    "all examples dropped": (
        ["data.max_length=3"],
        ["no example is left", "longer than max_length", "data.max_length"],
    ),
    "fewer examples than asked for": (["data.num_examples=41"], ["data.num_examples=41", "only 40"]),
    "files and hub": (["data.sources.0.hub=a/b"], ["data.sources[files]", "either", "hub=a/b"]),
    "hub data set that is not there": (
        ["data.sources.0.hub=./nowhere", "data.sources.0.files=[]"],
        ["data.sources.hub=./nowhere", "cannot load it"],
    ),
    "negative weight": (["data.sources.0.weight=-1"], ["data.sources[files].weight=-1", "negative"]),
}
for setting_name, (extra, setting_parts) in SETTINGS.items():
    FAULTS[setting_name] = (lambda place, extra=extra: place.prepare(*extra), setting_parts)


@fault("folder that exists", "data.folder=", "exists already", "another folder")
def _(place: Place) -> list[str]:
    place.out.mkdir()
    return place.prepare()


# The disk


@fault("disk full", "data.folder=", "No space left", "run the command again", ".out.partial")
def _(place: Place) -> list[str]:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    place.monkeypatch.setattr("lit_refusion.data.shard_writing.webdataset.TarWriter", full)
    return place.prepare()


@fault("no permission to write", "data.folder=", "Permission denied")
def _(place: Place) -> list[str]:
    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(place.out))

    place.monkeypatch.setattr(Path, "mkdir", denied)
    return place.prepare()


@fault("no permission to read", "r.jsonl", "no permission to read it", "chmod")
def _(place: Place) -> list[str]:
    original, settings = Path.open, place.records()

    def denied(path: Path, *arguments: Any, **keywords: Any) -> Any:
        if path.name == "r.jsonl":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original(path, *arguments, **keywords)

    command = place.prepare(*settings)
    place.monkeypatch.setattr(Path, "open", denied)
    return command


@fault("two processes on one folder", "data.folder=", "another process is writing it", "wait")
def _(place: Place) -> list[str]:
    held = resumable_folder(place.out, setting="data.folder")
    held.__enter__()
    place.monkeypatch.setattr(place, "held", held, raising=False)  # keeps the lock until the test ends
    return place.prepare()


# Prepared data


@fault("manifest missing", "manifest.json", "no prepared data here", "lit-refusion prepare")
def _(place: Place) -> list[str]:
    (place.data / "manifest.json").unlink()
    return place.train()


@fault("manifest broken", "manifest.json", "not a manifest of this version", "prepare the data again")
def _(place: Place) -> list[str]:
    (place.data / "manifest.json").write_text("{")
    return place.train()


@fault("manifest of another version", "manifest.json", "format version 1, expected 2", "prepare the data again")
def _(place: Place) -> list[str]:
    manifest = json.loads((place.data / "manifest.json").read_text())
    (place.data / "manifest.json").write_text(json.dumps({**manifest, "version": 1}))
    return place.train()


@fault("shard missing", "shard-00001.tar", "missing", "put it back")
def _(place: Place) -> list[str]:
    (place.data / "shard-00001.tar").unlink()
    return place.train()


@fault("shard cut off", "shard-00001.tar", "cut off", "prepare the data again")
def _(place: Place) -> list[str]:
    os.truncate(place.data / "shard-00001.tar", 1000)
    return place.train()


def _damage(place: Place) -> None:
    index = np.load(place.data / "index.npy")
    for shard in range(2):
        offsets = index["offset"][shard * 20 : shard * 20 + 20]
        edit(
            place.data / f"shard-{shard:05d}.tar",
            lambda b, offsets=offsets: [b.__setitem__(o + 3, 99) for o in offsets],
        )


@fault("shard damaged, seen at the read", "shard-0000", "is damaged", "lit-refusion prepare verify")
def _(place: Place) -> list[str]:
    _damage(place)
    return place.train()


@fault("shard damaged, seen by a loader process", "shard-0000", "is damaged", "lit-refusion prepare verify")
def _(place: Place) -> list[str]:
    _damage(place)
    return place.train("loader.num_workers=1")


@fault("index cut off", "index.npy", "cut off", "prepare the data again")
def _(place: Place) -> list[str]:
    os.truncate(place.data / "index.npy", 300)
    return place.train()


@fault("token counts missing", "token_counts.npy", "missing")
def _(place: Place) -> list[str]:
    (place.data / "token_counts.npy").unlink()
    return place.train()


@fault("tokenizer of another model", "its tokenizer", "is not the one that prepared", "prepare it again")
def _(place: Place) -> list[str]:
    make_tokenizer(mask_token="<|m|>").save_pretrained(place.folder / "other")
    (place.folder / "other" / "config.json").write_text(json.dumps(ARCHITECTURES["qwen3"]))
    return place.train("~backbone.architecture", "+backbone.architecture=null", f"backbone.path={place.folder}/other")


@fault("fewer examples than a global batch", "trainer.global_batch_size=64", "the 40 training examples", "lower it")
def _(place: Place) -> list[str]:
    return place.train("trainer.global_batch_size=64")


@fault("mixture of an unknown source", "loader.mixture.wiki", "no such source", "files")
def _(place: Place) -> list[str]:
    return place.train("+loader.mixture.wiki=2.0")


# The cache of remote data


def _remote(place: Place, *settings: str) -> list[str]:
    return place.train(f"data.folder=file://{place.data}", f"cache.folder={place.folder}/cache", *settings)


@fault("remote data that is not there", "file:///nowhere/manifest.json", "cannot fetch it")
def _(place: Place) -> list[str]:
    return _remote(place, "data.folder=file:///nowhere")


@fault("no server", "http://127.0.0.1:9/data/manifest.json", "cannot fetch it")
def _(place: Place) -> list[str]:
    return _remote(place, "data.folder=http://127.0.0.1:9/data")


@fault("remote shard missing", "shard-0000", "cannot fetch it")
def _(place: Place) -> list[str]:
    for path in place.data.glob("*.tar"):
        path.unlink()
    return _remote(place)


@fault("remote shard changed", "shard-0000", "damaged or changed", "checksum")
def _(place: Place) -> list[str]:
    _damage(place)
    return _remote(place)


@fault("cache smaller than a shard", "cache.max_gigabytes=1e-06", "smaller than", "raise it")
def _(place: Place) -> list[str]:
    return _remote(place, "cache.max_gigabytes=0.000001")


@fault("no space for the cache", "cache.folder=", "No space left", "choose another folder")
def _(place: Place) -> list[str]:
    def full(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    place.monkeypatch.setattr(remote.RemoteFolder, "_download", full)
    return _remote(place)


# Checkpoints


@fault("disk full at a checkpoint", "last.ckpt", "cannot write the checkpoint", "No space left", "resume=auto")
def _(place: Place) -> list[str]:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    place.monkeypatch.setattr("lit_refusion.run_folder.torch.save", full)
    return place.train()


@fault("all checkpoints damaged", "last.ckpt", "damaged", "another run folder")
def _(place: Place) -> list[str]:
    (place.folder / "run" / "checkpoints").mkdir(parents=True)
    (place.folder / "run" / "checkpoints" / "last.ckpt").write_bytes(b"PK")
    return place.train("resume=auto")


@pytest.fixture(scope="module")
def prepared(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "r.jsonl").write_bytes(LINES)
    where = [f"data.sources.0.files=[{folder}/r.jsonl]", f"data.folder={folder}/data"]
    settings = [f"data.tokenizer={tokenizer_folder}", "data.examples_per_shard=20"]
    assert main(["prepare", "data=files", *where, *settings]) == 0
    return folder / "data"


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_one_line_that_says_what_to_do(
    name: str,
    prepared: Path,
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make, parts = FAULTS[name]
    place = Place(tmp_path, tokenizer_folder, prepared, monkeypatch)
    command = make(place)
    capsys.readouterr()

    assert main(command) == 2

    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"lit-refusion {command[0]}: error: ")
    for part in parts:
        assert part in lines[0]
    assert not (place.out / "manifest.json").exists()  # nothing that looks finished


def test_the_table_has_enough_faults() -> None:
    assert len(FAULTS) >= 25


def test_byte_order_mark_and_mixed_schemas_are_no_faults(
    prepared: Path, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, tokenizer_folder, prepared, monkeypatch)
    chat = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]}
    content = b"\xef\xbb\xbf" + LINES + json.dumps(chat).encode()
    assert main(place.prepare(*place.file("r.jsonl", content))) == 0
    assert json.loads((place.out / "manifest.json").read_text())["num_examples"] == 41


def test_repeated_texts_are_reported(
    prepared: Path,
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = Place(tmp_path, tokenizer_folder, prepared, monkeypatch)
    assert main(place.prepare(*place.records(*RECORDS[:3]))) == 0
    assert "3 examples repeat an earlier text; deduplicate=true drops them" in capsys.readouterr().out
