"""``stoker cache list | info | remove``: what stores there are, for people."""

from __future__ import annotations

import os
import sys
import time

from rich.console import Console
from rich.table import Table

from stoker.cache import store_dir
from stoker.cache.counters import DAMAGED, ENDED, FULL, ITEMS, PAYLOAD_BYTES, USED_BYTES
from stoker.errors import CacheError
from stoker.machine import format_bytes


def table() -> None:
    """Print all stores; what killed processes left is removed first."""
    for folder in store_dir.sweep(*store_dir.all_stores()):
        print(f"removed {folder}, whose users were killed")
    try:
        store_dir.check_memory_folder()
    except CacheError as error:
        print(f"no cache can be in memory: {error}", file=sys.stderr)
    folders = store_dir.all_stores()
    if not folders:
        print("no caches: neither in memory, nor at a path that this user gave")
        return
    shown = Table(box=None, pad_edge=False)
    for name in ("name", "holds", "items", "used", "of", "users", "stays"):
        shown.add_column(name, overflow="fold", no_wrap=name not in ("name", "holds"))
    for folder in folders:
        told = store_dir.told_by(folder)
        if told is None:
            shown.add_row(_name(folder), "does not say what it is", "", "", "", "", "")
            continue
        about, head, _ = told
        shown.add_row(
            _name(folder),
            about.describes,
            f"{head[ITEMS]:,}",
            format_bytes(head[USED_BYTES]),
            format_bytes(about.limit_bytes),
            "yes" if store_dir.in_use(folder) else "none",
            "while used" if about.temporary else "until removed",
        )
    console = Console()
    (console if console.is_terminal else Console(width=1000)).print(shown)


def info(which: str) -> None:
    """Print what is known about one store. Raises CacheError where there is none."""
    folder = _folder(which)
    told = store_dir.told_by(folder)
    if told is None:
        raise CacheError(f"{folder} does not say what it is")
    about, head, counts = told
    states = {FULL: "full: nothing enters", ENDED: "ended: writing failed", DAMAGED: "damaged"}
    state = [text for place_, text in states.items() if head[place_]] or ["admits"]
    lines = {
        "folder": folder,
        "holds": about.describes,
        "made": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(about.made_s)),
        "stays": "until its last user ends" if about.temporary else "until it is removed",
        "in use": "yes" if store_dir.in_use(folder) else "no",
        "state": ", ".join(state),
        "items": f"{head[ITEMS]:,} ({format_bytes(head[PAYLOAD_BYTES])})",
        "takes": f"{format_bytes(head[USED_BYTES])} of {format_bytes(about.limit_bytes)}",
        "so far": f"{counts.hits:,} hits, {counts.misses:,} misses, "
        f"{format_bytes(counts.saved_bytes)} not read from storage",
    }
    for name, text in lines.items():
        print(f"{name:<8}{text}")


def removed(which: str) -> str:
    """Remove a store, and return its folder. Raises CacheError where it is used, or is none."""
    folder = _folder(which)
    store_dir.remove(folder)
    return folder


def _folder(which: str) -> str:
    for folder in store_dir.all_stores():
        if which in (folder, _name(folder)):
            return folder
    folder = os.path.realpath(which)
    if store_dir.is_store(folder):
        return folder
    raise CacheError(f"there is no cache {which!r}: see stoker cache list")


def _name(folder: str) -> str:
    memory = store_dir.memory_folder()
    return os.path.basename(folder) if os.path.dirname(folder) == memory else folder
