"""Sharded checkpoints: whole under their name, resumed by other numbers of ranks, exported; models loaded in shares."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_refusion.cli import main
from lit_refusion.errors import UserError
from lit_refusion.run_folder import checkpoint_path
from lit_refusion.sharded_checkpoint import load_whole
from tests.children import command, figures, prepared_data, run, run_ranks, start, torchrun_environments
from tests.strategies.test_equality import needs_deepspeed, weights

SHARDING = [
    "fsdp2",
    *(pytest.param(f"deepspeed_zero{stage}", marks=needs_deepspeed) for stage in (1, 2, 3)),
]
STEPS = 6


@pytest.fixture(scope="module")
def data(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_data(tmp_path_factory.mktemp("checkpoints"), tokenizer_folder)


def arguments(data: Path, folder: Path, strategy: str, world: int, *extra: str) -> list[str]:
    settings = [f"strategy={strategy}", f"trainer.devices={world}", "loader.micro_batch_size=2", "resume=auto"]
    return command(data, folder, "refusion", *settings, f"trainer.max_steps={STEPS}", "trainer.loggers=[csv]",
                   "optimizer.weight_decay=0.1", "optimizer.schedule=constant", *extra)  # fmt: skip


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of one process."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(*arguments(data, folder, "single", 1))
    return folder


@pytest.mark.parametrize("strategy", SHARDING)
def test_a_run_goes_on_with_other_numbers_of_ranks_and_is_exported(
    strategy: str, whole: Path, data: Path, tmp_path: Path
) -> None:
    """2 ranks, then 1, then 4: weights, moments, step counts and weight decay all have to come through."""
    folder = tmp_path / "run"
    for world, steps in ((2, 2), (1, 4), (4, STEPS)):
        run_ranks(world, [arguments(data, folder, strategy, world, f"trainer.max_steps={steps}")], tmp_path)
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["best.ckpt", "last.ckpt", "previous.ckpt"]  # nothing half-written, nothing intermediate
    expected = weights(whole)
    for name, found in weights(folder).items():
        torch.testing.assert_close(found, expected[name], atol=3e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")
    losses = [{row["step"]: float(row["train/loss"]) for row in figures(run) if row["train/loss"]}
              for run in (folder, whole)]  # fmt: skip
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)

    assert main(["export", f"run={folder}", f"out={tmp_path}/model", "checkpoint=last"]) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    for name, value in exported.items():
        torch.testing.assert_close(value, expected[f"backbone.model.{name}"], atol=3e-5, rtol=1e-4)


def test_damage_to_a_sharded_checkpoint_is_named(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_ranks(2, [arguments(data, folder, "fsdp2", 2, "trainer.max_steps=2")], tmp_path)
    last = checkpoint_path(folder, "last")
    load_whole(last)
    shutil.copytree(last, tmp_path / "copy")
    for name in ("lit_refusion.json", ".metadata"):
        (last / name).unlink()
        with pytest.raises(UserError, match=r"last\.ckpt: damaged or not a checkpoint"):
            load_whole(last)
        shutil.copy(tmp_path / "copy" / name, last / name)
    share = next(last.glob("*.distcp"))
    share.write_bytes(share.read_bytes()[:100])
    with pytest.raises(UserError, match=r"last\.ckpt: damaged or not a checkpoint"):
        load_whole(last)


# Trained models


@pytest.fixture(scope="module", params=["tied", "untied"])
def pretrained(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    tied = f"++backbone.architecture.tie_word_embeddings={'true' if request.param == 'tied' else 'false'}"
    run(*arguments(data, folder / "run", "single", 1, "trainer.max_steps=1", tied))
    assert main(["export", f"run={folder}/run", f"out={folder}/model", "checkpoint=last"]) == 0
    return folder / "model"


def train_without_loading_whole(command: list[str]) -> int:
    """In a child: nobody may call `from_pretrained` on a model."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the whole model is loaded")

    AutoModelForCausalLM.from_pretrained = fail  # type: ignore[method-assign]
    return main(command)


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("deepspeed_zero3", marks=needs_deepspeed)])
def test_a_trained_model_is_loaded_in_shares(strategy: str, pretrained: Path, data: Path, tmp_path: Path) -> None:
    model = ["backbone=pretrained", f"backbone.path={pretrained}"]
    length = ["trainer.max_steps=2"]
    run(*_with_model(arguments(data, tmp_path / "single", "single", 1, *length), model))
    sharded = _with_model(arguments(data, tmp_path / "run", strategy, 2, *length), model)
    children = [
        start(train_without_loading_whole, sharded, log=tmp_path / f"{rank}.log", environment=environment)
        for rank, environment in enumerate(torchrun_environments(2))
    ]
    assert [child.wait() for child in children] == [0, 0], children[0].output[-3000:]
    expected = weights(tmp_path / "single")
    for name, found in weights(tmp_path / "run").items():
        torch.testing.assert_close(found, expected[name], atol=2e-5, rtol=1e-4)


def _with_model(command: list[str], model: list[str]) -> list[str]:
    return [*(text for text in command if "backbone.architecture" not in text), *model]


def test_a_model_that_lacks_a_weight_is_refused(pretrained: Path, data: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(pretrained, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    model = ["backbone=pretrained", f"backbone.path={broken}"]
    command = _with_model(arguments(data, tmp_path / "run", "fsdp2", 2, "trainer.max_steps=2"), model)
    children = [
        start(main, command, log=tmp_path / f"{rank}.log", environment=environment)
        for rank, environment in enumerate(torchrun_environments(2))
    ]
    assert [child.wait() for child in children] == [2, 2]
    for child in children:
        assert "1 weights are not in its files (model.layers.1.mlp.up_proj.weight, ...)" in child.output


def test_deepspeed_without_the_package_names_the_extra(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "deepspeed" else real(name, *rest)
    )
    assert main(arguments(data, tmp_path / "run", "deepspeed_zero2", 1)) == 2
    assert "pip install 'lit-refusion[deepspeed]'" in capsys.readouterr().err
