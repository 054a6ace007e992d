"""Puts the values of rows where they belong: into their task's batch, or among its values.

Rows that remote workers compute (processes, or actors on other nodes) are requested before. A
request has the inputs of rows, or their indices in the source, and their addresses. Its answer lies
in the channel's memory, which is free again when it was taken from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stoker.basics import pytree
from stoker.basics.buffers import Recycler
from stoker.basics.signals import pass_on
from stoker.batching.builder import Columns, Misfits
from stoker.engine.work.step import REJECTED, Failure
from stoker.engine.work.work import Work
from stoker.engine.workers.requests import GivenUp, Request
from stoker.engine.workers.tasks import Task
from stoker.engine.workers.threads import WorkerPool


@dataclass(frozen=True)
class RowWriter:
    """Puts the values of rows where they belong.

    Attributes:
        work: the segment's work; it names the batch in errors.
        worker_pool: the workers.
    """

    work: Work
    worker_pool: WorkerPool

    def deliver(self, task: Task, start: int, values: list[Any], ns: list[int]) -> None:
        """Put values, or failures, in rows from ``start`` on."""
        if task.builder is None:
            if self.work.segment.behind.into_pool:  # a small view would keep a large array alive
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
        if self.work.segment.batch is None:
            task.values[row] = failure
        else:
            task.failed.setdefault(row, failure)


@dataclass(frozen=True, eq=False)
class RemoteRows:
    """Rows of a task that a remote worker computes.

    Attributes:
        writer: puts values where they belong.
        own_work: returns the calling thread's version of the work, which does the rows if no remote
            worker is left.
        recycler: the owner of the batches' memory.
        task: has the rows.
        remote: runs requests.
        ns: the counters of the segment.
    """

    writer: RowWriter
    own_work: Callable[[], Work]
    recycler: Recycler
    task: Task
    remote: Any
    ns: list[int]

    def compute(self, start: int, stop: int, values: list[Any] | None) -> None:
        """Compute rows ``start .. stop - 1`` of these inputs; None: the remote worker has them."""
        task = self.task
        failed = {i: v for i, v in enumerate(values or []) if type(v) is Failure}
        for i, failure in failed.items():  # failures are not sent
            if self._is_batched:
                return self.writer.fail(task, start + i, failure)
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
        return self.writer.work.segment.batch is not None

    def _exchange(self, start: int, request: Request, failed: dict[int, Failure]) -> None:
        """Have the remote worker do rows from ``start`` on, but for one that is given up.

        ``failed`` are failures among the inputs, by their numbers in the request.
        """
        try:
            with self.remote.run(request) as answered:
                if answered is None:  # no remote worker is left
                    return self._run_here(start, request, failed)
                answer, spent = answered
                for i, each in enumerate(spent):
                    self.ns[i] += each
                self._take(start, request, answer, failed)
        except GivenUp:
            watch = self.writer.worker_pool.watch
            assert watch is not None  # which alone ends processes
            verdict = watch.verdict()
            if verdict is None:  # the process was ended for what another thread had asked
                return self._exchange(start, request, failed)
            row, failure = verdict
            self.writer.fail(self.task, row, failure)
            if self._is_batched:
                return
            at = row - start
            for some in (slice(0, at), slice(at + 1, len(request.places))):
                if request.places[some]:
                    those = {i - some.start: each for i, each in failed.items() if i >= some.start}
                    self._exchange(start + some.start, request.part(some), those)

    def _take(self, start: int, request: Request, answer: Any, failed: dict[int, Failure]) -> None:
        """Copy the values of rows from an answer."""
        task, work, rows = self.task, self.writer.work, len(request.places)
        if isinstance(answer, Columns):
            self.writer.put(task, start, task.builder.put_columns, answer, self.ns)
        elif isinstance(answer, Misfits):
            self.writer.put(task, start, task.builder.put, pytree.deep_copy(answer), self.ns)
            return
        elif type(answer) is Failure:
            for row in range(start, start + (1 if self._is_batched else rows)):
                self.writer.fail(task, row, work.add_index(answer))
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
            self.task.values = [self.recycler.copy(batch)]
        except Exception as error:
            pass_on(error)
            number, places = self.task.number, self.task.places
            failure = self.writer.work.batch_failure(error, number, places)
            self.writer.fail(self.task, 0, failure)

    def _keep_value(self, value: Any, place: int) -> Any:
        try:
            return pytree.deep_copy(value)
        except Exception as error:
            pass_on(error)
            return self.writer.work.send_failure(error, place)

    def _run_here(self, start: int, request: Request, failed: dict[int, Failure]) -> None:
        """Do in this thread what was to be sent; ``values`` are stored items, or a reader's."""
        work = self.own_work()
        # Nobody has declared the code thread-safe.
        with self.writer.worker_pool.one_at_a_time, work.seeding(with_global=False):
            if request.values is None:
                assert request.indices is not None
                values = work.read(request.indices, request.places, self.ns)
            else:
                is_stored = self.writer.work.fetcher.reader is None
                values = [
                    failed.get(i) or (self.recycler.copy(value) if is_stored else value)
                    for i, value in enumerate(request.values)
                ]
            work.apply(values, request.places, request.uses, self.ns)
            self.writer.deliver(self.task, start, values, self.ns)
