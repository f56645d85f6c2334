"""A conversation with a model, line by line."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from lit_refusion.errors import UserError
from lit_refusion.prompts import Messages, with_system
from lit_refusion.streaming import Stream
from lit_refusion.writer import Writer, Written

RESET, QUIT = "/reset", "/quit"
HELP = f"{RESET} begins anew, {QUIT} or Ctrl-D ends, Ctrl-C stops an answer"


@dataclass
class Conversation:
    """Reads what a person says, and writes what the model answers while it is decoded.

    Args:
        writer: the model.
        system: system prompt, or None.
        read: gives the next line; raises EOFError at the end.
        write: receives the pieces of an answer.
        tell: receives everything else, one line each.
        messages: what was said since the last reset, without the system prompt.
        answers: all finished answers.
    """

    writer: Writer
    system: str | None
    read: Callable[[], str]
    write: Callable[[str], object]
    tell: Callable[[str], object]
    messages: Messages = field(default_factory=list)
    answers: list[Written] = field(default_factory=list)

    def run(self) -> list[Written]:
        """Talk until the end of the input or `/quit`; returns the finished answers."""
        while True:
            try:
                line = self.read().strip()
            except EOFError:
                return self.answers
            except KeyboardInterrupt:
                self.tell(HELP)
                continue
            if line == QUIT:
                return self.answers
            if line == RESET:
                self.messages.clear()
                self.tell("the conversation begins anew")
            elif re.fullmatch(r"/\w+", line):
                self.tell(f"{line}: unknown command; {HELP}")
            elif line:
                self._answer(line)

    def _answer(self, line: str) -> None:
        """Answer a line. What was written of an answer that was stopped stays in the conversation."""
        question = {"role": "user", "content": line}
        stream = Stream(
            self.writer.model.tokenizer, max_new_tokens=self.writer.decoder.max_new_tokens, write=self.write
        )
        try:
            written = self.writer.write(
                [with_system([*self.messages, question], self.system)],
                first_index=len(self.answers),
                on_step=lambda _, step: stream.on_step(step),
            )[0]
            text = stream.finish(written.generation)
            self.answers.append(written)
            self.write("\n")
        except KeyboardInterrupt:
            text = stream.text
            self.write("\n")
            self.tell("stopped")
            if not text:
                return
        except UserError as error:
            self.tell(f"{error}, or say {RESET}")
            return
        self.messages += [question, {"role": "assistant", "content": text}]
