"""What a store says about itself, and whether its files are as they were left.

The first user of a store trusts nothing in it before it is checked: format, boot, length of the
file, damage that readers noted, and a digest (``left``) of LMDB's first pages and of the counters,
as the last user left them. Where others than its users have written to its items (the file was
changed after the last item entered), the whole table is read, in a process of its own (this module,
run as a program): damage may crash the reader.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import xxhash

from stoker.cache.counters import DAMAGED, DATA_NS, Counters
from stoker.cache.held_folder import CacheFolder
from stoker.cache.layout import PAGE_BYTES, PAGE_HEADER_BYTES, find_disorder
from stoker.cache.store import COUNTERS, DATA, FILES, changed_ns, import_lmdb
from stoker.errors import CacheError

FORMAT = 4
ABOUT = "about.json"
LEFT = "left"
REBOOTED = "it was in use when the machine went down"
_ABOUT_BYTES = 1 << 20
_META_BYTES = 2 * PAGE_BYTES  # what LMDB reads when it opens its file
_META = struct.Struct("<IIQQ")  # of each of these pages: magic, version, address, map size
_MAGIC = 0xBEEFC0DE
_DIGEST_BYTES = 32
_FROM_OTHERS = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
_BEGINS = "the check begins"  # printed first: what comes after it is about the store


class About(msgspec.Struct):
    """What a store's folder says about it, in ``about.json``."""

    format: int
    describes: str
    """What is in it, for people."""
    limit_bytes: int
    temporary: bool
    """Whether it goes with its last user."""
    made_s: float
    """When it was made, in seconds since 1970."""
    boot: str
    """The boot of the machine in which it was used last."""
    clean: bool = False
    """Whether its last user closed it."""

    @classmethod
    def read(cls, folder: CacheFolder) -> About | None:
        """Read it; None where there is none that can be understood."""
        try:
            return msgspec.json.decode(folder.read_file(ABOUT, _ABOUT_BYTES), type=cls)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    def write(self, folder: CacheFolder) -> None:
        """Write it. Raises OSError."""
        folder.replace_file(ABOUT, msgspec.json.encode(self))


def boot_id() -> str:
    """Return what tells this boot of the machine from others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import psutil

        return str(int(psutil.boot_time()))


def record_end(folder: CacheFolder, about: About) -> None:
    """Write down, as its last user, how the files are left. Raises OSError."""
    folder.replace_file(LEFT, _digest(folder))
    about.clean = True
    about.write(folder)


def record_use(folder: CacheFolder, about: About) -> None:
    """Write down that a store in which nothing is wrong is used again."""
    about.clean, about.boot = False, boot_id()
    with suppress(OSError):  # a full disk is no reason not to read what is there
        about.write(folder)
    with suppress(FileNotFoundError):
        os.unlink(LEFT, dir_fd=folder.descriptor)
    with closing(Counters(os.path.join(folder.inside, COUNTERS))) as counters:
        counters.head[DATA_NS] = changed_ns(folder.inside)


def find_damage(folder: CacheFolder, about: About | None) -> str:
    """Return what is wrong with a store that nobody else uses; "" for nothing.

    Raises CacheError where that cannot be found out.
    """
    if about is None:
        return f"{ABOUT} cannot be read"
    if about.format != FORMAT:
        return f"it has format {about.format}, this version writes {FORMAT}"
    if not about.clean and about.boot != boot_id():
        return REBOOTED
    names = folder.list_names()
    try:
        for name in {LEFT, *FILES}.intersection(names) | {DATA}:
            folder.stat_file(name)  # nothing but files
        size = folder.stat_file(DATA).st_size
        if size != about.limit_bytes:
            return f"{DATA} has {size:,} bytes instead of {about.limit_bytes:,}"
        is_left = LEFT not in names or folder.read_file(LEFT, _DIGEST_BYTES) == _digest(folder)
    except OSError as error:
        return str(error)
    changed = "" if is_left else "its files are not as its last user left them"
    return _find_damage_of_data(folder, about.limit_bytes) or changed


def _digest(folder: CacheFolder) -> bytes:
    """Return a digest of the files that are trusted without being read through."""
    hashed = xxhash.xxh3_128(folder.read_file(DATA, _META_BYTES))
    hashed.update(folder.read_file(COUNTERS, Counters.SIZE_BYTES + 1))
    return hashed.hexdigest().encode()


def _find_damage_of_data(folder: CacheFolder, limit_bytes: int) -> str:
    with closing(Counters(os.path.join(folder.inside, COUNTERS))) as counters:
        if counters.head[DAMAGED]:
            return "items in it were not as they had been written"
        if changed_ns(folder.inside) == counters.head[DATA_NS]:
            return ""  # nobody has written since the last item entered
    return _read_through_elsewhere(folder, limit_bytes)


def _read_through_elsewhere(folder: CacheFolder, limit_bytes: int) -> str:
    """Read the table through in another process.

    Raises CacheError where that process cannot be run, or was ended by others.
    """
    paths = [entry for entry in sys.path if isinstance(entry, str) and entry]
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__, folder.inside, str(limit_bytes)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},  # it imports what is here
            pass_fds=[folder.descriptor],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise CacheError(f"the cache in {folder.path} cannot be checked: {error}") from error
    lines = done.stderr.strip().splitlines()
    if _BEGINS not in done.stdout.splitlines() or -done.returncode in _FROM_OTHERS:
        why = lines[-1] if lines else f"its reader ended with code {done.returncode}"
        raise CacheError(f"the cache in {folder.path} cannot be checked: {why}")
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return f"reading it ends with signal {-done.returncode}"
    return (lines or ["it cannot be read"])[-1].removeprefix(f"{folder.inside}: ")


def _read_through(folder: str, limit_bytes: int) -> str:
    """Return what is wrong with a store's table; "" for nothing."""
    lmdb = import_lmdb()
    print(_BEGINS, flush=True)
    with open(os.path.join(folder, DATA), "rb") as file:
        for page in range(2):
            file.seek(page * PAGE_BYTES + PAGE_HEADER_BYTES)
            if _META.unpack(file.read(_META.size))[0] != _MAGIC:
                return "it does not begin as a store does"
    try:
        env = lmdb.open(folder, map_size=limit_bytes, readonly=True, lock=False, readahead=False)
        with env.begin(buffers=True) as txn:
            return find_disorder(txn, limit_bytes)
    except struct.error:
        return "an item is cut short"
    except lmdb.Error as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(_read_through(sys.argv[1], int(sys.argv[2])) or 0)
