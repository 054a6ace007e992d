"""Worker processes that stay from epoch to epoch: ``.workers(n, persistent=True)``.

Behind a whole epoch they rest, and do the next one. It is the user's word that nothing changes
meanwhile: not the dataset, not the functions, not what they use. What their code keeps in such a
process, such as open files, stays there. An epoch that is left early ends its processes: they may
be busy. They end with the pipeline.
"""

from __future__ import annotations

import weakref

from stoker.basics.process import OwningProcess
from stoker.engine.work.work import Work
from stoker.engine.workers.processes import starting
from stoker.engine.workers.processes.worker_process import ProcessSlot

_all: weakref.WeakSet[KeptProcesses] = weakref.WeakSet()


class KeptProcesses:
    """The worker processes of a pipeline. While an epoch runs, they are its own."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._process = OwningProcess()
        self._resting: list[ProcessSlot] = []
        self._segments: set[int] = set()
        weakref.finalize(self, _end, self._resting, self._process)
        _all.add(self)

    def __reduce__(self) -> tuple[type[KeptProcesses], tuple[()]]:
        return KeptProcesses, ()  # a pipeline that an object holds is copied without its processes

    def take(self, works: list[Work]) -> list[ProcessSlot]:
        """Return the slots of processes that rest, begun for another epoch; none if none can."""
        if not self._process.is_current:  # in a forked child: they are the parent's
            self._begin()
        found = list(self._resting)
        self._resting.clear()
        segments = {id(work.segment) for work in works}
        # A dataset that has grown has another segment; so has what an echo makes again.
        if segments <= self._segments and all(
            slot.begin([work.address for work in works]) for slot in found
        ):
            return found
        starting.end(found)
        self._segments = segments
        return []

    def rest(self, slots: list[ProcessSlot]) -> bool:
        """Keep the processes of an epoch, which are idle, for the next; False: they cannot stay."""
        if not self._process.is_current:
            return False
        if not all(slot.rest() for slot in slots) or not all(slot.is_at_rest() for slot in slots):
            return False
        self._resting += slots
        return True

    def end(self) -> None:
        """End those that rest."""
        _end(self._resting, self._process)


def end_all() -> None:
    """End the processes that rest: this process is about to end without running finalizers."""
    for kept in list(_all):
        kept.end()


def _end(slots: list[ProcessSlot], process: OwningProcess) -> None:
    """End processes whose pipeline is gone, unless it is a forked child's copy of it."""
    if process.is_current:
        starting.end(slots)
