"""Runs the tasks of a segment, in workers or inline in the consumer.

All uses of a stored item but the last get a copy; the last gets the item itself. If the first
function only reads items (``basics.buffers``), or they are only stacked into a batch, all uses get
the item itself, and parts of it in the function's result are copied.

What the consumer does with code of the user's may be made again (``OwnThread``). Then
items are kept, and copied for the last use, too, until that is no longer possible.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any

from stoker.basics import pytree
from stoker.basics.buffers import Recycler
from stoker.basics.signals import pass_on
from stoker.batching.builder import Builder, Columns, Misfits, batch_of
from stoker.batching.joining import JoinedBatch, Packed, rows_of
from stoker.batching.user_collate import collate_examples
from stoker.engine.items import EpochCounters, Item
from stoker.engine.segments.own_thread import CannotRepeat, OwnThread
from stoker.engine.work.step import REJECTED, Failure
from stoker.engine.work.work import Work
from stoker.engine.work.worker_status import current_worker
from stoker.engine.workers.cost import CostEstimate
from stoker.engine.workers.requests import GivenUp, Request
from stoker.engine.workers.threads import Task, WorkerPool
from stoker.errors import StageError
from stoker.schedule.batch_bounds import BatchBounds

Places = Callable[[], Sequence[int]]
"""Returns the places of examples. Most batches that are gathered need none."""


@dataclass(eq=False, repr=False)
class SegmentRunner:
    """Runs the tasks of a segment.

    Attributes:
        work: the segment's work, as the consumer does it.
        worker_pool: the workers; its lock guards counts of time and uses.
        depth: the segment's number among the segments of its worker pool.
        cost: the measured cost of the segment.
        group: the number of examples in a batch.
        cuts: which inputs make up an output.
        recycler: the owner of the batches' memory.
        tally: counts time.
        is_sent: whether worker processes or actors do the work, if there are any.
        rows: gathers batches straight from arrays; None if they are made of single examples. If
            gathering holds the GIL, a task is gathered as a whole: threads would only wait for one
            another.
    """

    work: Work
    worker_pool: WorkerPool
    depth: int
    cost: CostEstimate
    group: int
    cuts: BatchBounds
    recycler: Recycler
    tally: EpochCounters
    is_sent: bool

    def __post_init__(self) -> None:
        self.segment = self.work.segment
        self._here = threading.local()
        self._counters = len(self.segment.counters())
        self.rows = None if self.segment.batch_maps and self.is_sent else self.segment.rows
        self._joins_batches = self.segment.joins_batches
        self._stacks_cached = self.segment.stacks_cached
        # Threads call code of users only by their word, and nobody can seed for several at once.
        is_alone = self.is_sent or not self.worker_pool.limit
        self._own_thread = OwnThread() if self.segment.users_code and is_alone else None

    def _own_work(self) -> Work:
        """Return the calling thread's version of the work: its generator is placed at each use."""
        work: Work | None = getattr(self._here, "work", None)
        if work is None:
            work = self._here.work = self.work.for_thread()
        return work

    def allocate(self, task: Task) -> None:
        """Allocate the values of a task."""
        batch = self.segment.batch
        if batch is None:
            task.values = [None] * task.rows
        elif self._joins_batches:
            task.builder = JoinedBatch(self.segment.joins, task.rows, self.recycler)
        elif self.rows is not None:
            if self.rows.releases_gil:
                task.batch = self.rows.allocate(task.rows, self.recycler)
        else:
            task.builder = Builder(task.rows, batch.collate, self.recycler)

    def make_now(self, number: int, indices: Any, places: Places) -> list[Any]:
        """Return outputs from ``number`` on, of examples read at these places, without a task.

        The consumer calls this.
        """
        began, ns = time.perf_counter_ns(), [0] * self._counters

        def make(_: bool) -> list[Any]:
            return self._outputs(self.work, number, indices, places, ns)

        values = self._make(self.work, make, ns)
        with self.worker_pool.lock:
            wall = time.perf_counter_ns() - began
            self.cost.note(len(indices), wall)
            if self.cost.releases_gil:  # so threads may take over from a consumer that is busy
                self.worker_pool.note(self.cost, len(indices), wall)
            self.account(ns)
        return values

    def join_now(self, items: list[Item], size: int) -> list[Any]:
        """Return packed sequences as batches of this size, or ``Failure``s, without a task.

        The consumer calls this.
        """
        began, ns = time.perf_counter_ns(), [0] * self._counters
        values = [item.task.values[item.row] for item in items]
        whole = self._join(values)
        made: list[Any] = [rows_of(whole, at, at + size) for at in range(0, len(values), size)]
        if Failure in {*map(type, values)}:
            for row in reversed(range(len(values))):
                if type(values[row]) is Failure:
                    made[row // size] = values[row]  # the first of a batch stays
        with self.worker_pool.lock:
            wall = time.perf_counter_ns() - began
            ns[self.work.batch_at], ns[self.work.batched_at] = wall, len(values)
            self.cost.note(len(values), wall)
            self.worker_pool.note(self.cost, len(values), wall)
            self.account(ns)
        return made

    def _outputs(
        self, work: Work, number: int, indices: Any, places: Places, ns: list[int]
    ) -> list[Any]:
        """Return outputs from ``number`` on, made of the examples read at these places."""
        values = self._gather_batches(indices, ns) if self.rows is not None else None
        if values is None:
            at_places = places()
            values = work.read(indices, at_places, ns)
            work.apply(values, at_places, None, ns)
            if self.segment.batch is not None:
                values = [
                    self._batch(work, values[at:end], number + i, at_places, at, ns)
                    for i, (at, end) in enumerate(self.cuts.spans(number, len(values)))
                ]
        self._finish(work, values, number, ns, len(indices))
        return values

    def _gather_batches(self, indices: Any, ns: list[int]) -> list[Any] | None:
        """Return batches gathered from arrays; None if an example cannot be read."""
        assert self.rows is not None
        began = time.perf_counter_ns()
        try:
            batch = self.rows.take(indices, self.recycler)
            batches = self.rows.split(batch, self.group)
            nbytes = self.rows.data_bytes(batch)
        except Exception as error:
            pass_on(error)
            return None
        ns[0] = time.perf_counter_ns() - began
        ns[-1] = nbytes
        self._count_gathered(ns, len(indices))
        return batches

    def _batch(
        self,
        work: Work,
        examples: list[Any],
        number: int,
        places: Sequence[int],
        at: int,
        ns: list[int],
    ) -> Any:
        """Return the batch of these examples, or a ``Failure``; their places begin at ``at``."""
        if Failure in {*map(type, examples)}:
            return next(each for each in examples if type(each) is Failure)
        rows = len(examples)
        ns[work.batched_at] += rows
        began = time.perf_counter_ns()
        try:
            collate = work.collate
            if collate is not None:
                work.seed_collate(number)
                return collate_examples(collate, examples)
            return batch_of(examples, self.recycler)
        except Exception as error:
            pass_on(error)
            return work.batch_failure(error, number, places[at : at + rows])
        finally:
            ns[work.batch_at] += time.perf_counter_ns() - began

    def _count_gathered(self, ns: list[int], rows: int) -> None:
        ns[self.work.stages] += rows
        ns[self.work.batched_at] += rows

    def _finish(self, work: Work, values: list[Any], number: int, ns: list[int], rows: int) -> None:
        """Run the maps behind the batching stage over batches from ``number`` on, in place.

        ``rows`` is the number of examples in all of them.
        """
        if self.segment.batch_maps:
            for i, (at, end) in enumerate(self.cuts.spans(number, rows)):
                if type(values[i]) is not Failure:
                    values[i] = work.finish(values[i], number + i, ns, end - at)

    def sends(self, task: Task) -> bool:
        """Whether a remote worker does a task's rows, if there is one; else who claims them."""
        return task.batch is None and self.rows is None and self.is_sent and self.work.worth_sending

    def run(self, task: Task, start: int, stop: int, remote: Any) -> tuple[list[int], bool]:
        """Compute rows ``start .. stop - 1``.

        Return the counters of their segment, and whether a cache had them in place of ``remote``.
        """
        ns, is_found = [0] * self._counters, False
        if task.batch is not None:
            began = time.perf_counter_ns()
            self._gather(task, start, stop)
            ns[0] = time.perf_counter_ns() - began
            ns[-1] = pytree.data_bytes(task.batch) * (stop - start) // task.rows
            self._count_gathered(ns, stop - start)
        elif self.rows is not None:
            work = self._own_work()

            def make(_: bool) -> list[Any]:
                return self._outputs(work, task.number, task.indices, lambda: task.places, ns)

            task.values = self._make(work, make, ns)
        elif remote is not None and self.sends(task):
            found = self._find_cached(task, start, stop, ns)
            is_found = bool(found)
            if is_found:
                self.deliver(task, start, found, ns)
            else:
                sent = self._values_to_send(task, start, stop, ns)
                RemoteRows(self, task, remote, ns).compute(start, stop, sent)
        else:
            work = self._own_work()
            is_watched = self.worker_pool.watch is not None
            for at in range(start, stop) if is_watched else (start,):
                end = at + 1 if is_watched else stop  # so that it is known which one is stuck
                if is_watched and current_worker.status is not None:
                    current_worker.status.at_row(at - start, 0)
                make_rows = functools.partial(self._work_rows, work, task, at, end, ns)
                values = self._make(work, make_rows, ns)
                self.deliver(task, at, values, ns)
                if self._own_thread is not None and task.items is not None:
                    task.kept += task.items[at:end]
            if self.segment.batch is None:
                self._end_kept(task)
        if self.segment.batches_in:  # its stages counted one batch, the only one in the task
            assert task.items is not None
            each, stages = task.items[start].rows, self.work.stages
            ns[stages : 2 * stages] = [batches * each for batches in ns[stages : 2 * stages]]
        return ns, is_found

    def _find_cached(self, task: Task, start: int, stop: int, ns: list[int]) -> list[Any]:
        """Return rows that this host's cache has, if it has all of them; else nothing.

        A process would copy each twice on its way: 3 MB took 8 times the processor time.
        """
        if not self._stacks_cached or self.work.fetcher.reader is not None:
            return []
        return self._own_work().fetcher.find_whole(task.indices[start:stop], ns)

    def deliver(self, task: Task, start: int, values: list[Any], ns: list[int]) -> None:
        """Put values, or failures, in rows from ``start`` on."""
        if task.builder is None:
            if self.segment.behind.into_pool:  # a small view would keep a large array alive
                values = [v if type(v) is Failure else pytree.copy_views(v) for v in values]
            task.values[start : start + len(values)] = values
            return
        for row, value in enumerate(values, start):
            if type(value) is Failure:
                self.fail(task, row, value)
                return
        self.put(task, start, task.builder.put, values, ns)
        ns[self.work.batched_at] += len(values)

    def put(
        self, task: Task, start: int, put: Callable[[int, Any], None], rows: Any, ns: list[int]
    ) -> None:
        """Write rows into a batch by a method of its builder."""
        began = time.perf_counter_ns()
        try:
            put(start, rows)
        except Exception as error:
            pass_on(error)
            self.fail(task, start, self.work.batch_failure(error, task.number, task.places))
        ns[self.work.batch_at] += time.perf_counter_ns() - began

    def fail(self, task: Task, row: int, failure: Failure) -> None:
        """Put a failure in place of a row; of a batch, the first one counts."""
        if self.segment.batch is None:
            task.values[row] = failure
        else:
            task.failed.setdefault(row, failure)

    def _make(self, work: Work, make: Callable[[bool], list[Any]], ns: list[int]) -> list[Any]:
        """Make values, with draws of the user's code that do not depend on who calls it."""
        alone = self._own_thread
        return make(False) if alone is None else alone.make(work, make, ns)

    def _end_kept(self, task: Task) -> None:
        with self.worker_pool.lock:
            for item in task.kept:
                item.end_use()
        task.kept.clear()

    def _work_rows(
        self, work: Work, task: Task, start: int, stop: int, ns: list[int], may_repeat: bool
    ) -> list[Any]:
        copied, keeps = None, self._own_thread is not None
        if task.items is None:
            values = work.read(task.indices[start:stop], task.places[start:stop], ns)
        elif self.segment.joins and not self._joins_batches:
            values = self._joined(task.items[start:stop], keeps=keeps)
        elif self.segment.shares_items:
            values = self._lent_values(task.items[start:stop], keeps=keeps)
            copied = self.recycler.copy
        elif keeps:
            values = [self._kept_value(item, may_repeat) for item in task.items[start:stop]]
        else:
            values = list(map(self.stored_value, task.items[start:stop]))
        uses = task.uses[start:stop] if task.uses is not None else None
        work.apply(values, task.places[start:stop], uses, ns, copied)
        return values

    def _values_to_send(self, task: Task, start: int, stop: int, ns: list[int]) -> list[Any] | None:
        """Return the inputs of rows; None if a remote worker reads them itself."""
        if self.work.fetcher.reader is not None:  # reads go on in this process alone
            return self._own_work().fetcher.fetch(task.indices[start:stop], ns)
        if task.items is None:
            return None
        if self.segment.joins:
            return self._joined(task.items[start:stop])
        return self._lent_values(task.items[start:stop])

    def _join(self, values: list[Any]) -> Packed:
        """Return full sequences as rows; failures leave theirs as they are."""
        batch = JoinedBatch(self.segment.joins, len(values), self.recycler)
        if Failure not in {*map(type, values)}:
            batch.put(0, values)
        else:
            for row, value in enumerate(values):
                if type(value) is not Failure:
                    batch.put(row, [value])
        return batch.finish()

    def _joined(self, items: list[Item], *, keeps: bool = False) -> list[Any]:
        """Return packed sequences, joined; failed ones as they are."""
        values = self._lent_values(items, keeps=keeps)
        rows = starmap(Packed, zip(*self._join(values), strict=True))
        return [
            value if type(value) is Failure else row
            for value, row in zip(values, rows, strict=True)
        ]

    def _gather(self, task: Task, start: int, stop: int) -> None:
        """Gather rows of a task; on an error one by one."""
        assert self.rows is not None
        indices = task.indices[start:stop]
        try:
            self.rows.gather(indices, task.batch, start)
        except Exception as error:
            pass_on(error)
            if stop - start > 1:
                for row in range(start, stop):
                    self._gather(task, row, row + 1)
                return
            (read,) = self.work.fetcher.fetch(indices, [0] * self._counters)
            is_failure = type(read) is Failure
            if not is_failure:
                number, one = task.number + start // self.group, task.places[start:stop]
                read = self.work.batch_failure(error, number, one)
            self.fail(task, start, read)

    def account(self, spent: list[int]) -> None:
        """Add counters to the epoch's; called under the worker pool's lock."""
        self.tally.add(self.segment.at, spent)

    def complete(self, task: Task) -> None:
        """Finish a batch: all its rows are written."""
        if self.segment.batch is None or task.values:
            return
        if task.failed and task.batch is None:
            task.values = [task.failed[min(task.failed)]]
        else:
            task.values = self._completed(self._own_work(), task)
        self._end_kept(task)
        task.batch = task.builder = task.indices = task.items = None

    def _completed(self, work: Work, task: Task) -> list[Any]:
        """Return the batches of a task, whose rows are written."""
        segment, ns = self.segment, [0] * self._counters
        assert segment.batch is not None
        again = False

        def make(_: bool) -> list[Any]:
            nonlocal again
            if again:  # the user's code may have changed the examples, or the batch
                self._make_rows(work, task)
            again = True
            return self._complete_batches(work, task, ns)

        calls = segment.batch_maps or segment.batch.collate is not None
        values = self._make(work, make, ns) if calls else make(False)
        if segment.batch_maps:
            with self.worker_pool.lock:
                self.account(ns)
        return values

    def _make_rows(self, work: Work, task: Task) -> None:
        """Write all rows of a task anew."""
        task.failed = {}
        self.allocate(task)
        if task.batch is not None:
            self._gather(task, 0, task.rows)
            return
        ns = [0] * self._counters
        values = self._work_rows(work, task, 0, task.rows, ns, may_repeat=True)
        self.deliver(task, 0, values, ns)

    def failure_at(self, task: Task, row: int, stage: int, error: Exception) -> Failure:
        """Return the failure of a stage on a row, or on the batch if it works on batches."""
        work = self.work
        name, account = work.stage_at(stage)
        if stage < work.batch_at:
            return work.failure(name, error, task.places[row], account)
        return Failure(StageError(name, error, batch=task.number))

    def _complete_batches(self, work: Work, task: Task, ns: list[int]) -> list[Any]:
        try:
            if task.batch is not None:
                assert self.rows is not None
                values = self.rows.split(task.batch, self.group)
            else:
                work.seed_collate(task.number)
                values = [task.builder.finish(work.collate)]
        except Exception as error:
            pass_on(error)
            values = [work.batch_failure(error, task.number, task.places)]
        for row in sorted(task.failed, reverse=True):
            values[row // self.group] = task.failed[row]  # the first of a batch stays
        if self.segment.batch_maps:
            self._finish(work, values, task.number, ns, task.rows)
        return values

    def _lent_values(self, items: list[Item], *, keeps: bool = False) -> list[Any]:
        """Return stored values themselves; their uses end, unless they are kept."""
        values = [item.task.values[item.row] for item in items]
        if not keeps:
            with self.worker_pool.lock:
                for item in items:
                    item.end_use()
        return values

    def _kept_value(self, item: Item, may_repeat: bool) -> Any:
        """Return a copy of a stored value, whose use does not end yet; as ``stored_value``.

        Raises CannotRepeat where the value of a last use would have to be copied, and cannot.
        """
        value = self._copied_value(item, last_too=may_repeat)
        if may_repeat and type(value) is Failure and item.is_last_use:
            raise CannotRepeat
        return value

    def stored_value(self, item: Item) -> Any:
        """Return a copy of a stored value, for its last use the value itself."""
        value = self._copied_value(item)
        with self.worker_pool.lock:
            item.end_use()
        return value

    def _copied_value(self, item: Item, *, last_too: bool = False) -> Any:
        value = item.task.values[item.row]
        if type(value) is Failure or (item.is_last_use and not last_too):
            return value
        try:
            return self.recycler.copy(value)
        except Exception as error:
            pass_on(error)
            return self.work.copy_failure(error, item.place)


@dataclass(frozen=True, eq=False)
class RemoteRows:
    """Rows of a task that a remote worker computes: a process, or an actor on another node.

    They are requested before. A request has the inputs of rows, or their indices in the source, and
    their addresses. Its answer lies in the channel's memory, which is free again when it was taken
    from there.

    Attributes:
        runner: of the segment, which does the rows if no remote worker is left.
        task: has the rows.
        remote: runs requests.
        ns: the counters of the segment.
    """

    runner: SegmentRunner
    task: Task
    remote: Any
    ns: list[int]

    def compute(self, start: int, stop: int, values: list[Any] | None) -> None:
        """Compute rows ``start .. stop - 1`` of these inputs; None: the remote worker has them."""
        task = self.task
        failed = {i: v for i, v in enumerate(values or []) if type(v) is Failure}
        for i, failure in failed.items():  # failures are not sent
            if self._is_batched:
                return self.runner.fail(task, start + i, failure)
            assert values is not None
            values[i] = REJECTED
        places, whole = task.places[start:stop], stop - start == task.rows
        uses = task.uses[start:stop] if task.uses is not None else None
        indices = None if task.indices is None or values else task.indices[start:stop]
        depth = task.runner.depth
        request = Request(depth, indices, values, places, uses, task.number, whole)
        self._exchange(start, request, failed)

    @property
    def _is_batched(self) -> bool:
        return self.runner.work.segment.batch is not None

    def _exchange(self, start: int, request: Request, failed: dict[int, Failure]) -> None:
        """Have the remote worker do rows from ``start`` on, but for one that is given up.

        ``failed`` are failures among the inputs, by their numbers in the request.
        """
        watch = self.runner.worker_pool.watch
        if watch is not None:
            watch.begin_request(start)
        try:
            with self.remote.run(request) as answered:
                if answered is None:  # no remote worker is left
                    return self._run_here(start, request, failed)
                answer, spent = answered
                for i, each in enumerate(spent):
                    self.ns[i] += each
                self._take(start, request, answer, failed)
        except GivenUp:
            assert watch is not None  # which alone ends processes
            verdict = watch.verdict()
            if verdict is None:  # the process was ended for what another thread had asked
                return self._exchange(start, request, failed)
            row, failure = verdict
            self.runner.fail(self.task, row, failure)
            if self._is_batched:
                return
            at = row - start
            for some in (slice(0, at), slice(at + 1, len(request.places))):
                if request.places[some]:
                    those = {i - some.start: each for i, each in failed.items() if i >= some.start}
                    self._exchange(start + some.start, request.part(some), those)

    def _take(self, start: int, request: Request, answer: Any, failed: dict[int, Failure]) -> None:
        """Copy the values of rows from an answer."""
        task, work, rows = self.task, self.runner.work, len(request.places)
        if isinstance(answer, Columns):
            self.runner.put(task, start, task.builder.put_columns, answer, self.ns)
        elif isinstance(answer, Misfits):
            self.runner.put(task, start, task.builder.put, pytree.deep_copy(answer), self.ns)
            return
        elif type(answer) is Failure:
            for row in range(start, start + (1 if self._is_batched else rows)):
                self.runner.fail(task, row, work.add_index(answer))
            return
        elif self._is_batched:  # a whole batch, its maps done
            self._keep_batch(answer)
        else:
            task.values[start : start + rows] = [
                failed.get(i) or work.add_index(value)
                if type(value) is Failure
                else self._keep_value(value, place)
                for i, (value, place) in enumerate(zip(answer, request.places, strict=True))
            ]
            return
        self.ns[work.batched_at] += rows

    def _keep_batch(self, batch: Any) -> None:
        try:
            self.task.values = [self.runner.recycler.copy(batch)]
        except Exception as error:
            pass_on(error)
            number, places = self.task.number, self.task.places
            failure = self.runner.work.batch_failure(error, number, places)
            self.runner.fail(self.task, 0, failure)

    def _keep_value(self, value: Any, place: int) -> Any:
        try:
            return pytree.deep_copy(value)
        except Exception as error:
            pass_on(error)
            return self.runner.work.send_failure(error, place)

    def _run_here(self, start: int, request: Request, failed: dict[int, Failure]) -> None:
        """Do in this thread what was to be sent; ``values`` are stored items, or a reader's."""
        work = self.runner._own_work()
        # Nobody has declared the code thread-safe.
        with self.runner.worker_pool.one_at_a_time, work.seeding(with_global=False):
            if request.values is None:
                assert request.indices is not None
                values = work.read(request.indices, request.places, self.ns)
            else:
                is_stored = self.runner.work.fetcher.reader is None
                values = [
                    failed.get(i) or (self.runner.recycler.copy(value) if is_stored else value)
                    for i, value in enumerate(request.values)
                ]
            work.apply(values, request.places, request.uses, self.ns)
            self.runner.deliver(self.task, start, values, self.ns)
