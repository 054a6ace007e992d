"""Records: one value as bytes.

A record is a head, then contents. The head holds the lengths of its two parts (4 bytes each), the
schema (MessagePack: how the value is nested, and the types), and the numbers (MessagePack: small
values, lengths and shapes, in order). The contents are byte strings and the memory of arrays and
tensors, in the schema's order. No offsets are stored, so none can be wrong.
Records of one kind have the same schema, so its reader is built once. A byte string that is not
nested has an empty schema and no numbers.

Dtypes are of numbers, texts, bytes and times alone: elements of others are pointers, or have no
bytes, so a sender could make this process read any memory, or allocate without end. Named tuples
and dataclasses are found by name among what is imported already.

A record from another host may hold anything. So decoding runs no foreign code and imports nothing.
It takes no more memory than the record has bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pickle
import re
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
from stoker.transport.flatten import ALIGNMENT

LENGTHS = struct.Struct("<II")
# An empty schema and no numbers: the bytes themselves follow.
BYTES_HEAD = LENGTHS.pack(0, 0)
# The deepest nesting. Each level takes three nested calls, and Python allows 1,000.
MAX_DEPTH = 100
# The most elements of zero bytes in one array. Nothing else in a record bounds their number, so a
# damaged record could ask for any.
MAX_EMPTY_ELEMENTS = 1 << 16
# Classes made here for named tuples that this process has not imported. Without a limit, damaged
# records could fill the memory with classes.
_MAX_MADE_CLASSES = 256
_PLAIN_DTYPE = re.compile(r"[<>|][biufcmMSUV][0-9]{1,9}(\[[0-9A-Za-z]{1,12}\])?")
# The last code point of Unicode. NumPy text may hold larger numbers; a Python string cannot.
_MAX_CODE_POINT = 0x10FFFF
TENSOR_DTYPES = {
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16",
    "bfloat16", "float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
}  # fmt: skip
"""The names of torch's dtypes, without the prefix ``torch.``."""
NUMPY_DTYPES = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
"""NumPy dtypes for a tensor's bytes, by item size: NumPy lacks some of torch's dtypes."""
# An x87 long double has 63 bits of mantissa: 10 bytes of data, padded to 12 or 16.
_LONGDOUBLE_IS_PADDED = np.finfo(np.longdouble).nmant == 63
# Sign and exponent take two bytes of an x87 long double, the mantissa eight.
_LONGDOUBLE_BYTES = 10
_PLAIN = (type(None), bool, float, str)
_ZEROS = bytes(ALIGNMENT)
_encode = msgspec.msgpack.Encoder().encode
_tags: weakref.WeakKeyDictionary[type, list[Any]] = weakref.WeakKeyDictionary()
# Readers that are kept. A pipeline needs a few; files with odd values may need any number.
_MAX_READERS = 256
# The longest schema whose reader is kept. A reader takes up to 51 times the memory of its schema,
# so 256 readers take at most 214 MB.
_MAX_KEPT_SCHEMA_BYTES = 1 << 14
_decode_numbers = msgspec.msgpack.Decoder(list[bool | int | float | str | list[int] | None]).decode
_END = object()


class LeftOut:
    """Stored in place of an example that a filter left out."""

    def __reduce__(self) -> str:
        return "LEFT_OUT"  # by name, so that worker processes get the same object


LEFT_OUT = LeftOut()


def _is_plain(text: str) -> bool:
    """True if a text, such as ``<f4``, names a plain dtype."""
    return _PLAIN_DTYPE.fullmatch(text) is not None


def _plain_dtype(text: str) -> np.dtype[Any]:
    """Return the dtype that a text names. Raises ValueError or TypeError for other texts."""
    if not _is_plain(text):
        raise ValueError(f"not a plain dtype: {text!r}")
    return np.dtype(text)


def check_code_points(array: np.ndarray[Any, Any]) -> None:
    """Raise ValueError if a text has invalid code points, which Python cannot decode."""
    for name in array.dtype.names or ():
        check_code_points(array[name])
    if array.dtype.kind == "U" and array.size and array.itemsize:
        codes = np.ascontiguousarray(array).reshape(-1).view(array.dtype.byteorder + "u4")
        if codes.max() > _MAX_CODE_POINT:
            raise ValueError("a text has invalid code points")


def is_restorable(dtype: np.dtype[Any]) -> bool:
    """True if a dtype can be restored exactly."""
    if dtype.names is None:  # dtypes of other packages, such as bfloat16, have kind V too
        return _is_plain(dtype.str) and (dtype.kind != "V" or dtype.type is np.void)
    try:
        restored = parse_dtype(
            msgspec.msgpack.decode(msgspec.msgpack.encode(describe_dtype(dtype)))
        )
    except (TypeError, ValueError):
        return False
    return restored == dtype and restored.type is dtype.type


def describe_dtype(dtype: np.dtype[Any]) -> Any:
    return dtype.str if dtype.names is None else np.lib.format.dtype_to_descr(dtype)


def parse_dtype(description: Any) -> np.dtype[Any]:
    """Return a dtype of plain numbers, texts and bytes. Raises ValueError, TypeError."""
    if isinstance(description, str):
        return _plain_dtype(description)
    instance = np.lib.format.descr_to_dtype(_restore_tuples(description))
    if instance.hasobject:
        raise ValueError("the dtype holds Python objects")
    return instance


def _restore_tuples(description: Any) -> Any:
    """Return a dtype's description with tuples again: MessagePack turns tuples into lists."""
    if isinstance(description, str):
        return _plain_dtype(description).str
    return [
        tuple(
            tuple(part) if i and isinstance(part, list) and isinstance(part[0], int) else part
            for i, part in enumerate([*field[:1], _restore_tuples(field[1]), *field[2:]])
        )
        for field in description
    ]


def find_class(name: str, names: Sequence[str], *, is_tuple: bool) -> type | None:
    """Return a class with these fields if it is imported already, else None. Imports nothing."""
    module, _, path = name.partition(":")
    main = sys.modules["__main__"]
    # The writer may have imported as a module the file that runs here as the script.
    is_script = os.path.basename(getattr(main, "__file__", None) or "") == f"{module}.py"
    for place in [sys.modules.get(module)] + [main] * is_script:
        found: Any = place
        for part in path.split("."):
            # Not getattr(): a module's ``__getattr__`` or a property would run its code.
            found = getattr(found, "__dict__", {}).get(part)
        if not isinstance(found, type):
            continue
        own = _field_names(found, is_tuple=is_tuple)
        if own == list(names):
            return found
        if is_tuple and own and own == list(names[: len(own)]):  # with fields of ``with_index()``
            made: type = functools.reduce(pytree.longer, names[len(own) :], found)
            return made
    return None


def _field_names(kind: type, *, is_tuple: bool) -> list[str] | None:
    if is_tuple and issubclass(kind, tuple):
        return list(getattr(kind, "_fields", [None]))
    return [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else None


@functools.lru_cache(maxsize=_MAX_MADE_CLASSES)
def make_namedtuple(name: str, names: tuple[str, ...]) -> Any:
    return namedtuple(name, names)  # raises ValueError for invalid names


def encode(value: Any) -> list[bytes]:
    """Return a value's record as a list of byte strings to join. Arrays are copied, bytes are not.

    Raises TypeError for a part that cannot be encoded; the message names the part's path.
    """
    if type(value) is bytes:
        return [BYTES_HEAD, value]
    writer = _Writer(shares_memory=False)
    return [writer.head(value), *writer.contents]


def encode_views(value: Any) -> tuple[bytes, list[Any]]:
    """Return the head and the contents of a value's record without copying dense arrays.

    The contents refer to the value's memory. Dense arrays keep their memory layout, such as
    channels last. Raises as ``encode`` does.
    """
    if type(value) is bytes:
        return BYTES_HEAD, [value]
    writer = _Writer(shares_memory=True)
    return writer.head(value), writer.contents


class _Writer:
    """Builds the head of one value's record, and collects its contents as copies or as views."""

    def __init__(self, *, shares_memory: bool) -> None:
        self.contents: list[Any] = []
        self._shares_memory = shares_memory
        self._numbers: list[Any] = []
        self._end = 0

    def head(self, value: Any) -> bytes:
        schema = _encode(self._add(value, "", 0))
        numbers = _encode(self._numbers)
        return LENGTHS.pack(len(schema), len(numbers)) + schema + numbers

    def _add(self, value: Any, at: str, depth: int) -> Any:
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
        if kind is np.bytes_ or kind is np.str_:  # an array would drop trailing zeros
            return [kind.__name__, self._add(kind.__bases__[0](value), at, depth)]
        has_bounded_size = kind is np.ndarray and (
            value.itemsize or value.size <= MAX_EMPTY_ELEMENTS
        )
        if has_bounded_size and is_restorable(value.dtype):
            return ["array", describe_dtype(value.dtype), *self._array(_without_padding(value))]
        if isinstance(value, np.generic) and is_restorable(value.dtype):
            self._add_content(_without_padding(np.asarray(value)).tobytes())
            return ["scalar", describe_dtype(value.dtype)]
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
            same_bytes = value.view(getattr(torch, NUMPY_DTYPES[value.dtype.itemsize])).numpy()
            return ["tensor", str(value.dtype).removeprefix("torch."), *self._array(same_bytes)]
        if depth == MAX_DEPTH:
            raise TypeError(
                f"cannot store or send a value that is nested more than {depth} levels deep "
                f"(at {at})"
            )
        return self._add_nested(value, kind, at, depth + 1)

    def _add_nested(self, value: Any, kind: type, at: str, depth: int) -> list[Any]:
        parts = pytree.children(value)
        tag = None if parts is None else _find_tag(value, kind, [name for name, _ in parts])
        if parts is None or tag is None:
            where = f" (at {at})" if at else ""
            form = getattr(value, "layout", getattr(value, "dtype", None))
            of_form = "" if form is None else f", which is of {form}"
            raise TypeError(
                f"cannot store or send a {kind.__module__}.{kind.__qualname__}{where}{of_form}. "
                "Arrays of numbers, CPU "
                "tensors, bytes, strings and numbers work, and tuples, lists, dicts, named tuples "
                "and dataclasses of them, if the class is at the top of a module and the instance "
                "has no other attributes than its fields. Convert the value to an array, or put "
                ".cache() before the stage that makes it"
            )
        nodes = [self._add(part, f"{at}.{name}" if at else name, depth) for name, part in parts]
        if kind is dict:
            tag = [*tag, [self._add(key, at, depth) for key in value]]
        return [*tag, *nodes]

    def _text(self, tag: str, content: bytes) -> str:
        self._numbers.append(len(content))
        self._add_content(content)
        return tag

    def _array(self, array: NDArray[Any]) -> list[int]:
        """Add an array. Return the order of its axes in memory, or [] for C order."""
        self._numbers.append(array.shape)
        axes: list[int] = []
        if not array.nbytes:
            return axes
        if padding := -self._end % ALIGNMENT:
            self._add_content(_ZEROS[:padding])
        if not self._shares_memory:
            self._add_content(array.tobytes())
            return axes
        if not array.flags.c_contiguous:
            order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
            transposed = array.transpose(order)
            if transposed.flags.c_contiguous:
                array, axes = transposed, order
            else:
                array = np.ascontiguousarray(array)
        self._add_content(array.reshape(-1).view(np.uint8).data)
        return axes

    def _add_content(self, content: bytes | memoryview) -> None:
        self.contents.append(content)
        self._end += len(content)


def _find_tag(value: Any, kind: type, names: list[str]) -> list[Any] | None:
    """Return the schema tag of a nested value; None if its type cannot be restored."""
    if kind is tuple or kind is list or kind is dict:
        return [kind.__name__]
    if getattr(value, "__dict__", {}).keys() - set(names):
        return None
    tag = _tags.get(kind)
    if tag is None:
        is_tuple = isinstance(value, tuple) and hasattr(value, "_fields")
        name = f"{kind.__module__}:{kind.__qualname__}"
        if find_class(name, names, is_tuple=is_tuple) is kind:
            tag = _tags[kind] = ["named" if is_tuple else "dataclass", name, names]
    return tag


def _is_plain_tensor(tensor: Any) -> bool:
    import torch

    has_known_dtype = str(tensor.dtype).removeprefix("torch.") in TENSOR_DTYPES
    is_dense_on_cpu = tensor.layout == torch.strided and tensor.device.type == "cpu"
    return type(tensor) is torch.Tensor and is_dense_on_cpu and has_known_dtype


def _without_padding(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array with zeroed padding: padding may hold old memory of this process."""
    if not _has_padding(array.dtype):
        return array
    clean = np.zeros(array.shape, array.dtype)
    _copy_without_padding(clean, array)
    return clean


def _has_padding(dtype: np.dtype[Any]) -> bool:
    if dtype.subdtype is not None:
        return _has_padding(dtype.subdtype[0])
    if dtype.names is None:
        return _LONGDOUBLE_IS_PADDED and dtype.char in "gG"
    fields = [dtype[name] for name in dtype.names]
    return sum(f.itemsize for f in fields) < dtype.itemsize or any(map(_has_padding, fields))


def _copy_without_padding(out: NDArray[Any], array: NDArray[Any]) -> None:
    """Copy an array's numbers, but not the padding between them."""
    for name in array.dtype.names or ():
        _copy_without_padding(out[name], array[name])
    if array.dtype.names is None:
        if _has_padding(array.dtype):
            array = array.copy()
            size = np.dtype(np.longdouble).itemsize
            parts = array.reshape(-1).view(np.uint8).reshape(-1, size)
            parts[
                :,
                slice(_LONGDOUBLE_BYTES, size)
                if array.dtype.isnative
                else slice(size - _LONGDOUBLE_BYTES),
            ] = 0
        out[...] = array


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
