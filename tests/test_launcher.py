"""The Slurm launcher: its script, the script's life under stand-ins for srun and scontrol, and submitting it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_refusion.cli import main
from lit_refusion.errors import UserError
from lit_refusion.launcher import Local, Slurm
from lit_refusion.world import World

WORLD = World(devices=4, num_nodes=2)
PLAIN = ["objective=refusion", "data.folder=some where/data", "objective.slot_sizes=[4, 8]", "++note='it''s $HOME'"]


def slurm(**changed: Any) -> Slurm:
    settings: dict[str, Any] = {
        "partition": None, "account": None, "time": "24:00:00", "cpus_per_task": 8, "gpus_per_node": None,
        "warning_seconds": 180, "extra": (), "setup": (),
    }  # fmt: skip
    return Slurm(**{**settings, **changed})


def script(
    arguments: Sequence[str] = (), *, run: Path = Path("runs/mine"), world: World = WORLD, **changed: Any
) -> str:
    text = slurm(**changed).job(arguments, run, world)
    assert text is not None
    return text


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def command(text: str) -> list[str]:
    """The command behind srun, as a shell splits it."""
    line = next(line for line in text.splitlines() if line.startswith("srun "))
    return shlex.split(line)


def fake(folder: Path, name: str, body: str) -> None:
    """A stand-in for a program, which writes its arguments to NAME.txt, one a line."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" >> "{folder}/{name}.txt"\n{body}\n')
    path.chmod(0o755)


def told(folder: Path, name: str) -> list[str]:
    path = folder / f"{name}.txt"
    return path.read_text().splitlines() if path.exists() else []


def path_with(folder: Path) -> str:
    return f"{folder}:/usr/bin:/bin"


# The script


def test_a_local_run_has_nothing_to_submit() -> None:
    assert Local().job(["objective=ar"], Path("run"), WORLD) is None
    with pytest.raises(AssertionError):
        Local().submit("", Path("run"))


def test_the_script_asks_for_one_task_a_device_a_warning_and_a_requeue() -> None:
    assert options(script()) == [
        "--job-name=mine",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--cpus-per-task=8",
        "--time=24:00:00",
        "--output=runs/mine/slurm-%j.log",
        "--signal=USR1@180",
        "--requeue",
        "--open-mode=append",
        "--gpus-per-node=4",
    ]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"partition": "gpu"}, "--partition=gpu"),
        ({"account": "physics"}, "--account=physics"),
        ({"time": "1-00:00:00"}, "--time=1-00:00:00"),
        ({"cpus_per_task": 3}, "--cpus-per-task=3"),
        ({"gpus_per_node": 8}, "--gpus-per-node=8"),
        ({"warning_seconds": 60}, "--signal=USR1@60"),
        ({"extra": ("--mem=0", "--exclusive")}, "--mem=0"),
        ({"extra": ("--mem=0", "--exclusive")}, "--exclusive"),
    ],
)
def test_settings_reach_the_options(changed: dict[str, Any], expected: str) -> None:
    assert expected in options(script(**changed))


@pytest.mark.parametrize("name", ["partition", "account"])
def test_null_leaves_the_cluster_its_default(name: str) -> None:
    assert name not in script()


def test_machines_without_gpus_are_asked_for_none() -> None:
    assert not [option for option in options(script(gpus_per_node=0)) if "gpu" in option]


def test_all_options_stand_before_the_first_command() -> None:
    """Slurm stops reading options at the first line that is no comment."""
    lines = script(setup=("module load cuda",), extra=("--mem=0",)).splitlines()
    assert lines[0] == "#!/bin/bash"
    is_option = [line.startswith("#SBATCH") for line in lines[1:]]
    assert is_option == sorted(is_option, reverse=True)


def test_setup_lines_run_before_the_training() -> None:
    lines = script(setup=("module load cuda", "source .venv/bin/activate")).splitlines()
    places = [lines.index("module load cuda"), lines.index("source .venv/bin/activate")]
    assert places == sorted(places)
    assert lines[places[1] + 1].startswith("srun ")


def test_a_task_that_dies_ends_the_job() -> None:
    assert command(script())[:2] == ["srun", "--kill-on-bad-exit=1"]


@pytest.mark.parametrize("arguments", [[], PLAIN, ["--config-dir", "/my configs", *PLAIN]], ids=["none", "odd", "dir"])
def test_the_arguments_survive_the_shell(arguments: list[str]) -> None:
    words = command(script(arguments))
    assert words[2:] == [
        *(sys.executable, "-m", "lit_refusion.cli", "train"),
        *arguments,
        *("launcher=local", "resume=auto"),
    ]


@pytest.mark.parametrize(
    "removed",
    [
        "launcher=slurm",
        "launcher.time=1:00:00",
        "launcher.extra=[--mem=0]",
        "++launcher.partition=gpu",
        "+launcher=slurm",
        "dry_run=true",
        "resume=null",
        "++resume=auto",
    ],
)
def test_the_job_is_not_submitted_again_and_resumes_by_itself(removed: str) -> None:
    words = command(script(["seed=1", removed, "run=x"]))
    assert words[6:] == ["seed=1", "run=x", "launcher=local", "resume=auto"]


def test_a_run_that_is_forced_to_go_on_stays_so() -> None:
    assert command(script(["seed=1", "resume=force"]))[6:] == ["seed=1", "launcher=local", "resume=force"]


@pytest.mark.parametrize("kept", ["run=launcher", "data.resume=1", "backbone.path=launcher=slurm", "resumed=1"])
def test_settings_that_only_look_alike_are_kept(kept: str) -> None:
    assert kept in command(script([kept]))


@pytest.mark.parametrize("name", ["cpus_per_task", "warning_seconds"])
@pytest.mark.parametrize("value", [0, -1])
def test_numbers_below_one_are_refused(name: str, value: int) -> None:
    with pytest.raises(UserError, match=rf"launcher\.{name}={value}: must be at least 1"):
        slurm(**{name: value})


@pytest.mark.parametrize("arguments", [[], PLAIN])
def test_bash_accepts_the_script(arguments: list[str]) -> None:
    text = script(arguments, setup=("export A=1",), extra=("--mem=0",))
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_folder_with_a_space_is_quoted_for_sbatch() -> None:
    text = script(run=Path("my runs/first try"))
    assert [len(shlex.split(option)) for option in options(text)] == [1] * len(options(text))


# The script's life


def life(tmp_path: Path, code: int, arguments: Sequence[str] = (), **changed: Any) -> tuple[int, Path]:
    """Exit code of the script where srun ends with `code`, and the folder of stand-ins."""
    programs = tmp_path / "bin"
    fake(programs, "srun", f"exit {code}")
    fake(programs, "scontrol", "exit 0")
    environment = {"PATH": path_with(programs), "SLURM_JOB_ID": "4711"}
    done = subprocess.run(["bash"], input=script(arguments, **changed), env=environment, text=True, cwd=tmp_path)
    return done.returncode, programs


@pytest.mark.parametrize(("code", "is_requeued"), [(130, True), (0, False), (1, False), (2, False), (137, False)])
def test_only_an_interrupted_run_is_queued_again(code: int, is_requeued: bool, tmp_path: Path) -> None:
    found, programs = life(tmp_path, code)
    assert found == code
    assert told(programs, "scontrol") == (["requeue", "4711"] if is_requeued else [])


def test_srun_gets_every_argument_as_it_was_given(tmp_path: Path) -> None:
    _, programs = life(tmp_path, 0, PLAIN)
    assert told(programs, "srun")[5:] == [*PLAIN, "launcher=local", "resume=auto"]


def test_setup_lines_are_run(tmp_path: Path) -> None:
    life(tmp_path, 0, setup=("echo loaded > loaded.txt",))
    assert (tmp_path / "loaded.txt").read_text() == "loaded\n"


# Submitting


def test_submitting_writes_the_script_and_says_what_sbatch_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, run = tmp_path / "bin", tmp_path / "new" / "run"
    fake(programs, "sbatch", "echo Submitted batch job 42")
    monkeypatch.setenv("PATH", path_with(programs))
    assert slurm().submit("#!/bin/bash\n", run) == "Submitted batch job 42"
    assert told(programs, "sbatch") == [f"{run}/submit.sbatch"]
    assert (run / "submit.sbatch").read_text() == "#!/bin/bash\n"


def test_a_refusal_of_sbatch_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(
        tmp_path / "bin", "sbatch", "echo 'sbatch: error: invalid partition specified: gpuu' >&2; echo more >&2; exit 1"
    )
    monkeypatch.setenv("PATH", path_with(tmp_path / "bin"))
    with pytest.raises(UserError) as caught:
        slurm().submit("", tmp_path / "run")
    assert str(caught.value) == (
        f"launcher=slurm: sbatch refuses {tmp_path}/run/submit.sbatch: sbatch: error: invalid partition specified: gpuu"
    )


def test_without_sbatch_the_script_is_left_to_be_submitted_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=re.escape(f"no sbatch here; {tmp_path}/run/submit.sbatch is written")):
        slurm().submit("hello\n", tmp_path / "run")
    assert (tmp_path / "run" / "submit.sbatch").read_text() == "hello\n"


# The command line


def train(tmp_path: Path, *extra: str) -> list[str]:
    return ["train", "objective=refusion", f"run={tmp_path}/run", "trainer.devices=2", "trainer.num_nodes=3",
            "objective.slot_sizes=[4, 8]", f"data.folder={tmp_path}/some where", "launcher=slurm",
            'launcher.extra=["--mem=0"]', "launcher.partition=gpu", "resume=force", *extra]  # fmt: skip


def shown_config(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*arguments, "--show-config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_the_submitted_command_line_is_the_same_run_started_locally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From `lit-refusion train` through sbatch and srun to a command line that parses."""
    programs, configs = tmp_path / "bin", tmp_path / "my configs"
    (configs / "loader").mkdir(parents=True)
    (configs / "loader" / "own.yaml").write_text("defaults: [padded]\nmicro_batch_size: 3\n")
    fake(programs, "sbatch", f'SLURM_JOB_ID=9 bash "$1" > "{tmp_path}/log" 2>&1; echo Submitted batch job 9')
    fake(programs, "srun", "exit 130")
    fake(programs, "scontrol", "")
    monkeypatch.setenv("PATH", path_with(programs))
    monkeypatch.chdir(tmp_path)
    arguments = train(tmp_path, "loader=own", "--config-dir", "my configs")

    assert main(arguments) == 0

    assert capsys.readouterr().out == "Submitted batch job 9\n"
    assert told(programs, "scontrol") == ["requeue", "9"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["submit.sbatch"]
    words = told(programs, "srun")
    assert words[1:5] == [sys.executable, "-m", "lit_refusion.cli", "train"]
    assert words[5:7] == ["--config-dir", str(configs)]
    job = shown_config(words[4:], capsys)
    expected = shown_config(arguments, capsys)
    assert job["launcher"] == {"_target_": "lit_refusion.launcher.Local"}
    assert job["resume"] == "force"
    assert job["loader"]["micro_batch_size"] == 3
    assert {**job, "launcher": 0, "resume": 0} == {**expected, "launcher": 0, "resume": 0}


def test_the_command_line_reports_a_missing_sbatch_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(train(tmp_path)) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert error[0].startswith("lit-refusion train: error: launcher=slurm: there is no sbatch here")
    assert os.listdir(tmp_path / "run") == ["submit.sbatch"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("launcher.cpus_per_task=0", "launcher.cpus_per_task=0: must be at least 1"),
        ("launcher.warning_seconds=soon", "launcher.warning_seconds='soon': expected a whole number"),
        ("launcher=lsf", "launcher=lsf: no such choice; launcher takes local, slurm"),
    ],
)
def test_wrong_settings_of_the_launcher_are_one_line(
    setting: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(train(tmp_path, setting)) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert message in error[0]
    assert not (tmp_path / "run").exists()
