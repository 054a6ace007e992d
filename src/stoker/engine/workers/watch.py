"""Watches for workers that are stuck in an example: ``.workers(patience=)``.

A thread looks at each worker's ``Spot`` some times within the patience. A stage's work on one
example that has not ended within it is warned of, by the consumer; after ``GIVES_UP`` times the
patience the example is given up. It becomes a failure as if the stage had raised TimeoutError, so
that skip budgets apply.

- A process is killed, and another takes its place. What else it had to do is done again.
- A thread cannot be ended. It is left, another takes its place, and what it may yet return is
  dropped: it delivers nothing without asking (``may_deliver``).

Threads do their rows one by one, so that it is known which one is stuck; others do the rest. Time
is counted in looks: while this whole process is stopped, nobody loses patience.
"""

from __future__ import annotations

import linecache
import re
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from stoker.basics.future import start_thread
from stoker.basics.resources import format_seconds
from stoker.basics.warn import is_inside_library, is_inside_package
from stoker.engine.work.failure import Failure
from stoker.engine.work.spot import CELLS, HERE, IDLE, Spot
from stoker.errors import StageError

GIVES_UP = 4
"""The multiple of the patience after which an example is given up. A storage client that waits for
60 s, as many do, may try twice within a patience of 30 s. Chosen, not measured."""
# Looks within a patience: a warning comes late by an eighth of it at most.
_LOOKS = 8
# The frames of a stack that are shown: the innermost.
_FRAMES = 12
# How long the watching thread's end is waited for; not for ever, as in cache/writer.py.
_END_S = 5.0


class WatchedPool(Protocol):
    """The pool of workers that a watch asks to act; the last three with its lock held."""

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    @property
    def closed(self) -> bool: ...

    def fail(self, error: BaseException) -> None: ...

    def wake_consumer(self) -> None: ...

    def leave(self, number: int, stuck: threading.Thread) -> None: ...

    def give_up(self, task: Any, rows: range, row: int, stage: int, failure: Failure) -> None: ...


class Job:
    """What one worker thread has claimed, and where it is.

    Attributes:
        is_given_up: whether the thread is left, and must deliver nothing.
        verdict: the row on which a process was ended, and the row's failure.
    """

    def __init__(self, number: int, task: Any, rows: range, remote: Any, spot: Spot) -> None:
        self.number = number
        self.task = task
        self.rows = rows
        self.remote = remote
        self.thread = threading.current_thread()
        self.is_given_up = False
        self.verdict: tuple[int, Failure] | None = None
        self._spot = spot
        self._slot = 0 if remote is None else remote.number
        self.mark: tuple[int, ...] = ()
        self.waited_ns = 0
        self.is_told = False

    def look(self, passed_ns: int) -> None:
        """Count the time since the last look, unless the worker has moved on."""
        mark = tuple(self._spot.cells)
        if mark != self.mark or mark[1] == IDLE or mark[3] != self._slot:
            self.mark, self.waited_ns, self.is_told = mark, 0, False
        else:
            self.waited_ns += passed_ns

    @property
    def has_moved(self) -> bool:
        return tuple(self._spot.cells) != self.mark

    @property
    def stage(self) -> int:
        return self.mark[1]

    @property
    def row(self) -> int:
        """The row of the task that the worker is at."""
        return self.rows.start + self.mark[2]

    def stack(self) -> str:
        """Return the stack of the thread, or of the process' main thread, as text."""
        if self.remote is not None:
            return _text_of(self.remote.stack())
        frame = sys._current_frames().get(self.thread.ident or 0)
        return _text_of(traceback.extract_stack(frame) if frame is not None else [])

    @property
    def worker(self) -> str:
        return f"thread {self.thread.name}" if self.remote is None else str(self.remote.name)


class Watch:
    """Watches the workers of a pool.

    Args:
        pool: the pool.
        patience_ns: how long a stage may work on one example.

    Attributes:
        left: how many threads were left; ``replaced``: how many processes were ended.
        warnings: what the consumer is to warn of.
    """

    def __init__(self, pool: WatchedPool, patience_ns: int) -> None:
        self.left = self.replaced = 0
        self.warnings: list[str] = []
        self._pool: WatchedPool | None = pool
        self._lock = pool.lock
        self._patience_ns = patience_ns
        self._jobs: dict[int, Job] = {}
        self._running = threading.Lock()  # no Event: Ctrl-C could leave the lock in it held
        self._running.acquire()
        self._thread: threading.Thread | None = None

    @property
    def _of_pool(self) -> WatchedPool:
        assert self._pool is not None
        return self._pool

    def open(self) -> None:
        """Begin to watch."""
        self._thread = start_thread("stoker-watch", self._run)

    def close(self) -> None:
        """End watching."""
        if self._running.locked():
            self._running.release()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_END_S)
        self._pool = None  # it refers to this

    def begin(self, number: int, task: Any, rows: range, remote: Any) -> Job:
        """Watch what the calling worker thread does next."""
        if remote is None and HERE.spot is None:
            HERE.spot = Spot([0] * CELLS)
        spot = HERE.spot if remote is None else remote.spot
        assert spot is not None
        if remote is None:
            spot.leave()
        job = Job(number, task, rows, remote, spot)
        with self._lock:
            self._jobs[threading.get_ident()] = job
        return job

    def end(self, job: Job) -> bool:
        """Stop watching the calling thread; return whether it was left meanwhile."""
        with self._lock:
            if not job.is_given_up:
                self._jobs.pop(threading.get_ident(), None)
            return job.is_given_up

    def may_deliver(self) -> bool:
        """Whether the calling worker may deliver; if so, it is not given up while it does."""
        with self._lock:
            job = self._jobs.get(threading.get_ident())
            if job is None:  # not a worker, or one that was left
                return HERE.spot is None
            if job.remote is None and HERE.spot is not None:
                HERE.spot.leave()
            return True

    def verdict(self) -> tuple[int, Failure] | None:
        """Return the row on which the calling thread's process was ended, once; None: another's."""
        with self._lock:
            job = self._jobs[threading.get_ident()]
            verdict, job.verdict = job.verdict, None
            return verdict

    def look(self, passed_ns: int) -> None:
        """Look at all workers, so many nanoseconds after the last look."""
        with self._lock:
            for job in self._jobs.values():
                job.look(passed_ns)
            late = [job for job in self._jobs.values() if job.waited_ns >= self._patience_ns]
        for job in late:
            if not job.is_told:
                self._tell(job)
            if job.waited_ns >= GIVES_UP * self._patience_ns:
                self._give_up(job)

    def _run(self) -> None:
        period_ns = max(1, self._patience_ns // _LOOKS)
        try:
            while not self._running.acquire(timeout=period_ns / 1e9):
                self.look(period_ns)
        except BaseException as error:
            self._of_pool.fail(error)

    def _failure(self, job: Job, stack: str) -> Failure:
        waited, patience = format_seconds(job.waited_ns / 1e9), self._patience_ns / 1e9
        error = TimeoutError(
            f"no end after {waited} (.workers(patience={patience:g})), in {job.worker}, at\n{stack}"
        )
        failure: Failure = job.task.runner.failure_at(job.task, job.row, job.stage, error)
        return failure

    def _tell(self, job: Job) -> None:
        job.is_told = True
        stack = job.stack()
        error = self._failure(job, stack).error
        assert isinstance(error, StageError)
        waited, end = job.waited_ns / 1e9, GIVES_UP * self._patience_ns / 1e9
        with self._lock:
            if job.has_moved:
                return
            self.warnings.append(
                f"{error.where} has been in {error.stage} for {format_seconds(waited)} (patience: "
                f"{format_seconds(self._patience_ns / 1e9)}), in {job.worker}, at\n{stack}\n"
                f"After {format_seconds(end)} it fails with TimeoutError, which on_error= may skip"
            )
            self._of_pool.wake_consumer()

    def _give_up(self, job: Job) -> None:
        failure = self._failure(job, job.stack())
        with self._lock:
            if job.has_moved or self._of_pool.closed or job.verdict is not None:
                return
            if job.remote is not None:
                self.replaced += 1
                job.verdict = job.row, failure
                job.remote.give_up()
            else:
                self.left += 1
                job.is_given_up = True
                del self._jobs[job.thread.ident or 0]
                self._of_pool.leave(job.number, job.thread)
                self._of_pool.give_up(job.task, job.rows, job.row, job.stage, failure)


def _text_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return a stack as text: the user's part, or the end where it is stoker that waits."""
    if not frames:
        return "  (its stack cannot be read)"
    own = [at for at, each in enumerate(frames) if is_inside_package(each.filename)]
    users = frames[own[-1] + 1 :] if own else frames
    shown = users if any(not is_inside_library(each.filename) for each in users) else frames
    return "".join(traceback.format_list(shown[-_FRAMES:])).rstrip()


_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)')


def read_dump(text: str) -> list[traceback.FrameSummary]:
    """Return the frames of a stack that ``faulthandler`` wrote, the innermost last."""
    frames = [
        traceback.FrameSummary(
            each["file"],
            int(each["line"]),
            each["name"],
            line=linecache.getline(each["file"], int(each["line"])).strip(),
        )
        for each in _FRAME.finditer(text)
    ]
    return frames[::-1]
