"""Preparation: the tokens, what is dropped, what the folder holds, and what an interruption costs."""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import pickle
import re
import signal
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
import yaml
from rich.progress import Progress
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lit_refusion.chat import PromptFormat
from lit_refusion.cli import main
from lit_refusion.config import config_folder, load_config
from lit_refusion.data import lengths, parts, shard_writing
from lit_refusion.data import prepare as module
from lit_refusion.data.formats import BadRecordError
from lit_refusion.data.parts import Tokenizing, make_part
from lit_refusion.data.permutation import mix
from lit_refusion.data.prepare import PrepareConfig, Prepared, prepare
from lit_refusion.data.selection import SourceCounts
from lit_refusion.data.shards import Manifest, Shards
from lit_refusion.data.sources import Source
from lit_refusion.data.verification import verify
from lit_refusion.errors import UserError
from lit_refusion.new_folder import partial_folder
from lit_refusion.schema import build
from lit_refusion.tokenizer import load_tokenizer, tokenizer_fingerprint
from tests.conftest import make_source as source
from tests.conftest import make_tokenizer

Configure = Callable[..., PrepareConfig]
Record = dict[str, Any]
WORKERS = [0, 1, 2, 3]
BLOCK = 10
"""Records of a block in most tests: the 60 additions take six."""
GOOD = {"query": "What is 1 + 2?", "response": "3"}


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_lines(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def style(name: str, **template_kwargs: Any) -> PromptFormat:
    return PromptFormat(style=name, template_kwargs=template_kwargs)


def draw_quickly(numbers: dict[str, list[int]], path: Path) -> None:
    path.write_text(json.dumps(numbers))


@pytest.fixture(autouse=True)
def quick_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than all the rest; `test_lengths` has the real picture."""
    monkeypatch.setattr(lengths, "draw", draw_quickly)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are cut in this process, so this holds for the work of all processes."""
    monkeypatch.setattr(parts, "BLOCK_SIZE", BLOCK)


@pytest.fixture(scope="module", autouse=True)
def processes() -> None:
    """A server of processes that has imported this file, so that no process needs seconds for it."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([module.PRELOAD, __name__])
    forkserver.ensure_running()


@pytest.fixture
def configure(records: Path, tokenizer_folder: Path, tmp_path: Path) -> Configure:
    """A config of the 60 additions into `tmp_path/out/data`, with changes."""

    def make(*files: Path, **changes: Any) -> PrepareConfig:
        values = {
            "folder": str(tmp_path / "out" / "data"),
            "tokenizer": str(tokenizer_folder),
            "sources": (source(*(files or (records,))),),
            "prompt_format": style("chat"),
            "max_length": 200,
            "num_examples": None,
            "seed": 0,
            "examples_per_shard": 16,
            "on_error": "raise",
        }
        return PrepareConfig(**{**values, **changes})

    return make


@pytest.fixture
def mixture(configure: Configure, records: Path, tmp_path: Path) -> PrepareConfig:
    """Two sources with duplicates, bad records, filters, weights and a subset: every rule has something to do."""
    lines = read_lines(records)
    chats = [{"messages": [{"role": "user", "content": f"Hi {n}"}, {"role": "assistant", "content": "x" * n}]}
             for n in range(1, 20)]  # fmt: skip
    mixed = [*lines[:7], {"query": "no response"}, *chats, chats[3], *lines[50:], {"query": 1, "response": "r"}]
    first = source(records, name="sums", weight=1.5, max_examples=40)
    second = source(
        *(write(tmp_path / "mixed.jsonl", mixed), write(tmp_path / "more.jsonl", lines[:3] + chats[:1])),
        name="mixed",
        weight=2.0,
        max_tokens=38,
        min_response_tokens=3,
        deduplicate=True,
    )
    return configure(sources=(first, second), on_error="skip", num_examples=70, examples_per_shard=9)


def elsewhere(config: PrepareConfig, name: str) -> PrepareConfig:
    return replace(config, folder=str(Path(config.folder).parent.parent / name))


def prepare_into(config: PrepareConfig, **options: Any) -> Path:
    prepare(config, **options)
    return Path(config.folder)


def tree(folder: str | Path) -> dict[str, str]:
    """SHA-256 of every file."""
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def fresh_tree(config: PrepareConfig) -> dict[str, str]:
    """What the same settings give where nothing was before."""
    return tree(prepare_into(elsewhere(config, "fresh")))


def prepared_texts(config: PrepareConfig, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    shards = Shards(Path(config.folder))
    examples = [shards[i] for i in range(len(shards))]
    return [(tokenizer.decode(e.prompt_ids), tokenizer.decode(e.response_ids)) for e in examples]


def left_behind(config: PrepareConfig) -> list[str]:
    folder = Path(config.folder).parent
    return sorted(os.listdir(folder)) if folder.exists() else []


def counted(name: str = "mine", **figures: Any) -> Record:
    """A source's entry in the manifest, but for `refused`."""
    entry = asdict(SourceCounts(name=name, **figures))
    del entry["refused"]
    return entry


def counts_of(prepared: Prepared) -> list[Record]:
    return [counted(**{k: v for k, v in asdict(count).items() if k != "refused"}) for count in prepared.counts]


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of texts in every batch that this process tokenises."""
    batches: list[int] = []
    encode = parts.encode

    def counting(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        batches.append(len(texts))
        return encode(texts, tokenizer)

    monkeypatch.setattr(parts, "encode", counting)
    return batches


# Tokens


def test_tokens_are_those_of_the_template_and_the_tokenizer(
    configure: Configure, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "BLOCK_SIZE", 25)
    monkeypatch.setattr(parts, "TOKENIZE_BATCH", 7)  # each block takes several batches
    prepare(config := configure())
    shards = Shards(config.folder)
    expected = set()
    for query, response in [(f"What is {a} + {b}?", f"The answer is {a + b}.") for a in range(12) for b in range(5)]:
        prompt = f"<|im_start|>user\n{query}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer.backend_tokenizer.encode(response).ids
        response_ids = (*ids, tokenizer.convert_tokens_to_ids("<|im_end|>"))
        expected.add((tuple(tokenizer.backend_tokenizer.encode(prompt).ids), response_ids))
    found = [(tuple(shards[i].prompt_ids.tolist()), tuple(shards[i].response_ids.tolist())) for i in range(60)]
    assert len(shards) == len(expected) == 60
    assert set(found) == expected
    assert [(shards[i].index, shards[i].source) for i in range(60)] == [(i, "mine") for i in range(60)]


def test_chat_with_system_and_several_turns(
    configure: Configure, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    texts = [("system", "Short."), ("user", "Où?"), ("assistant", "Là."), ("user", "When?"), ("assistant", "Now.")]
    record = {"messages": [{"role": role, "content": text} for role, text in texts]}
    prepare(config := configure(write(tmp_path / "chat.jsonl", [record])))
    prompt = (
        "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\nOù?<|im_end|>\n<|im_start|>assistant\nLà.<|im_end|>\n"
        "<|im_start|>user\nWhen?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prepared_texts(config, tokenizer) == [(prompt, "Now.<|im_end|>")]


def test_plain_style_joins_the_texts(configure: Configure, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    chat = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant")]
    path = write(tmp_path / "a.jsonl", [{"query": "1 + 1 = ", "response": "2"}, {"messages": chat}])
    prepare(config := configure(path, prompt_format=style("plain")))
    assert sorted(prepared_texts(config, tokenizer)) == [("1 + 1 = ", "2<|im_end|>"), ("su", "a<|im_end|>")]


def test_template_variables_reach_the_template(configure: Configure, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if thinking %} hmm{% endif %}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = write(tmp_path / "a.jsonl", [{"query": "q", "response": "r"}])
    settings = {"tokenizer": str(tmp_path / "tokenizer"), "prompt_format": style("chat", thinking=True)}
    manifest = prepare(config := configure(path, **settings)).manifest
    assert prepared_texts(config, tokenizer) == [("q hmm", "r<|im_end|>")]
    assert manifest.prompt_format == {"style": "chat", "template_kwargs": {"thinking": True}}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_template_variables_that_the_template_cannot_use_are_named(num_workers: int, configure: Configure) -> None:
    config = configure(prompt_format=style("chat", tokenize=True))
    with pytest.raises(UserError, match=r"data\.prompt_format\.template_kwargs: the chat template cannot use them"):
        prepare(config, num_workers=num_workers)


def test_chat_style_needs_a_template(configure: Configure, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(UserError, match=r"prompt_format\.style=chat, but .* no chat template"):
        prepare(config := configure(tokenizer=str(tmp_path / "tokenizer")))
    assert left_behind(config) == []


def test_a_data_set_of_the_hub_is_read_like_files(configure: Configure, records: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(read_lines(records)).save_to_disk(tmp_path / "saved")
    config = configure(sources=(source(name="mine", hub=str(tmp_path / "saved")),))
    prepared = prepare(config)
    expected = prepare(elsewhere(configure(), "files"))
    assert prepared.manifest.content_fingerprint == expected.manifest.content_fingerprint
    assert prepared.counts == expected.counts


# Order


def text_key(*texts: str) -> int:
    """The documented identity of an example: a hash of its roles and texts; alternating from the end, "user" first."""
    roles = {2: ("user",), 3: ("system", "user")}[len(texts)]
    parts = [text for pair in zip(roles, texts) for text in pair]
    return int.from_bytes(hashlib.blake2b("\x1f".join([*parts, texts[-1]]).encode(), digest_size=8).digest(), "little")


def test_examples_are_sorted_by_source_and_by_the_hash_of_their_text(
    configure: Configure, records: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    chat = [{"role": role, "content": text} for role, text in (("system", "s"), ("user", "q"), ("assistant", "r"))]
    second = write(tmp_path / "second.jsonl", [*read_lines(records)[:20], {"messages": chat}])
    config = configure(sources=(source(records), source(second, name="second")), prompt_format=style("plain"))
    prepare(config)
    shards = Shards(config.folder)
    keys = shards.keys.tolist()
    assert keys[:60] == sorted(keys[:60])
    assert keys[60:] == sorted(keys[60:])
    assert [shards[i].source for i in range(81)] == ["mine"] * 60 + ["second"] * 21
    expected = {line["query"]: text_key(line["query"], line["response"]) for line in read_lines(records)}
    expected["sq"] = text_key("s", "q", "r")
    assert keys == [expected[prompt] for prompt, _ in prepared_texts(config, tokenizer)]


def test_chats_that_differ_in_a_role_are_different_examples(configure: Configure, tmp_path: Path) -> None:
    roles = [("system", "user", "assistant"), ("user", "user", "assistant")]
    chats = [{"messages": [{"role": role, "content": "a"} for role in its_roles]} for its_roles in roles]
    path = write(tmp_path / "a.jsonl", chats)
    prepared = prepare(configure(sources=(source(path, deduplicate=True),)))
    assert prepared.manifest.num_examples == 2


# Drops


def test_over_long_examples_are_dropped_and_counted_never_cut(configure: Configure, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"query": "q", "response": "z" * n} for n in (1, 5, 9, 10, 11, 30, 2)])
    whole = Shards(prepare_into(configure(path, folder=str(tmp_path / "all"))))
    found = sorted(whole.lengths(np.arange(7)).tolist())
    limit = found[4]  # the response of 10 letters just fits
    config = configure(path, max_length=limit)
    prepared = prepare(config)
    assert counts_of(prepared) == [counted(read=7, kept=5, dropped={f"longer than max_length {limit}": 2})]
    assert prepared.manifest.longest == prepared.manifest.max_length == limit
    shards = Shards(config.folder)
    assert sorted(len(shards[i]) for i in range(5)) == found[:5]
    assert all(shards[i].response_ids[-1] == 2 for i in range(5))  # each still ends with EOS


def test_skip_counts_bad_records_and_lists_the_first_ten(configure: Configure, tmp_path: Path) -> None:
    bad = [{"query": "", "response": "r"} if n % 2 else {"query": "q"} for n in range(12)]
    path = write(tmp_path / "a.jsonl", [GOOD, *bad, GOOD])
    prepared = prepare(configure(path, on_error="skip"))
    expected = counted(read=14, kept=2, duplicates=1, dropped={"bad record": 12})
    assert counts_of(prepared) == [expected]
    assert len(prepared.errors) == 10
    for number, error in enumerate(prepared.errors, start=2):
        assert error.startswith(f"{path}: record {number}: field '{'query' if number % 2 else 'response'}' is ")


@pytest.mark.parametrize("num_workers", WORKERS)
def test_raise_stops_at_the_first_bad_record_whatever_the_number_of_processes(
    num_workers: int, configure: Configure, records: Path, tmp_path: Path
) -> None:
    lines = read_lines(records)
    lines[24] = {"query": "q"}  # in the third block
    lines[35] = lines[58] = {"response": "r"}
    other = write(tmp_path / "other.jsonl", [{"query": 1}])
    config = configure(write(tmp_path / "a.jsonl", lines), other)
    with pytest.raises(UserError, match=r"a\.jsonl: record 25: field 'response' is missing"):
        prepare(config, num_workers=num_workers)
    assert left_behind(config) == [".data.partial"]  # what is good of it waits for the next run


@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_bad_record_is_told_before_the_trouble_with_a_file_behind_it(
    num_workers: int, configure: Configure, tmp_path: Path
) -> None:
    bad = write(tmp_path / "bad.jsonl", [GOOD, {"query": "q"}])
    (tmp_path / "broken.json").write_text("{}")
    for later in (write(tmp_path / "empty.jsonl", []), tmp_path / "broken.json"):
        with pytest.raises(UserError, match=r"bad\.jsonl: record 2: field 'response'"):
            prepare(configure(bad, later), num_workers=num_workers)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_unreadable_file_is_an_error_whatever_on_error_says(
    on_error: str, configure: Configure, records: Path, tmp_path: Path
) -> None:
    (tmp_path / "cut.jsonl.gz").write_bytes(b"\x1f\x8b")
    config = configure(records, tmp_path / "cut.jsonl.gz", on_error=on_error)
    with pytest.raises(UserError, match=r"cut\.jsonl\.gz: cannot read it") as caught:
        prepare(config)
    assert not isinstance(caught.value, BadRecordError)
    assert not Path(config.folder).exists()


@pytest.mark.parametrize("content", ["", "\n  \n"], ids=["no byte", "blank lines"])
def test_an_empty_file_is_an_error_unless_bad_records_are_skipped(
    content: str, configure: Configure, records: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty.jsonl").write_text(content)
    config = configure(tmp_path / "empty.jsonl", records)
    with pytest.raises(UserError, match=r"empty\.jsonl: no record in it; remove it from data\.sources\[mine\]"):
        prepare(config)
    prepared = prepare(replace(config, on_error="skip"))
    assert counts_of(prepared) == [counted(read=60, kept=60)]
    assert prepared.errors == []


def test_a_source_of_weight_0_is_not_read(configure: Configure, records: Path) -> None:
    missing = Path("not", "there.jsonl")
    sources = (
        source(missing, name="off", weight=0.0),
        source(records),
        source(missing, name="off too", weight=0.0),
    )
    assert counts_of(prepare(configure(sources=sources))) == [counted(read=60, kept=60)]


def test_filters_count_exactly_what_they_drop(configure: Configure, tmp_path: Path) -> None:
    """In plain style a text of letters that were never merged has as many tokens as letters."""
    shapes = [(1, 3), (9, 3), (10, 3), (2, 17), (2, 18), (3, 1), (3, 2), (40, 40), (1, 3)]
    records = [{"query": "q" * prompt, "response": "z" * response} for prompt, response in shapes]
    limits = {"max_prompt_tokens": 9, "max_tokens": 20, "min_response_tokens": 3, "deduplicate": True}
    sources = (source(write(tmp_path / "a.jsonl", records), **limits),)
    prepared = prepare(config := configure(sources=sources, prompt_format=style("plain"), max_length=60))
    dropped = {
        "longer than max_length 60": 1,
        "prompt over 9 tokens": 1,
        "over 20 tokens": 1,  # 2 and 18 letters, with EOS
        "response under 3 tokens": 1,
        "duplicate": 1,
    }
    assert counts_of(prepared) == [counted(read=9, kept=4, duplicates=1, dropped=dropped)]
    assert prepared.counts[0].refused == {
        "prompt without tokens": 0,
        **dropped,
        "prompt over 9 tokens": 2,
        "over 20 tokens": 2,
    }
    shards = Shards(config.folder)
    kept = sorted((len(shards[i].prompt_ids), len(shards[i].response_ids) - 1) for i in range(4))
    assert kept == [(1, 3), (2, 17), (3, 2), (9, 3)]


@pytest.mark.parametrize(("weight", "kept", "repeats", "dropped"), [
    (0.5, 30, 0, {"left out by weight 0.5": 30}), (1.0, 60, 0, {}), (2.5, 150, 90, {}),
])  # fmt: skip
def test_a_weight_gives_an_exact_number_of_examples(
    weight: float, kept: int, repeats: int, dropped: dict[str, int], configure: Configure, records: Path
) -> None:
    prepared = prepare(config := configure(sources=(source(records, weight=weight),)))
    assert counts_of(prepared) == [counted(read=60, kept=kept, repeats=repeats, dropped=dropped)]
    keys = Shards(config.folder).keys
    assert len(keys) == prepared.manifest.num_examples == kept
    assert set(np.unique(keys, return_counts=True)[1].tolist()) == ({2, 3} if weight > 1 else {1})


# The subset


def test_num_examples_takes_the_smallest_hashes_over_all_sources(configure: Configure, records: Path) -> None:
    lines = read_lines(records)
    files = [write(records.with_name(f"{n}.jsonl"), lines[n : n + 20]) for n in (0, 20, 40)]
    sources = tuple(source(file, name=file.stem) for file in files)
    everything = Shards(prepare_into(elsewhere(configure(), "all"))).keys
    manifest = prepare(config := configure(sources=sources, num_examples=25, seed=4)).manifest
    found = Shards(config.folder).keys
    expected = np.sort(everything[np.argsort(mix(everything, 4))[:25]])
    assert manifest.num_examples == 25
    assert np.sort(found).tolist() == expected.tolist()


@pytest.mark.parametrize("wanted", [1, 25, 60])
def test_the_subset_does_not_depend_on_the_order_of_records_and_files(
    wanted: int, configure: Configure, records: Path, tmp_path: Path
) -> None:
    lines = read_lines(records)
    order = np.random.default_rng(0).permutation(60)
    halves = [write(tmp_path / f"{name}.jsonl", [lines[i] for i in half]) for name, half in
              (("b", order[:17]), ("a", order[17:]))]  # fmt: skip
    first = prepare_into(configure(num_examples=wanted))
    second = prepare_into(configure(*halves, num_examples=wanted, folder=str(tmp_path / "second")))
    assert tree(first) == tree(second)


def test_another_seed_gives_another_subset(configure: Configure) -> None:
    folders = [prepare_into(elsewhere(configure(num_examples=25, seed=seed), f"s{seed}")) for seed in (0, 1)]
    keys = [set(Shards(folder).keys.tolist()) for folder in folders]
    assert keys[0] != keys[1]
    assert len(keys[0]) == len(keys[1]) == 25


def test_more_examples_than_there_are_is_refused(configure: Configure) -> None:
    with pytest.raises(UserError, match=r"data\.num_examples=61: only 60 examples are left; lower it or add sources"):
        prepare(config := configure(num_examples=61))
    assert not Path(config.folder).exists()


# The folder


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_folder_appears_whole_or_not_at_all(
    error: type[BaseException], configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure()

    def fail(self: Manifest, folder: Path) -> None:
        assert not Path(config.folder).exists()
        assert len(list(folder.glob("shard-*.tar"))) == 4  # written, but elsewhere
        raise error("stopped")

    monkeypatch.setattr(Manifest, "save", fail)
    with pytest.raises(error, match="stopped"):
        prepare(config)
    assert left_behind(config) == [".data.partial"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_success_leaves_the_folder_and_nothing_else(num_workers: int, configure: Configure) -> None:
    prepare(config := configure(), num_workers=num_workers)
    assert left_behind(config) == ["data"]
    shards = [f"shard-{n:05d}.tar" for n in range(4)]
    others = ["index.npy", "keys.npy", "lengths.png", "manifest.json", "token_counts.npy", "tokenizer"]
    assert sorted(os.listdir(config.folder)) == sorted([*others, *shards])


def test_existing_folder_is_refused_and_left_alone(configure: Configure) -> None:
    config = configure()
    Path(config.folder).mkdir(parents=True)
    (Path(config.folder) / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match=r"data\.folder=.*: it exists already; remove it or choose another"):
        prepare(config)
    assert os.listdir(config.folder) == ["mine.txt"]
    assert left_behind(config) == ["data"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_length": 3}, r"\{'mine': \{'longer than max_length 3': 2\}\}"),
        ({"on_error": "skip"}, r"\{'mine': \{'bad record': 1"),
    ],
)
def test_empty_result_is_refused_with_the_reasons(
    changes: dict[str, Any], reason: str, configure: Configure, tmp_path: Path
) -> None:
    records = [{"query": "q", "response": "" if "on_error" in changes else "long"}, {"query": "q", "response": "long"}]
    path = write(tmp_path / "a.jsonl", records[: 1 if "on_error" in changes else 2])
    with pytest.raises(UserError, match=rf"no example is left \(dropped: {reason}"):
        prepare(config := configure(path, **changes))
    assert not Path(config.folder).exists()


def test_progress_runs_to_the_end(configure: Configure, records: Path, tmp_path: Path) -> None:
    lines = read_lines(records)
    files = [write(tmp_path / f"{n}.jsonl", lines[n : n + 25]) for n in (0, 25, 50)]
    with Progress(disable=True) as progress:
        prepare(configure(*files), progress=progress)
    found = [(task.description, task.completed, task.total) for task in progress.tasks]
    size = records.stat().st_size
    assert found == [("tokenise mine", size, size), ("write shards", 4, 4)]


# What the folder holds


def test_manifest_counts(
    configure: Configure, records: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    other = write(tmp_path / "other.jsonl", [GOOD, {"query": "q"}, {"query": "q", "response": "long " * 300}])
    prepared = prepare(config := configure(sources=(source(records), source(other, name="second")), on_error="skip"))
    manifest = Manifest.load(Path(config.folder))
    assert manifest.sources == [asdict(count) for count in prepared.counts]
    assert counts_of(prepared) == [
        counted(read=60, kept=60),
        counted("second", read=3, kept=1, dropped={"bad record": 1, "longer than max_length 200": 1}),
    ]
    shards = Shards(config.folder)
    examples = [shards[i] for i in range(len(shards))]
    assert [example.source for example in examples] == ["mine"] * 60 + ["second"]
    assert manifest.bounds() == [(0, 60), (60, 61)]
    assert manifest.num_examples == len(shards) == 61
    assert manifest.num_prompt_tokens == sum(len(example.prompt_ids) for example in examples)
    assert manifest.num_response_tokens == sum(len(example.response_ids) for example in examples)
    assert manifest.longest == max(map(len, examples))
    assert (manifest.dtype, manifest.max_length, manifest.version) == ("uint16", 200, 2)
    assert manifest.examples_per_shard == 16
    saved = load_tokenizer(Path(config.folder) / "tokenizer")
    assert manifest.tokenizer_fingerprint == tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(saved)


def test_manifest_describes_every_other_file(configure: Configure) -> None:
    prepare(config := configure())
    manifest = Manifest.load(Path(config.folder))
    assert [shard["name"] for shard in manifest.shards] == [f"shard-{n:05d}.tar" for n in range(4)]
    described = {file["name"]: file["sha256"] for file in (*manifest.shards, *manifest.files)}
    found = tree(config.folder)
    del found["manifest.json"]
    assert described == found
    for file in (*manifest.shards, *manifest.files):
        assert (Path(config.folder) / file["name"]).stat().st_size == file["num_bytes"]


def test_token_counts_are_the_occurrences(configure: Configure, tokenizer: PreTrainedTokenizerBase) -> None:
    prepare(config := configure())
    shards = Shards(config.folder)
    tokens = np.concatenate([ids for i in range(60) for ids in (shards[i].prompt_ids, shards[i].response_ids)])
    counts = shards.token_counts()
    assert counts.tolist() == [int((tokens == token).sum()) for token in range(len(tokenizer))]
    assert counts[tokenizer.eos_token_id] == 120  # <|im_end|> closes each prompt and each response


def tar_arrays(folder: str) -> list[np.ndarray]:
    arrays = []
    for path in sorted(Path(folder).glob("shard-*.tar")):
        with tarfile.open(path) as archive:
            for number, member in enumerate(archive, start=len(arrays)):
                assert member.name == f"{number:09d}.npy"
                arrays.append(np.load(io.BytesIO(archive.extractfile(member).read())))
    return arrays


def test_shards_are_plain_tars_of_numpy_arrays(configure: Configure) -> None:
    prepare(config := configure())
    shards = Shards(config.folder)
    arrays = tar_arrays(config.folder)
    assert len(arrays) == len(shards)
    for number, array in enumerate(arrays):
        example = shards[number]
        assert array.dtype == np.uint16
        assert array.tolist() == [len(example.prompt_ids), *example.prompt_ids, *example.response_ids]


def test_shards_are_read_by_webdataset(configure: Configure) -> None:
    prepare(config := configure())
    urls = sorted(map(str, Path(config.folder).glob("shard-*.tar")))
    samples = list(webdataset.WebDataset(urls, shardshuffle=False).decode())
    assert [sample["__key__"] for sample in samples] == [f"{n:09d}" for n in range(60)]
    assert [sample["npy"].tolist() for sample in samples] == [array.tolist() for array in tar_arrays(config.folder)]


# Fingerprints


def test_content_fingerprint_does_not_depend_on_how_the_content_is_cut(
    configure: Configure, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = read_lines(records)
    cut = [write(tmp_path / "part-1.jsonl", lines[:20]), write(tmp_path / "part-2.jsonl", lines[20:])]
    (tmp_path / "list.json").write_text(json.dumps(lines))
    expected = prepare(configure()).manifest.content_fingerprint
    monkeypatch.setattr(parts, "TOKENIZE_BATCH", 9)
    monkeypatch.setattr(parts, "BLOCK_SIZE", 23)
    variants = [
        configure(*cut, folder=str(tmp_path / "parts")),
        configure(tmp_path / "list.json", folder=str(tmp_path / "list")),
        configure(folder=str(tmp_path / "shards"), examples_per_shard=7),
        configure(write(tmp_path / "turned.jsonl", lines[::-1]), folder=str(tmp_path / "turned")),
    ]
    assert [prepare(config).manifest.content_fingerprint for config in variants] == [expected] * 4


def change_a_letter(lines: list[Record]) -> list[Record]:
    return [*lines[:-1], {**lines[-1], "response": lines[-1]["response"] + "!"}]


def move_text_from_prompt_to_response(lines: list[Record]) -> list[Record]:
    return [{"query": "What is ", "response": "0 + 0?The answer is 0."}, *lines[1:]]


CHANGES = [
    change_a_letter,
    move_text_from_prompt_to_response,
    lambda lines: lines[:-1],
    lambda lines: [*lines, lines[0]],
]


@pytest.mark.parametrize("change", CHANGES, ids=["letter", "border", "fewer", "more"])
def test_content_fingerprint_changes_with_the_content(
    change: Callable, configure: Configure, records: Path, tmp_path: Path
) -> None:
    changed = write(tmp_path / "changed.jsonl", change(read_lines(records)))
    plain = {"prompt_format": style("plain")}  # where only the border tells prompt from response
    expected = prepare(configure(**plain)).manifest.content_fingerprint
    found = prepare(configure(changed, folder=str(tmp_path / "changed"), **plain)).manifest.content_fingerprint
    assert found != expected


def test_content_fingerprint_does_not_depend_on_the_stored_type(configure: Configure, tmp_path: Path) -> None:
    expected = prepare(configure()).manifest.content_fingerprint
    wide = prepare(configure(folder=str(tmp_path / "wide"), max_length=70_000)).manifest  # nothing is dropped
    assert wide.dtype == "uint32"
    assert wide.content_fingerprint == expected


# Many processes


def test_every_byte_is_the_same_whatever_the_number_of_processes(mixture: PrepareConfig) -> None:
    found = [tree(prepare_into(elsewhere(mixture, f"by-{count}"), num_workers=count)) for count in WORKERS]
    assert found[1:] == found[:1] * 3
    assert "manifest.json" in found[0]
    assert len([name for name in found[0] if name.endswith(".tar")]) == 8


def test_the_mixture_of_these_tests_uses_every_rule(mixture: PrepareConfig) -> None:
    first, second = prepare(mixture).counts
    assert list(first.dropped) == ["beyond max_examples 40", "beyond num_examples 70"]
    assert list(second.dropped) == [
        *("bad record", "over 38 tokens", "response under 3 tokens", "duplicate", "beyond num_examples 70"),
    ]
    assert first.repeats == 20
    assert second.repeats > 0


def test_every_byte_is_the_same_whatever_the_size_of_the_blocks(
    mixture: PrepareConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for size in (1, 10, 1000):
        monkeypatch.setattr(parts, "BLOCK_SIZE", size)
        found.append(tree(prepare_into(elsewhere(mixture, f"of-{size}"))))
    monkeypatch.setattr(parts, "BLOCK_BYTES", 100)  # a record or two
    found.append(tree(prepare_into(elsewhere(mixture, "of-bytes"))))
    assert found[1:] == found[:1] * 3


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def make_part_or_die(block: bytes, settings: Tokenizing, folder: str) -> parts.Part:
    if b"What is 8 + 0?" in block:  # the fifth block
        die()
    return make_part(block, settings, folder)


def test_a_killed_worker_is_one_error_and_the_parts_are_kept(
    configure: Configure, tokenized: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure()
    expected = fresh_tree(config)
    with monkeypatch.context() as patch:
        patch.setattr(module, "make_part", make_part_or_die)
        with pytest.raises(UserError, match=r"a worker process was killed .* is kept: run the command again"):
            prepare(config, num_workers=2)
    assert left_behind(config) == [".data.partial"]
    tokenized.clear()
    assert tree(prepare_into(config)) == expected
    assert sum(tokenized) <= 30  # as a worker began the fifth block, the other had at most one of the four unfinished


def make_part_or_fill_the_disk(block: bytes, settings: Tokenizing, folder: str) -> parts.Part:
    if b"What is 8 + 0?" in block:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return make_part(block, settings, folder)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_full_disk_among_the_parts_keeps_them_and_says_so(
    num_workers: int, configure: Configure, tokenized: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure()
    expected = fresh_tree(config)
    kept = f"run the command again, what is finished is kept in {partial_folder(Path(config.folder))}"
    with monkeypatch.context() as patch:
        patch.setattr(module, "make_part", make_part_or_fill_the_disk)
        with pytest.raises(UserError, match=f"No space left .*{re.escape(kept)}"):
            prepare(config, num_workers=num_workers)
    tokenized.clear()
    assert tree(prepare_into(config)) == expected
    assert sum(tokenized) in ([20] if num_workers == 0 else [10, 20])  # another process may have done the sixth block


def shards_of(folder: Path) -> dict[str, tuple[int, int]]:
    """The identity of each shard on the disk: a rewritten one gets another."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.tar")}


def reused(before: dict[str, tuple[int, int]], config: PrepareConfig) -> list[str]:
    after = shards_of(Path(config.folder))
    return sorted(name for name in before if after.get(name) == before[name])


def unfinished_shards(config: PrepareConfig) -> dict[str, tuple[int, int]]:
    return shards_of(partial_folder(Path(config.folder)) / "out")


def test_a_full_disk_among_the_shards_keeps_them(
    configure: Configure, tokenized: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure()
    expected = fresh_tree(config)
    with monkeypatch.context() as patch:
        fail_at(patch, webdataset.TarWriter, "write", 2 * 16 + 5, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        with pytest.raises(UserError, match=r"No space left .* is kept in"):
            prepare(config)
    before = unfinished_shards(config)
    tokenized.clear()
    assert tree(prepare_into(config)) == expected
    assert tokenized == []
    assert reused(before, config) == ["shard-00000.tar", "shard-00001.tar"]


def fail_at(patch: pytest.MonkeyPatch, owner: Any, name: str, number: int, error: BaseException) -> None:
    """Have the call of this number fail."""
    original, calls = getattr(owner, name), itertools.count(1)

    def method(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            raise error
        return original(*args, **kwargs)

    patch.setattr(owner, name, method)


# Interruptions


@dataclass(frozen=True)
class Kill:
    """A place at which a run is killed, and what that leaves to do, without further processes.

    Args:
        arm: has the code of this process do it.
        texts: texts that the next run tokenises.
        shards: shards that it takes over.
    """

    arm: Callable[[], None]
    texts: int
    shards: int


def after(function: str, number: int) -> Callable[[], None]:
    """Killed once this many results of `make_part` or `write_shard` have been taken."""

    def arm() -> None:
        original = module.in_order

        def in_order(called: Callable, tasks: Iterator, **options: Any) -> Iterator[Any]:
            for done, result in enumerate(original(called, tasks, **options), start=1):
                yield result
                if (called.__name__, done) == (function, number):
                    die()

        module.in_order = in_order

    return arm


def at(owner: Any, name: str, number: int, half: Callable[..., Any] = lambda *_: None) -> Callable[[], None]:
    """Killed within the call of this number, of which `half` is done."""

    def arm() -> None:
        original, calls = getattr(owner, name), itertools.count(1)

        def method(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == number:
                half(*args)
                die()
            return original(*args, **kwargs)

        setattr(owner, name, method)

    return arm


KILLS = {
    "first part": Kill(after("make_part", 1), 50, 0),
    "fourth part": Kill(after("make_part", 4), 20, 0),
    "half of the third part": Kill(at(np, "save", 3, lambda file, _: file.write(b"\x93NUMPY")), 40, 0),
    "report of the third part without its name": Kill(at(Path, "replace", 9), 40, 0),
    "all parts": Kill(after("make_part", 6), 0, 0),
    "first shard": Kill(after("write_shard", 1), 0, 1),
    "half of the third shard": Kill(at(webdataset.TarWriter, "write", 2 * 16 + 5), 0, 2),
    "second shard without its note": Kill(at(shard_writing, "_write_note", 2), 0, 1),
    "all shards": Kill(after("write_shard", 4), 0, 4),
    "half of the index": Kill(at(np, "save", 7, lambda path, _: path.write_bytes(b"\x93NUMPY")), 0, 4),
    "no manifest": Kill(at(Manifest, "save", 1), 0, 4),
    "half a manifest": Kill(
        at(Manifest, "save", 1, lambda _, folder: (folder / "manifest.json").write_text('{"version"')), 0, 4
    ),
    "all but the name": Kill(at(module, "finish", 1), 0, 4),
}


def run_until_killed(config: PrepareConfig, place: str, num_workers: int) -> None:
    parts.BLOCK_SIZE, lengths.draw = BLOCK, draw_quickly
    KILLS[place].arm()
    prepare(config, num_workers=num_workers)


def kill(config: PrepareConfig, place: str, *, num_workers: int = 0) -> None:
    """Prepare in a process of its own, which does not come far."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=run_until_killed, args=(config, place, num_workers))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not Path(config.folder).exists()


@pytest.mark.parametrize("place", KILLS)
def test_a_killed_run_goes_on_and_gives_the_same_bytes(place: str, configure: Configure, tokenized: list[int]) -> None:
    config = configure()
    expected = fresh_tree(config)
    kill(config, place)
    before = unfinished_shards(config)
    tokenized.clear()

    prepare(config)

    assert tree(config.folder) == expected
    assert left_behind(config) == ["data"]
    assert sum(tokenized) == KILLS[place].texts
    assert reused(before, config) == [f"shard-{n:05d}.tar" for n in range(KILLS[place].shards)]


def test_a_run_of_many_processes_that_is_killed_goes_on_with_another_number_of_them(
    mixture: PrepareConfig, tokenized: list[int]
) -> None:
    expected = fresh_tree(mixture)
    total = sum(tokenized)
    kill(mixture, "fourth part", num_workers=2)
    tokenized.clear()
    prepare(elsewhere(mixture, "out/data"))
    assert sum(tokenized) <= total - 4 * BLOCK
    assert tree(mixture.folder) == expected


def test_a_run_that_is_killed_again_and_again_gets_there(mixture: PrepareConfig, tokenized: list[int]) -> None:
    expected = fresh_tree(mixture)
    for place in ("first part", "fourth part", "first shard", "half of the third shard", "half a manifest"):
        kill(mixture, place)
    tokenized.clear()
    assert tree(prepare_into(mixture, num_workers=3)) == expected
    assert tokenized == []


class Stopped(Exception):  # noqa: N818 - not a mistake of anyone
    """A run that a test stops when all is written but the manifest."""


def stop_before_the_manifest(config: PrepareConfig) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, Manifest, "save", 1, Stopped())
        with pytest.raises(Stopped):
            prepare(config)


def of_source(**changes: Any) -> Callable[[PrepareConfig], PrepareConfig]:
    return lambda config: replace(
        config, sources=tuple(replace(own, **changes) for own in config.sources), num_examples=None
    )


def of_all(**changes: Any) -> Callable[[PrepareConfig], PrepareConfig]:
    return lambda config: replace(config, **changes)


NEW_SETTINGS = {
    "larger shards": of_all(examples_per_shard=40),
    "smaller shards": of_all(examples_per_shard=4),
    "shorter": of_all(max_length=31, num_examples=None),
    "fewer": of_all(num_examples=10),
    "all": of_all(num_examples=None),
    "seed": of_all(seed=1),
    "max_examples": of_source(max_examples=11),
    "max_prompt_tokens": of_source(max_prompt_tokens=22),
    "max_tokens": of_source(max_tokens=30),
    "min_response_tokens": of_source(min_response_tokens=9),
    "more weight": of_source(weight=3.5),
    "less weight": of_source(weight=0.5),
    "duplicates": of_source(deduplicate=False),
    "other order": lambda config: replace(config, sources=config.sources[::-1]),
    "one source": lambda config: replace(config, sources=(replace(config.sources[0], weight=0), config.sources[1]),
                                         num_examples=None),
}  # fmt: skip


@pytest.mark.parametrize("change", NEW_SETTINGS)
def test_other_settings_after_an_interruption_need_no_tokenizer_and_give_what_a_fresh_run_gives(
    change: str, mixture: PrepareConfig, tokenized: list[int]
) -> None:
    stop_before_the_manifest(mixture)
    config = NEW_SETTINGS[change](mixture)
    expected = fresh_tree(config)
    assert set(tree(partial_folder(Path(config.folder)) / "out").items()) - set(expected.items())  # something is stale
    tokenized.clear()
    assert tree(prepare_into(config)) == expected
    assert tokenized == []


def test_settings_that_are_changed_and_changed_back_give_what_a_fresh_run_gives(configure: Configure) -> None:
    config = configure(num_examples=32)
    expected = fresh_tree(config)
    stop_before_the_manifest(config)
    stop_before_the_manifest(replace(config, seed=1))  # other examples in shards of the same size
    assert tree(prepare_into(config)) == expected


def test_another_tokenizer_after_an_interruption_gives_what_a_fresh_run_gives(
    configure: Configure, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "other")
    stop_before_the_manifest(configure())  # its tokenizer has a file with the chat template
    config = configure(tokenizer=str(tmp_path / "other"), prompt_format=style("plain"))
    expected = fresh_tree(config)
    assert tree(prepare_into(config)) == expected


def test_equal_settings_take_over_the_parts_wherever_they_come_from(configure: Configure, tokenized: list[int]) -> None:
    config = configure()
    same = pickle.loads(pickle.dumps(config))  # its equal strings are other objects
    assert same == config
    prepare(same, dry_run=True)
    tokenized.clear()
    prepare(config)
    assert tokenized == []


@pytest.mark.parametrize("what", ["prompt format", "tokenizer at the same path", "stored type", "text", "field"])
def test_parts_of_other_tokens_are_not_taken_over(
    what: str, configure: Configure, tmp_path: Path, tokenized: list[int]
) -> None:
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    lines = [{"query": f"q {n}", "response": f"r {n}", "other": f"o {n}"} for n in range(20)]
    path = write(tmp_path / "a.jsonl", lines)
    config = configure(path, tokenizer=str(tmp_path / "tokenizer"))
    prepare(config, dry_run=True)
    if what == "prompt format":
        config = replace(config, prompt_format=style("plain"))
    elif what == "tokenizer at the same path":
        tokenizer = make_tokenizer()
        tokenizer.chat_template = "{{ messages[0]['content'] }} -> "
        tokenizer.save_pretrained(tmp_path / "tokenizer")
    elif what == "stored type":
        config = replace(config, max_length=70_000)
    elif what == "text":
        write(path, [{**line, "response": line["response"].upper()} for line in lines])
    else:
        config = replace(config, sources=(source(path, response="other"),))
    expected = fresh_tree(config)
    tokenized.clear()
    assert tree(prepare_into(config)) == expected
    assert sum(tokenized) == 20


def test_only_the_blocks_that_changed_are_tokenised_again(
    configure: Configure, records: Path, tokenized: list[int]
) -> None:
    config = configure()
    prepare(config, dry_run=True)
    lines = read_lines(records)
    lines[34]["query"] = lines[34]["query"].replace("4", "5")  # as long as before
    write(records, lines)
    tokenized.clear()
    prepare(config)
    assert tokenized == [10]


def test_parts_with_bad_records_are_taken_over_with_their_errors(
    configure: Configure, tmp_path: Path, tokenized: list[int]
) -> None:
    path = write(tmp_path / "a.jsonl", [*[GOOD] * 14, {"query": "q"}, *[GOOD] * 9, {"response": "r"}])
    config = configure(path, on_error="skip")
    errors = prepare(config, dry_run=True).errors
    tokenized.clear()
    with pytest.raises(UserError, match=r"record 15: field 'response'"):
        prepare(replace(config, on_error="raise"))
    prepared = prepare(config)
    assert prepared.errors == errors
    assert [re.findall(r"record \d+", error) for error in errors] == [["record 15"], ["record 25"]]
    assert counts_of(prepared)[0]["dropped"] == {"bad record": 2}
    assert tokenized == []


def test_a_second_process_on_the_same_target_is_refused(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure()
    expected = fresh_tree(config)
    save = Manifest.save

    def try_again(self: Manifest, folder: Path) -> None:
        with pytest.raises(UserError, match=r"data\.folder=.*: another process is writing it; wait for it"):
            prepare(config)
        save(self, folder)

    monkeypatch.setattr(Manifest, "save", try_again)
    assert tree(prepare_into(config)) == expected


# Dry run


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dry_run_counts_and_writes_nothing_and_the_run_itself_needs_no_tokenizer(
    num_workers: int, mixture: PrepareConfig, tokenized: list[int]
) -> None:
    expected = fresh_tree(mixture)
    dry = prepare(mixture, num_workers=num_workers, dry_run=True)
    assert dry.manifest is None
    assert left_behind(mixture) == [".data.partial"]
    assert unfinished_shards(mixture) == {}
    tokenized.clear()
    prepared = prepare(mixture)
    assert tree(mixture.folder) == expected
    assert (prepared.counts, prepared.errors) == (dry.counts, dry.errors)
    assert tokenized == []


# The command


@pytest.fixture
def command(records: Path, tokenizer_folder: Path, tmp_path: Path) -> list[str]:
    """The command line of the 60 additions and three copies."""
    write(tmp_path / "twice.jsonl", [*read_lines(records), *read_lines(records)[:3]])
    return [
        *("prepare", "data=files", f"data.folder={tmp_path}/out/data", f"data.tokenizer={tokenizer_folder}"),
        *(f"data.sources.0.files=[{tmp_path}/twice.jsonl]", "num_workers=0", "data.max_length=200"),
    ]


def test_the_command_reports_what_it_wrote(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "data.sources.0.weight=2", "data.max_length=31"]) == 0
    manifest = Manifest.load(tmp_path / "out" / "data")
    tokens = manifest.num_prompt_tokens + manifest.num_response_tokens
    dropped = manifest.sources[0]["dropped"]["longer than max_length 31"]
    kept = manifest.num_examples
    assert capsys.readouterr().out.splitlines() == [
        f"files: read 63, kept {kept}, dropped {dropped} longer than max_length 31, repeated {kept // 2}",
        "files: 2 examples repeat an earlier text; deduplicate=true drops them",
        f"{tmp_path}/out/data: {kept} examples, {tokens:,} tokens ({manifest.num_response_tokens:,} in responses), "
        f"longest {manifest.longest}, 1 shards",
    ]


def test_duplicates_that_are_dropped_need_no_advice(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "data.sources.0.deduplicate=true"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "files: read 63, kept 60, dropped 3 duplicate"
    assert "deduplicate=true" not in out


def test_a_dry_run_prints_what_every_filter_refuses_and_drops(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filters = ["data.sources.0.deduplicate=true", "data.sources.0.max_examples=50", "data.num_examples=40"]
    assert main([*command, *filters, "dry_run=true"]) == 0
    out = capsys.readouterr().out
    rows = [re.split(r" *[│┃] *", line)[1:-1] for line in out.splitlines() if line.startswith("│")]
    assert rows == [
        ["files", "prompt without tokens", "0", "0"],
        ["files", "longer than max_length 200", "0", "0"],
        ["files", "duplicate", "3", "3"],
        ["files", "beyond max_examples 50", "", "10"],
        ["files", "beyond num_examples 40", "", "10"],
    ]
    assert f"dry run: {tmp_path}/out/data is not written" in out
    assert not (tmp_path / "out" / "data").exists()


def test_an_interrupted_command_says_where_its_work_is(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_at(patch, Manifest, "save", 1, KeyboardInterrupt())
        assert main(command) == 130
    kept = f"what is finished is kept in {tmp_path}/out/.data.partial; run the command again to go on"
    assert kept in capsys.readouterr().out
    assert main(command) == 0


@pytest.mark.parametrize("setting", ["num_workers=-1", "num_workers=x", "num_workers=1.5", "dry_run=3"])
def test_the_command_refuses_bad_settings_of_its_own(
    setting: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, setting]) == 2
    assert "give a number of processes or null, and true or false" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# Settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_length": 0}, r"data\.max_length=0: must be at least 1"),
        ({"examples_per_shard": 0}, r"data\.examples_per_shard=0: must be at least 1"),
        ({"num_examples": 0}, r"data\.num_examples=0: must be at least 1"),
        ({"seed": -1}, r"data\.seed=-1: must not be negative"),
        ({"sources": ()}, r"data\.sources: give at least one source"),
        (
            {"sources": (source(Path("a"), weight=0),)},
            r"data\.sources: give at least one source with a weight above 0",
        ),
        (
            {"sources": (source(Path("a")), source(Path("b")))},
            r"data\.sources: the names \['mine', 'mine'\] must diff",
        ),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str, configure: Configure) -> None:
    with pytest.raises(UserError, match=message):
        configure(**changes)


def test_a_negative_number_of_processes_is_refused(configure: Configure) -> None:
    with pytest.raises(UserError, match=r"num_workers=-1: must not be negative"):
        prepare(config := configure(), num_workers=-1)
    assert left_behind(config) == []


def test_a_missing_file_is_named_before_anything_is_tokenised(
    configure: Configure, records: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"data\.sources\[mine\]\.files=.*none\.jsonl: no such file"):
        prepare(config := configure(records, tmp_path / "none.jsonl"))
    assert not Path(config.folder).exists()


def test_the_subset_of_the_comparison_is_the_papers_data_but_for_its_size() -> None:
    whole, subset = (load_config("prepare", [f"data={name}"])["data"] for name in ("refusion_3p7m", "refusion_120k"))
    assert subset == {**whole, "folder": "runs/data/refusion_120k", "num_examples": 120_000}
    config = build(subset, PrepareConfig, key="data")
    assert [own.name for own in config.sources if own.weight] == ["released"]
    assert config.on_error == "skip"


DATA_FILES = {path.stem: yaml.safe_load(path.read_text()) for path in (config_folder() / "data").glob("*.yaml")}


@pytest.mark.parametrize("name", sorted(name for name, content in DATA_FILES.items() if "sources" in content))
def test_every_yaml_with_sources_lists_every_setting(name: str) -> None:
    assert list(DATA_FILES[name]) == [field.name for field in fields(PrepareConfig)]
    for entry in DATA_FILES[name]["sources"]:
        assert list(entry) == [field.name for field in fields(Source)]


def test_there_are_yaml_files_with_sources() -> None:
    assert {name for name, content in DATA_FILES.items() if "sources" in content} >= {"demo", "files", "hub"}


# Bugs


def test_half_a_surrogate_pair_is_skipped(configure: Configure, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [GOOD, {"query": "\ud83d", "response": "r"}])
    assert prepare(configure(path, on_error="skip")).manifest.sources[0]["dropped"] == {"bad record": 1}


def test_chat_that_the_template_refuses_is_a_bad_record(configure: Configure, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        + tokenizer.chat_template
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    chat = [{"role": role, "content": "x"} for role in ("system", "user", "assistant")]
    path = write(tmp_path / "a.jsonl", [GOOD, {"messages": chat}])
    prepared = prepare(configure(path, tokenizer=str(tmp_path / "tokenizer"), on_error="skip"))
    assert prepared.manifest.sources[0]["dropped"] == {"bad record": 1}
    assert prepared.errors[0].startswith(f"{path}: record 2: ")
    assert "System role not supported" in prepared.errors[0]


def test_tokenizer_with_unused_ids(configure: Configure, tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "q": 1, "r": 2, "</s>": 9}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(tmp_path / "tokenizer")
    path = write(tmp_path / "a.jsonl", [{"query": "q", "response": "r"}])
    config = configure(path, tokenizer=str(tmp_path / "tokenizer"), prompt_format=style("plain"))
    prepare(config)
    assert Shards(config.folder).token_counts().tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0, 1]


def test_a_prepared_mixture_is_whole(mixture: PrepareConfig) -> None:
    assert list(verify(prepare_into(mixture))) == []
