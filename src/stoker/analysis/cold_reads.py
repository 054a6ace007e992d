"""Finds the loader's own files, and reads them again, cold and warm."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

from stoker.analysis.probe import residency

# Large reads: a system call costs little beside a MiB, and a thread holds no more memory.
_CHUNK = 1 << 20
# Blocks for a confidence interval, as with steps (analysis/model/rates.py).
_BLOCKS = 8

Reads: TypeAlias = list[tuple[float, float]]
"""Blocks of files: the number of files read, and the wall seconds of reading."""


def find_files(
    opened: Sequence[dict[str, Any]], examples: int, read_bytes: int
) -> tuple[list[str], str]:
    """Return the files that a loader opened, and why they cannot be read again as it reads them.

    The reason is empty if it reads them whole, one or a few for each example. ``opened`` holds
    files and connections; the loader read ``read_bytes`` for so many ``examples``.
    """
    sockets = {line["name"] for line in opened if line["kind"] == "socket"}
    held = {line["name"]: line for line in opened if line["kind"] != "socket"}
    files = [line for line in held.values() if line["kind"] == "file"]
    total = sum(line["bytes"] for line in files)
    # Up to five examples a file. Reading half more or less than its size still means once as a
    # whole: the difference is metadata and rounding.
    whole = len(files) >= 0.2 * examples and 0.5 * total <= read_bytes <= 1.5 * total
    if files and whole:
        return [line["name"] for line in files], ""
    if sockets:
        why = f"the data comes over the network ({', '.join(sorted(sockets)[:3])})"
    elif not held:
        why = (
            "no file was seen to be opened by the loader: its data is in memory, made up, or "
            "read by a library that opens files by itself"
        )
    elif any(line["kind"] == "mapped" for line in held.values()):
        why = "the data is mapped into memory from few large files"
    else:
        why = "examples are parts of few large files"
    return list(held), why


def read_files(paths: Sequence[str], readers: int, longest_s: float) -> Reads:
    """Read whole files with ``readers`` threads, in blocks, for at most ``longest_s`` seconds.

    Raises OSError if one cannot be read.
    """
    size = max(1, -(-len(paths) // _BLOCKS))
    reads: Reads = []
    began = time.perf_counter()
    for start in range(0, len(paths), size):
        block = paths[start : start + size]
        at = time.perf_counter()
        _read_block(block, readers)
        reads.append((len(block), time.perf_counter() - at))
        if time.perf_counter() - began > longest_s:
            break
    return reads


def _read_block(paths: Sequence[str], readers: int) -> None:
    """Read all files. Raises OSError; after any error no further file is begun."""
    left, errors = deque(paths), list[OSError]()

    def run() -> None:
        try:
            while not errors:
                _read(left.popleft())
        except IndexError:  # all are read
            pass
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(max(1, readers))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:  # Ctrl-C, too
        left.clear()
    if errors:
        raise errors[0]


def _read(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while os.read(fd, _CHUNK):
            pass
    finally:
        os.close(fd)


def drop_files(paths: Sequence[str]) -> None:
    """Ask for these files to leave the page cache. Raises OSError."""
    for path in paths:
        residency.drop(path)


def resident_fraction(paths: Sequence[str]) -> float | None:
    """Return the fraction of the files' pages that is in the page cache.

    None if the kernel does not tell for one of them. Raises OSError.
    """
    resident = pages = 0
    for path in paths:
        found = residency.resident_pages(path)
        if found is None:
            return None
        resident += found[0]
        pages += found[1]
    return resident / pages if pages else 1.0
