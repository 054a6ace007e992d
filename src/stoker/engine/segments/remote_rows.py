"""Rows that remote workers compute: processes, or actors on other nodes.

A request has the inputs of rows, or their indices in the source, and their addresses. Its answer
lies in the channel's memory, which is free again when it was taken from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker.basics import pytree
from stoker.basics.buffers import Recycler
from stoker.basics.signals import pass_on
from stoker.engine.items import EpochCounters
from stoker.engine.segments.delivery import Delivery
from stoker.engine.work.failure import REJECTED, Failure
from stoker.engine.work.work import Work
from stoker.engine.workers.tasks import GivenUp, Request, Task
from stoker.engine.workers.threads import WorkerPool
from stoker.stages.batching.builder import Columns, Misfits


class RemoteRows:
    """Has rows of a segment's tasks computed by remote workers.

    Args:
        work: the segment's work.
        own_work: returns the calling thread's version of it, which does the rows if no remote
            worker is left.
        worker_pool: tells which row a process was ended for.
        delivery: puts values where they belong.
        depth: the segment's number among the segments of its worker pool.
        recycler: the owner of the batches' memory.
        tally: collects random maps that draw from global generators.
    """

    def __init__(
        self,
        work: Work,
        own_work: Callable[[], Work],
        worker_pool: WorkerPool,
        delivery: Delivery,
        depth: int,
        recycler: Recycler,
        tally: EpochCounters,
    ) -> None:
        self._work = work
        self._own_work = own_work
        self._worker_pool = worker_pool
        self._delivery = delivery
        self._depth = depth
        self._recycler = recycler
        self._tally = tally
        self._is_batched = work.segment.batch is not None

    def compute(
        self,
        task: Task,
        rows: range,
        values: list[Any] | None,
        remote: Any,
        ns: list[int],
    ) -> None:
        """Compute rows of a task, of these inputs; None: the remote worker reads them."""
        failed = {i: v for i, v in enumerate(values or []) if type(v) is Failure}
        for i, failure in failed.items():  # failures are not sent
            if self._is_batched:
                self._delivery.fail(task, rows.start + i, failure)
                return
            assert values is not None
            values[i] = REJECTED
        some = slice(rows.start, rows.stop)
        use_keys = task.use_keys[some] if task.use_keys is not None else None
        indices = None if task.indices is None or values else task.indices[some]
        whole = len(rows) == task.rows
        request = Request(
            self._depth, indices, values, task.places[some], use_keys, task.number, whole
        )
        self._exchange(task, rows.start, request, failed, remote, ns)

    def _exchange(
        self,
        task: Task,
        start: int,
        request: Request,
        failed: dict[int, Failure],
        remote: Any,
        ns: list[int],
    ) -> None:
        """Have a remote worker do rows from ``start`` on; those before a row given up, and after.

        ``failed`` are failures among the inputs, by their numbers in the request.
        """
        try:
            with remote.run(request) as answered:
                if answered is None:  # no remote worker is left
                    self._run_here(task, start, request, failed, ns)
                    return
                answer, spent, misdrawn = answered
                self._tally.misdrawn += misdrawn
                for i, each in enumerate(spent):
                    ns[i] += each
                self._take(task, start, request, answer, failed, ns)
        except GivenUp:
            verdict = self._worker_pool.verdict()
            if verdict is None:  # the process was ended for what another thread had asked
                return self._exchange(task, start, request, failed, remote, ns)
            row, failure = verdict
            self._delivery.fail(task, row, failure)
            if self._is_batched:
                return
            at = row - start
            for some in (slice(0, at), slice(at + 1, len(request.places))):
                if request.places[some]:
                    those = {i - some.start: each for i, each in failed.items() if i >= some.start}
                    rest = request.part(some)
                    self._exchange(task, start + some.start, rest, those, remote, ns)

    def _take(
        self,
        task: Task,
        start: int,
        request: Request,
        answer: Any,
        failed: dict[int, Failure],
        ns: list[int],
    ) -> None:
        """Copy the values of rows from an answer."""
        delivery, inputs, count = self._delivery, self._work.inputs, len(request.places)
        if isinstance(answer, Columns):
            delivery.put(task, start, task.builder.put_columns, answer, ns)
            ns[self._work.batched_at] += count
        elif isinstance(answer, Misfits):
            delivery.put(task, start, task.builder.put, pytree.deep_copy(answer), ns)
        elif type(answer) is Failure and self._is_batched:
            delivery.fail(task, start, inputs.add_index(answer))
        elif type(answer) is Failure:
            task.values[start : start + count] = [inputs.add_index(answer)] * count
        elif self._is_batched:  # a whole batch, its maps done
            self._keep_batch(task, answer)
            ns[self._work.batched_at] += count
        else:
            task.values[start : start + count] = [
                failed.get(i) or inputs.add_index(value)
                if type(value) is Failure
                else self._keep_value(value, place)
                for i, (value, place) in enumerate(zip(answer, request.places, strict=True))
            ]

    def _keep_batch(self, task: Task, batch: Any) -> None:
        try:
            task.values = [self._recycler.copy(batch)]
        except Exception as error:
            pass_on(error)
            failure = self._work.batch_failure(error, task.number, task.places)
            self._delivery.fail(task, 0, failure)

    def _keep_value(self, value: Any, place: int) -> Any:
        try:
            return pytree.deep_copy(value)
        except Exception as error:
            pass_on(error)
            return self._work.inputs.send_failure(error, place)

    def _run_here(
        self, task: Task, start: int, request: Request, failed: dict[int, Failure], ns: list[int]
    ) -> None:
        """Do in this thread what was to be sent; ``values`` are stored items, or a reader's."""
        work = self._own_work()
        if request.values is None:
            assert request.indices is not None
            values = work.fetcher.fetch(request.indices, ns)
        else:
            is_stored = self._work.fetcher.reader is None
            values = [
                failed.get(i) or (self._recycler.copy(value) if is_stored else value)
                for i, value in enumerate(request.values)
            ]
        work.apply(values, request.places, request.use_keys, ns)
        self._delivery.deliver(task, start, values, ns)
