"""ReFusion decoding: golden vectors, the slow reference, batch equals singles, cached equals uncached."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decoders.refusion import ReFusionDecoder
from lit_refusion.backbone import Backbone
from lit_refusion.engine.scheduler import decode
from lit_refusion.errors import UserError
from lit_refusion.generation import Generation
from tests.conftest import ARCHITECTURES, shared_folder
from tests.reference import refusion_decode as reference

DECODER = ReFusionDecoder(
    max_new_tokens=24,
    batch_size=1,
    slot_size=4,
    block_size=8,
    slot_threshold=0.5,
    token_threshold=0.3,
    temperature=0.0,
    certainty="first_token",
    recompute_kv=False,
    as_released=False,
    stop_at_eos=True,
    speculation_budget=0,
)


class Unmasked(Backbone):
    """Gives [MASK] no probability, so that fast and slow decoding agree on untrained weights."""

    def logits(self, rows: Tensor) -> Tensor:
        logits = super().logits(rows).clone()
        logits[:, self.mask_token_id] = -torch.inf
        return logits


def random_backbone(tokenizer: Any, *, architecture: str, seed: int) -> Unmasked:
    """Random weights, made confident and fond of EOS so that every branch of the method is taken."""
    backbone = Unmasked.from_architecture(ARCHITECTURES[architecture], tokenizer=tokenizer, seed=seed)
    head = backbone.model.get_output_embeddings().weight
    with torch.no_grad():
        head.mul_(4.0)
        head[backbone.eos_token_id] *= 1.6
    return backbone


def slow(backbone: Backbone, prompt: list[int], decoder: ReFusionDecoder) -> reference.ReferenceDecode:
    logits_of = reference.model_logits_fn(backbone.model)

    def logits_fn(ids: list[int], positions: list[int], allowed: Tensor) -> Tensor:
        logits = logits_of(ids, positions, allowed).clone()
        logits[:, backbone.mask_token_id] = -torch.inf
        return logits

    return reference.decode(
        logits_fn,
        prompt,
        gen_length=decoder.max_new_tokens,
        slot_size=decoder.slot_size,
        block_size=decoder.block_size,
        slot_threshold=decoder.slot_threshold,
        token_threshold=decoder.token_threshold,
        mask_id=backbone.mask_token_id,
        eos_id=backbone.eos_token_id,
        certainty=decoder.certainty,
        as_released=decoder.as_released,
    )


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(10, 250, rng.integers(1, 20)).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def golden_model() -> Backbone:
    return Backbone.from_pretrained(shared_folder("golden", "model"))


@pytest.fixture(scope="module")
def golden_cases() -> list[dict[str, Any]]:
    return json.loads(shared_folder("golden", "refusion_decode.json").read_text())


def golden_decoder(case: dict[str, Any], mode: str) -> ReFusionDecoder:
    return dataclasses.replace(
        DECODER,
        max_new_tokens=case["gen_length"],
        as_released=mode == "as_released",
        **{name: case[name] for name in ("slot_size", "block_size", "slot_threshold", "token_threshold")},
    )


def check_golden(generation: Generation, recorded: dict[str, Any]) -> None:
    assert list(generation.uncut_tokens) == recorded["response_ids"]
    assert list(generation.tokens) == recorded["response_ids_to_eos"]
    assert generation.forward_passes == recorded["forward_passes"]
    if "reported_tpf" in recorded:
        assert generation.statistics["official_tpf"] == pytest.approx(recorded["reported_tpf"])


@pytest.mark.parametrize("mode", ["corrected", "as_released"])
def test_golden_decodes(golden_model: Backbone, golden_cases: list[dict[str, Any]], mode: str) -> None:
    assert len(golden_cases) == 119
    for case in golden_cases:
        decoder = golden_decoder(case, mode)
        check_golden(decoder.generate(golden_model, [case["prompt_ids"]])[0], case[mode])


def test_golden_decodes_in_one_batch(golden_model: Backbone, golden_cases: list[dict[str, Any]]) -> None:
    """Prompts of different lengths under different settings share forward passes, each row at its own stage."""
    rows = [
        golden_decoder(case, "corrected").row(
            np.array(case["prompt_ids"]), golden_model.eos_token_id, np.random.default_rng(0)
        )
        for case in golden_cases
    ]
    generations = decode(golden_model, rows, batch_size=8, capacity=256, seeds=[0] * len(rows))
    for case, generation in zip(golden_cases, generations, strict=True):
        check_golden(generation, case["corrected"])


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"slot_threshold": 0.0, "token_threshold": 0.9},  # completion of many slots
        {"slot_threshold": 0.1, "token_threshold": 0.0},  # everything verified at once
        {"slot_threshold": 1.0},
        {"slot_size": 8, "block_size": 16, "slot_threshold": 0.2},
        {"max_new_tokens": 21, "block_size": 12, "slot_threshold": 0.2},  # neither whole slots nor whole blocks
        {"slot_size": 1, "block_size": 1},
        {"certainty": "mean_probability", "slot_threshold": 0.4},
        {"certainty": "mean_entropy", "slot_threshold": 0.3},
        {"as_released": True, "slot_threshold": 0.0, "token_threshold": 0.6, "block_size": 24},
    ],
    ids=lambda change: ",".join(f"{name}={value}" for name, value in change.items()) or "default",
)
def test_equals_the_slow_reference(tokenizer: Any, architecture: str, seed: int, change: dict[str, Any]) -> None:
    backbone = random_backbone(tokenizer, architecture=architecture, seed=seed)
    decoder = dataclasses.replace(DECODER, **change)
    for prompt in prompts(2, seed):
        expected = slow(backbone, prompt, decoder)
        generation = decoder.generate(backbone, [prompt])[0]
        assert list(generation.uncut_tokens) == expected.response_ids
        assert list(generation.tokens) == expected.response_ids_to_eos[: decoder.max_new_tokens]
        assert generation.forward_passes == expected.forward_passes
        assert generation.statistics["official_tpf"] == pytest.approx(expected.reported_tpf)
        assert generation.statistics["verified_slots"] == pytest.approx(expected.verified_slots)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("recompute_kv", [False, True])
def test_batch_equals_singles(tokenizer: Any, temperature: float, recompute_kv: bool) -> None:
    backbone = random_backbone(tokenizer, architecture="qwen3", seed=0)
    decoder = dataclasses.replace(DECODER, batch_size=3, temperature=temperature, recompute_kv=recompute_kv)
    asked = prompts(7)
    together = decoder.generate(backbone, asked, seed=5)
    singles = [decoder.generate(backbone, [prompt], seed=5, indices=[i])[0] for i, prompt in enumerate(asked)]
    assert together == singles
    assert len({generation.forward_passes for generation in singles}) > 1  # rows ended at different times


def test_sampling_noise_is_keyed_by_seed_and_index(tokenizer: Any) -> None:
    backbone = random_backbone(tokenizer, architecture="qwen3", seed=1)
    decoder = dataclasses.replace(DECODER, temperature=3.0)
    prompt = prompts(1)[0]
    draw = lambda seed, index: decoder.generate(backbone, [prompt], seed=seed, indices=[index])[0].uncut_tokens  # noqa: E731
    assert draw(0, 0) == draw(0, 0)
    assert len({draw(0, 0), draw(0, 1), draw(1, 0)}) == 3


def test_recompute_kv_costs_one_pass_per_completion(tokenizer: Any) -> None:
    backbone = random_backbone(tokenizer, architecture="qwen3", seed=0)
    decoder = dataclasses.replace(DECODER, slot_threshold=0.0, token_threshold=0.9, recompute_kv=True)
    generation = decoder.generate(backbone, prompts(1))[0]
    kinds = [step.kind for step in generation.steps]
    assert "recompute" in kinds
    assert generation.forward_passes == len(kinds)
    for place, kind in enumerate(kinds):
        if kind == "recompute":
            assert kinds[place - 1] == "verify"
            assert kinds[place - 2] == "predict"


@pytest.mark.parametrize("seed", range(3))
def test_steps_commit_every_kept_position_once(tokenizer: Any, seed: int) -> None:
    backbone = random_backbone(tokenizer, architecture="llama", seed=seed)
    generation = DECODER.generate(backbone, prompts(1, seed))[0]
    places = [place for step in generation.steps for place in step.committed]
    tokens = {p: t for step in generation.steps for p, t in zip(step.committed, step.tokens)}
    assert len(places) == len(set(places))
    assert tuple(tokens[place] for place in sorted(tokens)) == generation.uncut_tokens
    assert backbone.mask_token_id not in generation.uncut_tokens
    assert len(generation.steps) == generation.forward_passes


def test_slot_and_block_of_one_is_greedy_masked_decoding(tokenizer: Any) -> None:
    """k = b = 1: every token is the argmax at a [MASK] behind the text so far."""
    backbone = random_backbone(tokenizer, architecture="qwen3", seed=2)
    decoder = dataclasses.replace(DECODER, slot_size=1, block_size=1, max_new_tokens=10)
    prompt = prompts(1)[0]
    text = list(prompt)
    with torch.inference_mode():
        for _ in range(10):
            logits = backbone.model(torch.tensor([[*text, backbone.mask_token_id]]), use_cache=False).logits[0, -1]
            logits[backbone.mask_token_id] = -torch.inf
            text.append(int(logits.argmax()))
            if text[-1] == backbone.eos_token_id:
                break
    assert list(decoder.generate(backbone, [prompt])[0].tokens) == text[len(prompt) :]


def test_untouched_canvas_without_stop(tokenizer: Any) -> None:
    backbone = random_backbone(tokenizer, architecture="qwen3", seed=0)
    cut = DECODER.generate(backbone, prompts(4))
    uncut = dataclasses.replace(DECODER, stop_at_eos=False).generate(backbone, prompts(4))
    assert [g.uncut_tokens for g in cut] == [g.tokens for g in uncut]
    for generation in cut:
        ends = [t == backbone.eos_token_id for t in generation.tokens]
        assert sum(ends) == (generation.stop == "eos")
        assert not any(ends[:-1])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"slot_size": 3}, "decoder.slot_size=3 does not divide decoder.block_size=8"),
        ({"slot_size": 0}, "decoder.slot_size"),
        ({"slot_threshold": 1.5}, "decoder.slot_threshold"),
        ({"token_threshold": -0.1}, "decoder.token_threshold"),
        ({"temperature": -1.0}, "decoder.temperature"),
        ({"max_new_tokens": 0}, "decoder.max_new_tokens"),
        ({"batch_size": 0}, "decoder.batch_size"),
    ],
)
def test_bad_settings_name_the_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError, match=field):
        dataclasses.replace(DECODER, **change)
