"""Tar shards behind a URL: an example is a range of its shard, read by one request."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.cache.fingerprint import Fingerprint
from stoker.one_shot import run_on
from stoker.sources.open_files import FileVersion
from stoker.sources.patterns import Paths, expand_braces
from stoker.sources.remote.access import Access
from stoker.sources.remote.failures import UnusableError, retry
from stoker.sources.remote.files import FilesSource
from stoker.sources.remote.reader import RemoteFile, RemoteReader
from stoker.sources.remote.storage import UNKNOWN, Storage
from stoker.sources.shards.index import ShardIndex
from stoker.sources.shards.indexing import index_shards
from stoker.sources.shards.shard_source import ShardSource
from stoker.sources.shards.tar_members import HEADER_BYTES, is_header
from stoker.sources.source import Indices

_AHEAD_BYTES = 1 << 16  # of small files one request finds many headers


class RemoteShardSource(ShardSource):
    """Tar shards by URL, all of one file system; else as ``ShardSource``.

    Args:
        shards: URLs or patterns.
        requests, retry_s, storage_options: as in ``RemoteFolderSource``.

    Raises RemoteError, ImportError as that does, and RemoteError for a server that does not send
    parts of files.
    """

    def __init__(
        self,
        shards: Paths,
        fields: Sequence[str] | None,
        *,
        is_strict: bool,
        requests: int = 32,
        retry_s: float = 60.0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        given = [shards] if isinstance(shards, str) else list(shards)  # type: ignore[arg-type]
        self._access = Access(str(given[0]), requests, retry_s, dict(storage_options or {}))
        super().__init__(shards, fields, is_strict=is_strict)

    def reader(self) -> RemoteReader:
        """Open the file system for reading ahead."""
        return self._access.reader(self)

    def fetch(self, indices: Indices) -> list[Any]:
        """Read the examples, through a reader of its own."""
        with contextlib.closing(self.reader()) as reader:
            return reader.fetch(indices)

    def locate(self, index: int) -> RemoteFile:
        """Tell the range from the header of the example's first file to the end of its last."""
        shard, number = self._locate(index)
        places = shard.files_of(number).values()
        start = min(at for at, _, _ in places) - HEADER_BYTES
        end = max(at + nbytes for at, nbytes, _ in places)
        if end > shard.version.size_bytes:
            raise ValueError(f"example {shard.keys[number]!r}: {shard.path} {shard.damage}")
        return RemoteFile(None, shard.path, end - start, start)

    def example(self, index: int, data: bytes) -> dict[str, Any]:
        shard, number = self._locate(index)
        first, size, _ = min(shard.files_of(number).values())
        first -= HEADER_BYTES
        if not is_header(data[:HEADER_BYTES], size):
            raise ValueError(
                f"example {shard.keys[number]!r}: {shard.path} has changed since the pipeline was "
                "built: build it anew"
            )

        def read(start: int, nbytes: int) -> bytes:
            return data[start - first : start - first + nbytes]

        return self._make(shard, number, read)

    def name_of(self, index: int) -> str:
        shard, number = self._locate(index)
        return f"{shard.path}/{shard.keys[number]}"

    def identity(self) -> str | None:
        """Return the fields, if the server told a version of every shard."""
        told = all(shard.version.modified_ns for shard in self._shards)
        return super().identity() if told else None

    def fingerprint(self, index: int) -> Fingerprint:
        """Return the shard's URL with the key, its size and its version, as they were found."""
        shard, number = self._locate(index)
        return Fingerprint(f"{shard.path}/{shard.keys[number]}", *shard.version, number)

    def _index(self, shards: Paths) -> list[ShardIndex]:
        access = self._access
        given = [shards] if isinstance(shards, str) else list(shards)  # type: ignore[arg-type]
        urls: list[str] = []
        for url in (each for text in given for each in expand_braces(str(text))):
            found = FilesSource(
                url,
                requests=access.requests,
                retry_s=access.retry_s,
                storage_options=access.options,
            )
            urls += [str(found.path(index)) for index in range(len(found))]
        storage = access.open()
        ended: list[bool] = []
        try:
            return index_shards(
                urls, lambda url: _RemoteShard(url, storage, access.retry_s, ended), access.requests
            )
        finally:
            ended.append(True)  # where one has failed, others may be under way
            run_on(storage.loop, storage.close)


class _RemoteShard:
    """A file behind a URL, read by offset, by one thread, until ``ended`` says something."""

    def __init__(self, url: str, storage: Storage, retry_s: float, ended: list[bool]) -> None:
        self.path = url
        self._storage = storage
        self._retry_s = retry_s
        self._ended = ended
        self._at = storage.to_path(url)
        self._start, self._held = 0, b""
        size, version = self._run(lambda: storage.look_up(self._at))
        if size == UNKNOWN:
            raise UnusableError(f"{url}: the server does not tell its size")
        self._version = FileVersion(size, version)

    def version(self) -> FileVersion:
        return self._version

    def read(self, start: int, nbytes: int) -> bytes:
        """Return bytes, and keep some of those behind them."""
        within = start - self._start
        if not 0 <= within <= len(self._held) - nbytes:
            wanted = min(max(nbytes, _AHEAD_BYTES), self._version.size_bytes - start)
            self._start, within = start, 0
            self._held = self._run(lambda: self._storage.read_part(self._at, start, wanted))
        return self._held[within : within + nbytes]

    def _run(self, attempt: Any) -> Any:
        self._check()
        reading = functools.partial(retry, attempt, self.path, self._retry_s, self._check)
        return run_on(self._storage.loop, reading)

    def _check(self) -> None:
        if self._ended:
            raise RuntimeError("another shard could not be read")
