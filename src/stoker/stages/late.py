"""Batches in which examples that are not ready may come later: ``.late(k).batch(n)``.

An example's own batch is the one that it has in the epoch's order. A batch takes the first ``n``
that are left, in order, if these are ready. If not, it leaves out those that are not, and takes
as many later ones that are ready, of at most ``k`` batches on. An example that has moved on by
``k`` batches is waited for. So none is lost, none comes twice, each comes at most ``k`` batches
away from its own, and there are as many batches as ever.

A batch is in the epoch's order in itself. So the examples that it left behind say all about it:
those before its last one that had not come by then. Batches that leave none behind are not noted.

The consumer asks when it has no batch left: only then is one due. A worker that plans ahead takes
the next examples in order, once they are ready. Inline every example is made when it is asked for,
so none is late.

A node has what batches left behind: those from the oldest on that anybody may still need, and those
that were decided ahead. A resume reads on from the first example that is left. Up to ``k`` batches
of examples are read again, and dropped, as they have come before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from stoker.basics.compact_integers import check_integer
from stoker.basics.validate import is_whole_number
from stoker.engine.checkpoint import Bounds, Count, Node, UpstreamRequest, as_json, damage_error
from stoker.engine.items import Item, WouldBlock
from stoker.engine.segments.stream import SegmentStream
from stoker.engine.setup import StreamContext
from stoker.engine.skip import RAISE
from stoker.engine.survivors import DecidingStream
from stoker.errors import CombinationError, StateError
from stoker.schedule.echo_record import RunRecord
from stoker.stages.batching.batch import Batch
from stoker.stages.batching.planned import PlannedBatch
from stoker.stages.stage import ChainStage, ChainView, StreamStage, Traits, first_with

Left = tuple[int, ...]
"""The examples that a batch left behind, ascending."""


@dataclass(frozen=True)
class Late(StreamStage):
    """The stage ``.late(max_batches)``, right before ``.batch(n)``.

    Attributes:
        max_batches: how many batches an example that is not ready may move on by.
        n, drop_last: of the batches behind it; 0 before there are some.
    """

    max_batches: int
    n: int = 0
    drop_last: bool = False
    traits = Traits(late=True, keeps_fields=True)
    kind = "late"
    is_decided = False
    in_turn = False

    @staticmethod
    def of(max_batches: Any) -> Late:
        """Check the argument of ``.late()``."""
        if not is_whole_number(max_batches):
            raise TypeError(f".late() takes a whole number of batches, not {max_batches!r}")
        if max_batches < 1:
            raise ValueError(f".late() takes a number of batches from 1, not {max_batches}")
        return Late(int(max_batches))

    @property
    def call(self) -> str:
        return f"late({self.max_batches})"

    def bind(self, before: ChainView) -> Late:
        """Refuse what decides about examples in their order, and what has no order."""
        if not before.source.is_indexed:
            raise CombinationError(
                f".{self.call} has examples made out of order, and a stream has one order alone"
            )
        stage = first_with(
            before.stages,
            lambda t: (
                t.filters or t.skips or t.repeats or t.joins or t.scans or t.batches or t.late
            ),
        )
        if stage is not None and (stage.traits.batches or stage.traits.late):
            raise CombinationError(
                f".{self.call} cannot follow {stage.name}: put it before .batch(n)"
            )
        if stage is not None and stage.traits.repeats:
            raise CombinationError(
                f".{stage.name} decides on numbers alone which uses are in a batch: leave out "
                f'.{self.call}. .echo("auto") uses what is there while examples are late'
            )
        if stage is not None or before.budget != RAISE:
            name = "max_errors=" if stage is None else f".{stage.name}"
            raise CombinationError(
                f"{name} decides about one example after another, and so waits for each: "
                f".{self.call} cannot follow it"
            )
        return Late(self.max_batches)

    def followed_by(self, stage: ChainStage) -> Late:
        """Return it with the size of the batches behind it."""
        if self.n:
            return self
        if not isinstance(stage, Batch):
            raise CombinationError(f".{self.call} stands right before .batch(n), not {stage.name}")
        if isinstance(stage, PlannedBatch):
            raise CombinationError(
                f".{stage.name} plans its batches ahead, so nothing in them may be late: .batch(n)"
            )
        return replace(self, n=stage.n, drop_last=stage.drop_last)

    def begin(self, chain: ChainView) -> None:
        """Refuse what has to know the places of examples in batches."""
        if not self.n:
            raise CombinationError(f".{self.call} is about batches: put .batch(n) behind it")
        share = chain.selection.share
        if share is not None and share.padding is not None:
            raise CombinationError(
                f".shard({share.padding}) says which rows are padding before .{self.call}"
            )
        if first_with(chain.stages, lambda t: t.repeats) is not None:
            raise CombinationError(
                f".echo() uses batches again by their number: without .{self.call}"
            )

    def stream(self, upstream: SegmentStream, context: StreamContext) -> LateStream:
        return LateStream(self, upstream, context.setup.epoch, context.setup.record)

    def read_node(self, saved: Any, bounds: Bounds) -> LateStart:
        start = msgspec.convert(saved, LateStart, str_keys=True)
        sizes = self.sizes(bounds.most)
        batch = check_integer(start.batch, 0, sizes.batches)
        check_integer(start.decided, batch, sizes.batches)
        if start.before:
            sizes.check({batch - 1: start.before}, 0)
            if start.before[-1] >= batch * sizes.group + len(start.before):
                raise ValueError("what was left behind does not fit its batch")
        sizes.check(start.left, batch)
        if max(start.left, default=-1) >= start.decided:
            raise ValueError("a batch that is not decided has left examples behind")
        return start

    def check_leg(self, chain: ChainView) -> None:
        raise StateError("which examples were late is the rank's own")

    def of_ranks(self, rank: int, world: int, batches: Any, examples: int) -> Late:
        return replace(self, n=check_integer(batches, 1))

    def sizes(self, examples: int) -> Sizes:
        """Return the sizes of an epoch with so many examples."""
        total = examples - examples % self.n if self.drop_last else examples
        return Sizes(self.n, self.max_batches, total)

    def signature(self) -> str:
        return self.call


class Sizes(NamedTuple):
    """The sizes that decide which examples a batch may take.

    Attributes:
        group: the examples in a batch.
        late: how many batches an example may move on by.
        total: the examples in the batches of the epoch.
    """

    group: int
    late: int
    total: int

    @property
    def batches(self) -> int:
        """The number of batches in the epoch."""
        return -(-self.total // self.group)

    def check(self, found: Mapping[int, Left], at_least: int) -> None:
        """Raise ValueError for what no batches, from ``at_least`` on, leave behind."""
        for batch, left in found.items():
            check_integer(batch, at_least, self.batches)
            first = max(0, (batch + 1 - self.late) * self.group)
            reach = min(self.total, (batch + 1 + self.late) * self.group)
            if not 0 < len(left) <= self.late * self.group:
                raise ValueError(f"batch {batch} cannot leave so many behind")
            for each in left:
                check_integer(each, first, reach - 1)
            if list(left) != sorted(set(left)):
                raise ValueError(f"what batch {batch} left behind is not in order")


class Choice(NamedTuple):
    """What a batch takes, or what it waits for.

    Attributes:
        taken: the numbers of its examples, ascending; None if it must wait.
        waits_for: then the examples of which one must be ready before it is worth asking again.
    """

    taken: list[int] | None
    waits_for: list[int]


class LateOrder:
    """The examples of the batches of one epoch, decided one batch after another.

    Args:
        sizes: the sizes of batches, and of the epoch.

    Attributes:
        batch: the next batch to decide.
        batches: the number of batches in the epoch.
        moved: how many examples came in a later batch than their own.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.group, self.late, self.total = sizes
        self.batches = sizes.batches
        self.batch = self.moved = 0
        self._left: dict[int, Left] = {}  # of decided batches, and of the one before the first
        self._known: dict[int, Left] = {}  # of batches up to a number: decided before, repeated
        self._known_to = 0

    def start_at(self, batch: int, left: Left, known: Mapping[int, Left], known_to: int) -> None:
        """Go on at a batch, behind one that left these examples.

        Args:
            batch: the next batch.
            left: what came before it and is left.
            known: what batches from this one on left, of those before batch ``known_to``.
        """
        self.batch = batch
        self._left = {batch - 1: left} if left else {}
        self._known, self._known_to = dict(known), known_to

    def left_before(self, batch: int) -> Left:
        """Return what batches before this one left behind; all of them must be decided."""
        return self._left.get(batch - 1, ())

    def first_unread(self, batch: int) -> int:
        """Return the first example that no batch before this one has had, nor left behind."""
        return min(batch * self.group, self.total) + len(self.left_before(batch))

    def frontier(self, batch: int) -> int:
        """Return the first example that batches before this one have not had."""
        left = self.left_before(batch)
        return left[0] if left else self.first_unread(batch)

    def within_reach(self) -> int:
        """Return the end of the examples that the next batch may take."""
        return min(self.total, (self.batch + 1 + self.late) * self.group)

    def choose(self, is_ready: Callable[[int], bool], *, is_due: bool) -> Choice:
        """Decide what the next batch takes, if it can be decided now.

        Args:
            is_ready: whether an example is ready; asked of those within reach.
            is_due: whether somebody waits for the batch: otherwise it takes the first in order.
        """
        need = min(self.group, self.total - self.batch * self.group)
        left, start = self.left_before(self.batch), self.first_unread(self.batch)
        some = [*left, *range(start, self.within_reach())]
        if self.batch < self._known_to:
            behind = set(self._known.get(self.batch, ()))
            first = [each for each in some if each not in behind][:need]
            is_due = False
        else:
            first = some[:need]
        if len(first) < need:
            raise StateError(f"the state or record is damaged at batch {self.batch}")
        awaited = [each for each in first if not is_ready(each)]
        if awaited and not is_due:
            return Choice(None, awaited[:1])
        if awaited:
            last = [e for e in some if e // self.group + self.late <= self.batch]
            awaited = [each for each in last if not is_ready(each)]
            if awaited:
                return Choice(None, awaited[:1])
            ready = [each for each in some if is_ready(each)]
            if len(ready) < need:
                return Choice(None, [each for each in some if not is_ready(each)])
            must = set(last)
            others = [each for each in ready if each not in must]
            first = sorted([*last, *others[: need - len(last)]])
        return Choice(self._take(first, some), [])

    def _take(self, taken: list[int], some: Sequence[int]) -> list[int]:
        ahead, end = set(taken), max(taken[-1] + 1, self.first_unread(self.batch))
        left = tuple(each for each in some if each < end and each not in ahead)
        if self.batch < self._known_to and left != self._known.get(self.batch, ()):
            raise StateError(f"the state or record is damaged at batch {self.batch}")
        if left:
            self._left[self.batch] = left
        self.moved += sum(each // self.group < self.batch for each in taken)
        self.batch += 1
        return taken

    def examples_of(self, batch: int) -> list[int]:
        """Return the examples of a decided batch once more."""
        behind = set(self._left.get(batch, ()))
        need = min(self.group, self.total - batch * self.group)
        start = self.first_unread(batch)
        stop = start + need + len(behind)
        some = [*self.left_before(batch), *range(start, min(stop, self.total))]
        return [each for each in some if each not in behind][:need]

    def left_from(self, batch: int) -> dict[int, Left]:
        """Return what decided batches left behind, of those from one on; known ones, too."""
        found = {at: left for at, left in self._left.items() if at >= batch}
        found.update({at: left for at, left in self._known.items() if at >= max(batch, self.batch)})
        return dict(sorted(found.items()))

    @property
    def decided(self) -> int:
        """The number of batches that are decided, or known from before."""
        return max(self.batch, self._known_to)


class LateRecord(msgspec.Struct):
    """What batches of an epoch left behind, on record.

    Attributes:
        first: the first batch on record: 0, or where a run was resumed.
        decided: the batch after the last.
        left: what each left behind, by its number; none for most. Of batch ``first - 1``, too.
    """

    first: Count
    decided: Count
    left: dict[int, Left]

    def after(self, earlier: LateRecord | None) -> LateRecord:
        """Return this with what an earlier part of the epoch left behind before it."""
        if earlier is None or not earlier.first <= self.first <= earlier.decided:
            return self
        before = {at: left for at, left in earlier.left.items() if at < self.first}
        return LateRecord(earlier.first, self.decided, {**before, **self.left})

    def to_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        return as_json(self)

    @classmethod
    def of_run(cls, run: RunRecord, epoch: int, sizes: Sizes) -> LateRecord:
        """Return what is on record of an epoch.

        Raises StateError if that is nothing, or damaged.
        """
        saved = run.late_of(epoch)
        try:
            record = msgspec.convert(saved, cls, str_keys=True)
            check_integer(record.first, 0, sizes.batches)
            check_integer(record.decided, record.first, sizes.batches)
            sizes.check(record.left, record.first - 1)
        except (TypeError, ValueError, msgspec.ValidationError) as error:
            raise StateError(f"the record is damaged: {type(error).__name__}: {error}") from error
        return record


class LateStart(Node, tag=Late.kind):
    """What batches left behind, around one from which an epoch goes on.

    Attributes:
        batch: the number of that batch.
        before: what the batches before it left.
        left: what it and later ones left, of those before batch ``decided``.
        decided: the first batch that is not decided.
    """

    batch: Count
    before: Left
    left: dict[int, Left]
    decided: Count


class LateStream(DecidingStream):
    """The examples of a stream, batch by batch, those that were late in later ones.

    Args:
        stage: the stage.
        upstream: the stream of examples.
        epoch: the epoch's number.
        record: the decisions of an earlier run that are repeated, or None.
    """

    keeps = True

    def __init__(
        self, stage: Late, upstream: SegmentStream, epoch: int, record: RunRecord | None
    ) -> None:
        super().__init__(upstream)
        self.total = upstream.total
        assert self.total is not None
        sizes = stage.sizes(self.total)
        self.order = LateOrder(sizes)
        self._record = None if record is None else LateRecord.of_run(record, epoch, sizes)
        self._items: dict[int, Item] = {}  # read, and in no batch yet
        self._read_to = self._had_to = 0
        self._first = 0  # the first batch of this run
        self._begin(LateStart(0, (), {}, 0))

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
        start = node or LateStart(batch, (), {}, batch)
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
        first = self._first
        with self._planning.lock:
            return LateRecord(first, self.order.decided, self.order.left_from(first - 1))

    def stats(self) -> dict[str, Any]:
        return {"late_examples": self.order.moved}

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
                self._survivors += [_at(item, at) for at, item in enumerate(items, number)]
                continue
            self._read(choice.waits_for[0] + 1)
            tasks = [self._items[n].task for n in choice.waits_for if n in self._items]
            if not self._planning.may_block:
                raise WouldBlock(tasks[0])
            self._worker_pool.wait_for_any(tasks)

    def _read(self, stop: int) -> None:
        """Have the examples up to a number made."""
        if stop <= self._read_to:
            return
        left = self.order.left_before(self.order.batch)
        items = self.upstream.pull_many(stop - self._read_to)
        for example, item in enumerate(items, self._read_to):
            if example >= self._had_to or example in left:
                self._items[example] = item
        self._read_to = stop

    def _is_ready(self, example: int) -> bool:
        item = self._items.get(example)
        return item is not None and item.task.done


def _at(item: Item, number: int) -> Item:
    """Return an example as the one of this number among those that come."""
    return Item(item.task, item.row, item.place, item.use, number + 1, 1)
