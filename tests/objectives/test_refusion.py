"""ReFusion's rows and losses: golden vectors, the slow reference, and hand-checked cases."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_refusion.backbone import Backbone
from lit_refusion.errors import UserError
from lit_refusion.examples import Example
from lit_refusion.noise import Stream, noise
from lit_refusion.views import IGNORE, MASK, View, collate
from objectives.refusion import ReFusion
from tests.conftest import shared_folder
from tests.reference.refusion_train import arrange_reference, loss_reference

REFUSION = ReFusion(slot_sizes=(4, 8, 16, 32), masking="bernoulli", mdm_weight=1.0, eps=1e-3, complementary=False)
EXACT = dataclasses.replace(REFUSION, masking="exact")


def example(prompt: Any, response: Any) -> Example:
    return Example(index=0, prompt_ids=np.asarray(prompt, np.int64), response_ids=np.asarray(response, np.int64))


def batch_of(views: list[View], mask_token_id: int) -> Any:
    return collate(
        [[view] for view in views],
        mask_token_id=mask_token_id,
        pad_to_multiple=8,
        num_examples=len(views),
        num_response_tokens=1,
    )


def document_view(document: dict[str, Any], objective: ReFusion = REFUSION) -> View:
    return objective.arrange(
        example(document["prompt_ids"], document["response_ids"]),
        slot_size=document["slot_size"],
        masked_slots=document["masked_slots"],
        clean_slot_order=document["clean_slot_order"],
        p_mask=document["p_mask"],
    )


@pytest.fixture(scope="module")
def golden_cases() -> list[dict[str, Any]]:
    return json.loads(shared_folder("golden", "refusion_train.json").read_text())


@pytest.fixture(scope="module")
def golden_model() -> Backbone:
    return Backbone.from_pretrained(shared_folder("golden", "model"))


def test_golden_rows(golden_cases: list[dict[str, Any]]) -> None:
    documents = [document for case in golden_cases for document in case["documents"]]
    assert len(documents) == 80
    for document in documents:
        view = document_view(document)
        assert np.where(view.input_ids == MASK, 4, view.input_ids).tolist() == document["input_ids"]
        assert (view.input_ids == MASK).tolist() == [bool(flag) for flag in document["is_masked"]]
        assert view.position_ids.tolist() == document["position_ids"]
        assert view.targets.tolist() == document["labels"]


def test_golden_losses(golden_cases: list[dict[str, Any]], golden_model: Backbone) -> None:
    for case in golden_cases:
        views = [document_view(document) for document in case["documents"]]
        batch = batch_of(views, golden_model.mask_token_id)
        with torch.inference_mode():
            loss = REFUSION.loss(golden_model, batch, step=0)
        recorded = np.concatenate(
            [np.array(d["token_cross_entropy"])[np.array(d["labels"]) != IGNORE] for d in case["documents"]]
        )
        is_mdm, is_ar = loss.token_term == 1, loss.token_term == 0
        np.testing.assert_allclose(loss.token_loss[is_ar | is_mdm], recorded, atol=1e-3)
        mdm = (loss.token_weight * loss.token_loss)[is_mdm].sum() / len(views)
        assert mdm == pytest.approx(case["mdm_loss"], abs=1e-3)
        # The official AR term is a mean over the tokens of the micro-batch; ours is a mean within each example.
        if case["official_loss"] is not None:
            ar = loss.token_loss[is_ar].mean()
            assert ar == pytest.approx(case["ar_loss_token_mean"], abs=1e-3)
            assert ar + mdm == pytest.approx(case["official_loss"], abs=2e-3)
        assert torch.isfinite(loss.total)


def test_official_nan_cases_are_finite_here(golden_cases: list[dict[str, Any]]) -> None:
    without_ar = [case for case in golden_cases if case["official_loss"] is None]
    assert len(without_ar) == 7
    for case in without_ar:
        for document in case["documents"]:
            view = document_view(document)
            assert not (view.term == 0).any()
            assert np.isfinite(view.weights).all()


@st.composite
def arrangements(draw: st.DrawFn) -> dict[str, Any]:
    num_response = draw(st.integers(1, 40))
    slot_size = draw(st.sampled_from([1, 2, 3, 4, 8, 32]))
    num_slots = -(-num_response // slot_size)
    masked = draw(st.lists(st.booleans(), min_size=num_slots, max_size=num_slots))
    order = draw(st.permutations([slot for slot in range(num_slots) if not masked[slot]]))
    return {
        "prompt_ids": list(range(100, 100 + draw(st.integers(1, 6)))),
        "response_ids": draw(st.lists(st.integers(5, 60), min_size=num_response, max_size=num_response)),
        "slot_size": slot_size,
        "masked_slots": [slot for slot in range(num_slots) if masked[slot]],
        "clean_slot_order": order,
    }


@given(arrangements(), st.floats(0.01, 1.0))
def test_arrange_equals_the_slow_reference(case: dict[str, Any], p_mask: float) -> None:
    ids, positions, targets, terms = arrange_reference(**case, mask_id=MASK)
    cross_entropy = np.random.default_rng(0).random(len(ids))
    for objective in (REFUSION, EXACT):
        view = document_view({**case, "p_mask": p_mask}, objective)
        assert view.input_ids.tolist() == ids
        assert view.position_ids.tolist() == positions
        assert view.targets.tolist() == targets
        assert [None if term < 0 else objective.terms[term] for term in view.term] == terms
        ar, mdm = loss_reference(
            cross_entropy.tolist(),
            terms,
            p_mask=p_mask,
            response_length=len(case["response_ids"]),
            masking=objective.masking,
        )
        weighted = view.weights * cross_entropy
        assert weighted[view.term == 0].sum() == pytest.approx(ar, rel=1e-5)
        assert weighted[view.term == 1].sum() == pytest.approx(mdm, rel=1e-5)
        assert (view.weights[view.targets == IGNORE] == 0).all()


def test_a_row_written_out_by_hand() -> None:
    # Slots of 2: [10 11] [12 13] [14]; slot 1 is masked, slot 2 comes before slot 0.
    view = REFUSION.arrange(
        example([1, 2, 3], [10, 11, 12, 13, 14]), slot_size=2, masked_slots=[1], clean_slot_order=[2, 0], p_mask=0.5
    )
    assert view.input_ids.tolist() == [1, 2, 3, 14, 10, 11, MASK, MASK]
    assert view.position_ids.tolist() == [0, 1, 2, 7, 3, 4, 5, 6]
    assert view.targets.tolist() == [-100, -100, -100, -100, 11, -100, 12, 13]
    assert view.term.tolist() == [-1, -1, -1, -1, 0, -1, 1, 1]
    np.testing.assert_allclose(view.weights, [0, 0, 0, 0, 1, 0, 0.4, 0.4])


def test_lambda_scales_the_masked_term_only() -> None:
    case: dict[str, Any] = {"slot_size": 2, "masked_slots": [1], "clean_slot_order": [0], "p_mask": 0.5}
    one, three = (
        dataclasses.replace(REFUSION, mdm_weight=weight).arrange(example([1], [5, 6, 7, 8]), **case)
        for weight in (1.0, 3.0)
    )
    np.testing.assert_allclose(three.weights, np.where(one.term == 1, 3 * one.weights, one.weights))


def test_draws_follow_the_noise_alone() -> None:
    item = example(range(5), range(10, 47))
    draw = lambda epoch: REFUSION.view(item, noise(3, index=7, epoch=epoch, stream=Stream.TRAIN_NOISE))  # noqa: E731
    assert draw(0).input_ids.tolist() == draw(0).input_ids.tolist()
    assert any(draw(epoch).input_ids.tolist() != draw(0).input_ids.tolist() for epoch in (1, 2))


@pytest.mark.parametrize("masking", ["bernoulli", "exact"])
def test_masked_share_is_uniform_on_average(masking: str) -> None:
    objective = dataclasses.replace(REFUSION, masking=masking, slot_sizes=(2,))
    item = example([1], range(10, 42))  # 16 slots
    shares = []
    for index in range(2000):
        view = objective.view(item, noise(0, index=index, epoch=0, stream=Stream.TRAIN_NOISE))
        shares.append((view.input_ids == MASK).mean() * 33 / 32)
    expected = 0.5 if masking == "bernoulli" else 15 / 32  # E floor(16 t) / 16
    assert np.mean(shares) == pytest.approx(expected, abs=0.03)
    if masking == "exact":
        assert max(shares) < 1  # floor(t K) < K


def test_the_two_maskings_have_the_same_expected_masked_loss_weight() -> None:
    """1/(p R) and 1/num_masked agree in expectation: each example's masked weights sum to about 1."""
    item = example([1], range(10, 138))
    plain = dataclasses.replace(REFUSION, slot_sizes=(4,))
    for objective in (
        plain,
        dataclasses.replace(EXACT, slot_sizes=(4,)),
        dataclasses.replace(plain, complementary=True),
    ):
        total = np.mean(
            [
                sum(view.weights[view.term == 1].sum() for view in objective.views(item, rng))
                for rng in (noise(0, index=index, epoch=0, stream=Stream.TRAIN_NOISE) for index in range(1500))
            ]
        )
        assert total == pytest.approx(1.0, abs=0.06)


def test_no_masked_slot_equals_slotwise_autoregression(backbone: Backbone) -> None:
    """t -> 0: every target is the next token of its slot and the row is the text itself."""
    item = example([20, 21, 22], range(30, 38))
    view = REFUSION.arrange(item, slot_size=4, masked_slots=[], clean_slot_order=[0, 1], p_mask=1e-3)
    with torch.inference_mode():
        loss = REFUSION.loss(backbone, batch_of([view], backbone.mask_token_id), step=0)
        ids = torch.tensor([[*item.prompt_ids, *item.response_ids]])
        log_p = backbone.model(ids, use_cache=False).logits[0].log_softmax(-1)
    expected = [-log_p[i, ids[0, i + 1]] for i in (3, 4, 5, 7, 8, 9)]
    torch.testing.assert_close(loss.token_loss, torch.stack(expected), atol=1e-4, rtol=1e-4)
    assert float(loss.total) == pytest.approx(float(torch.stack(expected).mean()), abs=1e-4)


@pytest.mark.parametrize(
    ("field", "value"), [("slot_sizes", ()), ("slot_sizes", (4, 0)), ("eps", 0.0), ("eps", 1.0), ("mdm_weight", -1.0)]
)
def test_bad_settings_name_the_field(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"objective.{field}"):
        dataclasses.replace(REFUSION, **{field: value})


def test_complementary_rows_mask_every_slot_once() -> None:
    objective = dataclasses.replace(REFUSION, complementary=True, slot_sizes=(4,))
    item = example([1, 2], range(10, 35))
    for index in range(20):
        rows = objective.views(item, noise(0, index=index, epoch=0, stream=Stream.TRAIN_NOISE))
        masked = np.concatenate([row.position_ids[row.input_ids == MASK] for row in rows])
        assert sorted(masked.tolist()) == list(range(2, 27))
        assert sum(row.weights[row.term == 0].sum() for row in rows) <= 1 + 1e-6
