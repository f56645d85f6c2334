"""Starting a run: here, or as a Slurm job that goes on by itself when it is cut off."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lit_refusion.callbacks.interrupt import INTERRUPTED
from lit_refusion.errors import UserError, first_line
from lit_refusion.world import World


def _key(override: str) -> str:
    """The first part of the key that an override sets."""
    return override.lstrip("+~").split("=")[0].split(".")[0]


@dataclass(frozen=True, kw_only=True)
class Launcher(ABC):
    """Where the processes of a run are started."""

    submits: ClassVar[bool]
    """Whether runs are handed to a scheduler, and so go on after the command has ended."""

    @abstractmethod
    def job(self, arguments: Sequence[str], run: Path, world: World) -> str | None:
        """The script to submit, which runs `lit-refusion train ARGUMENTS`; None to train in this process."""

    @abstractmethod
    def follow(self, command: Sequence[str], *, name: str, folder: Path, after: Sequence[str]) -> str:
        """The script of a single process that runs a command once other jobs have ended (`afterok:ID`)."""

    @abstractmethod
    def submit(self, script: str, run: Path) -> str:
        """Hand the script over; returns what the scheduler said."""


@dataclass(frozen=True, kw_only=True)
class Local(Launcher):
    """This process, under torchrun or srun where they started it."""

    submits: ClassVar[bool] = False

    def job(self, arguments: Sequence[str], run: Path, world: World) -> str | None:
        """Nothing to submit."""
        return None

    def follow(self, command: Sequence[str], *, name: str, folder: Path, after: Sequence[str]) -> str:
        """Never asked to."""
        raise AssertionError("a local run is not submitted")

    def submit(self, script: str, run: Path) -> str:
        """Never asked to."""
        raise AssertionError("a local run is not submitted")


@dataclass(frozen=True, kw_only=True)
class Slurm(Launcher):
    """One task a device through `sbatch` and `srun`.

    Slurm warns the tasks before the time limit (SIGUSR1) and on preemption (SIGTERM): they save, exit with 130, and the
    job is queued again; `resume=auto` goes on. A task that dies ends the job (`--kill-on-bad-exit`).

    Args:
        partition: queue; null for the cluster's default.
        account: null for the user's default.
        time: limit, as Slurm writes it, for example 24:00:00.
        cpus_per_task: cores of each task, loader workers included.
        gpus_per_node: GPUs to ask for; null for one a task, 0 on machines without.
        warning_seconds: how long before the limit the tasks are warned.
        extra: further lines of `#SBATCH`, without the prefix, for example ["--mem=0"].
        setup: shell lines before the run, for example ["module load cuda", "source .venv/bin/activate"].
    """

    submits: ClassVar[bool] = True

    partition: str | None
    account: str | None
    time: str
    cpus_per_task: int
    gpus_per_node: int | None
    warning_seconds: int
    extra: tuple[str, ...]
    setup: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in ("cpus_per_task", "warning_seconds"):
            if getattr(self, name) < 1:
                raise UserError(f"launcher.{name}={getattr(self, name)}: must be at least 1")

    def job(self, arguments: Sequence[str], run: Path, world: World) -> str | None:
        """The batch script."""
        gpus = world.devices if self.gpus_per_node is None else self.gpus_per_node
        more = [f"--signal=USR1@{self.warning_seconds}", "--requeue"]
        options = self._options(run.name, run, num_nodes=world.num_nodes, tasks=world.devices, gpus=gpus, more=more)
        kept = [text for text in arguments if _key(text) not in ("launcher", "dry_run", "resume")]
        resume = "resume=force" if "resume=force" in arguments else "resume=auto"
        command = [sys.executable, "-m", "lit_refusion.cli", "train", *kept, "launcher=local", resume]
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH {shlex.quote(option)}" for option in options),
            "set -u",
            *self.setup,
            f"srun --kill-on-bad-exit=1 {shlex.join(command)}",
            "code=$?",
            f"if [ $code -eq {INTERRUPTED} ]; then  # stopped by Slurm's warning, state saved",
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            "exit $code",
        ]
        return "\n".join(lines) + "\n"

    def follow(self, command: Sequence[str], *, name: str, folder: Path, after: Sequence[str]) -> str:
        """The batch script of one task; on one GPU, where trainings ask for any."""
        gpus = 1 if self.gpus_per_node is None else min(1, self.gpus_per_node)
        more = [f"--dependency={','.join(after)}"] if after else []
        options = self._options(name, folder, num_nodes=1, tasks=1, gpus=gpus, more=more)
        lines = ["#!/bin/bash", *(f"#SBATCH {shlex.quote(option)}" for option in options), "set -u", *self.setup]
        return "\n".join([*lines, f"exec {shlex.join(command)}"]) + "\n"

    def _options(self, name: str, folder: Path, *, num_nodes: int, tasks: int, gpus: int, more: list[str]) -> list[str]:
        """What every job asks for, on each of its nodes."""
        return [
            f"--job-name={name}",
            f"--nodes={num_nodes}",
            f"--ntasks-per-node={tasks}",
            f"--cpus-per-task={self.cpus_per_task}",
            f"--time={self.time}",
            f"--output={folder}/slurm-%j.log",
            *more,
            "--open-mode=append",
            *([f"--gpus-per-node={gpus}"] if gpus else []),
            *([f"--partition={self.partition}"] if self.partition else []),
            *([f"--account={self.account}"] if self.account else []),
            *self.extra,
        ]

    def submit(self, script: str, run: Path) -> str:
        """Write `submit.sbatch` into the run folder and give it to `sbatch`."""
        run.mkdir(parents=True, exist_ok=True)
        path = run / "submit.sbatch"
        path.write_text(script, encoding="utf-8")
        if shutil.which("sbatch") is None:
            raise UserError(f"launcher=slurm: there is no sbatch here; {path} is written, submit it on the cluster")
        done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"launcher=slurm: sbatch refuses {path}: {first_line(RuntimeError(done.stderr))}")
        return done.stdout.strip()
