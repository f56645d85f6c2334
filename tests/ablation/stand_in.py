"""A program that stands in for `python -m lit_refusion.cli`: it notes what it is asked for, and has the results ready.

An ablation starts a process for every step, which needs seconds to import torch. What an ablation makes of such
processes does not depend on what they compute, so here they copy files. Like the real commands they refuse a folder
that holds something else.
"""

from __future__ import annotations

import json
import os
import select
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_refusion.ablation import step
from lit_refusion.commands import ablate
from lit_refusion.comparison import compare, statistics
from lit_refusion.config import config_folder, load_config
from tests.comparison.folders import make_evaluation, make_run, make_task

PROGRAM = """
import json, os, shutil, signal, sys
from pathlib import Path

here = Path(sys.argv[0]).parent
assert sys.argv[1:3] == ["-m", "lit_refusion.cli"]
command, *arguments = sys.argv[3:]
settings = dict(text.split("=", 1) for text in arguments if "=" in text)
target = Path(settings["run" if command == "train" else "out"])
name = "/".join(target.parts[-2:]) if command == "evaluate" else target.name


def listed(file):
    return (here / file).read_text().splitlines() if (here / file).exists() else []


def refuse(text):
    print(f"lit-refusion {command}: error: {text}")
    sys.exit(2)


with (here / "calls").open("a") as file:
    file.write(json.dumps([command, name, os.environ.get("OMP_NUM_THREADS"), sys.argv[3:]]) + "\\n")
print(f"{command} {name} of {os.getpid()}", flush=True)
if f"{command} {name}" in listed("failing"):
    refuse(f"{name} is not to my liking")
if f"{command} {name}" in listed("held"):
    signal.alarm(120)  # the end of one whose test has ended
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    (here / "waiting").write_text(f"{os.getpid()}\\n")  # a pipe: waits until somebody reads it
    signal.sigwait([signal.SIGINT])
    print("stopped; saved")
    sys.exit(130)
plain = sorted(text for text in arguments if not text.startswith(("run=", "resume=", "trainer.progress=")))
fixed = [text for text in plain if text.startswith("objective")]
if command == "train":
    known = json.loads((target / "weights").read_text()) if (target / "weights").exists() else {"fixed": fixed}
    if known["fixed"] != fixed:
        refuse("resume: the run has changed")
    shutil.copytree(here / "run", target, dirs_exist_ok=True)
    (target / "weights").write_text(json.dumps({"fixed": fixed, "plain": plain}))
elif command == "export":
    if target.exists():
        refuse(f"out={target}: it exists already")
    target.mkdir(parents=True)
    shutil.copy(Path(settings["run"]) / "weights", target)
else:
    own = json.dumps([plain, (Path(settings["model"]) / "weights").read_text()])
    target.mkdir(parents=True, exist_ok=True)
    if (target / "settings.json").exists() and (target / "settings.json").read_text() != own:
        refuse(f"out={target}: it holds another evaluation")
    (target / "settings.json").write_text(own)
    shutil.copytree(here / "evaluation", target, dirs_exist_ok=True)
"""
INTERPRETER = sys.executable
LONGEST_WAIT = 60
"""Seconds after which a process that does not come to its place fails the test."""
SETTINGS = config_folder() / "ablate.yaml"
LAUNCHERS: dict[str, dict[str, Any]] = {
    name: yaml.safe_load((config_folder() / "launcher" / f"{name}.yaml").read_text()) for name in ("local", "slurm")
}
EXPERIMENT: dict[str, Any] = {
    "train": ["data=prepared", "data.folder=nowhere"],
    "arms": {
        "ar": {"train": ["objective=ar"], "decode": ["decoder=ar"]},
        "bd3": {"train": ["objective=bd3"], "decode": ["decoder=bd3"]},
        "bd3_fast": {"train": ["objective=bd3"], "decode": ["decoder=sdar"]},
    },
    "tasks": {"words": []},
    "measure": {"num_problems": 0},
}


@dataclass
class Ablation:
    """An ablation in a folder, whose commands are the stand-in's.

    Args:
        folder: where it and the stand-in are.
        experiment: its YAML.
    """

    folder: Path
    experiment: dict[str, Any]

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def program(self) -> Path:
        return self.folder / "program" / "python"

    @property
    def configs(self) -> Path:
        return self.folder / "configs"

    def write(self) -> None:
        """The YAML as the experiment is now."""
        (self.configs / "experiment").mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump({"out": str(self.out), **self.experiment}, sort_keys=False)
        (self.configs / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}")

    def arguments(self, *overrides: str) -> list[str]:
        """The command line."""
        self.write()
        return ["ablate", "experiment=mine", "--config-dir", str(self.configs), *overrides]

    def run(self, *overrides: str, code: int = 0) -> list[str]:
        """Run it in this process; returns the steps that it has started now, as "COMMAND NAME"."""
        before = len(self.steps)
        self.write()
        assert ablate.start(["experiment=mine", *overrides], config_dir=str(self.configs)) == code
        return self.steps[before:]

    @property
    def calls(self) -> list[list[Any]]:
        """(command, name, threads, arguments) of all processes, in the order of their start."""
        path = self.program.with_name("calls")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def steps(self) -> list[str]:
        return [f"{command} {name}" for command, name, *_ in self.calls]

    def fail(self, *steps: str) -> None:
        """From now on these fail, and no others."""
        self.program.with_name("failing").write_text("\n".join(steps))

    def hold(self, *steps: str) -> None:
        """From now on these wait for a signal, and no others."""
        self.program.with_name("held").write_text("\n".join(steps))

    def wait(self, count: int = 1) -> list[int]:
        """Until so many processes are held; returns their numbers."""
        pipe, found = os.open(self.program.with_name("waiting"), os.O_RDWR | os.O_NONBLOCK), b""
        try:
            while found.count(b"\n") < count:
                assert select.select([pipe], [], [], LONGEST_WAIT)[0], "nothing is held"
                found += os.read(pipe, 1000)
        finally:
            os.close(pipe)
        return [int(line) for line in found.splitlines()]

    def arm(self, name: str) -> dict[str, Any]:
        """What its folder says of it."""
        return json.loads((self.out / "arms" / f"{name}-seed0" / "arm.json").read_text())

    def log(self, name: str) -> str:
        return (self.out / "logs" / f"{name}.log").read_text()


def make_stand_in(folder: Path) -> None:
    """The program, with a training and an evaluation for it to copy."""
    folder.mkdir()
    run = make_run(folder / "run")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "last.ckpt").touch()
    problems = make_task(folder / "problems.jsonl")
    make_evaluation(folder / "evaluation", problems=str(problems), result={"task.name": "words"})
    os.mkfifo(folder / "waiting")
    program = folder / "python"
    program.write_text(f"#!{INTERPRETER} -SE\n{PROGRAM}")
    program.chmod(0o755)


def use(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start it in place of this interpreter; without Hydra and pictures, which take longer than all the rest."""

    def experiment(command: str, overrides: list[str], *, extra_folder: str) -> dict[str, Any]:
        config = yaml.safe_load(SETTINGS.read_text()) | {"launcher": LAUNCHERS["local"]}
        own = yaml.safe_load((Path(extra_folder) / "experiment" / "mine.yaml").read_text())
        for text in overrides[1:]:
            name, _, value = text.partition("=")
            if not name.startswith("launcher."):
                own[name] = LAUNCHERS[value] if name == "launcher" else yaml.safe_load(value)
        measure = {**config["measure"], "threads": None, **own["measure"]}
        return {name: value for name, value in {**config, **own, "measure": measure}.items() if name != "defaults"}

    def names(command: str, overrides: list[str], *, extra_folder: str | None = None) -> dict[str, Any]:
        if wrong := [text for text in overrides if "no_such" in text]:
            return load_config(command, wrong, extra_folder=extra_folder)
        return {"overrides": list(overrides)}

    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(ablate, "load_config", experiment)
    monkeypatch.setattr(step, "load_config", names)
    monkeypatch.setattr(compare, "draw", lambda *_: [])
    monkeypatch.setattr(statistics, "RESAMPLES", 100)


def run_in(folder: Path, experiment: dict[str, Any], *overrides: str) -> int:
    """An ablation in a process of its own."""
    found = Ablation(folder, experiment)
    use(found.program, pytest.MonkeyPatch())
    return ablate.start(["experiment=mine", *overrides], config_dir=str(found.configs))
