"""Lets examples that are not ready move on to later batches: ``.batch(n, late=k)``.

``schedule.late_order`` decides. The consumer asks it when it has no batch left: only then is one
due. A worker that plans ahead takes the next examples in order, once they are ready. Inline every
example is made when it is asked for, so none is late.

A node has what batches left behind: those from the oldest on that anybody may still need, and those
that were decided ahead. A resume reads on from the first example that is left. Up to ``k`` batches
of examples are read again, and dropped, as they have come before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from stoker.basics.compact_integers import check_integer
from stoker.engine.checkpoint import Bounds, Node, UpstreamRequest, damage_error
from stoker.engine.items import Item, WouldBlock
from stoker.engine.late_bias import LateBias
from stoker.engine.plan.points import LatePoint
from stoker.engine.segments.stream import SegmentStream
from stoker.engine.survivors import DecidingStream
from stoker.engine.work.failure import Failure
from stoker.errors import StateError
from stoker.schedule.echo_record import RunRecord
from stoker.schedule.late_order import LateOrder, LateRecord, Left, check_left


class LateStart(Node, tag=LatePoint.kind):
    """What batches left behind, around one from which an epoch goes on.

    Attributes:
        batch: the number of that batch.
        before: what the batches before it left.
        left: what it and later ones left, of those before batch ``decided``.
        decided: the first batch that is not decided.
    """

    batch: int = 0
    before: Left = ()
    left: Mapping[int, Left] = msgspec.field(default_factory=dict)
    decided: int = 0

    @classmethod
    def from_json(cls, point: LatePoint, saved: Any, bounds: Bounds) -> LateStart:
        """Read the result of ``to_json``."""
        group, late = point.batch.n, point.batch.late
        total = point.examples(bounds.most)
        batches = -(-total // group)
        batch = check_integer(saved["batch"], 0, batches)
        decided = check_integer(saved["decided"], batch, batches)
        before: Left = ()
        if saved["before"]:
            left = check_left({batch - 1: saved["before"]}, group, late, total, 0)
            before = left[batch - 1]
            if before[-1] >= batch * group + len(before):
                raise ValueError("what was left behind does not fit its batch")
        left = check_left(saved["left"], group, late, total, batch)
        if max(left, default=-1) >= decided:
            raise ValueError("a batch that is not decided has left examples behind")
        return cls(batch, before, left, decided)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": LatePoint.kind,
            "batch": self.batch,
            "before": list(self.before),
            "left": {str(at): list(left) for at, left in sorted(self.left.items())},
            "decided": self.decided,
        }


class LateStream(DecidingStream):
    """The examples of a stream, batch by batch, those that were late in later ones.

    Args:
        point: the batches.
        upstream: the stream of examples.
        epoch: the epoch's number.
        record: the decisions of an earlier run that are repeated, or None.
    """

    keeps = True

    def __init__(
        self, point: LatePoint, upstream: SegmentStream, epoch: int, record: RunRecord | None
    ) -> None:
        super().__init__(upstream)
        self.total = upstream.total
        assert self.total is not None
        batch = point.batch
        sizes = batch.n, batch.late, point.examples(self.total)
        self.order = LateOrder(*sizes)
        self._record = None if record is None else record.late_of(epoch, *sizes)
        self.bias = LateBias()
        self._items: dict[int, Item] = {}  # read, and in no batch yet
        self._read_to = self._had_to = 0
        self._first = 0  # the first batch of this run
        self._begin(LateStart())

    def ready_since(self) -> tuple[int, int | None]:
        ready, since = self.upstream.ready_since()
        return len(self._survivors) + ready, since

    def recompute(self, number: int) -> Item:
        batch, row = divmod(number, self.order.group)
        item = self.upstream.recompute(self.order.examples_of(batch)[row])
        return _at(item, number)

    def resume_point(self, number: int) -> tuple[LateStart, int]:
        order = self.order
        batch = -(-number // order.group)
        before, left = order.left_before(batch), order.left_from(batch)
        return LateStart(batch, before, left, order.decided), order.frontier(batch)

    def resume(self, node: LateStart | None, request: UpstreamRequest) -> UpstreamRequest:
        """Go on with the saved decisions; None: nothing was late before."""
        group = self.order.group
        batch = -(-request.next // group)
        start = node or LateStart(batch, decided=batch)
        if not start.batch <= batch <= start.decided:
            raise damage_error("what was late does not fit the rest")
        self._check_record(start.batch)
        self._begin(start)
        oldest = self.order.frontier(start.batch)
        while self.order.batch < batch:
            self.order.choose(lambda _: True, is_due=False)
        self._first = batch
        again = frozenset(self.order.examples_of(n // group)[n % group] for n in request.again)
        self._read_to = self.order.frontier(batch)
        self._had_to = self.order.first_unread(batch)
        return UpstreamRequest(self._read_to, self._read_to, oldest, again, request.loaded)

    def clear(self) -> None:
        super().clear()
        self._items.clear()

    def decisions(self) -> LateRecord:
        """Return what the batches of this run left behind so far."""
        first = self._first
        return LateRecord(first, self.order.decided, self.order.left_from(first - 1))

    def _begin(self, start: LateStart) -> None:
        before, left, decided, record = start.before, start.left, start.decided, self._record
        if record is not None:
            left = {at: each for at, each in record.left.items() if at >= start.batch}
            before = record.left.get(start.batch - 1, ())
            decided = record.decided
        self.order.start_at(start.batch, before, left, decided)

    def _check_record(self, batch: int) -> None:
        """Raise StateError if the record begins behind a batch; a state may be loaded before."""
        if self._record is not None and batch < self._record.first:
            raise StateError(
                f"the record begins at batch {self._record.first}: load the state that the "
                "recorded run went on from"
            )

    def _have(self, count: int) -> None:
        assert self._planning.is_held()
        order, record = self.order, self._record
        while len(self._survivors) < count and not self._has_ended:
            if order.batch == order.batches:
                self._has_ended = True
                return
            if record is not None and not record.first <= order.batch < record.decided:
                if not self._planning.may_block:  # planned ahead, and perhaps never asked for
                    raise WouldBlock(None)
                self._check_record(order.batch)
                raise StateError(
                    f"the record ends at batch {order.batch}, where the recorded run was left: "
                    "without .replay(record) the epoch goes on from there"
                )
            if not self._worker_pool.inline:  # else one after another, when it is asked for
                self._read(order.within_reach())
            number = order.batch * order.group
            choice = order.choose(self._is_ready, is_due=self._planning.may_block)
            if choice.taken is not None:
                items = [self._items.pop(example) for example in choice.taken]
                if choice.taken[-1] - choice.taken[0] >= len(items) or choice.taken[0] != number:
                    self._note(items, order.batch - 1)
                self._survivors += [_at(item, at) for at, item in enumerate(items, number)]
                continue
            self._read(choice.waits_for[0] + 1)
            tasks = [self._items[n].task for n in choice.waits_for if n in self._items]
            if not self._planning.may_block:
                raise WouldBlock(tasks[0])
            self._worker_pool.wait_for_any(tasks)

    def _note(self, items: list[Item], batch: int) -> None:
        """Compare the examples of a batch that is not in the epoch's order."""
        for item in items:
            value = item.task.values[item.row]
            if type(value) is not Failure:
                self.bias.note(value, batch - item.ordinal // self.order.group)

    def _read(self, stop: int) -> None:
        """Have the examples up to a number made."""
        if stop <= self._read_to:
            return
        left = self.order.left_before(self.order.batch)
        for item in self.upstream.pull_many(stop - self._read_to):
            if item.ordinal >= self._had_to or item.ordinal in left:
                self._items[item.ordinal] = item
        self._read_to = stop

    def _is_ready(self, example: int) -> bool:
        item = self._items.get(example)
        return item is not None and item.task.done


def _at(item: Item, number: int) -> Item:
    """Return an example at its place among those that come."""
    return Item(item.task, item.row, item.ordinal, item.use, number + 1, 1)
