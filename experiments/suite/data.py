"""Where the data of the workloads is found, and what is unpacked of it."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

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


class Files(Sequence[bytes]):
    """The files of a tar archive, in order of their names, read from one place.

    The archive is unpacked once, into a temporary folder. Interrupted, that leaves nothing; of
    several processes the first one wins.
    """

    def __init__(self, archive: Path) -> None:
        folder = _packed(archive)
        self.names: list[str] = json.loads((folder / "names.json").read_text())
        """Their paths in the archive."""
        self._ends = np.load(folder / "ends.npy").tolist()
        self._bytes = np.memmap(folder / "bytes", np.uint8, mode="r")

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: Any) -> Any:
        return self._bytes[self._ends[index - 1] if index else 0 : self._ends[index]].tobytes()


def _packed(archive: Path) -> Path:
    stat = archive.stat()
    root = Path(tempfile.gettempdir()) / f"stoker-experiments-{os.getuid()}"
    folder = root / f"{archive.name.split('.')[0]}-{stat.st_size}-{int(stat.st_mtime)}"
    if folder.is_dir():
        return folder
    root.mkdir(mode=0o700, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=root))
    try:
        with tarfile.open(archive) as tar:
            found = {
                member.name.removeprefix("./"): file.read()
                for member in tar
                if (file := tar.extractfile(member)) is not None
            }
        names = sorted(found)
        (unfinished / "names.json").write_text(json.dumps(names))
        np.save(unfinished / "ends.npy", np.cumsum([len(found[name]) for name in names]))
        (unfinished / "bytes").write_bytes(b"".join(found[name] for name in names))
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
