"""Batches: the same examples with the same noise, however they are dealt, laid out, loaded or resumed."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import tracemalloc
from collections import Counter
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lit_refusion.callbacks.interrupt import STOP_SIGNALS
from lit_refusion.data import split
from lit_refusion.data.loader import DataModule, LoaderConfig, TrainBatches, ValidationBatches
from lit_refusion.data.plan import Visit
from lit_refusion.data.shards import Shards
from lit_refusion.data.workers import plain_worker_errors
from lit_refusion.errors import UserError
from lit_refusion.examples import Example
from lit_refusion.noise import Stream, noise
from lit_refusion.views import IGNORE, MASK, Batch, View
from objectives.refusion import ReFusion
from tests.data.test_shards import ADDITIONS, OTHERS, flip_byte, prepare_folder, sparse_folder

OBJECTIVE = ReFusion(slot_sizes=(4, 8), masking="bernoulli", mdm_weight=1.0, eps=1e-3, complementary=False)
GLOBAL_BATCH = 8
MASK_ID = 300
NAMES = [item.name for item in fields(View)]
LAYOUTS = ["padded", "packed"]


@pytest.fixture(scope="module")
def folder(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 60 additions."""
    return prepare_folder(tmp_path_factory.mktemp("loader") / "data", tokenizer_folder, sums=ADDITIONS)


@pytest.fixture
def shards(folder: Path) -> Shards:
    return Shards(folder)


@pytest.fixture(scope="module")
def two_sources(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 60 additions and 29 others."""
    path = tmp_path_factory.mktemp("two_sources") / "data"
    return prepare_folder(path, tokenizer_folder, sums=ADDITIONS, others=OTHERS)


def loader_config(**changes: Any) -> LoaderConfig:
    values: dict[str, Any] = {
        "layout": "padded",
        "micro_batch_size": 2,
        "max_row_length": 128,
        "pad_to_multiple": 8,
        "num_workers": 0,
        "validation_fraction": 0.3,
        "max_training_examples": None,
        "max_validation_examples": None,
        "mixture": {},
        "mask_rates": "independent",
    }
    return LoaderConfig(**{**values, **changes})


def data_module(
    shards: Shards, *, rank: int = 0, world_size: int = 1, step: int = 0, steps: int = 3, seed: int = 4, **changes: Any
) -> DataModule:
    """The data of one rank of a run that goes from `step` to `steps`."""
    data = DataModule(
        shards,
        OBJECTIVE,
        config=loader_config(**changes),
        mask_token_id=MASK_ID,
        seed=seed,
        global_batch_size=GLOBAL_BATCH,
    )
    data.trainer = SimpleNamespace(world_size=world_size, global_rank=rank, global_step=step, max_steps=steps)
    return data


def training_indices(data: DataModule) -> list[int]:
    """The examples of the first epoch."""
    visits = [visit for step in range(data.plan.num_steps(1)) for visit in data.plan.step(step)]
    return sorted(visit.index for visit in visits[: data.plan.epoch_size])


def train(shards: Shards, **settings: Any) -> list[Batch]:
    return batches_of(data_module(shards, **settings))


def batches_of(data: DataModule) -> list[Batch]:
    try:
        return list(data.train_dataloader())
    finally:
        data.release_workers()


def validation(shards: Shards, **settings: Any) -> list[Batch]:
    return list(data_module(shards, **settings).val_dataloader())


def same(first: Batch, second: Batch) -> bool:
    """Whether two batches are equal to the bit, layout included."""
    pairs = [(getattr(first, name), getattr(second, name)) for name in vars(first)]
    return all(
        torch.equal(a.nan_to_num(-7), b.nan_to_num(-7)) if isinstance(a, torch.Tensor) else a == b for a, b in pairs
    )


def documents(batches: list[Batch]) -> Counter:
    """The views in the batches by their content, whatever row and place they lie in."""
    found: Counter = Counter()
    for batch in batches:
        for row, segments in enumerate(batch.segment_ids):
            for segment in range(1, int(segments.max()) + 1):
                found[tuple(tuple(getattr(batch, name)[row][segments == segment].tolist()) for name in NAMES)] += 1
    return found


def expected(data: DataModule, visits: list[Visit], stream: Stream) -> Counter:
    """The same from the objective itself, one example at a time."""
    found: Counter = Counter()
    for visit in visits:
        rng = noise(data.seed, index=visit.index, epoch=visit.epoch, stream=stream)
        view = OBJECTIVE.view(data.shards[visit.index], rng)
        columns = {name: np.asarray(getattr(view, name)) for name in NAMES}
        columns["input_ids"] = np.where(columns["input_ids"] == MASK, MASK_ID, columns["input_ids"])
        columns["mask_rate"] = np.full(len(view), view.mask_rate, np.float32)
        found[tuple(tuple(columns[name].tolist()) for name in NAMES)] += 1
    return found


class Recorder(ReFusion):
    """Notes which examples were asked for, and the first draw of each, which tells its noise."""

    def views(self, example: Example, rng: np.random.Generator) -> list[View]:
        self.seen.append((example.index, rng.random()))
        return OBJECTIVE.views(example, rng)


def recorded(shards: Shards, **settings: Any) -> list[tuple[int, float]]:
    """(example, first draw) of one rank's examples, in order."""
    data = data_module(shards, **settings)
    data.objective = Recorder(**dataclasses.asdict(OBJECTIVE))
    object.__setattr__(data.objective, "seen", [])
    list(data.train_dataloader())
    return data.objective.seen


def planned(data: DataModule, visits: list[Visit]) -> list[tuple[int, float]]:
    """What `recorded` should note of these visits."""
    return [
        (v.index, noise(data.seed, index=v.index, epoch=v.epoch, stream=Stream.TRAIN_NOISE).random()) for v in visits
    ]


# Training


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 4), (2, 2), (4, 1)])
def test_a_step_has_the_same_views_however_it_is_dealt(
    world_size: int, accumulation: int, num_workers: int, layout: str, shards: Shards
) -> None:
    settings = {"world_size": world_size, "layout": layout, "steps": 7, "num_workers": num_workers}
    ranks = [train(shards, rank=rank, **settings) for rank in range(world_size)]
    data = data_module(shards)
    assert data.num_micro_batches(world_size) == accumulation
    assert [len(batches) for batches in ranks] == [7 * accumulation] * world_size
    for step in range(7):  # the 38 or so training examples last for less than five steps: epochs are spanned
        dealt = [batch for batches in ranks for batch in batches[step * accumulation : (step + 1) * accumulation]]
        visits = data.plan.step(step)
        assert documents(dealt) == expected(data, visits, Stream.TRAIN_NOISE)
        assert {sum(documents([batch]).values()) for batch in dealt} == {2}
        tokens = sum(len(shards[visit.index].response_ids) for visit in visits)
        assert {(batch.num_examples, batch.num_response_tokens) for batch in dealt} == {(GLOBAL_BATCH, tokens)}
    assert data.plan.step(6)[-1].epoch > 0


def test_ranks_that_run_at_the_same_time_get_padded_rows_of_like_length(shards: Shards) -> None:
    ranks = [recorded(shards, rank=rank, world_size=2, steps=5) for rank in range(2)]
    plan = data_module(shards).plan
    for step in range(5):
        lengths = shards.lengths(np.array([visit.index for visit in plan.step(step)]))
        falling = sorted(lengths.tolist(), reverse=True)
        for turn in range(2):
            first = 2 * (2 * step + turn)  # two examples in a micro-batch, two micro-batches a rank and step
            at_once = [index for seen in ranks for index, _ in seen[first : first + 2]]
            assert sorted(shards.lengths(np.array(at_once)).tolist(), reverse=True) == falling[4 * turn : 4 * turn + 4]


def test_packed_micro_batches_hold_about_as_many_tokens(shards: Shards) -> None:
    ranks = [recorded(shards, rank=rank, world_size=4, steps=5, layout="packed") for rank in range(4)]
    for step in range(5):
        dealt = [[index for index, _ in seen[2 * step : 2 * step + 2]] for seen in ranks]
        tokens = [int(shards.lengths(np.array(indices)).sum()) for indices in dealt]
        longest = int(shards.lengths(np.concatenate(dealt)).max())
        shortest = int(shards.lengths(np.concatenate(dealt)).min())
        assert max(tokens) - min(tokens) <= longest - shortest


def test_a_step_is_dealt_once(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dealing looks up every example of the step; each of its many micro-batches must not do so again."""
    data = data_module(shards, steps=5, micro_batch_size=1)
    steps: list[int] = []
    step = data.plan.step
    monkeypatch.setattr(data.plan, "step", lambda number: steps.append(number) or step(number))
    assert len(list(data.train_dataloader())) == 5 * GLOBAL_BATCH
    assert steps == [0, 1, 2, 3, 4]


def test_micro_batches_can_be_asked_for_in_any_order(shards: Shards) -> None:
    dataset = data_module(shards).train_dataloader().dataset
    in_order = [dataset[number] for number in range(12)]
    for number in np.random.default_rng(0).permutation(12):
        assert same(dataset[int(number)], in_order[number])


def test_micro_batch_size_changes_the_cut_and_not_the_views(shards: Shards) -> None:
    batches = {size: train(shards, micro_batch_size=size) for size in (1, 2, 4, 8)}
    assert [len(batches[size]) for size in batches] == [24, 12, 6, 3]
    assert documents(batches[1]) == documents(batches[2]) == documents(batches[4]) == documents(batches[8])


def test_packed_rows_keep_to_their_length_and_padded_rows_hold_one_view(shards: Shards) -> None:
    padded = train(shards, micro_batch_size=8)
    packed = train(shards, layout="packed", micro_batch_size=8)
    assert documents(padded) == documents(packed)
    assert {int(batch.segment_ids.max()) for batch in padded} == {1}
    assert {len(batch.segment_ids) for batch in padded} == {8}
    assert max(int(batch.segment_ids.max()) for batch in packed) > 1
    assert all(batch.segment_ids.shape[1] <= 128 and batch.segment_ids.shape[1] % 8 == 0 for batch in packed)


def test_batches_do_not_depend_on_the_number_of_workers(shards: Shards) -> None:
    alone = train(shards, layout="packed", steps=2)
    torch.manual_seed(3)  # workers are seeded from the global generator; nothing may come of it
    with_workers = train(shards, layout="packed", steps=2, num_workers=2)
    assert len(with_workers) == len(alone) == 8
    assert all(same(a, b) for a, b in zip(with_workers, alone, strict=True))


def test_two_loaders_of_the_same_run_are_equal_and_another_seed_is_another_run(shards: Shards) -> None:
    np.random.seed(0)
    first = train(shards)
    np.random.seed(1)
    assert all(same(a, b) for a, b in zip(train(shards), first, strict=True))
    assert not documents(train(shards, seed=5)) & documents(first)


def test_noise_of_an_example_is_new_in_every_epoch(shards: Shards) -> None:
    once = documents(train(shards, steps=10))
    assert sum(once.values()) == 80
    assert len(once) == 80  # about two epochs, and no view twice


@pytest.mark.parametrize("step", range(9))
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2)])
def test_resumed_loader_gives_the_tail_of_an_uninterrupted_one(
    rank: int, world_size: int, step: int, shards: Shards
) -> None:
    whole = train(shards, rank=rank, world_size=world_size, steps=8)
    tail = train(shards, rank=rank, world_size=world_size, step=step, steps=8)
    assert len(tail) == (8 - step) * len(whole) // 8
    assert all(same(a, b) for a, b in zip(tail, whole[len(whole) - len(tail) :], strict=True))


def test_resuming_on_more_ranks_gives_the_remaining_views(shards: Shards) -> None:
    whole = train(shards, steps=6)
    resumed = [batch for rank in range(4) for batch in train(shards, rank=rank, world_size=4, step=4, steps=6)]
    assert documents(resumed) == documents(whole[4 * 4 :])


ELASTIC = {
    "1 to 2 to 4 ranks": [(1, 0, 3), (2, 3, 8), (4, 8, 15)],
    "4 to 2 to 1 ranks": [(4, 0, 1), (2, 1, 2), (1, 2, 15)],
    "8 ranks from the middle of an epoch": [(1, 0, 2), (8, 2, 15)],
    "2 ranks stopped at every step": [(2, step, step + 1) for step in range(15)],
}
"""(ranks, first step, last step + 1) of each stretch of a run."""


@pytest.mark.parametrize("name", ELASTIC)
@pytest.mark.parametrize("mixture", [{}, {"sums": 0.5, "others": 1.3}])
def test_a_run_on_changing_numbers_of_ranks_sees_the_planned_sequence(
    name: str, mixture: dict[str, float], two_sources: Path
) -> None:
    shards = Shards(two_sources)
    settings = {"mixture": mixture, "micro_batch_size": 1}
    data = data_module(shards, **settings)
    seen: list[tuple[int, float]] = []
    for world_size, first, last in ELASTIC[name]:
        run = {"world_size": world_size, "step": first, "steps": last, **settings}
        ranks = [recorded(shards, rank=rank, **run) for rank in range(world_size)]
        share = GLOBAL_BATCH // world_size
        assert [len(found) for found in ranks] == [(last - first) * share] * world_size
        for number in range(first, last):
            start = (number - first) * share
            together = [visit for found in ranks for visit in found[start : start + share]]
            assert sorted(together) == sorted(planned(data, data.plan.step(number)))
            seen += together
    assert len(set(seen)) == 15 * GLOBAL_BATCH  # no example twice with the same noise
    if not mixture:  # 15 x 8 visits end in the second epoch; the first has each example once
        first_epoch = [v for number in range(15) for v in data.plan.step(number) if v.epoch == 0]
        assert sorted(v.index for v in first_epoch) == training_indices(data)
        assert set(planned(data, first_epoch)) < set(seen)


def test_length_of_the_loader_is_that_of_the_whole_run(shards: Shards) -> None:
    assert len(data_module(shards, step=5, steps=8).train_dataloader()) == 8 * 4


def test_data_set_can_be_sent_to_a_worker(shards: Shards) -> None:
    data = data_module(shards)
    dataset = data.train_dataloader().dataset
    first = dataset[0]
    assert same(pickle.loads(pickle.dumps(dataset))[0], first)


# Validation


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_validation_sees_every_held_out_example_once(world_size: int, layout: str, shards: Shards) -> None:
    ranks = [validation(shards, rank=rank, world_size=world_size, layout=layout) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    data = data_module(shards)
    supervised = [batch for batches in ranks for batch in batches if (batch.targets != IGNORE).any()]
    visits = [Visit(int(index), 0) for index in data.validation_indices]
    assert documents(supervised) == expected(data, visits, Stream.VALIDATION_NOISE)
    tokens = sum(len(shards[visit.index].response_ids) for visit in visits)
    counts = {(batch.num_examples, batch.num_response_tokens) for batches in ranks for batch in batches}
    assert counts == {(len(visits), tokens)}


def test_validation_noise_is_the_same_on_each_pass_and_at_each_step(shards: Shards) -> None:
    data = data_module(shards)
    loader = data.val_dataloader()
    first = list(loader)
    later = validation(shards, step=2)
    assert len(loader) == len(first) > 1
    assert all(same(a, b) for a, b in zip(loader, first, strict=True))
    assert all(same(a, b) for a, b in zip(later, first, strict=True))


def test_validation_and_training_share_no_example_and_no_noise(shards: Shards) -> None:
    data = data_module(shards)
    assert sorted([*training_indices(data), *data.validation_indices]) == list(range(60))
    visits = [Visit(int(index), 0) for index in data.validation_indices]
    assert not expected(data, visits, Stream.TRAIN_NOISE) & documents(validation(shards))


def test_ranks_without_examples_get_batches_without_supervision(shards: Shards) -> None:
    held_out = len(data_module(shards).validation_indices)
    world_size = -(-held_out // 2) + 3  # three ranks more than batches
    ranks = [validation(shards, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert [len(batches) for batches in ranks] == [1] * world_size
    for [batch] in ranks[-3:]:
        assert (batch.targets == IGNORE).all()
        assert (batch.weights == 0).all()
        assert (batch.segment_ids > 0).any()  # there is still something to run forward
        assert batch.num_examples == held_out
    assert all((batch.targets != IGNORE).any() for [batch] in ranks[:-3])


def test_batches_without_supervision_have_no_terms(shards: Shards) -> None:
    [empty] = validation(shards, rank=59, world_size=60)
    assert (empty.term == -1).all()


def test_subsets_are_the_smallest_hashes_of_their_side(two_sources: Path) -> None:
    shards = Shards(two_sources)

    def smallest(indices: list[int], count: int) -> list[int]:
        return sorted(sorted(indices, key=lambda index: int(shards.keys[index]))[:count])

    whole = data_module(shards)
    part = data_module(shards, max_training_examples=9, max_validation_examples=5)
    assert training_indices(part) == smallest(training_indices(whole), 9)
    assert part.validation_indices.tolist() == smallest(whole.validation_indices.tolist(), 5)
    with pytest.raises(
        UserError, match=r"loader\.max_training_examples=1000000: there are only \d+; lower it, or null"
    ):
        data_module(shards, max_training_examples=10**6)
    more = data_module(shards, max_validation_examples=10**6)
    assert training_indices(more) == training_indices(whole)
    assert more.validation_indices.tolist() == whole.validation_indices.tolist()


def test_no_validation_where_the_fraction_is_zero(shards: Shards) -> None:
    data = data_module(shards, validation_fraction=0.0)
    assert data.val_dataloader() == []
    assert training_indices(data) == list(range(60))


def test_validation_batches_by_rank(shards: Shards) -> None:
    maker = data_module(shards)._maker(Stream.VALIDATION_NOISE)
    indices = np.array([7, 3, 9, 1, 4])
    dealt = [ValidationBatches(maker, indices, rank=rank, world_size=2).batches for rank in range(2)]
    assert [[[visit.index for visit in batch] for batch in batches] for batches in dealt] == [
        [[7, 3], [4]],
        [[9, 1], []],
    ]


# Settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch_size": 0}, r"loader\.micro_batch_size=0: must be at least 1"),
        ({"max_row_length": 0}, r"loader\.max_row_length=0: must be at least 1"),
        ({"pad_to_multiple": -8}, r"loader\.pad_to_multiple=-8: must be at least 1"),
        ({"num_workers": -1}, r"loader\.num_workers=-1: must not be negative"),
        ({"validation_fraction": 1.0}, r"loader\.validation_fraction=1\.0: must lie in \[0, 1\)"),
        ({"validation_fraction": -0.1}, r"loader\.validation_fraction=-0\.1: must lie in \[0, 1\)"),
        ({"max_training_examples": 0}, r"loader\.max_training_examples=0: must be at least 1, or null"),
        (
            {"mixture": {"sums": 1.0, "others": -0.5}},
            r"loader\.mixture\.others=-0\.5: must be a number, and not negative",
        ),
        ({"max_validation_examples": -1}, r"loader\.max_validation_examples=-1: must be at least 1, or null"),
    ],
)
def test_bad_settings_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        loader_config(**changes)


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_name_the_field(weight: float, shards: Shards) -> None:
    with pytest.raises(UserError, match=r"loader\.mixture\.sums="):
        data_module(shards, mixture={"sums": weight})


def test_uneven_global_batch_is_refused(shards: Shards) -> None:
    with pytest.raises(UserError, match=r"trainer\.global_batch_size=8 is not a multiple of .*=3 x 1 devices"):
        data_module(shards, micro_batch_size=3).train_dataloader()


def test_everything_held_out_is_refused(shards: Shards) -> None:
    with pytest.raises(UserError, match="no training examples are left"):
        data_module(shards, validation_fraction=0.999999)


# Mixtures


def test_mixture_of_an_unknown_source_names_those_there_are(two_sources: Path) -> None:
    message = r"loader\.mixture\.sum: no such source in the data; it has sums, others"
    with pytest.raises(UserError, match=message):
        data_module(Shards(two_sources), mixture={"sum": 2.0})


@pytest.mark.parametrize(
    "mixture", [{}, {"others": 0.5}, {"others": 0.0}, {"sums": 0.25, "others": 2.0}, {"sums": 1.3}]
)
def test_mixture_gives_exact_counts_of_training_examples(mixture: dict[str, float], two_sources: Path) -> None:
    shards = Shards(two_sources)
    data = data_module(shards, mixture=mixture)
    sizes = [split.num_examples([item]) for item in split.split(shards, 0.3)[0]]
    found = [shards[index].source for index in training_indices(data)]
    for name, size in zip(("sums", "others"), sizes):
        assert found.count(name) == round(mixture.get(name, 1.0) * size)


def test_mixture_leaves_validation_alone(two_sources: Path) -> None:
    shards = Shards(two_sources)
    plain, mixed = (validation(shards, mixture=mixture) for mixture in ({}, {"sums": 0.0, "others": 2.0}))
    assert all(same(a, b) for a, b in zip(plain, mixed, strict=True))


def test_an_example_seen_twice_in_an_epoch_gets_two_noises(shards: Shards) -> None:
    data = data_module(shards, mixture={"sums": 2.0})
    steps = data.plan.epoch_size // GLOBAL_BATCH
    once = documents(train(shards, mixture={"sums": 2.0}, steps=steps))
    assert len(once) == sum(once.values()) == steps * GLOBAL_BATCH > len(set(training_indices(data)))


# Large data


def test_a_run_over_ten_million_examples_starts_without_reading_them(tmp_path: Path) -> None:
    shards = Shards(sparse_folder(tmp_path / "data", num_examples=10**7, num_shards=4))
    tracemalloc.start()
    data = data_module(shards, validation_fraction=0.0, max_training_examples=9 * 10**6, step=10**6, steps=2 * 10**6)
    dataset = data.train_dataloader().dataset
    assert isinstance(dataset, TrainBatches)
    hands, _ = dataset._deal(10**6)
    content = pickle.dumps(dataset)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(visit.index for hand in hands for visit in hand) < 9 * 10**6
    assert peak < 2**20
    assert len(content) < 10_000


# Errors of the loader's processes


def damaged(folder: Path, target: Path) -> tuple[Shards, str]:
    """A copy with a flipped byte in an example of the first step, and the name of its shard."""
    shutil.copytree(folder, target)
    number = data_module(Shards(target)).plan.step(0)[3].index
    flip_byte(number, 5)(target)
    return Shards(target), f"{target}/shard-{number // 16:05d}.tar: example {number} is damaged"


def error_of(shards: Shards, **settings: Any) -> str:
    with pytest.raises(UserError) as caught, plain_worker_errors():
        train(shards, **settings)
    return str(caught.value)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_damaged_shard_is_named_in_one_line(
    num_workers: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, message = damaged(folder, tmp_path / "data")
    # After an error in a worker, torch waits this long (5 s) for each worker when the loader is collected.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    found = error_of(shards, num_workers=num_workers)
    gc.collect()
    assert found.startswith(message)
    assert "\n" not in found
    assert "Traceback" not in found


def test_a_killed_worker_is_a_user_error_with_a_remedy(shards: Shards) -> None:
    data = data_module(shards, num_workers=1)
    data.objective = KilledObjective(**dataclasses.asdict(OBJECTIVE))
    message = r"^DataLoader worker \(pid.* lower loader\.num_workers; go on with resume=auto$"
    with pytest.raises(UserError, match=message), plain_worker_errors():
        batches_of(data)


class KilledObjective(ReFusion):
    """Does to its process what the kernel does where the memory runs out."""

    def views(self, example: Example, rng: np.random.Generator) -> list[View]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_workers_serve_through_a_signal_until_they_are_released(number: signal.Signals, shards: Shards) -> None:
    """Slurm and the terminal send theirs to every process of the group; the step under way needs its batches."""
    data = data_module(shards, num_workers=1)
    batches = iter(data.train_dataloader())
    [worker] = batches._workers  # type: ignore[attr-defined]
    found = [next(batches)]
    os.kill(worker.pid, number)
    found += batches
    assert all(same(a, b) for a, b in zip(found, train(shards), strict=True))
    assert worker.is_alive()
    data.release_workers()
    os.kill(worker.pid, number)
    worker.join(30)
    assert worker.exitcode == 0


def test_a_process_that_uses_a_loader_halfway_and_never_releases_it_ends(shards: Shards) -> None:
    def use() -> None:
        data = data_module(shards, num_workers=1)
        batches = iter(data.train_dataloader())
        next(batches)
        globals()["kept"] = data, batches  # as a variable of a script

    process = multiprocessing.get_context("fork").Process(target=use)
    process.start()
    process.join(10)
    process.kill()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("error", [UserError("loader.layout=x: no"), RuntimeError("CUDA error"), KeyError("x")])
def test_other_errors_pass_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, plain_worker_errors():
        raise error
    assert caught.value is error


# Mask rates


def first_uniforms(shards: Shards, mask_rates: str, *, world_size: int = 1, **changes: Any) -> dict[int, float]:
    """The first draw that every example of step 1 gets, by example index."""
    settings = {"world_size": world_size, "step": 1, "steps": 2, "mask_rates": mask_rates, "micro_batch_size": 1}
    ranks = [recorded(shards, rank=rank, **{**settings, **changes}) for rank in range(world_size)]
    return {index: drawn for found in ranks for index, drawn in found}


def test_stratified_rates_fall_one_into_each_slice(shards: Shards) -> None:
    seen = first_uniforms(shards, "stratified")
    assert sorted(int(u * GLOBAL_BATCH) for u in seen.values()) == list(range(GLOBAL_BATCH))
    assert first_uniforms(shards, "stratified", world_size=2, micro_batch_size=2) == seen


def test_antithetic_rates_pair_up(shards: Shards) -> None:
    seen = sorted(first_uniforms(shards, "antithetic").values())
    np.testing.assert_allclose(np.array(seen) + np.array(seen[::-1]), 1.0)
    assert seen != sorted(first_uniforms(shards, "independent").values())
