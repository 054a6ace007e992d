"""Puts the values of rows where they belong: into their task's batch, or among its values."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stoker.basics import pytree
from stoker.basics.signals import pass_on
from stoker.engine.work.failure import Failure
from stoker.engine.work.work import Work
from stoker.engine.workers.tasks import Task
from stoker.engine.workers.threads import WorkerPool


@dataclass(frozen=True)
class Delivery:
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
