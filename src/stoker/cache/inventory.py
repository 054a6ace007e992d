"""Inventory of this user's stores: found, swept, removed, and shown by ``stoker cache``."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from stoker.basics.resources import format_bytes
from stoker.cache import location, store_dir
from stoker.cache.counters import (
    DAMAGED,
    ENDED,
    FULL,
    ITEMS,
    MAP_VERSION,
    MEMBERS,
    MEMBERS_ALIVE,
    PAYLOAD_BYTES,
    USED_BYTES,
    Counters,
    read_counts,
)
from stoker.cache.folder import CacheFolder
from stoker.cache.store import COUNTERS
from stoker.cache.store_dir import About
from stoker.errors import CacheError
from stoker.stats import CacheCounts

_STATES = {FULL: "full: nothing enters", ENDED: "ended: writing failed", DAMAGED: "damaged"}


class StoreSummary(NamedTuple):
    """A store's description and counters."""

    about: About
    head: list[int]
    """Of its counters."""
    counts: CacheCounts
    """Of everybody."""


def find_stores() -> list[str]:
    """Return the folders of this user's known stores, stores in memory first."""
    found = []
    with _opened_memory() as memory:
        for name in sorted(memory.list_names()) if memory is not None else ():
            with store_dir.opened(name, memory) as folder:
                if folder is not None:
                    found.append(folder.path)
    for path in location.remembered():
        if is_store(path):
            found.append(path)
        else:  # it was removed by other means
            location.forget(path)
    return found


def is_store(path: str) -> bool:
    """True if a folder is a store of this user."""
    with store_dir.opened(path) as folder:
        return folder is not None


def is_in_use(path: str) -> bool:
    with store_dir.opened(path) as folder:
        return folder is not None and store_dir.is_in_use(folder)


def read_summary(path: str) -> StoreSummary | None:
    """Return a store's summary; None where there is none, or it cannot be read."""
    with store_dir.opened(path) as folder:
        if folder is not None and (about := About.read(folder)) is not None:
            with contextlib.suppress(OSError, ValueError):
                content = folder.read_file(COUNTERS, Counters.SIZE_BYTES + 1)
                return StoreSummary(about, *read_counts(content))
    return None


def sweep(*paths: str) -> list[str]:
    """Remove leftovers of killed processes: temporary stores, and half made or half removed ones.

    Also looks beside the stores at ``paths``. Returns the paths of the temporary stores.
    """
    swept = []
    for path in find_stores():
        with contextlib.suppress(CacheError, OSError), store_dir.opened(path) as folder:
            about = folder and About.read(folder)
            if folder and about and about.temporary and store_dir.remove_unused(folder):
                swept.append(path)
    with _opened_memory() as memory:
        if memory is not None:
            store_dir.sweep(memory)
    for parent in {os.path.dirname(path) for path in paths} - {location.memory_folder()}:
        with contextlib.suppress(OSError), CacheFolder(parent) as folder:
            store_dir.sweep(folder)
    return swept


def remove(path: str) -> None:
    """Remove an unused store. Raises CacheError when it is in use, or not a store."""
    with store_dir.opened(path) as folder:
        if folder is None:
            raise CacheError(f"{path} is no cache")
        if not store_dir.remove_unused(folder):
            raise CacheError(f"the cache in {path} is in use")


def resolve_name(name: str) -> str:
    """Return a store's folder, by its name in the list or a path. Raises CacheError for neither."""
    for folder in find_stores():
        if name in (folder, _name(folder)):
            return folder
    folder = os.path.realpath(name)
    if is_store(folder):
        return folder
    raise CacheError(f"there is no cache {name!r}: see stoker cache list")


def print_table() -> None:
    """Print all stores, after removing leftovers of killed processes."""
    from rich.console import Console
    from rich.table import Table

    for folder in sweep(*find_stores()):
        print(f"removed {folder}, whose users were killed")
    try:
        location.check_memory_folder()
    except CacheError as error:
        print(f"no cache can be in memory: {error}", file=sys.stderr)
    folders = find_stores()
    if not folders:
        print("no caches: neither in memory, nor at a path that this user gave")
        return
    shown = Table(box=None, pad_edge=False)
    for name in ("name", "holds", "items", "used", "of", "users", "stays"):
        shown.add_column(name, overflow="fold", no_wrap=name not in ("name", "holds"))
    for folder in folders:
        summary = read_summary(folder)
        if summary is None:
            shown.add_row(_name(folder), "does not say what it is", "", "", "", "", "")
            continue
        about, head, _ = summary
        shown.add_row(
            _name(folder),
            about.describes,
            f"{head[ITEMS]:,}",
            format_bytes(head[USED_BYTES]),
            format_bytes(about.limit_bytes),
            "yes" if is_in_use(folder) else "none",
            "while used" if about.temporary else "until removed",
        )
    console = Console()
    (console if console.is_terminal else Console(width=1000)).print(shown)


def print_info(name: str) -> None:
    """Print what is known about one store. Raises CacheError where there is none."""
    folder = resolve_name(name)
    summary = read_summary(folder)
    if summary is None:
        raise CacheError(f"{folder} does not say what it is")
    about, head, counts = summary
    state = [text for position, text in _STATES.items() if head[position]] or ["admits"]
    lines = {
        "folder": folder,
        "holds": about.describes,
        "made": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(about.made_s)),
        "stays": "until its last user ends" if about.temporary else "until it is removed",
        "in use": "yes" if is_in_use(folder) else "no",
        "state": ", ".join(state),
        "items": f"{head[ITEMS]:,} ({format_bytes(head[PAYLOAD_BYTES])})",
        "takes": f"{format_bytes(head[USED_BYTES])} of {format_bytes(about.limit_bytes)}",
        "so far": f"{counts.hits:,} hits, {counts.misses:,} misses, "
        f"{format_bytes(counts.saved_bytes)} not read from storage",
    }
    if head[MEMBERS]:
        lines["nodes"] = f"{head[MEMBERS_ALIVE]} of {head[MEMBERS]} answer, map {head[MAP_VERSION]}"
        lines["places"] = (
            f"{counts.local_hits:,} here, {counts.peer_hits:,} from other nodes "
            f"({format_bytes(counts.peer_bytes)}), {counts.misses:,} from storage"
        )
        if counts.peer_timeouts:
            lines["places"] += f" ({counts.peer_timeouts:,} after 5 s in vain)"
    for label, text in lines.items():
        print(f"{label:<8}{text}")


@contextlib.contextmanager
def _opened_memory() -> Iterator[CacheFolder | None]:
    """Open the folder of stores in memory; None if there is none, or it is not this user's
    alone."""
    with contextlib.ExitStack() as opened:
        memory = None
        with contextlib.suppress(OSError):
            memory = opened.enter_context(CacheFolder(location.memory_folder()))
        yield memory if memory is not None and memory.is_own(alone=True) else None


def _name(folder: str) -> str:
    return os.path.basename(folder) if location.is_in_memory(folder) else folder
