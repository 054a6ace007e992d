"""Starting worker processes, ending them, and keeping them for the next epoch."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import gc
import itertools
import multiprocessing
import os
import stat
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from stoker.basics import resources
from stoker.basics.process import WORKER_NAME, OwningProcess, has_jax_started
from stoker.basics.signals import defer_interrupts
from stoker.engine.work.work import Work
from stoker.engine.workers.processes.serving import Epoch, serve
from stoker.engine.workers.processes.signs import Signs
from stoker.engine.workers.processes.worker_process import ProcessSlot, WorkerProcess
from stoker.engine.workers.requests import SLOTS
from stoker.errors import StokerError
from stoker.transport.channel import Arena

_children: weakref.WeakSet[Any] = weakref.WeakSet()
# Held while this process has a child's end of a connection: a child that another thread forks then
# would keep it open, and nobody would see when the first child dies.
_launching = threading.Lock()
_kept: weakref.WeakSet[KeptProcesses] = weakref.WeakSet()


def _disown() -> None:
    """Keep ``multiprocessing`` in a forked child from ending the parent's processes at exit."""
    global _launching
    _launching = threading.Lock()  # the parent's is held while it forks
    known: set[Any] = getattr(multiprocessing.process, "_children", set())
    known.difference_update(_children)
    _children.clear()


os.register_at_fork(after_in_child=_disown)


def start(
    count: int,
    works: list[Work],
    crew: list[WorkerProcess] | None = None,
    *,
    watched: bool = False,
) -> list[ProcessSlot]:
    """Start worker processes by the start method of ``multiprocessing``.

    Args:
        count: how many.
        works: their works, by depth.
        crew: those of the same run that were started before; the new ones join them.
        watched: whether they show where they are, and may be replaced.

    Returns two slots for each process: first one of every process, then the second ones.

    Raises TypeError if the start method pickles and an object, which the message names, does not;
    OSError if the system starts no more; RuntimeError if a fork would lose JAX's threads;
    StokerError if a process would run the program from its beginning.
    """
    slots: list[ProcessSlot] = []
    crew = [] if crew is None else crew
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


def _start_one(works: list[Work], crew: list[WorkerProcess], watched: bool) -> list[ProcessSlot]:
    """Start a process, which joins the ``crew`` of those that were started together."""
    context: Any = multiprocessing.get_context()
    with contextlib.ExitStack() as undo:

        def arena() -> Arena:
            made = Arena.create()
            undo.callback(made.close)
            return made

        arenas = [(arena(), arena()) for _ in range(SLOTS)]
        signs = Signs(context) if watched else None
        if signs is not None:
            undo.callback(signs.close)
        handles = [tuple(arena.handle for arena in pair) for pair in arenas]

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
    method = context.get_start_method()
    is_forked = method == "fork"
    path = main_file()
    if not is_forked and path is not None and has_guard(path) is False:
        raise StokerError(no_guard(path, method))
    if is_forked and has_jax_started():
        raise RuntimeError(
            "JAX runs threads in this process, and a worker process that is forked from it hangs "
            'as soon as it uses JAX: take threads, .workers(n, kind="thread"), or call '
            "multiprocessing.set_start_method('forkserver') where the program begins"
        )
    with _launching, contextlib.ExitStack() as undo:
        ours, theirs = context.Pipe()
        for opened in (ours, theirs):
            undo.callback(opened.close)
        process = context.Process(
            target=serve,
            args=(
                theirs,
                [*inherited, ours] if is_forked else [],
                handles,
                works,
                os.getpid(),
                _reading_places() if is_forked else {},
                threading.current_thread() is threading.main_thread(),
                signs,
            ),
            name=WORKER_NAME,
            daemon=True,
        )
        with defer_interrupts(), _frozen():  # hooks of a fork swallow exceptions
            try:
                process.start()
            except OSError:
                raise
            except Exception as error:
                _name_what_cannot_be_sent(works, error)
                raise
            # By it multiprocessing ends its children at exit; they ignore SIGTERM.
            process._popen.terminate = process._popen.kill
            _children.add(process)
        undo.pop_all()
        theirs.close()
    return process, ours


def _reading_places() -> Mapping[int, int]:
    """Return the descriptors of regular files open for reading only, and their positions.

    A forked process reopens them, each under its number, so that it has read positions of its own:
    Python's files, archives and C libraries need not know.
    """
    places: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            number = int(name)
            flags = fcntl.fcntl(number, fcntl.F_GETFL)
            if flags & os.O_ACCMODE == os.O_RDONLY and stat.S_ISREG(os.fstat(number).st_mode):
                places[number] = os.lseek(number, 0, os.SEEK_CUR)
    return places


def main_file() -> str | None:
    """Return the file that a process which does not fork imports as the program; None if none."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name.endswith(".__main__"):
        return None  # python -m PACKAGE, which multiprocessing leaves out
    return getattr(main, "__file__", None)


def has_guard(path: str) -> bool | None:
    """Whether a program's file has a main guard; None if unknown."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    return any(
        isinstance(node, ast.Name) and node.id == "__name__"
        for statement in tree.body
        if isinstance(statement, ast.If)
        for node in ast.walk(statement.test)
    )


def no_guard(path: str, method: str) -> str:
    """Return the text of an error about a program without a main guard, with the remedy."""
    return (
        f"each process that {method!r} starts would run {path} from its beginning: put what "
        'starts training under if __name__ == "__main__", or call '
        "multiprocessing.set_start_method('fork') where the program begins"
    )


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """Keep a child's garbage collector from writing to inherited memory, which copies it."""
    is_frozen = gc.get_freeze_count() > 0  # by the user
    if not is_frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not is_frozen:
            gc.unfreeze()


def _name_what_cannot_be_sent(works: list[Work], error: Exception) -> None:
    """Raise TypeError with the name of the source or stage that does not pickle."""
    for name, part in itertools.chain.from_iterable(work.segment.parts() for work in works):
        try:
            ForkingPickler.dumps(part)
        except Exception as own:
            if (type(own), str(own)) == (type(error), str(error)):
                raise TypeError(
                    f"{name} cannot be sent to worker processes, which are started by "
                    f"{multiprocessing.get_start_method()!r}: {error}. Define functions and "
                    "classes at the top of a module; make locks and open files where they are "
                    "first used, or leave them out in __getstate__; or take threads, "
                    '.workers(n, kind="thread")'
                ) from error


class KeptProcesses:
    """Worker processes that stay from epoch to epoch: ``.workers(n, persistent=True)``.

    Behind a whole epoch they rest, and do the next one. It is the user's word that nothing changes
    meanwhile: not the dataset, not the functions, not what they use. What their code keeps in such
    a process, such as open files, stays there. An epoch that is left early ends its processes: they
    may be busy. They end with the pipeline.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._process = OwningProcess()
        self._resting: list[ProcessSlot] = []
        self._segments: set[int] = set()
        weakref.finalize(self, _end_kept, self._resting, self._process)
        _kept.add(self)

    def __reduce__(self) -> tuple[type[KeptProcesses], tuple[()]]:
        return KeptProcesses, ()  # a pipeline that an object holds is copied without its processes

    def take(self, works: list[Work]) -> list[ProcessSlot]:
        """Return the slots of processes that rest, begun for another epoch; none if none can."""
        if not self._process.is_current:  # in a forked child: they are the parent's
            self._begin()
        found = list(self._resting)
        self._resting.clear()
        segments = {id(work.segment) for work in works}
        epoch = Epoch([work.address for work in works])
        # A dataset that has grown has another segment; so has what an echo makes again.
        if segments <= self._segments and all(each.begin(epoch) for each in _processes_of(found)):
            return found
        end(found)
        self._segments = segments
        return []

    def rest(self, slots: list[ProcessSlot]) -> bool:
        """Keep the processes of an epoch, which are idle, for the next; False: they cannot stay."""
        if not self._process.is_current:
            return False
        processes = _processes_of(slots)
        if not all(each.rest() for each in processes):
            return False
        if not all(each.is_at_rest() for each in processes):
            return False
        self._resting += slots
        return True


def _processes_of(slots: list[ProcessSlot]) -> list[WorkerProcess]:
    return [slot.process for slot in slots if slot.number == 0]


def end_kept() -> None:
    """End the processes that rest: this process is about to end without running finalizers."""
    for kept in list(_kept):
        _end_kept(kept._resting, kept._process)


def _end_kept(slots: list[ProcessSlot], process: OwningProcess) -> None:
    """End processes whose pipeline is gone, unless it is a forked child's copy of it."""
    if process.is_current:
        end(slots)
