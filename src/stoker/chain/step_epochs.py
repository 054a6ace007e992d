"""Epochs of a fixed number of outputs, independent of the data's own epochs: ``.repeat()``.

Here an epoch of ``.steps(n)`` is a step epoch, and a pass over the data is a data epoch. Each data
epoch is a run of its own, with its own order. If a step epoch ends in the middle of a data epoch,
the run rests, with its prepared outputs, and goes on in the next step epoch. Leaving a step epoch
early ends the run. The next step epoch then goes on after the last output, or with a new data epoch
if that position cannot be reached again.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, NamedTuple, cast

from stoker.basics.signals import finalize
from stoker.basics.validate import whole_from
from stoker.basics.warn import warn
from stoker.chain import state
from stoker.chain.chain import Chain
from stoker.chain.cursor import Cursor
from stoker.chain.iterator import MOVED, SECOND_ITERATOR, PipelineIterator, T, leave_out
from stoker.chain.seek import can_jump, seek, skip_epochs
from stoker.engine.checkpoint import Position
from stoker.engine.run import Run
from stoker.errors import StateError, StokerError, raised_here
from stoker.frameworks.queries import EpochListener, calling_loop, epoch_listener
from stoker.stats import Counts, Stats


class StepEpochs(Cursor):
    """A cursor over step epochs of ``chain.steps`` outputs; None: a single one without an end.

    Its epoch, position and counts are those of the data. ``handed_out`` counts outputs in step
    epochs: a step epoch that was left early counts as whole once the next begins.
    """

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain)
        self.handed_out = 0
        self._goes_on = False  # whether the next step epoch is the rest of a resumed one
        self._why = ""  # why the last data epoch was empty
        self._number = 0  # the current step epoch, or the last one
        self._ended_stats: Stats | None = None  # statistics of its finished data epochs
        # The part of the current data epoch that belongs to an earlier step epoch.
        self._earlier_stats: Stats | None = None
        self._data_epoch: PipelineIterator[Any] | None = None  # it rests between step epochs
        self._step_epoch: weakref.ref[StepEpochIterator[Any]] | None = None

    # -- step epochs

    def _live_step_epoch(self) -> StepEpochIterator[Any] | None:
        """Return the live iterator over the current step epoch, or None."""
        live = None if self._step_epoch is None else self._step_epoch()
        return None if live is None or live.is_closed else live

    def begin(self) -> PipelineIterator[Any]:
        """Start the next step epoch, or go on in a loaded one; closes a live iterator."""
        live = self._live_step_epoch()
        if live is not None:
            live.supersede(SECOND_ITERATOR)
        if self._run is not None and self._run.is_inherited:
            self._data_epoch = None
        self._follow(calling_loop())
        skip = self._skip
        if not self._goes_on:
            self.handed_out = self.next_step_epoch * (self.chain.steps or 0)
        steps, run = self.chain.steps, self._live_run()
        done = self.handed_out if steps is None else self.handed_out % steps  # of its step epoch
        self._agree((self.next_step_epoch, max(done, skip)))
        # All outputs of earlier step epochs count as acknowledged.
        self._pending.clear()
        if run is not None and run.history.late:
            run.history.acknowledge(run.history.late)
        end = None if steps is None else (self.handed_out // steps + 1) * steps
        rest = self._advance(skip if steps is None else min(skip, steps)) if skip else 0
        self._skip = 0
        self._goes_on = False
        self._number = 0 if end is None or steps is None else end // steps - 1
        self._ended_stats, self._earlier_stats = None, self._data_epoch_stats()
        if (run := self._live_run()) is not None:
            run.wake()
        iterator: StepEpochIterator[Any] = StepEpochIterator(self, end)
        self._step_epoch = weakref.ref(iterator)
        began = self.handed_out
        try:
            leave_out(iterator, rest)
        except BaseException:  # the next one goes on where this one failed
            # Without steps, what was handed out before is not counted again (see _advance).
            self._skip = rest - (self.handed_out - began) if steps is None else skip
            self._goes_on = True
            raise
        return iterator

    @property
    def is_loaded(self) -> bool:
        return self._goes_on

    @property
    def next_step_epoch(self) -> int:
        """The number of the step epoch that ``begin`` starts or continues."""
        steps = self.chain.steps
        if steps is None:
            return 0
        return self.handed_out // steps if self._goes_on else -(-self.handed_out // steps)

    def next(self) -> Any:
        """Return the next output, of the current data epoch or of the next one."""
        for _ in range(3):  # the first may be at its end, and the second may be left early
            if self._data_epoch is None:
                self._data_epoch = self._begin_data_epoch()
            try:
                output = next(self._data_epoch)
            except StopIteration:
                run = self._run
                why = "" if run is None else run.why_empty()
                self._why = f": {why}" if why else ""
                self._data_epoch = None
                continue
            except BaseException as error:
                run = self._live_run()
                if run is None:
                    self.leave()
                elif run.has_lost(error):
                    self.handed_out += 1
                raise
            self.handed_out += 1
            return output
        raise StokerError(
            f"a whole pass over the data has no batch, so .repeat() would not end{self._why}"
        )

    def leave(self) -> None:
        """End the current data epoch; the next step epoch goes on there, if it can."""
        ended, self._data_epoch = self._data_epoch, None
        if ended is None:
            return
        ended.close()
        if self._fresh_start:
            return
        try:
            self.chain.source.check_state(self.chain)
        except StateError:
            return
        self._fresh_start = True

    def rest(self) -> None:
        """Stop the counts of the current data epoch, which goes on in the next step epoch.

        If nothing follows in it, it ends with this one, and ``epoch`` counts it. To know that, the
        next output is decided, but not where that depends on time, or reads a stream further.
        """
        run, ending = self._live_run(), self._data_epoch
        if run is None or ending is None:
            return
        looks = self.chain.source.is_indexed and not self.chain.follows_clock
        if run.is_last if looks else run.is_over:
            next(ending, None)
            self._data_epoch = None
        else:
            run.rest()

    def _begin_data_epoch(self) -> PipelineIterator[Any]:
        skip_epochs = self._step_epoch_stats(is_whole=True)
        iterator = super()._begin_data_epoch()
        share, run = self.chain.selection.share, self._run
        if share is not None and not share.uneven and run is not None and run.length is not None:
            self._agree_on_epoch(iterator, long=True)  # all ranks come here at the same output
        before = self._data_epoch_stats()
        if before is not None:
            # Its outputs may be from before a resume, but its time is this step epoch's.
            before = replace(before, elapsed_s=0.0, consumer_wait_s=0.0)
        self._ended_stats, self._earlier_stats = skip_epochs, before
        return iterator

    # -- statistics

    def stats(self) -> Stats:
        """Return the statistics of the current step epoch, or else of the last one."""
        of_data_epoch, of_step_epoch = super().stats(), self._step_epoch_stats()
        if of_step_epoch is None:
            return replace(of_data_epoch, epoch=self.next_step_epoch)
        return replace(of_step_epoch, epoch=self._number, totals=of_data_epoch.totals)

    def _data_epoch_stats(self) -> Stats | None:
        if self._run is None or self._run.is_inherited:
            return None
        return super().stats()

    def _step_epoch_stats(self, *, is_whole: bool = False) -> Stats | None:
        """Return the sum over its data epochs; ``is_whole``: the current data epoch is over."""
        of_data_epoch, before = self._data_epoch_stats(), self._earlier_stats
        if of_data_epoch is None:
            return self._ended_stats
        if before is not None:
            left_out = of_data_epoch.dropped_uses if is_whole else 0
            of_data_epoch = replace(of_data_epoch - before, dropped_uses=left_out)
        return of_data_epoch if self._ended_stats is None else self._ended_stats + of_data_epoch

    def _iterate(self, run: Run) -> PipelineIterator[Any]:
        """Refer to this weakly: a resting data epoch would keep it, and itself, alive."""
        cursor = weakref.ref(self)
        run.flows = True

        def ended(run: Run) -> None:
            owner = cursor()
            if owner is None:
                run.close()
            else:
                owner._end(run)

        return PipelineIterator(run, ended)

    # -- going elsewhere

    def set_epoch(self, epoch: Any) -> None:
        """Set the next step epoch. Raises ValueError for one that only its state leads to."""
        epoch = whole_from(0, epoch, "an epoch is")
        self._agree_again()
        live = self._live_step_epoch()
        if live is not None:
            live.supersede(MOVED)
        if epoch == self.next_step_epoch:
            return
        steps = self.chain.steps
        if epoch and (steps is None or not can_jump(self.chain)):
            raise ValueError(
                f"under .repeat() epoch {epoch} begins at the end of epoch {epoch - 1}, and "
                "that position is not known: load a state"
            )
        self.before = Counts()
        self.go_to(0, None)
        self.before = Counts()
        self.handed_out = 0
        self._advance(epoch * (steps or 0))
        self._goes_on = False

    def _advance(self, outputs: int) -> int:
        """Go forward by ``outputs`` outputs; return how many must be made and dropped for it."""
        steps, chain = self.chain.steps, self.chain
        done = self.handed_out % steps if steps and self._goes_on else 0
        if done > outputs:
            raise ValueError(
                f"{outputs} batches of this epoch cannot be skipped: the state that was loaded is "
                f"behind {done}"
            )
        ahead = outputs - done
        if ahead:
            chain.check_skips()
        if not ahead or not can_jump(chain) or not chain.count_of_data_epoch(self.epoch):
            return ahead
        epoch, position, before = self.where()
        if position.leg is not None:
            return ahead
        whole_epochs, rest, passed_by = skip_epochs(chain, epoch, position.yielded + ahead)
        self.go_to(epoch + whole_epochs, seek(chain, epoch + whole_epochs, rest)[0])
        self.before = before + passed_by
        self.handed_out += ahead
        self._goes_on = True
        return 0

    def go_to(self, epoch: int, position: Position | None) -> None:
        live = self._live_step_epoch()
        if live is not None:
            live.supersede(MOVED)
        self.leave()
        super().go_to(epoch, position)

    # -- states

    def where(self) -> tuple[int, Position, Counts]:
        """Return the current position, as ``Cursor`` does.

        If a step epoch ends in the middle of a data epoch that cannot be made again, it is the
        beginning of the next data epoch, with a warning: otherwise a user who saves after every
        step epoch could never resume.
        """
        epoch, position, before = super().where()
        steps, source = self.chain.steps, self.chain.source
        handed_out = self._handed_out()
        if not steps or not handed_out or handed_out % steps or not position.yielded:
            return epoch, position, before
        if source.is_indexed or source.takes_state:
            return epoch, position, before
        warn(
            f"under .repeat() this epoch ended in the middle of a pass over {source.name}, which "
            "has no state there: after a resume the rest of that pass is left out. To avoid that, "
            "use a source with an index, or with a state (torchdata's StatefulDataLoader), or no "
            ".repeat()"
        )
        return epoch + 1, Position(), before + self._counts(position)

    def _forget_pending(self) -> None:
        """Do nothing: a trainer may acknowledge them after the next data epoch has begun."""

    def _handed_out(self) -> int:
        run, steps = self._live_run(), self.chain.steps
        if self._asked_to_skip() and not self._goes_on:  # as ``begin`` counts
            return self.next_step_epoch * (steps or 0)
        late = 0 if run is None else self._late(run)
        finished = self.handed_out - late - len(self._pending)
        has_ended = bool(steps) and calling_loop().has_ended_epoch()
        return -(-finished // steps) * steps if steps and has_ended else finished

    def _asked_to_skip(self) -> int:
        return 0 if self._live_step_epoch() is not None or self._pending else self._skip

    def _is_epoch_left(self) -> bool:
        """Return False: the next epoch goes on after the last output."""
        return False

    def load(self, saved: Any, *, elastic: bool = True) -> state.Loaded:
        loaded = super().load(saved, elastic=elastic)
        self.handed_out = loaded.handed_out or 0
        self._goes_on = True
        return loaded


class StepEpochEnd(NamedTuple):
    """The end of a step epoch: a number of outputs of all step epochs; None: without an end."""

    epochs: StepEpochs
    at: int | None

    @property
    def is_last(self) -> bool:
        """Whether nothing follows the output handed out last."""
        return self.at is not None and self.epochs.handed_out >= self.at

    @property
    def remainder(self) -> int:
        """Return 0: ``.repeat()`` has no padding."""
        return 0

    @property
    def ends_unequally(self) -> bool:
        """Return False: all ranks take equally many steps of it."""
        return False


class StepEpochIterator(PipelineIterator[T]):
    """The batches of one step epoch."""

    def __init__(self, epochs: StepEpochs, end: int | None) -> None:
        self._epochs = epochs
        self._end = StepEpochEnd(epochs, end)
        self._listener = epoch_listener(self._end)
        self._finish = finalize(self, _left, epochs, self._listener)

    @property
    def has_handed_out_all(self) -> bool:
        return self._end.is_last

    @property
    def is_closed(self) -> bool:
        """Whether it has ended."""
        return not self._finish.alive

    def __next__(self) -> T:
        if self.is_closed:
            self._end_closed()
        if self.has_handed_out_all:
            self._epochs.rest()
            self._finish.detach()
            if self._listener is not None:
                self._listener.end()
            raise StopIteration
        try:
            output = self._epochs.next()
        except StokerError as error:
            del self  # the traceback would keep it
            raise raised_here(error) from error.__cause__
        if self._listener is not None:
            self._listener.begin()
        return cast(T, output)

    def __len__(self) -> int:
        if self._end.at is None:
            raise TypeError(".repeat() has no end; .steps(n) ends an epoch after n batches")
        return self._end.at - self._epochs.handed_out


def _left(epochs: StepEpochs, listener: EpochListener | None) -> None:
    try:
        epochs.leave()
    finally:
        if listener is not None:
            listener.end()
