"""Values as bytes and back, for stores, for other nodes and for relays; nothing is pickled.

A record is a head and contents. The head: the lengths of its two parts (4 bytes each), the outline
(MessagePack: how the value is nested, and of what types), and the numbers (MessagePack: small
values, lengths and shapes, in order). The contents: byte strings and the memory of arrays and
tensors, in the order in which the outline comes to them, so there are no offsets to get wrong.
Records of one kind have the same outline, so that their reader is made once. A byte string that is
not nested has an empty outline, and no numbers.

A record may come from another host, and be anything. Reading one runs no foreign code and imports
nothing. It makes arrays of plain dtypes only (dtype ``O`` would take bytes for pointers), instances
of already imported named tuples and dataclasses only, and takes no more memory than the record has
bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pickle
import struct
import sys
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree
from stoker.transport.dtypes import TENSOR_DTYPES, check_letters, is_plain, plain_dtype
from stoker.transport.flatten import ALIGNMENT

_LENGTHS = struct.Struct("<II")
# No outline and no numbers: the bytes themselves follow.
_BARE = _LENGTHS.pack(0, 0)
_PLAIN = (type(None), bool, float, str)
_ZEROS = bytes(ALIGNMENT)
# x87's long doubles have 63 bits of mantissa: 10 bytes, in 12 or 16.
_PADS_LONG = np.finfo(np.longdouble).nmant == 63
# Of an x87 long double: sign and exponent in two, mantissa in eight.
_LONG_BYTES = 10
# Outlines whose readers are kept: pipelines have a few, files with odd values may have any number.
_KEPT = 256
# Of the longest outline that is kept: readers take up to 51 times as much, 214 MB in all.
_KEPT_BYTES = 1 << 14
# Named tuples that are made up here, because nobody has imported theirs: damaged records are not to
# make any number.
_MOST_CLASSES = 256
# Of nested parts: each takes three calls within each other, and Python stops at 1,000.
_MOST_DEPTH = 100
# Elements without bytes: nothing else in a record says how many there can be, so damage could ask
# for any number.
_MOST_EMPTY = 1 << 16
_WORDS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
"""NumPy dtypes of the same size for a tensor's bytes: NumPy lacks some of torch's dtypes."""

_encode = msgspec.msgpack.Encoder().encode
_decode_numbers = msgspec.msgpack.Decoder(list[bool | int | float | str | list[int] | None]).decode
_END = object()
_written: weakref.WeakKeyDictionary[type, list[Any]] = weakref.WeakKeyDictionary()


class LeftOut:
    """Stored for an example that a filter left out."""

    def __reduce__(self) -> str:
        return "LEFT_OUT"  # one and the same in worker processes


LEFT_OUT = LeftOut()


class UnknownType(LookupError):
    """A record needs a named tuple or dataclass that this process has not imported."""


class Damaged(ValueError):
    """The bytes are not a record."""


def encode(value: Any) -> list[bytes]:
    """Return a value's record in pieces, to be joined. Arrays are copied, bytes are not.

    Raises TypeError for a part that cannot be encoded, with its place in the value.
    """
    if type(value) is bytes:
        return [_BARE, value]
    writer = _Writer(lends=False)
    return [writer.head(value), *writer.contents]


def decode(record: memoryview) -> Any:
    """Return the value of a record; it shares no memory with it, and its arrays may be written.

    Raises UnknownType when a class is not imported, or has other fields now; Damaged for bytes that
    ``encode`` has not written.
    """
    try:
        outline_bytes, numbers_bytes = _LENGTHS.unpack_from(record)
        middle = _LENGTHS.size + outline_bytes
        start = middle + numbers_bytes
        if start == _LENGTHS.size:
            return bytes(record[start:])
        head = bytes(record[:start])
        form = _forms.get(head)
        if form is not None and start + form[2] == len(record):
            return np.ndarray(form[0], form[1], record, start).copy()
        value = _read(head, middle, _Contents(record[start:], False))
    except (UnknownType, MemoryError):
        raise
    except Exception as error:  # whatever it is, it is said of the bytes alone
        raise Damaged(f"{type(error).__name__}: {error}") from error
    is_form = type(value) is np.ndarray and value.nbytes and value.dtype.kind not in "UV"
    if is_form and value.flags.c_contiguous:
        if len(_forms) >= _KEPT:
            _forms.clear()
        _forms[head] = value.shape, value.dtype, value.nbytes
    return value


def view(head: bytes, contents: Any) -> Any:
    """Return the value of a record as views of its contents, a buffer of bytes.

    Its arrays are read-only views of the contents, its tensors are views. A named tuple that this
    process has not imported gets a new class. Raises as ``decode``.
    """
    try:
        if head == _BARE:
            return bytes(contents)
        outline_bytes, numbers_bytes = _LENGTHS.unpack_from(head)
        middle = _LENGTHS.size + outline_bytes
        if len(head) != middle + numbers_bytes:
            raise ValueError("a head of another length")
        return _read(head, middle, _Contents(memoryview(contents), True))
    except (UnknownType, MemoryError):
        raise
    except Exception as error:
        raise Damaged(f"{type(error).__name__}: {error}") from error


def lend(value: Any) -> tuple[bytes, list[Any]]:
    """Return the head and the contents of a value's record. Contents refer to the value's memory.

    Dense arrays keep their memory layout, such as channels last.

    Raises as ``encode``.
    """
    if type(value) is bytes:
        return _BARE, [value]
    writer = _Writer(lends=True)
    return writer.head(value), writer.contents


class RecordView:
    """A record that unpickles as a view of its value."""

    def __init__(self, head: bytes, contents: NDArray[np.uint8]) -> None:
        self._head = head
        self._contents = contents

    def __reduce__(self) -> Any:
        return view, (self._head, pickle.PickleBuffer(self._contents.data))


# -- writing


class _Writer:
    """Collects the contents of a value, as copies or not."""

    def __init__(self, *, lends: bool) -> None:
        self.contents: list[Any] = []
        self._lends = lends
        self._numbers: list[Any] = []
        self._end = 0

    def head(self, value: Any) -> bytes:
        outline = _encode(self._node(value, "", 0))
        numbers = _encode(self._numbers)
        return _LENGTHS.pack(len(outline), len(numbers)) + outline + numbers

    def _node(self, value: Any, at: str, depth: int) -> Any:
        kind = type(value)
        if kind is str and not value.isascii() and value != value.encode(errors="ignore").decode():
            return self._text("surrogates", value.encode("utf-8", "surrogatepass"))
        if kind in _PLAIN or (kind is int and -(2**63) <= value < 2**63):
            self._numbers.append(value)
            return "plain"
        if kind is bytes:
            return self._text("bytes", value)
        if kind is bytearray:
            return self._text("bytearray", bytes(value))
        if kind is np.bytes_ or kind is np.str_:  # as an array it would lose zeros at its end
            return [kind.__name__, self._node(kind.__bases__[0](value), at, depth)]
        tells_its_size = kind is np.ndarray and (value.itemsize or value.size <= _MOST_EMPTY)
        if tells_its_size and _is_plain_dtype(value.dtype):
            return ["array", _describe(value.dtype), *self._array(_without_padding(value))]
        if isinstance(value, np.generic) and _is_plain_dtype(value.dtype):
            self._add(_without_padding(np.asarray(value)).tobytes())
            return ["scalar", _describe(value.dtype)]
        if kind is int:
            self._numbers.append(f"{value:x}")
            return "integer"
        if kind is complex:
            self._numbers += value.real, value.imag
            return "complex"
        if value is LEFT_OUT:
            return "left out"
        if pytree.is_tensor(value) and _is_plain_tensor(value):
            import torch

            value = value.detach().resolve_conj().resolve_neg()
            words = value.view(getattr(torch, _WORDS[value.dtype.itemsize])).numpy()
            return ["tensor", str(value.dtype).removeprefix("torch."), *self._array(words)]
        if depth == _MOST_DEPTH:
            raise TypeError(f"cannot store or send parts that are nested {depth} deep (at {at})")
        return self._nested(value, kind, at, depth + 1)

    def _nested(self, value: Any, kind: type, at: str, depth: int) -> list[Any]:
        parts = pytree.children(value)
        tag = None if parts is None else _find_tag(value, kind, [name for name, _ in parts])
        if parts is None or tag is None:
            where = f" (at {at})" if at else ""
            raise TypeError(
                f"cannot store or send a {kind.__module__}.{kind.__qualname__}{where}: arrays, "
                "tensors on the CPU, bytes, strings and numbers can be, in tuples, lists, dicts, "
                "named tuples and dataclasses, whose class is at the top of a module and which "
                "hold no more than its fields. Turn it into an array, or cache before what makes it"
            )
        nodes = [self._node(part, f"{at}.{name}" if at else name, depth) for name, part in parts]
        if kind is dict:
            tag = [*tag, [self._node(key, at, depth) for key in value]]
        return [*tag, *nodes]

    def _text(self, tag: str, content: bytes) -> str:
        self._numbers.append(len(content))
        self._add(content)
        return tag

    def _array(self, array: NDArray[Any]) -> list[int]:
        """Add an array; return the order of its axes in memory unless that is C's."""
        self._numbers.append(array.shape)
        axes: list[int] = []
        if not array.nbytes:
            return axes
        if padding := -self._end % ALIGNMENT:
            self._add(_ZEROS[:padding])
        if not self._lends:
            self._add(array.tobytes())
            return axes
        if not array.flags.c_contiguous:
            order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
            turned = array.transpose(order)
            if turned.flags.c_contiguous:
                array, axes = turned, order
            else:
                array = np.ascontiguousarray(array)
        self._add(array.reshape(-1).view(np.uint8).data)
        return axes

    def _add(self, content: bytes | memoryview) -> None:
        self.contents.append(content)
        self._end += len(content)


def _find_tag(value: Any, kind: type, names: list[str]) -> list[Any] | None:
    """Return the tag of a nested value's outline; None if its type cannot be restored."""
    if kind is tuple or kind is list or kind is dict:
        return [kind.__name__]
    if getattr(value, "__dict__", {}).keys() - set(names):
        return None
    tag = _written.get(kind)
    if tag is None:
        is_tuple = isinstance(value, tuple) and hasattr(value, "_fields")
        name = f"{kind.__module__}:{kind.__qualname__}"
        if _find_class(name, names, is_tuple=is_tuple) is kind:
            tag = _written[kind] = ["named" if is_tuple else "dataclass", name, names]
    return tag


def _without_padding(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array with its padding bytes set to zero."""
    if not _has_padding(array.dtype):
        return array
    clean = np.zeros(array.shape, array.dtype)
    _copy_numbers(clean, array)
    return clean


def _has_padding(dtype: np.dtype[Any]) -> bool:
    if dtype.subdtype is not None:
        return _has_padding(dtype.subdtype[0])
    if dtype.names is None:
        return _PADS_LONG and dtype.char in "gG"
    fields = [dtype[name] for name in dtype.names]
    return sum(f.itemsize for f in fields) < dtype.itemsize or any(map(_has_padding, fields))


def _copy_numbers(out: NDArray[Any], array: NDArray[Any]) -> None:
    """Copy the numbers without the padding between them."""
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


def _is_plain_dtype(dtype: np.dtype[Any]) -> bool:
    """True if a dtype can be restored exactly."""
    if dtype.names is None:  # other packages' dtypes call themselves V
        return is_plain(dtype.str) and (dtype.kind != "V" or dtype.type is np.void)
    try:
        again = _parse_dtype(msgspec.msgpack.decode(_encode(_describe(dtype))))
    except (TypeError, ValueError):
        return False
    return again == dtype and again.type is dtype.type


def _describe(dtype: np.dtype[Any]) -> Any:
    return dtype.str if dtype.names is None else np.lib.format.dtype_to_descr(dtype)


# -- reading


class _Contents:
    """The contents of a record, taken one after the other.

    Attributes:
        memory: all contents.
        at: the offset of the next one.
        is_lent: whether arrays are views of them.
    """

    __slots__ = ("at", "is_lent", "memory")

    def __init__(self, memory: memoryview, is_lent: bool) -> None:
        self.memory = memory
        self.at = 0
        self.is_lent = is_lent

    def take(self, size: int) -> memoryview:
        start = self.at
        self.at = end = start + size
        if size < 0 or end > len(self.memory):
            raise ValueError("there is less than the outline says")
        return self.memory[start:end]


_ReadPart = Callable[[Iterator[Any], _Contents], Any]
_readers: dict[bytes, _ReadPart] = {}
_forms: dict[bytes, tuple[tuple[int, ...], np.dtype[Any], int]] = {}
"""Shape, dtype and bytes of an array that is not nested, by the head of its record."""


def _read(head: bytes, middle: int, contents: _Contents) -> Any:
    outline = head[_LENGTHS.size : middle]
    read = _readers.get(outline)
    if read is None:
        read = _make_reader(msgspec.msgpack.decode(outline), 0)
        if len(outline) <= _KEPT_BYTES:
            if len(_readers) >= _KEPT:
                _readers.clear()
            _readers[outline] = read
    numbers = iter(_decode_numbers(head[middle:]))
    value = read(numbers, contents)
    if next(numbers, _END) is not _END or contents.at != len(contents.memory):
        raise ValueError("there is more than the outline says")
    return value


def _make_reader(node: Any, depth: int) -> _ReadPart:
    """Return a function that reads the values of an outline."""
    if isinstance(node, str):
        return _LEAVES[node]
    if depth > _MOST_DEPTH:
        raise ValueError("parts are nested too deep")
    tag = node[0]
    if tag == "array":
        return _make_array_reader(_parse_dtype(node[1]), node[2:], is_tensor=False)
    if tag == "scalar":
        return _make_scalar_reader(_parse_dtype(node[1]))
    if tag == "tensor":
        return _make_tensor_reader(node[1], node[2:])
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


def _make_text_reader(kind: type[np.bytes_] | type[np.str_], inner: _ReadPart) -> _ReadPart:
    def read(numbers: Iterator[Any], contents: _Contents) -> Any:
        content = inner(numbers, contents)
        if type(content) is not kind.__bases__[0]:  # of a number it would make as many zeros
            raise TypeError(f"{kind.__name__} of a {type(content).__name__}")
        return kind(content)

    return read


def _make_named_reader(
    name: str, names: list[str], parts: list[_ReadPart], *, is_tuple: bool
) -> _ReadPart:
    if len(names) != len(parts):
        raise ValueError("as many names as parts")
    module, _, path = name.partition(":")
    kind: type | None = None

    def find(contents: _Contents) -> Any:
        """Return the current class of that name."""
        nonlocal kind
        found = kind
        if found is None or getattr(sys.modules.get(module), "__dict__", {}).get(path) is not found:
            found = kind = _find_class(name, names, is_tuple=is_tuple)
        if found is None and is_tuple and contents.is_lent:
            return _make_up(path.rpartition(".")[2], tuple(names))
        if found is None:
            raise UnknownType(f"{module}.{path}")
        return found

    def read_tuple(numbers: Iterator[Any], contents: _Contents) -> Any:
        return tuple.__new__(find(contents), [read(numbers, contents) for read in parts])

    def read_dataclass(numbers: Iterator[Any], contents: _Contents) -> Any:
        # Without ``__init__``, which may take other arguments, or check what was checked when it
        # was made.
        made: Any = object.__new__(find(contents))
        for field, read in zip(names, parts, strict=True):
            object.__setattr__(made, field, read(numbers, contents))  # frozen ones included
        return made

    return read_tuple if is_tuple else read_dataclass


def _find_class(name: str, names: Sequence[str], *, is_tuple: bool) -> type | None:
    """Return an already imported class with these fields. Imports nothing."""
    module, _, path = name.partition(":")
    main = sys.modules["__main__"]
    # Whoever wrote it may have imported as a module what runs here as the script.
    is_script = os.path.basename(getattr(main, "__file__", None) or "") == f"{module}.py"
    for place in [sys.modules.get(module)] + [main] * is_script:
        found: Any = place
        for part in path.split("."):
            found = getattr(found, "__dict__", {}).get(part)  # no code of the module may run
        if isinstance(found, type) and _fields_of(found, is_tuple=is_tuple) == list(names):
            return found
    return None


def _fields_of(kind: type, *, is_tuple: bool) -> list[str] | None:
    if is_tuple and issubclass(kind, tuple):
        return list(getattr(kind, "_fields", [None]))
    return [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else None


@functools.lru_cache(maxsize=_MOST_CLASSES)
def _make_up(name: str, names: tuple[str, ...]) -> Any:
    return namedtuple(name, names)  # raises ValueError for what are no names


def _make_array_reader(dtype: np.dtype[Any], axes: list[int], *, is_tensor: bool) -> _ReadPart:
    if sorted(axes) != list(range(len(axes))):
        raise ValueError("these are no axes")
    back = sorted(range(len(axes)), key=axes.__getitem__)
    size, is_text = dtype.itemsize, dtype.kind in "UV"

    def read(numbers: Iterator[Any], contents: _Contents) -> NDArray[Any]:
        shape = next(numbers)
        count = math.prod(shape)
        if count and size:
            start = contents.at + -contents.at % ALIGNMENT
            contents.at = start + count * size
            if not axes:
                array: NDArray[Any] = np.ndarray(shape, dtype, contents.memory, start)
            elif len(axes) == len(shape):
                laid_out = [shape[axis] for axis in axes]
                array = np.ndarray(laid_out, dtype, contents.memory, start).transpose(back)
            else:
                raise ValueError("as many axes as the shape has")
            if not contents.is_lent:
                array = array.copy("K")
            if is_text:
                check_letters(array)
        elif count <= _MOST_EMPTY:
            array = np.ndarray(shape, dtype)  # np.empty has no strings of no length
        else:
            raise ValueError(f"{count} elements without bytes")
        if contents.is_lent and not is_tensor:
            array.flags.writeable = False
        return array

    return read


def _make_scalar_reader(dtype: np.dtype[Any]) -> _ReadPart:
    def read(numbers: Iterator[Any], contents: _Contents) -> Any:
        scalar = np.ndarray((), dtype, bytearray(contents.take(dtype.itemsize)))
        check_letters(scalar)
        return scalar[()]

    return read


def _make_tensor_reader(name: str, axes: list[int]) -> _ReadPart:
    import torch

    if name not in TENSOR_DTYPES:
        raise ValueError(f"no dtype: {name!r}")
    dtype = getattr(torch, name)
    read = _make_array_reader(np.dtype(_WORDS[dtype.itemsize]), axes, is_tensor=True)
    return lambda numbers, contents: torch.from_numpy(read(numbers, contents)).view(dtype)


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


_LEAVES: dict[str, _ReadPart] = {
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
