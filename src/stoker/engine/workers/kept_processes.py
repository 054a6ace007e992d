"""Worker processes that a pipeline keeps from epoch to epoch: those that import the program.

Behind a whole epoch they rest, and do the next one as long as the same would be sent to new ones
(``replicas.snapshot``). What the user's code has kept in them, such as open files, stays
there, as in worker threads. An epoch that is left early ends its processes: they may be busy. They
end with the pipeline.

Forked processes do not stay. They see all that the program holds when an epoch begins, modules and
the state of installed packages included; nobody can tell cheaply whether that has changed.
"""

from __future__ import annotations

import multiprocessing
import weakref
from dataclasses import fields
from typing import NamedTuple

from stoker.basics.process import OwningProcess
from stoker.cache.example_cache import ExampleCache
from stoker.engine.plan.segment import Segment
from stoker.engine.work.work import Work
from stoker.engine.workers.processes import starting
from stoker.engine.workers.processes.worker_process import ProcessSlot
from stoker.replicas.snapshot import PickleSnapshot
from stoker.replicas.user_lock import USER_LOCK

_CHANGED = "the dataset, a function or what they use has changed since the epoch before"
_ENDED = "one of them had ended"
_FOREIGN_CACHE = "each epoch sees the cache anew"


_all: weakref.WeakSet[KeptProcesses] = weakref.WeakSet()


class _Basis(NamedTuple):
    """The dataset and settings from which processes were started.

    Attributes:
        number: how many there are.
        method: the start method.
        segments: what they know to do.
        snapshot: what tells whether new ones would be the same.
    """

    number: int
    method: str
    segments: list[Segment]
    snapshot: PickleSnapshot


class KeptProcesses:
    """The worker processes of a pipeline. While an epoch runs, they are its own.

    Attributes:
        why_new: why those of the last epoch, or of every one, were started anew; "" if they stayed.
    """

    def __init__(self) -> None:
        self.why_new = ""
        self._basis: _Basis | None = None
        self._begin()

    def _begin(self) -> None:
        self._process = OwningProcess()
        self._resting: list[ProcessSlot] = []
        weakref.finalize(self, _end, self._resting, self._process)
        _all.add(self)

    def __reduce__(self) -> tuple[type[KeptProcesses], tuple[()]]:
        return KeptProcesses, ()  # a pipeline that an object holds is copied without its processes

    def hire(self, count: int, works: list[Work], *, watched: bool) -> list[ProcessSlot]:
        """Return slots of processes for an epoch, as ``starting.start`` does.

        ``watched`` is the same in all epochs of a pipeline.
        """
        if not self._process.is_current:  # in a forked child: they are the parent's
            self._begin()
        segments = [work.segment for work in works]
        method = multiprocessing.get_start_method()
        found = list(self._resting)
        if found:
            self.why_new = self._why_new(count, method, segments)
            self._resting.clear()  # not before: Ctrl-C may end the comparison
            if not self.why_new:
                if all(slot.begin([work.address for work in works]) for slot in found):
                    return found
                self.why_new = _ENDED
            starting.end(found)
        basis = self._basis
        if basis is None or not basis.snapshot.unknown or not _are_among(segments, basis.segments):
            basis = _Basis(count, method, segments, _snapshot(segments))
            self._basis = basis
        self.why_new = basis.snapshot.unknown or self.why_new
        return starting.start(count, works, watched=watched)

    def end(self) -> None:
        """End those that rest."""
        _end(self._resting, self._process)

    def _why_new(self, count: int, method: str, segments: list[Segment]) -> str:
        basis = self._basis
        assert basis is not None
        if (basis.number, basis.method) != (count, method):
            return _CHANGED
        if not _are_among(segments, basis.segments):
            return _CHANGED
        with USER_LOCK:
            return "" if basis.snapshot.is_current() else _CHANGED

    def rest(self, slots: list[ProcessSlot]) -> bool:
        """Keep the processes of an epoch, which are idle, for the next; False: they cannot stay."""
        basis = self._basis
        if basis is None or basis.snapshot.unknown or not self._process.is_current:
            return False
        if not all(slot.rest() for slot in slots) or not all(slot.is_at_rest() for slot in slots):
            return False
        self._resting += slots
        return True


def end_all() -> None:
    """End the processes that rest: this process is about to end without running finalizers."""
    for kept in list(_all):
        kept.end()


def _are_among(segments: list[Segment], known: list[Segment]) -> bool:
    return {*map(id, segments)} <= {*map(id, known)}


def _snapshot(segments: list[Segment]) -> PickleSnapshot:
    for segment in segments:
        cache = segment.cache
        if cache is not None and (cache.cluster or type(cache.cache) is not ExampleCache):
            return PickleSnapshot(None, _FOREIGN_CACHE)
    # Not what segments work out and keep beside their fields, when they are first asked.
    roots = [[getattr(one, each.name) for each in fields(one)] for one in segments]
    with USER_LOCK:  # threads of another run may be calling the same objects
        return PickleSnapshot.of(roots)


def _end(slots: list[ProcessSlot], process: OwningProcess) -> None:
    """End processes whose pipeline is gone, unless it is a forked child's copy of it."""
    if process.is_current:
        starting.end(slots)
