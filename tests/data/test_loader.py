"""Batches: the same examples with the same noise, however they are dealt, laid out, loaded or resumed."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lit_refusion.chat import PromptFormat
from lit_refusion.data.loader import DataModule, LoaderConfig, ValidationBatches
from lit_refusion.data.plan import Visit
from lit_refusion.data.prepare import PrepareConfig, prepare
from lit_refusion.data.records import Source
from lit_refusion.data.shards import Shards
from lit_refusion.errors import UserError
from lit_refusion.noise import Stream, noise
from lit_refusion.views import IGNORE, MASK, Batch, View
from objectives.refusion import ReFusion

OBJECTIVE = ReFusion(slot_sizes=(4, 8), masking="bernoulli", mdm_weight=1.0, eps=1e-3, complementary=False)
GLOBAL_BATCH = 8
MASK_ID = 300
NAMES = [item.name for item in fields(View)]
LAYOUTS = ["padded", "packed"]


@pytest.fixture
def shards(records: Path, tokenizer_folder: Path, tmp_path: Path) -> Shards:
    """The 60 additions."""
    source = Source(name="sums", files=(str(records),), query="query", response="response", messages="messages")
    config = PrepareConfig(
        folder=str(tmp_path / "data"),
        tokenizer=str(tokenizer_folder),
        sources=(source,),
        prompt_format=PromptFormat(style="chat", template_kwargs={}),
        max_length=200,
        examples_per_shard=16,
        on_error="raise",
    )
    prepare(config)
    return Shards(config.folder)


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


def train(shards: Shards, **settings: Any) -> list[Batch]:
    return list(data_module(shards, **settings).train_dataloader())


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


# Training


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 4), (2, 2), (4, 1)])
def test_a_step_has_the_same_views_however_it_is_dealt(
    world_size: int, accumulation: int, layout: str, shards: Shards
) -> None:
    ranks = [train(shards, rank=rank, world_size=world_size, layout=layout, steps=7) for rank in range(world_size)]
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


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2)])
def test_resumed_loader_gives_the_tail_of_an_uninterrupted_one(rank: int, world_size: int, shards: Shards) -> None:
    whole = train(shards, rank=rank, world_size=world_size, steps=8)
    tail = train(shards, rank=rank, world_size=world_size, step=5, steps=8)
    assert len(tail) == 3 * len(whole) // 8
    assert all(same(a, b) for a, b in zip(tail, whole[-len(tail) :], strict=True))


def test_resuming_on_more_ranks_gives_the_remaining_views(shards: Shards) -> None:
    whole = train(shards, steps=6)
    resumed = [batch for rank in range(4) for batch in train(shards, rank=rank, world_size=4, step=4, steps=6)]
    assert documents(resumed) == documents(whole[4 * 4 :])


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
    assert sorted([*data.plan.indices, *data.validation_indices]) == list(range(60))
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


def test_subsets_are_the_smallest_hashes_of_their_side(shards: Shards) -> None:
    def smallest(indices: np.ndarray, count: int) -> list[int]:
        return sorted(sorted(indices.tolist(), key=lambda index: int(shards.index["key"][index]))[:count])

    whole = data_module(shards)
    part = data_module(shards, max_training_examples=9, max_validation_examples=5)
    assert part.plan.indices.tolist() == smallest(whole.plan.indices, 9)
    assert part.validation_indices.tolist() == smallest(whole.validation_indices, 5)
    more = data_module(shards, max_training_examples=10**6, max_validation_examples=10**6)
    assert more.plan.indices.tolist() == whole.plan.indices.tolist()
    assert more.validation_indices.tolist() == whole.validation_indices.tolist()


def test_no_validation_where_the_fraction_is_zero(shards: Shards) -> None:
    data = data_module(shards, validation_fraction=0.0)
    assert data.val_dataloader() == []
    assert data.plan.indices.tolist() == list(range(60))


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
        ({"max_validation_examples": -1}, r"loader\.max_validation_examples=-1: must be at least 1, or null"),
    ],
)
def test_bad_settings_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        loader_config(**changes)


def test_uneven_global_batch_is_refused(shards: Shards) -> None:
    with pytest.raises(UserError, match=r"trainer\.global_batch_size=8 is not a multiple of .*=3 x 1 devices"):
        data_module(shards, micro_batch_size=3).train_dataloader()


def test_everything_held_out_is_refused(shards: Shards) -> None:
    with pytest.raises(UserError, match="no training examples are left"):
        data_module(shards, validation_fraction=0.999999)


# Mask rates


def first_uniforms(
    shards: Shards, mask_rates: str, *, world_size: int = 1, micro_batch_size: int = 1
) -> dict[int, float]:
    """The first draw that every example of step 1 gets, by example index."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Recorder(ReFusion):
        def views(self, example: Any, rng: np.random.Generator) -> list[Any]:
            seen[example.index] = rng.random()
            return OBJECTIVE.views(example, rng)

    seen: dict[int, float] = {}
    for rank in range(world_size):
        data = data_module(
            shards, rank=rank, world_size=world_size, step=1, steps=2, mask_rates=mask_rates,
            micro_batch_size=micro_batch_size,
        )  # fmt: skip
        data.objective = Recorder(**dataclasses.asdict(OBJECTIVE))
        list(data.train_dataloader())
    return seen


def test_stratified_rates_fall_one_into_each_slice(shards: Shards) -> None:
    seen = first_uniforms(shards, "stratified")
    assert sorted(int(u * GLOBAL_BATCH) for u in seen.values()) == list(range(GLOBAL_BATCH))
    assert first_uniforms(shards, "stratified", world_size=2, micro_batch_size=2) == seen


def test_antithetic_rates_pair_up(shards: Shards) -> None:
    seen = sorted(first_uniforms(shards, "antithetic").values())
    np.testing.assert_allclose(np.array(seen) + np.array(seen[::-1]), 1.0)
    assert seen != sorted(first_uniforms(shards, "independent").values())
