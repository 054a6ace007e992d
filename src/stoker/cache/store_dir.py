"""A store's folder: made as a whole, shared by its users, checked when it is opened, removed with
the last of them.

The first user of a store checks it before trusting it: format, boot, length of the file, damage
that readers noted, and a digest (``left``) of LMDB's first pages and of the counters, written by
the last user. If other programs have written to its items (the file was changed after the last item
entered), a separate process (this module, run as a program) reads the whole table: damage may crash
the reader.

The folder is opened once, checked (who owns it, who may write to it), and used by its descriptor
from then on. No link is followed; only regular files are opened, and none can block
(``folder``).

Every user holds a shared lock (``flock``) on the folder's file ``users``, which the kernel frees
with its process. A user that gets the lock exclusively is alone, and may check or remove the store.
A folder is renamed to its path only when it is complete and locked, and away from it before it is
removed, ``users`` last. The next process that gets the lock of a killed process's leftover folder
removes it, if it contains only a store's files.

A store is opened where an epoch begins. So LMDB's errors are raised or warned of there, and not as
an example's failure.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import xxhash

from stoker.basics.warn import warn
from stoker.cache import location
from stoker.cache.counters import DAMAGED, DATA_NS, Counters
from stoker.cache.folder import CacheFolder
from stoker.cache.layout import PAGE_BYTES, PAGE_HEADER_BYTES, find_disorder
from stoker.cache.store import COUNTERS, DATA, FILES, Store, changed_ns, import_lmdb
from stoker.errors import CacheError, CacheWarning

# Raised whenever the layout of a store changes: stores of other formats are made anew.
FORMAT = 4
ABOUT = "about.json"
LEFT = "left"
REBOOTED = "it was in use when the machine went down"
# Of ``about.json``, which has a few hundred bytes: a damaged one is not read into memory whole.
_ABOUT_BYTES = 1 << 20
# LMDB's two meta pages, which it reads when it opens its file.
_META_BYTES = 2 * PAGE_BYTES
_META = struct.Struct("<IIQQ")  # of each of these pages: magic, version, address, map size
# LMDB's (MDB_MAGIC in mdb.c).
_MAGIC = 0xBEEFC0DE
# Of 128 bits, as hexadecimal digits.
_DIGEST_BYTES = 32
_FROM_OTHERS = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
_BEGINS = "the check begins"  # printed first: what comes after it is about the store


class About(msgspec.Struct):
    """A store's description, in ``about.json``."""

    format: int
    describes: str
    """Its contents, for people."""
    limit_bytes: int
    temporary: bool
    """Whether it is removed with its last user."""
    made_s: float
    """The time at which it was made, in seconds since 1970."""
    boot: str
    """The machine's boot id at its last use."""
    clean: bool = False
    """Whether its last user closed it."""

    @classmethod
    def read(cls, folder: CacheFolder) -> About | None:
        """Read it; None if it is missing or cannot be understood."""
        try:
            return msgspec.json.decode(folder.read_file(ABOUT, _ABOUT_BYTES), type=cls)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    def write(self, folder: CacheFolder) -> None:
        """Write it. Raises OSError."""
        folder.replace_file(ABOUT, msgspec.json.encode(self))


def boot_id() -> str:
    """Return an id of this boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import psutil

        return str(int(psutil.boot_time()))


def record_end(folder: CacheFolder, about: About) -> None:
    """As the last user, write the digest of the files. Raises OSError."""
    folder.replace_file(LEFT, _digest(folder))
    about.clean = True
    about.write(folder)


def record_use(folder: CacheFolder, about: About) -> None:
    """Note that a store without damage is used again."""
    about.clean, about.boot = False, boot_id()
    with suppress(OSError):  # a full disk is no reason not to read what is there
        about.write(folder)
    with suppress(FileNotFoundError):
        os.unlink(LEFT, dir_fd=folder.descriptor)
    with closing(Counters(os.path.join(folder.inside, COUNTERS))) as counters:
        counters.head[DATA_NS] = changed_ns(folder.inside)


def find_damage(folder: CacheFolder, about: About | None) -> str:
    """Return the damage in a store that no other process uses, or "".

    Raises CacheError where it cannot be checked.
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
    """Return a digest of the files that are not read through."""
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
    """Read the whole table in another process.

    Raises CacheError where that process cannot run, or was killed.
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
    """Return the damage in a store's table, or ""."""
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


_USERS = "users"
_NAMES = {_USERS, ABOUT, LEFT, *FILES}
_TEMPORARY_NAMES = (f".{ABOUT}.", f".{LEFT}.")
_MAKING, _GONE = ".making-", ".gone-"
_LEFT_OVER = re.compile(rf"({_MAKING}|{_GONE})[0-9a-f]{{16}}".replace(".", r"\."))
# A process holds the lock alone to check, make or remove a store: not so long unless it is frozen.
# Chosen, not measured.
_PATIENCE_S = 30.0


class StoreDir:
    """A user's shared lock on a store's folder, which keeps the folder.

    Attributes:
        folder: its path.
        inside: a path into it that stays valid if the folder is moved.
        about: its description.
    """

    def __init__(self, folder: CacheFolder, users: int, about: About) -> None:
        self.folder = folder.path
        self.inside = folder.inside
        self.about = about
        self._folder = folder
        self._users = users

    def leave(self) -> None:
        """Release the lock; the last user removes a temporary store and closes a kept one."""
        try:
            if _try_lock(self._users, fcntl.LOCK_EX) and self._folder.is_current():
                if self.about.temporary:
                    with contextlib.suppress(CacheError):  # it holds other files, too
                        _remove(self._folder)
                else:
                    self._finish()
        finally:
            self.drop()

    def drop(self) -> None:
        """Close the inherited lock in a forked child: the parent still holds it."""
        os.close(self._users)
        self._folder.close()

    def _finish(self) -> None:
        with contextlib.suppress(OSError):  # then it is checked when it is used again
            with open(self._folder.open_file(DATA, os.O_RDWR), "rb") as data:
                os.fsync(data)
            record_end(self._folder, self.about)


def join(
    path: str, *, limit_bytes: int | None, describes: str, temporary: bool, on_damage: str
) -> StoreDir | None:
    """Join a store; make it if there is none.

    Args:
        path: the store's folder.
        limit_bytes, describes, temporary: properties of a new store. Without a limit no store is
            made, and None is returned if there is none, or it must be removed.
        on_damage: ``"rebuild"`` to make a damaged store anew, with a warning, or ``"refuse"``.

    Raises CacheError where the store is damaged and refused, the folder is not a store, or it is
    another user's; OSError where the store cannot be made.
    """
    while True:
        folder = _open_own(path)
        if folder is None:
            if limit_bytes is None:
                return None
            made = _make(path, limit_bytes, describes, temporary)
            if made is not None:
                if not location.is_in_memory(path):
                    location.remember(path)
                return made
            continue  # another process was first
        with contextlib.ExitStack() as undo:
            undo.callback(folder.close)
            try:
                users = folder.open_file(_USERS, os.O_RDWR)
            except FileNotFoundError:  # it has just been removed
                continue
            except OSError as error:
                raise CacheError(f"the cache in {path} cannot be locked: {error}") from error
            undo.callback(os.close, users)
            about = _enter(folder, users, on_damage)
            if about is not None:
                undo.pop_all()
                return StoreDir(folder, users, about)


@contextlib.contextmanager
def opened(path: str, parent: CacheFolder | None = None) -> Iterator[CacheFolder | None]:
    """Open a store's folder for inspection; None if there is none of this user."""
    try:
        folder = _open_own(path, parent)
    except CacheError:
        folder = None
    try:
        yield folder
    finally:
        if folder is not None:
            folder.close()


def is_in_use(folder: CacheFolder) -> bool:
    with contextlib.suppress(OSError), _locked(folder) as alone:
        return not alone
    return False


def remove_unused(folder: CacheFolder) -> bool:
    """Remove a store unless it is in use; True if it was removed.

    Raises CacheError where it contains other files.
    """
    with _locked(folder) as alone:
        if alone:
            _remove(folder)
    return alone


def sweep(parent: CacheFolder) -> None:
    """Remove half made or half removed stores in a folder that no process holds."""
    for name in filter(_LEFT_OVER.fullmatch, parent.list_names()):
        with contextlib.suppress(CacheError, OSError), CacheFolder(name, parent) as folder:
            folder.check_owner(alone=True)
            if not _list_foreign(folder):
                with _locked(folder, os.O_RDWR | os.O_CREAT) as alone:
                    if alone:
                        folder.clear(_USERS)


def _enter(folder: CacheFolder, users: int, on_damage: str) -> About | None:
    """Join an existing store; None if the caller must try again."""
    path = folder.path
    alone = _try_lock(users, fcntl.LOCK_EX)
    if not alone:
        _wait_for_lock(users, path)
    if not folder.is_current() or (not alone and LEFT in folder.list_names()):
        return None  # removed, or its last user has just left: try to be alone
    about = About.read(folder)
    if alone:
        if about is not None and about.temporary:
            _remove(folder)  # its last user was killed
            return None
        found = find_damage(folder, about)
        if found:
            if on_damage == "refuse":
                raise CacheError(
                    f"the cache in {path} is damaged: {found}. Remove it (stoker cache remove "
                    f"{path}), or have it made anew: on_damage='rebuild'"
                )
            if found != REBOOTED:
                warn(f"the cache in {path} is damaged ({found}) and is made anew", CacheWarning)
            _remove(folder)
            return None
        assert about is not None
        record_use(folder, about)
        fcntl.flock(users, fcntl.LOCK_SH)
    if about is None:
        raise CacheError(f"the cache in {path} does not say what it is: remove it")
    return about


def _make(path: str, limit_bytes: int, describes: str, temporary: bool) -> StoreDir | None:
    """Make a store; None when another process was faster."""
    parent = os.path.dirname(path)
    os.makedirs(parent, mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), CacheFolder(path) as found:
        if found.list_names() and not _is_store(found):
            raise CacheError(
                f"{path} holds other things than a cache: give path= a folder of its own"
            )
    making = os.path.join(parent, _MAKING + secrets.token_hex(8))
    os.mkdir(making, 0o700)  # its owner's alone
    with contextlib.ExitStack() as undo:
        try:
            folder = CacheFolder(making)
            undo.callback(folder.close)
            undo.callback(folder.clear, _USERS)
            if not folder.is_own(alone=False):
                raise CacheError(
                    f"no cache can be made in {parent}: its file system does not keep who may "
                    "write to a folder, so that others may change the cache. Give path= on another "
                    "one (ext4, xfs, btrfs, tmpfs)"
                )
            users = folder.open_file(_USERS, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:  # another process swept it
            return None
        undo.callback(os.close, users)
        if not _try_lock(users, fcntl.LOCK_SH) or not folder.has_open_file(_USERS, users):
            return None  # swept, too
        Store.create(folder.inside, limit_bytes)
        about = About(FORMAT, describes, limit_bytes, temporary, time.time(), boot_id())
        about.write(folder)
        try:
            folder.rename(path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return None  # and it may be gone again by now
            raise
        undo.pop_all()
    return StoreDir(folder, users, about)


def _remove(folder: CacheFolder) -> None:
    """Remove a store whose users are locked out. Raises CacheError where it contains other
    files."""
    path = folder.path
    foreign = _list_foreign(folder)
    if foreign:
        raise CacheError(
            f"{path} holds other things than a cache, and is not removed: {min(foreign)!r}"
        )
    folder.rename(os.path.join(os.path.dirname(path), _GONE + secrets.token_hex(8)))
    folder.clear(_USERS)
    location.forget(path)


def _open_own(path: str, parent: CacheFolder | None = None) -> CacheFolder | None:
    """Open a store's folder; None where there is none. Raises CacheError for another user's."""
    try:
        folder = CacheFolder(path, parent)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CacheError(f"{path} cannot be opened: {error}") from error
    with contextlib.ExitStack() as undo:
        undo.callback(folder.close)
        if not _is_store(folder):
            return None
        folder.check_owner(alone=False)
        undo.pop_all()
    return folder


def _is_store(folder: CacheFolder) -> bool:
    """True if a folder's files are those of a store."""
    names, foreign = folder.list_names(), _list_foreign(folder)
    return _USERS in names and _USERS not in foreign and (ABOUT in names or not foreign)


def _list_foreign(folder: CacheFolder) -> list[str]:
    """Return the names in a folder that are not a store's; a store's ``users`` is empty."""
    names = folder.list_names()
    foreign = [n for n in names if n not in _NAMES and not n.startswith(_TEMPORARY_NAMES)]
    with contextlib.suppress(OSError):
        if folder.stat_file(_USERS).st_size:
            foreign.append(_USERS)
    return foreign


@contextlib.contextmanager
def _locked(folder: CacheFolder, flags: int = os.O_RDWR) -> Iterator[bool]:
    """Try to lock a folder exclusively; True if that worked and the folder is still there."""
    users = folder.open_file(_USERS, flags)
    try:
        yield _try_lock(users, fcntl.LOCK_EX) and folder.is_current()
    finally:
        os.close(users)


def _try_lock(users: int, kind: int) -> bool:
    """Try to lock; if others hold the lock, an earlier lock of this process may be lost."""
    try:
        fcntl.flock(users, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for_lock(users: int, folder: str) -> None:
    """Take the shared lock, as soon as no process holds the exclusive one."""
    deadline = time.monotonic() + _PATIENCE_S
    while not _try_lock(users, fcntl.LOCK_SH):
        if time.monotonic() > deadline:
            raise CacheError(
                f"the cache in {folder} has been locked for {_PATIENCE_S:.0f} s by a process "
                "that checks or removes it"
            )
        # Locks have no wait with a limit; a hundredth of a second is no delay to opening a cache.
        time.sleep(0.01)
