"""Composing: overrides, groups, a folder of one's own; every error is one line that says what to do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lit_refusion.config import choices, config_folder, load_config
from lit_refusion.errors import UserError

DATA = ["data=prepared", "data.folder=somewhere"]


def error_of(command: str, overrides: list[str], *, extra_folder: str | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_config(command, overrides, extra_folder=extra_folder)
    text = str(caught.value)
    assert text.strip()
    assert "\n" not in text
    return text


def test_groups_and_keys_are_overridden() -> None:
    config = load_config("train", [*DATA, "objective=ar", "trainer.max_steps=7", "optimizer.betas=[0.5,0.6]"])

    assert config["objective"] == {"_target_": "objectives.autoregressive.Autoregressive", "average": "example"}
    assert config["trainer"]["max_steps"] == 7
    assert config["optimizer"]["betas"] == [0.5, 0.6]
    assert config["data"] == {"folder": "somewhere"}
    assert type(config["trainer"]) is dict


def test_one_call_leaves_nothing_for_the_next() -> None:
    load_config("train", [*DATA, "seed=5"])

    assert load_config("train", DATA)["seed"] == 0


def test_choices_are_the_yaml_files() -> None:
    assert choices("objective") == sorted(path.stem for path in (config_folder() / "objective").glob("*.yaml"))
    assert choices("no_such_group") == []


@pytest.mark.parametrize("group", ["objective", "backbone", "data", "loader", "optimizer", "trainer"])
def test_unknown_choice_lists_the_choices(group: str) -> None:
    text = error_of("train", [*DATA, f"{group}=nope"])

    assert text.startswith(f"{group}=nope: no such choice")
    for name in choices(group):
        assert name in text


def test_unknown_experiment_is_refused() -> None:
    assert "experiment=nope" in error_of("train", [*DATA, "experiment=nope"])


@pytest.mark.parametrize("key", ["trainer.max_step", "objektive", "objective.slot_size", "trainer.a.b"])
def test_unknown_key_is_named(key: str) -> None:
    text = error_of("train", [*DATA, f"{key}=3"])

    assert f"unknown setting {key.split('.b')[0]}" in text
    assert "--show-config" in text


def test_missing_value_is_named() -> None:
    assert error_of("export", ["run=a"]) == "out: missing; give out=..."


@pytest.mark.parametrize(
    ("command", "overrides", "key"),
    [
        ("train", ["data=prepared"], "data.folder"),
        ("train", [*DATA, "backbone=pretrained"], "backbone.path"),
        ("prepare", ["data=files"], "data.tokenizer"),
    ],
)
def test_missing_value_inside_a_group_has_its_full_key(command: str, overrides: list[str], key: str) -> None:
    assert f"{key}: missing; give {key}=..." in error_of(command, overrides)


@pytest.mark.parametrize("override", ["objective.slot_sizes=[4", "seed", "run=${nope}", "~trainer.nope", "run='a"])
def test_bad_syntax_is_one_line(override: str) -> None:
    error_of("train", [*DATA, override])


def test_override_without_a_key_is_one_line() -> None:
    error_of("train", [*DATA, "=3"])


def test_group_file_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "objective").mkdir()
    (tmp_path / "objective" / "mine.yaml").write_text("_target_: my_package.Mine\nknob: 3\n")

    config = load_config("train", [*DATA, "objective=mine", "objective.knob=4"], extra_folder=str(tmp_path))

    assert config["objective"] == {"_target_": "my_package.Mine", "knob": 4}
    assert load_config("train", [*DATA, "objective=ar"], extra_folder=str(tmp_path))["objective"]["average"]
    assert error_of("train", [*DATA, "objective=mine"]).startswith("objective=mine: no such choice")


def test_unknown_choice_lists_ones_own_choices_too(tmp_path: Path) -> None:
    (tmp_path / "objective").mkdir()
    (tmp_path / "objective" / "mine.yaml").write_text("_target_: my_package.Mine\n")

    assert "mine" in error_of("train", [*DATA, "objective=other"], extra_folder=str(tmp_path))


def test_config_dir_that_is_not_there(tmp_path: Path) -> None:
    assert error_of("train", DATA, extra_folder=str(tmp_path / "no")) == f"--config-dir {tmp_path}/no: no such folder"


def test_broken_yaml_of_ones_own_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "objective").mkdir()
    (tmp_path / "objective" / "broken.yaml").write_text("a: [1\nb: 2\n")

    error_of("train", [*DATA, "objective=broken"], extra_folder=str(tmp_path))


def test_threads_compose_at_the_same_time() -> None:
    """Hydra's state is global."""
    seeds = list(range(12))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda seed: load_config("train", [f"seed={seed}"])["seed"], seeds))
    assert found == seeds
