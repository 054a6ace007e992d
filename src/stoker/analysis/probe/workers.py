"""What a worker does in a drain: how long a batch takes, and which files it reads."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from . import residency
from .held import Held
from .records import WorkRecord, write_work

_clock = time.perf_counter_ns
_STREAMS = ("/dev/", "/proc/", "/sys/", "/memfd:", "/anon_hugepage")


class Listener:
    """Notes what this process opens while it prepares examples; in drains alone.

    An audit hook cannot be taken back, so there is one a process, and it is deaf between drains.
    """

    def __init__(self) -> None:
        self.tag = ""
        """What files about the drain under way are named after; empty when there is none."""
        self.hears = False
        self._lines: list[str] = []
        self._known: set[str] = set()
        self._hooked = self._busy = False

    def begin(self, tag: str, hears: bool) -> None:
        """Be part of a drain; with ``hears``, note each file that is opened, once."""
        self.tag, self.hears, self._lines, self._known = tag, hears, [], set()
        if hears and not self._hooked:
            sys.addaudithook(self._heard)
            self._hooked = True

    def end(self) -> None:
        """Be part of none."""
        self.tag, self.hears = "", False

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.hears or self._busy:
            return
        if event == "open":
            name, flags = args[0], args[2]
            if isinstance(name, int) or not isinstance(flags, int) or flags & os.O_ACCMODE:
                return
            self._busy = True
            try:
                self.note_file(os.path.abspath(os.fsdecode(name)), "file")
            except (OSError, TypeError, ValueError):
                pass
            finally:
                self._busy = False
        elif event == "socket.connect" and isinstance(args[1], tuple):
            self._lines.append(json.dumps({"kind": "socket", "name": str(args[1][0])}))

    def note_file(self, name: str, kind: str) -> None:
        """Note a file, and which part of it lies in the page cache, before it is read."""
        if name in self._known or _is_code(name) or not os.path.isfile(name):
            return
        self._known.add(name)
        pages = residency.resident_pages(name)
        size = os.path.getsize(name)
        self._lines.append(json.dumps({"kind": kind, "name": name, "bytes": size, "pages": pages}))

    def note_held(self, held: Held, read_bytes: int) -> None:
        """Note files that were kept open or mapped, and read: archives, databases, memory maps."""
        self._busy = True
        try:
            for name, kind in held.read(read_bytes > 0 and not self._known):
                self.note_file(name, kind)
        except (OSError, KeyError, ValueError):  # a kernel that tells less
            pass
        finally:
            self._busy = False

    def flush(self) -> None:
        """Write what was noted."""
        if self._lines:
            with open(f"{self.tag}-{os.getpid()}.opened", "a") as file:
                file.write("\n".join(self._lines) + "\n")
            self._lines = []


LISTENER = Listener()


def watch(fetcher: Any, worker: int) -> None:
    """Have a fetcher tell about each batch; on the instance, so that nothing else changes."""
    fetch, collate = fetcher.fetch, fetcher.collate_fn
    many = fetcher.auto_collation
    fd, pid = _appending(LISTENER.tag), os.getpid()
    io = os.open("/proc/self/io", os.O_RDONLY | os.O_CLOEXEC) if LISTENER.hears else -1
    collate_ns = examples = 0
    held = Held() if LISTENER.hears else None
    looks = 2  # files that are kept open are sought while the first batches are made

    def timed_collate(data: Any) -> Any:
        nonlocal collate_ns, examples
        began = time.thread_time_ns()
        try:
            return collate(data)
        finally:
            collate_ns, examples = time.thread_time_ns() - began, len(data) if many else 1

    def timed_fetch(index: Any) -> Any:
        nonlocal looks, collate_ns, examples
        collate_ns = examples = 0
        read = _read_bytes(io)
        began = _clock()
        try:
            return fetch(index)
        finally:
            ended, cpu = _clock(), time.process_time_ns()
            size = _read_bytes(io) - read if io >= 0 else -1
            if examples:
                write_work(
                    fd, WorkRecord(pid, worker, began, ended, cpu, collate_ns, examples, size)
                )
            if LISTENER.hears:
                if held is not None and looks:
                    looks -= 1
                    LISTENER.note_held(held, size)
                LISTENER.flush()

    fetcher.collate_fn = timed_collate
    fetcher.fetch = timed_fetch


_files: dict[str, int] = {}


def _appending(base: str) -> int:
    """Return this process's descriptor of a file of work; one each, over all epochs."""
    path = f"{base}-{os.getpid()}.work"
    if path not in _files:
        _files[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    return _files[path]


def _read_bytes(io: int) -> int:
    if io < 0:
        return 0
    for line in os.pread(io, 512, 0).split(b"\n"):
        if line.startswith(b"rchar:"):
            return int(line[6:])
    return 0


def _is_code(name: str) -> bool:
    """Whether a file is a program's rather than data."""
    if name.startswith(_STREAMS) or name.endswith((".py", ".pyc", ".so", ".pyi")):
        return True
    if ".so." in name or name.startswith(os.environ.get("STOKER_PROBE", "/dev/null") + "/"):
        return True
    libraries = [sys.prefix + "/lib/", "/usr/lib/", "/usr/share/", "/usr/bin/", "/lib/", "/etc/"]
    if sys.base_prefix != "/usr":
        libraries.append(sys.base_prefix + "/")
    return name.startswith(tuple(libraries))
