"""Train a few steps, export, load with transformers, decode: the whole line through the command line."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from lit_refusion.cli import main
from lit_refusion.commands import generate as generate_command
from lit_refusion.config import load_config
from lit_refusion.decoder import Decoder
from lit_refusion.export import LoadedModel, load_model
from lit_refusion.generation import Generation, Step
from lit_refusion.objective import Objective
from lit_refusion.schema import build
from lit_refusion.show_steps import render_steps
from lit_refusion.tokenizer import tokenizer_fingerprint
from tests.conftest import ARCHITECTURES, make_tokenizer

TINY = [
    f"++backbone.architecture.{name}={value}" for name, value in ARCHITECTURES["qwen3"].items() if name != "model_type"
]
PROMPT = "What is 1 + 2?"


def prepare_data(folder: Path, tokenizer_folder: Path) -> Path:
    """The additions of the `records` fixture as shards (that fixture lives for one test only)."""
    lines = [
        {"query": f"What is {a} + {b}?", "response": f"The answer is {a + b}."} for a in range(12) for b in range(5)
    ]
    source = folder.with_suffix(".jsonl")
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    overrides = [f"data.folder={folder}", f"data.tokenizer={tokenizer_folder}", f"data.sources.0.files=[{source}]"]
    assert main(["prepare", "data=files", *overrides]) == 0
    return folder


def train_command(data: Path | str, run: Path | str, *overrides: str, objective: str = "refusion") -> list[str]:
    """Three steps of a tiny model; the best checkpoint is of step 2, the last one of step 3."""
    settings = [
        "trainer.max_steps=3",
        "trainer.validate_every=2",
        "loader.validation_fraction=0.2",
        "trainer.loggers=[]",
        "trainer.progress=none",
    ]
    where = ["data=prepared", f"data.folder={data}", f"run={run}", f"objective={objective}"]
    return ["train", *where, *settings, *TINY, *overrides]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    return prepare_data(tmp_path_factory.mktemp("export") / "data", tokenizer_folder)


@pytest.fixture(scope="module", params=["ar", "refusion"])
def run(request: pytest.FixtureRequest, data: Path) -> Path:
    folder = data.parent / request.param
    assert main(train_command(data, folder, objective=request.param)) == 0
    return folder


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    out = run.parent / f"{run.name}-exported"
    assert main(["export", f"run={run}", f"out={out}"]) == 0
    return out


def checkpoint_of(run: Path, name: str) -> dict[str, Any]:
    return torch.load(run / "checkpoints" / f"{name}.ckpt", weights_only=True)


def weights_of(run: Path, name: str) -> dict[str, torch.Tensor]:
    state = checkpoint_of(run, name)["state_dict"]
    return {key.removeprefix("backbone.model."): value for key, value in state.items()}


def assert_same_weights(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# --- export ---


def test_transformers_loads_the_best_checkpoint_unchanged(run: Path, exported: Path) -> None:
    assert_same_weights(exported, weights_of(run, "best"))
    assert checkpoint_of(run, "best")["global_step"] == 3


def test_last_checkpoint_can_be_chosen(run: Path, tmp_path: Path) -> None:
    assert main(["export", f"run={run}", f"out={tmp_path}/deep/out", "checkpoint=last"]) == 0

    assert_same_weights(tmp_path / "deep" / "out", weights_of(run, "last"))
    assert checkpoint_of(run, "last")["global_step"] == 3


def test_dtype_can_be_chosen(run: Path, tmp_path: Path) -> None:
    assert main(["export", f"run={run}", f"out={tmp_path}/out", "dtype=bfloat16"]) == 0

    expected = {name: tensor.bfloat16() for name, tensor in weights_of(run, "best").items()}
    assert_same_weights(tmp_path / "out", expected)
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_config_carries_the_conventions(run: Path, exported: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    config = AutoConfig.from_pretrained(exported)
    mask = tokenizer.mask_token_id if run.name == "refusion" else None

    assert config.diffusion_spec == checkpoint_of(run, "best")["lit_refusion"]["spec"]
    assert config.diffusion_spec["objective"] == {"ar": "autoregressive", "refusion": "refusion"}[run.name]
    assert config.diffusion_spec["mask_token_id"] == config.mask_token_id == mask
    assert config.eos_token_id == tokenizer.eos_token_id


def test_tokenizer_is_the_one_of_the_data(data: Path, exported: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(exported)

    manifest = json.loads((data / "manifest.json").read_text())
    assert tokenizer_fingerprint(loaded) == manifest["tokenizer_fingerprint"]


def test_folder_holds_safetensors_only(exported: Path) -> None:
    names = {path.name for path in exported.iterdir()}

    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not [name for name in names if name.endswith((".bin", ".ckpt", ".pt"))]


def test_existing_folder_is_left_alone(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")

    assert main(["export", f"run={run}", f"out={tmp_path}/out"]) == 2

    assert "exists already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine.txt"]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "web page": lambda path: path.write_bytes(b"<html>not found</html>"),
    "other file": lambda path: torch.save({"state_dict": {}}, path),
    "absent": lambda path: path.unlink(),
    "plain text": lambda path: path.write_bytes(b"hello world"),
    "bare tensor": lambda path: torch.save(torch.zeros(3), path),
    "weights missing": lambda path: torch.save(
        {**torch.load(path, weights_only=True), "state_dict": {}},
        path,
    ),
}


@pytest.mark.parametrize(
    "damage",
    [pytest.param(change, id=name) for name, change in DAMAGES.items()],
)
def test_damaged_checkpoint_is_refused_and_leaves_nothing(
    damage: Callable[[Path], object], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    path = checkpoints / "best.ckpt"
    path.write_bytes((run / "checkpoints" / "best.ckpt").read_bytes())
    damage(path)

    assert main(["export", f"run={tmp_path}/run", f"out={tmp_path}/out"]) == 2

    error = capsys.readouterr().err.strip()
    assert str(path) in error
    assert len(error.splitlines()) == 1
    assert [item.name for item in tmp_path.iterdir()] == ["run"]


def test_failure_while_writing_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def disk_full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", disk_full)

    assert main(["export", f"run={run}", f"out={tmp_path}/out"]) == 2
    assert f"out={tmp_path}/out: cannot write it: no space left" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_run_without_validation_is_told_of_the_last_checkpoint(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(train_command(data, tmp_path / "run", "loader.validation_fraction=0")) == 0
    main(["export", f"run={tmp_path}/run", f"out={tmp_path}/out"])

    assert "checkpoint=last" in capsys.readouterr().err


# --- decoding ---


def decode_in_python(model: LoadedModel, *overrides: str) -> Generation:
    preset = {"autoregressive": "ar", "refusion": "refusion"}[model.spec.objective]
    config = load_config("generate", [f"decoder={preset}", "model=m", "prompt=p", *overrides])
    messages = [{"role": "user", "content": PROMPT}]
    text = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    return build(config["decoder"], Decoder).generate(model.backbone, [prompt])[0]


def test_generate_prints_what_the_decoder_gives(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budget = "decoder.max_new_tokens=16"
    model = load_model(str(exported), objective=None, device="cpu")
    expected = decode_in_python(model, budget)

    assert main(["generate", f"model={exported}", f"prompt={PROMPT}", budget]) == 0

    out = capsys.readouterr().out
    assert out.startswith(str(model.tokenizer.decode(list(expected.tokens), skip_special_tokens=True)))
    assert f"{len(expected.tokens)} tokens, {expected.forward_passes} forward passes" in out
    assert 0 < len(expected.tokens) <= 16
    assert model.spec.mask_token_id not in expected.tokens


def test_show_steps_prints_one_line_per_forward_pass(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--show-steps", f"model={exported}", f"prompt={PROMPT}", "decoder.max_new_tokens=16"]) == 0

    out = capsys.readouterr().out
    num_passes = int(re.search(r"(\d+) forward passes", out)[1])  # type: ignore[index]
    numbers = [int(match) for match in re.findall(r"^ *(\d+) (?:token|select|verify|predict|\w+) ", out, re.M)]
    committed = sum(int(count) for count in re.findall(r"\[(\d+) at [\d,-]+\]$", out, re.M))
    assert numbers[:num_passes] == list(range(1, num_passes + 1))
    assert committed == int(re.search(r"^(\d+) tokens, ", out, re.M)[1])  # type: ignore[index]


class Letters:
    """Token 0 is a, 1 is b, ...; 9 is a line end."""

    def decode(self, tokens: list[int]) -> str:
        return "".join("\n" if token == 9 else chr(ord("a") + token) for token in tokens)


GENERATION = Generation(
    tokens=(0, 1, 2, 9),
    uncut_tokens=(0, 1, 2, 9),
    forward_passes=3,
    stop="length",
    steps=(Step("select", (), ()), Step("verify", (3, 2), (9, 2)), Step("verify", (0, 1), (0, 1))),
)


def test_shown_steps_typed_out() -> None:
    console = Console(record=True, width=80, color_system=None)
    render_steps(GENERATION, Letters(), console)  # type: ignore[arg-type]

    assert console.export_text().splitlines() == [
        "1 select    -",
        "2 verify    ··c⏎  [2 at 2-3]",
        "3 verify    abc⏎  [2 at 0-1]",
    ]


def last_line_in_colour(capsys: pytest.CaptureFixture[str]) -> str:
    console = Console(force_terminal=True, color_system="standard", width=80)
    render_steps(GENERATION, Letters(), console)  # type: ignore[arg-type]
    return capsys.readouterr().out.splitlines()[-1]


def test_new_tokens_are_green_in_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    line = last_line_in_colour(capsys)

    assert re.search(r"\x1b\[[\d;]*32ma", line)
    assert not re.search(r"\x1b\[[\d;]*32mc", line)


def test_only_open_places_are_dim_in_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\x1b[1;32ma\x1b[0m" in last_line_in_colour(capsys)


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A folder laid out like the official release: Qwen3 with `mask_token_id`, and no spec of ours."""
    folder = tmp_path / "release"
    tokenizer = make_tokenizer(mask_token=None)
    fields = {**ARCHITECTURES["qwen3"], "vocab_size": 320, "mask_token_id": 300, "eos_token_id": tokenizer.eos_token_id}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_official_release_needs_its_objective(release: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", f"model={release}", f"prompt={PROMPT}", "decoder.max_new_tokens=8"]

    assert main(command) == 2
    error = capsys.readouterr().err
    assert "no diffusion_spec" in error
    assert "objective=" in error

    assert main([*command, "objective=refusion"]) == 0
    assert "8 tokens, " in capsys.readouterr().out


def test_official_release_keeps_its_mask_token(release: Path) -> None:
    config = load_config("train", ["data=prepared", "data.folder=x", "objective=refusion"])

    model = load_model(str(release), objective=build(config["objective"], Objective), device="cpu")

    assert model.backbone.mask_token_id == model.spec.mask_token_id == 300
    assert model.spec.objective == "refusion"


@pytest.mark.parametrize(
    "prompt", ["Tom has 3, Ann has 4.", "What's up?", "Add (1 and 2)", "Is 1 = 2?", "a\nb", "12", "null"]
)
def test_prompts_may_hold_any_text(prompt: str, exported: Path) -> None:
    assert main(["generate", f"model={exported}", f"prompt={prompt}", "decoder.max_new_tokens=1"]) == 0


def test_options_may_stand_between_settings(exported: Path) -> None:
    assert main(["generate", f"model={exported}", "--show-steps", f"prompt={PROMPT}", "decoder.max_new_tokens=1"]) == 0


def test_decoded_text_is_printed_as_it_is(
    exported: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(str(exported), objective=None, device="cpu")
    tokenizer = copy.copy(model.tokenizer)
    tokenizer.decode = lambda *_, **__: "x[1:100:5] [bold]"  # type: ignore[method-assign]
    monkeypatch.setattr(
        generate_command,
        "load_model",
        lambda *_, **__: LoadedModel(model.backbone, tokenizer, model.spec, model.prompt_format),
    )

    assert main(["generate", f"model={exported}", f"prompt={PROMPT}", "decoder.max_new_tokens=8"]) == 0

    assert "x[1:100:5] [bold]\n" in capsys.readouterr().out


def test_mixed_precision_trains_with_the_default_clipping(data: Path, tmp_path: Path) -> None:
    assert main(train_command(data, tmp_path / "run", "trainer.precision=bf16-mixed", "trainer.max_steps=1")) == 0
