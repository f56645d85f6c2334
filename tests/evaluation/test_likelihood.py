"""Likelihoods against slow enumerations: every mask or order of a toy response, one plain forward pass each."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from lit_refusion.any_order import hide_some
from lit_refusion.attention import CAUSAL, Attention, dense_mask
from lit_refusion.backbone import Backbone
from lit_refusion.cli import main
from lit_refusion.config import choices, config_folder
from lit_refusion.errors import UserError
from lit_refusion.evaluation.likelihood import (
    Likelihood,
    check_conventions,
    figures,
    negative_log_likelihood,
    standard_error,
)
from lit_refusion.examples import Example
from lit_refusion.objective import Objective
from lit_refusion.schema import build
from lit_refusion.spec import DiffusionSpec
from lit_refusion.views import IGNORE, MASK, Batch, View, collate
from objectives.autoregressive import Autoregressive
from objectives.bd3 import BD3
from objectives.dream import Dream
from objectives.llada import LLaDA
from objectives.orthrus import Orthrus
from objectives.refusion import ReFusion
from tests.conftest import ARCHITECTURES, confident_backbone

AR = Autoregressive(average="example")
LLADA = LLaDA(
    eps=1e-3,
    shift=False,
    pad_policy="eos",
    pad_multiple=32,
    pad_scope="response",
    complementary=True,
    attention_annealing_steps=100,
)
DREAM = Dream(eps=1e-3, weighting="cart", geometric_p=0.3, complementary=False, attention_annealing_steps=0)
BLOCKS = BD3(
    block_size=2,
    block_origin="sequence",
    t_min=0.3,
    t_max=0.8,
    t_per="block",
    stratify_blocks=False,
    weighting="inverse_t",
    complementary=False,
    force_mask=True,
    shift=False,
    pad_policy="none",
    average="example",
)
FAST = dataclasses.replace(
    BLOCKS, block_size=3, shift=True, pad_policy="mask", weighting="uniform", complementary=True, average="token"
)
REFUSION = ReFusion(slot_sizes=(4, 2), masking="bernoulli", mdm_weight=0.5, eps=1e-3, complementary=True)
ORTHRUS = Orthrus(
    block_size=4, num_anchors=3, per_tokens=None, twins="qkvo", loss_type="kl", mask_share=1.0, complementary=False
)


def example(prompt: Sequence[int], response: Sequence[int], index: int = 0) -> Example:
    return Example(index=index, prompt_ids=np.asarray(prompt, np.int64), response_ids=np.asarray(response, np.int64))


TOY = example([20, 21, 22], [30, 31, 32, 33])
LONGER = example([20, 21, 22], [30, 31, 32, 33, 34])
FOUR_SLOTS = example([20, 21, 22], [30, 31, 32, 33, 34, 35, 36])


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Backbone:
    return confident_backbone(tokenizer, seed=3)


# --- slow references: one copy of the text, one pass for each state of decoding ---


class Reader:
    """-log p of a token from one plain forward pass over tokens at their positions."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone
        self.seen: dict[Any, torch.Tensor] = {}

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int], positions: Sequence[int], block: Sequence[int], row: int) -> np.ndarray:
        """[V] of the row; a token sees those of blocks up to its own."""
        key = (tuple(tokens), tuple(positions), tuple(block))
        if key not in self.seen:
            ids = [self.backbone.mask_token_id if token == MASK else token for token in tokens]
            mask = torch.tensor(block)[:, None] >= torch.tensor(block)[None]
            logits = self.backbone.model(
                input_ids=torch.tensor([ids]),
                position_ids=torch.tensor([list(positions)]),
                attention_mask=mask[None, None],
                use_cache=False,
            ).logits[0]
            self.seen[key] = -logits.log_softmax(-1)
        return self.seen[key][row].numpy()


def by_chain_rule(backbone: Backbone, item: Example) -> float:
    read, total = Reader(backbone), 0.0
    for place, token in enumerate(item.response_ids):
        text = [*item.prompt_ids, *item.response_ids[:place]]
        total += read(text, range(len(text)), range(len(text)), -1)[token]
    return total


def any_order(costs_of: Callable[[frozenset[int]], dict[int, float]], places: Sequence[int]) -> list[float]:
    """-log p of each order of these places; `costs_of` has the cost of every hidden place."""
    found = []
    for order in itertools.permutations(places):
        found.append(sum(costs_of(frozenset(order[step:]))[place] for step, place in enumerate(order)))
    return found


def full_attention_orders(backbone: Backbone, item: Example, *, shift: bool) -> list[float]:
    read, num_prompt, length = Reader(backbone), len(item.prompt_ids), len(item)
    text = [*item.prompt_ids.tolist(), *item.response_ids.tolist()]

    def costs_of(hidden: frozenset[int]) -> dict[int, float]:
        tokens = [MASK if place in hidden else token for place, token in enumerate(text)]
        return {p: read(tokens, range(length), [0] * length, p - int(shift))[text[p]] for p in hidden}

    return any_order(costs_of, range(num_prompt, length))


def blocks_of(objective: BD3, item: Example) -> list[list[int]]:
    """Places of each block that holds response tokens, those of a filled last one included."""
    num_prompt, size = len(item.prompt_ids), objective.block_size
    origin = num_prompt if objective.block_origin == "response" else 0
    end = len(item) if objective.pad_policy == "none" else origin + -(-(len(item) - origin) // size) * size
    blocks = [list(range(start, min(start + size, end))) for start in range(origin, end, size)]
    return [block for block in blocks if block[-1] >= num_prompt]


def block_bound(backbone: Backbone, objective: BD3, item: Example) -> float:
    """Blocks one after the other, as a decoder goes: the clean text before, then the noisy block."""
    read, num_prompt = Reader(backbone), len(item.prompt_ids)
    text = dict(enumerate([*item.prompt_ids.tolist(), *item.response_ids.tolist()]))
    number = {p: p // objective.block_size for p in range(100)}
    if objective.block_origin == "response":
        number = {p: 0 if p < num_prompt else 1 + (p - num_prompt) // objective.block_size for p in range(100)}
    total = 0.0
    for block in blocks_of(objective, item):
        before = list(range(block[0]))
        open_places = [p for p in block if num_prompt <= p < len(item)]
        if objective.shift and open_places[0] == block[0]:
            place = open_places.pop(0)
            total += read([text[p] for p in before], before, [number[p] for p in before], -1)[text[place]]

        def costs_of(hidden: frozenset[int], before: list[int] = before, block: list[int] = block) -> dict[int, float]:
            places = before + block
            tokens = [MASK if p in hidden or p not in text else text[p] for p in places]
            fields = (tokens, places, [number[p] for p in places])
            return {p: read(*fields, p - int(objective.shift))[text[p]] for p in hidden}

        total += np.mean(any_order(costs_of, open_places))
    return total


def slot_orders(backbone: Backbone, item: Example, *, size: int) -> list[float]:
    """-log p given each order of the slots: a pass over what is decoded and all open [MASK]s, then left to right."""
    read, num_prompt = Reader(backbone), len(item.prompt_ids)
    text = [*item.prompt_ids.tolist(), *item.response_ids.tolist()]
    slots = [list(range(start, min(start + size, len(item)))) for start in range(num_prompt, len(item), size)]
    found = []
    for order in itertools.permutations(slots):
        places, total = list(range(num_prompt)), 0.0
        for step, slot in enumerate(order):
            row = places + sorted(itertools.chain(*order[step:]))
            tokens = [text[p] for p in places] + [MASK] * (len(row) - len(places))
            total += read(tokens, row, range(len(row)), row.index(slot[0]))[text[slot[0]]]
            for one, two in itertools.pairwise(slot):
                places.append(one)
                total += read([text[p] for p in places], places, range(len(places)), -1)[text[two]]
            places.append(slot[-1])
        found.append(total)
    return found


def log_mean(orders: Sequence[float]) -> float:
    """-log p of the model that draws an order first."""
    return -float(np.logaddexp.reduce(-np.array(orders)) - math.log(len(orders)))


def reference(objective: Objective, backbone: Backbone, item: Example) -> float:
    if isinstance(objective, LLaDA | Dream):
        shift = objective.shift if isinstance(objective, LLaDA) else True
        return float(np.mean(full_attention_orders(backbone, item, shift=shift)))
    if isinstance(objective, BD3):
        return block_bound(backbone, objective, item)
    if isinstance(objective, ReFusion):
        return float(np.mean(slot_orders(backbone, item, size=min(objective.slot_sizes))))
    return by_chain_rule(backbone, item)


METHODS: dict[str, Objective] = {
    "ar": AR,
    "llada": LLADA,
    "llada, shifted": dataclasses.replace(LLADA, shift=True),
    "dream": DREAM,
    "bd3": BLOCKS,
    "bd3 from the response": dataclasses.replace(BLOCKS, block_size=3, block_origin="response", pad_policy="eos"),
    "bd3 of one block": dataclasses.replace(BLOCKS, block_size=8),
    "bd3, blocks of 1": dataclasses.replace(BLOCKS, block_size=1),
    "fast_dllm_v2": FAST,
    "fast_dllm_v2 from the response": dataclasses.replace(FAST, block_size=2, block_origin="response"),
    "refusion": REFUSION,
    "refusion, slots of 1": dataclasses.replace(REFUSION, slot_sizes=(1,)),
    "refusion, one slot": dataclasses.replace(REFUSION, slot_sizes=(8,)),
    "orthrus": ORTHRUS,
}


def measure(objective: Objective, backbone: Backbone, *items: Example, **changes: Any) -> list[Likelihood]:
    settings = {"num_draws": 64, "seed": 0, "max_tokens_per_batch": 4096, **changes}
    return negative_log_likelihood(backbone, objective, items, **settings)


@pytest.mark.parametrize("name", METHODS)
def test_the_mean_is_the_enumerated_value(name: str, model: Backbone) -> None:
    objective = METHODS[name]
    expected = reference(objective, model, LONGER)
    (found,) = measure(objective, model, LONGER, num_draws=1200)
    assert found.tokens == 5
    if objective.likelihood_kind == "exact":
        assert (found.num_draws, found.standard_error) == (1, 0.0)
        assert found.nats == pytest.approx(expected, rel=1e-5)
    else:
        assert found.num_draws == 1200
        assert abs(found.nats - expected) < max(4 * found.standard_error, 1e-4)
        assert found.standard_error < 0.01 * expected
        assert found.nats == pytest.approx(expected, rel=0.02)


def every_outcome(objective: Objective, item: Example) -> Iterator[list[View]]:
    """Draws of equal chance that are all there are, for one block or any order of slots."""
    count = len(item.response_ids)

    class Fixed:
        def __init__(self, order: tuple[int, ...]) -> None:
            self.order = order

        def permutation(self, count: int) -> np.ndarray:
            assert count == len(self.order)
            return np.array(self.order)

    size = min(objective.slot_sizes) if isinstance(objective, ReFusion) else 1
    num_units = -(-count // size)
    for order in itertools.permutations(range(num_units)):
        for level in range(num_units):
            yield objective.likelihood_views(item, (level + 0.5) / num_units, Fixed(order))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "item"),
    [
        ("llada", TOY),
        ("llada, shifted", TOY),
        ("dream", TOY),
        ("bd3 of one block", TOY),
        ("refusion", LONGER),
        ("refusion", FOUR_SLOTS),
        ("refusion, slots of 1", TOY),
    ],
)
def test_the_expectation_is_the_enumerated_value_to_rounding(name: str, item: Example, model: Backbone) -> None:
    """All equally likely masks or orders instead of draws."""
    objective = METHODS[name]
    total, draws = 0.0, list(every_outcome(objective, item))
    with torch.no_grad():
        for view in itertools.chain(*draws):
            batch = collate(
                [[view]],
                mask_token_id=model.mask_token_id,
                pad_to_multiple=1,
                num_examples=1,
                num_response_tokens=1,
            )
            hidden = model(batch, objective.likelihood_attention())[batch.targets != IGNORE]
            losses = model.token_cross_entropy(hidden, batch.targets[batch.targets != IGNORE])
            total += float((losses * batch.weights[batch.targets != IGNORE]).sum())
    assert total / len(draws) == pytest.approx(reference(objective, model, item), rel=1e-5)


def test_bounds_lie_above_what_they_bound(model: Backbone) -> None:
    for name, orders in {
        "refusion": slot_orders(model, LONGER, size=2),
        "llada": full_attention_orders(model, LONGER, shift=False),
        "dream": full_attention_orders(model, LONGER, shift=True),
    }.items():
        (found,) = measure(METHODS[name], model, LONGER, num_draws=600)
        gap = np.mean(orders) - log_mean(orders)
        assert gap > 0.05, name  # the orders differ, so the bound is not the thing itself
        assert found.nats - 4 * found.standard_error > log_mean(orders), name


def test_blocks_of_one_with_shift_are_the_chain_rule(model: Backbone) -> None:
    """The clean copy of a block of one token is a causal row: the value of the same model read as a causal one."""
    blocks = dataclasses.replace(FAST, block_size=1)
    assert blocks.likelihood_kind == "exact"
    for origin in ("sequence", "response"):
        (found,) = measure(dataclasses.replace(blocks, block_origin=origin), model, LONGER)
        if origin == "sequence":
            assert found.nats == pytest.approx(measure(AR, model, LONGER)[0].nats, rel=1e-5)
        assert found.nats == pytest.approx(block_bound(model, dataclasses.replace(blocks, block_origin=origin), LONGER))


def test_the_frozen_model_is_measured_beside_its_twins(model: Backbone) -> None:
    twins = copy.deepcopy(model)
    ORTHRUS.prepare(twins)
    with torch.no_grad():
        for parameter in twins.parameters():
            if parameter.requires_grad:
                parameter += 1.0
    assert measure(ORTHRUS, twins, TOY)[0].nats == pytest.approx(by_chain_rule(model, TOY), rel=1e-5)


# --- rows ---


@pytest.mark.parametrize("name", choices("objective"))
def test_only_response_tokens_count_and_each_with_weight_one_on_average(name: str) -> None:
    node: Any = OmegaConf.to_container(OmegaConf.load(config_folder() / "objective" / f"{name}.yaml"))
    objective = build(node, Objective)
    assert objective.likelihood_kind in ("exact", "bound")
    assert objective.likelihood_meaning != "none"
    rng = np.random.default_rng(0)
    for num_prompt, num_response in ((1, 1), (3, 5), (8, 8), (30, 41), (2, 100)):
        item = example(np.arange(num_prompt), np.arange(1000, 1000 + num_response))
        counted = np.zeros(num_response)
        for draw in range(20):
            views = objective.likelihood_views(item, (draw + rng.random()) / 20, rng)
            assert sum(view.weights.sum() for view in views) == pytest.approx(num_response, rel=1e-5)
            for view in views:
                supervised = view.targets != IGNORE
                assert (view.targets[supervised] >= 1000).all()
                assert (view.weights[~supervised] == 0).all()
                assert ((view.term >= 0) == supervised).all()
                np.add.at(counted, view.targets[supervised] - 1000, 1)
                text = np.arange(num_prompt).tolist() + np.arange(1000, 1000 + num_response).tolist()
                shown = view.input_ids != MASK
                assert (view.input_ids[shown] == np.array(text)[view.position_ids[shown]]).all()
        if objective.likelihood_kind == "exact":
            assert (counted == 20).all()


def sees(view: View, attention: Attention) -> np.ndarray:
    """[N, N] bool."""
    batch = collate([[view]], mask_token_id=279, pad_to_multiple=1, num_examples=1, num_response_tokens=1)
    return dense_mask(attention, batch)[0, 0].numpy()


@pytest.mark.parametrize("num_clean", range(4))
def test_slots_are_drafted_behind_decoded_ones_and_open_masks_on_their_left(num_clean: int) -> None:
    """Rows of 4 slots, of 2, 2, 2 and 1 tokens, causal as in training."""
    assert REFUSION.likelihood_attention() == REFUSION.attention(0) == CAUSAL
    first, rest = REFUSION.likelihood_views(FOUR_SLOTS, (num_clean + 0.5) / 4, np.random.default_rng(1))
    text = np.concatenate([FOUR_SLOTS.prompt_ids, FOUR_SLOTS.response_ids])
    order = list(dict.fromkeys((rest.position_ids[3:] - 3) // 2))  # sigma
    in_order = {slot: [place for place in (3 + 2 * slot, 4 + 2 * slot) if place < 10] for slot in order}

    allowed = sees(first, CAUSAL)
    decoded = [0, 1, 2, *itertools.chain(*(in_order[slot] for slot in order[:num_clean]))]
    open_places = sorted(set(range(10)) - set(decoded))
    assert first.position_ids.tolist() == decoded + open_places
    assert ((first.input_ids == MASK) == (np.arange(10) >= len(decoded))).all()
    supervised = np.flatnonzero(first.targets != IGNORE)
    assert first.position_ids[supervised].tolist() == sorted(3 + 2 * slot for slot in order[num_clean:])
    np.testing.assert_allclose(first.weights[supervised], 4 / (4 - num_clean))
    for row in supervised:
        own = first.position_ids[row]
        assert first.targets[row] == text[own]  # itself, no shift
        shown = first.position_ids[allowed[row]].tolist()
        assert shown == decoded + [place for place in open_places if place <= own]

    allowed = sees(rest, CAUSAL)
    assert (rest.input_ids == text[rest.position_ids]).all()
    supervised = np.flatnonzero(rest.targets != IGNORE)
    assert sorted(rest.position_ids[supervised]) == [3, 5, 7]
    assert (rest.weights[supervised] == 1).all()
    for row in supervised:
        own = rest.position_ids[row]
        assert rest.targets[row] == text[own + 1]
        before = order[: order.index((own - 3) // 2)]
        shown = rest.position_ids[allowed[row]].tolist()
        assert shown == [0, 1, 2, *itertools.chain(*(in_order[slot] for slot in before)), own]


@pytest.mark.parametrize(
    ("name", "num_slots"), [("refusion", 4), ("refusion, slots of 1", 7), ("refusion, one slot", 1)]
)
def test_first_tokens_of_slots_and_others_have_their_own_rows(name: str, num_slots: int) -> None:
    rng = np.random.default_rng(0)
    for u in (0.0, *rng.random(20), 1.0):  # a stratified u can be rounded up to 1
        sums = [float(view.weights.sum()) for view in METHODS[name].likelihood_views(FOUR_SLOTS, u, rng)]
        assert sums == pytest.approx([num_slots, 7 - num_slots] if num_slots < 7 else [7])


def test_every_token_has_weight_one_on_average_over_orders_of_slots() -> None:
    draws = list(every_outcome(REFUSION, FOUR_SLOTS))
    weights = np.zeros(7)
    for view in itertools.chain(*draws):
        supervised = view.targets != IGNORE
        np.add.at(weights, view.targets[supervised] - 30, view.weights[supervised])
    np.testing.assert_allclose(weights / len(draws), 1, rtol=1e-6)


def test_padding_and_annealing_of_training_play_no_part() -> None:
    (view,) = LLADA.likelihood_views(TOY, 0.99, np.random.default_rng(0))
    assert len(view) == len(TOY)
    assert sees(view, LLADA.likelihood_attention()).all()
    assert not sees(view, LLADA.attention(0)).all()


def test_hidden_tokens_are_as_many_as_u_says() -> None:
    rng = np.random.default_rng(0)
    counts = [hide_some(4, u, rng).sum() for u in (0.0, 0.24, 0.25, 0.5, 0.999999)]
    assert counts == [1, 1, 2, 3, 4]
    chosen = np.mean([hide_some(4, 0.3, rng) for _ in range(2000)], axis=0)
    np.testing.assert_allclose(chosen, 0.5, atol=0.05)


def test_an_objective_without_likelihood_says_so(model: Backbone) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Silent(Autoregressive):
        likelihood_kind = None

    with pytest.raises(UserError, match="no likelihood"):
        measure(Silent(average="token"), model, TOY)
    with pytest.raises(UserError, match="no likelihood"):
        Objective.likelihood_views(AR, TOY, 0.0, np.random.default_rng(0))


# --- draws ---


def spread(
    objective: Objective, backbone: Backbone, item: Example, *, num_draws: int, repeats: int
) -> list[Likelihood]:
    """Independent estimates: the same example under many numbers."""
    items = [dataclasses.replace(item, index=index) for index in range(repeats)]
    return measure(objective, backbone, *items, num_draws=num_draws, max_tokens_per_batch=20000)


@pytest.mark.parametrize("name", ["llada", "bd3 of one block", "refusion"])
def test_standard_errors_cover(name: str, model: Backbone) -> None:
    objective = METHODS[name]
    expected = reference(objective, model, LONGER)
    found = spread(objective, model, LONGER, num_draws=24, repeats=150)
    z = np.array([(one.nats - expected) / one.standard_error for one in found])
    assert 0.88 <= np.mean(np.abs(z) < 1.96) <= 0.995
    assert abs(z.mean()) < 0.35
    real, claimed = np.std([one.nats for one in found]), np.sqrt(np.mean([one.standard_error**2 for one in found]))
    assert 0.8 < claimed / real < 1.35
    together = figures(found)
    assert abs(together["nats"] - 150 * expected) < 4 * together["nats_error"]


class Counter:
    """A stand-in for a model whose tokens cost as many nats as their row hides: a draw with l hidden ones costs R l."""

    training, max_length, mask_token_id, attention_backend, device = False, None, 7, "sdpa", torch.device("cpu")

    def eval(self) -> None: ...

    def train(self, mode: bool) -> None: ...

    def __call__(self, batch: Batch, attention: Attention) -> torch.Tensor:
        hidden = ((batch.input_ids == self.mask_token_id) & (batch.segment_ids > 0)).sum(dim=1, keepdim=True)
        return hidden.expand_as(batch.input_ids)[..., None].float()

    def token_cross_entropy(self, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return rows[:, 0]


@pytest.mark.parametrize("objective", [LLADA, dataclasses.replace(BLOCKS, block_size=3)], ids=["llada", "bd3"])
def test_stratified_draws_vary_less(objective: Objective) -> None:
    item, counter = example([20, 21, 22], range(30, 42)), cast(Backbone, Counter())
    found = spread(objective, counter, item, num_draws=8, repeats=100)
    singles = np.var([one.nats for one in spread(objective, counter, item, num_draws=1, repeats=800)])
    assert np.var([one.nats for one in found]) < 0.4 * singles / 8
    claimed = np.mean([one.standard_error**2 for one in found])
    assert np.var([one.nats for one in found]) < claimed
    if objective is LLADA:
        assert claimed < 0.5 * singles / 8  # the spread of the draws would say all of it
        assert np.mean([one.nats for one in found]) == pytest.approx(12 * 13 / 2, rel=0.01)


def test_standard_error_by_hand() -> None:
    assert standard_error(np.array([1.0, 3.0, 2.0])) == pytest.approx(math.sqrt((4 + 1) / (2 * 3 * 2)))
    assert math.isnan(standard_error(np.array([1.0])))
    steps = np.arange(100.0)  # nothing but the difference of the slices
    assert standard_error(steps) < 0.03 * steps.std() / 10 * 10
    noise = np.random.default_rng(0).normal(size=40000)
    assert standard_error(noise) == pytest.approx(1 / 200, rel=0.03)


@pytest.mark.parametrize("name", ["ar", "llada", "fast_dllm_v2", "refusion"])
def test_batches_and_neighbours_change_nothing(name: str, model: Backbone) -> None:
    rng = np.random.default_rng(0)
    items = [example(rng.integers(10, 250, p), rng.integers(10, 250, r), i) for i, (p, r) in enumerate(
        [(1, 1), (4, 9), (9, 2), (2, 17), (12, 5)]
    )]  # fmt: skip
    whole = measure(METHODS[name], model, *items, num_draws=4)
    singles = measure(METHODS[name], model, *items, num_draws=4, max_tokens_per_batch=1)
    turned = measure(METHODS[name], model, *items[::-1], num_draws=4, max_tokens_per_batch=60)[::-1]
    alone = [measure(METHODS[name], model, item, num_draws=4)[0] for item in items]
    for other in (singles, turned, alone):
        for one, two in zip(whole, other, strict=True):
            assert (one.index, one.tokens) == (two.index, two.tokens)
            assert two.nats == pytest.approx(one.nats, rel=1e-5)
            assert two.standard_error == pytest.approx(one.standard_error, rel=1e-3, abs=1e-5)
    other_seed = measure(METHODS[name], model, *items, num_draws=4, seed=1)
    assert (other_seed[1].nats == whole[1].nats) == (name == "ar")


def test_mode_gradients_and_progress(model: Backbone) -> None:
    model.train()
    told: list[int] = []
    found = measure(LLADA, model, TOY, LONGER, num_draws=3, max_tokens_per_batch=10, on_progress=told.append)
    assert model.training
    model.eval()
    assert told[-1] == 2
    assert told == sorted(told)
    assert [one.tokens for one in found] == [4, 5]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_greedy_responses_are_known(model: Backbone) -> None:
    text = TOY.prompt_ids.tolist()
    for _ in range(4):
        with torch.no_grad():
            logits = model.model(torch.tensor([text]), use_cache=False).logits[0, -1]
        logits[model.mask_token_id] = -torch.inf
        text.append(int(logits.argmax()))
    greedy = example(text[:3], text[3:])
    other = example(text[:3], [*text[3:6], (text[6] + 1) % 200])
    found = measure(AR, model, greedy, other, check_greedy=True)
    assert [one.is_greedy for one in found] == [True, False]
    assert [one.is_greedy for one in measure(AR, model, greedy)] == [None]
    assert [one.is_greedy for one in measure(LLADA, model, greedy, check_greedy=True, num_draws=2)] == [None]


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (example([], [1]), "0 prompt and 1 response tokens"),
        (example([1], []), "1 prompt and 0 response tokens"),
        (example([1], range(300)), "window of 256"),
    ],
)
def test_what_cannot_be_measured_is_refused(item: Example, text: str, model: Backbone) -> None:
    with pytest.raises(UserError, match=text):
        measure(AR, model, TOY, item)
    with pytest.raises(UserError, match="num_draws=0"):
        measure(AR, model, TOY, num_draws=0)


def test_figures_by_hand() -> None:
    one, two = (
        Likelihood(index=i, nats=n, standard_error=e, tokens=t, num_draws=4)
        for i, n, e, t in ((0, 4.0, 0.3, 3), (1, 6.0, 0.4, 2))
    )
    found = figures([one, two])
    assert found["nats"] == 10
    assert found["nats_error"] == pytest.approx(0.5)
    assert found["bits_per_token"] == pytest.approx(2 / math.log(2))
    assert found["bits_per_token_error"] == pytest.approx(0.1 / math.log(2))
    assert found["perplexity"] == pytest.approx(math.exp(2))


# --- the command ---


def test_conventions_must_agree() -> None:
    check_conventions(REFUSION, REFUSION.spec(5), model="m")
    with pytest.raises(UserError, match=r"slot_sizes is \[4, 2\], but model=m was trained with \[8\]"):
        check_conventions(REFUSION, dataclasses.replace(REFUSION.spec(5), slot_sizes=(8,)), model="m")
    with pytest.raises(UserError, match="block_size is 2"):
        check_conventions(BLOCKS, dataclasses.replace(BLOCKS.spec(5), block_size=4), model="m")
    with pytest.raises(UserError, match="shift is none"):
        check_conventions(BLOCKS, dataclasses.replace(BLOCKS.spec(5), shift="all"), model="m")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, tokenizer_folder: Path) -> dict[str, Path]:
    """Prepared data and a model that says it was trained for slots of 4."""
    root = tmp_path_factory.mktemp("likelihood")
    records = root / "records.jsonl"
    lines = [{"query": f"What is {a} + 1?", "response": f"The answer is {a + 1}."} for a in range(30)]
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [
        f"data.folder={root / 'data'}",
        f"data.tokenizer={tokenizer_folder}",
        f"data.sources.0.files=[{records}]",
    ]
    assert main(["prepare", "data=files", *command]) == 0
    backbone = Backbone.from_architecture(ARCHITECTURES["qwen3"], tokenizer=tokenizer, seed=1)
    spec = dataclasses.replace(REFUSION, slot_sizes=(4,)).spec(backbone.mask_token_id)
    backbone.model.config.diffusion_spec = spec.to_dict()
    backbone.model.config.mask_token_id = backbone.mask_token_id
    backbone.model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    return {"root": root, "data": root / "data", "model": root / "model"}


def command(places: dict[str, Path], out: Path, *more: str) -> list[str]:
    where = [f"model={places['model']}", f"data.folder={places['data']}", f"out={out}"]
    return ["likelihood", *where, "validation_fraction=0.3", "limit=4", "num_draws=3", "device=cpu", *more]


def test_the_command_writes_figures_and_where_they_are_from(
    places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(command(places, out, "objective=refusion", "objective.slot_sizes=[4]")) == 0
    assert "bits per token" in capsys.readouterr().out
    result = json.loads((out / "result.json").read_text())
    assert result["likelihood"]["kind"] == "bound"
    assert "slots of 4 tokens" in result["likelihood"]["is"]
    assert result["figures"]["examples"] == 4
    assert result["figures"]["nats_error"] > 0
    assert result["num_draws"] == 3
    assert {"weights_fingerprint", "tokenizer_fingerprint", "data_fingerprint", "objective", "spec"} <= set(result)
    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert sum(record["nats"] for record in records) == pytest.approx(result["figures"]["nats"])
    again = tmp_path / "again"
    assert main(command(places, again, "objective=refusion", "objective.slot_sizes=[4]", "max_tokens_per_batch=1")) == 0
    other = json.loads((again / "result.json").read_text())
    assert other["figures"]["nats"] == pytest.approx(result["figures"]["nats"], rel=1e-5)
    assert main(command(places, tmp_path / "one", "objective=refusion", "objective.slot_sizes=[4]", "num_draws=1")) == 0
    assert json.loads((tmp_path / "one" / "result.json").read_text())["figures"]["nats_error"] is None


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ([], "objective: missing"),
        (["objective=ar"], "was trained with 'refusion'"),
        (["objective=refusion"], r"slot_sizes is \[4, 8, 16, 32\], but model="),
        (["objective=ar", "limit=0"], "limit=0: must be at least 1"),
        (["objective=ar", "validation_fraction=0"], "no examples"),
        (["objective=ar", "split=test"], "split=test"),
    ],
)
def test_bad_settings_get_one_line(
    places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], text: str
) -> None:
    assert main(command(places, tmp_path / "out", *more)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert re.search(text, lines[-1]), lines
    assert not (tmp_path / "out").exists()


def test_a_spec_has_all_the_conventions_that_are_compared() -> None:
    assert set(REFUSION.spec(1).to_dict()) == {field.name for field in dataclasses.fields(DiffusionSpec)}
