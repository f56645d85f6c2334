"""LLaDA, Dream and BD3-LM: golden vectors, the three-part mask, and exact expectations on a toy problem."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_refusion.attention import FULL, TokenFields, annealed, dense_mask
from lit_refusion.backbone import Backbone
from lit_refusion.errors import UserError
from lit_refusion.examples import Example
from lit_refusion.noise import Stream, noise
from lit_refusion.objective import Objective
from lit_refusion.views import IGNORE, MASK, View, collate
from objectives.bd3 import BD3
from objectives.dream import Dream
from objectives.llada import LLaDA
from tests.conftest import ARCHITECTURES, shared_folder

LLADA = LLaDA(
    eps=1e-3,
    shift=False,
    pad_policy="none",
    pad_multiple=32,
    pad_scope="response",
    complementary=False,
    attention_annealing_steps=0,
)
DREAM = Dream(eps=1e-3, weighting="cart", geometric_p=0.3, complementary=False, attention_annealing_steps=0)
BLOCKS = BD3(
    block_size=4,
    block_origin="sequence",
    t_min=1e-3,
    t_max=1.0,
    t_per="block",
    stratify_blocks=False,
    weighting="inverse_t",
    complementary=False,
    force_mask=False,
    shift=False,
    pad_policy="none",
    average="example",
)


def example(prompt: Any, response: Any) -> Example:
    return Example(index=0, prompt_ids=np.asarray(prompt, np.int64), response_ids=np.asarray(response, np.int64))


def batch_of(views: list[View], mask_token_id: int) -> Any:
    rows = [[view] for view in views]
    return collate(rows, mask_token_id=mask_token_id, pad_to_multiple=1, num_examples=1, num_response_tokens=1)


@torch.no_grad()
def loss_of(objective: Objective, backbone: Backbone, view: View) -> tuple[np.ndarray, float]:
    """Cross-entropy of every supervised row in row order, and the weighted sum."""
    loss = objective.loss(backbone, batch_of([view], backbone.mask_token_id), step=0)
    return loss.token_loss[loss.token_term >= 0].numpy(), float(loss.total)


def response_mask(document: dict[str, Any]) -> np.ndarray:
    return np.isin(np.arange(len(document["response_ids"])), document["masked_positions"])


@pytest.fixture(scope="module")
def golden_model() -> Backbone:
    return Backbone.from_pretrained(shared_folder("golden", "model"))


@pytest.fixture(scope="module")
def masked_documents() -> list[dict[str, Any]]:
    return json.loads(shared_folder("golden", "masked_train.json").read_text())


def test_llada_golden(masked_documents: list[dict[str, Any]], golden_model: Backbone) -> None:
    for document in masked_documents:
        is_masked = response_mask(document)
        view = LLADA.arrange(
            example(document["prompt_ids"], document["response_ids"]), is_masked, p_mask=document["p_mask"]
        )
        losses, total = loss_of(LLADA, golden_model, view)
        recorded = np.array(document["llada_token_cross_entropy"])[is_masked]
        np.testing.assert_allclose(losses, recorded, atol=1e-3)
        assert total == pytest.approx(document["llada_loss"], abs=1e-3)


def test_dream_golden(masked_documents: list[dict[str, Any]], golden_model: Backbone) -> None:
    for document in masked_documents:
        is_masked = response_mask(document)
        item = example(document["prompt_ids"], document["response_ids"])
        weights = DREAM.cart_weights(is_masked, num_prompt=len(item.prompt_ids))
        np.testing.assert_allclose(np.where(is_masked, weights, 0), document["dream_cart_weights"], atol=2e-6)
        losses, total = loss_of(DREAM, golden_model, DREAM.arrange(item, is_masked, p_mask=document["p_mask"]))
        recorded = np.array(document["dream_shifted_token_cross_entropy"])[is_masked]
        np.testing.assert_allclose(losses, recorded, atol=1e-3)
        expected = (weights[is_masked] * recorded).sum() / len(is_masked)
        assert total == pytest.approx(expected, abs=1e-3)


def test_bd3_golden_losses(golden_model: Backbone) -> None:
    for document in json.loads(shared_folder("golden", "bd3_train.json").read_text()):
        objective = dataclasses.replace(
            BLOCKS, block_size=document["block_size"], block_origin=document["block_origin"]
        )
        item = example(document["prompt_ids"], document["response_ids"])
        num_prompt = len(item.prompt_ids)
        positions = np.arange(num_prompt, len(item))
        is_masked = np.isin(positions, document["masked_sequence_positions"])
        t = np.array(document["t_per_block"])[positions // objective.block_size]
        view = objective.arrange(item, is_masked, t=t)
        assert len(view) <= num_prompt + 2 * len(is_masked) + objective.block_size
        losses, total = loss_of(objective, golden_model, view)
        recorded = np.array(document["token_cross_entropy"])[num_prompt:][is_masked]
        np.testing.assert_allclose(losses, recorded, atol=1e-3)
        assert total * len(is_masked) == pytest.approx(document["loss_sum_over_t"], rel=1e-3, abs=1e-2)


def test_bd3_golden_masks() -> None:
    cases = json.loads(shared_folder("golden", "bd3_masks.json").read_text())
    assert len(cases) == 8
    for case in cases:
        n, objective = case["n"], dataclasses.replace(BLOCKS, block_size=case["block_size"])
        item = example([], np.arange(10, 10 + n))  # a response alone: every block has a noisy copy
        view = objective.arrange(item, np.ones(n, bool), t=np.ones(n))
        mask = dense_mask(objective.attention(0), batch_of([view], 3))[0, 0].int()
        order = [*range(n, 2 * n), *range(n)]  # ours is [clean ; noisy], the record's [noisy ; clean]
        expected = [[int(flag) for flag in row] for row in case["allowed"]]
        assert mask[order][:, order].tolist() == expected


def test_bd3_mask_written_out() -> None:
    """Two blocks of two, prompt of one block: clean p p a b c d, noisy a b c d."""
    view = dataclasses.replace(BLOCKS, block_size=2).arrange(
        example([5, 6], [7, 8, 9, 10]), np.array([1, 0, 0, 1], bool), t=np.full(4, 0.5)
    )
    assert view.input_ids.tolist() == [5, 6, 7, 8, 9, 10, MASK, 8, 9, MASK]
    assert view.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5]
    assert view.targets.tolist() == [-100] * 6 + [7, -100, -100, 10]
    np.testing.assert_allclose(view.weights[6:], [0.5, 0, 0, 0.5])
    mask = dense_mask(BLOCKS.attention(0), batch_of([view], 3))[0, 0].int().tolist()
    assert ["".join(map(str, row)) for row in mask] == [
        "1100000000", "1100000000", "1111000000", "1111000000", "1111110000", "1111110000",
        "1100001100", "1100001100", "1111000011", "1111000011",
    ]  # fmt: skip


def test_bd3_shift_predicts_from_the_row_before() -> None:
    objective = dataclasses.replace(BLOCKS, block_size=2, shift=True)
    view = objective.arrange(example([5, 6], [7, 8, 9, 10]), np.ones(4, bool), t=np.ones(4))
    # The first response token is predicted by the clean last prompt token, the others by noisy rows.
    assert view.targets.tolist() == [-100, 7, -100, -100, -100, -100, 8, 9, 10, -100]


def test_blocks_do_not_see_what_comes_later(backbone: Backbone) -> None:
    item = example(np.arange(20, 26), np.arange(30, 42))
    view = BLOCKS.arrange(item, np.arange(12) % 2 == 0, t=np.full(12, 0.5))
    noisy = np.arange(len(view)) >= len(item)
    hidden = lambda ids: backbone(  # noqa: E731
        batch_of([dataclasses.replace(view, input_ids=ids)], backbone.mask_token_id), BLOCKS.attention(0)
    )[0]
    with torch.no_grad():
        original = hidden(view.input_ids)
        for block in range(1, view.block.max() + 1):
            changed = np.where(view.block >= block, 77, view.input_ids)
            seen_before = torch.from_numpy(view.block < block)
            torch.testing.assert_close(hidden(changed)[seen_before], original[seen_before], atol=1e-5, rtol=1e-5)
        clean = torch.from_numpy(~noisy)
        other_noise = np.where(noisy, 99, view.input_ids)
        torch.testing.assert_close(hidden(other_noise)[clean], original[clean], atol=1e-5, rtol=1e-5)


# Exact expectations: a response of 3 tokens, all masks enumerated, the integral over t by quadrature.

POINTS, POINT_WEIGHTS = np.polynomial.legendre.leggauss(40)
POINTS, POINT_WEIGHTS = (POINTS + 1) / 2, POINT_WEIGHTS / 2


@torch.no_grad()
def full_attention_log_p(backbone: Backbone, item: Example, is_masked: np.ndarray) -> np.ndarray:
    """[R] log-probability of each response token at its own row, plain Hugging Face call with an all-true mask."""
    ids = np.concatenate([item.prompt_ids, item.response_ids])
    hidden = np.concatenate([np.zeros(len(item.prompt_ids), bool), is_masked])
    rows = torch.from_numpy(np.where(hidden, backbone.mask_token_id, ids))[None]
    mask = torch.ones(1, 1, len(ids), len(ids), dtype=torch.bool)
    logits = backbone.model(rows, attention_mask=mask, use_cache=False).logits[0].double().log_softmax(-1)
    return logits[torch.arange(len(ids)), torch.from_numpy(ids)].numpy()[len(item.prompt_ids) :]


def any_order_nelbo(backbone: Backbone, item: Example) -> float:
    """Exact bound: mean over decoding orders of - log P, which equals the integral over t of LLaDA's loss times R."""
    count = len(item.response_ids)
    total = 0.0
    for order in itertools.permutations(range(count)):
        for place, token in enumerate(order):
            is_masked = np.isin(np.arange(count), order[place:])
            total -= full_attention_log_p(backbone, item, is_masked)[token]
    return total / len(list(itertools.permutations(range(count))))


def expected_loss(objective: Any, backbone: Backbone, item: Example) -> float:
    """E over t and masks of the objective's loss: all 2^R masks, Gauss-Legendre over t in (0, 1)."""
    count = len(item.response_ids)
    total, levels = 0.0, {}
    for flags in itertools.product([False, True], repeat=count):
        is_masked = np.array(flags)
        for t, point_weight in zip(POINTS, POINT_WEIGHTS):
            p = np.prod(np.where(is_masked, t, 1 - t))
            view = (
                objective.arrange(item, is_masked, t=np.full(count, t))
                if isinstance(objective, BD3)
                else objective.arrange(item, is_masked, p_mask=t)
            )
            # The token losses do not depend on t: take one forward pass per mask.
            key = flags
            if key not in levels:
                levels[key] = float(loss_of(objective, backbone, view)[0].sum())
            weight = view.weights.max()
            total += point_weight * p * weight * levels[key]
    return total


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_llada_expectation_is_the_nelbo_per_token(architecture: str, tokenizer: Any) -> None:
    backbone = Backbone.from_architecture(ARCHITECTURES[architecture], tokenizer=tokenizer, seed=3)
    item = example([20, 21], [30, 31, 32])
    expected = any_order_nelbo(backbone, item) / 3
    assert expected_loss(LLADA, backbone, item) == pytest.approx(expected, rel=1e-4)


def test_bd3_with_one_block_is_llada(tokenizer: Any) -> None:
    """The whole response as one block behind a prompt block that looks at itself only; LLaDA's prompt looks at all."""
    backbone = Backbone.from_architecture(ARCHITECTURES["qwen3"], tokenizer=tokenizer, seed=3)
    item = example([], [30, 31, 32])  # without a prompt the two rows see the same
    objective = dataclasses.replace(BLOCKS, block_size=3)
    bd3, llada = (expected_loss(method, backbone, item) for method in (objective, LLADA))
    assert bd3 == pytest.approx(llada, rel=1e-4)


def test_bd3_with_blocks_of_one_is_autoregression_in_expectation(tokenizer: Any) -> None:
    """Blocks of 1: a hidden token sees the clean text before it and itself, so all masks average to the chain rule."""
    backbone = Backbone.from_architecture(ARCHITECTURES["llama"], tokenizer=tokenizer, seed=3)
    item = example([20, 21], [30, 31, 32])
    objective = dataclasses.replace(BLOCKS, block_size=1)
    view = objective.arrange(item, np.ones(3, bool), t=np.ones(3))
    losses, _ = loss_of(objective, backbone, view)
    plain = []
    for place, token in enumerate(item.response_ids):
        text = [*item.prompt_ids, *item.response_ids[:place], backbone.mask_token_id]
        with torch.no_grad():
            logits = backbone.model(torch.tensor([text]), use_cache=False).logits[0, -1].log_softmax(-1)
        plain.append(-float(logits[token]))
    np.testing.assert_allclose(losses, plain, atol=1e-4)
    assert expected_loss(objective, backbone, item) == pytest.approx(np.mean(plain), rel=1e-4)


@pytest.mark.parametrize(
    "objective",
    [
        LLADA,
        dataclasses.replace(LLADA, complementary=True),
        dataclasses.replace(DREAM, weighting="inverse_rate"),
        dataclasses.replace(DREAM, weighting="inverse_rate", complementary=True),
        BLOCKS,
        dataclasses.replace(BLOCKS, t_min=0.3, t_max=0.8),
        dataclasses.replace(BLOCKS, t_min=0.3, t_max=0.8, complementary=True),
        dataclasses.replace(BLOCKS, pad_policy="eos"),
        dataclasses.replace(BLOCKS, pad_policy="mask", block_size=7),
        dataclasses.replace(BLOCKS, stratify_blocks=True),
        dataclasses.replace(BLOCKS, t_per="example"),
        dataclasses.replace(BLOCKS, complementary=True, weighting="uniform"),
    ],
    ids=str,
)
def test_uniform_logits_cost_log_v_per_token(objective: Objective) -> None:
    """With equal logits every hidden token costs log V, so the expected weight of an example must be 1."""
    item = example([1, 2], np.arange(10, 74))
    sums = []
    for index in range(600):
        views = objective.views(item, noise(0, index=index, epoch=0, stream=Stream.TRAIN_NOISE))
        sums.append(sum(view.weights.sum() for view in views))
    assert np.mean(sums) == pytest.approx(1.0, abs=0.05)


@given(st.integers(0, 5), st.integers(1, 40), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_complementary_rows_hide_every_token_once(num_prompt: int, num_response: int, index: int) -> None:
    item = example(np.arange(num_prompt), np.arange(10, 10 + num_response))
    for objective in (LLADA, DREAM, BLOCKS):
        both = dataclasses.replace(objective, complementary=True)
        rows = both.views(item, noise(0, index=index, epoch=0, stream=Stream.TRAIN_NOISE))
        hidden = np.concatenate([row.position_ids[row.input_ids == MASK] for row in rows])
        assert sorted(hidden.tolist()) == list(range(num_prompt, num_prompt + num_response))


def test_padding_with_eos_is_hidden_and_counted() -> None:
    objective = dataclasses.replace(LLADA, pad_policy="eos", pad_multiple=8)
    view = objective.view(example([1, 2], [5, 6, 2]), noise(0, index=1, epoch=0, stream=Stream.TRAIN_NOISE))
    assert len(view) == 10
    assert set(view.targets[5:].tolist()) <= {2, IGNORE}
    assert view.weights.max() == pytest.approx(1 / (view.mask_rate * 8))
    row = dataclasses.replace(objective, pad_scope="row").view(
        example([1, 2], [5, 6, 2]), noise(0, index=1, epoch=0, stream=Stream.TRAIN_NOISE)
    )
    assert len(row) == 8


def test_annealing_opens_the_future_step_by_step() -> None:
    place, zeros = torch.arange(64), torch.zeros(64, dtype=torch.long)
    fields = TokenFields(zeros, place, place, zeros, zeros)
    query, key = (TokenFields(*(field.unsqueeze(side) for field in fields)) for side in (1, 0))
    causal = place[:, None] >= place[None]
    shares = []
    for step in (0, 5, 10):
        allowed = annealed(FULL, step=step, num_steps=10).allows(query, key)
        assert allowed[causal].all()
        shares.append(float(allowed[~causal].float().mean()))
        opened = allowed & ~causal
        if step == 5:  # no stripes: neighbours open independently of each other
            both = (opened[:, 1:] & opened[:, :-1])[~causal[:, :-1]].float().mean()
            assert float(both) == pytest.approx(0.25, abs=0.05)
    assert shares[0] == 0
    assert shares[1] == pytest.approx(0.5, abs=0.08)
    assert shares[2] == 1
    assert annealed(FULL, step=10, num_steps=10) is FULL


def draws(objective: BD3, num_response: int = 64, count: int = 200) -> list[View]:
    item = example([1, 2, 3], np.arange(10, 10 + num_response))
    return [objective.view(item, noise(0, index=i, epoch=0, stream=Stream.TRAIN_NOISE)) for i in range(count)]


def levels(view: View) -> np.ndarray:
    """Noise levels of a row's hidden tokens, read back from its weights (64 response tokens)."""
    return 1 / (64 * view.weights[view.weights > 0])


def test_noise_levels_stay_in_their_range() -> None:
    found = np.concatenate([levels(view) for view in draws(dataclasses.replace(BLOCKS, t_min=0.3, t_max=0.6))])
    assert 0.3 <= found.min() < 0.35
    assert 0.57 < found.max() <= 0.6 + 1e-6


def test_levels_per_block_per_example_and_stratified() -> None:
    one = dataclasses.replace(BLOCKS, t_per="example")
    assert all(np.ptp(found) < 1e-6 for found in map(levels, draws(one)) if len(found))
    means = {
        name: np.std([view.mask_rate for view in draws(objective)])
        for name, objective in {"block": BLOCKS, "even": dataclasses.replace(BLOCKS, stratify_blocks=True)}.items()
    }
    assert means["even"] < 0.5 * means["block"]  # the mean level of an example hardly varies


def test_force_mask_hides_at_least_one_token() -> None:
    low = dataclasses.replace(BLOCKS, t_min=1e-3, t_max=1e-2)
    hidden = lambda objective: [int((view.input_ids == MASK).sum()) for view in draws(objective, num_response=4)]  # noqa: E731
    assert min(hidden(low)) == 0
    assert min(hidden(dataclasses.replace(low, force_mask=True))) == 1


def test_short_last_block_can_be_filled() -> None:
    item = example([5, 6, 7], [8, 9, 10, 11, 2])
    rng = lambda: noise(0, index=3, epoch=0, stream=Stream.TRAIN_NOISE)  # noqa: E731
    filled = dataclasses.replace(BLOCKS, pad_policy="mask", block_origin="response").view(item, rng())
    behind = filled.position_ids >= len(item)
    assert (filled.input_ids[behind] == MASK).all()
    assert (filled.targets[behind] == IGNORE).all()
    assert np.bincount(filled.block)[2] == 8  # the last block is whole, clean and noisy
    learned = dataclasses.replace(BLOCKS, pad_policy="eos", block_origin="response").view(item, rng())
    assert set(learned.targets[learned.position_ids >= len(item)].tolist()) <= {2, IGNORE}
    assert dataclasses.replace(BLOCKS, pad_policy="eos").spec(3).pad_policy == "eos"


def test_token_average_weighs_tokens_alike() -> None:
    objective = dataclasses.replace(BLOCKS, average="token", weighting="uniform")
    assert objective.normalizer == "response_tokens"
    assert {float(w) for view in draws(objective, count=5) for w in view.weights} == {0.0, 1.0}


def test_specs_tell_the_conventions() -> None:
    assert dataclasses.replace(LLADA, shift=True, pad_policy="eos").spec(3).shift == "all"
    assert dataclasses.replace(LLADA, pad_policy="eos").spec(3).pad_policy == "eos"
    assert (LLADA.spec(3).shift, LLADA.spec(3).pad_policy) == ("none", "none")
    assert (DREAM.spec(3).shift, DREAM.spec(3).attention) == ("all", "full")
    assert (BLOCKS.spec(3).block_size, BLOCKS.spec(3).block_origin) == (4, "sequence")


@pytest.mark.parametrize("objective", [LLADA, DREAM], ids=["llada", "dream"])
def test_objectives_anneal_their_attention(objective: Any) -> None:
    slow = dataclasses.replace(objective, attention_annealing_steps=10)
    assert slow.attention(5).name == "full, annealed"
    assert slow.attention(10) is FULL
    assert objective.attention(0) is FULL


@pytest.mark.parametrize(
    ("objective", "change", "field"),
    [
        (BLOCKS, {"t_min": 0.9, "t_max": 0.5}, "t_min"),
        (BLOCKS, {"t_per": "example", "stratify_blocks": True}, "stratify_blocks"),
        (BLOCKS, {"block_size": 0}, "block_size"),
        (LLADA, {"attention_annealing_steps": -1}, "attention_annealing_steps"),
        (LLADA, {"eps": 0.0}, "eps"),
        (DREAM, {"geometric_p": 1.0}, "geometric_p"),
    ],
)
def test_bad_settings_name_the_field(objective: Any, change: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError, match=f"objective.{field}"):
        dataclasses.replace(objective, **change)
