"""Sources: which settings are refused, and which files a pattern stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_refusion.data.formats import SUFFIXES
from lit_refusion.data.records import Fields
from lit_refusion.errors import UserError
from tests.conftest import make_source

# Settings


REFUSED = {
    "files_and_hub": ({"hub": "owner/set"}, r"mine\]: give either files=\['a\.jsonl'\] or hub=owner/set"),
    "neither": ({"files": ()}, r"mine\]: give either files=\[\] or hub=None"),
    "subsets_of_files": ({"subsets": ("en",)}, r"mine\]\.subsets=\['en'\]: only a hub data set has subsets"),
    "weight": ({"weight": -0.5}, r"mine\]\.weight=-0\.5: must be a number, and not negative"),
    "max_examples": ({"max_examples": 0}, r"mine\]\.max_examples=0: must be at least 1"),
    "max_prompt_tokens": ({"max_prompt_tokens": -1}, r"mine\]\.max_prompt_tokens=-1: must be at least 1"),
    "max_tokens": ({"max_tokens": 0}, r"mine\]\.max_tokens=0: must be at least 1"),
    "min_response_tokens": ({"min_response_tokens": 0}, r"mine\]\.min_response_tokens=0: must be at least 1"),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_bad_setting_names_source_value_and_rule(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(UserError, match=rf"^data\.sources\[{message}"):
        make_source("a.jsonl", **changes)


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_a_weight_must_be_a_number_of_copies(weight: float) -> None:
    with pytest.raises(UserError, match="weight"):
        make_source("a.jsonl", weight=weight)


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": 0.0},  # leaves the source out
        {"weight": 2.5},
        {"max_examples": 1, "max_prompt_tokens": 1, "max_tokens": 1, "min_response_tokens": 1},
        {"files": (), "hub": "owner/set"},
        {"files": (), "hub": "owner/set", "subsets": ("en", "fr")},
    ],
)
def test_smallest_and_other_good_settings_are_accepted(changes: dict[str, Any]) -> None:
    found = make_source("a.jsonl", **changes)
    assert {name: getattr(found, name) for name in changes} == changes


def test_fields_carry_the_names_and_nothing_that_is_chosen_later() -> None:
    names = {"query": "question", "response": "answer", "messages": "chat"}
    chosen = make_source("a.jsonl", weight=0.5, max_examples=3, max_tokens=9, deduplicate=True, **names)
    assert chosen.fields == make_source("b.jsonl", **names).fields == Fields(source="mine", **names)


# Files


def test_globs_are_sorted_within_a_pattern_and_patterns_keep_their_order(tmp_path: Path) -> None:
    for name in ("b/2.jsonl", "b/10.jsonl", "a/9.jsonl", "b/c/1.jsonl", "z.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.jsonl").mkdir()  # not a file
    paths = make_source(tmp_path / "z.json", tmp_path / "**" / "*.jsonl").paths()
    found = [path.relative_to(tmp_path).as_posix() for path in paths]
    assert found == ["z.json", "a/9.jsonl", "b/10.jsonl", "b/2.jsonl", "b/c/1.jsonl"]


@pytest.mark.parametrize("pattern", ["none.jsonl", "none-*.jsonl", "folder.jsonl"])
def test_missing_file_names_source_and_pattern(pattern: str, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").touch()
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UserError, match="no such file") as caught:
        make_source(tmp_path / "there.jsonl", tmp_path / pattern).paths()
    assert f"data.sources[mine].files={tmp_path / pattern}" in str(caught.value)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_supported_suffix_is_accepted(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"part.one{suffix}"
    path.touch()
    assert make_source(path).paths() == [path]


@pytest.mark.parametrize("name", ["a.csv", "a.parquet.gz", "a.tar.zst", "a.jsonl.bz2", "a.zst", "jsonl"])
def test_unknown_suffix_names_the_file_and_the_choices(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"unknown kind of file; supported: \.json, .*\.parquet, \.tar") as caught:
        make_source(tmp_path / name).paths()
    assert str(caught.value).startswith(str(tmp_path / name))


def test_a_hub_data_set_has_no_files() -> None:
    assert make_source(hub="owner/set").paths() == []
