"""What the harness asks for, as token ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from lit_refusion.examples import Example, token_digest


@dataclass(frozen=True, kw_only=True)
class Question:
    """A request for text: prompt ids, budget in tokens, and what ends the answer."""

    prompt: list[int]
    budget: int
    until: tuple[str, ...]


def request_keys(prompts: Sequence[Sequence[int]]) -> list[int]:
    """[n] number of each prompt for its noise: a hash of its tokens, moved for every repetition."""
    seen: Counter[int] = Counter()
    keys = []
    for prompt in prompts:
        digest = token_digest(np.asarray(prompt, np.int64), len(prompt))
        keys.append((digest + seen[digest]) % 2**64)
        seen[digest] += 1
    return keys


def cut(tokens: Sequence[int], until: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of an answer up to the first stop string; one that is a special token ends it as a token."""
    added = tokenizer.get_added_vocab()
    stops = {added[text] for text in until if text in added}
    end = next((place for place, token in enumerate(tokens) if token in stops), len(tokens))
    text = str(tokenizer.decode(list(tokens[:end]), skip_special_tokens=True))
    for stop in until:
        text = text.split(stop, 1)[0]
    return text


def scored(context: Sequence[int], text: Sequence[int], *, window: int) -> Example:
    """A context and the text whose likelihood is asked for, numbered by a hash of both.

    A context that does not fit into the window of `window` tokens loses its beginning.
    """
    kept = context[-max(1, window - len(text)) :]
    tokens = np.array([*kept, *text], np.int64)
    return Example(
        index=token_digest(tokens, len(kept)), prompt_ids=tokens[: len(kept)], response_ids=tokens[len(kept) :]
    )
