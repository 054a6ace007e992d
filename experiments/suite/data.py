"""Where the data of the workloads is found, and what is unpacked of it."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

VARIABLE = "STOKER_DATA"
_BESIDE = Path(__file__).resolve().parents[2].parent / "shared" / "data"


class MissingData(Exception):
    """A workload's files are not there; says which, and where they come from."""


def data_folder(given: Path | None) -> Path | None:
    """Return the folder of data: what is `given`, or what the environment says, or its usual place.

    None if there is none. Raises MissingData if a folder was named that is not there.
    """
    named = given or (Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None)
    if named is None:
        return _BESIDE if _BESIDE.is_dir() else None
    if not named.is_dir():
        raise MissingData(f"the data folder {named} does not exist")
    return named


def find(folder: Path, name: str, origin: str) -> Path:
    """Return the path of a file or folder of data. Raises MissingData, naming its origin."""
    path = folder / name
    if not path.exists():
        raise MissingData(f"{path} is missing; it is {origin}")
    return path


def unpacked(archive: Path, prepare: Callable[[Path, Path], None] | None = None) -> Path:
    """Return a folder with what is in a tar archive, unpacked once into a temporary place.

    `prepare(unpacked, out)` may make other files of it: then the folder has those instead.
    Interrupted, it leaves nothing; of several processes the first one wins.
    """
    stat = archive.stat()
    name = f"{archive.name.split('.')[0]}-{stat.st_size}-{int(stat.st_mtime)}"
    root = Path(tempfile.gettempdir()) / f"stoker-experiments-{os.getuid()}"
    folder = root / (name if prepare is None else f"{name}-{prepare.__name__}")
    if folder.is_dir():
        return folder
    root.mkdir(mode=0o700, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=root))
    try:
        raw = unfinished / "raw"
        with tarfile.open(archive) as tar:
            tar.extractall(raw, filter="data")
        out = raw
        if prepare is not None:
            out = unfinished / "prepared"
            out.mkdir()
            prepare(raw, out)
        try:
            out.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
