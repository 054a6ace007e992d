"""What all sources behind URLs are: read ahead, by readers of their own."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from typing import Any

from stoker.orders import Selection
from stoker.sources.remote.access import Access
from stoker.sources.remote.reader import RemoteFile
from stoker.sources.source import IndexedSource, Indices, Reader


class RemoteSource(IndexedSource):
    """Examples of one remote file system.

    It is ``Files`` for its readers. What is open belongs to these.

    Attributes:
        access: how the file system is reached.
    """

    access: Access

    @abstractmethod
    def locate(self, index: int) -> RemoteFile:
        """Tell what is read for an example; where blocks are read, for a block."""

    @abstractmethod
    def example(self, index: int, data: bytes) -> Any:
        """Make the example, or the block, of what was read."""

    def reader(self, selection: Selection | None = None) -> Reader:
        """Open the file system for reading ahead."""
        return self.access.reader(self)

    def fetch(self, indices: Indices) -> list[Any]:
        """Read examples, through a reader of its own."""
        with contextlib.closing(self.reader()) as reader:
            return reader.fetch(indices)
