"""Where a pipeline is, and the iterator over one of its epochs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from stoker.engine.crew import is_worker
from stoker.engine.run import Position, Resolved, Run
from stoker.stages.echo import Echo
from stoker.stats import PoolStats, Stats


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
            raise
        except BaseException as error:
            if error is not run.loader_error():
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
        self.epoch, self.position, self._fresh_start = epoch, None, False
        self._run = run
        self._iterator = weakref.ref(iterator)

    def ended(self, run: Run) -> None:
        """Close a run and keep where it was."""
        if run.closed:
            return
        try:
            if self._run is run:
                if run.complete:
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
        self.epoch, self.position, self._fresh_start = epoch, position, True

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
