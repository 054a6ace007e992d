"""The cores and the memory that this process may use, by affinity and control groups."""

from __future__ import annotations

import errno
import functools
import os
import re
import time
from pathlib import Path
from typing import Any

# Bytes by the units that users write: a KB is 1,000 bytes, a KiB 1,024.
_UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)},
}

_CORES = ("cpu.max", "cpu.cfs_quota_us")  # of control groups v2, of v1
_MEMORY = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as ``"2GiB"``, ``"500 MB"`` or ``"9"``, or ValueError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = match and _UNITS.get(match[2].upper())
    if not match or not unit:
        raise ValueError(f"{text!r} is not a size; write for example '2GiB', '500MB' or '4096'")
    return int(float(match[1]) * unit)


def parse_share(text: str) -> float | None:
    """Return the fraction that a share such as ``"50%"`` is, from 0 to 1; None for other texts."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", text)
    fraction = float(match[1]) / 100 if match else 2.0
    return fraction if fraction <= 1 else None


def format_seconds(seconds: float) -> str:
    """Return a time as text for people, such as ``"2.5 min"``."""
    for unit, unit_s in (("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.3g} {unit}"
    return f"{seconds * 1e3:.3g} ms"


def user_folder(variable: str, default: str) -> str:
    """Return a base folder of the XDG specification, which ignores relative paths."""
    value = os.environ.get(variable, "")
    return value if os.path.isabs(value) else os.path.expanduser(default)


def format_bytes(count: float) -> str:
    """Return a size as text for people, such as ``"1.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def format_rounded(value: float, digits: int = 3) -> str:
    """Return a number with so many digits, as text for people: a large one without an exponent."""
    text = f"{value:,.{digits}g}"
    return f"{value:,.0f}" if "e+" in text else text


def usable_cores() -> int:
    """Return the number of cores that this process may use, at least 1.

    It is limited by affinity and by control groups, and divided by the number of ranks on this host
    (``LOCAL_WORLD_SIZE``, which torchrun sets).
    """
    cores: float = len(os.sched_getaffinity(0))
    for group in _control_groups():
        cores = min(cores, _quota_cores(group))
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(cores) // (int(ranks) if ranks.isdigit() and int(ranks) else 1))


def default_threads() -> int:
    """Return how many threads prepare data unless the user says: one in eight cores stays free.

    With as many threads as cores, the training loop waits for a processor at each operation that
    it launches, and does not take what they have made: beside a GPU and ResNet-18, 14 threads of 16
    cores brought 1.18 times the examples of 16. With four cores and ResNet-50, three brought less
    than four (bench/gpu.py).
    """
    cores = usable_cores()
    return cores - cores // 8


def usable_device_bytes(device: Any) -> int:
    """Return the free memory of a device; the host's if the device does not tell."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return usable_memory_bytes()


def usable_memory_bytes() -> int:
    """Return the bytes that this process may still allocate, within its control groups."""
    import psutil

    usable = int(psutil.virtual_memory().available)
    for group in _control_groups():
        limit, used = _memory_of(group)
        if limit is not None:
            usable = min(usable, max(0, limit - used))
    return usable


class ThreadTimer:
    """Measures how this thread spends its time, from the moment it is made."""

    def __init__(self) -> None:
        self._wall_ns = time.perf_counter_ns()
        self._wanted_ns = thread_busy_ns()
        self._cpu_ns = time.thread_time_ns()

    def read_ns(self) -> tuple[int, int, int]:
        """Return the elapsed time; the part in which the thread had or wanted a processor; and the
        part in which it had one."""
        cpu_ns = time.thread_time_ns() - self._cpu_ns
        wanted_ns = thread_busy_ns() - self._wanted_ns
        return time.perf_counter_ns() - self._wall_ns, wanted_ns, cpu_ns


def no_descriptors() -> str:
    """Return a message that this process can open no more files, with the remedy."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"no file descriptors are left, of the {limit:,} that a process may have: raise the limit "
        "(ulimit -n), or use fewer workers"
    )


def lacks_descriptors(error: OSError) -> bool:
    return error.errno in (errno.EMFILE, errno.ENFILE)


def thread_busy_ns() -> int:
    """Return how long this thread has had a processor so far, or waited for one, not for locks."""
    return thread_delay_ns() + time.thread_time_ns()


def thread_delay_ns() -> int:
    """Return how long this thread has waited for a processor so far; 0 where that is unknown."""
    try:
        descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        # The file holds three numbers of at most 20 digits.
        _, waited_ns, _ = os.read(descriptor, 128).split()
    finally:
        os.close(descriptor)
    return int(waited_ns)


def _control_groups() -> tuple[Path, ...]:
    """Return the folders of this process's control groups that limit it, the innermost first."""
    return _folders_of(_read("/proc/self/cgroup"))


@functools.lru_cache(maxsize=1)  # called at the start of each epoch, and takes a millisecond
def _folders_of(groups: str) -> tuple[Path, ...]:
    folders: list[Path] = []
    for line in groups.splitlines():
        _, controllers, path_in_hierarchy = line.split(":", 2)
        for mount_name in (controllers, *controllers.split(",")):  # in v2 both are empty
            root = Path("/sys/fs/cgroup", mount_name)
            group_folder = root / path_in_hierarchy.lstrip("/")
            # In a container the path may be the host's; then the mounted root is this process's.
            for folder in (group_folder, *group_folder.parents):
                limits = any((folder / name).exists() for name in (*_CORES, *_MEMORY))
                if limits and folder.is_relative_to(root) and folder not in folders:
                    folders.append(folder)
    return tuple(folders)


def _quota_cores(group: Path) -> float:
    text = _read(f"{group}/cpu.max")
    if text:
        quota, period = text.split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    quota, period = _read(f"{group}/cpu.cfs_quota_us"), _read(f"{group}/cpu.cfs_period_us")
    if quota and period and int(quota) > 0:
        return int(quota) / int(period)
    return float("inf")


def _memory_of(group: Path) -> tuple[int | None, int]:
    for limit_name, used_name in _MEMORY.items():
        limit = _read(f"{group}/{limit_name}")
        if limit and limit != "max":
            used = int(_read(f"{group}/{used_name}") or 0)
            return int(limit), max(0, used - _reclaimable(group))
    return None, 0


def _reclaimable(group: Path) -> int:
    """Return the bytes of the page cache: the kernel frees them when memory is needed."""
    statistics = dict(line.split(" ", 1) for line in _read(f"{group}/memory.stat").splitlines())
    prefix = "total_" if "total_inactive_file" in statistics else ""
    return sum(int(statistics.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))


def _read(path: str) -> str:
    """Return the text of a small file; "" if it cannot be read.

    Each epoch asks for the quotas: by ``pathlib`` that was a fifth of the 0.4 ms to begin one.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode().strip()
    except OSError:
        return ""
