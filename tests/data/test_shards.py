"""Reading prepared data back: random access, damage that is noticed, and the split by hash."""

from __future__ import annotations

import io
import json
import pickle
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_refusion.chat import PromptFormat
from lit_refusion.data.prepare import PrepareConfig, prepare
from lit_refusion.data.records import Source
from lit_refusion.data.shards import Shards
from lit_refusion.errors import UserError
from lit_refusion.examples import Example

Prepare = Callable[..., Path]


@pytest.fixture
def prepare_folder(tokenizer_folder: Path, tmp_path: Path) -> Prepare:
    """Prepares records files into `tmp_path/name`."""

    def make(name: str, *files: Path, max_length: int = 200) -> Path:
        fields = {"query": "query", "response": "response", "messages": "messages"}
        sources = tuple(Source(name=path.stem, files=(str(path),), **fields) for path in files)
        config = PrepareConfig(
            folder=str(tmp_path / name),
            tokenizer=str(tokenizer_folder),
            sources=sources,
            prompt_format=PromptFormat(style="chat", template_kwargs={}),
            max_length=max_length,
            examples_per_shard=16,
            on_error="raise",
        )
        prepare(config)
        return tmp_path / name

    return make


@pytest.fixture
def folder(prepare_folder: Prepare, records: Path) -> Path:
    """The 60 additions in four shards."""
    return prepare_folder("data", records)


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ids(example: Example) -> tuple[list[int], list[int]]:
    return example.prompt_ids.tolist(), example.response_ids.tolist()


def all_ids(shards: Shards) -> list[tuple[list[int], list[int]]]:
    return [ids(shards[i]) for i in range(len(shards))]


# Random access


@pytest.mark.parametrize(("max_length", "dtype"), [(200, "uint16"), (65_535, "uint16"), (65_536, "uint32")])
def test_random_access_gives_the_stored_tokens(
    max_length: int, dtype: str, prepare_folder: Prepare, records: Path, tmp_path: Path
) -> None:
    other = write(tmp_path / "other.jsonl", [{"query": "q" * n, "response": "r" * n} for n in range(1, 30)])
    folder = prepare_folder("data", records, other, max_length=max_length)
    arrays = []
    for path in sorted(folder.glob("shard-*.tar")):
        with tarfile.open(path) as archive:
            arrays += [np.load(io.BytesIO(archive.extractfile(member).read())) for member in archive]
    shards = Shards(folder)
    assert (len(shards), shards.manifest.dtype, arrays[0].dtype.name) == (89, dtype, dtype)
    for number in np.random.default_rng(0).permutation(len(shards)):
        example, (num_prompt, *tokens) = shards[int(number)], arrays[number].tolist()
        assert ids(example) == (tokens[:num_prompt], tokens[num_prompt:])
        assert example.prompt_ids.dtype == example.response_ids.dtype == np.int64
        assert (example.index, example.source) == (number, "records" if number < 60 else "other")
        assert shards.lengths()[number] == len(tokens)
        assert shards.response_lengths()[number] == len(tokens) - num_prompt


def test_numbers_beyond_the_end_are_refused(folder: Path) -> None:
    with pytest.raises(IndexError):
        Shards(folder)[60]


def test_examples_are_copies(folder: Path) -> None:
    shards = Shards(folder)
    before = ids(shards[0])
    shards[0].prompt_ids[:] = 0
    assert ids(shards[0]) == before


def test_pickling_carries_no_shard(folder: Path) -> None:
    shards = Shards(folder)
    unread = len(pickle.dumps(shards))
    expected = all_ids(shards)
    content = pickle.dumps(shards)
    assert len(content) == unread  # open memory maps would be copied whole
    assert all_ids(pickle.loads(content)) == expected
    assert all_ids(shards) == expected  # and the original still reads


# Damage


def change_manifest(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def change_index(field: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        index = np.load(folder / "index.npy")
        index[field] = change(index[field])
        np.save(folder / "index.npy", index)

    return damage


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def cut_index_entries(folder: Path) -> None:
    np.save(folder / "index.npy", np.load(folder / "index.npy")[:-1])


def index_of_another_type(folder: Path) -> None:
    np.save(folder / "index.npy", np.zeros(60, np.int64))


DAMAGE = {
    "shard cut": (rewrite("shard-00002.tar", lambda data: data[:-512]), r"shard-00002\.tar: missing or cut off"),
    "shard longer": (rewrite("shard-00002.tar", lambda data: data + b"x"), r"shard-00002\.tar: missing or cut off"),
    "shard missing": (remove("shard-00001.tar"), r"shard-00001\.tar: missing or cut off \(no file"),
    "manifest missing": (remove("manifest.json"), r"manifest\.json: no prepared data here; run"),
    "manifest cut": (rewrite("manifest.json", lambda data: data[:40]), r"manifest\.json: not a manifest"),
    "manifest a list": (rewrite("manifest.json", lambda data: b"[]"), r"manifest\.json: not a manifest"),
    "manifest field": (change_manifest(new=1), r"manifest\.json: not a manifest of this version .*'new'"),
    "manifest version": (change_manifest(version=2), r"manifest\.json: format version 2, expected 1"),
    "manifest count": (change_manifest(num_examples=59), r"index\.npy does not match manifest\.json"),
    "index shorter": (cut_index_entries, r"index\.npy does not match manifest\.json"),
    "index type": (index_of_another_type, r"index\.npy does not match manifest\.json"),
    "index missing": (remove("index.npy"), r"index\.npy: cannot read it"),
    "index cut": (rewrite("index.npy", lambda data: data[:-10]), r"index\.npy: cannot read it"),
    "index garbage": (rewrite("index.npy", lambda data: b"hello"), r"index\.npy: cannot read it"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_noticed_on_opening_and_the_file_is_named(name: str, folder: Path) -> None:
    damage, message = DAMAGE[name]
    Shards(folder)
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        Shards(folder)
    assert str(folder) in str(caught.value)


MISMATCHES = {
    "offset": change_index("offset", lambda offset: offset + 2),
    "dtype": change_manifest(dtype="uint32"),
    "shard content": rewrite("shard-00000.tar", lambda data: bytes(len(data))),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_index_that_does_not_fit_its_shard_is_noticed_on_reading(name: str, folder: Path) -> None:
    MISMATCHES[name](folder)
    shards = Shards(folder)
    with pytest.raises(UserError, match=r"shard-00000\.tar: example 3 does not match the index; .*prepare the data"):
        shards[3]


def test_empty_data_set_is_refused(folder: Path) -> None:
    np.save(folder / "index.npy", np.load(folder / "index.npy")[:0])
    change_manifest(num_examples=0)(folder)
    with pytest.raises(UserError, match="the data set is empty"):
        Shards(folder)


FURTHER_DAMAGE = {
    "prompt length": change_index("prompt_length", lambda length: length + 1),
    "empty index": rewrite("index.npy", lambda data: b""),
    "manifest not UTF-8": rewrite("manifest.json", lambda data: data.replace(b"records", b"\xff")),
    "manifest shards": change_manifest(shards=[]),
    "manifest shard without name": change_manifest(shards=[{"num_bytes": 1}]),
    "manifest sources": change_manifest(sources=[]),
    "manifest dtype": change_manifest(dtype="int5"),
    "index shard": change_index("shard", lambda shard: shard + 4),
    "index offset": change_index("offset", lambda offset: offset + 10**6),
    "index length": change_index("length", lambda length: length + 1),
    "token counts": remove("token_counts.npy"),
}


@pytest.mark.parametrize("name", FURTHER_DAMAGE)
def test_further_damage_is_a_user_error(name: str, folder: Path) -> None:
    FURTHER_DAMAGE[name](folder)
    with pytest.raises(UserError, match=re.escape(str(folder))):  # noqa: PT012 - whichever notices first
        shards = Shards(folder)
        all_ids(shards)
        shards.token_counts()


# Split


def split_texts(folder: Path, fraction: float) -> tuple[set[str], set[str]]:
    shards = Shards(folder)
    train, validation = shards.split(fraction)
    assert sorted([*train, *validation]) == list(range(len(shards)))  # disjoint and complete
    sides = [{str(ids(shards[int(i)])) for i in side} for side in (train, validation)]
    return sides[0], sides[1]


def test_split_is_near_its_fraction_and_grows_with_it(folder: Path) -> None:
    held_out = [split_texts(folder, fraction)[1] for fraction in (0.0, 0.1, 0.3, 0.6)]
    assert held_out[0] == set()
    assert held_out[1] < held_out[2] < held_out[3]
    assert 10 <= len(held_out[2]) <= 26  # 18 expected, three standard deviations


def test_split_does_not_move_when_examples_are_added_or_reordered(
    folder: Path, prepare_folder: Prepare, records: Path, tmp_path: Path
) -> None:
    train, validation = split_texts(folder, 0.3)
    extra = [{"query": f"Name {n}", "response": "no"} for n in range(40)]
    shuffled = [*extra[:20], *read_lines(records)[::-1], *extra[20:]]
    grown = split_texts(prepare_folder("grown", write(tmp_path / "grown.jsonl", shuffled)), 0.3)
    assert train < grown[0]
    assert validation < grown[1]


def test_equal_texts_fall_on_the_same_side(prepare_folder: Prepare, records: Path, tmp_path: Path) -> None:
    lines = read_lines(records)
    train, validation = split_texts(prepare_folder("twice", records, write(tmp_path / "b.jsonl", lines[::-1])), 0.3)
    assert not train & validation
    assert len(train) + len(validation) == len(lines)
    assert min(len(train), len(validation)) > 0
