"""From a run's checkpoint to a Hugging Face folder, and back to a backbone with its conventions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from lit_refusion.adapter import (
    SETTINGS,
    AdapterSettings,
    Base,
    is_adapter_folder,
    load_weights,
    read_settings,
    save_adapter,
    weights_fingerprint,
)
from lit_refusion.backbone import Backbone, ForwardChoice
from lit_refusion.chat import PromptFormat
from lit_refusion.engine.forward import runs_lean
from lit_refusion.errors import UserError, first_line
from lit_refusion.new_folder import new_folder
from lit_refusion.objective import Objective
from lit_refusion.run_folder import BEST, LAST, RECORD_KEY, TOKENIZER, checkpoint_path, load_checkpoint
from lit_refusion.schema import build
from lit_refusion.sharded_checkpoint import load_whole
from lit_refusion.spec import DiffusionSpec
from lit_refusion.tokenizer import load_tokenizer, tokenizer_fingerprint

MODEL_PREFIX = "backbone.model."
DType = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What to export.

    Args:
        run: folder of a training run.
        checkpoint: "best" (lowest validation loss) or "last".
        out: folder to write; must not exist.
        dtype: dtype of the weights; "auto" keeps the checkpoint's.
    """

    run: str
    checkpoint: Literal["best", "last"]
    out: str
    dtype: DType


def export(config: ExportConfig) -> Path:
    """Write safetensors, config with the DiffusionSpec, and tokenizer; `AutoModelForCausalLM` loads it unchanged.

    What was trained beside a frozen model is written as an adapter.
    """
    run = Path(config.run)
    path = checkpoint_path(run, config.checkpoint)
    if config.checkpoint == BEST and not path.exists() and checkpoint_path(run, LAST).exists():
        raise UserError(f"checkpoint=best: {run} has not been validated yet; export checkpoint=last")
    checkpoint = load_whole(path) if path.is_dir() else load_checkpoint(path)
    record = checkpoint[RECORD_KEY]
    if record.get("base") is not None:
        return _export_adapter(config, checkpoint)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**record["model_config"]))
    state = checkpoint["state_dict"]
    weights = {name.removeprefix(MODEL_PREFIX): state[name] for name in state if name.startswith(MODEL_PREFIX)}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(
            f"{path}: its weights do not fit its model ({first_line(error)}); choose the run's other checkpoint"
        ) from error
    if config.dtype != "auto":
        model = model.to(getattr(torch, config.dtype))
    model.config.diffusion_spec = record["spec"]
    model.config.mask_token_id = record["spec"]["mask_token_id"]
    model.config.prompt_format = record["prompt_format"]
    tokenizer = load_tokenizer(run / TOKENIZER)
    for settings in (model.config, model.generation_config):  # the end that was trained, whatever the base said
        settings.eos_token_id = tokenizer.eos_token_id
    out = Path(config.out)
    with new_folder(out, setting="out") as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return out


def _export_adapter(config: ExportConfig, checkpoint: dict[str, Any]) -> Path:
    """Only what was trained, with the fingerprint of the model that it belongs to."""
    record, run = checkpoint[RECORD_KEY], Path(config.run)
    if record["base"]["path"] is None:
        raise UserError(
            f"run={run}: it trained beside frozen weights that were fresh, which nobody could load again; train such a "
            "model first, export it, and give backbone.path"
        )
    settings = AdapterSettings(
        base=Base(**record["base"]),
        objective=record["config"]["objective"],
        spec=record["spec"],
        prompt_format=record["prompt_format"],
    )
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    weights = {name.removeprefix(MODEL_PREFIX): x.to(dtype) for name, x in checkpoint["state_dict"].items()}
    out = Path(config.out)
    with new_folder(out, setting="out") as folder:
        save_adapter(folder, settings, weights)
        load_tokenizer(run / TOKENIZER).save_pretrained(folder)
    return out


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to decode."""

    backbone: Backbone
    tokenizer: PreTrainedTokenizerBase
    spec: DiffusionSpec
    prompt_format: PromptFormat

    def identity(self, path: str) -> dict[str, Any]:
        """Plain data that tells this model, loaded from `path`, from another: for results."""
        return {
            "model": path,
            "weights_fingerprint": weights_fingerprint(self.backbone),
            "tokenizer_fingerprint": tokenizer_fingerprint(self.tokenizer),
            "spec": self.spec.to_dict(),
            "dtype": str(self.backbone.model.dtype).removeprefix("torch."),
            "device": self.backbone.device.type,
        }


def load_model(
    path: str,
    *,
    objective: Objective | None,
    base: str | None = None,
    device: str = "auto",
    dtype: DType = "auto",
    forward: ForwardChoice = "auto",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load an exported folder, or a model without a DiffusionSpec given its objective.

    Args:
        path: folder or hub id.
        base: where the base model of an adapter is; None for where it was.
        objective: what the model was trained with, where its config does not say (the official release).
        device: "auto" takes CUDA where there is one.
        dtype: "auto" is fp32 on CPU and bf16 on CUDA.
        forward: what runs decoding.
        trust_remote_code: run code that comes with the model.

    Raises:
        UserError: names the setting that cannot be met.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise UserError(f"device={device}: give cpu or cuda")
    if (Path(path) / "checkpoints").is_dir() or str(path).endswith(".ckpt"):
        raise UserError(f"model={path}: this is a training run; export it first: lit-refusion export run=... out=...")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device={device}: not available here ({first_line(error)}); use device=auto") from error
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    options: dict[str, Any] = {
        "dtype": getattr(torch, dtype), "device": device, "trust_remote_code": trust_remote_code
    }  # fmt: skip
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    if is_adapter_folder(path):
        found = _load_adapter(Path(path), tokenizer, base=base, options=options)
        if objective is not None and objective.name != found.spec.objective:
            raise UserError(f"objective={objective.name}: but model={path} was trained with '{found.spec.objective}'")
        return _decoding_by(found, forward)
    if base is not None:
        raise UserError(f"base={base}: only an adapter has one, and model={path} is whole; leave it out")
    backbone = Backbone.from_pretrained(path, tokenizer=tokenizer, **options)
    spec = backbone.saved_spec(origin=f"{path}/config.json")
    if spec is None and objective is None:
        raise UserError(
            f"model={path}: its config has no diffusion_spec, so nobody knows how it was trained; give objective=..."
        )
    if objective is not None:
        if spec is not None and spec.objective != objective.name:
            raise UserError(f"objective={objective.name}: but model={path} was trained with '{spec.objective}'")
        spec = spec or objective.spec(backbone.mask_token_id)
    assert spec is not None
    return _decoding_by(LoadedModel(backbone, tokenizer, spec, _prompt_format(backbone, origin=path)), forward)


def _decoding_by(model: LoadedModel, forward: ForwardChoice) -> LoadedModel:
    """The model with its choice of forward, which is checked now."""
    model.backbone.forward_choice = forward
    runs_lean(model.backbone)
    return model


def _load_adapter(
    folder: Path, tokenizer: PreTrainedTokenizerBase, *, base: str | None, options: dict[str, Any]
) -> LoadedModel:
    """The base model with an adapter's parameters beside its own."""
    settings = read_settings(folder)
    origin = base or settings.base.path
    if origin is None or (Path(origin).is_absolute() and not Path(origin).is_dir()):
        raise UserError(f"{folder / SETTINGS}: the base model was {origin}, which is not there; give base=...")
    backbone = Backbone.from_pretrained(
        origin,
        tokenizer=tokenizer,
        gguf_file=settings.base.gguf_file,
        mask_token_id=settings.base.mask_token_id,
        **options,
    )
    try:
        objective = build(settings.objective, Objective, key="objective")
    except UserError as error:
        raise UserError(f"{folder / SETTINGS}: {error}; export the adapter again") from error
    objective.prepare(backbone)
    load_weights(backbone, folder, settings.base, origin=origin)
    spec = DiffusionSpec.from_dict(settings.spec, origin=str(folder / SETTINGS))
    prompt_format = build(settings.prompt_format, PromptFormat, key=f"{folder / SETTINGS}: prompt_format")
    return LoadedModel(backbone, tokenizer, spec, prompt_format)


def _prompt_format(backbone: Backbone, *, origin: str) -> PromptFormat:
    """How the training prompts were written out; the chat template where the model does not say."""
    saved = getattr(backbone.model.config, "prompt_format", None)
    if saved is None:
        return PromptFormat(style="chat", template_kwargs={})
    return build(saved, PromptFormat, key=f"{origin}/config.json: prompt_format")
