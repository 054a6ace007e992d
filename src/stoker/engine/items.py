"""Items: the values of a stream, with the task that computes each, and its address.

The order is decided on integers, by one thread at a time, which holds ``Planning.lock``. Any thread
computes the values. So the order never depends on timing, and any item can be made again from its
number, after a resume.

The streams of an epoch form a row: each has an ``upstream``, which it takes its items from. Saving
and resuming call them one after another, from the consumer to the source:

- ``resume_point``: each returns its node, which says how to make an output again, and the number of
  the oldest input that this needs. So a pool's snapshot reaches back to the oldest item in the pool
  behind it, because that item will be made again.
- ``forget_before``: each drops data that only a resume at earlier outputs would need.
- ``resume``: each goes to an output by its node, and returns its request to its upstream. Some then
  make outputs again (``catch_up``), from the source to the consumer.

The planner is a worker that plans a step ahead, or the consumer if the window is empty or work is
done inline. A worker never waits for the lock, because its holder may be waiting for a task of
this worker (deadlock). For the same reason it never waits for values: ``Planning.may_block`` is
false, and ``WouldBlock`` is raised.
"""

from __future__ import annotations

import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from stoker.basics import resources
from stoker.engine.checkpoint import Node, Position, UpstreamRequest
from stoker.engine.workers.threads import Task
from stoker.schedule.echo_record import DecidedLate, Decisions


class Lent(msgspec.Struct, eq=False):
    """An item's stay in a pool, which lends it to several uses.

    Attributes:
        scheduled: the number of its uses in tasks that are not finished.
        settled: whether no further use will be scheduled.
    """

    scheduled: int = 0
    settled: bool = False


class Item(msgspec.Struct, eq=False):
    """One value in a stream, or one use of it: its task, and its address.

    Attributes:
        task, row: the task that computes the value, and the value's row there.
        place, use: its address (see ``rng``): where it stands in the epoch over all ranks (below 0
            if a pool has it from an earlier epoch), and which use of it this is, from 0.
        fresh: the fresh examples of the epoch that were read up to this item.
        rows: the examples in it.
        repeats: the examples that are in it more than once.
        age: steps since its last use, as in ``Draw.ages``.
        examples: for a batch of echoed examples, their uses and their ages.
        lent: its stay in a pool, which is that of all uses of one value; None if it is used once.
    """

    task: Any
    row: int
    place: int
    use: int
    fresh: int
    rows: int
    repeats: int = 0
    age: int = 0
    examples: tuple[list[int], list[int]] | None = None
    lent: Lent | None = None

    @property
    def is_last_use(self) -> bool:
        """Whether nobody else uses the value any more, nor will."""
        lent = self.lent
        # Asked for in this order: once it is settled, uses only become fewer.
        return lent is None or (lent.settled and lent.scheduled == 1)

    def end_use(self) -> None:
        """Note that this use is finished; after the last one the value is dropped.

        The caller holds the worker pool's lock.
        """
        lent = self.lent
        if lent is not None:
            lent.scheduled -= 1
            if lent.scheduled or not lent.settled:
                return
        self.task.values[self.row] = None

    def settle(self) -> None:
        """Note that a pool lets go of the item; the caller holds the worker pool's lock."""
        assert self.lent is not None
        self.lent.settled = True
        if not self.lent.scheduled:
            self.task.values[self.row] = None


HEAD = -1
"""The key of a loader or stream in the counters, where segments have their place in the flow."""


@dataclass
class EpochCounters:
    """The counters of a running epoch."""

    names: dict[int, list[str]] = field(default_factory=dict)  # of stages, by layer
    spent: dict[int, list[int]] = field(default_factory=dict)  # by part: ``Segment.counters``
    distance_sum: int = 0
    distances: int = 0

    def open(self, part: int, names: list[str]) -> None:
        """Create the counters of a part."""
        # Times and counts of the stages, then four of samples (``cost.TIMED``) and the bytes
        # read.
        self.names[part], self.spent[part] = names, [0] * (2 * len(names) + 5)

    def add(self, part: int, spent: list[int]) -> None:
        """Add to the counters of a part; the caller holds the worker pool's lock, or is alone."""
        self.spent[part] = list(map(operator.add, self.spent[part], spent))

    def stages(self) -> list[tuple[str, int, int]]:
        """Return each stage's name, nanoseconds and examples, in the order of the chain."""
        found: list[tuple[str, int, int]] = []
        for part in sorted(self.names):
            names, spent = self.names[part], self.spent[part]
            found += zip(names, spent, spent[len(names) :], strict=False)
        return found

    @property
    def read_bytes(self) -> int:
        """The bytes read from the source."""
        return sum(spent[-1] for spent in self.spent.values())


class WouldBlock(Exception):
    """The next decision needs a value that is not computed yet, and the planner must not block.

    Attributes:
        task: the task that computes the value; None if only the consumer can continue.
    """

    def __init__(self, task: Task | None) -> None:
        self.task = task


class Planning:
    """The planning lock: its holder decides which items come next.

    Attributes:
        lock: the lock.
        may_block: whether its holder may wait for values. The consumer may; a worker may not, as
            it might wait for itself (deadlock).
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.may_block = True

    def is_held(self) -> bool:
        """True if the calling thread holds it. Functions that need the lock assert this."""
        lock: Any = self.lock
        return bool(lock._is_owned())  # as a Condition asks its lock

    def without_waiting(self, plan: Callable[[int], None], count: int) -> None:
        """Call ``plan`` as a worker does; end silently where that needs a missing value.

        A context manager would take a microsecond, of some four that a batch of numbers takes.
        """
        may_block, self.may_block = self.may_block, False
        try:
            plan(count)
        except WouldBlock:
            pass
        finally:
            self.may_block = may_block


class Stream(ABC):
    """A stream of items, in order. The planning lock must be held for all methods but ``clear``.

    Those that resume suit a stream that keeps nothing and passes on each input once.

    Attributes:
        keeps: whether it has a node in a state.
        upstream: the stream that its inputs come from; None at the head.
        total: how many items an epoch has; None if only its end tells.
        blocking: whether it is read in the calling thread, so that no work is done ahead.
        follows: whether the next item is decided on request, by the number of ready inputs.
        is_fed: whether a pool may stand in front, which decides by what it is asked for.
    """

    keeps: ClassVar[bool] = False
    upstream: Stream | None = None
    total: int | None = None
    blocking = False
    follows = False
    is_fed = False

    @property
    @abstractmethod
    def fresh(self) -> int:
        """Fresh examples up to the last taken item."""

    @abstractmethod
    def pull_many(self, count: int) -> Iterator[Item]:
        """Yield the next ``count`` items, fewer only at the end; none at all if WouldBlock."""

    @abstractmethod
    def recompute(self, number: int) -> Item:
        """Make an item once more; below 0 one of an earlier epoch, if pools are carried."""

    def resume_point(self, output: int) -> tuple[Node | None, int]:
        """Return its node for a resume at this output, and the oldest input that this needs.

        The node is None before it has begun.
        """
        return None, output

    def forget_before(self, output: int) -> int:
        """Drop data that only a resume at earlier outputs would need.

        Return the oldest input that this output needs.
        """
        return self.resume_point(output)[1]

    def resume(self, node: Any, request: UpstreamRequest) -> UpstreamRequest:
        """Go to the requested output by a node; return the request to the upstream.

        Raises StateError if the node does not fit the request.
        """
        return request

    def catch_up(self) -> None:  # noqa: B027 most have nothing to make
        """Make requested outputs again; everything upstream is in place by now."""

    def clear(self) -> None:  # noqa: B027 nor to drop
        """Drop all items; the run is over."""

    @property
    def end(self) -> int | None:
        """The number of items in the epoch; None until its end is known."""
        return None

    @property
    def dropped(self) -> int:
        """The number of inputs that a user's function has dropped."""
        return 0

    def decisions(self) -> DecidedLate | None:
        """Return what it decided by the clock so far, for a record."""
        return None

    def stats(self) -> dict[str, Any]:
        """Return its fields of ``Stats``."""
        return {}


def row(last: Stream | None) -> list[Stream]:
    """Return the streams from the last one to the head."""
    found = []
    while last is not None:
        found.append(last)
        last = last.upstream
    return found


def resume_points(last: Stream, yielded: int, planning: Planning) -> list[Node | None]:
    """Return the nodes for a resume at ``yielded``: none if a pool has not begun yet."""
    assert planning.is_held()
    nodes: list[Node | None] = []
    oldest = yielded
    for each in row(last):
        node, oldest = each.resume_point(oldest)
        if each.keeps:
            if node is None:
                return []
            nodes.append(node)
    return nodes[::-1]


def forget(last: Stream, yielded: int, planning: Planning) -> None:
    """Drop data that only a resume before output ``yielded`` would need."""
    assert planning.is_held()
    oldest = yielded
    for each in row(last):
        oldest = each.forget_before(oldest)


def resume(last: Stream, position: Position) -> None:
    """Bring new streams to a position.

    Raises StateError if its nodes do not fit each other.
    """
    done = position.yielded
    request, nodes = UpstreamRequest(done, done, done, loaded=position.loaded), list(position.parts)
    streams = row(last)
    for each in streams:
        request = each.resume(nodes.pop() if each.keeps and nodes else None, request)
    for each in reversed(streams):
        each.catch_up()


class PolledStream(Stream):
    """A stream that tells which items are ready.

    Attributes:
        leaves_out: whether it passes the source's items in order, but drops some.
    """

    leaves_out = False

    @abstractmethod
    def peek(self) -> Item | None:
        """Return the next item without taking it."""

    @abstractmethod
    def poll(self, count: int) -> tuple[int, bool]:
        """Return how many of the next ``count`` items are ready, and whether they are the last.

        Also submits work for further items. Never blocks.
        """

    @abstractmethod
    def wait_for(self, count: int) -> None:
        """Wait until the next ``count`` items are ready, or all that are left.

        Raises WouldBlock if the planning thread must not wait.
        """

    def items_of(self, loaded: int) -> int:
        """Return the number of items made from so many outputs of a loader or a stream."""
        return loaded

    @property
    @abstractmethod
    def is_full(self) -> bool:
        """True if more items wait than will soon be taken."""

    @abstractmethod
    def ready_since(self) -> tuple[int, int | None]:
        """Return how many items wait ready, and since when there is no room for more.

        That is None while there is room, else in nanoseconds of ``time.perf_counter_ns``.
        """

    def left_to(self, number: int, taken: int) -> int:
        """Return the number of items up to the source's item ``number``, after those ``taken``.

        Raises WouldBlock if that is not decided yet, and the planner must not block.
        """
        return number - taken

    def usable_bytes(self) -> int:
        """Return the free memory of the items' device, or of the host."""
        return resources.usable_memory_bytes()


class RepeatingStream(Stream):
    """A stream that keeps items in a pool, and hands out each several times.

    Attributes:
        agreement: the ``AgreedPolicy`` by which ranks agree on its steps, so that all take equally
            many (``echoing/rank_sync.py``), or None.
    """

    agreement: Any = None

    @property
    @abstractmethod
    def held(self) -> int:
        """The number of items in the pool."""

    @property
    @abstractmethod
    def factor(self) -> float:
        """The uses so far, divided by the first uses among them; 1 before any."""

    @property
    @abstractmethod
    def taken_of_source(self) -> int:
        """The number of the source's items that were taken, dropped ones in between included."""

    @abstractmethod
    def item_bytes(self) -> int:
        """Return the bytes of an item in the pool; 0 if it is empty."""

    def decided(self, epoch: int) -> Decisions | None:
        """Return what it decided by the clock so far; None before anything."""
        return None

    def next_start(self, total: int) -> Node | None:
        """Return its node at the beginning of the next epoch; this one has ``total`` items.

        None if the pool does not go on there.
        """
        return None

    def handed_on(self, total: int) -> dict[int, Item]:
        """Return the pool's items by their numbers in the next epoch; this one has ``total``."""
        return {}

    def adopt(self, items: dict[int, Item]) -> None:
        """Keep the items that the pool held at the end of the epoch before."""


class PulledStream(PolledStream):
    """A stream from which the consumer, or a device, takes one item after another."""

    @abstractmethod
    def pull(self, *, may_block: bool = True) -> Item | None:
        """Return the next item, None at the end.

        Raises WouldBlock if it would have to wait and ``may_block`` is False.
        """


class DrivenStream(PulledStream):
    """A stream that works in the calling thread: peeking at an item takes it from upstream."""

    def __init__(self) -> None:
        self._next_item: Item | None = None

    @abstractmethod
    def _take(self, may_block: bool) -> Item | None:
        """Take the next item from upstream, None at the end; raises as ``pull`` does."""

    def pull(self, *, may_block: bool = True) -> Item | None:
        if self._next_item is not None:
            item, self._next_item = self._next_item, None
            return item
        return self._take(may_block)

    def pull_many(self, count: int) -> Iterator[Item]:
        for _ in range(count):
            item = self.pull()
            if item is None:
                return
            yield item

    def peek(self) -> Item | None:
        self._next_item = self.pull()
        return self._next_item


class DoneTask:
    """A finished task with these values."""

    __slots__ = ("items", "values", "waiting")
    done = True
    done_ns = 0

    def __init__(self, values: list[Any]) -> None:
        self.values = values
        self.items = self.waiting = None


def with_value(item: Item, task: Any, row: int = 0) -> Item:
    """Return an item with another value at the same address."""
    return Item(
        task, row, item.place, item.use, item.fresh, item.rows,
        item.repeats, item.age, item.examples,
    )  # fmt: skip


def done_item(value: Any, place: int, fresh: int, rows: int) -> Item:
    """Return an item whose value is computed already, in its first use."""
    return Item(DoneTask([value]), 0, place, 0, fresh, rows)
