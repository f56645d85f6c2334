"""`lit-refusion evaluate`: records, figures, interruption, sweeps."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from lit_refusion.cli import main
from lit_refusion.evaluation import evaluate as evaluation
from tests.children import command, prepared_data, run

QUESTIONS = [f"What is {a} + {b}?" for a in (1, 2, 3) for b in (1, 2, 3)]


@pytest.fixture(scope="module")
def model(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    data = prepared_data(folder, tokenizer_folder)
    run(*command(data, folder / "run", "ar", "trainer.max_steps=40", "trainer.validate_every=40"))
    run("export", f"run={folder}/run", f"out={folder}/model")
    return folder / "model"


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"question": text, "answer": "3"}) + "\n" for text in QUESTIONS))
    return path


def arguments(model: Path, questions: Path, out: Path, *extra: str) -> list[str]:
    return [
        "evaluate", f"model={model}", f"task.files=[{questions}]", f"out={out}", "decoder.max_new_tokens=12",
        "decoder.batch_size=4", "num_singles=2", *extra,
    ]  # fmt: skip


def records(out: Path) -> dict[str, dict[str, Any]]:
    """By problem, without the clock."""
    lines = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    return {line["id"]: {k: v for k, v in line.items() if k not in ("seconds", "session")} for line in lines}


def result(out: Path) -> dict[str, Any]:
    return json.loads((out / "result.json").read_text())


def test_records_and_figures_agree_with_generate(
    model: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*arguments(model, questions, tmp_path / "out"))
    assert "accuracy" in capsys.readouterr().out
    found = records(tmp_path / "out")
    assert sorted(found) == sorted(str(number) for number in range(len(QUESTIONS)))
    figures = result(tmp_path / "out")["figures"]
    assert figures["problems"] == len(QUESTIONS)
    assert figures["tokens"] == sum(record["tokens"] for record in found.values())
    assert figures["accuracy"] == sum(record["is_correct"] for record in found.values()) / len(found)
    assert figures["tokens_per_forward"] == 1
    assert figures["tokens_per_second_batch_1"] > 0
    assert figures["tokens_per_second_batch_4"] > 0
    run("generate", f"model={model}", f"prompt={QUESTIONS[4]}", "decoder.max_new_tokens=12")
    assert found["4"]["text"] in capsys.readouterr().out


def test_batches_do_not_change_answers(model: Path, questions: Path, tmp_path: Path) -> None:
    for size in (1, 4, 16):
        sampled = ["decoder.temperature=0.8", f"decoder.batch_size={size}", "num_singles=0", "seed=5"]
        run(*arguments(model, questions, tmp_path / str(size), *sampled))
    assert records(tmp_path / "1") == records(tmp_path / "4") == records(tmp_path / "16")


def test_an_interrupted_evaluation_goes_on(
    model: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(*arguments(model, questions, tmp_path / "whole", "decoder.temperature=0.8"))
    score = evaluation.Answer.to_dict
    turns = iter(range(100))

    def failing(answer: Any) -> dict[str, Any]:
        if next(turns) == 5:
            raise KeyboardInterrupt
        return score(answer)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation.Answer, "to_dict", failing)
        assert main(arguments(model, questions, tmp_path / "out", "decoder.temperature=0.8")) == 130
    path = tmp_path / "out" / "records.jsonl"
    kept = path.read_text()
    assert len(kept.splitlines()) == 5
    assert not (tmp_path / "out" / "result.json").exists()
    path.write_text(kept + '{"id": "torn')
    run(*arguments(model, questions, tmp_path / "out", "decoder.temperature=0.8"))
    assert path.read_text().startswith(kept)
    assert records(tmp_path / "out") == records(tmp_path / "whole")
    figures = result(tmp_path / "out")["figures"]
    assert figures["sessions"] == 2
    sessions: dict[int, float] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        sessions[line["session"]] = max(sessions.get(line["session"], 0), line["seconds"])
    assert figures["seconds"] == pytest.approx(sum(sessions.values()))
    before = path.read_bytes()
    run(*arguments(model, questions, tmp_path / "out", "decoder.temperature=0.8"))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("seed=1", "seed was 0, is 1"),
        ("limit=3", "num_problems was 9, is 3"),
        ("decoder.temperature=0.5", "decoder.temperature was 0.0, is 0.5"),
        ("task.prefix=Well", "task.prefix was '', is 'Well'"),
    ],
)
def test_another_evaluation_does_not_go_on_in_the_folder(
    change: str, told: str, model: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*arguments(model, questions, tmp_path / "out", "num_singles=0"))
    before = (tmp_path / "out" / "records.jsonl").read_bytes()
    assert main(arguments(model, questions, tmp_path / "out", "num_singles=0", change)) == 2
    error = capsys.readouterr().err
    assert f"out={tmp_path}/out: it holds another evaluation: " in error
    assert told in error
    assert (tmp_path / "out" / "records.jsonl").read_bytes() == before


def test_a_damaged_record_is_named(
    model: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*arguments(model, questions, tmp_path / "out", "num_singles=0"))
    path = tmp_path / "out" / "records.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{broken", *lines[2:]]) + "\n")
    assert main(arguments(model, questions, tmp_path / "out", "num_singles=0")) == 2
    assert f"{path}: line 2 is not a record" in capsys.readouterr().err


def test_a_sweep_evaluates_every_combination_and_draws_them(
    model: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*arguments(model, questions, tmp_path / "out", "sweep.temperature=0.0,0.7", "sweep.top_k=[1,3]", "limit=3"))
    with (tmp_path / "out" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    pairs = [(row["temperature"], row["top_k"]) for row in rows]
    assert pairs == [("0.0", "1"), ("0.0", "3"), ("0.7", "1"), ("0.7", "3")]
    for row in rows:
        found = result(tmp_path / "out" / f"temperature={row['temperature']},top_k={row['top_k']}")
        assert float(row["accuracy"]) == found["figures"]["accuracy"]
        assert found["decoder"]["temperature"] == float(row["temperature"])
    assert records(tmp_path / "out" / "temperature=0.0,top_k=1") == records(
        tmp_path / "out" / "temperature=0.7,top_k=1"
    )
    for name in ("temperature", "top_k", "frontier"):
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 5000
        assert f"{name}.png" in capsys.readouterr().out or name != "temperature"


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (["sweep.nonsense=1,2"], "sweep.nonsense: AutoregressiveDecoder has no such setting"),
        (["limit=0"], "limit=0"),
        (["num_singles=-1"], "num_singles=-1"),
        (["decoder.max_new_tokens=250"], "exceed the model's window of 256"),
        (["decoder=refusion"], "was trained with 'autoregressive'"),
        (["scorer@task.scorer=unit_tests"], "give allow_code_execution=true"),
        (["task.files=[/nowhere.jsonl]"], "no such file"),
    ],
)
def test_wrong_input_is_one_line(
    extra: list[str], told: str, model: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(model, questions, tmp_path / "out", *extra)) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("sweep", "told"),
    [
        ("sweep.canvas=1,2", "sweep.canvas: AutoregressiveDecoder has no such setting"),
        ("sweep.max_new_tokens=foo", "decoder.max_new_tokens"),
        ("sweep.temperature=0.5,null", "decoder.temperature"),
        ("sweep.top_p=0.5,7", "top_p=7"),
    ],
)
def test_a_wrong_value_of_a_sweep_is_found_before_anything_runs(
    sweep: str, told: str, model: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(model, questions, tmp_path / "out", sweep)) == 2
    assert told in capsys.readouterr().err
    assert not list((tmp_path / "out").rglob("records.jsonl"))


def test_at_batch_1_the_speed_is_that_of_all_problems(model: Path, questions: Path, tmp_path: Path) -> None:
    run(*arguments(model, questions, tmp_path / "out", "decoder.batch_size=1"))
    figures = result(tmp_path / "out")["figures"]
    assert figures["tokens_per_second_batch_1"] == pytest.approx(figures["tokens"] / figures["seconds"])


def test_a_damaged_settings_file_is_named(
    model: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*arguments(model, questions, tmp_path / "out", "num_singles=0"))
    (tmp_path / "out" / "settings.json").write_text("{")
    assert main(arguments(model, questions, tmp_path / "out", "num_singles=0")) == 2
    assert f"{tmp_path}/out/settings.json: cannot read it" in capsys.readouterr().err
