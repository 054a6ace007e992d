"""A store's folder: made as a whole, shared by its users, removed with the last of them.

Every user holds a shared lock on the folder's file ``users``, which the kernel frees with its
process. Who gets the lock exclusively is alone, and may check, mend or remove the store. A folder
is renamed into its place only when it is complete and locked, and out of it before it is removed.
What killed processes leave of either is removed by who gets its lock next.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from stoker.cache import damage, register
from stoker.cache.about import ABOUT, FORMAT, About, boot
from stoker.cache.counters import Counters, told
from stoker.cache.directory import CacheFolder
from stoker.cache.store import COUNTERS, DATA, FILES, Store
from stoker.caution import warn
from stoker.errors import CacheError, CacheWarning
from stoker.stats import CacheCounts

_USERS = "users"
_NAMES = {_USERS, ABOUT, damage.LEFT, *FILES}
_MAKING, _GONE = ".making-", ".gone-"
_LEFT_OVER = re.compile(rf"({_MAKING}|{_GONE})[0-9a-f]{{16}}".replace(".", r"\."))
_PATIENCE_S = 30.0
_NETWORK = re.compile(r"nfs|cifs|smb|9p|lustre|gpfs|ceph|gluster|fuse\.(?!fuseblk|ext)")


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
        """Let go; the last one removes a temporary store and closes a kept one."""
        try:
            if _alone(self._users) and self._folder.is_current():
                if self.about.temporary:
                    with contextlib.suppress(CacheError):  # somebody has put more into it
                        _remove(self._folder)
                else:
                    self._finish()
        finally:
            self.drop()

    def drop(self) -> None:
        """Let go of what was inherited over a fork: the parent still holds it."""
        os.close(self._users)
        self._folder.close()

    def _finish(self) -> None:
        with contextlib.suppress(OSError):  # then it is checked when it is used again
            data = self._folder.file(DATA, os.O_RDWR)
            try:
                os.fsync(data)
            finally:
                os.close(data)
            damage.leave(self._folder)
            self.about.clean = True
            self.about.write(self._folder)


def joined(
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
        folder = _opened(path)
        if folder is None:
            if limit_bytes is None:
                return None
            made = _made(path, limit_bytes, describes, temporary)
            if made is not None:
                if not in_memory(path):
                    register.add(path)
                return made
            continue  # somebody else was first
        with contextlib.ExitStack() as undo:
            undo.callback(folder.close)
            try:
                users = folder.file(_USERS, os.O_RDWR)
            except FileNotFoundError:  # it has just been removed
                continue
            except OSError as error:
                raise CacheError(f"the cache in {path} cannot be locked: {error}") from error
            undo.callback(os.close, users)
            about = _entered(folder, users, on_damage)
            if about is not None:
                undo.pop_all()
                return StoreDir(folder, users, about)


def _entered(folder: CacheFolder, users: int, on_damage: str) -> About | None:
    """Take hold of a store that is there; None if that has to be tried again."""
    path = folder.path
    alone = _alone(users)
    if not alone:
        _wait_for(users, path)
    if not folder.is_current() or (not alone and damage.LEFT in folder.names()):
        return None  # it was removed, or its last user has just left: somebody has to be first
    about = About.of(folder)
    if alone:
        if about is not None and about.temporary:
            _remove(folder)  # its last user was killed
            return None
        found = damage.damage(folder, about)
        if found:
            if on_damage == "refuse":
                raise CacheError(
                    f"the cache in {path} is damaged: {found}. Remove it (stoker cache remove "
                    f"{path}), or have it made anew: on_damage='rebuild'"
                )
            if found != damage.REBOOTED:
                warn(f"the cache in {path} is damaged ({found}) and is made anew", CacheWarning)
            _remove(folder)
            return None
        assert about is not None
        about.clean, about.boot = False, boot()
        with contextlib.suppress(OSError):  # a full disk is no reason not to read what is there
            about.write(folder)
        damage.trust(folder)
        fcntl.flock(users, fcntl.LOCK_SH)
    if about is None:
        raise CacheError(f"the cache in {path} does not say what it is: remove it")
    return about


def _made(path: str, limit_bytes: int, describes: str, temporary: bool) -> StoreDir | None:
    """Make a store; None when somebody else was faster."""
    parent = os.path.dirname(path)
    os.makedirs(parent, mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), CacheFolder(path) as found:
        if found.names() and not _is_store(found):
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
            users = folder.file(_USERS, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:  # who sweeps took it for left over
            return None
        undo.callback(os.close, users)
        if not _joins(users) or not folder.holds(_USERS, users):
            return None  # so did somebody here
        Store.create(folder.inside, limit_bytes)
        about = About(FORMAT, describes, limit_bytes, temporary, time.time(), boot())
        about.write(folder)
        try:
            os.rename(making, path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return None  # and it may be gone again by now
            raise
        folder.path = path
        undo.pop_all()
    return StoreDir(folder, users, about)


def is_store(path: str) -> bool:
    """Tell whether a folder is a store of this user's."""
    with _store(path) as folder:
        return folder is not None


def told_by(path: str) -> tuple[About, list[int], CacheCounts] | None:
    """Return what a store says about itself, the head of its counts, and those of everybody.

    None where there is none, or it does not say so.
    """
    with _store(path) as folder:
        about = About.of(folder) if folder is not None else None
        if folder is None or about is None:
            return None
        try:
            return about, *told(folder.read(COUNTERS, Counters.SIZE_BYTES + 1))
        except (OSError, ValueError):
            return None


def in_use(path: str) -> bool:
    """Tell whether a store has users."""
    with _store(path) as folder:
        with contextlib.suppress(OSError):
            if folder is not None:
                with _lock_of(folder) as alone:
                    return not alone
        return False


def remove(path: str) -> None:
    """Remove a store that nobody uses. Raises CacheError when somebody does, or it is none."""
    with _store(path) as folder:
        if folder is None:
            raise CacheError(f"{path} is no cache")
        if not _removed(folder):
            raise CacheError(f"the cache in {path} is in use")


def all_stores() -> list[str]:
    """Return the folders of all stores of this user that are known, those in memory first."""
    found = []
    with _memory() as memory:
        for name in sorted(memory.names()) if memory is not None else ():
            with _store(name, memory) as folder:
                if folder is not None:
                    found.append(folder.path)
    for path in sorted(register.paths()):
        if is_store(path):
            found.append(path)
        else:  # it was removed by other means
            register.forget(path)
    return found


def sweep(*paths: str) -> list[str]:
    """Remove what killed processes left: temporary stores, and what was half made or half removed.

    Args:
        paths: of stores, beside which that may lie, too.

    Returns the paths of the temporary stores.
    """
    swept = []
    for path in all_stores():
        with contextlib.suppress(CacheError, OSError), _store(path) as folder:
            about = About.of(folder) if folder is not None else None
            if folder is not None and about is not None and about.temporary and _removed(folder):
                swept.append(path)
    with _memory() as memory:
        _sweep_in(memory)
    for parent in {os.path.dirname(path) for path in paths} - {memory_folder()}:
        with contextlib.suppress(OSError), CacheFolder(parent) as folder:
            _sweep_in(folder)
    return swept


def _sweep_in(parent: CacheFolder | None) -> None:
    """Remove what is half made or half removed in a folder, if nobody is at it any more."""
    for name in filter(_LEFT_OVER.fullmatch, parent.names() if parent is not None else ()):
        with contextlib.suppress(CacheError, OSError), CacheFolder(name, parent) as folder:
            folder.check_owner(alone=True)
            if not _others(folder):
                with _lock_of(folder, os.O_RDWR | os.O_CREAT) as alone:
                    if alone:
                        folder.clear(_USERS)


def _is_store(folder: CacheFolder) -> bool:
    """Tell whether a folder is a store by what is in it, not another with such a name in it."""
    names, others = folder.names(), _others(folder)
    return _USERS in names and _USERS not in others and (ABOUT in names or not others)


def _others(folder: CacheFolder) -> list[str]:
    """Return the names in a folder that are no store's: its ``users`` has nothing in it."""
    names = folder.names()
    others = [n for n in names if n not in _NAMES and not n.startswith((f".{ABOUT}.", ".left."))]
    with contextlib.suppress(OSError):
        if folder.stat(_USERS).st_size:
            others.append(_USERS)
    return others


@contextlib.contextmanager
def _store(path: str, parent: CacheFolder | None = None) -> Iterator[CacheFolder | None]:
    """Open a store's folder; None where there is none that is this user's."""
    try:
        folder = _opened(path, parent)
    except CacheError:
        folder = None
    try:
        yield folder
    finally:
        if folder is not None:
            folder.close()


def _opened(path: str, parent: CacheFolder | None = None) -> CacheFolder | None:
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


@contextlib.contextmanager
def _memory() -> Iterator[CacheFolder | None]:
    """Open the folder of stores in memory; None where there is none that is this user's alone."""
    with contextlib.ExitStack() as opened:
        memory = None
        with contextlib.suppress(OSError, CacheError):
            found = opened.enter_context(CacheFolder(memory_folder()))
            found.check_owner(alone=True)
            memory = found
        yield memory


def _removed(folder: CacheFolder) -> bool:
    """Remove a store, if nobody uses it."""
    with _lock_of(folder) as alone:
        if alone:
            _remove(folder)
    return alone


def _remove(folder: CacheFolder) -> None:
    """Remove a store whose users are locked out. Raises CacheError where there is more in it."""
    path = folder.path
    others = _others(folder)
    if others:
        raise CacheError(
            f"{path} holds other things than a cache, and is not removed: {min(others)!r}"
        )
    folder.rename(os.path.join(os.path.dirname(path), _GONE + secrets.token_hex(8)))
    folder.clear(_USERS)
    register.forget(path)


@contextlib.contextmanager
def _lock_of(folder: CacheFolder, flags: int = os.O_RDWR) -> Iterator[bool]:
    """Try to lock a folder for oneself alone; tell whether one is, and it is still there."""
    users = folder.file(_USERS, flags)
    try:
        yield _alone(users) and folder.is_current()
    finally:
        os.close(users)


def memory_folder() -> str:
    """Return where stores in memory lie: a folder of this user's alone, on tmpfs."""
    shared = "/dev/shm"
    root = shared if os.path.isdir(shared) else tempfile.gettempdir()
    return os.path.join(root, f"stoker-{os.getuid()}")


def in_memory(path: str) -> bool:
    """Tell whether a store lies there."""
    return os.path.dirname(path) == memory_folder()


def made_memory_folder() -> str:
    """Make that folder. Raises CacheError where another user made it."""
    folder = memory_folder()
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    check_memory_folder()
    return folder


def check_memory_folder() -> None:
    """Raise CacheError where another user made that folder, or something else in its place."""
    try:
        with CacheFolder(memory_folder()) as memory:
            memory.check_owner(alone=True)
    except FileNotFoundError:
        pass
    except OSError:
        raise CacheError(
            f"{memory_folder()} is not a folder of this user's alone: somebody else made it"
        ) from None


def check_local(folder: str) -> None:
    """Refuse a folder on a network file system, where LMDB's locks do not hold."""
    kind = _file_system(folder)
    if _NETWORK.match(kind):
        raise ValueError(
            f"path={folder!r} is on a network file system ({kind}): a cache needs a local disk"
        )


def _file_system(folder: str) -> str:
    best, kind = "", ""
    target = os.path.realpath(folder)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, point, found, *_ = line.split(" ")
            inside = target == point or target.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, found
    return kind


def _alone(users: int) -> bool:
    """Lock for oneself alone; if others hold it, a lock that was held before may be lost."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for(users: int, folder: str) -> None:
    """Lock together with others, once who is alone is done."""
    deadline = time.monotonic() + _PATIENCE_S
    while not _joins(users):
        if time.monotonic() > deadline:
            raise CacheError(
                f"the cache in {folder} has been locked for {_PATIENCE_S:.0f} s by a process "
                "that checks or removes it"
            )
        time.sleep(0.01)


def _joins(users: int) -> bool:
    """Lock together with others, if none is alone."""
    try:
        fcntl.flock(users, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
