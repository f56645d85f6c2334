"""Decoding on a GPU: CUDA graphs of the lean forward against the module; skipped elsewhere."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from lit_refusion.backbone import Backbone
from lit_refusion.engine import graphs
from lit_refusion.engine.forward import ModuleForward, fastest_forward
from lit_refusion.engine.graphs import GraphedForward
from tests.conftest import ARCHITECTURES, confident_backbone, random_prompts
from tests.engine.test_graphs import assert_same_passes
from tests.engine.test_lean import PRESETS, cache_of, make, preset

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _capture_soon(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    monkeypatch.setattr(graphs, "CAPTURE_AFTER", 1)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    with caplog.at_level(logging.WARNING):
        yield
    assert "without a CUDA graph" not in caplog.text


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_replays_equal_the_module(architecture: str) -> None:
    """fp32, rows of unequal lengths; every size is captured and then replayed."""
    backbone, rng = make(ARCHITECTURES[architecture]), np.random.default_rng(0)
    backbone.to("cuda")
    caches = cache_of(backbone), cache_of(backbone)
    module, lean = ModuleForward(backbone, caches[0]), fastest_forward(backbone, caches[1], is_shared=False)
    assert isinstance(lean, GraphedForward)
    passes = [[9, 4, 6], [5, 7, 3], [7, 6, 5], [6, 8, 4], [1, 1, 1], [1, 1, 1], [1, 1, 1]]
    assert_same_passes(backbone, module, lean, passes=passes, rng=rng, rtol=1e-3, atol=1e-4)
    assert len(lean.graphs) == 2


@pytest.mark.parametrize("name", PRESETS)
def test_tokens_equal_the_modules(tokenizer: Any, name: str) -> None:
    """In fp32 all, in bf16, where ties move with the shape of a pass, most."""
    backbone: Backbone = confident_backbone(tokenizer)
    prompts, decoder = random_prompts(6, longest=12), preset(name, **PRESETS[name])
    backbone.to("cuda")
    for dtype, least in ((torch.float32, 1.0), (torch.bfloat16, 0.9)):
        backbone.model.to(dtype)
        found: dict[str, list[int]] = {}
        for choice in ("module", "lean"):
            backbone.forward_choice = choice  # type: ignore[assignment]
            found[choice] = [token for g in decoder.generate(backbone, prompts, seed=1) for token in g.tokens]
        same = [one == two for one, two in zip(found["module"], found["lean"])]
        assert np.mean(same) >= least
