"""Block-diffusion decoding against an uncached reference; batch equals singles; boundaries are those of training."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoders.block import BlockDecoder
from lit_refusion.backbone import Backbone
from lit_refusion.errors import UserError
from lit_refusion.examples import Example
from lit_refusion.views import collate
from objectives.bd3 import BD3
from tests.conftest import ARCHITECTURES, confident_backbone, make_tokenizer, random_prompts

DECODER = BlockDecoder(
    max_new_tokens=14,
    batch_size=3,
    block_size=4,
    block_origin="sequence",
    steps_per_block=4,
    ranking="confidence",
    threshold=None,
    sub_block_size=None,
    temperature=0.0,
    top_p=1.0,
    shift=False,
    stop_at_eos=False,
)


def block_numbers(length: int, num_prompt: int, decoder: BlockDecoder) -> np.ndarray:
    places = np.arange(length)
    if decoder.block_origin == "sequence":
        return places // decoder.block_size
    return np.where(places < num_prompt, 0, 1 + (places - num_prompt) // decoder.block_size)


@torch.no_grad()
def slow(backbone: Backbone, prompt: list[int], decoder: BlockDecoder) -> tuple[list[int], int]:
    """Everything up to the current block is run anew in every pass, under the block-causal mask."""
    mask_id = backbone.mask_token_id
    text = np.array([*prompt, *[mask_id] * decoder.max_new_tokens])
    block = block_numbers(len(text), len(prompt), decoder)
    passes = 0
    for number in range(block[len(prompt)], block[-1] + 1):
        places = np.flatnonzero(block == number)
        count = int((text[places] == mask_id).sum())
        base, rest = divmod(count, decoder.steps_per_block or count)
        step = 0
        while hidden := [place for place in places if text[place] == mask_id]:
            seen = block[: places[-1] + 1]
            allowed = torch.from_numpy(seen[:, None] >= seen[None])[None, None]
            ids = torch.from_numpy(text[: places[-1] + 1])[None]
            logits = backbone.model(ids, attention_mask=allowed, use_cache=False).logits[0]
            passes += 1
            if decoder.sub_block_size:
                first = (hidden[0] - places[0]) // decoder.sub_block_size
                hidden = [place for place in hidden if (place - places[0]) // decoder.sub_block_size == first]
            scored = []
            for place in hidden:
                p = logits[place - 1 if decoder.shift else place].softmax(-1)
                token = int(torch.where(torch.arange(len(p)) == mask_id, -1, p).argmax())
                score = float(p[token]) if decoder.ranking == "confidence" else -float(torch.special.entr(p).sum())
                scored.append((score, place, token))
            quota = max(1, base + (step < rest))
            best = sorted(scored, key=lambda item: (-item[0], item[1]))[:quota]
            chosen = [item for item in scored if item in best or item[0] > (decoder.threshold or 9e9)]
            if decoder.shift and step == 0 and hidden[0] == places[0]:
                chosen = scored[:1]
            for _, place, token in chosen:
                text[place] = token
            step += 1
    return text[len(prompt) :].tolist(), passes


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"block_origin": "response"},
        {"shift": True},
        {"shift": True, "block_origin": "response", "threshold": 0.3},
        {"steps_per_block": 2},
        {"block_size": 1},
        {"block_size": 6, "steps_per_block": 4},
        {"steps_per_block": None, "threshold": 1.0},
        {"block_size": 32, "steps_per_block": 7},
        {"threshold": 0.2, "steps_per_block": 2},
        {"ranking": "entropy", "block_size": 3},
        {"block_size": 8, "sub_block_size": 2, "steps_per_block": 8, "threshold": 0.3},
        {"block_size": 8, "sub_block_size": 4, "shift": True, "steps_per_block": 8},
    ],
    ids=str,
)
def test_equals_the_uncached_reference(tokenizer: Any, architecture: str, change: dict[str, Any]) -> None:
    backbone = confident_backbone(tokenizer, architecture=architecture)
    decoder = dataclasses.replace(DECODER, **change)
    for prompt in random_prompts(4, longest=11):
        tokens, passes = slow(backbone, prompt, decoder)
        generation = decoder.generate(backbone, [prompt])[0]
        assert list(generation.tokens) == tokens
        assert generation.forward_passes == passes


@pytest.mark.parametrize("change", [{}, {"ranking": "random"}, {"temperature": 1.0}, {"stop_at_eos": True}], ids=str)
def test_batch_equals_singles(tokenizer: Any, change: dict[str, Any]) -> None:
    backbone = confident_backbone(tokenizer)
    decoder = dataclasses.replace(DECODER, **change)
    asked = random_prompts(7, longest=11)
    together = decoder.generate(backbone, asked, seed=4)
    assert together == [decoder.generate(backbone, [p], seed=4, indices=[i])[0] for i, p in enumerate(asked)]


def test_finished_blocks_are_not_run_again(tokenizer: Any) -> None:
    """Prompt of two blocks, then per block: the block before it once as clean text, and itself in every pass."""
    backbone = confident_backbone(tokenizer)
    widths = []
    original = backbone.model.base_model.forward
    backbone.model.base_model.forward = lambda **kw: (widths.append(kw["input_ids"].shape[1]), original(**kw))[1]
    dataclasses.replace(DECODER, max_new_tokens=8).generate(backbone, [[20] * 8])
    assert widths == [12, 4, 4, 4, 8, 4, 4, 4]


@pytest.mark.parametrize("origin", ["sequence", "response"])
def test_first_pass_sees_what_training_saw(tokenizer: Any, origin: Any) -> None:
    """The candidates of a block's first pass are those of the training row with that block hidden."""
    backbone = confident_backbone(tokenizer)
    prompt = random_prompts(1, longest=11, seed=3)[0]
    decoder = dataclasses.replace(DECODER, block_origin=origin, steps_per_block=1)
    response = np.array(decoder.generate(backbone, [prompt])[0].tokens)  # one pass per block: all its candidates
    objective = BD3(
        block_size=4, block_origin=origin, t_min=1e-3, t_max=1.0, t_per="block", stratify_blocks=False,
        weighting="inverse_t", complementary=False, force_mask=False, shift=False,
        pad_policy="none", average="example",
    )  # fmt: skip
    item = Example(index=0, prompt_ids=np.array(prompt), response_ids=response)
    view = objective.arrange(item, np.ones(len(response), bool), t=np.ones(len(response)))
    batch = collate(
        [[view]], mask_token_id=backbone.mask_token_id, pad_to_multiple=1, num_examples=1, num_response_tokens=1
    )
    with torch.no_grad():
        logits = backbone.logits(backbone(batch, objective.attention(0))[0])
    logits[:, backbone.mask_token_id] = -torch.inf
    supervised = view.targets >= 0
    predicted, targets = logits.argmax(-1).numpy()[supervised], view.targets[supervised]
    assert predicted.tolist() == targets.tolist()


@given(
    st.integers(1, 20), st.integers(1, 9), st.integers(1, 12), st.sampled_from(["sequence", "response"]), st.booleans()
)
@settings(max_examples=25, deadline=None)
def test_nothing_stays_hidden(length: int, block: int, steps: int, origin: Any, shift: bool) -> None:
    backbone = confident_backbone(make_tokenizer(), seed=1)
    decoder = dataclasses.replace(
        DECODER, max_new_tokens=length, block_size=block, steps_per_block=steps, block_origin=origin, shift=shift,
        ranking="random",
    )  # fmt: skip
    generation = decoder.generate(backbone, [[20, 21, 22]])[0]
    assert len(generation.tokens) == length
    assert backbone.mask_token_id not in generation.tokens
    assert sorted(place for step in generation.steps for place in step.committed) == list(range(length))


def test_shift_reveals_the_first_token_alone(tokenizer: Any) -> None:
    """The others of the block then see it; with threshold 1.0 every pass reveals one token."""
    backbone = confident_backbone(tokenizer)
    decoder = dataclasses.replace(DECODER, shift=True, threshold=1.0, steps_per_block=None, max_new_tokens=8)
    steps = decoder.generate(backbone, [[20] * 8])[0].steps
    assert [len(step.committed) for step in steps] == [1] * 8
    assert [steps[0].committed, steps[4].committed] == [(0,), (4,)]


def test_stop_at_eos(tokenizer: Any) -> None:
    backbone = confident_backbone(tokenizer)
    prompt = random_prompts(1, longest=11)[0]
    whole = DECODER.generate(backbone, [prompt])[0]
    backbone._eos_token_id = whole.tokens[5]
    stopped = dataclasses.replace(DECODER, stop_at_eos=True).generate(backbone, [prompt])[0]
    assert stopped.tokens == whole.tokens[: whole.tokens.index(whole.tokens[5]) + 1]
    assert stopped.forward_passes < whole.forward_passes


def test_conventions_come_from_the_model() -> None:
    spec = BD3(
        block_size=8, block_origin="response", t_min=1e-3, t_max=1.0, t_per="block", stratify_blocks=False,
        weighting="inverse_t", complementary=False, force_mask=False, shift=True,
        pad_policy="none", average="example",
    ).spec(3)  # fmt: skip
    other = dataclasses.replace(DECODER, block_size=None, shift=None)
    with pytest.raises(UserError, match=r"block_origin=sequence: the model was trained with response"):
        other.fit_to(spec)
    with pytest.raises(UserError, match=r"shift=False: the model was trained with True"):
        dataclasses.replace(other, block_origin=None, shift=False).fit_to(spec)
    assert other.fit_to(dataclasses.replace(spec, block_origin="sequence")).block_origin == "sequence"
    fitted = dataclasses.replace(DECODER, block_size=None, block_origin=None, shift=None).fit_to(spec)
    assert (fitted.block_size, fitted.block_origin, fitted.shift) == (8, "response", True)
    with pytest.raises(UserError, match="block_size=4: the model was trained with 8"):
        DECODER.fit_to(spec)
    assert DECODER.fit_to(spec, force=True).block_size == 4
    with pytest.raises(UserError, match="fit the decoder to a block-diffusion model"):
        dataclasses.replace(DECODER, block_size=None).row(np.array([1]), 2, np.random.default_rng(0))
