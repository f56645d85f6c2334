"""Randomness as a function of the data: the same example gets the same noise on any machine."""

import enum
from collections.abc import Callable
from typing import Any

import numpy as np


class Stream(enum.IntEnum):
    """Independent uses of randomness; a new use gets a new number, old numbers never change."""

    TRAIN_NOISE = 0
    VALIDATION_NOISE = 1
    EPOCH_ORDER = 2
    DECODING = 3
    MASK_RATE_PAIR = 4
    LIKELIHOOD = 5
    DEPENDENCY = 6


def noise(seed: int, *, index: int, epoch: int, stream: Stream) -> np.random.Generator:
    """Counter-based generator keyed by (seed, stream) and counted from (index, epoch).

    It does not depend on rank, worker, batch layout or call order. The low 128 bits of the Philox counter are
    left to the draws themselves, so two examples can never overlap.
    """
    return np.random.Generator(np.random.Philox(key=_words(seed, stream), counter=_words(0, 0, index, epoch)))


def _words(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)  # a plain list would pass through float for large seeds


class FirstUniform(np.random.Generator):
    """A generator whose first `random` call is moved by `transform`; all other draws are unchanged.

    An objective draws its mask rate first (or one per block), so this replaces just those uniforms (variance
    reduction over a batch) without the objective's knowing.
    """

    def __init__(self, generator: np.random.Generator, transform: Callable[[np.ndarray], np.ndarray]) -> None:
        super().__init__(generator.bit_generator)
        self._transform: Callable[[np.ndarray], np.ndarray] | None = transform

    def random(self, size: int | None = None) -> Any:  # type: ignore[override]
        """As numpy's; the values of the first call, a scalar or [size], are transformed."""
        drawn = super().random(size)
        if self._transform is None:
            return drawn
        moved, self._transform = self._transform(np.atleast_1d(drawn)), None
        return float(moved[0]) if size is None else moved
