"""Tasks: records to problems, problems to prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from lit_refusion.chat import PromptFormat
from lit_refusion.config import choices, load_config
from lit_refusion.errors import UserError
from lit_refusion.evaluation.task import Task, fingerprint
from lit_refusion.schema import build


def task(*files: Path | str, scorer: str = "exact", **changes: Any) -> Task:
    found = load_config("evaluate", ["model=m", "out=o", f"scorer@task.scorer={scorer}"])["task"]
    return build({**found, "files": list(map(str, files)), **changes}, Task, key="task")


def written(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_every_task_of_the_configuration_builds() -> None:
    for name in choices("task"):
        build(load_config("evaluate", ["model=m", "out=o", f"task={name}"])["task"], Task, key="task")


def test_problems_come_in_order_with_what_their_fields_say(tmp_path: Path) -> None:
    file = written(tmp_path / "t.jsonl", {"question": "a", "answer": 3}, {"question": "b", "answer": "4"})
    one, two = task(file).problems()
    assert (one.id, one.question, one.answer, one.choices, one.tests) == ("0", "a", "3", (), None)
    assert (two.id, two.question, two.answer) == ("1", "b", "4")
    assert [problem.question for problem in task(file).problems(1)] == ["a"]


def test_lists_of_lines_are_joined_and_dots_lead_into_records(tmp_path: Path) -> None:
    record = {"meta": {"name": "x"}, "text": "do it", "tests": ["assert a", "assert b"], "setup": "import c"}
    fields = {"id": "meta.name", "question": "text", "answer": None, "tests": "tests", "setup": "setup"}
    (problem,) = task(written(tmp_path / "t.jsonl", record), scorer="unit_tests", **fields).problems()
    assert (problem.id, problem.tests, problem.setup) == ("x", "assert a\nassert b", "import c")


def test_an_answer_by_label_becomes_a_letter(tmp_path: Path) -> None:
    record = {"question": "q", "choices": {"text": ["p", "q", "r"], "label": ["1", "2", "3"]}, "answer": "3"}
    fields = {"choices": "choices.text", "labels": "choices.label"}
    (problem,) = task(written(tmp_path / "t.jsonl", record), scorer="choice", **fields).problems()
    assert (problem.choices, problem.answer) == (("p", "q", "r"), "C")
    record["answer"] = "4"
    with pytest.raises(UserError, match=r"t.jsonl: record 1: the answer '4' is not among \['1', '2', '3'\]"):
        task(written(tmp_path / "t.jsonl", record), scorer="choice", **fields).problems()


def test_choices_in_fields_of_their_own_are_shuffled_by_the_question(tmp_path: Path) -> None:
    names = ("right", "wrong 1", "wrong 2", "wrong 3")
    records = [{"question": str(i), **{name: f"{name}!" for name in names}} for i in range(40)]
    fields = {"choices": list(names), "answer": "right"}
    problems = task(written(tmp_path / "t.jsonl", *records), scorer="choice", **fields).problems()
    assert all(p.choices["ABCD".index(p.answer or "")] == "right!" for p in problems)
    assert {p.answer for p in problems} == set("ABCD")
    assert problems == task(tmp_path / "t.jsonl", scorer="choice", **fields).problems()


def test_the_prompt_is_template_and_prefix_in_the_chat_format(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    record = {"question": "Which?", "c": ["one", "two"], "answer": "B"}
    made = task(
        written(tmp_path / "t.jsonl", record),
        scorer="choice",
        choices="c",
        prefix="It is",
        template="{question}\n{choices}",
    )
    (ids,) = made.prompts(made.problems(), tokenizer, PromptFormat(style="chat", template_kwargs={}))
    assert tokenizer.decode(ids) == ("<|im_start|>user\nWhich?\nA. one\nB. two<|im_end|>\n<|im_start|>assistant\nIt is")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"template": "{answer}"}, r"task.template: it asks for \['answer'\]"),
        ({"template": "no place"}, "task.template: it asks for"),
        ({"template": "{question"}, "task.template: "),
        ({"hub": "a/b"}, "give one of the two"),
        ({"files": []}, "give one of the two"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    found = load_config("evaluate", ["model=m", "out=o", "scorer@task.scorer=exact"])["task"]
    with pytest.raises(UserError, match=told):
        build({**found, **changes}, Task, key="task")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "record 1: not JSON"),
        ("[1]", "record 1: expected an object"),
        ('{"question": "q"}', "record 1: field 'answer' must be a text, found None"),
        ('{"question": ["q", 1], "answer": "a"}', "record 1: field 'question' must be a text"),
        ('{"question": "q", "answer": true}', "record 1: field 'answer' must be a text, found True"),
    ],
)
def test_a_bad_record_is_named(line: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=told) as caught:
        task(tmp_path / "t.jsonl").problems()
    assert str(tmp_path / "t.jsonl") in str(caught.value)


def test_no_problems_two_of_one_name_and_missing_files_are_errors(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError, match="no problems in"):
        task(tmp_path / "empty.jsonl").problems()
    twice = written(tmp_path / "t.jsonl", *[{"n": "x", "question": "q", "answer": "a"}] * 2)
    with pytest.raises(UserError, match="two problems have the id 'x'"):
        task(twice, id="n").problems()
    with pytest.raises(UserError, match="no such file"):
        task(tmp_path / "nowhere.jsonl").problems()


def test_the_fingerprint_is_of_content_and_order(tmp_path: Path) -> None:
    records = [{"question": str(i), "answer": "a"} for i in range(3)]
    problems = task(written(tmp_path / "t.jsonl", *records)).problems()
    assert fingerprint(problems) == fingerprint(list(problems))
    assert len({fingerprint(problems), fingerprint(problems[::-1]), fingerprint(problems[:2])}) == 3
