"""Indexing many shards: several at a time, with a line of progress where it takes long."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Sequence

from stoker.one_shot import OneShot
from stoker.sources.shards.header_reads import HeaderReads
from stoker.sources.shards.index import ShardIndex, build_index
from stoker.sources.shards.index_files import load_index, save_index
from stoker.sources.shards.members import ShardFile

_THREADS = 8  # more than cores: they wait for a disk
_SHOW_EVERY_S = 2.0


def index_shards(
    paths: Sequence[str],
    open_shard: Callable[[str], ShardFile] = HeaderReads,
    at_once: int = _THREADS,
) -> list[ShardIndex]:
    """Return the indexes of shards: those that were kept, and those that are built now.

    Raises what ``build_index`` does for the first shard that cannot be used.
    """
    results: list[OneShot[ShardIndex]] = [OneShot() for _ in paths]
    numbers = itertools.count()  # each is taken by one thread
    given_up = False

    def run() -> None:
        while not given_up and (number := next(numbers)) < len(paths):
            try:
                results[number].give(_index(open_shard(paths[number])))
            except BaseException as error:
                results[number].give(error=error)

    threads = [
        threading.Thread(target=run, name=f"stoker-index-{number}", daemon=True)
        for number in range(min(at_once, len(paths)))
    ]
    for thread in threads:
        thread.start()
    shown = False
    indexes: list[ShardIndex] = []
    due_s = time.monotonic() + _SHOW_EVERY_S
    try:
        for result in results:
            while True:
                try:
                    indexes.append(result.wait(max(0.0, due_s - time.monotonic())))
                    break
                except TimeoutError:
                    shown = _show(indexes, len(paths)) or shown
                    due_s = time.monotonic() + _SHOW_EVERY_S
    finally:
        given_up = True
    for thread in threads:
        thread.join()
    if shown:
        _show(indexes, len(paths))
    return indexes


def _index(file: ShardFile) -> ShardIndex:
    version = file.version()
    is_told = version.modified_ns != 0  # not all servers tell it
    index = load_index(file.path, version) if is_told else None
    if index is None:
        index = build_index(file)
        if is_told:
            save_index(index)
    return index


def _show(indexes: Sequence[ShardIndex], of: int) -> bool:
    with contextlib.suppress(ValueError, OSError, AttributeError):  # no stderr, or a closed one
        if sys.stderr.isatty():
            examples = sum(len(index.keys) for index in indexes)
            sys.stderr.write(f"index: {len(indexes):,} of {of:,} shards, {examples:,} examples\n")
            sys.stderr.flush()
            return True
    return False
