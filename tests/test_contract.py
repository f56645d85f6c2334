"""What every objective and decoder must do, run over every YAML of conf/objective and conf/decoder."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from lit_refusion.backbone import Backbone
from lit_refusion.config import choices, config_folder, load_config
from lit_refusion.data.prepare import PrepareConfig
from lit_refusion.decoder import Decoder
from lit_refusion.examples import Example
from lit_refusion.noise import Stream, noise
from lit_refusion.objective import Objective
from lit_refusion.schema import build
from lit_refusion.training import TrainConfig
from lit_refusion.views import IGNORE, MASK, Batch, View, collate, pack


def node(group: str, name: str) -> Any:
    return OmegaConf.to_container(OmegaConf.load(config_folder() / group / f"{name}.yaml"), resolve=True)


@pytest.fixture(params=choices("objective"))
def objective(request: pytest.FixtureRequest) -> Objective:
    return build(node("objective", request.param), Objective)


@pytest.fixture(params=choices("decoder"))
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return build(node("decoder", request.param), Decoder)


def examples(count: int = 6) -> list[Example]:
    rng = np.random.default_rng(0)
    return [
        Example(
            index=index,
            prompt_ids=rng.integers(10, 250, rng.integers(1, 12)),
            response_ids=rng.integers(10, 250, [1, 2, 9, 16, 33, 40][index % 6]),
        )
        for index in range(count)
    ]


def views(objective: Objective, epoch: int = 0) -> list[View]:
    return [
        objective.view(item, noise(0, index=item.index, epoch=epoch, stream=Stream.TRAIN_NOISE)) for item in examples()
    ]


def batch(rows: list[list[View]], backbone: Backbone, pad_to_multiple: int = 8) -> Batch:
    return collate(
        rows,
        mask_token_id=backbone.mask_token_id,
        pad_to_multiple=pad_to_multiple,
        num_examples=6,
        num_response_tokens=101,
    )


def prepared(objective: Objective, backbone: Backbone) -> Backbone:
    """A copy that is ready for training; what was added to it is no longer a copy of something else."""
    copied = copy.deepcopy(backbone)
    before = {id(parameter) for parameter in copied.parameters()}
    objective.prepare(copied)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in copied.parameters():
            if id(parameter) not in before:
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return copied


def gradients(objective: Objective, backbone: Backbone, batches: list[Batch]) -> dict[str, torch.Tensor]:
    backbone = prepared(objective, backbone)
    for item in batches:
        objective.loss(backbone, item, step=0).total.backward()
    found = {name: p.grad for name, p in backbone.named_parameters() if p.grad is not None}
    assert set(found) == {name for name, p in backbone.named_parameters() if p.requires_grad}
    return found


def tolerance(gradient: torch.Tensor) -> float:
    """fp32 rounding of sums whose terms carry weights up to 1/t."""
    return 3e-5 * max(1.0, float(gradient.abs().max()))


@pytest.mark.parametrize("group", ["objective", "decoder"])
def test_yaml_lists_every_field(group: str) -> None:
    expected: Any = Objective if group == "objective" else Decoder
    for name in choices(group):
        config = node(group, name)
        cls = type(build(config, expected))
        fields = dataclasses.fields(cls)
        assert set(config) == {"_target_"} | {field.name for field in fields}
        for field in fields:
            assert field.default is dataclasses.MISSING, f"{cls.__name__}.{field.name} has a default"
            assert field.default_factory is dataclasses.MISSING, f"{cls.__name__}.{field.name} has a default"


def test_view_is_a_function_of_example_and_noise(objective: Objective) -> None:
    for one, two in zip(views(objective), views(objective)):
        for field in dataclasses.fields(View):
            np.testing.assert_array_equal(getattr(one, field.name), getattr(two, field.name))


def test_views_are_well_formed(objective: Objective) -> None:
    for epoch in range(8):
        for item, view in zip(examples(), views(objective, epoch)):
            supervised = view.targets != IGNORE
            assert (view.weights[~supervised] == 0).all()
            assert (view.term[~supervised] == -1).all()
            assert np.isin(view.term[supervised], range(len(objective.terms))).all()
            assert np.isfinite(view.weights).all()
            assert (view.input_ids == MASK).any() <= objective.needs_mask_token
            text = np.concatenate([item.prompt_ids, item.response_ids])
            shown = (view.input_ids != MASK) & (view.position_ids < len(text))  # behind it an objective may pad
            np.testing.assert_array_equal(view.input_ids[shown], text[view.position_ids[shown]])


def test_packed_equals_padded(objective: Objective, backbone: Backbone) -> None:
    made = views(objective)
    padded = gradients(objective, backbone, [batch([[view] for view in made], backbone)])
    packed = gradients(objective, backbone, [batch(pack(made, max_length=100), backbone)])
    for name, gradient in padded.items():
        torch.testing.assert_close(packed[name], gradient, atol=tolerance(gradient), rtol=1e-4)


def test_batch_equals_singles(objective: Objective, backbone: Backbone) -> None:
    made = views(objective)
    whole = gradients(objective, backbone, [batch([[view] for view in made], backbone)])
    singles = gradients(objective, backbone, [batch([[view]], backbone, pad_to_multiple=1) for view in made])
    for name, gradient in whole.items():
        torch.testing.assert_close(singles[name], gradient, atol=tolerance(gradient), rtol=1e-4)


def test_padding_content_changes_nothing(objective: Objective, backbone: Backbone) -> None:
    one = batch([[view] for view in views(objective)], backbone)
    ids = torch.where(one.segment_ids == 0, 77, one.input_ids)
    two = one.replace(input_ids=ids, position_ids=torch.where(one.segment_ids == 0, 5, one.position_ids))
    backbone = prepared(objective, backbone)
    with torch.no_grad():
        first, second = (objective.loss(backbone, item, step=0) for item in (one, two))
    torch.testing.assert_close(first.token_loss, second.token_loss, atol=1e-5, rtol=1e-5)


def test_decoder_contract(decoder: Decoder, backbone: Backbone) -> None:
    objective = next(
        objective
        for objective in (build(node("objective", name), Objective) for name in choices("objective"))
        if objective.name in decoder.objectives
    )
    backbone = prepared(objective, backbone)
    small = dataclasses.replace(decoder, max_new_tokens=32, batch_size=2).fit_to(objective.spec(backbone.mask_token_id))
    prompts = [list(range(20, 20 + length)) for length in (1, 5, 9)]
    together = small.generate(backbone, prompts, seed=1)
    assert together == [small.generate(backbone, [p], seed=1, indices=[i])[0] for i, p in enumerate(prompts)]
    for generation in together:
        assert 1 <= len(generation.tokens) <= 32
        assert backbone.mask_token_id not in generation.uncut_tokens
        assert generation.forward_passes == len(generation.steps)
        assert generation.tokens == generation.uncut_tokens[: len(generation.tokens)]


def test_decoder_refuses_prompts_without_tokens(decoder: Decoder, backbone: Backbone) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        decoder.generate(backbone, [[5], []])


RECIPES = [
    name
    for name in choices("experiment")
    if "arms:" not in (config_folder() / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")
]


@pytest.mark.parametrize("experiment", RECIPES)
@pytest.mark.parametrize("objective_name", choices("objective"))
def test_recipes_build_with_every_objective(experiment: str, objective_name: str) -> None:
    config = load_config("train", [f"experiment={experiment}", f"objective={objective_name}"])
    built = build({**config, "data": config["data"]["folder"]}, TrainConfig)
    batch, learning_rate, longest = (160, 2e-4, 2048) if "orthrus" in experiment else (512, 2e-5, 4096)
    assert built.trainer.global_batch_size == batch
    assert (built.optimizer.learning_rate, built.optimizer.schedule) == (learning_rate, "cosine")
    assert config["data"]["max_length"] == longest


@pytest.mark.parametrize("name", ["refusion_3p7m", "refusion_120k", "orthrus_600k", "demo"])
def test_data_sets_build(name: str) -> None:
    build(load_config("prepare", [f"data={name}"])["data"], PrepareConfig)
