"""One evaluation: a model, a task and a decoder, to a folder of records and figures that can be trusted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lit_refusion.backbone import Backbone
from lit_refusion.errors import UserError
from lit_refusion.evaluation.answers import Answer, Examiner
from lit_refusion.evaluation.meter import figures
from lit_refusion.evaluation.problem import Problem
from lit_refusion.generation import Generation
from lit_refusion.new_file import read_json, write_file
from lit_refusion.resume import describe, flat

RECORDS, RESULT, SETTINGS = "records.jsonl", "result.json", "settings.json"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is to be done.

    Args:
        examiner: task, decoder and tokenizer.
        backbone: the model.
        problems: the problems, in order.
        seed: seed of the sampling noise.
        num_singles: problems that are decoded once more one at a time, for the speed at batch 1; 0 for none.
        identity: plain data that tells this evaluation from another: settings and fingerprints.
    """

    examiner: Examiner
    backbone: Backbone
    problems: Sequence[Problem]
    seed: int
    num_singles: int
    identity: dict[str, Any]

    def run(self, folder: Path, *, on_progress: Callable[[int], None] | None = None) -> dict[str, Any]:
        """Answer what is not answered yet, and write the result.

        Every record is on the disk as soon as it is scored, so an interrupted evaluation goes on where it was.

        Args:
            folder: of records and result.
            on_progress: told how many problems are answered.

        Returns:
            What `result.json` holds.

        Raises:
            UserError: the folder holds another evaluation, or records that cannot be read.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._claim(folder)
        records = read_records(folder / RECORDS)
        done = {record["id"] for record in records}
        if on_progress:
            on_progress(len(done))
        missing = [number for number, problem in enumerate(self.problems) if problem.id not in done]
        if not missing and (folder / RESULT).exists():
            return _read(folder / RESULT)
        if missing:
            self._answer(
                folder / RECORDS, missing, session=_last_session(records) + 1, done=len(done), told=on_progress
            )
        records = read_records(folder / RECORDS)
        result = {**self.identity, "figures": {**self._figures(records), **self._single_speed()}}
        _write(folder / RESULT, result)
        return result

    def _claim(self, folder: Path) -> None:
        """Note what the folder is for, or see that it is for this."""
        path = folder / SETTINGS
        if not path.exists():
            _write(path, self.identity)
            return
        found = flat("", _read(path))
        own = flat("", json.loads(json.dumps(self.identity)))
        other = {name.lstrip("."): (found.get(name), own.get(name)) for name in {**found, **own}}
        other = {name: pair for name, pair in other.items() if pair[0] != pair[1]}
        if other:
            raise UserError(f"out={folder}: it holds another evaluation: {describe(other)}; choose another folder")

    def _answer(
        self, path: Path, numbers: list[int], *, session: int, done: int, told: Callable[[int], None] | None
    ) -> None:
        """Append the records of these problems."""
        start, scoring = time.perf_counter(), 0.0
        ended = start
        with path.open("a", encoding="utf-8") as file:

            def on_answer(answer: Answer, generation: Generation) -> None:
                nonlocal done, scoring, ended
                now = time.perf_counter()
                scoring += now - ended
                record = {**answer.to_dict(), "session": session, "seconds": now - start - scoring}
                file.write(json.dumps(record) + "\n")
                file.flush()
                done += 1
                if told:
                    told(done)

            def on_decoded() -> None:
                nonlocal ended
                ended = time.perf_counter()

            self.examiner.ask(
                self.backbone,
                [self.problems[number] for number in numbers],
                seed=self.seed,
                indices=numbers,
                on_answer=on_answer,
                on_decoded=on_decoded,
            )

    def _figures(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        """Over all records; the time is that of decoding, over all sessions."""
        names = Answer.__dataclass_fields__
        answers = [Answer(**{name: record[name] for name in names}) for record in records]
        sessions: dict[int, float] = {}
        for record in records:
            sessions[record["session"]] = max(sessions.get(record["session"], 0.0), record["seconds"])
        seconds, tokens = sum(sessions.values()), sum(answer.tokens for answer in answers)
        batch_size = self.examiner.decoder.batch_size
        speed = {f"tokens_per_second_batch_{batch_size}": tokens / seconds if seconds else 0.0}
        return {**figures(answers), **speed, "tokens": tokens, "seconds": seconds, "sessions": len(sessions)}

    def _single_speed(self) -> dict[str, float]:
        """Tokens per second and latency at batch 1, over the first problems, scoring left out."""
        problems = self.problems[: self.num_singles]
        if not problems or self.examiner.decoder.batch_size == 1:
            return {}
        examiner = replace(self.examiner, decoder=replace(self.examiner.decoder, batch_size=1))
        prompts = examiner.task.prompts(problems, examiner.tokenizer, examiner.prompt_format)
        examiner.decoder.generate(self.backbone, prompts[:1], seed=self.seed)  # first calls are slower
        start = time.perf_counter()
        found = examiner.decoder.generate(self.backbone, prompts, seed=self.seed)
        seconds = time.perf_counter() - start
        tokens = sum(len(generation.tokens) for generation in found)
        return {"tokens_per_second_batch_1": tokens / seconds, "seconds_per_answer_batch_1": seconds / len(problems)}


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records that are there; half a line at the end, of a run that was killed, is removed.

    Raises:
        UserError: another line cannot be read.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        write_file(path, whole.decode(), name="")
    records = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            record = json.loads(line)
            if not {"session", "seconds", *Answer.__dataclass_fields__} <= record.keys():
                raise ValueError("fields are missing")
        except (ValueError, AttributeError) as error:
            raise UserError(f"{path}: line {number} is not a record ({error}); remove the line") from error
        records.append(record)
    return records


def _read(path: Path) -> dict[str, Any]:
    return read_json(path, remedy="choose another folder")


def _last_session(records: list[dict[str, Any]]) -> int:
    return max((record["session"] for record in records), default=0)


def _write(path: Path, content: dict[str, Any]) -> None:
    write_file(path, json.dumps(content, indent=2) + "\n", name="")
