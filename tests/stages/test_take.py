"""``.take(n)`` and ``.skip(n)``: the first of an epoch, and the others, by their numbers alone."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
from strategies import FULL, GoesOn

pytestmark = pytest.mark.filterwarnings("ignore:.*are fewer than.*ranks")

COUNTS = st.integers(0, 60)
TAKEN = st.integers(1, 60)
BLOCKS = 20  # more than are drawn from at a time
ORDERS: dict[str, Any] = {
    "as it lies": lambda p, rank, world: p,
    "shuffled": lambda p, rank, world: p.shuffle(),
    "by blocks": lambda p, rank, world: p.shuffle(block=max(1, len(p) // BLOCKS)),
    "drawn anew": lambda p, rank, world: p.shuffle().shard(
        rank=rank, world_size=world, remainder="uneven"
    ),
    "by blocks, anew": lambda p, rank, world: p.shuffle(block=2).shard(rank=rank, world_size=world),
    "fixed": lambda p, rank, world: p.shard(rank=rank, world_size=world, remainder="uneven"),
    "fixed, shuffled": lambda p, rank, world: p.shard(
        rank=rank, world_size=world, remainder="uneven"
    ).shuffle(),
}


def numbers(length: int, seed: int = 0) -> stoker.Pipeline[Any]:
    return stoker.from_arrays(np.arange(length), seed=seed)


def drawn(pipeline: stoker.Pipeline[Any], epoch: int = 0) -> list[int]:
    pipeline.set_epoch(epoch)
    return [int(example) for example in pipeline]


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


@given(st.integers(0, 40), COUNTS)
def test_only_what_is_left_is_read(length: int, count: int) -> None:
    source = Counting(length)
    pipeline = stoker.from_dataset(source, seed=0).workers(0)
    first = pipeline.take(max(1, count))
    assert list(first) == list(range(length))[: max(1, count)]
    assert len(first) == len(set(source.read)) == min(length, max(1, count))
    source.read.clear()
    rest = pipeline.skip(count)
    assert list(rest) == list(range(length))[count:]
    assert len(rest) == max(0, length - count)
    assert len(pipeline) == length  # a new pipeline, as from every method
    assert set(source.read) == set(range(length)[count:])


@pytest.mark.parametrize("how", ORDERS)
@given(st.integers(1, 120), COUNTS, st.integers(0, 3), st.integers(0, 2**32 - 1), st.data())
def test_take_and_skip_are_a_split_of_whatever_stands_before(
    how: str, length: int, count: int, epoch: int, seed: int, data: st.DataObject
) -> None:
    world = data.draw(st.integers(1, 4))
    rank = data.draw(st.integers(0, world - 1))
    whole = ORDERS[how](numbers(length, seed), rank, world)
    first, rest = whole.take(max(1, count)), whole.skip(max(1, count))
    assert drawn(first, epoch) + drawn(rest, epoch) == drawn(whole, epoch)
    assert len(first) + len(rest) == len(whole)
    middle = whole.skip(count).take(7).skip(2)
    assert drawn(middle, epoch) == drawn(whole, epoch)[count : count + 7][2:]
    assert len(middle) == len(drawn(middle, epoch))


@given(
    st.integers(1, 60),
    st.integers(1, 4),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 2), TAKEN), max_size=4),
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
                made = made.shard(
                    rank=rank, world_size=world, remainder="uneven" if uneven else "drop"
                )
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


@given(st.integers(1, 90), COUNTS, st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_before_shuffling_and_sharding_a_split_holds_for_good(
    length: int, count: int, world: int, epoch: int, by_blocks: bool
) -> None:
    data = numbers(length).skip(count)
    held_out = numbers(length).take(max(1, count)).shuffle()
    assert sorted(drawn(held_out, epoch)) == list(range(length))[: max(1, count)]
    shuffled = data.shuffle(block=3) if by_blocks else data.shuffle()
    assert sorted(drawn(shuffled, epoch)) == list(range(length))[count:]
    parts = [
        drawn(shuffled.shard(rank=rank, world_size=world, remainder="uneven"), epoch)
        for rank in range(world)
    ]
    assert sorted(chain.from_iterable(parts)) == list(range(length))[count:]
    each = [
        drawn(data.shard(rank=rank, world_size=world).shuffle(), epoch) for rank in range(world)
    ]
    assert {len(part) for part in each} == {max(0, length - count) // world}
    assert len(set(chain.from_iterable(each))) == sum(map(len, each))


@settings(max_examples=500 if FULL else 8)
@given(st.integers(4, 60), st.integers(1, 20), st.integers(1, 4))
def test_a_split_of_a_fixed_part_uses_all_of_it_in_the_long_run(
    length: int, count: int, world: int
) -> None:
    for rank in range(world):
        part = numbers(length).shard(rank=rank, world_size=world)
        own = list(range(rank, length, world))
        equal = length // world
        first, rest = part.take(count), part.skip(count)
        seen: set[int] = set()
        for _ in range(len(own)):
            held_out = [int(x) for x in first]
            left = [int(x) for x in rest]
            assert not set(held_out) & set(left)
            assert len(held_out) + len(left) == equal
            seen |= set(left)
        if count < equal:
            assert seen == set(own[count:])


def test_what_a_stream_raises_among_the_skipped_is_raised() -> None:
    def ends_early() -> Any:
        yield from range(3)
        raise OSError("torn")

    stream = stoker.from_iterable(ends_early, seed=0)
    for way in (stream.skip(9), stream.shuffle(buffer=2).skip(9)):
        with pytest.raises(stoker.StageError, match="torn"):
            list(way)


@settings(max_examples=500 if FULL else 8)
@given(st.integers(0, 40), st.integers(1, 50), st.integers(1, 4))
def test_streams_are_split_too(length: int, count: int, world: int) -> None:
    stream = stoker.from_iterable(range(length), seed=0)
    read: list[int] = []
    few = stoker.from_iterable(lambda: (read.append(n) or n for n in range(length)), seed=0)  # type: ignore[func-returns-value]
    assert list(few.take(count)) == list(range(length))[:count]
    assert len(read) == min(length, count)
    ways = [stream, stream.shuffle(buffer=5)]
    for rank in range(world):
        ways.append(stream.shard(rank=rank, world_size=world))
        ways.append(stream.shuffle(buffer=5).shard(rank=rank, world_size=world))
        ways.append(stream.shard(rank=rank, world_size=world).shuffle(buffer=5))
    for way in ways:
        whole = list(way)
        way.set_epoch(0)
        assert list(way.take(count)) + list(way.skip(count)) == whole
        assert list(way.skip(2).take(count).skip(1)) == whole[2 : 2 + count][1:]
    assert list(stream.skip(count).shard(rank=0, world_size=1)) == list(range(length))[count:]


@pytest.mark.parametrize("skipped", [3, 20])
@pytest.mark.parametrize("how", ["alone", "sharded", "sharded first"])
def test_a_stream_that_is_left_early_goes_on_behind_what_was_handed_out(
    how: str, skipped: int
) -> None:
    stream = stoker.from_iterable(GoesOn(60), seed=0)
    if how == "sharded first":
        stream = stream.shard(rank=0, world_size=2).skip(skipped // 2)
    else:
        stream = stream.skip(skipped)
        stream = stream.shard(rank=0, world_size=2) if how == "sharded" else stream
    step = 1 if how == "alone" else 2
    first = stream.batch(2).steps(2)
    begin = skipped // 2 * 2 if how == "sharded first" else skipped
    seen = [int(x) for batch in first for x in batch]
    assert seen == list(range(begin, begin + 4 * step, step))
    then = [int(x) for batch in first for x in batch]
    begin = seen[-1] + step + (skipped // 2 * 2 if how == "sharded first" else skipped)
    assert then == list(range(begin, begin + 4 * step, step))


def test_a_state_fits_only_the_same_count() -> None:
    state = numbers(20).skip(5).state_dict()
    with pytest.raises(stoker.StateError, match=r"skip\(5\) where this one has skip\(6\)"):
        numbers(20, seed=0).skip(6).load_state_dict(state)
    state = numbers(20).take(5).state_dict()
    with pytest.raises(stoker.StateError, match=r"take\(5\) where this one has take\(6\)"):
        numbers(20, seed=0).take(6).load_state_dict(state)


def test_with_workers_a_cache_and_parts_of_mixtures_it_counts() -> None:
    data = numbers(50).skip(40).cache("1MiB").map(lambda x: x * 2).echo(2).batch(4)
    assert ".skip(40)" in str(data)
    for workers in ({"n": 2}, {"n": 1, "kind": "process"}):
        made = data.workers(**workers)
        assert len(made) == 5
        assert sorted({int(x) for batch in made for x in batch}) == [2 * n for n in range(40, 50)]
    mixed = stoker.mix(
        [numbers(30).skip(20), numbers(30).take(20).map(lambda x: -x)], weights=[1, 2], seed=0
    )
    assert sorted(drawn(mixed)) == [*range(-19, 1), *range(20, 30)]


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda p: p.filter(bool).skip(3), r"\.skip\(\) cannot follow filter\(bool\)"),
        (lambda p: p.map(abs, max_errors=3).skip(3), r"cannot follow map\(abs\)"),
        (lambda p: p.echo(2).skip(3), r"cannot follow echo\(2\)"),
        (lambda p: p.batch(2).skip(3), r"batch\(2\): put it before \(\.resume_at\(n\)"),
        (lambda p: p.skip(-1), "from 0 on, not -1"),
        (lambda p: p.take(0), "takes a number from 1 on, not 0"),
        (lambda p: p.filter(bool).take(3), r"\.take\(\) cannot follow filter\(bool\)"),
        (lambda p: p.batch(2).take(3), r"cannot follow batch\(2\)"),
        (lambda p: stoker.from_loader([1, 2, 3]).take(2), r"\.steps\(n\) ends an epoch"),
        (lambda p: stoker.mix([p]).skip(3), r"skip in its parts, stoker\.mix"),
        (lambda p: stoker.from_loader([1, 2]).skip(1), r"\.resume_at\(n\) starts the next epoch"),
    ],
)
def test_it_is_refused_where_numbers_do_not_tell(build: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build(numbers(9))


@pytest.mark.parametrize("n", [True, 2.0, "3", None])
def test_a_count_is_a_whole_number(n: Any) -> None:
    with pytest.raises(TypeError, match="whole number"):
        numbers(9).skip(n)
    with pytest.raises(TypeError, match="whole number"):
        numbers(9).take(n)
