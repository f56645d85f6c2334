"""The dependency study: a divergence with known values, rows laid out as the objective says, and an honest mean."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase

from lit_refusion.analysis.dependency import (
    LN2,
    Dependency,
    Point,
    _point,
    draw_mask,
    draw_pairs,
    jensen_shannon,
    predicting_rows,
)
from lit_refusion.analysis.dependency_report import draw_report, write_report
from lit_refusion.attention import Attention
from lit_refusion.backbone import Backbone
from lit_refusion.cli import main
from lit_refusion.commands.analyze import fitting_objective
from lit_refusion.config import choices, config_folder
from lit_refusion.errors import UserError
from lit_refusion.examples import Example
from lit_refusion.masking import mask_response
from lit_refusion.objective import Objective
from lit_refusion.schema import build
from lit_refusion.spec import DiffusionSpec
from lit_refusion.views import IGNORE, MASK, View
from tests.conftest import ARCHITECTURES, confident_backbone

STUDY = Dependency(ratios=(0.5, 0.9), num_pairs=12, max_distance=8, run_length=1, batch_size=4, seed=0)
SUPPORTED = ("refusion", "llada", "dream")


def objective(name: str) -> Objective:
    node = OmegaConf.to_container(OmegaConf.load(config_folder() / "objective" / f"{name}.yaml"), resolve=True)
    return build(node, Objective)


def example(num_response: int = 12, *, index: int = 0) -> Example:
    rng = np.random.default_rng(index)
    return Example(
        index=index, prompt_ids=rng.integers(10, 250, 3), response_ids=rng.integers(10, 250, num_response)
    )  # fmt: skip


# The divergence


@pytest.mark.parametrize(
    ("p", "q", "expected"),
    [
        ((1.0, 0.0), (1.0, 0.0), 0.0),
        ((1.0, 0.0), (0.0, 1.0), math.log(2)),
        ((0.5, 0.5), (1.0, 0.0), 0.75 * math.log(4 / 3)),  # (ln(2/3) / 2 + ln 2 / 2 + ln(4/3)) / 2
        ((0.5, 0.25, 0.25), (0.25, 0.25, 0.5), 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)),
    ],
)
def test_divergence_by_hand(p: tuple[float, ...], q: tuple[float, ...], expected: float) -> None:
    one, two = (torch.tensor([x], dtype=torch.float64).log() for x in (p, q))

    assert jensen_shannon(one, two).item() == pytest.approx(expected, abs=1e-12)
    assert jensen_shannon(two, one).item() == pytest.approx(expected, abs=1e-12)


def test_divergence_is_symmetric_and_bounded() -> None:
    logits = torch.randn(2, 500, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 8
    logits[:, :, 3] = -torch.inf
    one, two = logits.log_softmax(-1)

    found = jensen_shannon(one, two)

    torch.testing.assert_close(found, jensen_shannon(two, one), atol=1e-12, rtol=0)
    assert ((found > 0) & (found < LN2)).all()
    m = (one.exp() + two.exp()) / 2
    by_entropy = (
        torch.special.entr(m).sum(-1) - (torch.special.entr(one.exp()) + torch.special.entr(two.exp())).sum(-1) / 2
    )
    torch.testing.assert_close(found, by_entropy, atol=1e-12, rtol=0)
    assert jensen_shannon(one, one).max() < 1e-12


# What is hidden, and which pairs


@pytest.mark.parametrize(
    ("ratio", "run_length", "expected"),
    [(0.25, 1, 5), (0.9, 1, 18), (0.01, 1, 2), (0.6, 4, 12), (0.01, 4, 4), (1, 3, 20)],
)
def test_masks_have_their_share_in_whole_runs(ratio: float, run_length: int, expected: int) -> None:
    is_masked = draw_mask(20, ratio, run_length, np.random.default_rng(1))

    assert is_masked.sum() == expected
    for start in range(0, 20, run_length):
        assert len(set(is_masked[start : start + run_length])) == 1


def test_pairs_are_near_different_and_of_all_distances() -> None:
    hidden = np.array([0, 1, 2, 3, 4, 5, 6, 7, 20, 40])

    pairs = draw_pairs(hidden, 10**6, 7, np.random.default_rng(0))
    assert len(pairs) == 8 * 7  # 20 and 40 are near to nothing
    assert len({tuple(pair) for pair in pairs.tolist()}) == len(pairs)
    assert (np.diff(pairs[:, 1]) >= 0).all()
    assert set(np.abs(pairs[:, 0] - pairs[:, 1])) == set(range(1, 8))

    first = [np.abs(np.subtract(*draw_pairs(hidden, 1, 7, np.random.default_rng(seed))[0])) for seed in range(1400)]
    assert (np.abs(np.bincount(first)[1:] - 200) < 60).all()  # a distance is as likely as another one
    assert draw_pairs(np.array([3]), 5, 7, np.random.default_rng(0)).shape == (0, 2)
    assert draw_pairs(np.array([3, 30]), 5, 7, np.random.default_rng(0)).shape == (0, 2)


# Rows


@pytest.mark.parametrize("name", choices("objective"))
def test_masked_views_hide_just_what_is_asked_for(name: str) -> None:
    if name not in SUPPORTED:
        with pytest.raises(UserError, match="masked_view"):
            objective(name).masked_view(example(), np.ones(12, bool))
        return
    item = example()
    for seed in range(20):
        is_masked = np.random.default_rng(seed).random(12) < (0.0, 0.3, 0.9, 1.0)[seed % 4]
        view = objective(name).masked_view(item, is_masked)
        hidden = view.position_ids[view.input_ids == MASK] - 3
        np.testing.assert_array_equal(np.sort(hidden), np.flatnonzero(is_masked))
        rows = np.flatnonzero(view.targets != IGNORE)
        np.testing.assert_array_equal(view.targets[rows], item.response_ids[is_masked])
        if is_masked.any():
            last = np.flatnonzero(is_masked)[-1:]
            assert view.targets[predicting_rows(view, is_masked, last)] == item.response_ids[last]


def reference_row(name: str, item: Example, is_masked: np.ndarray, place: int) -> tuple[Any, Any, bool, int]:
    """Ids, positions, whether it is causal, and the row that predicts a response token: written out by hand."""
    num_prompt = len(item.prompt_ids)
    order = list(range(len(item.response_ids)))
    if name == "refusion":
        order = [r for r in order if not is_masked[r]] + [r for r in order if is_masked[r]]
    ids = [*item.prompt_ids.tolist(), *(MASK if is_masked[r] else int(item.response_ids[r]) for r in order)]
    positions = [*range(num_prompt), *(num_prompt + r for r in order)]
    return ids, positions, name == "refusion", num_prompt + order.index(place) - (name == "dream")


@torch.no_grad()
def reference_p(backbone: Backbone, name: str, item: Example, is_masked: np.ndarray, place: int) -> torch.Tensor:
    ids, positions, is_causal, row = reference_row(name, item, is_masked, place)
    allowed = torch.ones(1, 1, len(ids), len(ids), dtype=torch.bool)
    logits = (
        backbone.model(
            input_ids=torch.tensor([[backbone.mask_token_id if token == MASK else token for token in ids]]),
            position_ids=torch.tensor([positions]),
            attention_mask=allowed.tril() if is_causal else allowed,
            use_cache=False,
        )
        .logits[0, row]
        .double()
    )
    p = logits.softmax(-1)
    p[backbone.mask_token_id] = 0
    return p / p.sum()


@pytest.mark.parametrize("name", SUPPORTED)
def test_pair_by_pair_without_batches_gives_the_same(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    backbone, item = confident_backbone(tokenizer), example()
    torch.manual_seed(0)

    pairs, found = STUDY.divergences(backbone, objective(name), item, 0.5)
    is_masked = np.zeros(12, bool)
    is_masked[np.unique(pairs)] = True
    everything = dataclasses.replace(STUDY, num_pairs=10**6, max_distance=99)
    all_pairs, _ = everything.divergences(backbone, objective(name), item, 0.5)
    is_masked[np.unique(all_pairs)] = True

    assert len(pairs) == 12
    assert is_masked.sum() == 6
    assert len(all_pairs) == 30
    for (i, j), value in zip(pairs, found):
        revealed = is_masked.copy()
        revealed[j] = False
        p, q = (reference_p(backbone, name, item, mask, i) for mask in (is_masked, revealed))
        kl = [float(torch.xlogy(x, x / ((p + q) / 2)).nansum()) for x in (p, q)]
        assert value == pytest.approx(sum(kl) / 2, abs=1e-6)
    assert found.max() > 1e-3


def test_batches_and_other_examples_change_nothing(tokenizer: PreTrainedTokenizerBase) -> None:
    backbone = confident_backbone(tokenizer)
    items = [example(length, index=index) for index, length in enumerate((2, 9, 15))]
    pairs, expected = STUDY.divergences(backbone, objective("llada"), items[2], 0.9)

    for batch_size in (1, 3, 64):
        study = dataclasses.replace(STUDY, batch_size=batch_size)
        again, found = study.divergences(backbone, objective("llada"), items[2], 0.9)
        np.testing.assert_array_equal(again, pairs)
        np.testing.assert_allclose(found, expected, atol=1e-6)
    one, two = (STUDY.measure(backbone, objective("llada"), group) for group in (items[2:], items[2:]))
    assert one == two
    assert all(point.examples == 1 and point.low is None for point in one)
    with_others = STUDY.measure(backbone, objective("llada"), items)
    assert sum(point.pairs for point in with_others) == 2 * (2 + 12 + 12)


@dataclass(frozen=True, kw_only=True)
class Near(Objective):
    """Masked prediction in which a token sees those at most `reach` places away."""

    name: ClassVar[str] = "near"
    terms: ClassVar[tuple[str, ...]] = ("mdm",)
    needs_mask_token: ClassVar[bool] = True
    reach: int

    def view(self, example: Example, rng: np.random.Generator) -> View:
        return self.masked_view(example, rng.random(len(example.response_ids)) < 0.5)

    def masked_view(self, example: Example, is_masked: np.ndarray) -> View:
        return mask_response(example, is_masked, np.ones(len(is_masked)), shift=False, mask_rate=0.5)

    def attention(self, step: int) -> Attention:
        return Attention("near", lambda q, k: (q.position - k.position).abs() <= self.reach)

    def spec(self, mask_token_id: int | None) -> DiffusionSpec:
        return DiffusionSpec(objective=self.name, mask_token_id=mask_token_id, shift="none", attention="near")


@pytest.mark.parametrize("reach", [0, 1, 2])
def test_dependency_reaches_as_far_as_the_layers_let_it(reach: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Two layers carry a token 2 x reach places and no further; with reach 0 nothing depends on anything."""
    backbone = confident_backbone(tokenizer)
    study = dataclasses.replace(STUDY, ratios=(1.0,), num_pairs=200)

    points = study.measure(backbone, Near(reach=reach), [example(20, index=index) for index in range(3)])

    assert [point.distance for point in points] == list(range(1, 9))
    for point in points:
        if point.distance > 2 * reach:
            assert point.jsd < 1e-9
        else:
            assert point.jsd > 1e-5
        assert point.low is not None
        assert point.high is not None
        assert 0 <= point.low <= point.jsd <= point.high <= LN2


def test_the_mean_and_its_interval_by_hand() -> None:
    """Example 1: 0.1 + 0.3 of two pairs; example 2: 0.2 of one; example 3 has none."""
    found = _point(0.5, 3, np.array([0.4, 0.2, 0.0]), np.array([2, 1, 0]))

    assert found == Point(
        ratio=0.5,
        distance=3,
        jsd=pytest.approx(0.2),
        low=pytest.approx(0.2),
        high=pytest.approx(0.2),
        pairs=3,
        examples=2,
    )
    found = _point(0.5, 3, np.array([0.1, 0.3]), np.array([1, 1]))
    spread = 1.959964 * math.sqrt(2 / 1 * (0.1**2 + 0.1**2)) / 2
    assert (found.low, found.high) == (pytest.approx(0.2 - spread), pytest.approx(0.2 + spread))
    assert _point(0.5, 3, np.array([0.6, 0.001]), np.array([1, 1])).low == 0.0
    assert _point(0.5, 3, np.array([0.6, 0.001]), np.array([1, 1])).high == pytest.approx(LN2)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"ratios": ()}, "ratios=[]"),
        ({"ratios": (0.5, 0.0)}, "ratios=[0.5, 0.0]"),
        ({"ratios": (1.1,)}, "at most 1"),
        ({"num_pairs": 0}, "num_pairs=0"),
        ({"max_distance": 0}, "max_distance=0"),
        ({"run_length": 0}, "run_length=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_settings_out_of_range(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(UserError) as caught:
        dataclasses.replace(STUDY, **changes)
    assert part in str(caught.value)


def test_nothing_to_compare(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError, match="no example has two hidden tokens"):
        STUDY.measure(confident_backbone(tokenizer), objective("llada"), [example(1)])


def test_the_report(tmp_path: Path) -> None:
    points = [
        Point(ratio=0.5, distance=1, jsd=0.2, low=0.1, high=0.3, pairs=4, examples=2),
        Point(ratio=0.5, distance=2, jsd=0.1, low=None, high=None, pairs=1, examples=1),
    ]
    write_report(tmp_path, points, {"model": "m"})

    content = json.loads((tmp_path / "dependency.json").read_text())
    assert content["settings"] == {"model": "m"}
    assert content["points"] == [dataclasses.asdict(point) for point in points]
    rows = list(csv.DictReader((tmp_path / "dependency.csv").read_text().splitlines()))
    assert [row["distance"] for row in rows] == ["1", "2"]
    assert rows[1]["low"] == ""
    for log_x in (False, True):
        assert draw_report(tmp_path, points, log_x=log_x) == tmp_path / "dependency.png"
        assert (tmp_path / "dependency.png").read_bytes().startswith(b"\x89PNG")


# The command


@pytest.fixture(scope="module")
def places(
    tokenizer: PreTrainedTokenizerBase, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Prepared data, and models that were never trained, by name."""
    root = tmp_path_factory.mktemp("analyze")
    lines = [{"query": f"What is {a} + 1?", "response": f"The answer is {a + 1}."} for a in range(20)]
    (root / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = [f"data.sources.0.files=[{root}/records.jsonl]", f"data.tokenizer={tokenizer_folder}", "num_workers=0"]
    assert main(["prepare", "data=files", *files, f"data.folder={root}/data"]) == 0
    names = {"root": root, "data": root / "data"}
    for name in (*SUPPORTED, "bd3", "ar"):
        backbone = Backbone.from_architecture(ARCHITECTURES["qwen3"], tokenizer=tokenizer)
        backbone.model.config.diffusion_spec = objective(name).spec(backbone.mask_token_id).to_dict()
        backbone.model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        names[name] = root / name
    return names


def analyze(places: dict[str, Path], name: str, *settings: str) -> int:
    shared = [f"data.folder={places['data']}", "num_pairs=6", "limit=4", "ratios=[0.3,0.8]", "max_distance=9"]
    return main(["analyze", "dependency", f"model={places[name]}", *shared, *settings])


@pytest.mark.parametrize("name", SUPPORTED)
def test_the_command_writes_what_it_measured(
    name: str, places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert analyze(places, name, f"out={out}") == 0

    content = json.loads((out / "dependency.json").read_text())
    assert sorted(path.name for path in out.iterdir()) == ["dependency.csv", "dependency.json", "dependency.png"]
    assert content["settings"]["num_examples"] == 4
    assert content["settings"]["spec"]["objective"] == name
    assert content["settings"]["run_length"] == (4 if name == "refusion" else 1)
    assert {point["ratio"] for point in content["points"]} == {0.3, 0.8}
    assert all(0 <= point["jsd"] <= LN2 and 1 <= point["distance"] <= 9 for point in content["points"])
    assert "80%" in capsys.readouterr().out
    assert analyze(places, name, f"out={tmp_path}/again") == 0
    assert (tmp_path / "again" / "dependency.csv").read_bytes() == (out / "dependency.csv").read_bytes()


BAD = {
    "no study": (["analyze", "model=a"], "nothing: give what to study first"),
    "another study": (["analyze", "speed", "model=a"], "speed: give what to study first"),
    "no row": (["{bd3}"], "objective=bd3: it hides no free choice of tokens"),
    "no masks": (["{ar}"], "objective=autoregressive: it hides no free choice"),
    "another objective": (["{llada}", "objective=dream"], "objective=dream: but model"),
    "another shift": (["{llada}", "objective=llada", "objective.shift=true"], "shift=all, but model="),
    "no data": (["{llada}", "data.folder={root}/none"], "{root}/none/manifest.json"),
    "ratio": (["{llada}", "ratios=[2]"], "ratios=[2.0]"),
    "limit": (["{llada}", "limit=0"], "limit=0"),
    "out is there": (["{llada}", "out={root}"], "out={root}: it exists already"),
}


@pytest.mark.parametrize(("command", "part"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line(
    command: list[str], part: str, places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [text.format(**places) for text in command]
    capsys.readouterr()
    if texts[0] == "analyze":
        assert main(texts) == 2
    else:
        settings = [f"model={texts[0]}", f"data.folder={places['data']}", f"out={tmp_path}/out", "limit=2"]
        assert main(["analyze", "dependency", *settings, *texts[1:]]) == 2

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert part.format(**places) in lines[0]
    assert not (tmp_path / "out").exists()


def test_a_preset_is_found_for_every_model() -> None:
    for name in choices("objective"):
        spec = objective(name).spec(3)
        assert fitting_objective(spec, None).name == spec.objective
    with pytest.raises(UserError, match="no objective preset is called 'nope'"):
        fitting_objective(dataclasses.replace(spec, objective="nope"), None)
