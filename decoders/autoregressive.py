"""Left-to-right decoding, one token per forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lit_refusion.decoder import Decoder, check_sampling
from lit_refusion.engine.request import Request, Row, Sampling, visible
from lit_refusion.generation import Generation, Step


@dataclass(frozen=True, kw_only=True)
class AutoregressiveDecoder(Decoder):
    """Greedy or sampled decoding with a key-value cache.

    Args:
        temperature: 0 for greedy.
        top_k: sample among the k likeliest; 0 for all.
        top_p: sample among the likeliest up to this probability; 1 for all.
        stop_at_eos: end a row at its first end-of-sequence token.
    """

    objectives: ClassVar[frozenset[str]] = frozenset({"autoregressive", "orthrus"})  # whose frozen view is one

    temperature: float
    top_k: int
    top_p: float
    stop_at_eos: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    def row(self, prompt: np.ndarray, eos_token_id: int, rng: np.random.Generator) -> Row:
        """One token per pass; the first pass carries the prompt."""
        sampling = Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        response: list[int] = []
        steps: list[Step] = []
        fed = prompt  # tokens whose keys are not in the buffer yet
        while True:
            places = len(prompt) + len(response) - len(fed) + np.arange(len(fed))
            reply = yield Request(
                tokens=fed,
                positions=places,
                places=places,
                intervals=visible((0, places + 1)),
                num_replies=1,
                sampling=sampling,
                steps=steps,
            )
            token = int(reply.tokens[0])
            steps.append(Step("token", (len(response),), (token,)))
            response.append(token)
            is_over = self.stop_at_eos and token == eos_token_id
            if is_over or len(response) == self.max_new_tokens:
                break
            fed = np.array([token])
        return Generation(
            tokens=tuple(response),
            uncut_tokens=tuple(response),
            forward_passes=len(response),
            stop="eos" if is_over else "length",
            steps=tuple(steps),
        )
