"""A store's folder: made as a whole, shared by its users, removed with the last of them.

Every user holds a shared lock on the folder's file ``users``, which the kernel frees with its
process. Who gets the lock exclusively is alone, and may check, mend or remove the store. A folder
is renamed into its place only when it is complete and locked, and out of it before it is removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from stoker.caching.counters import DAMAGED, DATA_NS, Counters
from stoker.caching.store import DATA, Store
from stoker.caution import warn
from stoker.errors import CacheError, CacheWarning

_FORMAT = 1
_ABOUT = "about.json"
_USERS = "users"
_MAKING, _GONE = ".making-", ".gone-"
_PATIENCE_S = 30.0
_HALF_MADE_S = 60.0
_NETWORK = re.compile(r"nfs|cifs|smb|9p|lustre|gpfs|ceph|gluster|fuse\.(?!fuseblk|ext)")


class About(msgspec.Struct):
    """What a store's folder says about it."""

    format: int
    describes: str
    """What is in it, for people."""
    limit_bytes: int
    temporary: bool
    """Whether it goes with its last user."""
    made_s: float
    """When it was made, in seconds since 1970."""
    boot: str
    """Since when the machine runs on which it was used last."""
    clean: bool = False
    """Whether its last user closed it."""


class Place:
    """A user's hold on a store's folder; while it lasts, the folder stays.

    Attributes:
        folder: the folder.
        about: what it says.
    """

    def __init__(self, folder: str, users: int, about: About) -> None:
        self.folder = folder
        self.about = about
        self._users = users

    def leave(self) -> None:
        """Let go; the last one removes a temporary store and closes a kept one."""
        try:
            if _alone(self._users) and _is_current(self.folder, self._users):
                if self.about.temporary:
                    _remove(self.folder)
                else:
                    self._finish()
        finally:
            os.close(self._users)

    def drop(self) -> None:
        """Let go of what was inherited over a fork: the parent still holds it."""
        os.close(self._users)

    def _finish(self) -> None:
        data = os.open(os.path.join(self.folder, DATA), os.O_RDWR)
        try:
            os.fsync(data)
        finally:
            os.close(data)
        self.about.clean = True
        with contextlib.suppress(OSError):  # then it is checked when it is used again
            _write_about(self.folder, self.about)


def joined(
    folder: str, *, limit_bytes: int | None, describes: str, temporary: bool, on_damage: str
) -> Place | None:
    """Take hold of a store, which is made if it is not there.

    Args:
        folder: where.
        limit_bytes, describes, temporary: what it is made with. Without a limit none is made, and
            None returned if there is none, or none that can stay.
        on_damage: ``"rebuild"`` to begin anew, with a warning, or ``"refuse"``.

    Raises CacheError where it is damaged and is refused, or is no store; OSError where it cannot be
    made.
    """
    while True:
        made = None
        try:
            users = os.open(os.path.join(folder, _USERS), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            if limit_bytes is None:
                return None
            made = _made(folder, limit_bytes, describes, temporary)
            if made is None:
                continue  # somebody else was first
            _register(folder)
            return made
        try:
            place = _entered(folder, users, on_damage)
        except BaseException:
            os.close(users)
            raise
        if place is not None:
            return place
        os.close(users)


def _entered(folder: str, users: int, on_damage: str) -> Place | None:
    """Take hold of a store that is there; None if it is not, or no more."""
    alone = _alone(users)
    if not alone:
        _wait_for(users, folder)
    if not _is_current(folder, users):
        return None
    about = _about(folder)
    if alone:
        if about is not None and about.temporary:
            _remove(folder)  # its last user was killed
            return None
        damage = _damage(folder, about)
        if damage:
            if on_damage == "refuse":
                raise CacheError(
                    f"the cache in {folder} is damaged: {damage}. Remove it (stoker cache remove "
                    f"{folder}), or have it made anew: on_damage='rebuild'"
                )
            if damage != _REBOOTED:
                warn(
                    f"the cache in {folder} is damaged ({damage}) and is made anew",
                    CacheWarning,
                )
            _remove(folder)
            return None
        assert about is not None
        about.clean, about.boot = False, boot()
        with contextlib.suppress(OSError):  # a full disk is no reason not to read what is there
            _write_about(folder, about)
        fcntl.flock(users, fcntl.LOCK_SH)
    if about is None:
        raise CacheError(f"the cache in {folder} does not say what it is: remove it")
    return Place(folder, users, about)


_REBOOTED = "it was in use when the machine went down"


def _damage(folder: str, about: About | None) -> str:
    """Tell what is wrong with a store that nobody uses; "" for nothing."""
    if about is None:
        return f"{_ABOUT} cannot be read"
    if about.format != _FORMAT:
        return f"it has format {about.format}, this version writes {_FORMAT}"
    if not about.clean and about.boot != boot():
        return _REBOOTED
    try:
        data = os.stat(os.path.join(folder, DATA))
    except OSError as error:
        return str(error)
    if data.st_size != about.limit_bytes:
        return f"{DATA} has {data.st_size:,} bytes instead of {about.limit_bytes:,}"
    counters = Counters(os.path.join(folder, "counters"))
    spoilt, known_ns = bool(counters.head[DAMAGED]), int(counters.head[DATA_NS])
    counters.close()
    if spoilt:
        return "items in it were not as they had been written"
    if data.st_mtime_ns == known_ns:
        return ""  # nobody has written since the last item entered
    # What cannot be trusted may crash its reader: that is another process. It reads all of it.
    done = subprocess.run(
        [sys.executable, "-m", "stoker.caching.check", folder, str(about.limit_bytes)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return f"reading it ends with signal {-done.returncode}"
    return (done.stderr.strip().splitlines() or ["it cannot be read"])[-1]


def _made(folder: str, limit_bytes: int, describes: str, temporary: bool) -> Place | None:
    """Make a store; None when somebody else was faster."""
    parent = os.path.dirname(folder)
    os.makedirs(parent, mode=0o700, exist_ok=True)
    with contextlib.suppress(OSError):
        found = os.listdir(folder)
        if found and _USERS not in found:
            raise CacheError(
                f"{folder} holds other things than a cache: give path= a folder of its own"
            )
    making = tempfile.mkdtemp(prefix=_MAKING, dir=parent)  # its owner's alone
    users = -1
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        users = os.open(os.path.join(making, _USERS), flags, 0o600)
        fcntl.flock(users, fcntl.LOCK_SH)
        Store.create(making, limit_bytes)
        about = About(_FORMAT, describes, limit_bytes, temporary, time.time(), boot())
        _write_about(making, about)
        os.rename(making, folder)
    except BaseException as error:
        if users >= 0:
            os.close(users)
        shutil.rmtree(making, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return None  # and it may be gone again by now
        raise
    return Place(folder, users, about)


def is_store(folder: str) -> bool:
    """Tell whether a folder is a store."""
    return os.path.exists(os.path.join(folder, _USERS))


def about_of(folder: str) -> About | None:
    """Return what a store says about itself; None if it does not."""
    return _about(folder)


def in_use(folder: str) -> bool:
    """Tell whether a store has users."""
    with _users_of(folder) as users:
        return users is not None and not _alone(users)


def remove(folder: str) -> None:
    """Remove a store that nobody uses. Raises CacheError when somebody does, or it is none."""
    with _users_of(folder) as users:
        if users is None:
            raise CacheError(f"{folder} is no cache")
        if not _alone(users):
            raise CacheError(f"the cache in {folder} is in use")
        _remove(folder)


def all_stores() -> list[str]:
    """Return the folders of all stores of this user that are known, those in memory first."""
    found = [path for path in _entries(memory_folder()) if is_store(path)]
    for link in _entries(_register_folder()):
        folder = os.path.realpath(link)
        if is_store(folder):
            found.append(folder)
        else:  # it was removed by other means
            with contextlib.suppress(OSError):
                os.unlink(link)
    return sorted(set(found), key=lambda folder: (not folder.startswith(memory_folder()), folder))


def sweep() -> list[str]:
    """Remove what processes left that were killed: temporary stores, and half-made ones."""
    swept = []
    for folder in all_stores():
        with _users_of(folder) as users:
            about = _about(folder)
            if users is not None and about is not None and about.temporary and _alone(users):
                _remove(folder)
                swept.append(folder)
    for path in _entries(memory_folder()):
        name = os.path.basename(path)
        with contextlib.suppress(OSError):
            half = name.startswith(_MAKING) and time.time() - os.stat(path).st_mtime > _HALF_MADE_S
            if name.startswith(_GONE) or half:
                shutil.rmtree(path, ignore_errors=True)
    return swept


def _entries(folder: str) -> list[str]:
    try:
        return [os.path.join(folder, name) for name in os.listdir(folder)]
    except OSError:
        return []


def memory_folder() -> str:
    """Return where stores in memory lie: a folder of this user's alone, on tmpfs."""
    shared = "/dev/shm"
    root = shared if os.path.isdir(shared) else tempfile.gettempdir()
    return os.path.join(root, f"stoker-{os.getuid()}")


def made_memory_folder() -> str:
    """Make that folder. Raises CacheError where another user made it."""
    folder = memory_folder()
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise CacheError(f"{folder} is not a folder of this user's alone: somebody else made it")
    return folder


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


def boot() -> str:
    """Return what tells this run of the machine from others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import psutil

        return str(int(psutil.boot_time()))


@contextlib.contextmanager
def _users_of(folder: str) -> Iterator[int | None]:
    try:
        users = os.open(os.path.join(folder, _USERS), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield users
    finally:
        os.close(users)


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
    while True:
        try:
            return fcntl.flock(users, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise CacheError(
                    f"the cache in {folder} has been locked for {_PATIENCE_S:.0f} s by a process "
                    "that checks or removes it"
                ) from None
            time.sleep(0.01)


def _is_current(folder: str, users: int) -> bool:
    """Tell whether a folder is still the one whose lock is held."""
    try:
        found = os.stat(os.path.join(folder, _USERS))
    except OSError:
        return False
    mine = os.fstat(users)
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)


def _remove(folder: str) -> None:
    gone = os.path.join(os.path.dirname(folder), _GONE + secrets.token_hex(8))
    os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)
    _unregister(folder)


def _about(folder: str) -> About | None:
    try:
        return msgspec.json.decode(Path(folder, _ABOUT).read_bytes(), type=About)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _write_about(folder: str, about: About) -> None:
    new = os.path.join(folder, f".{_ABOUT}.{os.getpid()}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(about))
        os.replace(new, os.path.join(folder, _ABOUT))
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # Ctrl-C came behind the replacing
            os.unlink(new)
        raise


def _register_folder() -> str:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(state, "stoker", "caches")


def _link(folder: str) -> str:
    return os.path.join(_register_folder(), xxhash.xxh3_64_hexdigest(folder.encode()))


def _register(folder: str) -> None:
    """Note where a store outside of memory lies, for ``stoker cache list``."""
    if folder.startswith(memory_folder()):
        return
    with contextlib.suppress(OSError):  # without a home it is not listed
        os.makedirs(_register_folder(), mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.symlink(folder, _link(folder))


def _unregister(folder: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(_link(folder))
