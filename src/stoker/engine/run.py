"""One running epoch: its streams, its worker pool and its position.

The consumer alone calls it, one thread at a time. A forked child may use nothing of a parent's run
(``is_inherited``).
"""

from __future__ import annotations

import contextlib
import copy
import time
import weakref
from dataclasses import replace
from typing import Any

import numpy as np

from stoker.basics import pytree
from stoker.basics.process import OwningProcess
from stoker.basics.warn import warn
from stoker.engine.checkpoint import Position
from stoker.engine.epoch import EpochStreams
from stoker.engine.history import HandedOut, History
from stoker.engine.items import Item, RepeatingStream, forget, resume, resume_points
from stoker.engine.setup import EpochSetup
from stoker.engine.work.step import ENDED, Failure, Rejected
from stoker.engine.workers.cost import worker_time
from stoker.errors import StageError, StateError, StokerError
from stoker.schedule.echo_record import DecidedLate, Decisions
from stoker.schedule.epoch_rest import EpochRest
from stoker.stats import PoolStats, StageStats, Stats, Uses

# Batches from one removal of old bookkeeping to the next. Chosen, not measured.
_PRUNE_BATCHES = 64


class Run:
    """An epoch of a flow, from its beginning or from a position; used by the consumer alone.

    Attributes:
        history: the latest outputs, and which of them the trainer has acknowledged.
    """

    def __init__(self, setup: EpochSetup) -> None:
        flow, position = setup.flow, setup.position
        self._setup = setup
        self._flow = flow
        self.steps = setup.steps
        self.length = setup.length
        self._left_ns = 0
        self.began_at = position.yielded
        self.flows = False  # whether another data epoch follows within the same step epoch
        self.was_asked = False
        self._lost: weakref.ref[StageError] | None = None  # the error of the last lost output
        self._has_looked = False  # whether the next output, or its error, is in ``_ahead``
        self._ahead: Item | Exception | None = None
        self.wrapper: str | None = None  # the framework that is known to read ahead of its trainer
        self.owner = OwningProcess()
        self.yielded = position.yielded
        self.uses = position.uses
        self.fresh = position.fresh
        self.loaded = position.loaded
        self.history = History(HandedOut(self.yielded, self.uses, self.fresh, self.loaded))
        self._repeats = 0
        self._last: Item | None = None
        self._batch_bytes = 0
        self._ended_ns = self._rested_ns = 0
        self._resting_ns = 0  # the time since which the clock is stopped; 0 while it runs
        self._began_ns = time.perf_counter_ns()
        self.closed = False
        self.complete = False
        self._cache = None if flow.cache is None else flow.cache.cache
        self._cache_before = self._cache.counts() if self._cache is not None else None
        if self._cache_before is not None:
            setup.autotuner.begin_epoch(self._cache_before.misses)
        self._streams = streams = EpochStreams(setup)
        self._planning = streams.planning
        self._skip_log = streams.skip_log
        self._segments = self._streams.segments
        began = time.perf_counter_ns()
        try:
            self._streams.build()
            if position.order and position.order != self.order_digest:
                raise StateError(
                    f"the order of epoch {setup.epoch} is another one now than when the state was "
                    "saved: have its function return what it returned then (load what it depends "
                    "on, such as losses, before the pipeline begins), or begin the next epoch "
                    "(set_epoch)"
                )
            if position.yielded or position.parts:
                resume(streams.last, position)
            if setup.carried:
                assert streams.echo is not None
                streams.echo.adopt(setup.carried)
        except BaseException:
            self.close()
            raise
        self._kept_workers = kept = setup.kept_workers
        pool = streams.worker_pool
        self._may_warn = kept.actors is not None or bool(
            pool.watch or pool.tells_of_cost or pool.is_trying
        )
        self._wait_ns = time.perf_counter_ns() - began  # iter() may start processes

    @property
    def order_digest(self) -> str:
        """The digest of an order that a user's function decides; "" for other orders."""
        return self._streams.order_digest if self._flow.orders.calls_user else ""

    @property
    def leg(self) -> EpochRest | None:
        """The leg that this runs of an epoch that other ranks began; all counts begin with it."""
        return self._flow.orders.selection.leg

    @property
    def total(self) -> int | None:
        """The number of outputs of the epoch, or None."""
        total = self._streams.last.total
        limits = [limit for limit in (total, self.steps) if limit is not None]
        return min(limits, default=None)

    @property
    def has_handed_out_all(self) -> bool:
        """Whether every output was handed out, as far as the epoch's length tells."""
        return self.yielded > self.began_at and self.yielded == self.length

    @property
    def is_over(self) -> bool:
        """Whether no output is left. Asks a loader, which may have more than its length."""
        if not self.has_handed_out_all:
            return False
        if self.yielded == self.steps:
            return True
        streams = self._streams
        return streams.head is None or streams.prefetcher is not None or streams.head.has_ended()

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the one that runs this.

        If so, nothing here may be used: the threads do not exist in the child, locks may stay held
        for ever, and the worker processes belong to the parent.
        """
        return not self.owner.is_current

    @property
    def short(self) -> bool:
        """Whether there were fewer outputs than ``.steps(n)`` asks for; valid after the epoch."""
        return self.steps is not None and self.yielded < self.steps

    def why_empty(self) -> str:
        """Return why the epoch was empty; "" if it was not, or other ranks have outputs."""
        if self.yielded or self.together:
            return ""
        left_out = self._filter_count + self._skip_log.skipped
        if left_out:
            return f"filters, scans and max_errors= left out {left_out:,} examples"
        batch = next((s.segment.batch for s in self._segments if s.segment.batch), None)
        drop_count = self._drop_count()
        if batch is not None and drop_count:
            return (
                f"drop_last left out {drop_count:,} examples, and a batch has {batch.n:,}: take a "
                "smaller batch, or keep the last one"
            )
        share = self._flow.orders.selection.share
        if (share is not None and share.world > 1) or self.leg is not None:
            return ""  # the stage has warned: fewer examples than ranks; or earlier ranks had them
        if any(segment.renumbered for segment in self._flow.segments):
            return "all examples together do not fill one packed sequence"
        return (
            "the loader gave none" if self._flow.source.yields_batches else "there are no examples"
        )

    @property
    def _filter_count(self) -> int:
        """The number of examples that filters and scans have dropped."""
        return self._skip_log.filtered + sum(s.dropped for s in self._streams.own)

    @property
    def together(self) -> bool:
        """Whether other ranks might take more steps, and then wait for this one.

        If the length is known beforehand, the parts are of equal length, and end together.
        """
        share = self._flow.orders.selection.share
        is_sharded = share is not None and share.world > 1 and self._streams.last.total is None
        return self._setup.ranks is not None or is_sharded

    def rest(self) -> None:
        """Stop the clock until ``wake``: nobody is iterating."""
        self._resting_ns = self._resting_ns or time.perf_counter_ns()

    def wake(self) -> None:
        """Start the clock again."""
        if self._resting_ns:
            self._rested_ns += time.perf_counter_ns() - self._resting_ns
            self._resting_ns = 0

    def next(self) -> Any:
        """Return the next output.

        Raises:
            StopIteration: the epoch is over.
            StageError: a stage failed on an example that this output needs. If this is the error of
                a lost output (``has_lost``), the next call goes on with the next one.
        """
        # This runs for each output, also for those that take 5 us in all: a method or a property
        # takes 0.06 us (bench/paths.py, batches of one).
        self.was_asked = True
        streams = self._streams
        if self._may_warn:
            self._warn()
        began = time.perf_counter_ns()
        if self._has_looked:
            item, self._ahead, self._has_looked = self._ahead, None, False
        else:
            item = self._pull(began)
        if isinstance(item, Exception):
            raise item
        if item is None:
            raise StopIteration
        task = item.task
        if not task.done:
            streams.last_pool.wait(task)
        value, task.values[item.row] = task.values[item.row], None
        if type(value) is Failure:
            if isinstance(value.error, Rejected):
                raise StateError(
                    "a filter let an example through before the resume and rejects it now: filters "
                    "must be deterministic"
                )
            error = value.error
            if isinstance(error, StageError) and value.part != ENDED:
                error = copy.copy(error)  # a pool may hold it for further uses
                self._lose(item, error)
            raise error
        if streams.mask is not None:
            value = streams.mask.added(value, self.yielded, item.fresh - item.rows, item.fresh)
        self._left_ns = time.perf_counter_ns()
        self._wait_ns += self._left_ns - began
        if not self.yielded:
            streams.last_pool.plan()
        self.yielded += 1
        if item.fresh > self.fresh:
            self.fresh = item.fresh
        self._last = item
        self.uses += item.rows
        self._repeats += item.repeats
        if streams.head is not None:
            self.loaded = streams.head.loaded_with(item, self.loaded)
        self.history.add((self.yielded, self.uses, self.fresh, self.loaded))
        if not self._batch_bytes:
            self._batch_bytes = pytree.nbytes(value)
            if streams.echo is not None:
                known = self._setup.pool_size
                known.item_bytes = known.item_bytes or streams.echo.item_bytes()
        if self.yielded % _PRUNE_BATCHES == 0:
            self._forget()
        return value

    def _lose(self, item: Item, error: StageError) -> None:
        """Count an output that cannot be made as handed out, and its examples as skipped."""
        self._left_ns = time.perf_counter_ns()
        self.yielded += 1
        self.fresh = max(self.fresh, item.fresh)
        self.uses += item.rows
        if self._streams.head is not None:
            self.loaded = self._streams.head.loaded_with(item, self.loaded)
        self.history.lose(HandedOut(self.yielded, self.uses, self.fresh, self.loaded))
        self._skip_log.lose(error, item.rows)
        self._lost = weakref.ref(error)  # its traceback may hold what holds this

    def _pull(self, now: int) -> Item | None:
        """Take the next output from the last stream, done or not; None at the end."""
        if self.yielded == self.steps:
            return None
        echo = self._streams.echo
        if echo is None or echo.agreement is None:
            return self._streams.last.pull()
        self._agree(echo, now)
        if echo.agreement.over(self.yielded):
            return None
        item = self._streams.last.pull()
        if item is None and not echo.agreement.alike and self.steps is None:
            raise StokerError("no example is left on this rank, while others go on")
        return item

    @property
    def is_last(self) -> bool:
        """Whether the output handed out last was the final one.

        If the length is unknown, this takes the next output from its stream, and keeps it for
        ``next``.
        """
        if self.length is not None and (self.yielded < self.length or self.is_over):
            return self.yielded >= self.length
        if not self._has_looked:
            self._has_looked = True
            began = time.perf_counter_ns()
            try:
                self._ahead = self._pull(began)
            except Exception as error:  # ``next`` raises it
                self._ahead = error
            self._wait_ns += time.perf_counter_ns() - began
        return self._ahead is None

    def last_uses(self) -> Uses:
        """Return the uses in the output handed out last."""
        item = self._last
        uses, ages = (
            ([], [])
            if item is None
            else item.examples or ([item.use] * item.rows, [item.age] * item.rows)
        )
        return Uses(
            1 + np.array(uses, np.int64),
            np.array(ages, np.int64),
            self._streams.valid(item) if item is not None else np.zeros(0, bool),
        )

    @property
    def remainder(self) -> int:
        """The examples in the last batches of all ranks together; 0 if these have no padding."""
        padded = self._streams.padded
        return 0 if padded is None else padded.remainder

    @property
    def ends_unequally(self) -> bool:
        """Whether ranks have more or fewer examples than others."""
        selection, source = self._flow.orders.selection, self._flow.indexed
        if selection.share is None or not selection.share.uneven or source is None:
            return False
        first, last = (
            source.examples(replace(selection, share=replace(selection.share, rank=rank)))
            for rank in (0, selection.share.world - 1)
        )
        return first != last

    def _warn(self) -> None:
        """Give the warnings that came up since the last output."""
        for message in self._kept_workers.warnings():
            warn(message)
        self._streams.worker_pool.warn()

    def _forget(self) -> None:
        oldest = self.history.oldest
        if self._streams.head is not None:
            self._streams.head.forget_states(oldest.fresh, oldest.loaded)
        if not self._planning.lock.acquire(blocking=False):
            return  # another time will do
        try:
            forget(self._streams.last, oldest.yielded, self._planning)
        finally:
            self._planning.lock.release()

    def _agree(self, echo: RepeatingStream, now: int) -> None:
        """Agree with other ranks on the next steps, if that is due."""
        agreement = echo.agreement
        if self._left_ns:
            agreement.note_consumed(now - self._left_ns)
        if agreement.due(self.yielded):
            agreement.agree(self.yielded, echo.taken_of_source)
            self._setup.autotuner.factor = agreement.factor
            self._streams.worker_pool.plan()  # it stopped at the end of the agreed steps

    def pending_positions(self) -> list[Position | None]:
        """Return the start positions of the outputs not yet acknowledged, oldest first.

        None stands for outputs whose positions are forgotten.
        """
        return [at and self._position(at) for at in self.history.pending()]

    def position(self, late: int) -> Position:
        """Return the position before the last ``late`` outputs that were handed out.

        For a loader or a stream it has no nodes, because nothing can be made again; and it does not
        wait for the thread that may be reading.
        """
        return self._position(self.history.before(late))

    def _position(self, at: HandedOut) -> Position:
        head = self._streams.head
        if head is not None:
            state, loaded = head.state_at(at.fresh, at.loaded)
            return Position(
                at.yielded, at.uses, at.fresh, loaded=loaded, loader_state=state, leg=self.leg
            )
        with self._planning.lock:
            return Position(
                at.yielded,
                at.uses,
                at.fresh,
                resume_points(self._streams.last, at.yielded, self._planning),
                dict(self._skip_log.spent),
                self._skip_log.filtered,
                order=self.order_digest,
                leg=self.leg,
            )

    def next_start(self) -> Position | None:
        """Return the next epoch's first position if the pool of this finished epoch goes on in it.

        None if the next epoch begins with an empty pool.
        """
        echo = self._echo_to_carry()
        if echo is None:
            return None
        with self._planning.lock:
            node = echo.next_start(self._segments[0].total or 0)
        return None if node is None else Position(parts=[node])

    def items_to_carry(self) -> dict[int, Item]:
        """Return the pool's items for the next epoch, by their numbers there."""
        echo = self._echo_to_carry()
        return {} if echo is None else echo.handed_on(self._segments[0].total or 0)

    def _echo_to_carry(self) -> RepeatingStream | None:
        if not self._flow.carries_pool or self._setup.ranks is not None or self.leg is not None:
            return None
        echo = self._streams.echo
        return echo if echo is not None and echo.held else None

    def close(self) -> None:
        """End all threads and processes of this run, and drop a loader's iterator."""
        if self.closed:
            return
        self.closed = True
        self._ended_ns = time.perf_counter_ns()
        self._streams.end_whole(self.complete or self.has_handed_out_all)
        with contextlib.ExitStack() as rest:
            rest.callback(self.leave)
            rest.callback(self._streams.recycler.rest)
            rest.callback(self._streams.close)

    def leave(self) -> None:
        """Tell a loader or stream how far the consumer got."""
        head = self._streams.head
        if head is not None:
            ended = self.complete and self.yielded != self.steps
            head.leave(self.fresh, self.loaded, ended=ended)

    def has_lost(self, error: BaseException) -> bool:
        """True if this is the error of the last output that was lost."""
        return self._lost is not None and self._lost() is error

    def goes_on(self, error: BaseException) -> bool:
        """True if outputs may follow this error: one was lost, or a foreign loader raised it."""
        head = self._streams.head
        return self.has_lost(error) or (head is not None and head.has_raised(error))

    def decisions(self) -> Decisions | None:
        """Return the decisions of an adaptive echo so far; None before any."""
        echo = self._streams.echo
        return None if echo is None else echo.decided(self._setup.epoch)

    @property
    def epoch(self) -> int:
        return self._setup.epoch

    def late_decisions(self) -> DecidedLate | None:
        """Return what batches left behind so far, where examples may be late."""
        every = (stream.decisions() for stream in self._streams.own)
        return next((each for each in every if each is not None), None)

    @property
    def held(self) -> int:
        """The number of items in the pool."""
        echo = self._streams.echo
        return 0 if echo is None else echo.held

    def stats(self, pool_stats: PoolStats | None) -> Stats:
        """Return the statistics so far."""
        tally, pool = self._streams.tally, self._streams.worker_pool
        with pool.lock:
            stages = tuple(StageStats(name, ns / 1e9, n) for name, ns, n in tally.stages())
            sharing = 1 if pool.remote else pool.active
            spent = worker_time(tally.spent, self._setup.autotuner.costs, sharing)
        last = self._segments[-1] if self._segments else None
        ready, size = (0, 0) if last is None else (last.ready_since()[0], last.ahead())
        ended_ns = self._resting_ns or self._ended_ns or time.perf_counter_ns()
        worked_s = sum(stage.seconds for stage in stages)
        return Stats(
            epoch=self._setup.epoch,
            fresh_examples=self.fresh,
            uses=self.uses,
            batches=self.yielded,
            realised_factor=self._factor(),
            dropped_uses=self._drop_count(),
            repeats_in_batches=self._repeats,
            copy_distance=tally.distance_sum / tally.distances if tally.distances else 0.0,
            elapsed_s=(ended_ns - self._began_ns - self._rested_ns) / 1e9,
            consumer_wait_s=self._wait_ns / 1e9,
            production_s_per_example=worked_s / self.fresh if self.fresh else 0.0,
            stages=stages,
            workers=pool.workers,
            window_ready=ready,
            window_size=size,
            window_bytes=self._window_bytes() + self._streams.recycler.held_bytes(),
            pool=pool_stats,
            filtered_examples=self._filter_count,
            skipped_examples=self._skip_log.skipped,
            cache=None if self._cache is None else self._cache.stats(self._cache_before),
            skips=tuple(self._skip_log.skips),
            parts=self._streams.part_stats(self.fresh),
            read_bytes=tally.read_bytes,
            thread_trial=pool.thread_trial,
            process_trial=pool.process_trial,
            worker_time=spent,
            stuck_processes=pool.replaced,
            feed_lag_outputs=self._flow.source.lag_outputs(),
            **{name: n for stream in self._streams.own for name, n in stream.stats().items()},
        )

    def _factor(self) -> float:
        """Return the mean uses of a fresh example.

        If examples are dropped or joined, outputs do not say it: then by what the pools drew.
        """
        echo = self._streams.echo
        if echo is None or not self.fresh:
            return float(self.fresh > 0)
        if self._flow.is_decided:
            return echo.factor
        return self.uses / self.fresh

    def _window_bytes(self) -> int:
        item_bytes, prefetcher = self._setup.pool_size.item_bytes, self._streams.prefetcher
        total = 0 if prefetcher is None else prefetcher.size * item_bytes
        for stream in self._segments:
            total += stream.ahead() * (
                item_bytes if stream.segment.behind.into_pool else self._batch_bytes
            )
        return total

    def _drop_count(self) -> int:
        for stream in self._segments:
            batch = stream.segment.batch
            if batch is not None and batch.drop_last:
                inputs = stream.inputs
                return stream.dropped_inputs if inputs is None else inputs % batch.n
        return 0
