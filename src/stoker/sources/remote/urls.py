"""Files at URLs that are read in parts: patterns, sizes and first bytes."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard

from stoker.basics.future import run_on
from stoker.sources.patterns import Paths, expand_braces, is_aside, is_web
from stoker.sources.remote.failures import retry
from stoker.sources.remote.files import FilesSource
from stoker.sources.remote.options import RemoteOptions
from stoker.sources.remote.source import Access
from stoker.sources.remote.storage import Storage


class RemotePart(NamedTuple):
    """A file's size and version from the server, and some of its bytes.

    Attributes:
        version: a digest of its ETag or time, 0 without either.
        data: the requested part.
    """

    url: str
    size_bytes: int
    version: int
    data: bytes


def access_to(given: Paths, options: RemoteOptions) -> Access:
    """Return the access to the file system of these URLs."""
    first = next(iter(given)) if _is_list(given) else given
    return Access(str(first), options)


def find_urls(given: Paths, access: Access, suffix: str = "") -> list[str]:
    """Return the matching files: a list's in its order, a pattern's sorted.

    Args:
        given: URLs or patterns; braces are expanded first.
        access: to their file system.
        suffix: for a folder, find files below it with this suffix (without ``is_aside``); a URL
            without it, and without a query, is a folder if there are such files below it; over
            HTTP it is a file.

    Raises FileNotFoundError where a pattern matches no file; ValueError for local paths among URLs;
    RemoteError.
    """
    texts = [os.fspath(each) for each in given] if _is_list(given) else [str(given)]
    urls: list[str] = []
    for url in itertools.chain.from_iterable(map(expand_braces, texts)):
        if "://" not in url:
            raise ValueError(f"{url} is a local path, among URLs: read them apart")
        is_folder = suffix and not url.endswith(suffix) and "*" not in url and not is_web(url)
        folder = f"{url.rstrip('/')}/"
        try:
            found = FilesSource(f"{folder}**/*{suffix}" if is_folder else url, access.options)
        except FileNotFoundError:
            if not is_folder:
                raise
            found, is_folder = FilesSource(url, access.options), False
        each = [str(found.path(index)) for index in range(len(found))]
        if is_folder:
            each = [
                one
                for one in each
                if not one.startswith(folder) or not is_aside(one[len(folder) :])
            ]
        if not each:
            raise FileNotFoundError(f"no file fits {folder}**/*{suffix}")
        urls += each
    return urls


def read_parts(
    urls: list[str], access: Access, part: Callable[[str, int], tuple[int, int]]
) -> list[RemotePart]:
    """Look up all files, many at a time, and read a part of each that depends on its size.

    Args:
        part: given URL and size, returns the part's first byte, and its number of bytes (or 0).

    Raises FileNotFoundError, RemoteError, also for a server that sends whole files only.
    """
    storage, retry_s = access.open(), access.options.retry_s
    slots = asyncio.Semaphore(access.options.requests)

    async def look(url: str) -> RemotePart:
        path = storage.to_path(url)
        async with slots:
            size, version = await retry(lambda: storage.look_up(path), url, retry_s)
            start, nbytes = part(url, size)
            read = _start_read(storage, path, start, nbytes, size, version)
            data = await retry(read, url, retry_s) if nbytes else b""
        return RemotePart(url, size, version, data)

    async def look_all() -> list[RemotePart]:
        tasks = [asyncio.ensure_future(look(url)) for url in urls]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await storage.close()

    return run_on(storage.loop, look_all)


def _is_list(given: Paths) -> TypeGuard[Sequence[str | os.PathLike[str]]]:
    return not isinstance(given, (str, os.PathLike))


def _start_read(
    storage: Storage, path: str, start: int, nbytes: int, size: int, version: int
) -> Any:
    return lambda: storage.read_part(path, start, nbytes, size, version)
