"""``Tail``: a source without its first examples, for a run that continues."""

from __future__ import annotations

from typing import Any

from stoker.basics.fingerprint import Fingerprint
from stoker.schedule.selection import Selection
from stoker.sources.origin import IndexedSource
from stoker.sources.source import Indices, Reader


class Tail(IndexedSource):
    """The examples of a source from example ``first`` on."""

    def __init__(self, source: IndexedSource, first: int) -> None:
        self._source, self._first = source, first

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def kind(self) -> str:
        return self._source.kind

    def __len__(self) -> int:
        return len(self._source) - self._first

    def fetch(self, indices: Indices) -> list[Any]:
        return self._source.fetch([int(index) + self._first for index in indices])

    def path(self, index: int) -> str | None:
        return self._source.path(int(index) + self._first)

    def fingerprint(self, index: int) -> Fingerprint:
        return self._source.fingerprint(int(index) + self._first)

    def reader(self, selection: Selection | None = None) -> Reader | None:
        reader = self._source.reader(selection)
        return None if reader is None else _TailReader(reader, self._first)


class _TailReader:
    """Reads ahead for a ``Tail``."""

    def __init__(self, reader: Reader, first: int) -> None:
        self.requests = reader.requests
        self._reader, self._first = reader, first

    def expect(self, indices: Indices) -> None:
        self._reader.expect([int(index) + self._first for index in indices])

    def fetch(self, indices: Indices) -> list[Any]:
        return self._reader.fetch([int(index) + self._first for index in indices])

    def close(self) -> None:
        self._reader.close()
