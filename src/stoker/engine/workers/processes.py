"""Worker processes: each has its own copy of the dataset and does one request at a time.

Two threads of the worker pool talk to one process, each through an arena of its own, so that the
next request is already there: a thread that comes late, because all cores are busy, would leave the
process idle. ``transport.channel`` carries the values.

- A message ends an idle process; a busy one is killed. A parent-death signal, a pidfd of the parent
  and the closed pipe end it with its parent, however the parent dies.
- An error loses attributes that do not pickle, and carries its traceback as a note.
- A map after ``.batch``, or a ``collate``, makes a process take whole batches.
- Global generators are seeded anew for each use that a user's function or dataset sees, and for
  each batch. So a dataset with ``__getitems__`` is asked for one example at a time there.
- A forked process opens files anew that are open for reading: it would share their place.
- No process is forked once JAX has started threads: one that uses JAX would hang.
- A source that reads ahead is read in the training process, which sends the bytes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, cast

from stoker.basics import resources
from stoker.basics.process import end_with, has_jax_started
from stoker.basics.resources import ThreadTimer
from stoker.basics.signals import defer_interrupts, pass_on
from stoker.engine.plan.address import WorkAddress
from stoker.engine.work.failure import Failure
from stoker.engine.work.generators import UndeclaredRng
from stoker.engine.work.spot import CELLS, HERE, Spot
from stoker.engine.work.work import Work
from stoker.engine.workers.requests import WorkExecutor, unloadable
from stoker.engine.workers.samples import SAMPLED_NS, TIMED
from stoker.engine.workers.tasks import GivenUp, Request
from stoker.engine.workers.watch import read_dump
from stoker.errors import StageError, WorkerDied
from stoker.replicas.files import reading_places, reopen_descriptors
from stoker.stages.functions.stray_draws import WORKER_NAME
from stoker.transport import channel
from stoker.transport.channel import Arena

NO_DESCRIPTORS = 71
"""The exit code of a process that lacked file descriptors: EX_OSERR of sysexits.h."""


class Epoch(NamedTuple):
    """Tells a process that another epoch begins, and what of it there is to do, by depth."""

    addresses: list[WorkAddress]


class Rest(NamedTuple):
    """Asks a process to have written all that it keeps back, and to answer: an epoch is over."""


def serve(
    connection: Connection,
    not_ours: list[Connection],
    slots: list[tuple[str | None, str | None]],
    works: list[Work],
    parent: int,
    places: Mapping[int, int],
    by_main_thread: bool,
    signs: Signs | None,
) -> None:
    """Answer requests for batches and chunks until the parent ends the process, or is gone.

    Args:
        connection: the pipe of requests and answers.
        not_ours: connections that a fork inherited from the parent.
        slots: for each thread, the arenas for the arrays of requests and of answers.
        works: the works, by depth.
        parent: the training process.
        places: the parent's files open for reading, inherited by a fork.
        by_main_thread: whether the parent's main thread started this process.
        signs: where it writes what it is at; None if nobody watches it.
    """
    for other in not_ours:  # inherited: an end that stays open here would hide the parent's death
        other.close()
    reopen_descriptors(places)
    end_with(parent, by_main_thread)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if "torch" in sys.modules:
        # Workers share the cores, so torch's threads in each of them would wait for one another.
        sys.modules["torch"].set_num_threads(1)
    if signs is not None:
        signs.open()
    try:
        _serve(connection, slots, works)
    except OSError as error:
        if not resources.lacks_descriptors(error):
            raise
        sys.exit(NO_DESCRIPTORS)


def _serve(
    connection: Connection, slots: list[tuple[str | None, str | None]], works: list[Work]
) -> None:
    inboxes, outboxes = (
        [Arena.open(handle) if handle else None for handle in handles]
        for handles in zip(*slots, strict=True)
    )
    runner = WorkExecutor()
    known = {work.address.at: work for work in works}
    untimed_ns = SAMPLED_NS  # the first request that is not the very first is a sample
    while True:
        try:
            slot, request = channel.receive(connection, inboxes)
        except (EOFError, ConnectionError):
            return
        except channel.Unloadable as error:
            channel.send(connection, (unloadable(error), [], []), error.slot, None)
            continue
        if request is None:
            return
        if isinstance(request, Epoch):
            works = [known[address.at].at(address) for address in request.addresses]
            continue
        if isinstance(request, Rest):
            for work in works:
                if work.segment.cache is not None:
                    work.segment.cache.flush()
            channel.send(connection, None, slot, None)
            continue
        work = works[request.depth]
        ns = work.segment.counters()
        began_ns = time.perf_counter_ns()
        timer = ThreadTimer() if untimed_ns > SAMPLED_NS else None
        answer = runner.do(work, request, ns, outboxes[slot], slot)
        if HERE.spot is not None:
            HERE.spot.leave()
        untimed_ns += time.perf_counter_ns() - began_ns
        if timer is not None:
            ns[TIMED], untimed_ns = (len(request.places), *timer.read_ns()), 0
        misdrawn = work.misdrawn
        try:
            channel.send(connection, (answer, ns, misdrawn), slot, outboxes[slot])
        except (BrokenPipeError, ConnectionResetError):
            return
        except Exception as error:
            if isinstance(error, OSError) and resources.lacks_descriptors(error):
                raise
            sendable = runner.sendable(work, request, answer, error)
            channel.send(connection, (sendable, ns, misdrawn), slot, outboxes[slot])
        misdrawn.clear()


class Signs:
    """What a worker process shows of itself: where it is, and on a signal its stack."""

    def __init__(self, context: Any) -> None:
        self._cells = context.RawArray("q", CELLS)
        self.spot = Spot(self._cells)
        self._file = self._handle = None
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("stoker-stack", os.MFD_CLOEXEC)
            self._handle = f"/proc/{os.getpid()}/fd/{self._file}"

    def __getstate__(self) -> dict[str, Any]:
        return {"_cells": self._cells, "_handle": self._handle}

    def open(self) -> None:
        """Begin to show this process; it calls this itself."""
        HERE.spot = Spot(self._cells)
        if self._handle is not None:
            file = os.open(self._handle, os.O_RDWR | os.O_CLOEXEC | os.O_APPEND)
            # In the thread that takes the signal: the main thread, where all requests are done.
            faulthandler.register(_STACK_SIGNAL, file, all_threads=False)

    def stack(self, pid: int) -> list[traceback.FrameSummary]:
        """Return the stack of the process' main thread; none if it cannot be read."""
        if self._file is None:
            return []
        os.ftruncate(self._file, 0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _STACK_SIGNAL)
        size, deadline = 0, time.monotonic() + _STACK_S
        while time.monotonic() < deadline:
            before, size = size, os.fstat(self._file).st_size
            if size and size == before:
                break
            time.sleep(_STACK_S / 50)
        return read_dump(os.pread(self._file, size, 0).decode(errors="replace"))

    def close(self) -> None:
        """Close the file of stacks."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


# A signal that no program is likely to use.
_STACK_SIGNAL = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else 0
# As long as a warning may wait for the stack of a process that the system lets not run.
_STACK_S = 1.0
# A process whose pipe broke is about to end; its exit code is worth waiting this long for.
_GRACE_S = 1.0
# A cache in the process writes its last items, for at most 5 s (cache/example_cache.py).
_END_S = 8.0
# Requests that a process may have at a time: bench/gil.py, 0.985 of torch with two, 0.83 to 0.90
# with one.
_SLOTS = 2

_children: set[Any] = set()


def _disown() -> None:
    """Keep ``multiprocessing`` in a forked child from ending the parent's processes at exit."""
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
    """A worker process that several threads share; it answers them in turn."""

    def __init__(self, launch: Launch, signs: Signs | None, crew: list[WorkerProcess]) -> None:
        self._launch = launch
        self.signs = signs
        self._crew = crew
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
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    def is_busy(self) -> bool:
        """Whether a request is under way."""
        return bool(self._turns)

    def ask(self, slot: int, request: Any, requests: Arena | None, answers: Arena | None) -> Any:
        """Send a request and wait for its answer.

        Raises GivenUp if the process was ended because it was stuck; another has taken its place.
        """
        me = object()
        with self._lock:
            connection = self._connection
            self._turns.append(me)  # busy from here on: nobody else may send meanwhile
            try:
                with defer_interrupts():  # half a request would be read with the next one
                    channel.send(connection, request, slot, requests)
            except BaseException as error:
                self._turns.remove(me)
                self._changed.notify_all()
                self._replace(connection, error)
                raise
            while self._turns[0] is not me:
                self._changed.wait()
        try:
            self._is_in_step = False
            answer = channel.receive(connection, [answers] * _SLOTS)[1]
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
        """End the process, which is stuck. Whoever waits for it starts another."""
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
                    self.signs.spot.leave()  # the one that was ended shows where it was
                _children.discard(self._process)
                others = [each._connection for each in self._crew if each is not self]
                try:
                    check_forks()
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
            channel.receive(self._connection, [None] * _SLOTS)
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
        _children.discard(self._process)
        self._process.close()
        self._connection.close()
        if self.signs is not None:
            self.signs.close()
        self._crew.remove(self)  # the crew and the works refer to what holds this
        del self._launch

    def how_it_ended(self) -> str:
        """Describe the end of a process that gives no answer."""
        with self._lock:  # the other thread asks, too
            self._process.join(_GRACE_S)
            code = cast(int | None, self._process.exitcode)
        how = f"ended with exit code {code}"
        if code and code < 0:
            how = f"was killed by signal {signal.Signals(-code).name}"
        hint = "; is memory short?" if code == -signal.SIGKILL else ""
        if code == NO_DESCRIPTORS:
            hint = f": {resources.no_descriptors()}"
        elif code == 1 and not self._has_answered and _start_method() != "fork":
            hint = (
                ": what it printed says why. Where processes are started by "
                f"{_start_method()!r}, each imports the program: keep what starts a pipeline "
                'under if __name__ == "__main__", and datasets and functions in a module'
            )
        return f"worker process {self._process.pid} {how}{hint}"


class ProcessSlot:
    """One thread's connection to a worker process."""

    def __init__(
        self, process: WorkerProcess, number: int, requests: Arena | None, answers: Arena | None
    ) -> None:
        self.number = number
        self._process = process
        self._requests = requests
        self._answers = answers

    @contextlib.contextmanager
    def run(self, request: Request) -> Iterator[tuple[Any, list[int], list[UndeclaredRng]]]:
        """Run a request; the answer's arrays are valid only within the ``with``.

        Raises WorkerDied when the process ends without an answer, GivenUp if it was ended.
        """
        try:
            answer = self._process.ask(self.number, request, self._requests, self._answers)
        except (EOFError, OSError) as error:
            if isinstance(error, OSError) and resources.lacks_descriptors(error):
                raise OSError(error.errno, resources.no_descriptors()) from error
            raise WorkerDied(self._process.how_it_ended()) from error
        except (GivenUp, WorkerDied):
            raise
        except Exception as error:  # of a value that does not survive pickling, on either way
            pass_on(error)
            cause = error.__cause__ if isinstance(error, channel.Unloadable) else error
            assert isinstance(cause, Exception)
            answer = Failure(StageError("worker process", cause)), [], []
        yield answer

    @property
    def spot(self) -> Spot | None:
        """Where the process is; None if nobody watches it."""
        return None if self._process.signs is None else self._process.signs.spot

    @property
    def name(self) -> str:
        """The process in messages."""
        return self._process.name

    def stack(self) -> list[traceback.FrameSummary]:
        """Return the stack of the process' main thread; none if it cannot be read."""
        return self._process.stack()

    def give_up(self) -> None:
        """End the process, which is stuck; whoever waits for it starts another."""
        self._process.give_up()

    def begin(self, addresses: list[WorkAddress]) -> bool:
        """Have the process begin another epoch; ``addresses`` are those of its works, by depth.

        False if it has ended.
        """
        return self.number > 0 or self._process.begin(Epoch(addresses))

    def rest(self) -> bool:
        """Ask the process to come to rest. False if it is busy, or has ended."""
        return self.number > 0 or self._process.rest()

    def is_at_rest(self) -> bool:
        """Wait until the process has come to rest. False if it does not, or has ended."""
        return self.number > 0 or self._process.is_at_rest()

    def stop(self) -> None:
        """End the process, by ``WorkerProcess.dismiss``."""
        if self.number == 0 or self._process.is_busy:
            self._process.dismiss()

    def close(self) -> None:
        """End the process, and free its memory; it must not be used any more."""
        self._process.close()
        for arena in (self._requests, self._answers):
            if arena is not None:
                arena.close()
        self._requests = self._answers = None


def check_forks() -> None:
    """Raise RuntimeError if a fork would lose JAX's threads."""
    if has_jax_started() and multiprocessing.get_start_method() == "fork":
        raise RuntimeError(
            "JAX runs threads in this process, and a worker process that is forked from it hangs "
            "as soon as it uses JAX: take threads, .workers(n), or call "
            "multiprocessing.set_start_method('forkserver') where the program begins"
        )


def start(count: int, works: list[Work], *, watched: bool = False) -> list[ProcessSlot]:
    """Start worker processes by the start method of ``multiprocessing``.

    With ``watched``, they show where they are, and may be replaced.

    Returns two slots for each process: first one of every process, then the second ones.

    Raises TypeError if the start method pickles and an object, which the message names, does not;
    OSError if the system starts no more; RuntimeError if a fork would lose JAX's threads.
    """
    check_forks()
    slots: list[ProcessSlot] = []
    crew: list[WorkerProcess] = []
    with contextlib.ExitStack() as undo:
        for number in range(count):
            try:
                started = _start_one(works, crew, watched)
            except OSError as error:
                why = resources.no_descriptors() if resources.lacks_descriptors(error) else error
                raise OSError(
                    error.errno, f"worker process {number + 1} of {count} cannot be started: {why}"
                ) from error
            for end in (*(slot.close for slot in started), *(slot.stop for slot in started)):
                undo.callback(end)  # the newest process is ended first
            slots += started
        undo.pop_all()
    return sorted(slots, key=lambda slot: slot.number)


def end(slots: list[ProcessSlot]) -> None:
    """End processes, and free their memory."""
    ending, slots[:] = list(slots), []
    for slot in ending:
        slot.stop()
    for slot in ending:
        slot.close()


Launch = Callable[[list[Connection]], tuple[Any, Connection]]
"""Starts a process that closes these connections, if it inherits them; returns it and our end."""


def _start_one(works: list[Work], crew: list[WorkerProcess], watched: bool) -> list[ProcessSlot]:
    """Start a process, which joins the ``crew`` of those that were started together."""
    context: Any = multiprocessing.get_context()
    with contextlib.ExitStack() as undo:
        arenas = [(Arena.create(), Arena.create()) for _ in range(_SLOTS)]
        signs = Signs(context) if watched else None
        for opened in (signs, *itertools.chain(*arenas)):
            if opened is not None:
                undo.callback(opened.close)
        handles = [tuple(arena and arena.handle for arena in pair) for pair in arenas]

        def launch(inherited: list[Connection]) -> tuple[Any, Connection]:
            return _launch(context, works, handles, signs, inherited)

        shared = WorkerProcess(launch, signs, crew)
        undo.pop_all()
    return [ProcessSlot(shared, number, *pair) for number, pair in enumerate(arenas)]


def _launch(
    context: Any,
    works: list[Work],
    handles: list[Any],
    signs: Signs | None,
    inherited: list[Connection],
) -> tuple[Any, Connection]:
    """Start a process; return it, and our end of its connection."""
    with contextlib.ExitStack() as undo:
        ours, theirs = context.Pipe()
        for opened in (ours, theirs):
            undo.callback(opened.close)
        process = context.Process(
            target=serve,
            args=(
                theirs,
                [*inherited, ours] if context.get_start_method() == "fork" else [],
                handles,
                works,
                os.getpid(),
                reading_places() if context.get_start_method() == "fork" else {},
                threading.current_thread() is threading.main_thread(),
                signs,
            ),
            name=WORKER_NAME,
            daemon=True,
        )
        with defer_interrupts():  # hooks of a fork swallow what is raised in them
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
    return process, ours
