"""The benchmarks run: each command with tiny settings, without the official code, and no time is asserted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from benchmarks import decode, decode_lengths, figures, reference, train, train_loss, train_profile, train_worker
from benchmarks.worker import Worker
from lit_refusion.backbone import Backbone
from tests.conftest import ARCHITECTURES, confident_backbone, random_prompts


class InThisProcess:
    """A worker without a process of its own: they take seconds to start."""

    def __init__(self, module: str) -> None:
        self.contender: Any = {
            "benchmarks.train_worker": train_worker.Ours, "benchmarks.train_loss": train_loss.Kernel,
        }[module]()  # fmt: skip

    def ask(self, action: str, **arguments: Any) -> Any:
        return json.loads(json.dumps(getattr(self.contender, action)(**json.loads(json.dumps(arguments)))))

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (train, train_loss):
        monkeypatch.setattr(module, "Worker", InThisProcess)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    backbone = confident_backbone(tokenizer)
    backbone.model.config.mask_token_id = backbone.mask_token_id
    backbone.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    path = tmp_path / "cases.json"
    found = [
        {"prompt_ids": ids, "corrected": {"response_ids_to_eos": [20, 21]}} for ids in random_prompts(3, longest=9)
    ]
    path.write_text(json.dumps(found))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    lines = [{"query": f"What is {a} + 1?", "response": f"The answer is {a + 1}."} for a in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def contents(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    assert found["environment"]["threads"] == "1"
    return found


def test_decode(model: Path, cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ["--model", model, "--cases", cases, "--num-prompts", 2, "--settings", "4,8,0.5,0.3,8", "--repeats", 1]
    decode.main([*map(str, arguments), "--batch-sizes", "1,2", "--budget", "8", "--out", str(out)])
    rows = contents(out)["all"]
    assert [row["contender"] for row in rows] == [
        "ours, module, batch 1", "ours, module, batch 2", "ours, lean, batch 1", "ours, lean, batch 2",
        "ours, lean, batch 1, 8 guesses", "ours, lean, batch 2, 8 guesses", "transformers, greedy",
    ]  # fmt: skip
    assert [row["same_tokens"] for row in rows[:-1]] == [2] * 6
    assert rows[4]["passes"] <= rows[0]["passes"]
    assert capsys.readouterr().out.count("| ours, lean, batch 2 |") == 2  # the setting's table and the one for all


def test_decode_by_length(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_lengths, "SELECTED", (1, 2))
    out = tmp_path / "out.json"
    decode.main(["--model", str(model), "--prompt-lengths", "9", "--repeats", "1", "--out", str(out)])
    rows = contents(out)["lengths"]
    assert len(rows) == 2 * 2
    assert all(row["same_tokens"] for row in rows)
    assert {row["passes"] for row in rows} == {4 * 8}  # of four blocks: select, verify, three times predict and verify


def test_decode_methods(model: Path, cases: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--model", model, "--cases", cases, "--methods", "--num-prompts", 1, "--prompt-lengths", 20]
    changes = ["--new-tokens", "6", "--repeats", "1", "--batch-sizes", "1", "--out", str(out)]
    decode.main([*map(str, arguments), *changes])
    rows = contents(out)["methods"]
    assert {row["method"] for row in rows} == {
        "BD3-LM", "LLaDA, no cache", "Fast-dLLM, prefix cache", "Fast-dLLM, dual cache", "Orthrus",
    }  # fmt: skip
    exact = [row for row in rows if "(exact)" not in row["contender"]]
    assert all(row["same_tokens"] == row["prompts"] for row in exact), [row for row in exact if not row["same_tokens"]]


@pytest.mark.usefixtures("in_this_process")
def test_train(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    changes = ["--documents", "4", "--micro-batch", "2", "--width", "32", "--layers", "1", "--repeats", "1"]
    train.main(["--data", str(data), "--vocab", "600", *changes, "--out", str(out)])
    [found] = contents(out)["training"]
    losses = [row["loss"] for row in found["contenders"]]
    assert len(losses) == 5
    assert losses == pytest.approx([losses[0]] * 5, rel=1e-4)  # the same rows, however they are laid out


@pytest.mark.usefixtures("in_this_process")
def test_loss_and_profile(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_profile, "OBJECTIVES", ("refusion", "orthrus"))
    out = tmp_path / "out.json"
    changes = ["--documents", "2", "--micro-batch", "2", "--width", "32", "--layers", "1", "--repeats", "1"]
    train.main(["--data", str(data), "--vocab", "600", *changes, "--loss", "--profile", "--out", str(out)])
    found = contents(out)
    assert [row["kernel"] for row in found["loss"]] == ["all logits at once", "chunked", "torch"]
    assert found["loss"][1]["loss"] == pytest.approx(found["loss"][0]["loss"], rel=1e-5)
    for row in found["profile"]["objectives"]:
        assert sum(row["shares"].values()) == pytest.approx(1)


def test_official_rows_are_weighed_as_the_official_code_does(tokenizer: PreTrainedTokenizerBase) -> None:
    """AR: the mean over the micro-batch. MDM: over the mask rate and the response's length, a mean over examples."""
    rows = {
        "input_ids": [[20, 21, 22, 3], [20, 23, 24, 0]],
        "labels": [[-100, 22, -100, 25], [-100, 24, -100, -100]],
        "is_masked": [[False, False, False, True], [False] * 4],
        "p_mask": [[0.5] * 4, [0.25] * 4],
        "response_length": [[3] * 4, [2] * 4],
        "position_ids": [[0, 1, 2, 3]] * 2,
        "lengths": [4, 3],
    }
    batch = train_worker.official_batch(rows)
    assert batch.weights.tolist() == [[0, 0.5, 0, pytest.approx(1 / (0.5 * 3 * 2))], [0, 0.5, 0, 0]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    backbone = Backbone.from_architecture(ARCHITECTURES["qwen3"], tokenizer=tokenizer)
    loss = train_worker.load_objective("refusion").loss(backbone, batch, step=0)
    assert torch.isfinite(loss.total)


def test_a_worker_answers_and_says_why_it_fails(tmp_path: Path) -> None:
    (tmp_path / "adder.py").write_text(
        "from benchmarks.worker import serve\nprint('this is no answer')\nserve({'add': lambda a, b: a + b})\n"
    )
    with Worker("adder", path=[str(tmp_path)]) as worker:
        assert worker.ask("add", a=2, b=3) == 5
        with pytest.raises(SystemExit, match=r"failed at add(.|\n)*TypeError"):
            worker.ask("add", a=2, b="3")
        assert worker.ask("add", a="x", b="y") == "xy"
    assert worker.process.returncode == 0


def test_figures() -> None:
    assert figures.spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert figures.ratio([2.0, 9.0], [1.0, 3.0])["median"] == 2.5
    assert figures.shown({"median": 2.0, "min": 2.0, "max": 2.0}, ".1f") == "2.0"
    assert figures.turns(["a", "b", "c"], 1) == ["b", "c", "a"]
    assert reference.cut([5, 2, 7], 2) == [5, 2]
