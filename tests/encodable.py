"""Values that have bytes: of any kind that is written, nested in any way."""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Record:
    x: Any
    y: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    y: Any = dataclasses.field(kw_only=True)


class Outer:
    class Inner(NamedTuple):
        only: Any


def shown(value: Any) -> Any:
    """Return what tells a value from all others: types, bits, and order."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack("<d", value)
    if kind is complex:
        return kind, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, (np.ndarray, np.generic)):
        return kind, value.dtype, value.dtype.str, value.shape, bits(np.asarray(value))
    if kind is torch.Tensor:
        plain = torch.empty(value.shape, dtype=value.dtype).copy_(value)
        flat = plain.view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return kind, value.dtype, tuple(value.shape), flat
    if kind in (tuple, list) or hasattr(value, "_fields"):
        return kind, [shown(part) for part in value]
    if kind is dict:
        return kind, [(shown(key), shown(part)) for key, part in value.items()]
    if dataclasses.is_dataclass(value):
        return kind, [shown(getattr(value, f.name)) for f in dataclasses.fields(value)]
    return kind, value


def bits(array: np.ndarray[Any, Any]) -> Any:
    """Return an array's bits, without those between its numbers, of which nothing is promised."""
    if array.dtype.names is not None:
        return [(name, array.dtype[name].str, bits(array[name])) for name in array.dtype.names]
    if array.dtype.char not in "gG" or np.finfo(np.longdouble).nmant != 63:
        return array.tobytes()
    size = np.dtype(np.longdouble).itemsize  # of which 10 bytes are the number
    start = 0 if array.dtype.isnative else size - 10
    raw = np.frombuffer(array.tobytes(), np.uint8).reshape(-1, size)
    return raw[:, start : start + 10].tobytes()


TENSORS = (
    *(torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
)

plain_dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(endianness="?"),
    hnp.datetime64_dtypes(endianness="?"),
    hnp.timedelta64_dtypes(endianness="?"),
    hnp.byte_string_dtypes(endianness="?", max_len=5),
    hnp.unicode_string_dtypes(endianness="?", max_len=5),
    st.sampled_from([np.dtype("V3"), np.dtype("longdouble"), np.dtype("M8"), np.dtype("m8[25s]")]),
)
dtypes = st.one_of(
    plain_dtypes,
    hnp.nested_dtypes(plain_dtypes, max_itemsize=200).filter(lambda dtype: not titled(dtype)),
    st.just(np.dtype([("a", "i1"), ("b", ">f8"), ("c", "M8[ns]", (2,))], align=True)),
)
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


def titled(dtype: np.dtype[Any]) -> bool:
    """Tell whether a field has a second name."""
    if dtype.subdtype is not None:
        return titled(dtype.subdtype[0])
    return any(len(field) > 2 or titled(field[0]) for field in (dtype.fields or {}).values())


def fill(array: np.ndarray[Any, Any], rng: np.random.Generator) -> None:
    """Draw the bits of an array, field by field; text cannot have just any."""
    if array.dtype.names is not None:
        for name in array.dtype.names:
            fill(array[name], rng)
    elif array.dtype.kind == "U":
        words = rng.integers(0, 0x80, array.nbytes // 4).astype(array.dtype.byteorder + "u4")
        array[...] = words.view(array.dtype).reshape(array.shape)
    elif array.nbytes:
        most = 2 if array.dtype.kind == "b" else 256
        drawn = rng.integers(0, most, array.nbytes, np.uint8)
        array[...] = drawn.view(array.dtype).reshape(array.shape)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Any bits of any dtype, laid out in any way."""
    array = np.zeros(draw(shapes), draw(dtypes))
    shape = array.shape
    fill(array, np.random.default_rng(draw(st.integers(0, 2**32 - 1))))
    layout = draw(st.sampled_from(["C", "F", "reversed", "strided", "transposed"]))
    if layout == "F":
        return np.asfortranarray(array).reshape(shape)
    if layout == "transposed":
        return array.T
    if array.ndim and layout == "reversed":
        return array[::-1]
    if array.ndim and layout == "strided":
        return np.repeat(array, 2, axis=-1)[..., ::2]
    return array


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from([*TENSORS, torch.bool]))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    seed = draw(st.integers(0, 2**32 - 1))
    size = int(np.prod([1, *shape]))
    if dtype is torch.bool:
        made = torch.from_numpy(np.random.default_rng(seed).integers(0, 2, size).astype(bool))
    else:
        bits = np.random.default_rng(seed).bytes(size * dtype.itemsize)
        made = torch.frombuffer(bytearray(bits), dtype=dtype) if bits else torch.empty(0).to(dtype)
    made = made.reshape(shape)
    layout = draw(st.sampled_from(["C", "transposed", "strided", "expanded"]))
    if shape and layout == "transposed":
        return made.transpose(0, -1)
    if shape and layout == "strided":
        return made[..., ::2]
    if layout == "expanded":
        return made.expand(2, *shape)
    return made


# A scalar of bytes or text may not end in zeros: NumPy itself cuts them when it reads one.
scalars = st.one_of(
    hnp.scalar_dtypes().filter(lambda d: d.kind not in "SU").flatmap(hnp.from_dtype),
    st.integers(0, 2**16).map(np.longdouble),
    st.text(max_size=4).filter(lambda s: not s.endswith("\0")).map(np.str_),
    st.binary(max_size=4).map(np.void),
)
text = st.text(st.characters(exclude_categories=()), max_size=5)  # lone surrogates included
numbers = st.one_of(
    st.integers(),
    st.integers(-(2**63) - 2, -(2**63) + 2),
    st.integers(2**63 - 2, 2**64 + 2),
    st.integers(0, 200).map(lambda n: -(3**n)),
    st.floats(),
    st.complex_numbers(),
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    numbers,
    text,
    st.binary(max_size=9),
    st.binary(max_size=9).map(bytearray),
    arrays(),
    scalars,
    tensors(),
)
keys = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), text, st.binary(max_size=4)),
    lambda inner: st.one_of(st.tuples(inner, inner), st.builds(Pair, inner, inner)),
    max_leaves=3,
)
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Record, inner, inner),
        st.builds(Frozen, inner, y=inner),
        st.builds(Outer.Inner, inner),
    ),
    max_leaves=8,
)
