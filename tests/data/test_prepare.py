"""Preparation: the tokens, what is dropped, what the folder holds, and that it appears whole or not at all."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lit_refusion.chat import PromptFormat
from lit_refusion.data import prepare as module
from lit_refusion.data.prepare import PrepareConfig, prepare
from lit_refusion.data.records import BadRecordError, Source
from lit_refusion.data.shards import Manifest, Shards
from lit_refusion.errors import UserError
from lit_refusion.tokenizer import load_tokenizer, tokenizer_fingerprint
from tests.conftest import make_tokenizer

Configure = Callable[..., PrepareConfig]


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def source(*files: Path, name: str = "mine") -> Source:
    return Source(name=name, files=tuple(map(str, files)), query="query", response="response", messages="messages")


def style(name: str, **template_kwargs: Any) -> PromptFormat:
    return PromptFormat(style=name, template_kwargs=template_kwargs)


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
            "examples_per_shard": 16,
            "on_error": "raise",
        }
        return PrepareConfig(**{**values, **changes})

    return make


def prepared_texts(config: PrepareConfig, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    shards = Shards(Path(config.folder))
    examples = [shards[i] for i in range(len(shards))]
    return [(tokenizer.decode(e.prompt_ids), tokenizer.decode(e.response_ids)) for e in examples]


def left_behind(config: PrepareConfig) -> list[str]:
    folder = Path(config.folder).parent
    return sorted(os.listdir(folder)) if folder.exists() else []


# Tokens


def test_tokens_are_those_of_the_template_and_the_tokenizer(
    configure: Configure, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOKENIZE_BATCH", 7)  # 60 examples take nine batches
    prepare(config := configure())
    shards = Shards(config.folder)
    expected = [(f"What is {a} + {b}?", f"The answer is {a + b}.") for a in range(12) for b in range(5)]
    assert len(shards) == len(expected)
    for number, (query, response) in enumerate(expected):
        prompt = f"<|im_start|>user\n{query}<|im_end|>\n<|im_start|>assistant\n"
        example = shards[number]
        assert example.prompt_ids.tolist() == tokenizer.backend_tokenizer.encode(prompt).ids
        ids = tokenizer.backend_tokenizer.encode(response).ids
        assert example.response_ids.tolist() == [*ids, tokenizer.convert_tokens_to_ids("<|im_end|>")]
        assert (example.index, example.source) == (number, "mine")


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
    assert prepared_texts(config, tokenizer) == [("1 + 1 = ", "2<|im_end|>"), ("su", "a<|im_end|>")]


def test_template_variables_reach_the_template(configure: Configure, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if thinking %} hmm{% endif %}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = write(tmp_path / "a.jsonl", [{"query": "q", "response": "r"}])
    settings = {"tokenizer": str(tmp_path / "tokenizer"), "prompt_format": style("chat", thinking=True)}
    manifest = prepare(config := configure(path, **settings)).manifest
    assert prepared_texts(config, tokenizer) == [("q hmm", "r<|im_end|>")]
    assert manifest.prompt_format == {"style": "chat", "template_kwargs": {"thinking": True}}


def test_chat_style_needs_a_template(configure: Configure, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(UserError, match=r"prompt_format\.style=chat, but .* no chat template"):
        prepare(configure(tokenizer=str(tmp_path / "tokenizer")))


# Drops


def test_over_long_examples_are_dropped_and_counted_never_cut(configure: Configure, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"query": "q", "response": "z" * n} for n in (1, 5, 9, 10, 11, 30, 2)])
    lengths = Shards(prepare_into(configure(path, folder=str(tmp_path / "all")))).lengths()
    limit = int(lengths[3])  # the response of 10 letters just fits
    config = configure(path, max_length=limit)
    manifest = prepare(config).manifest
    assert manifest.sources == [{"name": "mine", "read": 7, "kept": 5, "dropped": {"longer than max_length": 2}}]
    assert manifest.longest == manifest.max_length == limit
    shards = Shards(config.folder)
    assert [len(example) for example in map(shards.__getitem__, range(5))] == lengths[[0, 1, 2, 3, 6]].tolist()
    assert all(shards[i].response_ids[-1] == 2 for i in range(5))  # each still ends with EOS


def prepare_into(config: PrepareConfig) -> str:
    prepare(config)
    return config.folder


GOOD = {"query": "What is 1 + 2?", "response": "3"}


def test_skip_counts_bad_records_and_lists_the_first_ten(configure: Configure, tmp_path: Path) -> None:
    bad = [{"query": "", "response": "r"} if n % 2 else {"query": "q"} for n in range(12)]
    path = write(tmp_path / "a.jsonl", [GOOD, *bad, GOOD])
    prepared = prepare(configure(path, on_error="skip"))
    assert prepared.manifest.sources == [{"name": "mine", "read": 14, "kept": 2, "dropped": {"bad record": 12}}]
    assert len(prepared.errors) == 10
    for number, error in enumerate(prepared.errors, start=2):
        assert error.startswith(f"{path}: record {number}: field '{'query' if number % 2 else 'response'}' is ")


def test_raise_stops_at_the_first_bad_record(configure: Configure, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [GOOD, GOOD, {"query": "q"}, {"response": "r"}])
    with pytest.raises(BadRecordError, match=r"a\.jsonl: record 3: field 'response' is missing"):
        prepare(config := configure(path, examples_per_shard=1))
    assert left_behind(config) == []


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_unreadable_file_is_an_error_whatever_on_error_says(
    on_error: str, configure: Configure, records: Path, tmp_path: Path
) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"query": "caf\xe9", "response": "r"}\n')
    config = configure(records, tmp_path / "latin.jsonl", on_error=on_error)
    with pytest.raises(UserError, match=r"latin\.jsonl: cannot read it"):
        prepare(config)
    assert left_behind(config) == []


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
    assert left_behind(config) == []


def test_success_leaves_the_folder_and_nothing_else(configure: Configure) -> None:
    prepare(config := configure())
    assert left_behind(config) == ["data"]
    shards = [f"shard-{n:05d}.tar" for n in range(4)]
    assert sorted(os.listdir(config.folder)) == sorted(
        ["index.npy", "manifest.json", "token_counts.npy", "tokenizer", *shards]
    )


def test_existing_folder_is_refused_and_left_alone(configure: Configure) -> None:
    config = configure()
    Path(config.folder).mkdir(parents=True)
    (Path(config.folder) / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match=r"data\.folder=.*: it exists already; remove it or choose another"):
        prepare(config)
    assert os.listdir(config.folder) == ["mine.txt"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"max_length": 3}, r"\{'longer than max_length': 2\}"), ({"on_error": "skip"}, r"\{'bad record': 1")],
)
def test_empty_result_is_refused_with_the_reasons(
    changes: dict[str, Any], reason: str, configure: Configure, tmp_path: Path
) -> None:
    records = [{"query": "q", "response": "" if "on_error" in changes else "long"}, {"query": "q", "response": "long"}]
    path = write(tmp_path / "a.jsonl", records[: 1 if "on_error" in changes else 2])
    with pytest.raises(UserError, match=f"no example is left \(dropped: {reason}"):
        prepare(config := configure(path, **changes))
    assert left_behind(config) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_length": 0}, r"data\.max_length=0: must be at least 1"),
        ({"examples_per_shard": 0}, r"data\.examples_per_shard=0: must be at least 1"),
        ({"sources": ()}, r"data\.sources: give at least one source"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str, configure: Configure) -> None:
    with pytest.raises(UserError, match=message):
        prepare(config := configure(**changes))
    assert left_behind(config) == []


# What the folder holds


def test_manifest_counts(
    configure: Configure, records: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    other = write(tmp_path / "other.jsonl", [GOOD, {"query": "q"}, {"query": "q", "response": "long " * 300}])
    prepare(config := configure(sources=(source(records), source(other, name="second")), on_error="skip"))
    manifest = Manifest.load(Path(config.folder))
    assert manifest.sources == [
        {"name": "mine", "read": 60, "kept": 60, "dropped": {}},
        {"name": "second", "read": 3, "kept": 1, "dropped": {"bad record": 1, "longer than max_length": 1}},
    ]
    shards = Shards(config.folder)
    examples = [shards[i] for i in range(len(shards))]
    assert [example.source for example in examples] == ["mine"] * 60 + ["second"]
    assert manifest.num_examples == len(shards) == 61
    assert manifest.num_prompt_tokens == sum(len(example.prompt_ids) for example in examples)
    assert manifest.num_response_tokens == sum(len(example.response_ids) for example in examples)
    assert manifest.longest == max(map(len, examples))
    assert (manifest.dtype, manifest.max_length, manifest.version) == ("uint16", 200, 1)
    saved = load_tokenizer(Path(config.folder) / "tokenizer")
    assert manifest.tokenizer_fingerprint == tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(saved)


def test_manifest_describes_the_shards(configure: Configure) -> None:
    prepare(config := configure())
    found = Manifest.load(Path(config.folder)).shards
    assert [shard["num_examples"] for shard in found] == [16, 16, 16, 12]
    for shard in found:
        content = (Path(config.folder) / shard["name"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (shard["num_bytes"], shard["sha256"])


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


def test_two_runs_are_equal_to_the_byte(configure: Configure, tmp_path: Path) -> None:
    folders = [Path(prepare_into(configure(folder=str(tmp_path / name)))) for name in ("first", "second")]
    names = ["index.npy", "manifest.json", "token_counts.npy", *(f"shard-{n:05d}.tar" for n in range(4))]
    for name in names:
        first, second = [(folder / name).read_bytes() for folder in folders]
        assert first == second, name


def test_content_fingerprint_does_not_depend_on_how_the_content_is_cut(
    configure: Configure, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    parts = [write(tmp_path / "part-1.jsonl", lines[:20]), write(tmp_path / "part-2.jsonl", lines[20:])]
    (tmp_path / "list.json").write_text(json.dumps(lines))
    expected = prepare(configure()).manifest.content_fingerprint
    monkeypatch.setattr(module, "TOKENIZE_BATCH", 9)
    variants = [
        configure(*parts, folder=str(tmp_path / "parts")),
        configure(tmp_path / "list.json", folder=str(tmp_path / "list")),
        configure(folder=str(tmp_path / "shards"), examples_per_shard=7),
    ]
    assert [prepare(config).manifest.content_fingerprint for config in variants] == [expected] * 3


def change_a_letter(lines: list[dict[str, str]]) -> list[dict[str, str]]:
    return [*lines[:-1], {**lines[-1], "response": lines[-1]["response"] + "!"}]


def move_text_from_prompt_to_response(lines: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"query": "What is ", "response": "0 + 0?The answer is 0."}, *lines[1:]]


CHANGES = [
    change_a_letter,
    move_text_from_prompt_to_response,
    lambda lines: lines[:-1],
    lambda lines: [*lines, lines[0]],
    lambda lines: lines[::-1],
]


@pytest.mark.parametrize("change", CHANGES, ids=["letter", "border", "fewer", "more", "order"])
def test_content_fingerprint_changes_with_the_content(
    change: Callable, configure: Configure, records: Path, tmp_path: Path
) -> None:
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    changed = write(tmp_path / "changed.jsonl", change(lines))
    plain = {"prompt_format": style("plain")}  # where only the border tells prompt from response
    expected = prepare(configure(**plain)).manifest.content_fingerprint
    found = prepare(configure(changed, folder=str(tmp_path / "changed"), **plain)).manifest.content_fingerprint
    assert found != expected


def test_content_fingerprint_does_not_depend_on_the_stored_type(configure: Configure, tmp_path: Path) -> None:
    expected = prepare(configure()).manifest.content_fingerprint
    wide = prepare(configure(folder=str(tmp_path / "wide"), max_length=70_000)).manifest  # nothing is dropped
    assert wide.dtype == "uint32"
    assert wide.content_fingerprint == expected


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


def test_partial_folder_of_another_process_is_left_alone(configure: Configure) -> None:
    config = configure()
    other = Path(config.folder).with_name(f".data.partial-{os.getpid()}")  # another container's process of this id
    other.mkdir(parents=True)
    prepare(config)
    assert left_behind(config) == [other.name, "data"]


def test_tokenizer_with_unused_ids(configure: Configure, tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "q": 1, "r": 2, "</s>": 9}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(tmp_path / "tokenizer")
    path = write(tmp_path / "a.jsonl", [{"query": "q", "response": "r"}])
    config = configure(path, tokenizer=str(tmp_path / "tokenizer"), prompt_format=style("plain"))
    prepare(config)
    assert Shards(config.folder).token_counts().tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0, 1]
