"""Folders as training and evaluation leave them, made up: what a comparison reads, without a model."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_refusion.comparison.arm import ABLATION, ARM_FOLDERS, write_arm

CONFIG: dict[str, Any] = {
    "objective": {"_target_": "objectives.autoregressive.Autoregressive", "average": "example"},
    "backbone": {"path": None, "init_seed": 0},
    "data": {"folder": "runs/data", "sources": [{"name": "mine", "files": ["a.jsonl"], "subsets": []}]},
    "loader": {"micro_batch_size": 8, "max_training_examples": None},
    "optimizer": {"learning_rate": 0.003, "schedule": "cosine", "betas": [0.9, 0.98]},
    "trainer": {"max_steps": 6, "progress": "lines", "loggers": ["csv"]},
    "launcher": {"_target_": "lit_refusion.launcher.Local"},
    "run": "runs/mine",
    "resume": "auto",
    "seed": 0,
}
ORIGIN: dict[str, Any] = {
    "data": "d0",
    "tokenizer": "t0",
    "initial_weights": "w0",
    "parameters": 1300,
    "layer_parameters": 1000,
    "head_parameters": 300,
    "example_order": "o0",
    "steps": 6,
    "examples": 48,
    "tokens": 2400,
    "response_tokens": 900,
    "held_out": "h0",
    "software": {"torch": "2.0", "machine": "a laptop", "threads": "1"},
}
DECODER: dict[str, Any] = {
    "_target_": "decoders.autoregressive.AutoregressiveDecoder", "max_new_tokens": 16, "batch_size": 4,
    "temperature": 0.0, "top_k": 0, "top_p": 1.0, "stop_at_eos": True,
}  # fmt: skip


def changed(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with values at dotted names replaced."""
    copy = json.loads(json.dumps(content))
    for name, value in changes.items():
        *groups, last = name.split(".")
        node = copy
        for group in groups:
            node = node[group]
        node[last] = value
    return copy


def make_run(
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    origin: Mapping[str, Any] | None = None,
    last_step: int = 6,
    term: str = "ce/ar",
) -> Path:
    """A training of 6 steps, logged every second and validated every third; changes by dotted name."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(changed(CONFIG, config or {})))
    (folder / "origin.json").write_text(json.dumps(changed(ORIGIN, origin or {})))
    rows = [
        {"step": step, "train/loss": 6 / step, "train/tokens": 900, "train/supervised_tokens": 300,
         "train/seconds": 30, "train/peak_memory_gb": 0.25 * step}
        for step in range(2, last_step + 1, 2)
    ]  # fmt: skip
    for step in range(3, last_step + 1, 3):
        rows += [
            {"step": step, "val/nelbo": 9 / step},
            {"step": step, "val/loss": 6 / step, f"val/{term}": 5 / step, "val/loss/x": 1},
        ]
    with (folder / "metrics.csv").open("w", newline="") as file:
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: row["step"]))
    return folder


def make_task(path: Path, questions: Sequence[str] = ("What is 1 + 2?", "What is 2 + 2?", "What is 3 + 3?")) -> Path:
    """A file of problems."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"question": text, "answer": "3"}) + "\n" for text in questions))
    return path


def task(name: str, files: Sequence[str]) -> dict[str, Any]:
    """Settings of a task, as a result has them."""
    nothing = dict.fromkeys(
        ("hub", "subset", "id", "choices", "labels", "tests", "setup", "entry_point")
    )  # fmt: skip
    return {
        "_target_": "lit_refusion.evaluation.task.Task", "name": name, "files": list(files), "split": "test",
        "question": "question", "answer": "answer", "template": "{question}", "prefix": "", **nothing,
        "scorer": {"_target_": "lit_refusion.evaluation.scorers.Numeric", "pattern": None, "tolerance": 0.0},
    }  # fmt: skip


def make_evaluation(
    folder: Path,
    *,
    correct: Sequence[bool] = (True, False, True),
    texts: Sequence[str] | None = None,
    problems: str = "/nowhere.jsonl",
    result: Mapping[str, Any] | None = None,
    decoder: Mapping[str, Any] | None = None,
    tokens: int = 8,
    passes: int = 8,
) -> Path:
    """An evaluation, its records from the last problem to the first; the folder's name is that of the task."""
    content = {
        "model": "runs/model",
        "weights_fingerprint": "m0",
        "dtype": "float32",
        "device": "cpu",
        "task": task(folder.name, [problems]),
        "problems_fingerprint": "p0",
        "num_problems": len(correct),
        "prompt_format": {"style": "chat", "template_kwargs": {}},
        "seed": 0,
        "decoder": changed(DECODER, decoder or {}),
    }
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(changed(content, result or {})))
    records = [
        {"id": str(number), "prompt_tokens": 5, "text": texts[number] if texts else f"It is {number}.",
         "tokens": tokens, "forward_passes": passes, "stop": "eos", "is_correct": is_correct,
         "answer": str(number) if is_correct or number % 2 else None, "note": "", "statistics": {},
         "repeats_eos": False, "goes_on": False, "session": 1, "seconds": 1.0}
        for number, is_correct in enumerate(correct)
    ]  # fmt: skip
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records[::-1]))
    return folder


def make_trained(folder: Path, *, evaluation: Mapping[str, Any] | None = None, **run: Any) -> Path:
    """A training run with an evaluation below it, as `compare` takes it."""
    make_run(folder, **run)
    make_evaluation(folder / "evaluations" / "words", **(evaluation or {}))
    return folder


def make_ablation(folder: Path, arms: Sequence[str], *, seeds: Sequence[int] = (0,), tasks: Sequence[str] = ()) -> Path:
    """The frame of an ablation, without any arm."""
    folder.mkdir(parents=True)
    content = {"arms": list(arms), "seeds": list(seeds), "tasks": list(tasks), "command": ["lit-refusion", "ablate"]}
    (folder / ABLATION).write_text(json.dumps(content))
    return folder


def make_arm(
    out: Path,
    arm: str,
    seed: int = 0,
    *,
    run: Path | None = None,
    failure: str | None = None,
    **tasks: Mapping[str, Any],
) -> Path:
    """An arm of an ablation with an evaluation for each task, named by keyword."""
    folder = out / ARM_FOLDERS / f"{arm}-seed{seed}"
    for name, settings in tasks.items():
        make_evaluation(folder / name, **settings)
    write_arm(folder, arm=arm, seed=seed, run=run and os.path.relpath(run, folder), failure=failure)
    return folder
