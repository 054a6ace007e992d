"""What one thread waits for and another gives."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class OneShot(Generic[T]):
    """A value or an error that is given once; an interrupted wait does no harm to who gives it.

    ``concurrent.futures.Future`` has a ``threading.Condition``, which is entered by a function in
    Python: Ctrl-C may come behind it, the lock stays held, and who completes the future (here the
    event loop that reads all remote files) waits for ever.
    """

    def __init__(self) -> None:
        self._given = threading.Lock()
        self._given.acquire()
        self._outcome: tuple[T | None, BaseException | None] | None = None

    def give(self, value: T) -> None:
        """Let who waits have the value."""
        self._outcome = value, None
        self._given.release()

    def fail(self, error: BaseException) -> None:
        """Let who waits have the error."""
        self._outcome = None, error
        self._given.release()

    def wait(self, timeout_s: float = -1) -> T:
        """Return the value, at once if it was given before; raise the error, or TimeoutError."""
        if self._outcome is None and self._given.acquire(timeout=timeout_s):
            self._given.release()  # somebody else may wait, too
        if self._outcome is None:
            raise TimeoutError
        value, error = self._outcome
        if error is not None:
            raise error
        return cast("T", value)
