"""Values for other hosts: an outline in MessagePack, and the contents of arrays behind it.

Nothing is pickled, and reading runs no code of anybody's: an outline names no function, and a
class only among those that the reader has imported already. Contents lie one after another, each
aligned, in the order in which the outline comes to them, so there are no offsets to get wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pickle
import sys
from collections import namedtuple
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stoker import pytree
from stoker.dtypes import TENSOR_DTYPES, check_letters, is_plain, plain_dtype
from stoker.ipc.flatten import ALIGNMENT

_LARGE_BYTES = 1024  # byte strings above this size lie with the arrays
_MOST_CLASSES = 256  # named tuples that are made up here, because nobody has imported theirs
_MOST_DIMENSIONS = 64
_ZEROS = bytes(ALIGNMENT)

_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Dimensions = Annotated[list[_Size], msgspec.Meta(max_length=_MOST_DIMENSIONS)]


class _Node(msgspec.Struct, tag=True, array_like=True, forbid_unknown_fields=True):
    """A part of an outline."""


class _Tuple(_Node, tag=0):
    parts: list[_Part]


class _List(_Node, tag=1):
    parts: list[_Part]


class _Dict(_Node, tag=2):
    keys: list[_Part]
    parts: list[_Part]


class _Named(_Node, tag=3):
    """A named tuple, or a dataclass."""

    is_tuple: bool
    module: str
    path: str
    names: list[str]
    parts: list[_Part]


class _Large(_Node, tag=4):
    """A byte string that lies with the arrays."""

    size: _Size


class _Array(_Node, tag=5):
    """An array; ``axes`` is the order of its axes in memory, from the outermost one."""

    dtype: str
    shape: _Dimensions
    axes: list[_Size] | None


class _Tensor(_Node, tag=6):
    """A tensor, as the bytes of an array."""

    dtype: str
    shape: _Dimensions
    axes: list[_Size] | None


class _Scalar(_Node, tag=7):
    dtype: str
    content: bytes


class _Bytes(_Node, tag=8):
    """A short byte string."""

    content: bytes


_Part = (
    None | bool | int | float | str
    | _Tuple | _List | _Dict | _Named | _Large | _Array | _Tensor | _Scalar | _Bytes
)  # fmt: skip
_PLAIN = (type(None), bool, float)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Part).decode


class Unknown(LookupError):
    """A value needs a class that this process has not imported, or has in another form."""


def write(value: Any) -> tuple[bytes, list[memoryview]]:
    """Return the outline of a value, and its contents in pieces, which refer to its memory.

    Raises TypeError for what cannot be said so, with where it is in the value.
    """
    contents: list[memoryview] = []
    try:
        return _encode(_node(value, contents, "")), contents
    except RecursionError as error:
        raise TypeError(f"{type(value).__name__}: {error}") from None


def read(outline: bytes, contents: Any) -> Any:
    """Return a value. Its arrays are read-only views of ``contents``, its tensors are views.

    Raises ValueError for what is no value, Unknown for a class that is not there.
    """
    try:
        body = np.frombuffer(contents, np.uint8) if memoryview(contents).nbytes else _NOTHING
        reader = _Reader(body)
        value = reader.value(_decode(outline))
    except (Unknown, MemoryError):
        raise
    except Exception as error:  # whatever it is, it is said of the outline alone
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if reader.at < len(body):
        raise ValueError("there is more than the outline says")
    return value


_NOTHING = np.zeros(0, np.uint8)


class Portable:
    """A value in this form, which becomes the value itself where it is unpickled."""

    def __init__(self, outline: bytes, contents: NDArray[np.uint8]) -> None:
        self._outline = outline
        self._contents = contents

    def __reduce__(self) -> Any:
        return read, (self._outline, pickle.PickleBuffer(self._contents.data))


# -- writing


def _node(value: Any, contents: list[memoryview], at: str) -> Any:
    kind = type(value)
    if kind is bytes:
        if len(value) <= _LARGE_BYTES:
            return _Bytes(value)
        _append(contents, memoryview(value))
        return _Large(len(value))
    if kind in _PLAIN or (kind is int and -(1 << 63) <= value < 1 << 63):
        return value
    if kind is str:
        if value.encode(errors="replace").decode() != value:
            raise _refusal(f"a text that is no UTF-8, {value!r}", at)
        return value
    if kind is np.ndarray and _is_plain(value.dtype):
        return _Array(value.dtype.str, list(value.shape), _append_array(contents, value))
    if isinstance(value, np.generic) and _is_plain(value.dtype):
        return _Scalar(value.dtype.str, value.tobytes())
    if pytree.is_tensor(value):
        return _tensor_node(value, contents, at)
    parts = pytree.children(value)
    if parts is not None:
        nodes = [_node(part, contents, f"{at}.{name}" if at else name) for name, part in parts]
        if kind is tuple:
            return _Tuple(nodes)
        if kind is list:
            return _List(nodes)
        if kind is dict:
            return _Dict([_node(key, contents, at) for key in value], nodes)
        names = [name for name, _ in parts]
        if not isinstance(value, dict) and not getattr(value, "__dict__", {}).keys() - set(names):
            is_tuple = isinstance(value, tuple)
            return _Named(is_tuple, kind.__module__, kind.__qualname__, names, nodes)
    raise _refusal(f"{kind.__module__}.{kind.__qualname__}", at)


def _refusal(what: str, at: str) -> TypeError:
    return TypeError(
        f"{what}{f' (at {at})' if at else ''}: to other hosts go arrays, tensors on the CPU, "
        "numbers, strings and bytes, in tuples, lists, dicts, named tuples and dataclasses"
    )


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return dtype.itemsize > 0 and dtype.kind != "V" and is_plain(dtype.str)


def _tensor_node(tensor: Any, contents: list[memoryview], at: str) -> _Tensor:
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    is_dense = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    if not is_dense or tensor.device.type != "cpu" or name not in TENSOR_DTYPES:
        raise _refusal(f"a tensor of {tensor.dtype} on {tensor.device}, {tensor.layout}", at)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    words = tensor.view(_word(tensor.dtype)) if tensor.dtype.itemsize <= 8 else tensor
    return _Tensor(name, list(tensor.shape), _append_array(contents, words.numpy()))


def _word(dtype: Any) -> Any:
    """Return the integers of a tensor's size: NumPy does not have all of torch's dtypes."""
    import torch

    return (torch.uint8, torch.int16, torch.int32, torch.int64)[dtype.itemsize.bit_length() - 1]


def _append_array(contents: list[memoryview], array: NDArray[Any]) -> list[int] | None:
    """Append an array as it lies in memory; return the order of its axes unless that is C's."""
    axes = None
    if not array.flags.c_contiguous:
        order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
        turned = array.transpose(order)
        if turned.flags.c_contiguous:
            array, axes = turned, order
        else:
            array = np.ascontiguousarray(array)
    _append(contents, array.reshape(-1).view(np.uint8).data)
    return axes


def _append(contents: list[memoryview], content: memoryview) -> None:
    if content.nbytes:
        contents.append(content)
        if padding := -content.nbytes % ALIGNMENT:
            contents.append(memoryview(_ZEROS)[:padding])


# -- reading


class _Reader:
    """Takes contents one after another."""

    def __init__(self, contents: NDArray[np.uint8]) -> None:
        self._contents = contents
        self.at = 0

    def value(self, node: Any) -> Any:
        if not isinstance(node, _Node):
            return node
        if isinstance(node, _Array):
            array = self._array(_dtype(node.dtype), node)
            check_letters(array)
            array.flags.writeable = False
            return array
        if isinstance(node, _Tuple):
            return tuple([self.value(part) for part in node.parts])
        if isinstance(node, _List):
            return [self.value(part) for part in node.parts]
        if isinstance(node, _Dict):
            parts = [self.value(part) for part in node.parts]  # as they were written
            return dict(zip([self.value(key) for key in node.keys], parts, strict=True))
        if isinstance(node, _Bytes):
            return node.content
        if isinstance(node, _Large):
            return self._take(node.size).tobytes()
        if isinstance(node, _Scalar):
            dtype = _dtype(node.dtype)
            if len(node.content) != dtype.itemsize:
                raise ValueError("a scalar of another size")
            scalar = np.frombuffer(node.content, dtype)
            check_letters(scalar)
            return scalar[0]
        if isinstance(node, _Tensor):
            return self._tensor(node)
        assert isinstance(node, _Named)
        return _named(node, [self.value(part) for part in node.parts])

    def _take(self, size: int) -> NDArray[np.uint8]:
        start, self.at = self.at, self.at + -(-size // ALIGNMENT) * ALIGNMENT
        if self.at > len(self._contents):
            raise ValueError("there is less than the outline says")
        return self._contents[start : start + size]

    def _array(self, dtype: np.dtype[Any], node: _Array | _Tensor) -> NDArray[Any]:
        flat = self._take(math.prod(node.shape) * dtype.itemsize).view(dtype)
        if node.axes is None:
            return flat.reshape(node.shape)
        if sorted(node.axes) != list(range(len(node.shape))):
            raise ValueError("these are no axes")
        back = sorted(range(len(node.axes)), key=node.axes.__getitem__)
        return flat.reshape([node.shape[axis] for axis in node.axes]).transpose(back)

    def _tensor(self, node: _Tensor) -> Any:
        import torch

        if node.dtype not in TENSOR_DTYPES:
            raise ValueError(f"no dtype: {node.dtype}")
        dtype = getattr(torch, node.dtype)
        if dtype.itemsize > 8:
            return torch.from_numpy(self._array(np.dtype(node.dtype), node))
        word = np.dtype(f"{'ui'[dtype.itemsize > 1]}{dtype.itemsize}")
        return torch.from_numpy(self._array(word, node)).view(dtype)


def _dtype(text: str) -> np.dtype[Any]:
    dtype = plain_dtype(text)
    if not dtype.itemsize:
        raise ValueError("a dtype without bytes")
    return dtype


def _named(node: _Named, parts: list[Any]) -> Any:
    if len(node.names) != len(parts):
        raise ValueError("as many names as parts")
    kind = _find_class(node)
    if node.is_tuple:
        if kind is None:
            kind = _made_up(node.path.rpartition(".")[2], tuple(node.names))
        return tuple.__new__(kind, parts)
    if kind is None:
        raise Unknown(f"{node.module}.{node.path}")
    made: Any = object.__new__(kind)
    for name, part in zip(node.names, parts, strict=True):
        object.__setattr__(made, name, part)  # frozen ones included
    return made


def _find_class(node: _Named) -> Any:
    """Return a class that is imported already and has these fields, or None."""
    main = sys.modules["__main__"]
    is_script = os.path.basename(getattr(main, "__file__", None) or "") == f"{node.module}.py"
    for module in ([main] if is_script else []) + [sys.modules.get(node.module)]:
        found: Any = module
        for name in node.path.split("."):
            found = getattr(found, "__dict__", {}).get(name)  # no code of the module may run
        if isinstance(found, type) and _fields(found, node.is_tuple) == node.names:
            return found
    return None


def _fields(kind: type, is_tuple: bool) -> Sequence[str] | None:
    if is_tuple:
        fields = getattr(kind, "_fields", None) if issubclass(kind, tuple) else None
        return None if fields is None else list(fields)
    return [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else None


@functools.lru_cache(maxsize=_MOST_CLASSES)
def _made_up(name: str, names: tuple[str, ...]) -> Any:
    return namedtuple(name, names)  # raises ValueError for what are no names
