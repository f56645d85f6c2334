"""An answer shown while it is written: the text that is complete so far, in reading order."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from lit_refusion.generation import Generation, Step


class Stream:
    """Turns the steps of one row into growing text.

    Tokens may become final in any order; what is written is the text of those before the first open place. What has
    been written is never taken back: an end-of-sequence token, a budget that is rounded up, and half a character hold
    the rest back until the row ends.

    Args:
        tokenizer: the model's.
        max_new_tokens: places behind this many are no part of the answer.
        write: receives each new piece of text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, max_new_tokens: int, write: Callable[[str], object]
    ) -> None:
        self.tokenizer, self.max_new_tokens, self.write = tokenizer, max_new_tokens, write
        self.text = ""  # what has been written
        self._final: dict[int, int] = {}  # place -> token
        self._ready: list[int] = []  # tokens before the first open place

    def on_step(self, step: Step) -> None:
        """Take in a step, and write what it completes."""
        self._final.update(zip(step.committed, step.tokens, strict=True))
        before = len(self._ready)
        while (place := len(self._ready)) in self._final and place < self.max_new_tokens:
            if self._final[place] == self.tokenizer.eos_token_id:
                break
            self._ready.append(self._final[place])
        if len(self._ready) > before:
            self._write(self._decode(self._ready).rstrip("\ufffd"))

    def finish(self, generation: Generation) -> str:
        """Write what is missing of the whole answer; returns the answer."""
        text = self._decode(list(generation.tokens))
        if not text.startswith(self.text):  # a tokenizer that tidies up what it has said before
            self.write("\n")
            self.text = ""
        self._write(text)
        return text

    def _write(self, text: str) -> None:
        if text.startswith(self.text) and len(text) > len(self.text):
            self.write(text[len(self.text) :])
            self.text = text

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))
