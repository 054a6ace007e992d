"""Decodes a record into its value.

A record from another host may hold anything. So decoding runs no foreign code and imports nothing.
It builds arrays of plain dtypes only (dtype ``O`` would read bytes as pointers), and instances of
named tuples and dataclasses that are already imported. It takes no more memory than the record has
bytes.
"""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stoker.transport.codec.record import (
    BYTES_HEAD,
    LEFT_OUT,
    LENGTHS,
    MAX_DEPTH,
    MAX_EMPTY_ELEMENTS,
    NUMPY_DTYPES,
    TENSOR_DTYPES,
    check_code_points,
    find_class,
    make_namedtuple,
    parse_dtype,
)
from stoker.transport.flatten import ALIGNMENT

# Readers that are kept. A pipeline needs a few; files with odd values may need any number.
_MAX_READERS = 256
# The longest schema whose reader is kept. A reader takes up to 51 times the memory of its schema,
# so 256 readers take at most 214 MB.
_MAX_KEPT_SCHEMA_BYTES = 1 << 14
_decode_numbers = msgspec.msgpack.Decoder(list[bool | int | float | str | list[int] | None]).decode
_END = object()


class UnknownType(LookupError):
    """A record needs a named tuple or dataclass that this process has not imported."""


class Damaged(ValueError):
    """The bytes are not a record."""


def decode(record: memoryview, *, lends: bool = False) -> Any:
    """Return the value of a record, as copies that the caller owns and may write.

    With ``lends``, arrays are views of a record that cannot be written to.

    Raises UnknownType if a class is not imported or has other fields now, and Damaged for bytes
    that ``encode`` did not write.
    """
    try:
        schema_bytes, numbers_bytes = LENGTHS.unpack_from(record)
        schema_end = LENGTHS.size + schema_bytes
        start = schema_end + numbers_bytes
        if start == LENGTHS.size:
            return bytes(record[start:])
        head = bytes(record[:start])
        array_form = _array_forms.get(head)
        if array_form is not None and start + array_form[2] == len(record):
            array: NDArray[Any] = np.ndarray(array_form[0], array_form[1], record, start)
            return array if lends else array.copy()
        value = _read(head, schema_end, _Contents(record[start:], lends))
    except (UnknownType, MemoryError):
        raise
    except Exception as error:  # decoding calls no user code: only the bytes can be at fault
        raise Damaged(f"{type(error).__name__}: {error}") from error
    is_form = type(value) is np.ndarray and value.nbytes and value.dtype.kind not in "UV"
    if is_form and value.flags.c_contiguous:
        if len(_array_forms) >= _MAX_READERS:
            _array_forms.clear()
        _array_forms[head] = value.shape, value.dtype, value.nbytes
    return value


def array_form(record: memoryview) -> tuple[bytes, tuple[int, ...], np.dtype[Any]] | None:
    """Return the head, shape and dtype of a record that was decoded before, and is one array.

    None for other records, and where the array is not all that follows the head in C order.
    """
    schema_bytes, numbers_bytes = LENGTHS.unpack_from(record)
    head = bytes(record[: LENGTHS.size + schema_bytes + numbers_bytes])
    form = _array_forms.get(head)
    if form is None or len(head) + form[2] != len(record):
        return None
    return head, form[0], form[1]


def decode_views(head: bytes, contents: Any) -> Any:
    """Return the value of a record; its arrays and tensors are views of ``contents``.

    Arrays are read-only, tensors are not. A named tuple that this process has not imported gets a
    new class. Raises as ``decode`` does.

    Args:
        head: the head of the record.
        contents: a buffer with all contents, one after another.
    """
    try:
        if head == BYTES_HEAD:
            return bytes(contents)
        schema_bytes, numbers_bytes = LENGTHS.unpack_from(head)
        schema_end = LENGTHS.size + schema_bytes
        if len(head) != schema_end + numbers_bytes:
            raise ValueError("the head has the wrong length")
        return _read(head, schema_end, _Contents(memoryview(contents), True, makes_classes=True))
    except (UnknownType, MemoryError):
        raise
    except Exception as error:
        raise Damaged(f"{type(error).__name__}: {error}") from error


class RecordView:
    """A record that unpickles as its value; arrays are views of the pickle's buffer."""

    def __init__(self, head: bytes, contents: NDArray[np.uint8]) -> None:
        self._head = head
        self._contents = contents

    def __reduce__(self) -> Any:
        return decode_views, (self._head, pickle.PickleBuffer(self._contents.data))


class _Contents:
    """The contents of a record, read from the start to the end.

    Attributes:
        memory: all contents.
        at: the offset of the next content.
        is_lent: whether decoded arrays are views of ``memory``; otherwise they are copies.
        makes_classes: whether a named tuple that this process has not imported gets a new class.
    """

    __slots__ = ("at", "is_lent", "makes_classes", "memory")

    def __init__(self, memory: memoryview, is_lent: bool, *, makes_classes: bool = False) -> None:
        self.memory = memory
        self.at = 0
        self.is_lent = is_lent
        self.makes_classes = makes_classes

    def take(self, size: int) -> memoryview:
        start = self.at
        self.at = end = start + size
        if size < 0 or end > len(self.memory):
            raise ValueError("the contents are shorter than the schema says")
        return self.memory[start:end]


_ReadPart = Callable[[Iterator[Any], _Contents], Any]
_readers: dict[bytes, _ReadPart] = {}
_array_forms: dict[bytes, tuple[tuple[int, ...], np.dtype[Any], int]] = {}
"""Shape, dtype and bytes of an array that is not nested, by the head of its record."""


def _read(head: bytes, schema_end: int, contents: _Contents) -> Any:
    schema = head[LENGTHS.size : schema_end]
    read = _readers.get(schema)
    if read is None:
        read = _make_reader(msgspec.msgpack.decode(schema), 0)
        if len(schema) <= _MAX_KEPT_SCHEMA_BYTES:
            if len(_readers) >= _MAX_READERS:
                _readers.clear()
            _readers[schema] = read
    numbers = iter(_decode_numbers(head[schema_end:]))
    value = read(numbers, contents)
    if next(numbers, _END) is not _END or contents.at != len(contents.memory):
        raise ValueError("the record is longer than the schema says")
    return value


def _make_reader(schema_node: Any, depth: int) -> _ReadPart:
    """Return a function that decodes records of a schema."""
    if isinstance(schema_node, str):
        return _LEAVES[schema_node]
    if depth > MAX_DEPTH:
        raise ValueError("the schema is nested too deep")
    tag = schema_node[0]
    if tag == "array":
        return _make_array_reader(parse_dtype(schema_node[1]), schema_node[2:], is_tensor=False)
    if tag == "scalar":
        return _make_scalar_reader(parse_dtype(schema_node[1]))
    if tag == "tensor":
        return _make_tensor_reader(schema_node[1], schema_node[2:])
    if tag == "dict":
        keys = [_make_reader(key, depth + 1) for key in schema_node[1]]
        values = [_make_reader(child, depth + 1) for child in schema_node[2:]]

        def read_dict(numbers: Iterator[Any], contents: _Contents) -> Any:
            # The writer adds all values before the keys, so they are read in that order.
            found = [read(numbers, contents) for read in values]
            return dict(zip([read(numbers, contents) for read in keys], found, strict=True))

        return read_dict
    if tag in ("bytes_", "str_"):
        kind = np.bytes_ if tag == "bytes_" else np.str_
        return _make_text_reader(kind, _make_reader(schema_node[1], depth + 1))
    if tag in ("list", "tuple"):
        parts = [_make_reader(child, depth + 1) for child in schema_node[1:]]
        if tag == "list":
            return lambda numbers, contents: [read(numbers, contents) for read in parts]
        return lambda numbers, contents: tuple([read(numbers, contents) for read in parts])
    if tag in ("named", "dataclass"):
        fields = [_make_reader(child, depth + 1) for child in schema_node[3:]]
        return _make_named_reader(schema_node[1], schema_node[2], fields, is_tuple=tag == "named")
    raise ValueError(f"unknown tag in the schema: {tag!r}")


def _make_text_reader(kind: type[np.bytes_] | type[np.str_], inner: _ReadPart) -> _ReadPart:
    def read(numbers: Iterator[Any], contents: _Contents) -> Any:
        content = inner(numbers, contents)
        if type(content) is not kind.__bases__[0]:  # np.bytes_(n) would allocate n zeros
            raise TypeError(f"{kind.__name__} expected text, got a {type(content).__name__}")
        return kind(content)

    return read


def _make_named_reader(
    name: str, names: list[str], parts: list[_ReadPart], *, is_tuple: bool
) -> _ReadPart:
    if len(names) != len(parts):
        raise ValueError("the numbers of field names and of fields differ")
    module, _, path = name.partition(":")
    kind: type | None = None

    def find(contents: _Contents) -> Any:
        """Return the class as it is imported now: a reload may have replaced it."""
        nonlocal kind
        found = kind
        if found is None or getattr(sys.modules.get(module), "__dict__", {}).get(path) is not found:
            found = kind = find_class(name, names, is_tuple=is_tuple)
        if found is None and is_tuple and contents.makes_classes:
            return make_namedtuple(path.rpartition(".")[2], tuple(names))
        if found is None:
            raise UnknownType(f"{module}.{path}")
        return found

    def read_tuple(numbers: Iterator[Any], contents: _Contents) -> Any:
        return tuple.__new__(find(contents), [read(numbers, contents) for read in parts])

    def read_dataclass(numbers: Iterator[Any], contents: _Contents) -> Any:
        # ``__init__`` is not called: it may take other arguments, and its checks passed when the
        # original was made.
        instance: Any = object.__new__(find(contents))
        for field, read in zip(names, parts, strict=True):
            object.__setattr__(instance, field, read(numbers, contents))  # works if it is frozen
        return instance

    return read_tuple if is_tuple else read_dataclass


def _make_array_reader(dtype: np.dtype[Any], axes: list[int], *, is_tensor: bool) -> _ReadPart:
    if sorted(axes) != list(range(len(axes))):
        raise ValueError("the axes are not a permutation")
    inverse = sorted(range(len(axes)), key=axes.__getitem__)
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
                memory_shape = [shape[axis] for axis in axes]
                array = np.ndarray(memory_shape, dtype, contents.memory, start).transpose(inverse)
            else:
                raise ValueError("the numbers of axes and of dimensions differ")
            # torch has no tensors that cannot be written to.
            if not contents.is_lent or (is_tensor and contents.memory.readonly):
                array = array.copy("K")
            if is_text:
                check_code_points(array)
        elif count <= MAX_EMPTY_ELEMENTS:
            array = np.ndarray(shape, dtype)  # np.empty would widen strings of length 0
        else:
            raise ValueError(f"the array has {count} elements of 0 bytes, which is too many")
        if contents.is_lent and not is_tensor:
            array.flags.writeable = False
        return array

    return read


def _make_scalar_reader(dtype: np.dtype[Any]) -> _ReadPart:
    def read(numbers: Iterator[Any], contents: _Contents) -> Any:
        scalar = np.ndarray((), dtype, bytearray(contents.take(dtype.itemsize)))
        check_code_points(scalar)
        return scalar[()]

    return read


def _make_tensor_reader(name: str, axes: list[int]) -> _ReadPart:
    import torch

    if name not in TENSOR_DTYPES:
        raise ValueError(f"unknown tensor dtype: {name!r}")
    dtype = getattr(torch, name)
    read = _make_array_reader(np.dtype(NUMPY_DTYPES[dtype.itemsize]), axes, is_tensor=True)
    return lambda numbers, contents: torch.from_numpy(read(numbers, contents)).view(dtype)


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
