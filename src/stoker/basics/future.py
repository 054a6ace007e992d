"""A result that one thread waits for and another gives; coroutines that are waited for so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class OneShot(Generic[T]):
    """A value or an error that is given once; an interrupted wait does not block the giver.

    ``concurrent.futures.Future`` has a ``threading.Condition``, which is entered by a function in
    Python. If Ctrl-C comes right after it, the lock stays held, and the thread that completes the
    future (here the event loop that reads all remote files) waits for ever.
    """

    def __init__(self) -> None:
        self._given = threading.Lock()
        self._given.acquire()
        self._outcome: tuple[T | None, BaseException | None] | None = None

    def give(self, value: T | None = None, error: BaseException | None = None) -> None:
        """Complete it with a value, or with an error."""
        self._outcome = value, error
        self._given.release()

    def wait(self, timeout_s: float = -1) -> T:
        """Return the value, at once if it was given before; raise the error, or TimeoutError."""
        if self._outcome is None and self._given.acquire(timeout=timeout_s):
            self._given.release()  # others may wait, too
        if self._outcome is None:
            raise TimeoutError
        value, error = self._outcome
        if error is not None:
            raise error
        return cast("T", value)


def run_on(loop: asyncio.AbstractEventLoop, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on a loop of another thread, and wait; an interruption cancels it.

    That thread makes it, too: here Ctrl-C might come before anything awaits it.
    """
    ended: OneShot[T] = OneShot()
    tasks: list[asyncio.Task[None]] = []

    async def run() -> None:
        try:
            ended.give(await make())
        except BaseException as error:
            ended.give(error=error)

    def start() -> None:
        tasks.append(loop.create_task(run()))

    def cancel() -> None:
        for task in tasks:
            task.cancel()

    try:
        loop.call_soon_threadsafe(start)
        return ended.wait()
    except BaseException:
        loop.call_soon_threadsafe(cancel)
        raise
