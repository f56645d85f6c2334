"""Checkpoints on disk: a whole one at every moment, and the right one to go on from."""

from __future__ import annotations

import io
import json
import os
import signal
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_refusion.cli import main
from lit_refusion.errors import UserError
from lit_refusion.run_folder import (
    FILES,
    RECORD_FILE,
    RECORD_KEY,
    AtomicCheckpointIO,
    checkpoint_path,
    is_whole,
    load_checkpoint,
    resume_point,
)
from tests.children import Blow, as_it_was, assert_same_run, checkpoint, command, prepared_data, run, start, train

NAMES = ("last", "previous")


def state(number: int) -> dict[str, Any]:
    return {
        RECORD_KEY: {},
        "global_step": number,
        "weights": {f"{i}": torch.full((100 + i,), float(number)) for i in range(4)},
    }


def save(folder: Path, *numbers: int) -> AtomicCheckpointIO:
    """States under `last`, one after the other, by one process."""
    writer = AtomicCheckpointIO()
    for number in numbers:
        writer.save_checkpoint(state(number), checkpoint_path(folder, "last"))
    return writer


def number_in(path: Path) -> int:
    loaded = torch.load(path, weights_only=True)
    assert all((value == loaded["global_step"]).all() for value in loaded["weights"].values())
    return loaded["global_step"]


def numbers(folder: Path) -> dict[str, int]:
    """What lies in a run's checkpoint folder."""
    return {path.name: number_in(path) for path in (folder / "checkpoints").iterdir()}


# Saving


def test_the_last_state_but_one_stays(tmp_path: Path) -> None:
    save(tmp_path, 1)
    assert numbers(tmp_path) == {"last.ckpt": 1}
    save(tmp_path, 2, 3)
    assert numbers(tmp_path) == {"last.ckpt": 3, "previous.ckpt": 2}


def test_the_best_state_has_no_previous_one(tmp_path: Path) -> None:
    for number in (1, 2):
        AtomicCheckpointIO().save_checkpoint(state(number), checkpoint_path(tmp_path, "best"))
    assert numbers(tmp_path) == {"best.ckpt": 2}


def refuse_link(*_: Any) -> None:
    raise OSError("this file system has no links")


def test_a_file_system_without_links_keeps_the_previous_state_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse_link)
    save(tmp_path, 1, 2, 3)
    assert numbers(tmp_path) == {"last.ckpt": 3, "previous.ckpt": 2}


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, 2)

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"last\.ckpt: cannot write the checkpoint: .*No space left on device"):
        save(tmp_path, 3)
    assert numbers(tmp_path) == {"last.ckpt": 2, "previous.ckpt": 1}


def save_and_die(folder: Path, before: int, has_links: bool) -> int:
    """Save states 1, 2 and 3, killed before the `before`-th operation on files."""
    left = [before]

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **named)

        return operation

    for owner, name in ((os, "fsync"), (os, "link"), (Path, "unlink"), (Path, "replace"), (Path, "open")):
        original = refuse_link if name == "link" and not has_links else getattr(owner, name)
        setattr(owner, name, counted(original))
    save(folder, 1, 2, 3)
    return 0


def killed_saves(tmp_path: Path, *, has_links: bool) -> list[tuple[int, Path]]:
    """Run folders of processes that were killed before every one of their operations on files."""
    folders: list[tuple[int, Path]] = []
    code = -signal.SIGKILL
    while code == -signal.SIGKILL:
        folder = tmp_path / f"{len(folders)}"
        child = start(save_and_die, folder, len(folders), has_links, log=tmp_path / "log")
        code = child.wait()
        folders.append((code, folder))
    assert code == 0, child.output
    assert len(folders) > 15
    return folders


@pytest.mark.parametrize(
    "has_links",
    [
        True,
        False,
    ],
    ids=["links", "no links"],
)
def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_state_that_is_never_an_older_one(
    has_links: bool, tmp_path: Path
) -> None:
    found = []
    for _, folder in killed_saves(tmp_path, has_links=has_links):
        point = resume_point(folder, "auto")
        found.append(0 if point is None else number_in(point))
    assert found == sorted(found)  # a later kill never leaves less
    assert set(found) == {0, 1, 2, 3}


@pytest.mark.parametrize("has_links", [True, False], ids=["links", "no links"])
def test_what_a_kill_leaves_over_is_gone_after_two_saves(has_links: bool, tmp_path: Path) -> None:
    for _, folder in killed_saves(tmp_path, has_links=has_links):
        save(folder, 7, 8)
        assert numbers(folder) == {"last.ckpt": 8, "previous.ckpt": 7}


# Damage


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes, place: int, bit: int = 0) -> bytes:
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def place_of(content: bytes, name: str) -> int:
    """Where the bytes of a record begin, which lie behind its name and padding."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        [record] = [item for item in archive.infolist() if item.filename.endswith(f"/{name}")]
    lengths = content[record.header_offset + 26 : record.header_offset + 30]  # of the name and of the padding
    return record.header_offset + 30 + sum(struct.unpack("<HH", lengths))


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "half": half,
    "empty": lambda content: b"",
    "a byte short": lambda content: content[:-1],
    "a bit flipped": lambda content: flipped(content, place_of(content, "data/0")),
    "zeros from the middle": lambda content: half(content).ljust(len(content), b"\0"),
    "zeros to the middle": lambda content: half(content[::-1])[::-1].rjust(len(content), b"\0"),
    "another file": lambda content: b"model: tiny\n" * 100,
}


def damage(folder: Path, name: str, how: str) -> None:
    """Write a damaged file in a checkpoint's place, as a new file: the two may be one file with two names."""
    path = checkpoint_path(folder, name)
    content = DAMAGES[how](path.read_bytes())
    path.unlink()
    path.write_bytes(content)


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_is_seen(how: str, tmp_path: Path) -> None:
    save(tmp_path, 1)
    last = checkpoint_path(tmp_path, "last")
    assert is_whole(last)
    damage(tmp_path, "last", how)
    assert not is_whole(last)


@pytest.mark.parametrize("how", [pytest.param(how) if "bit" in how else how for how in DAMAGES])
def test_a_damaged_state_is_not_loaded(how: str, tmp_path: Path) -> None:
    """Not by `export` and `generate` either, which read the best one."""
    save(tmp_path, 1)
    last = checkpoint_path(tmp_path, "last")
    assert load_checkpoint(last)["global_step"] == 1
    damage(tmp_path, "last", how)
    with pytest.raises(UserError, match="damaged"):
        load_checkpoint(last)


def test_every_bit_of_a_weight_counts(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"weight": torch.arange(4.0)}, path)
    content = path.read_bytes()
    start = place_of(content, "data/0")
    assert content[start : start + 16] == struct.pack("<4f", 0, 1, 2, 3)
    for place in range(start, start + 16):
        for bit in range(8):
            path.write_bytes(flipped(content, place, bit))
            assert not is_whole(path), (place, bit)


@pytest.mark.parametrize(
    ("offset", "bit"),
    [(6, 6), (8, 0), (10, 0), (38, 4)],
    ids=[
        "version",
        "encryption",
        "compression",
        "a folder, so torch reads nothing and leaves the weights as they were",
    ],
)
def test_a_flipped_bit_in_the_table_of_contents_is_seen(offset: int, bit: int, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    torch.save(state(1), path)
    content = path.read_bytes()
    entry = content.rindex(b"last/data/0") - 46
    assert content[entry : entry + 4] == b"PK\x01\x02"
    path.write_bytes(flipped(content, entry + offset, bit))
    assert not is_whole(path)


def test_a_flipped_bit_in_the_length_of_a_name_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    torch.save(state(1), path)
    path.write_bytes(flipped(path.read_bytes(), 26, 5))
    assert not is_whole(path)


def test_a_folder_of_a_sharded_strategy_is_whole_with_all_its_files(tmp_path: Path) -> None:
    last = checkpoint_path(tmp_path, "last")
    (last / "part").mkdir(parents=True)
    (last / "part" / "a.pt").write_bytes(b"12345")
    assert not is_whole(last)  # the list of the files is written last
    (last / RECORD_FILE).write_text(json.dumps({RECORD_KEY: {}, FILES: {"part/a.pt": 5}}))
    assert is_whole(last)
    assert resume_point(tmp_path, "auto") == last
    (last / "part" / "a.pt").write_bytes(b"1234")
    assert not is_whole(last)
    (last / "part" / "a.pt").unlink()
    assert not is_whole(last)


# The one to go on from


@pytest.mark.parametrize("resume", ["auto", "force"])
@pytest.mark.parametrize(
    ("last", "previous", "chosen"),
    [
        ("whole", "whole", "last"),
        ("whole", "damaged", "last"),
        ("whole", "missing", "last"),
        ("damaged", "whole", "previous"),
        ("missing", "whole", "previous"),
        ("missing", "missing", None),
    ],
)
def test_the_last_whole_state_is_chosen(
    last: str, previous: str, chosen: str | None, resume: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1, 2)
    for name, condition in zip(NAMES, (last, previous), strict=True):
        if condition == "damaged":
            damage(tmp_path, name, "half")
        elif condition == "missing":
            checkpoint_path(tmp_path, name).unlink()
    assert resume_point(tmp_path, resume) == (chosen and checkpoint_path(tmp_path, chosen))
    told = capsys.readouterr().err
    paths = [str(checkpoint_path(tmp_path, name)) for name in NAMES]
    warning = f"warning: {paths[0]} is damaged; going on from the one before it, {paths[1]}\n"
    assert told == (warning if last == "damaged" else "")


@pytest.mark.parametrize("left", [("last", "previous"), ("last",), ("previous",)])
def test_a_run_without_a_whole_state_is_an_error_that_names_what_is_damaged(
    left: tuple[str, ...], tmp_path: Path
) -> None:
    save(tmp_path, 1, 2)
    for name in NAMES:
        damage(tmp_path, name, "half")
        if name not in left:
            checkpoint_path(tmp_path, name).unlink()
    with pytest.raises(UserError) as caught:
        resume_point(tmp_path, "auto")
    assert str(caught.value).startswith(" and ".join(str(checkpoint_path(tmp_path, name)) for name in left))
    assert "damaged; put another checkpoint in its place, or choose another run folder" in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_with_any_checkpoint_is_not_started_anew(name: str, tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    checkpoint_path(tmp_path, NAMES[1 - NAMES.index(name)]).unlink()
    with pytest.raises(UserError, match="it holds a checkpoint already; continue it with resume=auto"):
        resume_point(tmp_path, None)


def test_a_half_written_file_is_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    last = checkpoint_path(tmp_path, "last")
    last.rename(last.with_name(".last.ckpt.partial"))
    assert resume_point(tmp_path, "auto") is None
    assert resume_point(tmp_path, None) is None


def test_the_previous_state_stays_where_the_last_one_is_damaged(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    damage(tmp_path, "last", "half")
    point = resume_point(tmp_path, "auto")
    assert point is not None
    writer = AtomicCheckpointIO()
    writer.load_checkpoint(point, weights_only=True)
    writer.save_checkpoint(state(3), checkpoint_path(tmp_path, "last"))
    assert numbers(tmp_path) == {"last.ckpt": 3, "previous.ckpt": 1}
    writer.save_checkpoint(state(4), checkpoint_path(tmp_path, "last"))
    assert numbers(tmp_path) == {"last.ckpt": 4, "previous.ckpt": 3}


def test_a_run_that_goes_on_from_the_last_state_keeps_it(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    writer = AtomicCheckpointIO()
    writer.load_checkpoint(checkpoint_path(tmp_path, "last"), weights_only=True)
    writer.save_checkpoint(state(3), checkpoint_path(tmp_path, "last"))
    assert numbers(tmp_path) == {"last.ckpt": 3, "previous.ckpt": 2}


# Runs


@pytest.fixture(scope="module")
def data(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_data(tmp_path_factory.mktemp("data"), tokenizer_folder)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of 6 steps."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(*command(data, folder, "ar"))
    return folder


@pytest.fixture(scope="module")
def killed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in its sixth step, with the states of steps 4 and 2."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    child = start(
        train, command(data, folder, "ar"), Blow(signal.SIGKILL, "training", 5), log=folder.with_suffix(".log")
    )
    assert child.wait() == -signal.SIGKILL, child.output
    return folder


@pytest.fixture
def unfinished(killed: Path) -> Path:
    """The killed run at its place, as it was."""
    return as_it_was(killed)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_run_whose_last_state_is_damaged_goes_on_from_the_one_before(
    how: str, whole: Path, data: Path, unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(unfinished, "last", how)
    run(*command(data, unfinished, "ar", "resume=auto"))
    told = capsys.readouterr().err
    assert all(str(checkpoint_path(unfinished, name)) in told for name in NAMES)
    assert_same_run(unfinished, whole)


def test_a_run_whose_last_state_is_missing_goes_on_from_the_one_before(
    whole: Path, data: Path, unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint_path(unfinished, "last").unlink()
    run(*command(data, unfinished, "ar", "resume=auto"))
    assert "warning" not in capsys.readouterr().err
    assert_same_run(unfinished, whole)


def test_a_damaged_state_does_not_become_the_previous_one_of_the_run(
    whole: Path, data: Path, unfinished: Path, tmp_path: Path
) -> None:
    damage(unfinished, "last", "half")
    again = command(data, unfinished, "ar", "resume=auto")
    child = start(train, again, Blow(signal.SIGKILL, "training", 5), log=tmp_path / "log")
    assert child.wait() == -signal.SIGKILL, child.output
    assert [checkpoint(unfinished, name)["global_step"] for name in NAMES] == [4, 2]
    run(*again)
    assert_same_run(unfinished, whole)


def test_a_run_whose_states_are_all_damaged_is_refused_and_left_alone(
    data: Path, unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in NAMES:
        damage(unfinished, name, "half")
    before = {path: path.read_bytes() for path in unfinished.rglob("*") if path.is_file()}
    assert main(command(data, unfinished, "ar", "resume=auto")) == 2
    told = capsys.readouterr().err
    assert all(str(checkpoint_path(unfinished, name)) in told for name in NAMES)
    assert {path: path.read_bytes() for path in unfinished.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["last", "previous", "best"])
def test_a_half_written_file_beside_the_states_is_ignored(
    name: str, whole: Path, data: Path, unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = io.BytesIO()
    torch.save(state(9), memory)
    checkpoint_path(unfinished, name).with_name(f".{name}.ckpt.partial").write_bytes(half(memory.getvalue()))
    run(*command(data, unfinished, "ar", "resume=auto"))
    assert "warning" not in capsys.readouterr().err
    assert_same_run(unfinished, whole)
