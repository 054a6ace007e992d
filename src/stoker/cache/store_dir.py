"""A store's folder: how users make it, share it, check it and remove it.

Locks. Each user holds a shared lock (``flock``) on the folder's file ``users``; the kernel frees it
with the process. A user that gets the lock exclusively is the only one, and may check or remove the
store. A new folder gets its path by a rename, once it is complete and locked. Before it is removed,
it is renamed away, and ``users`` is deleted last. If a process is killed meanwhile, the next one
that gets the lock of the leftover folder removes it, if it holds only files of a store.

Checks. The first user checks a store before it trusts it: format, boot, size of the file, damage
that readers recorded, and whether the file of items has changed since the last item entered. Only
another program can have changed it, or a process that was killed as it wrote; it says so while it
does, and LMDB's transactions are whole or not there. A store that fails a check is made anew.

Safety. The folder is opened once, its owner and permissions are checked, and it is then used
through its descriptor (``folder``). No link is followed, only regular files are opened, and no open
can block.

A store is opened at the beginning of an epoch, so LMDB's errors come there and not as the failure
of an example.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec

from stoker.basics.warn import warn
from stoker.cache import location
from stoker.cache.counters import DAMAGED, DATA_NS, IN_USE, WRITING, Counters
from stoker.cache.folder import CacheFolder
from stoker.cache.store import COUNTERS, DATA, FILES, Store, changed_ns
from stoker.errors import CacheError, CacheWarning

# Raised whenever the layout of a store changes; stores of other formats are rebuilt.
FORMAT = 6
ABOUT = "about.json"
REBOOTED = "it was in use when the machine went down"
# The most bytes that are read of ``about.json``. It has a few hundred; a damaged one may be huge.
_ABOUT_BYTES = 1 << 20


class StoreMeta(msgspec.Struct):
    """A store's description, in ``about.json``."""

    format: int
    describes: str
    """The contents, for messages."""
    limit_bytes: int
    temporary: bool
    """True if it is removed with its last user."""
    made_s: float
    """The time at which it was made, in seconds since 1970."""
    boot: str
    """The machine's boot id at its last use."""

    @classmethod
    def read(cls, folder: CacheFolder) -> StoreMeta | None:
        """Read the description; None if it is missing or invalid."""
        try:
            return msgspec.json.decode(folder.read_file(ABOUT, _ABOUT_BYTES), type=cls)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    def write(self, folder: CacheFolder) -> None:
        """Write the description. Raises OSError."""
        folder.replace_file(ABOUT, msgspec.json.encode(self))


def boot_id() -> str:
    """Return an id that changes with each boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import psutil

        return str(int(psutil.boot_time()))


def record_use(folder: CacheFolder, about: StoreMeta) -> None:
    """Record that a store without damage is in use again."""
    about.boot = boot_id()
    with suppress(OSError):  # on a full disk the store can still be read
        about.write(folder)
    with _counters(folder) as counters:
        counters.head[DATA_NS] = changed_ns(folder.inside)
        counters.head[WRITING], counters.head[IN_USE] = 0, 1
        counters.begin_anew()
        counters.write_through()


def find_damage(folder: CacheFolder, about: StoreMeta | None) -> str:
    """Return what is damaged in a store that no other process uses, or ""."""
    if about is None:
        return f"{ABOUT} cannot be read"
    if about.format != FORMAT:
        return f"it has format {about.format}, but this version of stoker uses {FORMAT}"
    try:
        for name in FILES.intersection(folder.list_names()) | {DATA}:
            folder.stat_file(name)  # raises unless it is a regular file
        size = folder.stat_file(DATA).st_size
        if size != about.limit_bytes:
            return f"{DATA} has {size:,} bytes instead of {about.limit_bytes:,}"
        with _counters(folder) as counters:
            head = counters.head.tolist()
        if head[IN_USE] and about.boot != boot_id():
            return REBOOTED
        if head[DAMAGED]:
            return "readers found damaged items"
        if not head[WRITING] and head[DATA_NS] != changed_ns(folder.inside):
            return f"another program has changed {DATA}"
    except OSError as error:
        return str(error)
    return ""


def _counters(folder: CacheFolder) -> closing[Counters]:
    return closing(Counters(os.path.join(folder.inside, COUNTERS)))


_USERS = "users"
_NAMES = {_USERS, ABOUT, *FILES}
_TEMPORARY_NAME = f".{ABOUT}."
_MAKING, _REMOVING = ".making-", ".gone-"
_LEFTOVER = re.compile(rf"({_MAKING}|{_REMOVING})[0-9a-f]{{16}}".replace(".", r"\."))
# How long to wait for a process that checks, makes or removes a store. A process that takes longer
# is frozen. Chosen, not measured.
_LOCK_TIMEOUT_S = 30.0


class StoreDir:
    """A user's shared lock on a store's folder. While it is held, the folder is not removed.

    Attributes:
        folder: the folder's path.
        inside: a path to it that stays valid if the folder is moved.
        about: the store's description.
        is_current: tells whether the path still leads to the folder: a user may have removed it.
    """

    def __init__(self, folder: CacheFolder, users: int, about: StoreMeta) -> None:
        self.folder, self.inside, self.about = folder.path, folder.inside, about
        self.is_current = folder.is_current
        self._folder, self._users = folder, users

    def keep(self) -> None:
        """Have the store stay after its last user, whoever made it. Raises OSError."""
        if self.about.temporary:
            self.about.temporary = False
            self.about.write(self._folder)

    def leave(self) -> None:
        """Release the lock. The last user removes a temporary store, and closes a kept one."""
        try:
            if _try_lock(self._users, fcntl.LOCK_EX) and self._folder.is_current():
                about = StoreMeta.read(self._folder) or self.about  # a later user may want it kept
                if about.temporary:
                    with contextlib.suppress(CacheError):  # if it holds files of others, too
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
        with contextlib.suppress(OSError):  # it counts as in use: lost if the machine goes down
            with open(self._folder.open_file(DATA, os.O_RDWR), "rb") as data:
                os.fsync(data)
            with _counters(self._folder) as counters:
                counters.head[IN_USE] = 0
                counters.write_through()


def join(path: str, *, limit_bytes: int | None, describes: str, temporary: bool) -> StoreDir | None:
    """Join a store, or make it. A damaged one is replaced, with a warning.

    Args:
        path: the store's folder.
        limit_bytes, describes, temporary: properties of a new store. With a limit of None no store
            is made: the result is None if there is none, or if a damaged one was removed.

    Raises CacheError if the folder is not a store, or if another user owns it; OSError if the store
    cannot be made.
    """
    while True:
        folder = _open_own(path)
        if folder is None:
            if limit_bytes is None:
                return None
            store_dir = _make_store(path, limit_bytes, describes, temporary)
            if store_dir is not None:
                if not location.is_in_memory(path):
                    location.list_store(path)
                return store_dir
            continue  # another process has made it meanwhile
        with contextlib.ExitStack() as undo:
            undo.callback(folder.close)
            try:
                users = folder.open_file(_USERS, os.O_RDWR)
            except FileNotFoundError:  # another process has just removed it
                continue
            except OSError as error:
                raise CacheError(f"cannot lock the cache in {path}: {error}") from error
            undo.callback(os.close, users)
            about = _join_existing(folder, users)
            if about is not None:
                undo.pop_all()
                return StoreDir(folder, users, about)


@contextlib.contextmanager
def open_existing(path: str) -> Iterator[CacheFolder | None]:
    """Open a store's folder for inspection; None if this user has no store there."""
    try:
        folder = _open_own(path)
    except CacheError:
        folder = None
    try:
        yield folder
    finally:
        if folder is not None:
            folder.close()


def is_in_use(folder: CacheFolder) -> bool:
    with contextlib.suppress(OSError), _locking(folder) as is_alone:
        return not is_alone
    return False


def remove_unused(folder: CacheFolder) -> bool:
    """Remove a store unless it is in use; True if it was removed.

    Raises CacheError if it holds files of others.
    """
    with _locking(folder) as is_alone:
        if is_alone:
            _remove(folder)
    return is_alone


def sweep(parent: str) -> None:
    """Remove incomplete stores in a folder, unless a process holds them. Raises OSError."""
    for name in filter(_LEFTOVER.fullmatch, os.listdir(parent)):
        path = os.path.join(parent, name)
        with contextlib.suppress(CacheError, OSError), CacheFolder(path) as folder:
            folder.check_owner(private=True)
            if not _list_foreign(folder):
                with _locking(folder, os.O_RDWR | os.O_CREAT) as is_alone:
                    if is_alone:
                        folder.clear(_USERS)


def _join_existing(folder: CacheFolder, users: int) -> StoreMeta | None:
    """Join an existing store; None if it is gone and the caller must try again."""
    path = folder.path
    is_alone = _try_lock(users, fcntl.LOCK_EX)
    if not is_alone:
        _wait_for_lock(users, path)
    if not folder.is_current() or (not is_alone and not _is_used(folder)):
        return None  # it was removed, or its last user has just left: try to get it exclusively
    about = StoreMeta.read(folder)
    if is_alone:
        if about is not None and about.temporary:
            _remove(folder)  # its last user was killed
            return None
        damage = find_damage(folder, about)
        if damage:
            if damage != REBOOTED:
                warn(f"the cache in {path} is damaged ({damage}) and is rebuilt", CacheWarning)
            _remove(folder)
            return None
        assert about is not None
        record_use(folder, about)
        fcntl.flock(users, fcntl.LOCK_SH)
    if about is None:
        raise CacheError(
            f"the description of the cache in {path} cannot be read: remove it (stoker cache "
            f"remove {path})"
        )
    return about


def _is_used(folder: CacheFolder) -> bool:
    with _counters(folder) as counters:
        return bool(counters.head[IN_USE])


def _make_store(path: str, limit_bytes: int, describes: str, temporary: bool) -> StoreDir | None:
    """Make a store; None if another process was faster."""
    parent = os.path.dirname(path)
    os.makedirs(parent, mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), CacheFolder(path) as existing:
        if existing.list_names() and not _is_store(existing):
            raise CacheError(
                f"{path} holds other files than a cache's: give path= an empty or new folder"
            )
    making = os.path.join(parent, _MAKING + secrets.token_hex(8))
    os.mkdir(making, 0o700)  # for its owner only
    with contextlib.ExitStack() as undo:
        try:
            folder = CacheFolder(making)
            undo.callback(folder.close)
            undo.callback(folder.clear, _USERS)
            if not folder.is_own(private=False):
                raise CacheError(
                    f"cannot make a cache in {parent}: its file system does not keep permissions, "
                    "so other users could change the cache. Give path= on another file system "
                    "(ext4, xfs, btrfs, tmpfs)"
                )
            users = folder.open_file(_USERS, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:  # `sweep` in another process has removed it
            return None
        undo.callback(os.close, users)
        if not _try_lock(users, fcntl.LOCK_SH) or not folder.has_open_file(_USERS, users):
            return None  # `sweep` in another process is removing it
        Store.create(folder.inside, limit_bytes)
        about = StoreMeta(FORMAT, describes, limit_bytes, temporary, time.time(), boot_id())
        about.write(folder)
        try:
            folder.rename(path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return None  # another process was faster; its store may be gone again by now
            raise
        undo.pop_all()
    return StoreDir(folder, users, about)


def _remove(folder: CacheFolder) -> None:
    """Remove a store while this process has its lock. Raises CacheError if it holds files of
    others."""
    path = folder.path
    foreign = _list_foreign(folder)
    if foreign:
        raise CacheError(
            f"{path} holds files that are not a cache's, such as {min(foreign)!r}, and is not "
            "removed"
        )
    folder.rename(os.path.join(os.path.dirname(path), _REMOVING + secrets.token_hex(8)))
    folder.clear(_USERS)
    location.unlist_store(path)


def _open_own(path: str) -> CacheFolder | None:
    """Open a store's folder; None if there is none. Raises CacheError if another user owns it."""
    try:
        folder = CacheFolder(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CacheError(f"cannot open {path}: {error}") from error
    with contextlib.ExitStack() as undo:
        undo.callback(folder.close)
        if not _is_store(folder):
            return None
        folder.check_owner(private=False)
        undo.pop_all()
    return folder


def _is_store(folder: CacheFolder) -> bool:
    """True if a folder's files are those of a store."""
    names, foreign = folder.list_names(), _list_foreign(folder)
    return _USERS in names and _USERS not in foreign and (ABOUT in names or not foreign)


def _list_foreign(folder: CacheFolder) -> list[str]:
    """Return the names in a folder that do not belong to a store; a store's ``users`` is empty."""
    names = folder.list_names()
    foreign = [n for n in names if n not in _NAMES and not n.startswith(_TEMPORARY_NAME)]
    with contextlib.suppress(OSError):
        if folder.stat_file(_USERS).st_size:
            foreign.append(_USERS)
    return foreign


@contextlib.contextmanager
def _locking(folder: CacheFolder, flags: int = os.O_RDWR) -> Iterator[bool]:
    """Try to lock a folder exclusively; True if the lock is held and the folder still exists."""
    users = folder.open_file(_USERS, flags)
    try:
        yield _try_lock(users, fcntl.LOCK_EX) and folder.is_current()
    finally:
        os.close(users)


def _try_lock(users: int, kind: int) -> bool:
    """Try to lock. If that fails, an earlier lock of this process may be lost, too."""
    try:
        fcntl.flock(users, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for_lock(users: int, folder: str) -> None:
    """Take the shared lock as soon as no process holds the exclusive one."""
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    while not _try_lock(users, fcntl.LOCK_SH):
        if time.monotonic() > deadline_s:
            raise CacheError(
                f"a process has been checking or removing the cache in {folder} for more than "
                f"{_LOCK_TIMEOUT_S:.0f} s: end that process, or give another path="
            )
        # flock has no time limit, so poll; 10 ms do not delay the opening of a cache noticeably.
        time.sleep(0.01)
