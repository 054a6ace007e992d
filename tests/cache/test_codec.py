"""Values and their records: what goes in comes out, of the same types, and nothing else does."""

from __future__ import annotations

import collections
import dataclasses
import enum
import importlib
import pickle
import random
import struct
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from odd_records import ODD_RECORDS
from stoker.cache.codec import LEFT_OUT, Damaged, LeftOut, UnknownType, decode, encode
from strategies import FULL


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


class Wordy(str):
    pass


class Level(enum.IntEnum):
    LOW = 1


def there_and_back(value: Any) -> Any:
    """Decode from memory that is overwritten at once, as a store's may be."""
    memory = bytearray(b"".join(encode(value)))
    made = decode(memoryview(memory).toreadonly())
    memory[:] = b"\xaa" * len(memory)
    return made


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


def writable(value: Any) -> bool:
    """Write into every array and tensor of a value, and tell whether that changed it."""
    if type(value) is np.ndarray:
        if value.nbytes:
            before = value.tobytes()
            value.reshape(-1).view(np.uint8)[:] ^= 255  # a copy of it would leave it as it was
            return value.tobytes() != before
    elif type(value) is torch.Tensor:
        if value.numel():
            flat = value.view(-1).view(torch.uint8)
            before = flat.numpy().tobytes()
            flat ^= 255
            return value.view(-1).view(torch.uint8).numpy().tobytes() != before
    elif isinstance(value, (tuple, list)):
        return [writable(part) for part in value].count(False) == 0
    elif isinstance(value, dict):
        return writable(list(value.values()))
    elif dataclasses.is_dataclass(value):
        return writable([getattr(value, f.name) for f in dataclasses.fields(value)])
    return True


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


# -- there and back


@given(nested)
def test_values_come_back_bit_for_bit_and_of_the_same_types(value: Any) -> None:
    before = shown(value)
    made = there_and_back(value)
    assert shown(made) == before
    assert writable(made)
    assert shown(value) == before  # nor does it share memory with what went in


@given(arrays())
def test_arrays_of_any_dtype_and_layout_come_back(array: np.ndarray[Any, Any]) -> None:
    made = there_and_back(array)
    assert shown(made) == shown(array)
    assert made.flags.writeable
    assert made.flags.c_contiguous
    assert writable(made)


@given(tensors())
def test_tensors_of_any_dtype_and_layout_come_back(tensor: torch.Tensor) -> None:
    made = there_and_back(tensor)
    assert shown(made) == shown(tensor)
    assert made.is_contiguous()
    assert writable(made)


@given(scalars)
def test_numpy_scalars_come_back(scalar: np.generic) -> None:
    assert shown(there_and_back(scalar)) == shown(scalar)


@given(text)
@example("a\udcff.jpg")
def test_all_text_comes_back(words: str) -> None:
    # Names of files that are no UTF-8 have lone surrogates.
    assert there_and_back((words, {words: 1})) == (words, {words: 1})


@given(st.lists(nested, max_size=4))
def test_a_record_says_where_it_ends(values: list[Any]) -> None:
    """What stands behind a record is not read."""
    record = b"".join(encode(values))
    assert shown(decode(memoryview(record + b"\xff" * 100))) == shown(values)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(np.bytes_(b"a\0"), id="bytes that end in a zero"),
        pytest.param(np.bytes_(b""), id="no bytes"),
        pytest.param(np.str_(""), id="no text"),
        pytest.param(np.void(b""), id="no void"),
        pytest.param(np.array([-(2**63)]).view("M8")[0], id="a date without a unit"),
        pytest.param(np.zeros(2, [("a", "U0"), ("b", "i4")])["a"], id="texts of no length"),
        pytest.param(np.zeros(2, [("a", "S0"), ("b", "i4")])["a"], id="byte strings of no length"),
        pytest.param(np.zeros(2, np.dtype([])), id="no fields"),
        pytest.param(np.zeros(2, [("a", "i4")])[0], id="a structured scalar"),
    ],
)
def test_the_smallest_and_strangest_come_back_and_leave_the_others_alone(value: Any) -> None:
    around = (b"before", value, b"behind", np.arange(3))
    assert shown(there_and_back(around)) == shown(around)


@pytest.mark.parametrize(
    "lazy",
    [torch.tensor([1 + 2j, 3 - 1j]).conj(), torch.tensor([1 + 2j]).conj().imag],
    ids=["conjugated", "negated"],
)
def test_tensors_that_are_computed_when_read_come_back(lazy: torch.Tensor) -> None:
    assert lazy.is_conj() or lazy.is_neg()
    assert torch.equal(there_and_back(lazy), lazy)


def test_tensors_come_back_without_their_gradients() -> None:
    made = there_and_back(torch.ones(2, requires_grad=True))
    assert torch.equal(made, torch.ones(2))
    assert not made.requires_grad


def test_what_a_filter_left_out_comes_back_as_that() -> None:
    assert there_and_back(LEFT_OUT) is LEFT_OUT
    assert there_and_back([LEFT_OUT, None])[0] is LEFT_OUT


def test_the_order_of_a_dict_stays() -> None:
    value = {3: "a", (1, b"k"): np.arange(2), "x": bytearray(b"b"), None: 1.5}
    assert shown(there_and_back(value)) == shown(value)


# -- what cannot be stored


class Plain:
    pass


def a_local_class() -> Any:
    @dataclass
    class Local:
        x: int

    return Local(1)


def a_local_named_tuple() -> Any:
    Local: Any = collections.namedtuple("Local", ["x"])
    return Local(1)


def an_impostor() -> Any:
    """Return an instance of a class whose name finds another one."""

    @dataclass
    class Impostor:
        x: Any
        y: Any

    Impostor.__qualname__ = "Record"
    return Impostor(1, 2)


def more_than_its_fields() -> Any:
    record = Record(1, 2)
    record.z = 3  # type: ignore[attr-defined]
    return record


OVERLAPPING = np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 1]})

REFUSED = {
    "an image": lambda: Image.new("RGB", (2, 2)),
    "an object array": lambda: np.array([None, 1], object),
    "an object in a field": lambda: np.zeros(2, [("a", object)]),
    "variable texts": lambda: np.array(["a", "b" * 50], np.dtypes.StringDType()),
    "a masked array": lambda: np.ma.masked_array([1, 2], [True, False]),
    "a matrix of its own class": lambda: np.zeros(2).view(np.recarray),
    "a sparse tensor": lambda: torch.eye(2).to_sparse(),
    "a tensor without data": lambda: torch.empty(2, device="meta"),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "a local dataclass": a_local_class,
    "a local named tuple": a_local_named_tuple,
    "a class of another's name": an_impostor,
    "an object": Plain,
    "a class": lambda: Record,
    "a function": lambda: print,
    "a set": lambda: {1, 2},
    "a subclass of str": lambda: Wordy("a"),
    "an enum": lambda: Level.LOW,
    "a defaultdict": lambda: collections.defaultdict(list, a=[1]),
    "an ordered dict": lambda: collections.OrderedDict(a=1),
    "a memoryview": lambda: memoryview(b"abc"),
    "LeftOut of others": LeftOut,
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_stored_is_refused_with_its_place(make: Any) -> None:
    value = make()
    with pytest.raises(TypeError, match=f"cannot cache a {type(value).__module__}"):
        encode(value)
    name = type(value).__qualname__.replace("<", r"\<")
    with pytest.raises(TypeError, match=rf"cannot cache a .*{name} \(at a\.1\.left\.x\)"):
        encode({"a": (1, Pair(Record(value, 0), 2))})


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: np.zeros(2, OVERLAPPING), id="fields that overlap"),
        pytest.param(lambda: np.zeros(2, [(("title", "name"), "i4")]), id="titles"),
        pytest.param(lambda: np.rec.array([(1, 2)], dtype="i4,i4")[0], id="a record"),
        pytest.param(more_than_its_fields, id="a dataclass that holds more than its fields"),
    ],
)
def test_what_is_hard_to_store_comes_back_or_is_refused_with_its_place(make: Any) -> None:
    value = make()
    refusal = ""
    try:
        record = b"".join(encode({"a": [value]}))
    except TypeError as error:
        refusal = str(error)
    if refusal:
        assert "(at a.0)" in refusal
        return
    (made,) = decode(memoryview(record))["a"]
    assert type(made) is type(value)
    if isinstance(value, (np.ndarray, np.generic)):
        assert made.dtype == value.dtype
        assert made.dtype.fields == value.dtype.fields  # titles included
        assert made.tobytes() == value.tobytes()
    else:
        assert vars(made) == vars(value)


def test_a_structure_that_holds_itself_is_an_error() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises((TypeError, ValueError, RecursionError)):
        encode(value)


# -- nothing is unpickled, nothing is imported

MODULE = """
from dataclasses import dataclass
from typing import NamedTuple

@dataclass
class Kept:
    x: int

class Named(NamedTuple):
    x: int
"""


@pytest.mark.parametrize("kind", ["Kept", "Named"])
def test_a_class_that_is_not_imported_is_unknown_and_stays_so(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"stoker_test_of_{kind.lower()}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    module = importlib.import_module(name)
    value = [np.arange(2), getattr(module, kind)(7)]
    record = memoryview(b"".join(encode(value)))
    assert decode(record)[1] == value[1]
    del sys.modules[name]
    with pytest.raises(UnknownType, match=f"{name}:{kind}"):
        decode(record)
    assert name not in sys.modules
    # Once somebody else has imported it, it is known again: the class of that time.
    again = importlib.import_module(name)
    try:
        assert type(decode(record)[1]) is getattr(again, kind)
        setattr(again, kind, None)
        with pytest.raises(UnknownType):
            decode(record)
    finally:
        del sys.modules[name]


def test_a_class_whose_fields_are_others_by_now_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = memoryview(b"".join(encode([Pair(1, 2), Record(3, 4)])))
    assert decode(record) == [Pair(1, 2), Record(3, 4)]
    for name, fields in (("Pair", "left right more"), ("Pair", "right left"), ("Record", "x y")):
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[__name__], name, collections.namedtuple(name, fields))
            with pytest.raises(UnknownType, match=name):
                decode(record)


def test_looking_for_a_class_runs_no_code_of_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules that import their parts when asked for them (torch, stoker) are not asked."""
    lazy = "def __getattr__(name):\n    import stoker_test_part\n    raise AttributeError(name)\n"
    (tmp_path / "stoker_test_lazy.py").write_text(lazy)
    (tmp_path / "stoker_test_part.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    importlib.import_module("stoker_test_lazy")
    record = naming("stoker_test_lazy:Part", Record)
    try:
        with pytest.raises(UnknownType):
            decode(memoryview(record))
        assert "stoker_test_part" not in sys.modules
    finally:
        sys.modules.pop("stoker_test_part", None)
        sys.modules.pop("stoker_test_lazy")


@pytest.mark.parametrize(
    "name",
    [
        *("os:system", "builtins:eval", "builtins:dict", "subprocess:Popen", "sys:modules"),
        f"{__name__}:Plain",
        f"{__name__}:Outer",
        f"{__name__}:Record.__init__",
        "antigravity:Record",
    ],
)
@pytest.mark.parametrize("kind", [Pair, Record], ids=["named", "dataclass"])
def test_nothing_but_named_tuples_and_dataclasses_is_made(name: str, kind: Any) -> None:
    record = naming(name, kind)
    with pytest.raises(UnknownType):
        decode(memoryview(record))
    assert "antigravity" not in sys.modules


def naming(name: str, like: Any) -> bytes:
    """Return a record of something like ``like(1, 2)`` that names another class, or no class."""
    module = types.ModuleType("m")
    twin = module.__dict__["x" * (len(name) - 2)] = type(like.__name__, (like,), {})
    twin.__module__, twin.__qualname__ = "m", "x" * (len(name) - 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "m", module)
        record = b"".join(encode(twin(1, 2)))
    own = f"m:{twin.__qualname__}".encode()
    assert record.count(own) == 1
    return record.replace(own, name.encode())


def test_what_a_filter_left_out_is_one_and_the_same() -> None:
    assert there_and_back(LEFT_OUT) is LEFT_OUT
    assert pickle.loads(pickle.dumps(LEFT_OUT)) is LEFT_OUT


PADDED = {
    "long": np.dtype(np.longdouble),
    "long complex": np.dtype(np.clongdouble),
    "long, swapped": np.dtype(np.longdouble).newbyteorder(),
    "aligned": np.dtype([("a", "i1"), ("b", "f8"), ("c", "i2")], align=True),
    "nested": np.dtype(
        [("a", "i1"), ("b", np.dtype([("x", "i1"), ("y", "f4")], align=True), (2,)), ("c", "g")],
        align=True,
    ),
}


@pytest.mark.parametrize("name", PADDED)
def test_what_lies_between_numbers_is_not_stored(name: str) -> None:
    """Memory that was never written: the same value is the same record whatever it holds."""
    dtype = PADDED[name]
    records, arrays = [], []
    for rest in (0, 255):
        array = np.full(6 * dtype.itemsize, rest, np.uint8).view(dtype).reshape(2, 3)
        number(array, 3)
        arrays.append(array)
        records.append(b"".join(encode([array, array[::2, 1:], array[1, 1]])))
    assert records[0] == records[1]
    whole, part, one = decode(memoryview(records[1]))
    assert (whole == arrays[1]).all()
    assert whole.dtype == dtype
    assert (part == arrays[1][::2, 1:]).all()
    assert one == arrays[1][1, 1]


def number(array: Any, value: int) -> None:
    """Set each number of an array, and nothing between them."""
    if array.dtype.names is not None:
        for name in array.dtype.names:
            number(array[name], value)
        return
    size = np.dtype(np.longdouble).itemsize
    if array.dtype.char not in "gG" or np.finfo(np.longdouble).nmant != 63:
        array[...] = value
        return
    new = np.full(array.shape, value, array.dtype)
    raw = new.reshape(-1).view(np.uint8).reshape(-1, size)
    start = 10 if array.dtype.isnative else 0
    raw[:, start : start + size - 10] = RNG.integers(0, 255, (len(raw), size - 10), np.uint8)
    array[...] = new


RNG = np.random.default_rng(0)


# -- what was never written here


@pytest.mark.parametrize("name", ODD_RECORDS)
def test_what_was_never_written_is_damage(name: str) -> None:
    """Nothing else comes out of it: no value, no other error, no crash, and no long wait."""
    with pytest.raises(Damaged):
        decode(memoryview(ODD_RECORDS[name]))


FUZZED = 100_000 if FULL else 3_000
SEEDS = [
    *ODD_RECORDS.values(),
    *(
        b"".join(encode(value))
        for value in (
            [np.arange(6.0).reshape(2, 3), {"a": (1, 2.5, None, True), "b": b"x" * 30}],
            np.zeros(3, [("a", "<i4"), ("b", "<M8[ns]", (2,)), ("c", [("d", "S3")])]),
            [torch.arange(5), torch.ones(2, dtype=torch.bfloat16), np.float32(2), 3**90, 1j],
            [Pair(np.bytes_(b"a\0"), np.str_("b")), Record("\udcff", bytearray(b"c")), LEFT_OUT],
            b"alone",
        )
    ),
]


def changed(data: bytes, draw: random.Random) -> bytes:
    """Return a record that a few things were done to."""
    made = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 4])):
        at, kind = draw.randrange(len(made) + 1), draw.randrange(8)
        if kind == 0:
            del made[at:]
        elif kind == 1:
            made[at:at] = draw.randbytes(draw.randint(1, 9))
        elif kind == 2:
            made[at : at + 1] = draw.choice([b"\xdd", b"\xdf", b"\xcf"]) + draw.randbytes(8)
        elif kind == 3 and b"<" in made:  # a dtype
            at = draw.choice([n for n, byte in enumerate(made) if byte == ord("<")])
            made[at + 1 : at + 2] = draw.choice(b"OVSUcfmM").to_bytes()
        else:
            made[at : at + 1] = draw.randbytes(1)
    return bytes(made)


@pytest.mark.timeout(1800)
def test_changed_records_are_values_or_damage() -> None:
    draw = random.Random(5)
    values = damaged = 0
    for _ in range(FUZZED):
        record = changed(draw.choice(SEEDS), draw)
        try:
            decode(memoryview(record))
            values += 1
        except (Damaged, UnknownType):
            damaged += 1
    assert values
    assert damaged


def test_what_could_not_be_read_again_is_refused() -> None:
    deep: Any = 1
    for _ in range(101):
        deep = [deep]
    with pytest.raises(TypeError, match="nested 100 deep"):
        encode(deep)
    assert there_and_back(deep[0]) == deep[0]
    with pytest.raises(TypeError, match=r"cannot cache a numpy\.ndarray"):
        encode(np.ndarray((2**16 + 1,), "V0"))
    assert there_and_back(np.ndarray((3, 2), "V0")).shape == (3, 2)
    assert there_and_back(3**20_000) == 3**20_000
