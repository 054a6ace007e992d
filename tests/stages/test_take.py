"""``.take(n)``: the first examples of an epoch, by their numbers alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.testing import check_resume

COUNTS = st.integers(1, 60)


@stoker.thread_safe  # one for all threads: it counts
class Counting:
    """A dataset that counts what is read of it."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


def numbers(length: int, seed: int = 0) -> stoker.Pipeline[Any]:
    return stoker.from_arrays(np.arange(length), seed=seed)


def drawn(pipeline: stoker.Pipeline[Any]) -> list[int]:
    return [int(example) for example in pipeline]


@given(st.integers(0, 40), COUNTS)
def test_it_leaves_the_first_examples_and_reads_no_others(length: int, count: int) -> None:
    source = Counting(length)
    pipeline = stoker.from_dataset(source, seed=0).take(count)
    assert list(pipeline) == list(range(min(length, count)))
    assert len(pipeline) == min(length, count)
    assert sorted(set(source.read)) == list(range(min(length, count)))


@given(st.integers(1, 40), COUNTS, st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_behind_shuffle_it_is_the_beginning_of_the_shuffled_epoch(
    length: int, count: int, epoch: int, seed: int
) -> None:
    whole, part = numbers(length, seed).shuffle(), numbers(length, seed).shuffle().take(count)
    for pipeline in (whole, part):
        pipeline.set_epoch(epoch)
    assert drawn(part) == drawn(whole)[:count]


@given(st.integers(1, 40), COUNTS, st.integers(0, 3))
def test_before_shuffle_every_epoch_has_the_same_examples(
    length: int, count: int, epoch: int
) -> None:
    pipeline = numbers(length).take(count).shuffle()
    pipeline.set_epoch(epoch)
    assert sorted(drawn(pipeline)) == list(range(min(length, count)))


@given(
    st.integers(1, 60),
    st.integers(1, 4),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 2), COUNTS), max_size=4),
    st.booleans(),
)
def test_with_sharding_ranks_are_disjoint_and_counted(
    length: int, world: int, uneven: bool, takes: list[tuple[int, int]], shuffled_first: bool
) -> None:
    """Takes stand before, between and behind shuffling and sharding."""

    def chain(rank: int) -> stoker.Pipeline[Any]:
        made = numbers(length)
        for place in range(3):
            for at, count in takes:
                made = made.take(count) if at == place else made
            if place == 2:
                break
            if (place == 0) == shuffled_first:
                made = made.shuffle()
            else:
                made = made.shard(rank=rank, world=world, uneven=uneven)
        return made

    parts = [drawn(chain(rank)) for rank in range(world)]
    assert [len(part) for part in parts] == [len(chain(rank)) for rank in range(world)]
    together = [number for part in parts for number in part]
    assert len(set(together)) == len(together)
    assert all(0 <= number < length for number in together)
    if not uneven:
        assert len({len(part) for part in parts}) == 1
    limits = [[count for at, count in takes if at == place] for place in range(3)]
    assert all(len(part) <= min(limits[2], default=length) for part in parts)


@given(st.integers(1, 30), COUNTS, st.integers(1, 4))
def test_of_a_stream_it_is_the_first_examples_too(length: int, count: int, world: int) -> None:
    taken: list[int] = []

    def stream() -> Iterator[int]:
        for number in range(length):
            taken.append(number)
            yield number

    assert list(stoker.from_iterable(stream, seed=0).take(count)) == list(range(min(length, count)))
    assert len(taken) <= count
    shards = [
        list(stoker.from_iterable(stream, seed=0).take(count).shard(rank=r, world=world))
        for r in range(world)
    ]
    each = min(length, count) // world
    assert shards == [[rank + world * n for n in range(each)] for rank in range(world)]
    shuffled = stoker.from_iterable(stream, seed=0).shuffle(buffer=5)
    assert list(shuffled.take(count)) == list(shuffled)[:count]


@pytest.mark.parametrize("echo", [1, 2.5])
def test_it_resumes_exactly(echo: float) -> None:
    def build() -> stoker.Pipeline[Any]:
        chain = numbers(50, 3).take(40).shuffle().take(23).map(stoker.thread_safe(lambda x: x + 1))
        return (
            chain.echo(echo)
            .random_map(stoker.thread_safe(lambda x, rng: x + rng.random()))
            .batch(4)
        )

    assert check_resume(build) == len(build())


def test_a_state_fits_only_the_same_count() -> None:
    state = numbers(20).take(5).state_dict()
    with pytest.raises(stoker.StateError, match=r"take\(5\) where this one has take\(6\)"):
        numbers(20, seed=0).take(6).load_state_dict(state)


def test_with_a_cache_and_echoes_it_counts() -> None:
    chain = numbers(50).take(10).cache("1MiB").map(lambda x: x * 2).echo(2).batch(4)
    assert len(chain) == 5
    assert sorted({int(x) for batch in chain for x in batch}) == [2 * n for n in range(10)]
    assert ".take(10)" in str(chain)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda p: p.filter(bool).take(3), r"\.take\(\) cannot follow filter\(bool\)"),
        (lambda p: p.map(abs, on_error=3).take(3), r"cannot follow map\(abs\)"),
        (lambda p: p.echo(2).take(3), r"cannot follow echo\(2\)"),
        (lambda p: p.batch(2).take(3), r"cannot follow batch\(2\)"),
        (lambda p: p.take(0), "takes a number from 1 on, not 0"),
    ],
)
def test_it_is_refused_where_numbers_do_not_tell(build: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build(numbers(9))


def test_a_loader_ends_by_steps() -> None:
    with pytest.raises(ValueError, match=r"\.steps\(n\) ends an epoch"):
        stoker.from_loader([1, 2, 3, 4]).take(3)


@pytest.mark.parametrize("n", [True, 2.0, "3", None])
def test_a_count_is_a_whole_number(n: Any) -> None:
    with pytest.raises(TypeError, match="whole number"):
        numbers(9).take(n)
