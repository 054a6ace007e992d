"""Hedged requests: one that lasts too long is made a second time, and the first answer counts.

Source: Dean and Barroso, "The Tail at Scale", CACM 2013, section "Within-request short-term
adaptations".
"""

from __future__ import annotations

import asyncio
import bisect
import time
from collections import deque
from collections.abc import Awaitable, Callable

# The paper hedges behind the 95th percentile and adds 5 % of load; behind the 99th, 1 %.
_PERCENTILE = 0.99
# Twice what the percentile asks for: a storage that becomes slow as a whole is not asked for more.
_MOST_FRACTION = 0.02
# The fewest durations that have a 99th percentile.
_LEAST_SEEN = 100
# A storage's speed changes over hours; these are the last seconds to minutes. Chosen, not measured.
_REMEMBERED = 1000


class Durations:
    """The last durations of some requests, and their 99th percentile."""

    def __init__(self) -> None:
        self._by_age: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, seconds: float) -> None:
        if len(self._by_age) == _REMEMBERED:
            del self._sorted[bisect.bisect_left(self._sorted, self._by_age.popleft())]
        self._by_age.append(seconds)
        bisect.insort(self._sorted, seconds)

    def limit_s(self) -> float | None:
        """Return the 99th percentile in seconds, or None of too few durations."""
        count = len(self._sorted)
        return self._sorted[int(_PERCENTILE * (count - 1))] if count >= _LEAST_SEEN else None


class Hedge:
    """Makes requests, and those that last too long a second time. One event loop calls it.

    A request lasts too long beyond the 99th percentile of the last requests for as many bytes
    (within a factor of two). Second requests are at most 2 % of all.

    Attributes:
        hedged: how many requests were made a second time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.hedged = 0
        self._requests = 0
        self._seen: dict[int, Durations] = {}
        self._clock = clock

    async def request(self, attempt: Callable[[], Awaitable[bytes]], nbytes: int) -> bytes:
        """Return the first answer; raise the first failure if no request succeeds."""
        seen = self._seen.setdefault(max(nbytes, 0).bit_length(), Durations())
        self._requests += 1
        began = self._clock()
        tasks = [asyncio.ensure_future(_call(attempt))]
        try:
            limit_s = seen.limit_s()
            if limit_s is not None:
                await asyncio.wait(tasks, timeout=limit_s)
                if not tasks[0].done() and self.hedged + 1 <= _MOST_FRACTION * self._requests:
                    self.hedged += 1
                    tasks.append(asyncio.ensure_future(_call(attempt)))
            answer = await _first_answer(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        seen.add(self._clock() - began)
        return answer


async def _call(attempt: Callable[[], Awaitable[bytes]]) -> bytes:
    return await attempt()


async def _first_answer(tasks: list[asyncio.Task[bytes]]) -> bytes:
    failed: list[asyncio.Task[bytes]] = []
    running = set(tasks)
    while running:
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.exception() is None:
                return task.result()
            failed.append(task)
    return failed[0].result()
