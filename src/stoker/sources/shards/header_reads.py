"""Reading the headers of a local shard: what follows one with it, where files are small."""

from __future__ import annotations

from stoker.sources.open_files import FileVersion, OpenFile

_AHEAD_BYTES = 1 << 16


class HeaderReads:
    """A ``ShardFile`` that is read from its beginning to its end, by one thread.

    Where one header follows another within so many bytes, that much is read at once: storage that
    seeks slowly gives it for one seek. Headers of large files are read alone.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = OpenFile(path)
        self._size_bytes = self._file.version().size_bytes
        self._held, self._start, self._last = b"", 0, -_AHEAD_BYTES

    def version(self) -> FileVersion:
        return self._file.version()

    def read(self, start: int, nbytes: int) -> bytes:
        within = start - self._start
        if not 0 <= within <= len(self._held) - nbytes:
            near = 0 <= start - self._last < _AHEAD_BYTES
            ahead = min(_AHEAD_BYTES, self._size_bytes - start) if near else 0
            self._start, within = start, 0
            self._held = self._file.read(start, max(nbytes, ahead))
        self._last = start
        return self._held[within : within + nbytes]
