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


def noise(seed: int, *, index: int, epoch: int, stream: Stream) -> np.random.Generator:
    """Counter-based generator keyed by (seed, stream) and counted from (index, epoch).

    It does not depend on rank, worker, batch layout or call order. The low 128 bits of the Philox counter are
    left to the draws themselves, so two examples can never overlap.
    """
    return np.random.Generator(np.random.Philox(key=_words(seed, stream), counter=_words(0, 0, index, epoch)))


def _words(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)  # a plain list would pass through float for large seeds


class FirstUniform(np.random.Generator):
    """A generator whose first scalar `random()` is moved by `transform`; all other draws are unchanged.

    An objective draws its mask rate first, so this replaces that one uniform (variance reduction over a batch)
    without the objective's knowing.
    """

    def __init__(self, generator: np.random.Generator, transform: Callable[[float], float]) -> None:
        super().__init__(generator.bit_generator)
        self._transform: Callable[[float], float] | None = transform

    def random(self, size: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As numpy's; the first call without a size is transformed."""
        drawn = super().random(size, *args, **kwargs)
        if self._transform is None or size is not None:
            return drawn
        drawn, self._transform = self._transform(drawn), None
        return drawn
