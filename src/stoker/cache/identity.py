"""What tells cached items apart: the source and its contents, what was done to its examples, the
file as it was.

Two halves of a ``random_split`` have the same class and length; only their selections differ. So a
digest covers an object's class and length, its texts, numbers and paths, the beginnings of its
arrays and long lists, and the objects that it wraps. For a function it covers the code. The digest
is the same in another process of the same Python.

A key is a digest of the chain's identity and the example's fingerprint. A chain has an identity if
its source has one and the functions before the cache are stoker's own, or if the user gives a
version. Otherwise the identity is random, is made with the stage, and reaches workers with it
(under torchrun it is made of the launcher and a count). A file's fingerprint is taken before and
after the file is read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.basics import pytree
from stoker.basics.fingerprint import Fingerprint
from stoker.cache.layout import KEY_BYTES

_ATOMS = (str, bytes, int, float, complex, bool, type(None), PurePath, np.generic)
_WRAPPED = ("dataset", "datasets")
_SELECTED = "indices"
_DEPTH = 8
_PARTS = 4096  # of one object, its parts' parts included: then it is told well enough
_SHORT = 64  # longer lists, but for indices, count by their length and these many
_ROWS = 16
_DIGESTED_BYTES = 1 << 20


def told(thing: Any) -> str:
    """Return a digest of an object's contents. Calls none of its methods but ``len``."""
    teller = _Teller()
    teller.add(thing, _DEPTH, is_data=True)
    return teller.digest.hexdigest()


def told_by_rows(fetch: Any, count: int) -> str:
    """Return a digest of some examples, for objects that differ in nothing else."""
    return (
        told(fetch(np.unique(np.linspace(0, count - 1, _ROWS).astype(np.int64)))) if count else ""
    )


def selected(dataset: Any) -> str:
    """Return a digest of the selections of wrapped data sets; "" without any."""
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
        """Add an object; one that is neither data nor a function counts by its class alone."""
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
    """Return a selection as bytes."""
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


_OWN = "stoker."
_ENCODER = msgspec.msgpack.Encoder()
_count = 0


def chain_identity(source: Any, maps: Iterable[Any], version: str | None) -> str | None:
    """Return an identity of a chain's source and functions.

    A user's ``version`` stands for the data and for code that functions call; ``contents`` is added
    to it. Without a version the identity is None where it is unknown: functions that are not
    stoker's own may change, and a dataset object does not identify its data.
    """
    known = own = source.identity()
    names = []
    for stage in maps:
        module = getattr(stage.fn, "__module__", "") or ""
        name = getattr(stage.fn, "__qualname__", "")
        says = "" if version is None else f" {told(stage.fn)}"
        names.append(f"{stage.name}:{module}.{name}{says}")
        if not module.startswith(_OWN) or not name or "<" in name:
            own = None
    if version is None:
        return None if own is None else "\0".join(["chain", own, *names])
    return "\0".join(
        ["version", version, known or f"{source.name} of {len(source)} {source.contents()}", *names]
    )


def private_identity(what: str) -> str:
    """Return an identity of this job only: of its ranks on a host under torchrun, or a process.

    For ranks it is made of the launcher's identity and a count of their caches so far.
    """
    global _count
    _count += 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if ranks.isdigit() and int(ranks) > 1:
        import psutil

        launcher = psutil.Process(os.getppid())
        return "\0".join(["job", str(launcher.pid), str(launcher.create_time()), str(_count), what])
    return "\0".join(["own", secrets.token_hex(16)])


def item_key(chain: bytes, fingerprint: Fingerprint) -> bytes:
    """Return the 16 bytes under which an item is stored; ``chain`` is its identity's digest."""
    name = fingerprint.name
    if isinstance(name, str):
        fingerprint = fingerprint._replace(name=os.fsencode(name))
    return xxhash.xxh3_128_digest(chain + _ENCODER.encode(fingerprint))


def digest(identity: str) -> bytes:
    """Return 16 bytes for an identity."""
    return xxhash.xxh3_128_digest(identity.encode("utf-8", "surrogateescape"))


class NumberedKeys:
    """Keys of examples that are identified by numbers alone; each is made once. Thread-safe."""

    def __init__(self, examples: int) -> None:
        self._made = np.zeros(examples, f"V{KEY_BYTES}"), np.zeros(examples, bool)

    def of(
        self, indices: NDArray[np.int64], make: Callable[[Fingerprint, int], bytes]
    ) -> list[Any]:
        """Return the keys of examples; ``make`` makes one."""
        keys, is_made = self._made
        try:
            made = is_made[indices]  # max() beforehand would cost 2 us a batch
        except IndexError:  # a dataset that has grown
            more = int(indices.max()) + 1 - len(keys) + len(keys) // 2
            is_made = np.concatenate([is_made, np.zeros(more, bool)])
            keys = np.concatenate([keys, np.zeros(more, keys.dtype)])
            self._made = keys, is_made
            made = is_made[indices]
        if not made.all():
            for index in indices[~made].tolist():
                keys[index] = make(Fingerprint(index), index)
                is_made[index] = True  # behind it: other threads look here
        found: list[Any] = keys[indices].tolist()
        return found
