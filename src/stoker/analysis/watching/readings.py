"""Reads from the kernel what the processes of a run do; each reading takes well under 1 ms."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from stoker.basics.resources import usable_memory_bytes

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
# Of a processor in /proc/stat, see proc_stat(5): user, nice, system, irq, softirq, steal.
_BUSY = 0, 1, 2, 5, 6, 7


@dataclass(frozen=True)
class WorkerReading:
    """The counters of a process since it began."""

    cpu_s: float
    queued_s: float
    """In which it was ready to run and had no processor."""
    read_bytes: int
    """From storage."""


@dataclass(frozen=True)
class HostReading:
    """The counters of the host."""

    busy_s: float
    """Of the processors that this process may use, by all processes, with steal."""
    memory_s: float
    """In which some process waited for memory."""
    available_bytes: int
    """That this process may still allocate."""


def list_children() -> list[int]:
    """Return the processes that this one has started, and theirs."""
    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process().children(recursive=True)]
    return []


def read_state(task: str) -> str:
    """Return the state of a process (``PID``) or thread (``self/task/TID``), as in ps(1).

    X if it is gone.
    """
    try:
        with open(f"/proc/{task}/stat", "rb") as file:
            return chr(file.read(512).rpartition(b") ")[2][0])
    except (OSError, IndexError):
        return "X"


def read_workers(pids: Iterable[int]) -> dict[int, WorkerReading]:
    """Return the counters of processes; those that are gone are left out."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read(1024).rpartition(b") ")[2].split()
            found[pid] = WorkerReading(
                cpu_s=_TICK_S * (int(fields[11]) + int(fields[12])),
                queued_s=_read_queued_s(pid),
                read_bytes=_read_bytes(pid),
            )
    return found


def _read_queued_s(pid: int) -> float:
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/schedstat") as f:
        return int(f.read().split()[1]) / 1e9
    return 0.0


def _read_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/io") as file:
        for line in file:
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    return 0


def read_host() -> HostReading:
    """Return the counters of the host; 0 for those that the kernel does not tell."""
    return HostReading(_read_busy_s(), _read_memory_s(), usable_memory_bytes())


def _read_busy_s() -> float:
    usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    with contextlib.suppress(OSError, IndexError, ValueError), open("/proc/stat") as file:
        rows = [line.split() for line in file if line.startswith("cpu")]
        return _TICK_S * sum(int(r[1 + f]) for r in rows if r[0] in usable for f in _BUSY)
    return 0.0


def _read_memory_s() -> float:
    with contextlib.suppress(OSError, IndexError, ValueError), open("/proc/pressure/memory") as f:
        return int(f.readline().rpartition("total=")[2]) / 1e6
    return 0.0
