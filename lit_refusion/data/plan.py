"""Which examples an optimizer step sees: a pure function of (lengths, seed, global batch size)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lit_refusion.errors import UserError
from lit_refusion.noise import Stream, noise


@dataclass(frozen=True)
class Visit:
    """One example seen in one epoch; together they key its noise.

    Args:
        index: number of the example.
        epoch: how often it was seen before.
        step: optimizer step that sees it.
        place: place in that step, in plan order.
    """

    index: int
    epoch: int
    step: int = 0
    place: int = 0


class Plan:
    """An endless sequence of epoch permutations, cut into steps of exactly `global_batch_size` examples.

    A step may span two epochs, so there is no short last step. The state to resume from is the step number alone.

    Args:
        indices: numbers of the examples to train on.
        lengths: [num_examples] tokens of every example of the data set, for balancing.
        seed: keys the permutations.
        global_batch_size: examples per optimizer step, over all ranks and micro-batches.
    """

    def __init__(self, indices: np.ndarray, lengths: np.ndarray, *, seed: int, global_batch_size: int) -> None:
        if len(indices) == 0:
            raise UserError("data: no training examples are left; lower loader.validation_fraction or add data")
        self.indices, self.lengths = indices, lengths
        self.seed, self.global_batch_size = seed, global_batch_size
        self._cached: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def num_steps(self, epochs: float) -> int:
        """Steps in which every example is seen `epochs` times, rounded up."""
        return int(np.ceil(epochs * len(self.indices) / self.global_batch_size))

    def step(self, number: int) -> list[Visit]:
        """The examples of optimizer step `number`, in plan order."""
        visits = []
        first = number * self.global_batch_size
        for place in range(self.global_batch_size):
            epoch, offset = divmod(first + place, len(self.indices))
            visits.append(Visit(int(self._permutation(epoch)[offset]), epoch, number, place))
        return visits

    def micro_batches(self, number: int, *, count: int) -> list[list[Visit]]:
        """The step's examples dealt to `count` micro-batches (ranks x accumulation).

        Each gets the same number of examples and nearly the same number of tokens: longest first, each to the
        lightest micro-batch that has room.
        """
        capacity, rest = divmod(self.global_batch_size, count)
        assert rest == 0, f"{self.global_batch_size} examples do not divide into {count} micro-batches"
        visits = sorted(self.step(number), key=lambda visit: -int(self.lengths[visit.index]))
        hands: list[list[Visit]] = [[] for _ in range(count)]
        lightest = [(0, hand) for hand in range(count)]
        for visit in visits:
            tokens, hand = heapq.heappop(lightest)
            hands[hand].append(visit)
            if len(hands[hand]) < capacity:
                heapq.heappush(lightest, (tokens + int(self.lengths[visit.index]), hand))
        return hands

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._cached[0] != epoch:
            order = noise(self.seed, index=0, epoch=epoch, stream=Stream.EPOCH_ORDER).permutation(self.indices)
            self._cached = (epoch, order)
        return self._cached[1]


def accumulation(*, global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Micro-batches that each rank accumulates per optimizer step.

    Raises:
        UserError: the global batch does not divide evenly.
    """
    per_round = micro_batch_size * world_size
    count, rest = divmod(global_batch_size, per_round)
    if rest or count == 0:
        raise UserError(
            f"trainer.global_batch_size={global_batch_size} is not a multiple of loader.micro_batch_size="
            f"{micro_batch_size} x {world_size} devices = {per_round}; change one of them"
        )
    return count


def sequential(indices: Sequence[int] | np.ndarray, *, size: int) -> list[list[Visit]]:
    """Fixed batches of at most `size` examples in the given order, all as epoch 0 (validation)."""
    return [[Visit(int(i), 0) for i in indices[start : start + size]] for start in range(0, len(indices), size)]
