"""What is compared: a training run and the evaluations of its model, read from their folders."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lit_refusion.errors import UserError
from lit_refusion.evaluation.evaluate import RECORDS, RESULT, read_records
from lit_refusion.new_file import read_json, write_file
from lit_refusion.origin import ORIGIN, read_origin

ARM, ABLATION, CONFIG, METRICS = "arm.json", "ablation.json", "config.json", "metrics.csv"
ARM_FOLDERS, EVALUATIONS = "arms", "evaluations"
NOT_RUN = "it has not been run"


@dataclass(frozen=True)
class Evaluated:
    """An evaluation that has ended.

    Args:
        result: what `result.json` holds.
        records: one for each problem, in the order of the problems' ids.
    """

    result: dict[str, Any]
    records: list[dict[str, Any]]

    @property
    def task(self) -> str:
        """Name of the task."""
        return str(self.result["task"]["name"])


@dataclass(frozen=True)
class ArmRun:
    """An arm with a seed.

    Args:
        arm: its name.
        seed: of training and decoding.
        run: folder of the training; None where a given model was decoded.
        evaluations: by task.
        failure: why it has no result; None where nothing failed.
    """

    arm: str
    seed: int
    run: Path | None
    evaluations: dict[str, Evaluated]
    failure: str | None

    @property
    def name(self) -> str:
        """With the seed."""
        return cell_name(self.arm, self.seed)

    @cached_property
    def origin(self) -> dict[str, Any] | None:
        """What the training was made of; None without one."""
        return None if self.run is None or not (self.run / ORIGIN).exists() else read_origin(self.run)

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """Settings of the training."""
        path = None if self.run is None else self.run / CONFIG
        return _json(path) if path is not None and path.exists() else None

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """The logged figures of the training, a row a logged step."""
        path = None if self.run is None else self.run / METRICS
        if path is None or not path.exists():
            return []
        with path.open(newline="", encoding="utf-8") as file:
            try:
                return [{name: float(x) for name, x in row.items() if name and x} for row in csv.DictReader(file)]
            except ValueError as error:
                raise UserError(f"{path}: cannot read it: {error}; remove the line") from error

    @property
    def last_step(self) -> int:
        """The last optimizer step that was logged."""
        return int(max((row["step"] for row in self.metrics), default=0))

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of a logged figure."""
        rows = [row for row in self.metrics if name in row]
        return [int(row["step"]) for row in rows], [row[name] for row in rows]

    def total(self, name: str) -> float | None:
        """Sum of a logged figure over the training; None where it was not logged."""
        values = self.curve(name)[1]
        return sum(values) if values else None


def cell_name(arm: str, seed: int) -> str:
    """Of an arm with a seed, and of its folder."""
    return f"{arm}-seed{seed}"


def write_arm(folder: Path, *, arm: str, seed: int, run: str | None, failure: str | None) -> None:
    """Say what an arm's folder is: `run` is the training's folder, seen from there."""
    content = {"arm": arm, "seed": seed, "run": run, "failure": failure}
    write_file(folder / ARM, json.dumps(content, indent=2) + "\n", name="out=")


def read_all(paths: Sequence[str]) -> list[ArmRun]:
    """The runs in these folders: of ablations, arms of one, or training runs with their evaluations.

    Raises:
        UserError: a folder is none of these, or two are called alike.
    """
    found = [run for path in paths for run in _read(Path(path))]
    for number, run in enumerate(found):
        if run.name in [other.name for other in found[:number]]:
            raise UserError(f"{run.name}: two of the runs are called so; rename the folder of one")
    return found


def read_plan(folder: Path) -> dict[str, Any] | None:
    """Arms, seeds, tasks and command of an ablation; None where the folder is none's."""
    path = folder / ABLATION
    return _json(path) if path.is_file() else None


def _read(path: Path) -> list[ArmRun]:
    if plan := read_plan(path):
        cells = [(arm, seed) for arm in plan["arms"] for seed in plan["seeds"]]
        found = [_read_cell(path / ARM_FOLDERS, arm, seed) for arm, seed in cells]
        return sorted(found, key=lambda run: run.failure == NOT_RUN)
    if (path / ARM).is_file():
        return [_read_arm(path)]
    if (path / ORIGIN).is_file():
        run = ArmRun(path.resolve().name, 0, path, _evaluations(path / EVALUATIONS), None)
        return [replace(run, seed=(run.config or {}).get("seed", 0))]
    raise UserError(
        f"{path}: not the folder of an ablation, of one of its arms, or of a training run (no {ABLATION}, {ARM} or "
        f"{ORIGIN} in it)"
    )


def _read_cell(folder: Path, arm: str, seed: int) -> ArmRun:
    own = folder / cell_name(arm, seed)
    return _read_arm(own) if (own / ARM).is_file() else ArmRun(arm, seed, None, {}, NOT_RUN)


def _read_arm(folder: Path) -> ArmRun:
    content = _json(folder / ARM)
    run = None if content["run"] is None else (folder / content["run"]).resolve()
    return ArmRun(content["arm"], content["seed"], run, _evaluations(folder), content["failure"])


def _evaluations(folder: Path) -> dict[str, Evaluated]:
    found = {}
    for result in sorted(folder.glob(f"*/{RESULT}")):
        records = sorted(read_records(result.with_name(RECORDS)), key=lambda record: record["id"])
        found[result.parent.name] = Evaluated(_json(result), records)
    return found


def _json(path: Path) -> dict[str, Any]:
    return read_json(path, remedy="run what wrote it again")
