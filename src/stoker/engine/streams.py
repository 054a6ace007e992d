"""What a segment makes of its inputs, in order, through a bounded window."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from stoker import machine, structure
from stoker.buffers import Recycler
from stoker.engine.crew import (
    GATHER_AHEAD,
    GATHER_BATCHES,
    GATHER_INLINE_BATCH_NS,
    INLINE_BATCH_NS,
    Crew,
    Job,
    Pace,
)
from stoker.engine.items import Feed, Item, NotYet, Planning, Ready, Tally, Use, done_item, like
from stoker.engine.plan import ENDED, REJECTED, Failure, Work
from stoker.interrupts import pass_on
from stoker.orders import Order
from stoker.stages.batch import Builder, Columns

FOLLOWED_BATCHES = 8
"""Batches in front of a pool whose factor follows the stall."""


class SegmentStream:
    """What a segment makes of its inputs, in order, through a bounded window.

    Args:
        work: what is done.
        feed: where inputs come from; None for fresh examples, in ``order``.
        order: the epoch's order, None where there is no addressed source.
        examples: the number of fresh examples in the epoch.
        depth: the segment's number among those of its crew.
        group: the number of examples in a batch.
        into_pool: whether a pool keeps what comes out.
        followed: whether the pool's factor follows how fast that is.
        planning: held by whoever decides what comes next, in this run.
        read_ahead: how many examples a source wants to be told of before they are fetched.
    """

    blocking = False

    def __init__(
        self,
        work: Work,
        feed: Feed | None,
        order: Order | None,
        examples: int,
        *,
        crew: Crew,
        depth: int,
        pace: Pace,
        group: int,
        recycler: Recycler,
        tally: Tally,
        into_pool: bool,
        followed: bool,
        planning: Planning,
        read_ahead: int = 0,
    ) -> None:
        self._planning = planning
        self._read_ahead = read_ahead
        self.work = work
        self.segment = work.segment
        self.feed = feed
        self.depth = depth
        self.pace = pace
        self.crew = crew
        self._order = order
        self._group = group
        self._recycler = recycler
        self._tally = tally
        self.into_pool = into_pool
        self._followed = followed
        self._names = self.segment.names
        batch = self.segment.batch
        self.inputs_each = batch.n if batch else 1
        self._batches = batch is not None or self.segment.batches_in
        self.inputs = inputs = examples if feed is None else feed.total
        self._examples = examples
        self.total = inputs if batch is None or inputs is None else batch.count(inputs)
        maps = self.segment.batch_maps
        self._stacks = self.segment.gathers and not (maps and crew.remote)
        self._gathers_alone = self._stacks and not maps
        self._gathers = self._gathers_alone and not into_pool
        if feed is not None and not self.segment.maps and not self.segment.batch_maps:
            pace.light = True
        self._passes = feed is not None and self.segment.batches_in and not self.segment.maps
        if self._passes or self._gathers_alone:
            pace.releases_gil = True
            pace.inline_ns = GATHER_INLINE_BATCH_NS
        if self._gathers:
            pace.chunk_rows = GATHER_BATCHES * group
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
        """Whether the next batch is gathered in place, because a job would cost more."""
        if not self._gathers_alone or not self.crew.inline:
            return False
        return 0 < self.pace.batch_ns() < self.pace.inline_ns or not self.crew.limit

    @property
    def _passes_here(self) -> bool:
        """Whether the consumer copies uses itself, because a job would cost more than the copy."""
        return self._passes and (self.crew.inline or self.pace.batch_ns() < INLINE_BATCH_NS)

    def pull(self, *, patient: bool = True) -> Item | None:
        """Return the next output, and see to it that the window is filled up.

        Called by the consumer, who plans only where it has to: workers plan ahead. Raises NotYet
        if it is not ``patient`` and would have to be.
        """
        if self._window:  # nobody else takes from it
            item: Item | None = self._window.popleft()
        else:
            with self._planning.lock:
                self._planning.patient = patient
                item = self._first()
        if item is not None and (self._pulled or self._gathers):
            self.crew.plan()
        self._pulled = True  # nothing delays the first output; who takes it calls for planning
        return item

    def _first(self) -> Item | None:
        if not self._window:
            if self._passes_here:
                return self._passed()
            if not self._submit_next():
                return None
        return self._window.popleft()

    def plan_ahead(self) -> bool:
        """Begin one more output, if the window has room; return whether it has room for more.

        Called by workers. Never waiting, for who plans may wait for a worker.
        """
        if self.crew.closed or self._passes_here:  # what feeds that is filled up with each use
            return False
        if not self._planning.lock.acquire(blocking=False):
            return False
        try:
            self._planning.patient = False
            if len(self._window) >= self.ahead() or not self._submit_next():
                return False
            return len(self._window) < self.ahead()
        except NotYet as error:
            job = error.job
        finally:
            self._planning.lock.release()
        return job is not None and self.crew.plan_after(job)

    def pull_many(self, count: int) -> Iterator[Item]:
        """Yield the next ``count`` outputs, fewer only at the end; then fill the window up.

        Called by who plans.
        """
        window = self._window
        while count:
            # Inline nobody works ahead, so no more is begun than is wanted.
            at_most = count if self.crew.inline else None
            if not window and not self._submit_next(at_most):
                return
            taken = min(count, len(window))
            for _ in range(taken):
                yield window.popleft()
            count -= taken
        ahead = self.ahead()
        patient, self._planning.patient = self._planning.patient, False
        try:
            while len(window) < ahead and self._submit_next():
                pass
        except NotYet:
            pass
        finally:
            self._planning.patient = patient

    def look(self, count: int) -> tuple[int, bool]:
        """Return how many of the next ``count`` outputs are there, and whether they are the last.

        Called by who plans; never waits. Inline they are made here and now.
        """
        window = self._window
        inline = self.crew.inline
        patient, self._planning.patient = self._planning.patient, False
        try:
            least = count if inline else self.ahead()
            while len(window) < least:
                if not self._submit_next(least - len(window) if inline else None):
                    break
        except NotYet:
            pass
        finally:
            self._planning.patient = patient
        ready = 0
        for item in window:
            if ready == count or not item.job.done:
                break
            ready += 1
        return ready, ready == len(window) and (self._ended or self._next == self.total)

    def wait_for(self, count: int) -> None:
        """Return when the next ``count`` outputs are there, or all that are left."""
        window = self._window
        while len(window) < count and self._submit_next():
            pass
        for item in reversed(list(islice(window, count))):
            if not item.job.done:
                if not self._planning.patient:
                    raise NotYet(item.job)
                self.crew.wait(item.job)

    @property
    def plenty(self) -> bool:
        """Whether the window is full and done; inline, outputs are there when they are wanted."""
        window = self._window
        if self.crew.inline:
            return True
        return len(window) >= self.ahead() and window[0].job.done and window[-1].job.done

    def stock(self) -> tuple[int, int | None]:
        """Return how many outputs in the window are done, and since when all are and it is full."""
        jobs = [item.job for item in tuple(self._window)]
        done = sum(job.done for job in jobs)
        if done < len(jobs) or done < self.ahead():
            return done, None
        return done, max((job.done_ns for job in set(jobs)), default=0)

    usable_bytes = staticmethod(machine.usable_memory_bytes)

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
        batch = self.segment.source.allocate(stop - start, self._recycler)
        self.segment.source.gather(self._order.span(start, stop), batch, 0)
        spent = time.perf_counter_ns() - began
        self.pace.note(stop - start, spent)
        self._tally.add(self._names[:1], [spent], stop - start)
        self._next = number + 1
        return done_item(batch, number, 0, stop, stop - start)

    def _passed(self) -> Item | None:
        """Hand the next use on, here and now: a copy, or what is stored if it is the last."""
        assert self.feed is not None
        uses = self.feed.take(1)
        if not uses or self._next == self.total:
            return None
        item, word = uses[0]
        self.crew.wait(item.job)
        self._next += 1
        began = time.perf_counter_ns()
        (value,) = self._taken([item], own=False)
        self.pace.note(1, time.perf_counter_ns() - began)
        return like(item, Ready(value), word, self.feed.fresh)

    def again(self, number: int) -> Item:
        """Make one output once more."""
        start = number * self.inputs_each
        uses = None if self.feed is None else self.feed.again_for(start, self.inputs_each)
        return self._submit(number, 1, uses)[0]

    def start_at(self, number: int) -> None:
        """Continue with output ``number``; what feeds this stream must be there already."""
        self._next = number

    def ahead(self) -> int:
        """Return how many outputs the window holds besides the one that was asked for."""
        if self.crew.inline or (self.feed is not None and self.feed.blocking):
            return 0
        if self._gathers:
            return GATHER_AHEAD
        chunk = self.pace.chunk(self.crew.target_ns)
        examples = max(2 * self._group, 8 * self.crew.workers * chunk, self._read_ahead)
        if self._followed:  # or jitter alone would call for echoing
            examples = max(FOLLOWED_BATCHES * self._group, examples)
        elif self.feed is not None and self.feed.follows:  # what is decided early is decided badly
            examples = 2 * self._group
        return -(-examples // self._group) if self._batches else examples

    def clear(self) -> None:
        """Let go of what nobody will take any more."""
        for item in self._window:
            item.job.waiting = item.job.items = None  # jobs that wait for each other are a cycle
        self._window.clear()

    def occupancy(self) -> tuple[int, int]:
        """Return how many outputs in the window are done, and how many it may hold."""
        return sum(item.job.done for item in tuple(self._window)), self.ahead()

    def _submit_next(self, at_most: int | None = None) -> bool:
        number = self._next
        if self._ended or number == self.total:
            return False
        if self._gathers_here:
            self._window.append(self._gathered())
            return True
        count = 1
        if not self._batches:
            # Items share jobs, which cost the consumer time, but wait for no more than an eighth
            # of a batch. (Nothing is known at first: then the consumer waits for a batch anyway.)
            chunk = self.pace.chunk(self.crew.target_ns) if self.pace.row_ns else self._group
            count = min(max(chunk, self._group // 8), self._group)
            if self._followed:
                count = max(1, self._group // 8)
            if at_most is not None:
                count = min(count, at_most)
        elif self._gathers and not self.crew.inline:
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
        needs: set[Job] = set()
        batch = self.segment.batch
        if uses is None:
            start = number * self.inputs_each
            rows = min(count * self.inputs_each, self._examples - start)
            job = Job(self, number, rows)
            assert self._order is not None
            job.indices = self._order.span(start, start + rows)
            job.ordinals = range(start, start + rows)
            job.fresh = start + rows
            self.work.expect(job.indices)
        else:
            job = Job(self, number, len(uses))
            job.items = [item for item, _ in uses]
            job.words = [word for _, word in uses]
            job.ordinals = [item.ordinal for item in job.items]
            job.fresh = self.fresh
            needs = {item.job for item in job.items if not item.job.done}
        if batch is None:
            job.values = [None] * job.rows
        elif self._stacks:
            job.batch = self.segment.source.allocate(job.rows, self._recycler)
        else:
            job.builder = Builder(job.rows, batch.collate, self._recycler)
        self.crew.submit(job, needs)
        if self._gathers:
            group = self._group
            starts = range(0, job.rows, group)
            behind = [min(start + group, job.rows) for start in starts]
            return [
                Item(job, i, number + i, 0, job.ordinals[0] + stop, stop - start)
                for i, (start, stop) in enumerate(zip(starts, behind, strict=True))
            ]
        if batch is not None:
            item = Item(job, 0, number, 0, job.fresh, job.rows)
            if uses is not None:
                item.repeats = job.rows - len(set(job.ordinals))
            return [item]
        if uses is not None and self._batches:
            return [like(uses[0][0], job, uses[0][1], job.fresh)]
        words = job.words or [0] * job.rows
        return [
            Item(job, row, ordinal, word, fresh, 1)
            for row, (ordinal, word, fresh) in enumerate(
                zip(job.ordinals, words, self._fresh_of(job, uses), strict=True)
            )
        ]

    def _fresh_of(self, job: Job, uses: list[Use] | None) -> Sequence[int]:
        """Return, for each row, the fresh examples that were read up to it."""
        if uses is None or self.feed is None:
            return [ordinal + 1 for ordinal in job.ordinals]
        if self.feed.in_order:
            return [item.fresh for item, _ in uses]
        return [job.fresh] * job.rows

    # What follows runs in workers.

    def run(self, job: Job, start: int, stop: int, remote: Any) -> list[int]:
        """Do rows of a job; return the nanoseconds spent in each stage."""
        ns = [0] * len(self._names)
        if job.batch is not None:
            began = time.perf_counter_ns()
            self.segment.source.gather(job.indices[start:stop], job.batch, start)
            ns[0] = time.perf_counter_ns() - began
        elif remote is not None and self.work.worth_sending:
            self._run_remotely(job, start, stop, remote, ns)
        else:
            self._run_here(job, start, stop, ns)
        return ns

    def account(self, spent: list[int], rows: int) -> None:
        """Count time that was spent; called under the crew's lock."""
        self._tally.add(self._names, spent, rows)

    def complete(self, job: Job) -> None:
        """Finish a batch whose rows are all there."""
        if self.segment.batch is None or job.values:
            return
        if job.failed is not None:
            job.values = [job.failed[1]]
        else:
            try:
                if job.batch is not None:
                    values = self.segment.source.parted(job.batch, self._group)
                else:
                    values = [job.builder.finish()]
            except Exception as error:
                pass_on(error)
                values = [self.work.batch_failure(error, job.number)]
            if self.segment.batch_maps:
                ns = [0] * len(self._names)
                values = [
                    value
                    if type(value) is Failure
                    else self.work.finish(value, job.number + i, 0, ns)
                    for i, value in enumerate(values)
                ]
                with self.crew.lock:
                    self._tally.add(self._names, ns, 0)
            job.values = values
        job.batch = job.builder = job.indices = job.items = None

    def _run_here(self, job: Job, start: int, stop: int, ns: list[int]) -> None:
        if job.items is None:
            values = self.work.fetch(job.indices[start:stop], ns)
        else:
            values = self._taken(job.items[start:stop], own=self.segment.only_stacks)
        words = job.words[start:stop] if job.words is not None else None
        self.work.apply(values, job.ordinals[start:stop], words, ns)
        self._deliver(job, start, values, ns)

    def _deliver(self, job: Job, start: int, values: list[Any], ns: list[int]) -> None:
        if job.builder is None:
            if self.into_pool:
                values = [v if type(v) is Failure else structure.owned(v) for v in values]
            job.values[start : start + len(values)] = values
            return
        for row, value in enumerate(values, start):
            if type(value) is Failure:
                self._fail(job, row, value)
                return
        self._put(job, start, lambda: job.builder.put(start, values), ns)

    def _put(self, job: Job, start: int, put: Any, ns: list[int]) -> None:
        began = time.perf_counter_ns()
        try:
            put()
        except Exception as error:
            pass_on(error)
            self._fail(job, start, self.work.batch_failure(error, job.number))
        ns[self.work.batch_at] += time.perf_counter_ns() - began

    def _run_remotely(self, job: Job, start: int, stop: int, remote: Any, ns: list[int]) -> None:
        values = None if job.items is None else self._taken(job.items[start:stop], own=True)
        if self.work.reader is not None:  # reads go on in this process alone
            values = self.work.fetch(job.indices[start:stop], ns)
        words = job.words[start:stop] if job.words is not None else None
        indices = None if job.indices is None or values else job.indices[start:stop]
        failed = {i: v for i, v in enumerate(values or []) if type(v) is Failure}
        for i, failure in failed.items():  # these stay here
            if self.segment.batch is not None:
                self._fail(job, start + i, failure)
                return
            assert values is not None
            values[i] = REJECTED
        whole = stop - start == job.rows
        with remote.run(
            self.depth, indices, values, job.ordinals[start:stop], words, job.number, whole
        ) as (answer, spent, misdrawn):
            self._tally.misdrawn += misdrawn
            for i, each in enumerate(spent):
                ns[i] += each
            if isinstance(answer, Columns):
                self._put(
                    job,
                    start,
                    lambda: job.builder.put_columns(start, answer),
                    ns,
                )
            elif type(answer) is Failure and self.segment.batch is None:
                job.values[start:stop] = [answer] * (stop - start)
            elif self.segment.batch is None:
                job.values[start:stop] = [
                    failed.get(i, value) if type(value) is Failure else structure.copied(value)
                    for i, value in enumerate(answer)
                ]
            elif type(answer) is Failure:
                self._fail(job, start, answer)
            else:  # a whole batch, its maps done
                job.values = [self._recycler.copied(answer)]

    def _fail(self, job: Job, row: int, failure: Failure) -> None:
        with self.crew.lock:
            if job.failed is None or row < job.failed[0]:
                job.failed = (row, failure)

    def _taken(self, items: list[Item], *, own: bool) -> list[Any]:
        """Return stored values: a copy, but for an item's last use or where nothing writes."""
        lock = self.crew.lock
        with lock:
            mine = [own or (i.settled and i.scheduled == 1) for i in items]
        values = []
        for item, hand_over in zip(items, mine, strict=True):
            value = item.job.values[item.row]
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
                    item.job.values[item.row] = None
        return values


def _ended_stream(use: Use) -> bool:
    item = use[0]
    value = item.job.values[item.row] if item.job.done else None
    return type(value) is Failure and value.part == ENDED
