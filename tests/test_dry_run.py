"""`lit-refusion train ... dry_run=true`: what it prints, and that it does nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lit_refusion.cli import main
from lit_refusion.config import choices
from lit_refusion.data.remote import CacheConfig
from lit_refusion.data.shards import Shards
from tests.children import command, prepared_data
from tests.conftest import ARCHITECTURES

PARTS = ["weights", "gradients", "optimizer", "activations", "logits", "total"]
ARCHITECTURE = "++backbone.architecture"


@pytest.fixture(scope="module")
def data(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_data(tmp_path_factory.mktemp("dry"), tokenizer_folder)


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    return tmp_path / "not" / "prepared"


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of a dry run, which must succeed."""
    capsys.readouterr()
    assert main([*arguments, "dry_run=true"]) == 0
    return capsys.readouterr().out.splitlines()


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a dry run ends with."""
    capsys.readouterr()
    assert main([*arguments, "dry_run=true"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith("lit-refusion train: error: ")
    return err


def memory(lines: list[str]) -> dict[str, float]:
    """MiB by part."""
    first = lines.index("memory of a device, estimated:") + 1
    found = [re.fullmatch(r"  (\w+) +([\d,]+\.\d) MiB", line) for line in lines[first : first + len(PARTS)]]
    return {match[1]: float(match[2].replace(",", "")) for match in found if match}


def plan(data: Path, folder: Path, *extra: str, objective: str = "refusion") -> list[str]:
    """A command whose precision does not depend on the machine."""
    return command(data, folder / "run", objective, "trainer.loggers=[csv]", "trainer.precision=32-true", *extra)


@pytest.mark.parametrize("is_prepared", [True, False])
@pytest.mark.parametrize("strategy", choices("strategy"))
def test_world_accumulation_and_memory_are_printed(
    strategy: str, is_prepared: bool, data: Path, nowhere: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes, devices, turns = (1, 1, 12) if strategy == "single" else (3, 2, 2)
    lines = printed(
        plan(data if is_prepared else nowhere, tmp_path, f"strategy={strategy}", f"trainer.num_nodes={nodes}",
             f"trainer.devices={devices}", "trainer.global_batch_size=24", "loader.micro_batch_size=2"),
        capsys,
    )  # fmt: skip
    size = nodes * devices
    assert lines[0].startswith(f"world: {nodes} nodes x {devices} devices = {size} processes, ")
    assert lines[1] == f"step: 24 examples = {size} processes x {turns} micro-batches x 2 examples"
    assert re.fullmatch(r"model: qwen3, 0\.\d M parameters, fp32", lines[2]) or not is_prepared
    assert lines[3].startswith("largest micro-batch: ")
    parts = memory(lines)
    assert list(parts) == PARTS
    assert parts["total"] == pytest.approx(sum(parts.values()) - parts["total"], abs=0.3)
    assert len(lines) == 5 + len(PARTS)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("objective", choices("objective"))
def test_every_objective_is_measured_on_its_longest_examples(
    objective: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = printed(plan(data, tmp_path, objective=objective), capsys)[3]
    found = re.fullmatch(r"largest micro-batch: ([\d,]+) tokens, ([\d,]+) with a loss \(the 8 longest examples\)", line)
    assert found
    tokens, supervised = (int(text.replace(",", "")) for text in found.groups())
    lengths = sorted(Shards(str(data), cache=CacheConfig(folder="unused", max_gigabytes=1.0)).index["length"])[-8:]
    assert 0 < supervised <= tokens
    assert sum(lengths) <= tokens <= 8 * 8 * max(lengths)


def test_packed_rows_hold_no_padding(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def tokens(*extra: str) -> int:
        line = printed(
            plan(data, tmp_path, "loader.micro_batch_size=60", "trainer.global_batch_size=60", *extra), capsys
        )[3]
        return int(line.split()[2].replace(",", ""))

    lengths = Shards(str(data), cache=CacheConfig(folder="unused", max_gigabytes=1.0)).index["length"]
    ar = "objective=ar"
    packed = tokens(ar, "loader=packed", "loader.max_row_length=120", "loader.pad_to_multiple=1")
    assert lengths.sum() <= packed < 1.1 * lengths.sum() < tokens(ar)


def test_rows_are_padded_as_in_training(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = printed(plan(data, tmp_path, "loader.pad_to_multiple=128", objective="ar"), capsys)[3]
    assert line.split()[2] == "1,024"  # 8 rows of less than 128


def test_without_data_the_longest_rows_are_assumed(
    nowhere: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(plan(nowhere, tmp_path, "loader.max_row_length=120", f"{ARCHITECTURE}.vocab_size=512"), capsys)
    assert lines[3] == (
        "largest micro-batch: 960 tokens, 960 with a loss "
        "(all rows of loader.max_row_length=120; the data is not there yet)"
    )
    matrices = 2 * 32 * (2 * 32 + 2 * 16 + 3 * 48) + 512 * 32
    assert memory(lines)["optimizer"] == pytest.approx(matrices * 8 / 2**20, abs=0.06)


def test_a_trained_model_is_read_from_its_config_alone(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(**{**ARCHITECTURES["llama"], "vocab_size": 40_000}).save_pretrained(tmp_path / "model")
    arguments = [text for text in plan(data, tmp_path) if "architecture" not in text]
    lines = printed([*arguments, "backbone=pretrained", f"backbone.path={tmp_path}/model"], capsys)
    assert lines[2] == "model: llama, 2.6 M parameters, fp32"


@pytest.mark.parametrize(
    ("setting", "smaller", "same"),
    [
        ("backbone.gradient_checkpointing=true", ["activations", "total"], ["weights", "optimizer", "logits"]),
        ("trainer.precision=bf16-mixed", ["activations"], ["weights", "gradients", "optimizer"]),
        ("loader.micro_batch_size=1", ["activations", "logits", "total"], ["weights", "gradients", "optimizer"]),
        ("strategy=fsdp2", ["optimizer", "gradients"], ["activations", "logits"]),
    ],
)
def test_settings_that_save_memory_are_seen_to(
    setting: str, smaller: list[str], same: list[str], nowhere: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    base = plan(nowhere, tmp_path, "trainer.devices=2", "trainer.global_batch_size=16", "loader.max_row_length=1024",
                f"{ARCHITECTURE}.vocab_size=8192")  # fmt: skip
    before, after = memory(printed(base, capsys)), memory(printed([*base, setting], capsys))
    assert all(after[name] < before[name] for name in smaller), (before, after)
    assert all(after[name] == before[name] for name in same), (before, after)


@pytest.mark.parametrize(("on_cuda", "expected"), [(False, "fp32"), (True, "bf16")])
def test_auto_precision_is_that_of_the_device(
    on_cuda: bool, expected: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_cuda)
    settings = ["trainer.precision=auto", "trainer.accelerator=auto", "trainer.devices=1"]
    assert printed(plan(data, tmp_path, *settings), capsys)[2].endswith(expected)


def test_auto_precision_on_the_cpu_of_a_machine_with_gpus_is_fp32(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    lines = printed(plan(data, tmp_path, "trainer.precision=auto", "trainer.accelerator=cpu"), capsys)
    assert lines[2].endswith("fp32")


def test_a_slurm_job_is_shown_and_not_submitted(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without sbatch
    lines = printed(plan(data, tmp_path, "launcher=slurm", "launcher.partition=gpu"), capsys)
    script = lines[lines.index("would submit:") + 1 :]
    assert script[0] == "#!/bin/bash"
    assert "#SBATCH --partition=gpu" in script
    assert script[-1] == "exit $code"
    assert "dry_run" not in "\n".join(script)
    assert not (tmp_path / "run").exists()


# Refusals


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        (
            ["trainer.global_batch_size=10"],
            ["trainer.global_batch_size=10", "loader.micro_batch_size=8", "x 1 devices"],
        ),
        (["trainer.devices=3"], ["trainer.global_batch_size=8", "8 x 3 devices = 24"]),
        (["trainer.devices=0"], ["trainer.devices=0", "at least 1, or auto"]),
        (["trainer.num_nodes=many"], ["trainer.num_nodes=many", "at least 1, or auto"]),
        (["strategy=zero9"], ["strategy=zero9: no such choice", "fsdp2"]),
        (["strategy=deepspeed_zero2", "strategy.offload_parameters=true"], ["needs stage 3"]),
        (["strategy.timeout_minutes=0"], ["strategy.timeout_minutes=0", "must be positive"]),
        ([f"{ARCHITECTURE}.model_type=nope"], ["backbone", "nope"]),
    ],
)
@pytest.mark.parametrize("is_prepared", [True, False])
def test_what_does_not_fit_is_one_line(
    settings: list[str], found: list[str], is_prepared: bool, data: Path, nowhere: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    line = refusal(plan(data if is_prepared else nowhere, tmp_path, *settings), capsys)
    for text in found:
        assert text in line
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_not_there_is_one_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [text for text in plan(data, tmp_path) if "architecture" not in text]
    line = refusal([*arguments, "backbone=pretrained", f"backbone.path={tmp_path}/nothing"], capsys)
    assert f"backbone.path={tmp_path}/nothing: cannot read its config: " in line


def test_a_launcher_that_contradicts_the_settings_is_one_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "x"}.items():
        monkeypatch.setenv(name, value)
    assert "the launcher started 2 x 2 processes" in refusal(plan(data, tmp_path, "trainer.devices=8"), capsys)


CRASHES = {
    "text for a number": f"{ARCHITECTURE}.hidden_size=wide",
    "negative layers": f"{ARCHITECTURE}.num_hidden_layers=-1",
}
PASSED_OVER = {
    "no heads": f"{ARCHITECTURE}.num_attention_heads=0",
    "no width": f"{ARCHITECTURE}.hidden_size=0",
    "misspelt field": f"{ARCHITECTURE}.hiden_size=64",
    "heads that do not divide": f"{ARCHITECTURE}.num_attention_heads=3",
    "a vocabulary that is too small": f"{ARCHITECTURE}.vocab_size=64",
    "a model without rotary positions": f"{ARCHITECTURE}.model_type=gpt2",
}


@pytest.mark.parametrize("setting", [*CRASHES.values(), *PASSED_OVER.values()], ids=[*CRASHES, *PASSED_OVER])
def test_training_refuses_an_architecture_that_makes_no_sense(
    setting: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the dry run is held to below."""
    assert main(plan(data, tmp_path, setting)) == 2
    assert "backbone" in capsys.readouterr().err


@pytest.mark.parametrize("setting", CRASHES.values(), ids=list(CRASHES))
def test_an_architecture_of_wrong_types_is_one_line(
    setting: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "backbone" in refusal(plan(data, tmp_path, setting), capsys)


@pytest.mark.parametrize("setting", PASSED_OVER.values(), ids=list(PASSED_OVER))
def test_an_architecture_that_training_refuses_is_refused(
    setting: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "backbone" in refusal(plan(data, tmp_path, setting), capsys)


def test_one_device_strategy_on_two_devices_is_refused_as_in_training(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["strategy=single", "trainer.devices=2", "loader.micro_batch_size=4"]
    assert "strategy=single" in refusal(plan(data, tmp_path, *settings), capsys)


def test_what_does_not_train_has_neither_gradients_nor_optimizer_states(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = memory(printed(plan(data, tmp_path, objective="ar"), capsys))
    lines = printed(plan(data, tmp_path, objective="orthrus"), capsys)
    found = re.search(r"M parameters, (0\.\d) M train beside them", lines[2])
    assert found
    parts = memory(lines)
    assert parts["gradients"] < whole["gradients"] / 3
    assert parts["optimizer"] < whole["optimizer"] / 3
    assert parts["weights"] == pytest.approx(whole["weights"] + parts["gradients"], abs=0.2)
