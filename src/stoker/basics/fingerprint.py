"""Fingerprints: of an item of a source, and of a dataset or function that has no name of its own.

Two halves of a ``random_split`` are of one class and one length: what tells them apart is what they
select, and from what. So a digest is made of the class, of the length, of texts, numbers and paths
that an object holds, of arrays and long lists by what they begin with, and of the objects that it
wraps. Of functions it is of their code. It is the same in another process of the same Python.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import types
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from stoker.basics import pytree

_ATOMS = (str, bytes, int, float, complex, bool, type(None), PurePath, np.generic)
_WRAPPED = ("dataset", "datasets")
_SELECTED = "indices"
# A dataset, its wrappers and what they hold are hardly deeper; cycles end there.
_DEPTH = 8
# Of one object, its parts' parts included: an epoch is not to begin late.
_PARTS = 4096
# Longer lists, but for indices, count by their length and these many: lists of files have millions.
_SHORT = 64
# Examples that are read to tell data apart: the first batch waits for them. Chosen, not measured.
_ROWS = 16
# Larger arrays count by dtype and shape: the first batch waits for digests. Chosen, not measured.
_DIGESTED_BYTES = 1 << 20

_RENUMBERING = {"vfat", "msdos", "exfat", "cifs", "smb3"}


class Fingerprint(NamedTuple):
    """What tells the content of an example from that of others, and from its own former one."""

    name: str | bytes | int
    """Within its source: a path, or an index."""
    size_bytes: int = -1
    """Of its file; -1 where there is none, or its server does not tell."""
    version: int = 0
    """Of its file: when it was modified (ns), or a digest of what its server tells; 0: unknown."""
    label: int = 0
    """What its source adds to the file's content."""
    changed_ns: int = 0
    """When its local file was changed in any way, which no tool can set back."""
    inode: int = 0
    """Of its local file, where its file system goes on numbering it so."""


def of_file(name: str, found: os.stat_result, label: int = 0) -> Fingerprint:
    """Return the fingerprint of a local file as it was found."""
    inode = 0 if can_renumber(found.st_dev, _mounts()) else found.st_ino
    return Fingerprint(name, found.st_size, found.st_mtime_ns, label, found.st_ctime_ns, inode)


@functools.cache
def can_renumber(device: int, mounts: str) -> bool:
    """Tell whether a file system may number files anew: those of user space, FAT and CIFS do.

    ``mounts`` is what is mounted, as in ``/proc/self/mountinfo``.
    """
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        before, _, behind = line.partition(" - ")
        if before.split(" ")[2:3] == [number]:
            return behind.startswith("fuse") or behind.split(" ")[0] in _RENUMBERING
    return False


@functools.cache
def _mounts() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text(errors="replace")
    except OSError:
        return ""


def told(thing: Any) -> str:
    """Return a digest of what an object says of itself. Nothing of it is called but ``len``."""
    teller = _Teller()
    teller.add(thing, _DEPTH, is_data=True)
    return teller.digest.hexdigest()


def told_by_rows(fetch: Any, count: int) -> str:
    """Return a digest of some of so many examples, which are told apart by nothing else."""
    return (
        told(fetch(np.unique(np.linspace(0, count - 1, _ROWS).astype(np.int64)))) if count else ""
    )


def selected(dataset: Any) -> str:
    """Return a digest of what data sets around data sets select; "" where none do."""
    digest, is_any, at = hashlib.blake2b(digest_size=16), False, [dataset]
    for _ in range(_PARTS):
        if not at:
            break
        held = getattr(at.pop(0), "__dict__", {})
        if _SELECTED in held and "dataset" in held:
            is_any = True
            digest.update(_numbers(held[_SELECTED]) + b"\0")
        at += [held["dataset"]] if "dataset" in held else []
        many = held.get("datasets")
        at += many if isinstance(many, (list, tuple)) else []
    return digest.hexdigest() if is_any else ""


class _Teller:
    """Adds objects to a digest."""

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        self._left = _PARTS

    def add(self, thing: Any, depth: int, *, is_data: bool = False) -> None:
        """Add an object; what is neither data nor called counts by its class alone."""
        kind = type(thing)
        self._add(f"\0{kind.__module__}.{kind.__qualname__}:")
        self._left -= 1
        if isinstance(thing, _ATOMS):
            self._add(repr(thing))
        elif depth == 0 or self._left < 0:
            return
        elif isinstance(thing, np.ndarray) or pytree.is_tensor(thing):
            self._add_array(thing)
        elif isinstance(thing, types.FunctionType):
            self._add_code(thing.__code__)
            self.add([thing.__defaults__, thing.__kwdefaults__, _closed_over(thing)], depth - 1)
        elif isinstance(thing, types.MethodType):
            self.add(thing.__func__, depth - 1)
            self.add(thing.__self__, depth - 1, is_data=True)
        elif isinstance(thing, (type, types.BuiltinFunctionType)):
            self._add(f"{thing.__module__}.{thing.__qualname__}")
        elif isinstance(thing, functools.partial):
            self.add([thing.func, thing.args, thing.keywords], depth - 1)
        elif kind in (list, tuple, range):
            self._add_all(thing, depth, is_data)
        elif kind is dict:
            self._add_all(list(thing.items()), depth, is_data)
        elif is_data or callable(thing) or hasattr(kind, "_fields"):
            self._add_object(thing, depth)

    def _add(self, text: str) -> None:
        self.digest.update(text.encode("utf-8", "surrogatepass"))

    def _add_object(self, thing: Any, depth: int) -> None:
        with contextlib.suppress(Exception):  # most things that are called have none
            self._add(f"{len(thing)}")
        if isinstance(thing, tuple):
            return self._add_all(tuple(thing), depth, False)
        held: Mapping[str, Any] = getattr(thing, "__dict__", {})
        for name in sorted(held):
            self._add(f"\0{name}")
            if name == _SELECTED:
                self.digest.update(_numbers(held[name]))
            else:
                self.add(held[name], depth - 1, is_data=name in _WRAPPED)

    def _add_all(self, things: Sequence[Any], depth: int, is_data: bool) -> None:
        self._add(f"{len(things)}")
        if isinstance(things, range):
            return self._add(repr(things))
        half = _SHORT // 2
        some = things if len(things) <= _SHORT else [*things[:half], *things[-half:]]
        for each in some:
            self.add(each, depth - 1, is_data=is_data)

    def _add_array(self, array: Any) -> None:
        self._add(f"{array.dtype} {tuple(array.shape)}")
        is_plain = isinstance(array, np.ndarray) and not array.dtype.hasobject
        if is_plain and array.nbytes <= _DIGESTED_BYTES:
            self.digest.update(np.ascontiguousarray(array).tobytes())

    def _add_code(self, code: types.CodeType) -> None:
        self.digest.update(code.co_code)
        self._add(f"{code.co_name} {code.co_names}")
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._add_code(constant)
            elif not isinstance(constant, frozenset):  # whose order differs by process
                self._add(repr(constant))


def _numbers(indices: Any) -> bytes:
    """Return what is selected, as bytes."""
    try:
        return np.ascontiguousarray(indices, dtype=np.int64).tobytes()
    except (TypeError, ValueError, OverflowError, RuntimeError):  # names, say
        return repr(indices).encode("utf-8", "surrogatepass")


def _closed_over(function: types.FunctionType) -> list[Any]:
    cells = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            cells.append(cell.cell_contents)
    return cells
