"""Orthrus: golden vectors, the slow reference and its gradients, the rows and their mask, and what trains."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import objectives.orthrus
from lit_refusion.attention import CAUSAL, dense_mask
from lit_refusion.backbone import Backbone
from lit_refusion.context import Context
from lit_refusion.errors import UserError
from lit_refusion.examples import Example
from lit_refusion.noise import Stream, noise
from lit_refusion.views import IGNORE, MASK, Batch, View, collate, pack
from objectives.orthrus import Orthrus
from tests.conftest import ARCHITECTURES, shared_folder
from tests.reference.orthrus import SupervisedRow, frozen_view, loss_rows

ORTHRUS = Orthrus(
    block_size=4, num_anchors=3, per_tokens=None, twins="qkvo", loss_type="kl", mask_share=1.0, complementary=False
)
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def example(prompt: Any, response: Any, index: int = 0) -> Example:
    return Example(index=index, prompt_ids=np.asarray(prompt, np.int64), response_ids=np.asarray(response, np.int64))


def examples(*lengths: tuple[int, int], seed: int = 0) -> list[Example]:
    """Examples of ordinary tokens with these lengths of prompt and response."""
    rng = np.random.default_rng(seed)
    return [
        example(rng.integers(10, 250, num_prompt), rng.integers(10, 250, num_response), index)
        for index, (num_prompt, num_response) in enumerate(lengths)
    ]


EXAMPLES = examples((5, 9), (1, 6), (7, 2))


def draw(index: int = 0, epoch: int = 0) -> np.random.Generator:
    return noise(3, index=index, epoch=epoch, stream=Stream.TRAIN_NOISE)


def batch_of(rows: list[list[View]], mask_token_id: int, *, pad_to_multiple: int = 8) -> Batch:
    return collate(
        rows, mask_token_id=mask_token_id, pad_to_multiple=pad_to_multiple, num_examples=1, num_response_tokens=1
    )


def perturb_twins(backbone: Backbone, *, scale: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in backbone.parameters():
            if parameter.requires_grad:
                parameter += scale * torch.randn(parameter.shape, generator=generator)


def prepared(backbone: Backbone, objective: Orthrus = ORTHRUS) -> Backbone:
    """With twins that are no longer copies."""
    objective.prepare(backbone)
    perturb_twins(backbone)
    return backbone


def trainable(backbone: Backbone) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in backbone.named_parameters() if parameter.requires_grad}


def gradients(backbone: Backbone, total: Tensor) -> dict[str, Tensor]:
    backbone.zero_grad()
    total.backward()
    return {
        name: parameter.grad.clone() for name, parameter in backbone.named_parameters() if parameter.grad is not None
    }


def choices_of(view: View, block_size: int) -> tuple[list[int], list[list[bool]]]:
    """Anchors and hidden tokens that a row was made with."""
    anchors = view.position_ids[view.noisy].reshape(-1, block_size)[:, 0]
    return anchors.tolist(), (view.input_ids[view.noisy] == MASK).reshape(-1, block_size)[:, 1:].tolist()


def reference_rows(backbone: Backbone, item: Example, view: View, block_size: int) -> list[SupervisedRow]:
    anchors, hidden = choices_of(view, block_size)
    return loss_rows(
        backbone.model,
        [*item.prompt_ids.tolist(), *item.response_ids.tolist()],
        anchors=anchors,
        hidden=hidden,
        block_size=block_size,
        mask_id=backbone.mask_token_id,
    )


# --- golden vectors ---


@pytest.fixture(scope="module")
def golden_cases() -> list[dict[str, Any]]:
    return json.loads(shared_folder("golden", "orthrus.json").read_text())["train"]


@pytest.fixture(scope="module")
def golden_model() -> Backbone:
    backbone = Backbone.from_pretrained(shared_folder("golden", "model"))
    ORTHRUS.prepare(backbone)
    twins = load_file(shared_folder("golden", "orthrus_twins.safetensors"))
    renamed = {
        name.replace("self_attn.", "self_attn.twin.").replace("_diff", ""): tensor for name, tensor in twins.items()
    }
    own = {name.removeprefix("model."): parameter for name, parameter in trainable(backbone).items()}
    assert set(own) == set(renamed)
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(renamed[name])
    return backbone


@pytest.mark.parametrize("loss_type", ["kl", "ce"])
def test_golden_losses(golden_cases: list[dict[str, Any]], golden_model: Backbone, loss_type: Any) -> None:
    assert len(golden_cases) == 8
    for case in golden_cases:
        objective = dataclasses.replace(ORTHRUS, block_size=case["block_size"], loss_type=loss_type)
        shape = len(case["anchors"]), case["block_size"] - 1
        view = objective.arrange(
            example(case["prompt_ids"], case["response_ids"]), case["anchors"], is_masked=np.ones(shape, bool)
        )
        supervised = (view.targets != IGNORE)[view.noisy].reshape(len(case["anchors"]), -1)
        assert np.argwhere(supervised).tolist() == case["rows"]
        with torch.no_grad():
            loss = objective.loss(golden_model, batch_of([[view]], golden_model.mask_token_id), step=0)
        np.testing.assert_allclose(loss.token_loss, case[loss_type], atol=1e-4)
        assert float(loss.total) == pytest.approx(np.mean(case[loss_type]), abs=1e-4)


def test_the_slow_reference_gives_the_golden_losses(golden_cases: list[dict[str, Any]], golden_model: Backbone) -> None:
    for case in golden_cases[:2]:
        with torch.no_grad():
            rows = loss_rows(
                golden_model.model,
                case["prompt_ids"] + case["response_ids"],
                anchors=case["anchors"],
                hidden=[[True] * (case["block_size"] - 1)] * len(case["anchors"]),
                block_size=case["block_size"],
                mask_id=golden_model.mask_token_id,
            )
        assert [[row.block, row.i] for row in rows] == case["rows"]
        np.testing.assert_allclose([row.kl for row in rows], case["kl"], atol=1e-4)
        np.testing.assert_allclose([row.ce for row in rows], case["ce"], atol=1e-4)


# --- the slow reference ---


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"twins": "qkv"},
        {"loss_type": "ce", "mask_share": 0.5},
        {"block_size": 2, "num_anchors": 20},
        {"block_size": 5, "mask_share": 0.5, "complementary": True},
        {"block_size": 6, "mask_share": 0.3, "complementary": True, "loss_type": "ce", "twins": "qkv"},
        {"num_anchors": 2, "per_tokens": 6},
    ],
    ids=lambda change: ",".join(f"{name}={value}" for name, value in change.items()) or "default",
)
def test_loss_and_gradients_equal_the_slow_reference(backbone: Backbone, change: dict[str, Any]) -> None:
    objective = dataclasses.replace(ORTHRUS, **change)
    prepared(backbone, objective)
    pairs = [(item, objective.views(item, draw(item.index))) for item in EXAMPLES]
    expected: list[float] = []
    total = torch.zeros(())
    for item, views in pairs:
        rows = [reference_rows(backbone, item, view, objective.block_size) for view in views]
        losses = [getattr(row, objective.loss_type) for part in rows for row in part]
        total = total + torch.stack(losses).mean()
        expected += [float(loss.detach()) for loss in losses]
    reference = gradients(backbone, total)

    views = [view for _, views in pairs for view in views]
    padded = [[view] for view in views]
    loss = objective.loss(backbone, batch_of(padded, backbone.mask_token_id), step=0)
    np.testing.assert_allclose(loss.token_loss, expected, atol=1e-5, rtol=1e-4)
    for rows in (padded, pack(views, max_length=60)):
        loss = objective.loss(backbone, batch_of(rows, backbone.mask_token_id), step=0)
        torch.testing.assert_close(loss.total, total, atol=1e-5, rtol=1e-5)
        actual = gradients(backbone, loss.total)
        assert set(actual) == set(reference) == set(trainable(backbone))
        for name, gradient in reference.items():
            torch.testing.assert_close(actual[name], gradient, atol=1e-5, rtol=1e-3)
            assert gradient.abs().max() > 1e-4


def test_packing_joins_rows() -> None:
    """So that the comparison with the reference is about packed rows."""
    assert max(map(len, pack([ORTHRUS.view(item, draw(item.index)) for item in EXAMPLES], max_length=60))) > 1


def test_gradient_checkpointing_gives_the_same_gradients(backbone: Backbone) -> None:
    prepared(backbone).train()
    batch = batch_of([[ORTHRUS.view(item, draw(item.index))] for item in EXAMPLES], backbone.mask_token_id)
    plain = gradients(backbone, ORTHRUS.loss(backbone, batch, step=0).total)
    calls: list[bool] = []
    twin = backbone.layers[0].self_attn.twin
    twin.q_proj.register_forward_hook(lambda *args: calls.append(True))
    backbone.enable_gradient_checkpointing()
    again = gradients(backbone, ORTHRUS.loss(backbone, batch, step=0).total)
    assert len(calls) == 2  # once more in the backward pass
    assert set(again) == set(plain)
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, atol=1e-6, rtol=1e-4)


def test_flex_attention_gives_the_same_losses(tokenizer: Any) -> None:
    found = []
    for kernel in ("sdpa", "flex_attention"):
        backbone = Backbone.from_architecture(ARCHITECTURES["qwen3"], tokenizer=tokenizer, seed=1, attention=kernel)
        prepared(backbone)
        batch = batch_of([[ORTHRUS.view(item, draw(item.index))] for item in EXAMPLES], backbone.mask_token_id)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            found.append(ORTHRUS.loss(backbone, batch, step=0).token_loss)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


# --- what trains ---


@pytest.mark.parametrize("twins", ["qkvo", "qkv"])
def test_only_the_twins_change(backbone: Backbone, twins: Any) -> None:
    before = {name: parameter.detach().clone() for name, parameter in backbone.named_parameters()}
    objective = dataclasses.replace(ORTHRUS, twins=twins)
    prepared(backbone, objective)
    modules = [*PROJECTIONS, "o_proj"] if twins == "qkvo" else list(PROJECTIONS)
    if twins == "qkvo" and "qwen3" in type(backbone.model).__name__.lower():
        modules += ["q_norm", "k_norm"]
    expected = {
        f"model.model.layers.{layer}.self_attn.twin.{module}.weight" for layer in range(2) for module in modules
    }
    assert set(trainable(backbone)) == expected
    started = {name: parameter.detach().clone() for name, parameter in trainable(backbone).items()}

    batch = batch_of([[objective.view(item, draw(item.index))] for item in EXAMPLES], backbone.mask_token_id)
    optimizer = torch.optim.AdamW(backbone.parameters(), lr=0.1, weight_decay=0.1)
    objective.loss(backbone, batch, step=0).total.backward()
    optimizer.step()

    for name, parameter in backbone.named_parameters():
        if name in expected:
            assert not torch.equal(parameter, started[name])
        else:
            assert parameter.grad is None
            assert torch.equal(parameter, before[name])
    assert set(dict(backbone.named_parameters())) == set(before) | expected


def test_twins_start_as_copies(backbone: Backbone) -> None:
    ORTHRUS.prepare(backbone)
    parameters = dict(backbone.model.named_parameters())
    assert set(backbone.copies) == {name.removeprefix("model.") for name in trainable(backbone)}
    for name, origin in backbone.copies.items():
        assert torch.equal(parameters[name], parameters[origin])
        assert parameters[name].data_ptr() != parameters[origin].data_ptr()
    batch = batch_of([[ORTHRUS.view(item, draw(item.index))] for item in EXAMPLES], backbone.mask_token_id)
    with torch.no_grad():
        assert torch.equal(backbone(batch, CAUSAL, adapted=True), backbone(batch, CAUSAL))
        perturb_twins(backbone)
        is_equal = torch.isclose(backbone(batch, CAUSAL, adapted=True), backbone(batch, CAUSAL)).all(dim=-1)
        assert not is_equal[batch.segment_ids > 0].any()


def test_the_frozen_view_is_the_model_that_was_given(backbone: Backbone) -> None:
    """The class of the attention layers changes, their names and what they compute do not."""
    original = copy.deepcopy(backbone)
    prepared(backbone)
    ids = torch.tensor([[*EXAMPLES[0].prompt_ids, *EXAMPLES[0].response_ids]])
    with torch.no_grad():
        assert torch.equal(backbone.model(ids).logits, original.model(ids).logits)
        reference = backbone.model.lm_head(frozen_view(backbone.model, ids[0].tolist())[0])
        torch.testing.assert_close(reference, original.model(ids).logits[0], atol=1e-4, rtol=1e-4)


def test_the_clean_pass_has_no_gradient(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(backbone)
    contexts: list[Context] = []
    passes: list[tuple[bool, bool]] = []
    monkeypatch.setattr(objectives.orthrus, "Context", lambda batch: contexts.append(Context(batch)) or contexts[-1])
    backbone.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: passes.append((kwargs.get("adapted", False), torch.is_grad_enabled())),
        with_kwargs=True,
    )
    batch = batch_of([[ORTHRUS.view(EXAMPLES[0], draw())]], backbone.mask_token_id)
    ORTHRUS.loss(backbone, batch, step=0)
    assert passes == [(False, False), (True, True)]
    assert len(contexts[0].layers) == len(backbone.layers)
    for pair in contexts[0].layers:
        assert [tensor.shape[2] for tensor in pair] == [len(EXAMPLES[0])] * 2  # the clean tokens alone
        assert not any(tensor.requires_grad for tensor in pair)


@pytest.mark.parametrize(("twins", "billions", "share"), [("qkvo", 1.510, 0.156), ("qkv", 0.906, 0.100)])
def test_trainable_share_of_qwen3_8b(twins: Any, billions: float, share: float) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(
                "qwen3",
                num_hidden_layers=36,
                hidden_size=4096,
                num_attention_heads=32,
                num_key_value_heads=8,
                head_dim=128,
                intermediate_size=12288,
                vocab_size=151936,
                tie_word_embeddings=False,
            )
        )
    backbone = Backbone(model, mask_token_id=151669, eos_token_id=151645, attention="sdpa")
    num_frozen = sum(parameter.numel() for parameter in backbone.parameters())
    dataclasses.replace(ORTHRUS, twins=twins).prepare(backbone)
    num_trained = sum(parameter.numel() for parameter in trainable(backbone).values())
    assert num_trained / 1e9 == pytest.approx(billions, abs=5e-4)
    assert num_trained / (num_frozen + num_trained) == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize(
    ("model_type", "layer"), [("gpt_neox", "GPTNeoXLayer"), ("phi3", "Phi3DecoderLayer")]
)  # without self_attn, and with its projections in one
def test_other_models_are_refused(model_type: str, layer: str) -> None:
    config = AutoConfig.for_model(
        model_type, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    backbone = Backbone(AutoModelForCausalLM.from_config(config), mask_token_id=5, eos_token_id=2, attention="sdpa")
    with pytest.raises(UserError, match=rf"objective=orthrus: {layer} has no self_attn with q_proj.*Qwen3"):
        ORTHRUS.prepare(backbone)


# --- rows ---


def test_a_row_written_out_by_hand() -> None:
    """Blocks of 3 at places 2 and 4 of [1 2 | 10 11 12 13]; the second runs over the end."""
    view = dataclasses.replace(ORTHRUS, block_size=3).arrange(
        example([1, 2], [10, 11, 12, 13]), np.array([2, 4]), is_masked=np.array([[True, False], [True, True]])
    )
    assert view.input_ids.tolist() == [1, 2, 10, 11, 12, 13, 10, MASK, 12, 12, MASK, MASK]
    assert view.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 4, 4, 5, 6]
    assert view.targets.tolist() == [IGNORE] * 6 + [11, IGNORE, IGNORE, 13, IGNORE, IGNORE]
    assert view.term.tolist() == [-1] * 6 + [0, -1, -1, 0, -1, -1]
    np.testing.assert_allclose(view.weights, [0] * 6 + [0.5, 0, 0, 0.5, 0, 0])
    assert view.noisy.tolist() == [False] * 6 + [True] * 6


@pytest.mark.parametrize("mask_share", [0.5, 1.0])
def test_what_lies_behind_the_end_is_hidden_and_not_supervised(mask_share: float) -> None:
    objective = dataclasses.replace(ORTHRUS, block_size=6, num_anchors=99, mask_share=mask_share)
    item = EXAMPLES[0]
    for epoch in range(5):
        view = objective.view(item, draw(epoch=epoch))
        is_behind = view.noisy & (view.position_ids >= len(item))
        predicts_behind = view.noisy & (view.position_ids + 1 >= len(item))
        assert is_behind.any()
        assert (view.input_ids[is_behind] == MASK).all()
        assert (view.targets[predicts_behind] == IGNORE).all()


def test_supervised_rows_predict_hidden_tokens_of_the_text() -> None:
    objective = dataclasses.replace(ORTHRUS, block_size=6, mask_share=0.5)
    for item in examples((5, 30), (1, 12)):
        text = np.concatenate([item.prompt_ids, item.response_ids])
        view = objective.view(item, draw(item.index))
        anchors, hidden = choices_of(view, 6)
        targets = view.targets[view.noisy].reshape(-1, 6)
        for anchor, flags, row in zip(anchors, hidden, targets, strict=True):
            places = [anchor + 1 + j for j in range(5)]
            expected = [text[p] if flag and p < len(text) else IGNORE for p, flag in zip(places, flags, strict=True)]
            assert row.tolist() == [*expected, IGNORE]
        assert (view.targets[~view.noisy] == IGNORE).all()
        assert view.weights.sum() == pytest.approx(1)


def test_anchors_are_distinct_response_tokens_that_another_one_follows() -> None:
    item = examples((6, 8))[0]
    for count, expected in ((3, 3), (7, 7), (50, 7)):
        objective = dataclasses.replace(ORTHRUS, num_anchors=count)
        found = [objective.draw_anchors(item, draw(epoch=epoch)).tolist() for epoch in range(20)]
        for anchors in found:
            assert len(set(anchors)) == len(anchors) == expected
            assert anchors == sorted(anchors)
        assert {place for anchors in found for place in anchors} == set(range(6, 13))


def test_anchors_follow_the_noise_alone() -> None:
    item = examples((6, 40))[0]
    assert ORTHRUS.draw_anchors(item, draw()).tolist() == ORTHRUS.draw_anchors(item, draw()).tolist()
    assert len({tuple(ORTHRUS.draw_anchors(item, draw(epoch=epoch))) for epoch in range(5)}) > 1


@pytest.mark.parametrize(("lengths", "expected"), [((20, 44), 16), ((20, 45), 17), ((1, 2), 1), ((60, 5), 4)])
def test_anchors_per_tokens(lengths: tuple[int, int], expected: int) -> None:
    """16 in 64 tokens: a quarter of the text, rounded up, and never more than there are."""
    objective = dataclasses.replace(ORTHRUS, num_anchors=16, per_tokens=64)
    assert len(objective.draw_anchors(examples(lengths)[0], draw())) == expected


@pytest.mark.parametrize(("block_size", "mask_share", "count"), [(5, 0.5, 2), (9, 0.3, 2), (9, 0.01, 1), (2, 0.5, 1)])
def test_mask_share_hides_as_many_of_every_block(block_size: int, mask_share: float, count: int) -> None:
    objective = dataclasses.replace(ORTHRUS, block_size=block_size, mask_share=mask_share)
    item = examples((3, 200))[0]
    seen = np.zeros(block_size - 1, bool)
    for epoch in range(20):
        anchors, hidden = choices_of(objective.view(item, draw(epoch=epoch)), block_size)
        inside = [flags for anchor, flags in zip(anchors, hidden, strict=True) if anchor + block_size <= len(item)]
        assert [sum(flags) for flags in inside] == [count] * len(inside)
        seen |= np.any(inside, axis=0)
    assert seen.all()


@pytest.mark.parametrize("mask_share", [0.25, 0.5, 0.8])
def test_complementary_rows_supervise_every_draft_once(mask_share: float) -> None:
    objective = dataclasses.replace(ORTHRUS, block_size=6, mask_share=mask_share, complementary=True)
    for item in examples((5, 9), (1, 30), (3, 2)):
        one, two = objective.views(item, draw(item.index))
        anchors, _ = choices_of(one, 6)
        assert choices_of(two, 6)[0] == anchors
        count = sum(view.targets[view.noisy].reshape(-1, 6) != IGNORE for view in (one, two))
        expected = [[anchor + i + 1 < len(item) for i in range(5)] + [False] for anchor in anchors]
        assert count.tolist() == np.array(expected, int).tolist()
        assert one.weights.sum() + two.weights.sum() == pytest.approx(1)
        assert len({*one.weights[one.weights > 0], *two.weights[two.weights > 0]}) == 1


def test_a_response_of_one_token_reaches_every_twin_without_gradient(backbone: Backbone) -> None:
    prepared(backbone)
    view = ORTHRUS.view(examples((4, 1))[0], draw())
    assert len(view) == 5
    assert (view.targets == IGNORE).all()
    for loss_type in ("kl", "ce"):
        objective = dataclasses.replace(ORTHRUS, loss_type=loss_type)
        loss = objective.loss(backbone, batch_of([[view]], backbone.mask_token_id), step=0)
        found = gradients(backbone, loss.total)
        assert float(loss.total.detach()) == 0
        assert set(found) == set(trainable(backbone))
        assert not any(gradient.any() for gradient in found.values())


def test_mask_is_that_of_the_paper() -> None:
    """M_diff over two documents of one row, as loops."""
    size = 4
    views = [ORTHRUS.view(item, draw(item.index)) for item in EXAMPLES[:2]]
    batch = batch_of([views], 0)
    mask = dense_mask(ORTHRUS.attention(0), batch)[0, 0]
    start = 0
    expected = torch.zeros_like(mask)
    for item, view in zip(EXAMPLES, views):
        length = len(item)
        anchors, _ = choices_of(view, size)
        for q in range(len(view)):
            for k in range(len(view)):
                if q < length:
                    allowed = k < length and k <= q
                elif k < length:
                    allowed = k <= anchors[(q - length) // size] - 1
                else:
                    allowed = (q - length) // size == (k - length) // size
                expected[start + q, start + k] = allowed
        start += len(view)
    expected[start:, start:] = True  # padding
    assert torch.equal(mask, expected)


# --- settings ---


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"block_size": 1}, "block_size=1"),
        ({"num_anchors": 0}, "num_anchors=0"),
        ({"per_tokens": 0}, "per_tokens=0"),
        ({"mask_share": 0.0}, "mask_share=0.0"),
        ({"mask_share": 1.5}, "mask_share=1.5"),
        ({"complementary": True}, "complementary=true"),
    ],
)
def test_bad_settings_name_the_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError, match=f"objective.{field}"):
        dataclasses.replace(ORTHRUS, **change)


def test_conventions_are_those_of_the_decoder() -> None:
    spec = ORTHRUS.spec(9)
    assert (spec.objective, spec.mask_token_id, spec.shift, spec.block_size) == ("orthrus", 9, "all", 4)
    assert [dataclasses.replace(ORTHRUS, loss_type=kind).measure for kind in ("kl", "ce")] == ["kl", "ce"]
