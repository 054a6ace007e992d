"""The inventory of this user's stores: opens, finds, sweeps, removes and shows them."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import NamedTuple

from stoker.basics.resources import format_bytes
from stoker.cache import location, store_dir
from stoker.cache.counters import (
    DAMAGED,
    ENDED,
    FULL,
    ITEMS,
    USED_BYTES,
    Counters,
    read_head,
)
from stoker.cache.folder import CacheFolder
from stoker.cache.location import Limit
from stoker.cache.store import COUNTERS
from stoker.cache.store_dir import StoreDir, StoreMeta
from stoker.errors import CacheError

_STATES = {
    FULL: "full",
    ENDED: "writing failed",
    DAMAGED: "damaged",
}


class StoreSummary(NamedTuple):
    """A store's description, and the head of its counters."""

    about: StoreMeta
    head: list[int]


def find_stores() -> list[str]:
    """Return the folders of this user's stores, stores in memory first."""
    folders = [path for path in _in_memory() if is_store(path)]
    for path in location.list_stores():
        if is_store(path):
            folders.append(path)
        else:  # removed without `stoker cache remove`
            location.unlist_store(path)
    return folders


def is_store(path: str) -> bool:
    """True if a folder is a store of this user."""
    with store_dir.open_existing(path) as folder:
        return folder is not None


def is_in_use(path: str) -> bool:
    with store_dir.open_existing(path) as folder:
        return folder is not None and store_dir.is_in_use(folder)


def read_summary(path: str) -> StoreSummary | None:
    """Return a store's summary; None if there is no store, or if it cannot be read."""
    with store_dir.open_existing(path) as folder:
        if folder is not None and (about := StoreMeta.read(folder)) is not None:
            with contextlib.suppress(OSError, ValueError):
                content = folder.read_file(COUNTERS, Counters.SIZE_BYTES + 1)
                return StoreSummary(about, read_head(content))
    return None


def sweep(*paths: str) -> list[str]:
    """Remove the leftovers of killed processes: temporary stores, and incomplete ones.

    It also looks in the parent folders of ``paths``. Return the paths of removed temporary stores.
    """
    swept = []
    for path in find_stores():
        with contextlib.suppress(CacheError, OSError), store_dir.open_existing(path) as folder:
            about = folder and StoreMeta.read(folder)
            if folder and about and about.temporary and store_dir.remove_unused(folder):
                swept.append(path)
    parents = {os.path.dirname(path) for path in paths} - {location.memory_folder()}
    parents |= {os.path.dirname(path) for path in _in_memory()}
    for parent in parents:
        with contextlib.suppress(OSError):
            store_dir.sweep(parent)
    return swept


def join_or_make(
    path: str, limit: Limit, *, describes: str, temporary: bool
) -> tuple[StoreDir | None, bool]:
    """Join a store, or make it; return it, and whether it is new. None: there is no room for it.

    Args:
        path: the store's folder.
        limit: the size of a new store.
        describes, temporary: properties of a new store.

    Raises CacheError if no store can be made.
    """
    in_memory = location.is_in_memory(path)
    if in_memory:
        location.make_memory_folder()
    sweep(path)
    join = functools.partial(store_dir.join, path, describes=describes, temporary=temporary)
    try:
        found = join(limit_bytes=None)
        if found is not None:
            return found, False
        limit_bytes = location.resolve_limit(limit, path, in_memory=in_memory)
        return (join(limit_bytes=limit_bytes), True) if limit_bytes else (None, False)
    except OSError as error:
        raise location.cannot_make(path, error, in_memory=in_memory) from error


def remove(path: str) -> None:
    """Remove a store. Raises CacheError if it is in use, or if it is not a store."""
    with store_dir.open_existing(path) as folder:
        if folder is None:
            raise CacheError(f"{path} is not a cache")
        if not store_dir.remove_unused(folder):
            raise CacheError(f"the cache in {path} is in use: end the jobs that use it first")


def resolve_name(name: str) -> str:
    """Return a store's folder by its name in the list or by its path. Raises CacheError."""
    for folder in find_stores():
        if name in (folder, _name(folder)):
            return folder
    folder = os.path.realpath(name)
    if is_store(folder):
        return folder
    raise CacheError(f"there is no cache {name!r}: run stoker cache list to see all of them")


def print_table() -> None:
    """Remove the leftovers of killed processes, and print all stores."""
    from rich.console import Console
    from rich.table import Table

    for folder in sweep(*find_stores()):
        print(f"removed {folder}: its users were killed")
    try:
        location.check_memory_folder()
    except CacheError as error:
        print(f"caches in memory are not possible: {error}", file=sys.stderr)
    folders = find_stores()
    if not folders:
        print("no caches, neither in memory nor at a path that this user gave")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("name", "holds", "items", "used", "of", "state", "users", "stays"):
        table.add_column(name, overflow="fold", no_wrap=name not in ("name", "holds"))
    for folder in folders:
        summary = read_summary(folder)
        if summary is None:
            table.add_row(_name(folder), "its description cannot be read", "", "", "", "", "", "")
            continue
        about, head = summary
        state = [text for position, text in _STATES.items() if head[position]]
        table.add_row(
            _name(folder),
            about.describes,
            f"{head[ITEMS]:,}",
            format_bytes(head[USED_BYTES]),
            format_bytes(about.limit_bytes),
            ", ".join(state) or "examples enter",
            "yes" if is_in_use(folder) else "none",
            "while used" if about.temporary else "until removed",
        )
    console = Console()
    (console if console.is_terminal else Console(width=1000)).print(table)


def _in_memory() -> list[str]:
    """Return the paths in the folder of stores in memory; none if others may access it."""
    with contextlib.suppress(OSError), CacheFolder(location.memory_folder()) as memory:
        if memory.is_own(private=True):
            return [os.path.join(memory.path, name) for name in sorted(memory.list_names())]
    return []


def _name(folder: str) -> str:
    return os.path.basename(folder) if location.is_in_memory(folder) else folder
