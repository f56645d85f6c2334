"""Masked-diffusion decoding: golden vectors, a slow reference, batch equals singles, no mask left behind."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from decoders.masked import MaskedDecoder
from lit_refusion.backbone import Backbone
from lit_refusion.engine.scheduler import decode
from lit_refusion.errors import UserError
from lit_refusion.spec import DiffusionSpec
from tests.conftest import ARCHITECTURES, confident_backbone, make_tokenizer, random_prompts, shared_folder

DECODER = MaskedDecoder(
    max_new_tokens=16,
    batch_size=3,
    block_size=8,
    steps=16,
    schedule="equal",
    ranking="confidence",
    ranking_temperature=0.0,
    threshold=None,
    factor=None,
    entropy_bound=None,
    temperature=0.0,
    top_p=1.0,
    guidance=0.0,
    cache="none",
    shift=False,
    as_released=False,
    stop_at_eos=False,
)


@torch.no_grad()
def full_logits(backbone: Backbone, ids: np.ndarray) -> torch.Tensor:
    """[N, V] with full attention and without a cache."""
    mask = torch.ones(1, 1, len(ids), len(ids), dtype=torch.bool)
    return backbone.model(torch.from_numpy(ids)[None], attention_mask=mask, use_cache=False).logits[0]


def slow(backbone: Backbone, prompt: list[int], decoder: MaskedDecoder) -> tuple[list[int], int]:
    """One prompt, everything run in every pass, written straight after LLaDA's and Dream's description."""
    mask, length, size = backbone.mask_token_id, decoder.max_new_tokens, decoder.block_size or decoder.max_new_tokens
    text = np.array([*prompt, *[mask] * length])
    passes = 0
    num_blocks = -(-length // size)
    steps = max(1, decoder.steps // num_blocks)
    for block in range(num_blocks):
        places = np.arange(len(prompt) + block * size, min(len(prompt) + (block + 1) * size, len(text)))
        base, rest = divmod(len(places), steps)
        for step in range(length + 1):
            hidden = [place for place in places if text[place] == mask]
            if not hidden:
                break
            logits = full_logits(backbone, text)
            if decoder.guidance:
                blank = np.where(np.arange(len(text)) < len(prompt), mask, text)
                without = full_logits(backbone, blank)
                logits = without + (decoder.guidance + 1) * (logits - without)
            passes += 1
            scored = []
            for place in hidden:
                p = logits[place - 1 if decoder.shift else place].softmax(-1)
                token = int(torch.where(torch.arange(len(p)) == mask, -1, p).argmax())  # [MASK] cannot be drawn
                top = p.topk(2).values
                score = {
                    "confidence": float(p[token]),
                    "margin": float(top[0] - top[1]),
                    "entropy": float(-torch.special.entr(p).sum()),
                }[decoder.ranking]
                scored.append((-score, place, token, float(torch.special.entr(p).sum())))
            scored.sort(key=lambda item: item[:2])
            count = 1
            if decoder.threshold is not None:
                count = max(1, sum(-item[0] >= decoder.threshold for item in scored))
            elif decoder.factor is not None:
                while count < len(scored) and all(
                    -scored[i][0] >= 1 - decoder.factor / (i + 2) for i in range(count + 1)
                ):
                    count += 1
            elif decoder.entropy_bound is not None:
                while count < len(scored):
                    entropies = [item[3] for item in scored[: count + 1]]
                    if sum(entropies) - max(entropies) > decoder.entropy_bound:
                        break
                    count += 1
            elif decoder.schedule == "time":
                grid = np.linspace(1, 1e-3, steps + 1)
                last = step >= steps - 1
                count = len(scored) if last else max(1, int(len(scored) * (1 - grid[step + 1] / grid[step])))
            else:
                count = max(1, base + (step < rest) if step < steps else base)
            for _, place, token, _ in scored[:count]:
                text[place] = token
    return text[len(prompt) :].tolist(), passes


def golden_decoder(case: dict[str, Any]) -> MaskedDecoder:
    return dataclasses.replace(
        DECODER,
        max_new_tokens=case["gen_length"],
        block_size=case["block_length"],
        steps=case["steps"],
        threshold=case.get("threshold"),
        cache="prefix" if case["method"] == "fast_dllm_prefix_cache" else "none",
        as_released=True,
    )


@pytest.fixture(scope="module")
def golden() -> tuple[Backbone, list[dict[str, Any]]]:
    cases = json.loads(shared_folder("golden", "masked_decode.json").read_text())
    return Backbone.from_pretrained(shared_folder("golden", "model")), cases


def test_the_extra_pass_of_the_released_caches_changes_no_token(golden: tuple[Backbone, list[dict[str, Any]]]) -> None:
    model, cases = golden
    saved = 0
    for case in cases:
        generation = dataclasses.replace(golden_decoder(case), as_released=False).generate(model, [case["prompt_ids"]])[
            0
        ]
        assert list(generation.tokens) == case["response_ids"]
        saved += case["forward_passes"] - generation.forward_passes
    assert saved == 4


def test_golden_decodes(golden: tuple[Backbone, list[dict[str, Any]]]) -> None:
    model, cases = golden
    assert len(cases) == 70
    for case in cases:
        generation = golden_decoder(case).generate(model, [case["prompt_ids"]])[0]
        assert list(generation.tokens) == case["response_ids"]
        assert generation.forward_passes == case["forward_passes"]


def test_golden_decodes_in_one_batch(golden: tuple[Backbone, list[dict[str, Any]]]) -> None:
    model, cases = golden
    rng = np.random.default_rng(0)
    rows = [golden_decoder(case).row(np.array(case["prompt_ids"]), model.eos_token_id, rng) for case in cases]
    generations = decode(model, rows, batch_size=8, capacity=256, seeds=[0] * len(rows))
    for case, generation in zip(cases, generations, strict=True):
        assert list(generation.tokens) == case["response_ids"]
        assert generation.forward_passes == case["forward_passes"]


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"steps": 4},
        {"steps": 5, "max_new_tokens": 21},
        {"steps": 100},
        {"block_size": None, "shift": True, "schedule": "time", "ranking": "entropy", "steps": 6},
        {"ranking": "margin", "steps": 8},
        {"threshold": 0.3},
        {"factor": 0.9},
        {"factor": 2.0, "shift": True},
        {"ranking": "entropy", "entropy_bound": 1.0},
        {"entropy_bound": 4.0, "shift": True},
        {"guidance": 0.7, "steps": 8},
        {"guidance": 1.5, "shift": True, "threshold": 0.4},
    ],
    ids=str,
)
def test_equals_the_slow_reference(tokenizer: Any, architecture: str, change: dict[str, Any]) -> None:
    backbone = confident_backbone(tokenizer, architecture=architecture)
    decoder = dataclasses.replace(DECODER, **change)
    for prompt in random_prompts(3, longest=13):
        tokens, passes = slow(backbone, prompt, decoder)
        generation = decoder.generate(backbone, [prompt])[0]
        assert list(generation.tokens) == tokens
        assert generation.forward_passes == passes


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 1.0, "top_p": 0.9},
        {"ranking": "random"},
        {"ranking_temperature": 0.5, "steps": 4},
        {"cache": "prefix", "threshold": 0.3},
        {"cache": "dual", "threshold": 0.3, "shift": True},
        {"guidance": 1.0, "steps": 4},
        {"stop_at_eos": True},
    ],
    ids=str,
)
def test_batch_equals_singles(tokenizer: Any, change: dict[str, Any]) -> None:
    backbone = confident_backbone(tokenizer)
    decoder = dataclasses.replace(DECODER, **change)
    asked = random_prompts(7, longest=13)
    together = decoder.generate(backbone, asked, seed=2)
    assert together == [decoder.generate(backbone, [p], seed=2, indices=[i])[0] for i, p in enumerate(asked)]


@torch.no_grad()
def slow_cached(backbone: Backbone, prompt: list[int], decoder: MaskedDecoder) -> list[int]:
    """Caches through transformers' own DynamicCache: keys of a block's first pass, the rest run anew in every pass."""
    mask_id, shift = backbone.mask_token_id, int(bool(decoder.shift))
    text = np.array([*prompt, *[mask_id] * decoder.max_new_tokens])
    total = len(text)
    for start in range(len(prompt), total, decoder.block_size or total):
        stop = min(start + (decoder.block_size or total), total)
        kept: Any = None
        while (text[start:stop] == mask_id).any():
            hidden = start + np.flatnonzero(text[start:stop] == mask_id)
            if kept is None:
                fed, order = np.arange(total), np.arange(total)
                cache = DynamicCache()
            else:
                fed = np.arange(start - shift, total if decoder.cache == "prefix" else stop)
                order = np.concatenate([np.setdiff1d(np.arange(total), fed), fed])
                cache = DynamicCache()
                for layer, (keys, values) in enumerate(kept):
                    others = order[: total - len(fed)]
                    cache.update(keys[:, :, others], values[:, :, others], layer)
            mask = torch.ones(1, 1, len(fed), total, dtype=torch.bool)
            output = backbone.model(
                torch.from_numpy(text[fed])[None], position_ids=torch.from_numpy(fed)[None], attention_mask=mask,
                cache=cache, use_cache=True,
            )  # fmt: skip
            if kept is None:
                kept = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
            place = {position: index for index, position in enumerate(fed)}
            p = output.logits[0][[place[h - shift] for h in hidden]].softmax(-1)
            allowed = torch.where(torch.arange(p.shape[-1]) == mask_id, -1, p)
            tokens, scores = allowed.argmax(-1).numpy(), allowed.max(-1).values.numpy()
            chosen = (scores >= decoder.threshold) | (np.arange(len(scores)) == scores.argmax())
            text[hidden[chosen]] = tokens[chosen]
    return text[len(prompt) :].tolist()


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("shift", [False, True])
def test_caches_equal_transformers_own(tokenizer: Any, cache: Any, shift: bool) -> None:
    differ = 0
    for seed in range(3):
        backbone = confident_backbone(tokenizer, seed=seed)
        decoder = dataclasses.replace(DECODER, cache=cache, shift=shift, threshold=0.5, max_new_tokens=21)
        for prompt, generation in zip(
            random_prompts(3, longest=13), decoder.generate(backbone, random_prompts(3, longest=13)), strict=True
        ):
            assert list(generation.tokens) == slow_cached(backbone, prompt, decoder)
            uncached = dataclasses.replace(decoder, cache="none").generate(backbone, [prompt])[0]
            differ += uncached.tokens != generation.tokens
    assert differ  # the caches are approximations: the comparison has something to find


def test_ranking_temperature_draws_other_positions(tokenizer: Any) -> None:
    backbone = confident_backbone(tokenizer)
    prompt = random_prompts(1, longest=13)
    orders = {
        temperature: [
            step.committed
            for step in dataclasses.replace(DECODER, ranking_temperature=temperature)
            .generate(backbone, prompt)[0]
            .steps
        ]
        for temperature in (0.0, 5.0)
    }
    assert orders[0.0] != orders[5.0]


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_caches_are_exact_where_a_block_takes_one_pass(tokenizer: Any, cache: str) -> None:
    backbone = confident_backbone(tokenizer)
    one_pass = dataclasses.replace(DECODER, steps=2)
    for prompt in random_prompts(3, longest=13):
        cached = dataclasses.replace(one_pass, cache=cache).generate(backbone, [prompt])
        assert cached == one_pass.generate(backbone, [prompt])


def test_dual_cache_feeds_the_block_alone(tokenizer: Any) -> None:
    backbone = confident_backbone(tokenizer)
    widths = []
    original = backbone.model.base_model.forward
    backbone.model.base_model.forward = lambda **kw: (widths.append(kw["input_ids"].shape[1]), original(**kw))[1]
    dataclasses.replace(DECODER, cache="dual").generate(backbone, [[20] * 10])
    assert widths == [26, *[8] * 7, 26, *[8] * 7]
    widths.clear()
    dataclasses.replace(DECODER, cache="prefix").generate(backbone, [[20] * 10])
    assert widths == [26, *[16] * 7, 26, *[8] * 7]


@given(
    st.integers(1, 20), st.one_of(st.none(), st.integers(1, 24)), st.integers(1, 30), st.sampled_from(["equal", "time"])
)
@settings(max_examples=25, deadline=None)
def test_nothing_stays_hidden(length: int, block: int | None, steps: int, schedule: Any) -> None:
    backbone = confident_backbone(make_tokenizer(), seed=1)
    decoder = dataclasses.replace(
        DECODER, max_new_tokens=length, block_size=block, steps=steps, schedule=schedule, ranking="random"
    )
    generation = decoder.generate(backbone, [[20, 21]])[0]
    assert len(generation.tokens) == length
    assert backbone.mask_token_id not in generation.tokens
    assert sorted(place for step in generation.steps for place in step.committed) == list(range(length))


def test_stop_at_eos_costs_nothing_more(tokenizer: Any) -> None:
    backbone = confident_backbone(tokenizer)
    prompt = random_prompts(1, longest=13)[0]
    whole = DECODER.generate(backbone, [prompt])[0]
    eos = whole.tokens[3]  # pretend that an early token is end-of-sequence
    backbone._eos_token_id = eos
    stopped = dataclasses.replace(DECODER, stop_at_eos=True).generate(backbone, [prompt])[0]
    assert stopped.tokens == whole.tokens[: whole.tokens.index(eos) + 1]
    assert stopped.stop == "eos"
    assert stopped.forward_passes < whole.forward_passes


def test_conventions_come_from_the_model() -> None:
    spec = DiffusionSpec(objective="dream", mask_token_id=3, shift="all", attention="full")
    open_decoder = dataclasses.replace(DECODER, shift=None)
    assert open_decoder.fit_to(spec).shift is True
    with pytest.raises(UserError, match=r"shift=False: the model was trained with True"):
        DECODER.fit_to(spec)
    assert DECODER.fit_to(spec, force=True).shift is False
    with pytest.raises(UserError, match="shift=null"):
        open_decoder.row(np.array([1]), 2, np.random.default_rng(0))
    with pytest.raises(UserError, match="trained with 'refusion'"):
        DECODER.fit_to(dataclasses.replace(spec, objective="refusion"))
    open_decoder.fit_to(dataclasses.replace(spec, objective="refusion"), force=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threshold": 0.9, "factor": 1.0}, "at most one of"),
        ({"steps": 0}, "decoder.steps=0"),
        ({"guidance": 1.0, "cache": "dual"}, "needs decoder.cache=none"),
        ({"top_p": 0.0}, "top_p"),
        ({"threshold": 7.0}, "decoder.threshold=7.0"),
        ({"threshold": 0.5, "ranking": "entropy"}, "ranking=entropy"),
        ({"factor": -1.0}, "decoder.factor=-1.0"),
        ({"entropy_bound": -1.0}, "decoder.entropy_bound"),
    ],
)
def test_bad_settings_name_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        dataclasses.replace(DECODER, **change)
