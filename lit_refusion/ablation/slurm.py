"""An ablation as Slurm jobs: each training, then its evaluations, then the report, each waiting for what it needs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from lit_refusion.ablation.plan import LOGS, Group
from lit_refusion.ablation.work import Work
from lit_refusion.errors import UserError

REPLACED = ("launcher", "only", "stages", "at_once", "seeds")
"""Settings of the user's command that its jobs give themselves."""


def submit(work: Work, found: Sequence[Group], overrides: Sequence[str]) -> Iterator[str]:
    """Submit what is missing; yields a line for each job.

    A training that fails does not keep the report from being written: that waits for the others' ends, however they
    end.

    Args:
        work: the ablation.
        found: its groups.
        overrides: settings of the `ablate` command, which the jobs repeat.
    """
    launcher = [text for text in overrides if text.lstrip("+").startswith("launcher")]
    jobs = []
    for group in found:
        trained = None
        if "train" in work.config.stages and not work.is_trained(group):
            trained = _submit_training(work.training(group)[0].arguments, launcher)
            yield f"{group.name}: training is job {trained}"
        if "evaluate" in work.config.stages and (trained or not work.is_evaluated(group)):
            cells = ",".join(dict.fromkeys(cell.arm for cell in group.cells))
            settings = [f"only=[{cells}]", f"seeds=[{group.cells[0].seed}]", "stages=[evaluate]"]
            after = [f"afterany:{trained}"] if trained else []  # it notes a training that has not ended
            jobs.append(_submit(work, overrides, name=group.name, settings=settings, after=after))
            yield f"{group.name}: its evaluation is job {jobs[-1]}"
    if "compare" in work.config.stages:
        after = ["afterany:" + ":".join(jobs)] if jobs else []
        settings = [f"seeds=[{','.join(map(str, work.config.seeds))}]", "stages=[compare]"]
        job = _submit(work, overrides, name="compare", settings=settings, after=after)
        yield f"the report is job {job}"


def _submit_training(arguments: Sequence[str], launcher: Sequence[str]) -> str:
    """Through `lit-refusion train launcher=slurm`, which asks for the training's nodes and goes on when cut off."""
    kept = [text for text in arguments if not text.startswith("trainer.progress=")]
    command = [sys.executable, "-m", "lit_refusion.cli", *kept, *launcher]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"ablate: the training could not be submitted: {reason}")
    return _number(done.stdout)


def _submit(work: Work, overrides: Sequence[str], *, name: str, settings: Sequence[str], after: Sequence[str]) -> str:
    """One task on one device that runs `lit-refusion ablate` again, for a part of the work."""
    kept = [text for text in overrides if text.lstrip("+~").split("=")[0].split(".")[0] not in REPLACED]
    options = ["--config-dir", work.config_dir] if work.config_dir else []
    own = ["launcher=local", "at_once=1", *settings]
    command = [sys.executable, "-m", "lit_refusion.cli", "ablate", *options, *kept, *own]
    folder = Path(work.config.out) / LOGS / name
    launcher = work.config.launcher
    return _number(launcher.submit(launcher.follow(command, name=name, folder=folder, after=after), folder))


def _number(text: str) -> str:
    """The job that `sbatch` speaks of."""
    found = re.search(r"\b(\d+)\b", text)
    if not found:
        raise UserError(f"launcher=slurm: sbatch named no job: {text.strip()!r}")
    return found.group(1)
