"""One epoch being run: a plan's streams, its crew, and where it stands."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

from stoker import machine, randomness, structure
from stoker.buffers import Recycler
from stoker.echoing.pool import Pool, Snapshot
from stoker.engine import processes
from stoker.engine.crew import Crew, Tempo
from stoker.engine.outside import DeviceStream, Direct, LoaderStream
from stoker.engine.plan import Failure, Plan, Segment, Work
from stoker.engine.pooled import PooledFeed
from stoker.engine.streams import SegmentStream, Tally
from stoker.randomness import Order
from stoker.stages.device import Mover, To
from stoker.stages.echo import DEFAULT_POOL_BATCHES, DEFAULT_POOL_MEMORY_FRACTION, Echo
from stoker.stages.source import LoaderSource
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
    """Where an epoch is: enough to go on from there."""

    yielded: int = 0
    uses: int = 0
    snapshots: list[Snapshot] = field(default_factory=list)


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
        self._planning = threading.RLock()
        self._loader: LoaderStream | None = None
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
        """Return where the last output that was handed out stands."""
        with self._planning:
            return Position(self.yielded, self.uses, self._snapshots(self.yielded))

    def close(self) -> None:
        """End every thread and process of this run, and let go of a loader's iterator."""
        if self.closed:
            return
        self.closed = True
        self.ended_ns = time.perf_counter_ns()
        with contextlib.ExitStack() as rest:  # all of it, should Ctrl-C come in between
            rest.callback(self.recycler.clear)
            for part in (*self.feeds, *self.segments, self._device, self._loader):
                if part is not None:
                    rest.callback(part.clear)
            for crew in self._crews:
                rest.callback(crew.close)

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
                return 0 if inputs is None else inputs % batch.n
        return 0

    # -- building

    def _build(self, tempo: Tempo, workers: Workers) -> Any:
        plan, seed, epoch = self.plan, self._seed, self._epoch
        parts = plan.parts
        order = None
        examples = 0
        loader = isinstance(plan.source, LoaderSource)
        if not loader:
            examples = len(plan.source)
            shuffle = randomness.key(seed, epoch, randomness.SHUFFLE) if plan.shuffled else None
            order = Order(examples, shuffle)
        device = next((i for i, part in enumerate(parts) if isinstance(part, To)), len(parts))
        works = {
            i: Work(part, seed, epoch, plan.source, order)
            for i, part in enumerate(parts)
            if isinstance(part, Segment)
        }
        host = [works[i] for i in sorted(works) if i < device]
        crew = self._hire(host, tempo, workers, loader)
        tail = Crew(0, max(1, len(works) - len(host)), Tempo())
        self._crews = [crew, tail]
        crew.begin()
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
        feed: Any = None
        self._crew_of_last = crew
        depth = 0
        for i, part in enumerate(parts):
            if isinstance(part, Echo):
                feed = PooledFeed(part, self._make_pool, stream, self.tally)
                self.feeds.append(feed)
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
                    into_pool=i + 1 < len(parts) and isinstance(parts[i + 1], Echo),
                    planning=self._planning if here is crew else threading.RLock(),
                )
                if here is crew:
                    crew.plan_with(stream.plan_ahead)  # the last one's: it plans for all
                self.segments.append(stream)
                self._crew_of_last = here
                feed = None
                depth += 1
        return stream

    def _hire(self, host: list[Work], tempo: Tempo, workers: Workers, loader: bool) -> Crew:
        depths = max(1, len(host))
        if loader or workers.count == 0:
            return Crew(0, depths, tempo)
        if workers.kind == "process":
            remotes = processes.start(workers.count, host, self._seed, self._epoch)
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
        return Pool(echo.factor, resolved.size, group, key, feed.upstream.total)

    def _batches_into(self, feed: PooledFeed) -> bool:
        at = self.plan.parts.index(feed.echo)
        before = self.plan.parts[at - 1] if at else None
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

    def _snapshots(self, yielded: int) -> list[Snapshot]:
        """Return, for each pool in order, the snapshot that a resume at ``yielded`` needs."""
        found: list[Snapshot] = []
        oldest = yielded  # the oldest output of the stream at hand that is asked for again
        for stream in reversed(self.segments):
            feed = stream.feed
            if not isinstance(feed, PooledFeed):
                continue
            if not feed.started:
                return []
            snapshot = feed.pool.snapshot(self._uses_taken(oldest, stream) // feed.pool.group)
            found.append(snapshot)
            oldest = int(snapshot.ordinals[0]) if len(snapshot.ordinals) else snapshot.admitted
        return found[::-1]

    def _forget(self) -> None:
        with self._planning:
            for feed, snapshot in zip(self.feeds, self._snapshots(self.yielded), strict=False):
                feed.pool.forget_before(snapshot.step)

    def _resume(self, position: Position) -> None:
        if self._loader is not None:
            raise AssertionError("a loader has no position to go to")
        snapshots = dict(zip(map(id, self.feeds), position.snapshots, strict=True))
        outputs = position.yielded
        needed: set[int] = set()
        for stream in reversed(self.segments):
            stream.start_at(outputs)
            if isinstance(stream.feed, PooledFeed):
                each = stream.inputs_each
                wanted = {n * each + i for n in needed for i in range(each)}
                taken = self._uses_taken(outputs, stream)
                needed = stream.feed.replay(snapshots[id(stream.feed)], taken, wanted)
                outputs = stream.feed.pool.admitted
        for feed in self.feeds:
            feed.refill()
        self.fresh = self._stream.fresh
