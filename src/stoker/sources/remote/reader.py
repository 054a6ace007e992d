"""Reading from a remote file system: single parts now, and files or blocks ahead of their use.

Blocks, row groups or runs of a shard, are kept in memory while there is room; local ones, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.basics.future import OneShot
from stoker.basics.process import OwningProcess
from stoker.basics.signals import again_soon, defer_interrupts
from stoker.sources.remote.failures import retry
from stoker.sources.remote.storage import RemoteOptions, Storage
from stoker.sources.source import Indices

# As long as a user waits without a word for connections that are being closed.
_GRACE_S = 2.0
_CLOSED = "the reader is closed"


class RemoteFile(NamedTuple):
    """A file's address and size."""

    url: str
    """Its URL, for people."""
    size: int
    """In bytes, or ``UNKNOWN``."""
    start: int | None = None
    """The first byte of the part to read, of this size; None: the whole file."""
    whole_bytes: int = -1
    """The whole file's size when it was listed, or ``UNKNOWN``."""
    version: int = 0
    """The file's version when it was listed, as in ``Entries``; 0: unknown."""
    path: str | None = None
    """Its path in the file system; None: derived from the URL."""


class Files(Protocol):
    """A reader's view of its source; called from any thread."""

    def locate(self, index: int) -> RemoteFile:
        """Return a file's address."""
        ...

    def example(self, index: int, data: bytes) -> Any:
        """Make an example from its bytes."""
        ...


class _Read(OneShot[bytes]):
    """One requested file. Only the loop's thread completes it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index


class RemoteReader:
    """Reads the files of a source on the event loop of its storage; any thread may call it.

    At most ``requests`` reads run at a time; ``retries`` counts requests after passing failures.
    """

    def __init__(self, files: Files, storage: Storage, options: RemoteOptions) -> None:
        self.requests = options.requests
        self._timeout_s = options.timeout_s
        self.retries = 0
        self._files = files
        self._storage = storage
        self._owner = OwningProcess()
        # Finalisers may close while this very thread is in here.
        self._lock = threading.RLock()
        self._ahead: dict[int, deque[_Read]] = {}
        self._queue: deque[_Read] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: OneShot[None] | None = None
        self._loop = storage.loop

    def expect(self, indices: Indices) -> None:
        """Start to read these files, after earlier expected ones; each is for one ``fetch``."""
        with self._lock:
            if self._closing is not None:
                return
            reads = [_Read(index) for index in _to_ints(indices)]
            self._put_back(reads)
            self._queue.extend(reads)
        self._wake()

    def fetch(self, indices: Indices) -> list[Any]:
        """Return the examples at these indices; unexpected ones are read before all others.

        When one of several fails, all of them stay expected, so that fetching them one by one finds
        the failing one and reads nothing twice.

        Raises FileNotFoundError, RemoteError; RuntimeError once closed.
        """
        with self._lock:
            if self._closing is not None:
                raise RuntimeError(_CLOSED)
            reads, new = [], []
            for index in _to_ints(indices):
                ahead = self._ahead.get(index)
                if ahead is None:
                    new.append(_Read(index))
                reads.append(ahead.popleft() if ahead else new[-1])
                if not ahead:
                    self._ahead.pop(index, None)
            self._queue.extendleft(reversed(new))
        if new:
            self._wake()
        try:
            return [self._files.example(read.index, read.wait()) for read in reads]
        except BaseException as error:
            if len(reads) > 1 or not isinstance(error, Exception):
                with self._lock:
                    self._put_back(reads, first=True)
            raise

    def close(self) -> None:
        """Cancel all reads and close connections; waiting calls get a RuntimeError.

        Any thread may call it, also finalizers, and repeatedly. It never waits for a server.
        """
        with defer_interrupts(again_soon):
            with self._lock:
                closing = self._closing
                first = closing is None
                if closing is None:
                    closing = self._closing = OneShot()
                    self._ahead.clear()
            if not self._owner.is_current or sys.is_finalizing() or not self._loop.is_running():
                return  # the loop's thread is not there: nothing of this is under way here
            if first:
                self._loop.call_soon_threadsafe(self._begin_to_close)
        if not self._in_loop():
            with contextlib.suppress(TimeoutError):
                closing.wait(_GRACE_S)

    def _in_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def _put_back(self, reads: list[_Read], *, first: bool = False) -> None:
        for read in reversed(reads) if first else reads:
            ahead = self._ahead.setdefault(read.index, deque())
            (ahead.appendleft if first else ahead.append)(read)

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: close() says so
            self._loop.call_soon_threadsafe(self._start_tasks)

    # What follows runs in the loop's thread.

    def _start_tasks(self) -> None:
        free = self.requests - len(self._tasks)
        for _ in range(min(free, len(self._queue))):
            task = self._loop.create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._end_task)

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._start_tasks()  # what was queued since it looked last

    async def _work(self) -> None:
        while self._queue:
            read = self._queue.popleft()
            try:
                read.give(await self._read(read.index))
            except Exception as error:
                read.give(error=error)
            except BaseException:
                read.give(error=RuntimeError(_CLOSED))
                raise

    async def _read(self, index: int) -> bytes:
        url, size, start, whole_bytes, version, path = self._files.locate(index)
        found = self._storage.to_path(url) if path is None else path

        def attempt() -> Awaitable[bytes]:
            if start is None:
                return self._storage.read(found, size)
            return self._storage.read_part(found, start, size, whole_bytes, version)

        return await retry(attempt, url, self._timeout_s, self._count_retry)

    def _count_retry(self) -> None:
        if self._closing is not None:  # a cancellation that came too late for an attempt
            raise asyncio.CancelledError
        self.retries += 1

    def _begin_to_close(self) -> None:
        self._last = self._loop.create_task(self._close())

    async def _close(self) -> None:
        assert self._closing is not None
        try:
            while self._queue:
                self._queue.popleft().give(error=RuntimeError(_CLOSED))
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_GRACE_S)
            await self._storage.close()
        finally:
            self._closing.give()


def _to_ints(indices: Indices) -> list[int]:
    plain: list[int] = np.asarray(indices, np.int64).tolist()
    return plain


class HeldBlocks:
    """The most recently used blocks, by key; one thread reads each, and others wait for it.

    Those that are being read come on top of ``limit_bytes``. Pickles as an empty one.
    ``rows_read`` counts the examples that were read in this process. A block, such as a table, has
    ``num_rows`` examples and ``nbytes``.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._begin()

    def __reduce__(self) -> tuple[object, ...]:
        return HeldBlocks, (self.limit_bytes,)

    def __contains__(self, key: Hashable) -> bool:
        """True if a block is held, or is being read."""
        return key in self._held

    def get(self, key: Hashable, read: Callable[[], Any]) -> Any:
        """Return a block that is held, or what ``read`` returns; raises what that raises."""
        if not self._owner.is_current:  # a forked child: its parent's threads give nothing here
            self._begin()
        mine: OneShot[Any] | None = None
        try:
            with self._lock:
                found = self._held.pop(key, None)
                if found is None:
                    found = mine = OneShot()
                self._held[key] = found  # the last one is what was used last
            if mine is None:
                return found.wait()
            block = read()
        except BaseException as error:
            if mine is None:
                raise
            with self._lock:
                if self._held.get(key) is mine:
                    del self._held[key]
            passed = error if isinstance(error, Exception) else OSError("reading was interrupted")
            mine.give(error=passed)
            raise
        mine.give(block)
        with self._lock:
            self.rows_read += block.num_rows
            self._sizes[mine] = block.nbytes
            self._nbytes += block.nbytes
            for other, held in list(self._held.items()):  # the one that was used longest ago first
                if self._nbytes <= self.limit_bytes:
                    break
                if held is not mine and held in self._sizes:
                    del self._held[other]
                    self._nbytes -= self._sizes.pop(held)
        return block

    def _begin(self) -> None:
        self._owner = OwningProcess()
        self._lock = threading.Lock()
        self._held: dict[Hashable, OneShot[Any]] = {}
        self._sizes: dict[OneShot[Any], int] = {}  # of those that have been read
        self._nbytes = 0
        self.rows_read = 0


class BlockFiles(Protocol):
    """A block reader's view of its source; called from any thread. ``held``: the kept blocks."""

    held: HeldBlocks

    def blocks_of(self, indices: Indices) -> NDArray[Any]:
        """Return the numbers of the blocks that contain examples."""
        ...

    def locate(self, index: int) -> RemoteFile:
        """Return a block's address."""
        ...

    def examples_of(self, indices: Indices, read: Callable[[int], Any]) -> list[Any]:
        """Return examples; ``read`` returns a block that is not held."""
        ...


class BlockReader:
    """Reads the blocks that contain an epoch's examples, by ``inner``; any thread may call it.

    Each expected block is read once, since a held block is never expected. No more than
    ``ahead_bytes`` are expected together.
    """

    def __init__(self, blocks: BlockFiles, inner: RemoteReader, ahead_bytes: int) -> None:
        self.requests = inner.requests
        self._blocks = blocks
        self._inner = inner
        self._ahead_bytes = ahead_bytes
        self._lock = threading.Lock()
        self._expected: dict[int, int] = {}  # the bytes of each

    def expect(self, indices: Indices) -> None:
        """Begin to read the blocks of these examples; returns at once."""
        for block in dict.fromkeys(self._blocks.blocks_of(indices).tolist()):
            nbytes = self._blocks.locate(block).size
            with self._lock:
                room = self._ahead_bytes - sum(self._expected.values())
                if block in self._expected or block in self._blocks.held or nbytes > room:
                    continue
                self._expected[block] = nbytes
            self._inner.expect([block])

    def fetch(self, indices: Indices) -> list[Any]:
        return self._blocks.examples_of(indices, self._read)

    def close(self) -> None:
        self._inner.close()

    def _read(self, block: int) -> Any:
        try:
            return self._inner.fetch([block])[0]
        finally:
            with self._lock:
                self._expected.pop(block, None)
