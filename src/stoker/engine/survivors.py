"""Streams whose items depend on values: filters, ``max_errors=``, the base of scans and packing.

So planning may have to wait for values. A thread that must not block gets ``WouldBlock`` instead,
and planning is tried again when the value is there.

Upstream numbers count inputs, downstream numbers count survivors. Whether an input survives is
known only once its value is computed.

A ``Sift`` stands after every segment with filters, or whose failures may be skipped. The
segment is split there, so that a batch takes survivors. A ``FilteredStream`` takes items in order,
drops those that a filter rejected or a budget skips, and numbers the rest. Pools and batches after
it count survivors. Random maps go on with the places of the source.

A ``FilterRecord`` holds the numbers that were dropped, from the oldest that a resume needs on. It
is saved, also for what was decided ahead of the position. So a resumed run drops the same examples,
whether or not they fail again. A pool behind a filter learns its number of items at the end of the
epoch; that number is saved as well.
"""

from __future__ import annotations

import bisect
import logging
from abc import abstractmethod
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from stoker.basics import compact_integers
from stoker.basics.compact_integers import check_integer
from stoker.engine.checkpoint import Bounds, Node, ReadSoFar, UpstreamRequest, damage_error
from stoker.engine.items import Item, PolledStream, WouldBlock
from stoker.engine.skip import RAISE, Budget
from stoker.engine.work.segment import Segment
from stoker.engine.work.step import Failure, Rejected
from stoker.engine.workers.threads import Task
from stoker.errors import Skip, StageError, TooManyErrors, describe_error

if TYPE_CHECKING:
    from stoker.engine.segments.stream import SegmentStream


class DecidingStream(PolledStream):
    """A stream that decides which of its inputs come next.

    Args:
        upstream: the stream of inputs; its pool computes them.
    """

    def __init__(self, upstream: SegmentStream) -> None:
        self.upstream: SegmentStream = upstream
        self.is_fed = upstream.upstream is not None
        self._worker_pool, self._planning = upstream.worker_pool, upstream.planning
        self._survivors: deque[Item] = deque()  # decided, and not taken
        self._has_ended = False
        self._fresh: int | None = None

    @property
    def fresh(self) -> int:
        return self.upstream.fresh if self._fresh is None else self._fresh

    def pull_many(self, count: int) -> Iterator[Item]:
        self._have(count)
        survivors = self._survivors
        items = [survivors.popleft() for _ in range(min(count, len(survivors)))]
        if items:
            self._fresh = items[-1].fresh
        return iter(items)

    def poll(self, count: int) -> tuple[int, bool]:
        """Return how many of the next ``count`` items are ready, and if they are the last.

        Called with the planning lock held; never blocks.
        """
        self._planning.without_waiting(self._have, count)
        kept = len(self._survivors)
        return min(count, kept), self._has_ended and kept <= count

    def wait_for(self, count: int) -> None:
        self._have(count)

    def ready_since(self) -> tuple[int, int | None]:
        """Return how many items wait, decided or not, and since when the stream is full."""
        ready, since = self.upstream.ready_since()
        return len(self._survivors) + ready, since

    @property
    def is_full(self) -> bool:
        return self.upstream.is_full

    def peek(self) -> Item | None:
        self._have(1)
        return self._survivors[0] if self._survivors else None

    def clear(self) -> None:
        self._survivors.clear()

    @abstractmethod
    def _have(self, count: int) -> None:
        """Make ``count`` items available, or all that are left. May raise WouldBlock."""


class OrderedStream(DecidingStream):
    """A stream that decides about its inputs in order, once their values are computed."""

    def __init__(self, upstream: SegmentStream) -> None:
        super().__init__(upstream)
        self._arriving: deque[Item] = deque()
        self._inputs = 0  # the number of decided inputs

    def clear(self) -> None:
        super().clear()
        self._arriving.clear()

    @abstractmethod
    def _decide(self, arriving: deque[Item]) -> None:
        """Take the next inputs whose values are there, one at least, and decide about them.

        After an error they come again.
        """

    @abstractmethod
    def _end(self) -> None:
        """Handle the end of the inputs."""

    def _inputs_for(self, count: int) -> int:
        """Return how many inputs to ask for, to make ``count`` items."""
        return count

    def _have(self, count: int) -> None:
        assert self._planning.is_held()
        survivors, arriving = self._survivors, self._arriving
        while len(survivors) < count and not self._has_ended:
            if not arriving:
                arriving.extend(self.upstream.pull_many(self._inputs_for(count - len(survivors))))
                if not arriving:
                    self._has_ended = True
                    self._end()
                    return
            task: Task = arriving[0].task
            if not task.done:
                if not self._planning.may_block:
                    raise WouldBlock(task)
                self._worker_pool.wait(task)
            self._decide(arriving)


_log = logging.getLogger("stoker")
_LISTED = 1_000  # the most skips that are listed with their details
LOST = -1
"""The account of examples that were lost with an output whose error was raised."""


class FilterRecord(Node, tag="filter"):
    """The dropped inputs from a number on; they translate numbers upstream and downstream.

    Attributes:
        number, survivors: the start of the record, as a number of inputs and of survivors.
        seen: the number of inputs up to which all are decided.
        drops: the numbers of dropped inputs, ascending.
        total: the number of survivors in the epoch, once it is known.
    """

    number: int = 0
    survivors: int = 0
    seen: int = 0
    drops: array[int] = msgspec.field(default_factory=lambda: array("q"))
    total: int | None = None

    @classmethod
    def from_json(cls, saved: Any, bounds: Bounds) -> FilterRecord | None:
        """Read the result of ``to_json``; None if nothing could be dropped when it was saved."""
        bounds.exact = None
        if saved is None:
            return None
        number = check_integer(saved["number"], 0, bounds.most)
        seen = check_integer(saved["seen"], number, bounds.most)
        drops = compact_integers.decode_ascending(saved["drops"], number, seen - number, seen)
        total = saved["total"]
        behind = total is not None and number == seen  # of a short last batch, behind the end
        survivors = check_integer(saved["survivors"], 0, number + behind * bounds.group)
        if total is not None:
            decided = survivors + seen - number - len(drops)
            total = check_integer(total, 0 if behind else decided, min(decided, seen))
        bounds.exact = total
        return cls(number, survivors, seen, array("q", drops.tobytes()), total)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "filter",
            "number": self.number,
            "survivors": self.survivors,
            "seen": self.seen,
            "total": self.total,
            "drops": compact_integers.encode_ascending(np.array(self.drops, np.int64), self.number),
        }

    def read_so_far(self) -> ReadSoFar:
        return ReadSoFar(self.number)

    def number_of(self, survivor: int) -> int:
        """Return the input number of a decided survivor, or of the next one."""
        if self.total is not None and survivor >= self.total:
            return self.seen
        away = survivor - self.survivors
        drops, base = self.drops, self.number
        dropped = bisect.bisect_right(range(len(drops)), away, key=lambda j: drops[j] - base - j)
        return base + away + dropped

    def covers(self, survivors: Iterable[int]) -> bool:
        """True if the record covers these survivors, or they are next after it, or at the end."""
        decided = self.survivors + self.seen - self.number - len(self.drops)
        return all(n == self.total or self.survivors <= n <= decided for n in survivors)

    def since(self, survivor: int) -> FilterRecord:
        """Return the record from a survivor on."""
        number = self.number_of(survivor)
        drops = self.drops[bisect.bisect_left(self.drops, number) :]
        return FilterRecord(number, survivor, self.seen, drops, self.total)


class SkipLog:
    """The skipped examples of an epoch, counted against the budgets.

    Attributes:
        examples: the number of examples in the epoch; None if it is unknown.

    Args:
        spent: the number of skips before a resume, by account.
        filtered: the number of examples that filters had dropped before a resume.
    """

    def __init__(self, spent: dict[int, int], filtered: int) -> None:
        self.examples: int | None = None
        self.spent = dict(spent)
        self.skips: list[Skip] = []
        self.skipped = sum(spent.values())
        self.filtered = filtered

    def skip(self, error: StageError, account: int, budget: Budget, seen: int) -> None:
        """Record one skip. Raises TooManyErrors, and records nothing, if the budget is used up."""
        count = self.spent.get(account, 0) + 1
        skip = Skip(error.stage, error.index, error.path, describe_error(error.__cause__))
        if not budget.allows(count, self.examples, seen):
            stage = error.stage if account else None
            skips = [s for s in (*self.skips, skip) if stage in (None, s.stage)]
            raise TooManyErrors(str(budget), stage, skips, count) from error
        self._count(account, 1, skip)
        _log.warning("skipped: %s", skip)

    def lose(self, error: StageError, examples: int) -> None:
        """Record the examples of an output whose error was raised; no budget has to do with it."""
        skip = Skip(error.stage, error.index, error.path, describe_error(error.__cause__))
        self._count(LOST, examples, skip)

    def _count(self, account: int, examples: int, skip: Skip) -> None:
        self.spent[account] = self.spent.get(account, 0) + examples
        self.skipped += examples
        if len(self.skips) < _LISTED:
            self.skips.append(skip)


class FilteredStream(OrderedStream):
    """The surviving items of a stream, in order.

    Args:
        budgets: what ``max_errors=`` allows, by account.
        part: the number of the segment before it among the layers of the flow.
        upstream: the stream of items.
        skip_log: records skips.
    """

    keeps = True
    leaves_out = True

    def __init__(
        self, budgets: Mapping[int, Budget], part: int, upstream: SegmentStream, skip_log: SkipLog
    ) -> None:
        super().__init__(upstream)
        self._budgets, self._part = budgets, part
        self._skip_log = skip_log
        self._spent = False
        self.record = FilterRecord()  # after a resume it reaches beyond the inputs taken so far

    @property
    def segment(self) -> Segment:
        """The segment whose outputs are filtered."""
        return self.upstream.segment

    def poll(self, count: int) -> tuple[int, bool]:
        """As for any stream. A used-up budget counts as a ready item, which raises its error."""
        ready, ended = super().poll(count)
        return min(count, max(ready, self._spent)), ended

    def left_to(self, number: int, taken: int) -> int:
        """Return how many survivors are left among the items up to ``number``, once decided."""
        while self._inputs < number and not self._has_ended:
            self._have(len(self._survivors) + 1)
        return sum(item.fresh <= number for item in self._survivors)

    def recompute(self, number: int) -> Item:
        """Make a survivor once more. It may fail now, but it is not dropped."""
        return self.upstream.recompute(self.record.number_of(number))

    @property
    def end(self) -> int | None:
        return self.record.total

    def resume_point(self, survivor: int) -> tuple[FilterRecord, int]:
        """Return all decisions from a survivor on, including decisions before a resume."""
        record = self.record.since(survivor)
        return record, record.number

    def forget_before(self, survivor: int) -> int:
        self.record = self.record.since(survivor)
        return self.record.number

    def resume(self, node: FilterRecord | None, request: UpstreamRequest) -> UpstreamRequest:
        """Go on with the saved decisions; None: nothing could be dropped, so all survived."""
        record, following, again = node or FilterRecord(), request.next, request.again
        if record.total is not None:
            if request.least > record.total:
                raise damage_error(f"a pool has had {request.least:,} of {record.total:,} items")
            following = min(following, record.total)
            again = frozenset(n for n in again if n < record.total)
        if node is not None and not record.covers({*again, following}):
            raise damage_error("what was left out does not fit the rest")
        # Lower numbers are kept, too: items in a pool are made again by them.
        self.record = replace(record, seen=max(record.seen, following), drops=record.drops[:])
        self._inputs = number = self.record.number_of(following)
        oldest = request.oldest if node is None else record.number
        again = frozenset(map(self.record.number_of, again))
        return UpstreamRequest(number, number, oldest, again, request.loaded)

    def _end(self) -> None:
        record = self.record
        record.seen = self._inputs
        record.drops = record.drops[: bisect.bisect_left(record.drops, record.seen)]
        record.total = record.survivors + record.seen - record.number - len(record.drops)

    def _decide(self, arriving: deque[Item]) -> None:
        item, record, number = arriving[0], self.record, self._inputs
        value = item.task.values[item.row]
        is_known = number < record.seen
        if is_known:
            at = bisect.bisect_left(record.drops, number)
            drop = at < len(record.drops) and record.drops[at] == number
        elif type(value) is not Failure:
            drop = False
        elif isinstance(value.error, Rejected):
            drop = True
            self._skip_log.filtered += 1
        else:
            drop = self._skips(item, value)
        arriving.popleft()
        self._inputs = number + 1
        if not is_known:
            record.seen = number + 1
            if drop:
                record.drops.append(number)
        if drop:
            item.task.values[item.row] = None
        else:
            self._survivors.append(item)

    def _skips(self, item: Item, failure: Failure) -> bool:
        """True if a failure is skipped. Raises TooManyErrors if the budget is used up.

        TooManyErrors is raised in the consumer only. A worker that plans ahead gets WouldBlock.
        """
        budget = self._budgets.get(failure.account, RAISE)
        error = failure.error
        if failure.part != self._part or budget == RAISE or not isinstance(error, StageError):
            return False
        try:
            self._skip_log.skip(error, failure.account, budget, item.fresh)
        except TooManyErrors:
            self._spent = True
            if self._planning.may_block:
                raise
            raise WouldBlock(None) from None
        return True
