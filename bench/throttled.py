"""A disk of a known speed and a process of a known memory: a loop device and control groups.

For the benchmarks of the cache; root alone may make them. Control groups of version 1 were run;
those of version 2 are written by their documentation, and untested.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

_V1 = Path("/sys/fs/cgroup")
_V2_MARK = Path("/sys/fs/cgroup/cgroup.controllers")


def why_not() -> str:
    """Return why this cannot be done here; "" if it can."""
    if os.geteuid():
        return "needs root, for a loop device and control groups"
    for program in ("losetup", "mkfs.ext4", "mount"):
        if shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None:
            return f"needs {program}"
    try:
        with _group(1 << 30, "7:0", 1 << 30):
            pass
    except OSError as error:
        return f"needs control groups that can be written: {error}"
    return ""


class Disk:
    """A file system on a loop device.

    Attributes:
        folder: where it is mounted.
        device: its number, as control groups have it.
        stat: where the kernel says what was read.
    """

    def __init__(self, folder: Path, loop: str) -> None:
        self.folder = folder
        number = os.stat(loop).st_rdev
        self.device = f"{os.major(number)}:{os.minor(number)}"
        self.stat = f"/sys/dev/block/{self.device}/stat"

    def forget(self) -> None:
        """Have the page cache forget its files."""
        subprocess.run(["mount", "-o", "remount,ro", self.folder], check=True)
        forget(self.folder)


def forget(folder: Path) -> None:
    """Have the page cache forget the files of a folder."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def read_bytes(stat: str) -> int:
    """Return how much was read from a device so far."""
    return int(Path(stat).read_text().split()[2]) * 512


def write_files(folder: Path, contents: Iterable[bytes]) -> None:
    """Write files into four class folders."""
    for number, content in enumerate(contents):
        home = folder / f"class{number % 4}"
        home.mkdir(exist_ok=True)
        (home / f"{number:06}.jpg").write_bytes(content)


@contextmanager
def disk(size_bytes: int) -> Iterator[Disk]:
    """Make a disk, in a sparse file that the page cache does not keep; it goes with the block."""
    with ExitStack() as undo:
        home = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="throttled-")))
        image, folder = home / "image", home / "files"
        folder.mkdir()
        with open(image, "wb") as file:
            file.truncate(size_bytes)
        _run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", image)
        loop = _run("losetup", "--find", "--show", "--direct-io=on", image).strip()
        undo.callback(_run, "losetup", "--detach", loop)
        _run("mount", "-o", "noatime", loop, folder)
        undo.callback(_run, "umount", folder)
        yield Disk(folder, loop)


@contextmanager
def limited(memory_bytes: int, on: Disk, bytes_per_s: int) -> Iterator[Sequence[str]]:
    """Limit memory and reading speed; what is yielded goes in front of a command line."""
    with _group(memory_bytes, on.device, bytes_per_s) as folders:
        yield _joining(folders)


def _joining(folders: Sequence[Path]) -> Sequence[str]:
    joins = " && ".join(f"echo $$ > {folder}/cgroup.procs" for folder in folders)
    return ["sh", "-c", f'{joins} && exec "$@"', "limited"]


@contextmanager
def _group(memory_bytes: int, device: str, bytes_per_s: int) -> Iterator[list[Path]]:
    name = f"stoker-{secrets.token_hex(4)}"
    if _V2_MARK.exists():
        folders = {_V1 / name: {"memory.max": memory_bytes, "memory.swap.max": 0}}
        (_V1 / "cgroup.subtree_control").write_text("+memory +io")
        folders[_V1 / name]["io.max"] = f"{device} rbps={bytes_per_s}"  # type: ignore[assignment]
    else:
        folders = {
            _V1 / "memory" / name: {"memory.limit_in_bytes": memory_bytes},
            _V1 / "blkio" / name: {
                "blkio.throttle.read_bps_device": f"{device} {bytes_per_s}"  # type: ignore[dict-item]
            },
        }
    made: list[Path] = []
    try:
        for folder, settings in folders.items():
            folder.mkdir()
            made.append(folder)
            for setting, value in settings.items():
                (folder / setting).write_text(str(value))
        yield made
    finally:
        for folder in made:
            _removed(folder)


def _removed(folder: Path) -> None:
    for _ in range(50):
        try:
            return folder.rmdir()
        except OSError:  # processes on their way out
            time.sleep(0.1)


def _run(*command: object) -> str:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    done = subprocess.run(
        [str(part) for part in command],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
    )
    return done.stdout
