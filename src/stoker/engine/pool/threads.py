"""Who does the work: the threads of one run, or the consumer itself.

A task is a group of rows (examples of a batch, or items for a pool) that workers claim in
chunks of about a millisecond of measured work. A task becomes ready when the tasks that it needs
are done. Downstream tasks go first, so that the work nearest to the consumer is finished first.
Several workers may write rows of one batch; the last to finish completes it.

How many threads take part is decided by timing: none, one or all, never a number between. The
stream does not depend on it. The decision, ``WorkerPool._decide``:

1. The consumer works inline until a row takes more than 1 ms, or 5 ms were worked in all. If a
   batch then costs more than 1 ms over all segments, all threads start. Otherwise it stays inline,
   and keeps looking. Gathering from arrays releases the GIL: from 0.04 ms a batch on all threads
   take part, without a trial.
2. A trial with all threads: at least 12 pieces and 20 ms of work. If together they kept less than
   half a core busy, they were sleeping (reads, latency), and all stay.
3. Otherwise a trial with one thread. All take part if that made a row at least a tenth faster, else
   one. If a batch had cost less than 1 ms inline, and the better of the two is not clearly faster
   than that, the work goes back to the consumer.

``Autotuner`` keeps the decision, and the cost of each segment, from epoch to epoch. Threads that do
not take part wait on a condition of their own, because they would swallow a call to work.

Guarantees:

- No function of the user runs under ``WorkerPool.lock``, and nobody waits for another lock under
  it.
- Planning ahead runs in a worker, in turns with other work (it holds the GIL that others need). It
  never blocks.
- What breaks a worker is raised by ``wait``. ``close`` never waits for its own thread, nor for
  ever.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

CHUNK_NS = 1_000_000
PROCESS_CHUNK_NS = 20_000_000  # larger: each chunk costs two wake-ups
INLINE_BATCH_NS = 1_000_000
GATHER_INLINE_BATCH_NS = 40_000  # gathering releases the GIL, and so gains from threads sooner
GATHER_AHEAD = 8  # batches: few, so that their memory stays in the caches
GATHER_BATCHES = 4  # gathered in one task, to share what a task costs
_INLINE_TRIAL_NS = 5_000_000
_TRIAL_TASKS = 12
_TRIAL_NS = 20_000_000
_CLEARLY = 0.9  # of the time: what counts as faster
_JOIN_S = 5.0
WORKER_NAME = "stoker-worker"


def is_worker() -> bool:
    """Tell whether the current thread is a worker of some run."""
    return threading.current_thread().name.startswith(WORKER_NAME)


class TaskRunner(Protocol):
    """A kind of task: what to do with its rows, and how long one took so far."""

    depth: int
    cost: CostEstimate

    def run(self, task: Task, start: int, stop: int, remote: Any) -> list[int]:
        """Do rows ``start .. stop - 1``; return the nanoseconds spent in each stage."""
        ...

    def account(self, spent: list[int], rows: int) -> None:
        """Count time that was spent; called under the worker pool's lock."""
        ...

    def complete(self, task: Task) -> None:
        """Finish a task whose rows are all done."""
        ...


class CostEstimate:
    """Measured work of one segment, kept from epoch to epoch."""

    def __init__(self, rows_per_batch: int) -> None:
        self.rows_per_batch = rows_per_batch
        self.row_ns: float | None = None
        self.inline_row_ns: float | None = None  # when the consumer did it, undisturbed
        self.whole = False  # whether a chunk is always a whole batch
        self.light = False  # whether rows are but copied: nothing to be careful about at first
        self.chunk_rows = rows_per_batch  # at most
        self.releases_gil = False  # whether it is all NumPy's own work
        self.inline_ns = INLINE_BATCH_NS  # a batch that costs less is made inline
        self.work_ns = 0
        self.rows = 0

    def chunk(self, target_ns: int) -> int:
        """Return how many rows make a chunk."""
        if self.whole:
            return self.rows_per_batch
        if self.row_ns is None:
            return self.chunk_rows if self.light else 1
        return max(1, min(self.chunk_rows, int(target_ns / max(self.row_ns, 1.0))))

    def batch_ns(self) -> float:
        """Return what a batch costs, 0 while that is not known."""
        return (self.row_ns or 0.0) * self.rows_per_batch

    def note(self, rows: int, work_ns: int) -> None:
        """Take a measurement in."""
        each = work_ns / rows
        if self.row_ns is None or self.rows < 8:  # the first are slow: imports, caches
            self.row_ns = each if self.row_ns is None else min(self.row_ns, each)
        else:
            self.row_ns += 0.2 * (each - self.row_ns)
        self.rows += rows
        self.work_ns += work_ns


class Task:
    """Rows to be done; what comes of them is in ``values``."""

    __slots__ = (
        "batch",
        "builder",
        "claimed",
        "done",
        "done_ns",
        "failed",
        "fresh",
        "indices",
        "items",
        "left",
        "number",
        "ordinals",
        "pending",
        "rows",
        "runner",
        "use_keys",
        "values",
        "waiting",
    )  # fmt: skip

    def __init__(self, runner: Any, number: int, rows: int) -> None:
        self.runner = runner
        self.number = number
        self.rows = rows
        self.claimed = 0
        self.left = rows
        self.pending = 0
        self.done = False
        self.done_ns = 0
        self.waiting: list[Task] | None = None
        self.values: list[Any] = []
        self.builder: Any = None
        self.batch: Any = None
        self.indices: Any = None
        self.items: list[Any] | None = None
        self.ordinals: Any = None
        self.use_keys: list[int] | None = None
        self.fresh = 0
        self.failed: tuple[int, Any] | None = None


class Autotuner:
    """What a pipeline learnt about its own speed; outlives its epochs.

    Attributes:
        active: how many threads take part, or None while that is not decided.
        factor: the echoing factor that ranks agreed on last (see ``rank_sync``), or None.
    """

    def __init__(self) -> None:
        self.active: int | None = None
        self.factor: int | None = None
        self.paces: dict[int, CostEstimate] = {}

    def cost(self, segment: int, rows_per_batch: int) -> CostEstimate:
        """Return the cost of a segment."""
        return self.paces.setdefault(segment, CostEstimate(rows_per_batch))


class WorkerPool:
    """The workers of one run.

    Args:
        threads: how many there may be; with 0 everything is done by the consumer.
        depths: how many segments there are.
        autotuner: the pipeline's memory of its speed.
        remotes: worker processes, as each thread uses one, or None for threads.
    """

    def __init__(
        self, threads: int, depths: int, autotuner: Autotuner, remotes: list[Any] | None = None
    ) -> None:
        self.lock = threading.RLock()
        self._work = threading.Condition(self.lock)
        self._bench = threading.Condition(self.lock)
        self._progress = threading.Condition(self.lock)
        self._ready: list[deque[Task]] = [deque() for _ in range(depths)]
        self.limit = threads
        self._autotuner = autotuner
        self._remotes = remotes
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._broken: BaseException | None = None
        self._chore: Callable[[], bool] | None = None
        self._chore_due = False
        self._chore_waits = False
        self._works_first = False
        self._trial: _Trial | None = None
        if remotes is not None:
            self.active = threads
        elif threads == 0:
            self.active = 0
        else:
            self.active = min(autotuner.active or 0, threads)
        self._undecided = remotes is None and threads > 0 and not self.active
        self.target_ns = CHUNK_NS if remotes is None else PROCESS_CHUNK_NS
        self.remote = remotes is not None

    def work_ahead(self) -> None:
        """Have all threads take part from the beginning, and work before they plan.

        For planning that may block: what is there already is not kept back by it.
        """
        self.active, self._undecided, self._works_first = self.limit, False, True

    def begin(self) -> None:
        """Start the threads that take part from the beginning."""
        if self.active:
            self._start()

    @property
    def closed(self) -> bool:
        """Whether nothing more is to be done."""
        return self._closed

    @property
    def workers(self) -> int:
        """How many threads or processes take part."""
        return self.active // 2 if self.remote else self.active

    @property
    def inline(self) -> bool:
        """Whether the consumer does the work itself."""
        return self.active == 0

    def submit(self, task: Task, needs: Iterable[Task] = ()) -> None:
        """Hand in a task that can start when all of ``needs`` are done.

        Inline, it is done when this returns, unless the work turns out to be worth threads.
        """
        if self.active == 0 and all(need.done for need in needs):
            while self.active == 0:
                if self._do(task, *self._next_rows(task), None):
                    return
        with self.lock:
            for need in needs:
                if not need.done:
                    if need.waiting is None:
                        need.waiting = []
                    need.waiting.append(task)
                    task.pending += 1
            if not task.pending:
                self._make_ready(task)

    def plan_with(self, chore: Callable[[], bool]) -> None:
        """Name what plans a step ahead, for ``plan``, and tells whether another is due."""
        self._chore = chore

    def plan(self) -> None:
        """Have a worker plan ahead, in turns with other work. Inline, do nothing."""
        if self.active:
            with self.lock:
                self._chore_due = True
                self._work.notify()

    def plan_after(self, task: Task) -> bool:
        """Have a worker plan ahead when a task is done; return True if it is done already."""
        with self.lock:
            self._chore_waits = not task.done
            return task.done

    def wait(self, task: Task) -> None:
        """Wait until a task is done. Raise a worker's unexpected error, if there was one.

        All threads may be busy with work upstream of a pool. So a thread that waits for a task
        downstream of it does some of that work itself.
        """
        while not task.done:
            helps = task.runner.depth if self._remotes is None else 0
            with self.lock:
                claim = None
                while not task.done and claim is None:
                    if self._broken is not None:
                        raise self._broken
                    if self._closed:
                        raise RuntimeError("the iterator was closed while it was waited for")
                    if self.active == 0 or helps:
                        claim = self._claim(helps if self.active else 0)
                    if claim is None:
                        self._progress.wait()
            if claim is not None:
                self._do(*claim, None)

    def shut(self) -> None:
        """Begin nothing any more."""
        with self.lock:
            self._closed = True
            for queue in self._ready:
                queue.clear()
            self._call_all()

    def close(self) -> None:
        """End the threads after the example that each is at. Never waits for its own thread."""
        self.shut()
        remotes, self._remotes = self._remotes or [], None
        for remote in remotes:
            remote.stop()
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        for remote in remotes:
            remote.close()
        self._chore = None
        self._broken = None  # its traceback holds all that ran

    def _call_all(self) -> None:
        """Have everybody see what changed."""
        for condition in (self._work, self._bench, self._progress):
            condition.notify_all()

    def _start(self) -> None:
        for number in range(len(self._threads), self.limit):
            thread = threading.Thread(
                target=self._run, args=(number,), name=f"{WORKER_NAME}-{number}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def _run(self, number: int) -> None:
        remote = self._remotes[number] if self._remotes is not None else None
        planned = more = False
        try:
            while True:
                chore = None
                with self.lock:
                    claim = None
                    self._chore_due = self._chore_due or more
                    while claim is None and chore is None:
                        if self._closed:
                            return
                        if number < self.active:
                            # Planning first, but in turns: it holds the GIL that others need.
                            if planned or self._works_first or not self._chore_due:
                                claim = self._claim()
                            if claim is None and self._chore_due:
                                self._chore_due, chore = False, self._chore
                                break
                        if claim is None:
                            # Who does not take part waits apart, or would swallow a call to work.
                            (self._work if number < self.active else self._bench).wait()
                planned = chore is not None
                if claim is not None:
                    self._do(*claim, remote)
                more = chore is not None and chore()
        except BaseException as error:
            with self.lock:
                self._broken = self._broken or error
                self._progress.notify_all()

    def _claim(self, depth: int = 0) -> tuple[Task, int, int] | None:
        for queue in reversed(self._ready[depth:]):
            if queue:
                task = queue[0]
                start, stop = self._next_rows(task)
                if stop == task.rows:
                    queue.popleft()
                return task, start, stop
        return None

    def _next_rows(self, task: Task) -> tuple[int, int]:
        start = task.claimed
        task.claimed = stop = min(task.rows, start + task.runner.cost.chunk(self.target_ns))
        return start, stop

    def _make_ready(self, task: Task) -> None:
        if self._closed:
            return
        self._ready[task.runner.depth].append(task)
        if self.active:
            self._work.notify(self.active if task.rows > 1 else 1)

    def _do(self, task: Task, start: int, stop: int, remote: Any) -> bool:
        """Do rows of a task; return whether it is done."""
        on_trial = self._trial is not None
        began = time.perf_counter_ns()
        cpu = time.thread_time_ns() if on_trial else 0
        runner = task.runner
        spent = runner.run(task, start, stop, remote)
        rows = stop - start
        last = rows == task.rows
        if not last:
            with self.lock:
                task.left -= rows
                last = task.left == 0
        if last:
            runner.complete(task)
        wall = time.perf_counter_ns() - began
        cpu = time.thread_time_ns() - cpu if on_trial else 0
        with self.lock:
            runner.cost.note(rows, wall)
            runner.account(spent, rows)
            if last:
                task.done_ns = began + wall
                self._settle(task)
            if self._undecided:
                self._decide(runner.cost, rows, wall, cpu)
        return last

    def _settle(self, task: Task) -> None:
        task.done = True
        if self._chore_waits:
            self._chore_waits, self._chore_due = False, True
            self._work.notify()
        if task.waiting is not None:
            for waiter in task.waiting:
                waiter.pending -= 1
                if not waiter.pending:
                    self._make_ready(waiter)
            task.waiting = None
        self._progress.notify_all()

    def _decide(self, cost: CostEstimate, rows: int, wall: int, cpu: int) -> None:
        """Choose how many threads take part, from the first measurements (under the lock)."""
        if self.active == 0:
            paces = self._autotuner.paces.values()
            slow = cost.row_ns is not None and cost.row_ns > INLINE_BATCH_NS and cost.rows > 1
            known = slow or sum(p.work_ns for p in paces) > _INLINE_TRIAL_NS
            for each in paces:
                each.inline_row_ns = each.row_ns
            if known and sum(p.batch_ns() for p in paces) > min(p.inline_ns for p in paces):
                self.active = self.limit
                if all(each.releases_gil for each in paces):  # then there is nothing to try
                    self._autotuner.active, self._undecided = self.active, False
                self._start()
                self._call_all()
            return
        trial = self._trial
        if trial is None:
            self._trial = _Trial(self.active)
            return
        trial.note(cost, rows, wall, cpu)
        if not trial.over:
            return
        if trial.threads > 1 and trial.before is None and not trial.idle:
            self._trial = _Trial(1, before=trial)
            self.active = 1
            self._call_all()
            return
        self.active = trial.verdict(self.limit)
        if self.active:
            self._autotuner.active = self.active
            self._undecided = False
        else:  # until a batch turns out to be costly after all
            cost.inline_ns = INLINE_BATCH_NS
        self._trial = None
        self._call_all()


class _Trial:
    """Work measured while a given number of threads took part."""

    def __init__(self, threads: int, before: _Trial | None = None) -> None:
        self.threads = threads
        self.before = before
        self._jobs = 0
        self._wall = 0
        self._cpu = 0
        self._each: dict[int, list[int]] = {}
        self._paces: dict[int, CostEstimate] = {}

    def note(self, cost: CostEstimate, rows: int, wall: int, cpu: int) -> None:
        self._jobs += 1
        self._wall += wall
        self._cpu += cpu
        self._paces[id(cost)] = cost
        sums = self._each.setdefault(id(cost), [0, 0])
        sums[0] += rows
        sums[1] += wall

    @property
    def over(self) -> bool:
        return self._jobs >= _TRIAL_TASKS and self._wall >= _TRIAL_NS

    @property
    def idle(self) -> bool:
        """Whether the threads mostly slept (reads, latency): then more of them always help."""
        return self._cpu < 0.5 / self.threads * self._wall

    def verdict(self, limit: int) -> int:
        """Return how many threads are to take part."""
        shared = self._each.keys() & self.before._each.keys() if self.before else set()
        one = self._batch_ns(self._each.keys())
        best, fastest = limit, one / self.threads
        if self.before is not None and shared:
            one, many = self._batch_ns(shared), self.before._batch_ns(shared)
            best, fastest = self.before.threads, many / self.before.threads
            if fastest > _CLEARLY * one:
                best, fastest = 1, one
        inline = sum((p.inline_row_ns or 0.0) * p.rows_per_batch for p in self._paces.values())
        cheap = 0 < inline < INLINE_BATCH_NS
        return 0 if cheap and fastest > _CLEARLY * inline else best

    def _batch_ns(self, which: Iterable[int]) -> float:
        each, paces = self._each, self._paces
        return sum(each[i][1] / each[i][0] * paces[i].rows_per_batch for i in which)
