"""Throughput in one process, arm by arm in turn on the same prompts: what noise remains hits all arms alike."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lit_refusion.chat import PromptFormat
from lit_refusion.comparison.arm import ArmRun, Evaluated
from lit_refusion.decoder import Decoder
from lit_refusion.errors import UserError
from lit_refusion.evaluation.task import Task
from lit_refusion.export import LoadedModel, load_model
from lit_refusion.new_file import write_file
from lit_refusion.origin import software
from lit_refusion.schema import build

THROUGHPUT = "throughput.json"


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """How throughput is measured.

    Args:
        num_problems: the first problems of each task; 0 measures nothing.
        repeats: rounds over all arms; the median counts.
        batch_sizes: rows that are decoded together.
        threads: of the process; null for what the environment says.
    """

    num_problems: int
    repeats: int
    batch_sizes: tuple[int, ...]
    threads: int | None

    def __post_init__(self) -> None:
        least = min((self.repeats, 1 if self.threads is None else self.threads, *self.batch_sizes))
        if self.num_problems < 0 or least < 1 or not self.batch_sizes:
            raise UserError(
                f"measure.num_problems={self.num_problems}, repeats={self.repeats}, batch_sizes="
                f"{list(self.batch_sizes)}, threads={self.threads}: num_problems must not be negative, the others must "
                "be at least 1"
            )


@dataclass(frozen=True)
class _Subject:
    """One arm, ready to decode."""

    model: LoadedModel
    decoder: Decoder
    prompts: list[list[int]]
    seed: int

    def tokens_per_second(self, batch_size: int) -> float:
        decoder = replace(self.decoder, batch_size=batch_size)
        start = time.perf_counter()
        found = decoder.generate(self.model.backbone, self.prompts, seed=self.seed)
        if self.model.backbone.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        return sum(len(generation.tokens) for generation in found) / seconds


def measure(
    runs: Sequence[ArmRun], config: MeasureConfig, *, path: Path, told: Callable[[str], None]
) -> dict[str, Any] | None:
    """Tokens per second of the first seed of each arm, on every task that all of them were evaluated on.

    Args:
        runs: the arms.
        config: how much.
        path: of the file that keeps the result; what was measured of the same is not measured again.
        told: gets a line for each task.

    Returns:
        By task, batch size and arm: the repeats, and the machine. None where nothing is to be measured.
    """
    first = {run.arm: run for run in reversed(runs) if run.evaluations}
    tasks = [task for run in first.values() for task in run.evaluations]
    tasks = [task for task in dict.fromkeys(tasks) if all(task in run.evaluations for run in first.values())]
    if not config.num_problems or not tasks:
        return None
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    arms = [arm for arm in dict.fromkeys(run.arm for run in runs) if arm in first]
    identity = {
        "measure": json.loads(json.dumps(asdict(config))),
        "arms": {arm: {task: _identity(first[arm].evaluations[task]) for task in tasks} for arm in arms},
        "software": software(),
    }
    found = _kept(path)
    if all(found.get(name) == value for name, value in identity.items()):
        return found
    result: dict[str, Any] = {**identity, "tasks": {}}
    models: dict[str, LoadedModel] = {}
    for task in tasks:
        told(f"measuring throughput: {task}, {len(arms)} arms in turn, {config.repeats} times")
        subjects = {arm: _subject(first[arm], task, config, models) for arm in arms}
        result["tasks"][task] = _rounds(subjects, config)
    write_file(path, json.dumps(result, indent=2) + "\n", name="out=")
    return result


def _kept(path: Path) -> dict[str, Any]:
    """What an earlier measurement has left; nothing of a damaged file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _rounds(subjects: dict[str, _Subject], config: MeasureConfig) -> dict[str, Any]:
    """{batch size: {arm: {tokens_per_second: median, repeats: [...]}}}."""
    found: dict[str, Any] = {}
    for size in config.batch_sizes:
        repeats: dict[str, list[float]] = {arm: [] for arm in subjects}
        for turn in range(config.repeats + 1):  # the first one warms up
            for arm, subject in subjects.items():
                speed = subject.tokens_per_second(size)
                if turn:
                    repeats[arm].append(speed)
        found[str(size)] = {
            arm: {"tokens_per_second": statistics.median(speeds), "repeats": speeds} for arm, speeds in repeats.items()
        }
    return found


def _identity(evaluated: Evaluated) -> dict[str, Any]:
    names = ("model", "weights_fingerprint", "decoder", "problems_fingerprint", "dtype", "device")
    return {name: evaluated.result[name] for name in names}


def _subject(run: ArmRun, task_name: str, config: MeasureConfig, models: dict[str, LoadedModel]) -> _Subject:
    result = run.evaluations[task_name].result
    path = result["model"]
    if path not in models:
        models[path] = load_model(path, objective=None, device=result["device"], dtype=result["dtype"])
    model = models[path]
    task = build(result["task"], Task, key="task")
    decoder = build(result["decoder"], Decoder, key="decoder").fit_to(model.spec)
    prompt_format = build(result["prompt_format"], PromptFormat, key="prompt_format")
    problems = task.problems(config.num_problems)
    return _Subject(model, decoder, task.prompts(problems, model.tokenizer, prompt_format), run.seed)
