"""The seam of a decoding method: tokens in, tokens out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np

from lit_refusion.backbone import Backbone
from lit_refusion.engine.request import Row
from lit_refusion.engine.scheduler import Watch, decode
from lit_refusion.errors import UserError
from lit_refusion.generation import Generation
from lit_refusion.noise import Stream, noise
from lit_refusion.spec import DiffusionSpec

T = TypeVar("T")


def agree(name: str, own: T | None, trained: T | None, *, force: bool) -> T | None:
    """A convention of the decoder: the model's where it is left open; another one than the model's is refused."""
    if own is None:
        return trained
    if trained is not None and own != trained and not force:
        raise UserError(
            f"decoder.{name}={own}: the model was trained with {trained}; leave it null, or pass force=true"
        )
    return own


def check_sampling(*, temperature: float, top_k: int, top_p: float) -> None:
    """Refuse settings of sampling that mean nothing."""
    if temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
        raise UserError(
            f"decoder.temperature={temperature}, top_k={top_k}, top_p={top_p}: temperature and top_k must not be "
            "negative, top_p must lie in (0, 1]"
        )


@dataclass(frozen=True, kw_only=True)
class Decoder(ABC):
    """A decoding method: a frozen dataclass of settings, without defaults.

    A subclass writes `row`: the method for one prompt, in straight-line code. Batching, caching and counting are
    the engine's.

    Args:
        max_new_tokens: budget per prompt.
        batch_size: rows decoded together; finished rows are replaced by waiting prompts.
    """

    objectives: ClassVar[frozenset[str]]
    """Objectives whose models this decoder fits."""

    max_new_tokens: int
    batch_size: int

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"decoder.{name}={getattr(self, name)}: must be at least 1")

    @abstractmethod
    def row(self, prompt: np.ndarray, eos_token_id: int, rng: np.random.Generator) -> Row:
        """Decode one prompt of [P] ids, P >= 1, as a generator of requests; `rng` is for choices among positions."""

    @property
    def canvas(self) -> int:
        """Response positions that may be decoded: the budget, or what the method rounds it up to."""
        return self.max_new_tokens

    def capacity(self, longest_prompt: int) -> int:
        """Buffer places that a row needs, scratch included."""
        return longest_prompt + self.canvas

    def generate(
        self,
        backbone: Backbone,
        prompts: Sequence[Sequence[int]],
        *,
        seed: int = 0,
        indices: Sequence[int] | None = None,
        watch: Watch | None = None,
    ) -> list[Generation]:
        """Decode prompts of any lengths.

        Args:
            backbone: the model.
            prompts: token ids of each prompt.
            seed: seed of the sampling noise.
            indices: number of each prompt in its data set (default 0, 1, ...). Noise is keyed by (seed, index), so
                a prompt's result depends neither on its neighbours nor on the batch size.
            watch: what to follow and decide while it goes on.

        Raises:
            UserError: a prompt has no tokens.
        """
        if not all(len(prompt) for prompt in prompts):
            raise UserError("prompt: it has no tokens; give some text")
        numbers = range(len(prompts)) if indices is None else indices
        rngs = [noise(seed, index=number, epoch=0, stream=Stream.DECODING) for number in numbers]
        seeds = [int(rng.integers(2**62)) for rng in rngs]  # of the engine's own noise, for tokens
        return decode(
            backbone,
            [
                self.row(np.asarray(p, np.int64), backbone.eos_token_id, rng)
                for p, rng in zip(prompts, rngs, strict=True)
            ],
            batch_size=self.batch_size,
            capacity=self.capacity(max(map(len, prompts), default=0)),
            seeds=seeds,
            watch=watch,
        )

    def fit_to(self, spec: DiffusionSpec, *, force: bool = False) -> Decoder:
        """This decoder with the model's conventions filled in where its settings leave them to the model.

        Raises:
            UserError: the model was trained for another way of decoding (not with `force`).
        """
        if spec.objective not in self.objectives and not force:
            raise UserError(
                f"decoder {type(self).__name__} decodes models trained with {sorted(self.objectives)}, but this model "
                f"was trained with '{spec.objective}'; choose another decoder, or pass force=true"
            )
        return self
