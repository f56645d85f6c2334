"""The ablations that come with the project: every step of every one composes and builds."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lit_refusion.ablation.plan import AblateConfig, groups
from lit_refusion.ablation.step import Step
from lit_refusion.ablation.work import Work
from lit_refusion.commands.evaluate import EvaluateConfig
from lit_refusion.comparison.control import FACTS, INTENDED, training_settings
from lit_refusion.config import choices, config_folder, load_config
from lit_refusion.schema import build
from lit_refusion.training import TrainConfig

TRAININGS = {"orthrus_qwen3_8b", "qwen3_8b_120k", "refusion_qwen3_8b"}
"""Experiments of `lit-refusion train`."""
ABLATIONS = sorted(set(choices("experiment")) - TRAININGS)


@functools.cache
def ablation(name: str) -> AblateConfig:
    return build(load_config("ablate", [f"experiment={name}"]), AblateConfig)


@functools.cache
def composed(command: str, shape: tuple[str, ...]) -> str:
    return json.dumps(load_config(command, shape))


def settings(step: Step) -> dict[str, Any]:
    """The settings of a step; steps that differ in values only are composed once."""
    values = dict(text.split("=", 1) for text in step.overrides)
    dotted = {name: text for name, text in values.items() if "." in name or name in ("run", "out", "seed", "model")}
    assert all(name.lstrip("+") == name for name in dotted)
    shape = [f"{name}=null" if name in dotted else f"{name}={text}" for name, text in values.items()]
    config = json.loads(composed(step.command, tuple(shape)))
    for name, text in dotted.items():
        *path, last = name.split(".")
        given: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
        functools.reduce(dict.__getitem__, path, config)[last] = given["value"]
    return config


def steps(name: str) -> list[Step]:
    """All trainings; all tasks of the first arm, and one task of the others."""
    work, found = Work(config=ablation(name), config_dir=None), groups(ablation(name))
    trainings = [step for group in found for step in work.training(group)]
    evaluations = [work.cell_steps(group, cell) for group in found for cell in group.cells]
    return [*trainings, *evaluations[0], *(own[0] for own in evaluations[1:])]


def test_every_file_is_a_training_or_an_ablation() -> None:
    assert set(choices("experiment")) >= TRAININGS
    assert len(ABLATIONS) >= 20


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_step_composes_and_builds(name: str) -> None:
    allowed: set[str] = set()
    for step in steps(name):
        config = settings(step)
        if step.command == "train":
            build({**config, "data": config["data"]["folder"]}, TrainConfig)
            allowed |= set(training_settings(config))
        else:
            evaluation = build({"decoder": None, "objective": None, **config}, EvaluateConfig)
            assert evaluation.decoder is not None
    for key in ablation(name).allow:
        assert key in {*FACTS, *allowed} or any(known.startswith(f"{key}.") for known in allowed)
        assert key.split(".")[0] not in INTENDED


@pytest.mark.parametrize("name", [name for name in ABLATIONS if f"{name}_demo" in ABLATIONS])
def test_a_study_and_its_demo_vary_the_same_settings(name: str) -> None:
    def varied(config: AblateConfig) -> set[str]:
        texts = [(*arm.train, *arm.decode) for arm in config.arms.values()]
        return {text.split("=")[0] for own in texts for text in own if any(text not in others for others in texts)}

    assert varied(ablation(name)) == varied(ablation(f"{name}_demo"))


def test_all_studies_have_a_demo() -> None:
    assert {name.removesuffix("_demo") for name in ABLATIONS if name.endswith("_demo")} >= {
        name for name in ABLATIONS if not name.endswith("_demo") and not name.startswith("controlled_")
    }


def test_the_files_at_the_base_are_no_experiments_of_their_own() -> None:
    names = {path.stem for path in (config_folder() / "experiment" / "base").glob("*.yaml")}
    assert names
    assert not names & set(choices("experiment"))
    assert Path(config_folder(), "ablate.yaml").is_file()
