"""The start barrier: a feed waits for a number of jobs, or for the jobs of the feeder before it."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Iterable, Iterator, Sequence


class StartBarrier:
    """Delays the first epoch until ``jobs`` jobs have requested it; then ``is_open`` is True.

    Jobs wait at most ``patience_s`` seconds for the others. The barrier registers callables with
    ``selector``, for processes that end.
    """

    def __init__(self, jobs: int, patience_s: float, selector: selectors.BaseSelector) -> None:
        self.is_open = False
        self._jobs = jobs
        self._patience_s = patience_s
        self._selector = selector
        self._since_s: float | None = None
        self._missing: dict[int, int] = {}  # pidfds by process id

    @property
    def awaited_jobs(self) -> int:
        """How many jobs must request the first epoch; 0 once it has begun."""
        return 0 if self.is_open else self._jobs

    def wait_for(self, pids: Iterable[int]) -> None:
        """Wait for these processes instead, as long as they live: an earlier feeder served them."""
        if self.is_open:
            return
        self._jobs = 1
        for pid in {*pids} - {*self._missing}:
            with contextlib.suppress(OSError):
                self._missing[pid] = pidfd = os.pidfd_open(pid)
                self._selector.register(pidfd, selectors.EVENT_READ, lambda p=pid: self._forget(p))

    def record_requests(self, pids: Sequence[int]) -> None:
        """Record which processes request an epoch now; open if no other is missing."""
        if self.is_open or not pids:
            return
        if self._since_s is None:
            self._since_s = time.monotonic()
        for pid in pids:
            self._forget(pid)
        is_late = time.monotonic() - self._since_s >= self._patience_s
        if is_late or not (self._missing or len(pids) < self._jobs):
            self.is_open = True
            self.close()

    def deadlines_s(self) -> Iterator[float]:
        """Yield the time at which waiting ends, if a job waits."""
        if not self.is_open and self._since_s is not None:
            yield self._since_s + self._patience_s

    def close(self) -> None:
        """Stop waiting."""
        for pid in list(self._missing):
            self._forget(pid)

    def _forget(self, pid: int) -> None:
        """Stop waiting for one process: it has requested an epoch, or has ended."""
        pidfd = self._missing.pop(pid, -1)
        if pidfd >= 0:
            self._selector.unregister(pidfd)
            os.close(pidfd)
