"""Reading prepared data back: random access, little memory, few open files, and damage that is noticed and named."""

from __future__ import annotations

import errno
import gc
import io
import json
import multiprocessing
import operator
import os
import pickle
import re
import shutil
import tarfile
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_refusion.chat import PromptFormat
from lit_refusion.data import shards as module
from lit_refusion.data.prepare import PrepareConfig, prepare
from lit_refusion.data.shards import INDEX_DTYPE, Manifest, Shards
from lit_refusion.errors import UserError
from lit_refusion.examples import Example
from tests.conftest import make_source

ADDITIONS = [
    {"query": f"What is {a} + {b}?", "response": f"The answer is {a + b}."} for a in range(12) for b in range(5)
]
OTHERS = [{"query": "q" * n, "response": "r" * n} for n in range(1, 30)]


def write(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prepare_folder(
    folder: Path, tokenizer_folder: Path, *, max_length: int = 200, **sources: Sequence[dict[str, str]]
) -> Path:
    """Prepare the records of each source, in shards of 16 examples."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    config = PrepareConfig(
        folder=str(folder),
        tokenizer=str(tokenizer_folder),
        sources=tuple(
            make_source(write(folder.parent / f"{folder.name}-{name}.jsonl", records), name=name)
            for name, records in sources.items()
        ),
        prompt_format=PromptFormat(style="chat", template_kwargs={}),
        max_length=max_length,
        num_examples=None,
        seed=0,
        examples_per_shard=16,
        on_error="raise",
    )
    prepare(config)
    return folder


def sparse_folder(folder: Path, *, num_examples: int, num_shards: int) -> Path:
    """A data set as large as `num_examples` asks for, all holes: it takes no room on the disk."""
    folder.mkdir()
    for name, dtype in (("index.npy", INDEX_DTYPE), ("keys.npy", np.dtype(np.uint64))):
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (num_examples,)}
        with (folder / name).open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + num_examples * dtype.itemsize)
    shards = [f"shard-{number:05d}.tar" for number in range(num_shards)]
    for name in shards:
        with (folder / name).open("wb") as file:
            file.truncate(2**30)
    Manifest(
        num_examples=num_examples,
        examples_per_shard=num_examples // num_shards,
        sources=[{"name": "holes", "kept": num_examples}],
        shards=[describe(folder / name) for name in shards],
        files=[describe(folder / name) for name in ("index.npy", "keys.npy")],
    ).save(folder)
    return folder


def describe(path: Path) -> dict[str, Any]:
    return {"name": path.name, "num_bytes": path.stat().st_size, "sha256": ""}


@pytest.fixture(scope="module")
def prepared(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 60 additions in four shards."""
    return prepare_folder(tmp_path_factory.mktemp("prepared") / "data", tokenizer_folder, records=ADDITIONS)


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(prepared, tmp_path / "data"))


def ids(example: Example) -> tuple[list[int], list[int]]:
    return example.prompt_ids.tolist(), example.response_ids.tolist()


def all_ids(shards: Shards) -> list[tuple[list[int], list[int]]]:
    return [ids(shards[i]) for i in range(len(shards))]


def open_shards() -> list[str]:
    """The shards that this process holds open."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # the listing's own
            continue
    return sorted(Path(link).name for link in links if Path(link).name.startswith("shard-"))


def stored(folder: Path) -> list[np.ndarray]:
    """The arrays in the shards, as any reader of tars would find them."""
    arrays = []
    for path in sorted(folder.glob("shard-*.tar")):
        with tarfile.open(path) as archive:
            arrays += [np.load(io.BytesIO(archive.extractfile(member).read())) for member in archive]
    return arrays


# Random access


@pytest.mark.parametrize(("max_length", "dtype"), [(200, "uint16"), (65_535, "uint16"), (65_536, "uint32")])
def test_random_access_gives_the_stored_tokens(
    max_length: int, dtype: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    folder = prepare_folder(tmp_path / "data", tokenizer_folder, max_length=max_length, records=ADDITIONS, other=OTHERS)
    arrays = stored(folder)
    shards = Shards(folder)
    assert (len(shards), shards.manifest.dtype, arrays[0].dtype.name) == (89, dtype, dtype)
    for number in np.random.default_rng(0).permutation(len(shards)):
        example, (num_prompt, *tokens) = shards[int(number)], arrays[number].tolist()
        assert ids(example) == (tokens[:num_prompt], tokens[num_prompt:])
        assert example.prompt_ids.dtype == example.response_ids.dtype == np.int64
        assert (example.index, example.source) == (number, "records" if number < 60 else "other")
        assert shards.lengths(np.array([number])) == len(tokens)
        assert shards.response_lengths(np.array([number])) == len(tokens) - num_prompt
    tokens = np.concatenate([array[1:] for array in arrays])
    assert shards.token_counts().tolist() == np.bincount(tokens, minlength=len(shards.token_counts())).tolist()


def test_examples_lie_sorted_by_source_and_key(tokenizer_folder: Path, tmp_path: Path) -> None:
    shards = Shards(prepare_folder(tmp_path / "data", tokenizer_folder, records=ADDITIONS, other=OTHERS))
    assert shards.manifest.bounds() == [(0, 60), (60, 89)]
    for start, stop in shards.manifest.bounds():
        assert sorted(shards.keys[start:stop].tolist()) == shards.keys[start:stop].tolist()


def test_sources_without_examples_do_not_shift_the_names_of_the_others(folder: Path) -> None:
    sources = [{"name": "a", "kept": 0}, {"name": "b", "kept": 20}, {"name": "c", "kept": 0}, {"name": "d", "kept": 40}]
    change_manifest(sources=sources)(folder)
    shards = Shards(folder)
    assert [shards[i].source for i in (0, 19, 20, 59)] == ["b", "b", "d", "d"]


@pytest.mark.parametrize("number", [60, -1, 10**12])
def test_numbers_beyond_the_ends_are_refused(number: int, prepared: Path) -> None:
    with pytest.raises(IndexError, match=f"example {number} of 60"):
        Shards(prepared)[number]


def test_examples_are_copies(prepared: Path) -> None:
    shards = Shards(prepared)
    before = ids(shards[0])
    shards[0].prompt_ids[:] = 0
    assert ids(shards[0]) == before


# Memory, processes and open files


def test_opening_does_not_read_the_index(tmp_path: Path) -> None:
    folder = sparse_folder(tmp_path / "data", num_examples=10**7, num_shards=4)
    tracemalloc.start()
    shards = Shards(folder)
    lengths = shards.lengths(np.array([0, 10**7 - 1]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (len(shards), lengths.tolist()) == (10**7, [0, 0])
    assert peak < 2**20  # the index has 240 MB
    assert len(pickle.dumps(shards)) < 10_000


def test_pickling_carries_no_array_and_no_open_file(prepared: Path) -> None:
    shards = Shards(prepared)
    unread = pickle.dumps(shards)
    expected = all_ids(shards)
    content = pickle.dumps(shards)
    assert len(content) == len(unread) < 10_000
    assert shards.keys[7].tobytes() not in content
    assert all_ids(pickle.loads(content)) == expected
    assert all_ids(shards) == expected  # and the original still reads


def test_shards_can_be_read_in_a_spawned_process(prepared: Path) -> None:
    shards = Shards(prepared)
    here = [shards[3], shards[40]]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        there = list(pool.map(operator.getitem, [shards, shards], [3, 40]))
    assert [ids(example) for example in there] == [ids(example) for example in here]


def test_few_files_are_open_at_a_time(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = all_ids(Shards(prepared))
    gc.collect()
    before = len(open_shards())
    monkeypatch.setattr(module, "MAX_OPEN", 2)
    shards = Shards(prepared)
    most = 0
    for number in np.random.default_rng(0).integers(0, 60, 300):
        assert ids(shards[int(number)]) == expected[number]
        most = max(most, len(open_shards()) - before)
    assert most == 2


def test_the_file_used_least_recently_is_closed(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    real = os.open
    monkeypatch.setattr(module, "MAX_OPEN", 2)
    monkeypatch.setattr(os, "open", lambda path, *rest: opened.append(Path(path).stem) or real(path, *rest))
    shards = Shards(prepared)
    opened.clear()
    for shard in (0, 1, 0, 2, 0, 1):  # 0 stays open, since it is used again before each new one
        shards[16 * shard]
    assert opened == ["shard-00000", "shard-00001", "shard-00002", "shard-00001"]


def test_files_are_closed_with_the_data_set(prepared: Path) -> None:
    gc.collect()
    before = open_shards()
    shards = Shards(prepared)
    all_ids(shards)
    assert len(open_shards()) == len(before) + 4
    del shards
    gc.collect()
    assert open_shards() == before


# Damage


def change_manifest(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def accept_sizes(folder: Path) -> None:
    """Let the manifest tell the sizes that the files have now."""
    files = json.loads((folder / "manifest.json").read_text())["files"]
    change_manifest(files=[{**file, "num_bytes": (folder / file["name"]).stat().st_size} for file in files])(folder)


def replace_array(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    """Another array that the manifest vouches for, so that only a look at the array itself can tell."""

    def damage(folder: Path) -> None:
        np.save(folder / name, change(np.load(folder / name)))
        accept_sizes(folder)

    return damage


def change_index(field: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        index = np.load(folder / "index.npy")
        index[field] = change(index[field])
        np.save(folder / "index.npy", index)

    return damage


def rewrite(name: str, change: Callable[[bytes], bytes], *, vouched: bool = False) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        if vouched:
            accept_sizes(folder)

    return damage


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def make_directory(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


def drop_checksum(folder: Path) -> None:
    shards = json.loads((folder / "manifest.json").read_text())["shards"]
    del shards[2]["sha256"]
    change_manifest(shards=shards)(folder)


NO_MANIFEST = r"manifest\.json: not a manifest of this version"
CONTRADICTS = rf"{NO_MANIFEST} \(its counts contradict each other\); prepare the data again"
NO_MATCH = r"\.npy does not match manifest\.json; prepare the data again"
DAMAGE = {
    "shard cut": (rewrite("shard-00002.tar", lambda data: data[:-512]), r"00002\.tar: cut off or changed \(19968 of 2"),
    "shard longer": (
        rewrite("shard-00002.tar", lambda data: data + b"x"),
        r"00002\.tar: cut off or changed \(20481 of",
    ),
    "shard missing": (remove("shard-00001.tar"), r"shard-00001\.tar: missing; put it back, or prepare the data again"),
    "shard a folder": (make_directory("shard-00001.tar"), r"shard-00001\.tar: missing; put it back"),
    "manifest missing": (remove("manifest.json"), r"manifest\.json: no prepared data here; run"),
    "manifest cut": (rewrite("manifest.json", lambda data: data[:40]), NO_MANIFEST),
    "manifest empty": (rewrite("manifest.json", lambda data: b""), NO_MANIFEST),
    "manifest a list": (rewrite("manifest.json", lambda data: b"[]"), NO_MANIFEST),
    "manifest not UTF-8": (rewrite("manifest.json", lambda data: data.replace(b"records", b"\xff")), NO_MANIFEST),
    "manifest field": (change_manifest(new=1), rf"{NO_MANIFEST} .*'new'"),
    "manifest version": (change_manifest(version=1), r"manifest\.json: format version 1, expected 2; prepare the data"),
    "manifest count": (change_manifest(num_examples=59), CONTRADICTS),
    "manifest count a text": (change_manifest(num_examples="60"), NO_MANIFEST),
    "manifest shards": (change_manifest(shards=[]), CONTRADICTS),
    "manifest shard size": (change_manifest(examples_per_shard=0), CONTRADICTS),
    "manifest sources": (change_manifest(sources=[]), CONTRADICTS),
    "manifest source without count": (change_manifest(sources=[{"name": "records"}]), rf"{NO_MANIFEST} .*'kept'"),
    "manifest dtype": (change_manifest(dtype="int5"), rf"{NO_MANIFEST} .*'int5'"),
    "manifest checksum": (drop_checksum, rf"{NO_MANIFEST} \(a file lacks its name, size or checksum: .*00002"),
    "no examples": (change_manifest(num_examples=0, shards=[], sources=[]), "the data set is empty; look at `dropped`"),
    "index missing": (remove("index.npy"), r"index\.npy: missing"),
    "index cut": (rewrite("index.npy", lambda data: data[:-10]), r"index\.npy: cut off or changed"),
    "keys missing": (remove("keys.npy"), r"keys\.npy: missing"),
    "keys cut": (rewrite("keys.npy", lambda data: data[:-10]), r"keys\.npy: cut off or changed"),
    "token counts missing": (remove("token_counts.npy"), r"token_counts\.npy: missing"),
    "index shorter": (replace_array("index.npy", lambda index: index[:-1]), rf"index{NO_MATCH}"),
    "index type": (replace_array("index.npy", lambda index: index["offset"]), rf"index{NO_MATCH}"),
    "keys shorter": (replace_array("keys.npy", lambda keys: keys[:-1]), rf"keys{NO_MATCH}"),
    "keys longer": (replace_array("keys.npy", lambda keys: np.append(keys, keys[-1:])), rf"keys{NO_MATCH}"),
    "keys type": (replace_array("keys.npy", lambda keys: keys.astype(np.int64)), rf"keys{NO_MATCH}"),
    "keys shape": (replace_array("keys.npy", lambda keys: keys[:, None]), rf"keys{NO_MATCH}"),
    "index garbage": (rewrite("index.npy", lambda data: b"hello", vouched=True), r"index\.npy: cannot read it: "),
    "index empty": (rewrite("index.npy", lambda data: b"", vouched=True), r"index\.npy: cannot read it: "),
    "index short of its header": (rewrite("index.npy", lambda data: data[:-10], vouched=True), r"index\.npy: cannot r"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_noticed_on_opening_and_the_file_is_named(name: str, folder: Path) -> None:
    damage, message = DAMAGE[name]
    Shards(folder)
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        Shards(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_token_counts_of_another_type_are_refused(folder: Path) -> None:
    replace_array("token_counts.npy", lambda counts: counts.astype(float))(folder)
    with pytest.raises(UserError, match=rf"token_counts{NO_MATCH}"):
        Shards(folder).token_counts()


def flip_byte(number: int, place: int) -> Callable[[Path], None]:
    """One bit of an example's array, which holds its prompt length and then its tokens, two bytes each."""

    def damage(folder: Path) -> None:
        path = folder / f"shard-{number // 16:05d}.tar"
        data = bytearray(path.read_bytes())
        entry = np.load(folder / "index.npy")[number]
        size = 2 * (int(entry["length"]) + 1)
        data[int(entry["offset"]) + place % size] ^= 4
        path.write_bytes(data)

    return damage


def cut_shard(folder: Path) -> None:
    os.truncate(folder / "shard-00001.tar", 700)


def swap_shards(folder: Path) -> None:
    first, second = (folder / f"shard-0000{number}.tar" for number in (1, 2))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


DAMAGED = r"shard-00001\.tar: example 19 is damaged .*run `lit-refusion prepare verify`, or prepare the data again"
READ_DAMAGE = {
    "first byte of the prompt length": (flip_byte(19, 0), DAMAGED),
    "last byte of the prompt length": (flip_byte(19, 1), DAMAGED),
    "first token": (flip_byte(19, 2), DAMAGED),
    "last token": (flip_byte(19, -2), DAMAGED),
    "shard of zeros": (rewrite("shard-00001.tar", lambda data: bytes(len(data))), DAMAGED),
    "shard swapped with another": (swap_shards, DAMAGED),
    "shard cut": (cut_shard, DAMAGED),
    "shard removed": (remove("shard-00001.tar"), r"shard-00001\.tar: cannot read it: No such file or directory; prep"),
    "shard a folder": (make_directory("shard-00001.tar"), r"shard-00001\.tar: "),
}
INDEX_DAMAGE = {
    "offset": change_index("offset", lambda offset: offset + 2),
    "offset beyond the end": change_index("offset", lambda offset: offset + 10**9),
    "offset below zero": change_index("offset", lambda offset: offset * 0 - 7),
    "prompt length": change_index("prompt_length", lambda length: length + 1),
    "prompt length below zero": change_index("prompt_length", lambda length: -length),
    "length": change_index("length", lambda length: length + 1),
    "no length": change_index("length", lambda length: length * 0 - 1),
    "length below zero": change_index("length", lambda length: -length),
    "digest": change_index("digest", lambda digest: digest ^ np.uint64(1)),
    "dtype": change_manifest(dtype="uint32"),
}


@pytest.mark.parametrize("name", READ_DAMAGE)
def test_damage_after_opening_is_noticed_at_the_read_and_the_shard_is_named(name: str, folder: Path) -> None:
    damage, message = READ_DAMAGE[name]
    shards = Shards(folder)
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        shards[19]
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", INDEX_DAMAGE)
def test_index_that_does_not_fit_the_shard_is_noticed_at_the_read(name: str, folder: Path) -> None:
    INDEX_DAMAGE[name](folder)
    with pytest.raises(UserError, match=rf"{DAMAGED}|shard-00001\.tar: cannot read it"):
        Shards(folder)[19]


def test_a_disk_that_cannot_be_read_is_a_user_error(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    shards = Shards(prepared)
    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(UserError, match=r"shard-00001\.tar: .*Input/output error"):
        shards[19]


def test_a_shard_cut_off_while_it_is_open_does_not_end_the_process(folder: Path) -> None:
    """A memory map would be killed by SIGBUS here."""
    shards = Shards(folder)
    expected = all_ids(shards)
    cut_shard(folder)
    for number in range(17, 32):
        with pytest.raises(UserError, match=rf"shard-00001\.tar: example {number} is damaged"):
            shards[number]
    assert [ids(shards[number]) for number in (15, 32)] == [expected[15], expected[32]]


def test_a_shard_removed_while_it_is_open_still_reads(folder: Path) -> None:
    shards = Shards(folder)
    expected = all_ids(shards)
    for path in folder.glob("shard-*.tar"):
        path.unlink()
    assert all_ids(shards) == expected


@pytest.mark.parametrize("place", [0, 1, 2, 7, -1])
def test_damage_to_one_example_leaves_the_others_readable(place: int, folder: Path) -> None:
    expected = all_ids(Shards(folder))
    flip_byte(19, place)(folder)
    shards = Shards(folder)
    found: list[int] = []
    for number in range(60):
        try:
            assert ids(shards[number]) == expected[number]
        except UserError:
            found.append(number)
    assert found == [19]


def test_every_byte_of_an_example_is_guarded(folder: Path) -> None:
    entry = np.load(folder / "index.npy")[19]
    path, offset, size = folder / "shard-00001.tar", int(entry["offset"]), 2 * (int(entry["length"]) + 1)
    whole = path.read_bytes()
    shards = Shards(folder)
    for place in range(offset, offset + size):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(bytes([whole[place] ^ 1]))
        with pytest.raises(UserError, match=DAMAGED):
            shards[19]
        path.write_bytes(whole)
    assert len(shards[19]) == entry["length"]


def test_messages_name_the_folder_as_it_was_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    remove("keys.npy")(folder)
    with pytest.raises(UserError, match=re.escape("data/keys.npy: missing")) as caught:
        Shards("data")
    assert str(caught.value).startswith("data/")
