"""The runs over a pipeline: where the next one begins, and what the last one leaves behind.

A cursor is where its last iterator left it. An iterator that handed out nothing puts it back. One
that handed out ``len()`` batches has had its epoch, even if nobody asked for the end.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

from stoker.basics.buffers import Recycler
from stoker.basics.resources import process_group
from stoker.basics.validate import is_whole_number
from stoker.chain.agreement import agree, agree_order
from stoker.chain.bookmark import Bookmark
from stoker.chain.chain import Chain
from stoker.chain.iterator import PipelineIterator, warn_of_second_iterator
from stoker.chain.scheduler_check import warn_of_overshooting
from stoker.chain.seek import seek, seek_behind_pool
from stoker.engine.build import EpochSetup
from stoker.engine.checkpoint import Position
from stoker.engine.echo.pool_inputs import PoolStart
from stoker.engine.echo.rank_sync import agree_owners, ranks
from stoker.engine.run import Run
from stoker.engine.workers.make import KeptWorkers
from stoker.engine.workers.threads import is_worker
from stoker.engine.workers.tuning import Autotuner
from stoker.errors import StateError
from stoker.frameworks.framework import TrainingLoop
from stoker.frameworks.queries import calling_loop, epoch_listener
from stoker.schedule.owners import OwnerSnapshot
from stoker.stats import Clock, Totals

_PARENTS_RUNS: list[Run] = []
"""Runs that a forked child inherited. They are never freed: freeing them could stop the parent's
workers (a ``DataLoader``'s iterator does that)."""


class _Before(NamedTuple):
    """What a cursor was before ``iter()``."""

    epoch: int
    position: Position | None
    fresh_start: bool
    before: Clock
    run: Run | None
    skip: int
    totals_before: Totals


class Cursor(Bookmark):
    """Begins and ends the runs over a pipeline. Shared with its iterators, which may outlive it.

    Args:
        chain: what is iterated over.
        recycler: where the memory of batches comes from, and stays, also between epochs; by default
            each run has its own.
    """

    def __init__(self, chain: Chain, recycler: Recycler | None = None) -> None:
        super().__init__(chain)
        self._recycler = recycler
        self._autotuner = Autotuner()
        self._kept_workers = KeptWorkers()
        self._before_iter: _Before | None = None
        self._skip = 0  # outputs of the next epoch, from its beginning
        self._has_looked = False  # at the schedulers that there are

    def begin(self) -> PipelineIterator[Any]:
        """Start the next epoch, or go on in one that was loaded; closes a live iterator."""
        live, going, loop = self._live(), self._live_run(), calling_loop()
        if live is not None:
            left = going is None or not going.has_handed_out_all
            if left and not loop.reads_ahead:  # one that does leaves epochs early
                if going is not None and not going.was_asked:
                    live.is_superseded = True  # tqdm.auto makes one that it never asks
                else:
                    warn_of_second_iterator()
            live.close()
        self._follow(loop)
        self._agree((self.epoch + (not self._fresh_start), self._outputs_to(self._skip)))
        iterator = self._begin_data_epoch()
        run = self._run
        assert run is not None
        try:
            agree_order(self.chain, run.order_digest)
        except BaseException:
            iterator.close()
            raise
        return iterator

    def _agree(self, place: tuple[int, ...]) -> None:
        """Compare with other ranks what is iterated over, and where, if that is due.

        It is in every epoch where the data may be longer than in the one before. If only the rank
        whose own data is longer asked the others, it would ask alone.
        """
        if self._live_run() is None:
            self._measure()
        if not self._must_agree and not self.chain.source.may_grow:
            return
        is_later = self._set_by_epoch or not self._must_agree
        self.chain = agree(self.chain, place, long=is_later)
        self._must_agree = self._set_by_epoch = False

    def _outputs_to(self, skip: int) -> int:
        """Return behind which output of its epoch the next run begins."""
        at = self.of_epoch().steps if self._fresh_start and self.position is not None else 0
        return max(at, skip)

    def _follow(self, loop: TrainingLoop) -> None:
        """Be where a framework's loop wants an epoch to begin, if it does not say so."""
        if loop.repeats_first_epoch:
            if not self.is_loaded:
                self.set_epoch(0)
            return
        state = loop.take_state(self._is_of)
        if state is not None:
            self.load(state)

    def _is_of(self, loader: Any) -> bool:
        """Return whether this is a pipeline's cursor, or that of what ``as_dataloader`` made."""
        return getattr(getattr(loader, "pipeline", loader), "_cursor", None) is self

    def _begin_data_epoch(self) -> PipelineIterator[Any]:
        """Start an epoch of the data, or go on in one that was loaded."""
        self._look_at_schedulers()
        self._measure()
        chain = self.chain
        skip, self._skip = self._skip, 0
        epoch, position = self.epoch + 1, Position()
        if self._fresh_start:
            epoch, position = self.epoch, self.position or position
        chain.check_start()
        position, rest = self._start_behind(epoch, position, skip)
        owners = self._agree_owners(position)
        totals_before = self.stats().totals
        if not position.yielded:
            position = self._start_of_record(epoch) or position
        together = chain.follows_clock and (process_group() or (0, 1))[1] > 1
        here = chain.on_leg(position.leg)
        setup = EpochSetup(
            here.plan,
            chain.seed,
            epoch,
            self._autotuner,
            chain.workers_here(),
            self.sizes,
            position,
            here.data_epoch_steps,
            ranks() if together else None,
            self._recycler,
            here.sure_count(epoch),
            self._carry,
            self._kept_workers,
            owners,
        )
        self._carry = {}
        run = Run(setup)
        if run.length is None and chain.steps is None:
            loop = calling_loop()
            run.wrapper = loop.framework if loop.reads_ahead else None
        iterator = self._iterate(run)
        self._note_start(epoch, run, iterator, skip, totals_before)
        for _ in range(rest):
            next(iterator, None)
        return iterator

    def _measure(self) -> None:
        """Take the source as long as it is now, for the epoch that begins; pools begin empty then.

        Raises StateError where an epoch is to go on that had another length.
        """
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

    def resume_at(self, outputs: Any) -> None:
        """Have the next ``iter()`` begin behind so many outputs of its epoch.

        Raises ValueError for what is no number.
        """
        if not is_whole_number(outputs) or outputs < 0:
            raise ValueError(f"a number of batches is a whole number from 0, not {outputs!r}")
        self._skip = int(outputs)

    def _start_behind(self, epoch: int, position: Position, skip: int) -> tuple[Position, int]:
        """Return where to begin so that so much of the epoch is skipped, and what is left of it."""
        steps_before = self._clock(position).steps
        if not skip or steps_before == skip:
            return position, 0
        if steps_before > skip:
            raise ValueError(
                f"{skip} batches of this epoch cannot be skipped: the state that was loaded is "
                f"behind {steps_before}"
            )
        if self.chain.follows_clock:
            raise ValueError(
                '.echo("auto") cannot skip batches, because its remaining items depend on timing: '
                "load the state that state_dict() returned after them"
            )
        if steps_before:
            return position, skip - steps_before
        before, rest = seek(self.chain, epoch, skip)
        if rest:
            before = seek_behind_pool(self.chain, epoch, skip, self.sizes)
        return (position, rest) if before is None else (before, 0)

    def _agree_owners(self, position: Position) -> OwnerSnapshot | None:
        """Return by whose parts the epoch is dealt, None where it is not; ranks agree on it."""
        share, cluster = self.chain.selection.share, self.chain.cluster
        if share is None or not share.is_dealt:
            return None
        assert cluster is not None
        agreeing = ranks("whose part is whose") if share.world > 1 else None
        return agree_owners(position.owners, cluster, share, agreeing)

    def _start_of_record(self, epoch: int) -> Position | None:
        """Return where an epoch began whose record is replayed, None where none is."""
        plan = self.chain.plan
        if not plan.carries_pool or (record := plan.echoes[0].echo.record) is None:
            return None
        items = plan.items_of_first(self.chain.examples(epoch))
        moment = record.carried_pool(0, epoch, items)
        return Position(parts=[PoolStart(moment)]) if moment is not None else Position()

    def _look_at_schedulers(self) -> None:
        """Once, behind the first whole epoch that echoed: is one carried past its end?"""
        run = self._run
        whole = run is not None and run.complete and run.leg is None
        if not self._has_looked and run is not None and whole and self.chain.echoes:
            self._has_looked = True
            warn_of_overshooting(self.chain, self.before.steps, run.yielded)

    def _note_start(
        self,
        epoch: int,
        run: Run,
        iterator: PipelineIterator[Any],
        skip: int,
        totals_before: Totals,
    ) -> None:
        was = self.epoch, self.position, self._fresh_start, self.before
        self._before_iter = _Before(*was, self._run, skip, self._totals_before)
        self._totals_before = totals_before
        if not self._fresh_start:  # the epoch before was left early
            self.before += self.of_epoch()
        self.epoch, self.position, self._fresh_start = epoch, None, False
        self._forget_pending()
        self._run = run
        if self._is_acknowledging:
            run.acknowledge(0)
        self._iterator = weakref.ref(iterator)

    def _end(self, run: Run) -> None:
        """Close a run and keep where it was; one that handed out nothing leaves no trace."""
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
        finally:  # should Ctrl-C come in between
            if is_worker():  # the collector found an abandoned iterator in there
                threading.Thread(target=run.close, name="stoker-closing", daemon=True).start()
            else:
                run.close()

    def _keep_pending(self, run: Run) -> None:
        """Keep where a run's outputs stand that were not acknowledged: they still may be."""
        epoch, before = self.epoch, self.before
        self._pending.extend((epoch, position, before) for position in run.pending_positions())

    def _go_back(self) -> None:
        """Be where the cursor was before ``iter()``; but what failed at once keeps its figures."""
        run = self._run
        assert self._before_iter is not None
        assert run is not None
        before = self._before_iter
        self.epoch, self.position, self._fresh_start = (
            before.epoch,
            before.position,
            before.fresh_start,
        )
        self.before, self._skip = before.before, before.skip
        if not run.was_asked:
            self._run, self._totals_before = before.run, before.totals_before
