"""The epoch, position and counts of a pipeline; its saved states, and statistics of its last run.

The position is after the last output that was handed out, or after the last acknowledged one if the
trainer acknowledges outputs. After the last output of an epoch, as far as ``len()`` tells, it is
the beginning of the next epoch.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np

from stoker.basics.validate import whole_from
from stoker.chain import state
from stoker.chain.chain import Chain
from stoker.chain.iterator import MOVED, PipelineIterator
from stoker.chain.seek import take_over
from stoker.engine.checkpoint import PoolSize, Position
from stoker.engine.history import FORGOTTEN
from stoker.engine.items import Item
from stoker.engine.run import Run
from stoker.errors import StateError
from stoker.frameworks.queries import calling_loop
from stoker.schedule.echo_record import DecidedLate, EchoRecord, encode
from stoker.stats import Counts, PoolStats, Stats, Totals, Uses


class EpochPosition:
    """A pipeline's epoch and position: they can be read, saved, and set."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.epoch = 0
        self.position: Position | None = None  # in self.epoch, to begin at, or where it ended
        self.pool_size = PoolSize()
        self.before = Counts()  # the counts before the current epoch
        self._skip = 0  # outputs of the next epoch to skip, from its beginning
        self._carry: dict[int, Item] = {}  # items of a pool that goes on in the next epoch
        self._totals_before = Totals()  # of all runs before the last one
        self._echo_record: EchoRecord | None = None
        self._late_records: dict[int, DecidedLate] = {}
        self._fresh_start = True  # whether the next iter() begins at ``position``
        self._run: Run | None = None
        self._iterator: weakref.ref[PipelineIterator[Any]] | None = None
        # Unacknowledged outputs of finished runs: epoch, position, and the counts before.
        self._pending: deque[tuple[int, Position | None, Counts]] = deque()
        self._is_acknowledging = False  # whether the trainer acknowledges outputs
        self._must_agree = True  # whether ranks compare their pipelines at the next iter()
        self._set_by_epoch = False  # whether ``set_epoch`` asked for that

    def _live(self) -> PipelineIterator[Any] | None:
        """Return the live iterator of this process, or None."""
        iterator = self._iterator() if self._iterator is not None else None
        return None if iterator is None or self._live_run() is None else iterator

    def _live_run(self) -> Run | None:
        """Return the live run; None for one of a parent process, whose locks may be held."""
        run = self._run
        return None if run is None or run.closed or run.is_inherited else run

    @property
    def is_untouched(self) -> bool:
        """True before anything moved it."""
        is_begun = self._run is not None or self.position is not None or self._asked_to_skip() > 0
        return not is_begun and not self.epoch

    @property
    def next_chain(self) -> Chain:
        """The chain of the running epoch; without one, of the next epoch."""
        return self.chain if self._live_run() is not None else self.chain.with_current_length()

    def count(self) -> int:
        """Return the number of outputs of the current epoch, or else of the next one."""
        is_next = self._live_run() is None and not self._fresh_start
        return self.next_chain.count(self.epoch + is_next)

    @property
    def is_loaded(self) -> bool:
        """Whether the next ``iter()`` goes on in the middle of an epoch."""
        return self._fresh_start and self.position is not None

    def set_epoch(self, epoch: Any) -> None:
        """Set the next epoch; that of a loaded state keeps its position. Raises ValueError."""
        epoch = whole_from(0, epoch, "an epoch is")
        if self.is_loaded and epoch == self.epoch:
            self._agree_again()
            self.chain.source.set_epoch(epoch)
            return
        self.chain.source.drawn_before(self.chain.orders.row, epoch)
        self._agree_again()
        self.go_to(epoch, None)
        self.chain.source.set_epoch(epoch)

    def _agree_again(self) -> None:
        """Have ranks compare their pipelines at the next ``iter()``; they may call it late."""
        self._set_by_epoch = self._set_by_epoch or not self._must_agree
        self._must_agree = True

    def go_to(self, epoch: int, position: Position | None) -> None:
        live = self._live()
        if live is not None:
            live.supersede(MOVED)
        self._pending.clear()
        self._carry = {}
        if not self._fresh_start:
            self.before += self.of_epoch()
        self.epoch, self.position, self._fresh_start = epoch, position, True

    def resume_at(self, outputs: Any) -> None:
        """Have the next ``iter()`` begin after so many outputs of its epoch. Raises ValueError."""
        self._skip = whole_from(0, outputs, "a number of batches is")

    def acknowledge(self, outputs: Any) -> None:
        """Record that the trainer has finished with ``outputs`` more outputs. Raises ValueError.

        From then on the position counts acknowledged outputs only, in later runs, too.
        """
        outputs = whole_from(0, outputs, "a number of batches is")
        self._is_acknowledging = True
        run = self._live_run()
        earlier = min(outputs, len(self._pending))
        if run is not None:
            run.history.acknowledge(outputs - earlier)
        elif outputs > earlier:
            raise ValueError("every batch that was handed out is acknowledged already")
        for _ in range(earlier):
            self._pending.popleft()

    def _forget_pending(self) -> None:
        """Count all outputs of earlier epochs as acknowledged: a new epoch begins."""
        self._pending.clear()

    def _at(self) -> Run | Position:
        """Return how far the current epoch is: its run, or else where that ended."""
        run = self._run
        if run is not None and not run.closed:  # also a parent's: its counts can be read
            return run
        return self.position or Position()

    def of_epoch(self) -> Counts:
        """Return the counts of the current epoch alone."""
        return self._counts(self._at())

    def _counts(self, at: Run | Position) -> Counts:
        """Return the counts of its epoch over all ranks, computed from this rank's counts."""
        own = self.chain.on_leg(at.leg).counts(self.epoch, at.fresh, at.uses, at.yielded)
        return own if at.leg is None else at.leg.before + own

    def _note(self, run: Run) -> None:
        late = run.late_decisions()
        if late is not None:
            self._late_records[run.epoch] = late.after(self._late_records.get(run.epoch))
        decisions = run.decisions()
        if decisions is not None:
            known = self._echo_record or EchoRecord(self.pool_size.size, {})
            after = decisions.after(known.epochs.get(run.epoch))
            self._echo_record = replace(known, epochs={**known.epochs, run.epoch: after})

    def where(self) -> tuple[int, Position, Counts]:
        """Return the current position: the epoch, the position in it, and the counts before it."""
        run = self._run
        is_left = self._live_run() is None and not self._fresh_start
        if is_left and self._asked_to_skip():  # of the epoch after the one that was left early
            return self.epoch + 1, Position(), self.before + self.of_epoch()
        if self._pending:
            epoch, oldest, before = self._pending[0]
            if oldest is None:
                raise StateError(FORGOTTEN)
            return epoch, oldest, before
        if run is None or run.closed:
            if self._is_epoch_left():
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
        if not late and self._is_epoch_left():
            return self.epoch + 1, Position(), self.before + self.of_epoch()
        if run.wrapper and run.history.finished is None and run.yielded > run.began_at:
            raise StateError(
                f"{run.wrapper} reads a batch ahead if the number of batches is not known, and "
                "would lose it on a resume: give epochs a length with .steps(n), or call "
                "pipeline.acknowledge() after each training step (in on_train_batch_end)"
            )
        return self.epoch, run.position(late), self.before

    def _behind(self, run: Run) -> tuple[int, Counts]:
        """Return the epoch after a whole run, and the counts then."""
        return self.epoch + 1, self.before + self._counts(run)

    def _is_epoch_left(self) -> bool:
        """True if a framework has left the current epoch before its end."""
        return not self._fresh_start and calling_loop().has_ended_epoch()

    @staticmethod
    def _late(run: Run) -> int:
        """Return the number of outputs that were handed out but not trained on."""
        if run.history.finished is not None:
            return run.history.late
        return min(calling_loop().untrained_batches(), run.yielded - run.began_at)

    def _has_left_data_epoch(self) -> bool:
        """True if a loader's epoch was left in its middle, as ``.steps(n)`` does."""
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

    def save(self) -> dict[str, Any]:
        """Return the state at ``where()``, ready for JSON except for a loader's own state."""
        chain = self.chain
        epoch, position, before = self.where()
        if not position.yielded and (epoch != self.epoch or self._live_run() is None):
            chain = chain.with_current_length()  # the epoch has not begun
            position = position if chain is self.chain else Position()
        if position.yielded:
            chain.source.check_state(chain)
            if not position.order:  # found by arithmetic: no run has asked for the order
                digest = chain.orders.digest(chain.seed, epoch)
                position = replace(position, order=digest)
        elif position.loader_state is None:
            run = self._live_run()
            if run is not None:
                run.leave()
            between = chain.source.state_between(left=self._has_left_data_epoch())
            position = replace(position, loader_state=between)
        handed_out, skip = self._handed_out(), self._asked_to_skip()
        return state.write(chain, epoch, position, self.pool_size, before, handed_out, skip)

    def _handed_out(self) -> int | None:
        """Return the outputs of all step epochs; None without step epochs (``.repeat()``)."""
        return None

    def _asked_to_skip(self) -> int:
        """Return the outputs of the next epoch that ``resume_at`` leaves out."""
        return 0 if self._live() is not None or self._pending else self._skip

    def load(self, states: Any, *, elastic: bool = True) -> state.Loaded:
        """Go to the position in a saved state, or in a list of the states of all ranks.

        Raises StateError if it belongs to another chain or is damaged; without ``elastic`` also if
        the number of ranks or the batch size differs.
        """
        chain = self.chain.with_current_length()
        states = states if isinstance(states, list) else [states]
        if not states:
            raise StateError("this is no state of a stoker pipeline: the list of states is empty")
        start = take_over([state.read(one, chain, elastic=elastic) for one in states], chain)
        has_begun = bool(start.epoch) or start.position is not None
        self.chain = replace(
            chain.with_seed(start.seed), is_seed_open=chain.is_seed_drawn and not has_begun
        )
        self._must_agree, self._set_by_epoch = True, False
        self.go_to(start.epoch, start.position)
        self.pool_size = start.pool_size
        self.before, self._skip = start.before, start.skip
        if chain.source.yields_batches:
            self._echo_record = None  # pools begin empty, so earlier decisions cannot be replayed
        return start

    def record(self) -> dict[str, Any]:
        """Return what adaptive echoes decided, and what was late, for JSON. Raises ValueError."""
        if not self.chain.flow.is_adaptive and self.chain.late is None:
            raise ValueError(
                'there is nothing to record: no .echo("auto") or .late().batch(n) stands in this '
                "chain"
            )
        run = self._live_run()
        if run is not None:
            self._note(run)
        lines = self.chain.signature()
        return encode(self.chain.seed, lines, self._echo_record, self._late_records)

    def progress(self) -> float:
        """Return the share of the epoch that was handed out, from 0 to 1."""
        chain, at, counts = self.chain, self._at(), self.of_epoch()
        steps, leg = chain.data_epoch_steps, at.leg
        share = None if steps is None else counts.steps / steps
        if isinstance(at, Run) and at.has_handed_out_all:
            return 1.0
        try:
            fresh = at.loaded if chain.source.yields_batches else counts.fresh_examples
            here, before = chain.on_leg(leg), Counts() if leg is None else leg.before
            examples = here.examples_in_batches(self.epoch)
            of_all = (before + here.counts(self.epoch, examples, 0, 0)).fresh_examples
            share = max(share or 0.0, fresh / max(1, of_all))
        except TypeError:
            if share is None:
                raise TypeError(
                    "progress is not known without a length; .steps(n) gives an epoch one"
                ) from None
        return min(1.0, share)

    def is_at_end(self) -> bool:
        """Return whether the live run has handed out its last output; may wait for the next one."""
        run = self._live_run()
        return run is not None and run.is_last

    def last_uses(self) -> Uses:
        """Return the uses in the last output; empty before any."""
        if self._run is None or self._run.is_inherited:
            return Uses(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, bool))
        return self._run.last_uses()

    def stats(self) -> Stats:
        """Return the statistics of the running epoch, or else of the last one."""
        if self._run is None or self._run.is_inherited:
            return Stats(
                self.epoch, 0, 0, 0, 0.0, 0, 0, 0.0, 0.0, 0.0, 0.0, (), 0, 0, 0, 0,
                self._pool_stats(0), totals=self._totals_before,
            )  # fmt: skip
        of_run = self._run.stats(self._pool_stats(self._run.held))
        return replace(of_run, totals=self._totals_before + of_run.epoch_totals())

    def _pool_stats(self, held: int) -> PoolStats | None:
        echo, known = self.chain.echo, self.pool_size
        if echo is None:
            return None
        return PoolStats(echo.name, held, known.size or echo.pool or 0, known.bytes)
