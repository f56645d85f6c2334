"""Twins beside a frozen model that is loaded in shares: trained, saved without it, resumed and exported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lit_refusion.adapter import trainable
from lit_refusion.export import load_model
from lit_refusion.run_folder import checkpoint_path
from tests.children import command, prepared_data, run, run_ranks
from tests.strategies.test_equality import needs_deepspeed, weights
from tests.test_adapter import PREFIX, beside, trained_base

STEPS = 6


@pytest.fixture(scope="module")
def data(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_data(tmp_path_factory.mktemp("adapters"), tokenizer_folder)


@pytest.fixture(scope="module")
def bases(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with a head of their own, and with one that is the embedding."""
    return {
        name: trained_base(
            tmp_path_factory.mktemp(name), data, f"++backbone.architecture.tie_word_embeddings={is_tied}"
        )
        for name, is_tied in (("tied", True), ("untied", False))
    }


def arguments(data: Path, base: Path, folder: Path, strategy: str, world: int, *extra: str) -> list[str]:
    settings = [f"strategy={strategy}", f"trainer.devices={world}", "loader.micro_batch_size=2", "resume=auto"]
    length = [f"trainer.max_steps={STEPS}", "trainer.loggers=[]", "optimizer.schedule=constant"]
    return beside(base, command(data, folder, "orthrus", *settings, *length, "optimizer.weight_decay=0.1", *extra))


@pytest.fixture(scope="module")
def whole(data: Path, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Uninterrupted runs of one process, by base and twins."""

    @functools.cache
    def make(base: str, twins: str) -> Path:
        folder = tmp_path_factory.mktemp("whole") / "run"
        run(*arguments(data, bases[base], folder, "single", 1, f"objective.twins={twins}"))
        return folder

    return make


def assert_twins(found: dict[str, torch.Tensor], run: Path) -> None:
    expected = weights(run)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], atol=2e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


def assert_holds_nothing_of(base: Path, folder: Path) -> None:
    """No file has the bytes of a piece of a frozen matrix, whichever half of it a rank has."""
    saved = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    for name, tensor in load_file(base / "model.safetensors").items():
        for half in tensor.flatten().chunk(2) if tensor.ndim > 1 else ():
            assert half[-4:].numpy().tobytes() not in saved, name


@pytest.mark.parametrize(
    ("strategy", "base", "twins"),
    [
        ("fsdp2", "tied", "qkvo"),
        ("fsdp2", "untied", "qkv"),
        pytest.param("deepspeed_zero2", "tied", "qkvo", marks=needs_deepspeed),
        pytest.param("deepspeed_zero3", "untied", "qkvo", marks=needs_deepspeed),
        pytest.param("deepspeed_zero3", "tied", "qkv", marks=needs_deepspeed),
    ],
)
def test_twins_are_those_of_one_process_and_are_saved_and_exported_alone(
    strategy: str, base: str, twins: str, whole: Callable[[str, str], Path], data: Path, bases: dict[str, Path],
    tmp_path: Path,
) -> None:  # fmt: skip
    folder, expected = tmp_path / "run", whole(base, twins)
    run_ranks(2, [arguments(data, bases[base], folder, strategy, 2, f"objective.twins={twins}")], tmp_path)
    assert_twins(weights(folder), expected)
    run("export", f"run={folder}", f"out={tmp_path}/adapter", "checkpoint=last")
    backbone = load_model(str(tmp_path / "adapter"), objective=None, device="cpu").backbone
    assert_twins({PREFIX + name: parameter.detach() for name, parameter in trainable(backbone).items()}, expected)
    assert_holds_nothing_of(bases[base], checkpoint_path(folder, "last"))


@pytest.mark.parametrize(
    ("strategy", "base"),
    [
        ("fsdp2", "tied"),
        ("fsdp2", "untied"),
        pytest.param("deepspeed_zero2", "tied", marks=needs_deepspeed),
        pytest.param("deepspeed_zero3", "tied", marks=needs_deepspeed),
    ],
)
def test_a_run_goes_on_with_as_many_ranks_and_with_fewer(
    strategy: str, base: str, whole: Callable[[str, str], Path], data: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    for world, steps in ((2, 2), (2, 4), (1, STEPS)):
        run_ranks(
            world, [arguments(data, bases[base], folder, strategy, world, f"trainer.max_steps={steps}")], tmp_path
        )
    assert_twins(weights(folder), whole(base, "qkvo"))
