"""Values and their records: what goes in comes out, of the same types, and nothing else does."""

from __future__ import annotations

import collections
import dataclasses
import enum
import importlib
import math
import pickle
import random
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

import encodable
from encodable import Pair, Record, arrays, nested, scalars, shown, tensors, text
from odd_records import ODD_RECORDS
from stoker.basics import pytree
from stoker.transport.codec import (
    LEFT_OUT,
    Damaged,
    LeftOut,
    RecordView,
    UnknownType,
    decode,
    decode_views,
    encode,
    encode_views,
)
from strategies import FULL


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


def lent(value: Any) -> Any:
    """View a record's contents, out of which it is unpickled."""
    head, contents = encode_views(value)
    buffers: list[pickle.PickleBuffer] = []
    memory = np.frombuffer(bytearray(b"".join(contents)), np.uint8)
    pickled = pickle.dumps(RecordView(head, memory), 5, buffer_callback=buffers.append)
    return pickle.loads(pickled, buffers=buffers)


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


# -- there and back


@given(nested)
def test_values_come_back_bit_for_bit_and_of_the_same_types(value: Any) -> None:
    before = shown(value)
    made = there_and_back(value)
    assert shown(made) == before
    assert writable(made)
    assert shown(value) == before  # nor does it share memory with what went in


@given(nested)
def test_all_ways_take_the_same_values(value: Any) -> None:
    """What a cache keeps goes to other hosts, too, and is the same there."""
    before = shown(value)
    assert shown(lent(value)) == before
    head, contents = encode_views(value)
    record = b"".join([head, *contents])
    for _ in range(2):  # the second time by what was kept of the first
        assert shown(decode(memoryview(record))) == before


@given(nested)
def test_what_is_lent_is_aligned_and_arrays_of_it_are_read_only(value: Any) -> None:
    memory: Any = np.zeros(1 << 20, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :]
    head, contents = encode_views(value)
    body = b"".join(contents)
    memory[: len(body)] = np.frombuffer(body, np.uint8)
    for leaf in pytree.leaves(decode_views(head, memory.data[: len(body)])):
        if type(leaf) is torch.Tensor and leaf.numel():
            assert leaf.data_ptr() % 64 == 0
        elif type(leaf) is np.ndarray:
            assert not leaf.flags.writeable
            assert not leaf.nbytes or leaf.ctypes.data % 64 == 0
            assert not leaf.nbytes or np.shares_memory(leaf, memory)


@given(arrays())
def test_arrays_of_any_dtype_and_layout_come_back(array: np.ndarray[Any, Any]) -> None:
    made = there_and_back(array)
    assert shown(made) == shown(array)
    assert made.flags.writeable
    assert made.flags.c_contiguous
    assert made.base is None
    assert writable(made)


@given(
    hnp.array_shapes(max_dims=4, min_side=2, max_side=3).flatmap(
        lambda s: st.permutations(range(len(s))).map(
            lambda axes: np.arange(math.prod(s), dtype=">f8").reshape(s).transpose(axes)
        )
    )
)
def test_dense_memory_stays_as_it_is_laid_out(array: np.ndarray[Any, Any]) -> None:
    """No element moves: neither do columns become rows, nor channels last channels first."""
    tensor = torch.from_numpy(array.astype("<f8", order="K"))
    made = lent([array, tensor])
    assert shown(made[0]) == shown(array)
    assert made[0].ravel("K").tobytes() == array.ravel("K").tobytes()
    assert torch.equal(made[1], tensor)
    assert made[1].stride() == tensor.stride()


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


@given(nested.filter(lambda value: type(value) is not bytes))
def test_what_stands_behind_a_record_is_damage(value: Any) -> None:
    head, *contents = encode(value)
    decode(memoryview(b"".join([head, *contents])))  # a reader that is kept refuses it, too
    with pytest.raises(Damaged):
        decode(memoryview(b"".join([head, *contents, b"\xff"])))
    with pytest.raises(Damaged):
        decode_views(head, bytearray(b"".join([*contents, b"\xff"])))


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
    assert pickle.loads(pickle.dumps(LEFT_OUT)) is LEFT_OUT
    assert there_and_back([LEFT_OUT, None])[0] is LEFT_OUT


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
    with pytest.raises(TypeError, match=f"cannot store or send a {type(value).__module__}"):
        encode(value)
    name = type(value).__qualname__.replace("<", r"\<")
    with pytest.raises(TypeError, match=rf"cannot store or send a .*{name} \(at a\.1\.left\.x\)"):
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
    with pytest.raises(UnknownType, match=rf"{name}\.{kind}"):
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


SCRIPT = """
import sys
from stoker.transport.codec import decode

if __name__ == "__main__":
    made = decode(memoryview(sys.stdin.buffer.read()))
    print(type(made) is Kept, made.x)
"""


def test_a_script_finds_its_own_class_where_others_import_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stoker_test_script.py").write_text(MODULE + SCRIPT)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    module = importlib.import_module("stoker_test_script")
    record = b"".join(encode(module.Kept(7)))
    del sys.modules["stoker_test_script"]
    command = [sys.executable, str(tmp_path / "stoker_test_script.py")]
    done = subprocess.run(command, input=record, capture_output=True, check=True, timeout=500)
    assert done.stdout.split() == [b"True", b"7"]


def test_a_class_whose_fields_are_others_by_now_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = memoryview(b"".join(encode([Pair(1, 2), Record(3, 4)])))
    assert decode(record) == [Pair(1, 2), Record(3, 4)]
    for name, fields in (("Pair", "left right more"), ("Pair", "right left"), ("Record", "x y")):
        with monkeypatch.context() as patch:
            patch.setattr(encodable, name, collections.namedtuple(name, fields))
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
        f"{encodable.__name__}:Outer",
        f"{encodable.__name__}:Record.__init__",
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
    with pytest.raises(TypeError, match="more than 100 levels deep"):
        encode(deep)
    assert there_and_back(deep[0]) == deep[0]
    with pytest.raises(TypeError, match=r"cannot store or send a numpy\.ndarray"):
        encode(np.ndarray((2**16 + 1,), "V0"))
    assert there_and_back(np.ndarray((3, 2), "V0")).shape == (3, 2)
    assert there_and_back(3**20_000) == 3**20_000
