"""Noise is a function of (seed, index, epoch, stream) and of nothing else, for ever."""

from __future__ import annotations

import numpy as np
import pytest

from lit_refusion.noise import Stream, noise

KEY = {"seed": 7, "index": 3, "epoch": 2, "stream": Stream.TRAIN_NOISE}


def generator(**changes: int) -> np.random.Generator:
    key = {**KEY, **changes}
    return noise(key.pop("seed"), **key)


def test_first_draws_never_change() -> None:
    raw = generator().bit_generator.random_raw(4)
    assert raw.tolist() == [14781193998888737049, 12892351686472163898, 12704759536037674457, 6052465357416776001]
    rng = generator()
    assert rng.random(3).tolist() == [0.8012901322762435, 0.6988957853460138, 0.6887263944938987]
    assert rng.integers(1000, size=3).tolist() == [860, 328, 315]
    assert rng.permutation(6).tolist() == [0, 1, 5, 4, 3, 2]


def test_stream_numbers_never_change() -> None:
    numbers = {"TRAIN_NOISE": 0, "VALIDATION_NOISE": 1, "EPOCH_ORDER": 2, "DECODING": 3}
    assert {stream.name: stream.value for stream in Stream}.items() >= numbers.items()


def test_draws_do_not_depend_on_the_order_of_the_calls() -> None:
    def draws(indices: range) -> dict[int, list[float]]:
        return {index: generator(index=index).random(4).tolist() for index in indices}

    assert draws(range(20)) == draws(range(19, -1, -1))


def test_global_random_state_is_neither_read_nor_moved() -> None:
    def state() -> list[int]:
        return np.random.get_state()[1].tolist()

    draws = []
    for seed in (0, 1):
        np.random.seed(seed)
        before = state()
        draws.append(generator().random(4).tolist())
        assert state() == before
    assert draws[0] == draws[1]


def test_interleaved_generators_do_not_disturb_each_other() -> None:
    alone = generator(index=1).random(6)
    first, second = generator(index=1), generator(index=2)
    mixed = []
    for _ in range(6):
        mixed.append(first.random())
        second.random()
    assert mixed == alone.tolist()


@pytest.mark.parametrize(
    "change", [{"index": 4}, {"epoch": 3}, {"stream": Stream.VALIDATION_NOISE}, {"seed": 8}, {"index": 2, "epoch": 3}]
)
def test_any_change_of_the_key_changes_the_draws(change: dict[str, int]) -> None:
    assert not np.isin(generator(**change).random(100), generator().random(100)).any()


def test_neighbouring_examples_never_overlap() -> None:
    """Consecutive counters: a long draw of one example must not run into the next one's."""
    many = generator(index=0).bit_generator.random_raw(40_000)
    for change in ({"index": 1}, {"index": 0, "epoch": 3}):
        assert not np.isin(generator(**change).bit_generator.random_raw(8), many).any()


@pytest.mark.filterwarnings("ignore:invalid value")
def test_large_seeds_differ() -> None:
    assert generator(seed=2**63).random() != generator(seed=2**63 + 1).random()
