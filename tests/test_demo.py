"""The embedded demo: its data, its tokenizer, and the whole command in miniature."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lit_refusion.cli import main
from lit_refusion.demo.comparison import is_right
from lit_refusion.demo.tokenizer_training import train_tokenizer
from lit_refusion.demo.word_problems import generate
from lit_refusion.tokenizer import load_tokenizer, tokenizer_fingerprint
from tests.conftest import REPOSITORY


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
        assert is_right(problem["response"], problem["answer"])


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("It is 3 + 4 = 7. The answer is 7.", True),
        ("7 then 8", False),
        ("no number", False),
        ("17", False),
        ("", False),
    ],
)
def test_only_the_last_number_counts(text: str, right: bool) -> None:
    assert is_right(text, "7") is right


def test_the_carried_tokenizer_is_the_one_its_script_builds(tmp_path: Path) -> None:
    carried = REPOSITORY / "lit_refusion" / "demo" / "tokenizer"
    train_tokenizer(tmp_path / "tokenizer")
    assert (tmp_path / "tokenizer" / "tokenizer.json").read_text() == (carried / "tokenizer.json").read_text()
    one, two = load_tokenizer(carried), load_tokenizer(tmp_path / "tokenizer")
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(two)


def test_demo_in_miniature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three steps an arm: the text is noise, but every stage runs, and a second call only decodes again."""
    folder = tmp_path / "demo"
    small = 'train=["backbone=tiny_qwen3","trainer.max_steps=3","trainer.log_every=1","trainer.validate_every=1"]'
    arguments = ["demo", f"folder={folder}", "num_train=200", "num_heldout=4", "num_singles=2", small]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    for text in (
        "held-out problems",
        "exact match",
        "ar        | train step 3/3",
        "refusion  | train step 3/3",
    ):
        assert text in output
    results = json.loads((folder / "results.json").read_text())
    assert [score["arm"] for score in results["scores"]] == ["ar", "refusion"]
    assert all(len(score["texts"]) == 4 for score in results["scores"])
    assert (folder / "loss.png").stat().st_size > 1000

    checkpoint = folder / "ar" / "checkpoints" / "best.ckpt"
    written = checkpoint.stat().st_mtime_ns
    assert main(arguments) == 0
    assert checkpoint.stat().st_mtime_ns == written
    assert "train step" not in capsys.readouterr().out
