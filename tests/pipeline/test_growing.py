"""Datasets that are longer or shorter in the next epoch: ``len`` is asked when one begins."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from scripts import REAL_WORLDS, told_by
from strategies import through_json


class Growing:
    """A dataset whose length is set between epochs; a module's class, for processes."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index >= self.length:
            raise IndexError(index)
        self.read.append(index)
        return index


def numbers(pipeline: Any) -> list[int]:
    return [int(x) for batch in pipeline for x in np.atleast_1d(batch)]


WORKERS: list[dict[str, Any]] = [{"n": 0}, {"n": 2}, {"n": 1, "kind": "process"}]


@pytest.mark.parametrize("workers", WORKERS)
def test_each_epoch_has_what_there_is_when_it_begins(workers: dict[str, Any]) -> None:
    data = Growing(10)
    pipeline = stoker.from_dataset(data, seed=0).shuffle().batch(4).workers(**workers)
    for length in (10, 25, 25, 3, 12):
        data.length = length
        assert len(pipeline) == -(-length // 4)
        assert f"{length:,} examples" in str(pipeline)
        assert sorted(numbers(pipeline)) == list(range(length))
        assert pipeline.stats().fresh_examples == length
    assert pipeline.counts.fresh_examples == 75
    assert pipeline.epoch == 5


@given(st.lists(st.integers(3, 40), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_an_epoch_is_that_of_a_dataset_that_always_was_so_long(
    lengths: list[int], seed: int
) -> None:
    def build(data: Any) -> stoker.Pipeline[Any]:
        chain = stoker.from_dataset(data, seed=seed).skip(1).shuffle(block=2)
        return chain.shard(rank=1, world_size=2).echo(1.5).batch(3).workers(0)

    data = Growing(lengths[0])
    pipeline = build(data)
    for epoch, length in enumerate(lengths):
        data.length = length
        constant = build(Growing(length))
        constant.set_epoch(epoch)
        assert numbers(pipeline) == numbers(constant)


def test_an_epoch_that_runs_keeps_its_length() -> None:
    data = Growing(12)
    pipeline = stoker.from_dataset(data, seed=0).batch(4)
    seen = []
    for batch in pipeline:
        data.length = 20
        seen += batch.tolist()
        assert len(pipeline) == 3
        assert pipeline.progress == len(seen) / 12
        if len(seen) == 8:
            state = pipeline.state_dict()
    assert seen == list(range(12))
    assert len(pipeline) == 5
    data.length = 12
    resumed = stoker.from_dataset(data, seed=0).batch(4)
    resumed.load_state_dict(state)
    assert numbers(resumed) == list(range(8, 12))
    data.length = 20
    other = stoker.from_dataset(data, seed=0).batch(4)
    with pytest.raises(stoker.StateError, match=r"DatasetSource of 12 where this one has .* of 20"):
        other.load_state_dict(state)


def test_a_loaded_epoch_does_not_go_on_over_another_length() -> None:
    data = Growing(12)
    pipeline = stoker.from_dataset(data, seed=0).batch(4)
    next(iter(pipeline))
    state = through_json(pipeline.state_dict())
    pipeline.load_state_dict(state)
    data.length = 13
    with pytest.raises(stoker.StateError, match=r"13 examples now, .* had 12"):
        iter(pipeline)
    pipeline.set_epoch(1)
    assert numbers(pipeline) == list(range(13))


@pytest.mark.parametrize("echo", [False, True])
def test_a_state_between_epochs_is_of_the_data_that_comes_next(echo: bool) -> None:
    data = Growing(40)

    def build() -> stoker.Pipeline[Any]:
        chain = stoker.from_dataset(data, seed=0).shuffle()
        return (chain.echo() if echo else chain).batch(4)

    pipeline = build()
    numbers(pipeline)
    data.length = 60
    state = through_json(pipeline.state_dict())
    resumed = build()
    resumed.load_state_dict(state)
    assert resumed.epoch == 1
    assert set(numbers(resumed)) == set(range(60))


def test_pools_that_go_on_begin_empty_where_the_length_changed() -> None:
    data = Growing(64)
    pipeline = stoker.from_dataset(data, seed=0).shuffle().echo(max_factor=3).batch(4)
    for length in (64, 64, 90, 50, 50):
        data.length = length
        seen = numbers(pipeline)
        assert set(seen) == set(range(length))
        assert max(seen.count(i) for i in set(seen)) <= 6  # of this epoch and the one before


def test_passes_beneath_repeat_grow_too() -> None:
    data = Growing(8)
    pipeline = stoker.from_dataset(data, seed=0).batch(4).repeat().steps(5)
    first = [batch.tolist() for batch in itertools.islice(pipeline, 3)]
    assert first[2] == [0, 1, 2, 3]
    pipeline = stoker.from_dataset(data, seed=0).batch(4).repeat().steps(2)
    assert numbers(pipeline) == list(range(8))
    data.length = 16
    assert numbers(pipeline) + numbers(pipeline) == list(range(16))


def test_a_cache_grows_and_does_not_take_others_for_those_it_knows() -> None:
    data = Growing(10)
    pipeline = stoker.from_dataset(data, seed=0).cache("1MiB").batch(4).workers(0)
    assert numbers(pipeline) == list(range(10))
    data.length = 100
    data.read.clear()
    assert numbers(pipeline) == list(range(100))
    assert min(data.read) == 10
    assert numbers(pipeline) == list(range(100))
    data.length = 99
    with pytest.raises(ValueError, match=r"had 100 examples, and has 99 now: \.cache\(\) knows"):
        iter(pipeline)
    cached = stoker.cached(data, "1MiB")
    grown = stoker.from_dataset(cached, seed=0)
    for length in (99, 300):
        data.length = length
        assert numbers(grown) == list(range(length))


def test_a_mixture_is_of_as_many_as_it_was_made_of() -> None:
    data = Growing(10)
    parts: list[Any] = [stoker.from_dataset(data, seed=0), stoker.from_arrays(np.arange(10))]
    mixed = stoker.mix(parts)
    list(mixed)
    data.length = 11
    with pytest.raises(
        ValueError, match=r"part 1, from_dataset\(Growing\), had 10 .* build it again"
    ):
        iter(mixed)


def test_what_was_selected_is_of_as_many_as_there_were() -> None:
    data = Growing(10)
    train = stoker.from_dataset(data, seed=0).select([1, 2])
    assert list(train) == [1, 2]
    data.length = 12
    with pytest.raises(ValueError, match=r"had 10 examples .* and has 12 now"):
        list(train)


LENGTHS = """
    class Rows(list):
        pass


    rows = Rows(range(12))
    train = stoker.from_dataset(rows, seed=0).shuffle().shard().batch(2)
    rounds = stoker.from_dataset(rows, seed=0).shard().batch(2).repeat().steps(2)
    told = {"seen": [], "refused": []}
    for _ in range(3):
        told["seen"].append([int(x) for batch in train for x in batch])
        list(rounds)
        rows += range(len(rows), len(rows) + 8)
    rows += [99] * RANK
    for pipeline in (train, rounds):
        try:
            for _ in range(20):  # under .repeat() once a pass over the longer data has begun
                list(pipeline)
        except ValueError as error:
            told["refused"].append(str(error))
"""


@pytest.mark.full
@pytest.mark.parametrize("world", REAL_WORLDS)
def test_ranks_grow_alike_or_say_which_of_them_did_not(tmp_path: Path, world: int) -> None:
    of_all = told_by(tmp_path, world, LENGTHS)
    for epoch, length in enumerate((12, 20, 28)):
        seen = [number for told in of_all for number in told["seen"][epoch]]
        assert len(seen) == len(set(seen)) == length // world * world
        assert {len(told["seen"][epoch]) for told in of_all} == {length // world}
    for told in of_all:
        assert len(told["refused"]) == 2
        for text in told["refused"]:
            assert "length of the data (36 on rank 0, 37 on rank" in text


def test_frameworks_see_the_length_of_the_next_epoch() -> None:
    data = Growing(10)
    loader = stoker.from_dataset(data, seed=0).batch(4).as_dataloader()
    assert len(loader) == 3
    numbers(loader)
    data.length = 30
    assert len(loader) == len(loader.sampler) == 8
    assert numbers(loader) == list(range(30))


def test_pipelines_over_one_dataset_each_have_their_epoch() -> None:
    data = Growing(6)
    base = stoker.from_dataset(data, seed=0)
    one, other = base.batch(2), base.batch(3)
    running = iter(one)
    next(running)
    data.length = 9
    assert numbers(other) == list(range(9))
    assert numbers(running) == list(range(2, 6))
    assert numbers(one) == list(range(9))
