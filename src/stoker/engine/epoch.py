"""Builds the streams and the worker pools of one epoch from a flow.

Segments on the host share one worker pool and one planning lock; the last of their streams plans
for all of them. Segments behind a device have a pool and a lock of their own, and the consumer
alone plans and does their work.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.generators import SeededGenerator
from stoker.engine.flow import Own
from stoker.engine.heads import Prefetcher, SequentialStream
from stoker.engine.items import (
    EpochCounters,
    Item,
    Planning,
    PulledStream,
    RepeatingStream,
    Stream,
    row,
)
from stoker.engine.segments.granularity import FOLLOWED_BATCHES, Granularity
from stoker.engine.segments.runner import SegmentRunner
from stoker.engine.segments.stream import SegmentStream
from stoker.engine.setup import EpochSetup, PaddingMask, StreamContext
from stoker.engine.survivors import SkipLog
from stoker.engine.work.segment import Segment
from stoker.engine.work.work import Work
from stoker.engine.workers.make import Workers, make_pool
from stoker.engine.workers.threads import WorkerPool
from stoker.engine.workers.tuning import Autotuner
from stoker.schedule.batch_bounds import BatchBounds, FixedBatches
from stoker.schedule.sharding import EpochIndices, PaddedSharding
from stoker.sources.source import Reader
from stoker.stats import PartStats

if TYPE_CHECKING:
    from stoker.engine.work.cached import Lookups


class EpochStreams:
    """The streams and worker pools of one epoch, and what they share.

    Attributes:
        last: the stream that the consumer takes outputs from.
        last_pool: the worker pool of that stream; ``worker_pool``: the pool of the host's segments.
        segments: the streams of the segments; ``own``: those that stages put on top.
        head: the stream of a loader or an iterable; None for an indexed source.
        prefetcher: reads the head ahead, in a thread; None without an adaptive echo behind it.
        padded: the deal that pads this rank's examples, or None; ``mask``: marks padding in
            outputs.
        echo: the stream of the echo's uses, or None.
        planning: the planning lock.
        recycler: the owner of the batches' memory.
        tally: counts time; ``skip_log``: records skips.
    """

    last: PulledStream
    last_pool: WorkerPool

    def __init__(self, setup: EpochSetup) -> None:
        self._setup = setup
        self._flow, self._seed, self._epoch = setup.flow, setup.seed, setup.epoch
        self.planning = Planning()
        self._planning_apart = Planning()  # for segments on a device, which only the consumer plans
        self.recycler = setup.recycler
        self.tally = EpochCounters()
        self.skip_log = SkipLog(setup.position.spent, setup.position.filtered)
        self.echo: RepeatingStream | None = None
        self.segments: list[SegmentStream] = []
        self.own: list[Stream] = []
        self.head: SequentialStream | None = None
        self.prefetcher: Prefetcher | None = None
        self._reader: Reader | None = None
        self._lookups: Lookups | None = None
        self._worker_pools: list[WorkerPool] = []
        self._order: EpochIndices | None = None
        self.padded: PaddedSharding | None = None
        self.mask: PaddingMask | None = None
        self._examples = 0
        self._works: dict[int, Work] = {}
        self._held: dict[int, list[list[SeededGenerator]]] = {}
        self._earlier: dict[int, tuple[Work, EpochIndices]] = {}  # by the number of epochs since
        self._stream: Any = None  # the last one so far
        self._depth = self._host_depths = 0

    @property
    def worker_pool(self) -> WorkerPool:
        """The worker pool of the host's segments."""
        return self._worker_pools[0]

    def valid(self, item: Item) -> NDArray[np.bool_]:
        """Return which examples of an output are not padding."""
        if self.padded is None:
            return np.ones(item.rows, bool)
        return self.padded.valid(item.fresh - item.rows, item.fresh)

    @property
    def order_digest(self) -> str:
        """The digest of an order that is drawn by weights or a function; "" for other orders."""
        return "" if self._order is None else self._order.digest

    def part_stats(self, fresh: int) -> tuple[PartStats, ...]:
        """Return the statistics of a mixture's parts after ``fresh`` examples."""
        if self._flow.indexed is None or self._order is None:
            return ()
        return self._flow.indexed.part_stats(self._order, fresh)

    def build(self) -> None:
        """Build everything. After an error, ``close`` ends what was built before it."""
        flow, orders = self._flow, self._flow.orders
        share = orders.selection.share
        if flow.indexed is not None:
            self._order = orders.order(self._seed, self._epoch)
            self._examples = self.skip_log.examples = len(self._order)
            self.padded = self._order.padded
            if self.padded is not None and flow.mask is not None:
                self.mask = PaddingMask(flow.mask, self.padded)
            # Planned batches of a rank have examples of all ranks: no run of its own.
            is_all = orders.rule is not None and share is not None and share.world > 1
            self._reader = flow.indexed.reader(None if is_all else orders.selection)
            if flow.cache is not None and not self._setup.workers.sends(flow.segments[0]):
                self._lookups = flow.cache.cache.batch_lookups()
        self._held = {segment.at: segment.find_generators() for segment in flow.segments}
        self._works = {
            segment.at: self._work(segment, self._epoch, self._order) for segment in flow.segments
        }
        self._look_back()
        self._hire()
        self._open_head()
        for work in self._works.values():
            self.tally.open(work.segment.at, work.segment.names)
        self.last_pool = self.worker_pool
        for layer in flow.layers:
            self._stream = layer.open(self._stream, self)

    def _work(self, segment: Segment, epoch: int, order: EpochIndices | None) -> Work:
        address = self._flow.address(segment.at, self._seed, epoch)
        return Work(segment, address, self._flow.indexed, order, self._held[segment.at])

    def _look_back(self) -> None:
        """Prepare to make again the items of earlier epochs that the pool holds."""
        flow = self._flow
        if flow.indexed is None or not flow.carries_pool:
            return
        items = flow.items_of_first(self._examples)
        for node in self._setup.position.parts:
            assert node is not None  # the pool's, which is the only one
            for back in node.epochs_back(items):
                epoch = self._epoch - back
                order = flow.orders.order(self._seed, epoch)
                self._earlier[back] = self._work(flow.segments[0], epoch, order), order
        orders, examples = (
            {back: order for back, (_, order) in self._earlier.items()},
            self._examples,
        )

        def index_before(ordinal: int) -> int:
            back, there = divmod(ordinal, examples)
            return int(orders[-back].span(there, there + 1)[0])

        for work in self._works.values():
            work.index_before = index_before

    def _hire(self) -> None:
        """Make the worker pools: one for the host, one for segments on a device."""
        flow = self._flow
        host = [work for work in self._works.values() if not work.segment.on_device]
        on_device = len(self._works) - len(host)
        self._host_depths = len(host)
        host += [work for work, _ in self._earlier.values()]
        given = self._setup.workers
        if flow.source.yields_batches:
            given = Workers(0)
        for segment in flow.segments:
            if not given.sends(segment) and (given.count or not segment.users_code):
                _refuse_threads(segment, self._held[segment.at])
        pool = make_pool(given, host, self._setup.autotuner, self._setup.kept_workers)
        for work in host:  # after they were pickled for processes
            if work.segment.source is not None:
                work.fetcher.reader, work.fetcher.lookups = self._reader, self._lookups
        if flow.iterated is not None and pool.limit:
            pool.work_ahead()  # an iterable's next() may be slow: other work goes on meanwhile
        in_turn = all(segment.behind.in_turn for segment in flow.segments)
        if not in_turn and pool.limit and not given.grows:
            pool.take_all()
        tail = WorkerPool(0, max(1, on_device), Autotuner())
        self._worker_pools = [pool, tail]
        pool.begin()

    def _open_head(self) -> None:
        """Begin to iterate over a source that is not indexed."""
        flow = self._flow
        if flow.iterated is None:
            return
        head: SequentialStream = flow.iterated.head(self._setup, self.tally)
        self.last = self.head = head
        if flow.is_adaptive:
            size = FOLLOWED_BATCHES * (1 if flow.iterated.yields_batches else flow.orders.group)
            pool = self.worker_pool
            self.last = self.prefetcher = Prefetcher(head, size, self.planning, pool)
        self._stream = self.last

    def open_own(self, layer: Own, upstream: Any) -> Stream:
        """Return the stream of a stage over that of the layer before it."""
        pool, planning = self._where(layer)
        context = StreamContext(
            layer, self._setup, self.tally, self.skip_log, pool, planning, self.mask
        )
        own: Any = layer.stage.stream(upstream, context)
        self.own.append(own)
        if layer.stage.traits.repeats:
            self.echo = own
        if layer.stage.traits.moves:  # the mask, too
            self.last, self.mask, self._depth = own, None, 0
        stream: Stream = own
        return stream

    def open_segment(self, part: Segment, upstream: Any) -> SegmentStream:
        """Return the stream of a segment over that of the layer before it."""
        pool, planning = self._where(part)
        work, orders = self._works[part.at], self._flow.orders
        each = 1 if part.batches_in else orders.group
        cost = self._setup.autotuner.cost(part.at, each, self._flow.uses_behind(part))
        is_sent = not part.on_device and self._setup.workers.sends(part)
        cost.whole = is_sent and bool(part.batch_maps or (part.batch and part.batch.collate))

        def stream_of(work: Work, depth: int, order: EpochIndices | None) -> SegmentStream:
            batch, reader = part.batch, work.fetcher.reader
            cuts: BatchBounds = FixedBatches(batch.n if batch is not None else 1)
            if batch is not None and batch.is_planned:
                cuts = orders.cuts(self._seed, self._epoch)
            runner = SegmentRunner(
                work, pool, depth, cost, orders.group, cuts, self.recycler, self.tally, is_sent
            )
            read_ahead = 0 if reader is None else 2 * reader.requests
            most_ahead = self._setup.workers.ahead
            granularity = Granularity(runner, upstream, orders.group, read_ahead, most_ahead)
            return SegmentStream(runner, upstream, order, self._examples, granularity, planning)

        stream = stream_of(work, self._depth, self._order)
        if not self.segments:  # the works of earlier epochs come after all others
            depths = enumerate(self._earlier.items(), self._host_depths)
            stream.earlier = {
                back: stream_of(work, depth, order) for depth, (back, (work, order)) in depths
            }
        if not part.on_device:
            pool.plan_with(stream.plan_ahead)  # the last stream plans for all
        self.segments.append(stream)
        self.last, self.last_pool = stream, pool
        self._depth += 1
        return stream

    def _where(self, part: Segment | Own) -> tuple[WorkerPool, Planning]:
        if part.on_device:
            return self._worker_pools[1], self._planning_apart
        return self.worker_pool, self.planning

    def end_whole(self, is_whole: bool) -> None:
        """Say whether the consumer has all outputs: processes may then stay for another epoch."""
        for pool in self._worker_pools:
            pool.is_whole = is_whole

    def close(self) -> None:
        """End all threads and processes, and close what a source has open."""
        with contextlib.ExitStack() as rest:  # does all of it, even if Ctrl-C comes in between
            for stream in row(self._stream):
                rest.callback(stream.clear)
            if self._flow.cache is not None:
                rest.callback(self._flow.cache.cache.flush)
            for pool in self._worker_pools:
                rest.callback(pool.close)
            if self._lookups is not None:
                rest.callback(self._lookups.close)
            if self._reader is not None:
                rest.callback(self._reader.close)  # releases workers that wait for it
            for pool in self._worker_pools:
                rest.callback(pool.shut)  # runs first


def _refuse_threads(segment: Segment, held: list[list[SeededGenerator]]) -> None:
    """Raise TypeError if code that runs in threads holds generators: nobody could repeat it."""
    for caller, generators in zip(segment.callers, held, strict=True):
        if generators:
            paths = ", ".join(each.path for each in generators)
            raise TypeError(
                f"{caller.name} draws from {paths}, which threads would share, each taking what "
                "comes next: draw from the rng of .random_map(fn), which is given to fn(x, rng), "
                'or run this code in processes (.workers(n, kind="process"), without '
                "stoker.thread_safe)"
            )
