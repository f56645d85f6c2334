"""Reading the folders of ablations, of their arms and of training runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_refusion.comparison.arm import ArmRun, read_all
from lit_refusion.errors import UserError
from tests.comparison.folders import make_ablation, make_arm, make_evaluation, make_run, make_trained


def read(*paths: Path) -> list[ArmRun]:
    return read_all([str(path) for path in paths])


def error_of(*paths: Path) -> str:
    with pytest.raises(UserError) as caught:
        read(*paths)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_ablation_has_its_arms_in_order_and_says_what_has_not_been_run(tmp_path: Path) -> None:
    out = make_ablation(tmp_path / "out", ["z", "a"], seeds=[1, 0])
    for arm, seed in (("a", 0), ("z", 0), ("z", 1), ("stranger", 0)):
        make_arm(out, arm, seed, words={})
    found = read(out)
    assert [run.name for run in found] == ["z-seed1", "z-seed0", "a-seed0", "a-seed1"]
    assert [run.failure for run in found] == [None, None, None, "it has not been run"]


def test_an_arm_leads_to_its_training_wherever_the_folder_has_been_moved(tmp_path: Path) -> None:
    out = make_ablation(tmp_path / "out", ["a"])
    make_arm(out, "a", run=make_run(out / "runs" / "a-seed0", config={"seed": 4}), words={})
    out.rename(tmp_path / "moved")
    (run,) = read(tmp_path / "moved")
    assert run.run == tmp_path / "moved" / "runs" / "a-seed0"
    assert run.config is not None
    assert run.config["seed"] == 4
    assert run.origin is not None
    assert run.origin["steps"] == 6


def test_one_arm_can_be_read_by_itself(tmp_path: Path) -> None:
    folder = make_arm(tmp_path, "a", 3, words={}, failure="it broke")
    (run,) = read(folder)
    assert (run.arm, run.seed, run.run, run.failure) == ("a", 3, None, "it broke")
    assert list(run.evaluations) == ["words"]
    assert (run.origin, run.config, run.metrics, run.last_step) == (None, None, [], 0)


def test_a_training_run_is_called_like_its_folder_and_has_its_own_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_trained(tmp_path / "mine", config={"seed": 5})
    monkeypatch.chdir(folder)
    for run in (*read(folder), *read(Path("."))):
        assert run.name == "mine-seed5"
        assert list(run.evaluations) == ["words"]


def test_records_are_in_the_order_of_their_ids(tmp_path: Path) -> None:
    (run,) = read(make_trained(tmp_path / "mine"))
    assert [record["id"] for record in run.evaluations["words"].records] == ["0", "1", "2"]


def test_curves_and_sums_leave_out_rows_without_the_figure(tmp_path: Path) -> None:
    (run,) = read(make_trained(tmp_path / "mine"))
    assert run.curve("val/nelbo") == ([3, 6], [3.0, 1.5])
    assert run.total("train/tokens") == 3 * 900
    assert run.total("train/nothing") is None
    assert run.last_step == 6


def test_a_folder_of_another_kind_is_refused(tmp_path: Path) -> None:
    assert error_of(tmp_path / "nowhere").startswith(f"{tmp_path}/nowhere: not the folder of an ablation")


def test_two_runs_of_one_name_are_refused(tmp_path: Path) -> None:
    one, two = (make_trained(tmp_path / folder / "mine") for folder in ("x", "y"))
    assert error_of(one, two).startswith("mine-seed0: two of the runs are called so")


@pytest.mark.parametrize("name", ["config.json", "origin.json", "evaluations/words/result.json"])
def test_a_damaged_file_is_named(name: str, tmp_path: Path) -> None:
    folder = make_trained(tmp_path / "mine")
    (folder / name).write_text("{")

    def read_whole() -> None:
        (run,) = read(folder)
        assert run.config
        assert run.origin

    with pytest.raises(UserError) as caught:
        read_whole()
    assert str(folder / name) in str(caught.value)


def test_a_damaged_metrics_file_is_named(tmp_path: Path) -> None:
    folder = make_trained(tmp_path / "mine")
    (folder / "metrics.csv").write_text("step,train/loss\n1,oops\n")
    (run,) = read(folder)
    with pytest.raises(UserError) as caught:
        run.curve("train/loss")
    assert f"{folder}/metrics.csv" in str(caught.value)


def test_evaluations_that_have_not_ended_are_left_out(tmp_path: Path) -> None:
    folder = make_trained(tmp_path / "mine")
    (make_evaluation(folder / "evaluations" / "more") / "result.json").unlink()
    (run,) = read(folder)
    assert list(run.evaluations) == ["words"]
