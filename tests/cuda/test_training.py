"""What only a GPU can show; skipped elsewhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from lit_refusion.config import choices
from tests.children import command, metrics, prepared_data, run, weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CAUSAL = ("ar", "refusion")


@pytest.fixture(scope="module")
def data(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_data(tmp_path_factory.mktemp("cuda"), tokenizer_folder)


def arguments(data: Path, folder: Path, objective: str, *extra: str) -> list[str]:
    common = [text for text in command(data, folder, objective) if text != "trainer.accelerator=cpu"]
    return [*common, "trainer.accelerator=gpu", "trainer.devices=1", "loader.pad_to_multiple=128", *extra]


@pytest.mark.parametrize("objective", choices("objective"))
def test_flex_attention_trains_as_sdpa(objective: str, data: Path, tmp_path: Path) -> None:
    """fp32; kernels sum in other orders, so weights agree to 1e-4 after 6 steps."""
    for kernel in ("sdpa", "flex_attention"):
        run(*arguments(data, tmp_path / kernel, objective, "trainer.precision=32-true", f"backbone.attention={kernel}"))
    for name, expected in weights(tmp_path / "sdpa").items():
        torch.testing.assert_close(weights(tmp_path / "flex_attention")[name], expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("objective", choices("objective"))
def test_bf16_follows_fp32(objective: str, data: Path, tmp_path: Path) -> None:
    for precision in ("32-true", "bf16-mixed"):
        run(*arguments(data, tmp_path / precision, objective, f"trainer.precision={precision}"))
    for one, two in zip(metrics(tmp_path / "32-true"), metrics(tmp_path / "bf16-mixed"), strict=True):
        if one["train/loss"]:
            assert float(two["train/loss"]) == pytest.approx(float(one["train/loss"]), rel=0.05)


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed")
@pytest.mark.parametrize("objective", CAUSAL)
def test_flash_attention_follows_sdpa(objective: str, data: Path, tmp_path: Path) -> None:
    for kernel in ("sdpa", "flash_attention_2"):
        bf16 = ["trainer.precision=bf16-mixed", f"backbone.attention={kernel}"]
        run(*arguments(data, tmp_path / kernel, objective, *bf16))
    for one, two in zip(metrics(tmp_path / "sdpa"), metrics(tmp_path / "flash_attention_2"), strict=True):
        if one["train/loss"]:
            assert float(two["train/loss"]) == pytest.approx(float(one["train/loss"]), rel=0.05)
