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


@pytest.mark.parametrize("objective", ["refusion", pytest.param("ar", marks=pytest.mark.slow)])
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


def test_the_official_sample_goes_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two sources of real records, mixed, filtered, prepared by processes, verified, and trained on, packed."""
    sample = shared_folder("data", "refusion_sample", "train.jsonl")
    gsm8k = shared_folder("data", "gsm8k", "train.jsonl")
    tokenizer = shared_folder("golden", "model")
    source = (tmp_path / "conf" / "data").resolve()
    source.mkdir(parents=True)
    fields = (
        "query: query\n    response: response\n    messages: messages\n    hub: null\n    subsets: []\n    split: train"
    )
    limits = "max_tokens: null\n    min_response_tokens: 8\n    deduplicate: true"
    source.joinpath("mixed.yaml").write_text(f"""
folder: {tmp_path}/data
tokenizer: {tokenizer}
sources:
  - name: official
    files: [{sample}]
    {fields}
    weight: 2.0
    max_examples: null
    max_prompt_tokens: 1024
    {limits}
  - name: gsm8k
    files: [{gsm8k}]
    {fields}
    weight: 0.5
    max_examples: 300
    max_prompt_tokens: null
    {limits}
prompt_format: {{style: chat, template_kwargs: {{}}}}
max_length: 2048
num_examples: null
seed: 0
examples_per_shard: 100
on_error: raise
""")
    extra = ["--config-dir", str(tmp_path / "conf")]
    assert main(["prepare", "data=mixed", "num_workers=2", *extra]) == 0
    output = capsys.readouterr().out
    assert "official: read 84, kept " in output
    assert "gsm8k: read 7,473, kept 150, dropped" in output
    assert main(["prepare", "verify", "data=prepared", f"data.folder={tmp_path}/data"]) == 0
    assert "whole" in capsys.readouterr().out
    assert main([
        "train", "objective=refusion", "data=prepared", f"data.folder={tmp_path}/data", f"run={tmp_path}/run",
        "loader=packed", "loader.max_row_length=2048", "loader.micro_batch_size=4", "+loader.mixture.gsm8k=0.5",
        "trainer.global_batch_size=8", "trainer.max_steps=2", "trainer.progress=none", "trainer.accelerator=cpu",
        "++backbone.architecture.max_position_embeddings=2048",
    ]) == 0  # fmt: skip
