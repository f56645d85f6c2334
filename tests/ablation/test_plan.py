"""What an ablation consists of: its YAML, which arms share a training, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from lit_refusion.ablation.plan import AblateConfig, Cell, chosen, groups
from lit_refusion.cli import main
from lit_refusion.config import load_config
from lit_refusion.errors import UserError
from lit_refusion.schema import build
from tests.ablation.stand_in import Ablation

ARMS = {
    "a": {"train": ["objective=ar"], "decode": ["decoder=ar"]},
    "b": {"train": ["objective=ar"], "decode": ["decoder=ar", "decoder.top_k=3"]},
    "c": {"train": ["objective=bd3"], "decode": []},
    "d": {"train": [], "decode": []},
}


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    return load_config("ablate", [])


def config(defaults: dict[str, Any], **changes: Any) -> AblateConfig:
    own = {"out": "runs/mine", "arms": ARMS, "tasks": {"words": ["limit=3"]}, "train": ["data=prepared"]}
    return build({**defaults, **own, **changes}, AblateConfig)


def cells(*names: str) -> tuple[Cell, ...]:
    pairs = [name.split("-seed") for name in names]
    return tuple(Cell(arm=arm, seed=int(seed)) for arm, seed in pairs)


def test_arms_with_the_same_training_share_it_within_a_seed(defaults: dict[str, Any]) -> None:
    found = groups(config(defaults, seeds=[0, 7]))
    assert [(group.name, group.cells) for group in found] == [
        (f"{name}-seed{seed}", cells(*(f"{arm}-seed{seed}" for arm in arms)))
        for seed in (0, 7)
        for name, arms in (("a", "ab"), ("c", "c"), ("d", "d"))
    ]


def test_a_training_has_the_settings_of_all_then_its_own_then_its_place(defaults: dict[str, Any]) -> None:
    third = groups(config(defaults, seeds=[7]))[1]
    assert third.train == ("data=prepared", "objective=bd3", "seed=7", "run=runs/mine/runs/c-seed7", "resume=auto")
    assert third.model == "runs/mine/models/c-seed7"


def test_arms_without_training_decode_a_given_model_or_share_a_training_of_the_settings_of_all(
    defaults: dict[str, Any],
) -> None:
    trained, given = groups(config(defaults))[2], groups(config(defaults, model="some/model"))[2]
    assert (given.train, given.model) == (None, "some/model")
    assert trained.train is not None
    assert trained.model == "runs/mine/models/d-seed0"


def test_chosen_arms_keep_the_name_of_their_training_and_know_the_others(defaults: dict[str, Any]) -> None:
    everything = groups(config(defaults))
    (found,) = chosen(everything, ["b"])
    assert (found.name, found.cells, found.others) == ("a-seed0", cells("b-seed0"), cells("a-seed0"))
    assert chosen(everything, []) == everything


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"out": ""}, "out=''"),
        ({"arms": {}}, "0 arms"),
        ({"seeds": []}, "0 seeds"),
        ({"tasks": {}}, "0 tasks"),
        ({"seeds": [1, 2, 1]}, "seeds=[1, 2, 1]"),
        ({"seeds": [-1]}, "seeds=[-1]"),
        ({"seeds": [0.5]}, "seeds[0]=0.5"),
        ({"at_once": 0}, "at_once=0"),
        ({"threads": 0}, "threads=0"),
        ({"only": ["a", "x"]}, "only=x: no such arm; there are a, b, c, d"),
        ({"baseline": "x"}, "baseline=x: no such arm"),
        ({"stages": []}, "stages=[]"),
        ({"stages": ["fly"]}, "stages[0]=fly: unknown choice; it takes train, evaluate, compare"),
        ({"checkpoint": "first"}, "checkpoint=first: unknown choice"),
        ({"arms": {"a/b": ARMS["a"]}}, "arms.a/b: a name may have letters"),
        ({"arms": {"..": ARMS["a"]}}, "arms...: a name may have letters"),
        ({"tasks": {"a b": []}}, "tasks.a b: a name may have letters"),
        ({"tasks": {"train": []}}, "tasks.train: choose another name"),
        ({"arms": {"a": {"train": []}}}, "arms.a.decode: missing"),
        ({"arms": {"a": {**ARMS["a"], "model": None}}}, "unknown setting arms.a.model"),
        ({"measure": {"num_problems": -1, "repeats": 1, "batch_sizes": [1], "threads": None}}, "num_problems=-1"),
    ],
)
def test_wrong_values_are_named(wrong: dict[str, Any], told: str, defaults: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        config(defaults, **wrong)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], "give experiment=..., or out, arms, seeds and tasks"),
        (["experiment=nope"], "experiment=nope"),
        (["experiment=mine", "only=[x]"], "only=x: no such arm; there are ar, bd3, bd3_fast"),
        (["experiment=mine", "sedes=[1]"], "unknown setting sedes"),
    ],
)
def test_the_command_line_refuses_in_one_line(
    overrides: list[str],
    told: str,
    ablation: Ablation,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from lit_refusion.commands import ablate

    monkeypatch.setattr(ablate, "load_config", load_config)
    ablation.write()
    assert main(["ablate", "--config-dir", str(ablation.configs), *overrides]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert told in error
    assert ablation.steps == []
    assert not ablation.out.exists()


def test_the_resolved_ablation_can_be_looked_at(ablation: Ablation, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ablation.arguments("threads=2"), "--show-config"]) == 0
    shown = capsys.readouterr().out
    assert "bd3_fast:" in shown
    assert shown.count("threads: 2") == 2
    assert ablation.steps == []
