"""Copies for threads: programs that go wrong where they are shared, and what replicas promise."""

from __future__ import annotations

import bz2
import contextlib
import functools
import gc
import gzip
import io
import json
import lzma
import operator
import os
import random
import re
import signal
import sqlite3
import sys
import threading
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from descriptors import open_descriptors
from stoker.replicas.files import reading_places, reopen_descriptors
from stoker.replicas.replica import Replica, replicate, unset_attributes
from stoker.replicas.user_lock import USER_LOCK
from strategies import FULL
from thread_programs import PROGRAMS, N, Program

THREADS = 8
# The programs leave their files open, as users do.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(autouse=True)
def _switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def caller(replica: Replica, roots: tuple[Any, ...]) -> Callable[[int], Any]:
    """Return how one thread makes an example."""

    def made(i: int) -> Any:
        value: Any = i
        for number, (own, why) in enumerate(zip(replica.values, replica.locked, strict=True)):
            with USER_LOCK if why is not None else contextlib.nullcontext():
                value = own[value] if number == 0 else own(value)
        return value

    return made


def wrong(program: Program, calls: list[Callable[[int], Any]], seconds: float) -> list[str]:
    """Return what several threads get wrong, or raise, in so long a time."""
    found: list[str] = []
    start = threading.Barrier(len(calls))
    end = [0.0]

    def work(seed: int, call: Callable[[int], Any]) -> None:
        order = random.Random(seed)
        start.wait()
        end[0] = end[0] or time.monotonic() + seconds
        while time.monotonic() < end[0] and not found:
            i = order.randrange(N)
            try:
                value = call(i)
            except Exception as error:
                found.append(f"example {i}: {error!r}")
                return
            if value != program.expected(i):
                found.append(f"example {i}: {value!r} for {program.expected(i)!r}")

    threads = [threading.Thread(target=work, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def replicas(roots: tuple[Any, ...]) -> list[Replica]:
    return [replicate(roots) for _ in range(THREADS)]


def check(program: Program, folder: Path, seconds: float) -> None:
    roots = program.make(folder)
    own = replicas(roots)
    found = wrong(program, [caller(each, roots) for each in own], seconds)
    if found and any(each.make_private() for each in own):  # a write to a large array
        assert "read-only" in found[0], found
        own = replicas(roots)
        found = wrong(program, [caller(each, roots) for each in own], seconds)
    assert found == []
    if program.locked is not None:
        assert any(own[0].locked) == program.locked, own[0].locked


@pytest.mark.parametrize("program", PROGRAMS[::3], ids=lambda each: each.name)
def test_copies_are_right(program: Program, tmp_path: Path) -> None:
    check(program, tmp_path, 0.05)


@pytest.mark.full
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.name)
def test_copies_are_right_for_long(program: Program, tmp_path: Path) -> None:
    check(program, tmp_path, 2.0 if FULL else 0.5)


@pytest.mark.full
@pytest.mark.parametrize(
    "program", [each for each in PROGRAMS if each.unsafe], ids=lambda each: each.name
)
def test_shared_they_are_wrong(program: Program, tmp_path: Path) -> None:
    """In a child process: some end it, and some hang."""
    child = os.fork()
    if child == 0:
        status = 1
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        if "torch" in sys.modules:  # its threads are not there after a fork
            sys.modules["torch"].set_num_threads(1)
        with contextlib.suppress(BaseException):
            roots = program.make(tmp_path)
            shared = Replica(roots, (None,) * len(roots), None)  # type: ignore[arg-type]
            status = 0 if wrong(program, [caller(shared, roots)] * THREADS, 20.0) else 3
        os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        waits = program.name in ("Piped", "Sockets")  # for what another has read
        assert waits or os.WTERMSIG(status) != signal.SIGALRM
    else:
        assert os.WEXITSTATUS(status) == 0


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.name)
def test_a_replica_of_unchanged_originals_is_current(program: Program, tmp_path: Path) -> None:
    replica = replicate(program.make(tmp_path))
    assert replica.is_current()


class Holder:
    """A dataset with all kinds of attributes."""

    def __init__(self) -> None:
        self.scale = 1
        self.items = [1, 2, [3]]
        self.table = {"a": [1]}
        self.names = [f"name {i}" for i in range(1_000)]
        self.pairs = [(f"path {i}", i) for i in range(1_000)]
        self.records = [{"id": i, "box": [i, i + 1]} for i in range(1_000)]
        self.small = np.zeros(10)
        self.bytes = bytearray(10)
        self.random = random.Random(0)
        self.inner: Any = SimpleNamespace(depth=1, values={1, 2})
        self.queue: deque[int] = deque([1, 2])
        self.by_default: defaultdict[str, list[int]] = defaultdict(list)

    def __getitem__(self, i: int) -> Any:
        return i

    def __len__(self) -> int:
        return N


CHANGES: dict[str, Callable[[Holder], Any]] = {
    "an attribute": lambda d: setattr(d, "scale", 10),
    "an attribute more": lambda d: setattr(d, "more", 10),
    "an attribute less": lambda d: delattr(d, "scale"),
    "an attribute of another type": lambda d: setattr(d, "scale", True),
    "an element": lambda d: operator.setitem(d.items, 0, 5),
    "an element within": lambda d: d.items[2].append(4),  # type: ignore[attr-defined]
    "a value": lambda d: d.table["a"].append(2),
    "a key": lambda d: d.table.update(b=[]),
    "a name of many": lambda d: operator.setitem(d.names, 500, "other"),
    "a pair of many": lambda d: operator.setitem(d.pairs, 500, ("other", 1)),
    "a record of many": lambda d: operator.setitem(d.records[500], "id", -1),
    "within a record of many": lambda d: d.records[500]["box"].append(1),  # type: ignore[attr-defined]
    "an array": lambda d: d.small.__setitem__(3, 1.0),
    "an array's shape": lambda d: setattr(d, "small", d.small.reshape(2, 5)),
    "bytes": lambda d: operator.setitem(d.bytes, 3, 1),
    "a generator": lambda d: d.random.random(),
    "an object within": lambda d: setattr(d.inner, "depth", 2),
    "a set within": lambda d: d.inner.values.add(3),
    "a queue": lambda d: d.queue.append(3),
    "a default": lambda d: d.by_default["x"],
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.replace(" ", "-"))
def test_a_replica_is_not_current_when_something_has_changed(change: str) -> None:
    holder = Holder()
    replica = replicate([holder])
    assert replica.locked == (None,)
    assert replica.is_current()
    CHANGES[change](holder)
    assert not replica.is_current()


@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.replace(" ", "-"))
def test_what_is_done_to_a_copy_does_not_reach_the_original(change: str) -> None:
    holder = Holder()
    replica = replicate([holder])
    CHANGES[change](replica.values[0])
    assert replica.is_current()
    assert replicate([holder]).is_current()


def test_a_function_is_not_current_when_what_it_names_has_changed() -> None:
    scratch = [1]
    rate = 1

    def mapped(i: int) -> Any:
        return scratch, rate, OPTION

    replica = replicate([mapped])
    assert replica.values[0](0) == ([1], 1, "a")
    assert replica.values[0](0)[0] is not scratch
    assert replica.is_current()
    scratch.append(2)
    assert not replica.is_current()
    replica = replicate([mapped])
    rate = 2
    assert not replica.is_current()
    replica = replicate([mapped])
    globals()["OPTION"] = "b"
    try:
        assert not replica.is_current()
        assert replicate([mapped]).values[0](0)[2] == "b"
    finally:
        globals()["OPTION"] = "a"


OPTION = "a"

scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats()
structures = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=70)
        | st.dictionaries(st.integers(), inner, max_size=70)
        | st.tuples(inner, inner)
        | st.builds(lambda value: SimpleNamespace(value=value), inner)
    ),
    max_leaves=200,
)


def mutables(x: Any, found: dict[int, Any]) -> dict[int, Any]:
    if isinstance(x, (list, dict, SimpleNamespace)):
        found[id(x)] = x
    parts = vars(x).values() if isinstance(x, SimpleNamespace) else x
    parts = x.values() if isinstance(x, dict) else parts
    if not isinstance(x, (str, int, float, type(None))):
        for part in parts:
            mutables(part, found)
    return found


@given(structures)
def test_a_copy_is_equal_and_shares_nothing_that_changes(structure: Any) -> None:
    replica = replicate([structure])
    assert repr(replica.values[0]) == repr(structure)
    assert mutables(replica.values[0], {}).keys().isdisjoint(mutables(structure, {}))
    assert replica.is_current()


@given(st.lists(structures, min_size=2, max_size=80), st.data())
def test_a_copy_has_the_same_aliases(parts: list[Any], data: st.DataObject) -> None:
    picked = data.draw(st.lists(st.sampled_from(range(len(parts))), max_size=100))
    original = [parts[i] for i in picked]
    (copied,) = replicate([original]).values
    for i, one in enumerate(original):
        for k, other in enumerate(original):
            assert (one is other) == (copied[i] is copied[k]) or not mutables(one, {})


def test_roots_share_in_their_copies_what_they_share() -> None:
    shared: list[int] = []
    one, other = SimpleNamespace(own=shared), functools.partial(max, shared)
    first, second = replicate([one, other]).values
    assert first.own is second.args[0]
    assert first.own is not shared


def test_what_cannot_be_copied_locks_all_that_share_with_it() -> None:
    shared: list[int] = []
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        one = SimpleNamespace(connection=connection, own=shared)
        other, apart = SimpleNamespace(own=shared), SimpleNamespace(own=[])
        replica = replicate([other, one, apart])
    reason = "SimpleNamespace.connection, a sqlite3.Connection, cannot be copied"
    assert replica.locked == (reason, reason, None)
    assert replica.values[0] is other
    assert replica.values[1] is one
    assert replica.values[2] is not apart


def test_what_was_opened_since_the_epoch_began_is_left_out() -> None:
    one = SimpleNamespace(connection=None, opened=None, rate=3)
    unset = unset_attributes([one])
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        one.connection, one.opened, one.rate = connection, True, 4
        one.cursor = connection.cursor()
        assert replicate([one]).locked != (None,)
        replica = replicate([one], unset)
        assert replica.locked == (None,)
        assert vars(replica.values[0]) == {"connection": None, "opened": None, "rate": 4}


def test_a_large_array_is_shared_and_cannot_be_written_to() -> None:
    large = SimpleNamespace(x=np.zeros(4 << 20, np.uint32))
    replica = replicate([large])
    copied = replica.values[0].x
    assert np.shares_memory(copied, large.x)
    with pytest.raises(ValueError, match="read-only"):
        copied[0] = 1
    large.x[5] = 7  # between epochs: every thread sees it
    assert copied[5] == 7
    assert replica.is_current()


def test_a_large_array_is_private_once_writing_has_failed() -> None:
    large = SimpleNamespace(x=np.arange(4 << 20, dtype=np.uint32))
    assert replicate([large]).make_private()
    one, other = replicate([large]), replicate([large])
    one.values[0].x[3] = 0
    assert other.values[0].x[3] == large.x[3] == 3
    assert one.is_current()
    assert not one.make_private()
    large.x[3] = 1
    assert not one.is_current()
    assert replicate([large]).values[0].x[3] == 1


def test_a_large_array_is_private_where_code_writes_past_its_flag() -> None:
    class Through(Holder):
        def __getitem__(self, i: int) -> Any:
            import torch

            return torch.from_numpy(self.small)

    dataset = Through()
    dataset.small = np.zeros(4 << 20)
    (copied,) = replicate([dataset]).values
    copied[0][0] = 1  # without torch's warning of an array that is not writable
    assert dataset.small[0] == 0


def test_views_of_an_array_are_views_of_its_copy() -> None:
    torch = pytest.importorskip("torch")
    base = np.zeros((4, 5))
    tensor = torch.from_numpy(base)
    made = SimpleNamespace(
        row=base[2], turned=base.T, back=base[::-1, 1:], tensor=tensor[2:], base=base
    )
    (copied,) = replicate([made]).values
    copied.base[2, 3] = 7
    assert copied.row[3] == copied.turned[3, 2] == copied.back[1, 2] == copied.tensor[0, 3] == 7
    assert base.sum() == 0


def test_classes_and_functions_of_packages_are_shared() -> None:
    made = SimpleNamespace(a=np.mean, b=json.loads, c=Path("/a"), d=Holder, e=re.compile("a"))
    (copied,) = replicate([made]).values
    assert vars(copied) == vars(made)
    assert all(vars(copied)[name] is value for name, value in vars(made).items())


def test_what_is_declared_is_shared() -> None:
    @stoker.thread_safe
    class Declared:
        def __init__(self) -> None:
            self.scratch: list[int] = []

    class Derived(Declared):
        pass

    @stoker.thread_safe
    def declared(i: int) -> Any:
        return SCRATCH.append(i)

    roots = [Declared(), Derived(), declared, stoker.thread_safe(SimpleNamespace())]
    replica = replicate(roots)
    assert [own is root for own, root in zip(replica.values, roots, strict=True)] == [
        True,
        False,
        True,
        True,
    ]
    assert replica.locked == (None,) * 4
    assert replicate([Calling(stoker.thread_safe(Holder()))]).declared != ()


SCRATCH: list[int] = []


class Calling:
    def __init__(self, held: Any) -> None:
        self.held = held


def test_a_declaration_ends_with_its_object() -> None:
    for _ in range(100):  # a later object has the same id
        stoker.thread_safe(SimpleNamespace())
        assert replicate([one := SimpleNamespace()]).values[0] is not one


def test_files_that_were_opened_again_are_closed_with_their_replica(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    with open(tmp_path / "a", "rb") as file, open(tmp_path / "a") as text:
        one = SimpleNamespace(file=file, text=text)
        gc.collect()
        before = open_descriptors()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            replica = replicate([one])
            assert replica.values[0].file.read() == b"abc"
            assert len(open_descriptors() - before) == 2
            del replica
            gc.collect()
        assert open_descriptors() <= before


def _of_a_file(folder: Path, content: bytes = b"") -> Path:
    path = folder / "file"
    path.write_bytes(content)
    return path


READERS: dict[str, tuple[Callable[[Path], Any], str | None]] = {
    "raw": (lambda folder: _of_a_file(folder).open("rb", buffering=0), None),
    "text": (lambda folder: _of_a_file(folder, b"one\ntwo\n").open(), None),
    "bz2": (lambda folder: bz2.open(_of_a_file(folder, bz2.compress(b"one"))), None),  # noqa: SIM115
    "xz": (lambda folder: lzma.open(_of_a_file(folder, lzma.compress(b"one"))), None),  # noqa: SIM115
    "for both": (lambda folder: _of_a_file(folder).open("r+b", buffering=0), "open in mode"),
    "a device": (lambda folder: open("/dev/null", "rb"), "not a regular file"),  # noqa: SIM115
    "of memory": (
        lambda folder: gzip.open(io.BytesIO(gzip.compress(b"one"))),  # noqa: SIM115
        "does not read a file",
    ),
    "other line ends": (
        lambda folder: _of_a_file(folder, b"one\r\n").open(newline=""),
        "end with a carriage return",
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_what_is_open_is_opened_again_or_the_reason_is_told(name: str, tmp_path: Path) -> None:
    make, why = READERS[name]
    with make(tmp_path) as file:
        replica = replicate([SimpleNamespace(file=file)])
        (reason,), (copy,) = replica.locked, replica.values
        if why is not None:
            assert why in str(reason)
            return
        assert reason is None
        assert copy.file is not file
        assert copy.file.read() == file.read()  # each from a place of its own


def test_it_never_raises() -> None:
    class Odd(Holder):
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise KeyError("odd")

    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    replica = replicate([Odd(), SimpleNamespace(deep=deep)])
    assert "odd" in str(replica.locked[0])
    assert "nested too deeply" in str(replica.locked[1])
    while deep:  # freed level by level
        deep = deep.pop()


def test_reasons_name_what_copies_would_share() -> None:
    class Tokenizing(Holder):
        def __getitem__(self, i: int) -> Any:
            return SCRATCH.append(i)

    (reason,) = replicate([Tokenizing()]).locked
    assert reason == (
        f"{Tokenizing.__qualname__}.__getitem__ uses the global 'SCRATCH', which its copies would "
        "share"
    )


def test_a_forked_child_reads_from_a_place_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(256)) * 1_000)
    with open(tmp_path / "a", "rb", buffering=0) as file:
        file.seek(7)
        places = reading_places()
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                reopen_descriptors(places)
                is_there = file.tell() == 7 and file.read(1) == b"\x07"
                status = 0 if is_there and file.seek(99_000) else 2
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert file.tell() == 7


class Record:
    """One of very many."""

    def __init__(self, number: int, parts: Any) -> None:
        self.number = number
        self.parts = parts


class Slotted:
    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def test_many_objects_are_copied_as_each_of_them_is() -> None:
    shared = [0]
    records: list[Any] = [Record(number, [number, shared]) for number in range(200)]
    records[3].parts = records  # it refers to all of them, itself as well
    records += [Slotted(number) for number in range(200)]
    declared = stoker.thread_safe(Record(-1, []))
    replica = replicate([records, [declared, *(Record(n, None) for n in range(200))]])
    assert replica.locked == (None, None)
    copies, others = replica.values
    assert others[0] is declared
    assert len({*map(id, copies), *map(id, records)}) == 2 * len(records)
    assert [type(each) for each in copies] == [type(each) for each in records]
    assert [each.number for each in copies] == [each.number for each in records]
    assert copies[3].parts is copies
    assert copies[0].parts[1] is copies[1].parts[1] is not shared
    copies[0].number = -1
    copies[0].parts[0] = -1
    assert (records[0].number, records[0].parts[0]) == (0, 0)


CHANGES_OF_MANY: dict[str, Callable[[list[Any]], Any]] = {
    "an attribute": lambda records: setattr(records[70], "number", -1),
    "a new attribute": lambda records: setattr(records[70], "other", -1),
    "no attribute": lambda records: delattr(records[70], "number"),
    "a list in one": lambda records: records[70].parts.append(1),
    "another table": lambda records: setattr(records[70], "__dict__", dict(vars(records[70]))),
    "another object": lambda records: operator.setitem(records, 70, Record(70, [70])),
}


@pytest.mark.parametrize("change", CHANGES_OF_MANY)
def test_a_replica_of_many_objects_is_not_current_when_one_has_changed(change: str) -> None:
    records = [Record(number, [number]) for number in range(200)]
    replica = replicate([records])
    assert replica.is_current()
    CHANGES_OF_MANY[change](records)
    assert not replica.is_current()


def test_a_large_list_is_looked_at_once_for_all_copies_of_a_generation() -> None:
    paths = [f"{number}.jpg" for number in range(1_000)]
    first, second = replicate([paths]), replicate([paths])
    generation, later = object(), object()
    assert first.is_current(generation)
    assert second.is_current(generation)
    paths[3] = "other.jpg"
    assert second.is_current(generation)  # by the first look
    assert not first.is_current(later)
    assert not second.is_current(later)
    assert not second.is_current()
