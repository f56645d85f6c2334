"""A task: problems in a file, how they are put to a model, and who scores the answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from transformers import PreTrainedTokenizerBase

from lit_refusion.chat import PromptFormat
from lit_refusion.data.formats import read_hub, read_raw
from lit_refusion.errors import UserError
from lit_refusion.evaluation.problem import Problem
from lit_refusion.evaluation.scorer import Scorer

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
PLACES = ("question", "choices", "tests")
"""What a template may ask for."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Problems of JSON, JSON lines, Parquet or a Hugging Face data set. Zero-shot; the chat template is the model's.

    Args:
        name: of the task.
        files: patterns of the files; empty with `hub`.
        hub: Hugging Face data set, or null.
        subset: its configuration, or null.
        split: its split.
        id: field that names a problem; null to number them. Here and below a dot leads into a nested record.
        question: field of the question.
        answer: field of the right answer; null where tests decide.
        choices: field of the list of choices, or the fields of the choices, which are then shuffled by the question;
            null for free answers. The answer is a letter, a label, or in the second case one of the texts.
        labels: field of the choices' labels, where answers are given by label and not by letter; null for letters.
        tests: field of the tests, a text or a list of lines; null for none.
        setup: field of code that comes before the tests; null for none.
        entry_point: field of the tested function's name; null for none.
        template: the user's message, with {question}, {choices} (one a line, with letters) and {tests}.
        prefix: text that the answer is made to begin with; it is scored with the answer.
        scorer: who decides.
    """

    name: str
    files: tuple[str, ...]
    hub: str | None
    subset: str | None
    split: str
    id: str | None
    question: str
    answer: str | None
    choices: str | tuple[str, ...] | None
    labels: str | None
    tests: str | None
    setup: str | None
    entry_point: str | None
    template: str
    prefix: str
    scorer: Scorer

    def __post_init__(self) -> None:
        if bool(self.files) == (self.hub is not None):
            raise UserError(f"task.files={list(self.files)}, task.hub={self.hub}: give one of the two")
        try:
            asked = {name for _, name, _, _ in Formatter().parse(self.template) if name is not None}
        except ValueError as error:
            raise UserError(f"task.template: {error}; write braces twice") from error
        if not asked <= set(PLACES) or "question" not in asked:
            raise UserError(
                f"task.template: it asks for {sorted(asked)}; give {{question}}, and {{choices}} or {{tests}} if needed"
            )

    def problems(self, limit: int | None = None) -> list[Problem]:
        """The problems, in their order; the first `limit` of them.

        Raises:
            UserError: names the file, the record and the field that is missing or malformed.
        """
        found: list[Problem] = []
        for where, record in self._records():
            if limit is not None and len(found) == limit:
                break
            found.append(self._problem(record, number=len(found), where=where))
        if not found:
            raise UserError(f"task={self.name}: no problems in {self.hub or list(self.files)}")
        names = [problem.id for problem in found]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"task={self.name}: two problems have the id {twice!r}; name another field in task.id")
        return found

    def prompts(
        self, problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, prompt_format: PromptFormat
    ) -> list[list[int]]:
        """Token ids of each problem as it is put to the model, the prefix included."""
        messages = [[{"role": "user", "content": self._message(problem)}] for problem in problems]
        texts = [prompt_format.prompt_text(tokenizer, message) + self.prefix for message in messages]
        return [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]

    def _message(self, problem: Problem) -> str:
        choices = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, problem.choices, strict=False))
        return self.template.format(question=problem.question, choices=choices, tests=problem.tests or "")

    def _records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(where it stands, record) of all records."""
        if self.hub is not None:
            records, _ = read_hub(self.hub, self.subset, self.split)
            yield from ((f"{self.hub}: record {number}", record) for number, record in records)
            return
        for path in self._paths():
            with path.open("rb") as file:
                for number, raw in read_raw(path, file):
                    where = f"{path}: record {number}"
                    yield where, _object(raw, where)

    def _paths(self) -> list[Path]:
        paths = []
        for pattern in self.files:
            own = Path(pattern)
            matches = [own] if own.is_file() else sorted(Path(own.anchor or ".").glob(str(own.relative_to(own.anchor))))
            if not matches:
                raise UserError(f"task.files={pattern}: no such file; check the path or the pattern")
            paths += matches
        return paths

    def _problem(self, record: dict[str, Any], *, number: int, where: str) -> Problem:
        def text(field: str | None) -> str | None:
            return None if field is None else _text(record, field, where)

        question, answer = text(self.question) or "", text(self.answer)
        choices, labels = self._choices(record, question, where)
        if labels and answer is not None:
            if answer not in labels:
                raise UserError(f"{where}: the answer {answer!r:.60} is not among {labels!r:.200}")
            answer = LETTERS[labels.index(answer)]
        problem = Problem(
            id=text(self.id) or str(number),
            question=question,
            answer=answer,
            choices=choices,
            tests=text(self.tests),
            setup=text(self.setup) or "",
            entry_point=text(self.entry_point),
        )
        self.scorer.check(problem)
        return problem

    def _choices(self, record: dict[str, Any], question: str, where: str) -> tuple[tuple[str, ...], list[str]]:
        """The choices, and what the answer may be called where it is not a letter."""
        if self.choices is None:
            return (), []
        if isinstance(self.choices, tuple):
            texts = [_text(record, field, where) for field in self.choices]
            order = sorted(texts, key=lambda text: hashlib.sha256(f"{question}\x1f{text}".encode()).digest())
            return tuple(order), order
        found = _field(record, self.choices)
        if not isinstance(found, (list, tuple)) or not all(isinstance(choice, str) for choice in found):
            raise UserError(f"{where}: field '{self.choices}' must be a list of texts, found {found!r:.60}")
        if len(found) > len(LETTERS):
            raise UserError(f"{where}: {len(found)} choices; there are letters for {len(LETTERS)}")
        labels = [] if self.labels is None else [str(label) for label in _field(record, self.labels) or ()]
        return tuple(found), labels


def _field(record: dict[str, Any], field: str) -> Any:
    """The value of a field; where there is none of this name, its parts lead into nested records."""
    if field in record:
        return record[field]
    value: Any = record
    for part in field.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _text(record: dict[str, Any], field: str, where: str) -> str:
    value = _field(record, field)
    if isinstance(value, (list, tuple)) and all(isinstance(line, str) for line in value):
        value = "\n".join(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise UserError(f"{where}: field '{field}' must be a text, found {value!r:.60}; see the task's fields")
    return value


def fingerprint(problems: Sequence[Problem]) -> str:
    """A digest of the problems, in order."""
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(json.dumps(vars(problem), sort_keys=True).encode())
    return digest.hexdigest()[:32]


def _object(raw: Any, where: str) -> dict[str, Any]:
    try:
        record = json.loads(raw) if isinstance(raw, bytes) else raw
    except ValueError as error:
        raise UserError(f"{where}: not JSON: {error}") from error
    if isinstance(record, Exception):
        raise record
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected an object with fields, found {record!r:.60}")
    return record
