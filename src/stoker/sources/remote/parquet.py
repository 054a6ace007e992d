"""Parquet files at URLs: a row group is a range of its file, read ahead while there is room."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any, Self

from numpy.typing import NDArray

from stoker.schedule.selection import Selection
from stoker.sources.arrow.parquet import ParquetSource, columns_of
from stoker.sources.arrow.table import import_pyarrow
from stoker.sources.files import FileVersion, SeekableFile
from stoker.sources.patterns import Paths
from stoker.sources.remote.options import RemoteOptions
from stoker.sources.remote.reader import BlockReader, RemoteFile
from stoker.sources.remote.source import ReadsRanges
from stoker.sources.remote.urls import access_to, find_urls, read_parts
from stoker.sources.source import Rows

# Nearly all footers are shorter: one request finds the length and the footer.
_FOOTER_BYTES = 1 << 16
# The length of the footer, and the magic number: four bytes each.
_TRAILER_BYTES = 8
# Of the memory for row groups: those that are read ahead are held beside the kept ones.
_AHEAD_SHARE = 0.25


class RemoteParquetSource(ReadsRanges[Any], ParquetSource):
    """The rows of Parquet files at URLs, all of one file system.

    For a row group, one range is read: from its first wanted column to its last.

    Args:
        options: how the files are listed and read.

    Raises as ``ParquetSource`` does, and RemoteError, also for a server that does not send parts of
    files.
    """

    def __init__(
        self,
        paths: Paths,
        options: RemoteOptions,
        columns: Sequence[str] | None = None,
    ) -> None:
        self.access = access_to(paths, options)
        self._metadata: dict[str, Any] = {}
        super().__init__(paths, columns)
        self._spans = [self._span(group) for group in range(len(self._groups))]

    @property
    def rows(self) -> Rows | None:
        """Return None: a reader reads row groups ahead."""
        return None

    def reader(self, selection: Selection | None = None) -> BlockReader:
        """Open the file system for reading ahead."""
        ahead_bytes = int(self.held.limit_bytes * _AHEAD_SHARE)
        return BlockReader(self, self.access.reader(self), ahead_bytes)

    def of_columns(self, names: Sequence[str]) -> Self:
        twin = super().of_columns(names)
        twin._spans = [twin._span(group) for group in range(twin.row_groups)]
        return twin

    def tables(self, groups: Sequence[int]) -> Iterator[Any]:
        """Yield the tables of row groups; as many are read at a time as requests are allowed."""
        with contextlib.closing(self.access.reader(self)) as reader:
            for start in range(0, len(groups), reader.requests):
                some = groups[start : start + reader.requests]
                reader.expect(some)
                for group in some:
                    yield from reader.fetch([group])

    def _metadata_of(self, path: str) -> Any:
        return self._metadata[path]

    def column(self, field: str | int) -> NDArray[Any]:
        """Refuse: a range has all columns of a row group, so one column is not cheap."""
        raise TypeError(
            f"{self.name} cannot read one column of all files: give its numbers as an array"
        )

    def locate(self, index: int) -> RemoteFile:
        """Return a row group's range."""
        start, end = self._spans[index]
        file = self._files[self._groups[index][0]]
        return RemoteFile(file.path, end - start, start, *file.version[:2])

    def example(self, index: int, data: bytes) -> Any:
        """Return the table of a row group."""
        number, within = self._groups[index]
        path, version = self._files[number]
        parquet = import_pyarrow("from_parquet", "pyarrow.parquet")
        part = io.BufferedReader(_Part(data, self._spans[index][0], version.size_bytes))
        try:
            file = parquet.ParquetFile(part, metadata=self._metadata[path])
            table = file.read_row_group(within, columns=self._columns, use_threads=False)
            return self._declared(table, self._columns)
        except (OSError, ValueError) as error:  # pyarrow's are of these kinds
            raise ValueError(
                f"{path}, row group {within}, is damaged, or the file has changed since the "
                f"pipeline was built: {error}"
            ) from error

    def _look(self, paths: Paths) -> Iterator[tuple[str, FileVersion, Any]]:
        access = self.access

        def footer(url: str, size: int) -> tuple[int, int]:
            nbytes = min(size, self._footer_bytes.get(url, _FOOTER_BYTES))
            return size - nbytes, nbytes

        self._footer_bytes: dict[str, int] = {}
        parts = read_parts(find_urls(paths, access, ".parquet"), access, footer)
        for url, size, _, data in parts:
            length = int.from_bytes(data[-_TRAILER_BYTES:-4], "little") + _TRAILER_BYTES
            if len(data) < min(length, size):
                self._footer_bytes[url] = length
        longer = {part.url: part for part in read_parts([*self._footer_bytes], access, footer)}
        for part in parts:
            url, size, version, data = longer.get(part.url, part)
            footer = import_pyarrow("from_parquet").BufferReader(data)
            self._metadata[url] = self._read_metadata(url, footer)
            yield url, FileVersion(size, version), self._metadata[url]

    def _span(self, group: int) -> tuple[int, int]:
        """Return the first and last byte of a row group's wanted columns."""
        number, within = self._groups[group]
        about = self._metadata[self._files[number].path].row_group(within)
        chunks = [about.column(at) for at in range(about.num_columns)]
        wanted = [c for c in chunks if columns_of(c.path_in_schema, self._columns)]
        wanted = wanted or chunks[:1]  # of a file without these columns, only rows count
        starts = [c.dictionary_page_offset or c.data_page_offset for c in wanted]
        ends = [s + c.total_compressed_size for s, c in zip(starts, wanted, strict=True)]
        return min(starts), max(ends)


class _Part(SeekableFile):
    """A file of which only a part is in memory."""

    def __init__(self, data: bytes, start: int, size: int) -> None:
        super().__init__(size)
        self._data = memoryview(data)
        self._start = start

    def readinto(self, buffer: Any) -> int:
        begin = self._at - self._start
        found = self._data[begin : begin + len(buffer)] if begin >= 0 else b""
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)
