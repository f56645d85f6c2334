"""Bad input on the command line: exit code 2 and one line that says what to do; the traceback only with --debug."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from lit_refusion.backbone import Backbone
from lit_refusion.cli import main
from lit_refusion.errors import UserError
from tests.conftest import ARCHITECTURES, make_tokenizer

TINY = [
    f"++backbone.architecture.{name}={value}" for name, value in ARCHITECTURES["qwen3"].items() if name != "model_type"
]
TRAIN = [
    *("train", "objective=refusion", "data=prepared", "data.folder={data}", "run={new}"),
    *("trainer.max_steps=1", "trainer.loggers=[]", "trainer.progress=none", *TINY),
]
PREPARE = [
    "prepare",
    "data=files",
    "data.folder={new}",
    "data.tokenizer={tokenizer}",
    "data.sources.0.files=[{records}]",
]
GENERATE = ["generate", "model={model}", "prompt=What is 1 + 2?", "decoder=refusion", "decoder.max_new_tokens=8"]
EXPORT = ["export", "run={run}", "out={new}"]


@pytest.fixture(scope="module")
def places(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase, tokenizer_folder: Path
) -> dict[str, Path]:
    """Data, a run of one step, an exported model, and some broken relatives of them, by name."""
    root = tmp_path_factory.mktemp("cli")
    names = {name: root / name for name in ("new", "nowhere", "data", "run", "model", "plain", "other", "nothing")}
    names |= {"tokenizer": tokenizer_folder, "records": root / "records.jsonl", "empty": root / "empty.jsonl"}
    names |= {"bad": root / "bad.jsonl"}
    records = [{"query": f"What is {a} + 1?", "response": f"The answer is {a + 1}."} for a in range(40)]
    names["records"].write_text("".join(json.dumps(record) + "\n" for record in records))
    names["empty"].write_text("")
    names["bad"].write_text(json.dumps(records[0]) + '\n{"query": "no response"}\n')

    def run(command: list[str], **changed: Path) -> None:
        assert main([text.format(**{**names, **changed}) for text in command]) == 0

    run(PREPARE, new=names["data"])
    run(TRAIN, new=names["run"])
    run(EXPORT, new=names["model"])

    # A model without our spec; a model whose tokenizer is another one; a data set without examples.
    backbone = Backbone.from_architecture(ARCHITECTURES["qwen3"], tokenizer=tokenizer)
    for folder, its_tokenizer in ((names["plain"], tokenizer), (names["other"], make_tokenizer(mask_token="<|m|>"))):
        backbone.model.save_pretrained(folder)
        its_tokenizer.save_pretrained(folder)
    shutil.copytree(names["data"], names["nothing"])
    manifest = json.loads((names["data"] / "manifest.json").read_text())
    source = {**manifest["sources"][0], "kept": 0}
    nothing = {**manifest, "num_examples": 0, "shards": [], "sources": [source]}
    (names["nothing"] / "manifest.json").write_text(json.dumps(nothing))
    return names


def error_line(command: list[str], places: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> str:
    """Run it; the one line on stderr (the progress display of `prepare` aside)."""
    shutil.rmtree(places["new"], ignore_errors=True)
    capsys.readouterr()

    code = main([text.format(**places) for text in command])

    lines = [
        line for line in capsys.readouterr().err.splitlines() if line.strip() and not line.startswith("prepare files")
    ]
    assert code == 2
    assert len(lines) == 1, lines
    prefix = f"lit-refusion {command[0]}: error: "
    assert lines[0].startswith(prefix)
    assert not (places["new"] / "checkpoints").exists()
    return lines[0].removeprefix(prefix)


# name: (command, what the line must hold: key, value, remedy)
ERRORS: dict[str, tuple[list[str], list[str]]] = {
    # unknown config key or choice
    "unknown key": ([*TRAIN, "trainer.max_step=3"], ["trainer.max_step", "--show-config"]),
    "unknown key, added": ([*TRAIN, "+trainer.max_step=3"], ["trainer.max_step=3", "did you mean 'max_steps'?"]),
    "unknown group": ([*TRAIN, "objektive=ar"], ["objektive", "--show-config"]),
    "unknown choice": ([*TRAIN, "objective=nope"], ["objective=nope", "refusion"]),
    "unknown literal": ([*TRAIN, "objective.masking=poisson"], ["objective.masking=poisson", "bernoulli, exact"]),
    "unknown decoder": ([*GENERATE, "decoder=nope"], ["decoder=nope", "refusion"]),
    "unknown decoder key": ([*GENERATE, "decoder.slots=3"], ["decoder.slots", "--show-config"]),
    "unknown checkpoint": ([*EXPORT, "checkpoint=first"], ["checkpoint=first", "best, last"]),
    "unknown model type": (
        [*TRAIN, "backbone.architecture.model_type=nope"],
        ["backbone.architecture", "nope", "qwen3"],
    ),
    "unknown objective class": (
        [*TRAIN, "objective._target_=nope.Nope"],
        ["objective._target_=nope.Nope", "installed package"],
    ),
    "class of another kind": (
        [*TRAIN, "objective._target_=decoders.refusion.ReFusionDecoder"],
        ["objective._target_=decoders.refusion.ReFusionDecoder", "subclass of Objective"],
    ),
    "fp16": ([*TRAIN, "trainer.precision=16-mixed"], ["trainer.precision=16-mixed", "32-true", "bf16-mixed"]),
    "syntax": ([*TRAIN, "objective.slot_sizes=[4"], ["[4"]),
    "missing value": (["export", "run={run}"], ["out", "missing", "out=..."]),
    "config folder": ([*TRAIN, "--config-dir", "{nowhere}"], ["--config-dir {nowhere}", "no such folder"]),
    # wrong type or range
    "text for a number": ([*TRAIN, "trainer.max_steps=many"], ["trainer.max_steps='many'", "whole number"]),
    "fraction for a number": ([*TRAIN, "trainer.max_steps=1.5"], ["trainer.max_steps=1.5", "whole number"]),
    "number for a list": ([*TRAIN, "objective.slot_sizes=4"], ["objective.slot_sizes=4", "[4,8]"]),
    "text in a list": ([*TRAIN, "objective.slot_sizes=[4,b]"], ["objective.slot_sizes[1]='b'", "whole number"]),
    "negative steps": ([*TRAIN, "trainer.max_steps=-1"], ["trainer.max_steps=-1", "positive"]),
    "two lengths": ([*TRAIN, "trainer.epochs=1"], ["trainer.max_steps=1", "trainer.epochs=1", "exactly one"]),
    "no slot sizes": ([*TRAIN, "objective.slot_sizes=[]"], ["objective.slot_sizes=[]", "at least one"]),
    "learning rate": ([*TRAIN, "optimizer.learning_rate=0"], ["optimizer.learning_rate=0.0", "positive"]),
    "workers": ([*TRAIN, "loader.num_workers=-1"], ["loader.num_workers=-1", "negative"]),
    "validation examples": (
        [*TRAIN, "loader.max_validation_examples=-1"],
        ["loader.max_validation_examples=-1", "null for all"],
    ),
    "threshold": ([*GENERATE, "decoder.token_threshold=2"], ["decoder.token_threshold=2", "[0, 1]"]),
    # missing file
    "no records": ([*PREPARE, "data.sources.0.files=[{nowhere}]"], ["{nowhere}", "no such file", "check the path"]),
    "no tokenizer": ([*PREPARE, "data.tokenizer={nowhere}"], ["tokenizer={nowhere}", "give a folder"]),
    "no data": ([*TRAIN, "data.folder={nowhere}"], ["{nowhere}/manifest.json", "lit-refusion prepare"]),
    "no backbone": (
        [*TRAIN, "backbone.architecture=null", "backbone.path={nowhere}"],
        ["{nowhere}", "cannot load"],
    ),
    "no run": ([*EXPORT, "run={nowhere}"], ["{nowhere}/checkpoints/best.ckpt", "no such checkpoint", "run=..."]),
    "no model": ([*GENERATE, "model={nowhere}"], ["{nowhere}", "cannot load", "give a folder"]),
    # empty data set, bad records
    "no record in the files": (
        [*PREPARE, "data.sources.0.files=[{empty}]"],
        ["{empty}", "no record in it", "data.sources[files]"],
    ),
    "all dropped": ([*PREPARE, "data.max_length=3"], ["no example is left", "longer than max_length", "40"]),
    "bad record": ([*PREPARE, "data.sources.0.files=[{bad}]"], ["{bad}: record 2", "'response' is missing"]),
    "no examples in the shards": ([*TRAIN, "data.folder={nothing}"], ["{nothing}", "is empty", "manifest.json"]),
    "all held out": (
        [*TRAIN, "loader.validation_fraction=0.999999999"],
        ["no training examples are left", "loader.validation_fraction"],
    ),
    # lengths
    "prompt longer than the window": (
        [*GENERATE, "decoder.max_new_tokens=250"],
        ["decoder.max_new_tokens=250", "window of 256", "shorten the prompt"],
    ),
    "no prompt": ([*GENERATE, "prompt=", "prompt_style=plain"], ["prompt: it has no tokens", "give some"]),
    "example longer than the window": (
        [*TRAIN, "backbone.architecture.max_position_embeddings=16"],
        ["{data}", "window is 16", "data.max_length=16"],
    ),
    "example longer than the row": (
        [*TRAIN, "loader=packed", "loader.max_row_length=8"],
        ["loader.max_row_length=8", "raise it"],
    ),
    # things that do not fit together
    "tokenizer of other data": (
        [*TRAIN, "backbone.architecture=null", "backbone.path={other}"],
        ["backbone.path={other}", "{data}", "prepare it again"],
    ),
    "slot size and block": (
        [*GENERATE, "decoder.slot_size=3", "decoder.block_size=32"],
        ["decoder.slot_size=3", "decoder.block_size=32", "whole slots"],
    ),
    "mask is eos": ([*TRAIN, "backbone.mask_token_id=2"], ["backbone.mask_token_id=2", "eos", "leave it null"]),
    "mask is pad": ([*TRAIN, "backbone.mask_token_id=0"], ["backbone.mask_token_id=0", "pad", "leave it null"]),
    "mask outside the table": ([*TRAIN, "backbone.mask_token_id=320"], ["=320", "320 rows", "leave it null"]),
    "mask in the data": (
        [*TRAIN, "backbone.mask_token_id=1"],
        ["{data}", "mask token 1 occurs", "choose another backbone.mask_token_id"],
    ),
    "checkpoint of another objective": (
        [*TRAIN, "objective=ar", "run={run}", "resume=auto", "trainer.max_steps=2"],
        ["objectives.refusion.ReFusion", "objectives.autoregressive.Autoregressive", "choose another run"],
    ),
    "global batch": (
        [*TRAIN, "trainer.global_batch_size=24", "loader.micro_batch_size=16"],
        ["trainer.global_batch_size=24", "loader.micro_batch_size=16", "change one of them"],
    ),
    "global batch smaller than a micro-batch": (
        [*TRAIN, "trainer.global_batch_size=4"],
        ["trainer.global_batch_size=4", "loader.micro_batch_size=16"],
    ),
    "two sources of weights": (
        [*TRAIN, "backbone.path={plain}"],
        ["backbone.path", "backbone.architecture", "not both"],
    ),
    "no spec and no objective": ([*GENERATE, "model={plain}"], ["model={plain}", "no diffusion_spec", "objective=..."]),
    "objective against the spec": (
        [*GENERATE, "objective=ar"],
        ["objective=autoregressive", "trained with 'refusion'"],
    ),
    "decoder of another objective": (
        [*GENERATE[:3], "decoder=ar"],
        ["AutoregressiveDecoder", "['autoregressive', 'orthrus']", "'refusion'", "force=true"],
    ),
    # nothing is overwritten
    "run folder in use": ([*TRAIN, "run={run}"], ["run={run}", "holds a checkpoint", "resume=auto"]),
    "data folder in use": (
        [*PREPARE, "data.folder={data}"],
        ["data.folder={data}", "exists already", "another folder"],
    ),
    "export folder in use": ([*EXPORT, "out={model}"], ["out={model}", "exists already", "another folder"]),
}


@pytest.mark.parametrize(("command", "parts"), ERRORS.values(), ids=ERRORS)
def test_bad_input_is_one_line_that_says_what_to_do(
    command: list[str], parts: list[str], places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    line = error_line(command, places, capsys)

    for part in parts:
        assert part.format(**places) in line


BUGS: dict[str, tuple[list[str], list[str]]] = {
    "experiment": ([*TRAIN, "experiment=nope"], ["experiment=nope"]),
    "unknown architecture key": ([*TRAIN, "+backbone.architecture.hiden_size=8"], ["hiden_size"]),
    "type in the architecture": ([*TRAIN, "backbone.architecture.hidden_size=wide"], ["hidden_size"]),
    "heads": ([*TRAIN, "backbone.architecture.num_attention_heads=3"], ["num_attention_heads"]),
    "small vocabulary": ([*TRAIN, "+backbone.architecture.vocab_size=64"], ["vocab_size"]),
    "no devices": ([*TRAIN, "trainer.devices=0"], ["trainer.devices=0"]),
    "no nodes": ([*TRAIN, "trainer.num_nodes=0"], ["trainer.num_nodes=0"]),
    "strategy": ([*TRAIN, "strategy=nope"], ["strategy=nope", "fsdp2"]),
    "clip": ([*TRAIN, "trainer.gradient_clip=-1"], ["trainer.gradient_clip=-1"]),
    "run is a file": ([*TRAIN, "run={records}"], ["run={records}"]),
    "out below a file": ([*EXPORT, "out={records}/out"], ["out={records}/out"]),
    "device": ([*GENERATE, "device=nope"], ["device=nope"]),
    "another size on resume": (
        [*TRAIN, "run={run}", "resume=auto", "trainer.max_steps=2", "backbone.architecture.num_hidden_layers=1"],
        ["resume"],
    ),
}


@pytest.mark.parametrize(("command", "parts"), BUGS.values(), ids=BUGS)
def test_more_bad_input(
    command: list[str], parts: list[str], places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    test_bad_input_is_one_line_that_says_what_to_do(command, parts, places, capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="right on a machine with a GPU")
@pytest.mark.parametrize(
    ("command", "part"),
    [
        ([*TRAIN, "trainer.accelerator=gpu"], "trainer.accelerator=gpu"),
        ([*TRAIN, "backbone.attention=flash_attention_2"], "backbone.attention=flash_attention_2"),
        ([*TRAIN, "backbone.attention=flex_attention"], "backbone.attention=flex_attention"),
        ([*GENERATE, "device=cuda"], "device=cuda"),
    ],
)
def test_what_needs_a_gpu_says_so(
    command: list[str], part: str, places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert part in error_line(command, places, capsys)


def test_damaged_checkpoint_on_resume(places: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    run = places["run"].with_name("damaged")
    (run / "checkpoints").mkdir(parents=True)
    whole = (places["run"] / "checkpoints" / "last.ckpt").read_bytes()
    (run / "checkpoints" / "last.ckpt").write_bytes(whole[: len(whole) // 2])

    line = error_line([*TRAIN, f"run={run}", "resume=auto", "trainer.max_steps=2"], places, capsys)

    assert "last.ckpt" in line


def test_data_without_its_token_counts(places: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    data = shutil.copytree(places["data"], places["data"].with_name("no-counts"), dirs_exist_ok=True)
    (data / "token_counts.npy").unlink(missing_ok=True)

    assert "token_counts.npy" in error_line([*TRAIN, f"data.folder={data}"], places, capsys)


@pytest.mark.parametrize(
    "name", ["mask is eos", "no data", "unknown choice", "slot size and block", "checkpoint of another objective"]
)
def test_debug_shows_the_traceback(name: str, places: dict[str, Path]) -> None:
    command, parts = ERRORS[name]

    with pytest.raises(UserError) as caught:
        main([*(text.format(**places) for text in command), "--debug"])

    assert parts[0].format(**places) in str(caught.value)


def test_force_decodes_all_the_same(places: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    command = [*GENERATE[:3], "decoder=ar", "decoder.max_new_tokens=2", "force=true"]

    assert main([text.format(**places) for text in command]) == 0
    assert "2 tokens, 2 forward passes" in capsys.readouterr().out


def test_show_config_does_nothing_else(places: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(places["new"], ignore_errors=True)

    assert main([*(text.format(**places) for text in TRAIN), "--show-config"]) == 0

    assert "max_steps: 1\n" in capsys.readouterr().out
    assert not places["new"].exists()


@pytest.mark.parametrize("argv", [[], ["trane"], ["train", "--no-such-option"]])
def test_the_parser_exits_with_2_as_well(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)

    assert caught.value.code == 2
    assert "usage: lit-refusion" in capsys.readouterr().err


def test_ctrl_c_is_one_word_and_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lit_refusion.commands.export.export", interrupted)

    assert main(["export", "run=a", "out=b"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
