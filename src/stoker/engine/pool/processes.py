"""Worker processes: each has its own copy of the dataset and does what it is sent.

Two threads of the worker pool talk to one process. Arrays cross in memory that both map (a memfd,
which the kernel frees with its last owner); everything else crosses in a pipe. Where there is no
memfd, arrays cross in the pipe too.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import multiprocessing
import os
import pickle
import random
import select
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from io import BytesIO
from multiprocessing.connection import Connection
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from stoker import pytree, rng
from stoker.buffers import Recycler
from stoker.engine.work import Failure, Misdrawn, Rejected, Work
from stoker.errors import StageError, WorkerDied
from stoker.signals import deferred
from stoker.stages.batch import Builder, collated

_GRACE_S = 1.0
_END_S = 8.0  # a cache in there writes what waits, for at most 5
_SLOTS = 2  # requests that a process may have at a time
_PAGE = 1 << 16
_PR_SET_PDEATHSIG = 1
_BATCHES = 1 << 62  # sets the seeds of batches apart from those of examples


_children: set[Any] = set()


def _disown() -> None:
    """In a forked child: have ``multiprocessing`` not end at exit what is the parent's."""
    known: set[Any] = getattr(multiprocessing.process, "_children", set())
    known -= _children
    _children.clear()


os.register_at_fork(after_in_child=_disown)


class _Line:
    """The connection to one process, which several threads share: answers come in turn."""

    def __init__(self, process: Any, connection: Connection) -> None:
        self.process = process
        self.connection = connection
        self.closed = False
        self._turns: deque[object] = deque()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    def busy(self) -> bool:
        """Whether a request is under way."""
        return bool(self._turns)

    def ask(self, slot: int, request: Any, there: _Shared | None, back: _Shared | None) -> Any:
        """Send a request and wait for its answer."""
        me = object()
        with self._lock:
            self._turns.append(me)  # busy from here on: nobody else may send meanwhile
            try:
                with deferred():  # what was sent by half would be read with the next as one
                    _send(self.connection, request, slot, there)
            except BaseException:
                self._turns.remove(me)
                self._changed.notify_all()
                raise
            while self._turns[0] is not me:
                self._changed.wait()
        try:
            return _receive(self.connection, [back] * _SLOTS)[1]
        finally:
            with self._lock:
                self._turns.popleft()
                self._changed.notify_all()

    def dismiss(self) -> None:
        """Have the process end: by asking if it is idle, by force if it is busy."""
        if not self.busy:
            with self._lock:
                if not self.busy:
                    with contextlib.suppress(OSError):  # it may have died by itself
                        _send(self.connection, None, 0, None)
                    return
        self.process.kill()

    def exit_code(self) -> int | None:
        """Return how a process that is gone has ended."""
        with self._lock:  # the other thread learns of it, too
            self.process.join(_GRACE_S)
            return cast(int | None, self.process.exitcode)


class Remote:
    """A worker process, seen from one of the threads that use it.

    A process has two of them, so that it finds its next request waiting: a thread that comes late,
    because all cores are busy, would leave it idle.
    """

    def __init__(self, line: _Line, slot: int, there: _Shared | None, back: _Shared | None) -> None:
        self._line = line
        self.slot = slot
        self._there = there
        self._back = back

    @contextlib.contextmanager
    def run(self, *request: Any) -> Iterator[tuple[Any, list[int], list[Misdrawn]]]:
        """Have a request done; the answer's arrays are valid within the ``with`` alone.

        Raises WorkerDied when the process ends without an answer.
        """
        try:
            answer = self._line.ask(self.slot, request, self._there, self._back)
        except (EOFError, OSError) as error:
            raise self._died() from error
        yield answer

    def stop(self) -> None:
        """Have the process end: by asking if it is idle, by force if it is busy."""
        if self.slot == 0 or self._line.busy:
            self._line.dismiss()

    def close(self) -> None:
        """End the process, and free what belonged to it; nobody may use it any more."""
        line = self._line
        if not line.closed:
            line.closed = True
            line.process.join(_END_S)
            if line.process.is_alive():
                line.process.kill()
                line.process.join()
            _children.discard(line.process)
            line.process.close()
            line.connection.close()
        for shared in (self._there, self._back):
            if shared is not None:
                shared.close()
        self._there = self._back = None

    def _died(self) -> WorkerDied:
        process = self._line.process
        code = self._line.exit_code()
        how = (
            f"was killed by signal {signal.Signals(-code).name}"
            if code and code < 0
            else (f"ended with exit code {code}")
        )
        hint = "; is memory short?" if code == -signal.SIGKILL else ""
        return WorkerDied(f"worker process {process.pid} {how}{hint}")


def start(count: int, works: list[Work], seed: int, epoch: int, rank: int) -> list[Remote]:
    """Start worker processes by the start method that ``multiprocessing`` is set to.

    Returns what threads use them by, two for each, first one of every process.

    Raises what pickling raises where the start method pickles and something cannot be.
    """
    context: Any = multiprocessing.get_context()
    main = threading.current_thread() is threading.main_thread()
    remotes: list[Remote] = []
    ours_before: list[Connection] = []
    with contextlib.ExitStack() as undo:
        for _ in range(count):
            ours, theirs = context.Pipe()
            shared = [(_Shared.create(), _Shared.create()) for _ in range(_SLOTS)]
            for opened in (ours, theirs, *itertools.chain(*shared)):
                undo.callback(opened.close if opened is not None else int)
            forked = context.get_start_method() == "fork"
            process = context.Process(
                target=_serve,
                args=(
                    theirs,
                    [*ours_before, ours] if forked else [],
                    [(there and there.handle, back and back.handle) for there, back in shared],
                    works,
                    rng.key(seed, epoch, rng.LEGACY, rank),
                    os.getpid(),
                    main,
                ),
                name="stoker-worker",
                daemon=True,
            )
            with deferred():  # hooks of a fork swallow what is raised in them
                process.start()
                _children.add(process)
            undo.pop_all()
            theirs.close()
            ours_before.append(ours)
            line = _Line(process, ours)
            remotes += [Remote(line, slot, *each) for slot, each in enumerate(shared)]
            for remote in remotes:
                undo.callback(remote.close)
                undo.callback(remote.stop)
        undo.pop_all()
    return sorted(remotes, key=lambda remote: remote.slot)


class _Shared:
    """Memory that two processes map; it grows, and is freed with its last owner."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._size = 0

    @classmethod
    def create(cls) -> _Shared | None:
        if not hasattr(os, "memfd_create"):
            return None
        return cls(os.memfd_create("stoker", os.MFD_CLOEXEC))

    @property
    def handle(self) -> str:
        """What another process of the same user opens it by."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @classmethod
    def open(cls, handle: str) -> _Shared:
        return cls(os.open(handle, os.O_RDWR | os.O_CLOEXEC))

    def view(self, size: int, *, grow: bool) -> memoryview:
        """Return its first ``size`` bytes."""
        if size > self._size:
            if grow:
                os.ftruncate(self._descriptor, -(-size * 5 // 4 // _PAGE) * _PAGE)
            self._size = os.fstat(self._descriptor).st_size
            self._map = mmap.mmap(self._descriptor, self._size)
        return memoryview(self._map)[:size] if self._map is not None else memoryview(bytearray())

    def close(self) -> None:
        """Close the descriptor; the memory goes when nothing maps it any more."""
        os.close(self._descriptor)
        self._map = None


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if pytree.is_tensor(obj) and obj.device.type == "cpu" and obj.layout is not None:
            try:
                return _as_tensor, (obj.detach().numpy(),)
            except TypeError:  # a dtype that NumPy does not have
                return NotImplemented
        return NotImplemented


def _as_tensor(array: NDArray[Any]) -> Any:
    import torch

    return torch.from_numpy(array)


def _send(connection: Connection, value: Any, slot: int, shared: _Shared | None) -> None:
    buffers: list[pickle.PickleBuffer] = []
    stream = BytesIO()
    _Pickler(stream, 5, buffer_callback=buffers.append if shared else None).dump(value)
    raws = [buffer.raw() for buffer in buffers]
    sizes = [raw.nbytes for raw in raws]
    if shared is not None and raws:
        starts = _starts(sizes)
        view = shared.view(starts[-1], grow=True)
        for raw, start in zip(raws, starts, strict=False):
            if raw.nbytes:
                view[start : start + raw.nbytes] = raw
    connection.send_bytes(pickle.dumps((slot, sizes)))
    connection.send_bytes(stream.getbuffer())


def _receive(connection: Connection, slots: Sequence[_Shared | None]) -> tuple[int, Any]:
    """Return what came, and the slot that its arrays came through."""
    slot, sizes = pickle.loads(connection.recv_bytes())
    data = connection.recv_bytes()
    shared = slots[slot]
    if shared is None or not sizes:
        return slot, pickle.loads(data)
    starts = _starts(sizes)
    view = shared.view(starts[-1], grow=False)
    buffers = [view[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    return slot, pickle.loads(data, buffers=buffers)


def _starts(sizes: list[int]) -> list[int]:
    """Return where buffers start, aligned, and where the last one ends."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // 64) * 64)
    return starts


# What follows runs in the worker process.


def _serve(
    connection: Connection,
    not_ours: list[Connection],
    slots: list[tuple[str | None, str | None]],
    works: list[Work],
    legacy_key: NDArray[np.uint64],
    parent: int,
    by_main_thread: bool,
) -> None:
    for other in not_ours:  # inherited: an end that stays open here would hide the parent's death
        other.close()
    _die_with(parent, by_main_thread)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    inboxes, outboxes = (
        [_Shared.open(handle) if handle else None for handle in handles]
        for handles in zip(*slots, strict=True)
    )
    hand = _Hand(works, legacy_key)
    while True:
        try:
            slot, request = _receive(connection, inboxes)
        except (EOFError, OSError):
            return
        if request is None:
            return
        ns = [0] * len(works[request[0]].segment.names)
        answer = hand.do(ns, *request)
        misdrawn = works[request[0]].misdrawn
        try:
            _send(connection, (answer, ns, misdrawn), slot, outboxes[slot])
        except (BrokenPipeError, ConnectionResetError):
            return
        except Exception as error:
            if isinstance(answer, list):  # say which
                sendable: Any = hand.sendable(answer, *request)
            else:
                sendable = Failure(StageError("worker process", _plain(error)))
            _send(connection, (sendable, ns, misdrawn), slot, outboxes[slot])
        misdrawn.clear()


def _die_with(parent: int, by_main_thread: bool) -> None:
    """Have this process end with its parent, however that dies and whatever it is doing.

    The kernel's own signal comes at once, but tells of the thread that forked, and under
    forkserver of the server; a pidfd tells of the process.
    """
    if not sys.platform.startswith("linux"):
        return
    if by_main_thread and os.getppid() == parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # a kernel or a sandbox without it
        return

    def watch() -> None:
        select.select([descriptor], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="stoker-parent-watch", daemon=True).start()


class _Hand:
    """Does requests."""

    def __init__(self, works: list[Work], legacy_key: NDArray[np.uint64]) -> None:
        self._works = works
        self._legacy_key = legacy_key
        self._recycler = Recycler()

    def do(
        self,
        ns: list[int],
        depth: int,
        indices: NDArray[np.int64] | None,
        values: list[Any] | None,
        ordinals: Sequence[int],
        use_keys: list[int] | None,
        number: int,
        whole: bool,
    ) -> Any:
        work = self._works[depth]
        if values is not None:
            values = _separate(values)
        values = self._examples(work, ns, indices, values, ordinals, use_keys)
        batch = work.segment.batch
        for i, value in enumerate(values):
            if isinstance(value, Failure) and not isinstance(value.error, Rejected):
                values[i] = _plained(value)
                if batch is not None:
                    return values[i]
        if batch is None:
            return values
        if not whole or (batch.collate is None and not work.segment.batch_maps):
            try:
                return collated(values, self._recycler)
            except Exception as error:
                return Failure(_plain(work.batch_failure(error, number).error))
        builder = Builder(len(values), batch.collate, self._recycler)
        try:
            builder.put(0, values)
            made = builder.finish()
        except Exception as error:
            return Failure(_plain(work.batch_failure(error, number).error))
        self._reseed(number, _BATCHES)
        made = work.finish(made, number, 0, ns)
        return Failure(_plain(made.error)) if isinstance(made, Failure) else made

    def sendable(self, values: list[Any], depth: int, *request: Any) -> list[Any]:
        """Return the answer to a request with failures for what cannot be sent."""
        work, ordinals = self._works[depth], request[2]
        checked = []
        for value, ordinal in zip(values, ordinals, strict=True):
            try:
                _Pickler(BytesIO(), 5).dump(value)
            except Exception as error:
                value = _plained(work.send_failure(error, ordinal))
            checked.append(value)
        return checked

    def _examples(
        self,
        work: Work,
        ns: list[int],
        indices: NDArray[np.int64] | None,
        values: list[Any] | None,
        ordinals: Sequence[int],
        use_keys: list[int] | None,
    ) -> list[Any]:
        source = work.segment.source
        if indices is None and work.segment.is_plain:
            assert values is not None
            return values
        if source is not None and not source.runs_user_code and work.segment.is_plain:
            assert indices is not None
            return work.fetch(indices, ns)  # no code of the user's: nothing to seed for
        examples = []
        for i, ordinal in enumerate(ordinals):
            self._reseed(ordinal, use_keys[i] if use_keys else 0)
            if indices is not None:
                one = work.fetch(indices[i : i + 1], ns)
            else:
                assert values is not None
                one = values[i : i + 1]
            work.apply(one, ordinals[i : i + 1], use_keys and use_keys[i : i + 1], ns)
            examples.append(one[0])
        return examples

    def _reseed(self, ordinal: int, use_key: int) -> None:
        """Seed the global generators by the example's address, as old datasets draw from them."""
        seed = rng.mixed(int(self._legacy_key[0]) ^ use_key, ordinal)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.default_generator.manual_seed(seed)


def _separate(values: list[Any]) -> list[Any]:
    """Copy what came twice: pickling keeps two uses of one item one object, maps may write."""
    seen: set[int] = set()
    separate = []
    for value in values:
        separate.append(pytree.copied(value) if id(value) in seen else value)
        seen.add(id(value))
    return separate


def _plained(failure: Failure) -> Failure:
    return Failure(_plain(failure.error), failure.part, failure.account)


def _plain(error: BaseException) -> BaseException:
    """Return an exception that survives pickling, with the worker's traceback as a note."""
    cause = error.__cause__ if isinstance(error, StageError) and error.__cause__ else error
    note = "In a worker process:\n" + "".join(traceback.format_exception(cause)).rstrip()
    try:
        if type(pickle.loads(pickle.dumps(cause))) is not type(cause):
            raise TypeError
    except Exception:
        cause = RuntimeError(f"{type(cause).__name__}: {cause}")
    cause.__traceback__ = None
    cause.__cause__ = cause.__context__ = None
    cause.add_note(note)
    if isinstance(error, StageError):
        return StageError(
            error.stage,
            cause,
            index=error.index,
            path=error.path,
            batch=error.batch,
            number=error.number,
        )
    return cause
