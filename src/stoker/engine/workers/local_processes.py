"""Worker processes of this host: when users' Python code runs in them.

By default the user's code runs inline where it is cheap, and in processes where it is not, which a
first process finds out (``first_process``). The objects of the training process are called only if
the work stays inline, and then for the pipeline's life.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

from stoker.basics.process import has_jax_started, has_polars_started
from stoker.basics.warn import warn
from stoker.engine.work.held_generators import find_connections
from stoker.engine.work.work import Work
from stoker.engine.workers.first_process import FirstProcess
from stoker.engine.workers.processes import starting
from stoker.engine.workers.processes.worker_process import ProcessSlot
from stoker.engine.workers.threads import WorkerPool
from stoker.engine.workers.tuning import Autotuner
from stoker.errors import StokerError


def make_pool(
    count: int,
    host: list[Work],
    autotuner: Autotuner,
    kept: starting.KeptProcesses | None,
    tell: Callable[[str], None],
    *,
    is_asked: bool,
    grows: bool,
    watched: bool,
) -> WorkerPool:
    """Return the pool of a run with worker processes, or one whose consumer does the work.

    Args:
        count: the number of processes.
        host: the works of the segments on the host, by depth.
        autotuner: has their costs, and keeps the decision.
        kept: the processes that stay from epoch to epoch; None if none do.
        tell: tells the user why costly code of theirs runs inline.
        is_asked: whether the user asked for processes: then all work is theirs.
        grows: whether there may be more for examples that wait: the user named no number.
        watched: whether they show where they are, and may be replaced. Then users' code is theirs,
            however cheap it is: nothing could end it in the loop's thread.

    Raises as ``starting.start`` does, and StokerError if nothing can be watched.
    """
    works = [work.for_another_process() for work in host]
    depths = max(1, len(host))
    if not is_asked:
        why = why_inline(works) if watched or autotuner.processes != 0 else None
        if watched and why is not None:
            raise StokerError(
                "timeout_s= can end your Python code in worker processes alone, and none can run "
                f"it: {why}; or leave timeout_s= out"
            )
        if autotuner.processes == 0 and not watched:
            return WorkerPool(count, depths, autotuner, stays_inline=True)
        if why is not None:
            return _inline(count, depths, autotuner, functools.partial(tell, why))
    elif multiprocessing.get_start_method() == "fork":
        if why := _why_polars_hangs(works):
            warn(f"a worker process may hang: {why}")
        if why := _why_answers_mix(works):
            warn(f"worker processes may take each other's answers: {why}")
    slots = [] if kept is None else kept.take(works)
    rest = None if kept is None else kept.rest
    if is_asked or watched or autotuner.processes is not None:
        count = count if is_asked or watched else autotuner.processes or 1
        slots = slots or starting.start(count, works, watched=watched)
        return WorkerPool(len(slots), depths, autotuner, slots, rest=rest)
    try:
        slots = starting.start(1, works, watched=watched)
    except OSError as error:  # by forkserver in a process that the program forked, for one
        return _inline(count, depths, autotuner, functools.partial(tell, str(error)))

    def add(more: int) -> list[ProcessSlot]:
        return starting.start(more, works, slots[0].process.crew, watched=watched)

    first = FirstProcess(slots, add, count, works, autotuner, tell, grows=grows)
    return WorkerPool(count, depths, autotuner, rest=rest, first=first)


def _inline(
    count: int, depths: int, autotuner: Autotuner, tells_of_cost: Callable[[], None]
) -> WorkerPool:
    """Return a pool whose consumer does the work, and tells why if that is costly."""
    pool = WorkerPool(count, depths, autotuner, stays_inline=True)
    pool.tells_of_cost = tells_of_cost
    return pool


def why_inline(works: list[Work]) -> str | None:
    """Return why no worker process can do these works, with the remedy; None if one can."""
    if multiprocessing.current_process().daemon:
        return "this process is itself a worker process, which may start no other"
    method = multiprocessing.get_start_method()
    if method == "fork":
        if has_jax_started():
            return (
                "JAX runs threads in this process, which a fork would lose: call "
                "multiprocessing.set_start_method('forkserver') where the program begins"
            )
        return _why_answers_mix(works) or _why_polars_hangs(works)
    return _why_not_imported(works, method)


def _why_answers_mix(works: list[Work]) -> str | None:
    """Return which connection forked processes would share, with the remedy; None if none is."""
    objects = [each.value for work in works for each in work.segment.users_code]
    connections = find_connections(objects)
    if not connections:
        return None
    return (
        f"{connections[0]} is open, which all forked processes would share: open it in the first "
        "call"
    )


def _why_polars_hangs(works: list[Work]) -> str | None:
    """Return why a forked process would hang in Polars, with the remedy; None if it would not.

    It would if Polars has started its threads, which a fork loses, and the user's code calls it:
    nobody can tell, but where it is defined Polars is at hand.
    """
    if not has_polars_started():
        return None
    for each in (each for work in works for each in work.segment.users_code):
        value = inspect.unwrap(each.value) if callable(each.value) else each.value
        name = getattr(value, "__module__", None) or type(value).__module__
        around = vars(sys.modules[name]).values() if name in sys.modules else ()
        if any(inspect.ismodule(one) and one.__name__ == "polars" for one in around):
            return (
                f"{each.name} is defined where Polars is imported, whose threads a fork loses: "
                "call multiprocessing.set_start_method('forkserver') where the program begins"
            )
    return None


def _why_not_imported(works: list[Work], method: str) -> str | None:
    """Return why a process that imports the program could not do the works."""
    fork = "multiprocessing.set_start_method('fork') where the program begins"
    path = starting.main_file()
    if path is not None and not starting.has_guard(path):
        return starting.no_guard(path, method)
    for work in works:
        for name, part in work.segment.parts():
            try:
                data = ForkingPickler.dumps(part)
            except Exception as error:
                return (
                    f"{name} cannot be sent to a process that {method!r} starts: {error}. Define "
                    f"functions and classes at the top of a module, or call {fork}"
                )
            if path is None and b"__main__" in bytes(data):
                return (
                    f"{name} is defined in a notebook, a prompt or a package's __main__, which a "
                    f"process that {method!r} starts cannot import: define it in a module, or call "
                    f"{fork}"
                )
    return None
