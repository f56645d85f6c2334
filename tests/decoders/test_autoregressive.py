"""Left-to-right decoding against a loop without a cache, and against Hugging Face's own generation."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from decoders.autoregressive import AutoregressiveDecoder
from lit_refusion.backbone import Backbone

GREEDY = AutoregressiveDecoder(max_new_tokens=12, batch_size=3, temperature=0.0, top_k=0, top_p=1.0, stop_at_eos=True)


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(10, 250, rng.integers(1, 20)).tolist() for _ in range(count)]


@torch.inference_mode()
def slow_greedy(backbone: Backbone, prompt: list[int], max_new_tokens: int) -> list[int]:
    text = list(prompt)
    for _ in range(max_new_tokens):
        logits = backbone.model(torch.tensor([text]), use_cache=False).logits[0, -1]
        logits[backbone.mask_token_id] = -torch.inf
        text.append(int(logits.argmax()))
        if text[-1] == backbone.eos_token_id:
            break
    return text[len(prompt) :]


def test_greedy_equals_decoding_without_a_cache(backbone: Backbone) -> None:
    asked = prompts(8)
    with torch.no_grad():  # some rows should stop early
        backbone.model.get_output_embeddings().weight[backbone.eos_token_id] *= 3
    generations = GREEDY.generate(backbone, asked)
    assert [list(g.tokens) for g in generations] == [slow_greedy(backbone, prompt, 12) for prompt in asked]
    assert [g.forward_passes for g in generations] == [len(g.tokens) for g in generations]
    assert {g.stop for g in generations} == {"eos", "length"}


def test_greedy_equals_hugging_face_generate(backbone: Backbone) -> None:
    prompt = prompts(1)[0]
    model = backbone.model
    expected = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=12, do_sample=False
    )
    assert list(GREEDY.generate(backbone, [prompt])[0].tokens) == expected[0, len(prompt) :].tolist()


def test_batch_equals_singles_when_sampling(backbone: Backbone) -> None:
    decoder = dataclasses.replace(GREEDY, temperature=1.0, top_k=50, top_p=0.9)
    asked = prompts(7)
    together = decoder.generate(backbone, asked, seed=3)
    assert together == [decoder.generate(backbone, [p], seed=3, indices=[i])[0] for i, p in enumerate(asked)]


def test_sampling_follows_the_models_distribution(backbone: Backbone) -> None:
    """One token from 3,000 rows: observed frequencies of the likeliest tokens match the softmax."""
    prompt, count = [20, 21], 3000
    decoder = dataclasses.replace(GREEDY, max_new_tokens=1, temperature=1.0, batch_size=500)
    drawn = np.array([g.tokens[0] for g in decoder.generate(backbone, [prompt] * count)])
    with torch.inference_mode():
        p = backbone.model(torch.tensor([prompt]), use_cache=False).logits[0, -1].softmax(-1).numpy()
    for token in np.argsort(-p)[:8]:
        assert (drawn == token).mean() == pytest.approx(p[token], abs=5 * float(np.sqrt(p[token] / count)))


def test_without_stop_the_budget_is_used(backbone: Backbone) -> None:
    with torch.no_grad():
        backbone.model.get_output_embeddings().weight[backbone.eos_token_id] *= 3
    for generation in dataclasses.replace(GREEDY, stop_at_eos=False).generate(backbone, prompts(4)):
        assert len(generation.tokens) == 12
        assert generation.stop == "length"
