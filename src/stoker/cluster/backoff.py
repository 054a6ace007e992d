"""Backoff: a member that did not answer is tried again, later each time."""

from __future__ import annotations

import time
from collections.abc import Callable

# Doubled each time: a node that was only busy is asked again before the next batch or two.
FIRST_S = 0.1
# So long a node that is back goes unused at most; each try costs one connection.
LAST_S = 5.0


class Backoff:
    """Whether a member answers, and when to try again if it does not.

    Args:
        clock: returns the time, in seconds.

    Attributes:
        is_alive: whether the last try succeeded.
        due_s: the clock's time of the next try, if it failed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._delay_s = FIRST_S
        self.is_alive = False
        self.due_s = clock()

    @property
    def is_due(self) -> bool:
        """Whether it is time to try again."""
        return not self.is_alive and self._clock() >= self.due_s

    def succeeded(self) -> None:
        """Note an answer."""
        self.is_alive = True
        self._delay_s = FIRST_S

    def failed(self) -> None:
        """Note a failed try: the wait before the next try doubles each time, up to 5 s."""
        self.is_alive = False
        self.due_s = self._clock() + self._delay_s
        self._delay_s = min(LAST_S, 2 * self._delay_s)
