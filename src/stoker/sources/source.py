"""Sources: where examples come from, addressed by index (loaders: in their own order)."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from stoker import pytree
from stoker.buffers import Recycler
from stoker.cache.fingerprint import Fingerprint, of_file
from stoker.sources.local_files import IMAGE_SUFFIXES, images_below, read_file, warn_left_out


class Source(Protocol):
    """What the engine needs of a source whose examples have an index."""

    @property
    def name(self) -> str:
        """Name the source for people."""
        ...

    @property
    def fields(self) -> Sequence[str | int] | None:
        """The fields that every example is known to have, or None."""
        ...

    def __len__(self) -> int: ...

    def fetch(self, indices: Sequence[int]) -> list[Any]:
        """Return the examples at these indices. An error concerns the first of them alone."""
        ...

    def path(self, index: int) -> str | None:
        """Return the file an example comes from, where there is one."""
        ...

    def identity(self) -> str | None:
        """Return what tells this source from others, in all processes; None where nothing does."""
        ...

    def fingerprint(self, index: int) -> Fingerprint:
        """Return what tells an example's present content from others, looked up anew."""
        ...


@runtime_checkable
class LocalFiles(Protocol):
    """A source that reads whole files, local ones where ``local`` says so."""

    @property
    def local(self) -> bool:
        """Whether they are in a file system."""
        ...

    def path(self, index: int) -> str | None:
        """Return the file of an example."""
        ...


@runtime_checkable
class ReadAhead(Protocol):
    """A source that is told what will be fetched, to have many reads under way."""

    requests: int

    def reader(self) -> Reader:
        """Open it for one epoch."""
        ...


class Reader(Protocol):
    """Reads the examples of one epoch."""

    def expect(self, indices: Sequence[int]) -> None:
        """Begin to read what will be fetched; returns at once."""
        ...

    def fetch(self, indices: Sequence[int]) -> list[Any]:
        """Return the examples at these indices. An error concerns the first of them alone."""
        ...

    def close(self) -> None:
        """Give up what is under way."""
        ...


class LabeledImage(NamedTuple):
    """An example of ``from_folder``: an encoded image and the number of its class."""

    image: bytes
    label: int


class FolderSource:
    """Image files in one sub-folder a class, listed once, in sorted order.

    Hidden files, and files that are no images by their suffix, are left out. So is, with a warning,
    what is named like an image and is no regular file (nor a link to one), and what cannot be
    listed. A link that leads nowhere is an example that fails.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such folder.
        ValueError: it has no sub-folders, or no images in them.
    """

    fields = LabeledImage._fields
    local = True

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        with os.scandir(self.folder) as entries:
            self.classes = sorted(
                e.name for e in entries if e.is_dir() and not e.name.startswith(".")
            )
        if not self.classes:
            raise ValueError(
                f"{self.folder} has no sub-folders; from_folder expects one a class, "
                "such as train/cat/0001.jpg"
            )
        self._files: list[tuple[str, int]] = []
        left_out: list[str] = []
        for label, name in enumerate(self.classes):
            found = sorted(images_below(os.path.join(self.folder, name), left_out))
            self._files += [(os.path.relpath(file, self.folder), label) for file in found]
        warn_left_out(self.name, left_out)
        if not self._files:
            raise ValueError(
                f"{self.folder} has no images in its {len(self.classes)} sub-folders (looked for "
                f"{', '.join(IMAGE_SUFFIXES[:5])}, ...)"
            )

    @property
    def name(self) -> str:
        """Name the source for people."""
        return f"from_folder({self.folder!r})"

    def __len__(self) -> int:
        return len(self._files)

    def fetch(self, indices: Sequence[int]) -> list[Any]:
        """Read the files."""
        examples = []
        for index in indices:
            file, label = self._files[index]
            data = read_file(os.path.join(self.folder, file))
            examples.append(LabeledImage(data, label))
        return examples

    def identity(self) -> str | None:
        """Return the folder's real path: files are known below it by path, size, times, inode."""
        return f"folder {os.path.realpath(self.folder)}"

    def fingerprint(self, index: int) -> Fingerprint:
        """Return the file's fingerprint as it is now, with its label."""
        file, label = self._files[index]
        return of_file(file, os.stat(os.path.join(self.folder, file)), label)

    def path(self, index: int) -> str | None:
        """Return the file's path."""
        return os.path.join(self.folder, self._files[index][0])


class DatasetSource:
    """Any object with ``__len__`` and ``__getitem__``; ``__getitems__`` is used when there."""

    fields = None

    def __init__(self, dataset: Any) -> None:
        for method in ("__getitem__", "__len__"):
            if not hasattr(dataset, method):
                raise TypeError(
                    f"from_dataset needs an object with __len__ and __getitem__; "
                    f"{type(dataset).__name__} has no {method}"
                )
        self.dataset = dataset
        self._length = len(dataset)
        self.takes_many = getattr(dataset, "__getitems__", None) is not None

    @property
    def name(self) -> str:
        """Name the source for people."""
        return f"from_dataset({type(self.dataset).__name__})"

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: Any) -> list[Any]:
        """Ask the dataset, with plain integers."""
        plain = indices.tolist() if isinstance(indices, np.ndarray) else list(indices)
        if self.takes_many:
            examples = list(self.dataset.__getitems__(plain))
            if len(examples) != len(plain):
                raise ValueError(f"__getitems__ gave {len(examples)} examples for {len(plain)}")
            return examples
        dataset = self.dataset
        return [dataset[index] for index in plain]

    def path(self, index: int) -> str | None:
        """Return None: a dataset does not tell."""
        return None

    def identity(self) -> str | None:
        """Return None: an object says nothing about its data."""
        return None

    def fingerprint(self, index: int) -> Fingerprint:
        """Return the index."""
        return Fingerprint(int(index))


class ArraySource:
    """NumPy arrays or memory maps of one length; an example is a row of each.

    Rows are copied out of the arrays: what is done to an example does not reach them.
    """

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        if not arrays:
            raise TypeError("from_arrays needs at least one array")
        for array in arrays:
            if not isinstance(array, np.ndarray) or array.ndim == 0:
                raise TypeError(
                    f"from_arrays takes NumPy arrays of at least one dimension, not "
                    f"{type(array).__name__}; use np.asarray(...), or from_dataset"
                )
        lengths = [len(array) for array in arrays]
        if len(set(lengths)) > 1:
            raise ValueError(f"from_arrays needs arrays of one length, not {lengths}")
        self.arrays = [np.asarray(array) for array in arrays]
        # Rows are copied fastest from two dimensions.
        self._flat = [
            a.reshape(len(a), math.prod(a.shape[1:])) if a.ndim > 2 and a.flags.c_contiguous else a
            for a in self.arrays
        ]
        # Strings and objects go the way of single examples: batches of them are lists.
        self.stacks = all(array.dtype.kind in "biufcmM" for array in self.arrays)
        self.fields: Sequence[str | int] = range(len(arrays)) if len(arrays) > 1 else ()

    @property
    def name(self) -> str:
        """Name the source for people."""
        shapes = ", ".join(f"{a.dtype} {list(a.shape)}" for a in self.arrays)
        return f"from_arrays({shapes})"

    def __len__(self) -> int:
        return len(self.arrays[0])

    def fetch(self, indices: Sequence[int]) -> list[Any]:
        """Return rows: a bare row of one array, or tuples of rows."""
        columns = [list(array[np.asarray(indices)]) for array in self.arrays]
        return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    def path(self, index: int) -> str | None:
        """Return None: there are no files."""
        return None

    def identity(self) -> str | None:
        """Return None: what is in memory, or in a part of a map, says nothing about itself."""
        return None

    def fingerprint(self, index: int) -> Fingerprint:
        """Return the index."""
        return Fingerprint(int(index))

    def allocate(self, rows: int, recycler: Recycler) -> Any:
        """Return the arrays of a batch, to be filled by ``gather``."""
        outs = [recycler.array((rows, *a.shape[1:]), a.dtype) for a in self.arrays]
        return outs[0] if len(outs) == 1 else tuple(outs)

    def parted(self, batch: Any, rows: int) -> list[Any]:
        """Return what was allocated as batches of ``rows``: views, the last one of the rest."""
        first = batch[0] if isinstance(batch, tuple) else batch
        if len(first) <= rows:
            return [batch]
        spans = [slice(start, start + rows) for start in range(0, len(first), rows)]
        if isinstance(batch, tuple):
            return [tuple(array[span] for array in batch) for span in spans]
        return [batch[span] for span in spans]

    def gather(self, indices: NDArray[np.int64], batch: Any, start: int) -> None:
        """Copy rows into ``batch``, from its row ``start`` on."""
        outs = batch if isinstance(batch, tuple) else (batch,)
        stop = start + len(indices)
        for flat, out in zip(self._flat, outs, strict=True):
            rows = out[start:stop]
            if flat.ndim != out.ndim:
                rows = rows.reshape(len(indices), flat.shape[1])
            # "clip" lets NumPy write straight into out; the indices are in range.
            flat.take(indices, axis=0, out=rows, mode="clip")


def check_fields(source: Any, on: str | int | None) -> None:
    """Refuse a field that the source's examples are known not to have.

    Raises LookupError with the fields that there are.
    """
    fields = source.fields
    if on is None or fields is None:
        return
    positions = range(-len(fields), len(fields))
    if on in fields or (isinstance(on, int) and on in positions):
        return
    shown = ", ".join(repr(f) for f in fields) or "no fields: they are single arrays"
    raise pytree.FieldError(f"no field {on!r}; the examples of {source.name} have {shown}")
