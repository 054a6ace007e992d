"""Values as bytes and back: nested structures behind an explicit header, and nothing pickled.

A record is: the length of its outline and of its numbers (2 and 4 bytes), the outline (MessagePack:
how the value is nested, and of what types), the numbers (MessagePack: small values, lengths and
shapes, in order), and the contents of arrays, tensors and byte strings, one after the other.
Records of one kind have the same outline, so that their reader is made once. A byte string that is
not nested has an empty outline, and no numbers.

A record may come from another host, and be anything. Reading one makes arrays of the dtypes below
and of no others (one of ``O`` would take bytes for pointers), and no more memory than it has bytes.
"""

from __future__ import annotations

import dataclasses
import math
import struct
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from stoker import pytree
from stoker.dtypes import TENSOR_DTYPES, check_letters, is_plain, plain_dtype

_LENGTHS = struct.Struct("<HI")
_BARE = _LENGTHS.pack(0, 0)
_PLAIN = (type(None), bool, float, str)
_PADS_LONG = np.finfo(np.longdouble).nmant == 63  # x87's: 10 bytes, in 12 or 16
_LONG_BYTES = 10
_KEPT = 256  # outlines whose readers are kept
_MOST_DEPTH = 100  # of nested parts: each takes three calls within each other
_MOST_EMPTY = 1 << 16  # elements without bytes: nothing else in a record says how many there can be

_Node = list[Any]
_decode_numbers = msgspec.msgpack.Decoder(list[bool | int | float | str | list[int] | None]).decode
_END = object()
_written: weakref.WeakKeyDictionary[type, _Node] = weakref.WeakKeyDictionary()


class LeftOut:
    """What is stored for an example that a filter left out."""

    def __reduce__(self) -> str:
        return "LEFT_OUT"  # one and the same in worker processes


LEFT_OUT = LeftOut()


class UnknownType(LookupError):
    """A record needs a named tuple or dataclass that this process has not imported."""


class Damaged(ValueError):
    """Bytes are no record."""


def encode(value: Any) -> list[bytes]:
    """Write a value: a record in pieces, to be joined. Arrays are copied, bytes are not.

    Raises TypeError for what cannot be stored, with where it is in the value.
    """
    if type(value) is bytes:
        return [_BARE, value]
    numbers: list[Any] = []
    contents: list[bytes] = []
    outline = msgspec.msgpack.encode(_write_node(value, numbers, contents, "", 0))
    if len(outline) > 0xFFFF:
        raise TypeError("cannot cache a value of so many parts: put them into arrays")
    packed = msgspec.msgpack.encode(numbers)
    return [_LENGTHS.pack(len(outline), len(packed)) + outline + packed, *contents]


def decode(record: memoryview) -> Any:
    """Read a value; it shares no memory with the record, and its arrays may be written.

    Raises UnknownType when a class is not there, or is another one by now; Damaged for anything
    that ``encode`` has not written.
    """
    try:
        outline_bytes, numbers_bytes = _LENGTHS.unpack_from(record)
        if not outline_bytes:  # a byte string: read here, as one more call costs 0.1 us an item
            return bytes(record[_LENGTHS.size :])
        return _decode(record, outline_bytes, numbers_bytes)
    except (UnknownType, MemoryError):
        raise
    except Exception as error:  # whatever it is, it is said of the bytes alone
        raise Damaged(f"{type(error).__name__}: {error}") from error


def _decode(record: memoryview, outline_bytes: int, numbers_bytes: int) -> Any:
    middle = _LENGTHS.size + outline_bytes
    start = middle + numbers_bytes
    form = _forms.get(bytes(record[:start]))
    if form is not None:
        return np.ndarray(*form, record, start).copy()
    outline = bytes(record[_LENGTHS.size : middle])
    read = _readers.get(outline)
    if read is None:
        read = _make_reader(msgspec.msgpack.decode(outline), 0)
        if len(_readers) >= _KEPT:
            _readers.clear()
        _readers[outline] = read
    numbers = iter(_decode_numbers(record[middle:start]))
    try:
        value = read(numbers, _Contents(record, start))
    except UnknownType:
        _readers.pop(outline, None)  # it may be there another time
        raise
    if next(numbers, _END) is not _END:
        raise ValueError("there are more numbers than the outline says")
    if type(value) is np.ndarray and value.nbytes and value.dtype.kind not in "UV":
        if len(_forms) >= _KEPT:
            _forms.clear()
        _forms[bytes(record[:start])] = value.shape, value.dtype
    return value


def _write_node(value: Any, numbers: list[Any], contents: list[bytes], at: str, depth: int) -> Any:
    kind = type(value)
    if kind is str and not value.isascii() and value != value.encode(errors="ignore").decode():
        contents.append(value.encode("utf-8", "surrogatepass"))
        numbers.append(len(contents[-1]))
        return "surrogates"  # names of files that are no UTF-8
    if kind in _PLAIN or (kind is int and -(2**63) <= value < 2**63):
        numbers.append(value)
        return "plain"
    if kind is bytes or kind is bytearray:
        numbers.append(len(value))
        contents.append(value if kind is bytes else bytes(value))
        return kind.__name__
    if kind is np.bytes_ or kind is np.str_:  # as an array it would lose zeros at its end
        return [kind.__name__, _write_node(kind.__bases__[0](value), numbers, contents, at, depth)]
    if kind is np.ndarray and _is_plain_dtype(value.dtype) and _tells_its_size(value):
        numbers.append(value.shape)
        contents.append(_content(value))
        return ["array", _describe(value.dtype)]
    if isinstance(value, np.generic) and _is_plain_dtype(value.dtype):
        contents.append(_content(np.asarray(value)))
        return ["scalar", _describe(value.dtype)]
    if kind is int:
        numbers.append(f"{value:x}")
        return "integer"
    if kind is complex:
        numbers += value.real, value.imag
        return "complex"
    if value is LEFT_OUT:
        return "left out"
    if pytree.is_tensor(value) and _is_plain_tensor(value):
        import torch

        there = value.detach().resolve_conj().resolve_neg()
        flat = there.contiguous().reshape(-1)
        if flat.stride() != (1,):  # a single element may have any
            flat = torch.empty(len(flat), dtype=flat.dtype).copy_(flat)
        flat = flat.view(torch.uint8)
        numbers.append(tuple(value.shape))
        contents.append(flat.numpy().tobytes())
        return ["tensor", str(value.dtype).removeprefix("torch.")]
    if depth == _MOST_DEPTH:
        raise TypeError(f"cannot cache a value whose parts are nested {depth} deep (at {at})")
    return _write_nested(value, kind, numbers, contents, at, depth + 1)


def _write_nested(
    value: Any, kind: type, numbers: list[Any], contents: list[bytes], at: str, depth: int
) -> _Node:
    parts = pytree.children(value)
    where = f" (at {at})" if at else ""
    if parts is None:
        raise TypeError(
            f"cannot cache a {kind.__module__}.{kind.__qualname__}{where}: arrays, tensors, bytes, "
            "strings and numbers can be, in tuples, lists, dicts, named tuples and dataclasses. "
            "Cache before what makes it, or turn it into an array"
        )
    nodes = [
        _write_node(part, numbers, contents, f"{at}.{n}" if at else n, depth) for n, part in parts
    ]
    if kind is tuple or kind is list:
        return [kind.__name__, *nodes]
    if kind is dict:
        return ["dict", [_write_node(key, numbers, contents, at, depth) for key in value], *nodes]
    named = _written.get(kind)
    if getattr(value, "__dict__", {}).keys() - {name for name, _ in parts}:
        named = []  # more than its fields
    elif named is None:
        is_tuple = isinstance(value, tuple) and hasattr(value, "_fields")
        name, names = f"{kind.__module__}:{kind.__qualname__}", [n for n, _ in parts]
        if _find_class(name, names, is_tuple=is_tuple) is kind:
            named = _written[kind] = ["named" if is_tuple else "dataclass", name, names]
    if named:
        return [*named, *nodes]
    raise TypeError(
        f"cannot cache a {kind.__module__}.{kind.__qualname__}{where}: it is defined within a "
        "function, or holds more than its fields. Define it at the top of a module, or use a tuple "
        "or a dict"
    )


def _content(array: np.ndarray[Any, Any]) -> bytes:
    """Return an array's content; what lies between its numbers is whatever memory held: zeros."""
    if not _has_padding(array.dtype):
        return array.tobytes()
    clean = np.zeros(array.shape, array.dtype)
    _copy_numbers(clean, array)
    return clean.tobytes()


def _has_padding(dtype: np.dtype[Any]) -> bool:
    if dtype.subdtype is not None:
        return _has_padding(dtype.subdtype[0])
    if dtype.names is None:
        return _PADS_LONG and dtype.char in "gG"
    fields = [dtype[name] for name in dtype.names]
    return sum(f.itemsize for f in fields) < dtype.itemsize or any(map(_has_padding, fields))


def _copy_numbers(out: np.ndarray[Any, Any], array: np.ndarray[Any, Any]) -> None:
    """Copy the numbers, and nothing of what lies between them."""
    for name in array.dtype.names or ():
        _copy_numbers(out[name], array[name])
    if array.dtype.names is None:
        if _has_padding(array.dtype):
            array = array.copy()
            size = np.dtype(np.longdouble).itemsize
            parts = array.reshape(-1).view(np.uint8).reshape(-1, size)
            parts[
                :, slice(_LONG_BYTES, size) if array.dtype.isnative else slice(size - _LONG_BYTES)
            ] = 0
        out[...] = array


def _is_plain_tensor(tensor: Any) -> bool:
    import torch

    known = str(tensor.dtype).removeprefix("torch.") in TENSOR_DTYPES
    strided = tensor.layout == torch.strided and tensor.device.type == "cpu"
    return type(tensor) is torch.Tensor and strided and known


def _tells_its_size(array: np.ndarray[Any, Any]) -> bool:
    """Tell whether an array has bytes, or not so many elements without any."""
    return array.dtype.itemsize > 0 or array.size <= _MOST_EMPTY


def _is_plain_dtype(dtype: np.dtype[Any]) -> bool:
    """Tell whether a dtype comes back as it is."""
    if dtype.names is None:  # other packages' dtypes call themselves V
        return is_plain(dtype.str) and (dtype.kind != "V" or dtype.type is np.void)
    try:
        described = msgspec.msgpack.decode(msgspec.msgpack.encode(_describe(dtype)))
        again = _parse_dtype(described)
    except (TypeError, ValueError):
        return False
    return again == dtype and again.type is dtype.type


def _describe(dtype: np.dtype[Any]) -> Any:
    return dtype.str if dtype.names is None else np.lib.format.dtype_to_descr(dtype)


def _parse_dtype(description: Any) -> np.dtype[Any]:
    """Return a dtype of plain numbers, texts and bytes. Raises ValueError, TypeError."""
    if isinstance(description, str):
        return plain_dtype(description)
    made = np.lib.format.descr_to_dtype(_restore_tuples(description))
    if made.hasobject:
        raise ValueError("a dtype of objects")
    return made


def _restore_tuples(description: Any) -> Any:
    """Return a dtype's description with the tuples that MessagePack made lists."""
    if isinstance(description, str):
        return plain_dtype(description).str
    return [
        tuple(
            tuple(part) if i and isinstance(part, list) and isinstance(part[0], int) else part
            for i, part in enumerate([*field[:1], _restore_tuples(field[1]), *field[2:]])
        )
        for field in description
    ]


def _find_class(name: str, names: Sequence[str], *, is_tuple: bool) -> type | None:
    """Return a class that is imported already and has these fields. Nothing is imported for it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # no code of the module may run
    if not isinstance(found, type):
        return None
    if is_tuple:
        fields = getattr(found, "_fields", None) if issubclass(found, tuple) else None
    else:
        known = dataclasses.is_dataclass(found)
        fields = tuple(f.name for f in dataclasses.fields(found)) if known else None
    return found if fields is not None and list(fields) == list(names) else None


class _Contents:
    """The contents of a record, taken one after the other."""

    __slots__ = ("_at", "_record")

    def __init__(self, record: memoryview, start: int) -> None:
        self._record = record
        self._at = start

    def take(self, size: int) -> memoryview:
        start = self._at
        self._at = start + size
        if size < 0 or self._at > len(self._record):
            raise ValueError("there is less than the outline says")
        return self._record[start : start + size]


_Read = Callable[[Iterator[Any], _Contents], Any]
_readers: dict[bytes, _Read] = {}
_forms: dict[bytes, tuple[tuple[int, ...], np.dtype[Any]]] = {}
"""Shape and dtype of an array that is not nested, by all that stands before its content."""


def _make_reader(node: Any, depth: int) -> _Read:
    """Return what reads the values of an outline."""
    if isinstance(node, str):
        return _LEAVES[node]
    if depth > _MOST_DEPTH:
        raise ValueError("parts are nested too deep")
    tag = node[0]
    if tag == "array":
        dtype = _parse_dtype(node[1])
        return lambda numbers, contents: _read_array(contents, dtype, next(numbers))
    if tag == "scalar":
        scalar = _parse_dtype(node[1])
        return lambda _, contents: _read_array(contents, scalar, [])[()]
    if tag == "tensor":
        return _make_tensor_reader(node[1])
    if tag == "dict":
        keys = [_make_reader(key, depth + 1) for key in node[1]]
        values = [_make_reader(child, depth + 1) for child in node[2:]]

        def read_dict(numbers: Iterator[Any], contents: _Contents) -> Any:
            found = [read(numbers, contents) for read in values]  # as they were written
            return dict(zip([read(numbers, contents) for read in keys], found, strict=True))

        return read_dict
    if tag in ("bytes_", "str_"):
        kind = np.bytes_ if tag == "bytes_" else np.str_
        return _make_text_reader(kind, _make_reader(node[1], depth + 1))
    if tag in ("list", "tuple"):
        parts = [_make_reader(child, depth + 1) for child in node[1:]]
        if tag == "list":
            return lambda numbers, contents: [read(numbers, contents) for read in parts]
        return lambda numbers, contents: tuple([read(numbers, contents) for read in parts])
    if tag in ("named", "dataclass"):
        fields = [_make_reader(child, depth + 1) for child in node[3:]]
        return _make_named_reader(node[1], node[2], fields, is_tuple=tag == "named")
    raise ValueError(f"no part of a value: {tag!r}")


def _make_text_reader(kind: type[np.bytes_] | type[np.str_], inner: _Read) -> _Read:
    def read(numbers: Iterator[Any], contents: _Contents) -> Any:
        content = inner(numbers, contents)
        if type(content) is not kind.__bases__[0]:  # of a number it would make as many zeros
            raise TypeError(f"{kind.__name__} of a {type(content).__name__}")
        return kind(content)

    return read


def _make_named_reader(name: str, names: list[str], parts: list[_Read], *, is_tuple: bool) -> _Read:
    kind = _find_class(name, names, is_tuple=is_tuple)
    if kind is None:
        raise UnknownType(name)
    if len(names) != len(parts):
        raise ValueError("as many names as parts")
    module, _, path = name.partition(":")
    new_tuple = tuple.__new__

    def check() -> None:
        """Refuse a class that is another one by now."""
        if getattr(sys.modules.get(module), "__dict__", {}).get(path) is not kind and (
            "." not in path or _find_class(name, names, is_tuple=is_tuple) is not kind
        ):
            raise UnknownType(name)

    def read_tuple(numbers: Iterator[Any], contents: _Contents) -> Any:
        check()
        return new_tuple(kind, [read(numbers, contents) for read in parts])

    def read_dataclass(numbers: Iterator[Any], contents: _Contents) -> Any:
        check()
        made: Any = object.__new__(kind)
        for field, read in zip(names, parts, strict=True):
            object.__setattr__(made, field, read(numbers, contents))
        return made

    return read_tuple if is_tuple else read_dataclass


def _read_array(contents: _Contents, dtype: np.dtype[Any], shape: Sequence[int]) -> Any:
    count = math.prod(shape)
    if not count or not dtype.itemsize:
        if count > _MOST_EMPTY:
            raise ValueError(f"{count} elements without bytes")
        return np.ndarray(shape, dtype)  # np.empty has no strings of no length
    array = np.ndarray(shape, dtype, contents.take(count * dtype.itemsize)).copy()
    if dtype.kind in "UV":
        check_letters(array)
    return array


def _make_tensor_reader(name: str) -> _Read:
    import torch

    if name not in TENSOR_DTYPES:
        raise ValueError(f"no dtype: {name!r}")
    dtype = getattr(torch, name)

    def read(numbers: Iterator[Any], contents: _Contents) -> Any:
        shape = next(numbers)
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        flat = torch.from_numpy(_read_array(contents, np.dtype(np.uint8), [size]))
        return flat.view(dtype).reshape(shape)

    return read


_LEAVES: dict[str, _Read] = {
    "plain": lambda numbers, _: next(numbers),
    "bytes": lambda numbers, contents: bytes(contents.take(next(numbers))),
    "bytearray": lambda numbers, contents: bytearray(contents.take(next(numbers))),
    "surrogates": lambda numbers, contents: str(
        contents.take(next(numbers)), "utf-8", "surrogatepass"
    ),
    "integer": lambda numbers, _: int(next(numbers), 16),
    "complex": lambda numbers, _: complex(next(numbers), next(numbers)),
    "left out": lambda numbers, contents: LEFT_OUT,
}
