"""Backoff: when to try again a member that did not answer."""

from __future__ import annotations

import time
from collections.abc import Callable

# The first wait; it doubles each time. A node that was only busy is tried again within a batch or
# two. Chosen, not measured.
FIRST_S = 0.1
# The longest wait, and so the longest time for which a node that is back goes unused. Each try
# costs one connection. Chosen, not measured.
LAST_S = 5.0


class Backoff:
    """Remembers whether a member answers, and when to try it again if it does not.

    Args:
        clock: returns the time, in seconds.

    Attributes:
        is_alive: whether the last try succeeded.
        due_s: the time of the next try by the clock, if the last one failed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._delay_s = FIRST_S
        self.is_alive = False
        self.due_s = clock()

    @property
    def is_due(self) -> bool:
        """True if the member does not answer and it is time to try again."""
        return not self.is_alive and self._clock() >= self.due_s

    def succeeded(self) -> None:
        """Record that the member answered."""
        self.is_alive = True
        self._delay_s = FIRST_S

    def failed(self) -> None:
        """Record a failed try. The wait before the next try doubles, up to 5 s."""
        self.is_alive = False
        self.due_s = self._clock() + self._delay_s
        self._delay_s = min(LAST_S, 2 * self._delay_s)
