"""Where a pipeline is, and the iterator over one of its epochs."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from stoker.caution import warn
from stoker.engine.epoch import FORGOTTEN, Run
from stoker.engine.pool.threads import is_worker
from stoker.engine.position import Position, Resolved
from stoker.errors import StateError, StokerError
from stoker.schedule.record import EchoRecord
from stoker.stages.echo import Echo
from stoker.stats import Clock, PoolStats, Stats

_LIGHTNING = ("lightning.pytorch.", "pytorch_lightning.")
_PARENTS_RUNS: list[Run] = []
"""What a forked child inherited is kept untouched until it ends: to free it could end its owner's
workers (a ``DataLoader``'s iterator does so)."""


class PipelineIterator(Iterator[Any]):
    """One epoch's batches. ``close()`` ends it early; it also works in ``with``.

    Dropping the last reference closes it too. An error or Ctrl-C within ``next()`` closes it;
    only what a foreign loader raises leaves it as it is, for the loader may go on.

    It belongs to the process that made it: a forked child that asks it for a batch gets a
    RuntimeError, and ends nothing of its parent's by closing it.
    """

    def __init__(self, run: Run, cursor: Cursor) -> None:
        self._run = run
        self._finish = weakref.finalize(self, cursor.ended, run)

    def __iter__(self) -> PipelineIterator:
        return self

    def __next__(self) -> Any:
        run = self._run
        if run.is_inherited:
            raise RuntimeError(
                "this iterator belongs to the process that made it, whose workers a forked child "
                "does not have: call iter(pipeline) in the child, or iterate before the fork only"
            )
        if run.closed:
            raise StopIteration
        try:
            return run.next()
        except StopIteration:
            run.complete = True
            self.close()
            if run.short:
                if run.together:
                    raise StokerError(
                        f"this rank's epoch ended after {run.yielded} of the {run.steps} batches "
                        "that .steps() says, and the others go on: give .steps() fewer"
                    ) from None
                warn(
                    f"the epoch ended after {run.yielded} of the {run.steps} batches that .steps() "
                    "says: there are no more fresh examples",
                )
            raise
        except BaseException as error:
            if not run.raised_by_loader(error):
                self.close()
            raise

    def __len__(self) -> int:
        """Return the number of outputs that are left; TypeError where it is not known."""
        if self._run.total is None:
            raise TypeError("the number of batches is not known before the epoch ends")
        return self._run.total - self._run.yielded

    def close(self) -> None:
        """End this iteration: its threads and processes are gone when this returns."""
        self._finish()

    def __enter__(self) -> PipelineIterator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def reads_ahead() -> str | None:
    """Name the framework that is about to read ahead of its trainer, if one is calling.

    Lightning prefetches a batch where there is no ``len()`` (``_PrefetchDataFetcher``).
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(_LIGHTNING) and module.endswith(".loops.fetchers"):
            return "Lightning"
        frame = frame.f_back
    return None


class _Before(NamedTuple):
    """What a cursor was before ``iter()``."""

    epoch: int
    position: Position | None
    fresh_start: bool
    before: Clock
    run: Run | None


class Cursor:
    """Where a pipeline is. Shared with its iterators, which outlive it or not."""

    def __init__(self) -> None:
        self.epoch = 0
        self.position: Position | None = None  # in self.epoch, where to begin or where it ended
        self.resolved: dict[int, Resolved] = {}
        self.warned_of_cache = False
        self.before = Clock()  # what was handed out before the epoch at hand
        self._records: dict[int, EchoRecord] = {}
        self._fresh_start = True  # whether the next iter() begins here rather than behind
        self._run: Run | None = None
        self._iterator: weakref.ref[PipelineIterator] | None = None
        self._found: _Before | None = None
        self._unfinished: deque[Position | None] = deque()  # of the last run, where it is over
        self._unfinished_in = 0, Clock()  # its epoch, and what was handed out before that
        self._acknowledged = False  # whether the trainer says what it has finished with

    def live(self) -> PipelineIterator | None:
        """Return the iterator that has not ended, if it is this process's."""
        iterator = self._iterator() if self._iterator is not None else None
        return None if iterator is None or self._live_run() is None else iterator

    def _live_run(self) -> Run | None:
        """Return the run that goes on; None for a parent's as well: its locks may be held."""
        run = self._run
        return None if run is None or run.closed or run.is_inherited else run

    def has_handed_out_all(self) -> bool:
        """Whether the live iterator has nothing more to hand out, as far as is known."""
        run = self._live_run()
        return run is not None and run.has_handed_out_all

    def upcoming(self) -> tuple[int, Position]:
        """Return the epoch that ``iter()`` starts, and where in it."""
        if self._fresh_start:
            return self.epoch, self.position or Position()
        return self.epoch + 1, Position()

    @property
    def loaded(self) -> bool:
        """Whether the next ``iter()`` goes on in the middle of an epoch."""
        return self._fresh_start and self.position is not None

    def started(self, epoch: int, run: Run, iterator: PipelineIterator) -> None:
        self._found = _Before(self.epoch, self.position, self._fresh_start, self.before, self._run)
        if not self._fresh_start:  # the epoch before was left early
            self.before += self.of_epoch()
        self.epoch, self.position, self._fresh_start = epoch, None, False
        self._unfinished.clear()
        self._run = run
        if self._acknowledged:
            run.acknowledge(0)
        self._iterator = weakref.ref(iterator)

    def acknowledge(self, outputs: int) -> None:
        """Take note that the trainer has finished with so many more outputs of the last run.

        From then on trainers of all runs are expected to say so.
        """
        self._acknowledged = True
        run = self._live_run()
        if run is not None:
            run.acknowledge(outputs)
        elif outputs > len(self._unfinished):
            raise ValueError("no batch was handed out that was not acknowledged")
        else:
            for _ in range(outputs):
                self._unfinished.popleft()

    def ended(self, run: Run) -> None:
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
                self.position, self._fresh_start = None, True
            elif run.yielded > run.began_at:
                self._leave_unfinished(run)
                self.position = run.last_position()
            else:
                self._go_back()
        finally:  # should Ctrl-C come in between
            if is_worker():  # the collector found an abandoned iterator in there
                threading.Thread(target=run.close, name="stoker-closing", daemon=True).start()
            else:
                run.close()

    def _leave_unfinished(self, run: Run) -> None:
        """Keep where a run's outputs stand that were not acknowledged: they still may be."""
        self._unfinished = run.unfinished()
        self._unfinished_in = self.epoch, self.before

    def _behind(self, run: Run) -> tuple[int, Clock]:
        """Return the epoch that follows a whole run, and the clock then."""
        return self.epoch + 1, self.before + Clock(run.fresh, run.uses, run.yielded)

    def _go_back(self) -> None:
        """Be where the cursor was before ``iter()``; but what failed at once keeps its figures."""
        found, run = self._found, self._run
        assert found is not None
        assert run is not None
        self.epoch, self.position, self._fresh_start = (
            found.epoch,
            found.position,
            found.fresh_start,
        )
        self.before = found.before
        if not run.was_asked:
            self._run = found.run

    def go_to(self, epoch: int, position: Position | None) -> None:
        live = self.live()
        if live is not None:
            live.close()
        self._unfinished.clear()
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

    def loaded_batches(self) -> int:
        """Return how many batches of a loader were handed out in the epoch at hand."""
        if self._run is not None and not self._run.closed:
            return self._run.loaded
        return (self.position or Position()).loaded

    def record(self) -> dict[int, EchoRecord]:
        """Return what each echo that follows the stall decided, by its position."""
        run = self._live_run()
        if run is not None:
            self._note(run)
        return self._records

    def forget_record(self) -> None:
        """Begin a record anew."""
        self._records = {}

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
            oldest = self._unfinished[0]
            if oldest is None:
                raise StateError(FORGOTTEN)
            epoch, before = self._unfinished_in
            return epoch, oldest, before
        if run is None or run.closed:
            return self.epoch, self.position or Position(), self.before
        if run.is_inherited:
            raise StateError(
                "the epoch is iterated by the process that this one was forked from: save there"
            )
        if run.wrapper and run.finished is None and run.yielded > run.began_at:
            raise StateError(
                f"{run.wrapper} reads a batch ahead where the number of batches is not known, and "
                "would lose it on a resume: give epochs a length with .steps(n), or call "
                "pipeline.acknowledge() behind each training step (in on_train_batch_end)"
            )
        if run.finished in (None, run.yielded) and run.is_over:
            epoch, before = self._behind(run)
            return epoch, Position(), before
        return self.epoch, run.position(), self.before

    def stats(self, stages: Sequence[Any]) -> Stats:
        if self._run is None or self._run.is_inherited:
            return Stats(
                self.epoch, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, (), 0, 0, 0, 0,
                _pools(stages, self.resolved, {}),
            )  # fmt: skip
        return self._run.stats(_pools(stages, self.resolved, self._run.held()))


def _pools(
    stages: Sequence[Any], resolved: dict[int, Resolved], held: dict[int, int]
) -> tuple[PoolStats, ...]:
    pools = []
    for stage in stages:
        if isinstance(stage, Echo):
            known = resolved.get(stage.position, Resolved(stage.pool or 0))
            pools.append(
                PoolStats(
                    stage.name,
                    held.get(stage.position, 0),
                    known.size,
                    known.size * known.item_bytes,
                )
            )
    return tuple(pools)
