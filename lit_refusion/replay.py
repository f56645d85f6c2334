"""A page that replays decoding, pass by pass, in a browser."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lit_refusion.errors import UserError
from lit_refusion.generation import Generation
from lit_refusion.new_file import write_file

TEMPLATE, PLACE_OF_DATA = "replay.html", "/*DATA*/"
MAX_TOKENS_OF_A_CHARACTER = 4
"""UTF-8 writes a character in at most four bytes, and a token holds at least one."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward pass.

    Args:
        kind: what it was for, in the method's own words.
        places: places in the response whose tokens became final in it.
    """

    kind: str
    places: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What the page shows of one prompt.

    Args:
        prompt: text of the prompt.
        tokens: text of each place of the response, in reading order; empty where a place was never decided.
        kept: whether each place belongs to the answer; the others stand behind its end.
        steps: the forward passes, in order.
        seconds: what each pass took, or None where nobody measured.
        model: name of the model.
        decoder: settings of the decoder, plain data.
        figures: tokens, passes, tokens per pass, and the method's own figures.
    """

    prompt: str
    tokens: tuple[str, ...]
    kept: tuple[bool, ...]
    steps: tuple[Pass, ...]
    seconds: tuple[float, ...] | None
    model: str
    decoder: dict[str, Any]
    figures: dict[str, float]

    @classmethod
    def of(
        cls,
        generation: Generation,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt: str,
        seconds: Sequence[float] | None,
        model: str,
        decoder: dict[str, Any],
    ) -> Replay:
        """The replay of a Generation; `seconds` has one entry per pass."""
        assert seconds is None or len(seconds) == len(generation.steps), f"{len(seconds)} times"
        found = {
            place: token for step in generation.steps for place, token in zip(step.committed, step.tokens, strict=True)
        }
        order = sorted(found)
        tokens, kept = [""] * (max(order, default=-1) + 1), [False] * (max(order, default=-1) + 1)
        for number, (place, text) in enumerate(zip(order, token_texts([found[place] for place in order], tokenizer))):
            tokens[place], kept[place] = text, number < len(generation.tokens)
        return cls(
            prompt=prompt,
            tokens=tuple(tokens),
            kept=tuple(kept),
            steps=tuple(Pass(kind=step.kind, places=step.committed) for step in generation.steps),
            seconds=None if seconds is None else tuple(seconds),
            model=model,
            decoder=decoder,
            figures={
                "tokens": len(generation.tokens),
                "passes": generation.forward_passes,
                "tokens_per_pass": generation.tokens_per_forward,
                **generation.statistics,
            },
        )


def token_texts(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """[N] text that each token adds to those before it; special tokens are shown.

    A character that takes several tokens is given to the first of them, and the others are empty.
    """
    texts = [""] * len(tokens)
    start = written = 0  # tokens[start:written] stand before the piece, since some tokenizers drop a leading space
    for stop in range(1, len(tokens) + 1):
        text = _decode(tokens[start:stop], tokenizer)
        is_cut = text.endswith("\ufffd") and stop - written < MAX_TOKENS_OF_A_CHARACTER
        if is_cut and stop < len(tokens):
            continue
        before = _decode(tokens[start:written], tokenizer)
        alone = _decode(tokens[written:stop], tokenizer)
        texts[written] = text[len(before) :] if text.startswith(before) else alone
        start, written = written, stop
    return texts


def _decode(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)) if tokens else ""


def write_replay(path: Path, items: Sequence[Replay]) -> Path:
    """Write one HTML page that needs nothing else; a file of that name is replaced in one rename.

    Args:
        path: of the page.
        items: what it shows, one prompt each.

    Raises:
        UserError: there is nothing to show, or the page cannot be written.
    """
    if not items:
        raise UserError(f"--html {path}: nothing was decoded, so there is nothing to replay; give a prompt")
    template = Path(__file__).with_name(TEMPLATE).read_text(encoding="utf-8")
    head, tail = template.split(PLACE_OF_DATA)
    data = json.dumps({"items": [asdict(item) for item in items]}, ensure_ascii=True, allow_nan=False)
    for sign in "<>&":  # nothing in it can end the script element, or begin another one
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    return write_file(path, head + data + tail, name="--html ")
