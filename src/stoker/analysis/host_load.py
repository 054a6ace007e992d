"""Measures who used the host's processors during a phase: the job, or other processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from stoker.analysis.model.report import HostLoad

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
# Fields of a processor in /proc/stat: see proc_stat(5).
_USER, _NICE, _SYSTEM, _IDLE, _IOWAIT, _IRQ, _SOFTIRQ, _STEAL = range(8)


@dataclass(frozen=True)
class _Reading:
    """The counters at one moment, in seconds."""

    at_s: float
    busy_s: float
    idle_s: float
    steal_s: float
    own_s: float
    """Of this process and its descendants, with those that have ended."""
    pressure_s: float | None
    """In which some process of the host waited for a processor."""


@contextlib.contextmanager
def watch_host(found: list[HostLoad]) -> Iterator[None]:
    """Add the load of the host during the block to ``found``, also if the block raises.

    Adds nothing where the kernel does not tell.
    """
    before = _read()
    try:
        yield
    finally:
        after = _read()
        if before is not None and after is not None and after.at_s > before.at_s:
            found.append(_compare(before, after))


def join_loads(loads: list[HostLoad]) -> HostLoad | None:
    """Return the load over several phases together; None if there is none."""
    total = sum(load.seconds for load in loads)
    if not total:
        return None

    def mean(values: list[float]) -> float:
        weighted = zip(values, loads, strict=True)
        return sum(value * load.seconds for value, load in weighted) / total

    pressures = [load.pressure_fraction for load in loads]
    known = [pressure for pressure in pressures if pressure is not None]
    return HostLoad(
        seconds=total,
        cores=loads[0].cores,
        own_cores=mean([load.own_cores for load in loads]),
        others_cores=mean([load.others_cores for load in loads]),
        steal_cores=mean([load.steal_cores for load in loads]),
        idle_cores=mean([load.idle_cores for load in loads]),
        pressure_fraction=mean(known) if len(known) == len(loads) else None,
        load_average=max(load.load_average for load in loads),
    )


def _compare(before: _Reading, after: _Reading) -> HostLoad:
    seconds = after.at_s - before.at_s
    own = max(0.0, after.own_s - before.own_s) / seconds
    busy = (after.busy_s - before.busy_s) / seconds
    pressure = None
    if before.pressure_s is not None and after.pressure_s is not None:
        pressure = min(1.0, (after.pressure_s - before.pressure_s) / seconds)
    return HostLoad(
        seconds=seconds,
        cores=len(os.sched_getaffinity(0)),
        own_cores=own,
        others_cores=max(0.0, busy - own),
        steal_cores=max(0.0, (after.steal_s - before.steal_s) / seconds),
        idle_cores=max(0.0, (after.idle_s - before.idle_s) / seconds),
        pressure_fraction=pressure,
        load_average=os.getloadavg()[0],
    )


def _read() -> _Reading | None:
    """Return the counters of the processors that this process may use; None if there are none."""
    try:
        with open("/proc/stat") as file:
            lines = [line.split() for line in file if line.startswith("cpu")]
    except OSError:
        return None
    usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    rows = [[int(text) for text in words[1:]] for words in lines if words[0] in usable]
    if not rows or any(len(row) <= _STEAL for row in rows):
        return None

    def seconds(*fields: int) -> float:
        return _TICK_S * sum(row[field] for row in rows for field in fields)

    return _Reading(
        at_s=time.monotonic(),
        busy_s=seconds(_USER, _NICE, _SYSTEM, _IRQ, _SOFTIRQ),
        idle_s=seconds(_IDLE, _IOWAIT),
        steal_s=seconds(_STEAL),
        own_s=_read_own_s(),
        pressure_s=_read_pressure_s(),
    )


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


def _read_pressure_s() -> float | None:
    """Return for how long some process waited for a processor; None where it is not counted."""
    try:
        with open("/proc/pressure/cpu") as file:
            words = file.readline().split()
    except OSError:
        return None
    total = [word[6:] for word in words if word.startswith("total=")]
    return int(total[0]) / 1e6 if words[:1] == ["some"] and total else None
