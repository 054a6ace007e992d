"""The parent's side of a worker process: threads ask, and it answers them in turn."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, cast

from stoker.basics import resources
from stoker.basics.signals import defer_interrupts, pass_on
from stoker.engine.work.step import SENDING, Failure
from stoker.engine.work.worker_status import WorkerStatus
from stoker.engine.workers.processes.serving import NO_DESCRIPTORS, Epoch, Rest
from stoker.engine.workers.processes.signs import Signs
from stoker.engine.workers.requests import SLOTS, Comparison, GilQuestion, GivenUp, Request
from stoker.errors import StageError, WorkerDied
from stoker.transport import channel
from stoker.transport.channel import Arena

# A process whose pipe broke is about to end; its exit code is worth waiting this long for.
_GRACE_S = 1.0
# A cache in the process writes its last items, for at most 5 s (cache/example_cache.py).
_END_S = 8.0

Launch = Callable[[list[Connection]], tuple[Any, Connection]]
"""Starts a process that closes these connections, if it inherits them; returns it and our end."""


class WorkerProcess:
    """A worker process that several threads share; it answers them in turn."""

    def __init__(self, launch: Launch, signs: Signs | None, crew: list[WorkerProcess]) -> None:
        self._launch = launch
        self.signs = signs
        self.crew = crew
        self._process: Any
        self._connection: Connection
        self._process, self._connection = launch([each._connection for each in crew])
        crew.append(self)
        self._epoch: Epoch | None = None
        self._is_given_up = False
        self._closed = False
        self._has_answered = False
        self._is_in_step = True  # whether each answer was read to its end
        self._turns: deque[object] = deque()
        self._sending = threading.Lock()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    def is_busy(self) -> bool:
        """Whether a request is under way."""
        return bool(self._turns)

    def ask(self, slot: int, request: Any, requests: Arena, answers: Arena) -> Any:
        """Send a request and wait for its answer.

        Raises GivenUp if the process was ended because it was stuck; another has taken its place.
        """
        me = object()
        with self._sending:
            with self._lock:
                connection = self._connection
                self._turns.append(me)  # busy from here on: nobody else may send meanwhile
            try:
                # Without the lock, which who reads the answer before needs: until that is read,
                # the process reads no request that is larger than a pipe.
                with defer_interrupts():  # half a request would be read with the next one
                    channel.send(connection, request, slot, requests)
            except BaseException as error:
                with self._lock:
                    self._turns.remove(me)
                    self._changed.notify_all()
                self._replace(connection, error)
                raise
        with self._lock:
            while self._turns[0] is not me:
                self._changed.wait()
        try:
            self._is_in_step = False
            answer = channel.receive(connection, [answers] * SLOTS)[1]
            self._has_answered = self._is_in_step = True
            return answer
        except channel.Unloadable:
            self._is_in_step = True
            raise
        except (EOFError, OSError) as error:
            self._replace(connection, error)
            raise
        finally:
            with self._lock:
                self._turns.popleft()
                self._changed.notify_all()

    def give_up(self) -> None:
        """End the process, which is stuck. A thread that waits for it starts another."""
        self._is_given_up = True
        self._process.kill()

    def _replace(self, connection: Connection, error: BaseException) -> None:
        """Start another process if the one behind a connection was given up, and say so.

        Raises GivenUp if it was, WorkerDied if no other can be started.
        """
        with self._lock:
            if connection is self._connection:
                if not self._is_given_up:
                    return
                self._process.join()
                if self.signs is not None:
                    self.signs.status.leave()  # the one that was ended shows where it was
                others = [each._connection for each in self.crew if each is not self]
                try:
                    self._process, self._connection = self._launch(others)
                except (OSError, RuntimeError) as why:
                    raise WorkerDied(
                        f"a worker process that was stuck was ended, and no other can be "
                        f"started: {why}"
                    ) from why
                self._is_given_up = False
                if self._epoch is not None:
                    self._tell(self._epoch)
        raise GivenUp from error

    def stack(self) -> list[traceback.FrameSummary]:
        """Return the stack of its main thread; none if it cannot be read."""
        return [] if self.signs is None else self.signs.stack(self._process.pid)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"worker process {self._process.pid}"

    def begin(self, epoch: Epoch) -> bool:
        """Have it begin another epoch. False if it has ended."""
        self._epoch = epoch
        return bool(self._process.is_alive()) and self._tell(epoch)

    def rest(self) -> bool:
        """Ask it to come to rest. False if it is busy, or has ended."""
        return self._is_in_step and not self.is_busy and self._tell(Rest())

    def is_at_rest(self) -> bool:
        """Wait until it has come to rest, as asked. False if it does not, or has ended."""
        try:
            if not self._connection.poll(_END_S):
                return False
            channel.receive(self._connection, [None] * SLOTS)
        except (EOFError, OSError):
            return False
        return True

    def _tell(self, message: Any) -> bool:
        try:
            channel.send(self._connection, message, 0, None)
        except OSError:
            return False
        return True

    def dismiss(self) -> None:
        """End the process: by a message if it is idle, by force if it is busy."""
        if not self.is_busy:
            with self._lock:
                if not self.is_busy:
                    with contextlib.suppress(OSError):  # it may have died by itself
                        channel.send(self._connection, None, 0, None)
                    return
        self._process.kill()

    def close(self) -> None:
        """Wait for the end of the process; after a time limit, kill it."""
        if self._closed:
            return
        self._closed = True
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
        self._connection.close()
        if self.signs is not None:
            self.signs.close()
        self.crew.remove(self)  # the crew and the works refer to the owner of this
        del self._launch

    def how_it_ended(self) -> str:
        """Describe the end of a process that gives no answer."""
        with self._lock:  # the other thread asks, too
            self._process.join(_GRACE_S)
            code = cast(int | None, self._process.exitcode)
        how = f"ended with exit code {code}"
        if code and code < 0:
            how = f"was killed by signal {signal.Signals(-code).name}"
        hint = ""
        if code == -signal.SIGKILL:
            hint = "; is memory short? Fewer workers, or a smaller ahead=, take less: .workers(2)"
        elif code == NO_DESCRIPTORS:
            hint = f": {resources.no_descriptors()}"
        elif code == 1 and not self._has_answered and multiprocessing.get_start_method() != "fork":
            hint = (
                ": what it printed says why. Where processes are started by "
                f"{multiprocessing.get_start_method()!r}, each imports the program: keep what "
                'starts a pipeline under if __name__ == "__main__", and datasets and functions in '
                "a module"
            )
        return f"worker process {self._process.pid} {how}{hint}"


class ProcessSlot:
    """One thread's connection to a worker process.

    Attributes:
        number: of the slot; a process has ``SLOTS`` of them.
        process: the process.
    """

    def __init__(
        self, process: WorkerProcess, number: int, requests: Arena, answers: Arena
    ) -> None:
        self.number = number
        self.process = process
        self._requests = requests
        self._answers = answers

    @contextlib.contextmanager
    def run(self, request: Request | Comparison | GilQuestion) -> Iterator[Any]:
        """Run a request; the answer's arrays are valid only within the ``with``.

        Raises WorkerDied when the process ends without an answer, GivenUp if it was ended.
        """
        try:
            answer = self.process.ask(self.number, request, self._requests, self._answers)
        except (EOFError, OSError) as error:
            if isinstance(error, OSError) and resources.lacks_descriptors(error):
                raise OSError(error.errno, resources.no_descriptors()) from error
            raise WorkerDied(self.process.how_it_ended()) from error
        except (GivenUp, WorkerDied):
            raise
        except Exception as error:  # of a value that does not survive pickling, on either way
            pass_on(error)
            cause = error.__cause__ if isinstance(error, channel.Unloadable) else error
            assert isinstance(cause, Exception)
            answer = Failure(StageError(SENDING, cause)), []
        yield answer

    @property
    def status(self) -> WorkerStatus | None:
        """Where the process is; None if nobody watches it."""
        return None if self.process.signs is None else self.process.signs.status

    def stop(self) -> None:
        """End the process, by ``WorkerProcess.dismiss``."""
        if self.number == 0 or self.process.is_busy:
            self.process.dismiss()

    def close(self) -> None:
        """End the process, and free its memory; it must not be used any more."""
        self.process.close()
        for arena in (self._requests, self._answers):
            arena.close()
