"""What is wrong with a store that nobody uses: found before any of it is trusted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import xxhash

from stoker.cache import check
from stoker.cache.about import ABOUT, FORMAT, About, boot
from stoker.cache.counters import DAMAGED, DATA_NS, Counters
from stoker.cache.directory import CacheFolder
from stoker.cache.store import COUNTERS, DATA, FILES, PAGE_BYTES, changed_ns
from stoker.errors import CacheError

LEFT = "left"
REBOOTED = "it was in use when the machine went down"
_META_BYTES = 2 * PAGE_BYTES  # what LMDB reads when it opens its file
_DIGEST_BYTES = 32
_FROM_OTHERS = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)


def damage(folder: CacheFolder, about: About | None) -> str:
    """Tell what is wrong with a store that nobody else uses; "" for nothing.

    Raises CacheError where that cannot be found out.
    """
    if about is None:
        return f"{ABOUT} cannot be read"
    if about.format != FORMAT:
        return f"it has format {about.format}, this version writes {FORMAT}"
    if not about.clean and about.boot != boot():
        return REBOOTED
    try:
        for name in {LEFT, *FILES}.intersection(folder.names()) | {DATA}:
            folder.stat(name)  # nothing but files
        size = folder.stat(DATA).st_size
        if size != about.limit_bytes:
            return f"{DATA} has {size:,} bytes instead of {about.limit_bytes:,}"
        if LEFT in folder.names() and folder.read(LEFT, _DIGEST_BYTES) != _digest(folder):
            changed = "its files are not as its last user left them"
        else:
            changed = ""
    except OSError as error:
        return str(error)
    return _damage_of_data(folder, about.limit_bytes) or changed


def trust(folder: CacheFolder) -> None:
    """Take note, before a store is used again, that nothing is wrong with it."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(LEFT, dir_fd=folder.descriptor)
    counters = Counters(os.path.join(folder.inside, COUNTERS))
    counters.head[DATA_NS] = changed_ns(folder.inside)
    counters.close()


def leave(folder: CacheFolder) -> None:
    """Take note of how files are left that are trusted without being read through."""
    folder.write(LEFT, _digest(folder))


def _digest(folder: CacheFolder) -> bytes:
    hashed = xxhash.xxh3_128(folder.read(DATA, _META_BYTES))
    hashed.update(folder.read(COUNTERS, Counters.SIZE_BYTES + 1))
    return hashed.hexdigest().encode()


def _damage_of_data(folder: CacheFolder, limit_bytes: int) -> str:
    counters = Counters(os.path.join(folder.inside, COUNTERS))
    spoilt, known_ns = bool(counters.head[DAMAGED]), int(counters.head[DATA_NS])
    counters.close()
    if spoilt:
        return "items in it were not as they had been written"
    if changed_ns(folder.inside) == known_ns:
        return ""  # nobody has written since the last item entered
    return _read_through(folder, limit_bytes)


def _read_through(folder: CacheFolder, limit_bytes: int) -> str:
    """Read the tables in another process: what cannot be trusted may crash its reader.

    Raises CacheError where that process cannot be run, or was ended by others.
    """
    places = [entry for entry in sys.path if isinstance(entry, str) and entry]
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", check.__name__, folder.inside, str(limit_bytes)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},  # it imports what is here
            pass_fds=[folder.descriptor],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise CacheError(f"the cache in {folder.path} cannot be checked: {error}") from error
    lines = done.stderr.strip().splitlines()
    if check.BEGINS not in done.stdout.splitlines() or -done.returncode in _FROM_OTHERS:
        why = lines[-1] if lines else f"its reader ended with code {done.returncode}"
        raise CacheError(f"the cache in {folder.path} cannot be checked: {why}")
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return f"reading it ends with signal {-done.returncode}"
    return (lines or ["it cannot be read"])[-1].removeprefix(f"{folder.inside}: ")
