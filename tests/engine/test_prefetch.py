"""What a thread reads ahead: in order, so many at most, errors where they were met."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from epochs import working
from hypothesis import given
from hypothesis import strategies as st
from loaders import LONG_S, Broken, Loader, value

from stoker.engine.heads import Prefetcher
from stoker.engine.items import EpochCounters, Item, Planning, WouldBlock
from stoker.engine.workers.threads import WorkerPool
from stoker.engine.workers.tuning import Autotuner
from stoker.stages.loader import LoaderHead, LoaderSource
from strategies import few


@contextlib.contextmanager
def prefetching(
    loader: Loader,
    size: int,
    pool: WorkerPool | None = None,
    planning: Planning | None = None,
) -> Iterator[Prefetcher]:
    """Read a loader ahead; planning may block unless the test says otherwise."""
    stream = LoaderHead(LoaderSource(loader), EpochCounters(), None)
    pool = pool or WorkerPool(0, 1, Autotuner())
    prefetcher = Prefetcher(stream, size, planning or Planning(), pool)
    try:
        yield prefetcher
    finally:
        prefetcher.clear()


def number(item: Item | None) -> int:
    """Return the number in an item's batch."""
    return int(value(item)[0, 0])


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
            came.append(number(item))
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
            came = [number(item) for item in prefetcher.pull_many(count)]
            assert came == left[:count]
            del left[:count]


class Counting(Loader):
    """Notes, whenever it makes a batch, how many were made before and not taken."""

    taken = 0

    def __init__(self, script: list[int | None]) -> None:
        super().__init__(script)
        self.leads: list[int] = []

    def batch(self, number: int) -> Any:
        self.leads.append(number - self.taken)
        return super().batch(number)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_so_many_wait_and_no_more(size: int) -> None:
    loader = Counting(list(range(40)))
    with prefetching(loader, size) as prefetcher:
        for each in range(40 - size):
            prefetcher.wait_for(size)
            assert prefetcher.is_full
            assert prefetcher.poll(size + 1) == (size, False)
            loader.taken += 1  # before: a slot may be filled again at once
            assert number(prefetcher.pull()) == each
    assert max(loader.leads) < size


@few(25)
@given(size=st.integers(1, 3), length=st.integers(0, 12), count=st.integers(1, 12))
def test_more_than_the_queue_holds_may_be_asked_for(size: int, length: int, count: int) -> None:
    with prefetching(Loader(list(range(length))), size) as prefetcher:
        prefetcher.wait_for(count)
        assert prefetcher.poll(count)[0] == min(count, length)
        came = [number(item) for item in prefetcher.pull_many(count)]
        assert came == list(range(min(count, length)))
        rest = [number(item) for item in prefetcher.pull_many(length + 1)]
        assert came + rest == list(range(length))


def test_who_asked_for_more_than_the_queue_holds_has_room_until_it_is_taken() -> None:
    loader = Counting(list(range(40)))
    with prefetching(loader, 2) as prefetcher:
        prefetcher.wait_for(9)
        for _ in range(30):
            loader.taken += 1
            prefetcher.pull()
            if loader.taken == 10:
                prefetcher.wait_for(2)
                loader.leads.clear()
    assert max(loader.leads) < 2


def test_who_must_not_wait_for_more_than_the_queue_holds_is_called_when_it_is_there() -> None:
    planning = Planning()
    planning.may_block = False
    there = threading.Event()

    def planned() -> bool:
        with contextlib.suppress(WouldBlock):
            prefetcher.wait_for(5)
            there.set()
        return False

    loader = Loader(list(range(9)))
    with working(1) as pool, prefetching(loader, 2, pool, planning) as prefetcher:
        pool.plan_with(planned)
        pool.plan()
        assert there.wait(LONG_S)


def test_who_plans_is_called_for_what_fills_the_queue() -> None:
    called = threading.Event()

    class Noted(WorkerPool):
        def plan(self) -> None:
            called.set()

    with prefetching(Loader([1, 2]), 1, Noted(0, 1, Autotuner())) as prefetcher:
        prefetcher.poll(1)
        assert called.wait(LONG_S)
        assert prefetcher.is_full


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
    called = threading.Event()

    def planned() -> bool:
        called.set()
        return False

    gate = threading.Semaphore(0)
    with working(1) as pool, prefetching(Loader([1], gate), 2, pool) as prefetcher:
        pool.plan_with(planned)
        prefetcher.poll(1)
        assert not called.is_set()
        gate.release()
        assert called.wait(LONG_S)


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
    assert loader.at == 0
    assert prefetcher.poll(1) == (0, False)
    assert not reading()
