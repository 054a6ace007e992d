"""One epoch being run: a plan's streams, its crew, and where it stands."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker import machine, randomness, structure
from stoker.buffers import Recycler
from stoker.echoing.pool import Pool, Snapshot
from stoker.engine.crew import Crew, Tempo
from stoker.engine.items import Feed, Planning, Tally
from stoker.engine.iterated import IteratedStream
from stoker.engine.outside import DeviceStream, Direct, LoaderStream
from stoker.engine.plan import Failure, Plan, Rejected, Segment, Sift, Work
from stoker.engine.pooled import PooledFeed
from stoker.engine.sieve import Ledger, Record, Sieve
from stoker.engine.streams import SegmentStream
from stoker.errors import StateError
from stoker.orders import order_of
from stoker.stages.device import Mover, To
from stoker.stages.echo import DEFAULT_POOL_BATCHES, DEFAULT_POOL_MEMORY_FRACTION, Echo
from stoker.stages.source import LoaderSource, ReadAhead
from stoker.stages.stream import IterableSource
from stoker.stats import PoolStats, StageStats, Stats

_PRUNE_BATCHES = 64


@dataclass
class Resolved:
    """A pool's size, once it is known.

    Attributes:
        size: items.
        item_bytes: bytes of the first item, 0 while nobody has looked.
    """

    size: int
    item_bytes: int = 0


@dataclass
class Workers:
    """How work is shared out: ``.workers(n, kind)``."""

    count: int
    kind: str


@dataclass
class Position:
    """Where an epoch is: enough to go on from there.

    Attributes:
        yielded, uses: outputs and examples that were handed out.
        snapshots: one of each pool, in the order that data meets them.
        items: how many fresh items each pool had in the epoch, where its end has told.
        records: of each sift, which examples it left out.
        spent: how much of each skip budget is spent; ``filtered``: what filters left out.
    """

    yielded: int = 0
    uses: int = 0
    snapshots: list[Snapshot] = field(default_factory=list)
    items: list[int | None] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    spent: dict[int, int] = field(default_factory=dict)
    filtered: int = 0


class Run:
    """An epoch of a plan, from its beginning or from a position.

    Args:
        plan: the plan.
        seed, epoch: they decide the order and every draw.
        tempo: the pipeline's memory of its speed.
        workers: how work is shared out.
        resolved: the sizes of the pools that are known; filled in here.
        position: where to begin.
    """

    def __init__(
        self,
        plan: Plan,
        seed: int,
        epoch: int,
        tempo: Tempo,
        workers: Workers,
        resolved: dict[int, Resolved],
        position: Position,
    ) -> None:
        self.plan = plan
        self.tally = Tally()
        self.recycler = Recycler()
        self.yielded = position.yielded
        self.uses = position.uses
        self.fresh = 0
        self.repeats = 0
        self.wait_ns = 0
        self.batch_bytes = 0
        self.ended_ns = 0
        self.began_ns = time.perf_counter_ns()
        self.closed = False
        self.complete = False
        self.feeds: list[PooledFeed] = []
        self.segments: list[SegmentStream] = []
        self._resolved = resolved
        self._seed, self._epoch = seed, epoch
        self._planning = Planning()
        self._ledger = Ledger(position.spent, position.filtered)
        self._loader: LoaderStream | None = None
        self._iterated: IteratedStream | None = None
        self._reader: Any = None
        self._device: DeviceStream | None = None
        self._crews: list[Crew] = []
        began = time.perf_counter_ns()
        try:
            self._stream = self._build(tempo, workers)
            if position.yielded:
                self._resume(position)
        except BaseException:
            self.close()
            raise
        self.wait_ns = time.perf_counter_ns() - began  # iter() may start processes

    @property
    def total(self) -> int | None:
        """The number of outputs of the epoch, or None."""
        total: int | None = self._stream.total
        return total

    @property
    def crew(self) -> Crew:
        """The crew of the host's segments."""
        return self._crews[0]

    def next(self) -> Any:
        """Return the next output.

        Raises:
            StopIteration: the epoch is over.
            StageError: a stage failed on an example that this output needs.
        """
        began = time.perf_counter_ns()
        item = self._stream.pull()
        if item is None:
            raise StopIteration
        job = item.job
        if not job.done:
            self._crew_of_last.wait(job)
        value, job.values[item.row] = job.values[item.row], None
        if type(value) is Failure:
            if isinstance(value.error, Rejected):
                raise StateError(
                    "a filter let an example through before the resume and rejects it now: filters "
                    "must be deterministic"
                )
            raise value.error
        self.wait_ns += time.perf_counter_ns() - began
        if not self.yielded:
            self._crew_of_last.plan()
        self.yielded += 1
        self.fresh = item.fresh
        self.uses += item.rows
        self.repeats += item.repeats
        if not self.batch_bytes:
            self.batch_bytes = structure.nbytes(value)
            for feed in self.feeds:
                known = self._resolved[feed.echo.position]
                known.item_bytes = known.item_bytes or feed.item_bytes()
        if self.yielded % _PRUNE_BATCHES == 0:
            self._forget()
        return value

    def position(self) -> Position:
        """Return where the last output that was handed out stands.

        Of a loader or a stream without what a resume needs, for there is none; and without waiting
        for who may be reading it.
        """
        if self._loader is not None or self._iterated is not None:
            return Position(self.yielded, self.uses)
        with self._planning.lock:
            snapshots, records = self._needed(self.yielded)
            pools = [feed.pool for feed in self.feeds] if snapshots else []
            return Position(
                self.yielded,
                self.uses,
                snapshots,
                [pool.admitted if pool.ended else None for pool in pools],
                records,
                dict(self._ledger.spent),
                self._ledger.filtered,
            )

    def close(self) -> None:
        """End every thread and process of this run, and let go of a loader's iterator."""
        if self.closed:
            return
        self.closed = True
        self.ended_ns = time.perf_counter_ns()
        with contextlib.ExitStack() as rest:  # all of it, should Ctrl-C come in between
            rest.callback(self.recycler.clear)
            sieves = [s.feed.upstream for s in self.segments if s.feed and _is_sieve(s.feed)]
            outside = (self._device, self._loader, self._iterated)
            for part in (*self.feeds, *sieves, *self.segments, *outside):
                if part is not None:
                    rest.callback(part.clear)
            for crew in self._crews:
                rest.callback(crew.close)
            if self._reader is not None:
                rest.callback(self._reader.close)  # lets go of workers that wait for it
            for crew in self._crews:
                rest.callback(crew.shut)  # this first of all

    def loader_error(self) -> BaseException | None:
        """Return what a foreign loader raised, once."""
        return self._loader.take_error() if self._loader is not None else None

    def held(self) -> dict[int, int]:
        """Return how many items each pool holds."""
        return {f.echo.position: f.pool.held for f in self.feeds if f.started}

    def stats(self, pools: tuple[PoolStats, ...]) -> Stats:
        """Return what happened so far."""
        tally = self.tally
        with self.crew.lock:
            stages = tuple(
                StageStats(name, ns / 1e9, tally.stage_rows[name])
                for name, ns in tally.stage_ns.items()
            )
        ready, size = self.segments[-1].occupancy() if self.segments else (0, 0)
        ended_ns = self.ended_ns or time.perf_counter_ns()
        worked_s = sum(stage.seconds for stage in stages)
        return Stats(
            epoch=self._epoch,
            fresh_examples=self.fresh,
            uses=self.uses,
            batches=self.yielded,
            dropped_uses=self._dropped(),
            repeats_in_batches=self.repeats,
            copy_distance=tally.distance_sum / tally.distances if tally.distances else 0.0,
            elapsed_s=(ended_ns - self.began_ns) / 1e9,
            consumer_wait_s=self.wait_ns / 1e9,
            production_s_per_example=worked_s / self.fresh if self.fresh else 0.0,
            stages=stages,
            workers=self.crew.active,
            window_ready=ready,
            window_size=size,
            window_bytes=self._window_bytes() + self.recycler.held_bytes(),
            pools=pools,
            filtered_examples=self._ledger.filtered,
            skipped_examples=self._ledger.skipped,
            skips=tuple(self._ledger.skips),
        )

    def _window_bytes(self) -> int:
        total = 0
        echoes = [feed.echo.position for feed in self.feeds]
        for stream in self.segments:
            unit = self.batch_bytes
            if stream.into_pool:  # the pool it fills is the next one that is left
                known = self._resolved.get(echoes.pop(0) if echoes else -1)
                unit = known.item_bytes if known else 0
            total += stream.ahead() * unit
        return total

    def _dropped(self) -> int:
        for stream in self.segments:
            batch = stream.segment.batch
            if batch is not None and batch.drop_last:
                inputs = stream.inputs
                return stream.dropped_inputs if inputs is None else inputs % batch.n
        return 0

    # -- building

    def _build(self, tempo: Tempo, workers: Workers) -> Any:
        plan, seed, epoch = self.plan, self._seed, self._epoch
        parts = plan.parts
        order = None
        examples = 0
        loader = isinstance(plan.source, LoaderSource)
        iterable = isinstance(plan.source, IterableSource)
        rank = plan.share.rank if plan.share else 0
        if not loader and not iterable:
            length = len(plan.source)
            order = order_of(length, seed, epoch, shuffled=plan.shuffled, share=plan.share)
            examples = len(order)
            self._ledger.examples = examples
            if isinstance(plan.source, ReadAhead):
                self._reader = plan.source.reader()
        device = next((i for i, part in enumerate(parts) if isinstance(part, To)), len(parts))
        works = {
            i: Work(part, seed, epoch, None if iterable else plan.source, order, part=i, rank=rank)
            for i, part in enumerate(parts)
            if isinstance(part, Segment)
        }
        host = [works[i] for i in sorted(works) if i < device]
        crew = self._hire(host, tempo, workers, loader, rank)
        for work in host:  # once they were pickled for processes
            if work.segment.source is not None:
                work.reader = self._reader
        if iterable and crew.limit:
            crew.work_ahead()  # nobody knows what reading costs, so it goes on beside the consumer
        tail = Crew(0, max(1, len(works) - len(host)), Tempo())
        self._crews = [crew, tail]
        crew.begin()
        if iterable:
            self.tally.add([plan.source.name], [0], 0)
        for work in works.values():
            self.tally.add(work.segment.names, [0] * len(work.segment.names), 0)
        stream: Any = None
        if loader:
            iterator = iter(plan.source.loader)
            stream = self._loader = LoaderStream(
                iterator,
                plan.source.name,
                self.tally,
                self.recycler if any(isinstance(part, Echo) for part in parts) else None,
            )
        if iterable:
            key = randomness.key(seed, epoch, randomness.SHUFFLE, rank)
            stream = self._iterated = IteratedStream(
                plan.source, plan.share, plan.buffer, key, self.tally
            )
        feed: Any = None
        self._crew_of_last = crew
        depth = 0
        for i, part in enumerate(parts):
            if isinstance(part, Echo):
                feed = PooledFeed(part, self._make_pool, stream, self.tally)
                self.feeds.append(feed)
            elif isinstance(part, Sift):
                stream = Sieve(part, i - 1, stream, crew, self._ledger, self._planning)
            elif isinstance(part, To):
                stream = self._device = DeviceStream(stream, Mover(part.device), crew)
                depth = 0
            else:
                if feed is None and stream is not None:
                    feed = Direct(stream)
                here = crew if i < device else tail
                pace = tempo.pace(i, 1 if part.batches_in else plan.group)
                pace.whole = workers.kind == "process" and bool(
                    part.batch_maps or (part.batch and part.batch.collate)
                )
                stream = SegmentStream(
                    works[i],
                    feed,
                    order,
                    examples,
                    crew=here,
                    depth=depth,
                    pace=pace,
                    group=plan.group,
                    recycler=self.recycler,
                    tally=self.tally,
                    into_pool=_is_echo([p for p in parts[i + 1 :] if not isinstance(p, Sift)]),
                    planning=self._planning if here is crew else Planning(),
                    read_ahead=2 * plan.source.requests if works[i].reader else 0,
                )
                if here is crew:
                    crew.plan_with(stream.plan_ahead)  # the last one's: it plans for all
                self.segments.append(stream)
                self._crew_of_last = here
                feed = None
                depth += 1
        return stream

    def _hire(
        self, host: list[Work], tempo: Tempo, workers: Workers, loader: bool, rank: int
    ) -> Crew:
        depths = max(1, len(host))
        if loader or workers.count == 0:
            return Crew(0, depths, tempo)
        if workers.kind == "process":
            from stoker.engine import processes  # multiprocessing takes its time to import

            remotes = processes.start(workers.count, host, self._seed, self._epoch, rank)
            return Crew(workers.count, depths, tempo, remotes)
        return Crew(workers.count, depths, tempo)

    # -- pools

    def _make_pool(self, feed: PooledFeed) -> Pool:
        echo = feed.echo
        group = 1 if self._batches_into(feed) else self.plan.group
        resolved = self._resolved.get(echo.position)
        if resolved is None:
            resolved = self._resolved[echo.position] = self._resolve(feed, group)
        if resolved.size < echo.smallest_distinct(group):
            what = "repeat a batch at once" if group == 1 else "hold an example twice"
            warnings.warn(
                f"{echo.name}: with a pool of {resolved.size} a batch may {what}; "
                f"at least {echo.smallest_distinct(group)} keep uses apart",
                stacklevel=6,
            )
        key = randomness.key(self._seed, self._epoch, randomness.ECHO + echo.position)
        # The pool admits an epoch of less than two groups whole.
        return Pool(
            echo.factor, resolved.size, group, key, feed.count(2 * group if group > 1 else 0)
        )

    def _batches_into(self, feed: PooledFeed) -> bool:
        at = self.plan.parts.index(feed.echo)
        before = self.plan.parts[at - 1] if at else None
        if isinstance(before, Sift):
            return False
        if isinstance(before, Segment):
            return before.batch is not None or before.batches_in
        return True

    def _resolve(self, feed: PooledFeed, group: int) -> Resolved:
        echo = feed.echo
        if echo.pool is not None:
            return Resolved(echo.pool)
        item = feed.upstream.peek()
        if item is None:
            return Resolved(DEFAULT_POOL_BATCHES * group)
        self.crew.wait(item.job)
        value = item.job.values[item.row]
        if type(value) is Failure:
            raise value.error
        each = max(1, structure.nbytes(value))
        if echo.pool_bytes is not None:
            size = echo.pool_bytes // each
            if size < group:
                raise ValueError(
                    f"{echo.name}: a pool of {machine.format_bytes(echo.pool_bytes)} holds {size} "
                    f"items of {machine.format_bytes(each)}, less than a batch of {group}; "
                    "give the pool more, or make batches smaller"
                )
            return Resolved(size, each)
        free = feed.upstream.usable_bytes()
        usable = int(free * DEFAULT_POOL_MEMORY_FRACTION)
        return Resolved(max(group, min(DEFAULT_POOL_BATCHES * group, usable // each)), each)

    # -- where it stands

    def _uses_taken(self, outputs: int, stream: SegmentStream) -> int:
        assert stream.feed is not None
        inputs = outputs * stream.inputs_each
        return inputs if stream.feed.total is None else min(inputs, stream.feed.total)

    def _needed(self, yielded: int) -> tuple[list[Snapshot], list[Record]]:
        """Return what a resume at ``yielded`` needs of each pool and each sift, in order."""
        snapshots: list[Snapshot] = []
        records: list[Record] = []
        oldest = yielded  # the oldest output of the stream at hand that is asked for again
        for stream in reversed(self.segments):
            feed = stream.feed
            if feed is None:
                break
            if isinstance(feed, PooledFeed):
                if not feed.started:
                    return [], []
                snapshot = feed.pool.snapshot(self._uses_taken(oldest, stream) // feed.pool.group)
                snapshots.append(snapshot)
                oldest = int(snapshot.ordinals[0]) if len(snapshot.ordinals) else snapshot.admitted
            else:
                oldest *= stream.inputs_each
            if _is_sieve(feed):
                record = feed.upstream.needed(oldest)
                records.append(record)
                oldest = record.number
        return snapshots[::-1], records[::-1]

    def _forget(self) -> None:
        if not self._planning.lock.acquire(blocking=False):
            return  # another time will do
        try:
            snapshots, records = self._needed(self.yielded)
            for feed, snapshot in zip(self.feeds, snapshots, strict=False):
                feed.pool.forget_before(snapshot.step)
            sieves = [s.feed.upstream for s in self.segments if s.feed and _is_sieve(s.feed)]
            for sieve, record in zip(sieves, records, strict=False):
                sieve.forget_before(record.survivors)
        finally:
            self._planning.lock.release()

    def _resume(self, position: Position) -> None:
        if self._loader is not None or self._iterated is not None:
            raise AssertionError("a loader or a stream has no position to go to")
        snapshots = list(position.snapshots)
        items = list(position.items)
        records = list(position.records)
        sieves = sum(stream.feed is not None and _is_sieve(stream.feed) for stream in self.segments)
        if records and len(records) != sieves:
            raise StateError(
                "the state was saved with other skip budgets: examples it left out cannot be told"
            )
        outputs = position.yielded
        needed: set[int] = set()
        for stream in reversed(self.segments):
            stream.start_at(outputs)
            feed = stream.feed
            if feed is None:
                break
            each = stream.inputs_each
            needed = {n * each + i for n in needed for i in range(each)}
            record = None
            if _is_sieve(feed):
                record = records.pop() if records else Record()
            if isinstance(feed, PooledFeed):
                taken = self._uses_taken(outputs, stream)
                needed = feed.replay(snapshots.pop(), taken, needed, items.pop())
                outputs = feed.pool.admitted
            else:
                outputs *= each
            if record is not None:
                record.seen = max(
                    record.seen, outputs
                )  # all survived where nothing could be left out
                needed = {record.number_of(n) for n in needed}
                outputs = feed.upstream.start_at(record, outputs)
        for pooled in self.feeds:
            pooled.refill()
        self.fresh = self._stream.fresh


def _is_sieve(feed: Feed) -> bool:
    return isinstance(feed.upstream, Sieve)


def _is_echo(parts: Sequence[Any]) -> bool:
    return bool(parts) and isinstance(parts[0], Echo)
