"""When two tokenizers are the same one, and what is said about those that cannot be used."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import normalizers
from transformers import PreTrainedTokenizerBase

from lit_refusion.errors import UserError
from lit_refusion.tokenizer import load_tokenizer, tokenizer_fingerprint
from tests.conftest import make_tokenizer


@pytest.fixture
def broken_folder(tokenizer_folder: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(tokenizer_folder, tmp_path / "broken"))


def test_load_gives_the_same_ids(tokenizer: PreTrainedTokenizerBase, tokenizer_folder: Path) -> None:
    loaded = load_tokenizer(tokenizer_folder)
    text = "What is 1 + 2?<|im_end|> Zoë"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert (loaded.eos_token_id, loaded.chat_template) == (tokenizer.eos_token_id, tokenizer.chat_template)


def test_fingerprint_survives_save_and_reload(tokenizer: PreTrainedTokenizerBase, tokenizer_folder: Path) -> None:
    loaded = load_tokenizer(str(tokenizer_folder))
    assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(tokenizer)


def test_fingerprint_does_not_depend_on_the_folder(tokenizer_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tokenizer_folder, tmp_path / "elsewhere" / "another-name")
    expected = tokenizer_fingerprint(load_tokenizer(tokenizer_folder))
    assert tokenizer_fingerprint(load_tokenizer(copy)) == expected
    load_tokenizer(copy).save_pretrained(tmp_path / "again")
    assert tokenizer_fingerprint(load_tokenizer(tmp_path / "again")) == expected


def test_fingerprint_does_not_depend_on_earlier_calls(tokenizer: PreTrainedTokenizerBase) -> None:
    used = make_tokenizer()
    used(["a", "b b b"], padding=True, truncation=True, max_length=2)
    assert used.backend_tokenizer.truncation is not None
    assert tokenizer_fingerprint(used) == tokenizer_fingerprint(tokenizer)


def add_token(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.add_tokens(["<tool>"])


def add_special_token(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})


def change_template(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template += " "


def remove_template(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = None


def change_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.eos_token = "<|endoftext|>"


def change_normalizer(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()


CHANGES = [add_token, add_special_token, change_template, remove_template, change_eos, change_normalizer]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_fingerprint_differs_after(change: Callable, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    changed = make_tokenizer()
    assert tokenizer_fingerprint(changed) == tokenizer_fingerprint(tokenizer)
    change(changed)
    assert tokenizer_fingerprint(changed) != tokenizer_fingerprint(tokenizer)
    changed.save_pretrained(tmp_path)
    assert tokenizer_fingerprint(load_tokenizer(tmp_path)) == tokenizer_fingerprint(changed)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot load it .*give a folder or a hub id") as caught:
        load_tokenizer(tmp_path / "none")
    assert str(caught.value).startswith(f"tokenizer={tmp_path / 'none'}: ")
    assert "\n" not in str(caught.value)


def test_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(f"tokenizer={tmp_path}: cannot load it")):
        load_tokenizer(tmp_path)


def test_damaged_file_is_an_error_that_names_the_folder(broken_folder: Path) -> None:
    content = (broken_folder / "tokenizer.json").read_text()
    (broken_folder / "tokenizer.json").write_text(content[: len(content) // 2])
    with pytest.raises(UserError, match=re.escape(f"tokenizer={broken_folder}: cannot load it")):
        load_tokenizer(broken_folder)


def test_end_of_sequence_token_is_required(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=re.escape(f"tokenizer={tmp_path}: it has no eos_token; set one")):
        load_tokenizer(tmp_path)


def test_tokenizer_of_a_newer_library_is_an_error_that_names_the_folder(broken_folder: Path) -> None:
    path = broken_folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pre_tokenizer": {"type": "Newer"}}))
    with pytest.raises(UserError, match=re.escape(f"tokenizer={broken_folder}: cannot load it")):
        load_tokenizer(broken_folder)
