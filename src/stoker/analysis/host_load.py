"""Measures who used the host's processors during a phase: the job, or other processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import psutil

from stoker.analysis.model.report import HostLoad


class _Reading(NamedTuple):
    """The counters at one moment, in seconds."""

    at: float
    busy: float
    idle: float
    steal: float
    own: float
    """Of this process and its descendants, with those that have ended."""


class HostWatch:
    """The load of the host since this was made."""

    def __init__(self) -> None:
        self._before = _read()

    def read(self) -> HostLoad | None:
        """Return the load until now; None where the kernel does not tell."""
        after = _read()
        seconds = after.at - self._before.at
        _, busy, idle, steal, own = (
            max(0.0, b - a) / max(1e-9, seconds) for a, b in zip(self._before, after, strict=True)
        )
        if busy + idle <= 0.0:
            return None
        cores = len(os.sched_getaffinity(0))
        return HostLoad(seconds, cores, own, max(0.0, busy - own), steal, idle)


@contextlib.contextmanager
def watch_host(found: list[HostLoad]) -> Iterator[None]:
    """Add the load of the host during the block to ``found``, also if the block raises.

    Adds nothing where the kernel does not tell.
    """
    watch = HostWatch()
    try:
        yield
    finally:
        load = watch.read()
        found += [] if load is None else [load]


def join_loads(loads: list[HostLoad]) -> HostLoad | None:
    """Return the load over several phases together; None if there is none."""
    total = sum(load.seconds for load in loads)
    if not total:
        return None
    names = ("own_cores", "others_cores", "steal_cores", "idle_cores")
    means = {
        name: sum(getattr(load, name) * load.seconds for load in loads) / total for name in names
    }
    return msgspec.structs.replace(loads[0], seconds=total, **means)


def _read() -> _Reading:
    """Return the counters of the processors that this process may use."""
    every = psutil.cpu_times(percpu=True)
    usable = [every[number] for number in os.sched_getaffinity(0) if number < len(every)]
    busy = sum(one.user + one.nice + one.system + one.irq + one.softirq for one in usable)
    idle = sum(one.idle + one.iowait for one in usable)
    return _Reading(time.monotonic(), busy, idle, sum(one.steal for one in usable), _read_own_s())


def _read_own_s() -> float:
    """Return the processor seconds of this process and its descendants.

    A process that has ended counts with the one that waited for it.
    """
    here = psutil.Process()
    total = 0.0
    for process in (here, *here.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total
