"""Permutations and hashes that are computed where they are needed, so that nothing grows with the data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NUM_ROUNDS = 8


@dataclass(frozen=True)
class Permutation:
    """A pseudo-random permutation of 0 ... size - 1 that takes no memory.

    A balanced Feistel network over the next power of four, walked on until the value falls into the range (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002). Eight rounds with a 64-bit hash as the round function.

    Args:
        size: number of values.
        keys: [NUM_ROUNDS] uint64; other keys give another permutation.
    """

    size: int
    keys: np.ndarray

    @classmethod
    def draw(cls, size: int, rng: np.random.Generator) -> Permutation:
        """The permutation that `rng` draws."""
        return cls(size, rng.integers(0, 2**64, NUM_ROUNDS, dtype=np.uint64))

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """[N] values at the [N] places, int64."""
        half = np.uint64(max(3, (self.size.bit_length() + 1) // 2))  # few values need some width to mix well
        values = self._rounds(places.astype(np.uint64), half)
        while (outside := values >= self.size).any():
            values[outside] = self._rounds(values[outside], half)
        return values.astype(np.int64)

    def _rounds(self, values: np.ndarray, half: np.uint64) -> np.ndarray:
        low = (np.uint64(1) << half) - np.uint64(1)
        left, right = values >> half, values & low
        for key in self.keys:
            left, right = right, left ^ (_finalise(right + key) & low)
        return (left << half) | right


def mix(keys: np.ndarray, seed: int) -> np.ndarray:
    """hash(seed, key): [N] uint64 in which every bit depends on every bit of both."""
    golden = np.array([(seed + 1) * 0x9E3779B97F4A7C15 % 2**64], np.uint64)
    return _finalise(keys ^ _finalise(golden))


def _finalise(words: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a bijection of 64-bit words."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
