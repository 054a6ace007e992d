"""Values as bytes and back: nested structures behind an explicit header, and nothing pickled.

A record is the length of its header (4 bytes), the header (MessagePack: the nesting, with small
values in it), and the contents of its arrays, tensors and byte strings, one behind the other.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from stoker import structure

_TUPLE, _LIST, _DICT, _NAMED, _DATACLASS = range(5)
_BYTES, _BYTEARRAY, _ARRAY, _SCALAR, _TENSOR, _INTEGER, _COMPLEX, _LEFT_OUT = range(5, 13)
_LENGTH_BYTES = 4
_PLAIN = (type(None), bool, float, str)


class LeftOut:
    """What is stored for an example that a filter left out."""


LEFT_OUT = LeftOut()


class UnknownType(LookupError):
    """A record needs a named tuple or dataclass that this process has not imported."""


def encoded(value: Any) -> list[bytes]:
    """Write a value: a record in pieces, to be joined. Arrays are copied, bytes are not.

    Raises TypeError for what cannot be stored, with the place it has in the value.
    """
    pieces: list[bytes] = []
    header = msgspec.msgpack.encode(_node(value, pieces, ""))
    return [len(header).to_bytes(_LENGTH_BYTES, "little") + header, *pieces]


def decoded(record: memoryview) -> Any:
    """Read a value; it shares no memory with the record, and its arrays may be written.

    Raises UnknownType when a class is not there, or is another one by now.
    """
    start = _LENGTH_BYTES + int.from_bytes(record[:_LENGTH_BYTES], "little")
    header = msgspec.msgpack.decode(record[_LENGTH_BYTES:start])
    return _Reader(record, start).value(header)


def _node(value: Any, pieces: list[bytes], at: str) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**63 else [_INTEGER, str(value)]
    if kind is bytes:
        pieces.append(value)
        return [_BYTES, len(value)]
    if kind is bytearray:
        pieces.append(bytes(value))
        return [_BYTEARRAY, len(value)]
    if kind is np.ndarray and not value.dtype.hasobject:
        pieces.append(value.tobytes())
        return [_ARRAY, _dtype(value.dtype), list(value.shape)]
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        pieces.append(value.tobytes())
        return [_SCALAR, _dtype(value.dtype)]
    if kind is complex:
        return [_COMPLEX, value.real, value.imag]
    if value is LEFT_OUT:
        return [_LEFT_OUT]
    if structure.is_tensor(value) and _is_plain(value):
        import torch

        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        pieces.append(flat.numpy().tobytes())
        return [_TENSOR, str(value.dtype).removeprefix("torch."), list(value.shape)]
    return _inner(value, kind, pieces, at)


def _inner(value: Any, kind: type, pieces: list[bytes], at: str) -> list[Any]:
    parts = structure.children(value)
    if parts is None:
        raise TypeError(
            f"cannot cache a {kind.__module__}.{kind.__qualname__}{f' (at {at})' if at else ''}: "
            "arrays, tensors, bytes, strings and numbers can be, in tuples, lists, dicts, named "
            "tuples and dataclasses. Cache before what makes it, or turn it into an array"
        )
    nodes = [_node(part, pieces, f"{at}.{name}" if at else name) for name, part in parts]
    if kind is tuple:
        return [_TUPLE, *nodes]
    if kind is list:
        return [_LIST, *nodes]
    if kind is dict:
        return [_DICT, [_node(key, pieces, at) for key in value], *nodes]
    named = _written.get(kind)
    if named is None:
        tag = _NAMED if isinstance(value, tuple) and hasattr(value, "_fields") else _DATACLASS
        name, names = f"{kind.__module__}:{kind.__qualname__}", [name for name, _ in parts]
        if _found(name, tag, names) is kind:
            named = _written[kind] = [tag, name, names]
    if named is not None:
        return [*named, *nodes]
    raise TypeError(
        f"cannot cache a {kind.__module__}.{kind.__qualname__}{f' (at {at})' if at else ''}: it "
        "would not be found again. Define it at the top of a module, or use a tuple or a dict"
    )


def _is_plain(tensor: Any) -> bool:
    import torch

    strided = tensor.layout == torch.strided and not tensor.is_quantized
    return type(tensor) is torch.Tensor and strided and tensor.device.type == "cpu"


def _dtype(dtype: np.dtype[Any]) -> Any:
    return dtype.str if dtype.names is None else np.lib.format.dtype_to_descr(dtype)


def _dtype_of(description: Any) -> np.dtype[Any]:
    if isinstance(description, str):
        return np.dtype(description)
    return np.lib.format.descr_to_dtype(_tuples(description))


def _tuples(description: Any) -> Any:
    """Return a dtype's description with the tuples that MessagePack made lists."""
    if isinstance(description, str):
        return description
    return [
        tuple(
            tuple(part) if i and isinstance(part, list) and isinstance(part[0], int) else part
            for i, part in enumerate([*field[:1], _tuples(field[1]), *field[2:]])
        )
        for field in description
    ]


_written: weakref.WeakKeyDictionary[type, list[Any]] = weakref.WeakKeyDictionary()
_read: weakref.WeakValueDictionary[tuple[Any, ...], type] = weakref.WeakValueDictionary()


def _found(name: str, tag: int, names: Sequence[str]) -> type | None:
    """Return a class that is imported already and has these fields. Nothing is imported for it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        return None
    if tag == _NAMED:
        fields = getattr(found, "_fields", None) if issubclass(found, tuple) else None
    else:
        known = dataclasses.is_dataclass(found)
        fields = tuple(f.name for f in dataclasses.fields(found)) if known else None
    return found if fields is not None and list(fields) == list(names) else None


class _Reader:
    """Takes the contents of a record, one after the other."""

    def __init__(self, record: memoryview, start: int) -> None:
        self._record = record
        self._at = start

    def value(self, node: Any) -> Any:
        if type(node) is not list:
            return node
        tag = node[0]
        if tag == _BYTES:
            return bytes(self._taken(node[1]))
        if tag == _ARRAY:
            return self._array(_dtype_of(node[1]), node[2])
        if tag <= _DATACLASS:
            return self._inner(node, tag)
        if tag == _SCALAR:
            return self._array(_dtype_of(node[1]), [])[()]
        if tag == _TENSOR:
            import torch

            dtype = getattr(torch, node[1])
            array = self._array(np.dtype(np.uint8), [int(np.prod(node[2])) * dtype.itemsize])
            return torch.from_numpy(array).view(dtype).reshape(node[2])
        if tag == _BYTEARRAY:
            return bytearray(self._taken(node[1]))
        if tag == _INTEGER:
            return int(node[1])
        if tag == _COMPLEX:
            return complex(node[1], node[2])
        return LEFT_OUT

    def _inner(self, node: list[Any], tag: int) -> Any:
        if tag == _TUPLE:
            return tuple([self.value(child) for child in node[1:]])
        if tag == _LIST:
            return [self.value(child) for child in node[1:]]
        if tag == _DICT:
            # The contents of values come first, as they were written.
            values = [self.value(child) for child in node[2:]]
            return dict(zip([self.value(key) for key in node[1]], values, strict=True))
        known = (tag, node[1], *node[2])
        kind = _read.get(known)
        if kind is None:
            kind = _found(node[1], tag, node[2])
            if kind is None:
                raise UnknownType(node[1])
            _read[known] = kind
        values = [self.value(child) for child in node[3:]]
        if tag == _NAMED:
            return tuple.__new__(kind, values)
        made: Any = object.__new__(kind)
        for name, value in zip(node[2], values, strict=True):
            object.__setattr__(made, name, value)
        return made

    def _taken(self, size: int) -> memoryview:
        start = self._at
        self._at = start + size
        return self._record[start : start + size]

    def _array(self, dtype: np.dtype[Any], shape: list[int]) -> np.ndarray[Any, Any]:
        out = np.empty(shape, dtype)
        if out.nbytes:
            flat = np.frombuffer(self._taken(out.nbytes), np.uint8)
            out.reshape(-1).view(np.uint8)[:] = flat
        return out
