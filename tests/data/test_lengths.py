"""The histogram of lengths: its numbers, its picture, and doing without the picture."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from lit_refusion.chat import PromptFormat
from lit_refusion.data.lengths import NUM_BINS, draw, histogram
from lit_refusion.data.prepare import PrepareConfig, prepare
from lit_refusion.data.shards import Manifest, Shards
from lit_refusion.data.verification import verify
from tests.conftest import make_source

NAMES = ("prompt", "response", "total")


@pytest.fixture
def config(records: Path, tokenizer_folder: Path, tmp_path: Path) -> PrepareConfig:
    """The 60 additions, prepared with the real picture."""
    source = make_source(records)
    return PrepareConfig(
        folder=str(tmp_path / "data"),
        tokenizer=str(tokenizer_folder),
        sources=(source,),
        prompt_format=PromptFormat(style="chat", template_kwargs={}),
        max_length=200,
        num_examples=None,
        seed=0,
        examples_per_shard=16,
        on_error="raise",
    )


# Numbers


@given(arrays(np.int32, st.integers(1, 50), elements=st.integers(1, 3000)), st.data())
def test_every_example_is_counted_once_in_the_bin_of_its_length(prompts: np.ndarray, data: st.DataObject) -> None:
    responses = data.draw(arrays(np.int32, len(prompts), elements=st.integers(1, 3000)))

    found = histogram(prompts, prompts + responses)

    edges = found["edges"]
    width = edges[1]
    assert edges == [place * width for place in range(NUM_BINS + 1)]
    for name, lengths in (("prompt", prompts), ("response", responses), ("total", prompts + responses)):
        bins = Counter(int(length) // width for length in lengths)
        assert found[name] == [bins[place] for place in range(NUM_BINS)]
        assert sum(found[name]) == len(prompts)


@pytest.mark.parametrize(("longest", "width"), [(1, 1), (63, 1), (64, 2), (127, 2), (128, 3), (4096, 65)])
def test_bins_are_as_narrow_as_the_longest_example_allows(longest: int, width: int) -> None:
    found = histogram(np.array([0, 1]), np.array([1, longest]))
    assert found["edges"][1] == width
    assert found["edges"][-1] > longest


def test_the_numbers_are_those_of_the_data_set(config: PrepareConfig) -> None:
    prepare(config)
    shards = Shards(config.folder)
    manifest = Manifest.load(Path(config.folder))
    assert [sum(manifest.lengths[name]) for name in NAMES] == [60] * 3
    examples = [shards[number] for number in range(60)]
    expected = histogram(np.array([len(e.prompt_ids) for e in examples]), np.array([len(e) for e in examples]))
    assert manifest.lengths == expected


# The picture


def test_the_picture_lies_in_the_folder_and_opens(config: PrepareConfig) -> None:
    prepare(config)
    with Image.open(Path(config.folder) / "lengths.png") as picture:
        picture.load()
        assert (picture.format, picture.size) == ("PNG", (1080, 720))
        assert len(picture.convert("L").getcolors()) > 2  # something is drawn on it


def test_equal_numbers_give_an_equal_picture_and_others_another(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    first = histogram(rng.integers(1, 50, 30), rng.integers(50, 99, 30))
    second = histogram(rng.integers(1, 50, 30), rng.integers(50, 99, 30))
    for name, numbers in (("a", first), ("b", first), ("c", second)):
        draw(numbers, tmp_path / f"{name}.png")
    contents = [(tmp_path / f"{name}.png").read_bytes() for name in "abc"]
    assert contents[0] == contents[1] != contents[2]
    assert b"Software" not in contents[0]  # another version of the library would change the file


def test_a_single_example_can_be_drawn(tmp_path: Path) -> None:
    draw(histogram(np.array([1]), np.array([2])), tmp_path / "a.png")
    Image.open(tmp_path / "a.png").verify()


def test_without_matplotlib_only_the_picture_is_missing(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)  # else what is imported already would serve
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    prepare(config)
    folder = Path(config.folder)
    assert not (folder / "lengths.png").exists()
    manifest = Manifest.load(folder)
    assert [sum(manifest.lengths[name]) for name in NAMES] == [60] * 3
    assert "lengths.png" not in [file["name"] for file in manifest.files]
    assert len(Shards(folder)) == 60
    assert list(verify(folder)) == []
