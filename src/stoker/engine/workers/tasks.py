"""Tasks: groups of rows that workers compute, and what remote workers are asked for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SLOTS = 2
"""Requests that a worker process may have at a time: 0.985 of torch with two, 0.83 to 0.90
with one (bench/results/gil.json)."""


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
        places, uses: the addresses of its rows (``InputAddresses.places``).
        failed: the first of its rows that failed, and the failure.
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
    fresh: int = 0
    failed: tuple[int, Any] | None = None
    kept: list[Any] = field(default_factory=list)


class Request(NamedTuple):
    """A request for rows of a task, sent to a worker process.

    Attributes:
        depth: the segment's number among the segments on the host.
        indices, values: the inputs of the rows: indices of examples in the source, or values.
        places, uses: the addresses of the rows.
        number: the task's number; ``whole``: whether these are all its rows.
    """

    depth: int
    indices: NDArray[np.int64] | None
    values: list[Any] | None
    places: Sequence[int]
    uses: list[int] | None
    number: int
    whole: bool

    def part(self, some: slice) -> Request:
        """Return the request for some of the rows, of a segment without batches."""
        return self._replace(
            indices=None if self.indices is None else self.indices[some],
            values=None if self.values is None else self.values[some],
            places=self.places[some],
            uses=None if self.uses is None else self.uses[some],
        )


class Comparison(NamedTuple):
    """Asks a process whether examples come out the same in two orders."""

    request: Request


class Compared(NamedTuple):
    """Answers a ``Comparison``.

    Attributes:
        differs: whether the examples differ.
        seeding_ns: what it takes in a process to seed the global generators for one call.
    """

    differs: bool
    seeding_ns: int


class GivenUp(Exception):
    """A worker process was ended, because it was stuck in an example, and another is there."""


Answer = tuple[Any, list[int]]
"""A remote worker's answer to a request: values, and the counters of its segment."""
