"""The outputs of a segment, in order, through a bounded window.

A segment is the work between two streams of stages. Each output is an ``Item``. Items
are computed by tasks (``runner``): one batch, or some examples for a pool (at least an eighth of a
batch), or a few batches that are gathered straight from arrays. The window holds the outputs that
were submitted and not taken yet (``granularity``).

The consumer calls ``pull`` of the last stream, workers call its ``plan_ahead``. The other methods
of ``Stream`` are called with the planning lock held. Outputs are appended to a window under that
lock. From the last window the consumer takes, without the lock; from the others the planner does.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from stoker.engine.checkpoint import UpstreamRequest, damage_error
from stoker.engine.items import (
    DoneTask,
    Item,
    Planning,
    PulledStream,
    Stream,
    WouldBlock,
    with_value,
)
from stoker.engine.segments.granularity import Granularity
from stoker.engine.segments.runner import SegmentRunner
from stoker.engine.work.step import ENDED, Failure
from stoker.engine.workers.threads import Task
from stoker.schedule.batch_bounds import PlannedBounds
from stoker.schedule.sharding import EpochIndices


class SegmentStream(PulledStream):
    """The outputs of a segment, in order, through a bounded window.

    Args:
        runner: does the work.
        upstream: the stream of inputs; None for fresh examples, in ``order``.
        order: the epoch's order; None without an indexed source.
        examples: the number of fresh examples in the epoch.
        granularity: how many outputs are made at once, and how many wait.
        planning: the planning lock of this run.
    """

    def __init__(
        self,
        runner: SegmentRunner,
        upstream: Stream | None,
        order: EpochIndices | None,
        examples: int,
        granularity: Granularity,
        planning: Planning,
    ) -> None:
        self._runner = runner
        self.upstream: Stream | None = upstream
        self._order = order
        self._examples = examples
        self._granularity = granularity
        self.planning = planning
        self.worker_pool = runner.worker_pool
        self.segment = segment = runner.segment
        batch = segment.batch
        self._cuts = runner.cuts
        self._address = runner.work.address
        self._first_batch, self._world = self._address.batch_place(0), self._address.world
        self._batches = batch is not None or segment.batches_in
        self.inputs = inputs = examples if upstream is None else upstream.total
        if isinstance(self._cuts, PlannedBounds):
            self.total: int | None = self._cuts.batches
        else:
            self.total = inputs if batch is None or inputs is None else batch.count(inputs)
        self._next = 0  # the number of the next output to submit
        self._window: deque[Item] = deque()
        self._has_ended = False
        self._has_pulled = False
        self.dropped_inputs = 0  # by drop_last, if the length was unknown
        self.earlier: dict[int, SegmentStream] = {}  # makes outputs below 0 again, by epochs since

    @property
    def fresh(self) -> int:
        """Fresh examples behind the outputs that were submitted."""
        if self.upstream is not None:
            return self.upstream.fresh
        return min(self._examples, self._cuts.start(self._next))

    def pull(self, *, may_block: bool = True) -> Item | None:
        """Return the next output, and ask for the window to be refilled.

        The consumer calls this. It plans only if the window is empty; otherwise workers plan ahead.
        """
        if self._window:  # the consumer alone takes from it
            item: Item | None = self._window.popleft()
        else:
            item = self._make_next(may_block)
        pool = self.worker_pool
        # The first output is handed out before planning ahead, but by one process while others
        # have nothing to do: with two of them that was a tenth of an epoch of 512 photographs.
        if item is not None and (self._has_pulled or self._granularity.gathers or pool.remote):
            pool.plan()
        self._has_pulled = True
        return item

    def _make_next(self, may_block: bool) -> Item | None:
        began, pool = time.perf_counter_ns(), self.worker_pool
        with self.planning.lock:
            self.planning.may_block = may_block
            if not self._window and self._granularity.passes_here:
                item = self._copy_next()
            else:
                item = self._window.popleft() if self._window or self._submit_next() else None
        if item is not None and pool.inline:
            pool.made_here(1 + len(self._window), time.perf_counter_ns() - began)
        return item

    def plan_ahead(self) -> bool:
        """Submit one more output if the window has room; return whether there is room for another.

        Called by workers. Must not block: the holder of the planning lock may be waiting for this
        worker (deadlock).
        """
        if self.worker_pool.closed or self._granularity.passes_here:  # copied on request
            return False
        if not self.planning.lock.acquire(blocking=False):
            return False
        try:
            self.planning.may_block = False
            if len(self._window) >= self.ahead() or not self._submit_next():
                return False
            return len(self._window) < self.ahead()
        except WouldBlock as error:
            task = error.task
        finally:
            self.planning.lock.release()
        return task is not None and self.worker_pool.plan_after(task)

    def pull_many(self, count: int) -> Iterator[Item]:
        """Yield the next ``count`` outputs, fewer only at the end; then fill the window."""
        window = self._window
        while count:
            # Inline nothing is done ahead, so no more is begun than the caller wants.
            at_most = count if self.worker_pool.inline else None
            if not window and not self._submit_next(at_most):
                return
            count_now = min(count, len(window))
            for _ in range(count_now):
                yield window.popleft()
            count -= count_now
        self.planning.without_waiting(self._fill, self.ahead())

    def make_values(self, at_most: int) -> tuple[list[Any], Sequence[int], range]:
        """Return the next outputs, single examples that are made here and now.

        Return their places, too, and the fresh examples up to each. An item for each would cost as
        much as reading it. None are returned where outputs are made otherwise, and at the end.
        """
        number = self._next
        count = 0 if self._window or number == self.total else self._granularity.here(at_most)
        if not count:
            return [], [], range(0)
        if self.total is not None:
            count = min(count, self.total - number)
        self._next += count
        values, rows, places = self._make_fresh(number, count)
        return values, places, range(rows.start + 1, rows.stop + 1)

    def poll(self, count: int) -> tuple[int, bool]:
        """Return how many of the next ``count`` outputs are ready, and whether they are the last.

        Never blocks; inline, outputs are made here and now.
        """
        window = self._window
        least = count if self.worker_pool.inline else self.ahead()
        self.planning.without_waiting(self._fill, least)
        ready = 0
        for item in window:
            if ready == count or not item.task.done:
                break
            ready += 1
        return ready, ready == len(window) and (self._has_ended or self._next == self.total)

    def _fill(self, least: int) -> None:
        """Submit outputs until the window holds ``least``, or the stream has ended."""
        window, inline = self._window, self.worker_pool.inline
        while len(window) < least:
            if not self._submit_next(least - len(window) if inline else None):
                break

    def wait_for(self, count: int) -> None:
        window = self._window
        while len(window) < count and self._submit_next():
            pass
        for item in reversed(list(islice(window, count))):
            if not item.task.done:
                if not self.planning.may_block:
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
        """Return how many outputs in the window are done; if it is full of these, since when."""
        tasks = [item.task for item in tuple(self._window)]
        done = sum(task.done for task in tasks)
        if done < len(tasks) or done < self.ahead():
            return done, None
        return done, max((task.done_ns for task in set(tasks)), default=0)

    def peek(self) -> Item | None:
        """Return the next output without taking it; begins no further one."""
        if not self._window and not self._submit_next(at_most=1):
            return None
        return self._window[0]

    def recompute(self, number: int) -> Item:
        if number < 0:
            assert self.total is not None
            back, there = divmod(number, self.total)
            item = self.earlier[-back].recompute(there)
            item.place = self._address.batch_place(number)
            return item
        upstream = self.upstream
        if upstream is None:
            return self._submit(number, 1, None)[0]
        start, stop = self._cuts.start(number), self._cuts.start(number + 1)
        if upstream.end is not None:
            stop = min(stop, upstream.end)
        return self._submit(number, 1, [*map(upstream.recompute, range(start, stop))])[0]

    def indices(self, start: int, stop: int) -> list[int]:
        """Return the indices of fresh examples ``start .. stop - 1`` that the epoch has."""
        assert self._order is not None
        indices: list[int] = self._order.span(start, max(start, min(stop, self._examples))).tolist()
        return indices

    def index_before(self, ordinal: int) -> int:
        """Return the index of a fresh example of an earlier epoch, numbered up to this one."""
        find = self._runner.work.index_before
        assert find is not None
        return find(ordinal)

    def place_before(self, number: int) -> int:
        """Return the place of an output of an earlier epoch by its number, which is below 0."""
        return self._address.batch_place(number)

    def failure(self, stage: str, error: Exception, place: int) -> Failure:
        """Return an error in using the output at a place as that output's failure."""
        return self._runner.work.failure(stage, error, place)

    def resume_point(self, output: int) -> tuple[None, int]:
        return None, self._cuts.start(output)

    def resume(self, node: None, request: UpstreamRequest) -> UpstreamRequest:
        if self.total is not None and request.next > self.total:
            raise damage_error(f"it is at {request.next:,} of {self.total:,}")
        self._next = request.next
        return request.of_inputs(self._cuts)

    def items_of(self, loaded: int) -> int:
        return self._cuts.outputs(loaded)

    def ahead(self) -> int:
        """Return how many outputs the window holds besides the requested one."""
        return self._granularity.ahead(self._window)

    def clear(self) -> None:
        for item in self._window:
            item.task.waiting = item.task.items = None  # tasks that wait for each other are a cycle
        self._window.clear()

    def _copy_next(self) -> Item | None:
        """Hand on the next use at once: a copy, or the stored item itself if it is its last use."""
        assert self.planning.is_held()
        assert self.upstream is not None
        item = next(self.upstream.pull_many(1), None)
        if item is None or self._next == self.total:
            return None
        self.worker_pool.wait(item.task)
        self._next += 1
        began = time.perf_counter_ns()
        value = self._runner.stored_value(item)
        self._runner.cost.note(1, time.perf_counter_ns() - began)
        return with_value(item, DoneTask([value]))

    def _submit_next(self, at_most: int | None = None) -> bool:
        assert self.planning.is_held()
        number = self._next
        if self._has_ended or number == self.total:
            return False
        count = (here := self._granularity.here(at_most)) or self._granularity.in_task(at_most)
        if self.total is not None:
            count = min(count, self.total - number)
        if here:
            return self._make(number, count)
        began = time.perf_counter_ns() if self._granularity.joins else 0
        self._granularity.last_ns = 0
        items: list[Item] | None = None
        if self.upstream is not None:
            wanted = self._cuts.start(number + count) - self._cuts.start(number)
            items, batch = [*self.upstream.pull_many(wanted)], self.segment.batch
            if not items or (batch and batch.drop_last and len(items) < batch.n):
                self._has_ended = True
                if not any(map(_has_stream_ended, items)):
                    self.dropped_inputs = len(items)
                    return False
        self._next += count
        self._window.extend(self._submit(number, count, items))
        if self._granularity.joins:  # reading may take long, which ``_cost`` does not tell
            self._granularity.last_ns = time.perf_counter_ns() - began
        return True

    def _make(self, number: int, count: int) -> bool:
        """Make outputs here and now; return whether there were any."""
        began, window, made = time.perf_counter_ns(), self._window, count
        if self._granularity.joins:
            made = self._join(number, count)
        else:
            values, rows, places = self._make_fresh(number, count)
            task: Any = DoneTask(values)
            if count == 1:  # the usual case without workers; a loop would cost as much as the batch
                window.append(Item(task, 0, places[0], 0, rows.stop, len(rows)))
            else:
                window.extend(self._fresh_outputs(task, number, len(rows), places))
        self._next += made
        self._granularity.last_ns = (time.perf_counter_ns() - began) // count
        return made > 0

    def _make_fresh(self, number: int, count: int) -> tuple[list[Any], range, Sequence[int]]:
        """Return outputs made here and now, the fresh examples in them, and their places."""
        assert self._order is not None
        cuts, runner = self._cuts, self._runner
        start, stop = cuts.start(number), min(cuts.start(number + count), self._examples)
        rows, find = range(start, stop), runner.work.places
        indices = self._order.span(start, stop)
        if self.segment.batch is None:
            places = find(rows)
            return runner.make_now(number, indices, lambda: places), rows, places
        values = runner.make_now(number, indices, functools.partial(find, rows))
        return values, rows, self._batch_places(number, count)

    def _batch_places(self, number: int, count: int) -> range:
        """Return the places of batches from ``number`` on."""
        first = self._first_batch + number * self._world
        return range(first, first + count * self._world, self._world)

    def _join(self, number: int, count: int) -> int:
        """Join packed sequences to batches here and now; return how many there were."""
        batch = self.segment.batch
        assert self.upstream is not None
        assert batch is not None
        items, size = [*self.upstream.pull_many(count * batch.n)], batch.n
        rest = len(items) % size
        if len(items) < count * size:
            self._has_ended = True
            if rest and batch.drop_last and not any(map(_has_stream_ended, items[-rest:])):
                self.dropped_inputs = rest
                del items[-rest:]
        made = self._runner.join_now(items, size) if items else []
        task: Any = DoneTask(made)
        for i in range(len(made)):
            group = items[i * size : (i + 1) * size]
            place = self._address.batch_place(number + i)
            self._window.append(Item(task, i, place, 0, group[-1].fresh, len(group)))
        return len(made)

    def _fresh_outputs(
        self, task: Task, number: int, rows: int, places: Sequence[int]
    ) -> list[Item]:
        """Return the outputs at these places, of so many fresh examples, from ``number`` on."""
        first = self._cuts.start(number)
        return [
            Item(task, i, places[i], 0, first + stop, stop - start)
            for i, (start, stop) in enumerate(self._cuts.spans(number, rows))
        ]

    def _submit(self, number: int, count: int, items: list[Item] | None) -> list[Item]:
        """Submit ``count`` outputs from ``number`` on; several batches only if gathered.

        They are made of these items, or of fresh examples if that is None.
        """
        needs = set[Task]()
        if items is None:
            assert self._order is not None
            start = self._cuts.start(number)
            stop = min(self._cuts.start(number + count), self._examples)
            task = Task(self._runner, number, stop - start)
            task.places = self._runner.work.places(range(start, stop))
            task.indices = self._order.span(start, stop)
            self._runner.work.fetcher.expect(task.indices)
        else:
            task = Task(self._runner, number, len(items))
            task.places = [item.place for item in items]
            task.items = items
            task.uses = uses = [item.use for item in items]
            needs = {item.task for item in items if not item.task.done}
        self._runner.allocate(task)
        self.worker_pool.submit(task, needs)
        if items is None:
            is_batch = self.segment.batch is not None
            places = self._batch_places(number, count) if is_batch else task.places
            return self._fresh_outputs(task, number, task.rows, places)
        if self.segment.batch is None:
            return [with_value(item, task, row) for row, item in enumerate(items)]
        rows, repeats = len(items), len(items) - len({*task.places})
        place = self._address.batch_place(number)
        batch = Item(task, 0, place, 0, items[-1].fresh, rows, repeats)
        batch.examples = uses, [item.age for item in items]
        return [batch]


def _has_stream_ended(item: Item) -> bool:
    value = item.task.values[item.row] if item.task.done else None
    return type(value) is Failure and value.part == ENDED
