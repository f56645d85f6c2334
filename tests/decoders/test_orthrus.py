"""Orthrus decoding: golden vectors, the slow reference, losslessness, batch equals singles, the cache.

Shapes: m rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from decoders.autoregressive import AutoregressiveDecoder
from decoders.orthrus import OrthrusDecoder
from lit_refusion.backbone import Backbone
from lit_refusion.engine import replies, scheduler
from lit_refusion.engine.cache import BufferCache
from lit_refusion.engine.request import Reply, Request, Row, Sampling
from lit_refusion.engine.sampling import distribution, draw_residual, draw_tokens
from lit_refusion.engine.scheduler import decode
from lit_refusion.errors import UserError
from lit_refusion.generation import Generation
from lit_refusion.views import MASK
from objectives.orthrus import Orthrus
from tests.conftest import ARCHITECTURES, random_prompts, shared_folder
from tests.reference import orthrus as reference

DECODER = OrthrusDecoder(
    max_new_tokens=13,
    batch_size=1,
    block_size=4,
    num_steps=1,
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    stop_at_eos=True,
)
OBJECTIVE = Orthrus(
    block_size=4, num_anchors=1, per_tokens=None, twins="qkvo", loss_type="kl", mask_share=1.0, complementary=False
)
EOS = 2


def autoregressive(decoder: OrthrusDecoder, **changes: Any) -> AutoregressiveDecoder:
    """The same settings for the frozen view alone."""
    names = ("max_new_tokens", "batch_size", "temperature", "top_k", "top_p", "stop_at_eos")
    return AutoregressiveDecoder(**{**{name: getattr(decoder, name) for name in names}, **changes})


def change_twins(backbone: Backbone, change: Callable[[Tensor, torch.Generator], Tensor]) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in backbone.parameters():
            if parameter.requires_grad:
                parameter.copy_(change(parameter, generator))


TWINS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "copies": lambda weight, generator: weight,
    "perturbed": lambda weight, generator: weight + 0.1 * torch.randn(weight.shape, generator=generator),
    "random": lambda weight, generator: 0.3 * torch.randn(weight.shape, generator=generator),
    "negated": lambda weight, generator: -weight,
    "huge": lambda weight, generator: 1e4 * weight,
}


def random_backbone(
    tokenizer: Any, *, architecture: str = "qwen3", twins: str = "perturbed", seed: int = 0
) -> Backbone:
    """Random weights, fond of EOS and with little but attention, so that one draft in two or so is kept."""
    backbone = Backbone.from_architecture(ARCHITECTURES[architecture], tokenizer=tokenizer, seed=seed)
    with torch.no_grad():
        for layer in backbone.layers:
            layer.mlp.down_proj.weight.mul_(0.1)
        head = backbone.model.get_output_embeddings().weight
        head.mul_(4.0)
        head[backbone.eos_token_id] *= 1.8
    OBJECTIVE.prepare(backbone)
    change_twins(backbone, TWINS[twins])
    return backbone


def kinds(generation: Generation) -> list[str]:
    return [step.kind for step in generation.steps]


# --- golden vectors ---


@pytest.fixture(scope="module")
def golden_cases() -> list[dict[str, Any]]:
    return json.loads(shared_folder("golden", "orthrus.json").read_text())["decode"]


@pytest.fixture(scope="module")
def golden_models() -> dict[str, Backbone]:
    """The tiny model with twins that are copies, and with trained ones."""
    models = {name: Backbone.from_pretrained(shared_folder("golden", "model")) for name in ("copies", "trained")}
    for backbone in models.values():
        OBJECTIVE.prepare(backbone)
    parameters = dict(models["trained"].model.named_parameters())
    with torch.no_grad():
        for name, weight in load_file(shared_folder("golden", "orthrus_twins.safetensors")).items():
            parameters[name.replace("self_attn.", "self_attn.twin.").replace("_diff", "")].copy_(weight)
    return models


def golden_decoder(case: dict[str, Any]) -> OrthrusDecoder:
    return dataclasses.replace(DECODER, block_size=case["block_size"], max_new_tokens=case["max_new_tokens"])


def check_golden(generation: Generation, case: dict[str, Any]) -> None:
    assert list(generation.tokens) == case["response_ids"]
    assert generation.forward_passes == case["forward_passes"]
    names = ["block" if kind == "block" else "ar" for kind in kinds(generation)]
    assert names == [kind for kind, _ in case["calls"]]


def test_golden_decodes(
    golden_models: dict[str, Backbone], golden_cases: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(golden_cases) == 40
    calls: list[list[Any]] = []
    table = scheduler._Scheduler._table

    def recording(self: Any, requests: list[Request]) -> Any:
        calls.append(["block" if requests[0].adapted else "ar", len(requests[0].tokens)])
        return table(self, requests)

    monkeypatch.setattr(scheduler._Scheduler, "_table", recording)
    for case in golden_cases:
        calls.clear()
        check_golden(golden_decoder(case).generate(golden_models[case["twins"]], [case["prompt_ids"]])[0], case)
        assert calls == case["calls"]


@pytest.mark.parametrize("twins", ["copies", "trained"])
def test_golden_decodes_in_one_batch(
    golden_models: dict[str, Backbone], golden_cases: list[dict[str, Any]], twins: str
) -> None:
    """Prompts of different lengths under different settings share forward passes."""
    cases = [case for case in golden_cases if case["twins"] == twins]
    backbone = golden_models[twins]
    rows = [
        golden_decoder(case).row(np.array(case["prompt_ids"]), backbone.eos_token_id, np.random.default_rng(0))
        for case in cases
    ]
    generations = decode(backbone, rows, batch_size=8, capacity=256, seeds=[0] * len(rows))
    for case, generation in zip(cases, generations, strict=True):
        check_golden(generation, case)


# --- the slow reference ---


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize("block_size", [2, 5, 8])
def test_equals_the_slow_reference(tokenizer: Any, architecture: str, num_steps: int, block_size: int) -> None:
    decoder = dataclasses.replace(DECODER, num_steps=num_steps, block_size=block_size)
    backbone = random_backbone(tokenizer, architecture=architecture, twins="perturbed")
    for prompt in random_prompts(4, longest=9, seed=block_size):
        expected = reference.decode(
            backbone.model,
            prompt,
            block_size=block_size,
            max_new_tokens=decoder.max_new_tokens,
            mask_id=backbone.mask_token_id,
            eos_id=backbone.eos_token_id,
            num_steps=num_steps,
        )
        generation = decoder.generate(backbone, [prompt])[0]
        assert list(generation.tokens) == expected.tokens
        assert kinds(generation) == expected.kinds
        assert generation.forward_passes == len(expected.kinds)
        assert generation.statistics["acceptance_length"] == pytest.approx(
            np.mean(expected.kept) if expected.kept else 0
        )
        committed = [len(step.committed) for step in generation.steps if step.kind == "verify"]
        assert committed[:-1] == [count + 1 for count in expected.kept[:-1]]


# --- losslessness ---


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("twins", ["copies", "random", "negated", "huge"])
def test_greedy_text_is_the_base_models_own(tokenizer: Any, architecture: str, twins: str) -> None:
    """200 prompts, in six groups under other batch and block sizes, and budgets that blocks do not divide."""
    backbone = random_backbone(tokenizer, architecture=architecture, twins=twins)
    prompts = random_prompts(200, longest=20, seed=1)
    short = dataclasses.replace(DECODER, max_new_tokens=9)
    expected = autoregressive(short, batch_size=100).generate(backbone, prompts)
    assert {generation.stop for generation in expected} == {"eos", "length"}
    settings = [(batch_size, block_size) for batch_size in (1, 7) for block_size in (2, 5, 16)]
    start = 0
    for (batch_size, block_size), count in zip(settings, (4, 4, 4, 63, 63, 62), strict=True):
        group = slice(start, start + count)
        decoder = dataclasses.replace(short, batch_size=batch_size, block_size=block_size)
        found = decoder.generate(backbone, prompts[group])
        for one, other in zip(found, expected[group], strict=True):
            assert (one.tokens, one.stop) == (other.tokens, other.stop)
        start += count
    assert start == len(prompts)


@pytest.mark.parametrize("change", [{}, {"num_steps": 3}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 20}])
@pytest.mark.parametrize("batch_size", [3, 7])
def test_batch_equals_singles(tokenizer: Any, change: dict[str, Any], batch_size: int) -> None:
    backbone = random_backbone(tokenizer)
    decoder = dataclasses.replace(DECODER, batch_size=batch_size, **change)
    asked = random_prompts(7, longest=15)
    together = decoder.generate(backbone, asked, seed=5)
    assert together == [decoder.generate(backbone, [p], seed=5, indices=[i])[0] for i, p in enumerate(asked)]
    assert len({generation.forward_passes for generation in together}) > 1  # rows were at different stages


# --- losslessness with a temperature ---

WORDS = 4
"""Words of the toy vocabulary; id 4 is [MASK]."""
NUM_SAMPLES = 2_000


@pytest.fixture(scope="module")
def toy() -> Backbone:
    """A model of four words, whose twins would say other ones."""
    config = AutoConfig.for_model(**ARCHITECTURES["llama"], vocab_size=WORDS + 1, pad_token_id=0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.2)
    backbone = Backbone(model, mask_token_id=WORDS, eos_token_id=0, attention="sdpa")
    OBJECTIVE.prepare(backbone)
    change_twins(backbone, TWINS["random"])
    return backbone


SAMPLED = dataclasses.replace(
    DECODER, max_new_tokens=4, batch_size=500, block_size=3, temperature=1.0, stop_at_eos=False
)
PROMPT = [1, 3, 0]


def filtered(logits: Tensor, decoder: OrthrusDecoder) -> np.ndarray:
    """[V] probabilities in plain steps: temperature, the k likeliest, the likeliest up to p."""
    p = (logits[:WORDS].double() / decoder.temperature).softmax(-1).numpy()
    order = np.argsort(-p)
    if decoder.top_k:
        p[order[decoder.top_k :]] = 0
        p /= p.sum()
    total = 0.0
    for word in order:
        if total >= decoder.top_p:
            p[word] = 0
        total += p[word]
    return p / p.sum()


@torch.no_grad()
def exact(backbone: Backbone, decoder: OrthrusDecoder) -> dict[tuple[int, ...], float]:
    """The base model's probability of every response."""
    found = {(): 1.0}
    for _ in range(decoder.max_new_tokens):
        texts = torch.tensor([[*PROMPT, *response] for response in found])
        logits = backbone.model(texts, use_cache=False).logits[:, -1]
        found = {
            (*response, word): probability * p
            for (response, probability), row in zip(found.items(), logits)
            for word, p in enumerate(filtered(row, decoder))
        }
    return found


def excess(backbone: Backbone, decoder: OrthrusDecoder) -> float:
    """Chi-square of the sampled responses, in standard deviations above its mean; rare cells are joined."""
    generations = decoder.generate(backbone, [PROMPT] * NUM_SAMPLES, seed=11)
    expected = exact(backbone, decoder)
    counts = dict.fromkeys(expected, 0)
    for generation in generations:
        counts[generation.tokens] += 1
    assert not any(count for response, count in counts.items() if expected[response] == 0)
    pairs = [(counts[response], NUM_SAMPLES * p) for response, p in expected.items() if p > 0]
    cells = [pair for pair in pairs if pair[1] >= 5]
    cells.append(tuple(np.sum([pair for pair in pairs if pair[1] < 5] or [(0, 0)], axis=0)))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells if mean)
    freedom = len([cell for cell in cells if cell[1]]) - 1
    assert freedom >= 10
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


LIMIT = 4.0


@pytest.mark.parametrize(
    "change",
    [{}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.8}, {"block_size": 2}],
    ids=str,
)
def test_samples_are_distributed_as_the_base_models(toy: Backbone, change: dict[str, Any]) -> None:
    assert excess(toy, dataclasses.replace(SAMPLED, **change)) < LIMIT


def accept_every_draft(logits: Tensor, targets: Tensor, live: Any) -> tuple[Tensor, Tensor]:
    tokens, acceptance = VERIFY(logits, targets, live)
    return tokens, torch.ones_like(acceptance)


def accept_no_draft(logits: Tensor, targets: Tensor, live: Any) -> tuple[Tensor, Tensor]:
    tokens, acceptance = VERIFY(logits, targets, live)
    return tokens, torch.zeros_like(acceptance)


def draw_from_p(p: Tensor, q: Tensor, generator: torch.Generator) -> Tensor:
    return draw_residual(p, torch.zeros_like(q), generator)


VERIFY = replies._verify


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("_verify", accept_every_draft), ("_verify", accept_no_draft), ("draw_residual", draw_from_p)],
    ids=["every draft is kept", "none is", "refused ones are replaced by draws from p"],
)
def test_the_samples_would_show_a_wrong_rule(
    toy: Backbone, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, name, wrong)
    assert excess(toy, SAMPLED) > 2 * LIMIT


class OneDraw(OrthrusDecoder):
    """Keeps all drafts by the same random number."""

    def row(self, prompt: np.ndarray, eos_token_id: int, rng: np.random.Generator) -> Row:
        class Repeating(np.random.Generator):
            def random(self, size: int) -> np.ndarray:  # type: ignore[override]
                return np.full(size, super().random())

        return super().row(prompt, eos_token_id, Repeating(rng.bit_generator))


def test_the_samples_would_show_drafts_that_are_kept_together(toy: Backbone) -> None:
    assert excess(toy, OneDraw(**dataclasses.asdict(SAMPLED))) > 2 * LIMIT


def test_a_wider_model_samples_as_autoregression_does(tokenizer: Any) -> None:
    """Three tokens, each among the three likeliest of a vocabulary of 320."""
    decoder = dataclasses.replace(SAMPLED, max_new_tokens=3, temperature=2.0, top_k=3, block_size=3)
    backbone = random_backbone(tokenizer)
    samples = [
        [generation.tokens for generation in method.generate(backbone, [[20, 30]] * 800, seed=seed)]
        for seed, method in enumerate((decoder, autoregressive(decoder)))
    ]
    cells = sorted({*samples[0], *samples[1]})
    one, two = (np.array([sample.count(cell) for cell in cells]) for sample in samples)
    statistic = ((one - two) ** 2 / (one + two)).sum()
    assert 10 < len(cells) <= 27
    assert statistic < len(cells) + LIMIT * (2 * len(cells)) ** 0.5


# --- the cache ---


def watched(row: Row, check: Callable[[Request], None]) -> Row:
    """The same row; `check` gets each request when its pass is over."""
    request = next(row)
    while True:
        reply = yield request
        check(request)
        try:
            request = row.send(reply)
        except StopIteration as stop:
            return stop.value


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_places_before_the_anchor_hold_the_frozen_views_keys(
    tokenizer: Any, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every pass, rejected drafts or not; and the buffer has places for prompt and budget alone."""
    backbone = random_backbone(tokenizer, architecture=architecture)
    decoder = dataclasses.replace(DECODER, stop_at_eos=False)
    prompt = random_prompts(1, longest=9, seed=2)[0]
    text = [*prompt, *autoregressive(decoder).generate(backbone, [prompt])[0].tokens]
    with torch.no_grad():
        _, frozen = reference.frozen_view(backbone.model, text)
    caches: list[BufferCache] = []

    class Kept(BufferCache):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            caches.append(self)

    monkeypatch.setattr(scheduler, "BufferCache", Kept)
    checked: list[tuple[int, bool]] = []

    def check(request: Request) -> None:
        first = int(request.places.min())
        for layer, pair in enumerate(frozen):
            for kind, states in enumerate(pair):
                torch.testing.assert_close(caches[0].buffer[layer, kind, 0, :first], states[:first])
                if not request.adapted:
                    torch.testing.assert_close(caches[0].buffer[layer, kind, 0, first], states[first])
        checked.append((first, request.adapted))

    row = watched(decoder.row(np.array(prompt), backbone.eos_token_id, np.random.default_rng(0)), check)
    capacity = decoder.capacity(len(prompt))
    generation = decode(backbone, [row], batch_size=1, capacity=capacity, seeds=[0])[0]
    assert capacity == len(prompt) + decoder.max_new_tokens
    assert caches[0].buffer.shape[2:4] == (1, capacity + 1)
    starts, num_committed = [(0, False)], 0
    for step in generation.steps[:-1]:
        num_committed += len(step.committed)
        if step.kind != "block":
            starts += [(len(prompt) + num_committed - 1, True), (len(prompt) + num_committed - 1, False)]
    assert checked == starts
    assert 0 < generation.statistics["acceptance_length"] < 3  # drafts were kept, and refused


@pytest.mark.parametrize("rows", [[0, 2], [1, 2], [2]])
def test_some_rows_of_the_buffer_are_written_and_returned(tokenizer: Any, rows: list[int]) -> None:
    config = random_backbone(tokenizer).model.config
    cache = BufferCache(config, num_rows=3, capacity=10, dtype=torch.float32, device=torch.device("cpu"))
    before = cache.buffer.normal_(generator=torch.Generator().manual_seed(0)).clone()
    places = torch.tensor([[0, 3], [4, 1], [2, 5]])[: len(rows)]
    cache.aim(places, rows=rows, visible=6)
    keys, values = (torch.randn(len(rows), config.num_key_value_heads, 2, config.head_dim) for _ in range(2))
    returned = cache.update(keys, values, 1)
    for i, row in enumerate(rows):
        before[1, 0, row, places[i]] = keys[i].transpose(0, 1)
        before[1, 1, row, places[i]] = values[i].transpose(0, 1)
    assert torch.equal(cache.buffer, before)
    for kind in range(2):
        assert torch.equal(returned[kind], before[1, kind, rows, :6].transpose(1, 2))


def count_calls(backbone: Backbone, decoder: OrthrusDecoder, prompts: list[list[int]]) -> tuple[int, list[int]]:
    """Forward passes of the model, and those that each row took part in."""
    calls = []
    handle = backbone.model.base_model.register_forward_hook(lambda *args: calls.append(True))
    generations = decoder.generate(backbone, prompts)
    handle.remove()
    return len(calls), [generation.forward_passes for generation in generations]


def test_rows_stay_in_step(tokenizer: Any) -> None:
    backbone = random_backbone(tokenizer)
    prompts = random_prompts(12, longest=9)
    decoder = dataclasses.replace(DECODER, batch_size=12)
    num_calls, passes = count_calls(backbone, decoder, prompts)
    assert min(passes) < max(passes) == num_calls


@pytest.mark.parametrize("batch_size", [2, 4, 5])
def test_rows_that_join_later_fall_into_step(tokenizer: Any, batch_size: int) -> None:
    """A new row costs the others at most the pass that reads its prompt."""
    backbone = random_backbone(tokenizer)
    decoder = dataclasses.replace(DECODER, batch_size=batch_size, max_new_tokens=31)
    num_calls, passes = count_calls(backbone, decoder, random_prompts(16, longest=9))
    ends = [0] * batch_size
    for count in passes:
        ends[ends.index(min(ends))] += count
    assert len(set(passes)) > 2
    assert max(ends) <= num_calls <= max(ends) + len(passes) - batch_size


def test_the_smaller_group_waits_for_the_larger_one(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of one token ends with the first pass; the one that takes its place is read with the others' drafts."""
    backbone = random_backbone(tokenizer)
    calls: list[tuple[str, int]] = []
    table = scheduler._Scheduler._table

    def recording(self: Any, requests: list[Request]) -> Any:
        calls.append(("block" if requests[0].adapted else "ar", len(requests)))
        assert len({request.adapted for request in requests}) == 1
        return table(self, requests)

    monkeypatch.setattr(scheduler._Scheduler, "_table", recording)
    rows = [
        dataclasses.replace(DECODER, max_new_tokens=budget, stop_at_eos=False).row(
            np.array([20, 30]), backbone.eos_token_id, np.random.default_rng(0)
        )
        for budget in (1, 30, 30, 30)
    ]
    decode(backbone, rows, batch_size=3, capacity=32, seeds=[0] * 4)
    assert calls[:5] == [("ar", 3), ("block", 2), ("ar", 3), ("block", 3), ("ar", 3)]


# --- one row, with replies written out ---


def said(*tokens: int, acceptance: tuple[float, ...] = (), p: tuple[float, ...] = ()) -> Reply:
    zeros = np.zeros(len(tokens))
    return Reply(
        tokens=np.array(tokens),
        p_token=np.array(p or zeros),
        p_target=zeros,
        entropy=zeros,
        margin=zeros,
        acceptance=np.array(acceptance or zeros),
    )


def play(decoder: OrthrusDecoder, *replies: Reply) -> tuple[list[Request], Generation]:
    """The requests of a row with the prompt [7, 8, 9] that gets these replies, and what it returns."""
    row = decoder.row(np.array([7, 8, 9]), EOS, np.random.default_rng(0))
    requests = [next(row)]
    for reply in replies[:-1]:
        requests.append(row.send(reply))
    with pytest.raises(StopIteration) as stop:
        row.send(replies[-1])
    return requests, stop.value.value


def by_place(request: Request, values: np.ndarray) -> list[Any]:
    return [values[i].tolist() for i in np.argsort(request.places)]


def test_a_cycle_written_out() -> None:
    decoder = dataclasses.replace(DECODER, max_new_tokens=5)
    # The prompt gives 10; drafts 11 12 13; the frozen view says 11 12 14: two are kept, and 14; then the budget ends.
    replies = said(10), said(11, 12, 13), said(11, 12, 14, 15), said(16), said(17, 18)
    requests, generation = play(decoder, *replies)
    prefill, block, verify, last_block, last_verify = requests

    assert [request.adapted for request in requests] == [False, True, False, True, False]
    assert [request.num_replies for request in requests] == [1, 3, 4, 1, 2]
    assert prefill.tokens.tolist() == [7, 8, 9]
    assert by_place(prefill, prefill.intervals[:, 0]) == [[0, 1], [0, 2], [0, 3]]
    assert by_place(block, block.tokens) == [10, MASK, MASK, MASK]
    assert sorted(block.places) == [3, 4, 5, 6]
    assert block.places[-3:].tolist() == [3, 4, 5]  # those that are answered
    assert block.positions.tolist() == block.places.tolist()
    assert by_place(block, block.intervals[:, 0]) == [[0, 7]] * 4
    assert verify.tokens.tolist() == [10, 11, 12, 13]
    assert verify.positions.tolist() == verify.places.tolist() == [3, 4, 5, 6]
    assert by_place(verify, verify.intervals[:, 0]) == [[0, 4], [0, 5], [0, 6], [0, 7]]
    assert by_place(last_block, last_block.tokens) == [14, MASK]
    assert last_verify.tokens.tolist() == [14, 16]
    assert last_verify.places.tolist() == [6, 7]
    assert generation.tokens == generation.uncut_tokens == (10, 11, 12, 14, 17)
    assert [(step.kind, step.committed, step.tokens) for step in generation.steps] == [
        ("prefill", (0,), (10,)),
        ("block", (), ()),
        ("verify", (1, 2, 3), (11, 12, 14)),
        ("block", (), ()),
        ("verify", (4,), (17,)),
    ]
    assert (generation.stop, generation.forward_passes) == ("length", 5)
    assert generation.statistics == {"acceptance_length": 1.0}


def test_a_block_never_exceeds_the_budget() -> None:
    """With every draft kept, the frozen view's own token behind the last one has no place."""
    decoder = dataclasses.replace(DECODER, max_new_tokens=4, block_size=16)
    requests, generation = play(decoder, said(10), said(11, 12, 13), said(11, 12, 13, 14))
    assert generation.tokens == (10, 11, 12, 13)
    assert generation.stop == "length"
    assert max(request.places.max() for request in requests) < decoder.capacity(3)
    assert generation.statistics == {"acceptance_length": 3.0}


def test_a_budget_of_one_is_the_prompts_own_pass() -> None:
    _, generation = play(dataclasses.replace(DECODER, max_new_tokens=1), said(10))
    assert (generation.tokens, generation.stop, generation.forward_passes) == ((10,), "length", 1)
    assert generation.statistics == {"acceptance_length": 0.0}


@pytest.mark.parametrize(
    ("replies", "tokens"),
    [
        ((said(EOS),), (EOS,)),
        ((said(10), said(11, EOS, 12), said(11, EOS, 12, 13)), (10, 11, EOS)),  # among the kept drafts
        ((said(10), said(11, 12, 13), said(11, EOS, 14, 15)), (10, 11, EOS)),  # in place of a refused one
        ((said(10), said(11, 12, 13), said(11, 12, 13, EOS)), (10, 11, 12, 13, EOS)),  # behind them
    ],
)
def test_eos_ends_the_row_wherever_it_is_said(replies: tuple[Reply, ...], tokens: tuple[int, ...]) -> None:
    _, generation = play(DECODER, *replies)
    assert (generation.tokens, generation.stop) == (tokens, "eos")
    assert generation.steps[-1].tokens == tokens[1:] or len(tokens) == 1


def test_eos_in_a_refused_draft_is_not_said() -> None:
    decoder = dataclasses.replace(DECODER, max_new_tokens=3)
    _, generation = play(decoder, said(10), said(EOS, EOS), said(11, 12, 13), said(14), said(14, 15))
    assert (generation.tokens, generation.stop) == ((10, 11, 14), "length")


def test_eos_is_a_token_like_others_without_stop() -> None:
    decoder = dataclasses.replace(DECODER, max_new_tokens=4, stop_at_eos=False)
    _, generation = play(decoder, said(EOS), said(11, EOS, 12), said(11, EOS, 12, 13))
    assert (generation.tokens, generation.stop) == ((EOS, 11, EOS, 12), "length")


@pytest.mark.parametrize("num_kept", range(4))
def test_acceptance_is_the_probability_to_keep_a_draft(num_kept: int) -> None:
    """Up to the first that is refused; with a temperature tokens are not compared."""
    drafts, said_instead = [11, 12, 13, 14][: 1 + num_kept], [21, 22, 23, 24, 25][: 2 + num_kept]
    decoder = dataclasses.replace(DECODER, max_new_tokens=1 + len(drafts), block_size=9, temperature=1.0)
    acceptance = tuple(float(i != num_kept) for i in range(len(said_instead)))
    requests, generation = play(decoder, said(10), said(*drafts), said(*said_instead, acceptance=acceptance))
    assert generation.tokens == (10, *drafts[:num_kept], said_instead[num_kept])
    assert generation.statistics == {"acceptance_length": num_kept}
    assert [request.drafts for request in requests] == [None, "propose", "verify"]
    assert requests[2].targets[:-1].tolist() == drafts
    assert {request.sampling for request in requests} == {Sampling(temperature=1.0)}


def test_drafts_are_kept_as_often_as_their_acceptance_says() -> None:
    decoder = dataclasses.replace(DECODER, max_new_tokens=9, temperature=1.0)
    counts = np.zeros(4)
    for seed in range(2000):
        row = decoder.row(np.array([7, 8, 9]), EOS, np.random.default_rng(seed))
        next(row)
        row.send(said(10))
        row.send(said(11, 12, 13))
        following = row.send(said(21, 22, 23, 24, acceptance=(0.5, 0.8, 0.25, 0.0)))
        counts[following.places.min() - 4] += 1  # the next anchor stands behind the kept drafts
    np.testing.assert_allclose(counts / 2000, [0.5, 0.1, 0.3, 0.1], atol=0.04)


def test_steps_fix_the_likeliest_drafts() -> None:
    """Five drafts in two steps: three and two."""
    decoder = dataclasses.replace(DECODER, max_new_tokens=6, block_size=6, num_steps=2)
    first = said(11, 12, 13, 14, 15, p=(0.1, 0.9, 0.5, 0.2, 0.8))
    second = said(21, 22, 23, 24, 25, p=(0.1, 0.1, 0.1, 0.1, 0.1))
    requests, generation = play(decoder, said(10), first, second, said(21, 12, 13, 24, 15, 16))
    assert by_place(requests[1], requests[1].tokens) == [10, MASK, MASK, MASK, MASK, MASK]
    assert by_place(requests[2], requests[2].tokens) == [10, MASK, 12, 13, MASK, 15]
    assert requests[3].tokens.tolist() == [10, 21, 12, 13, 24, 15]
    assert kinds(generation) == ["prefill", "block", "block", "verify"]
    assert generation.tokens == (10, 21, 12, 13, 24, 15)


def test_no_more_steps_than_drafts() -> None:
    decoder = dataclasses.replace(DECODER, max_new_tokens=3, block_size=3, num_steps=9)
    _, generation = play(decoder, said(10), said(11, 12, p=(0.5, 0.1)), said(0, 13, p=(0, 0.1)), said(11, 13, 14))
    assert kinds(generation) == ["prefill", "block", "block", "verify"]
    assert generation.tokens == (10, 11, 13)


def test_no_cycle_gives_less_than_a_token(tokenizer: Any) -> None:
    """So tokens per forward pass are at least a half, and a cycle gives at most a block."""
    for twins in TWINS:
        backbone = random_backbone(tokenizer, twins=twins)
        for generation in dataclasses.replace(DECODER, batch_size=8).generate(backbone, random_prompts(8, longest=9)):
            assert generation.tokens_per_forward > 0.5
            assert all(1 <= len(step.committed) <= 4 for step in generation.steps if step.kind == "verify")
            num_cycles = kinds(generation).count("verify")
            assert generation.forward_passes == 1 + 2 * num_cycles


# --- drawing ---


def histogram(tokens: Tensor, size: int) -> np.ndarray:
    return np.bincount(tokens.numpy(), minlength=size) / len(tokens)


def test_residual_draws_follow_what_p_has_over_q() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.2, 0.5, 0.1, 0.2])
    tokens = draw_residual(p.expand(20_000, 4), q.expand(20_000, 4), torch.Generator().manual_seed(0))
    np.testing.assert_allclose(histogram(tokens, 4), [0.75, 0, 0.25, 0], atol=0.015)


@pytest.mark.parametrize("noise", [0.0, 1e-7])
def test_residual_draws_follow_p_where_nothing_is_left_but_rounding(noise: float) -> None:
    p = torch.tensor([0.6, 0.1, 0.3])
    q = p + noise * torch.tensor([1.0, -1.0, 0.0])
    tokens = draw_residual(p.expand(20_000, 3), q.expand(20_000, 3), torch.Generator().manual_seed(0))
    np.testing.assert_allclose(histogram(tokens, 3), p, atol=0.015)


def test_residual_draws_follow_p_where_nothing_was_proposed() -> None:
    p = torch.tensor([0.6, 0.0, 0.4])
    tokens = draw_residual(p.expand(20_000, 3), torch.zeros(20_000, 3), torch.Generator().manual_seed(0))
    np.testing.assert_allclose(histogram(tokens, 3), p, atol=0.015)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5),
        Sampling(temperature=2.0, top_k=3),
        Sampling(temperature=1.3, top_p=0.7),
        Sampling(temperature=0.8, top_k=4, top_p=0.9),
    ],
    ids=str,
)
def test_distribution_is_what_tokens_are_drawn_from(sampling: Sampling) -> None:
    logits = torch.tensor([0.35, 0.25, 0.2, 0.15, 0.05]).log()
    p = distribution(logits[None], sampling)[0]
    assert float(p.sum()) == pytest.approx(1)
    tokens = draw_tokens(logits.expand(20_000, 5), sampling, torch.Generator().manual_seed(0))
    np.testing.assert_allclose(histogram(tokens, 5), p, atol=0.015)


def test_distribution_written_out() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    found = lambda **options: distribution(logits, Sampling(**options))[0].tolist()  # noqa: E731
    assert found(temperature=1.0) == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert found(temperature=0.5) == pytest.approx([16 / 30, 9 / 30, 4 / 30, 1 / 30])
    assert found(temperature=0.5, top_k=2) == pytest.approx([0.64, 0.36, 0, 0])
    assert found(temperature=1.0, top_p=0.6) == pytest.approx([4 / 7, 3 / 7, 0, 0])


@pytest.mark.parametrize("max_rows", [1, 2, 5])
def test_verification_in_parts_equals_the_whole(tokenizer: Any, max_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are proposed and verified in parts, those of other rows among them."""
    backbone = random_backbone(tokenizer)
    decoder = dataclasses.replace(DECODER, batch_size=3, block_size=6, temperature=1.0, top_k=8)
    asked = random_prompts(5, longest=9)
    whole = decoder.generate(backbone, asked)
    monkeypatch.setattr(replies, "MAX_LOGITS", max_rows * backbone.vocab_size)
    assert decoder.generate(backbone, asked) == whole
    assert max(generation.statistics["acceptance_length"] for generation in whole) > 0


def test_acceptance_is_the_ratio_of_the_two_views(toy: Backbone) -> None:
    """One row by hand: what the twins propose, what the frozen view makes of it."""
    requests: list[Request] = []
    replies: list[Reply] = []

    def recording(row: Row) -> Row:
        request = next(row)
        while True:
            reply = yield request
            requests.append(request)
            replies.append(reply)
            try:
                request = row.send(reply)
            except StopIteration as stop:
                return stop.value

    decoder = dataclasses.replace(SAMPLED, temperature=0.8, top_k=3, block_size=4)
    row = recording(decoder.row(np.array(PROMPT), 0, np.random.default_rng(0)))
    decode(toy, [row], batch_size=1, capacity=decoder.capacity(len(PROMPT)), seeds=[0])
    verify = next(i for i, request in enumerate(requests) if request.drafts == "verify")
    anchor, drafts = len(PROMPT), requests[verify].tokens[1:].tolist()
    text = [*PROMPT, int(requests[verify].tokens[0])]
    with torch.no_grad():
        states, _ = reference.frozen_view(toy.model, text + drafts)
        context = reference.frozen_view(toy.model, text)[1]
        drafted = reference.block_view(toy.model, [text[-1], *[WORDS] * len(drafts)], anchor, context)
        for i, token in enumerate(drafts):
            p, q = (filtered(toy.model.lm_head(rows), decoder) for rows in (states[anchor + i], drafted[i]))
            assert replies[verify].acceptance[i] == pytest.approx(min(1, p[token] / q[token]), rel=1e-4)


# --- settings ---


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"block_size": 1}, "decoder.block_size=1"),
        ({"num_steps": 0}, "decoder.num_steps=0"),
        ({"num_steps": 2, "temperature": 0.5}, "decoder.num_steps=2, temperature=0.5"),
        ({"temperature": -1.0}, "decoder.temperature=-1.0"),
        ({"top_k": -1}, "decoder.*top_k=-1"),
        ({"top_p": 0.0}, r"decoder.*top_p=0\.0"),
        ({"max_new_tokens": 0}, "decoder.max_new_tokens=0"),
        ({"batch_size": 0}, "decoder.batch_size=0"),
    ],
)
def test_bad_settings_name_the_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError, match=field):
        dataclasses.replace(DECODER, **change)


def test_block_size_comes_from_the_model() -> None:
    spec = dataclasses.replace(OBJECTIVE, block_size=8).spec(4)
    fitted = dataclasses.replace(DECODER, block_size=None).fit_to(spec)
    assert isinstance(fitted, OrthrusDecoder)
    assert fitted.block_size == 8
    with pytest.raises(UserError, match="block_size=4: the model was trained with 8"):
        DECODER.fit_to(spec)
    with pytest.raises(UserError, match=r"decoder.block_size=null: fit the decoder"):
        dataclasses.replace(DECODER, block_size=None).row(np.array([1]), EOS, np.random.default_rng(0))
