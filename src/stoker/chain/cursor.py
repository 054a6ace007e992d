"""Begins and ends the runs over a pipeline, and keeps its position between them.

An iterator leaves its cursor at its last output. An iterator that handed out nothing leaves the
cursor unchanged. After ``len()`` batches the epoch is over, even if nobody asked for its end.
"""

from __future__ import annotations

import weakref
from typing import Any

from stoker.basics.buffers import Recycler
from stoker.basics.future import start_thread
from stoker.chain.agreement import agree, agree_epoch
from stoker.chain.chain import Chain
from stoker.chain.epoch_position import EpochPosition
from stoker.chain.iterator import SECOND_ITERATOR, PipelineIterator, leave_out
from stoker.chain.seek import seek, seek_behind_pool
from stoker.echoing.rank_sync import ranks
from stoker.echoing.stream import PoolStart
from stoker.engine.checkpoint import Position
from stoker.engine.run import Run
from stoker.engine.setup import EpochSetup
from stoker.engine.workers.make import KeptWorkers
from stoker.engine.workers.threads import is_worker
from stoker.engine.workers.tuning import Autotuner
from stoker.errors import StateError
from stoker.frameworks.queries import TrainingLoop, calling_loop, epoch_listener
from stoker.frameworks.rank import process_group

# Free memory of batches that is kept between epochs: little beside what one takes. An epoch of 16
# batches of 7 MB that begins in new memory costs a fifth more; with two threads, four of 24 MB are
# in use at once (bench/cache_hits.py).
_RESTING_BYTES = 128 << 20
# Of one size, within an epoch. An echo's pool of 16 batches of 786 KB empties at its end: the next
# epoch made 12 of them anew, which took a twentieth of its time (bench/echo_overhead.py).
_SPARE_BYTES = 32 << 20
_PARENTS_RUNS: list[Run] = []
"""Runs that a forked child inherited. They are never freed: freeing them could stop the parent's
workers (a ``DataLoader``'s iterator does that)."""


_POSITION = ("epoch", "position", "_fresh_start", "before", "_skip", "_run", "_totals_before")
"""The attributes of a cursor that ``iter()`` changes."""


class Cursor(EpochPosition):
    """Begins and ends the runs over a pipeline. Shared with its iterators, which may outlive it.

    ``recycler`` owns the memory of batches, also between epochs.
    """

    def __init__(self, chain: Chain, recycler: Recycler | None = None) -> None:
        super().__init__(chain)
        own = [stage.allocate for stage in chain.stages if stage.allocate is not None]
        self._recycler = recycler or Recycler(
            allocate=own[0] if own else None, spare_bytes=_SPARE_BYTES, resting_bytes=_RESTING_BYTES
        )
        self._autotuner = Autotuner()
        self._kept_workers = KeptWorkers()
        self._before_iter: dict[str, Any] = {}  # its attributes then

    def begin(self) -> PipelineIterator[Any]:
        """Start the next epoch, or go on in a loaded one; closes a live iterator."""
        live = self._live()
        if live is not None:
            live.supersede(SECOND_ITERATOR)
        self._follow(calling_loop())
        at = self.of_epoch().steps if self.is_loaded else 0  # outputs of its epoch before
        self._agree((self.epoch + (not self._fresh_start), max(at, self._skip)))
        iterator = self._begin_data_epoch()
        self._agree_on_epoch(iterator)
        return iterator

    def _agree_on_epoch(self, iterator: PipelineIterator[Any], *, long: bool = False) -> None:
        """Compare the order that users' functions gave the epoch; an error closes it."""
        run = self._run
        assert run is not None
        try:
            agree_epoch(self.chain, run.order_digest, long=long)
        except BaseException:
            iterator.close()
            raise

    def _agree(self, place: tuple[int, ...]) -> None:
        """Compare chain and position with other ranks, if that is due.

        Sources that may grow are compared in every epoch: a rank cannot know of another's data.
        """
        if self._live_run() is None:
            self._measure()
        if not self._must_agree and not self.chain.source.may_grow:
            return
        is_later = self._set_by_epoch or not self._must_agree
        self.chain = agree(self.chain, place, long=is_later)
        self._must_agree = self._set_by_epoch = False

    def _follow(self, loop: TrainingLoop) -> None:
        """Go to the position that a framework's loop expects, though it does not set it itself."""
        if loop.repeats_first_epoch:
            if not self.is_loaded:
                self.set_epoch(0)
            return
        state = loop.take_state(self._is_of)
        if state is not None:
            self.load(state)

    def _is_of(self, loader: Any) -> bool:
        """True if a loader is this cursor's pipeline, or its ``as_dataloader()``."""
        return getattr(getattr(loader, "pipeline", loader), "_cursor", None) is self

    def _begin_data_epoch(self) -> PipelineIterator[Any]:
        """Start an epoch of the data, or go on in a loaded one; an error leaves all as it was."""
        self._measure()
        was, pending = {name: getattr(self, name) for name in _POSITION}, self._pending.copy()
        try:
            return self._open_data_epoch(was)
        except BaseException:
            vars(self).update(was)
            self._pending = pending
            raise

    def _open_data_epoch(self, was: dict[str, Any]) -> PipelineIterator[Any]:
        chain, skip, self._skip = self.chain, self._skip, 0
        epoch, position = self.epoch + 1, Position()
        if self._fresh_start:
            epoch, position = self.epoch, self.position or position
        chain.check_start()
        if not position.yielded:  # len() may have planned it before, on one rank alone
            chain.on_leg(position.leg).orders.forget_planned()
        position, rest = self._start_behind(epoch, position, skip)
        totals_before = self.stats().totals
        if not position.yielded:
            position = self._start_of_record(epoch) or position
        together = chain.follows_clock and (process_group() or (0, 1))[1] > 1
        here = chain.on_leg(position.leg)
        setup = EpochSetup(
            here.flow,
            chain.seed,
            epoch,
            self._autotuner,
            chain.workers_here(),
            self.pool_size,
            position,
            here.data_epoch_steps,
            ranks() if together else None,
            self._recycler,
            here.sure_count(epoch),
            self._carry,
            self._kept_workers,
            chain.record,
        )
        self._carry = {}
        run = Run(setup)
        if run.length is None and chain.steps is None:
            run.wrapper = calling_loop().wrapper
        iterator = self._iterate(run)
        self._before_iter, self._totals_before = was, totals_before
        self._note_start(epoch, run, iterator)
        leave_out(iterator, rest)
        return iterator

    def _measure(self) -> None:
        """Update the length of a source that may grow, for the next epoch; pools begin empty."""
        chain, position = self.chain.with_current_length(), self.position
        if chain is self.chain:
            return
        if self._fresh_start and position is not None and (position.yielded or position.leg):
            raise StateError(
                f"{chain.source.name} has {chain.source.count():,} examples now, and the epoch "
                f"that is to go on had {self.chain.source.count():,}: load the state where it has "
                "as many, or begin the next epoch (set_epoch)"
            )
        if self._fresh_start:
            self.position = None
        self.chain, self._carry = chain, {}

    def _iterate(self, run: Run) -> PipelineIterator[Any]:
        return PipelineIterator(run, self._end, epoch_listener(run))

    def _start_behind(self, epoch: int, position: Position, skip: int) -> tuple[Position, int]:
        """Return the position to begin at so as to skip outputs, and how many to make and drop."""
        steps_before = self._counts(position).steps
        if not skip or steps_before == skip:
            return position, 0
        if steps_before > skip:
            raise ValueError(
                f"{skip} batches of this epoch cannot be skipped: the state that was loaded is "
                f"behind {steps_before}"
            )
        count = self.chain.sure_count(epoch)
        if count and skip > count:
            raise ValueError(
                f"an epoch has {count:,} batches, so resume_at({skip}) is behind its end; counted "
                f"over epochs it is set_epoch({skip // count}), then resume_at({skip % count})"
            )
        self.chain.check_skips()
        if steps_before:
            return position, skip - steps_before
        before, rest = seek(self.chain, epoch, skip)
        if rest:
            before = seek_behind_pool(self.chain, epoch, skip, self.pool_size)
        return (position, rest) if before is None else (before, 0)

    def _start_of_record(self, epoch: int) -> Position | None:
        """Return the first position of an epoch whose record is replayed; None without a record."""
        flow, record = self.chain.flow, self.chain.record
        echo = flow.echo
        if not flow.carries_pool or record is None or echo is None:
            return None
        items = flow.items_of_first(self.chain.examples(epoch))
        moment = record.carried_pool(epoch, items, echo.stage.max_factor, echo.group)
        return Position(parts=[PoolStart(moment)]) if moment is not None else Position()

    def _note_start(self, epoch: int, run: Run, iterator: PipelineIterator[Any]) -> None:
        if not self._fresh_start:  # the epoch before was left early
            self.before += self.of_epoch()
        self.epoch, self.position, self._fresh_start = epoch, None, False
        self._forget_pending()
        self._run = run
        if self._is_acknowledging:
            run.history.acknowledge(0)
        self._iterator = weakref.ref(iterator)

    def _end(self, run: Run) -> None:
        """Close a run and keep its position; a run without outputs leaves the cursor unchanged."""
        if run.is_inherited:
            _PARENTS_RUNS.append(run)
        if run.closed or run.is_inherited:
            return
        try:
            if run.complete or run.has_handed_out_all or run.yielded > run.began_at:
                self._note(run)
            if self._run is not run:
                pass
            elif run.complete or run.has_handed_out_all:
                self._keep_pending(run)
                self.epoch, self.before = self._behind(run)
                self.position, self._carry = run.next_start(), run.items_to_carry()
                self._fresh_start = True
            elif run.yielded > run.began_at:
                self._keep_pending(run)
                self.position = run.position(0)
            else:
                self._go_back()
        finally:  # even if Ctrl-C comes in between
            if is_worker():  # the garbage collector found an abandoned iterator in this thread
                start_thread("stoker-closing", run.close)
            else:
                run.close()

    def _keep_pending(self, run: Run) -> None:
        """Keep the positions of outputs that may still be acknowledged."""
        epoch, before = self.epoch, self.before
        self._pending.extend((epoch, position, before) for position in run.pending_positions())

    def _go_back(self) -> None:
        """Restore the attributes from before ``iter()``; statistics of a failed run are kept."""
        kept = self._run, self._totals_before
        vars(self).update(self._before_iter)
        if kept[0] is not None and kept[0].was_asked:
            self._run, self._totals_before = kept
