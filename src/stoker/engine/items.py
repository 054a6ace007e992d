"""Items: values in a stream, where they will be and how they are addressed.

What comes next is decided on integers, by one thread at a time (it holds ``planning``); the
values are filled in by any. So the order never depends on timing, and any item can be made
again from its number, after a resume.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from stoker.engine.crew import Job
from stoker.engine.plan import Misdrawn


class Item:
    """One value in a stream: where it will be, and its address.

    Attributes:
        job, row: where the value is when the job is done.
        ordinal, word: its address (see ``randomness``).
        rows: the examples in it.
        repeats: those of them that are in it already.
        fresh: the fresh examples of the epoch that were read up to this item.
        scheduled: uses of it that were handed to jobs and are not over.
        settled: whether no further use will be scheduled.
    """

    __slots__ = (
        "fresh",
        "job",
        "ordinal",
        "repeats",
        "row",
        "rows",
        "scheduled",
        "settled",
        "word",
    )

    def __init__(self, job: Job, row: int, ordinal: int, word: int, fresh: int, rows: int) -> None:
        self.rows = rows
        self.repeats = 0
        self.job = job
        self.row = row
        self.ordinal = ordinal
        self.word = word
        self.fresh = fresh
        self.scheduled = 0
        self.settled = False


Use = tuple[Item, int]
"""One use of an item: the item, and the address word of this use."""


@dataclass
class Tally:
    """What is counted while an epoch runs."""

    stage_ns: dict[str, int] = field(default_factory=dict)
    stage_rows: dict[str, int] = field(default_factory=dict)
    distance_sum: int = 0
    distances: int = 0
    misdrawn: list[Misdrawn] = field(default_factory=list)  # to be told by the consumer

    def add(self, names: list[str], ns: list[int], rows: int) -> None:
        """Add the time that ``rows`` took in each stage; the caller holds the crew's lock."""
        for name, spent in zip(names, ns, strict=True):
            self.stage_ns[name] = self.stage_ns.get(name, 0) + spent
            self.stage_rows[name] = self.stage_rows.get(name, 0) + rows


class NotYet(Exception):
    """What comes next depends on a value that is not there, and who plans must not wait.

    Attributes:
        job: what it depends on, or None where only the consumer can go on.
    """

    def __init__(self, job: Job | None) -> None:
        self.job = job


class Planning:
    """Held by whoever decides what comes next, one thread at a time.

    Attributes:
        lock: what is held.
        patient: whether who holds it may wait for values: the consumer may, a worker might wait
            for itself.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.patient = True


class Stream(Protocol):
    """A stream of items, in order."""

    total: int | None
    blocking: bool

    @property
    def fresh(self) -> int: ...

    def pull_many(self, count: int) -> Iterator[Item]:
        """Yield the next ``count`` items, fewer only at the end."""
        ...

    def peek(self) -> Item | None:
        """Return the next item without taking it."""
        ...

    def again(self, number: int) -> Item:
        """Make an item once more."""
        ...

    def usable_bytes(self) -> int:
        """Return the memory that is free where the items are."""
        ...


class Watched(Stream, Protocol):
    """A stream of which it can be told what is ready. Called by who plans."""

    def look(self, count: int) -> tuple[int, bool]:
        """Return how many of the next ``count`` items are there, and whether they are the last.

        Sees to it that more are begun; never waits.
        """
        ...

    def wait_for(self, count: int) -> None:
        """Return when the next ``count`` items are there, or all that are left.

        Raises NotYet if who plans must not wait.
        """
        ...

    @property
    def plenty(self) -> bool:
        """Whether more items wait than will soon be asked for."""
        ...

    def stock(self) -> tuple[int, int | None]:
        """Return how many items wait ready, and since when there is no room for more.

        That is None while there is room, else in nanoseconds of ``time.perf_counter_ns``.
        """
        ...


class Feed(Protocol):
    """Where a segment gets its inputs from, unless they are fresh from the source.

    Attributes:
        in_order: whether each item comes once, as it was made.
        follows: whether what comes next is decided when it is asked for, by what is ready.
    """

    total: int | None
    blocking: bool
    in_order: bool
    follows: bool
    upstream: Any

    @property
    def fresh(self) -> int: ...

    def take(self, count: int) -> list[Use]:
        """Return the next uses, fewer only at the end."""
        ...

    def again_for(self, start: int, count: int) -> list[Use]:
        """Return uses ``start ..`` once more, outside the order."""
        ...


class Ready:
    """Stands for a job that is done: its one value."""

    __slots__ = ("items", "values", "waiting")
    done = True
    done_ns = 0

    def __init__(self, value: Any) -> None:
        self.values = [value]
        self.items = self.waiting = None


def like(item: Item, job: Any, word: int, fresh: int) -> Item:
    """Return an item for another value of the same address."""
    twin = Item(job, 0, item.ordinal, word, fresh, item.rows)
    twin.repeats = item.repeats
    return twin


def done_item(value: Any, ordinal: int, word: int, fresh: int, rows: int) -> Item:
    """Return an item whose value is there already."""
    job: Any = Ready(value)
    return Item(job, 0, ordinal, word, fresh, rows)
