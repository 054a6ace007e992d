"""What a request takes, where examples are files behind URLs: whole files, and their first bytes.

Nothing can be written beside such files. But what a request takes apart from the bytes tells what
fewer of them would.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from stoker.analysis.trials.cold_reads import Reads
from stoker.sources.remote.reader import Files, RemoteFile
from stoker.sources.remote.source import Access

# Blocks that an interval is made of, as of steps (analysis/model/rates.py).
_BLOCKS = 8
# A prime: neighbours in the list come far apart.
_STRIDE = 2_654_435_761


@dataclass(frozen=True)
class RequestTrial:
    """The same files, asked for wholly and for a byte of each, many at a time."""

    files: int
    nbytes: int
    whole: Reads
    first_bytes: Reads


def try_requests(files: Files, access: Access, count: int, longest_s: float) -> RequestTrial:
    """Ask for some of ``count`` files, in turns, for about ``longest_s`` seconds.

    Raises RemoteError, for a server that does not send parts of files, too.
    """
    whole: Reads = []
    first_bytes: Reads = []
    nbytes = asked = 0
    until = time.monotonic() + longest_s
    with (
        contextlib.closing(access.reader(_WholeFiles(files))) as reads_all,
        contextlib.closing(access.reader(_FirstBytes(files))) as reads_first,
    ):
        block = list(range(min(count, 2 * access.options.requests)))
        for reader in (reads_all, reads_first):  # connections are made
            reader.fetch(block)
        for number in range(_BLOCKS):
            # Others each time, for a server may remember what it sent.
            these, those = (_choose(2 * number + more, len(block), count) for more in (0, 1))
            began = time.perf_counter()
            nbytes += sum(reads_all.fetch(these))
            between = time.perf_counter()
            reads_first.fetch(those)
            first_bytes.append((len(block), time.perf_counter() - between))
            whole.append((len(block), between - began))
            asked += len(block)
            if time.monotonic() > until:
                break
    return RequestTrial(asked, nbytes, whole, first_bytes)


def _choose(number: int, size: int, count: int) -> list[int]:
    """Return a block of files from all over."""
    return [(number * size + place) * _STRIDE % count for place in range(size)]


class _WholeFiles:
    """The files, of which the sizes alone are wanted."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def locate(self, index: int) -> RemoteFile:
        return self._files.locate(index)

    def example(self, index: int, data: bytes) -> int:
        return len(data)


class _FirstBytes(_WholeFiles):
    def locate(self, index: int) -> RemoteFile:
        return self._files.locate(index)._replace(size=1, start=0)
