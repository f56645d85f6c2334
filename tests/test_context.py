"""Passes that attend to the keys of an earlier one: the parts of a batch, their mask, and the model itself.

Shapes: B rows, T row length, C tokens of the context.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_refusion.attention import BLOCK, BLOCK_CAUSAL, CAUSAL, FULL, Attention, block_mask, dense_mask
from lit_refusion.backbone import Backbone
from lit_refusion.context import Context
from lit_refusion.views import IGNORE, Batch, View, collate
from tests.conftest import ARCHITECTURES
from tests.test_views import TENSORS, lay_out, view

RULES = {"causal": CAUSAL, "full": FULL, "block_causal": BLOCK_CAUSAL}


def two_copies(num_clean: int, anchors: Sequence[int], *, size: int = 3, seed: int = 0) -> View:
    """A text, and behind it blocks of its tokens."""
    rng = np.random.default_rng(seed)
    places = np.array([anchor + i for anchor in anchors for i in range(size)], np.int64)
    length = num_clean + len(places)
    return View(
        input_ids=rng.integers(4, 250, length),
        position_ids=np.concatenate([np.arange(num_clean), places]),
        targets=np.full(length, IGNORE),
        weights=np.zeros(length, np.float32),
        term=np.full(length, -1),
        block=np.concatenate([np.arange(num_clean), np.repeat(np.array(anchors, np.int64), size)]),
        noisy=np.arange(length) >= num_clean,
    )


def make_batch(rows: Sequence[Sequence[View]], *, pad_to_multiple: int = 1) -> Batch:
    return collate(rows, mask_token_id=None, pad_to_multiple=pad_to_multiple, num_examples=1, num_response_tokens=1)


PACKED = make_batch(
    [
        [two_copies(7, [2, 4]), two_copies(5, [1, 3, 3], seed=1)],
        [two_copies(9, [5], seed=2)],
        [two_copies(4, [], seed=3), two_copies(3, [1], seed=4)],
    ],
    pad_to_multiple=8,
)


def halves(batch: Batch) -> tuple[Batch, Batch, Tensor, Tensor]:
    """The text and the blocks of a batch, and where they were."""
    is_text = (batch.segment_ids > 0) & ~batch.noisy
    is_block = (batch.segment_ids > 0) & batch.noisy
    return batch.take(is_text), batch.take(is_block), is_text, is_block


# --- parts of a batch ---


def test_take_keeps_the_order_and_pads_every_field() -> None:
    batch = lay_out([[view(3), view(1, start=30)], [view(2, start=50)]])
    taken = batch.take(torch.tensor([[True, False, True, True], [False, True, False, False]]))
    assert taken.input_ids.tolist() == [[10, 12, 30], [51, 0, 0]]
    assert taken.position_ids.tolist() == [[110, 112, 130], [151, 0, 0]]
    assert taken.targets.tolist() == [[210, 212, 230], [251, IGNORE, IGNORE]]
    assert taken.weights.tolist() == [[0.5] * 3, [0.5, 0.0, 0.0]]
    assert taken.term.tolist() == [[1, 1, 1], [1, -1, -1]]
    assert taken.block.tolist() == [[3, 3, 3], [3, 0, 0]]
    assert taken.noisy.tolist() == [[True] * 3, [True, False, False]]
    assert taken.segment_ids.tolist() == [[1, 1, 2], [1, 0, 0]]
    assert taken.mask_rate.isnan().tolist() == [[False] * 3, [False, True, True]]
    assert (taken.num_examples, taken.num_response_tokens) == (5, 17)
    for name in TENSORS:
        assert getattr(taken, name).dtype == getattr(batch, name).dtype


def test_taking_everything_changes_nothing() -> None:
    batch = lay_out([[view(3)], [view(2, start=50)]])
    taken = batch.take(batch.segment_ids > 0)
    for name in TENSORS:
        torch.testing.assert_close(getattr(taken, name), getattr(batch, name), equal_nan=True)


@pytest.mark.parametrize(("multiple", "length"), [(1, 3), (2, 4), (3, 3), (64, 64)])
def test_take_rounds_the_row_length_up(multiple: int, length: int) -> None:
    """Beyond the length of the batch too."""
    batch = lay_out([[view(5)], [view(3)]])
    is_taken = torch.tensor([[False, True, False, True, True], [True, False, False, False, False]])
    taken = batch.take(is_taken, pad_to_multiple=multiple)
    assert {name: tuple(getattr(taken, name).shape) for name in TENSORS} == dict.fromkeys(TENSORS, (2, length))
    assert taken.input_ids[:, :3].tolist() == [[11, 13, 14], [10, 0, 0]]
    assert (taken.segment_ids > 0).sum(dim=1).tolist() == [3, 1]


def test_taking_nothing_leaves_padding() -> None:
    batch = lay_out([[view(5)], [view(3)]])
    taken = batch.take(torch.zeros(2, 5, dtype=torch.bool))
    assert taken.segment_ids.tolist() == [[0], [0]]
    assert taken.targets.tolist() == [[IGNORE], [IGNORE]]


# --- masks ---


@pytest.mark.parametrize("rule", RULES)
def test_mask_with_a_context_is_a_part_of_the_whole(rule: str) -> None:
    attention = RULES[rule]
    text, blocks, is_text, is_block = halves(PACKED)
    whole = dense_mask(attention, PACKED)
    mask = dense_mask(attention, blocks, context=text)
    num_text = text.input_ids.shape[1]
    assert mask.shape == (3, 1, blocks.input_ids.shape[1], num_text + blocks.input_ids.shape[1])
    for b in range(len(PACKED.input_ids)):
        queries = is_block[b].nonzero()[:, 0]
        keys = torch.cat([is_text[b].nonzero()[:, 0], queries])
        expected = whole[b, 0][queries][:, keys]
        kept = torch.cat([text.segment_ids[b] > 0, blocks.segment_ids[b] > 0])
        assert torch.equal(mask[b, 0, : len(queries)][:, kept], expected)
        assert not mask[b, 0, : len(queries)][:, ~kept].any()
    assert mask.any(dim=-1).all()  # no row is empty


@pytest.mark.parametrize("rule", RULES)
def test_flex_mask_with_a_context_equals_dense_mask(rule: str) -> None:
    from torch.nn.attention.flex_attention import create_mask

    text, blocks, _, _ = halves(PACKED)
    flex = block_mask(RULES[rule], blocks, context=text)
    lengths = blocks.input_ids.shape[1], text.input_ids.shape[1] + blocks.input_ids.shape[1]
    elements = create_mask(flex.mask_mod, 3, 1, *lengths, device="cpu")
    assert flex.shape[-2:] == lengths
    assert torch.equal(elements, dense_mask(RULES[rule], blocks, context=text))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("multiple", [1, BLOCK])
def test_flex_blocks_with_a_context_are_those_of_the_library(rule: str, multiple: int) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    batch = make_batch([[two_copies(300, range(5, 250, 7)), two_copies(90, [40])], [two_copies(200, range(80))]])
    text = batch.take((batch.segment_ids > 0) & ~batch.noisy, pad_to_multiple=multiple)
    blocks = batch.take((batch.segment_ids > 0) & batch.noisy, pad_to_multiple=multiple)
    ours = block_mask(RULES[rule], blocks, context=text)
    lengths = blocks.input_ids.shape[1], text.input_ids.shape[1] + blocks.input_ids.shape[1]
    theirs = create_block_mask(ours.mask_mod, 2, None, *lengths, device="cpu")
    assert ours.seq_lengths == theirs.seq_lengths
    assert ours.kv_num_blocks.shape == theirs.kv_num_blocks.shape
    for numbers, indices in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        count = getattr(theirs, numbers)
        assert torch.equal(getattr(ours, numbers), count)
        is_listed = torch.arange(getattr(ours, indices).shape[-1]) < count[..., None]
        assert torch.equal(getattr(ours, indices)[is_listed], getattr(theirs, indices)[is_listed])


# --- through a model ---


def in_two_passes(backbone: Backbone, first: Batch, second: Batch, attention: Attention) -> tuple[Tensor, Tensor]:
    context = Context(first)
    with torch.no_grad():
        before = backbone(first, CAUSAL, record=context)
    assert len(context.layers) == len(backbone.layers)
    return before, backbone(second, attention, context=context)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_two_passes_equal_a_causal_one(backbone: Backbone, is_checkpointed: bool) -> None:
    batch = make_batch([[two_copies(9, [])], [two_copies(6, [], seed=1), two_copies(5, [], seed=2)]])
    is_first = (batch.segment_ids > 0) & (batch.position_ids < 4)
    is_second = (batch.segment_ids > 0) & (batch.position_ids >= 4)
    if is_checkpointed:
        backbone.enable_gradient_checkpointing()
    backbone.train(is_checkpointed)
    before, after = in_two_passes(backbone, batch.take(is_first), batch.take(is_second), CAUSAL)
    joint = backbone(batch, CAUSAL)
    for part, is_part in ((before, is_first), (after, is_second)):
        for b in range(2):
            expected = joint[b][is_part[b]]
            torch.testing.assert_close(part[b, : len(expected)], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rule", ["causal", "block_causal"])
def test_two_passes_equal_a_joint_one_of_both_copies(backbone: Backbone, rule: str) -> None:
    text, blocks, is_text, is_block = halves(PACKED)
    with torch.no_grad():
        before, after = in_two_passes(backbone, text, blocks, RULES[rule])
        joint = backbone(PACKED, RULES[rule])
    for part, is_part in ((before, is_text), (after, is_block)):
        for b in range(len(PACKED.input_ids)):
            expected = joint[b][is_part[b]]
            torch.testing.assert_close(part[b, : len(expected)], expected, atol=1e-5, rtol=1e-5)


def test_checkpointed_passes_with_a_context_have_the_same_gradients(backbone: Backbone) -> None:
    text, blocks, _, _ = halves(PACKED)
    calls: list[bool] = []
    backbone.layers[0].input_layernorm.register_forward_hook(lambda *args: calls.append(True))
    backbone.train()
    found = []
    for is_checkpointed in (False, True):
        if is_checkpointed:
            backbone.enable_gradient_checkpointing()
        backbone.zero_grad()
        calls.clear()
        _, after = in_two_passes(backbone, text, blocks, BLOCK_CAUSAL)
        after.sin().sum().backward()
        assert len(calls) == 2 + is_checkpointed
        found.append([parameter.grad.clone() for parameter in backbone.layers[0].parameters()])
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(again, plain, atol=1e-6, rtol=1e-5)
        assert plain.abs().max() > 1e-3


def test_flex_attention_with_a_context_equals_sdpa(tokenizer: PreTrainedTokenizerBase) -> None:
    text, blocks, _, _ = halves(PACKED)
    found = []
    for kernel in ("sdpa", "flex_attention"):
        backbone = Backbone.from_architecture(ARCHITECTURES["llama"], tokenizer=tokenizer, seed=1, attention=kernel)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            found.append(in_two_passes(backbone, text, blocks, BLOCK_CAUSAL)[1])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
