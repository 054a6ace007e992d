"""The iterator over one epoch of a pipeline."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from stoker.basics.signals import finalize
from stoker.basics.warn import warn
from stoker.engine.run import Run
from stoker.errors import StageError, StokerError, raised_here
from stoker.frameworks.queries import EpochListener

if TYPE_CHECKING:
    from typing_extensions import TypeVar as DefaultedTypeVar

    T = DefaultedTypeVar("T", default=Any)  # a bare Pipeline yields anything
else:
    T = TypeVar("T")


SECOND_ITERATOR = (
    "a second iterator over its pipeline has begun, and one at a time can run. Give each loop a "
    "pipeline of its own: other = copy.copy(pipeline), before the loops"
)
"""Why an iterator is superseded by ``iter()``."""
MOVED = (
    "set_epoch() or load_state_dict() has moved its pipeline. Leave the loop behind that call "
    "(break); iter(pipeline) goes on at the new place"
)
"""Why an iterator is superseded by what moves its pipeline."""


class PipelineIterator(Iterator[T]):
    """One epoch's batches. ``close()`` ends it early; it also works in ``with``.

    Dropping the last reference closes it too. After an error of a stage the next ``next()`` goes on
    behind the batch that could not be made, and after one of a foreign loader the loader may go on.
    Other errors within ``next()``, and Ctrl-C, close it. A closed iterator has no more batches; but
    where something else closed it before its end, ``next()`` raises RuntimeError, so that a loop
    over it does not look finished.

    It belongs to the process that made it. In a forked child, ``next()`` raises RuntimeError, and
    closing it ends nothing of the parent's.
    """

    superseded_by = ""
    """Why something else than its own loop closed it before its end; else empty."""

    def __init__(
        self, run: Run, ended: Callable[[Run], None], listener: EpochListener | None = None
    ) -> None:
        self._run = run
        self._listener = listener
        # Unlike __del__, it also runs as the interpreter ends, while workers can still be told to.
        self._finish: weakref.finalize[..., Any] = finalize(self, _finish, run, ended, listener)

    def __iter__(self) -> PipelineIterator[T]:
        return self

    def __next__(self) -> T:
        run = self._run
        if not run.owner.is_current:  # ``is_inherited``, without a call for each output
            raise RuntimeError(
                "this iterator belongs to the process that made it, whose workers a forked child "
                "does not have: call iter(pipeline) in the child, or iterate before the fork only"
            )
        if run.closed:
            self._end_closed()
        try:
            output: T = run.next()
            if self._listener is not None:
                self._listener.begin()
            return output
        except StopIteration:
            run.complete = True
            self.close()
            why = run.why_empty()
            if why and not run.flows:
                warn(f"the epoch had no batch: {why}")
            elif run.short:
                if run.together:
                    raise StokerError(
                        f"this rank's epoch ended after {run.yielded} of the {run.steps} batches "
                        "that .steps() says, and the others go on: give .steps() fewer"
                    ) from None
                warn(
                    f"the epoch ended after {run.yielded} of the {run.steps} batches that .steps() "
                    "says: there are no more fresh examples"
                )
            raise
        except BaseException as error:
            if not run.goes_on(error):
                self.close()
                if isinstance(error, StageError):
                    error.add_note("The epoch ends here: what follows depends on what failed.")
            elif isinstance(error, StageError) and isinstance(error, OSError):  # a bad file, mostly
                error.add_note('The next batch may follow. max_errors="1%" skips such examples.')
            del self, run  # the traceback would keep them, and with them their workers
            if isinstance(error, StokerError):
                raise raised_here(error) from error.__cause__
            raise

    def __len__(self) -> int:
        """Return the number of outputs that are left. Raises TypeError if it is unknown."""
        run = self._run
        total = run.length if run.total is None else run.total  # a loader's length, if it is sure
        if total is None:
            raise TypeError("the number of batches is not known before the epoch ends")
        return total - run.yielded

    @property
    def has_handed_out_all(self) -> bool:
        """Whether nothing follows the output handed out last, as far as that is known."""
        return self._run.has_handed_out_all

    def _end_closed(self) -> NoReturn:
        """Raise StopIteration, or RuntimeError if it was superseded."""
        if self.superseded_by:
            raise RuntimeError(f"this iterator was closed before its end: {self.superseded_by}")
        raise StopIteration

    def supersede(self, why: str) -> None:
        """Close it for something else than its own loop, which is told if outputs were left."""
        if not self.has_handed_out_all:
            self.superseded_by = why
        self.close()

    def close(self) -> None:
        """End this iteration: its threads and processes are gone when this returns."""
        self._finish()

    def __enter__(self) -> PipelineIterator[T]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def leave_out(iterator: PipelineIterator[Any], outputs: int) -> None:
    """Take so many outputs, and drop them. An error closes the iterator."""
    with contextlib.ExitStack() as undo:
        undo.callback(iterator.close)
        for _ in itertools.islice(iterator, outputs):
            pass
        undo.pop_all()


class DeferredIterator(PipelineIterator[T]):
    """An epoch that begins at the first ``next()``: a framework may load a state in between.

    ``count`` returns the number of its outputs, while it has not begun.
    """

    def __init__(self, begin: Callable[[], PipelineIterator[T]], count: Callable[[], int]) -> None:
        self._begin: Callable[[], PipelineIterator[T]] | None = begin
        self._count = count
        self._within: PipelineIterator[T] | None = None

    def __next__(self) -> T:
        if self._begin is not None:
            begin, self._begin = self._begin, None
            try:
                self._within = begin()
            except StokerError as error:
                raise raised_here(error) from error.__cause__
        if self._within is None:
            raise StopIteration
        return next(self._within)

    def __len__(self) -> int:
        return self._count() if self._within is None else len(self._within)

    def close(self) -> None:
        """End it, if it has begun; it then has no batches."""
        self._begin = None
        if self._within is not None:
            self._within.close()


def _finish(run: Run, ended: Callable[[Run], None], listener: EpochListener | None) -> None:
    try:
        ended(run)
    finally:
        if listener is not None:
            listener.end()
