"""The clock of a run, which can be stopped: networks are evaluated meanwhile, and it costs no time.

Storage sleeps on the same clock. So it gets nothing ahead of the training either.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class StoppableClock:
    """A monotonic clock in seconds. One thread stops it, at most once at a time; all may ask it."""

    def __init__(self) -> None:
        # Since when it is stopped, and for how long it was before: one value, replaced as a whole.
        self._stops: tuple[float | None, float] = (None, 0.0)
        self._goes = threading.Event()
        self._goes.set()

    def now(self) -> float:
        """Return the time in seconds."""
        stopped_at, lost_s = self._stops
        return (time.perf_counter() if stopped_at is None else stopped_at) - lost_s

    def sleep(self, seconds: float) -> None:
        """Sleep until so many seconds of this clock are over."""
        until = self.now() + seconds
        while (left_s := until - self.now()) > 0:
            time.sleep(left_s)
            self._goes.wait()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Have no time pass within a block."""
        stopped_at, (_, lost_s) = time.perf_counter(), self._stops
        self._goes.clear()
        self._stops = (stopped_at, lost_s)
        try:
            yield
        finally:
            self._stops = (None, lost_s + time.perf_counter() - stopped_at)
            self._goes.set()
