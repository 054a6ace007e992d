"""Fingerprints of examples, and digests of datasets and functions, which have no names.

Two halves of a ``random_split`` have the same class and length; only their selections differ. So
the digest of an object covers its class and length, its texts, numbers and paths, its arrays, the
ends of its long lists, and the objects that it wraps. The digest of a function covers its code. It
is the same in another process of the same Python.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from stoker.basics import pytree

_ATOMS = (str, bytes, int, float, complex, bool, type(None), PurePath, np.generic)
_WRAPPED = ("dataset", "datasets")
_SELECTED = "indices"
# The deepest part that is read. Datasets in wrappers are hardly deeper, and cycles end there.
# Chosen, not measured.
_MAX_DEPTH = 8
# The most parts that are read, nested ones included: the first epoch waits. Chosen, not measured.
_MAX_PARTS = 4096
# Of a longer list, only the length and this many items at its ends are read: lists of files may
# have millions. Indices are read whole. Chosen, not measured.
_MAX_WHOLE_LIST = 64
# Examples that are read to tell data apart: the first batch waits for them. Chosen, not measured.
_SAMPLED_ROWS = 16
# Names by which ranks see that they list data alike: some microseconds each. Chosen, not measured.
_SAMPLED_NAMES = 1024
# Of a longer text, ranks compare a digest: the first one that differs stands in a message.
_MAX_LANDMARK = 100
# Of a larger array, only dtype and shape are read: the first batch waits. Chosen, not measured.
_MAX_DIGESTED_BYTES = 1 << 20

_RENUMBERING = {"vfat", "msdos", "exfat", "cifs", "smb3"}


class Fingerprint(NamedTuple):
    """Identifies an example's content: it differs between examples, and when a file changes."""

    name: str | bytes | int
    """The example's name within its source: a path, or an index."""
    size_bytes: int = -1
    """The size of its file; -1 if there is no file, or if its server does not say."""
    version: int = 0
    """When its file was modified (ns), or a digest of the server's version; 0 if unknown."""
    label: int = 0
    """The label that its source adds to the file's content."""
    changed_ns: int = 0
    """The change time of its local file, which no tool can set back."""
    inode: int = 0
    """The inode number of its local file; 0 if the file system may change such numbers."""


def of_file(name: str, status: os.stat_result, label: int = 0) -> Fingerprint:
    inode = 0 if can_renumber(status.st_dev, _mounts()) else status.st_ino
    return Fingerprint(name, status.st_size, status.st_mtime_ns, label, status.st_ctime_ns, inode)


@functools.cache
def can_renumber(device: int, mounts: str) -> bool:
    """True if ``mounts`` say that a file system may change inode numbers, as FUSE and FAT do."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        before, _, behind = line.partition(" - ")
        if before.split(" ")[2:3] == [number]:
            return behind.startswith("fuse") or behind.split(" ")[0] in _RENUMBERING
    return False


@functools.cache
def _mounts() -> str:
    return Path("/proc/self/mountinfo").read_text(errors="replace")


def content_digest(value: Any) -> str:
    """Return a digest of an object's content. It calls only ``len`` of the object."""
    digester = _Digester()
    digester.add(value, _MAX_DEPTH, is_data=True)
    return digester.digest.hexdigest()


def rows_digest(fetch: Any, count: int) -> str:
    """Return a digest of 16 of ``count`` examples, for data that nothing else identifies."""
    if not count:
        return ""
    rows = np.unique(np.linspace(0, count - 1, _SAMPLED_ROWS).astype(np.int64))
    return content_digest(fetch(rows))


def spread(count: int, most: int = _SAMPLED_NAMES) -> list[int]:
    """Return up to ``most`` numbers below ``count``, evenly spaced, with the first and the last."""
    return sorted({at * (count - 1) // (most - 1) for at in range(most)}) if count else []


def landmark(item: Any) -> str:
    """Return a text by which hosts see that they have the same item: of a path the last part."""
    plain = pytree.map_leaves(_without_folders, item)
    text = repr(plain)
    if len(text) <= _MAX_LANDMARK and not any(
        isinstance(leaf, (np.ndarray, bytes)) for leaf in pytree.leaves(plain)
    ):
        return text
    digest = hashlib.blake2b(digest_size=16)
    for leaf in pytree.leaves(plain):
        is_array = isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject
        digest.update(leaf.tobytes() if is_array else repr(leaf).encode("utf-8", "surrogatepass"))
    return f"#{digest.hexdigest()[:8]}"


def landmarks_of_list(items: Any, name: str = "example {}") -> dict[str, str]:
    """Return the landmarks of a list: of names about a thousand, else three."""
    if not len(items):
        return {}
    places = spread(len(items)) if _has_name(items[0]) else spread(len(items), 3)
    return {name.format(at): landmark(items[at]) for at in places}


def landmarks_of_dataset(dataset: Any) -> dict[str, str]:
    """Return the landmarks of a user's dataset, whose examples are not asked for.

    They are the names that it lists, one for each example, and the indices that a ``Subset`` takes.
    Other attributes may differ between ranks: a device, a root folder, what was measured.
    """
    selects = selection_digest(dataset)
    found = {"the selection of its Subset": selects[:8]} if selects else {}
    for each, attributes in _wrapped(dataset):
        for name, value in sorted(attributes.items()):
            is_list = isinstance(value, (list, tuple, np.ndarray))
            if is_list and _length(value) == _length(each) > 0 and _has_name(value[0]):
                found |= landmarks_of_list(value, f"{name}[{{}}]")
    return found


def _wrapped(dataset: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield a dataset and those that it wraps, each with its attributes."""
    within = [dataset]
    for each in itertools.islice(within, _MAX_PARTS):  # grows meanwhile
        attributes = getattr(each, "__dict__", {})
        yield each, attributes
        datasets = attributes.get("datasets")
        within += [attributes["dataset"]] if "dataset" in attributes else []
        within += datasets if isinstance(datasets, (list, tuple)) else []


def _length(value: Any) -> int:
    with contextlib.suppress(Exception):  # a user's, which may raise anything
        return len(value)
    return -1


def _has_name(item: Any) -> bool:
    return any(isinstance(leaf, (str, PurePath)) for leaf in pytree.leaves(item))


def _without_folders(leaf: Any) -> Any:
    """Return a leaf as other hosts have it, too; of what may differ there, the name of its type."""
    if isinstance(leaf, (str, PurePath)):
        return os.path.basename(str(leaf))
    if pytree.is_tensor(leaf):
        return np.asarray(leaf.tolist())  # NumPy has no bfloat16
    if isinstance(leaf, np.ndarray):
        return np.asarray(leaf)  # a row of a memory map is one, and would not be read
    return leaf if isinstance(leaf, _ATOMS) else type(leaf).__name__


def selection_digest(dataset: Any) -> str:
    """Return a digest of the indices that ``Subset``-like wrappers select; "" if none selects."""
    digest, is_any = hashlib.blake2b(digest_size=16), False
    for _, attributes in _wrapped(dataset):
        if _SELECTED in attributes and "dataset" in attributes:
            is_any = True
            digest.update(_index_bytes(attributes[_SELECTED]) + b"\0")
    return digest.hexdigest() if is_any else ""


class _Digester:
    """Adds objects to a digest."""

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        self._parts_left = _MAX_PARTS

    def add(self, value: Any, depth: int, *, is_data: bool = False) -> None:
        """Add an object. Of an object that is neither data nor callable, add only the class."""
        kind = type(value)
        self._add(f"\0{kind.__module__}.{kind.__qualname__}:")
        self._parts_left -= 1
        if isinstance(value, _ATOMS):
            self._add(repr(value))
        elif depth == 0 or self._parts_left < 0:
            return
        elif isinstance(value, np.ndarray) or pytree.is_tensor(value):
            self._add_array(value)
        elif isinstance(value, types.FunctionType):
            self._add_code(value.__code__)
            self.add([value.__defaults__, value.__kwdefaults__, _closure_values(value)], depth - 1)
        elif isinstance(value, types.MethodType):
            self.add(value.__func__, depth - 1)
            self.add(value.__self__, depth - 1, is_data=True)
        elif isinstance(value, (type, types.BuiltinFunctionType)):
            self._add(f"{value.__module__}.{value.__qualname__}")
        elif isinstance(value, functools.partial):
            self.add([value.func, value.args, value.keywords], depth - 1)
        elif kind in (list, tuple, range):
            self._add_all(value, depth, is_data)
        elif kind is dict:
            self._add_all(list(value.items()), depth, is_data)
        elif is_data or callable(value) or hasattr(kind, "_fields"):
            self._add_object(value, depth)

    def _add(self, text: str) -> None:
        self.digest.update(text.encode("utf-8", "surrogatepass"))

    def _add_object(self, value: Any, depth: int) -> None:
        with contextlib.suppress(Exception):  # most callables have no length
            self._add(f"{len(value)}")
        if isinstance(value, tuple):
            return self._add_all(tuple(value), depth, False)
        attributes: Mapping[str, Any] = getattr(value, "__dict__", {})
        for name in sorted(attributes):
            self._add(f"\0{name}")
            if name == _SELECTED:
                self.digest.update(_index_bytes(attributes[name]))
            else:
                self.add(attributes[name], depth - 1, is_data=name in _WRAPPED)

    def _add_all(self, values: Sequence[Any], depth: int, is_data: bool) -> None:
        self._add(f"{len(values)}")
        if isinstance(values, range):
            return self._add(repr(values))
        half = _MAX_WHOLE_LIST // 2
        sample = values if len(values) <= _MAX_WHOLE_LIST else [*values[:half], *values[-half:]]
        for each in sample:
            self.add(each, depth - 1, is_data=is_data)

    def _add_array(self, array: Any) -> None:
        self._add(f"{array.dtype} {tuple(array.shape)}")
        is_plain = isinstance(array, np.ndarray) and not array.dtype.hasobject
        if is_plain and array.nbytes <= _MAX_DIGESTED_BYTES:
            self.digest.update(np.ascontiguousarray(array).tobytes())

    def _add_code(self, code: types.CodeType) -> None:
        self.digest.update(code.co_code)
        self._add(f"{code.co_name} {code.co_names}")
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._add_code(constant)
            elif not isinstance(constant, frozenset):  # its order differs between processes
                self._add(repr(constant))


def _index_bytes(indices: Any) -> bytes:
    try:
        return np.ascontiguousarray(indices, dtype=np.int64).tobytes()
    except (TypeError, ValueError, OverflowError, RuntimeError):  # for example names
        return repr(indices).encode("utf-8", "surrogatepass")


def _closure_values(function: types.FunctionType) -> list[Any]:
    cells = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # the cell is empty
            cells.append(cell.cell_contents)
    return cells
