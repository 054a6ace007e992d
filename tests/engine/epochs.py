"""The streams of one epoch, and its workers: built for a test, and taken from as a run does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from stoker.engine.checkpoint import PoolSize, Position
from stoker.engine.epoch import EpochStreams
from stoker.engine.items import PulledStream, resume_points, row
from stoker.engine.setup import EpochSetup
from stoker.engine.survivors import FilteredStream
from stoker.engine.work.step import Failure
from stoker.engine.workers.make import Workers
from stoker.engine.workers.threads import WorkerPool
from stoker.engine.workers.tuning import Autotuner
from stoker.pipeline import Pipeline


class Epoch:
    """The streams of a pipeline's first epoch.

    Attributes:
        streams: what was built; ``segments``: the streams of its segments.
        planning: held by whoever decides what comes next.
        skip_log: what was skipped.
        yielded: how many outputs were taken.
    """

    def __init__(
        self,
        pipeline: Pipeline[Any],
        workers: int = 0,
        position: Position | None = None,
        pool_size: PoolSize | None = None,
    ) -> None:
        chain = pipeline.chain
        position = position or Position()
        self.pool_size = pool_size or PoolSize()
        self.yielded = position.yielded
        tuned = Autotuner()
        if workers:
            tuned.settle(workers)  # from the beginning: nothing is measured
        self.streams = EpochStreams(
            EpochSetup(
                chain.flow,
                chain.seed,
                0,
                tuned,
                Workers(workers, "thread"),
                self.pool_size,
                position,
            )
        )
        self.planning = self.streams.planning
        self.skip_log = self.streams.skip_log
        self.streams.build()
        self.segments = self.streams.segments

    @property
    def filtered(self) -> list[FilteredStream]:
        """The filtered streams, in the order that data meets them."""
        return [each for each in reversed(row(self.last)) if isinstance(each, FilteredStream)]

    @property
    def last(self) -> PulledStream:
        """What the consumer takes from."""
        return self.streams.last

    @property
    def position(self) -> Position:
        """Where it is, as a run saves it."""
        with self.planning.lock:
            parts = resume_points(self.last, self.yielded, self.planning)
        log = self.skip_log
        return Position(self.yielded, parts=parts, spent=dict(log.spent), filtered=log.filtered)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = self.streams.last.pull()
        if item is None:
            raise StopIteration
        self.streams.last_pool.wait(item.task)
        value, item.task.values[item.row] = item.task.values[item.row], None
        if type(value) is Failure:
            raise value.error
        self.yielded += 1
        return value


@contextlib.contextmanager
def epoch(
    pipeline: Pipeline[Any],
    workers: int = 0,
    position: Position | None = None,
    pool_size: PoolSize | None = None,
) -> Iterator[Epoch]:
    """Build the streams of a pipeline's first epoch, and end them."""
    built = Epoch(pipeline, workers, position, pool_size)
    try:
        yield built
    finally:
        built.streams.close()


@contextlib.contextmanager
def working(threads: int, depths: int = 1) -> Iterator[WorkerPool]:
    """Have so many threads take part from the beginning; with 0 the consumer does everything."""
    tuned = Autotuner()
    if threads:
        tuned.settle(threads)
    pool = WorkerPool(threads, depths, tuned)
    pool.begin()
    try:
        yield pool
    finally:
        pool.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("stoker-worker")]
