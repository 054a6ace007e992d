"""Where a pipeline is: its epoch, the run over it, what was handed out, and its saved states.

A cursor is where its last iterator left it. An iterator that handed out nothing puts it back. One
that handed out ``len()`` batches has had its epoch, even if nobody asked for the end.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from stoker.basics.buffers import Recycler
from stoker.basics.resources import process_group
from stoker.basics.validate import is_whole_number
from stoker.chain import state
from stoker.chain.accelerate import EndSignal
from stoker.chain.agreement import agreed
from stoker.chain.chain import Chain
from stoker.chain.iterator import PipelineIterator, warn_of_second_iterator
from stoker.chain.scheduler_check import warn_of_overshooting
from stoker.chain.seek import behind_pool, nearest
from stoker.chain.state import StateSchema
from stoker.distributed.frameworks import ends_epoch, left_aside, overfits, reads_ahead, untrained
from stoker.engine.build import EpochSetup
from stoker.engine.checkpoint import Position
from stoker.engine.echo.pool_inputs import PoolStart
from stoker.engine.echo.rank_sync import pin, ranks
from stoker.engine.items import Item
from stoker.engine.run import FORGOTTEN, Run
from stoker.engine.workers.make import KeptWorkers
from stoker.engine.workers.threads import is_worker
from stoker.engine.workers.tuning import Autotuner
from stoker.errors import StateError
from stoker.schedule.echo_record import EchoRecord, written
from stoker.schedule.owners import OwnerSnapshot
from stoker.stages.stage import PoolSize
from stoker.stats import Clock, PoolStats, Stats, Totals, Uses

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
    spent: Totals


class Cursor:
    """A pipeline's epoch and position. Shared with its iterators, which may outlive it.

    Args:
        chain: what is iterated over.
        recycler: where the memory of batches comes from, and stays, also between epochs; by default
            each run has its own.
    """

    def __init__(self, chain: Chain, recycler: Recycler | None = None) -> None:
        self.chain = chain
        self._recycler = recycler
        self._autotuner = Autotuner()
        self._kept_workers = KeptWorkers()
        self.epoch = 0
        self.position: Position | None = None  # in self.epoch, where to begin or where it ended
        self._carried: dict[int, Item] = {}  # what a pool holds that goes on in the next epoch
        self.sizes: dict[int, PoolSize] = {}
        self.before = Clock()  # what was handed out before the epoch at hand
        self._spent = Totals()  # before the last run
        self._records: dict[int, EchoRecord] = {}
        self._fresh_start = True  # whether the next iter() begins here rather than behind
        self._run: Run | None = None
        self._iterator: weakref.ref[PipelineIterator[Any]] | None = None
        self._found: _Before | None = None
        # Where outputs of runs that are over stand, with the epoch, and the clock before that.
        self._unfinished: deque[tuple[int, Position | None, Clock]] = deque()
        self._skip = 0  # outputs of the next epoch, from its beginning
        self._has_looked = False  # at the schedulers that there are
        self._acknowledged = False  # whether the trainer says what it has finished with
        self._to_agree = True  # whether ranks compare their pipelines at the next iter()
        self._set_by_epoch = False  # whether that is because of set_epoch

    def _live(self) -> PipelineIterator[Any] | None:
        """Return the iterator that has not ended, if it is this process's."""
        iterator = self._iterator() if self._iterator is not None else None
        return None if iterator is None or self._live_run() is None else iterator

    def _live_run(self) -> Run | None:
        """Return the run that goes on; None for a parent's as well: its locks may be held."""
        run = self._run
        return None if run is None or run.closed or run.is_inherited else run

    def begin(self) -> PipelineIterator[Any]:
        """Start the next epoch, or go on in one that was loaded; closes a live iterator."""
        live, going = self._live(), self._live_run()
        if live is not None:
            left = going is None or not going.has_handed_out_all
            if left and reads_ahead() is None:  # Lightning leaves epochs early, and keeps iterators
                if going is not None and not going.was_asked:
                    live.is_superseded = True  # tqdm.auto makes one that it never asks
                else:
                    warn_of_second_iterator()
            live.close()
        self._heed_lightning()
        self._agree((self.epoch + (not self._fresh_start), self._outputs_to(self._skip)))
        return self._begin_pass()

    def _agree(self, place: tuple[int, ...]) -> None:
        """Compare with other ranks what is iterated over, and where, if that is due.

        It is in every epoch where the data may be longer than in the one before. If only the rank
        whose own data is longer asked the others, it would ask alone.
        """
        if self._live_run() is None:
            self._measure()
        if not self._to_agree and not self.chain.source.may_grow:
            return
        is_later = self._set_by_epoch or not self._to_agree
        self.chain = agreed(self.chain, place, long=is_later)
        self._to_agree = self._set_by_epoch = False

    def _outputs_to(self, skip: int) -> int:
        """Return behind which output of its epoch the next pass begins."""
        at = self.position.yielded if self._fresh_start and self.position is not None else 0
        return max(at, skip)

    def _heed_lightning(self) -> None:
        """Be where Lightning wants an epoch to begin, if it is calling and does not say so."""
        if overfits():
            if not self.is_loaded:
                self.set_epoch(0)
            return
        saved = left_aside(self._is_of)
        if saved is not None:
            self.load(saved)

    def _is_of(self, loader: Any) -> bool:
        """Return whether this is a pipeline's cursor, or that of what ``as_dataloader`` made."""
        return getattr(getattr(loader, "pipeline", loader), "_cursor", None) is self

    def _begin_pass(self) -> PipelineIterator[Any]:
        """Start a pass over the data, or go on in one that was loaded."""
        self._look_at_schedulers()
        self._measure()
        chain = self.chain
        skip, self._skip = self._skip, 0
        epoch, position = self.epoch + 1, Position()
        if self._fresh_start:
            epoch, position = self.epoch, self.position or position
        chain.check_start()
        position, missed = self._skipped(epoch, position, skip)
        owners = self._pinned(position)
        spent = self.stats().totals
        if not position.yielded:
            position = self._recorded_start(epoch) or position
        together = chain.follows_clock and (process_group() or (0, 1))[1] > 1
        setup = EpochSetup(
            chain.plan,
            chain.seed,
            epoch,
            self._autotuner,
            chain.workers_here(),
            self.sizes,
            position,
            chain.pass_steps,
            ranks() if together else None,
            self._recycler,
            chain.sure_count(),
            self._carried,
            self._kept_workers,
            owners,
        )
        self._carried = {}
        run = Run(setup)
        if run.length is None and chain.steps is None:
            run.wrapper = reads_ahead()
        iterator = self._iterate(run)
        self._started(epoch, run, iterator, skip, spent)
        for _ in range(missed):
            next(iterator, None)
        return iterator

    def _measure(self) -> None:
        """Take the source as long as it is now, for the epoch that begins; pools begin empty then.

        Raises StateError where an epoch is to go on that had another length.
        """
        chain, position = self.chain.measured(), self.position
        if chain is self.chain:
            return
        if self._fresh_start and position is not None and position.yielded:
            raise StateError(
                f"{chain.source.name} has {chain.source.count():,} examples now, and the epoch "
                f"that is to go on had {self.chain.source.count():,}: load the state where it has "
                "as many, or begin the next epoch (set_epoch)"
            )
        if self._fresh_start:
            self.position = None
        self.chain, self._carried = chain, {}

    @property
    def coming(self) -> Chain:
        """The chain as the next epoch finds it; while one is run, as that found it."""
        return self.chain if self._live_run() is not None else self.chain.measured()

    def _iterate(self, run: Run) -> PipelineIterator[Any]:
        return PipelineIterator(run, self._ended, EndSignal.of(run))

    def resume_at(self, outputs: Any) -> None:
        """Have the next ``iter()`` begin behind so many outputs of its epoch.

        Raises ValueError for what is no number.
        """
        if not is_whole_number(outputs) or outputs < 0:
            raise ValueError(f"a number of batches is a whole number from 0, not {outputs!r}")
        self._skip = int(outputs)

    def _skipped(self, epoch: int, position: Position, skip: int) -> tuple[Position, int]:
        """Return where to begin so that so much of the epoch is skipped, and what is left of it."""
        if not skip or position.yielded == skip:
            return position, 0
        if position.yielded > skip:
            raise ValueError(
                f"{skip} batches of this epoch cannot be skipped: the state that was loaded is "
                f"behind {position.yielded}"
            )
        if self.chain.follows_clock:
            raise ValueError(
                '.echo("auto") cannot skip batches, because its remaining items depend on timing: '
                "load the state that state_dict() returned after them"
            )
        if position.yielded:
            return position, skip - position.yielded
        found, missed = nearest(self.chain, skip)
        if missed:
            found = behind_pool(self.chain, epoch, skip, self.sizes)
        return (position, missed) if found is None else (found, 0)

    def _pinned(self, position: Position) -> OwnerSnapshot | None:
        """Return by whose parts the epoch is dealt, None where it is not; ranks agree on it."""
        share, cluster = self.chain.selection.share, self.chain.cluster
        if share is None or not share.is_dealt:
            return None
        assert cluster is not None
        agreeing = ranks("whose part is whose") if share.world > 1 else None
        return pin(position.owners, cluster, share, agreeing)

    def _recorded_start(self, epoch: int) -> Position | None:
        """Return where an epoch began whose record is replayed, None where none is."""
        plan = self.chain.plan
        if not plan.carries_pool or (record := plan.echoes[0].echo.record) is None:
            return None
        items = plan.items_of_first(self.chain.examples())
        moment = record.carried(0, epoch, items)
        return Position(parts=[PoolStart(moment)]) if moment is not None else Position()

    def _look_at_schedulers(self) -> None:
        """Once, behind the first whole epoch that echoed: is one carried past its end?"""
        run = self._run
        if not self._has_looked and run is not None and run.complete and self.chain.echoes:
            self._has_looked = True
            warn_of_overshooting(self.chain, self.before.steps, run.yielded)

    @property
    def is_loaded(self) -> bool:
        """Whether the next ``iter()`` goes on in the middle of an epoch."""
        return self._fresh_start and self.position is not None

    def _started(
        self, epoch: int, run: Run, iterator: PipelineIterator[Any], skip: int, spent: Totals
    ) -> None:
        was = self.epoch, self.position, self._fresh_start, self.before
        self._found = _Before(*was, self._run, skip, self._spent)
        self._spent = spent
        if not self._fresh_start:  # the epoch before was left early
            self.before += self.of_epoch()
        self.epoch, self.position, self._fresh_start = epoch, None, False
        self._forget_unfinished()
        self._run = run
        if self._acknowledged:
            run.acknowledge(0)
        self._iterator = weakref.ref(iterator)

    def acknowledge(self, outputs: Any) -> None:
        """Take note that the trainer has finished with so many more outputs of the last run.

        From then on trainers of all runs are expected to say so. Raises ValueError for more than
        were handed out, or what is no number.
        """
        if not is_whole_number(outputs) or outputs < 0:
            raise ValueError(f"a number of batches is a whole number from 0, not {outputs!r}")
        outputs = int(outputs)
        self._acknowledged = True
        run = self._live_run()
        earlier = min(outputs, len(self._unfinished))
        if run is not None:
            run.acknowledge(outputs - earlier)
        elif outputs > earlier:
            raise ValueError("every batch that was handed out is acknowledged already")
        for _ in range(earlier):
            self._unfinished.popleft()

    def _forget_unfinished(self) -> None:
        """An epoch begins: what was not acknowledged of those before counts as finished."""
        self._unfinished.clear()

    def _ended(self, run: Run) -> None:
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
                self._leave_unfinished(run)
                self.epoch, self.before = self._behind(run)
                self.position, self._carried = run.next_start(), run.carried()
                self._fresh_start = True
            elif run.yielded > run.began_at:
                self._leave_unfinished(run)
                self.position = run.position(0)
            else:
                self._go_back()
        finally:  # should Ctrl-C come in between
            if is_worker():  # the collector found an abandoned iterator in there
                threading.Thread(target=run.close, name="stoker-closing", daemon=True).start()
            else:
                run.close()

    def _leave_unfinished(self, run: Run) -> None:
        """Keep where a run's outputs stand that were not acknowledged: they still may be."""
        epoch, before = self.epoch, self.before
        self._unfinished.extend((epoch, position, before) for position in run.unfinished())

    def _behind(self, run: Run) -> tuple[int, Clock]:
        """Return the epoch that follows a whole run, and the clock then."""
        return self.epoch + 1, self.before + Clock(run.fresh, run.uses, run.yielded)

    def _go_back(self) -> None:
        """Be where the cursor was before ``iter()``; but what failed at once keeps its figures."""
        run = self._run
        assert self._found is not None
        assert run is not None
        found = self._found
        self.epoch, self.position, self._fresh_start = (
            found.epoch,
            found.position,
            found.fresh_start,
        )
        self.before, self._skip = found.before, found.skip
        if not run.was_asked:
            self._run, self._spent = found.run, found.spent

    def set_epoch(self, epoch: Any) -> None:
        """Make an epoch the next one; the one that a state was loaded for keeps its position.

        Raises ValueError for what is no number of an epoch.
        """
        if not is_whole_number(epoch) or epoch < 0:
            raise ValueError(f"an epoch is a whole number from 0, not {epoch!r}")
        self._agree_again()
        if self.is_loaded and epoch == self.epoch:
            return
        self.go_to(int(epoch), None)
        self.chain.source.set_epoch(int(epoch))

    def _agree_again(self) -> None:
        """Have ranks compare at the next ``iter()``, to which they may come late."""
        self._set_by_epoch = self._set_by_epoch or not self._to_agree
        self._to_agree = True

    def go_to(self, epoch: int, position: Position | None) -> None:
        live = self._live()
        if live is not None:
            live.close()
        self._unfinished.clear()
        self._carried = {}
        if not self._fresh_start:
            self.before += self.of_epoch()
        self.epoch, self.position, self._fresh_start = epoch, position, True

    def of_epoch(self) -> Clock:
        """Return what was handed out in the epoch at hand."""
        run = self._run
        if run is not None and not run.closed:  # a parent's too, for its numbers are there
            return Clock(run.fresh, run.uses, run.yielded)
        at = self.position or Position()
        return Clock(at.fresh, at.uses, at.yielded)

    def _loaded_batches(self) -> int:
        """Return how many batches of a loader were handed out in the epoch at hand."""
        if self._run is not None and not self._run.closed:
            return self._run.loaded
        return (self.position or Position()).loaded

    def _note(self, run: Run) -> None:
        for position, (echo, made) in run.decisions().items():
            epochs = dict(self._records.get(position, echo).epochs)
            epochs[made.epoch] = made.after(epochs.get(made.epoch))
            self._records[position] = replace(echo, epochs=epochs)

    def where(self) -> tuple[int, Position, Clock]:
        """Return where the last output stands that was handed out, or acknowledged if any was.

        The epoch, the position in it, and the clock before it. Behind the last output of an epoch
        that is the beginning of the next.
        """
        run = self._run
        if self._unfinished:
            epoch, oldest, before = self._unfinished[0]
            if oldest is None:
                raise StateError(FORGOTTEN)
            return epoch, oldest, before
        if run is None or run.closed:
            if self._is_left():
                return self.epoch + 1, Position(), self.before + self.of_epoch()
            return self.epoch, self.position or Position(), self.before
        if run.is_inherited:
            raise StateError(
                "the epoch is iterated by the process that this one was forked from: save there"
            )
        late = self._late(run)
        if not late and run.is_over:
            epoch, before = self._behind(run)
            return epoch, run.next_start() or Position(), before
        if not late and self._is_left():
            return self.epoch + 1, Position(), self.before + self.of_epoch()
        if run.wrapper and run.finished is None and run.yielded > run.began_at:
            raise StateError(
                f"{run.wrapper} reads a batch ahead if the number of batches is not known, and "
                "would lose it on a resume: give epochs a length with .steps(n), or call "
                "pipeline.acknowledge() after each training step (in on_train_batch_end)"
            )
        return self.epoch, run.position(late), self.before

    def _is_left(self) -> bool:
        """Return whether Lightning asks for no more of the epoch at hand, which is not over."""
        return not self._fresh_start and ends_epoch()

    def _left_a_pass(self) -> bool:
        """Return whether a loader stands in a pass that ``.steps(n)``, say, ended in its middle."""
        run, source = self._run, self.chain.source
        if run is None:
            return False
        if not source.is_counted:
            return run.yielded == run.steps
        try:
            whole = source.count()
        except Exception:  # a stream has none, and a foreign loader's len() may raise anything
            return False
        return 0 < (run.loaded if source.yields_batches else run.fresh) < whole

    @staticmethod
    def _late(run: Run) -> int:
        """Return how many of the outputs handed out last the trainer has not finished with."""
        if run.finished is not None:
            return run.late
        return min(untrained(), run.yielded - run.began_at)

    def saved(self) -> dict[str, Any]:
        """Return the state where ``where()`` says, ready for JSON but for a loader's own state."""
        chain = self.chain
        epoch, position, before = self.where()
        if not position.yielded and (epoch != self.epoch or self._live_run() is None):
            chain = chain.measured()  # an epoch that has not begun
            position = position if chain is self.chain else Position()
        if position.yielded:
            chain.source.check_state(chain)
        elif position.loader_state is None:
            run = self._live_run()
            if run is not None:
                run.leave()
            between = chain.source.state_between(left=self._left_a_pass())
            position = replace(position, loader_state=between)
        outline, handed_out = chain.outline(), self._handed_out()
        return state.saved(outline, chain.seed, epoch, position, self.sizes, before, handed_out)

    def _handed_out(self) -> int | None:
        """Return how many outputs there were in all epochs; None where an epoch is a pass."""
        return None

    def load(self, saved: dict[str, Any]) -> state.Loaded:
        """Go to a saved state. Raises StateError when it is another chain's, or damaged."""
        chain = self.chain.measured()
        examples = chain.examples() if chain.source.is_indexed else None
        fit = StateSchema(chain.plan, examples, chain.accounts, chain.pass_steps)
        given = None if chain.is_seed_drawn else chain.seed
        loaded = state.read(saved, chain.outline(), given, fit)
        begun = bool(loaded.epoch) or loaded.position is not None
        self.chain = replace(
            chain.seeded(loaded.seed), is_seed_open=chain.is_seed_drawn and not begun
        )
        self._to_agree, self._set_by_epoch = True, False
        self.go_to(loaded.epoch, loaded.position)
        self.sizes = loaded.sizes
        self.before = loaded.before
        if chain.source.yields_batches:
            self._records = {}  # pools begin empty: what was decided does not go on
        return loaded

    def record(self) -> dict[str, Any]:
        """Return what echoes that follow the stall decided, ready for JSON.

        Raises ValueError where there are none.
        """
        if not self.chain.plan.is_adaptive:
            raise ValueError('there is nothing to record: no .echo("auto") stands in this chain')
        run = self._live_run()
        if run is not None:
            self._note(run)
        return written(self.chain.seed, self.chain.outline(), self._records)

    def progress(self) -> float:
        """Return how much of the epoch's fresh examples, or steps, was handed out, from 0 to 1."""
        chain, done = self.chain, self.of_epoch()
        share = done.steps / chain.pass_steps if chain.pass_steps is not None else None
        if self._run is not None and not self._run.closed and self._run.has_handed_out_all:
            return 1.0
        try:
            fresh = self._loaded_batches() if chain.source.yields_batches else done.fresh_examples
            share = max(share or 0.0, fresh / max(1, chain.examples_in_batches()))
        except TypeError:
            if share is None:
                raise TypeError(
                    "progress is not known without a length; .steps(n) gives an epoch one"
                ) from None
        return min(1.0, share)

    def last_uses(self) -> Uses:
        """Return what the examples handed out last are uses of; of none, where there were none."""
        if self._run is None or self._run.is_inherited:
            return Uses(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, bool))
        return self._run.last_uses()

    def stats(self) -> Stats:
        """Return statistics of the epoch being run, or else of the last one."""
        if self._run is None or self._run.is_inherited:
            return Stats(
                self.epoch, 0, 0, 0, 0.0, 0, 0, 0.0, 0.0, 0.0, 0.0, (), 0, 0, 0, 0, self._pools({}),
                totals=self._spent,
            )  # fmt: skip
        of_run = self._run.stats(self._pools(self._run.held()))
        return replace(of_run, totals=self._spent + of_run.spent())

    def _pools(self, held: dict[int, int]) -> tuple[PoolStats, ...]:
        pools = []
        for echo in self.chain.echoes:
            known = self.sizes.get(echo.position, PoolSize(echo.pool or 0))
            size_bytes = known.size * known.item_bytes
            count = held.get(echo.position, 0)
            pools.append(PoolStats(echo.name, count, known.size, size_bytes))
        return tuple(pools)
