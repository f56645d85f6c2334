"""Loading in shares: skeletons, storage, and weights that are read tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lit_refusion.errors import UserError
from lit_refusion.sharded_loading import (
    is_skeleton,
    materialise,
    materialise_own,
    skeleton,
    stream_weights,
    weight_files,
)
from tests.conftest import ARCHITECTURES

CPU = torch.device("cpu")
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip
NAME = "model.layers.1.mlp.up_proj.weight"


def make(name: str, *, tied: bool, rope: str = "default") -> PreTrainedModel:
    fields: dict[str, Any] = {**ARCHITECTURES[name], "vocab_size": 64, "tie_word_embeddings": tied}
    if ROPES[rope]:
        fields["rope_parameters"] = {"rope_theta": 10000.0, **ROPES[rope]}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32)


@pytest.fixture(params=[(name, tied) for name in sorted(ARCHITECTURES) for tied in (True, False)], ids=str)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    name, tied = request.param
    return make(name, tied=tied)


@pytest.fixture
def folder(model: PreTrainedModel, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def bare(folder: Path) -> PreTrainedModel:
    return skeleton(str(folder), attention="sdpa", trust_remote_code=False)


def made(folder: Path) -> PreTrainedModel:
    """With storage on the CPU that holds NaN."""
    model = bare(folder)
    materialise(model, device=CPU, shared={})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return model


def copy(parameter: nn.Parameter, tensor: Tensor | None) -> None:
    assert tensor is not None
    with torch.no_grad():
        parameter.copy_(tensor)


def fill(folder: Path) -> PreTrainedModel:
    model = made(folder)
    stream_weights(model, weight_files(str(folder)), copy, copies={}, is_reader=True)
    return model


def assert_same(one: PreTrainedModel, two: PreTrainedModel) -> None:
    names = dict(two.named_parameters())
    assert dict(one.named_parameters()).keys() == names.keys()
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, names[name]), name


# Skeletons


def test_parameters_have_no_storage_and_the_names_and_shapes_of_the_model(folder: Path, model: PreTrainedModel) -> None:
    found = bare(folder)
    assert is_skeleton(found)
    assert not is_skeleton(model)
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in found.parameters())
    shapes = [(name, parameter.shape) for name, parameter in found.named_parameters()]
    assert shapes == [(name, parameter.shape) for name, parameter in model.named_parameters()]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_rotary_buffers_are_real_and_those_of_a_normal_model(name: str, rope: str, tmp_path: Path) -> None:
    normal = make(name, tied=True, rope=rope)
    normal.save_pretrained(tmp_path)
    found = dict(bare(tmp_path).named_buffers())
    expected = dict(normal.named_buffers())
    assert found.keys() == expected.keys()
    assert any("inv_freq" in name for name in found)
    for name, buffer in found.items():
        assert not buffer.is_meta
        assert torch.equal(buffer, expected[name]), name


@pytest.mark.parametrize("rope", ROPES)
def test_a_filled_skeleton_computes_what_the_model_computes(rope: str, tmp_path: Path) -> None:
    normal = make("llama", tied=False, rope=rope)
    normal.save_pretrained(tmp_path)
    ids = torch.arange(48)[None]
    with torch.no_grad():
        assert torch.equal(fill(tmp_path)(ids).logits, normal(ids).logits)


def test_a_model_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"backbone.path={tmp_path}: cannot build the model: "):
        bare(tmp_path)


def test_a_model_that_is_not_supported_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="'gpt2' has no rotary position embedding"):
        bare(tmp_path)


# Storage


@pytest.mark.parametrize("tied", [True, False])
def test_ties_survive(tied: bool, tmp_path: Path) -> None:
    make("qwen3", tied=tied).save_pretrained(tmp_path)
    found = made(tmp_path)
    assert not is_skeleton(found)
    head: Any = found.get_output_embeddings()
    table: Any = found.get_input_embeddings()
    assert (head.weight is table.weight) is tied


@pytest.mark.parametrize("tied", [True, False])
def test_ties_survive_when_modules_are_made_one_by_one(tied: bool, tmp_path: Path) -> None:
    make("llama", tied=tied).save_pretrained(tmp_path)
    found, shared = bare(tmp_path), dict[int, nn.Parameter]()
    for module in found.modules():
        materialise_own(module, device=CPU, shared=shared)
    assert not is_skeleton(found)
    head: Any = found.get_output_embeddings()
    table: Any = found.get_input_embeddings()
    assert (head.weight is table.weight) is tied


def test_a_module_alone_is_made_and_the_others_stay_bare(folder: Path) -> None:
    found = bare(folder)
    layers: Any = found.base_model.layers
    materialise(layers[0], device=CPU, shared={})
    assert not is_skeleton(layers[0])
    assert is_skeleton(layers[1])


def test_parameters_with_storage_are_left_alone_and_frozen_ones_stay_frozen() -> None:
    module = nn.Linear(2, 3)
    kept = module.bias
    module.weight = nn.Parameter(torch.empty(3, 2, device="meta"), requires_grad=False)
    materialise(module, device=CPU, shared={})
    assert module.bias is kept
    assert not module.weight.is_meta
    assert not module.weight.requires_grad


# Weights


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_a_model_is_filled_exactly(max_shard_size: str, model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (len(weight_files(str(tmp_path))) > 1) is (max_shard_size == "20KB")
    assert_same(fill(tmp_path), model)


def test_bf16_files_fill_an_fp32_model(tmp_path: Path) -> None:
    model = make("qwen3", tied=True).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    found = fill(tmp_path)
    assert {parameter.dtype for parameter in found.parameters()} == {torch.float32}
    assert_same(found, model.float())


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_ranks_that_do_not_read_take_part_in_the_same_order(max_shard_size: str, tmp_path: Path) -> None:
    make("llama", tied=False).save_pretrained(tmp_path, max_shard_size=max_shard_size)
    orders: list[list[int]] = []
    for is_reader in (True, False):
        model = made(tmp_path)
        places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
        orders.append([])

        def note(
            parameter: nn.Parameter, tensor: Tensor | None, places: dict[int, int] = places, reads: bool = is_reader
        ) -> None:
            assert (tensor is not None) is reads
            orders[-1].append(places[id(parameter)])

        stream_weights(model, weight_files(str(tmp_path)), note, copies={}, is_reader=is_reader)
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == list(range(len(orders[0])))


def test_tensors_that_the_model_has_no_use_for_are_passed_over(tmp_path: Path) -> None:
    model = make("qwen3", tied=False)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.rotary_emb.inv_freq": torch.ones(3)}, file, metadata={"format": "pt"})
    assert_same(fill(tmp_path), model)


@pytest.mark.parametrize("is_reader", [True, False])
def test_a_missing_weight_is_named_on_every_rank(is_reader: bool, folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[NAME]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"{folder}: 1 weights are not in its files \({NAME}, \.\.\.\)"):
        stream_weights(made(folder), weight_files(str(folder)), copy, copies={}, is_reader=is_reader)


def test_a_missing_file_of_several_is_told_by_its_weights(tmp_path: Path) -> None:
    make("llama", tied=False).save_pretrained(tmp_path, max_shard_size="20KB")
    weight_files(str(tmp_path))[-1].unlink()
    with pytest.raises(UserError, match=r"weights are not in its files .* fetch the model again"):
        fill(tmp_path)


@pytest.mark.parametrize("length", [0, 4, 100, -10])
@pytest.mark.parametrize("is_reader", [True, False])
def test_a_damaged_file_is_named_on_every_rank(length: int, is_reader: bool, tmp_path: Path) -> None:
    make("qwen3", tied=True).save_pretrained(tmp_path, max_shard_size="20KB")
    model, files = made(tmp_path), weight_files(str(tmp_path))
    files[1].write_bytes(files[1].read_bytes()[:length])
    with pytest.raises(UserError, match=rf"{files[1]}: cannot read it: .*; fetch the model again"):
        stream_weights(model, files, copy, copies={}, is_reader=is_reader)


@pytest.mark.parametrize("shape", [(7, 32), (48, 1), (1,)])
def test_a_weight_of_another_shape_is_named(shape: tuple[int, ...], tmp_path: Path) -> None:
    """(48, 1) and (1,) would even be spread over the whole weight without a word."""
    make("qwen3", tied=True).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), NAME: torch.ones(shape)}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=NAME):
        fill(tmp_path)


def test_a_folder_with_weights_in_another_format_has_no_files(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert weight_files(str(tmp_path)) == []


def test_a_hub_id_that_cannot_be_fetched_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr("lit_refusion.sharded_loading.snapshot_download", refuse)
    with pytest.raises(UserError, match=r"backbone\.path=nobody/nothing: cannot load the model: no network"):
        weight_files("nobody/nothing")


def test_a_hub_id_is_fetched_without_other_formats(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}
    make("qwen3", tied=True).save_pretrained(tmp_path)

    def fetch(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr("lit_refusion.sharded_loading.snapshot_download", fetch)
    assert weight_files("somebody/model") == [tmp_path / "model.safetensors"]
    assert asked == {"name": "somebody/model", "allow_patterns": ["*.safetensors", "*.json"]}
