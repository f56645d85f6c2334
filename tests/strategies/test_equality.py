"""Every objective under every strategy ends with the same weights.

This catches local denominators, noise keyed by rank and wrong loss scales. Sums are made in another order on each
world, so fp32 weights agree to rounding only: after 3 AdamW steps (eps 1e-4 keeps the step smooth at zero gradients) of
relative size 1e-3 each, to 2e-5 absolute; one wrong factor moves them by 1e-3.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from lit_refusion.run_folder import checkpoint_path, load_checkpoint
from lit_refusion.sharded_checkpoint import load_whole
from tests.children import OBJECTIVES, command, metrics, prepared_data, run_ranks

WORLDS = [
    ("ddp", 2),
    ("ddp", 4),
    ("fsdp2", 2),
    *((f"deepspeed_zero{stage}", 2) for stage in (1, 2, 3)),
    ("deepspeed_zero3_offload", 2),
]
STEPS = 3
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


@pytest.fixture(scope="module")
def data(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_data(tmp_path_factory.mktemp("strategies"), tokenizer_folder)


def arguments(data: Path, folder: Path, objective: str, strategy: str, world: int, *extra: str) -> list[str]:
    """8 examples a step, 2 at a time where there are ranks to share them, clipped; saved at the end."""
    settings = [f"strategy={strategy}", f"trainer.devices={world}", "loader.micro_batch_size=2"]
    length = [f"trainer.max_steps={STEPS}", "trainer.checkpoint_every=100", "trainer.loggers=[csv]"]
    return command(data, folder / objective, objective, *settings, *length, "trainer.gradient_clip=0.5", *extra)


def weights(run: Path) -> dict[str, torch.Tensor]:
    path = checkpoint_path(run, "last")
    return (load_whole(path) if path.is_dir() else load_checkpoint(path))["state_dict"]


@pytest.fixture(scope="module")
def single(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process that accumulates 4 micro-batches, for every objective."""
    folder = tmp_path_factory.mktemp("single")
    run_ranks(1, [arguments(data, folder, objective, "single", 1) for objective in OBJECTIVES], folder)
    return folder


each_world = pytest.mark.parametrize(
    ("strategy", "world"),
    [pytest.param(*world, marks=needs_deepspeed if "deepspeed" in world[0] else ()) for world in WORLDS],
)


@each_world
def test_every_objective_ends_with_the_weights_of_one_process(
    strategy: str, world: int, single: Path, data: Path, tmp_path: Path
) -> None:
    run_ranks(world, [arguments(data, tmp_path, name, strategy, world) for name in OBJECTIVES], tmp_path)
    for objective in OBJECTIVES:
        expected, found = weights(single / objective), weights(tmp_path / objective)
        if set(expected) != set(found):  # a tied head may be left out
            assert set(expected) - set(found) == {"backbone.model.lm_head.weight"}
        for name in found:
            torch.testing.assert_close(
                found[name], expected[name], atol=2e-5, rtol=1e-4, msg=lambda text, o=objective: f"{o}: {text}"
            )
        for one, two in zip(metrics(single / objective), metrics(tmp_path / objective), strict=True):
            for figure in ("train/loss", "val/loss", "train/gradient_norm"):
                if one[figure]:
                    assert float(two[figure]) == pytest.approx(float(one[figure]), rel=1e-3), (objective, figure)


@each_world
def test_a_loss_in_chunks_finds_the_whole_head(
    strategy: str, world: int, single: Path, data: Path, tmp_path: Path
) -> None:
    """Some rows fill one chunk and others many, so ranks that share the head out need it at different times."""
    kernels = ("chunked", "auto")  # auto: torch where one chunk is not enough
    run_ranks(
        world,
        [
            arguments(data, tmp_path / kernel, "refusion", strategy, world, f"backbone.cross_entropy={kernel}")
            for kernel in kernels
        ],
        tmp_path,
        max_logits=10_000,
    )
    expected = weights(single / "refusion")
    for kernel in kernels:
        for name, value in weights(tmp_path / kernel / "refusion").items():
            torch.testing.assert_close(value, expected[name], atol=2e-5, rtol=1e-4)
