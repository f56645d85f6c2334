"""Randomness as a function of the data: the same example gets the same noise on any machine."""

import enum

import numpy as np


class Stream(enum.IntEnum):
    """Independent uses of randomness; a new use gets a new number, old numbers never change."""

    TRAIN_NOISE = 0
    VALIDATION_NOISE = 1
    EPOCH_ORDER = 2
    DECODING = 3


def noise(seed: int, *, index: int, epoch: int, stream: Stream) -> np.random.Generator:
    """Counter-based generator keyed by (seed, stream) and counted from (index, epoch).

    It does not depend on rank, worker, batch layout or call order. The low 128 bits of the Philox counter are
    left to the draws themselves, so two examples can never overlap.
    """
    return np.random.Generator(np.random.Philox(key=_words(seed, stream), counter=_words(0, 0, index, epoch)))


def _words(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)  # a plain list would pass through float for large seeds
