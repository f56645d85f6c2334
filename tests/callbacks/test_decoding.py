"""Decoding in validation: the figures of an evaluation, on every strategy, and nothing else changed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_refusion.callbacks import decoding
from lit_refusion.cli import main
from tests.children import command, different, metrics, prepared_data, run, run_ranks, weights
from tests.strategies.test_equality import arguments

WORLDS = [("ddp", 2), ("fsdp2", 2), ("deepspeed_zero2", 2), ("deepspeed_zero3", 2)]
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
SPEEDS = ("tokens_per_second", "seconds_per_answer")


@pytest.fixture(scope="module")
def data(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decoding")
    lengths = [1, 9, 1, 1, 1, 6, 1]  # very different ones, and an odd number of them
    lines = [{"question": "What is 1 + 2? " * length, "answer": "3"} for length in lengths]
    (folder / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return prepared_data(folder, tokenizer_folder)


def settings(data: Path, decoder: str = "ar", **changes: Any) -> list[str]:
    values = {"every_n_steps": 3, "num_problems": 7, "num_singles": 1, "max_seconds": "null", **changes}
    return [
        "decoding=word_problems", f"decoder@decoding.words.decoder={decoder}",
        f"decoding.words.task.files=[{data.parent}/questions.jsonl]", "decoding.words.decoder.max_new_tokens=16",
        "decoding.words.decoder.batch_size=2", *(f"decoding.words.{name}={value}" for name, value in changes.items()),
        *(f"decoding.words.{name}={value}" for name, value in values.items() if name not in changes),
    ]  # fmt: skip


def decoded(folder: Path) -> list[dict[str, str]]:
    """The figures of each decoding without the clock's."""
    rows = [row for row in metrics(folder) if row.get("decode/words/accuracy")]
    return [{name: x for name, x in row.items() if x and not any(speed in name for speed in SPEEDS)} for row in rows]


def samples(folder: Path, step: int = 3) -> list[dict[str, Any]]:
    lines = (folder / "decoding" / f"words-{step:08d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def single(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single")
    run_ranks(
        1, [arguments(data, folder, name, "single", 1, *settings(data, name)) for name in ("ar", "orthrus")], folder
    )
    return folder


@pytest.mark.parametrize(
    ("strategy", "world"),
    [pytest.param(*world, marks=needs_deepspeed if "deepspeed" in world[0] else ()) for world in WORLDS],
)
def test_two_ranks_decode_what_one_does(strategy: str, world: int, single: Path, data: Path, tmp_path: Path) -> None:
    names = ("ar", "orthrus")
    run_ranks(
        world, [arguments(data, tmp_path, name, strategy, world, *settings(data, name)) for name in names], tmp_path
    )
    for name in names:
        assert samples(tmp_path / name) == samples(single / name)
        assert decoded(tmp_path / name) == decoded(single / name)


def test_the_figures_are_those_of_an_evaluation_of_the_checkpoint(single: Path, data: Path, tmp_path: Path) -> None:
    run("export", f"run={single}/ar", "checkpoint=last", f"out={tmp_path}/model")
    run("evaluate", f"model={tmp_path}/model", f"task.files=[{data.parent}/questions.jsonl]", f"out={tmp_path}/out",
        "decoder.max_new_tokens=16")  # fmt: skip
    figures = json.loads((tmp_path / "out" / "result.json").read_text())["figures"]
    (row,) = decoded(single / "ar")
    for name, value in row.items():
        if name != "step":
            assert float(value) == pytest.approx(figures[name.removeprefix("decode/words/")]), name


def test_training_is_not_changed(single: Path, data: Path, tmp_path: Path) -> None:
    run_ranks(1, [arguments(data, tmp_path, "ar", "single", 1)], tmp_path)
    assert different(weights(tmp_path / "ar"), weights(single / "ar")) == []
    for one, two in zip(metrics(tmp_path / "ar"), metrics(single / "ar")):
        assert one.get("train/loss") == two.get("train/loss")


def test_samples_have_the_steps(single: Path) -> None:
    for sample in samples(single / "orthrus"):
        assert len(sample["steps"]) == sample["forward_passes"]
        assert sum(len(committed) for _, committed, _ in sample["steps"]) == sample["tokens"]


def test_it_runs_at_its_own_pace(data: Path, tmp_path: Path) -> None:
    run(*command(data, tmp_path / "run", "ar", *settings(data, every_n_steps=6)))
    assert [row["step"] for row in decoded(tmp_path / "run")] == ["6"]


def test_a_limit_of_time_leaves_problems_out(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(decoding.time, "perf_counter", lambda: float(next(clock)))
    run(*command(data, tmp_path / "run", "ar", *settings(data, every_n_steps=6, max_seconds=4.0)))
    (row,) = decoded(tmp_path / "run")
    assert 1 <= float(row["decode/words/problems"]) < 7


def test_the_best_checkpoint_can_be_chosen_by_it(data: Path, tmp_path: Path) -> None:
    chosen = ["trainer.monitor=decode/words/tokens_per_answer", "trainer.monitor_mode=max"]
    run(*command(data, tmp_path / "run", "ar", *settings(data), *chosen))
    best = torch.load(tmp_path / "run" / "checkpoints" / "best.ckpt", weights_only=True)
    by_step = {int(row["step"]): float(row["decode/words/tokens_per_answer"]) for row in decoded(tmp_path / "run")}
    assert by_step[best["global_step"]] == max(by_step.values())


def test_a_resumed_run_decodes_the_same(data: Path, tmp_path: Path) -> None:
    run(*command(data, tmp_path / "whole", "ar", *settings(data)))
    run(*command(data, tmp_path / "run", "ar", *settings(data), "trainer.max_steps=4", "optimizer.schedule=constant"))
    run(*command(data, tmp_path / "again", "ar", *settings(data), "optimizer.schedule=constant"))
    run(*command(data, tmp_path / "run", "ar", *settings(data), "resume=auto", "optimizer.schedule=constant"))
    assert samples(tmp_path / "run", 6) == samples(tmp_path / "again", 6)


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"every_n_steps": 4}, "decoding.words.every_n_steps=4: must be a multiple of trainer.validate_every=3"),
        ({"num_problems": 0}, "num_problems=0: must be at least 1"),
        ({"max_seconds": 0}, "max_seconds=0"),
        ({"decoder.max_new_tokens": 250}, "exceed the model's window"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    extra: dict[str, Any], told: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(data, tmp_path / "run", "ar", *settings(data, **extra))) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (["decoder@decoding.words.decoder=refusion"], "decoder ReFusionDecoder decodes models trained with"),
        (["loader.validation_fraction=0"], "no example is held out"),
        (["trainer.monitor=decode/other/accuracy"], "trainer.monitor=decode/other/accuracy: needs decoding.other"),
        (["scorer@decoding.words.task.scorer=unit_tests"], "it runs programs that the model writes"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(
    extra: list[str], told: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [text for text in settings(data) if text.split("=")[0] not in {item.split("=")[0] for item in extra}]
    assert main(command(data, tmp_path / "run", "ar", *given, *extra)) == 2
    assert told in capsys.readouterr().err


def test_the_last_validation_decodes_whatever_its_step(data: Path, tmp_path: Path) -> None:
    chosen = ["trainer.monitor=decode/words/accuracy", "trainer.monitor_mode=max", "trainer.max_steps=2"]
    run(*command(data, tmp_path / "run", "ar", *settings(data), *chosen))
    assert [row["step"] for row in decoded(tmp_path / "run")] == ["2"]


def test_a_figure_that_is_not_there_is_named_with_those_that_are(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(data, tmp_path / "run", "ar", *settings(data), "trainer.monitor=decode/words/acuracy")) == 2
    error = capsys.readouterr().err
    assert "trainer.monitor: no such figure; there are decode/words/accuracy, " in error


def test_bf16_decodes_too(data: Path, tmp_path: Path) -> None:
    """On the CPU bf16 is emulated: a few steps show that nothing clashes."""
    for name in ("refusion", "orthrus"):
        run(*command(data, tmp_path / name, name, *settings(data, name), "trainer.precision=bf16-mixed"))
        assert len(samples(tmp_path / name, 6)) == 7
