"""The bucketed lean forward without capture: any device shows that padding changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_refusion.backbone import Backbone
from lit_refusion.engine import graphs, scheduler
from lit_refusion.engine.forward import Forward
from lit_refusion.engine.graphs import GraphedForward, Pass
from lit_refusion.engine.lean import LeanForward
from lit_refusion.engine.queries import Queries
from tests.conftest import ARCHITECTURES, confident_backbone, random_prompts
from tests.engine.test_lean import CAPACITY, PRESETS, add_twins, cache_of, make, preset, request


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "VISIBLE_STEP", 32)
    monkeypatch.setattr(graphs, "CAPTURE_AFTER", 1)


def kept(step: Pass) -> Pass:
    """What a graph does: results are written to the same memory."""
    memory: list[Tensor] = []

    def replay() -> Tensor:
        hidden = step()
        if not memory:
            memory.append(torch.empty_like(hidden))
        return memory[0].copy_(hidden)

    return replay


def assert_same_passes(
    backbone: Backbone,
    reference: Forward,
    other: Forward,
    *,
    passes: list[list[int]],
    rng: np.random.Generator,
    rtol: float,
    atol: float,
) -> None:
    """Passes one after the other with so many queries in each of three rows; the hidden states agree."""
    starts = np.zeros(3, int)
    with torch.inference_mode():
        for lengths in passes:
            requests = [request(length, int(start), rng=rng) for length, start in zip(lengths, starts)]
            queries = Queries.joined(requests, mask_token_id=backbone.mask_token_id, capacity=CAPACITY)
            (expected, ours), (found, theirs) = reference(queries, [0, 1, 2]), other(queries, [0, 1, 2])
            for length, one, two in zip(lengths, ours, theirs):
                torch.testing.assert_close(
                    found[two : two + length], expected[one : one + length], rtol=rtol, atol=atol
                )
            starts += lengths


@pytest.mark.parametrize("joins_groups", [False, True])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_bucketed_equals_unbucketed(architecture: str, joins_groups: bool) -> None:
    """Rows of unequal lengths, then of one token; padding is written to the trash and nowhere else."""
    backbone, rng = make(ARCHITECTURES[architecture]), np.random.default_rng(0)
    caches = cache_of(backbone), cache_of(backbone)
    lean, inner = (LeanForward(backbone, cache) for cache in caches)
    lean.joins_groups = inner.joins_groups = joins_groups
    graphed = GraphedForward(inner, capture=kept)
    passes = [[9, 4, 6], [5, 7, 3], [7, 6, 5], [1, 1, 1], [1, 1, 1], [1, 1, 1]]
    assert_same_passes(backbone, lean, graphed, passes=passes, rng=rng, rtol=1e-4, atol=1e-5)
    assert {size[:2] for size in graphed.graphs} == {(3, 8), (3, 1)}
    stored, wanted = (cache.buffer[:, :, :, :CAPACITY] for cache in caches)
    torch.testing.assert_close(stored, wanted, rtol=1e-4, atol=1e-5)


def test_the_last_bucket_ends_with_the_trash() -> None:
    backbone, rng = make(ARCHITECTURES["llama"]), np.random.default_rng(0)
    graphed = GraphedForward(LeanForward(backbone, cache_of(backbone)), capture=kept)
    with torch.inference_mode():
        for _ in range(2):
            queries = Queries.joined([request(2, CAPACITY - 2, rng=rng)], mask_token_id=0, capacity=CAPACITY)
            graphed(queries, [0])
    assert list(graphed.graphs) == [(1, 2, CAPACITY + 1)]


def test_rows_behind_the_first_and_far_positions_are_not_captured() -> None:
    backbone, rng = make(ARCHITECTURES["llama"]), np.random.default_rng(0)
    graphed = GraphedForward(LeanForward(backbone, cache_of(backbone)), capture=kept)
    with torch.inference_mode():
        for _ in range(4):
            queries = Queries.joined([request(2, 0, rng=rng)], mask_token_id=0, capacity=CAPACITY)
            graphed(queries, [1])
            queries.table[:, :, 1] = CAPACITY + 1
            graphed(queries, [0])
    assert not graphed.graphs


@pytest.mark.parametrize("name", [*PRESETS, "orthrus"])
def test_tokens_equal_the_modules(tokenizer: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = confident_backbone(tokenizer)
    if name == "orthrus":
        add_twins(backbone)
    prompts, decoder = random_prompts(5, longest=12), preset(name, **PRESETS.get(name, {"block_size": 4}))
    backbone.forward_choice = "module"
    expected = [generation.tokens for generation in decoder.generate(backbone, prompts, seed=1)]
    made: list[GraphedForward] = []

    def fastest_forward(backbone: Backbone, cache: Any, *, is_shared: bool, adapted: bool) -> GraphedForward:
        made.append(GraphedForward(LeanForward(backbone, cache, adapted=adapted), capture=kept))
        return made[-1]

    monkeypatch.setattr(scheduler, "fastest_forward", fastest_forward)
    assert [generation.tokens for generation in decoder.generate(backbone, prompts, seed=1)] == expected
    assert len(made) == (2 if name == "orthrus" else 1)  # a forward for adapted passes
    assert all(forward.graphs for forward in made)
