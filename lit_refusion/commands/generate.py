"""`lit-refusion generate`: decode one prompt."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from lit_refusion.chat import PromptFormat
from lit_refusion.commands import compose
from lit_refusion.config import choices, load_config
from lit_refusion.decoder import Decoder
from lit_refusion.errors import UserError
from lit_refusion.export import DType, load_model
from lit_refusion.generation import Generation
from lit_refusion.objective import Objective
from lit_refusion.schema import build
from lit_refusion.show_steps import render_steps
from lit_refusion.spec import DiffusionSpec


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What to decode, and how.

    Args:
        model: exported folder, or any Hugging Face causal LM with `objective`.
        base: where the base model of an adapter is; null for where it was in training.
        prompt: text of the user's message.
        decoder: settings of the decoder; null takes the first preset that fits the model.
        objective: settings of the objective of a model that does not say how it was trained.
        seed: seed of the sampling noise.
        device: auto, cpu, cuda, ...
        dtype: auto, float32 or bfloat16.
        force: decode although decoder and model do not fit.
        trust_remote_code: run code that comes with the model.
        prompt_style: "chat" or "plain"; null for the way that the model was trained.
        template_kwargs: variables of the chat template; null for those that the model was trained with.
    """

    model: str
    base: str | None
    prompt: str
    decoder: Decoder | None
    objective: Objective | None
    seed: int
    device: str
    dtype: DType
    force: bool
    trust_remote_code: bool
    prompt_style: Literal["chat", "plain"] | None
    template_kwargs: dict[str, Any] | None


def run(arguments: argparse.Namespace) -> int:
    """Decode and print; with `--show-steps` also what every forward pass committed."""
    # A prompt is plain text: it must not pass through the grammar of settings, where a comma has a meaning.
    prompts = [text for text in arguments.overrides if text.startswith("prompt=")]
    overrides = [text for text in arguments.overrides if text not in prompts] + ["prompt=text"] * len(prompts)
    arguments.overrides = [text for text in overrides if not text.lstrip("+").startswith("decoder.")]
    config = compose(arguments)
    if config is None:
        return 0
    config["prompt"] = prompts[-1].removeprefix("prompt=")
    settings = build({"decoder": None, "objective": None, **config}, GenerateConfig)
    model = load_model(
        settings.model,
        base=settings.base,
        objective=settings.objective,
        device=settings.device,
        dtype=settings.dtype,
        trust_remote_code=settings.trust_remote_code,
    )
    preset = [] if settings.decoder else [f"decoder={fitting_preset(model.spec, arguments.config_dir)}"]
    config = load_config("generate", [*preset, *overrides], extra_folder=arguments.config_dir)
    decoder = build(config["decoder"], Decoder, key="decoder").fit_to(model.spec, force=settings.force)
    trained = model.prompt_format
    prompt_format = PromptFormat(
        style=settings.prompt_style or trained.style,
        template_kwargs=trained.template_kwargs if settings.template_kwargs is None else settings.template_kwargs,
    )
    prompt_format.check(model.tokenizer)
    messages = [{"role": "user", "content": settings.prompt}]
    prompt = prompt_format.encode_prompts(model.tokenizer, [messages])[0]
    check_window(len(prompt), decoder, model.backbone.max_length)

    start = time.perf_counter()
    generation = decoder.generate(model.backbone, [prompt], seed=settings.seed)[0]
    seconds = time.perf_counter() - start
    _show(generation, model.tokenizer, seconds=seconds, show_steps=arguments.show_steps)
    return 0


def _show(generation: Generation, tokenizer: PreTrainedTokenizerBase, *, seconds: float, show_steps: bool) -> None:
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    if show_steps:
        render_steps(generation, tokenizer, console)
    console.print(str(tokenizer.decode(list(generation.tokens), skip_special_tokens=True)), markup=False)
    console.print(
        f"{len(generation.tokens)} tokens, {generation.forward_passes} forward passes "
        f"({generation.tokens_per_forward:.2f} tokens per pass), {len(generation.tokens) / seconds:.1f} tokens/s, "
        f"stopped by {generation.stop}" + "".join(f", {name} {v:.2f}" for name, v in generation.statistics.items()),
        style="dim",
    )


def fitting_preset(spec: DiffusionSpec, config_dir: str | None) -> str:
    """Name of a decoder preset that fits the model: the one called like its objective, else the first."""
    names = choices("decoder", extra_folder=config_dir)
    for name in sorted(names, key=lambda name: name != spec.objective):
        config = load_config("generate", [f"decoder={name}", "model=m", "prompt=p"], extra_folder=config_dir)
        if spec.objective in build(config["decoder"], Decoder, key="decoder").objectives:
            return name
    raise UserError(
        f"no decoder preset fits models trained with '{spec.objective}'; choose one of "
        f"{', '.join(names)} with decoder=... and force=true"
    )


def check_window(prompt_length: int, decoder: Decoder, max_length: int | None) -> None:
    """Refuse a prompt that does not fit into the model's window together with the response."""
    if prompt_length == 0:
        raise UserError("prompt: it has no tokens; give some text")
    if max_length is not None and prompt_length + decoder.canvas > max_length:
        raise UserError(
            f"prompt: {prompt_length} tokens and decoder.max_new_tokens={decoder.max_new_tokens} exceed the model's "
            f"window of {max_length}; shorten the prompt or lower decoder.max_new_tokens"
        )
