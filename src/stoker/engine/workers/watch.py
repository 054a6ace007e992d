"""Watches for workers that are stuck in an example: ``.workers(timeout_s=)``.

A thread looks at each worker's ``WorkerStatus`` now and then. The consumer warns of a stage's work
on one example that takes longer than ``WARNED_FRACTION`` of the timeout. After the timeout:

- A process is ended, and another takes its place. The example becomes a failure as if the stage had
  raised TimeoutError, so that ``max_errors=`` applies. The rest of its work is done again.
- A thread cannot be ended, so the run fails with that error.

Threads do their rows one by one, so that it is known which one is stuck. Time is counted in looks:
while this whole process is stopped, no time passes.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from stoker.basics.future import start_thread
from stoker.basics.resources import format_seconds
from stoker.basics.warn import is_inside_library, is_inside_package
from stoker.engine.work.step import Failure
from stoker.engine.work.worker_status import CELLS, IDLE, WorkerStatus, current_worker
from stoker.errors import StageError

WARNED_FRACTION = 0.25
"""The part of the timeout after which an example is warned of. Chosen, not measured."""
# Looks within that time: a warning comes late by an eighth of it at most.
_LOOKS = 8
# The frames of a stack that are shown: the innermost.
_FRAMES = 12
# How long the watching thread's end is waited for; not for ever, as in cache/writer.py.
_END_S = 5.0


class Job:
    """The rows that a worker thread has claimed, and its position in them.

    Attributes:
        verdict: the row on which a process was ended, and the row's failure.
    """

    def __init__(self, task: Any, rows: range, remote: Any, status: WorkerStatus) -> None:
        self.task = task
        self.rows = rows
        self.remote = remote
        self.thread = threading.current_thread()
        self.verdict: tuple[int, Failure] | None = None
        self._status = status
        self._slot = 0 if remote is None else remote.number
        self.mark: tuple[int, ...] = ()
        self.waited_ns = 0
        self.is_told = False

    def look(self, passed_ns: int) -> None:
        """Count the time since the last look, unless the worker has moved on."""
        mark = tuple(self._status.cells)
        if mark != self.mark or mark[1] == IDLE or mark[3] != self._slot:
            self.mark, self.waited_ns, self.is_told = mark, 0, False
        else:
            self.waited_ns += passed_ns

    @property
    def has_moved(self) -> bool:
        return tuple(self._status.cells) != self.mark

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
            return _text_of(self.remote.process.stack())
        frame = sys._current_frames().get(self.thread.ident or 0)
        return _text_of(traceback.extract_stack(frame) if frame is not None else [])

    @property
    def worker(self) -> str:
        return (
            f"thread {self.thread.name}" if self.remote is None else str(self.remote.process.name)
        )


class Watch:
    """Watches the workers of a pool.

    Args:
        pool: the ``WorkerPool``.
        timeout_ns: how long a stage may work on one example.

    Attributes:
        replaced: how many processes were ended.
        warnings: of these the consumer warns.
    """

    def __init__(self, pool: Any, timeout_ns: int) -> None:
        self.replaced = 0
        self.warnings: list[str] = []
        self._pool = pool
        self._lock = pool.lock
        self._timeout_ns = timeout_ns
        self._warned_ns = max(1, int(WARNED_FRACTION * timeout_ns))
        self._jobs: dict[int, Job] = {}
        self._running = threading.Lock()  # no Event: Ctrl-C could leave the lock in it held
        self._running.acquire()
        self._thread: threading.Thread | None = None

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

    def begin(self, task: Any, rows: range, remote: Any) -> Job:
        """Watch the next work of the calling worker thread."""
        if remote is None and current_worker.status is None:
            current_worker.status = WorkerStatus([0] * CELLS)
        status = current_worker.status if remote is None else remote.status
        assert status is not None
        if remote is None:
            status.leave()
        job = Job(task, rows, remote, status)
        with self._lock:
            self._jobs[threading.get_ident()] = job
        return job

    def begin_request(self, start: int) -> None:
        """The calling thread's next request begins at this row of its task.

        The process numbers rows by request, and a task may take several: what is left of the rows
        behind one that was given up. Nothing that was found out before holds for this request.
        """
        with self._lock:
            job = self._jobs[threading.get_ident()]
            job.rows, job.verdict = range(start, job.rows.stop), None
            job.mark, job.waited_ns, job.is_told = (), 0, False

    def end(self) -> None:
        """Stop watching the calling thread."""
        with self._lock:
            del self._jobs[threading.get_ident()]

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
            # Where they are is read here: a job may begin its next request at any moment.
            late = [
                (job, job.row, job.stage)
                for job in self._jobs.values()
                if job.waited_ns >= self._warned_ns
            ]
        for job, row, stage in late:
            if not job.is_told:
                self._tell(job, row, stage)
            if job.waited_ns >= self._timeout_ns:
                self._give_up(job, row, stage)

    def _run(self) -> None:
        period_ns = max(1, self._warned_ns // _LOOKS)
        try:
            while not self._running.acquire(timeout=period_ns / 1e9):
                self.look(period_ns)
        except BaseException as error:
            self._pool.fail(error)

    def _failure(self, job: Job, row: int, stage: int, stack: str) -> Failure:
        waited, timeout_s = format_seconds(job.waited_ns / 1e9), self._timeout_ns / 1e9
        error = TimeoutError(
            f"no end after {waited} (.workers(timeout_s={timeout_s:g})), in {job.worker}, at\n"
            f"{stack}"
        )
        failure: Failure = job.task.runner.failure_at(job.task, row, stage, error)
        return failure

    def _tell(self, job: Job, row: int, stage: int) -> None:
        job.is_told = True
        stack = job.stack()
        error = self._failure(job, row, stage, stack).error
        assert isinstance(error, StageError)
        waited, end = format_seconds(job.waited_ns / 1e9), format_seconds(self._timeout_ns / 1e9)
        skips = "" if job.remote is None else ", which max_errors= may skip"
        with self._lock:
            if job.has_moved:
                return
            self.warnings.append(
                f"{error.where} has been in {error.stage} for {waited}, in {job.worker}, at\n"
                f"{stack}\nAfter {end} it fails with TimeoutError{skips}"
            )
            self._pool.wake_consumer()

    def _give_up(self, job: Job, row: int, stage: int) -> None:
        failure = self._failure(job, row, stage, job.stack())
        with self._lock:
            if job.has_moved or self._pool.closed or job.verdict is not None:
                return
            if job.remote is None:
                self._pool.fail(failure.error)
            else:
                self.replaced += 1
                job.verdict = row, failure
                job.remote.process.give_up()


def _text_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return a stack as text: the user's part, or the end where it is stoker that waits."""
    if not frames:
        return "  (its stack cannot be read)"
    own = [at for at, each in enumerate(frames) if is_inside_package(each.filename)]
    users = frames[own[-1] + 1 :] if own else frames
    shown = users if any(not is_inside_library(each.filename) for each in users) else frames
    return "".join(traceback.format_list(shown[-_FRAMES:])).rstrip()
