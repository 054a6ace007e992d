"""How much of a time the GIL is free."""

from __future__ import annotations

import threading
import time
from typing import Self

# Between two looks: of code that held the GIL 0, 47 and 100 % of its time this found 1, 44 and 94 %
# within 6 ms; with 1 ms between them there were too few.
_PAUSE_S = 0.0002
# By what a sleep that waits for no GIL is too long: the kernel's timer slack, and waking up.
_SLACK_S = 0.0001


class GilProbe:
    """Measures how much of the time within ``with`` other threads could have run Python code.

    A thread sleeps and wakes up, again and again; how much later than planned it gets on is how
    long it waited for the GIL. It calls nobody's code.
    """

    def __init__(self) -> None:
        self._waited_s = self._elapsed_s = 0.0
        self._is_over = False
        self._thread: threading.Thread

    @property
    def free_fraction(self) -> float | None:
        """The share of the time in which the GIL was free; None before any was measured."""
        if not self._elapsed_s:
            return None
        return max(0.0, 1.0 - self._waited_s / self._elapsed_s)

    def __enter__(self) -> Self:
        self._is_over = False
        self._thread = threading.Thread(target=self._look, name="stoker-gil-probe", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over = True
        self._thread.join()

    def _look(self) -> None:
        began = before = time.perf_counter()
        while not self._is_over:
            time.sleep(_PAUSE_S)
            now = time.perf_counter()
            self._waited_s += max(0.0, now - before - _PAUSE_S - _SLACK_S)
            before = now
        self._elapsed_s += before - began
