"""The figures of a comparison against sums over its records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_refusion.comparison.arm import ArmRun, read_all
from lit_refusion.comparison.figures import Score, arms, costs, outcomes, scores, tasks
from lit_refusion.comparison.statistics import mcnemar
from lit_refusion.errors import UserError
from lit_refusion.evaluation.meter import wilson
from tests.comparison.folders import make_ablation, make_arm, make_run

pytestmark = pytest.mark.usefixtures("few_resamples")
SPEEDS = {
    "words": {
        "1": {
            "base": {"tokens_per_second": 10.0, "repeats": [10.0, 20.0, 5.0]},
            "other": {"tokens_per_second": 25.0, "repeats": [30.0, 20.0, 25.0]},
        }
    }
}


def bits(text: str) -> list[bool]:
    return [sign == "+" for sign in text]


def table(runs: list[ArmRun], *, throughput: dict[str, Any] | None = None) -> dict[tuple[str, str], Score]:
    found = scores(runs, baseline="base", throughput=throughput and {"tasks": throughput}, seed=0)
    return {(row.task, row.arm): row for row in found}


@pytest.fixture
def runs(tmp_path: Path) -> list[ArmRun]:
    """Two arms of one seed on two tasks; `other` wins problems 1 and 3, loses problem 0."""
    out = make_ablation(tmp_path / "out", ["base", "other"])
    make_arm(out, "base", words={"correct": bits("+-+-")}, more={"correct": bits("--")})
    make_arm(out, "other", words={"correct": bits("-+++"), "tokens": 12, "passes": 3}, more={"correct": bits("++")})
    return read_all([str(out)])


def test_a_row_for_every_task_and_arm(runs: list[ArmRun]) -> None:
    assert arms(runs) == ["base", "other"]
    assert tasks(runs) == ["more", "words"]
    assert list(table(runs)) == [("more", "base"), ("more", "other"), ("words", "base"), ("words", "other")]


def test_scores_lengths_and_passes_are_those_of_the_records(runs: list[ArmRun]) -> None:
    row = table(runs)["words", "other"]
    assert (row.score.value, row.score.low, row.score.high) == (0.75, *wilson(3, 4))
    assert (row.seeds, row.problems) == ((0,), 4)
    assert (row.tokens_per_forward, row.tokens_per_answer, row.forward_passes_per_answer) == (4, 12, 3)
    assert row.invalid == 1 / 4  # problem 0: wrong, and without an answer


def test_wins_are_the_arms_and_losses_the_baselines(runs: list[ArmRun]) -> None:
    found = table(runs)
    against = found["words", "other"].against
    assert against is not None
    assert against.gain.value == 0.25
    assert against.p_value == mcnemar(2, 1)
    more = found["more", "other"].against
    assert more is not None
    assert (more.gain.value, more.p_value) == (1.0, 0.5)
    assert found["words", "base"].against is None


def test_problems_are_paired_by_id_and_not_by_place(tmp_path: Path) -> None:
    out = make_ablation(tmp_path / "out", ["base", "other"])
    for arm in ("base", "other"):
        make_arm(out, arm, words={"correct": bits("++--")})
    path = out / "arms" / "other-seed0" / "words" / "records.jsonl"
    path.write_text("\n".join(sorted(path.read_text().splitlines())) + "\n")
    against = table(read_all([str(out)]))["words", "other"].against
    assert against is not None
    assert (against.gain.low, against.gain.high) == (0, 0)


def test_seeds_are_pooled_and_paired(tmp_path: Path) -> None:
    out = make_ablation(tmp_path / "out", ["base", "other"], seeds=[0, 1])
    for arm, answers in {"base": ("+--", "++-"), "other": ("++-", "+++")}.items():
        for seed, text in enumerate(answers):
            make_arm(out, arm, seed, words={"correct": bits(text), "tokens": 4 + 4 * seed, "passes": 4})
    row = table(read_all([str(out)]))["words", "other"]
    assert (row.score.value, row.seeds, row.tokens_per_answer, row.tokens_per_forward) == (5 / 6, (0, 1), 6, 1.5)
    assert row.against is not None
    assert row.against.gain.value == pytest.approx(1 / 3)
    assert row.against.test == "bootstrap over seeds and prompts"


def test_arms_with_other_seeds_or_other_problems_are_not_tested(tmp_path: Path) -> None:
    out = make_ablation(tmp_path / "out", ["base", "one_seed", "fewer"], seeds=[0, 1])
    for seed in (0, 1):
        make_arm(out, "base", seed, words={})
        make_arm(out, "fewer", seed, words={"correct": [True, True]})
    make_arm(out, "one_seed", 0, words={})
    found = table(read_all([str(out)]))
    assert found["words", "one_seed"].against is None
    assert found["words", "fewer"].against is None
    assert found["words", "fewer"].problems == 2


def test_seeds_of_one_arm_on_different_problems_are_refused(tmp_path: Path) -> None:
    out = make_ablation(tmp_path / "out", ["base"], seeds=[0, 1])
    make_arm(out, "base", 0, words={})
    make_arm(out, "base", 1, words={"correct": [True]})
    with pytest.raises(UserError, match="base-seed1: evaluated on other problems of words than base-seed0"):
        outcomes(read_all([str(out)]), "words")


def test_speed_is_the_median_and_its_ratio_the_median_within_rounds(runs: list[ArmRun]) -> None:
    found = table(runs, throughput=SPEEDS)
    row = found["words", "other"]
    assert row.tokens_per_second == {1: 25.0}
    assert row.speedup == {1: np.median([3.0, 1.0, 5.0])}
    assert found["words", "base"].speedup == {1: 1.0}
    assert found["more", "other"].tokens_per_second == {}


def test_arms_that_were_not_measured_have_no_speed(runs: list[ArmRun]) -> None:
    speeds = {"words": {"1": {"other": SPEEDS["words"]["1"]["other"]}}}
    found = table(runs, throughput=speeds)
    assert found["words", "base"].tokens_per_second == {}
    assert found["words", "other"].tokens_per_second == {1: 25.0}
    assert found["words", "other"].speedup == {}


def test_costs_are_means_of_seeds(tmp_path: Path) -> None:
    out = make_ablation(tmp_path / "out", ["base", "decoded"], seeds=[0, 1])
    make_arm(out, "base", 0, run=make_run(tmp_path / "0"), words={})
    make_arm(out, "base", 1, run=make_run(tmp_path / "1", origin={"tokens": 2600}), words={})
    make_arm(out, "decoded", 0, words={})
    (cost,) = costs(read_all([str(out)]))
    assert (cost.arm, cost.steps, cost.tokens, cost.row_tokens, cost.supervised_tokens) == ("base", 6, 2500, 2700, 900)
    assert cost.flops == 6 * (1000 * 2700 + 300 * 900)
    assert (cost.seconds, cost.peak_memory, cost.nelbo) == (90, 1.5e9, 1.5)


def test_an_unfinished_training_has_cost_what_it_has_run(tmp_path: Path) -> None:
    out = make_ablation(tmp_path / "out", ["base"])
    make_arm(out, "base", run=make_run(tmp_path / "run", last_step=2))
    (cost,) = costs(read_all([str(out)]))
    assert (cost.steps, cost.tokens, cost.row_tokens, cost.nelbo) == (2, 800, 900, None)


def test_steps_that_an_interruption_left_unlogged_cost_what_the_others_do(tmp_path: Path) -> None:
    """Steps 1 to 10 and 13 to 20 are logged, 100 tokens each: the run went on from step 12."""
    (tmp_path / "metrics.csv").write_text(
        "step,train/steps,train/tokens,train/supervised_tokens,train/seconds\n10,10,1000,10,5\n20,8,800,8,4\n"
    )
    (tmp_path / "origin.json").write_text(
        json.dumps({"tokens": 1, "steps": 20, "layer_parameters": 1, "head_parameters": 1})
    )
    [cost] = costs([ArmRun("arm", 0, tmp_path, {}, None)])
    assert (cost.row_tokens, cost.supervised_tokens, cost.seconds) == (2000, 20, 10)
