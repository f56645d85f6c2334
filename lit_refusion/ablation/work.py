"""Running an ablation on this machine: group by group, some at a time; what is finished stays finished."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lit_refusion.ablation.child import Children
from lit_refusion.ablation.plan import LOGS, RUNS, AblateConfig, Cell, Group
from lit_refusion.ablation.step import Step
from lit_refusion.comparison.arm import ABLATION, ARM_FOLDERS, CONFIG, read_plan, write_arm
from lit_refusion.comparison.control import training_settings
from lit_refusion.errors import UserError
from lit_refusion.evaluation.evaluate import RESULT
from lit_refusion.new_file import read_json, write_file
from lit_refusion.origin import has_ended
from lit_refusion.run_folder import LAST, checkpoint_path

MARKERS = "done"


@dataclass(frozen=True, kw_only=True)
class Work:
    """The steps of an ablation.

    Args:
        config: the ablation.
        config_dir: folder of further YAML groups.
    """

    config: AblateConfig
    config_dir: str | None

    def training(self, group: Group) -> list[Step]:
        """The training; nothing where the model is given."""
        if group.train is None:
            return []
        product = checkpoint_path(self.run_folder(group), LAST)
        return [self._step("train", (*group.train, "trainer.progress=lines"), f"{group.name}.train", product)]

    def is_trained(self, group: Group) -> bool:
        """Whether there is nothing to train (any more), also where a job of its own has done it."""
        if group.train is None:
            return True
        step, run = self.training(group)[0], self.run_folder(group)
        if step.is_done():
            return True
        if not has_ended(run):
            return False
        found = read_json(run / CONFIG, remedy="train it again into another folder")
        return training_settings(found) == training_settings(json.loads(step.content())["config"])

    def export(self, group: Group) -> list[Step]:
        """The export; nothing where the model is given."""
        if group.train is None:
            return []
        settings = (f"run={self.run_folder(group)}", f"checkpoint={self.config.checkpoint}", f"out={group.model}")
        model = Path(group.model)
        return [self._step("export", settings, f"{group.name}.export", model, folder=model)]

    def run_folder(self, group: Group) -> Path:
        """Of a group's training."""
        return Path(self.config.out) / RUNS / group.name

    def cell_steps(self, group: Group, cell: Cell) -> list[Step]:
        """An evaluation for each task."""
        steps = []
        for task, settings in self.config.tasks.items():
            out = self.folder(cell) / task
            overrides = (
                f"model={group.model}",
                f"seed={cell.seed}",
                *settings,
                *self.config.decode,
                *self.config.arms[cell.arm].decode,
                f"out={out}",
            )
            source = Path(group.model) if group.train is None else None
            name = f"{cell.name}.{task}"
            steps.append(self._step("evaluate", overrides, name, out / RESULT, folder=out, source=source))
        return steps

    def is_evaluated(self, group: Group) -> bool:
        """Whether all of its evaluations are done."""
        return all(step.is_done() for cell in group.cells for step in self.cell_steps(group, cell))

    def folder(self, cell: Cell) -> Path:
        """Of a cell's evaluations."""
        return Path(self.config.out) / ARM_FOLDERS / cell.name

    def run(self, group: Group, children: Children, environment: dict[str, str], lock: int) -> dict[str, str]:
        """Run what is missing of a group, whose lock the commands inherit; returns the failures by cell."""
        evaluations = {cell: self.cell_steps(group, cell) for cell in group.cells}
        later = [step for cell in (*group.cells, *group.others) for step in self.cell_steps(group, cell)]

        def perform(steps: Sequence[Step], name: str, *, later: Sequence[Step]) -> None:
            for step in steps:
                if not step.is_done():
                    for other in later:  # they are made of this one
                        other.discard()
                    step.begin()
                    log = Path(self.config.out) / LOGS / f"{name}.log"
                    children.run(step.arguments, name=name, log=log, environment=environment, lock=lock)
                    step.finish()

        failures = {}
        try:
            if "train" in self.config.stages and not self.is_trained(group):
                perform(self.training(group), group.name, later=[*self.export(group), *later])
            if "evaluate" in self.config.stages:
                if not self.is_trained(group):
                    raise UserError(f"{self.run_folder(group)}: its training has not ended; add train to stages")
                perform(self.export(group), group.name, later=later)
        except UserError as error:
            failures = {cell.name: str(error) for cell in group.cells}
        for cell, steps in evaluations.items():
            self._note(group, cell, failures.get(cell.name))
            if "evaluate" in self.config.stages and cell.name not in failures:
                try:
                    perform(steps, cell.name, later=[])
                except UserError as error:
                    failures[cell.name] = str(error)
                    self._note(group, cell, str(error))
        return failures

    def _note(self, group: Group, cell: Cell, failure: str | None) -> None:
        """Write what a cell is, and why it failed if it did."""
        run = None if group.train is None else os.path.relpath(self.run_folder(group), self.folder(cell))
        write_arm(self.folder(cell), arm=cell.arm, seed=cell.seed, run=run, failure=failure)

    def _step(
        self,
        command: str,
        overrides: Sequence[str],
        name: str,
        product: Path,
        *,
        folder: Path | None = None,
        source: Path | None = None,
    ) -> Step:
        marker = Path(self.config.out) / MARKERS / f"{name}.json"
        return Step(
            command=command,
            overrides=tuple(overrides),
            marker=marker,
            product=product,
            folder=folder,
            source=source,
            config_dir=self.config_dir,
        )


def run_all(work: Work, found: Sequence[Group], *, on_start: Callable[[], None]) -> dict[str, str]:
    """Run all groups, `at_once` at a time; returns the failures by cell.

    Args:
        work: the ablation.
        found: its groups.
        on_start: called when nothing stands against it any more.

    Raises:
        KeyboardInterrupt: SIGINT or SIGTERM came; the commands have saved and ended.
        UserError: settings of a command are wrong, or another process is at work in the folder.
    """
    for group in found:  # before anything is started
        evaluations = (step for cell in group.cells for step in work.cell_steps(group, cell))
        for step in [*work.training(group), *work.export(group), *evaluations]:
            try:
                step.content()
            except UserError as error:
                raise UserError(f"{step.marker.stem}: {error}") from error
    failures: dict[str, str] = {}
    slots: queue.Queue[dict[str, str]] = queue.Queue()
    for environment in environments(work.config.at_once, work.config.threads):
        slots.put(environment)
    with locked(Path(work.config.out), [group.name for group in found]) as locks:
        on_start()
        children = Children()

        def one(group: Group) -> dict[str, str]:
            environment = slots.get()
            try:
                return work.run(group, children, environment, locks[group.name])
            finally:
                slots.put(environment)

        with stopping(children), ThreadPoolExecutor(work.config.at_once) as pool:
            futures = [pool.submit(one, group) for group in found]
            for future in as_completed(futures):
                failures |= future.result()
    return failures


@contextmanager
def stopping(children: Children) -> Iterator[None]:
    """SIGINT and SIGTERM stop the commands; a second one is left to its default."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def stop(*_: Any) -> None:
        for number in numbers:
            signal.signal(number, before[number])
        children.stop()

    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, before[number])


@contextmanager
def locked(folder: Path, names: Sequence[str]) -> Iterator[dict[str, int]]:
    """Locks on groups of an ablation, by name; jobs on other groups have their own.

    Raises:
        UserError: somebody else has one of them.
    """
    (folder / MARKERS).mkdir(parents=True, exist_ok=True)
    locks: dict[str, int] = {}
    try:
        for name in names:
            locks[name] = os.open(folder / MARKERS / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(locks[name], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"out={folder}: another ablation, or a command that one has left behind, is at work on {name} "
                    "there; wait for it or end it"
                ) from error
        yield locks
    finally:
        for lock in locks.values():
            os.close(lock)


def environments(at_once: int, threads: int | None) -> list[dict[str, str]]:
    """Variables of the commands of each slot: threads, and a share of the GPUs where several run at once."""
    own = threads or max(1, (os.cpu_count() or 1) // at_once)
    shares: list[dict[str, str]] = [{"OMP_NUM_THREADS": str(own)} for _ in range(at_once)]
    devices = _devices()
    if at_once > 1 and devices:
        if len(devices) < at_once:
            raise UserError(f"at_once={at_once}: there are only {len(devices)} GPUs; lower it")
        for number, share in enumerate(shares):
            share["CUDA_VISIBLE_DEVICES"] = ",".join(devices[number::at_once])
    return shares


def _devices() -> list[str]:
    """The GPUs of this process, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    return [str(number) for number in range(torch.cuda.device_count())]


def write_plan(config: AblateConfig, overrides: Sequence[str]) -> None:
    """Note arms, their order and the whole command, for the report; a report by itself leaves the command as it was."""
    folder = Path(config.out)
    command = ["lit-refusion", "ablate", *(text for text in overrides if not text.startswith(("only=", "stages=")))]
    if config.stages == ("compare",) and (plan := read_plan(folder)):
        command = plan["command"]
    content = {
        "arms": list(config.arms),
        "seeds": list(config.seeds),
        "tasks": list(config.tasks),
        "command": command,
    }
    write_file(folder / ABLATION, json.dumps(content, indent=2) + "\n", name="out=")
