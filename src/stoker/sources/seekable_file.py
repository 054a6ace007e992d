"""A file that is read by offset, as ``zipfile`` and pyarrow want it."""

from __future__ import annotations

import io


class SeekableFile(io.RawIOBase):
    """Keeps the place in a file of known size; who inherits has ``readinto``.

    Args:
        size: in bytes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at
