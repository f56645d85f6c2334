"""What an ablation consists of: arms, seeds and tasks, and which of them share a training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lit_refusion.comparison.arm import cell_name
from lit_refusion.comparison.throughput import MeasureConfig
from lit_refusion.errors import UserError
from lit_refusion.launcher import Launcher

Stage = Literal["train", "evaluate", "compare"]
RUNS, MODELS, LOGS, REPORT = "runs", "models", "logs", "report"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of training and decoding.

    Args:
        train: settings of `lit-refusion train`, behind those of all arms. Arms with equal settings share the training.
        decode: settings of `lit-refusion evaluate`, behind those of all arms.
    """

    train: tuple[str, ...]
    decode: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class AblateConfig:
    """An ablation.

    Args:
        out: folder of everything that comes of it.
        model: exported folder or hub id that arms without settings of training decode; null to train one for them.
        train: settings of `lit-refusion train` for all arms.
        decode: settings of `lit-refusion evaluate` for all arms.
        arms: by name, in the order of the report.
        seeds: each arm is trained and evaluated once with each.
        tasks: settings of `lit-refusion evaluate`, by name; they choose the task and how much of it.
        checkpoint: the checkpoint that is evaluated.
        baseline: arm that the others are measured against; null for the first.
        allow: settings in which arms may differ on purpose, beside objective and decoder; see `compare`.
        measure: how throughput is measured.
        at_once: trainings under way at a time on this machine, each on its share of the cores and GPUs.
        threads: of each process; null for an equal share of the cores.
        only: names of the arms to run now; all for an empty list.
        stages: of them, the ones to run now.
        launcher: where the trainings run.
    """

    out: str
    model: str | None
    train: tuple[str, ...]
    decode: tuple[str, ...]
    arms: dict[str, Arm]
    seeds: tuple[int, ...]
    tasks: dict[str, tuple[str, ...]]
    checkpoint: Literal["best", "last"]
    baseline: str | None
    allow: tuple[str, ...]
    measure: MeasureConfig
    at_once: int
    threads: int | None
    only: tuple[str, ...]
    stages: tuple[Stage, ...]
    launcher: Launcher

    def __post_init__(self) -> None:
        if not self.out or not self.arms or not self.seeds or not self.tasks:
            raise UserError(
                "ablate: give experiment=..., or out, arms, seeds and tasks; one of them is empty "
                f"(out={self.out!r}, {len(self.arms)} arms, {len(self.seeds)} seeds, {len(self.tasks)} tasks)"
            )
        if self.at_once < 1 or (self.threads is not None and self.threads < 1):
            raise UserError(f"at_once={self.at_once}, threads={self.threads}: must be at least 1")
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise UserError(f"seeds={list(self.seeds)}: each must be there once, and not be negative")
        if not self.stages:
            raise UserError("stages=[]: give some of train, evaluate, compare")
        for key, arm in [("only", arm) for arm in self.only] + [("baseline", self.baseline)]:
            if arm is not None and arm not in self.arms:
                raise UserError(f"{key}={arm}: no such arm; there are {', '.join(self.arms)}")
        for key, name in [("arms", name) for name in self.arms] + [("tasks", name) for name in self.tasks]:
            if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
                raise UserError(f"{key}.{name}: a name may have letters, digits, '_', '-' and '.' only")
        for name in ("train", "export"):
            if name in self.tasks:
                raise UserError(f"tasks.{name}: choose another name, a step of the ablation is called so")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """An arm with a seed.

    Args:
        arm: name of the arm.
        seed: of training and decoding.
    """

    arm: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return cell_name(self.arm, self.seed)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cells that decode one model.

    Args:
        name: of the training: that of its first cell.
        train: settings of `lit-refusion train`; None where the model is given.
        model: where the model is, or will be exported to.
        cells: in the order of the arms.
        others: further cells that decode the model, which are not asked for now.
    """

    name: str
    train: tuple[str, ...] | None
    model: str
    cells: tuple[Cell, ...]
    others: tuple[Cell, ...] = ()


def groups(config: AblateConfig) -> list[Group]:
    """The trainings, or given models, of an ablation, each with what is decoded from it."""
    found: dict[tuple[object, int], list[Cell]] = {}
    for seed in config.seeds:
        for name, arm in config.arms.items():
            found.setdefault((arm.train, seed), []).append(Cell(arm=name, seed=seed))
    out = Path(config.out)
    result = []
    for cells in found.values():
        first, arm = cells[0], config.arms[cells[0].arm]
        settings = (*config.train, *arm.train, f"seed={first.seed}", f"run={out / RUNS / first.name}", "resume=auto")
        is_given = config.model is not None and not arm.train
        result.append(
            Group(
                name=first.name,
                train=None if is_given else settings,
                model=str(config.model) if is_given else str(out / MODELS / first.name),
                cells=tuple(cells),
            )
        )
    return result


def chosen(found: Sequence[Group], only: Sequence[str]) -> list[Group]:
    """The groups cut to the arms of `only`; all for an empty one."""
    if not only:
        return list(found)
    cut = []
    for group in found:
        cells, others = (tuple(cell for cell in group.cells if (cell.arm in only) is asked) for asked in (True, False))
        cut.append(replace(group, cells=cells, others=others))
    return [group for group in cut if group.cells]
