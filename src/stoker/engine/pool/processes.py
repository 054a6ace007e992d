"""Worker processes: each has its own copy of the dataset and does what it is sent.

Two threads of the worker pool talk to one process, each through an arena of its own, so that the
process finds its next request waiting: a thread that comes late, because all cores are busy, would
leave it idle. What runs in the process is in ``worker``; how values cross is in ``ipc.channel``.

- A message ends an idle process; a busy one is killed. A parent-death signal, a pidfd of the parent
  and the closed pipe end it with its parent, however that dies.
- An error loses what does not pickle, and carries its traceback as a note.
- A map after ``.batch``, or a ``collate``, makes a process take whole batches.
- Global generators are seeded anew for each use that a user's function or dataset sees, and for
  each batch. So a dataset with ``__getitems__`` is asked for one example at a time there.
- A forked process opens files anew that are open for reading: it would share their place.
- No process is forked once JAX has started threads: one that uses JAX would hang.
- A source that reads ahead is read in the training process; what was read is sent.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

from stoker import machine
from stoker.engine.pool import worker
from stoker.engine.pool.threads import Request
from stoker.engine.work import Failure, Misdrawn, Work
from stoker.errors import StageError, WorkerDied
from stoker.fork_safety import has_jax_started
from stoker.ipc import channel
from stoker.ipc.channel import Arena
from stoker.replicas.reopening import reading_places
from stoker.signals import deferred, pass_on
from stoker.stages.global_draws import WORKER_NAME

_GRACE_S = 1.0
_END_S = 8.0  # a cache in there writes what waits, for at most 5
_SLOTS = 2  # requests that a process may have at a time

_children: set[Any] = set()


def _disown() -> None:
    """In a forked child: have ``multiprocessing`` not end at exit what is the parent's."""
    known: set[Any] = getattr(multiprocessing.process, "_children", set())
    known -= _children
    _children.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown)


def _start_method() -> str:
    return multiprocessing.get_start_method()


def _name_what_cannot_be_sent(works: list[Work], error: Exception) -> None:
    """Raise TypeError with the name of the source or stage that does not pickle."""
    for name, part in itertools.chain.from_iterable(work.segment.parts() for work in works):
        try:
            ForkingPickler.dumps(part)
        except Exception as own:
            if (type(own), str(own)) == (type(error), str(error)):
                raise TypeError(
                    f"{name} cannot be sent to worker processes, which are started by "
                    f"{_start_method()!r}: {error}. Define functions and classes at the top of a "
                    "module; make locks and open files where they are first used, or leave them "
                    "out in __getstate__; or take threads, .workers(n)"
                ) from error


class WorkerProcess:
    """A worker process that several threads share: its answers come in turn."""

    def __init__(self, process: Any, connection: Connection) -> None:
        self._process = process
        self._connection = connection
        self._closed = False
        self._has_answered = False
        self._turns: deque[object] = deque()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    def is_busy(self) -> bool:
        """Whether a request is under way."""
        return bool(self._turns)

    def ask(self, slot: int, request: Any, requests: Arena | None, answers: Arena | None) -> Any:
        """Send a request and wait for its answer."""
        me = object()
        with self._lock:
            self._turns.append(me)  # busy from here on: nobody else may send meanwhile
            try:
                with deferred():  # half a request would be read with the next one
                    channel.send(self._connection, request, slot, requests)
            except BaseException:
                self._turns.remove(me)
                self._changed.notify_all()
                raise
            while self._turns[0] is not me:
                self._changed.wait()
        try:
            answer = channel.receive(self._connection, [answers] * _SLOTS)[1]
            self._has_answered = True
            return answer
        finally:
            with self._lock:
                self._turns.popleft()
                self._changed.notify_all()

    def dismiss(self) -> None:
        """Have it end: by asking if it is idle, by force if it is busy."""
        if not self.is_busy:
            with self._lock:
                if not self.is_busy:
                    with contextlib.suppress(OSError):  # it may have died by itself
                        channel.send(self._connection, None, 0, None)
                    return
        self._process.kill()

    def close(self) -> None:
        """Wait for its end, which is forced in the end."""
        if self._closed:
            return
        self._closed = True
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        _children.discard(self._process)
        self._process.close()
        self._connection.close()

    def how_it_ended(self) -> str:
        """Say how a process that gives no answer has ended."""
        with self._lock:  # the other thread asks, too
            self._process.join(_GRACE_S)
            code = cast(int | None, self._process.exitcode)
        how = f"ended with exit code {code}"
        if code and code < 0:
            how = f"was killed by signal {signal.Signals(-code).name}"
        hint = "; is memory short?" if code == -signal.SIGKILL else ""
        if code == worker.NO_DESCRIPTORS:
            hint = f": {machine.no_descriptors()}"
        elif code == 1 and not self._has_answered and _start_method() != "fork":
            hint = (
                ": what it printed says why. Where processes are started by "
                f"{_start_method()!r}, each imports the program: keep what starts a pipeline "
                'under if __name__ == "__main__", and datasets and functions in a module'
            )
        return f"worker process {self._process.pid} {how}{hint}"


class ProcessSlot:
    """A worker process, as one of the threads that use it sees it."""

    def __init__(
        self, process: WorkerProcess, number: int, requests: Arena | None, answers: Arena | None
    ) -> None:
        self.number = number
        self._process = process
        self._requests = requests
        self._answers = answers

    @contextlib.contextmanager
    def run(self, request: Request) -> Iterator[tuple[Any, list[int], list[Misdrawn]]]:
        """Have a request done; the answer's arrays are valid within the ``with`` alone.

        Raises WorkerDied when the process ends without an answer.
        """
        try:
            answer = self._process.ask(self.number, request, self._requests, self._answers)
        except (EOFError, OSError) as error:
            if isinstance(error, OSError) and machine.lacks_descriptors(error):
                raise OSError(error.errno, machine.no_descriptors()) from error
            raise WorkerDied(self._process.how_it_ended()) from error
        except Exception as error:  # of a value that does not survive pickling, on either way
            pass_on(error)
            cause = error.__cause__ if isinstance(error, channel.Unloadable) else error
            assert isinstance(cause, Exception)
            answer = Failure(StageError("worker process", cause)), [], []
        yield answer

    def stop(self) -> None:
        """Have the process end, as ``WorkerProcess.dismiss`` does."""
        if self.number == 0 or self._process.is_busy:
            self._process.dismiss()

    def close(self) -> None:
        """End the process, and free what belonged to it; nobody may use it any more."""
        self._process.close()
        for arena in (self._requests, self._answers):
            if arena is not None:
                arena.close()
        self._requests = self._answers = None


def start(count: int, works: list[Work]) -> list[ProcessSlot]:
    """Start worker processes by the start method that ``multiprocessing`` is set to.

    Returns what threads use them by, two for each, first one of every process.

    Raises TypeError where the start method pickles and something cannot be, which it names; OSError
    where the system starts no more; RuntimeError where a fork would take JAX's threads away from a
    child.
    """
    if has_jax_started() and multiprocessing.get_start_method() == "fork":
        raise RuntimeError(
            "JAX runs threads in this process, and a worker process that is forked from it hangs "
            "as soon as it uses JAX: take threads, .workers(n), or call "
            "multiprocessing.set_start_method('forkserver') where the program begins"
        )
    slots: list[ProcessSlot] = []
    inherited: list[Connection] = []
    with contextlib.ExitStack() as undo:
        for number in range(count):
            try:
                started = _start_one(works, inherited)
            except OSError as error:
                why = machine.no_descriptors() if machine.lacks_descriptors(error) else error
                raise OSError(
                    error.errno, f"worker process {number + 1} of {count} cannot be started: {why}"
                ) from error
            for end in (*(slot.close for slot in started), *(slot.stop for slot in started)):
                undo.callback(end)  # the last comes first
            slots += started
        undo.pop_all()
    return sorted(slots, key=lambda slot: slot.number)


def _start_one(works: list[Work], inherited: list[Connection]) -> list[ProcessSlot]:
    """Start a process. Our end of its connection joins what processes forked later inherit."""
    context: Any = multiprocessing.get_context()
    with contextlib.ExitStack() as undo:
        ours, theirs = context.Pipe()
        arenas = [(Arena.create(), Arena.create()) for _ in range(_SLOTS)]
        for opened in (ours, theirs, *itertools.chain(*arenas)):
            if opened is not None:
                undo.callback(opened.close)
        process = context.Process(
            target=worker.serve,
            args=(
                theirs,
                [*inherited, ours] if context.get_start_method() == "fork" else [],
                [tuple(arena and arena.handle for arena in pair) for pair in arenas],
                works,
                os.getpid(),
                reading_places() if context.get_start_method() == "fork" else {},
                threading.current_thread() is threading.main_thread(),
            ),
            name=WORKER_NAME,
            daemon=True,
        )
        with deferred():  # hooks of a fork swallow what is raised in them
            try:
                process.start()
            except OSError:
                raise
            except Exception as error:
                _name_what_cannot_be_sent(works, error)
                raise
            _children.add(process)
        undo.pop_all()
    theirs.close()
    inherited.append(ours)
    shared = WorkerProcess(process, ours)
    return [ProcessSlot(shared, number, *pair) for number, pair in enumerate(arenas)]
