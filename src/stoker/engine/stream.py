"""What a segment makes of its inputs, in order, through a bounded window.

A segment is the work between two pools (or filters, or a device). Each output is an ``Item``. Items
are computed by tasks: one batch, or some examples for a pool (at least an eighth of a batch,
because a task costs time), or a few batches that are gathered straight from arrays.

The window holds the outputs that were submitted and not taken yet:

- in general ``max(2 * group, 8 * workers * chunk)`` examples, in whole outputs;
- 8 batches where batches are gathered from arrays, so that their memory stays in the CPU's caches;
- at least twice as many as a source that reads ahead has requests;
- around an adaptive echo, see ``adaptive_feed``;
- nothing inline, and nothing after a feed that blocks in the consumer's thread (a loader, a
  device).

A use that takes less than a millisecond to copy is copied by the consumer when it asks for it: a
task would cost more.

All uses of a stored item but the last get a copy; the last gets the item itself. Where items are
only stacked into a batch nobody gets a copy. Items are stored with ``pytree.owned``, so that a
small view does not keep a large array alive.

The consumer calls ``pull`` of the last stream, workers call its ``plan_ahead``, and what is below
"What follows runs in workers" is for the worker pool. The other methods of ``Stream`` are called
with the planning lock held. Outputs are appended to a window under that lock. From the last window
the consumer alone takes, without the lock; from the others the planner takes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from stoker import pytree
from stoker.buffers import Recycler
from stoker.engine.items import (
    Feed,
    Item,
    Planning,
    PulledStream,
    Ready,
    Tally,
    Use,
    WouldBlock,
    done_item,
    like,
)
from stoker.engine.pool.threads import (
    GATHER_AHEAD,
    GATHER_BATCHES,
    GATHER_INLINE_BATCH_NS,
    INLINE_BATCH_NS,
    CostEstimate,
    Task,
    WorkerPool,
)
from stoker.engine.work import ENDED, REJECTED, Failure, Work
from stoker.orders import Order
from stoker.signals import pass_on
from stoker.stages.batch import Builder, Columns

FOLLOWED_BATCHES = 8
"""Batches in front of a pool whose factor follows the stall."""


class SegmentStream(PulledStream):
    """What a segment makes of its inputs, in order, through a bounded window.

    Args:
        work: what is done.
        feed: where inputs come from; None for fresh examples, in ``order``.
        order: the epoch's order, None where there is no addressed source.
        examples: the number of fresh examples in the epoch.
        depth: the segment's number among those of its worker_pool.
        group: the number of examples in a batch.
        planning: the planning lock of this run.
        read_ahead: how many examples a source wants to be told of before they are fetched.
    """

    def __init__(
        self,
        work: Work,
        feed: Feed | None,
        order: Order | None,
        examples: int,
        *,
        worker_pool: WorkerPool,
        depth: int,
        cost: CostEstimate,
        group: int,
        recycler: Recycler,
        tally: Tally,
        planning: Planning,
        read_ahead: int = 0,
    ) -> None:
        self._planning = planning
        self._read_ahead = read_ahead
        self.work = work
        self.segment = work.segment
        self.feed = feed
        self.depth = depth
        self.cost = cost
        self.worker_pool = worker_pool
        self._order = order
        self._group = group
        self._recycler = recycler
        self._tally = tally
        self._names = self.segment.names
        batch = self.segment.batch
        self.inputs_each = batch.n if batch else 1
        self._batches = batch is not None or self.segment.batches_in
        self.inputs = inputs = examples if feed is None else feed.total
        self._examples = examples
        self.total = inputs if batch is None or inputs is None else batch.count(inputs)
        maps = self.segment.batch_maps
        self._rows = None if maps and worker_pool.remote else self.segment.rows
        self._gathers_alone = self._rows is not None and not maps
        self._gathers = self._gathers_alone and not self.segment.into_pool
        if feed is not None and self.segment.is_plain and not maps:
            cost.light = True
        self._passes = feed is not None and self.segment.batches_in and self.segment.is_plain
        if self._passes or self._gathers_alone:
            cost.releases_gil = True
            cost.inline_ns = GATHER_INLINE_BATCH_NS
        if self._gathers:
            cost.chunk_rows = GATHER_BATCHES * group
        self._next = 0  # the output to be submitted next
        self._window: deque[Item] = deque()
        self._ended = False
        self._pulled = False
        self.dropped_inputs = 0  # where only the end tells

    @property
    def fresh(self) -> int:
        """Fresh examples behind the outputs that were submitted."""
        if self.feed is not None:
            return self.feed.fresh
        return min(self._examples, self._next * self.inputs_each)

    @property
    def _gathers_here(self) -> bool:
        """Whether the next batch is gathered in place, because a task would cost more."""
        if not self._gathers_alone or not self.worker_pool.inline:
            return False
        return 0 < self.cost.batch_ns() < self.cost.inline_ns or not self.worker_pool.limit

    @property
    def _passes_here(self) -> bool:
        """Whether the consumer copies uses itself, because a task would cost more than the copy."""
        return self._passes and (self.worker_pool.inline or self.cost.batch_ns() < INLINE_BATCH_NS)

    def pull(self, *, may_block: bool = True) -> Item | None:
        """Return the next output, and have the window refilled.

        Called by the consumer. It plans only if the window is empty; otherwise workers plan ahead.
        Raises WouldBlock if it would have to wait and ``may_block`` is false.
        """
        if self._window:  # nobody else takes from it
            item: Item | None = self._window.popleft()
        else:
            with self._planning.lock:
                self._planning.may_block = may_block
                item = self._first()
        if item is not None and (self._pulled or self._gathers):
            self.worker_pool.plan()
        self._pulled = True  # the first output is handed out before planning ahead
        return item

    def _first(self) -> Item | None:
        if not self._window:
            if self._passes_here:
                return self._passed()
            if not self._submit_next():
                return None
        return self._window.popleft()

    def plan_ahead(self) -> bool:
        """Submit one more output if the window has room; return whether there is room for another.

        Called by workers. Must not block: the holder of the planning lock may be waiting for this
        worker (deadlock).
        """
        if (
            self.worker_pool.closed or self._passes_here
        ):  # what feeds that is filled up with each use
            return False
        if not self._planning.lock.acquire(blocking=False):
            return False
        try:
            self._planning.may_block = False
            if len(self._window) >= self.ahead() or not self._submit_next():
                return False
            return len(self._window) < self.ahead()
        except WouldBlock as error:
            task = error.task
        finally:
            self._planning.lock.release()
        return task is not None and self.worker_pool.plan_after(task)

    def pull_many(self, count: int) -> Iterator[Item]:
        """Yield the next ``count`` outputs, fewer only at the end; then fill the window up.

        Called with the planning lock held.
        """
        window = self._window
        while count:
            # Inline there is no working ahead, so no more is begun than is wanted.
            at_most = count if self.worker_pool.inline else None
            if not window and not self._submit_next(at_most):
                return
            taken = min(count, len(window))
            for _ in range(taken):
                yield window.popleft()
            count -= taken
        ahead = self.ahead()
        may_block, self._planning.may_block = self._planning.may_block, False
        try:
            while len(window) < ahead and self._submit_next():
                pass
        except WouldBlock:
            pass
        finally:
            self._planning.may_block = may_block

    def poll(self, count: int) -> tuple[int, bool]:
        """Return how many of the next ``count`` outputs are ready, and whether they are the last.

        Called with the planning lock held. Never blocks; inline, outputs are made here and now.
        """
        window = self._window
        inline = self.worker_pool.inline
        may_block, self._planning.may_block = self._planning.may_block, False
        try:
            least = count if inline else self.ahead()
            while len(window) < least:
                if not self._submit_next(least - len(window) if inline else None):
                    break
        except WouldBlock:
            pass
        finally:
            self._planning.may_block = may_block
        ready = 0
        for item in window:
            if ready == count or not item.task.done:
                break
            ready += 1
        return ready, ready == len(window) and (self._ended or self._next == self.total)

    def wait_for(self, count: int) -> None:
        """Wait until the next ``count`` outputs are ready, or all that are left."""
        window = self._window
        while len(window) < count and self._submit_next():
            pass
        for item in reversed(list(islice(window, count))):
            if not item.task.done:
                if not self._planning.may_block:
                    raise WouldBlock(item.task)
                self.worker_pool.wait(item.task)

    @property
    def is_full(self) -> bool:
        """Whether the window is full and done; always true inline."""
        window = self._window
        if self.worker_pool.inline:
            return True
        return len(window) >= self.ahead() and window[0].task.done and window[-1].task.done

    def ready_since(self) -> tuple[int, int | None]:
        """Return how many outputs in the window are done, and since when all are and it is full."""
        tasks = [item.task for item in tuple(self._window)]
        done = sum(task.done for task in tasks)
        if done < len(tasks) or done < self.ahead():
            return done, None
        return done, max((task.done_ns for task in set(tasks)), default=0)

    def peek(self) -> Item | None:
        """Return the next output without taking it; of examples no more than that one is begun."""
        if not self._window and not self._submit_next(at_most=1):
            return None
        return self._window[0]

    def _gathered(self) -> Item:
        """Gather the next batch here and now."""
        number = self._next
        assert self._order is not None
        start = number * self._group
        stop = min(start + self._group, self._examples)
        began = time.perf_counter_ns()
        assert self._rows is not None
        batch = self._rows.allocate(stop - start, self._recycler)
        self._rows.gather(self._order.span(start, stop), batch, 0)
        spent = time.perf_counter_ns() - began
        self.cost.note(stop - start, spent)
        self._tally.add(self._names[:1], [spent], stop - start)
        self._next = number + 1
        return done_item(batch, number, 0, stop, stop - start)

    def _passed(self) -> Item | None:
        """Hand the next use on, here and now: a copy, or what is stored if it is the last."""
        assert self._planning.is_held()
        assert self.feed is not None
        uses = self.feed.take(1)
        if not uses or self._next == self.total:
            return None
        item, use_key = uses[0]
        self.worker_pool.wait(item.task)
        self._next += 1
        began = time.perf_counter_ns()
        (value,) = self._taken([item], own=False)
        self.cost.note(1, time.perf_counter_ns() - began)
        return like(item, Ready(value), use_key, self.feed.fresh)

    def recompute(self, number: int) -> Item:
        """Make one output once more."""
        start = number * self.inputs_each
        uses = None if self.feed is None else self.feed.recompute_uses(start, self.inputs_each)
        return self._submit(number, 1, uses)[0]

    def start_at(self, number: int) -> None:
        """Continue with output ``number``; what feeds this stream must be there already."""
        self._next = number

    def ahead(self) -> int:
        """Return how many outputs the window holds besides the one that was asked for."""
        if self.worker_pool.inline or (self.feed is not None and self.feed.blocking):
            return 0
        if self._gathers:
            return GATHER_AHEAD
        chunk = self.cost.chunk(self.worker_pool.target_ns)
        examples = max(2 * self._group, 8 * self.worker_pool.workers * chunk, self._read_ahead)
        if self.segment.is_followed:  # or jitter alone would call for echoing
            examples = max(FOLLOWED_BATCHES * self._group, examples)
        elif self.feed is not None and self.feed.follows:  # what is decided early is decided badly
            examples = 2 * self._group
        return -(-examples // self._group) if self._batches else examples

    def clear(self) -> None:
        """Drop the outputs that will not be taken."""
        for item in self._window:
            item.task.waiting = item.task.items = None  # tasks that wait for each other are a cycle
        self._window.clear()

    def occupancy(self) -> tuple[int, int]:
        """Return how many outputs in the window are done, and how many it may hold."""
        return sum(item.task.done for item in tuple(self._window)), self.ahead()

    def _submit_next(self, at_most: int | None = None) -> bool:
        assert self._planning.is_held()
        number = self._next
        if self._ended or number == self.total:
            return False
        if self._gathers_here:
            self._window.append(self._gathered())
            return True
        count = 1
        if not self._batches:
            # Items share tasks, which cost the consumer time, but wait for no more than an eighth
            # of a batch. (Nothing is known at first: then the consumer waits for a batch anyway.)
            chunk = self.cost.chunk(self.worker_pool.target_ns) if self.cost.row_ns else self._group
            count = min(max(chunk, self._group // 8), self._group)
            if self.segment.is_followed:
                count = max(1, self._group // 8)
            if at_most is not None:
                count = min(count, at_most)
        elif self._gathers and not self.worker_pool.inline:
            count = GATHER_BATCHES
        if self.total is not None:
            count = min(count, self.total - number)
        uses = None
        if self.feed is not None:
            uses = self.feed.take(count * self.inputs_each)
            batch = self.segment.batch
            if not uses or (batch and batch.drop_last and len(uses) < batch.n):
                self._ended = True
                if not any(map(_ended_stream, uses)):
                    self.dropped_inputs = len(uses)
                    return False
        self._next += count
        self._window.extend(self._submit(number, count, uses))
        return True

    def _submit(self, number: int, count: int, uses: list[Use] | None) -> list[Item]:
        """Submit ``count`` outputs from ``number`` on; several batches only if gathered."""
        needs: set[Task] = set()
        batch = self.segment.batch
        if uses is None:
            start = number * self.inputs_each
            rows = min(count * self.inputs_each, self._examples - start)
            task = Task(self, number, rows)
            assert self._order is not None
            task.indices = self._order.span(start, start + rows)
            task.ordinals = range(start, start + rows)
            task.fresh = start + rows
            self.work.expect(task.indices)
        else:
            task = Task(self, number, len(uses))
            task.items = [item for item, _ in uses]
            task.use_keys = [use_key for _, use_key in uses]
            task.ordinals = [item.ordinal for item in task.items]
            task.fresh = self.fresh
            needs = {item.task for item in task.items if not item.task.done}
        if batch is None:
            task.values = [None] * task.rows
        elif self._rows is not None:
            task.batch = self._rows.allocate(task.rows, self._recycler)
        else:
            task.builder = Builder(task.rows, batch.collate, self._recycler)
        self.worker_pool.submit(task, needs)
        if self._gathers:
            group = self._group
            starts = range(0, task.rows, group)
            behind = [min(start + group, task.rows) for start in starts]
            return [
                Item(task, i, number + i, 0, task.ordinals[0] + stop, stop - start)
                for i, (start, stop) in enumerate(zip(starts, behind, strict=True))
            ]
        if batch is not None:
            item = Item(task, 0, number, 0, task.fresh, task.rows)
            if uses is not None:
                item.repeats = task.rows - len(set(task.ordinals))
            return [item]
        if uses is not None and self._batches:
            return [like(uses[0][0], task, uses[0][1], task.fresh)]
        use_keys = task.use_keys or [0] * task.rows
        return [
            Item(task, row, ordinal, use_key, fresh, 1)
            for row, (ordinal, use_key, fresh) in enumerate(
                zip(task.ordinals, use_keys, self._fresh_of(task, uses), strict=True)
            )
        ]

    def _fresh_of(self, task: Task, uses: list[Use] | None) -> Sequence[int]:
        """Return, for each row, the fresh examples that were read up to it."""
        if uses is None or self.feed is None:
            return [ordinal + 1 for ordinal in task.ordinals]
        if self.feed.in_order:
            return [item.fresh for item, _ in uses]
        return [task.fresh] * task.rows

    # What follows runs in workers.

    def run(self, task: Task, start: int, stop: int, remote: Any) -> list[int]:
        """Do rows of a task; return the nanoseconds spent in each stage."""
        ns = [0] * len(self._names)
        if task.batch is not None:
            assert self._rows is not None
            began = time.perf_counter_ns()
            self._rows.gather(task.indices[start:stop], task.batch, start)
            ns[0] = time.perf_counter_ns() - began
        elif remote is not None and self.work.worth_sending:
            self._run_remotely(task, start, stop, remote, ns)
        else:
            self._run_here(task, start, stop, ns)
        return ns

    def account(self, spent: list[int], rows: int) -> None:
        """Count time that was spent; called under the worker pool's lock."""
        self._tally.add(self._names, spent, rows)

    def complete(self, task: Task) -> None:
        """Finish a batch whose rows are all there."""
        if self.segment.batch is None or task.values:
            return
        if task.failed is not None:
            task.values = [task.failed[1]]
        else:
            try:
                if task.batch is not None:
                    assert self._rows is not None
                    values = self._rows.split(task.batch, self._group)
                else:
                    values = [task.builder.finish()]
            except Exception as error:
                pass_on(error)
                values = [self.work.batch_failure(error, task.number)]
            if self.segment.batch_maps:
                ns = [0] * len(self._names)
                values = [
                    value
                    if type(value) is Failure
                    else self.work.finish(value, task.number + i, 0, ns)
                    for i, value in enumerate(values)
                ]
                with self.worker_pool.lock:
                    self._tally.add(self._names, ns, 0)
            task.values = values
        task.batch = task.builder = task.indices = task.items = None

    def _run_here(self, task: Task, start: int, stop: int, ns: list[int]) -> None:
        if task.items is None:
            values = self.work.fetch(task.indices[start:stop], ns)
        else:
            values = self._taken(task.items[start:stop], own=self.segment.only_stacks)
        use_keys = task.use_keys[start:stop] if task.use_keys is not None else None
        self.work.apply(values, task.ordinals[start:stop], use_keys, ns)
        self._deliver(task, start, values, ns)

    def _deliver(self, task: Task, start: int, values: list[Any], ns: list[int]) -> None:
        if task.builder is None:
            if self.segment.into_pool:
                values = [v if type(v) is Failure else pytree.owned(v) for v in values]
            task.values[start : start + len(values)] = values
            return
        for row, value in enumerate(values, start):
            if type(value) is Failure:
                self._fail(task, row, value)
                return
        self._put(task, start, lambda: task.builder.put(start, values), ns)

    def _put(self, task: Task, start: int, put: Any, ns: list[int]) -> None:
        began = time.perf_counter_ns()
        try:
            put()
        except Exception as error:
            pass_on(error)
            self._fail(task, start, self.work.batch_failure(error, task.number))
        ns[self.work.batch_at] += time.perf_counter_ns() - began

    def _run_remotely(self, task: Task, start: int, stop: int, remote: Any, ns: list[int]) -> None:
        values = None if task.items is None else self._taken(task.items[start:stop], own=True)
        if self.work.reader is not None:  # reads go on in this process alone
            values = self.work.fetch(task.indices[start:stop], ns)
        use_keys = task.use_keys[start:stop] if task.use_keys is not None else None
        indices = None if task.indices is None or values else task.indices[start:stop]
        failed = {i: v for i, v in enumerate(values or []) if type(v) is Failure}
        for i, failure in failed.items():  # these stay here
            if self.segment.batch is not None:
                self._fail(task, start + i, failure)
                return
            assert values is not None
            values[i] = REJECTED
        whole = stop - start == task.rows
        with remote.run(
            self.depth, indices, values, task.ordinals[start:stop], use_keys, task.number, whole
        ) as (answer, spent, misdrawn):
            self._tally.misdrawn += misdrawn
            for i, each in enumerate(spent):
                ns[i] += each
            if isinstance(answer, Columns):
                self._put(
                    task,
                    start,
                    lambda: task.builder.put_columns(start, answer),
                    ns,
                )
            elif type(answer) is Failure and self.segment.batch is None:
                task.values[start:stop] = [answer] * (stop - start)
            elif self.segment.batch is None:
                task.values[start:stop] = [
                    failed.get(i, value) if type(value) is Failure else pytree.copied(value)
                    for i, value in enumerate(answer)
                ]
            elif type(answer) is Failure:
                self._fail(task, start, answer)
            else:  # a whole batch, its maps done
                task.values = [self._recycler.copied(answer)]

    def _fail(self, task: Task, row: int, failure: Failure) -> None:
        with self.worker_pool.lock:
            if task.failed is None or row < task.failed[0]:
                task.failed = (row, failure)

    def _taken(self, items: list[Item], *, own: bool) -> list[Any]:
        """Return stored values: a copy, but for an item's last use or where nothing writes."""
        lock = self.worker_pool.lock
        with lock:
            mine = [own or (i.settled and i.scheduled == 1) for i in items]
        values = []
        for item, hand_over in zip(items, mine, strict=True):
            value = item.task.values[item.row]
            if not hand_over and type(value) is not Failure:
                try:
                    value = self._recycler.copied(value)
                except Exception as error:
                    pass_on(error)
                    value = self.work.copy_failure(error, item.ordinal)
            values.append(value)
        with lock:
            for item in items:
                item.scheduled -= 1
                if item.settled and not item.scheduled:
                    item.task.values[item.row] = None
        return values


def _ended_stream(use: Use) -> bool:
    item = use[0]
    value = item.task.values[item.row] if item.task.done else None
    return type(value) is Failure and value.part == ENDED
