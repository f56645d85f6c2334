"""Which examples an optimizer step sees: a pure function of (ranges, weights, seed, global batch size)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lit_refusion.data.permutation import Permutation
from lit_refusion.data.split import Range
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
    """An endless sequence of epochs, cut into steps of exactly `global_batch_size` examples.

    An epoch shows round(weight x size) examples of each source, in an order that mixes the sources. The examples of a
    source are taken from an endless sequence of permutations of its own, so that all are seen equally often, whatever
    the weight. A step may span two epochs: there is no short last step. Everything is computed from the place asked
    for; neither memory nor start-up time grows with the data, and the state to resume from is the step number alone.

    Args:
        ranges: training examples of each source.
        weights: how often an epoch shows each source; 1 each for None.
        seed: keys the permutations.
        global_batch_size: examples per optimizer step, over all ranks and micro-batches.

    Raises:
        UserError: no examples, or fewer than one step sees.
    """

    def __init__(
        self, ranges: Sequence[Range], *, weights: Sequence[float] | None = None, seed: int, global_batch_size: int
    ) -> None:
        self.starts = np.array([start for start, _ in ranges])
        self.sizes = np.array([stop - start for start, stop in ranges])
        self.counts = np.array([round(w * n) for w, n in zip(weights or [1.0] * len(ranges), self.sizes, strict=True)])
        self.seed, self.global_batch_size = seed, global_batch_size
        self.epoch_size = int(self.counts.sum())
        if self.epoch_size == 0:
            raise UserError("data: no training examples are left; lower loader.validation_fraction or add data")
        if self.epoch_size < global_batch_size:
            raise UserError(
                f"trainer.global_batch_size={global_batch_size}: larger than the {self.epoch_size} training examples "
                "of an epoch, so that one step would see an example twice; lower it or add data"
            )

    def num_steps(self, epochs: float) -> int:
        """Steps in which an epoch's examples are seen `epochs` times, rounded up."""
        return int(np.ceil(epochs * self.epoch_size / self.global_batch_size))

    def step(self, number: int) -> list[Visit]:
        """The examples of optimizer step `number`, in plan order."""
        places = number * self.global_batch_size + np.arange(self.global_batch_size)
        epochs, offsets = np.divmod(places, self.epoch_size)
        indices, visits = np.empty_like(places), np.empty_like(places)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            order = Permutation.draw(self.epoch_size, self._rng(0, int(epoch)))
            indices[in_epoch], visits[in_epoch] = self._draw(int(epoch), order(offsets[in_epoch]))
        return [Visit(int(i), int(e), number, place) for place, (i, e) in enumerate(zip(indices, visits))]

    def _draw(self, epoch: int, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(example numbers, how often each was seen before) of [N] places in an epoch that runs source by source."""
        stops = np.cumsum(self.counts)
        sources = np.searchsorted(stops, values, side="right")
        drawn = (
            epoch * self.counts[sources] + values - (stops - self.counts)[sources]
        )  # places in the source's sequence
        passes, places = np.divmod(drawn, np.maximum(self.sizes, 1)[sources])
        numbers = np.empty_like(values)
        for source, number in {*zip(sources.tolist(), passes.tolist())}:
            chosen = (sources == source) & (passes == number)
            order = Permutation.draw(int(self.sizes[source]), self._rng(source + 1, number))
            numbers[chosen] = self.starts[source] + order(places[chosen])
        return numbers, passes

    def _rng(self, index: int, epoch: int) -> np.random.Generator:
        return noise(self.seed, index=index, epoch=epoch, stream=Stream.EPOCH_ORDER)


def deal_by_tokens(visits: Sequence[Visit], lengths: np.ndarray, *, count: int) -> list[list[Visit]]:
    """A step's examples dealt to `count` micro-batches (ranks x accumulation), for packed rows.

    Each gets the same number of examples and nearly the same number of tokens: longest first, each to the lightest
    micro-batch that has room.

    Args:
        visits: the step's examples.
        lengths: tokens of each.
        count: micro-batches; divides the number of visits.
    """
    capacity = _share(visits, count)
    hands: list[list[Visit]] = [[] for _ in range(count)]
    lightest = [(0, hand) for hand in range(count)]
    for place in np.argsort(-np.asarray(lengths), kind="stable"):
        tokens, hand = heapq.heappop(lightest)
        hands[hand].append(visits[place])
        if len(hands[hand]) < capacity:
            heapq.heappush(lightest, (tokens + int(lengths[place]), hand))
    return hands


def deal_by_length(visits: Sequence[Visit], lengths: np.ndarray, *, count: int, world_size: int) -> list[list[Visit]]:
    """A step's examples dealt to `count` micro-batches, for padded rows: each gets examples of like length.

    Ranks that run at the same time get neighbours in the order of length, so that little is padded and none waits
    long; every other turn runs through the ranks backwards, so that none has the longer ones each time.

    Args:
        visits: the step's examples.
        lengths: tokens of each.
        count: micro-batches; divides the number of visits. Number t x world_size + r is the t-th of rank r.
        world_size: ranks; divides `count`.
    """
    capacity = _share(visits, count)
    order = np.argsort(-np.asarray(lengths), kind="stable")
    hands = [[visits[place] for place in order[first : first + capacity]] for first in range(0, len(order), capacity)]
    turns = [hands[first : first + world_size] for first in range(0, count, world_size)]
    return [hand for number, turn in enumerate(turns) for hand in (turn[::-1] if number % 2 else turn)]


def _share(visits: Sequence[Visit], count: int) -> int:
    capacity, rest = divmod(len(visits), count)
    assert rest == 0, f"{len(visits)} examples do not divide into {count} micro-batches"
    return capacity


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
