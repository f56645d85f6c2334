"""The estimate of memory against real tensors of tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lit_refusion.config import choices, load_config
from lit_refusion.errors import UserError
from lit_refusion.losses import MAX_LOGITS
from lit_refusion.memory import Placement, Shape, estimate
from lit_refusion.schema import build
from lit_refusion.strategy import StrategyConfig

ROWS, LENGTH = 2, 96
ALONE = Placement()
MODELS = [("qwen3", True), ("qwen3", False), ("llama", True), ("llama", False)]
REPLICATED, FSDP = ("ddp", "single"), "fsdp2"
ZERO1, ZERO2, ZERO3, OFFLOADED = (f"deepspeed_zero{stage}" for stage in ("1", "2", "3", "3_offload"))


def make(name: str = "qwen3", *, tied: bool = True, key_heads: int = 2) -> PreTrainedModel:
    """About half a million parameters, in the proportions of Qwen3-8B's layers."""
    config = AutoConfig.for_model(
        name, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=key_heads, head_dim=32,
        intermediate_size=384, vocab_size=512, max_position_embeddings=128, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def parts_of(model: PreTrainedModel, **changed: Any) -> dict[str, int]:
    settings: dict[str, Any] = {"is_bf16": False, "checkpointing": False, "tokens": ROWS * LENGTH, "supervised": 10}
    return estimate(Shape.of(model.config), ALONE, **{**settings, **changed})


def size(tensors: Iterator[Tensor] | list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# Parameters


@pytest.mark.parametrize(("name", "tied"), MODELS)
def test_the_number_of_parameters_is_that_of_the_model(name: str, tied: bool) -> None:
    model = make(name, tied=tied)
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1)
    everything = sum(parameter.numel() for parameter in model.parameters())
    shape = Shape.of(model.config)
    assert shape.parameters == matrices
    assert shape.parameters == pytest.approx(everything, rel=0.02)
    layer: Any = model.base_model.layers[0]
    assert shape.layer_parameters == sum(p.numel() for p in layer.parameters() if p.ndim > 1)


def test_a_config_without_head_size_or_key_heads_has_the_usual_ones() -> None:
    config = AutoConfig.for_model("llama", hidden_size=64, num_attention_heads=4, intermediate_size=8, vocab_size=16)
    config.head_dim = config.num_key_value_heads = None
    shape = Shape.of(config)
    assert (shape.heads_width, shape.kv_width) == (64, 64)


def test_qwen3_8b_has_its_8_billion_parameters() -> None:
    shape = Shape(layers=36, width=4096, heads_width=4096, kv_width=1024, intermediate=12288, vocabulary=151936,
                  is_tied=False)  # fmt: skip
    assert shape.parameters == pytest.approx(8.19e9, rel=0.001)


@pytest.mark.parametrize(("name", "tied"), MODELS)
def test_weights_gradients_and_optimizer_are_those_of_one_step(name: str, tied: bool) -> None:
    model = make(name, tied=tied)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(16)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    parts = parts_of(model)
    states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert parts["weights"] == pytest.approx(size(model.parameters()), rel=0.02)
    assert parts["gradients"] == pytest.approx(
        size([p.grad for p in model.parameters() if p.grad is not None]), rel=0.02
    )
    assert parts["optimizer"] == pytest.approx(size(states), rel=0.02)


# Activations


class Kept:
    """Bytes that autograd keeps for the backward pass, every storage once, the model's own apart."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def add(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self._storages[storage.data_ptr()] = storage  # held, so that its address is not given away again
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())

    @contextmanager
    def watching(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self.add, lambda tensor: tensor):
            yield


def run(model: PreTrainedModel) -> Tensor:
    """One forward pass of the decoder, as the backbone makes it: with a mask, without a cache, without the head."""
    mask = torch.ones(ROWS, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    places = torch.arange(LENGTH).expand(ROWS, -1)
    ids = torch.randint(0, 512, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return model.base_model(input_ids=ids, position_ids=places, attention_mask=mask, use_cache=False).last_hidden_state


@pytest.mark.parametrize("name", ["qwen3", "llama"])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_activations_are_what_autograd_keeps(name: str, key_heads: int) -> None:
    model = make(name, key_heads=key_heads).train()
    kept = Kept(model)
    with kept.watching():
        run(model)
    ratio = parts_of(model)["activations"] / kept.num_bytes
    assert 0.9 < ratio < 1.1, ratio


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_with_checkpointing_they_are_the_layers_inputs_and_one_layer(name: str) -> None:
    """Kept by the forward pass (checkpoints hold layers' inputs in closures), and by one layer's second pass."""
    model = make(name).train()
    layers: Any = model.base_model.layers
    whole, first = Kept(model), Kept(model)
    inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    handle = layers[0].register_forward_pre_hook(lambda _, *call: inputs.append(call), with_kwargs=True)
    run(model)
    handle.remove()
    with first.watching():
        layers[0](*inputs[0][0], **inputs[0][1])

    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, call: (whole.add(call[0]), None)[1])
    with whole.watching():
        run(model).sum()

    ratio = parts_of(model, checkpointing=True)["activations"] / (whole.num_bytes + first.num_bytes)
    assert 0.9 < ratio < 1.1, ratio


def test_checkpointing_keeps_less_and_bf16_half() -> None:
    model = make()
    everything, checkpointed = parts_of(model)["activations"], parts_of(model, checkpointing=True)["activations"]
    assert checkpointed < everything / 2
    assert parts_of(model, is_bf16=True)["activations"] == everything / 2
    assert parts_of(model, tokens=2 * ROWS * LENGTH)["activations"] == 2 * everything


# Logits


def test_few_rows_have_all_their_logits_and_their_gradients() -> None:
    assert parts_of(make(), supervised=10)["logits"] == 10 * 512 * (4 + 4)
    assert parts_of(make(), supervised=10, is_bf16=True)["logits"] == 10 * 512 * (4 + 4 + 2)


@pytest.mark.parametrize("vocabulary", [512, 151_936, MAX_LOGITS, 3 * MAX_LOGITS])
def test_many_rows_go_through_the_head_in_chunks(vocabulary: int) -> None:
    shape = Shape(layers=1, width=8, heads_width=8, kv_width=8, intermediate=8, vocabulary=vocabulary, is_tied=True)
    logits = [
        estimate(shape, ALONE, is_bf16=False, checkpointing=False, tokens=rows, supervised=rows)["logits"]
        for rows in (10**5, 10**6)
    ]
    assert logits[0] == logits[1]
    most = max(MAX_LOGITS, vocabulary) * 8  # a single row always fits
    assert most - vocabulary * 8 < logits[0] <= most


def test_no_supervised_row_has_no_logits() -> None:
    assert parts_of(make(), supervised=0)["logits"] == 0


def test_the_total_is_the_sum() -> None:
    parts = parts_of(make())
    assert parts.pop("total") == sum(parts.values())


# Shares


def strategy(name: str) -> StrategyConfig:
    return build(load_config("train", [f"strategy={name}"])["strategy"], StrategyConfig)


@pytest.mark.parametrize("world_size", [1, 2, 8, 128])
@pytest.mark.parametrize("name", choices("strategy"))
def test_shares_divide_by_the_number_of_processes_by_stage(name: str, world_size: int) -> None:
    if name == "single" and world_size > 1:
        with pytest.raises(UserError, match=f"strategy=single: {world_size} devices; use strategy=ddp"):
            strategy(name).placement(world_size)
        return
    shares_optimizer = name not in REPLICATED
    shares_gradients = shares_optimizer and name != ZERO1
    shares_parameters = name in (ZERO3, OFFLOADED, FSDP)
    shape, placement = Shape.of(make().config), strategy(name).placement(world_size)
    parts = estimate(shape, placement, is_bf16=False, checkpointing=False, tokens=1, supervised=1)
    whole = shape.parameters * 4
    states = 12 if name.startswith("deepspeed") else 8  # DeepSpeed steps on a copy of the weights
    gathered = (2 * shape.layer_parameters + 512 * 128) * 4 if shares_parameters and world_size > 1 else 0
    shares = 0 if name == OFFLOADED else whole // (world_size if shares_parameters else 1)
    assert parts["weights"] == shares + gathered
    assert parts["gradients"] == whole // (world_size if shares_gradients else 1)
    in_all = 0 if name == OFFLOADED else shape.parameters * states
    assert parts["optimizer"] == in_all // (world_size if shares_optimizer else 1)


@pytest.mark.parametrize("name", choices("strategy"))
def test_in_bf16_deepspeed_keeps_bf16_weights_beside_its_copy_and_the_others_fp32(name: str) -> None:
    shape = Shape.of(make().config)
    parts = estimate(shape, strategy(name).placement(1), is_bf16=True, checkpointing=False, tokens=1, supervised=1)
    num_bytes = 2 if name.startswith("deepspeed") else 4
    weights = 0 if name == OFFLOADED else num_bytes * shape.parameters
    assert (parts["weights"], parts["gradients"]) == (weights, num_bytes * shape.parameters)


@pytest.mark.parametrize("world_size", [2, 16])
def test_every_stage_needs_less_than_the_one_before(world_size: int) -> None:
    """For a model that is large beside the layers that ZeRO-3 gathers."""
    shape = Shape(layers=36, width=4096, heads_width=4096, kv_width=1024, intermediate=12288, vocabulary=151936,
                  is_tied=False)  # fmt: skip
    totals = [
        estimate(shape, strategy(name).placement(world_size), is_bf16=True, checkpointing=True, tokens=4096,
                 supervised=4096)["total"]
        for name in ("ddp", ZERO1, ZERO2, ZERO3, OFFLOADED)
    ]  # fmt: skip
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == len(totals)
