"""Arrays in HDF5 files, opened in each process anew."""

from __future__ import annotations

import os
from typing import Any

from stoker.fork_safety import OwningProcess
from stoker.sources.open_files import FileVersion, version_of

_INHERITED: list[Any] = []
"""What a forked child must not close: the files are its parent's."""


class HdfArray:
    """A dataset of a file, by the file's path: h5py's own can neither be sent nor inherited.

    It is opened when it is first read in a process, and stays open as long as this object.

    Raises ValueError for a dataset of a file that is closed, that is open for writing, or that has
    no path of its own.
    """

    def __init__(self, dataset: Any) -> None:
        if not dataset:
            raise ValueError("from_arrays: the HDF5 file of this dataset is closed")
        path = os.path.abspath(os.fsdecode(dataset.file.filename))
        if not os.path.isfile(path):
            raise ValueError(
                f"from_arrays: the HDF5 dataset {dataset.name!r} lies in no file of its own; "
                "workers could not open it: use np.asarray(...)"
            )
        if dataset.file.mode != "r":
            raise ValueError(
                f"from_arrays: {path} is open for writing, and workers could not open it: open it "
                "with h5py.File(path, 'r')"
            )
        self._path, self._name = path, dataset.name
        self.shape, self.dtype = dataset.shape, dataset.dtype
        self.chunks = dataset.chunks
        self._version = _version(path)
        self._open: Any = None
        self._owner = OwningProcess()

    def __getstate__(self) -> dict[str, Any]:
        opened = ("_owner", "_open")
        return {name: value for name, value in self.__dict__.items() if name not in opened}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        self._open, self._owner = None, OwningProcess()

    def __getitem__(self, rows: Any) -> Any:
        if not self._owner.is_current:
            _INHERITED.append(self._open)
            self._open, self._owner = None, OwningProcess()
        if self._open is None:
            self._open = self._opened()
        return self._open[rows]

    def _opened(self) -> Any:
        import h5py

        if _version(self._path) != self._version:
            raise ValueError(
                f"{self._path} has changed since the pipeline was built: build it anew"
            )
        return h5py.File(self._path, "r")[self._name]


def _version(path: str) -> FileVersion:
    found = os.stat(path)
    return version_of(found)
