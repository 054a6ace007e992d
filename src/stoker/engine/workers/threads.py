"""The workers of one run: threads, or the consumer itself.

A task is a group of rows (examples of a batch, or items for a pool) that workers claim in chunks of
about a millisecond of measured work. It is ready when the tasks that it needs are done. Downstream
tasks go first, so that the work nearest to the consumer is finished first. Several workers may
write rows of one batch; the last to finish completes it.

How many threads take part is decided by timing (``tuning``). Threads that do not take part wait on
a condition of their own: on the common one they would swallow a call to work.

Guarantees:

- No function of the user runs under ``WorkerPool.lock``, and nobody waits for another lock under
  it.
- Planning ahead runs in a worker, in turns with other work (it holds the GIL that others need). It
  never blocks.
- An unexpected error in a worker is raised by ``wait``. ``close`` never waits for its own thread,
  nor for ever.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stoker.basics.future import start_thread
from stoker.basics.process import WORKER_NAME
from stoker.basics.resources import ThreadTimer, usable_cores, usable_memory_bytes
from stoker.basics.warn import warn
from stoker.engine.workers.cost import INLINE_BATCH_NS, SAMPLED_NS, TIMED, CostEstimate
from stoker.engine.workers.requests import SLOTS
from stoker.engine.workers.tuning import MOST_SLEEPING, Autotuner
from stoker.engine.workers.watch import Watch
from stoker.stats import ProcessTrial, ThreadTrial

if TYPE_CHECKING:
    from stoker.engine.workers.first_process import FirstProcess  # takes its time to import

# Long beside the tens of us that a claim costs, short beside a batch that several threads share.
# Chosen, not measured.
CHUNK_NS = 1_000_000
# The work of a chunk that does without the GIL: its few waits for the GIL are shared by as many
# rows. Beside a GPU and 14 threads, 18 photographs a chunk brought 1.39 times the examples of 8
# (bench/gpu.py).
_FREE_CHUNK_NS = 50_000_000
# Larger than CHUNK_NS: each chunk of a process costs two wake-ups and a copy, 0.4 ms of processor
# time beside one of torch's batches at 0.1 (bench/users_code.py). A chunk also ends an epoch alone.
PROCESS_CHUNK_NS = 50_000_000
# Examples that are under way for each thread (``SegmentStream.ahead``).
_AHEAD_EACH = 8
# The share of usable memory that the bytes read for these examples may take; decoded images are
# some ten times larger.
_AHEAD_FRACTION = 1 / 64
# As long as a user waits without a message for the examples in progress when a run is closed.
_JOIN_S = 5.0
# Pieces of work before costly code that stays inline is told of, and the least that the cheapest of
# them may take: other programs make pieces longer, and seldom all. Chosen, not measured.
_TOLD_NOTES = 6
_LEAST_OF_COSTLY = 0.25
# Worker processes that are still busy behind an epoch's last output, with examples that nobody
# wants, end if they take longer. Chosen, not measured.
_REST_S = 2.0


def is_worker() -> bool:
    """True if the calling thread is a worker of some run."""
    return threading.current_thread().name.startswith(WORKER_NAME)


@dataclass(slots=True, eq=False, repr=False)
class Task:
    """Rows to compute; their values go into ``values``.

    Attributes:
        runner: computes the rows, and has their cost (``segments.runner``).
        claimed, finished: the numbers of rows that workers have begun, and have finished.
        pending: the number of unfinished tasks that this one needs; ``waiting``: the tasks that
            need this one.
        done_ns: when it was done, by ``time.perf_counter_ns``.
        builder, batch: where its rows are written, if they make a batch.
        indices, items: the inputs of its rows: indices of examples in the source, or items.
        places, uses: the addresses of its rows (``Item``).
        failed: the failures of rows of its batches.
        kept: stored items whose uses end with the task, as it may be made again until then.
    """

    runner: Any
    number: int
    rows: int
    claimed: int = 0
    finished: int = 0
    pending: int = 0
    done: bool = False
    done_ns: int = 0
    waiting: list[Task] | None = None
    values: list[Any] = field(default_factory=list)
    builder: Any = None
    batch: Any = None
    indices: Any = None
    items: list[Any] | None = None
    places: Any = None
    uses: list[int] | None = None
    failed: dict[int, Any] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)


class TaskQueue:
    """Tasks that are ready, and those that wait for others.

    Called under the worker pool's lock, but for ``next_rows`` of the only thread.

    Args:
        depths: the number of segments.
        target_ns: the work of a chunk that is sent to a process.
    """

    def __init__(self, depths: int, target_ns: int) -> None:
        self._target_ns = target_ns
        self._ready: list[deque[Task]] = [deque() for _ in range(depths)]
        self._is_closed = False

    def close(self) -> None:
        """Drop all tasks; later ones never become ready."""
        self._is_closed = True
        for queue in self._ready:
            queue.clear()

    def add(self, task: Task, needs: Iterable[Task]) -> bool:
        """Add a task; return whether it is ready: all tasks of ``needs`` are done."""
        for need in needs:
            if not need.done:
                if need.waiting is None:
                    need.waiting = []
                need.waiting.append(task)
                task.pending += 1
        return self._is_ready(task)

    def settle(self, task: Task) -> list[Task]:
        """Return the tasks that are ready now that this one is done."""
        waiting, task.waiting = task.waiting or [], None
        for waiter in waiting:
            waiter.pending -= 1
        return [waiter for waiter in waiting if self._is_ready(waiter)]

    def _is_ready(self, task: Task) -> bool:
        if task.pending or self._is_closed:
            return False
        self._ready[task.runner.depth].append(task)
        return True

    def claim(self, active: int, depth: int = 0) -> tuple[Task, range] | None:
        """Claim rows of a task of at least this depth; ``active`` threads take part."""
        for queue in reversed(self._ready[depth:]):
            if queue:
                task = queue[0]
                rows = self.next_rows(task, active)
                if rows.stop == task.rows:
                    queue.popleft()
                return task, rows
        return None

    def next_rows(self, task: Task, active: int) -> range:
        """Claim the next rows of a task."""
        start, cost = task.claimed, task.runner.cost
        target_ns = self._target_ns if task.runner.is_sent else CHUNK_NS
        rows = task.rows if cost.whole else cost.chunk(target_ns)
        if cost.releases_gil:
            # A chunk is read, cropped, and copied in one call each, without the GIL, which a call
            # waits for at its end: with many threads that took longer than the work (bench/gpu.py).
            # A thread that ends its share of a batch goes on with the next one.
            rows = max(rows, min(task.rows // max(1, active), cost.chunk(_FREE_CHUNK_NS)))
        # A short rest goes with it: an image of 32 x 32 takes a tenth less time.
        left = task.rows - start
        task.claimed = stop = start + (rows if left > rows + rows // 2 else left)
        return range(start, stop)


class WorkerPool:
    """The workers of one run.

    Args:
        threads: the most threads; with 0 the consumer does everything.
        depths: the number of segments.
        autotuner: the measured speeds of the pipeline.
        remotes: the slots of worker processes, as many as threads, or a single remote worker for
            all threads; None if threads do the work themselves.
        threads_each: the number of threads that use one remote worker.
        grows: whether the pool may add threads while its threads mostly sleep.
        rest: keeps idle worker processes for another epoch; False if they cannot stay.
        first: a first worker process, which makes batches alone until their cost is known.
        stays_inline: whether the consumer does everything, whatever it costs.

    Attributes:
        one_at_a_time: held while a thread works in place of a remote worker, as none is left.
        tells_of_cost: tells the user that work that stays inline is costly; None if there is no
            need to.
        is_whole: whether the consumer has all outputs of its epoch.
        watch: tells which workers are stuck; None without ``.workers(timeout_s=)``.
    """

    def __init__(
        self,
        threads: int,
        depths: int,
        autotuner: Autotuner,
        remotes: list[Any] | None = None,
        *,
        threads_each: int | None = None,
        grows: bool = False,
        rest: Callable[[list[Any]], bool] | None = None,
        first: FirstProcess | None = None,
        stays_inline: bool = False,
    ) -> None:
        self.tells_of_cost: Callable[[], None] | None = None
        self._costs: set[CostEstimate] = set()
        self._first = first
        self._stays_inline = stays_inline
        self.watch: Watch | None = None
        self.lock = threading.RLock()
        self.one_at_a_time = threading.Lock()
        self._work = threading.Condition(self.lock)
        self._bench = threading.Condition(self.lock)
        self._progress = threading.Condition(self.lock)
        self.target_ns = CHUNK_NS if remotes is None and first is None else PROCESS_CHUNK_NS
        self._queue = TaskQueue(depths, self.target_ns)
        self.limit = threads
        self._remotes = remotes
        self._free_slots = list(remotes or ())
        self._requests: Counter[Any] = Counter()  # under way, of each process
        self._rest = rest
        self.is_whole = self.closed = False
        self._autotuner = autotuner
        self._threads: list[threading.Thread] = []
        self._broken: BaseException | None = None
        self._chore: Callable[[], bool] | None = None
        self._chore_due = False
        self._chore_waits = False
        self._works_first = False
        is_alone = stays_inline or first is not None
        self._tuning: Autotuner | None = None
        if remotes is not None:
            self.active = threads
        else:
            self.active = 0 if is_alone else min(autotuner.active, threads)
            if threads and not is_alone and not autotuner.is_settled:
                self._tuning = autotuner
                autotuner.begin(threads, self._may_grow if grows else None)
                self.active = autotuner.active
        self.remote = remotes is not None
        self._threads_each = threads_each or (1 if remotes is None else SLOTS)
        self._untimed_ns = 0
        self._began_ns = time.perf_counter_ns()
        self._worked_ns = 0  # of remote workers
        self._waited_ns = self._waiting_since_ns = 0

    def work_ahead(self) -> None:
        """Have all threads take part from the beginning, and work before they plan.

        For plans that may block, so that tasks that are ready do not wait behind planning.
        """
        if self._first is None:
            self.take_all()
        self._works_first = True

    def take_all(self) -> None:
        """Have all threads take part from the beginning.

        For pipelines in which the consumer must not be held up by an example that it makes itself.
        """
        if self._first is not None:
            self._start_processes(self._first)
        elif not self._stays_inline:
            self.active, self._tuning = self.limit, None

    def watch_over(self, timeout_ns: int) -> None:
        """Watch for workers that are stuck."""
        self.take_all()
        self.watch = Watch(self, timeout_ns)

    def begin(self) -> None:
        """Start the threads that take part from the beginning; the consumer calls this."""
        if self.active:
            self._start()
        if self.watch is not None:
            self.watch.open()

    @property
    def workers(self) -> int:
        """How many threads or processes take part."""
        return self.active // self._threads_each

    @property
    def thread_trial(self) -> ThreadTrial | None:
        """The result of the last trial of threads; None before any."""
        speedup = self._autotuner.speedup
        if speedup is None or self.remote:
            return None
        return ThreadTrial(self.limit, usable_cores(), speedup)

    @property
    def process_trial(self) -> ProcessTrial | None:
        """What a first worker process showed of the user's code; None without one."""
        return self._autotuner.process_trial

    @property
    def inline(self) -> bool:
        """Whether the consumer does the work itself."""
        return self.active == 0

    @property
    def is_trying(self) -> bool:
        """Whether a first worker process makes all batches, until their cost is known."""
        return self._first is not None

    def submit(self, task: Task, needs: Iterable[Task] = ()) -> None:
        """Add a task, which starts when all tasks of ``needs`` are done.

        Inline, the task is done when this returns, unless it shows that threads are worth it.
        """
        if self.active == 0 and all(need.done for need in needs):
            while self.active == 0:
                if self._do_here(task, self._queue.next_rows(task, 0)):
                    return
        with self.lock:
            if self._queue.add(task, needs):
                self._call_for(task)

    def plan_with(self, chore: Callable[[], bool]) -> None:
        """Set the function that plans one step ahead, and returns whether to plan another."""
        self._chore = chore

    def plan(self) -> None:
        """Ask a worker to plan ahead, in turns with other work. Inline, do nothing."""
        if self.active:
            with self.lock:
                self._chore_due = True
                self._work.notify()

    def plan_after(self, task: Task) -> bool:
        """Ask a worker to plan ahead once a task is done; return True if it is done already."""
        with self.lock:
            self._chore_waits = not task.done
            return task.done

    def resize(self, threads: int, *, threads_each: int) -> None:
        """Set the number of threads, after remote workers have joined or left."""
        with self.lock:
            if self.closed or (threads, threads_each) == (self.active, self._threads_each):
                return
            self.active, self._threads_each = threads, threads_each
            self.limit = max(self.limit, threads)
            self._start()
            self._call_all()

    def waited_ns(self) -> int:
        """Return the time that the consumer has spent waiting for tasks."""
        with self.lock:
            since_ns = self._waiting_since_ns
            return self._waited_ns + (time.perf_counter_ns() - since_ns if since_ns else 0)

    def fail(self, error: BaseException) -> None:
        """Have ``wait`` raise an unexpected error of a worker."""
        with self.lock:
            self._broken = self._broken or error
            self._progress.notify_all()

    def wait(self, task: Task) -> None:
        """Wait until a task is done. Raise a worker's unexpected error, if there was one.

        All threads may be busy with work upstream of a pool. So a thread that waits for a task
        downstream of it does some of that work itself.
        """
        if not task.done:
            self.wait_for_any([task])

    def wait_for_any(self, tasks: list[Task]) -> None:
        """Wait until one of several tasks of a segment is done, as ``wait`` does for one."""
        while not any(task.done for task in tasks):
            can_help = self._remotes is None and self.watch is None
            helps = tasks[0].runner.depth if can_help else 0
            self.warn()
            with self.lock:
                claim = None
                while claim is None and not any(task.done for task in tasks):
                    if self._broken is not None:
                        raise self._broken
                    if self.closed:
                        raise RuntimeError("the iterator was closed while it was waited for")
                    if self.active == 0 or helps:
                        claim = self._queue.claim(self.active, helps if self.active else 0)
                    if claim is None:
                        self._wait_for_progress()
                    if self.watch is not None and self.watch.warnings:
                        break
            if claim is not None:
                self._do_here(*claim)

    def _do_here(self, task: Task, rows: range) -> bool:
        """Have the consumer, which calls this, do rows, or the first worker process for it."""
        first = self._first
        is_done = self._do(task, rows, first)
        if first is not None and (is_costly := first.is_costly()) is not None:
            if is_costly:
                self._start_processes(first)
            else:
                self._first, self.tells_of_cost = None, first.stay_inline()
        return is_done

    def _start_processes(self, first: FirstProcess) -> None:
        """Have all processes take part, which this starts before any thread."""
        self._first = None
        self._remotes = first.start_all()
        self._free_slots = list(self._remotes)
        self.remote, self._threads_each = True, SLOTS
        with self.lock:
            self.active = self.limit = len(self._remotes)
            self._start()
            self._call_all()

    def warn(self) -> None:
        """Give the warnings about workers; the consumer calls this."""
        tell, costs = self.tells_of_cost, self._costs
        if tell is not None and costs and all(each.notes >= _TOLD_NOTES for each in costs):
            batch_ns = sum(each.batch_ns() for each in costs)
            least_ns = sum(each.least_row_ns * each.rows_per_batch for each in costs)
            # Over a millisecond a batch, and not by other programs alone.
            if batch_ns > INLINE_BATCH_NS and least_ns > _LEAST_OF_COSTLY * INLINE_BATCH_NS:
                self.tells_of_cost = None
                tell()
        if self.watch is not None and self.watch.warnings:
            with self.lock:
                messages, self.watch.warnings = self.watch.warnings, []
            for message in messages:
                warn(message)

    def wake_consumer(self) -> None:
        """Wake the consumer, if it waits; call with the lock held."""
        self._progress.notify_all()

    @property
    def replaced(self) -> int:
        """How many processes were ended, as they were stuck."""
        return 0 if self.watch is None else self.watch.replaced

    def _wait_for_progress(self) -> None:
        self._waiting_since_ns = time.perf_counter_ns()
        try:
            self._progress.wait()
        finally:
            self._waited_ns += time.perf_counter_ns() - self._waiting_since_ns
            self._waiting_since_ns = 0

    def shut(self) -> None:
        """Start no further work."""
        with self.lock:
            self.closed = True
            self._queue.close()
            self._call_all()

    def close(self) -> None:
        """End each thread after its current example. Never waits for the calling thread."""
        self.shut()
        elapsed_ns = time.perf_counter_ns() - self._began_ns
        self._autotuner.spare_core(elapsed_ns, self.waited_ns(), self._worked_ns)
        first, self._first = self._first, None
        if first is not None:
            first.end()
        if self.watch is not None:
            self.watch.close()
        remotes, self._remotes = self._remotes or [], None
        self._free_slots = []
        if self._come_to_rest(remotes):
            remotes = []
        for remote in remotes:
            remote.stop()
        self._join(_JOIN_S)
        for remote in remotes:
            remote.close()
        self._chore = self._tuning = None  # both refer to the owner of this pool
        self._broken = None  # its traceback holds all that ran

    def _come_to_rest(self, remotes: list[Any]) -> bool:
        """Have worker processes stay for another epoch, if they can."""
        rest, self._rest = self._rest, None
        try:
            return (
                rest is not None
                and self.is_whole
                and self._join(_REST_S)
                and self._broken is None
                and rest(remotes)
            )
        except BaseException:  # Ctrl-C
            for remote in remotes:
                remote.stop()
            raise

    def _join(self, timeout_s: float) -> bool:
        """Wait for the threads, but for the calling one. False if some are still at work."""
        deadline = time.monotonic() + timeout_s
        others = [each for each in self._threads if each is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in others)

    def _may_grow(self, threads: int, cost: CostEstimate) -> bool:
        """Whether memory allows so many threads."""
        if threads > MOST_SLEEPING:
            return False
        ahead_bytes = threads * _AHEAD_EACH * cost.row_bytes()
        return ahead_bytes <= _AHEAD_FRACTION * usable_memory_bytes()

    def made_here(self, outputs: int, wall: int) -> None:
        """Record how long the consumer, which calls this, took to make outputs."""
        tuning = self._tuning
        if tuning is not None:
            with self.lock:
                tuning.made_here(outputs, wall)

    def _call_all(self) -> None:
        """Wake all waiting threads: the number of threads changed, or the pool closes."""
        for condition in (self._work, self._bench, self._progress):
            condition.notify_all()

    def _start(self) -> None:
        for number in range(len(self._threads), self.active):
            self._threads.append(start_thread(f"{WORKER_NAME}-{number}", self._run, number))

    def _run(self, number: int) -> None:
        planned = more = False
        try:
            while True:
                chore = None
                with self.lock:
                    claim = None
                    self._chore_due = self._chore_due or more
                    while claim is None and chore is None:
                        if self.closed:
                            return
                        if number < self.active:
                            # Planning first, but in turns: it holds the GIL that others need.
                            if planned or self._works_first or not self._chore_due:
                                claim = self._queue.claim(self.active)
                            if claim is None and self._chore_due:
                                self._chore_due, chore = False, self._chore
                                break
                        if claim is None:
                            # Threads that take no part wait apart: they would swallow a call.
                            (self._work if number < self.active else self._bench).wait()
                    remote = None if claim is None else self._take_remote()
                planned = chore is not None
                if claim is not None:
                    self._do(*claim, remote)
                more = chore is not None and chore()
        except BaseException as error:
            self.fail(error)

    def _take_remote(self) -> Any:
        """Return who does the next rows, None for this thread; call with the lock held.

        A second request to a process would wait, perhaps while another has none.
        """
        remotes = self._remotes or ()
        if len(remotes) < 2:
            return remotes[0] if remotes else None
        slot = min(self._free_slots, key=lambda each: self._requests[each.process])
        self._free_slots.remove(slot)
        self._requests[slot.process] += 1
        return slot

    def _give_back(self, remote: Any) -> None:
        """Have a slot free again; call with the lock held."""
        if len(self._remotes or ()) > 1:
            self._free_slots.append(remote)
            self._requests[remote.process] -= 1

    def _call_for(self, task: Task) -> None:
        """Wake threads for a task that is ready."""
        if self.active:
            self._work.notify(self.active if task.rows > 1 else 1)

    def _do(self, task: Task, rows: range, remote: Any) -> bool:
        """Compute rows of a task; return whether the task is done."""
        if self.watch is not None:
            self.watch.begin(task, rows, remote if task.runner.sends(task) else None)
        trial = self._tuning.timed if self._tuning is not None else None
        is_sampled = (
            self._untimed_ns > SAMPLED_NS * self.active and remote is None and self.active > 0
        )
        began = time.perf_counter_ns()
        timer = ThreadTimer() if trial is not None or is_sampled else None
        runner = task.runner
        began_cpu = 0 if self._first is None else time.thread_time_ns()
        count = len(rows)
        spent, is_found = runner.run(task, rows.start, rows.stop, remote)
        last = count == task.rows
        if not last:
            with self.lock:
                task.finished += count
                last = task.finished == task.rows
        if last:
            runner.complete(task)
        if self.watch is not None:
            self.watch.end()
        timed = timer.read_ns() if timer is not None else None
        busy = 0 if timed is None else timed[1]
        wall = time.perf_counter_ns() - began  # reading a clock releases the GIL, and waits for it
        work_ns = wall
        if remote is not None and runner.is_sent:
            work_ns = sum(spent[: runner.work.stages])  # without the way, and the wait for a turn
            if self._first is not None and not is_found:
                handing_ns = time.thread_time_ns() - began_cpu
                self._first.note(runner.depth, runner.cost, count, work_ns, handing_ns, spent)
        if self.tells_of_cost is not None:
            self._costs.add(runner.cost)
        with self.lock:
            self._give_back(remote)
            runner.cost.note(count, work_ns, spent[-1])
            if remote is not None:
                self._worked_ns += work_ns
            self._untimed_ns = 0 if is_sampled else self._untimed_ns + wall
            if is_sampled and timed is not None:
                spent[TIMED] = count, *timed
            runner.account(spent)
            if last:
                task.done_ns = began + wall
                self._settle(task)
            self.note(runner.cost, count, wall, busy, trial, self.waited_ns())
        return last

    def note(self, cost: CostEstimate, rows: int, wall: int, *timed: Any) -> None:
        """Tell the tuning of rows, as ``Autotuner.note``; call with the lock held."""
        tuning = None if self.closed else self._tuning  # it is the next epoch's
        if tuning and tuning.note(cost, rows, wall, *timed):
            self.active = tuning.active
            self._tuning = None if tuning.is_settled else tuning
            self._start()
            self._call_all()

    def _settle(self, task: Task) -> None:
        task.done = True
        if self._chore_waits:
            self._chore_waits, self._chore_due = False, True
            self._work.notify()
        if task.waiting is not None:
            for waiter in self._queue.settle(task):
                self._call_for(waiter)
        self._progress.notify_all()
