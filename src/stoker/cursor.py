"""Where a pipeline is, and the iterator over one of its epochs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from stoker.caution import warn
from stoker.echoing.record import EchoRecord
from stoker.engine.crew import is_worker
from stoker.engine.position import Position, Resolved
from stoker.engine.run import Run
from stoker.errors import StokerError
from stoker.stages.echo import Echo
from stoker.stats import Clock, PoolStats, Stats


class PipelineIterator(Iterator[Any]):
    """One epoch's batches. ``close()`` ends it early; it also works in ``with``.

    Dropping the last reference closes it too. An error or Ctrl-C within ``next()`` closes it;
    only what a foreign loader raises leaves it as it is, for the loader may go on.
    """

    def __init__(self, run: Run, cursor: Cursor) -> None:
        self._run = run
        self._finish = weakref.finalize(self, cursor.ended, run)

    def __iter__(self) -> PipelineIterator:
        return self

    def __next__(self) -> Any:
        run = self._run
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

    def live(self) -> PipelineIterator | None:
        iterator = self._iterator() if self._iterator is not None else None
        return None if iterator is None or self._run is None or self._run.closed else iterator

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
        if not self._fresh_start:  # the epoch before was left early
            self.before += self.of_epoch()
        self.epoch, self.position, self._fresh_start = epoch, None, False
        self._run = run
        self._iterator = weakref.ref(iterator)

    def ended(self, run: Run) -> None:
        """Close a run and keep where it was."""
        if run.closed:
            return
        try:
            self._note(run)
            if self._run is run:
                if run.complete:
                    self.before += Clock(run.fresh, run.uses, run.yielded)
                    self.epoch, self.position, self._fresh_start = self.epoch + 1, None, True
                else:
                    self.position = run.position()
        finally:  # should Ctrl-C come in between
            if is_worker():  # the collector found an abandoned iterator in there
                threading.Thread(target=run.close, name="stoker-closing", daemon=True).start()
            else:
                run.close()

    def go_to(self, epoch: int, position: Position | None) -> None:
        live = self.live()
        if live is not None:
            live.close()
        if not self._fresh_start:
            self.before += self.of_epoch()
        self.epoch, self.position, self._fresh_start = epoch, position, True

    def of_epoch(self) -> Clock:
        """Return what was handed out in the epoch at hand."""
        run = self._run
        if run is not None and not run.closed:
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
        if self._run is not None and not self._run.closed:
            self._note(self._run)
        return self._records

    def forget_record(self) -> None:
        """Begin a record anew."""
        self._records = {}

    def _note(self, run: Run) -> None:
        for position, (echo, made) in run.decisions().items():
            epochs = dict(self._records.get(position, echo).epochs)
            epochs[made.epoch] = made.after(epochs.get(made.epoch))
            self._records[position] = replace(echo, epochs=epochs)

    def where(self) -> Position:
        """Return the position of the last output that was yielded."""
        if self._run is not None and not self._run.closed:
            return self._run.position()
        return self.position or Position()

    def stats(self, stages: Sequence[Any]) -> Stats:
        if self._run is None:
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
