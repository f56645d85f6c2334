"""`lit-refusion generate`: decode a prompt, a file of prompts, or a conversation."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lit_refusion.backbone import ForwardChoice
from lit_refusion.commands import compose
from lit_refusion.conversation import HELP, Conversation
from lit_refusion.decoder import Decoder
from lit_refusion.errors import UserError
from lit_refusion.export import DType, load_model
from lit_refusion.fitting import fitted_decoder, without_decoder
from lit_refusion.objective import Objective
from lit_refusion.prompts import Messages, read_prompts, shown, with_system
from lit_refusion.replay import Replay, write_replay
from lit_refusion.schema import build
from lit_refusion.show_steps import render_steps
from lit_refusion.streaming import Stream
from lit_refusion.writer import Writer, Written, write_records

TEXTS = ("prompt", "system")
"""Settings that are plain text: they must not pass through the grammar of settings, where a comma has a meaning."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What to decode, and how.

    Args:
        model: exported folder, or any Hugging Face causal LM with `objective`.
        base: where the base model of an adapter is; null for where it was in training.
        prompt: text of the user's message.
        prompts: file of prompts, see `read_prompts`; all are decoded in one batch.
        system: system prompt, for conversations that bring none.
        out: file for the answers, JSON lines; must not exist.
        decoder: settings of the decoder; null takes the first preset that fits the model.
        objective: settings of the objective of a model that does not say how it was trained.
        seed: seed of the sampling noise.
        device: auto, cpu, cuda, ...
        dtype: auto, float32 or bfloat16.
        forward: what runs the model: "module" is Hugging Face's own code, "lean" does the same with less overhead,
            "auto" takes lean where it can be had.
        force: decode although decoder and model do not fit.
        trust_remote_code: run code that comes with the model.
        prompt_style: "chat" or "plain"; null for the way that the model was trained.
        template_kwargs: variables of the chat template; null for those that the model was trained with.
    """

    model: str
    base: str | None
    prompt: str | None
    prompts: str | None
    system: str | None
    out: str | None
    decoder: Decoder | None
    objective: Objective | None
    seed: int
    device: str
    dtype: DType
    forward: ForwardChoice
    force: bool
    trust_remote_code: bool
    prompt_style: Literal["chat", "plain"] | None
    template_kwargs: dict[str, Any] | None

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UserError(f"seed={self.seed}: must not be negative")


def run(arguments: argparse.Namespace) -> int:
    """Decode and print; `--html` also writes a page that replays it, `--show-steps` prints every forward pass."""
    texts = dict(text.split("=", 1) for text in arguments.overrides if text.split("=", 1)[0] in TEXTS and "=" in text)
    overrides = [text for text in arguments.overrides if text.split("=", 1)[0] not in TEXTS]
    arguments.overrides = without_decoder([*overrides, *(f"{name}=text" for name in texts)])
    config = compose(arguments)
    if config is None:
        return 0
    settings = build({"decoder": None, "objective": None, **config, **texts}, GenerateConfig)
    conversations = _asked(settings, arguments)
    writer, decoder_settings = _writer(settings, arguments, overrides)
    show_steps = arguments.show_steps
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    if arguments.chat:
        answers = _talk(writer, settings.system)
    elif settings.prompt is not None:
        answers = [_one(writer, conversations[0], console, stream=arguments.stream, show_steps=show_steps)]
    else:
        answers = _many(writer, conversations, console, show_steps=show_steps)
    if settings.out is not None:
        write_records(Path(settings.out), answers)
        print(f"{settings.out}: {len(answers)} answers", file=sys.stderr)
    if arguments.html is not None:
        print(write_replay(Path(arguments.html), _replays(answers, writer, settings.model, decoder_settings)))
    return 0


def _asked(settings: GenerateConfig, arguments: argparse.Namespace) -> list[Messages]:
    """The conversations to answer; refuses what cannot be done before the model is loaded."""
    ways = [settings.prompt is not None, settings.prompts is not None, arguments.chat]
    if sum(ways) != 1:
        raise UserError(
            f"prompt={settings.prompt}, prompts={settings.prompts}{', --chat' * arguments.chat}: give just one of "
            "prompt=TEXT, prompts=FILE and --chat"
        )
    if arguments.stream and settings.prompts is not None:
        raise UserError(f"--stream with prompts={settings.prompts}: it shows one answer; leave it out, or give prompt=")
    if arguments.show_steps and arguments.chat:
        raise UserError("--show-steps with --chat: it would break up the conversation; use --html")
    for name, given in (("out=", settings.out), ("--html ", arguments.html)):
        _check_target(name, given)
    if settings.prompt is not None:
        asked: list[Messages] = [[{"role": "user", "content": settings.prompt}]]
    else:
        asked = [] if settings.prompts is None else read_prompts(Path(settings.prompts))
    return [with_system(messages, settings.system) for messages in asked]


def _check_target(name: str, given: str | None) -> None:
    """Whether a file can be written later; the records of another run are not overwritten, a page is."""
    if given is None:
        return
    path = Path(given)
    if path.is_dir() or (name == "out=" and path.exists()):
        raise UserError(f"{name}{given}: it exists already; remove it or choose another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{name}{given}: cannot write it: {error.strerror}; choose another file") from error


def _writer(
    settings: GenerateConfig, arguments: argparse.Namespace, overrides: Sequence[str]
) -> tuple[Writer, dict[str, Any]]:
    """The model with its decoder, and the decoder's plain settings."""
    model = load_model(
        settings.model,
        base=settings.base,
        objective=settings.objective,
        device=settings.device,
        dtype=settings.dtype,
        forward=settings.forward,
        trust_remote_code=settings.trust_remote_code,
    )
    decoder, decoder_settings = fitted_decoder(
        "generate", overrides, model.spec, force=settings.force, config_dir=arguments.config_dir
    )
    prompt_format = model.prompt_format.changed(
        model.tokenizer, style=settings.prompt_style, template_kwargs=settings.template_kwargs
    )
    if arguments.chat and prompt_format.style == "plain":
        raise UserError("--chat: prompt_style=plain has no turns; give prompt_style=chat, or prompt=")
    return Writer(model=model, decoder=decoder, prompt_format=prompt_format, seed=settings.seed), decoder_settings


def _one(writer: Writer, messages: Messages, console: Console, *, stream: bool, show_steps: bool) -> Written:
    """Answer one prompt, and print the answer at its end or as it grows."""
    growing = Stream(writer.model.tokenizer, max_new_tokens=writer.decoder.max_new_tokens, write=_write)
    start = time.perf_counter()
    written = writer.write([messages], on_step=(lambda _, step: growing.on_step(step)) if stream else None)[0]
    seconds = time.perf_counter() - start
    if stream:
        growing.finish(written.generation)
        _write("\n")
    if show_steps:
        render_steps(written.generation, writer.model.tokenizer, console)
    if not stream:
        console.print(written.text, markup=False)
    console.print(_figures([written], seconds), style="dim")
    return written


def _many(writer: Writer, conversations: Sequence[Messages], console: Console, *, show_steps: bool) -> list[Written]:
    """Answer all prompts in one batch, and print the answers with their numbers."""
    errors = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    start = time.perf_counter()
    with Progress(*columns, TimeRemainingColumn(), console=errors, disable=not errors.is_terminal) as progress:
        task = progress.add_task("prompts", total=len(conversations))
        answers = writer.write(conversations, on_done=lambda *_: progress.advance(task))
    seconds = time.perf_counter() - start
    for number, written in enumerate(answers, start=1):
        console.print(f"[{number}]", style="bold", markup=False)
        if show_steps:
            render_steps(written.generation, writer.model.tokenizer, console)
        console.print(written.text, markup=False)
        console.print(_figures([written], None), style="dim")
    console.print(f"{len(answers)} prompts: {_figures(answers, seconds)}", style="dim")
    return answers


def _talk(writer: Writer, system: str | None) -> list[Written]:
    """Answer what a person types, or the lines of a file, until the end."""
    tell = partial(print, file=sys.stderr)
    if sys.stdin.isatty():
        tell(HELP)
    answers = Conversation(writer=writer, system=system, read=_read, write=_write, tell=tell).run()
    if sys.stdin.isatty():
        tell()
    return answers


def _read() -> str:
    """The next line of the standard input; a person sees a prompt and can edit."""
    try:
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401 - `input` then knows the arrow keys
            return input("> ")
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise UserError(f"--chat: the input is not UTF-8 text ({error.reason}); type or save it again") from error
    if not line:
        raise EOFError
    return line


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _figures(answers: Sequence[Written], seconds: float | None) -> str:
    """Tokens, passes and speed; of a single answer also how it ended and the method's own figures."""
    generations = [written.generation for written in answers]
    tokens = sum(len(generation.tokens) for generation in generations)
    passes = sum(generation.forward_passes for generation in generations)
    speed = "" if seconds is None else f", {tokens / seconds:.1f} tokens/s"
    text = f"{tokens} tokens, {passes} forward passes ({tokens / max(1, passes):.2f} tokens per pass){speed}"
    if len(generations) > 1:
        return text
    own = "".join(f", {name} {value:.2f}" for name, value in generations[0].statistics.items())
    return f"{text}, stopped by {generations[0].stop}{own}"


def _replays(answers: Sequence[Written], writer: Writer, model: str, decoder_settings: dict[str, Any]) -> list[Replay]:
    return [
        Replay.of(
            written.generation,
            writer.model.tokenizer,
            prompt=shown(written.messages),
            seconds=written.seconds,
            model=model,
            decoder=decoder_settings,
        )
        for written in answers
    ]
