"""Streams: sources that can be iterated, but not asked for an example by its number."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import stoker
from strategies import (
    Examples,
    Keep,
    factors,
    few,
    jitter,
    one_in,
    small_pools_allowed,
    stream,
    through_json,
)

KINDS = [(0, "thread"), (2, "thread"), (1, "process")]
REMAINDERS = ["drop", "uneven"]


def left() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("stoker")]


@stoker.thread_safe
class Numbers:
    """Can be iterated again and again; tells when an iteration began and ended."""

    def __init__(self, length: int, fails: bool = False, seconds: float = 0.0) -> None:
        self.length, self.fails, self.seconds = length, fails, seconds
        self.begun = self.ended = self.read = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.begun += 1
        try:
            examples = Examples(self.length)
            for number in range(self.length):
                self.read += 1
                time.sleep(self.seconds)
                yield examples[number]
            if self.fails:
                raise OSError("the line is dead")
        finally:
            self.ended += 1


def numbers(pipeline: stoker.Pipeline) -> list[int]:
    with small_pools_allowed():
        return [int(i) for batch in pipeline for i in batch["id"]]


def of(length: int, **options: Any) -> stoker.Pipeline:
    return stoker.from_iterable(Numbers(length), **{"seed": 0, **options})


# -- what can be iterated


@given(st.integers(0, 40), st.integers(1, 8), st.booleans(), st.sampled_from([0, 1, 3]))
def test_a_stream_comes_in_its_order_every_epoch(
    length: int, batch: int, drop_last: bool, workers: int
) -> None:
    pipeline = of(length).batch(batch, drop_last=drop_last).workers(workers)
    expected = list(range(length // batch * batch if drop_last else length))
    for epoch in range(3):
        assert pipeline.epoch == epoch
        assert numbers(pipeline) == expected
        stats = pipeline.stats()
        assert stats.uses == len(expected)
        assert stats.dropped_uses == length - len(expected)


@pytest.mark.parametrize(("workers", "kind"), one_in(3, KINDS))
def test_lists_generators_and_functions_are_streams(workers: int, kind: str) -> None:
    def generate() -> Iterator[int]:
        yield from range(7)

    class Reader:
        """A class is a function that returns an iterator, too."""

        def __init__(self) -> None:
            self.numbers = iter(range(7))

        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            return next(self.numbers)

    for source in (list(range(7)), range(7), generate, lambda: range(7), Reader):
        pipeline = stoker.from_iterable(source, seed=0).batch(3).workers(workers, kind=kind)
        for _ in range(2):
            assert [batch.tolist() for batch in pipeline] == [[0, 1, 2], [3, 4, 5], [6]]


USED_UP = r"used up.*function that returns"
NOT_ITERABLE = "from_iterable needs an iterable"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        *((each, USED_UP) for each in (iter([1]), (x for x in [1]), map(str, [1]), zip([1]))),
        *((each, NOT_ITERABLE) for each in (3, None, object())),
    ],
)
def test_what_cannot_be_iterated_in_every_epoch_is_refused(source: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says) as caught:
        stoker.from_iterable(source)
    assert "\n" not in str(caught.value)


def test_a_dataset_of_torch_may_be_its_own_iterator() -> None:
    from torch.utils.data import IterableDataset

    class Reader(IterableDataset):  # type: ignore[misc,type-arg]
        def __iter__(self) -> Iterator[int]:
            self.left = 3
            return self  # type: ignore[return-value]

        def __next__(self) -> int:
            if not self.left:
                raise StopIteration
            self.left -= 1
            return self.left

    pipeline = stoker.from_iterable(Reader())
    assert [list(pipeline), list(pipeline)] == [[2, 1, 0]] * 2


@pytest.mark.parametrize("nonsense", [3, None])
def test_a_function_that_returns_nonsense_is_told_when_the_epoch_begins(nonsense: Any) -> None:
    def make() -> Any:
        return nonsense

    pipeline = stoker.from_iterable(make).batch(2).workers(2)
    for _ in range(2):
        with pytest.raises(TypeError, match=rf"make.*{type(nonsense).__name__}") as caught:
            iter(pipeline)
        assert "\n" not in str(caught.value)
    assert pipeline.epoch == 0
    assert left() == []


def test_a_function_that_fails_is_told_and_its_epoch_can_begin_again() -> None:
    tries = []

    def make() -> list[int]:
        tries.append(0)
        if len(tries) == 1:
            raise ConnectionError("not yet")
        return [1, 2]

    pipeline = stoker.from_iterable(make).batch(2)
    with pytest.raises((ConnectionError, stoker.StageError), match="not yet"):
        list(pipeline)
    pipeline.set_epoch(0)
    assert [batch.tolist() for batch in pipeline] == [[1, 2]]


# -- what it raises


@pytest.mark.parametrize(("workers", "kind"), one_in(3, KINDS))
@pytest.mark.parametrize("length", one_in(2, [10, 0, 8]))
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_what_the_iterator_raises_is_raised_once_behind_what_came_before(
    mapped: bool, drop_last: bool, length: int, workers: int, kind: str
) -> None:
    source = Numbers(length, fails=True)
    chain = stoker.from_iterable(source, seed=0)
    chain = chain.random_map(jitter, on="x") if mapped else chain
    pipeline = chain.batch(4, drop_last=drop_last).workers(workers, kind=kind)
    iterator = iter(pipeline)
    found = [i for _ in range(length // 4) for i in next(iterator)["id"].tolist()]
    assert found == list(range(length // 4 * 4))
    with pytest.raises(stoker.StageError, match="the line is dead") as caught:
        next(iterator)
    error = caught.value
    assert next(iterator, None) is None
    assert (error.stage, error.number, error.index) == ("from_iterable(Numbers)", length, None)
    assert f"on example {length} of the stream" in str(error)
    assert type(error.__cause__) is OSError
    del caught, error
    assert left() == []
    assert source.ended == source.begun == 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("buffer", [2, 5, 100])
def test_what_it_raises_comes_behind_what_the_buffer_holds(buffer: int, workers: int) -> None:
    chain = stoker.from_iterable(Numbers(10, fails=True), seed=0).shuffle(buffer=buffer)
    iterator = iter(chain.batch(1).workers(workers))
    assert sorted(int(next(iterator)["id"][0]) for _ in range(10)) == list(range(10))
    with pytest.raises(stoker.StageError, match="example 10 of the stream"):
        next(iterator)
    assert next(iterator, None) is None


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["map", "filter", "echo", "own budget"])
def test_what_it_raises_cannot_be_skipped(how: str, workers: int) -> None:
    chain = stoker.from_iterable(Numbers(10, fails=True), seed=0, max_errors="100%")
    if how == "map":
        chain = chain.map(lambda x: x)
    elif how == "filter":
        chain = chain.filter(lambda x: True)
    elif how == "own budget":
        chain = chain.map(lambda x: x, max_errors=5)
    else:
        chain = chain.echo(2).random_map(jitter, on="x")
    with small_pools_allowed(), pytest.raises(stoker.StageError, match="the line is dead"):
        list(chain.batch(4).workers(workers))


@pytest.mark.parametrize(("workers", "kind"), KINDS)
def test_a_stage_s_errors_are_named_by_the_position(workers: int, kind: str) -> None:
    def fail(x: Any) -> Any:
        if x["id"] == 9:
            raise ArithmeticError("nine")
        return x

    iterator = iter(of(20).map(fail).batch(4).workers(workers, kind=kind))
    next(iterator), next(iterator)
    with pytest.raises(stoker.StageError) as caught:
        next(iterator)
    error = caught.value
    assert (error.stage, error.number, error.index, error.path) == ("map(fail)", 9, None, None)
    assert str(error) == "map(fail) failed on example 9 of the stream: ArithmeticError: nine"
    import pickle

    twin = pickle.loads(pickle.dumps(error))
    assert (str(twin), twin.number) == (str(error), 9)


# -- the order


@given(
    st.integers(0, 60),
    st.integers(2, 80),
    st.integers(1, 8),
    st.integers(0, 2**40),
    st.sampled_from([0, 1, 3]),
)
@example(10, 2, 4, 0, 0)
@example(10, 10, 4, 0, 2)
@example(10, 11, 4, 0, 0)
def test_a_buffer_gives_every_example_once_and_none_too_early(
    length: int, buffer: int, batch: int, seed: int, workers: int
) -> None:
    pipeline = of(length, seed=seed).shuffle(buffer=buffer).batch(batch).workers(workers)
    for _ in range(2):
        found = numbers(pipeline)
        assert sorted(found) == list(range(length))
        # What comes at a place was in the buffer: at most so many places ahead of its own.
        assert all(i < place + buffer for place, i in enumerate(found))


def test_a_buffer_shuffles_well() -> None:
    # Larger than the stream, it draws permutations: every place sees every example.
    pipeline = of(5).shuffle(buffer=1000).batch(5).workers(0)
    seen = Counter((place, i) for _ in range(400) for place, i in enumerate(numbers(pipeline)))
    assert len(seen) == 25
    assert all(40 <= count <= 120 for count in seen.values())


def test_a_buffer_holds_a_thousand_unless_told() -> None:
    assert "shuffle(buffer=1,000)" in str(of(3).shuffle())
    assert sorted(numbers(of(2500).shuffle().batch(100).workers(0))) == list(range(2500))


# -- the same for any workers


@st.composite
def chains(draw: st.DrawFn, max_examples: int = 60) -> Any:
    """Return a function of workers and kind that builds a pipeline over a stream."""
    length = draw(st.integers(0, max_examples))
    buffer = draw(st.none() | st.integers(2, 70))
    shard: Any = draw(st.none() | st.tuples(st.integers(0, 2), st.sampled_from(REMAINDERS)))
    filters = draw(st.lists(st.sampled_from(["first", "middle"]), unique=True, max_size=2))
    bad = draw(st.sets(st.integers(0, max_examples), max_size=3))
    echo = draw(st.sampled_from(["", "before", "after", "batch"]))
    factor: Any = draw(factors)
    batch, drop_last = draw(st.integers(1, 8)), draw(st.booleans())
    if shard is not None and (filters or bad):
        shard = shard[0], "uneven"

    def fail(x: Any) -> Any:
        if x["id"] in bad:
            raise ValueError(x["id"])
        return x

    def echoed(chain: stoker.Pipeline, place: str) -> stoker.Pipeline:
        return chain.echo(factor) if place == echo else chain

    def build(workers: int = 0, kind: str = "thread") -> stoker.Pipeline:
        max_errors = 40 if bad else 0
        chain = stoker.from_iterable(Numbers(length), seed=5, max_errors=max_errors)
        if shard is not None:
            chain = chain.shard(rank=shard[0], world_size=3, remainder=shard[1])
        if buffer is not None:
            chain = chain.shuffle(buffer=buffer)
        chain = chain.filter(Keep(3, 0), on="id") if "first" in filters else chain
        chain = echoed(chain.map(fail), "before")
        chain = chain.filter(Keep(5, 1), on="id") if "middle" in filters else chain
        chain = echoed(chain.random_map(jitter, on="x"), "after")
        return echoed(chain.batch(batch, drop_last=drop_last), "batch").workers(workers, kind=kind)

    return build


@few(20)
@given(chains(), st.integers(1, 4))
def test_the_stream_is_the_same_for_any_threads(build: Any, workers: int) -> None:
    alone, several = build(0), build(workers)
    for _ in range(2):
        assert stream(alone) == stream(several)


@few(5)
@given(chains(25), st.integers(1, 2))
def test_the_stream_is_the_same_for_any_processes(build: Any, workers: int) -> None:
    assert stream(build(0)) == stream(build(workers, "process"))


@few(15)
@given(chains())
def test_an_epoch_is_the_same_whenever_it_is_run(build: Any) -> None:
    one, other = build(0), build(2)
    epochs = [stream(one) for _ in range(3)]
    other.set_epoch(2)
    assert stream(other) == epochs[2]
    other.set_epoch(1)
    state = through_json(other.state_dict())
    restored = build(0)
    restored.load_state_dict(state)
    assert [stream(restored), stream(restored)] == epochs[1:]


@given(st.integers(0, 40), factors, st.sampled_from(["before", "after"]), st.integers(1, 6))
def test_every_example_is_used_as_its_count_says(
    length: int, factor: Any, place: str, batch: int
) -> None:
    chain = of(length)
    chain = chain.echo(factor) if place == "before" else chain
    chain = chain.random_map(jitter, on="x")
    chain = chain.echo(factor) if place == "after" else chain
    pipeline = chain.batch(batch).workers(0)
    assert Counter(numbers(pipeline)) == {
        n: int(factor * (n + 1)) - int(factor * n) for n in range(length)
    }
    stats = pipeline.stats()
    assert (stats.fresh_examples, stats.uses) == (length, int(factor * length))


@given(st.integers(0, 40), st.integers(1, 7), st.sampled_from([0, 2]))
def test_a_stream_draws_what_a_dataset_draws(length: int, batch: int, workers: int) -> None:
    # The address of an example is its number, whatever gives it.
    data = stoker.from_dataset(Examples(length), seed=0)
    expected = stream(data.random_map(jitter, on="x").batch(batch).workers(0))
    assert stream(of(length).random_map(jitter, on="x").batch(batch).workers(workers)) == expected


@given(st.integers(0, 60), st.sets(st.integers(0, 59)), st.sampled_from([0, 2]))
def test_filters_and_skips_leave_out_what_they_say(
    length: int, bad: set[int], workers: int
) -> None:
    @stoker.thread_safe
    def fail(x: Any) -> Any:
        if x["id"] in bad:
            raise ValueError("bad")
        return x

    pipeline = of(length, max_errors=len(bad)).map(fail).filter(Keep(3, 0), on="id")
    pipeline = pipeline.batch(4).workers(workers)
    expected = [i for i in range(length) if i not in bad and i % 3]
    assert numbers(pipeline) == expected
    stats = pipeline.stats()
    failed = [i for i in sorted(bad) if i < length]
    assert stats.skipped_examples == len(failed)
    assert [skip.index for skip in stats.skips] == [None] * len(failed)
    assert stats.filtered_examples == length - len(failed) - len(expected)


# -- ranks


@given(
    st.integers(0, 50),
    st.integers(1, 8),
    st.sampled_from(REMAINDERS),
    st.none() | st.integers(2, 20),
)
def test_parts_of_a_stream_are_disjoint_and_equally_long(
    length: int, world: int, remainder: Any, buffer: int | None
) -> None:
    parts = []
    for rank in range(world):
        chain = of(length).shard(rank=rank, world_size=world, remainder=remainder)
        chain = chain if buffer is None else chain.shuffle(buffer=buffer)
        parts.append(numbers(chain.batch(3).workers(0)))
    together = sorted(i for part in parts for i in part)
    if remainder == "uneven":
        assert together == list(range(length))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    else:
        assert together == list(range(length // world * world))  # whole rounds
        assert {len(part) for part in parts} == {length // world}
    for rank, part in enumerate(parts):
        assert all(i % world == rank for i in part)
        assert buffer is not None or part == sorted(part)


def test_ranks_draw_and_shuffle_differently() -> None:
    class Same:
        def __iter__(self) -> Any:
            return iter([np.zeros(2)] * 20)

    def part(rank: int) -> list[Any]:
        chain = stoker.from_iterable(Same(), seed=0).shard(rank=rank, world_size=2)
        return stream(chain.random_map(lambda x, rng: x + rng.random(2)).batch(1))

    assert not {batch[3] for batch in part(0)} & {batch[3] for batch in part(1)}
    orders = [
        [i // 2 for i in numbers(of(60).shard(rank=r, world_size=2).shuffle(buffer=9).batch(5))]
        for r in (0, 1)
    ]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("before", [True, False])
def test_a_part_of_one_is_the_identity(before: bool) -> None:
    plain = of(30).shuffle(buffer=7).random_map(jitter, on="x").batch(4)
    part = of(30)
    part = part.shard(rank=0, world_size=1).shuffle(buffer=7) if before else part
    part = part if before else part.shuffle(buffer=7).shard(rank=0, world_size=1)
    assert stream(part.random_map(jitter, on="x").batch(4)) == stream(plain)


@pytest.mark.parametrize("remainder", REMAINDERS)
def test_what_the_iterator_raises_is_raised_on_every_rank(remainder: Any) -> None:
    for rank in range(3):
        chain = stoker.from_iterable(Numbers(11, fails=True), seed=0)
        part = chain.shard(rank=rank, world_size=3, remainder=remainder)
        iterator = iter(part.batch(1).workers(0))
        found = [int(next(iterator)["id"][0]) for _ in range(3)]
        assert found == [rank, 3 + rank, 6 + rank]
        with pytest.raises(stoker.StageError, match="the line is dead"):
            list(iterator)


# -- states, lengths, words


@pytest.mark.parametrize("workers", [0, 2])
def test_there_is_no_state_in_the_middle_of_an_epoch_but_between_them(workers: int) -> None:
    def build() -> stoker.Pipeline:
        return of(20).shuffle(buffer=5).echo(2).batch(4).workers(workers)

    pipeline = build()
    between = through_json(pipeline.state_dict())
    with iter(pipeline) as iterator:
        through_json(pipeline.state_dict())  # nothing was yielded yet
        next(iterator)
        with pytest.raises(stoker.StateError, match=r"between epochs.*index") as caught:
            pipeline.state_dict()
        assert "\n" not in str(caught.value)
        list(iterator)
    state = through_json(pipeline.state_dict())
    second = stream(pipeline)
    restored = build()
    restored.load_state_dict(state)
    assert restored.epoch == 1
    assert stream(restored) == second
    pipeline.load_state_dict(between)
    assert pipeline.epoch == 0
    with pytest.raises(stoker.StateError, match="belongs to another pipeline"):
        of(20).shuffle(buffer=6).echo(2).batch(4).load_state_dict(state)


def test_it_has_no_length() -> None:
    for chain in (of(8), of(8).batch(2), of(8).echo(2).batch(2), of(8).shard(rank=0, world_size=2)):
        with pytest.raises(TypeError, match="no length"):
            len(chain)
        with iter(chain) as iterator:
            next(iterator)
            with pytest.raises(TypeError, match="not known"):
                len(iterator)
        assert list(chain)  # which asks for a hint


def test_the_length_that_it_says_is_taken_and_never_relied_on() -> None:
    class Sized(Numbers):
        def __len__(self) -> int:
            return 10

    for length in (8, 10, 12):
        train = stoker.from_iterable(Sized(length), seed=0).batch(4)
        assert len(train) == 3
        assert "10 examples, as it says" in str(train)
        assert numbers(train) == list(range(length))
        assert train.epoch == 1


def test_print_says_that_it_is_a_stream() -> None:
    shown = str(of(8).shuffle(buffer=4).echo(2).random_map(jitter, on="x").batch(2))
    assert "from_iterable(Numbers)" in shown
    assert "a stream: no length, no state in the middle" in shown
    assert "shuffle(buffer=4)" in shown
    assert "example echoing before augmentation" in shown
    assert "from_iterable(generate)" in repr(stoker.from_iterable(generate))


def generate() -> Iterator[int]:
    yield from range(3)


# -- life and death


@pytest.mark.parametrize(("workers", "kind"), one_in(3, KINDS))
@pytest.mark.parametrize("remainder", [None, *REMAINDERS])
@pytest.mark.parametrize("how", one_in(2, ["end", "break", "close", "error", "ctrl-c", "dropped"]))
def test_the_iterator_is_closed(how: str, remainder: Any, workers: int, kind: str) -> None:
    source = Numbers(24 if how == "end" else 10**9)
    chain = stoker.from_iterable(source, seed=0)
    if remainder is not None:
        chain = chain.shard(rank=1, world_size=2, remainder=remainder)
    chain = chain.shuffle(buffer=20).random_map(jitter, on="x").echo(2, pool=8)
    pipeline = chain.batch(4).workers(workers, kind=kind)
    if how == "end":
        list(pipeline)
    elif how == "break":
        for _ in pipeline:
            break
    elif how in ("close", "dropped"):
        iterator = iter(pipeline)
        next(iterator)
        if how == "close":
            iterator.close()
        else:
            del iterator
    else:
        raised = KeyError if how == "error" else KeyboardInterrupt
        with contextlib.suppress(KeyError, KeyboardInterrupt), iter(pipeline) as batches:
            next(batches)
            raise raised
    assert (source.begun, source.ended) == (1, 1)
    assert left() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_it_is_read_no_further_ahead_than_the_window_and_the_buffer(workers: int) -> None:
    source = Numbers(10**6)
    pipeline = stoker.from_iterable(source, seed=0).shuffle(buffer=50).batch(4).workers(workers)
    for number, _ in enumerate(pipeline):
        assert source.read <= 4 * number + 4 + 50 + 8 * 2 * 8
        if number == 30:
            break


class Jealous:
    """Notices two threads within it."""

    def __init__(self) -> None:
        self.within = threading.Lock()
        self.number = 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> dict[str, Any]:
        assert self.within.acquire(blocking=False), "iterated by two threads at a time"
        try:
            time.sleep(0.0005)
            self.number += 1
            if self.number > 150:
                raise StopIteration
            return Examples(200)[self.number - 1]
        finally:
            self.within.release()


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_it_is_iterated_by_one_thread_at_a_time(kind: str) -> None:
    chain = stoker.from_iterable(make_jealous, seed=0)
    chain = chain.random_map(jitter, on="x").filter(Keep(4, 0), on="id").echo(2, pool=16)
    pipeline = chain.batch(4).workers(4 if kind == "thread" else 2, kind=kind)
    assert set(numbers(pipeline)) == {i for i in range(150) if i % 4}


def make_jealous() -> Jealous:
    return Jealous()
