"""Listing remote folders: many requests at a time, kept compactly enough for millions of files."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.sources.patterns import Names
from stoker.sources.remote.failures import retry
from stoker.sources.remote.options import RemoteOptions
from stoker.sources.remote.storage import Entries, Storage

T = TypeVar("T")

# Folders within folders: links that lead in a circle would be followed for ever.
_DEEPEST = 64
_HIDDEN = re.compile(r"(?:^|/)\.")


class Listing(NamedTuple):
    """Files, in order."""

    names: Names
    """Below the root; quoted where the storage quotes."""
    sizes: NDArray[np.int64]
    versions: NDArray[np.int64]


class Lister:
    """Lists folders of one storage, many at a time; its coroutines run on its loop.

    ``url`` is its root, for messages.
    """

    def __init__(self, storage: Storage, url: str, options: RemoteOptions) -> None:
        self._storage = storage
        self._url = url.rstrip("/")
        self._retry_s = options.retry_s
        self._slots = asyncio.Semaphore(options.requests)

    async def list_classes(self, suffixes: Sequence[str]) -> tuple[list[str], list[Listing]]:
        """List files with these suffixes by class folder; both in a sorted local folder's order.

        Raises ValueError if there are no class folders; FileNotFoundError, RemoteError.
        """
        storage = self._storage
        top = await self._list_folder("")
        folders = sorted((storage.unquote(name), name) for name in top.folders)
        folders = [(plain, name) for plain, name in folders if not plain.startswith(".")]
        if not folders:
            raise ValueError(
                f"{self._url} has no sub-folders; from_folder expects one a class, such as "
                "train/cat/0001.jpg (over HTTP, on an index page that links to them)"
            )
        found = await _gather(self._list_class(name, suffixes) for _, name in folders)
        return [plain for plain, _ in folders], found

    async def _list_class(self, folder: str, suffixes: Sequence[str]) -> Listing:
        any_of = "|".join(map(re.escape, suffixes))
        # Nothing hidden on the way, and such a suffix; as FolderSource has it.
        meant = re.compile(rf"(?:(?!\.)[^/]+/)*(?!\.)[^/]+(?:{any_of})", re.DOTALL | re.IGNORECASE)
        entries = await self._list_below(folder, None)
        return self._select(entries, meant.fullmatch, f"{folder}/")

    async def list_matching(self, pattern: str) -> Listing:
        """List files below the root that match a pattern; hidden ones only if it names them."""
        from fsspec.utils import glob_translate

        pattern = self._storage.unquote(pattern)
        fits = re.compile(glob_translate(pattern)).fullmatch
        hidden = _HIDDEN.search(pattern)
        entries = await self._list_below("", None if "**" in pattern else pattern.count("/"))
        return self._select(
            entries, lambda name: (hidden or not _HIDDEN.search(name)) and fits(name)
        )

    def _select(self, found: Entries, fits: Callable[[str], Any], prefix: str = "") -> Listing:
        plain = [self._storage.unquote(name) for name in found.files]
        chosen = [i for i, name in enumerate(plain) if fits(name)]
        chosen.sort(key=plain.__getitem__)
        names = Names([prefix + found.files[i] for i in chosen])
        at = np.asarray(chosen, np.int64)
        return Listing(
            names, np.array(found.sizes, np.int64)[at], np.array(found.versions, np.int64)[at]
        )

    async def _list_below(self, folder: str, levels: int | None, depth: int = 0) -> Entries:
        """List all files below a folder, or down to so many levels."""
        if depth > _DEEPEST:
            raise ValueError(f"{self._url_of(folder)}: too deep; does a link lead into itself?")
        if levels is None:
            all_at_once = await self._ask(self._storage.list_below, folder)
            if all_at_once is not None:
                return all_at_once
        here = await self._list_folder(folder)
        if levels == 0:
            return here
        within = [name for name in here.folders if not self._storage.unquote(name).startswith(".")]
        rest = None if levels is None else levels - 1
        start = f"{folder}/" if folder else ""
        each = await _gather(self._list_below(start + name, rest, depth + 1) for name in within)
        for name, entries in zip(within, each, strict=True):
            here.files.extend(f"{name}/{file}" for file in entries.files)
            here.sizes.extend(entries.sizes)
            here.versions.extend(entries.versions)
        return here

    async def _list_folder(self, folder: str) -> Entries:
        return await self._ask(self._storage.list_folder, folder)

    async def _ask(self, ask: Callable[[str], Awaitable[T]], folder: str) -> T:
        path = f"{self._storage.root}/{folder}" if folder else self._storage.root

        async def attempt() -> T:
            async with self._slots:
                return await ask(path)

        return await retry(attempt, self._url_of(folder), self._retry_s)

    def _url_of(self, folder: str) -> str:
        return f"{self._url}/{folder}" if folder else self._url


async def _gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all; when one fails, cancel and await the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
