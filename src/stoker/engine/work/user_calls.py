"""Calls of the user's objects: by copies or originals, with a lock or without.

Each worker thread has a work of its own, which calls copies of the user's objects
(``workers/thread_copies``). If a copy fails on an input, the original is tried, under
``USER_LOCK``. Objects that cannot be copied are called under that lock from the beginning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from stoker.basics import pytree
from stoker.engine.work.failure import REJECTED, Failure
from stoker.replicas.user_lock import USER_LOCK

AnyWork = TypeVar("AnyWork")


class Call(NamedTuple):
    """The way in which a work calls the user's objects of a stage, or of the source.

    Attributes:
        is_locked: whether only one such call at a time may run in the process.
        copies: the numbers of the copied objects among all user objects of the pipeline.
    """

    is_locked: bool = False
    copies: tuple[int, ...] = ()


FREELY = Call()
NO_LOCK = contextlib.nullcontext()


def lock_of(call: Call) -> contextlib.AbstractContextManager[Any]:
    """Return the lock for a call: ``USER_LOCK``, or none."""
    return USER_LOCK if call.is_locked else NO_LOCK


class Copies(Protocol[AnyWork]):
    """A thread's copies of the user's objects."""

    def fresh(self, failed: Retry[AnyWork], original: AnyWork) -> AnyWork | None:
        """Return a work with newer copies; None if the failed ones were made in this epoch."""
        ...

    def distrust(self, copies: tuple[int, ...], error: BaseException) -> None:
        """Record copies that raised an error that their originals do not raise."""
        ...


class Retry(Generic[AnyWork]):
    """Repeats a call that a thread's copies failed on, with newer copies or with the originals.

    Args:
        original: the consumer's work, which calls the originals; None in that work itself.
        copies: the copies' owner.

    Attributes:
        failure: why the copies are no longer called: one failed and may be half changed, and new
            copies have replaced them. None while they are.
    """

    def __init__(
        self, original: AnyWork | None = None, copies: Copies[AnyWork] | None = None
    ) -> None:
        self.failure: Failure | None = None
        self._original = original
        self._copies = copies
        self._proven: set[Call] = set()

    def call(self, failure: Failure, call: Call, do: Callable[[AnyWork], Any]) -> Any:
        """Return the original's result, called alone, for an input that a copy failed on.

        Copies of an earlier epoch, which may hold objects of that epoch's thread, are made anew
        first. If the original fails as well, its failure is returned.

        Args:
            failure: the copy's failure.
            call: the way in which the copy was called.
            do: makes the result with another work.
        """
        original, copies = self._original, self._copies
        assert original is not None
        assert copies is not None
        fresh = copies.fresh(self, original)
        if fresh is not None:
            self.failure = failure
            return do(fresh)
        with USER_LOCK:
            value = do(original)
        if type(value) is not Failure or value is REJECTED:
            self.failure = failure
            copies.distrust(call.copies, failure.error)
        return value

    def keep_inputs(self, values: list[Any], call: Call) -> list[Any] | None:
        """Return copies of the first inputs of a new copy of a function; None for later inputs.

        A function may change its input before it fails.
        """
        if not call.copies or call in self._proven:
            return None
        self._proven.add(call)
        try:
            return [
                value if type(value) is Failure else pytree.deep_copy(value) for value in values
            ]
        except Exception:  # of types of the user's own
            return None
