"""What a thread reads ahead: in order, so many at most, errors where they were met."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.engine.heads import Prefetcher
from stoker.engine.items import EpochCounters, Item, Planning, WouldBlock
from stoker.engine.workers.threads import WorkerPool
from stoker.engine.workers.tuning import Autotuner
from stoker.stages.loader import LoaderHead, LoaderSource
from strategies import few

LONG_S = 60.0


class Broken(Exception):
    """What the loader of a test raises."""


class Loader:
    """Gives batches of one row, and raises in between; may have to be let.

    Args:
        script: what comes: numbers are batches, None is an error.
        gate: is waited for before each, if there is one.

    Attributes:
        asked: how often it was asked.
        closed: set when its iterator is let go of.
    """

    def __init__(self, script: list[int | None], gate: threading.Semaphore | None = None) -> None:
        self.script = script
        self.gate = gate
        self.asked = 0
        self.closed = threading.Event()

    def __iter__(self) -> Iterator[Any]:
        return LoaderIterator(self)


class LoaderIterator:
    """Goes on behind an error, and can be interrupted, as a feed's iterator can."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._interrupted = False

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        loader = self._loader
        at, loader.asked = loader.asked, loader.asked + 1
        if loader.gate is not None:
            assert loader.gate.acquire(timeout=LONG_S)
        if self._interrupted or at >= len(loader.script):
            raise StopIteration
        number = loader.script[at]
        if number is None:
            raise Broken(at)
        return np.array([number])

    def interrupt(self) -> None:
        self._interrupted = True
        if self._loader.gate is not None:
            self._loader.gate.release()

    def __del__(self) -> None:
        self._loader.closed.set()


@contextlib.contextmanager
def prefetching(loader: Loader, size: int, pool: WorkerPool | None = None) -> Iterator[Prefetcher]:
    """Read a loader ahead; planning may block unless the test says otherwise."""
    stream = LoaderHead(LoaderSource(loader), EpochCounters(), None)
    pool = pool or WorkerPool(0, 1, Autotuner())
    prefetcher = Prefetcher(stream, size, Planning(), pool)
    try:
        yield prefetcher
    finally:
        prefetcher.clear()


def value(item: Item | None) -> int | None:
    """Return the number in an item's batch, None where there is no item."""
    return None if item is None else int(item.task.values[item.row][0])


def reading() -> list[threading.Thread]:
    """Return the threads that read ahead now."""
    return [t for t in threading.enumerate() if t.name.endswith("-reading")]


scripts = st.lists(st.one_of(st.integers(0, 99), st.none()), max_size=12)


@few(25)
@given(script=scripts, size=st.integers(1, 5))
def test_everything_comes_in_order_and_errors_in_their_turn(
    script: list[int | None], size: int
) -> None:
    came: list[int | None] = []
    with prefetching(Loader(script), size) as prefetcher:
        while True:
            try:
                item = prefetcher.pull()
            except Broken:
                came.append(None)
                continue
            if item is None:
                break
            came.append(value(item))
            assert prefetcher.fresh == sum(number is not None for number in came)
        assert came == script
        assert prefetcher.pull() is None
        assert prefetcher.poll(1) == (0, True)
    assert not reading()


@few(15)
@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=8), length=st.integers(0, 12))
def test_many_come_at_a_time_and_fewer_only_at_the_end(counts: list[int], length: int) -> None:
    left = list(range(length))
    with prefetching(Loader(list(range(length))), 4) as prefetcher:
        for count in counts:
            came = [value(item) for item in prefetcher.pull_many(count)]
            assert came == left[:count]
            del left[:count]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_so_many_wait_and_no_more(size: int) -> None:
    leads: list[int] = []
    taken = 0

    class Counting(Loader):
        def __iter__(self) -> Iterator[Any]:
            for number in range(40):
                leads.append(number - taken)  # already read and not taken
                yield np.array([number])

    with prefetching(Counting([]), size) as prefetcher:
        for _ in range(40 - size):
            prefetcher.wait_for(size)
            assert prefetcher.is_full
            assert prefetcher.poll(size + 1) == (size, False)
            taken += 1  # before: a slot may be filled again at once
            assert value(prefetcher.pull()) == taken - 1
    assert max(leads) < size


@few(25)
@given(size=st.integers(1, 3), length=st.integers(0, 12), count=st.integers(1, 12))
def test_more_than_the_queue_holds_may_be_asked_for(size: int, length: int, count: int) -> None:
    with prefetching(Loader(list(range(length))), size) as prefetcher:
        prefetcher.wait_for(count)
        assert prefetcher.poll(count)[0] == min(count, length)
        came = [value(item) for item in prefetcher.pull_many(count)]
        assert came == list(range(min(count, length)))
        rest = [value(item) for item in prefetcher.pull_many(length + 1)]
        assert came + rest == list(range(length))


def test_who_asked_for_more_than_the_queue_holds_has_room_until_it_is_taken() -> None:
    leads: list[int] = []
    taken = 0

    class Counting(Loader):
        def __iter__(self) -> Iterator[Any]:
            for number in range(40):
                leads.append(number - taken)
                yield np.array([number])

    with prefetching(Counting([]), 2) as prefetcher:
        prefetcher.wait_for(9)
        for _ in range(30):
            taken += 1
            prefetcher.pull()
            if taken == 10:
                prefetcher.wait_for(2)
                leads.clear()
    assert max(leads) < 2


def test_who_must_not_wait_for_more_than_the_queue_holds_is_called_when_it_is_there() -> None:
    tuned = Autotuner()
    tuned.settle(1)
    pool = WorkerPool(1, 1, tuned)
    planning = Planning()
    planning.may_block = False
    prefetcher = Prefetcher(
        LoaderHead(LoaderSource(Loader(list(range(9)))), EpochCounters(), None), 2, planning, pool
    )
    there = threading.Event()

    def planned() -> bool:
        with contextlib.suppress(WouldBlock):
            prefetcher.wait_for(5)
            there.set()
        return False

    pool.plan_with(planned)
    pool.begin()
    try:
        pool.plan()
        assert there.wait(LONG_S)
    finally:
        pool.close()
        prefetcher.clear()


def test_who_plans_is_called_for_what_fills_the_queue() -> None:
    called = threading.Event()

    class Noted(WorkerPool):
        def plan(self) -> None:
            called.set()

    with prefetching(Loader([1, 2]), 1, Noted(0, 1, Autotuner())) as prefetcher:
        prefetcher.poll(1)
        assert called.wait(LONG_S)
        assert prefetcher.is_full


def test_an_error_stands_in_the_queue_and_is_not_read_past() -> None:
    loader = Loader([0, None, 2, None])
    with prefetching(loader, 4) as prefetcher:
        prefetcher.wait_for(3)  # returns for the error: who takes them meets it
        assert prefetcher.poll(3) == (2, False)
        assert loader.asked == 2
        assert value(prefetcher.pull()) == 0
        with pytest.raises(Broken):
            prefetcher.pull()
        assert value(prefetcher.pull()) == 2
        with pytest.raises(Broken):
            prefetcher.peek()
        assert prefetcher.peek() is None


def test_to_look_is_not_to_take() -> None:
    with prefetching(Loader([7, 8]), 5) as prefetcher:
        assert value(prefetcher.peek()) == value(prefetcher.peek()) == 7
        assert prefetcher.fresh == 0
        assert [value(item) for item in prefetcher.pull_many(5)] == [7, 8]
        assert prefetcher.peek() is None


def test_who_must_not_wait_does_not() -> None:
    gate = threading.Semaphore(0)
    pool = WorkerPool(0, 1, Autotuner())
    planning = Planning()
    stream = LoaderHead(LoaderSource(Loader([3], gate)), EpochCounters(), None)
    prefetcher = Prefetcher(stream, 2, planning, pool)
    try:
        assert prefetcher.poll(1) == (0, False)
        with pytest.raises(WouldBlock) as blocked:
            prefetcher.pull(may_block=False)
        assert blocked.value.task is None
        planning.may_block = False
        with pytest.raises(WouldBlock):
            prefetcher.wait_for(1)
        assert prefetcher.fresh == 0

        gate.release()
        planning.may_block = True
        prefetcher.wait_for(1)
        planning.may_block = False
        prefetcher.wait_for(1)
        assert value(prefetcher.pull(may_block=False)) == 3

        gate.release()
        planning.may_block = True
        prefetcher.wait_for(1)  # the end
        assert prefetcher.pull(may_block=False) is None
    finally:
        prefetcher.clear()


def test_an_error_is_raised_to_who_must_not_wait_too() -> None:
    with prefetching(Loader([None, 1]), 2) as prefetcher:
        prefetcher.wait_for(1)
        with pytest.raises(Broken):
            prefetcher.pull(may_block=False)
        assert value(prefetcher.pull()) == 1


def test_it_tells_since_when_there_is_no_room() -> None:
    before = time.perf_counter_ns()
    with prefetching(Loader([0, 1]), 2) as prefetcher:
        assert prefetcher.ready_since() == (0, None)  # nothing is read before it is asked for
        prefetcher.wait_for(2)
        ready, since = prefetcher.ready_since()
        assert ready == 2
        assert since is not None
        assert before <= since <= time.perf_counter_ns()
        prefetcher.pull()
        prefetcher.wait_for(2)  # the end
        assert prefetcher.ready_since() == (1, None)
        assert not prefetcher.is_full


def test_who_plans_is_called_when_something_came() -> None:
    tuned = Autotuner()
    tuned.settle(1)
    pool = WorkerPool(1, 1, tuned)
    called = threading.Event()

    def planned() -> bool:
        called.set()
        return False

    pool.plan_with(planned)
    pool.begin()
    gate = threading.Semaphore(0)
    try:
        with prefetching(Loader([1], gate), 2, pool) as prefetcher:
            prefetcher.poll(1)
            assert not called.is_set()
            gate.release()
            assert called.wait(LONG_S)
    finally:
        pool.close()


def test_clear_ends_a_thread_that_waits_for_room() -> None:
    loader = Loader(list(range(9)))
    with prefetching(loader, 2) as prefetcher:
        prefetcher.wait_for(2)
        assert len(reading()) == 1
    assert not reading()
    assert loader.closed.is_set()
    assert prefetcher.pull() is None


def test_clear_ends_a_thread_that_waits_for_the_loader() -> None:
    loader = Loader([1], threading.Semaphore(0))
    with prefetching(loader, 2) as prefetcher:
        prefetcher.poll(1)
        assert len(reading()) == 1
    assert not reading()
    assert loader.closed.is_set()


def test_clear_lets_go_of_who_waits() -> None:
    came: list[Any] = []
    waits = threading.Event()

    class Noted(Planning):
        """Tells that somebody is about to wait; the queue's lock is held then."""

        @property
        def may_block(self) -> bool:
            waits.set()
            return True

        @may_block.setter
        def may_block(self, may_block: bool) -> None: ...

    stream = LoaderHead(LoaderSource(Loader([1], threading.Semaphore(0))), EpochCounters(), None)
    prefetcher = Prefetcher(stream, 2, Noted(), WorkerPool(0, 1, Autotuner()))
    waiter = threading.Thread(target=lambda: came.append(prefetcher.pull()))
    waiter.start()
    assert waits.wait(LONG_S)
    prefetcher.clear()
    waiter.join(LONG_S)
    assert came == [None]


def test_what_was_never_begun_is_let_go_of_without_a_thread() -> None:
    loader = Loader([1])
    with prefetching(loader, 2) as prefetcher:
        assert not reading()
    assert loader.closed.is_set()
    assert loader.asked == 0
    assert prefetcher.poll(1) == (0, False)
    assert not reading()
