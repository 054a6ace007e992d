"""The clock of a run: it stands still while it is stopped, and so does who sleeps on it."""

from __future__ import annotations

import threading
import time

from experiments.clock import StoppableClock


def test_a_stopped_clock_loses_that_time() -> None:
    clock = StoppableClock()
    first = clock.now()
    for _ in range(2):
        with clock.stopped():
            stopped = clock.now()
            time.sleep(0.05)
            assert clock.now() == stopped
    assert stopped - first <= clock.now() - first < time.perf_counter() - first - 0.1


def test_a_sleeper_sleeps_on_while_it_is_stopped() -> None:
    clock = StoppableClock()
    sleeping = threading.Thread(target=clock.sleep, args=(0.1,))
    with clock.stopped():
        sleeping.start()
        sleeping.join(0.3)
        assert sleeping.is_alive()
    began = time.perf_counter()
    sleeping.join()
    assert time.perf_counter() - began >= 0.09


def test_no_time_is_no_sleep() -> None:
    clock = StoppableClock()
    with clock.stopped():
        clock.sleep(0.0)
