"""Carrying out runs, some side by side in processes, each row kept as soon as it is there."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.suite.rows import Run
from experiments.suite.workload import Variant
from experiments.suite.workloads import workload


@dataclass(frozen=True)
class Task:
    """A workload as processes find it."""

    name: str
    variant: Variant
    folder: Path | None
    """Its data; None: made up."""


def carried_out(task: Task, run: Run, known: dict[str, Any] | None) -> dict[str, Any]:
    """Carry out a run in this process; `known` is the row of the run that it rests on, if any."""
    # Here, so that the first process needs no torch.
    from experiments.suite.exact_clock import exact_run
    from experiments.suite.training import trained_run

    made = workload(task.name, task.variant, task.folder)
    if run.kind == "timing":
        return exact_run(made, run.arm, run.seed)
    assert run.learning_rate is not None
    record = known["record"] if known is not None else None
    part: Any = "validation" if run.kind == "tuning" else "test"
    found = trained_run(made, run.arm, run.seed, run.learning_rate, part, record, run.warm_up)
    if known is not None and found["digest"] != known["digest"]:
        raise AssertionError(f"{run} did not repeat what is on record: its counts differ")
    return found


def probed(task: Task) -> dict[str, float]:
    """Time a training step and a test, with the data in memory."""
    from experiments.suite.training import probe

    return probe(workload(task.name, task.variant, task.folder))


class Jobs:
    """Processes that carry out runs; made by `jobs`."""

    def __init__(self, executor: ProcessPoolExecutor, task: Task) -> None:
        self._executor = executor
        self._task = task

    def probe(self) -> dict[str, float]:
        """Time a training step and a test. Raises MissingData."""
        return self._executor.submit(probed, self._task).result()

    def carry_out(
        self,
        runs: Sequence[tuple[Run, dict[str, Any] | None]],
        on_row: Callable[[Run, dict[str, Any]], None],
    ) -> None:
        """Carry out runs with what each rests on; `on_row` is told of each as it ends."""
        waiting: dict[Future[dict[str, Any]], Run] = {
            self._executor.submit(carried_out, self._task, run, known): run for run, known in runs
        }
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                on_row(waiting.pop(future), future.result())


@contextmanager
def jobs(count: int, task: Task) -> Iterator[Jobs]:
    """Have `count` processes within a block; what they are at when it is left is given up."""
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(count, context, initializer=_begin)
    before = set(multiprocessing.active_children())
    try:
        yield Jobs(executor, task)
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
            child.join()


def _begin() -> None:
    """Leave Ctrl-C to the first process, which ends this one; compute on one core."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
