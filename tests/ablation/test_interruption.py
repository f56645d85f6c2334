"""An ablation that is stopped or killed leaves nothing half done behind, and the same command goes on."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest

from lit_refusion.errors import UserError
from tests.ablation.stand_in import Ablation, make_stand_in, run_in
from tests.ablation.test_work import AR, BD3, NO_REPORT
from tests.children import Child, start


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Processes come from a server, which has to be there before another program stands in for the interpreter."""
    assert start(len, "", log=tmp_path_factory.mktemp("server") / "log").wait() == 0


def begin(ablation: Ablation, *overrides: str) -> Child:
    ablation.write()
    log = ablation.folder / "ablation.log"
    return start(run_in, ablation.folder, ablation.experiment, *overrides, log=log)


def kill(pid: int) -> None:
    """End a process, and wait until it is gone."""
    file = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([file], [], [], 60)[0]
    os.close(file)


def report(ablation: Ablation) -> str:
    return "".join((ablation.out / "report" / name).read_text() for name in ("report.md", "results.json"))


def test_a_killed_ablation_goes_on_when_its_last_command_has_ended(ablation: Ablation, tmp_path: Path) -> None:
    ablation.hold("evaluate bd3-seed0/words")
    parent = begin(ablation)
    (orphan,) = ablation.wait()
    os.kill(parent.pid, signal.SIGKILL)
    assert parent.wait() == -signal.SIGKILL

    ablation.hold()
    before = ablation.steps
    with pytest.raises(UserError) as caught:
        ablation.run()
    assert str(caught.value).startswith(
        f"out={ablation.out}: another ablation, or a command that one has left behind, is at work on bd3-seed0 there"
    )
    assert ablation.steps == before == AR + BD3[:3]

    kill(orphan)
    assert ablation.run() == BD3[2:]
    whole = Ablation(tmp_path / "whole", ablation.experiment)
    whole.folder.mkdir()
    make_stand_in(whole.program.parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.executable", str(whole.program))
        assert whole.run() == AR + BD3
    assert report(ablation) == report(whole).replace(str(whole.folder), str(ablation.folder))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_ablation_stops_its_command_and_ends_with_130(number: signal.Signals, ablation: Ablation) -> None:
    ablation.hold("train bd3-seed0")
    parent = begin(ablation)
    (child,) = ablation.wait()
    os.kill(parent.pid, number)
    assert parent.wait() == 130
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert "stopped; saved" in ablation.log("bd3-seed0")
    assert "interrupted; the same command goes on" in parent.output
    assert ablation.steps == [*AR, BD3[0]]
    ablation.hold()
    assert ablation.run(NO_REPORT) == BD3


def test_what_waits_for_its_turn_is_not_started_after_a_stop(ablation: Ablation) -> None:
    ablation.hold("train ar-seed0")
    parent = begin(ablation, "seeds=[0,1,2]")
    ablation.wait()
    os.kill(parent.pid, signal.SIGINT)
    assert parent.wait() == 130
    assert ablation.steps == ["train ar-seed0"]
    assert not list((ablation.out / "arms").glob("*/arm.json"))


def test_arms_of_other_trainings_may_run_in_the_folder_meanwhile(ablation: Ablation) -> None:
    ablation.hold("train bd3-seed0")
    parent = begin(ablation, "only=[bd3]", NO_REPORT)
    (child,) = ablation.wait()
    ablation.hold()
    assert ablation.run("only=[ar]", NO_REPORT) == AR
    with pytest.raises(UserError, match="is at work on bd3-seed0 there"):
        ablation.run("only=[bd3_fast]", NO_REPORT)
    os.kill(child, signal.SIGINT)
    assert parent.wait() == 1


def test_a_refused_ablation_leaves_the_plan_alone(ablation: Ablation) -> None:
    ablation.hold("train ar-seed0")
    parent = begin(ablation)
    ablation.wait()
    ablation.hold()
    plan = (ablation.out / "ablation.json").read_text()
    with pytest.raises(UserError, match="is at work on ar-seed0 there"):
        ablation.run("seeds=[0,1]")
    assert (ablation.out / "ablation.json").read_text() == plan
    os.kill(parent.pid, signal.SIGTERM)
    assert parent.wait() == 130
