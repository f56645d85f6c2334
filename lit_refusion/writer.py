"""A model that answers: messages in, text out, with the story of how it was decoded."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lit_refusion.chat import PromptFormat
from lit_refusion.decoder import Decoder
from lit_refusion.engine.scheduler import Watch
from lit_refusion.errors import UserError, first_line
from lit_refusion.export import LoadedModel
from lit_refusion.generation import Generation, Step
from lit_refusion.new_file import write_file
from lit_refusion.prompts import Messages


@dataclass(frozen=True, kw_only=True)
class Written:
    """An answer.

    Args:
        messages: what it answers.
        generation: how it was decoded.
        text: the answer, its special tokens left out.
        seconds: what each forward pass took; None in a batch, whose rows share their passes.
    """

    messages: Messages
    generation: Generation
    text: str
    seconds: tuple[float, ...] | None

    def record(self, number: int) -> dict[str, Any]:
        """Plain data, for a line of JSON."""
        generation = self.generation
        return {
            "number": number,
            "messages": self.messages,
            "text": self.text,
            "tokens": len(generation.tokens),
            "passes": generation.forward_passes,
            "tokens_per_pass": generation.tokens_per_forward,
            "stop": generation.stop,
            "token_ids": list(generation.tokens),
            "statistics": generation.statistics,
        }


@dataclass(frozen=True, kw_only=True)
class Writer:
    """A model, a decoder that fits it, and how its prompts are written out."""

    model: LoadedModel
    decoder: Decoder
    prompt_format: PromptFormat
    seed: int

    def write(
        self,
        conversations: Sequence[Messages],
        *,
        first_index: int = 0,
        on_step: Callable[[int, Step], None] | None = None,
        on_done: Callable[[int, Generation], None] | None = None,
    ) -> list[Written]:
        """Answer conversations, all in one batch.

        Args:
            conversations: messages of each.
            first_index: number of the first; noise is keyed by it.
            on_step: told the place in the list and each step as it is made.
            on_done: told the place in the list and the generation of each that is finished.

        Raises:
            UserError: a prompt that cannot be written out, or is too long for the model; names it.
        """
        prompts = self._encode(conversations)
        times: list[float] = [time.perf_counter()]

        def note(number: int, step: Step) -> None:
            times.append(time.perf_counter())
            if on_step is not None:
                on_step(number, step)

        found = self.decoder.generate(
            self.model.backbone,
            prompts,
            seed=self.seed,
            indices=range(first_index, first_index + len(prompts)),
            watch=Watch(on_step=note, on_done=on_done),
        )
        seconds = tuple(stop - start for start, stop in pairwise(times)) if len(prompts) == 1 else None
        return [
            Written(messages=messages, generation=generation, text=self._text(generation), seconds=seconds)
            for messages, generation in zip(conversations, found, strict=True)
        ]

    def _text(self, generation: Generation) -> str:
        return str(self.model.tokenizer.decode(list(generation.tokens), skip_special_tokens=True))

    def _encode(self, conversations: Sequence[Messages]) -> list[list[int]]:
        """Token ids of each prompt."""
        from jinja2 import TemplateError

        for number, messages in enumerate(conversations, start=1):
            try:
                "".join(message["content"] for message in messages).encode()
            except UnicodeEncodeError as error:
                raise UserError(f"{_named(number, conversations)}: not UTF-8 text; save or type it again") from error
        try:
            prompts = self.prompt_format.encode_prompts(self.model.tokenizer, conversations)
        except (TemplateError, ValueError) as error:
            reason = first_line(error)
            raise UserError(f"prompt: the model's chat template refuses it ({reason}); change the messages") from error
        for number, prompt in enumerate(prompts, start=1):
            self._check_window(len(prompt), _named(number, conversations))
        return prompts

    def _check_window(self, length: int, name: str) -> None:
        """Refuse a prompt that does not fit into the model's window together with the response."""
        window = self.model.backbone.max_length
        if length == 0:
            raise UserError(f"{name}: it has no tokens; give some text")
        if window is not None and length + self.decoder.canvas > window:
            raise UserError(
                f"{name}: {length} tokens and decoder.max_new_tokens={self.decoder.max_new_tokens} exceed the model's "
                f"window of {window}; shorten the prompt or lower decoder.max_new_tokens"
            )


def _named(number: int, conversations: Sequence[Messages]) -> str:
    return "prompt" if len(conversations) == 1 else f"prompt {number}"


def write_records(path: Path, answers: Sequence[Written]) -> None:
    """One JSON object a line; the file appears in one rename.

    Raises:
        UserError: it cannot be written.
    """
    lines = [json.dumps(answer.record(number)) + "\n" for number, answer in enumerate(answers, start=1)]
    write_file(path, "".join(lines), name="out=")
