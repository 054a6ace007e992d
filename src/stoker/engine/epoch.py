"""One epoch being run: a plan's streams, its worker_pool, and where it stands."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from stoker import pytree, rng
from stoker.buffers import Recycler
from stoker.engine import checkpoint
from stoker.engine.adaptive_feed import AdaptiveFeed
from stoker.engine.echo_pools import Pools
from stoker.engine.filtering import FilteredStream, SkipLog
from stoker.engine.foreign import DeviceStream, Direct, LoaderStream
from stoker.engine.items import Planning, Tally
from stoker.engine.iterated import IteratedStream
from stoker.engine.pool.make import Workers, make_pool
from stoker.engine.pool.threads import Autotuner, WorkerPool
from stoker.engine.position import Position, Resolved
from stoker.engine.prefetch import Prefetcher
from stoker.engine.rank_sync import AgreedPolicy, Ranks
from stoker.engine.stream import FOLLOWED_BATCHES, SegmentStream
from stoker.engine.work import Failure, FilterPoint, Plan, Rejected, Segment, Work, warn_of_misdrawn
from stoker.errors import StateError, StokerError
from stoker.fork_safety import OwningProcess
from stoker.orders import order_of
from stoker.schedule.record import Decisions, EchoRecord
from stoker.sources.source import ReadAhead
from stoker.sources.stream import IterableSource, LoaderSource, Resumable
from stoker.stages.echo import Echo
from stoker.stages.to import Mover, To
from stoker.stats import PoolStats, StageStats, Stats

_PRUNE_BATCHES = 64
_REMEMBERED = 64  # outputs that a wrapper may have read ahead of its trainer
FORGOTTEN = (
    f"more than {_REMEMBERED - 1} batches were handed out since the last that was acknowledged: "
    "acknowledge batches when training has finished with them"
)


class _Handed(NamedTuple):
    """How far an epoch was when an output had been handed out."""

    yielded: int
    uses: int
    fresh: int
    loaded: int


class Run:
    """An epoch of a plan, from its beginning or from a position.

    Args:
        plan: the plan.
        seed, epoch: they decide the order and every draw.
        autotuner: the pipeline's memory of its speed.
        workers: how work is shared out.
        resolved: the sizes of the pools that are known; filled in here.
        position: where to begin.
        steps: how many outputs there are at most, or None.
        ranks: with whom echoes that follow the stall agree, or None.
        recycler: where the memory of batches comes from, and stays; by default the run has its own.
        length: how many outputs the epoch has, if that is known.
    """

    def __init__(
        self,
        plan: Plan,
        seed: int,
        epoch: int,
        autotuner: Autotuner,
        workers: Workers,
        resolved: dict[int, Resolved],
        position: Position,
        steps: int | None,
        ranks: Ranks | None,
        recycler: Recycler | None = None,
        length: int | None = None,
    ) -> None:
        self.plan = plan
        self.length = length
        self.steps = steps
        self.ranks = ranks
        self._left_ns = 0
        self._autotuner = autotuner
        self._begin_at = position
        self.tally = Tally()
        self.recycler = recycler or Recycler()
        self._own_recycler = recycler is None
        self.began_at = position.yielded
        self.was_asked = False
        self.wrapper: str | None = None  # what reads ahead of its trainer, if something is known to
        self.finished: int | None = None  # outputs that the trainer says it has finished with
        self._owner = OwningProcess()
        self.yielded = position.yielded
        self.uses = position.uses
        self.fresh = position.fresh
        self.loaded = position.loaded
        self._handed: deque[tuple[int, int, int, int]] = deque(maxlen=_REMEMBERED)  # _Handed
        self._handed.append((self.yielded, self.uses, self.fresh, self.loaded))
        self.repeats = 0
        self.wait_ns = 0
        self.batch_bytes = 0
        self.ended_ns = 0
        self.began_ns = time.perf_counter_ns()
        self.closed = False
        self.complete = False
        self.segments: list[SegmentStream] = []
        self._resolved = resolved
        self._seed, self._epoch = seed, epoch
        self._planning = Planning()
        self._skip_log = SkipLog(position.spent, position.filtered)
        self._loader: LoaderStream | None = None
        self._iterated: IteratedStream | None = None
        self._prefetcher: Prefetcher | None = None
        self._reader: Any = None
        self._device: DeviceStream | None = None
        self._worker_pools: list[WorkerPool] = []
        caches = [part.cache for part in plan.parts if isinstance(part, Segment) and part.cache]
        self._cache = caches[0].cache if caches else None
        self._cache_before = self._cache.counts() if self._cache is not None else None
        self.pools = Pools(
            plan,
            seed,
            epoch,
            resolved=resolved,
            autotuner=autotuner,
            ranks=ranks,
            skip_log=self._skip_log,
            steps=steps,
        )
        began = time.perf_counter_ns()
        try:
            self._stream = self._build(autotuner, workers)
            echoes = any(isinstance(part, Echo) for part in plan.parts)
            if position.yielded and (self._loader or (self._iterated and echoes)):
                checkpoint.begin_empty(self.segments, position)
            elif position.yielded:
                checkpoint.resume(self.segments, position)
        except BaseException:
            self.close()
            raise
        self.wait_ns = time.perf_counter_ns() - began  # iter() may start processes

    @property
    def total(self) -> int | None:
        """The number of outputs of the epoch, or None."""
        total: int | None = self._stream.total
        limits = [limit for limit in (total, self.steps) if limit is not None]
        return min(limits, default=None)

    @property
    def has_handed_out_all(self) -> bool:
        """Whether every output was handed out, as far as the epoch's length tells."""
        return self.yielded > self.began_at and self.yielded == self.length

    @property
    def is_over(self) -> bool:
        """Whether nothing is left; a loader, which may have more than its length, is asked."""
        if not self.has_handed_out_all:
            return False
        if self.yielded == self.steps:
            return True
        return self._loader is None or self._prefetcher is not None or self._loader.has_ended()

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a child, forked from the one that runs this.

        Then nothing in here may be used: its threads are not there, its locks may be held for ever,
        its processes are the parent's.
        """
        return not self._owner.is_current

    @property
    def short(self) -> bool:
        """Whether an epoch that is over had fewer outputs than its steps say."""
        return self.steps is not None and self.yielded < self.steps

    @property
    def together(self) -> bool:
        """Whether other ranks may take more steps, and would wait for this one.

        Not where the length is known beforehand: parts of equal length end alike.
        """
        share = self.plan.share
        sharded = share is not None and share.world > 1 and self._stream.total is None
        return self.ranks is not None or sharded

    @property
    def worker_pool(self) -> WorkerPool:
        """The worker pool of the host's segments."""
        return self._worker_pools[0]

    def next(self) -> Any:
        """Return the next output.

        Raises:
            StopIteration: the epoch is over.
            StageError: a stage failed on an example that this output needs.
        """
        self.was_asked = True
        if self.tally.misdrawn:
            warn_of_misdrawn(self.plan, self.tally.misdrawn)
        if self.yielded == self.steps:
            raise StopIteration
        began = time.perf_counter_ns()
        planned = self.pools.planned
        if planned is not None:
            self._confer(planned, began)
            if planned.over(self.yielded):
                raise StopIteration
        item = self._stream.pull()
        if item is None:
            if planned is not None and not planned.alike and self.steps is None:
                raise StokerError("no example is left on this rank, while others go on")
            raise StopIteration
        task = item.task
        if not task.done:
            self._last_worker_pool.wait(task)
        value, task.values[item.row] = task.values[item.row], None
        if type(value) is Failure:
            if isinstance(value.error, Rejected):
                raise StateError(
                    "a filter let an example through before the resume and rejects it now: filters "
                    "must be deterministic"
                )
            raise value.error
        self._left_ns = time.perf_counter_ns()
        self.wait_ns += self._left_ns - began
        if not self.yielded:
            self._last_worker_pool.plan()
        self.yielded += 1
        self.fresh = item.fresh
        self.uses += item.rows
        self.repeats += item.repeats
        if self._loader is not None:
            self.loaded = max(self.loaded, item.ordinal + 1)
        self._handed.append((self.yielded, self.uses, self.fresh, self.loaded))
        if not self.batch_bytes:
            self.batch_bytes = pytree.nbytes(value)
            for feed in self.pools.feeds:
                known = self._resolved[feed.echo.position]
                known.item_bytes = known.item_bytes or feed.item_bytes()
        if self.yielded % _PRUNE_BATCHES == 0:
            self._forget()
        return value

    def _forget(self) -> None:
        if self._loader is not None:
            self._loader.forget_before(self._oldest.loaded)
        if not self._planning.lock.acquire(blocking=False):
            return  # another time will do
        try:
            checkpoint.forget(self.segments, self._oldest.yielded)
        finally:
            self._planning.lock.release()

    def _confer(self, planned: AgreedPolicy, now: int) -> None:
        """Agree with other ranks where that is due."""
        if self._left_ns:
            planned.consumed(now - self._left_ns)
        if planned.due(self.yielded):
            feed = next(feed for feed in self.pools.feeds if isinstance(feed, AdaptiveFeed))
            taken = 0
            if feed.started:
                taken = (
                    feed.fresh if isinstance(feed.upstream, FilteredStream) else feed.pool.admitted
                )
            planned.agree(self.yielded, taken)
            self._autotuner.factor = planned.factor
            self.worker_pool.plan()  # who plans ahead may have come to where nobody had agreed

    def acknowledge(self, outputs: int) -> None:
        """Take note that the trainer has finished with so many more outputs.

        Raises ValueError when that is more than were handed out.
        """
        finished = (self.began_at if self.finished is None else self.finished) + outputs
        if finished > self.yielded:
            raise ValueError(
                f"{finished - self.began_at} batches cannot be finished: "
                f"{self.yielded - self.began_at} were handed out"
            )
        self.finished = finished
        while len(self._handed) > 1 and self._oldest.yielded < finished:
            self._handed.popleft()

    @property
    def _oldest(self) -> _Handed:
        return _Handed(*self._handed[0])

    def unfinished(self) -> deque[Position | None]:
        """Return, oldest first, where each output began that was handed out and not acknowledged.

        None for those that are too long ago; empty if nothing was acknowledged at all.
        """
        if self.finished is None:
            return deque()
        handed = [_Handed(*numbers) for numbers in self._handed]
        known = [at for at in handed if self.finished <= at.yielded < self.yielded]
        forgotten = self.yielded - self.finished - len(known)
        return deque([*[None] * forgotten, *map(self._position, known)])

    def position(self) -> Position:
        """Return where the last output stands that was handed out, or acknowledged if any was.

        Of a loader or a stream without what a resume needs, for there is none; and without waiting
        for who may be reading it.
        """
        if self.finished is None:
            return self.last_position()
        if self._oldest.yielded != self.finished:
            raise StateError(FORGOTTEN)
        return self._position(self._oldest)

    def last_position(self) -> Position:
        """Return where the last output stands that was handed out."""
        return self._position(_Handed(*self._handed[-1]))

    def _position(self, at: _Handed) -> Position:
        if self._loader is not None or self._iterated is not None:
            state, loaded = None, at.loaded
            if self._loader is not None:
                state = self._loader.state(loaded)
            elif isinstance(self.plan.source, Resumable):
                state, loaded = self.plan.source.state(at.fresh), at.fresh
            return Position(at.yielded, at.uses, fresh=at.fresh, loaded=loaded, loader_state=state)
        with self._planning.lock:
            snapshots, records = checkpoint.needed(self.segments, at.yielded)
            pools = [feed.pool for feed in self.pools.feeds] if snapshots else []
            return Position(
                at.yielded,
                at.uses,
                snapshots,
                [pool.admitted if pool.ended else None for pool in pools],
                records,
                dict(self._skip_log.spent),
                self._skip_log.filtered,
                at.fresh,
            )

    def close(self) -> None:
        """End every thread and process of this run, and let go of a loader's iterator."""
        if self.closed:
            return
        self.closed = True
        self.ended_ns = time.perf_counter_ns()
        with contextlib.ExitStack() as rest:  # all of it, should Ctrl-C come in between
            if self._own_recycler:
                rest.callback(self.recycler.clear)
            filtered = checkpoint.filtered_of(self.segments)
            outside = (self._device, self._prefetcher or self._loader or self._iterated)
            for part in (*self.pools.feeds, *filtered, *self.segments, *outside):
                if part is not None:
                    rest.callback(part.clear)
            if self._cache is not None:
                rest.callback(self._cache.flush)
            for worker_pool in self._worker_pools:
                rest.callback(worker_pool.close)
            if self._reader is not None:
                rest.callback(self._reader.close)  # lets go of workers that wait for it
            for worker_pool in self._worker_pools:
                rest.callback(worker_pool.shut)  # this first of all

    def raised_by_loader(self, error: BaseException) -> bool:
        """Tell whether a foreign loader raised an error, and may go on."""
        return self._loader is not None and self._loader.raised(error)

    def decisions(self) -> dict[int, tuple[EchoRecord, Decisions]]:
        """Return what each echo that follows the stall decided so far, by its position."""
        found = {}
        for feed in self.pools.feeds:
            if isinstance(feed, AdaptiveFeed) and feed.started:
                pool = feed.pool
                echo = EchoRecord(pool.max_factor, pool.size, pool.group, {})
                made = Decisions(self._epoch, pool.first_step, bytes(pool.codes))
                found[feed.echo.position] = echo, made
        return found

    def held(self) -> dict[int, int]:
        """Return how many items each pool holds."""
        return {f.echo.position: f.pool.held for f in self.pools.feeds if f.started}

    def stats(self, pools: tuple[PoolStats, ...]) -> Stats:
        """Return what happened so far."""
        tally = self.tally
        with self.worker_pool.lock:
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
            workers=self.worker_pool.workers,
            window_ready=ready,
            window_size=size,
            window_bytes=self._window_bytes() + self.recycler.held_bytes(),
            pools=pools,
            filtered_examples=self._skip_log.filtered,
            skipped_examples=self._skip_log.skipped,
            cache=self._cache.stats(self._cache_before) if self._cache is not None else None,
            skips=tuple(self._skip_log.skips),
        )

    def _window_bytes(self) -> int:
        total = 0
        echoes = [feed.echo.position for feed in self.pools.feeds]
        for stream in self.segments:
            unit = self.batch_bytes
            if stream.into_pool:  # the pool it fills is the next one that is left
                known = self._resolved.get(echoes.pop(0) if echoes else -1)
                unit = known.item_bytes if known else 0
            total += stream.ahead() * unit
        if self._prefetcher is not None and self.pools.feeds:
            known = self._resolved.get(self.pools.feeds[0].echo.position)
            total += self._prefetcher.size * (known.item_bytes if known else 0)
        return total

    def _dropped(self) -> int:
        for stream in self.segments:
            batch = stream.segment.batch
            if batch is not None and batch.drop_last:
                inputs = stream.inputs
                return stream.dropped_inputs if inputs is None else inputs % batch.n
        return 0

    # -- building

    def _build(self, autotuner: Autotuner, workers: Workers) -> Any:
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
            self._skip_log.examples = examples
            if isinstance(plan.source, ReadAhead):
                self._reader = plan.source.reader()
        device = next((i for i, part in enumerate(parts) if isinstance(part, To)), len(parts))
        works = {
            i: Work(
                part,
                seed,
                epoch,
                None if iterable else plan.source,
                order,
                part=i,
                rank=rank,
                misdrawn=self.tally.misdrawn,
            )
            for i, part in enumerate(parts)
            if isinstance(part, Segment)
        }
        host = [works[i] for i in sorted(works) if i < device]
        given = Workers(0, "thread") if loader else workers
        worker_pool = make_pool(given, host, autotuner, seed=seed, epoch=epoch, rank=rank)
        for work in host:  # once they were pickled for processes
            if work.segment.source is not None:
                work.reader = self._reader
        if iterable and worker_pool.limit:
            worker_pool.work_ahead()  # what reading costs is not known: it goes on meanwhile
        tail = WorkerPool(0, max(1, len(works) - len(host)), Autotuner())
        apart = Planning()  # of what the consumer alone plans
        self._worker_pools = [worker_pool, tail]
        worker_pool.begin()
        if iterable:
            self.tally.add([plan.source.name], [0], 0)
        for work in works.values():
            self.tally.add(work.segment.names, [0] * len(work.segment.names), 0)
        stream: Any = None
        if loader:
            if self._begin_at.loader_state is not None:
                plan.source.loader.load_state_dict(self._begin_at.loader_state)
            stream = self._loader = LoaderStream(
                plan.source,
                self.tally,
                self.recycler if any(isinstance(part, Echo) for part in parts) else None,
                loaded=self._begin_at.loaded,
                fresh=self._begin_at.fresh,
            )
        if iterable:
            key = rng.key(seed, epoch, rng.SHUFFLE, rank)
            if self._begin_at.loader_state is not None:
                plan.source.load(self._begin_at.loader_state)
            stream = self._iterated = IteratedStream(
                plan.source,
                plan.share,
                plan.buffer,
                key,
                self.tally,
                start=self._begin_at.fresh,
            )
        if stream is not None and any(isinstance(part, Echo) and part.follows for part in parts):
            size = FOLLOWED_BATCHES * (1 if loader else plan.group)
            stream = self._prefetcher = Prefetcher(stream, size, self._planning, worker_pool)
        feed: Any = None
        self._last_worker_pool = worker_pool
        depth = 0
        for i, part in enumerate(parts):
            if isinstance(part, Echo):
                here, planning = (worker_pool, self._planning) if i < device else (tail, apart)
                feed = self.pools.feed(part, stream, self.tally, here, planning)
            elif isinstance(part, FilterPoint):
                stream = FilteredStream(
                    part, i - 1, stream, worker_pool, self._skip_log, self._planning
                )
            elif isinstance(part, To):
                stream = self._device = DeviceStream(stream, Mover(part.device), worker_pool)
                depth = 0
            else:
                if feed is None and stream is not None:
                    feed = Direct(stream)
                here = worker_pool if i < device else tail
                behind = [p for p in parts[i + 1 :] if not isinstance(p, FilterPoint)]
                cost = autotuner.cost(i, 1 if part.batches_in else plan.group)
                cost.whole = workers.kind == "process" and bool(
                    part.batch_maps or (part.batch and part.batch.collate)
                )
                stream = SegmentStream(
                    works[i],
                    feed,
                    order,
                    examples,
                    worker_pool=here,
                    depth=depth,
                    cost=cost,
                    group=plan.group,
                    recycler=self.recycler,
                    tally=self.tally,
                    into_pool=behind[:1] != [] and isinstance(behind[0], Echo),
                    followed=_followed(behind),
                    planning=self._planning if here is worker_pool else apart,
                    read_ahead=2 * plan.source.requests if works[i].reader else 0,
                )
                if here is worker_pool:
                    worker_pool.plan_with(stream.plan_ahead)  # the last one's: it plans for all
                self.segments.append(stream)
                self._last_worker_pool = here
                feed = None
                depth += 1
        return stream


def _followed(behind: Sequence[Any]) -> bool:
    """Tell whether an echo that follows the stall comes next, on the device perhaps."""
    parts = [part for part in behind if not isinstance(part, To)]
    return bool(parts) and isinstance(parts[0], Echo) and parts[0].follows
