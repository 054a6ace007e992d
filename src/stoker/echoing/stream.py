"""The stream of an echo: a schedule draws uses from the items of the stream before it."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, Generic, TypeVar

from stoker.basics import pytree
from stoker.basics.compact_integers import check_integer
from stoker.engine.checkpoint import Bounds, Node, UpstreamRequest, damage_error
from stoker.engine.flow import Own
from stoker.engine.items import EpochCounters, Item, Lent, PolledStream, RepeatingStream
from stoker.engine.work.step import Failure
from stoker.engine.workers.threads import WorkerPool
from stoker.schedule.pools import adaptive, fixed
from stoker.schedule.pools.adaptive import AdaptivePool, AdaptiveSnapshot
from stoker.schedule.pools.fixed import Draw, Pool, Snapshot

AnyPool = TypeVar("AnyPool", bound=Pool | AdaptivePool)


class PoolStart(Node, tag="echo"):
    """The snapshot from which a pool is replayed.

    Attributes:
        snapshot: a ``Snapshot`` or an ``AdaptiveSnapshot``.
        items: the number of fresh items in the epoch, once it is known; else None.
    """

    snapshot: Any
    items: int | None = None

    @classmethod
    def from_json(cls, echo: Any, saved: Any, bounds: Bounds) -> PoolStart:
        """Read the result of ``to_json``; ``echo`` is the stage."""
        most, exact = bounds.most, bounds.exact
        if not (size := bounds.pool_size.size):
            raise ValueError("the size of its pool is missing in it")
        fits = {"size": size, "group": bounds.pool_group, "items": most}
        snapshot: Snapshot | AdaptiveSnapshot
        if echo.counts is not None:
            snapshot = fixed.unpack(saved, counts=echo.counts, **fits)
            bounds.pass_pool(echo.count(most), None if exact is None else echo.count(exact))
        else:
            earlier, before = (bounds.epoch * most, size) if bounds.carries_pool else (0, 0)
            snapshot = adaptive.unpack(saved, max_factor=echo.max_factor, earlier=earlier, **fits)
            bounds.pass_pool(echo.max_factor * (most + before), None)
        items = saved["items"]
        if items is not None:
            items = check_integer(
                items, max(exact or 0, snapshot.admitted), most if exact is None else exact
            )
        return cls(snapshot, items)

    def epochs_back(self, items: int) -> list[int]:
        back: list[int] = self.snapshot.epochs_back(items)
        return back

    def to_json(self) -> dict[str, Any]:
        snapshot = self.snapshot
        json = (
            adaptive.pack(snapshot)
            if isinstance(snapshot, AdaptiveSnapshot)
            else fixed.pack(snapshot)
        )
        return {"kind": "echo", "items": self.items, **json}


class EchoStream(RepeatingStream, Generic[AnyPool]):
    """The uses of the items in a pool.

    Args:
        layer: the echo's layer in the flow.
        make_pool: makes the schedule of this epoch, when the first use is requested: its size may
            depend on the first item.
        upstream: the stream of fresh items.
    """

    keeps = True

    def __init__(
        self,
        layer: Own,
        make_pool: Callable[[Any], AnyPool],
        upstream: PolledStream,
        tally: EpochCounters,
    ) -> None:
        self.layer = layer
        self.echo = layer.stage
        self._make_pool = make_pool
        self.upstream: PolledStream = upstream
        self.blocking = upstream.blocking
        self._items: dict[int, Any] = {}  # items by number, each with its ``lent``
        self._drawn: list[Item] = []  # uses, not pulled yet
        self._draws_again: dict[int, list[tuple[int, int, int]]] = {}
        self._tally = tally
        self._uses = self._first_uses = 0  # drawn so far
        self._fresh = 0
        self._has_begun: tuple[Draw, int] | None = None

    @cached_property
    def pool(self) -> AnyPool:
        """The schedule of uses."""
        return self._make_pool(self)

    @property
    def has_started(self) -> bool:
        """Whether the schedule exists yet."""
        return "pool" in self.__dict__

    @property
    def held(self) -> int:
        return self.pool.held if self.has_started else 0

    @property
    def factor(self) -> float:
        return self._uses / self._first_uses if self._first_uses else 1.0

    @property
    def taken_of_source(self) -> int:
        if not self.has_started:
            return 0
        return self.fresh if self.upstream.leaves_out else self.pool.admitted

    @property
    def fresh(self) -> int:
        """Fresh examples in the drawn items, without items that only wait in the pool.

        It is a mean if filters make items stand for unequal numbers of examples.
        """
        read = self._fresh
        if not self.has_started or not self.pool.admitted:
            return read
        admitted, seen = self.pool.admitted, self.pool.seen
        each = -(-read // admitted)
        if each * (admitted - 1) < read:  # all items alike, but for a shorter last one
            return min(each * seen, read)
        return read * seen // admitted

    def first_value(self, worker_pool: WorkerPool) -> Any:
        """Return the first item, or the ``Failure`` in its place; None if there is none."""
        item = self.upstream.peek()
        if item is None:
            return None
        worker_pool.wait(item.task)
        return item.task.values[item.row]

    def item_bytes(self) -> int:
        for item in list(self._items.values()):
            value = item.task.values[item.row] if item.task.done else None
            if value is not None and type(value) is not Failure:
                return pytree.nbytes(value)
        return 0

    def clear(self) -> None:
        """Drop all items."""
        for item in self._items.values():
            item.task.waiting = None
        self._items.clear()
        self._drawn.clear()
        self._make_pool = _over  # it refers to the run, which refers to this

    def pull_many(self, count: int) -> Iterator[Item]:
        while len(self._drawn) < count and self._step():
            pass
        drawn, self._drawn = self._drawn[:count], self._drawn[count:]
        return iter(drawn)

    @abstractmethod
    def _step(self) -> bool:
        """Draw the next step; return False at the end of the epoch."""

    def resume_point(self, use: int) -> tuple[PoolStart | None, int]:
        if not self.has_started:
            return None, 0
        pool = self.pool
        snapshot = pool.snapshot(self._within(use) // pool.group)
        return PoolStart(snapshot, pool.admitted if pool.ended else None), snapshot.oldest

    def forget_before(self, use: int) -> int:
        node, oldest = self.resume_point(use)
        if node is not None:
            self.pool.forget_before(node.snapshot.step)
        return oldest

    def resume(self, node: PoolStart | None, request: UpstreamRequest) -> UpstreamRequest:
        """Replay the draws from the node's snapshot on."""
        if node is None:
            raise damage_error("a pool is missing in it")
        taken, snapshot, pool = self._within(request.next), node.snapshot, self._begin(node)
        group = pool.group
        if not 0 <= self._within(request.oldest) // group - snapshot.step <= pool.replayed_steps:
            raise damage_error("what a pool holds in it is too new, or too old")
        steps = {number // group for number in request.again}
        pool.restore(snapshot)
        held = self._replay(node, taken, steps)
        if not steps <= self._draws_again.keys() or (
            pool.step * group < taken and not pool.exhausted
        ):
            raise damage_error("its pool does not come to where the run was")
        again = frozenset(held).union(pool.held_ordinals().tolist())
        return UpstreamRequest(pool.admitted, pool.admitted, snapshot.oldest, again)

    def catch_up(self) -> None:
        """Finish the work that ``resume`` left."""
        self._fresh = self.upstream.fresh
        if self._has_begun is not None:
            self._schedule(*self._has_begun)
            self._has_begun = None

    def _within(self, use: int) -> int:
        """Return a use's number, at most the number of uses: the last batch may be short."""
        return use if self.total is None else min(use, self.total)

    def _begin(self, node: PoolStart) -> AnyPool:
        """Make the pool of a resume."""
        return self.pool

    @abstractmethod
    def _replay(self, node: PoolStart, taken: int, steps: set[int]) -> set[int]:
        """Draw again until so many uses were taken; recall the draws of some steps.

        Returns the numbers of upstream items that will still be used, beyond those in the pool.
        Raises StateError if the node cannot be right.
        """

    def recompute(self, number: int) -> Item:
        """Return a use from before a resume, its item made again."""
        step, row = divmod(number, self.pool.group)
        drawn, use, age = self._draws_again[step][row]
        item = self.upstream.recompute(drawn)
        return Item(item.task, item.row, item.place, use, self.fresh, item.rows, age=age)

    @property
    def end(self) -> int | None:
        """The number of uses, if the last of them are from before a resume."""
        group = self.pool.group
        ends = (group * at + len(d) for at, d in self._draws_again.items() if len(d) < group)
        return next(ends, None)

    def _keep(self, items: Iterable[Item], first: int) -> int:
        """Keep fresh items, from number ``first`` on; return the number behind the last."""
        kept, number = self._items, first - 1
        for number, item in enumerate(items, first):
            item.lent = Lent()
            kept[number] = item
            self._fresh = item.fresh
        return number + 1

    def _schedule(self, draw: Draw, skip: int) -> None:
        numbers, uses = draw.ordinals, draw.uses.tolist()
        self._count(draw.distance_sum, draw.repeats, len(uses), uses.count(0))
        last = numbers[skip:][draw.last[skip:]].tolist()
        self._use(numbers[skip:].tolist(), uses[skip:], draw.ages[skip:].tolist(), last)

    def _count(self, distance_sum: int, distances: int, uses: int, first_uses: int) -> None:
        self._tally.distance_sum += distance_sum
        self._tally.distances += distances
        self._uses += uses
        self._first_uses += first_uses

    def _use(self, numbers: list[int], uses: list[int], ages: list[int], last: list[int]) -> None:
        """Add uses of these items to those drawn; these are the last ones of some."""
        items, fresh = self._items, self.fresh
        try:
            used = [items[number] for number in numbers]
        except KeyError:  # after a resume: an item is made again when it is next used
            for number in numbers:
                if number not in items:
                    items[number] = item = self.upstream.recompute(number)
                    item.lent = Lent()
            used = [items[number] for number in numbers]
        for item in used:
            item.lent.scheduled += 1
        for number in last:
            items.pop(number).lent.settled = True
        self._drawn += [
            Item(i.task, i.row, i.place, use, fresh, i.rows, 0, age, None, i.lent)
            for i, use, age in zip(used, uses, ages, strict=True)
        ]

    def _recall(self, draw: Draw, step: int, wanted: bool, skip: int | None) -> set[int]:
        """Record a draw from before a resume; return the numbers of its items still needed."""
        if wanted:
            columns = (draw.ordinals, draw.uses, draw.ages)
            self._draws_again[step] = list(zip(*(c.tolist() for c in columns), strict=True))
        if skip is not None:  # the resume is in the middle of this step
            self._has_begun = draw, skip
        return set(draw.ordinals.tolist()) if wanted or skip is not None else set()


class FixedEcho(EchoStream[Pool]):
    """The uses by a fixed factor."""

    def __init__(
        self,
        layer: Own,
        make_pool: Callable[[FixedEcho], Pool],
        upstream: PolledStream,
        tally: EpochCounters,
    ) -> None:
        super().__init__(layer, make_pool, upstream, tally)
        items = upstream.total
        self.total = None if items is None else self.echo.count(items)
        # If the number of items is unknown, one is peeked at, so that the end is seen in time.
        self._unknown = items is None and not upstream.blocking
        self._prefetcher: deque[Item] = deque()
        self._items_before: int | None = None  # items in the epoch, from the state
        self._replaying = False

    def count(self, at_least: int) -> int | None:
        """Return the number of items in the epoch, if it is known; called before any is taken.

        If only the end tells, it is searched for among the first ``at_least`` items.
        """
        if not self._unknown:
            return self.upstream.total
        if self._replaying:
            before = self._items_before
            return before if before is not None and before < at_least else None
        return None if self._have(at_least) else len(self._prefetcher)

    def clear(self) -> None:
        """Drop all items."""
        super().clear()
        self._prefetcher.clear()

    def _step(self) -> bool:
        pool = self.pool
        if wanted := pool.fresh_needed():
            self._admit(pool, wanted)
        if self._unknown and not pool.ended and not self._have(1):
            pool.end()
        if pool.exhausted:
            return False
        one = pool.draw_one()
        if one is None:
            self._schedule(pool.draw(), 0)
            return True
        number, use, is_last, age = one
        self._count(max(0, age), age > 0, 1, not use)
        self._use([number], [use], [age], [number] if is_last else [])
        return True

    def _admit(self, pool: Pool, wanted: int) -> None:
        """Take so many fresh items into the pool; fewer come only at the end."""
        held = len(self._items)
        try:
            self._keep(self._pull(wanted), pool.admitted)
        finally:  # a loader may raise an error, and go on
            got = len(self._items) - held
            pool.admit(got)
        if got < wanted:
            pool.end()

    def _pull(self, count: int) -> Iterator[Item]:
        while count and self._prefetcher:
            count -= 1
            yield self._prefetcher.popleft()
        yield from self.upstream.pull_many(count)

    def _have(self, count: int) -> bool:
        """Look ahead to ``count`` items; return whether there are as many."""
        missing = count - len(self._prefetcher)
        if missing > 0:
            self._prefetcher.extend(self.upstream.pull_many(missing))
        return len(self._prefetcher) >= count

    def _begin(self, node: PoolStart) -> Pool:
        self._items_before, self._replaying = node.items, True
        pool = self.pool
        self._replaying = False
        return pool

    def _replay(self, node: PoolStart, taken: int, steps: set[int]) -> set[int]:
        pool, items = self.pool, node.items
        held: set[int] = set()
        while pool.step * pool.group < taken:
            if pool.items is not None:  # go to the next step whose draw is of interest
                of_interest = steps | {-(-taken // pool.group), taken // pool.group}
                pool.skip(min(step for step in of_interest if step >= pool.step) - pool.step)
                if pool.step * pool.group >= taken:
                    break
            at = pool.step
            wanted = pool.fresh_needed()
            got = wanted if items is None else min(wanted, items - pool.admitted)
            pool.admit(got)
            if got < wanted or (self._unknown and pool.admitted == items):
                pool.end()
            if pool.exhausted:
                break
            draw = pool.draw()
            skip = taken - at * pool.group if pool.step * pool.group > taken else None
            held |= self._recall(draw, at, at in steps, skip)
        return held


def _over(feed: Any) -> Any:
    raise RuntimeError("the run is over")
