"""Remote file systems, opened: single attempts to read or to list. (HTTP: web.py.)"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stoker.basics.future import start_thread
from stoker.basics.validate import is_whole_number
from stoker.sources.files import read_file
from stoker.sources.remote.failures import PassingError, UnusableError

STALL_S = 10.0
"""The longest pause between two bytes. Requests of object stores take up to seconds under load, not
ten. Chosen, not measured."""
# If bytes cannot be seen coming, a slower read counts as stalled: it could not feed a training job.
_SLOWEST_BYTES_PER_S = 100_000
# Assumed of a file of unknown size, by that rule: five minutes of reading.
_LARGE_BYTES = 30_000_000
# No size is negative.
UNKNOWN = -1
SIZE_UNTOLD = "the server does not state its size"
_TAGS = ("ETag", "etag", "md5Hash")  # of the content
_TIMES = ("LastModified", "last_modified", "updated", "created")  # that servers set themselves
_WEAK = ("mtime", "ino")  # writers may set this time back: alone it says nothing


@dataclass(frozen=True)
class RemoteOptions:
    """Settings for reading files at URLs, checked when made.

    Attributes:
        requests: the largest number of files read at a time.
        timeout_s: for how many seconds after its first failure a file or a listing is requested
            again.
        storage_options: the arguments of fsspec's file system; a copy of the user's.

    Raises TypeError or ValueError for invalid values.
    """

    requests: int = 32
    timeout_s: float = 60.0
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not is_whole_number(self.requests):
            raise TypeError(f"requests is a whole number, not {self.requests!r}")
        if self.requests < 1:
            raise ValueError(f"requests is at least 1, not {self.requests}")
        if not self.timeout_s >= 0:
            raise ValueError(f"timeout_s is a number of seconds, not {self.timeout_s!r}")
        # A user may change the mapping later, and file systems are opened again and again.
        object.__setattr__(self, "storage_options", dict(self.storage_options))


class Entries(NamedTuple):
    """The files below a folder."""

    folder: str
    """The folder, as its file system has it."""
    names: list[str]
    sizes: list[int]
    """In bytes; ``UNKNOWN`` where not listed."""
    versions: list[int]
    """Digests of ETags, or of times that no writer sets; 0 without either."""


class Storage(ABC):
    """One file system. Its coroutines run on ``loop``."""

    def __init__(self, fs: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._fs = fs
        self.loop = loop

    @abstractmethod
    async def read(self, path: str, size: int) -> bytes:
        """Read a file, whose size is known or ``UNKNOWN``."""

    @abstractmethod
    async def read_part(
        self, path: str, start: int, nbytes: int, whole_bytes: int, version: int = 0
    ) -> bytes:
        """Read so many bytes, at least one, of a file that had ``whole_bytes`` (or ``UNKNOWN``).

        Raises UnusableError where the server sends only whole files, or the answer has another size
        or another ``version`` (0: unknown).
        """

    @abstractmethod
    async def look_up(self, path: str) -> tuple[int, int]:
        """Return the size of a file and its version, as in ``Entries``. Raises UnusableError."""

    @abstractmethod
    def to_path(self, url: str) -> str:
        """Return the path of a URL."""

    @abstractmethod
    async def close(self) -> None:
        """Close this object's own resources."""


def import_extra(module: str, url: str) -> Any:
    """Import a package of the extra, or raise ImportError with what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{url} needs {package}: pip install 'fsspec[http,s3]'") from error


class FileStorage(Storage):
    """Any file system of fsspec; those without coroutines are asked in threads."""

    def __init__(self, fs: Any, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(fs, loop)
        base = importlib.import_module("fsspec.asyn" if fs.async_impl else "fsspec.spec")
        kind = base.AsyncFileSystem if fs.async_impl else base.AbstractFileSystem
        name = "_find" if fs.async_impl else "find"
        self._finds = getattr(type(fs), name) is not getattr(kind, name)
        protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
        self._local = "file" in protocols

    async def read(self, path: str, size: int) -> bytes:
        if self._local:  # where there are pipes and devices, too
            return await self._read_in_time(_run_in_thread(lambda: read_file(path)), size)
        return await self._read_in_time(self._call("cat_file", path), size)

    async def read_part(
        self, path: str, start: int, nbytes: int, whole_bytes: int, version: int = 0
    ) -> bytes:
        """Read a part of a file, and compare its length; the whole file's is not available."""
        part = self._call("cat_file", path, start=start, end=start + nbytes)
        return await self._read_in_time(part, nbytes)

    async def look_up(self, path: str) -> tuple[int, int]:
        self._fs.invalidate_cache()
        sizes, versions = _read_infos([await self._call("info", path)])
        if sizes[0] == UNKNOWN:
            raise UnusableError(SIZE_UNTOLD)
        return sizes[0], versions[0]

    async def find(self, path: str, levels: int | None = None) -> Entries:
        """List the files below a folder, at least those down to so many levels."""
        self._fs.invalidate_cache()
        if self._finds and levels != 1:
            found = list((await self._call("find", path, detail=True)).values())
        else:  # the general one would leave out sub-folders that fail
            found, folders = [], [(path, 1)]
            for folder, level in folders:
                for info in await self._call("ls", folder, detail=True):
                    if info["type"] != "directory":
                        found.append(info)
                    elif level != levels and info["name"].rstrip("/") != folder:
                        folders.append((info["name"].rstrip("/"), level + 1))
        self._fs.invalidate_cache()  # a large listing is kept once, and not there
        start = len(path) + 1
        found = [info for info in found if info["name"][start:]]  # not the folder itself
        return Entries(path, [info["name"][start:] for info in found], *_read_infos(found))

    def to_path(self, url: str) -> str:
        stripped: str = self._fs._strip_protocol(url)
        return stripped

    async def close(self) -> None:
        """Close nothing: fsspec keeps one such file system for all."""

    async def _read_in_time(self, reading: Awaitable[Any], size: int) -> bytes:
        allowed_s = STALL_S + (_LARGE_BYTES if size == UNKNOWN else size) / _SLOWEST_BYTES_PER_S
        try:
            async with asyncio.timeout(allowed_s) as limit:
                data: bytes = await reading
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise PassingError(f"not read in {allowed_s:.3g} s") from error
        if len(data) != size != UNKNOWN:
            raise PassingError(f"{len(data)} bytes instead of the {size} listed")
        return data

    async def _call(self, method: str, *args: Any, **options: Any) -> Any:
        if self._fs.async_impl:
            return await getattr(self._fs, f"_{method}")(*args, **options)
        return await _run_in_thread(lambda: getattr(self._fs, method)(*args, **options))


def digest_of(values: Sequence[str]) -> int:
    """Return a number for what a server tells of a file's content; 0 where it tells nothing."""
    # 56 bits fit into an int64.
    digest = hashlib.blake2b(" ".join(values).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little") if values else 0


def _read_infos(infos: Iterable[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
    sizes, versions = [], []
    for info in infos:
        size = info.get("size")
        sizes.append(UNKNOWN if size is None else int(size))
        values = _find_values(info, _TAGS)[:1] or _find_values(info, _TIMES)
        if values:
            values += _find_values(info, _WEAK)
        versions.append(digest_of(values))
    return sizes, versions


def _find_values(info: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    return [str(info[name]) for name in names if info.get(name)]


async def _run_in_thread(function: Callable[[], Any]) -> Any:
    """Run in a daemon thread: a call that hangs for ever must not delay the interpreter's end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def finish(complete: Callable[[Any], None], outcome: Any) -> None:
        if not future.cancelled():
            complete(outcome)

    def run() -> None:
        try:
            ended: tuple[Callable[[Any], None], Any] = future.set_result, function()
        except BaseException as error:
            ended = future.set_exception, error
        loop.call_soon_threadsafe(finish, *ended)

    start_thread("remote-call", run)
    return await future
