"""Streams that the consumer's thread drives: a loader as it is, and a device one batch ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loaders import Broken, Loader, value

from stoker.basics.pytree import batch_rows
from stoker.engine.items import EpochCounters
from stoker.engine.work.step import Failure, WorkAddress
from stoker.engine.workers.threads import WorkerPool
from stoker.engine.workers.tuning import Autotuner
from stoker.errors import StageError
from stoker.schedule import rng
from stoker.schedule.selection import Selection
from stoker.stages.iterable import IterableHead, IterableSource
from stoker.stages.loader import LoaderHead, LoaderSource
from stoker.stages.to import DeviceStream, Mover
from strategies import few


class InPairs(Loader):
    rows = 2


class Stateful(InPairs):
    """Has a state: how many batches it gave."""

    def state_dict(self) -> dict[str, int]:
        return {"given": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["given"]


def opened(loader: Any, **begin: int) -> LoaderHead:
    """Return the stream of a loader's batches."""
    return LoaderHead(LoaderSource(loader), EpochCounters(), None, **begin)


scripts = st.lists(st.one_of(st.integers(0, 99), st.none()), max_size=12)


@given(script=scripts, looks=st.lists(st.booleans(), min_size=30, max_size=30))
def test_a_loader_is_taken_as_it_comes(script: list[int | None], looks: list[bool]) -> None:
    stream = opened(InPairs(script))
    came: list[int | None] = []
    told: list[bool] = []
    pulled = 0
    for look in looks:
        if look:  # whether it has ended changes nothing of what comes
            assert stream.has_ended() == (came == script)
        try:
            item = stream.pull()
        except Broken as error:
            came.append(None)
            told += [stream.has_raised(error), stream.has_raised(error)]
            continue
        if item is None:
            continue
        came.append(int(value(item)[0, 0]))
        assert item.place == pulled
        pulled += 1
        assert item.rows == 2
        assert item.fresh == stream.fresh == 2 * pulled
    assert came == script
    assert told == [True, False] * script.count(None)  # of each error it is told once
    assert stream.pull() is None
    assert stream.has_ended()
    assert not stream.has_raised(Broken())


@few(40)
@given(script=scripts.filter(bool), at=st.integers(0, 12))
def test_a_loaders_state_is_that_behind_the_batches_asked_for(
    script: list[int | None], at: int
) -> None:
    numbers = [number for number in script if number is not None]
    at = min(at, len(numbers))
    loader = Stateful(script)
    stream = opened(loader)
    behind = []  # how much of the script lies behind each batch
    while True:
        try:
            item = stream.pull()
        except Broken:
            continue
        if item is None:
            break
        behind.append(loader.at)
    state, loaded = stream.state_at(2 * at, at)
    assert loaded == at
    if at == 0:  # nothing was handed out: the first that is known
        assert state == ({"given": behind[0]} if behind else None)
        return
    assert state == {"given": behind[at - 1]}

    source = LoaderSource(Stateful(script))
    source.load(state)
    again = LoaderHead(source, EpochCounters(), None, loaded=at, fresh=2 * at)
    came: list[int] = []
    while True:
        try:
            item = again.pull()
        except Broken:
            continue
        if item is None:
            break
        assert item.place == at + len(came)
        came.append(int(value(item)[0, 0]))
        assert again.fresh == 2 * (at + len(came))
    assert came == numbers[at:]


@given(rows=st.integers(0, 9), depth=st.integers(0, 3), kind=st.sampled_from(["array", "tensor"]))
def test_rows_are_those_of_the_first_array(rows: int, depth: int, kind: str) -> None:
    batch: Any = np.zeros((rows, 2)) if kind == "array" else torch.zeros((rows, 2))
    for _ in range(depth):
        batch = {"names": ["a", "b", "c"], "x": (batch, np.zeros(77))}
    assert batch_rows(batch) == rows


def test_rows_without_an_array_are_those_of_the_first_list() -> None:
    assert batch_rows({"a": "text", "b": ["x", "y", "z"], "c": ["x"]}) == 3
    assert batch_rows([["a", "b"], ["c", "d"]]) == 2
    assert batch_rows(np.float64(1).reshape(())) == 1
    assert batch_rows("text") == 1
    assert batch_rows([]) == 1


def examples(values: list[Any], read: list[int] | None = None) -> IterableHead:
    """Return a stream that never makes who reads it wait; ``read`` counts what was read."""

    def iterate() -> Iterator[Any]:
        for number, each in enumerate(values):
            if read is not None:
                read.append(number)
            yield each

    key = rng.key(0, 0, rng.SHUFFLE, 0)
    source = IterableSource(iterate)
    return IterableHead(source, source.open(0), Selection(), 1, key, EpochCounters())


def on_cpu(upstream: Any) -> DeviceStream:
    """Return the way of batches to the CPU, where a move is a view."""
    return DeviceStream(upstream, Mover("cpu"), WorkAddress(0, 0, 0), WorkerPool(0, 1, Autotuner()))


@pytest.fixture
def batches() -> list[Any]:
    return [np.full(2, number) for number in range(5)]


def test_a_device_is_one_batch_ahead(batches: list[Any]) -> None:
    read: list[int] = []
    stream = on_cpu(examples(batches, read))
    assert read == []
    for number in range(5):
        item = stream.pull()
        assert torch.is_tensor(value(item))
        assert value(item).tolist() == [number, number]
        assert item is not None
        assert item.place == number
        assert item.fresh == number + 1
        assert len(read) == min(5, number + 2)
    assert stream.pull() is None
    assert stream.poll(1) == (0, True)


def test_what_cannot_be_moved_fails_in_its_turn(batches: list[Any]) -> None:
    batches[2] = np.arange(4)[::-1]  # torch takes no negative strides
    came = [value(item) for item in on_cpu(examples(batches)).pull_many(9)]
    assert [type(each) is Failure for each in came] == [False, False, True, False, False]
    error = came[2].error
    assert isinstance(error, StageError)
    assert (error.stage, error.batch) == ("to_torch(cpu)", 2)
    assert isinstance(error.__cause__, ValueError)


def test_a_loader_behind_a_device_is_asked_only_when_a_batch_is_wanted() -> None:
    loader = InPairs([0, 1, 2])
    stream = on_cpu(opened(loader))
    assert stream.poll(1) == (0, False)
    assert loader.at == 0
    stream.pull()
    assert loader.at == 1
    stream.wait_for(1)
    assert loader.at == 2
    assert stream.poll(1) == (1, False)
