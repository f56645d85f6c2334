"""`prepare verify`: a whole data set is called whole, and every kind of damage is named."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.progress import Progress

from lit_refusion.chat import PromptFormat
from lit_refusion.cli import main
from lit_refusion.data.prepare import PrepareConfig, prepare
from lit_refusion.data.verification import verify
from lit_refusion.errors import UserError
from tests.conftest import make_source

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def original(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 additions of two sources in five shards."""
    root = tmp_path_factory.mktemp("verification")
    pairs = [(a, b) for a in range(16) for b in (1, 20, 300, 4000, 5)]
    lines = [{"query": f"What is {a} + {b}?", "response": f"The answer is {a + b}."} for a, b in pairs]
    sources = []
    for name, own in (("first", lines[:50]), ("second", lines[50:])):
        path = root / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in own))
        source = make_source(path, name=name)
        sources.append(source)
    config = PrepareConfig(
        folder=str(root / "data"),
        tokenizer=str(tokenizer_folder),
        sources=tuple(sources),
        prompt_format=PromptFormat(style="chat", template_kwargs={}),
        max_length=200,
        num_examples=None,
        seed=0,
        examples_per_shard=16,
        on_error="raise",
    )
    prepare(config)
    return root / "data"


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(original, tmp_path / "data"))


def run(folder: Path) -> int:
    return main(["prepare", "verify", "data=prepared", f"data.folder={folder}"])


def flip(name: str, place: int) -> Damage:
    """Turn over the bits of one byte."""

    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[place] ^= 0xFF
        (folder / name).write_bytes(content)

    return damage


def cut(name: str, size: int) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def change_array(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Damage:
    return lambda folder: np.save(folder / name, change(np.load(folder / name)))


def add(field: str, amount: int) -> Damage:
    """Another number at entry 20 of the index, which is in the second shard."""

    def change(index: np.ndarray) -> np.ndarray:
        index[field][20] += amount
        return index

    return change_array("index.npy", change)


def swap(array: np.ndarray) -> np.ndarray:
    array[[3, 30]] = array[[30, 3]]
    return array


def one_more(array: np.ndarray) -> np.ndarray:
    array[7] += 1
    return array


def change_manifest(change: Callable[[dict[str, Any]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / "manifest.json").read_text())
        change(content)
        (folder / "manifest.json").write_text(json.dumps(content))

    return damage


def more(name: str, amount: int = 1) -> Damage:
    return change_manifest(lambda content: content.update({name: content[name] + amount}))


def put(name: str, value: Any) -> Damage:
    return change_manifest(lambda content: content.update({name: value}))


def renew_checksums(folder: Path) -> None:
    """As if the damage had been there when the checksums were taken."""

    def renew(content: dict[str, Any]) -> None:
        for file in (*content["files"], *content["shards"]):
            data = (folder / file["name"]).read_bytes()
            file.update(num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    change_manifest(renew)(folder)


def change_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["merges"].pop()
    path.write_text(json.dumps(content))


# Whole


def test_a_whole_data_set_is_called_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder) == 0
    assert capsys.readouterr().out == f"{folder}: whole; 80 examples in 5 shards\n"


def test_verifying_changes_nothing(folder: Path, original: Path) -> None:
    assert list(verify(folder)) == []
    names = sorted(path.relative_to(original) for path in original.rglob("*"))
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == names
    for name in names:
        assert (original / name).is_dir() or (folder / name).read_bytes() == (original / name).read_bytes()


def test_the_progress_counts_files_and_shards(folder: Path) -> None:
    with Progress(disable=True) as progress:
        assert list(verify(folder, progress=progress)) == []
    checksums, examples = progress.tasks
    num_files = sum(path.is_file() for path in folder.rglob("*")) - 1  # all but the manifest
    assert (checksums.completed, checksums.total) == (num_files, num_files)
    assert (examples.completed, examples.total) == (5, 5)


# Damage that the checksums tell

FILES = [
    "index.npy",
    "keys.npy",
    "lengths.png",
    "shard-00000.tar",
    "shard-00004.tar",
    "token_counts.npy",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0, -1, None], ids=["first byte", "last byte", "middle byte"])
def test_a_flipped_byte_is_noticed(
    name: str, place: int | None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(name, (folder / name).stat().st_size // 2 if place is None else place)(folder)
    assert run(folder) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{folder / name}: its content has changed (SHA-256)",
        f"{folder}: 1 problems; put the files back, or prepare the data again",
    ]


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_off_is_noticed(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = (folder / name).stat().st_size
    cut(name, size // 2)(folder)
    assert run(folder) == 1
    assert capsys.readouterr().out.splitlines()[0] == f"{folder / name}: {size // 2} bytes, not {size}"


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_noticed(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remove(name)(folder)
    assert run(folder) == 1
    assert capsys.readouterr().out.splitlines()[0] == f"{folder / name}: missing"


def test_every_damaged_file_is_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for damage in (flip("shard-00003.tar", 700), cut("shard-00001.tar", 9), remove("keys.npy"), flip("index.npy", 300)):
        damage(folder)
    assert run(folder) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split(": ")[0] for line in lines) == [
        str(folder),
        *(str(folder / name) for name in ("index.npy", "keys.npy", "shard-00001.tar", "shard-00003.tar")),
    ]
    assert lines[-1].startswith(f"{folder}: 4 problems")


# Damage that the checksums do not tell

OLDER_DAMAGE = {
    "token in a shard": (flip("shard-00001.tar", 512 + 128 + 4), r"shard-00001\.tar: example 16 is damaged"),
    "prompt length in a shard": (flip("shard-00001.tar", 512 + 128), r"shard-00001\.tar: example 16 is damaged"),
    "header of a member": (flip("shard-00001.tar", 1024), r"shard-00001\.tar: its members do not lie where"),
    "offset": (add("offset", 2), r"shard-00001\.tar: its members do not lie where"),
    "length": (add("length", 1), r"shard-00001\.tar: example 20 is damaged"),
    "prompt length": (add("prompt_length", 1), r"shard-00001\.tar: example 20 is damaged"),
    "digest": (add("digest", 1), r"shard-00001\.tar: example 20 is damaged"),
    "index out of order": (change_array("index.npy", swap), r"shard-00000\.tar: its members do not lie where"),
    "keys out of order": (change_array("keys.npy", swap), r"keys\.npy: keys 0 to 49 are not in order"),
    "one count": (change_array("token_counts.npy", one_more), r"token_counts\.npy: not the counts of the tokens"),
    "counts moved": (change_array("token_counts.npy", lambda array: np.roll(array, 1)), r"token_counts\.npy: not the"),
    "tokenizer": (change_tokenizer, r"manifest\.json: tokenizer_fingerprint is \w+, the content has"),
}  # fmt: skip


@pytest.mark.parametrize("name", OLDER_DAMAGE)
def test_damage_older_than_the_checksums_is_noticed(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = OLDER_DAMAGE[name]
    damage(folder)
    renew_checksums(folder)
    assert run(folder) == 1
    assert_named(folder, message, capsys)


def assert_named(folder: Path, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    *problems, summary = capsys.readouterr().out.splitlines()
    assert summary.startswith(f"{folder}: {len(problems)} problem")
    assert any(re.search(message, problem) for problem in problems), problems
    assert all(str(folder) in problem for problem in problems)


def test_only_the_shard_with_the_damage_is_named(folder: Path) -> None:
    flip("shard-00001.tar", 512 + 128 + 4)(folder)
    renew_checksums(folder)
    assert not [problem for problem in verify(folder) if ".tar" in problem and "shard-00001.tar" not in problem]


# Each of these ends in a traceback of the library that reads the file.
UNREADABLE = {
    "first header": flip("shard-00001.tar", 0),
    "array": flip("shard-00001.tar", 512),
    "header of the array": flip("shard-00001.tar", 530),
    "cut within a member": cut("shard-00001.tar", 5000),
    "empty": cut("shard-00001.tar", 0),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_shard_that_cannot_be_read_is_named(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    UNREADABLE[name](folder)
    renew_checksums(folder)
    assert run(folder) == 1
    assert_named(folder, r"shard-00001\.tar", capsys)


def test_token_counts_without_the_last_tokens_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_array("token_counts.npy", lambda counts: counts[:20])(folder)
    renew_checksums(folder)
    assert run(folder) == 1
    assert_named(folder, r"token_counts\.npy", capsys)


# The manifest, which has no checksum

WRONG_NUMBERS = {
    "num_prompt_tokens": (more("num_prompt_tokens"), r"manifest\.json: num_prompt_tokens is \d+, the content has \d+"),
    "longest": (more("longest"), r"manifest\.json: longest is \d+, the content has \d+"),
    "content_fingerprint": (put("content_fingerprint", "0" * 32), r"manifest\.json: content_fingerprint is 0+, the"),
    "tokenizer_fingerprint": (put("tokenizer_fingerprint", "0" * 32), r"manifest\.json: tokenizer_fingerprint is 0+"),
    "examples_per_shard": (more("examples_per_shard"), r"shard-00000\.tar: its members do not lie where"),
    "dtype": (put("dtype", "uint32"), r"shard-00000\.tar: example 0 is damaged"),
    "bounds": (
        change_manifest(lambda content: [source.update(kept=40) for source in content["sources"]]),
        r"keys\.npy: keys 40 to 79 are not in order",
    ),
    "checksum": (
        change_manifest(lambda content: content["shards"][2].update(sha256="0" * 64)),
        r"shard-00002\.tar: its content has changed",
    ),
    "size": (
        change_manifest(lambda content: content["files"][0].update(num_bytes=1)),
        r"index\.npy: \d+ bytes, not 1",
    ),
    "order of the shards": (
        change_manifest(lambda content: content["shards"].reverse()),
        r"shard-00004\.tar: example 0 is damaged",
    ),
}


@pytest.mark.parametrize("name", WRONG_NUMBERS)
def test_a_wrong_number_in_the_manifest_is_noticed(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, message = WRONG_NUMBERS[name]
    damage(folder)
    assert run(folder) == 1
    assert_named(folder, message, capsys)


UNNOTICED = {
    "lengths": change_manifest(lambda content: content["lengths"]["total"].reverse()),
    "max_length below the longest": put("max_length", 3),
    "read": change_manifest(lambda content: content["sources"][0].update(read=1)),
    "no files": put("files", []),
    "num_response_tokens": more("num_response_tokens"),  # noticed, but token_counts.npy gets the blame
}


@pytest.mark.parametrize("name", UNNOTICED)
def test_a_number_that_contradicts_the_content_is_named_with_the_manifest(name: str, folder: Path) -> None:
    UNNOTICED[name](folder)
    assert [problem for problem in verify(folder) if problem.startswith(str(folder / "manifest.json"))]


REFUSED = {
    "num_examples": (more("num_examples"), r"manifest\.json: not a manifest of this version \(its counts contradict"),
    "num_examples and kept": (
        change_manifest(lambda content: (content.update(num_examples=79), content["sources"][0].update(kept=49))),
        r"index\.npy does not match manifest\.json",
    ),
    "kept": (
        change_manifest(lambda content: content["sources"][1].update(kept=31)),
        r"manifest\.json: not a manifest of this version \(its counts contradict",
    ),
    "version": (put("version", 1), r"manifest\.json: format version 1, expected 2; prepare the data again"),
    "cut": (cut("manifest.json", 100), r"manifest\.json: not a manifest of this version"),
    "missing": (remove("manifest.json"), r"manifest\.json: no prepared data here; run"),
    "unknown field": (put("new", 1), r"manifest\.json: not a manifest of this version .*'new'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_manifest_that_cannot_be_used_is_one_error(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = REFUSED[name]
    damage(folder)
    with pytest.raises(UserError, match=message):
        list(verify(folder))
    assert run(folder) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lit-refusion prepare: error: {folder}/")


def test_a_folder_that_is_not_there_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "nowhere") == 2
    assert "no prepared data here" in capsys.readouterr().err
