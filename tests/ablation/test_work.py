"""An ablation on one machine: what is run, in which order, what is run again, and what a failure leads to."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from lit_refusion.ablation import step, work
from lit_refusion.ablation.work import Work, environments
from lit_refusion.errors import UserError
from tests.ablation.stand_in import Ablation

AR = ["train ar-seed0", "export ar-seed0", "evaluate ar-seed0/words"]
BD3 = ["train bd3-seed0", "export bd3-seed0", "evaluate bd3-seed0/words", "evaluate bd3_fast-seed0/words"]
NO_REPORT = "stages=[train,evaluate]"


def evaluation(folder: Path, *overrides: str) -> step.Step:
    return step.Step(
        command="evaluate", overrides=("model=m", "out=o", *overrides), marker=folder / "done.json", product=folder,
        folder=None, source=None, config_dir=None,
    )  # fmt: skip


# What is run


def test_every_step_is_run_once_and_a_shared_training_serves_both_arms(ablation: Ablation) -> None:
    assert ablation.run(NO_REPORT) == AR + BD3
    arguments = {f"{command} {name}": given for command, name, _, given in ablation.calls}
    assert arguments["train bd3-seed0"] == [
        "train", "--config-dir", f"{ablation.folder}/configs", "data=prepared", "data.folder=nowhere", "objective=bd3",
        "seed=0", f"run={ablation.out}/runs/bd3-seed0", "resume=auto", "trainer.progress=lines",
    ]  # fmt: skip
    assert arguments["export bd3-seed0"][3:] == [
        f"run={ablation.out}/runs/bd3-seed0", "checkpoint=best", f"out={ablation.out}/models/bd3-seed0",
    ]  # fmt: skip
    assert arguments["evaluate bd3_fast-seed0/words"][3:] == [
        f"model={ablation.out}/models/bd3-seed0", "seed=0", "decoder=sdar",
        f"out={ablation.out}/arms/bd3_fast-seed0/words",
    ]  # fmt: skip
    for arm, run in (("ar", "ar"), ("bd3", "bd3"), ("bd3_fast", "bd3")):
        assert ablation.arm(arm) == {"arm": arm, "seed": 0, "run": f"../../runs/{run}-seed0", "failure": None}


def test_settings_of_an_arm_stand_behind_those_of_all(ablation: Ablation) -> None:
    ablation.experiment["decode"] = ["decoder=ar", "decoder.max_new_tokens=8"]
    ablation.experiment["tasks"] = {"words": ["limit=4"], "more": ["limit=5"]}
    ablation.experiment["checkpoint"] = "last"
    ablation.run(NO_REPORT, "only=[bd3]")
    arguments = [given for command, *_, given in ablation.calls if command == "evaluate"]
    assert [given[4:-1] for given in arguments] == [
        ["seed=0", limit, "decoder=ar", "decoder.max_new_tokens=8", "decoder=bd3"] for limit in ("limit=4", "limit=5")
    ]
    assert "checkpoint=last" in ablation.calls[1][3]


def test_a_second_call_runs_nothing_and_reports_the_same(ablation: Ablation) -> None:
    assert ablation.run() == AR + BD3
    report = (ablation.out / "report" / "report.md").read_text()
    assert ablation.run() == []
    assert (ablation.out / "report" / "report.md").read_text() == report
    assert "| bd3_fast | 66.7%" in report
    assert "lit-refusion ablate experiment=mine" in report


def test_seeds_are_runs_of_their_own(ablation: Ablation) -> None:
    found = ablation.run(NO_REPORT, "seeds=[0,3]", "only=[bd3,bd3_fast]")
    assert found == BD3 + [text.replace("seed0", "seed3") for text in BD3]
    assert "seed=3" in next(given for command, name, _, given in ablation.calls if name == "bd3-seed3")


def test_only_some_arms_are_run_and_the_report_says_what_is_missing(
    ablation: Ablation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ablation.run("only=[ar]") == AR
    assert "bd3-seed0: it has not been run" in capsys.readouterr().out
    assert ablation.run("only=[bd3_fast]", NO_REPORT) == [BD3[0], BD3[1], BD3[3]]
    assert ablation.run(NO_REPORT) == [BD3[2]]


def test_stages_can_be_run_one_after_the_other(ablation: Ablation) -> None:
    assert ablation.run("stages=[train]") == [AR[0], BD3[0]]
    assert ablation.run("stages=[evaluate]") == AR[1:] + BD3[1:]
    assert not (ablation.out / "report").exists()
    assert ablation.run("stages=[compare]", "threads=2") == []
    report = (ablation.out / "report" / "report.md").read_text()
    assert "WARNING" not in report
    assert "\nlit-refusion ablate experiment=mine\n" in report


def test_what_was_not_trained_is_not_evaluated(ablation: Ablation, capsys: pytest.CaptureFixture[str]) -> None:
    assert ablation.run("stages=[evaluate]", code=1) == []
    assert "its training has not ended; add train to stages" in capsys.readouterr().err
    assert "has not ended" in ablation.arm("ar")["failure"]


def test_a_given_model_is_decoded_by_arms_without_training(ablation: Ablation) -> None:
    model = ablation.folder / "given"
    model.mkdir()
    (model / "weights").write_text("some")
    ablation.experiment["model"] = str(model)
    ablation.experiment["arms"]["ar"]["train"] = []
    assert ablation.run(NO_REPORT, "only=[ar]") == [AR[2]]
    assert ablation.arm("ar")["run"] is None
    assert ablation.run(NO_REPORT, "only=[ar]") == []
    (model / "weights").write_text("others")
    os.utime(model / "weights", ns=(2**62, 2**62))
    assert ablation.run(NO_REPORT, "only=[ar]") == [AR[2]]


def test_trainings_run_side_by_side_each_on_its_share_of_the_threads(ablation: Ablation) -> None:
    """Both must be under way at once, or the second would never be there to be waited for."""
    ablation.hold(AR[0], BD3[0])

    def release() -> None:
        for pid in ablation.wait(2):
            os.kill(pid, signal.SIGINT)

    thread = threading.Thread(target=release)
    thread.start()
    assert sorted(ablation.run(NO_REPORT, "at_once=2", "threads=3", code=1)) == [AR[0], BD3[0]]
    thread.join()
    assert {threads for _, _, threads, _ in ablation.calls} == {"3"}


@pytest.mark.parametrize(
    ("at_once", "threads", "devices", "expected"),
    [
        (1, 2, "", [{"OMP_NUM_THREADS": "2"}]),
        (2, None, "", [{"OMP_NUM_THREADS": "4"}] * 2),
        (16, None, "", [{"OMP_NUM_THREADS": "1"}] * 16),
        (1, 1, "0,1", [{"OMP_NUM_THREADS": "1"}]),
        (2, 1, "4,5,7", [{"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": share} for share in ("4,7", "5")]),
    ],
)
def test_processes_share_cores_and_gpus(
    at_once: int, threads: int | None, devices: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work.os, "cpu_count", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    assert environments(at_once, threads) == expected


def test_more_at_once_than_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match="at_once=2: there are only 1 GPUs"):
        environments(2, None)


# What is run again


def test_changed_settings_of_decoding_evaluate_that_arm_anew(ablation: Ablation) -> None:
    ablation.run(NO_REPORT)
    ablation.experiment["arms"]["bd3_fast"]["decode"].append("decoder.temperature=0.5")
    assert ablation.run(NO_REPORT) == [BD3[3]]
    assert ablation.arm("bd3_fast")["failure"] is None
    assert ablation.run(NO_REPORT) == []


def test_changed_settings_of_a_task_evaluate_all_arms_anew(ablation: Ablation) -> None:
    ablation.run(NO_REPORT)
    ablation.experiment["tasks"]["words"] = ["limit=2"]
    assert ablation.run(NO_REPORT) == [AR[2], *BD3[2:]]


def test_a_new_arm_runs_alone(ablation: Ablation) -> None:
    fast = ablation.experiment["arms"].pop("bd3_fast")
    ablation.run(NO_REPORT)
    ablation.experiment["arms"]["bd3_fast"] = fast
    assert ablation.run(NO_REPORT) == [BD3[3]]


def test_a_changed_training_makes_everything_of_it_anew(ablation: Ablation) -> None:
    ablation.run(NO_REPORT)
    for arm in ("bd3", "bd3_fast"):
        ablation.experiment["arms"][arm]["train"].append("trainer.max_steps=9")
    assert ablation.run(NO_REPORT) == BD3
    assert ablation.run(NO_REPORT) == []
    weights = (ablation.out / "models" / "bd3-seed0" / "weights").read_text()
    assert "trainer.max_steps=9" in weights


def test_a_changed_training_of_one_arm_makes_the_other_arms_of_it_anew_later(ablation: Ablation) -> None:
    """`only=` leaves the other arm alone, but its results are of a model that is gone."""
    ablation.run(NO_REPORT)
    for arm in ("bd3", "bd3_fast"):
        ablation.experiment["arms"][arm]["train"].append("trainer.max_steps=9")
    assert ablation.run(NO_REPORT, "only=[bd3]") == BD3[:3]
    assert not (ablation.out / "arms" / "bd3_fast-seed0" / "words").exists()
    assert ablation.run(NO_REPORT) == [BD3[3]]


def test_another_checkpoint_is_exported_and_evaluated(ablation: Ablation) -> None:
    ablation.run(NO_REPORT)
    assert ablation.run(NO_REPORT, "checkpoint=last") == AR[1:] + BD3[1:]


@pytest.mark.parametrize(
    ("removed", "expected"),
    [
        ("runs/ar-seed0", AR),
        ("models/ar-seed0", AR[1:]),
        ("arms/ar-seed0/words", AR[2:]),
        ("arms/ar-seed0/words/result.json", AR[2:]),
    ],
)
def test_what_somebody_has_removed_is_made_again(removed: str, expected: list[str], ablation: Ablation) -> None:
    ablation.run(NO_REPORT, "only=[ar]")
    path = ablation.out / removed
    path.unlink() if path.is_file() else shutil.rmtree(path)
    assert ablation.run(NO_REPORT, "only=[ar]") == expected


def test_results_of_a_model_that_is_being_replaced_do_not_outlive_it(ablation: Ablation) -> None:
    ablation.run(NO_REPORT, "only=[ar]")
    ablation.experiment["arms"]["ar"]["train"].append("trainer.max_steps=9")
    ablation.fail(AR[0])
    assert ablation.run(NO_REPORT, "only=[ar]", code=1) == AR[:1]
    assert not (ablation.out / "models" / "ar-seed0").exists()
    assert not (ablation.out / "arms" / "ar-seed0" / "words").exists()
    ablation.fail()
    assert ablation.run(NO_REPORT, "only=[ar]") == AR


def test_an_evaluation_that_failed_goes_on_with_its_records_if_it_is_the_same(ablation: Ablation) -> None:
    ablation.fail(AR[2])
    ablation.run(NO_REPORT, "only=[ar]", code=1)
    records = ablation.out / "arms" / "ar-seed0" / "words" / "records.jsonl"
    records.parent.mkdir()
    records.write_text("kept\n")
    ablation.run(NO_REPORT, "only=[ar]", code=1)
    assert records.exists()
    ablation.experiment["decode"] = ["decoder.max_new_tokens=9"]
    ablation.run(NO_REPORT, "only=[ar]", code=1)
    assert not records.exists()


def test_a_training_that_a_job_has_ended_is_not_started_again(
    ablation: Ablation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no marker; what it was trained with is in its folder."""
    ablation.run("stages=[train]", "only=[ar]")
    run = ablation.out / "runs" / "ar-seed0"
    marker = ablation.out / "done" / "ar-seed0.train.json"
    (run / "config.json").write_text(
        json.dumps({**json.loads(marker.read_text())["config"], "run": "x", "launcher": 1})
    )
    marker.unlink()
    monkeypatch.setattr(work, "has_ended", lambda folder: folder == run)
    assert ablation.run(NO_REPORT, "only=[ar]") == AR[1:]
    ablation.experiment["arms"]["ar"]["train"].append("trainer.max_steps=9")
    assert ablation.run(NO_REPORT, "only=[ar]") == AR


# Failures


def test_an_arm_that_fails_does_not_stop_the_others(ablation: Ablation, capsys: pytest.CaptureFixture[str]) -> None:
    ablation.fail(AR[0])
    assert ablation.run(code=1) == [AR[0], *BD3]
    told = "lit-refusion train ended with code 2; its last lines: train ar-seed0 of "
    printed = capsys.readouterr()
    assert f"ar-seed0 failed: {told}" in printed.err
    assert "WARNING: some arms have no result." in printed.out
    assert ablation.arm("ar")["failure"].startswith(told)
    assert ablation.arm("ar")["failure"].endswith("/ lit-refusion train: error: ar-seed0 is not to my liking")
    assert "ar-seed0 is not to my liking" in ablation.log("ar-seed0")
    report = (ablation.out / "report" / "report.md").read_text()
    assert "> - ar-seed0: lit-refusion train ended with code 2" in report
    assert "| bd3 | 66.7%" in report
    ablation.fail()
    assert ablation.run() == AR
    assert "WARNING" not in (ablation.out / "report" / "report.md").read_text()


def test_a_failed_training_fails_all_arms_of_it(ablation: Ablation) -> None:
    ablation.fail(BD3[1])
    assert ablation.run(NO_REPORT, code=1) == AR + BD3[:2]
    assert ablation.arm("bd3")["failure"] == ablation.arm("bd3_fast")["failure"]
    assert ablation.arm("bd3")["failure"].startswith("lit-refusion export ended with code 2")


def test_a_failed_evaluation_fails_its_arm_only(ablation: Ablation) -> None:
    ablation.fail(BD3[2])
    assert ablation.run(NO_REPORT, code=1) == AR + BD3
    assert ablation.arm("bd3")["failure"] is not None
    assert ablation.arm("bd3_fast")["failure"] is None


def test_a_report_by_itself_says_what_had_failed(ablation: Ablation) -> None:
    ablation.fail(BD3[2])
    ablation.run(NO_REPORT, code=1)
    assert ablation.run("stages=[compare]", code=1) == []


def test_a_training_that_refuses_to_go_on_fails_its_arm(ablation: Ablation) -> None:
    ablation.run(NO_REPORT, "only=[ar]")
    ablation.experiment["arms"]["ar"]["train"].append("objective.average=token")
    assert ablation.run(NO_REPORT, "only=[ar]", code=1) == AR[:1]
    assert "resume: the run has changed" in ablation.arm("ar")["failure"]


def test_wrong_settings_are_found_before_anything_is_started(ablation: Ablation) -> None:
    ablation.experiment["arms"]["bd3_fast"]["decode"] = ["decoder=no_such"]
    with pytest.raises(UserError) as caught:
        ablation.run()
    assert str(caught.value).startswith("bd3_fast-seed0.words: decoder=no_such: no such choice; decoder takes ar, ")
    assert ablation.steps == []
    assert not ablation.out.exists()


def test_settings_of_a_decoder_that_the_model_chooses_are_kept_in_mind(tmp_path: Path) -> None:
    settings = [(), ("decoder.max_new_tokens=4",), ("decoder.max_new_tokens=5",), ("sweep.top_k=1,2",)]
    assert len({evaluation(tmp_path, *own).content() for own in settings}) == len(settings)


def test_a_bug_is_not_mistaken_for_a_failed_arm(ablation: Ablation, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Work, "run", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        ablation.run()
