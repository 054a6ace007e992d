"""Token files at URLs: a window is a range of its file, read by one request."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from stoker.sources.files import FileVersion
from stoker.sources.patterns import Paths
from stoker.sources.remote.options import RemoteOptions
from stoker.sources.remote.reader import RemoteFile
from stoker.sources.remote.source import ReadsRanges
from stoker.sources.remote.urls import access_to, find_urls, read_parts
from stoker.sources.source import Rows
from stoker.sources.tokens import TokenFile, TokenSource, token_file

# Of a .npy file: more than the header of one with a single axis has, so that one request finds it.
_HEADER_BYTES = 4096


class RemoteTokenSource(ReadsRanges[Any], TokenSource):
    """Windows over token files at URLs, all of one file system; else as ``TokenSource``.

    Args:
        options: how they are listed and read.

    Raises RemoteError, ImportError as that does, and RemoteError for a server that does not send
    parts of files.
    """

    def __init__(
        self,
        files: Paths,
        options: RemoteOptions,
        length: int,
        stride: int | None = None,
        dtype: DTypeLike | None = None,
        separator: int | None = None,
    ) -> None:
        self.access = access_to(files, options)
        super().__init__(files, length, stride, dtype, separator)

    @property
    def rows(self) -> Rows | None:
        """None: single windows are read ahead."""
        return None

    def locate(self, index: int) -> RemoteFile:
        file, token = self._locate(index)
        nbytes = (self._length + 1) * file.dtype.itemsize
        start = file.start + token * file.dtype.itemsize
        return RemoteFile(file.path, nbytes, start, *file.version[:2])

    def example(self, index: int, data: bytes) -> Any:
        return self._window(np.frombuffer(data, self._locate(index)[0].dtype))

    def _find(self, files: Paths, dtype: DTypeLike | None) -> list[TokenFile]:
        urls = find_urls(files, self.access)
        parts = read_parts(urls, self.access, lambda _, size: (0, min(size, _HEADER_BYTES)))
        return [
            token_file(url, FileVersion(size, version), dtype, io.BytesIO(data))
            for url, size, version, data in parts
        ]
