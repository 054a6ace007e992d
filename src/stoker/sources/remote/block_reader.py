"""Reading ahead where examples are read by whole blocks: row groups, runs of a shard."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from numpy.typing import NDArray

from stoker.sources.held_blocks import HeldBlocks
from stoker.sources.remote.reader import RemoteFile, RemoteReader
from stoker.sources.source import Indices


class Blocks(Protocol):
    """What a reader of blocks asks of its source, from any thread.

    Attributes:
        held: the blocks that are kept.
    """

    held: HeldBlocks

    def blocks_of(self, indices: Indices) -> NDArray[Any]:
        """Return the numbers of the blocks that examples lie in."""
        ...

    def locate(self, index: int) -> RemoteFile:
        """Tell where a block is."""
        ...

    def examples_of(self, indices: Indices, read: Callable[[int], Any]) -> list[Any]:
        """Return examples; ``read`` returns a block that is not held."""
        ...


class BlockReader:
    """Reads the blocks that examples of one epoch lie in; any thread may call it.

    Each that was expected is read once, since nobody expects one that is held.

    Args:
        blocks: what is read.
        inner: reads blocks by their numbers.
        ahead_bytes: blocks are expected as long as they are no larger than that together.

    Attributes:
        requests: how many examples the engine should tell of before they are fetched.
    """

    def __init__(self, blocks: Blocks, inner: RemoteReader, ahead_bytes: int) -> None:
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
        """Return the examples at these indices. An error concerns the first of them alone."""
        return self._blocks.examples_of(indices, self._read)

    def close(self) -> None:
        """Give up what is under way."""
        self._inner.close()

    def _read(self, block: int) -> Any:
        try:
            return self._inner.fetch([block])[0]
        finally:
            with self._lock:
                self._expected.pop(block, None)
