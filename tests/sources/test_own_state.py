"""Streams that have a state of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.testing import check_resume
from strategies import few, frozen, stream, through_json


class Counting:
    """Counts, in another order each epoch; goes on where it was told to."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = self.at = self.asked = 0
        self.begin = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng(self.epoch).permutation(self.length).tolist()
        self.at = self.begin[1] if self.begin[0] == self.epoch else 0
        while self.at < self.length:
            self.at += 1
            yield order[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        self.asked += 1
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["epoch"], state["at"]


class CountingPasses:
    """Its iterators have the state, as those of torchdata's datasets may; it changes in place."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return CountingPass(np.random.default_rng(self.epoch).permutation(self.length).tolist())


class CountingPass(Iterator[int]):
    def __init__(self, order: list[int]) -> None:
        self.order, self.state = order, {"at": 0}

    def __next__(self) -> int:
        if self.state["at"] == len(self.order):
            raise StopIteration
        self.state["at"] += 1
        return self.order[self.state["at"] - 1]

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


class CountingItself(CountingPasses, CountingPass):
    """Is its own iterator, and begins where it is iterated, as datasets of torch may."""

    def __iter__(self) -> Iterator[int]:
        CountingPass.__init__(self, super().__iter__().order)  # type: ignore[attr-defined]
        return self


def of(length: int, **how: Any) -> stoker.Pipeline:
    return stoker.from_iterable(Counting(length), **{"seed": 0, **how})


@few(6)
@given(
    length=st.integers(0, 40),
    batch=st.integers(1, 20),
    workers=st.sampled_from([0, 2]),
    epoch=st.integers(0, 1),
    made=st.sampled_from([Counting, CountingPasses, CountingItself]),
    data=st.data(),
)
def test_resumes_anywhere_any_number_of_times(
    length: int, batch: int, workers: int, epoch: int, made: Any, data: st.DataObject
) -> None:
    def build() -> stoker.Pipeline:
        return stoker.from_iterable(made(length), seed=0).batch(batch).workers(workers)

    whole = build()
    epochs = [stream(whole) for _ in range(3)]
    train = build()
    train.set_epoch(epoch)
    seen: list[Any] = []
    while True:
        batches = iter(train)
        for _ in range(data.draw(st.integers(0, 3))):
            seen += [frozen(each) for each in [next(batches, None)] if each is not None]
        state = through_json(train.state_dict())
        batches.close()
        if state["epoch"] != epoch or len(seen) >= len(epochs[epoch]) or data.draw(st.booleans()):
            break
        if data.draw(st.booleans()):
            train = build()  # another process
        train.load_state_dict(state)
    train.load_state_dict(state)
    if state["epoch"] == epoch:
        seen += stream(train)
    assert seen == epochs[epoch]
    assert stream(train) == epochs[epoch + 1]


def test_a_loader_is_told_the_epoch_of_a_loaded_state_too() -> None:
    def build() -> stoker.Pipeline:
        return stoker.from_loader(Counting(10))

    train = build()
    list(train)
    train.set_epoch(1)
    batches = iter(train)
    for _ in range(4):
        next(batches)
    state = through_json(train.state_dict())
    resumed = build()
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    assert list(resumed) == list(batches)


def test_a_stream_is_not_asked_behind_each_example() -> None:
    source = Counting(400)
    train = stoker.from_iterable(source).batch(10)
    list(train)
    assert source.asked == 1 + 400 // 16


def test_what_is_acknowledged_late_is_what_is_kept() -> None:
    train = of(100).batch(7)
    train.acknowledge(0)
    batches = iter(train)
    taken = [frozen(next(batches)) for _ in range(9)]
    for _ in range(4):
        train.acknowledge()
    state = through_json(train.state_dict())
    batches.close()
    resumed = of(100).batch(7)
    resumed.load_state_dict(state)
    assert stream(resumed)[:5] == taken[4:]


def test_torchdata_s_loaders_of_nodes() -> None:
    from torchdata import nodes

    def build() -> stoker.Pipeline:
        loader = nodes.Loader(nodes.SamplerWrapper(range(50)))
        return stoker.from_iterable(loader, seed=0).map(np.int64).batch(4)

    check_resume(build, every=4)


def test_an_echo_that_follows_begins_with_an_empty_pool() -> None:
    train = of(64).echo("auto").batch(4)
    batches = iter(train)
    for _ in range(5):
        next(batches)
    fresh = train.stats().fresh_examples
    state = through_json(train.state_dict())
    batches.close()
    resumed = of(64).echo("auto").batch(4)
    resumed.load_state_dict(state)
    order = np.random.default_rng(0).permutation(64)
    assert {int(n) for batch in resumed for n in batch} == {int(n) for n in order[fresh:]}


def test_batches_that_are_echoed_are_numbered_on_behind_a_resume() -> None:
    """So the first use of a batch draws what it draws in a run that is not interrupted."""

    def draws(numbers: Any, rng: np.random.Generator) -> tuple[Any, int]:
        return numbers, int(rng.integers(1 << 40))

    def build() -> stoker.Pipeline:
        return of(64).batch(4).echo("auto").random_map(draws)

    def first_draws(outputs: list[Any]) -> dict[tuple[int, ...], int]:
        found: dict[tuple[int, ...], int] = {}
        for numbers, drawn in outputs:
            found.setdefault(tuple(numbers), drawn)
        return found

    whole = first_draws(list(build()))
    train, seen = build(), []
    for output in train:
        seen.append(output)
        if len(seen) == 6:
            break
    state = through_json(train.state_dict())
    resumed = build()
    resumed.load_state_dict(state)
    assert first_draws(seen + list(resumed)) == whole


@pytest.mark.parametrize(
    "made",
    [
        lambda: of(40).shuffle(buffer=8).batch(4),
        lambda: of(40).filter(lambda n: n > 3).batch(4),
        lambda: of(40, max_errors=3).batch(4),
        lambda: of(40).shard(rank=0, world_size=2, remainder="uneven").batch(4),
        lambda: of(40).shard(rank=0, world_size=2).shuffle(buffer=8).batch(4),
        lambda: of(40).echo(2, pool=8).batch(4),
    ],
)
def test_what_cannot_be_made_again_is_refused_in_the_middle(made: Any) -> None:
    train = made()
    with iter(train) as batches:
        next(batches)
        with pytest.raises(stoker.StateError, match=r"from_iterable\(Counting\).*cannot be made"):
            train.state_dict()
    train = made()
    list(train)
    resumed = made()
    resumed.load_state_dict(through_json(train.state_dict()))  # between epochs
    assert stream(resumed) == stream(train)


@pytest.mark.parametrize(
    "nested",
    [
        *[3, {}, {"own": 1}, {"own": 1, "skip": 16}, {"own": 1, "skip": -1}],
        *[{"own": 1, "skip": 2.0}, {"own": 1, "skip": 1, "is_over": True}],
    ],
)
def test_damaged_states_are_refused(nested: Any) -> None:
    train = of(40).batch(4)
    with iter(train) as batches:
        next(batches)
        state = through_json(train.state_dict())
    resumed = of(40).batch(4)
    resumed.load_state_dict({**state, "loader": [nested]})
    with pytest.raises(stoker.StateError, match="damaged"):
        iter(resumed)


def test_methods_that_need_more_than_a_state_are_no_state() -> None:
    class Sample(Counting):
        def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:  # type: ignore[override]
            raise AssertionError

    train = stoker.from_iterable(Sample(20)).batch(4)
    assert "no state in the middle" in str(train)
    with iter(train) as batches:
        next(batches)
        with pytest.raises(stoker.StateError, match="no state in its middle"):
            train.state_dict()
