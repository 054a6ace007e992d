"""What a thread waits for comes, however the wait was interrupted."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
from collections.abc import Iterator

import pytest

from stoker.basics.future import OneShot

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
