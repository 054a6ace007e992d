"""Who is waited for before a feed begins: so many jobs, or all that were served before."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Iterable, Iterator, Sequence


class StartBarrier:
    """The time before the first epoch, for which ``jobs`` must ask; ``is_open`` says it may begin.

    Those who ask wait for others for ``patience_s``. The selector, whose keys' data are called,
    hears of processes that end.
    """

    def __init__(self, jobs: int, patience_s: float, selector: selectors.BaseSelector) -> None:
        self.is_open = False
        self._jobs = jobs
        self._patience_s = patience_s
        self._selector = selector
        self._since_s: float | None = None
        self._missing: dict[int, int] = {}  # process ids: pidfds

    @property
    def awaited_jobs(self) -> int:
        """How many jobs must ask for the first epoch; 0 once it has begun."""
        return 0 if self.is_open else self._jobs

    def wait_for(self, pids: Iterable[int]) -> None:
        """Wait for the processes that were served before, as long as they live, instead."""
        if self.is_open:
            return
        self._jobs = 1
        for pid in {*pids} - {*self._missing}:
            with contextlib.suppress(OSError):
                self._missing[pid] = pidfd = os.pidfd_open(pid)
                self._selector.register(pidfd, selectors.EVENT_READ, lambda p=pid: self._forget(p))

    def note_asking(self, pids: Sequence[int]) -> None:
        """Note which processes ask for an epoch now; open if nobody else is to be waited for."""
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

    def ends_s(self) -> Iterator[float]:
        """Yield when it will have lasted too long, if anybody waits."""
        if not self.is_open and self._since_s is not None:
            yield self._since_s + self._patience_s

    def close(self) -> None:
        """Wait for nobody any more."""
        for pid in list(self._missing):
            self._forget(pid)

    def _forget(self, pid: int) -> None:
        """Wait for a process no more: it came, or it is gone."""
        pidfd = self._missing.pop(pid, -1)
        if pidfd >= 0:
            self._selector.unregister(pidfd)
            os.close(pidfd)
