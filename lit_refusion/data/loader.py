"""From the plan to batches: views are made in the loader's workers."""

from __future__ import annotations

import math
import multiprocessing.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lit_refusion.data import split
from lit_refusion.data.plan import Plan, Visit, accumulation, deal_by_length, deal_by_tokens, sequential
from lit_refusion.data.shards import Shards
from lit_refusion.data.workers import WorkerLoader, ignore_signals
from lit_refusion.errors import UserError
from lit_refusion.noise import FirstUniform, Stream, noise
from lit_refusion.objective import Objective
from lit_refusion.views import IGNORE, Batch, View, collate, pack

MaskRates = Literal["independent", "stratified", "antithetic"]


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How examples become batches.

    Args:
        layout: "padded" puts one example in a row; "packed" puts several, in rows of at most `max_row_length` tokens; a
            view that is longer by itself (two copies, padding to a multiple) gets a row of its own.
        micro_batch_size: examples per forward pass and device.
        max_row_length: row length of "packed", in tokens.
        pad_to_multiple: row lengths are rounded up to a multiple of this.
        num_workers: loader processes.
        validation_fraction: share of the examples held out, by hash of their text.
        max_training_examples: train on this many examples, those with the smallest hashes of their text: the same
            subset for every objective, order and worker count; null for all.
        max_validation_examples: the same for the held-out examples.
        mixture: how often an epoch shows each source, by its name; 1 for those not named. The number of examples is
            exact, and a source with a fraction goes on in the next epoch where it stopped.
        mask_rates: how the first uniform of an example, its mask rate, is drawn in training: "independent" (as the
            papers do), "stratified" (one from each of the step's equal slices of [0, 1)) or "antithetic" (u and 1 - u
            in pairs); the same examples get the same rates on any number of devices.
    """

    layout: Literal["padded", "packed"]
    micro_batch_size: int
    max_row_length: int
    pad_to_multiple: int
    num_workers: int
    validation_fraction: float
    max_training_examples: int | None
    max_validation_examples: int | None
    mixture: dict[str, float]
    mask_rates: MaskRates

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "max_row_length", "pad_to_multiple"):
            if getattr(self, name) < 1:
                raise UserError(f"loader.{name}={getattr(self, name)}: must be at least 1")
        if self.num_workers < 0:
            raise UserError(f"loader.num_workers={self.num_workers}: must not be negative")
        for name in ("max_training_examples", "max_validation_examples"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"loader.{name}={getattr(self, name)}: must be at least 1, or null for all")
        if not 0 <= self.validation_fraction < 1:
            raise UserError(f"loader.validation_fraction={self.validation_fraction}: must lie in [0, 1)")
        for name, weight in self.mixture.items():
            if not 0 <= weight < math.inf:
                raise UserError(f"loader.mixture.{name}={weight}: must be a number, and not negative")


@dataclass(frozen=True, kw_only=True)
class ViewMaker:
    """Turns visits into a Batch: the work of a loader process."""

    shards: Shards
    objective: Objective
    config: LoaderConfig
    mask_token_id: int | None
    seed: int
    stream: Stream
    step_size: int = 1
    mask_rates: MaskRates = "independent"

    def batch(self, visits: list[Visit], *, num_examples: int, num_response_tokens: int) -> Batch:
        """The batch of these visits; the counts are the denominators it carries."""
        views = [view for visit in visits for view in self._views(visit)]
        if not views:  # a rank whose validation examples ran out still takes part in the forward pass
            view = self._views(Visit(0, 0))[0]
            targets, term = np.full_like(view.targets, IGNORE), np.full_like(view.term, -1)
            views = [replace(view, targets=targets, term=term, weights=view.weights * 0)]
        packed = self.config.layout == "packed"
        rows = pack(views, max_length=self.config.max_row_length) if packed else [[view] for view in views]
        return collate(
            rows,
            mask_token_id=self.mask_token_id,
            pad_to_multiple=self.config.pad_to_multiple,
            num_examples=num_examples,
            num_response_tokens=num_response_tokens,
        )

    def _views(self, visit: Visit) -> list[View]:
        rng = noise(self.seed, index=visit.index, epoch=visit.epoch, stream=self.stream)
        if self.mask_rates == "stratified":
            rng = FirstUniform(rng, lambda u: _stratified(u, place=visit.place, count=self.step_size))
        elif self.mask_rates == "antithetic":
            pair = noise(self.seed, index=visit.place // 2, epoch=visit.step, stream=Stream.MASK_RATE_PAIR)
            rng = FirstUniform(rng, lambda u: abs(visit.place % 2 - pair.random(len(u))))
        return self.objective.views(self.shards[visit.index], rng)


class TrainBatches(Dataset):
    """Item m is this rank's m-th micro-batch of the whole run."""

    def __init__(self, maker: ViewMaker, plan: Plan, *, num_micro_batches: int, rank: int, world_size: int) -> None:
        self.maker, self.plan = maker, plan
        self.num_micro_batches, self.rank, self.world_size = num_micro_batches, rank, world_size
        self._dealt: tuple[int, list[list[Visit]], int] = (-1, [], 0)  # the last step, its hands, its response tokens

    def __getitem__(self, number: int) -> Batch:
        step, turn = divmod(number, self.num_micro_batches)
        if self._dealt[0] != step:
            self._dealt = (step, *self._deal(step))
        _, hands, num_response_tokens = self._dealt
        return self.maker.batch(
            hands[turn * self.world_size + self.rank],
            num_examples=self.plan.global_batch_size,
            num_response_tokens=num_response_tokens,
        )

    def _deal(self, step: int) -> tuple[list[list[Visit]], int]:
        visits = self.plan.step(step)
        indices = np.array([visit.index for visit in visits])
        shards = self.maker.shards
        lengths, count = shards.lengths(indices), self.num_micro_batches * self.world_size
        if self.maker.config.layout == "packed":
            hands = deal_by_tokens(visits, lengths, count=count)
        else:
            hands = deal_by_length(visits, lengths, count=count, world_size=self.world_size)
        return hands, int(shards.response_lengths(indices).sum())


class ValidationBatches(Dataset):
    """This rank's validation batches: as many on every rank, the noise the same at every validation."""

    def __init__(self, maker: ViewMaker, indices: np.ndarray, *, rank: int, world_size: int) -> None:
        self.maker, self.indices = maker, indices
        self.num_response_tokens = int(maker.shards.response_lengths(indices).sum())
        batches = sequential(indices, size=maker.config.micro_batch_size)
        self.batches = [
            batches[i] if i < len(batches) else []
            for i in range(rank, -(-len(batches) // world_size) * world_size, world_size)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Batch:
        return self.maker.batch(
            self.batches[number],
            num_examples=len(self.indices),
            num_response_tokens=self.num_response_tokens,
        )


class _From(Sampler[int]):
    """Counts up from `start`; its length is the whole run's, as Lightning's progress expects on resume."""

    def __init__(self, start: int, total: int) -> None:
        self.start, self.total = start, total

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.total))

    def __len__(self) -> int:
        return self.total


class DataModule(L.LightningDataModule):
    """The data of one run.

    Args:
        shards: the prepared data set.
        objective: makes the views.
        config: layout and sizes.
        mask_token_id: the backbone's [MASK].
        seed: keys order and noise.
        global_batch_size: examples per optimizer step.
    """

    def __init__(
        self,
        shards: Shards,
        objective: Objective,
        *,
        config: LoaderConfig,
        mask_token_id: int | None,
        seed: int,
        global_batch_size: int,
    ) -> None:
        super().__init__()
        self.shards, self.objective, self.config = shards, objective, config
        self.mask_token_id, self.seed = mask_token_id, seed
        train, validation = split.split(shards, config.validation_fraction)
        found, wanted = split.num_examples(train), config.max_training_examples
        if wanted is not None and wanted > found:
            raise UserError(f"loader.max_training_examples={wanted}: there are only {found}; lower it, or null for all")
        train = split.smallest_keys(shards, train, wanted)
        validation = split.smallest_keys(shards, validation, config.max_validation_examples)
        self.validation_indices = split.numbers(validation)
        weights = _weights(config.mixture, [source["name"] for source in shards.manifest.sources])
        self.plan = Plan(train, weights=weights, seed=seed, global_batch_size=global_batch_size)
        self._is_serving = multiprocessing.Event()
        self._is_serving.set()
        # Before multiprocessing waits for the processes at the end of this one, whoever forgot to release them.
        multiprocessing.util.Finalize(self, self._is_serving.clear, exitpriority=10)

    def num_micro_batches(self, world_size: int) -> int:
        """Gradient accumulation on `world_size` devices."""
        return accumulation(
            global_batch_size=self.plan.global_batch_size,
            micro_batch_size=self.config.micro_batch_size,
            world_size=world_size,
        )

    def train_dataloader(self) -> DataLoader:
        """Micro-batches from the trainer's current step to its last."""
        trainer = self.trainer
        assert trainer is not None
        count = self.num_micro_batches(trainer.world_size)
        dataset = TrainBatches(
            self._maker(Stream.TRAIN_NOISE),
            self.plan,
            num_micro_batches=count,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
        )
        return self._loader(dataset, _From(trainer.global_step * count, trainer.max_steps * count))

    def release_workers(self) -> None:
        """Let the loader processes end when they are told to, which they did not during training."""
        self._is_serving.clear()

    def val_dataloader(self) -> DataLoader | list[Any]:
        """Held-out examples; none where the fraction is 0."""
        if len(self.validation_indices) == 0:
            return []
        assert self.trainer is not None
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        maker = self._maker(Stream.VALIDATION_NOISE)
        dataset = ValidationBatches(maker, self.validation_indices, rank=rank, world_size=world_size)
        return self._loader(dataset, _From(0, len(dataset)))

    def _maker(self, stream: Stream) -> ViewMaker:
        return ViewMaker(
            shards=self.shards,
            objective=self.objective,
            config=self.config,
            mask_token_id=self.mask_token_id,
            seed=self.seed,
            stream=stream,
            step_size=self.plan.global_batch_size,
            mask_rates=self.config.mask_rates if stream == Stream.TRAIN_NOISE else "independent",
        )

    def _loader(self, dataset: Dataset, sampler: Sampler[int]) -> DataLoader:
        return WorkerLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=self.config.num_workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.config.num_workers > 0,
            worker_init_fn=partial(ignore_signals, self._is_serving),
        )


def _stratified(u: np.ndarray, *, place: int, count: int) -> np.ndarray:
    """Uniforms moved into the example's slice of [0, 1); those of further blocks into slices a golden step apart.

    So every block number is stratified over the batch, and the blocks of one example are not alike.
    """
    slices = (place + np.arange(len(u)) * round(0.618 * count)) % count
    return (slices + u) / count


def _weights(mixture: dict[str, float], names: list[str]) -> list[float]:
    """The weight of each source, in their order."""
    for name in mixture:
        if name not in names:
            raise UserError(f"loader.mixture.{name}: no such source in the data; it has {', '.join(names)}")
    return [mixture.get(name, 1.0) for name in names]
