"""Every objective through the whole line: preview, train, export, decode with a decoder that fits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lit_refusion.cli import main
from lit_refusion.config import choices
from tests.conftest import ARCHITECTURES


@pytest.fixture(scope="module")
def data(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("methods")
    lines = [f'{{"query": "What is {a} + {b}?", "response": "It is {a + b}."}}\n' for a in range(20) for b in range(5)]
    (folder / "records.jsonl").write_text("".join(lines))
    files = [f"data.sources.0.files=[{folder}/records.jsonl]", f"data.tokenizer={tokenizer_folder}"]
    assert main(["prepare", "data=files", *files, f"data.folder={folder}/data"]) == 0
    return folder / "data"


def training(objective: str, data: Path, run: Path, *model: str) -> list[str]:
    return [
        "train", f"objective={objective}", "data=prepared", f"data.folder={data}", f"run={run}",
        "trainer.max_steps=60", "trainer.log_every=20", "trainer.validate_every=20", "trainer.progress=none",
        "trainer.accelerator=cpu", "optimizer.warmup_steps=5", *model,
    ]  # fmt: skip


@pytest.mark.parametrize("objective", choices("objective"))
def test_objective_learns_and_its_model_decodes(
    objective: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [f"++backbone.architecture.{name}={value}" for name, value in ARCHITECTURES["qwen3"].items()]
    if objective == "orthrus":  # it needs a trained model
        assert main(training("ar", data, tmp_path / "base-run", *model)) == 0
        assert main(["export", f"run={tmp_path}/base-run", f"out={tmp_path}/base"]) == 0
        model = ["backbone=pretrained", f"backbone.path={tmp_path}/base"]
    assert main(training(objective, data, tmp_path / "run", *model)) == 0
    lines = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), line.split(","))) for line in lines[1:]]
    losses = [float(row["val/loss"]) for row in rows if row["val/loss"]]
    assert losses[-1] < losses[0]
    assert main(["export", f"run={tmp_path}/run", f"out={tmp_path}/model"]) == 0
    capsys.readouterr()
    assert main(["generate", f"model={tmp_path}/model", "prompt=What is 1 + 2?", "decoder.max_new_tokens=16"]) == 0
    assert "forward passes" in capsys.readouterr().out


@pytest.mark.parametrize("objective", choices("objective"))
def test_preview_shows_what_is_trained(
    objective: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "preview",
        f"objective={objective}",
        "data=prepared",
        f"data.folder={data}",
        f"out={tmp_path}",
        "example=3",
    ]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    name = {"ar": "autoregressive", "sdar": "bd3", "fast_dllm_v2": "bd3"}.get(objective, objective)
    assert f"conventions: objective {name}" in output
    assert "supervised rows" in output
    assert re.search(r"What is \d+ \+ \d+\?", output)
    pictures = list(tmp_path.glob("*.png"))
    assert len(pictures) == (2 if objective == "fast_dllm_v2" else 1)
    assert all(picture.stat().st_size > 1000 for picture in pictures)


def test_preview_of_an_example_that_is_not_there(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preview", "data=prepared", f"data.folder={data}", "example=1000"]) == 2
    assert "example=1000" in capsys.readouterr().err
