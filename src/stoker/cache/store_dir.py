"""A store's folder: made as a whole, shared by its users, removed with the last of them.

The folder is opened once, checked (who owns it, who may write to it), and used by its descriptor
from then on. No link is followed; only regular files are opened, and none can block
(``held_folder``).

Every user holds a shared lock (``flock``) on the folder's file ``users``, which the kernel frees
with its process. A user that gets the lock exclusively is alone, and may check or remove the store.
A folder is renamed to its path only when it is complete and locked, and away from it before it is
removed, ``users`` last. What killed processes leave of either is removed by the next process that
gets its lock, if there is nothing in it but a store's files.

A store is opened where an epoch begins. So what LMDB says then is refused or warned of there, and
is not the failure of an example.
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

from stoker.cache import integrity, location
from stoker.cache.held_folder import CacheFolder
from stoker.cache.integrity import ABOUT, FORMAT, About
from stoker.cache.store import DATA, FILES, Store
from stoker.caution import warn
from stoker.errors import CacheError, CacheWarning

_USERS = "users"
_NAMES = {_USERS, ABOUT, integrity.LEFT, *FILES}
_TEMPORARY_NAMES = (f".{ABOUT}.", f".{integrity.LEFT}.")
_MAKING, _GONE = ".making-", ".gone-"
_LEFT_OVER = re.compile(rf"({_MAKING}|{_GONE})[0-9a-f]{{16}}".replace(".", r"\."))
_PATIENCE_S = 30.0


class StoreDir:
    """A user's hold on a store's folder; while it lasts, the folder stays.

    Attributes:
        folder: its path.
        inside: a path that leads into it, whatever becomes of that one.
        about: what it says.
    """

    def __init__(self, folder: CacheFolder, users: int, about: About) -> None:
        self.folder = folder.path
        self.inside = folder.inside
        self.about = about
        self._folder = folder
        self._users = users

    def leave(self) -> None:
        """End the hold; the last user removes a temporary store and closes a kept one."""
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
        """Close what was inherited over a fork: the parent still holds it."""
        os.close(self._users)
        self._folder.close()

    def _finish(self) -> None:
        with contextlib.suppress(OSError):  # then it is checked when it is used again
            with open(self._folder.open_file(DATA, os.O_RDWR), "rb") as data:
                os.fsync(data)
            integrity.record_end(self._folder, self.about)


def join(
    path: str, *, limit_bytes: int | None, describes: str, temporary: bool, on_damage: str
) -> StoreDir | None:
    """Take hold of a store, which is made if it is not there.

    Args:
        path: of its folder.
        limit_bytes, describes, temporary: what it is made with. Without a limit none is made, and
            None returned if there is none, or none that can stay.
        on_damage: ``"rebuild"`` to begin anew, with a warning, or ``"refuse"``.

    Raises CacheError where it is damaged and is refused, is no store, or is another user's; OSError
    where it cannot be made.
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
    """Open a store's folder to look at it; None where there is none that is this user's."""
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
    """Remove a store, unless somebody uses it; tell whether it was removed.

    Raises CacheError where there is more in it.
    """
    with _locked(folder) as alone:
        if alone:
            _remove(folder)
    return alone


def sweep(parent: CacheFolder) -> None:
    """Remove what is half made or half removed in a folder, if no process holds it."""
    for name in filter(_LEFT_OVER.fullmatch, parent.list_names()):
        with contextlib.suppress(CacheError, OSError), CacheFolder(name, parent) as folder:
            folder.check_owner(alone=True)
            if not _list_foreign(folder):
                with _locked(folder, os.O_RDWR | os.O_CREAT) as alone:
                    if alone:
                        folder.clear(_USERS)


def _enter(folder: CacheFolder, users: int, on_damage: str) -> About | None:
    """Take hold of a store that is there; None if that has to be tried again."""
    path = folder.path
    alone = _try_lock(users, fcntl.LOCK_EX)
    if not alone:
        _wait_for_lock(users, path)
    if not folder.is_current() or (not alone and integrity.LEFT in folder.list_names()):
        return None  # removed, or its last user has just left: try to be alone
    about = About.read(folder)
    if alone:
        if about is not None and about.temporary:
            _remove(folder)  # its last user was killed
            return None
        found = integrity.find_damage(folder, about)
        if found:
            if on_damage == "refuse":
                raise CacheError(
                    f"the cache in {path} is damaged: {found}. Remove it (stoker cache remove "
                    f"{path}), or have it made anew: on_damage='rebuild'"
                )
            if found != integrity.REBOOTED:
                warn(f"the cache in {path} is damaged ({found}) and is made anew", CacheWarning)
            _remove(folder)
            return None
        assert about is not None
        integrity.record_use(folder, about)
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
        about = About(FORMAT, describes, limit_bytes, temporary, time.time(), integrity.boot_id())
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
    """Remove a store whose users are locked out. Raises CacheError where there is more in it."""
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
    """Open a store's folder; None where there is none. Raises CacheError where it is another's."""
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
    """Tell whether a folder is a store by what is in it, not another with such a name in it."""
    names, foreign = folder.list_names(), _list_foreign(folder)
    return _USERS in names and _USERS not in foreign and (ABOUT in names or not foreign)


def _list_foreign(folder: CacheFolder) -> list[str]:
    """Return the names in a folder that are no store's: its ``users`` has nothing in it."""
    names = folder.list_names()
    foreign = [n for n in names if n not in _NAMES and not n.startswith(_TEMPORARY_NAMES)]
    with contextlib.suppress(OSError):
        if folder.stat_file(_USERS).st_size:
            foreign.append(_USERS)
    return foreign


@contextlib.contextmanager
def _locked(folder: CacheFolder, flags: int = os.O_RDWR) -> Iterator[bool]:
    """Try to lock a folder exclusively; tell whether that worked, and it is still there."""
    users = folder.open_file(_USERS, flags)
    try:
        yield _try_lock(users, fcntl.LOCK_EX) and folder.is_current()
    finally:
        os.close(users)


def _try_lock(users: int, kind: int) -> bool:
    """Lock exclusively or shared; if others hold it, a lock that was held before may be lost."""
    try:
        fcntl.flock(users, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for_lock(users: int, folder: str) -> None:
    """Lock together with others, as soon as no process is alone."""
    deadline = time.monotonic() + _PATIENCE_S
    while not _try_lock(users, fcntl.LOCK_SH):
        if time.monotonic() > deadline:
            raise CacheError(
                f"the cache in {folder} has been locked for {_PATIENCE_S:.0f} s by a process "
                "that checks or removes it"
            )
        time.sleep(0.01)
