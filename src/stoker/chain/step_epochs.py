"""Epochs of a set number of outputs, beneath which passes over the data flow on: ``.repeat()``.

Each pass is a run of its own, with its own order. A pass in whose middle an epoch ends goes on in
the next one: its run rests meanwhile, with what it has prepared. An epoch that is left early ends
its run. The next one goes on behind the last output, or with a new pass where that cannot be made
again.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, NamedTuple, cast

from stoker.basics.validate import is_whole_number
from stoker.basics.warn import warn
from stoker.chain import state
from stoker.chain.chain import Chain
from stoker.chain.cursor import Cursor
from stoker.chain.iterator import PipelineIterator, T, warn_of_second_iterator
from stoker.chain.seek import can_jump, nearest
from stoker.engine.checkpoint import Position
from stoker.engine.run import Run
from stoker.errors import StateError, StokerError
from stoker.frameworks.framework import EpochListener
from stoker.frameworks.queries import calling_loop, epoch_listener
from stoker.stats import Clock, Stats


class StepEpochs(Cursor):
    """A cursor whose epochs are rounds of ``chain.steps`` outputs; None: one without an end.

    Its epoch, position and clock are those of the data. ``handed_out`` counts outputs in rounds:
    one that was left early counts as whole once the next begins.
    """

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain)
        self.handed_out = 0
        self._goes_on = False  # whether the next round is the rest of one
        self._why = ""  # the last pass had no batch
        self._number = 0  # of the round at hand, or the last one
        self._passed: Stats | None = None  # of the passes that it has behind it
        self._before_pass: Stats | None = None  # of the pass at hand, what is not the round's
        self._pass: PipelineIterator[Any] | None = None  # over the data; it rests between rounds
        self._round: weakref.ref[StepEpochIterator[Any]] | None = None

    # -- rounds

    def begin(self) -> PipelineIterator[Any]:
        """Start the next round, or go on in one that was loaded; closes a live iterator."""
        live, loop = self._round() if self._round is not None else None, calling_loop()
        if live is not None and not live.is_closed:
            if not live.is_last and not loop.reads_ahead:  # as in Cursor
                warn_of_second_iterator()
            live.close()
        if self._run is not None and self._run.is_inherited:
            self._pass = None
        self._heed(loop)
        skip, self._skip = self._skip, 0
        if not self._goes_on:
            self.handed_out = self.next_round * (self.chain.steps or 0)
        self._agree((self.next_round, max(self._outputs_in_round(), skip)))
        self._finish_all()
        steps = self.chain.steps
        end = None if steps is None else (self.handed_out // steps + 1) * steps
        missed = self._advanced(skip if steps is None else min(skip, steps)) if skip else 0
        self._goes_on = False
        self._number = 0 if end is None or steps is None else end // steps - 1
        self._passed, self._before_pass = None, self._of_pass()
        if (run := self._live_run()) is not None:
            run.wake()
        iterator: StepEpochIterator[Any] = StepEpochIterator(self, end)
        self._round = weakref.ref(iterator)
        for _ in range(missed):
            next(iterator, None)
        return iterator

    @property
    def is_loaded(self) -> bool:
        return self._goes_on

    @property
    def next_round(self) -> int:
        """The number of the round that ``begin`` begins, or goes on with."""
        steps = self.chain.steps
        if steps is None:
            return 0
        return self.handed_out // steps if self._goes_on else -(-self.handed_out // steps)

    def _outputs_in_round(self) -> int:
        """Return behind which output of its round the next ``iter()`` goes on."""
        steps = self.chain.steps
        return self.handed_out % steps if steps is not None else self.handed_out

    def next(self) -> Any:
        """Return the next output, of the pass at hand or of the one behind it.

        Raises StokerError where the data has nothing.
        """
        for _ in range(3):  # the first may have been at its end, and the second is left early
            if self._pass is None:
                self._pass = self._begin_pass()
            try:
                output = next(self._pass)
            except StopIteration:
                run = self._run
                why = "" if run is None else run.why_empty()
                self._why = f": {why}" if why else ""
                self._pass = None
                continue
            except BaseException:
                if self._live_run() is None:
                    self.leave()
                raise
            self.handed_out += 1
            return output
        raise StokerError(
            f"a whole pass over the data has no batch, so .repeat() would not end{self._why}"
        )

    def leave(self) -> None:
        """End the pass at hand; the next round goes on behind it, if that can be made again."""
        ended, self._pass = self._pass, None
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
        """Stop the clock of the pass at hand: it goes on in the next round."""
        run = self._live_run()
        if run is not None:
            run.rest()

    def _begin_pass(self) -> PipelineIterator[Any]:
        passed = self._of_round(is_whole=True)
        iterator = super()._begin_pass()
        before = self._of_pass()
        if before is not None:  # it has places from before a resume, but its time is this round's
            before = replace(before, elapsed_s=0.0, consumer_wait_s=0.0)
        self._passed, self._before_pass = passed, before
        return iterator

    # -- statistics

    def stats(self) -> Stats:
        """Return statistics of the round at hand, or else of the last one."""
        of_pass, of_round = super().stats(), self._of_round()
        if of_round is None:
            return replace(of_pass, epoch=self.next_round)
        return replace(of_round, epoch=self._number, totals=of_pass.totals)

    def _of_pass(self) -> Stats | None:
        if self._run is None or self._run.is_inherited:
            return None
        return super().stats()

    def _of_round(self, *, is_whole: bool = False) -> Stats | None:
        """Return what passes brought to the round; ``is_whole`` where the one at hand is over."""
        of_pass, before = self._of_pass(), self._before_pass
        if of_pass is None:
            return self._passed
        if before is not None:
            left_out = of_pass.dropped_uses if is_whole else 0
            of_pass = replace(of_pass - before, dropped_uses=left_out)
        return of_pass if self._passed is None else self._passed + of_pass

    def _iterate(self, run: Run) -> PipelineIterator[Any]:
        """Hold this only weakly: else a pass that rests would keep it alive, and itself."""
        cursor = weakref.ref(self)
        run.flows = True

        def ended(run: Run) -> None:
            owner = cursor()
            if owner is None:
                run.close()
            else:
                owner._ended(run)

        return PipelineIterator(run, ended)

    # -- going elsewhere

    def set_epoch(self, epoch: Any) -> None:
        """Make a round the next one.

        Raises ValueError for what is no number, and for one that only its state leads to.
        """
        if not is_whole_number(epoch) or epoch < 0:
            raise ValueError(f"an epoch is a whole number from 0, not {epoch!r}")
        self._agree_again()
        live = self._round() if self._round is not None else None
        if live is not None and not live.is_closed:
            live.close()
        if epoch == self.next_round:
            return
        steps = self.chain.steps
        if epoch and (steps is None or not can_jump(self.chain)):
            raise ValueError(
                f"under .repeat() epoch {epoch} begins at the end of epoch {int(epoch) - 1}, and "
                "that position is not known: load a state"
            )
        self.before = Clock()
        self.go_to(0, None)
        self.before = Clock()
        self.handed_out = 0
        self._advanced(int(epoch) * (steps or 0))
        self._goes_on = False

    def _advanced(self, outputs: int) -> int:
        """Go on by so many outputs of a round, of which those behind a resume were handed out.

        Returns how many of them have to be made to know what follows.
        """
        steps, chain = self.chain.steps, self.chain
        done = self.handed_out % steps if steps and self._goes_on else 0
        if done > outputs:
            raise ValueError(
                f"{outputs} batches of this epoch cannot be skipped: the state that was loaded is "
                f"behind {done}"
            )
        ahead = outputs - done
        if ahead and chain.follows_clock:
            raise ValueError(
                '.echo("auto") cannot skip batches, because its remaining items depend on timing: '
                "load the state that state_dict() returned after them"
            )
        if not ahead or not can_jump(chain) or not chain.count_of_pass():
            return ahead
        epoch, position, before = self.where()
        passes, rest = divmod(position.yielded + ahead, chain.count_of_pass())
        whole, _ = nearest(chain, chain.count_of_pass())
        assert whole is not None
        self.go_to(epoch + passes, nearest(chain, rest)[0])
        self.before = before + Clock(
            passes * whole.fresh, passes * whole.uses, passes * whole.yielded
        )
        self.handed_out += ahead
        self._goes_on = True
        return 0

    def go_to(self, epoch: int, position: Position | None) -> None:
        live = self._round() if self._round is not None else None
        if live is not None and not live.is_closed:
            live.close()
        self.leave()
        super().go_to(epoch, position)

    # -- states

    def where(self) -> tuple[int, Position, Clock]:
        """Return where the last output stands, as ``Cursor`` does.

        At a round's end in the middle of a pass that cannot be made again it is the beginning of
        the next pass, with a warning: those who save behind every epoch would not come further.
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
        done = Clock(position.fresh, position.uses, position.yielded)
        return epoch + 1, Position(), before + done

    def _forget_unfinished(self) -> None:
        """Keep them: a trainer may finish with them when the next pass has begun."""

    def _finish_all(self) -> None:
        """A round begins: what was not acknowledged of those before counts as finished."""
        self._unfinished.clear()
        run = self._live_run()
        if run is not None and run.late:
            run.acknowledge(run.late)

    def _handed_out(self) -> int:
        run, steps = self._live_run(), self.chain.steps
        late = 0 if run is None else self._late(run)
        finished = self.handed_out - late - len(self._unfinished)
        return (
            -(-finished // steps) * steps
            if steps and calling_loop().has_ended_epoch()
            else finished
        )

    def _is_left(self) -> bool:
        """Return False: the next epoch goes on behind the last output."""
        return False

    def load(self, saved: dict[str, Any]) -> state.Loaded:
        loaded = super().load(saved)
        self.handed_out = loaded.handed_out or 0
        self._goes_on = True
        return loaded


class StepEpochEnd(NamedTuple):
    """Where a round ends: behind so many outputs of all rounds, or never."""

    rounds: StepEpochs
    at: int | None

    @property
    def is_last(self) -> bool:
        """Whether nothing follows the output handed out last."""
        return self.at is not None and self.rounds.handed_out >= self.at

    @property
    def remainder(self) -> int:
        """Return 0: what is repeated is not padded."""
        return 0

    @property
    def ends_unequally(self) -> bool:
        """Return False: all ranks take equally many steps of it."""
        return False


class StepEpochIterator(PipelineIterator[T]):
    """One round's batches, as ``PipelineIterator`` has those of one pass."""

    def __init__(self, rounds: StepEpochs, end: int | None) -> None:
        self._rounds = rounds
        self._end = StepEpochEnd(rounds, end)
        self._listener = epoch_listener(self._end)
        self._finish = weakref.finalize(self, _left, rounds, self._listener)

    @property
    def is_last(self) -> bool:
        """Whether nothing follows the output handed out last."""
        return self._end.is_last

    @property
    def is_closed(self) -> bool:
        """Whether it has ended."""
        return not self._finish.alive

    def __next__(self) -> T:
        if self.is_closed:
            raise StopIteration
        if self.is_last:
            self._rounds.rest()
            self._finish.detach()
            if self._listener is not None:
                self._listener.end()
            raise StopIteration
        output = self._rounds.next()
        if self._listener is not None:
            self._listener.begin()
        return cast(T, output)

    def __len__(self) -> int:
        if self._end.at is None:
            raise TypeError(".repeat() has no end; .steps(n) ends an epoch after n batches")
        return self._end.at - self._rounds.handed_out


def _left(rounds: StepEpochs, listener: EpochListener | None) -> None:
    try:
        rounds.leave()
    finally:
        if listener is not None:
            listener.end()
