"""The whole line on GSM8K: train both objectives from the same weights, validate, export, decode."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_refusion.cli import main
from tests.conftest import shared_folder

STEPS = 60


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = shared_folder("data", "gsm8k", "train_equations.jsonl")
    folder = tmp_path_factory.mktemp("gsm8k") / "data"
    tokenizer = shared_folder("golden", "model")
    files = [f"data.sources.0.files=[{source}]", f"data.tokenizer={tokenizer}", f"data.folder={folder}"]
    assert main(["prepare", "data=files", *files, "data.max_length=224"]) == 0
    return folder


@pytest.mark.parametrize("objective", ["refusion", "ar"])
def test_validation_loss_falls_and_the_checkpoint_decodes(
    objective: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([
        "train", f"objective={objective}", "data=prepared", f"data.folder={data}", f"run={tmp_path}/run",
        f"trainer.max_steps={STEPS}", "trainer.validate_every=20", "trainer.progress=none", "trainer.accelerator=cpu",
        "loader.max_validation_examples=64",
    ]) == 0  # fmt: skip
    lines = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), line.split(","))) for line in lines[1:]]
    losses = [float(row["val/loss"]) for row in rows if row["val/loss"]]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.75 * losses[0]
    assert main(["export", f"run={tmp_path}/run", f"out={tmp_path}/model"]) == 0
    capsys.readouterr()
    prompt = "Tom has 3 apples and buys 4 more. How many apples does he have?"
    assert main(["generate", f"model={tmp_path}/model", f"prompt={prompt}", "decoder.max_new_tokens=32"]) == 0
    assert "forward passes" in capsys.readouterr().out
