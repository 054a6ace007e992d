"""A result that one thread gives and others wait for; with it, threads start and coroutines end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

if TYPE_CHECKING:
    import asyncio  # at run time 13 ms of every start, for those alone that read over a network

T = TypeVar("T")

# How often a thread that does not begin is looked after. Chosen, not measured: it delays only what
# takes the place of a dead one.
_LOOK_S = 0.1
# So many threads of which none begins do not die by accident.
_TRIES = 3


class OneShot(Generic[T]):
    """A value or an error that one thread gives once. A wait may be interrupted at any moment.

    It replaces ``concurrent.futures.Future``, whose ``threading.Condition`` is entered by a Python
    function. If Ctrl-C comes right after that, the lock stays held, and the thread that completes
    the future (here the event loop that reads all remote files) waits for ever.
    """

    def __init__(self) -> None:
        self._given = threading.Lock()
        self._given.acquire()
        self._outcome: tuple[T | None, BaseException | None] | None = None

    def give(self, value: T | None = None, error: BaseException | None = None) -> None:
        self._outcome = value, error
        self._given.release()

    def wait(self, timeout_s: float = -1) -> T:
        """Wait for the value and return it; raise the given error, or TimeoutError."""
        if self._outcome is None and self._given.acquire(timeout=timeout_s):
            self._given.release()  # other threads may wait, too
        if self._outcome is None:
            raise TimeoutError
        value, error = self._outcome
        if error is None:
            return cast("T", value)
        try:
            raise error
        finally:
            del error, self  # as `forget` says

    def forget(self) -> None:
        """Drop what was given: nobody waits any more.

        An error that was raised has in its traceback the frames of all who passed it on. One of
        them that still refers to it keeps them all, and what is in them, until the collector runs.
        """
        self._outcome = None


def start_thread(name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
    """Start a daemon thread, and return when its function has begun.

    Under a debugger or coverage, CPython 3.11 ends one of two threads that begin together before
    their functions ("Cannot install a trace function while another trace function is being
    installed"). Then another takes its place: nobody would look after a thread that never ran.

    Raises RuntimeError if no thread begins.
    """
    for _ in range(_TRIES):
        begun: OneShot[None] = OneShot()

        def run(begun: OneShot[None] = begun) -> None:
            begun.give()
            target(*args)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        is_alive = True
        while is_alive:
            is_alive = thread.is_alive()
            with contextlib.suppress(TimeoutError):
                begun.wait(_LOOK_S if is_alive else 0)
                return thread
    raise RuntimeError(f"a thread ends before it calls a function: {name}")


def run_on(loop: asyncio.AbstractEventLoop, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on another thread's event loop and wait for it; Ctrl-C cancels it.

    ``make`` is called in that thread, too: here Ctrl-C could come between the call and the await.
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
    finally:
        ended.forget()
