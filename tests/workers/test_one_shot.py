"""What a thread waits for comes, however the wait was interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import signal
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from stoker.basics.future import OneShot, run_on, start_thread

AMPLE_S = 60.0


def given_by_another_thread(answer: OneShot[int], value: int) -> threading.Thread:
    thread = threading.Thread(target=answer.give, args=[value], daemon=True)
    thread.start()
    return thread


def test_it_is_given_before_or_during_the_wait_and_waited_for_again() -> None:
    answer: OneShot[int] = OneShot()
    with pytest.raises(TimeoutError):
        answer.wait(0)
    giving = given_by_another_thread(answer, 7)
    assert [answer.wait(), answer.wait(AMPLE_S), answer.wait(0)] == [7, 7, 7]
    giving.join()


def test_what_failed_raises_its_error_each_time() -> None:
    answer: OneShot[int] = OneShot()
    error = KeyError("gone")
    answer.give(error=error)
    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            answer.wait()
        assert caught.value is error


class Held:
    """What a caller has in its frame."""


def fails_for(wait: Callable[[], object]) -> weakref.ref[Held]:
    held = Held()
    with contextlib.suppress(KeyError):  # pytest would keep the error
        wait()
        raise AssertionError
    return weakref.ref(held)


async def fails() -> None:
    raise KeyError


def test_an_error_keeps_no_frame_of_those_that_waited() -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def wait() -> None:
        answer: OneShot[int] = OneShot()
        answer.give(error=KeyError("gone"))
        try:
            answer.wait()
        finally:
            answer.forget()

    gc.collect()
    gc.disable()
    try:
        assert fails_for(wait)() is None
        assert fails_for(lambda: run_on(loop, fails))() is None
    finally:
        gc.enable()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_several_threads_may_wait() -> None:
    answer: OneShot[int] = OneShot()
    seen: list[int] = []
    waiting = [threading.Thread(target=lambda: seen.append(answer.wait())) for _ in range(4)]
    for thread in waiting:
        thread.start()
    answer.give(3)
    for thread in waiting:
        thread.join()
    assert seen == [3] * 4


@pytest.fixture
def interrupting() -> Iterator[None]:
    def raised(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, raised)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


@pytest.mark.full
@pytest.mark.interrupts
@pytest.mark.usefixtures("interrupting")
def test_an_interrupted_wait_leaves_it_to_be_given() -> None:
    rng = random.Random(0)
    for _ in range(200):
        answer: OneShot[int] = OneShot()
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            signal.setitimer(signal.ITIMER_VIRTUAL, rng.uniform(1e-6, 1e-3))
            while True:
                with contextlib.suppress(TimeoutError):
                    answer.wait(0)
        giving = given_by_another_thread(answer, 5)
        assert answer.wait(AMPLE_S) == 5
        giving.join()


@pytest.mark.parametrize("deaths", [0, 2])
def test_a_thread_that_dies_as_it_begins_is_replaced(deaths: int) -> None:
    given: OneShot[threading.Thread] = OneShot()
    with dying(deaths):
        thread = start_thread("mine", lambda: given.give(threading.current_thread()))
    assert given.wait(AMPLE_S) is thread


def test_threads_that_all_die_as_they_begin_are_an_error() -> None:
    with dying(99), pytest.raises(RuntimeError, match="before it calls a function: mine"):
        start_thread("mine", print)


@contextlib.contextmanager
def dying(deaths: int) -> Iterator[None]:
    """Let so many threads die before their function, as a tracer does that cannot be installed."""

    def trace(*_: object) -> None:
        nonlocal deaths
        deaths -= 1
        if deaths >= 0:
            raise RuntimeError("Cannot install a trace function")

    previous, hook = threading.gettrace(), threading.excepthook
    threading.settrace(trace)
    threading.excepthook = lambda _: None
    try:
        yield
    finally:
        threading.settrace(previous)  # type: ignore[arg-type]
        threading.excepthook = hook
