"""An ablation as Slurm jobs, under stand-ins for sbatch and for the interpreter."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_refusion.ablation import work
from lit_refusion.cli import main
from lit_refusion.errors import UserError
from tests.ablation.stand_in import INTERPRETER, Ablation
from tests.test_launcher import fake, options, path_with, told

OTHERS = ["launcher.partition=gpu", 'launcher.extra=["--mem=0"]', "launcher.setup=[]"]
TRAINER = """
import json, sys
from pathlib import Path

here = Path(sys.argv[0]).parent
calls = here / "calls"
count = len(calls.read_text().splitlines()) if calls.exists() else 0
with calls.open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if (here / "refusal").exists():
    sys.exit((here / "refusal").read_text())
print(f"Submitted batch job {100 + count}")
"""


class Cluster:
    """Numbers trainings from 100 and other jobs from 1."""

    def __init__(self, ablation: Ablation) -> None:
        self.ablation = ablation
        self.programs = ablation.folder / "bin"
        count = f'$(wc -l < "{self.programs}/sbatch.txt")'
        fake(self.programs, "sbatch", f'cp "$1" "{self.programs}/{count}.sbatch"; echo Submitted batch job {count}')
        self.trainer = ablation.folder / "trainer" / "python"
        self.trainer.parent.mkdir()
        self.trainer.write_text(f"#!{INTERPRETER} -SE\n{TRAINER}")
        self.trainer.chmod(0o755)

    def trainings(self) -> list[list[str]]:
        """Arguments of the `train` commands."""
        calls = self.trainer.with_name("calls")
        return [json.loads(line)[2:] for line in calls.read_text().splitlines()] if calls.exists() else []

    def jobs(self) -> list[str]:
        """Scripts of the others."""
        count = len(told(self.programs, "sbatch"))
        return [(self.programs / f"{number}.sbatch").read_text() for number in range(1, count + 1)]


@pytest.fixture
def cluster(ablation: Ablation, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster(ablation)
    monkeypatch.setattr(sys, "executable", str(cluster.trainer))
    monkeypatch.setenv("PATH", path_with(cluster.programs))
    return cluster


def dependencies(script: str) -> list[str]:
    return [option.partition("=")[2] for option in options(script) if option.startswith("--dependency")]


def command(script: str) -> list[str]:
    """What a job runs, behind `ablate`."""
    line = next(line for line in script.splitlines() if line.startswith("exec "))
    words = shlex.split(line)
    assert words[2:5] == ["-m", "lit_refusion.cli", "ablate"]
    return words[5:]


def test_every_training_is_a_job_its_evaluation_waits_for_it_and_the_report_for_all(
    ablation: Ablation, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    ablation.run("seeds=[0,4]", "launcher=slurm")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["ar-seed0: training is job 100", "ar-seed0: its evaluation is job 1"]
    assert lines[-1] == "the report is job 5"
    assert len(lines) == 9
    names = ["ar-seed0", "bd3-seed0", "ar-seed4", "bd3-seed4"]
    for arguments, name in zip(cluster.trainings(), names, strict=True):
        assert f"run={ablation.out}/runs/{name}" in arguments
        assert "launcher=slurm" in arguments
        assert "trainer.progress=lines" not in arguments
    *evaluations, report = cluster.jobs()
    assert [dependencies(script) for script in evaluations] == [[f"afterany:{100 + number}"] for number in range(4)]
    assert dependencies(report) == ["afterany:1:2:3:4"]
    assert "--gpus-per-node=1" in options(evaluations[0])
    assert [option for option in options(evaluations[1]) if option.startswith("--output")] == [
        f"--output={ablation.out}/logs/bd3-seed0/slurm-%j.log"
    ]


def test_jobs_repeat_the_command_for_their_part_of_it(ablation: Ablation, cluster: Cluster) -> None:
    ablation.run("seeds=[0,4]", "launcher=slurm", "at_once=2", "threads=3", "only=[bd3,bd3_fast]")
    first, _, report = map(command, cluster.jobs())
    same = ["--config-dir", str(ablation.configs), "experiment=mine", "threads=3", "launcher=local", "at_once=1"]
    assert first == [*same, "only=[bd3,bd3_fast]", "seeds=[0]", "stages=[evaluate]"]
    assert report == [*same, "seeds=[0,4]", "stages=[compare]"]


def test_a_job_does_its_part_of_the_work(ablation: Ablation, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the submission to results: the jobs' own command lines, one after the other."""
    ablation.run("launcher=slurm")
    monkeypatch.setattr(sys, "executable", str(ablation.program))

    def job(script: str, code: int = 0) -> list[str]:
        return ablation.run(*command(script)[3:], code=code)

    one, two, report = cluster.jobs()
    monkeypatch.setattr(work, "has_ended", lambda run: run.name == "bd3-seed0")
    trained = ablation.out / "runs" / "bd3-seed0"
    trained.mkdir(parents=True)
    (trained / "config.json").write_text(json.dumps({"overrides": cluster.trainings()[1][3:-1]}))
    (trained / "weights").write_text("some")
    monkeypatch.setattr(work, "training_settings", lambda config: "objective=bd3" in config["overrides"])
    assert job(one, code=1) == []
    assert job(two) == ["export bd3-seed0", "evaluate bd3-seed0/words", "evaluate bd3_fast-seed0/words"]
    assert job(report, code=1) == []
    text = (ablation.out / "report" / "report.md").read_text()
    assert f"> - ar-seed0: {ablation.out}/runs/ar-seed0: its training has not ended" in text
    assert "| bd3_fast | 66.7%" in text
    assert "\nlit-refusion ablate experiment=mine launcher=slurm\n" in text


def test_what_is_finished_is_not_submitted_again(
    ablation: Ablation, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(ablation.program))
        ablation.run("stages=[train]")
        ablation.run("stages=[evaluate]", "only=[ar]")
    capsys.readouterr()
    ablation.run("launcher=slurm")
    assert cluster.trainings() == []
    assert capsys.readouterr().out.splitlines() == ["bd3-seed0: its evaluation is job 1", "the report is job 2"]
    assert [dependencies(script) for script in cluster.jobs()] == [[], ["afterany:1"]]


def test_stages_choose_the_jobs(ablation: Ablation, cluster: Cluster) -> None:
    ablation.run("launcher=slurm", "stages=[train]")
    assert len(cluster.trainings()) == 2
    assert cluster.jobs() == []
    ablation.run("launcher=slurm", "stages=[compare]")
    (report,) = cluster.jobs()
    assert dependencies(report) == []


def test_a_refused_training_is_one_line(ablation: Ablation, cluster: Cluster) -> None:
    cluster.trainer.with_name("refusal").write_text("warning\nlit-refusion train: error: invalid partition")
    with pytest.raises(UserError) as caught:
        ablation.run("launcher=slurm")
    assert str(caught.value) == (
        "ablate: the training could not be submitted: lit-refusion train: error: invalid partition"
    )


def test_the_training_that_is_handed_to_slurm_is_a_command_line_that_slurm_gets(
    ablation: Ablation, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real `train` takes the arguments, and submits a script with the same settings."""
    ablation.run(*OTHERS, "launcher=slurm", "only=[ar]", "stages=[train]")
    (arguments,) = cluster.trainings()
    assert arguments[-4:] == [*OTHERS, "launcher=slurm"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Submitted batch job 1"
    (script,) = cluster.jobs()
    assert "--partition=gpu" in options(script)
    assert "--mem=0" in options(script)
    words: list[Any] = shlex.split(next(line for line in script.splitlines() if line.startswith("srun ")))
    assert words[6:8] == ["--config-dir", str(ablation.configs)]
    assert "launcher=local" in words
    assert "resume=auto" in words
    assert Path(ablation.out, "runs", "ar-seed0", "submit.sbatch").is_file()
