"""Times requests for files behind URLs: for whole files, and for their first bytes.

No trial shard can be written beside such files. But the time of a request for one byte predicts the
time that fewer requests would take.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from stoker.analysis.trials.cold_reads import Reads
from stoker.sources.remote.reader import Files, RemoteFile
from stoker.sources.remote.source import Access

# Blocks for a confidence interval, as with steps (analysis/model/rates.py).
_BLOCKS = 8
# A prime: neighbours in the list come far apart.
_STRIDE = 2_654_435_761


@dataclass(frozen=True)
class RequestTrial:
    """The rates of requests for the same files, whole and one byte of each, many at a time."""

    files: int
    nbytes: int
    whole: Reads
    first_bytes: Reads


def try_requests(files: Files, access: Access, count: int, longest_s: float) -> RequestTrial:
    """Ask for some of ``count`` files, in turns, for about ``longest_s`` seconds.

    Raises RemoteError, also if a server does not send parts of files.
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
            # Other files each time, as a server may cache the files that it sent.
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
    """Return a block of files, spread evenly over the list."""
    return [(number * size + place) * _STRIDE % count for place in range(size)]


class _WholeFiles:
    """Requests for whole files; of their content only the size is used."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def locate(self, index: int) -> RemoteFile:
        return self._files.locate(index)

    def example(self, index: int, data: bytes) -> int:
        return len(data)


class _FirstBytes(_WholeFiles):
    def locate(self, index: int) -> RemoteFile:
        return self._files.locate(index)._replace(size=1, start=0)
