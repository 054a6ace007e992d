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
class RunReading:
    """The counters of this process and its children, since they began."""

    cpu_s: float
    """With children that have ended: the kernel adds theirs to those of the parent."""
    read_bytes: int
    """From storage, with children that have ended."""
    queued_s: dict[int, float]
    """In which a process was ready to run and had no processor; of those that run, by PID."""


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


def read_run(children: Iterable[int]) -> RunReading:
    """Return the counters of this process and of its children."""
    pids = [os.getpid(), *children]
    return RunReading(
        cpu_s=sum(map(_read_cpu_s, pids)),
        read_bytes=sum(map(_read_bytes, pids)),
        queued_s={pid: _read_queued_s(pid) for pid in pids},
    )


def _read_cpu_s(pid: int) -> float:
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/stat", "rb") as f:
        # user and system time, its own and of the children that it has waited for
        return _TICK_S * sum(map(int, f.read(1024).rpartition(b") ")[2].split()[11:15]))
    return 0.0


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
