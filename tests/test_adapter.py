"""What is trained beside a frozen model: saved, exported and loaded alone, and only beside the model it belongs to."""

from __future__ import annotations

import copy
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from lit_refusion.adapter import base_fingerprint, trainable
from lit_refusion.backbone import Backbone, BackboneConfig
from lit_refusion.cli import main
from lit_refusion.config import load_config
from lit_refusion.decoder import Decoder
from lit_refusion.errors import UserError
from lit_refusion.export import LoadedModel, load_model
from lit_refusion.module import TrainingModule
from lit_refusion.objective import Objective
from lit_refusion.schema import build
from tests.children import (
    Blow,
    assert_same_run,
    checkpoint,
    command,
    different,
    prepared_data,
    run,
    start,
    train,
    weights,
)
from tests.conftest import ARCHITECTURES, make_tokenizer, random_prompts

PREFIX = "backbone.model."
TWINS = {
    f"model.layers.{layer}.self_attn.twin.{name}.weight"
    for layer in range(2)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
}
TABLE, NORM, KEYS = "model.embed_tokens.weight", "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"


def trained_base(folder: Path, data: Path, *extra: str) -> Path:
    """A model that was trained for a step and exported."""
    run(*command(data, folder / "run", "ar", "trainer.max_steps=1", *extra))
    run("export", f"run={folder}/run", f"out={folder}/model", "checkpoint=last")
    return folder / "model"


def beside(base: Path, command: list[str]) -> list[str]:
    """The same training, but of a trained model."""
    model = ["backbone=pretrained", f"backbone.path={base}"]
    return [*(text for text in command if "backbone.architecture" not in text), *model]


def arguments(data: Path, base: Path, folder: Path, *extra: str) -> list[str]:
    settings = ["trainer.max_steps=3", "trainer.loggers=[csv]", "resume=auto"]
    return beside(base, command(data, folder, "orthrus", *settings, *extra))


@pytest.fixture(scope="module")
def data(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_data(tmp_path_factory.mktemp("adapter"), tokenizer_folder)


@pytest.fixture(scope="module")
def base(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_base(tmp_path_factory.mktemp("base"), data)


@pytest.fixture(scope="module")
def trained(data: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(*arguments(data, base, folder))
    return folder


@pytest.fixture(scope="module")
def adapter(trained: Path) -> Path:
    run("export", f"run={trained}", f"out={trained.parent}/adapter", "checkpoint=last")
    return trained.parent / "adapter"


def twins(run: Path) -> dict[str, torch.Tensor]:
    return {name.removeprefix(PREFIX): value for name, value in weights(run).items()}


def altered(folder: Path, target: Path, *, name: str, row: int) -> Path:
    """A copy of a model in which one row of a weight is another."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    tensors[name][row] += 1
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def fingerprint_in(adapter: Path) -> str:
    return json.loads((adapter / "adapter.json").read_text())["base"]["fingerprint"]


def generate(model: Path, *extra: str) -> int:
    return main(["generate", f"model={model}", "prompt=What is 1 + 2?", "decoder.max_new_tokens=16", *extra])


def refusal(code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a refused command says."""
    assert code == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    return line


# Training


def test_a_checkpoint_holds_the_twins_and_their_optimizer_states_only(trained: Path) -> None:
    assert twins(trained).keys() == TWINS
    assert len(checkpoint(trained)["optimizer_states"][0]["state"]) == len(TWINS)


def test_training_moves_the_twins_away_from_what_they_copy(trained: Path, base: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    for name, value in twins(trained).items():
        assert not torch.equal(value, tensors[name.replace("twin.", "")]), name


def test_training_leaves_the_frozen_weights_as_they_were(
    data: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules: list[TrainingModule] = []
    monkeypatch.setattr(TrainingModule, "on_train_end", lambda module: modules.append(module))
    run(*arguments(data, base, tmp_path / "run"))
    backbone = modules[0].backbone
    assert_frozen_are_those_of(base, backbone)
    assert base_fingerprint(backbone) == checkpoint(tmp_path / "run")["lit_refusion"]["base"]["fingerprint"]


def assert_frozen_are_those_of(base: Path, backbone: Backbone) -> None:
    tensors = load_file(base / "model.safetensors")
    frozen = {name: value for name, value in backbone.model.named_parameters() if not value.requires_grad}
    assert frozen.keys() == tensors.keys()
    assert different({name: value.detach() for name, value in frozen.items()}, tensors) == []


def test_the_share_that_trains_is_told(
    data: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*arguments(data, base, tmp_path / "run"))
    told = capsys.readouterr().out
    number = sum(tensor.numel() for tensor in twins(tmp_path / "run").values())
    parameters = number + sum(tensor.numel() for tensor in load_file(base / "model.safetensors").values())
    assert f"orthrus: {parameters:,} parameters ({number:,} of them train, {number / parameters:.1%}), 48 " in told


def test_a_checkpoint_of_a_model_that_trains_whole_holds_all_of_it(base: Path) -> None:
    names = AutoModelForCausalLM.from_pretrained(base).state_dict().keys()
    assert weights(base.parent / "run").keys() == {PREFIX + name for name in names}
    assert checkpoint(base.parent / "run")["lit_refusion"]["base"] is None


# Export


def test_only_weights_settings_and_tokenizer_are_exported(adapter: Path, trained: Path) -> None:
    names = {path.name for path in adapter.iterdir()}
    tokenizer = {path.name for path in (trained / "tokenizer").iterdir()}
    assert names == {"adapter.safetensors", "adapter.json"} | tokenizer
    assert different(load_file(adapter / "adapter.safetensors"), twins(trained)) == []
    num_bytes = sum(tensor.nbytes for tensor in twins(trained).values())
    assert num_bytes < (adapter / "adapter.safetensors").stat().st_size < num_bytes + 4096  # its header


def test_dtype_of_the_twins_can_be_chosen(trained: Path, tmp_path: Path) -> None:
    run("export", f"run={trained}", f"out={tmp_path}/out", "checkpoint=last", "dtype=bfloat16")
    expected = {name: tensor.bfloat16() for name, tensor in twins(trained).items()}
    found = load_file(tmp_path / "out" / "adapter.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert different(found, expected) == []
    assert generate(tmp_path / "out") == 0


def test_the_settings_say_where_the_base_is_and_how_it_was_trained(adapter: Path, trained: Path, base: Path) -> None:
    settings = json.loads((adapter / "adapter.json").read_text())
    record = checkpoint(trained)["lit_refusion"]
    assert settings["base"] == record["base"]
    assert settings["base"]["path"] == str(base.resolve())
    assert settings["objective"] == record["config"]["objective"]
    assert settings["spec"] == record["spec"]
    assert settings["prompt_format"] == record["prompt_format"]


def test_a_relative_path_to_the_base_is_kept_as_an_absolute_one(
    data: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base.parent)
    run(*arguments(data, Path(base.name), tmp_path / "run", "trainer.max_steps=1"))
    assert checkpoint(tmp_path / "run")["lit_refusion"]["base"]["path"] == str(base.resolve())


def test_twins_of_fresh_weights_are_not_exported(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*command(data, tmp_path / "run", "orthrus", "trainer.max_steps=1"))
    code = main(["export", f"run={tmp_path}/run", f"out={tmp_path}/out", "checkpoint=last"])
    line = refusal(code, capsys)
    assert f"run={tmp_path}/run: it trained beside frozen weights that were fresh" in line
    assert "give backbone.path" in line
    assert not (tmp_path / "out").exists()


# Loading


def test_an_adapter_is_loaded_beside_its_base_to_the_bit(adapter: Path, trained: Path, base: Path) -> None:
    model = load_model(str(adapter), objective=None, device="cpu")
    found = {name: parameter.detach() for name, parameter in trainable(model.backbone).items()}
    assert different(found, twins(trained)) == []
    assert_frozen_are_those_of(base, model.backbone)
    assert (model.spec.objective, model.spec.mask_token_id) == ("orthrus", model.backbone.mask_token_id)


def test_the_mask_that_was_asked_for_in_training_is_the_adapters(data: Path, base: Path, tmp_path: Path) -> None:
    run(*arguments(data, base, tmp_path / "run", "trainer.max_steps=1", "backbone.mask_token_id=300"))
    run("export", f"run={tmp_path}/run", f"out={tmp_path}/adapter", "checkpoint=last")
    model = load_model(str(tmp_path / "adapter"), objective=None, device="cpu")
    assert model.backbone.mask_token_id == model.spec.mask_token_id == 300


def responses(model: LoadedModel, decoder: str) -> list[tuple[int, ...]]:
    settings = ["model=m", "prompt=p", "decoder.max_new_tokens=24"]
    config = load_config("generate", [f"decoder={decoder}", *settings])
    fitted = build(config["decoder"], Decoder).fit_to(model.spec)
    return [reply.tokens for reply in fitted.generate(model.backbone, random_prompts(4, longest=9))]


def test_an_adapter_says_what_its_base_says(adapter: Path, base: Path) -> None:
    model, alone = (load_model(str(path), objective=None, device="cpu") for path in (adapter, base))
    expected = responses(alone, "ar")
    assert len({token for reply in expected for token in reply}) > 8
    assert responses(model, "ar") == expected
    assert responses(model, "orthrus") == expected


def test_generate_takes_the_preset_of_the_adapter_and_others_that_fit(
    adapter: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for model, *decoder in ([adapter], [adapter, "decoder=ar"], [base]):
        assert generate(model, *decoder) == 0
        printed.append(capsys.readouterr().out)
    texts = {out.rpartition("16 tokens")[0] for out in printed}
    assert len(texts) == 1
    assert ["acceptance_length" in out for out in printed] == [True, False, False]


def test_a_decoder_that_does_not_fit_is_refused(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "orthrus" in refusal(generate(adapter, "decoder=refusion"), capsys)


def test_a_base_that_was_moved_is_found_with_base(
    adapter: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    homeless = with_settings(adapter, tmp_path / "adapter", lambda found: found["base"].update(path=f"{tmp_path}/gone"))
    line = refusal(generate(homeless), capsys)
    assert f"{tmp_path}/gone" in line
    assert "base=" in line
    shutil.copytree(base, tmp_path / "moved")
    assert generate(homeless, f"base={tmp_path}/moved") == 0


@pytest.mark.parametrize(("name", "row"), [(TABLE, 0), (TABLE, -1), (NORM, 0), (KEYS, -1)])
def test_another_base_is_refused_with_both_fingerprints(
    name: str, row: int, adapter: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = altered(base, tmp_path / "other", name=name, row=row)
    line = refusal(generate(adapter, f"base={other}"), capsys)
    assert f"base with fingerprint {fingerprint_in(adapter)} ({base.resolve()}), but {other} has " in line
    assert f"has {frozen_fingerprint(other)}; give the right one with base=..." in line


def test_a_base_of_another_shape_is_refused(
    adapter: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = trained_base(tmp_path, data, "++backbone.architecture.num_hidden_layers=3")
    assert f"fingerprint {fingerprint_in(adapter)}" in refusal(generate(adapter, f"base={other}"), capsys)


def test_a_whole_model_has_no_base(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(generate(base, f"base={base}"), capsys)
    assert f"base={base}: only an adapter has one, and model={base} is whole; leave it out" in line


def test_a_base_whose_table_grows_for_the_mask_is_known_again_in_either_precision(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(mask_token=None)
    folder = tmp_path / "base"
    architecture = {**ARCHITECTURES["llama"], "vocab_size": len(tokenizer)}  # without a row to spare
    tokenizer.save_pretrained(folder)
    Backbone.from_architecture(architecture, tokenizer=tokenizer, mask_token_id=100).model.save_pretrained(folder)
    run(*arguments(prepared_data(tmp_path / "data", folder), folder, tmp_path / "run", "trainer.max_steps=1"))
    run("export", f"run={tmp_path}/run", f"out={tmp_path}/adapter", "checkpoint=last")
    assert generate(tmp_path / "adapter") == 0
    assert generate(tmp_path / "adapter", "dtype=bfloat16") == 0


# Damage


def with_settings(adapter: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of an adapter with other settings."""
    shutil.copytree(adapter, target)
    settings = json.loads((target / "adapter.json").read_text())
    change(settings)
    (target / "adapter.json").write_text(json.dumps(settings))
    return target


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


FILE_DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": cut,
    "empty": lambda path: path.write_bytes(b""),
    "web page": lambda path: path.write_bytes(b"<html>not found</html>"),
    "not text": lambda path: path.write_bytes(bytes(range(128, 256))),
    "list": lambda path: path.write_bytes(b"[]"),
    "absent": lambda path: path.unlink(),
}


@pytest.mark.parametrize("file", ["adapter.json", "adapter.safetensors"])
@pytest.mark.parametrize("damage", FILE_DAMAGES)
def test_a_damaged_file_is_named(
    damage: str, file: str, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(adapter, tmp_path / "adapter")
    FILE_DAMAGES[damage](tmp_path / "adapter" / file)
    assert str(tmp_path / "adapter" / file) in refusal(generate(tmp_path / "adapter"), capsys)


SETTINGS_DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no base": lambda found: found.pop("base"),
    "no fingerprint": lambda found: found["base"].pop("fingerprint"),
    "path is null": lambda found: found["base"].update(path=None),
    "path is a number": lambda found: found["base"].update(path=3),
    "no objective": lambda found: found.pop("objective"),
    "objective is null": lambda found: found.update(objective=None),
    "unknown objective": lambda found: found["objective"].update(_target_="objectives.orthrus.Nothing"),
    "objective lacks a field": lambda found: found["objective"].pop("twins"),
    "spec lacks a field": lambda found: found["spec"].pop("shift"),
    "no prompt format": lambda found: found.pop("prompt_format"),
    "unknown field": lambda found: found.update(mine=1),
}


@pytest.mark.parametrize("damage", SETTINGS_DAMAGES)
def test_settings_that_make_no_sense_are_named(
    damage: str, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = with_settings(adapter, tmp_path / "adapter", SETTINGS_DAMAGES[damage])
    assert str(broken / "adapter.json") in refusal(generate(broken), capsys)


QUERIES = "model.layers.0.self_attn.twin.q_proj.weight"
WEIGHT_DAMAGES: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "missing": lambda found: found.pop(QUERIES),
    "extra": lambda found: found.update({"model.layers.2.self_attn.twin.q_proj.weight": torch.ones(2)}),
    "of the base": lambda found: found.update({NORM: torch.ones(32)}),
    "misshapen": lambda found: found.update({QUERIES: torch.ones(1, 32)}),
    "transposed": lambda found: found.update({KEYS.replace("attn.", "attn.twin."): torch.ones(32, 16)}),
    "none": lambda found: found.clear(),
}


@pytest.mark.parametrize("damage", WEIGHT_DAMAGES)
def test_weights_that_do_not_fit_are_named(
    damage: str, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(adapter, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter.safetensors"
    found, before = load_file(file), load_file(file)
    WEIGHT_DAMAGES[damage](found)
    save_file(found, file)
    changed = [
        name for name in {**found, **before}
        if name not in found or name not in before or found[name].shape != before[name].shape
    ]  # fmt: skip
    line = refusal(generate(tmp_path / "adapter"), capsys)
    assert f"{file}: weight " in line
    assert any(f"weight {name} does not fit" in line for name in changed)


# Fingerprints


def backbone_config(path: Path) -> BackboneConfig:
    settings = ["data=prepared", "data.folder=d", "objective=orthrus", "backbone=pretrained", f"backbone.path={path}"]
    return build(load_config("train", settings)["backbone"], BackboneConfig)


def freeze(backbone: Backbone) -> Backbone:
    config = load_config("train", ["data=prepared", "data.folder=d", "objective=orthrus"])
    build(config["objective"], Objective).prepare(backbone)
    return backbone


def frozen_fingerprint(path: Path) -> str | None:
    return base_fingerprint(freeze(Backbone.from_pretrained(path, mask_token_id=3)))


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))  # one of them with a tied head
def test_a_fingerprint_is_the_same_from_files_and_in_either_precision(
    name: str, dtype: torch.dtype, max_shard_size: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    fresh = Backbone.from_architecture(ARCHITECTURES[name], tokenizer=tokenizer, seed=1)
    fresh.model.to(dtype).save_pretrained(tmp_path, max_shard_size=max_shard_size)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) is (max_shard_size == "20KB")
    bare = freeze(backbone_config(tmp_path).load(tokenizer, in_shares=True))
    assert sorted(bare.weight_files) == sorted(files)
    loaded = [
        freeze(Backbone.from_pretrained(tmp_path, tokenizer=tokenizer, dtype=precision))
        for precision in (torch.float32, torch.bfloat16)
    ]
    assert len({base_fingerprint(backbone) for backbone in (bare, *loaded)}) == 1


def test_a_damaged_file_of_the_base_is_named(base: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "base")
    bare = freeze(backbone_config(tmp_path / "base").load(tokenizer, in_shares=True))
    cut(bare.weight_files[0])
    with pytest.raises(UserError, match=f"{bare.weight_files[0]}: cannot read it"):
        base_fingerprint(bare)


def test_a_model_that_trains_whole_has_no_fingerprint(backbone: Backbone) -> None:
    assert base_fingerprint(backbone) is None


def test_a_fingerprint_tells_every_weight_from_another(backbone: Backbone) -> None:
    frozen = freeze(copy.deepcopy(backbone))
    weights = [parameter for parameter in frozen.model.parameters() if not parameter.requires_grad]
    found = [base_fingerprint(frozen)]
    for parameter in weights:
        with torch.no_grad():
            parameter[-1] += 1
            found.append(base_fingerprint(frozen))
            parameter[-1] -= 1
    assert len(set(found)) == 1 + len(weights)


def test_a_fingerprint_does_not_depend_on_the_twins(backbone: Backbone) -> None:
    frozen = freeze(copy.deepcopy(backbone))
    before = base_fingerprint(frozen)
    with torch.no_grad():
        for parameter in trainable(frozen).values():
            parameter += 1
    assert base_fingerprint(frozen) == before


# Resuming


def test_a_run_that_is_stopped_goes_on_to_the_bit_beside_a_copy_of_its_base(
    trained: Path, data: Path, base: Path, tmp_path: Path
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    stopped = start(train, arguments(data, base, folder), Blow(signal.SIGTERM, "training", 1), log=log)
    assert stopped.wait() == 130, stopped.output
    assert checkpoint(folder)["global_step"] == 2
    shutil.copytree(base, tmp_path / "base")
    resumed = start(train, arguments(data, tmp_path / "base", folder), log=log)
    assert resumed.wait() == 0, resumed.output
    assert_same_run(folder, trained)


@pytest.mark.parametrize("resume", ["auto", "force"])
def test_another_base_is_refused_even_by_force(
    resume: str, trained: Path, data: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    other = altered(base, tmp_path / "other", name=KEYS, row=0)
    before = weights(tmp_path / "run")
    code = main(arguments(data, other, tmp_path / "run", "trainer.max_steps=4", f"resume={resume}"))
    pair = f"was '{frozen_fingerprint(base)}', is '{frozen_fingerprint(other)}'"
    told = capsys.readouterr().err
    assert code == 2
    assert f"resume: the checkpoint's weights do not fit (base model's fingerprint {pair}); choose another" in told
    assert different(weights(tmp_path / "run"), before) == []


@pytest.mark.parametrize("resume", ["auto", "force"])
def test_other_twins_are_refused_even_by_force(
    resume: str, trained: Path, data: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    changes = ["objective.twins=qkv", "trainer.max_steps=4", f"resume={resume}"]
    assert main(arguments(data, base, tmp_path / "run", *changes)) == 2
    assert "objective.twins was 'qkvo', is 'qkv'" in capsys.readouterr().err


@pytest.mark.parametrize("objective", ["ar", "refusion"])
def test_a_run_does_not_go_on_as_one_that_trains_the_whole_model(
    objective: str, trained: Path, data: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    changes = [f"objective={objective}", "trainer.max_steps=4", "resume=force"]
    assert main([*arguments(data, base, tmp_path / "run"), *changes]) == 2
    assert "base model's fingerprint was" in capsys.readouterr().err
