"""The embedded demo: its data, its tokenizer, and the whole command in miniature."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from lit_refusion.ablation.child import Children
from lit_refusion.cli import main
from lit_refusion.data.shards import Shards
from lit_refusion.demo.tokenizer_training import train_tokenizer
from lit_refusion.demo.word_problems import generate
from lit_refusion.evaluation.problem import Problem
from lit_refusion.evaluation.scorers import Numeric
from lit_refusion.tokenizer import load_tokenizer, tokenizer_fingerprint
from tests.children import start
from tests.conftest import REPOSITORY

SCORER = Numeric(pattern=None, tolerance=0.0)


def test_problems_are_a_function_of_the_seed_and_splits_are_disjoint() -> None:
    train, again = generate(300, seed=0), generate(300, seed=0)
    assert train == again
    assert generate(300, seed=1) != train
    heldout = {problem["query"] for seed in (0, 1) for problem in generate(200, seed=seed, held_out=True)}
    assert not heldout & {problem["query"] for seed in range(3) for problem in generate(300, seed=seed)}


def test_worked_solutions_are_right() -> None:
    for problem in generate(500, seed=3):
        equations = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", problem["response"])
        assert equations
        for left, sign, right, result in equations:
            value = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](int(left), int(right))
            assert value == int(result), problem
        assert equations[-1][3] == problem["answer"]
        question = Problem(id="0", question=problem["query"], answer=problem["answer"])
        assert SCORER.score(problem["response"], question).is_correct


def test_the_carried_tokenizer_is_the_one_its_script_builds(tmp_path: Path) -> None:
    carried = REPOSITORY / "lit_refusion" / "demo" / "tokenizer"
    train_tokenizer(tmp_path / "tokenizer")
    assert (tmp_path / "tokenizer" / "tokenizer.json").read_text() == (carried / "tokenizer.json").read_text()
    one, two = load_tokenizer(carried), load_tokenizer(tmp_path / "tokenizer")
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(two)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands of an ablation, which run in processes that need not import everything anew."""
    found: list[str] = []

    def run(
        _: Children, arguments: Sequence[str], *, name: str, log: Path, environment: dict[str, str], lock: int
    ) -> None:
        found.append(f"{name} {arguments[0]}")
        log.parent.mkdir(parents=True, exist_ok=True)
        child = start(main, [*arguments], log=log, environment=environment)
        assert child.wait() == 0, child.output

    monkeypatch.setattr(Children, "run", run)
    return found


def test_demo_in_miniature(tmp_path: Path, steps: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps an arm: the text is noise, but every stage runs, is controlled, and is not run again."""
    folder = tmp_path / "demo"
    settings = [
        "data=demo", f"data.folder={folder}/data", "backbone=tiny_qwen3", "loader.mask_rates=stratified",
        "trainer.max_steps=2", "trainer.log_every=1", "trainer.validate_every=1", "likelihood.num_examples=4",
        "likelihood.num_draws=2", "trainer.loggers=[csv]",
    ]  # fmt: skip
    train = ",".join(f"'{text}'" for text in settings)
    few = ["at_once=1", f"train=[{train}]", "measure.num_problems=2", "measure.repeats=1", "measure.batch_sizes=[2]"]
    ablate = ",".join(f'"{text}"' for text in ["experiment=controlled_demo", *few])
    arguments = ["demo", f"folder={folder}", "num_train=200", "num_heldout=4", f"ablate=[{ablate}]"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    arms = ["ar", "llada", "bd3", "refusion"]
    commands = ["train", "export", "evaluate"]
    assert steps == [f"{arm}-seed0 {command}" for arm in arms for command in commands]
    for text in ("200 word problems to train on", "controlled: the arms differ only in objective, decoder"):
        assert text in printed
    results = json.loads((folder / "report" / "results.json").read_text())
    assert results["control"]["violations"] == []
    for score, cost, arm in zip(results["scores"], results["costs"], arms, strict=True):
        assert (score["arm"], score["problems"], cost["arm"], cost["steps"]) == (arm, 4, arm, 2)
        assert score["tokens_per_second"]["2"] > 0
        assert cost["tokens"] == results["costs"][0]["tokens"] > 0
        assert cost["row_tokens"] >= cost["tokens"]
        assert cost["flops"] > 0
        assert cost["nelbo"] > 0
    assert results["costs"][0]["row_tokens"] == results["costs"][0]["tokens"]  # a causal row is the example
    page = (folder / "report" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert page.count("<strong>word_problems, ") == 4

    steps.clear()
    assert main(arguments) == 0
    assert steps == []
    assert "measuring" not in capsys.readouterr().out
    assert json.loads((folder / "report" / "results.json").read_text()) == results


def test_the_data_can_be_prepared_by_itself(tmp_path: Path, steps: list[str]) -> None:
    assert main(["demo", f"folder={tmp_path}", "num_train=20", "num_heldout=3", "until=prepare"]) == 0
    assert len((tmp_path / "records" / "heldout.jsonl").read_text().splitlines()) == 3
    assert Shards(tmp_path / "data").manifest.num_examples == 20
    assert steps == []
