"""Encodes a value as a record."""

from __future__ import annotations

import weakref
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree
from stoker.transport.codec.record import (
    BYTES_HEAD,
    LEFT_OUT,
    LENGTHS,
    MAX_DEPTH,
    MAX_EMPTY_ELEMENTS,
    NUMPY_DTYPES,
    TENSOR_DTYPES,
    describe_dtype,
    find_class,
    is_restorable,
)
from stoker.transport.flatten import ALIGNMENT

# An x87 long double has 63 bits of mantissa: 10 bytes of data, padded to 12 or 16.
_LONGDOUBLE_IS_PADDED = np.finfo(np.longdouble).nmant == 63
# Sign and exponent take two bytes of an x87 long double, the mantissa eight.
_LONGDOUBLE_BYTES = 10
_PLAIN = (type(None), bool, float, str)
_ZEROS = bytes(ALIGNMENT)
_encode = msgspec.msgpack.Encoder().encode
_tags: weakref.WeakKeyDictionary[type, list[Any]] = weakref.WeakKeyDictionary()


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
            raise TypeError(
                f"cannot store or send a {kind.__module__}.{kind.__qualname__}{where}. Arrays, CPU "
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
