"""Responses that a model writes anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_refusion.cli import main
from lit_refusion.data import answers
from lit_refusion.data.shards import KEYS, Shards
from tests.children import command, prepared_data, run

BUDGET = 6


@pytest.fixture(scope="module")
def original(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_data(tmp_path_factory.mktemp("original"), tokenizer_folder)


@pytest.fixture(scope="module")
def model(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained just long enough to stay within the tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    run(*command(original, folder / "run", "ar", "trainer.max_steps=60", "trainer.validate_every=60"))
    run("export", f"run={folder}/run", f"out={folder}/model")
    return folder / "model"


def arguments(original: Path, model: Path, out: Path, *extra: str) -> list[str]:
    return [
        "prepare", "data=files", f"data.sources.0.files=[{original.parent}/records.jsonl]", f"data.folder={out}",
        f"data.tokenizer={model}", "num_workers=0", "regenerate_responses=true", f"decoder.max_new_tokens={BUDGET}",
        *extra,
    ]  # fmt: skip


def generated(model: Any, prompt: np.ndarray) -> list[int]:
    """Greedy decoding by the library."""
    ids = torch.from_numpy(prompt)[None]
    found = model.generate(ids, max_new_tokens=BUDGET, do_sample=False, pad_token_id=0)
    return found[0, len(prompt) :].tolist()


def test_responses_are_the_models_own_and_all_else_stays(original: Path, model: Path, tmp_path: Path) -> None:
    run(*arguments(original, model, tmp_path / "data"))
    before, after = Shards(original), Shards(tmp_path / "data")
    teacher = AutoModelForCausalLM.from_pretrained(model)
    assert len(after) == len(before)
    np.testing.assert_array_equal(np.load(tmp_path / "data" / KEYS), np.load(original / KEYS))
    lengths = set()
    for number in range(len(after)):
        assert after[number].prompt_ids.tolist() == before[number].prompt_ids.tolist()
        assert after[number].response_ids.tolist() == generated(teacher, after[number].prompt_ids)
        lengths.add(len(after[number].response_ids))
    assert max(lengths) == BUDGET
    assert after.manifest.content_fingerprint != before.manifest.content_fingerprint
    assert after.manifest.answered_by is not None
    assert after.manifest.answered_by["model"] == str(model)
    assert before.manifest.answered_by is None
    run("prepare", "verify", f"data.folder={tmp_path}/data")


def test_an_interrupted_run_keeps_the_answers_that_it_has(
    original: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(*arguments(original, model, tmp_path / "whole"))
    monkeypatch.setattr(answers, "ANSWERED_TOGETHER", 16)
    load = answers._answerer
    calls = []

    def failing(settings: answers.Answering) -> Any:
        calls.append(settings)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return load(settings)

    monkeypatch.setattr(answers, "_answerer", failing)
    assert main(arguments(original, model, tmp_path / "data")) == 130
    run(*arguments(original, model, tmp_path / "data"))
    assert len(calls) == 3 + 2  # 4 blocks in all, 2 of them finished before
    for path in (tmp_path / "whole").glob("*.tar"):
        assert (tmp_path / "data" / path.name).read_bytes() == path.read_bytes()


def test_an_answer_is_cut_at_the_longest_length(original: Path, model: Path, tmp_path: Path) -> None:
    longest = Shards(original).manifest.longest
    run(*arguments(original, model, tmp_path / "data", f"data.max_length={longest}", "decoder.max_new_tokens=100"))
    assert Shards(tmp_path / "data").manifest.longest <= longest


def test_a_dry_run_asks_nobody(original: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_answerer", None)
    run(*arguments(original, model, tmp_path / "data", "dry_run=true"))
    assert not (tmp_path / "data").exists()


def test_a_model_with_another_tokenizer_is_refused(
    original: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in model.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main(arguments(original, model, tmp_path / "data", f"model={other}")) == 2
    assert f"model={other}: its tokenizer (fingerprint" in capsys.readouterr().err


def test_an_untrained_model_is_told_from_a_trained_one(
    original: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*command(original, tmp_path / "run", "ar", "trainer.max_steps=1", "optimizer.learning_rate=1e-9"))
    run("export", f"run={tmp_path}/run", f"out={tmp_path}/model")
    assert main(arguments(original, tmp_path / "model", tmp_path / "data", "decoder.max_new_tokens=100")) == 2
    assert "it seems to be untrained" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (["decoder.max_new_tokens=9000", "data.max_length=9000"], "exceed its window of 256"),
        (["dtype=bf16"], "dtype"),
        (["device=gpu"], "device"),
        (["decoder=refusion"], "was trained with 'autoregressive'"),
        (["regenerate_responses=perhaps"], "regenerate_responses=perhaps"),
        (["model=/nowhere"], "/nowhere"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    extra: list[str], told: str, original: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(original, model, tmp_path / "data", *extra)) == 2
    assert told in capsys.readouterr().err


def test_answers_of_a_model_that_has_changed_are_not_used_again(original: Path, model: Path, tmp_path: Path) -> None:
    before = answers.weights_state(str(model))
    copied = tmp_path / "model"
    copied.mkdir()
    for path in model.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    assert before == answers.weights_state(str(model)) != answers.weights_state(str(copied))
    assert answers.weights_state("some/hub-id") == ""
