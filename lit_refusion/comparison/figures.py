"""The figures of a comparison: one row an arm and task, one row an arm for what its training cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lit_refusion.comparison.arm import ArmRun
from lit_refusion.comparison.statistics import Difference, Interval, difference, score_interval
from lit_refusion.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Score:
    """An arm on a task, over its seeds.

    Args:
        task: name of the task.
        arm: name of the arm.
        seeds: seeds that were evaluated.
        problems: problems of each.
        score: share of right answers.
        against: the baseline's; None for the baseline itself, and where it was not evaluated on the same problems.
        tokens_per_forward: all kept tokens / all forward passes.
        tokens_per_answer: mean length.
        forward_passes_per_answer: mean passes.
        invalid: share of answers that no scorer could read.
        tokens_per_second: by batch size: the median of interleaved repeats of the first seed; empty if not measured.
        speedup: the same as a multiple of the baseline's.
    """

    task: str
    arm: str
    seeds: tuple[int, ...]
    problems: int
    score: Interval
    against: Difference | None
    tokens_per_forward: float
    tokens_per_answer: float
    forward_passes_per_answer: float
    invalid: float
    tokens_per_second: dict[int, float]
    speedup: dict[int, float]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What the training of an arm took, the mean of its seeds.

    Args:
        arm: name of the arm.
        steps: optimizer steps.
        tokens: of the examples seen.
        row_tokens: of the rows that the objective made of them: copies and learned padding count.
        supervised_tokens: rows with a loss.
        flops: of matrix products, forward and backward: 6 x parameters of the layers x row tokens + 6 x those of the
            head x supervised tokens. Attention scores and recomputed activations are left out.
        seconds: of training, without validation and without what an interruption lost.
        peak_memory: in bytes, of one device; on the CPU that of the process, libraries included.
        nelbo: the last `val/nelbo`, in nats per response token; None where it was not measured.
    """

    arm: str
    steps: int
    tokens: float
    row_tokens: float
    supervised_tokens: float
    flops: float
    seconds: float
    peak_memory: float
    nelbo: float | None


def arms(runs: Sequence[ArmRun]) -> list[str]:
    """Names of the arms, in order."""
    return list(dict.fromkeys(run.arm for run in runs))


def tasks(runs: Sequence[ArmRun]) -> list[str]:
    """Names of the tasks, in order."""
    return list(dict.fromkeys(task for run in runs for task in run.evaluations))


def scores(runs: Sequence[ArmRun], *, baseline: str, throughput: dict[str, Any] | None, seed: int) -> list[Score]:
    """The rows of all tasks; `seed` is the bootstrap's."""
    found = []
    for task in tasks(runs):
        speeds = (throughput or {"tasks": {}})["tasks"].get(task, {})
        for arm in arms(runs):
            own = _evaluated(runs, arm, task)
            if own:
                found.append(_score(task, arm, own, _evaluated(runs, baseline, task), baseline, speeds, seed))
    return found


def _evaluated(runs: Sequence[ArmRun], arm: str, task: str) -> list[ArmRun]:
    return [run for run in runs if run.arm == arm and task in run.evaluations]


def _score(
    task: str, arm: str, own: list[ArmRun], reference: list[ArmRun], baseline: str, speeds: dict[str, Any], seed: int
) -> Score:
    correct = outcomes(own, task)
    records = [record for run in own for record in run.evaluations[task].records]
    tokens, passes = (sum(record[name] for record in records) for name in ("tokens", "forward_passes"))
    against = None
    if arm != baseline and _comparable(own, reference, task):
        against = difference(correct, outcomes(reference, task), seed=seed)
    measured = {int(size): found for size, found in speeds.items() if arm in found}
    medians = {size: found[arm]["tokens_per_second"] for size, found in measured.items()}
    return Score(
        task=task,
        arm=arm,
        seeds=tuple(run.seed for run in own),
        problems=correct.shape[1],
        score=score_interval(correct, seed=seed),
        against=against,
        tokens_per_forward=tokens / max(1, passes),
        tokens_per_answer=tokens / len(records),
        forward_passes_per_answer=passes / len(records),
        invalid=sum(record["answer"] is None for record in records) / len(records),
        tokens_per_second=medians,
        speedup={size: _ratio(found, arm, baseline) for size, found in measured.items() if baseline in found},
    )


def _ratio(found: dict[str, Any], arm: str, baseline: str) -> float:
    """Median over the rounds of the ratio within a round."""
    pairs = zip(found[arm]["repeats"], found[baseline]["repeats"], strict=True)
    return float(np.median([own / reference for own, reference in pairs]))


def outcomes(runs: Sequence[ArmRun], task: str) -> np.ndarray:
    """[S, N] whether each problem was answered right, problems in the order of their ids.

    Raises:
        UserError: the seeds of an arm were evaluated on different problems.
    """
    names = [[record["id"] for record in run.evaluations[task].records] for run in runs]
    for run, own in zip(runs, names, strict=True):
        if own != names[0]:
            raise UserError(
                f"{run.name}: evaluated on other problems of {task} than {runs[0].name}; evaluate both on the same"
            )
    return np.array([[record["is_correct"] for record in run.evaluations[task].records] for run in runs], np.float64)


def _comparable(own: list[ArmRun], reference: list[ArmRun], task: str) -> bool:
    """Whether the two have the same seeds and problems."""
    if [run.seed for run in own] != [run.seed for run in reference]:
        return False
    first, second = own[0].evaluations[task], reference[0].evaluations[task]
    return [record["id"] for record in first.records] == [record["id"] for record in second.records]


def costs(runs: Sequence[ArmRun]) -> list[Cost]:
    """What the trainings took, arm by arm; arms that were not trained are left out."""
    found = []
    for arm in arms(runs):
        own = [run for run in runs if run.arm == arm and run.origin is not None and run.metrics]
        if own:
            found.append(_cost(arm, own))
    return found


def _cost(arm: str, runs: list[ArmRun]) -> Cost:
    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    origins = [run.origin or {} for run in runs]
    row_tokens, supervised, seconds = (
        mean([_summed(run, name) for run in runs]) for name in ("tokens", "supervised_tokens", "seconds")
    )
    nelbo = [run.curve("val/nelbo")[1][-1] for run in runs if run.curve("val/nelbo")[1]]
    return Cost(
        arm=arm,
        steps=runs[0].last_step,
        tokens=mean([origin["tokens"] * run.last_step / origin["steps"] for run, origin in zip(runs, origins)]),
        row_tokens=row_tokens,
        supervised_tokens=supervised,
        flops=6 * (origins[0]["layer_parameters"] * row_tokens + origins[0]["head_parameters"] * supervised),
        seconds=seconds,
        peak_memory=1e9 * max(value for run in runs for value in [*run.curve("train/peak_memory_gb")[1], 0.0]),
        nelbo=mean(nelbo) if len(nelbo) == len(runs) else None,
    )


def _summed(run: ArmRun, name: str) -> float:
    """Sum over all steps; those between the last logged row and an interruption are taken to be like the others."""
    total, covered = run.total(f"train/{name}") or 0.0, run.total("train/steps")
    return total * run.last_step / covered if covered else total


def plain(rows: Sequence[Score | Cost]) -> list[dict[str, Any]]:
    """For JSON."""
    return [asdict(row) for row in rows]
