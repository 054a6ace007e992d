"""Records in a worker, during a drain, the time of each batch and the files that it reads."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from . import residency
from .records import WorkRecord, write_work

_clock = time.perf_counter_ns
_FILE_PAGES = "3"  # clear_refs(5): of pages mapped from files
# What is heard of a file that a drain opens: whether the script may have read it before.
READ, UNREAD = "read", "unread"
_STREAMS = ("/dev/", "/proc/", "/sys/", "/memfd:", "/anon_hugepage")


class HeldFiles:
    """The files that this process has open or mapped, compared before and after it reads.

    It leaves out files that are inherited and not read, such as a checkpoint that the training
    process has mapped.
    """

    def __init__(self) -> None:
        self._positions = dict(_list_descriptors())
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write(_FILE_PAGES)
            self._cleared = True
        except OSError:  # then the use of a mapping is unknown, and all of them count
            self._cleared = False

    def list_read(self, read_bytes: bool) -> Iterator[tuple[str, str]]:
        """Return (file, "held" or "mapped") of the files that were read since.

        ``read_bytes``: whether the process read bytes that no other file accounts for.
        """
        now = dict(_list_descriptors())
        moved = [what for what, position in now.items() if self._positions.get(what) != position]
        mapped = _list_mapped()
        if not moved and read_bytes:  # at positions of its own; a file that is mapped is not read
            moved = [what for what in now if what[1] not in mapped]
        for _, name in moved:
            yield name, "held"
        for name, touched in mapped.items():
            if touched or not self._cleared:
                yield name, "mapped"


def _list_descriptors() -> Iterator[tuple[tuple[int, str], int]]:
    """Return ((descriptor, file), position) of the files open for reading."""
    for text in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{text}")
            with open(f"/proc/self/fdinfo/{text}") as file:
                fields = dict(line.split(None, 1) for line in file if len(line.split()) > 1)
        except (OSError, ValueError):
            continue
        if name[:1] == "/" and not int(fields["flags:"], 8) & os.O_ACCMODE:
            yield (int(text), name), int(fields["pos:"])


def _list_mapped() -> dict[str, bool]:
    """Return the files that are mapped, programs apart, and whether they were touched."""
    found: dict[str, bool] = {}
    name = ""
    with open("/proc/self/smaps") as file:
        for line in file:
            parts = line.split(maxsplit=5)
            if "-" in parts[0]:
                is_data = len(parts) == 6 and "x" not in parts[1] and parts[5][0] == "/"
                name = parts[5].rstrip("\n") if is_data else ""
            elif name and parts[0] == "Referenced:":
                found[name] = found.get(name, False) or int(parts[1]) > 0
    return found


class OpenedFiles:
    """Notes the files that this process opens while it prepares examples, during drains.

    An audit hook cannot be removed: a process has one, and it does nothing between drains.
    """

    def __init__(self) -> None:
        self.tag = ""
        """What files about the drain under way are named after; empty when there is none."""
        self.hears = ""
        self._lines: list[str] = []
        self._known: set[str] = set()
        self._hooked = self._busy = False

    def begin(self, tag: str, hears: str) -> None:
        """Begin a drain; with ``hears`` (READ or UNREAD), note each file that is opened, once."""
        self.tag, self.hears, self._lines, self._known = tag, hears, [], set()
        if hears and not self._hooked:
            sys.addaudithook(self._heard)
            self._hooked = True

    def end(self) -> None:
        """End the drain."""
        self.tag, self.hears = "", ""

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
        """Note a file, and how much of it is in the page cache, before it is read."""
        if name in self._known or _is_code(name) or not os.path.isfile(name):
            return
        self._known.add(name)
        pages = residency.resident_pages(name)
        about = {"kind": kind, "name": name, "bytes": os.path.getsize(name), "pages": pages}
        self._lines.append(json.dumps(about | {"unread": self.hears == UNREAD}))

    def note_held(self, held: HeldFiles, read_bytes: int) -> None:
        """Note files that stayed open or mapped and were read: archives, databases, memory maps."""
        self._busy = True
        try:
            for name, kind in held.list_read(read_bytes > 0 and not self._known):
                self.note_file(name, kind)
        except (OSError, KeyError, ValueError):  # a kernel that tells less
            pass
        finally:
            self._busy = False

    def flush(self) -> None:
        """Write the notes to the file of this drain."""
        if self._lines:
            with open(f"{self.tag}-{os.getpid()}.opened", "a") as file:
                file.write("\n".join(self._lines) + "\n")
            self._lines = []


LISTENER = OpenedFiles()


def watch_fetcher(fetcher: Any, worker: int) -> None:
    """Record each batch of a fetcher. Only this instance is changed, not its class."""
    fetch, collate = fetcher.fetch, fetcher.collate_fn
    many = fetcher.auto_collation
    fd, pid = _open_work_file(LISTENER.tag), os.getpid()
    io = os.open("/proc/self/io", os.O_RDONLY | os.O_CLOEXEC) if LISTENER.hears else -1
    examples = 0
    held = HeldFiles() if LISTENER.hears else None
    looks = 2  # files that are kept open are sought while the first batches are made

    def counted_collate(data: Any) -> Any:
        nonlocal examples
        examples = len(data) if many else 1
        return collate(data)

    def timed_fetch(index: Any) -> Any:
        nonlocal looks, examples
        examples = 0
        read = _count_read_bytes(io)
        began = _clock()
        try:
            return fetch(index)
        finally:
            ended, cpu = _clock(), time.process_time_ns()
            size = _count_read_bytes(io) - read if io >= 0 else -1
            if examples:
                write_work(fd, WorkRecord(pid, worker, began, ended, cpu, examples, size))
            if LISTENER.hears:
                if held is not None and looks:
                    looks -= 1
                    LISTENER.note_held(held, size)
                LISTENER.flush()

    fetcher.collate_fn = counted_collate
    fetcher.fetch = timed_fetch


_files: dict[str, int] = {}


def _open_work_file(base: str) -> int:
    """Return this process's descriptor of a work file; one for each file, over all epochs."""
    path = f"{base}-{os.getpid()}.work"
    if path not in _files:
        _files[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    return _files[path]


def _count_read_bytes(io: int) -> int:
    if io < 0:
        return 0
    # /proc/PID/io has seven lines of up to 45 bytes.
    for line in os.pread(io, 512, 0).split(b"\n"):
        if line.startswith(b"rchar:"):
            return int(line[6:])
    return 0


def _is_code(name: str) -> bool:
    """True if a file is a program's rather than data."""
    if name.startswith(_STREAMS) or name.endswith((".py", ".pyc", ".so", ".pyi")):
        return True
    if ".so." in name or name.startswith(os.environ.get("STOKER_PROBE", "/dev/null") + "/"):
        return True
    libraries = [sys.prefix + "/lib/", "/usr/lib/", "/usr/share/", "/usr/bin/", "/lib/", "/etc/"]
    if sys.base_prefix != "/usr":
        libraries.append(sys.base_prefix + "/")
    return name.startswith(tuple(libraries))
