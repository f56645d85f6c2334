"""Speculation of the ReFusion decoder: the same tokens in fewer passes, within the budget."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from decoders.refusion import ReFusionDecoder
from lit_refusion.backbone import Backbone
from lit_refusion.engine.request import Reply, Request
from lit_refusion.engine.scheduler import decode
from lit_refusion.errors import UserError
from lit_refusion.generation import Generation
from lit_refusion.speculation import Passes, Question, acceptance, choose, likely_runs
from lit_refusion.views import MASK
from tests.conftest import ARCHITECTURES, shared_folder
from tests.decoders.test_refusion import DECODER, golden_decoder, prompts, random_backbone

EOS = 2
NUM_CASES = 80


def mix(*numbers: int) -> int:
    """A hash of integers, below 2^64 (splitmix64)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state


def fraction(*numbers: int) -> float:
    return mix(*numbers) / 2**64


@dataclass
class HashModel:
    """A key is a hash of its token, its position and all keys it sees; a reply is a hash of its query's key.

    So a query that sees one key too many, too few or out of date gives another text, and nothing is ever nearly equal.
    """

    capacity: int
    eos_rate: float
    seed: int
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys = np.zeros(self.capacity, np.uint64)

    def run(self, row: Any) -> Generation:
        request = next(row)
        try:
            while True:
                request = row.send(self.answer(request))
        except StopIteration as stop:
            return stop.value

    def answer(self, request: Request) -> Reply:
        self.requests.append(request)
        assert len(set(request.places.tolist())) == len(request.places), "a place is written twice"
        for i in np.argsort(request.places):  # whatever is seen of this pass lies before
            place, seen = request.places[i], request.intervals[i]
            assert (seen[:, 1] <= place + 1).all()
            is_seen = np.zeros(self.capacity, bool)
            for start, stop in seen:
                is_seen[start:stop] = True
            is_seen[place] = False
            total = int(self.keys[is_seen].sum())
            self.keys[place] = mix(self.seed, int(request.tokens[i]) + 9, int(request.positions[i]), total)
        keys = self.keys[request.places[len(request.tokens) - request.num_replies :]].tolist()
        return Reply(
            tokens=np.array([EOS if fraction(key, 1) < self.eos_rate else 10 + key % 50 for key in keys], np.int64),
            p_token=np.array([1 - fraction(key, 2) ** 2 for key in keys]),
            p_target=np.array([1 - fraction(key, 3, t) ** 2 for key, t in zip(keys, request.targets.tolist())]),
            entropy=np.array([fraction(key, 4) if request.entropy else 0.0 for key in keys]),
            margin=np.zeros(len(keys)),
            acceptance=np.zeros(len(keys)),
        )


def random_settings(rng: np.random.Generator) -> dict[str, Any]:
    k = int(rng.choice([1, 2, 3, 4, 8]))
    return {
        "max_new_tokens": int(rng.integers(1, 41)),
        "slot_size": k,
        "block_size": k * int(rng.integers(1, 6)),
        "slot_threshold": float(rng.choice([0, 0.3, 0.6, 0.9, 1])),
        "token_threshold": float(rng.choice([0, 0.1, 0.3, 0.5, 0.9, 1])),
        "certainty": str(rng.choice(["first_token", "mean_probability", "mean_entropy"])),
        "recompute_kv": bool(rng.random() < 0.3),
        "as_released": bool(rng.random() < 0.3),
    }


def cases(count: int) -> Iterator[tuple[ReFusionDecoder, np.ndarray, dict[str, Any]]]:
    """Decoders without speculation, prompts, and settings of the model."""
    for number in range(count):
        rng = np.random.default_rng(number)
        decoder = dataclasses.replace(DECODER, **random_settings(rng))
        prompt = rng.integers(10, 60, rng.integers(1, 6))
        yield decoder, prompt, {"eos_rate": float(rng.choice([0, 0.02, 0.1, 0.4])), "seed": number}


def run(decoder: ReFusionDecoder, prompt: np.ndarray, **model: Any) -> tuple[Generation, HashModel]:
    stub = HashModel(capacity=decoder.capacity(len(prompt)), **model)
    return stub.run(decoder.row(prompt, EOS, np.random.default_rng(0))), stub


def check_equal(found: Generation, expected: Generation) -> None:
    """`expected` is without speculation: all but the number of passes is the same."""
    assert found.tokens == expected.tokens
    assert found.uncut_tokens == expected.uncut_tokens
    assert found.stop == expected.stop
    assert found.statistics == expected.statistics
    assert found.statistics["official_passes"] == expected.forward_passes == len(expected.steps)
    assert found.forward_passes == len(found.steps) <= expected.forward_passes
    done = [(part, step) for step in found.steps for part in step.kind.split("+")]
    assert [kind for kind, _ in done] == [step.kind for step in expected.steps]
    commits = [(step.committed, step.tokens) for step in found.steps if step.committed]
    assert commits == [(step.committed, step.tokens) for step in expected.steps if step.committed]


@dataclass
class Spy:
    """Counts the queries of every request: those that were asked, and guesses."""

    counts: list[tuple[int, int]] = field(default_factory=list)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        ask = Passes.ask

        def spied(passes: Passes, kind: str, asked: Any, *, guesses: Any = (), **options: Any) -> Any:
            self.counts.append((sum(map(len, asked)), sum(map(len, guesses))))
            return ask(passes, kind, asked, guesses=guesses, **options)

        patch.setattr(Passes, "ask", spied)


@pytest.fixture(scope="module")
def unspeculated() -> list[Generation]:
    return [run(decoder, prompt, **model)[0] for decoder, prompt, model in cases(NUM_CASES)]


@pytest.mark.parametrize("budget", [1, 6, 24, 10_000])
def test_any_settings(monkeypatch: pytest.MonkeyPatch, unspeculated: list[Generation], budget: int) -> None:
    """Whatever the settings and the model, speculation changes the number of passes and nothing else."""
    spy = Spy()
    spy.install(monkeypatch)
    kinds: Counter[str] = Counter()
    for (decoder, prompt, model), expected in zip(cases(NUM_CASES), unspeculated, strict=True):
        spy.counts.clear()
        found, stub = run(dataclasses.replace(decoder, speculation_budget=budget), prompt, **model)
        check_equal(found, expected)
        assert max(guessed for _, guessed in spy.counts) <= budget
        assert {len(request.tokens) for request in stub.requests} <= {sum(counts) for counts in spy.counts}
        kinds.update(step.kind for step in found.steps)
    if budget == 24:
        assert min(kinds[kind] for kind in ("verify+select", "verify+predict", "recompute+select")) > 10
    if budget == 10_000:
        assert kinds["select"] <= 1.05 * NUM_CASES  # hardly any but the first of each row
        assert kinds["predict"] <= 0.15 * kinds["verify+predict"]


def test_without_a_budget_nothing_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy()
    spy.install(monkeypatch)
    for decoder, prompt, model in cases(20):
        generation, stub = run(decoder, prompt, **model)
        assert generation.forward_passes == generation.statistics["official_passes"] == len(stub.requests)
    assert {guessed for _, guessed in spy.counts} == {0}


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("recompute_kv", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"slot_threshold": 0.0, "token_threshold": 0.9},
        {"slot_threshold": 0.1, "token_threshold": 0.0},
        {"slot_size": 8, "block_size": 16, "slot_threshold": 0.2, "as_released": True},
        {"certainty": "mean_entropy", "slot_threshold": 0.3, "max_new_tokens": 21, "block_size": 12},
    ],
    ids=lambda change: ",".join(f"{name}={value}" for name, value in change.items()) or "default",
)
def test_real_models(tokenizer: Any, architecture: str, recompute_kv: bool, change: dict[str, Any]) -> None:
    """One at a time without speculation equals together with it."""
    backbone = random_backbone(tokenizer, architecture=architecture, seed=1)
    decoder = dataclasses.replace(DECODER, recompute_kv=recompute_kv, **change)
    speculating = dataclasses.replace(decoder, speculation_budget=48)
    asked = prompts(4, seed=3)
    expected = decoder.generate(backbone, asked)
    for batch_size in (1, 3):
        found = dataclasses.replace(speculating, batch_size=batch_size).generate(backbone, asked)
        for generation, without in zip(found, expected, strict=True):
            check_equal(generation, without)
        assert sum(g.forward_passes for g in found) < sum(g.forward_passes for g in expected)


@pytest.mark.parametrize(
    ("mode", "budget", "batch_size", "ratio"),
    [
        ("corrected", 64, 16, 1.5),
        ("as_released", 128, 16, 1.65),
        pytest.param("corrected", 128, 1, 1.65, marks=pytest.mark.slow),
        pytest.param("as_released", 64, 1, 1.5, marks=pytest.mark.slow),
    ],
)
def test_golden_decodes_in_fewer_passes(mode: str, budget: int, batch_size: int, ratio: float) -> None:
    """The official decoder's tokens; passes in total, and the median over settings, fall by the ratio."""
    backbone = Backbone.from_pretrained(shared_folder("golden", "model"))
    golden = json.loads(shared_folder("golden", "refusion_decode.json").read_text())
    decoders = [dataclasses.replace(golden_decoder(case, mode), speculation_budget=budget) for case in golden]
    rows = [
        decoder.row(np.array(case["prompt_ids"]), backbone.eos_token_id, np.random.default_rng(0))
        for decoder, case in zip(decoders, golden, strict=True)
    ]
    capacity = max(decoder.capacity(len(case["prompt_ids"])) for decoder, case in zip(decoders, golden, strict=True))
    generations = decode(backbone, rows, batch_size=batch_size, capacity=capacity, seeds=[0] * len(rows))
    passes: defaultdict[tuple[float, ...], np.ndarray] = defaultdict(lambda: np.zeros(2))
    for case, generation in zip(golden, generations, strict=True):
        recorded = case[mode]
        assert list(generation.uncut_tokens) == recorded["response_ids"]
        assert generation.statistics["official_passes"] == recorded["forward_passes"]
        if "reported_tpf" in recorded:
            assert generation.statistics["official_tpf"] == pytest.approx(recorded["reported_tpf"])
        settings = ("gen_length", "slot_size", "block_size", "slot_threshold", "token_threshold")
        passes[tuple(case[name] for name in settings)] += recorded["forward_passes"], generation.forward_passes
    table = np.array([*passes.values()])  # [settings, 2], without speculation and with it
    assert np.median(table[:, 0] / table[:, 1]) >= ratio
    assert table[:, 0].sum() / table[:, 1].sum() >= ratio


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculation_budget": -1}, "decoder.speculation_budget=-1"),
        ({"speculation_budget": 8, "temperature": 0.5}, "decoder.speculation_budget=8: needs temperature 0"),
    ],
)
def test_bad_settings_name_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        dataclasses.replace(DECODER, **change)


def ask(model: HashModel, passes: Passes, queries: Question, *guesses: Question) -> tuple[Reply, int]:
    """The reply, and how many passes it took."""
    part = passes.ask("some", [queries], guesses=guesses, free=20)
    before = len(model.requests)
    try:
        part.send(model.answer(next(part)))
    except StopIteration as stop:
        return stop.value[0], len(model.requests) - before
    raise AssertionError("two passes")


def test_a_guess_answers_only_what_sees_the_same_until_the_next_pass() -> None:
    model, passes = HashModel(capacity=40, eos_rate=0.1, seed=0), Passes()
    text = Question((11, 12, 13), (0, 1, 2), ((0, 0),), 1)
    after = {n: Question((MASK, MASK), (3, 4), ((0, n),), 2) for n in (1, 2, 3)}
    ask(model, passes, text, after[3], after[2])
    guessed, cost = ask(model, passes, after[3])
    assert cost == 0
    assert ask(model, passes, after[2])[1] == 0
    assert ask(model, passes, after[1])[1] == 1  # where it runs, it writes over what the others saw
    assert ask(model, passes, text)[1] == 1
    asked, cost = ask(model, passes, after[3])
    assert cost == 1
    for name in ("tokens", "p_token", "p_target", "entropy"):
        assert getattr(guessed, name).tolist() == getattr(asked, name).tolist()
    assert passes.num_requests == 6
    assert [step.kind for step in passes.steps] == ["some+some+some", "some", "some", "some"]


def test_acceptance_compares_odds_with_the_threshold() -> None:
    np.testing.assert_allclose(acceptance(np.array([0.0, 0.5, 0.8, 1.0]), 0.5), [0, 0.5, 0.8, 1])
    np.testing.assert_allclose(acceptance(np.array([0.9]), 0.9), [0.5])
    assert acceptance(np.array([0.1, 1.0]), 0.0).tolist() == [1, 1]
    assert acceptance(np.array([0.1, 1.0]), 1.0).tolist() == [0, 0]


def test_likely_runs() -> None:
    runs = likely_runs(np.array([[1.0, 0.75], [1.0, 0.25]]))
    assert {tuple(lengths.tolist()): p for p, lengths in runs} == {(2, 1): 0.5625, (1, 1): 0.1875, (2, 2): 0.1875}
    assert [lengths.tolist() for _, lengths in likely_runs(np.ones((3, 4)))] == [[4, 4, 4]]


def test_the_best_guesses_within_the_budget() -> None:
    a, b, c = (Question((MASK,) * q, tuple(range(q)), ((0, q),), q) for q in (2, 3, 4))
    outcomes = [(0.4, [a, b]), (0.3, [c]), (0.2, [a]), (0.05, [c]), (0.05, [])]
    assert choose(outcomes, 0) == choose(outcomes, 1) == []
    assert choose(outcomes, 3) == [a]  # 0.1 per query
    assert choose(outcomes, 5) == [a, b]  # with a chosen, b alone brings 0.4
    assert choose(outcomes, 6) == [a, b]
    assert choose(outcomes, 9) == [a, b, c]
