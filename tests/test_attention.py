"""One rule, three realisations, against a loop over pairs; and why the mask is always explicit.

Shapes: B rows, T row length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from lit_refusion.attention import (
    CAUSAL,
    FULL,
    Attention,
    block_mask,
    dense_mask,
    token_fields,
    varlen_args,
)
from lit_refusion.backbone import Backbone
from lit_refusion.errors import UserError
from lit_refusion.views import Batch, View, collate
from tests.conftest import ARCHITECTURES

BLOCKS = Attention("blocks", lambda q, k: (q.block >= k.block) & (q.noisy | ~k.noisy))
"""A rule that reads the other two fields: earlier blocks, and noisy keys for noisy queries only."""
RULES = {"causal": CAUSAL, "full": FULL, "blocks": BLOCKS}


def make_view(num_tokens: int, *, seed: int = 0, positions: Sequence[int] | None = None) -> View:
    rng = np.random.default_rng(seed)
    return View(
        input_ids=rng.integers(4, 270, num_tokens),
        position_ids=np.arange(num_tokens) if positions is None else np.array(positions),
        targets=np.full(num_tokens, -100),
        weights=np.zeros(num_tokens, np.float32),
        term=np.full(num_tokens, -1),
        block=np.arange(num_tokens) // 2,
        noisy=rng.random(num_tokens) < 0.5,
    )


def make_batch(rows: Sequence[Sequence[int]], *, pad_to: int = 1) -> Batch:
    """Rows of documents with these lengths."""
    views = [[make_view(length, seed=10 * b + i) for i, length in enumerate(row)] for b, row in enumerate(rows)]
    return collate(views, mask_token_id=None, pad_to_multiple=pad_to, num_examples=1, num_response_tokens=1)


PACKED = make_batch([[5, 3], [4, 1, 2], [12]], pad_to=12)


def allowed(rule: str, batch: Batch, b: int, q: int, k: int) -> bool:
    """The rules in plain words."""
    if batch.segment_ids[b, q] != batch.segment_ids[b, k]:
        return False
    if rule == "causal":
        return k <= q
    if rule == "full":
        return True
    is_noisy = batch.noisy[b]
    return bool(batch.block[b, k] <= batch.block[b, q] and (is_noisy[q] or not is_noisy[k]))


@pytest.mark.parametrize("rule", RULES)
def test_dense_mask_equals_a_loop_over_pairs(rule: str) -> None:
    rows, length = PACKED.input_ids.shape
    mask = dense_mask(RULES[rule], PACKED)

    assert mask.shape == (rows, 1, length, length)
    assert mask.dtype == torch.bool
    for b in range(rows):
        expected = [[allowed(rule, PACKED, b, q, k) for k in range(length)] for q in range(length)]
        assert mask[b, 0].tolist() == expected


def test_small_causal_mask_typed_out() -> None:
    mask = dense_mask(CAUSAL, make_batch([[2, 1]], pad_to=4))[0, 0]

    assert mask.int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 1],
    ]


@pytest.mark.parametrize("rule", RULES)
def test_no_query_is_without_keys_and_padding_sees_padding_only(rule: str) -> None:
    mask = dense_mask(RULES[rule], PACKED)[:, 0]
    is_padding = PACKED.segment_ids == 0

    assert mask.any(dim=-1).all()
    assert not (mask & (is_padding[:, :, None] != is_padding[:, None, :])).any()


@pytest.mark.parametrize("rule", RULES)
def test_flex_mask_equals_dense_mask(rule: str) -> None:
    from torch.nn.attention.flex_attention import create_mask

    rows, length = PACKED.input_ids.shape
    flex = block_mask(RULES[rule], PACKED)
    elements = create_mask(flex.mask_mod, rows, 1, length, length, device="cpu")

    assert flex.shape[-2:] == (length, length)
    assert torch.equal(elements, dense_mask(RULES[rule], PACKED))


def test_flex_mask_skips_blocks_of_other_documents() -> None:
    flex = block_mask(FULL, make_batch([[128, 128]]))

    assert flex.to_dense()[0, 0].tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("lengths", [[[128, 128]], [[300, 90], [40, 250, 100]], [[7]]], ids=str)
def test_flex_blocks_are_those_of_the_library(rule: str, lengths: list[list[int]]) -> None:
    """The same blocks as `create_block_mask` finds by evaluating the rule everywhere, whole and partial ones apart."""
    from torch.nn.attention.flex_attention import create_block_mask

    batch = make_batch(lengths)
    ours = block_mask(RULES[rule], batch)
    rows, length = batch.input_ids.shape
    theirs = create_block_mask(ours.mask_mod, rows, None, length, length, device="cpu")
    assert ours.seq_lengths == theirs.seq_lengths
    assert ours.kv_num_blocks.shape == theirs.kv_num_blocks.shape  # one mask for all heads
    for numbers, indices in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        count = getattr(theirs, numbers)
        assert torch.equal(getattr(ours, numbers), count)
        is_listed = torch.arange(getattr(ours, indices).shape[-1]) < count[..., None]
        assert torch.equal(getattr(ours, indices)[is_listed], getattr(theirs, indices)[is_listed])


@pytest.mark.parametrize(("attention", "is_causal"), [(CAUSAL, True), (FULL, False)])
def test_varlen_arguments_typed_out(attention: Attention, is_causal: bool) -> None:
    # Rows of 12: documents of 5 and 3 with 4 of padding; of 4, 1 and 2 with 5 of padding; one of 12.
    args = varlen_args(attention, PACKED)

    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert args[name].tolist() == [0, 5, 8, 12, 16, 17, 19, 24, 36]
        assert args[name].dtype == torch.int32
    assert args["max_length_q"] == args["max_length_k"] == 12
    assert args["is_causal"] is is_causal


def test_varlen_sequences_end_with_their_row() -> None:
    assert varlen_args(CAUSAL, make_batch([[6], [6]]))["cu_seq_lens_q"].tolist() == [0, 6, 12]


def test_varlen_is_refused_for_other_rules() -> None:
    with pytest.raises(UserError, match=r"flash_attention_2 cannot express the attention rule 'blocks'.*sdpa"):
        varlen_args(BLOCKS, PACKED)


def test_rules_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CAUSAL.name = "other"  # type: ignore[misc]


def test_fields_of_a_batch() -> None:
    fields = token_fields(PACKED)

    assert fields.place[1].tolist() == list(range(12))
    assert fields.segment is PACKED.segment_ids


# --- through a model ---


def hidden_states(backbone: Backbone, batch: Batch, attention: Attention) -> torch.Tensor:
    with torch.no_grad():
        return backbone(batch, attention)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_documents_and_padding_do_not_leak(backbone: Backbone, rule: str, changed: int) -> None:
    batch = make_batch([[6, 5]], pad_to=16)  # segments 1, 2 and padding 0
    is_changed = batch.segment_ids == changed
    other = batch.replace(input_ids=torch.where(is_changed, batch.input_ids + 1, batch.input_ids))

    before, after = (hidden_states(backbone, item, RULES[rule]) for item in (batch, other))

    assert before.isfinite().all()
    assert torch.equal(before[~is_changed], after[~is_changed])
    assert not torch.isclose(before[is_changed], after[is_changed]).all(dim=-1).any()


@pytest.mark.parametrize("rule", ["causal", "full"])
def test_packed_document_equals_the_document_alone(backbone: Backbone, rule: str) -> None:
    first, second = make_view(6, seed=1), make_view(5, seed=2)
    packed, alone = (
        collate([row], mask_token_id=None, pad_to_multiple=16, num_examples=1, num_response_tokens=1)
        for row in ([first, second], [second])
    )

    together = hidden_states(backbone, packed, RULES[rule])[0, 6:11]

    torch.testing.assert_close(together, hidden_states(backbone, alone, RULES[rule])[0, :5])


def test_causal_rows_do_not_see_what_follows(backbone: Backbone) -> None:
    batch = make_batch([[12]])
    is_changed = torch.arange(12)[None] >= 7
    other = batch.replace(input_ids=torch.where(is_changed, batch.input_ids + 1, batch.input_ids))

    for attention, is_seen in ((CAUSAL, False), (FULL, True)):
        before, after = (hidden_states(backbone, item, attention)[:, :7] for item in (batch, other))
        assert (not torch.equal(before, after)) == is_seen


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("rule", RULES)
def test_flex_attention_equals_sdpa(architecture: str, rule: str, tokenizer: PreTrainedTokenizerBase) -> None:
    sdpa, flex = (
        Backbone.from_architecture(ARCHITECTURES[architecture], tokenizer=tokenizer, seed=1, attention=kernel)
        for kernel in ("sdpa", "flex_attention")
    )

    # Uncompiled: the same arithmetic without half a minute of C++ compilation.
    with torch.compiler.set_stance("force_eager"):
        actual = hidden_states(flex, PACKED, RULES[rule])

    torch.testing.assert_close(actual, hidden_states(sdpa, PACKED, RULES[rule]), rtol=1e-4, atol=1e-5)


def test_using_sdpa_switches_the_kernel_for_a_while(tokenizer: PreTrainedTokenizerBase) -> None:
    flex = Backbone.from_architecture(ARCHITECTURES["llama"], tokenizer=tokenizer, attention="flex_attention")

    with flex.using_sdpa():
        assert flex.model.config._attn_implementation == "sdpa"
    assert flex.model.config._attn_implementation == "flex_attention"


def test_transformers_misreads_reordered_positions_without_a_mask(backbone: Backbone) -> None:
    """Why every call passes its mask: left to itself, transformers takes a jump of `position_ids` for a border."""
    positions = [*range(8), *range(16, 24), *range(8, 16)]
    view = make_view(24, positions=positions)
    batch = collate([[view]], mask_token_id=None, pad_to_multiple=1, num_examples=1, num_response_tokens=1)
    inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False}
    causal = torch.ones(24, 24, dtype=torch.bool).tril()[None, None]

    with torch.no_grad():
        without_mask = backbone.model(**inputs).logits
        with_mask = backbone.model(**inputs, attention_mask=causal).logits
        ours = backbone.logits(backbone(batch, CAUSAL))

    torch.testing.assert_close(ours, with_mask)
    torch.testing.assert_close(without_mask[:, :8], with_mask[:, :8])
    assert (without_mask - with_mask)[:, 8:].abs().amax(dim=-1).min() > 0.1  # every row after the jump is wrong
