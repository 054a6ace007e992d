"""Programs as users write them: correct in one thread, and most of them wrong where threads share.

Each makes a dataset and functions that are mapped over it, and says what example ``i`` is.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import collections
import concurrent.futures
import configparser
import contextlib
import contextvars
import copy
import ctypes
import decimal
import enum
import functools
import gzip
import heapq
import importlib
import inspect
import io
import itertools
import logging
import logging.handlers
import math
import mmap
import operator
import os
import pathlib
import pickle
import queue
import random
import socket
import sqlite3
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import unittest.mock
import warnings
import weakref
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

N = 64
"""How many examples each has."""

OWN = sys.modules[__name__]


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        name: of the function or class that makes it.
        make: given a folder of its own, makes the dataset and the functions.
        expected: what example ``i`` is, behind the functions.
    """

    name: str
    make: Callable[[Path], tuple[Any, ...]]
    expected: Callable[[int], Any]


PROGRAMS: list[Program] = []
Made = TypeVar("Made", bound=Callable[..., Any])


def numbers(i: int) -> tuple[int, ...]:
    """What most examples are: enough steps that a switch of threads falls between them."""
    return tuple(i * 100 + k for k in range(8))


def program(expected: Callable[[int], Any] = numbers, name: str = "") -> Callable[[Made], Made]:
    """Add a function of a folder, or a dataset's class of a folder, of a file or of neither."""

    def add(make: Made) -> Made:
        def made(folder: Path) -> tuple[Any, ...]:
            asked = inspect.signature(make).parameters
            given: dict[str, Any] = {"folder": folder} if "folder" in asked else {}
            if "path" in asked:
                given["path"] = record_file(folder)
            parts = make(**given)
            return parts if isinstance(parts, tuple) else (parts,)

        PROGRAMS.append(Program(name or make.__name__, made, expected))
        return make

    return add


def fill(scratch: Any, i: int) -> tuple[int, ...]:
    """Go by way of a list that the caller keeps."""
    scratch.clear()
    for k in range(8):
        scratch.append(i * 100 + k)
    return tuple(scratch)


def number(i: int) -> int:
    return i


class Numbers:
    """The numbers themselves, for programs whose functions are what matters."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return i


# Tokenizers.

WORDS = " ".join(f"w{k % 7}" for k in range(40))


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"w{k}": k for k in range(7)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def tokenized(made: Any, i: int) -> int:
    made.enable_truncation(8 if i % 2 else 16)
    return len(made.encode(WORDS).ids)


def token_count(i: int) -> int:
    return 8 if i % 2 else 16


TOKENIZER: Any = None


@program(token_count)
class OwnTokenizer(Numbers):
    def __init__(self) -> None:
        self.tokenizer = tokenizer()

    def __getitem__(self, i: int) -> Any:
        return tokenized(self.tokenizer, i)


class GlobalTokenizer(Numbers):
    def __getitem__(self, i: int) -> Any:
        return tokenized(TOKENIZER, i)


@program(token_count)
def tokenizer_global_in_method(folder: Path) -> Any:
    OWN.TOKENIZER = tokenizer()  # type: ignore[attr-defined]
    return GlobalTokenizer()


def tokenize(i: int) -> Any:
    return tokenized(TOKENIZER, i)


@program(token_count)
def tokenizer_global_in_function(folder: Path) -> Any:
    OWN.TOKENIZER = tokenizer()  # type: ignore[attr-defined]
    return Numbers(), tokenize


@program(token_count)
def tokenizer_closure(folder: Path) -> Any:
    made = tokenizer()
    return Numbers(), lambda i: tokenized(made, i)


class BothTokenize(OwnTokenizer):
    def __getitem__(self, i: int) -> Any:
        return i if tokenized(self.tokenizer, i) == token_count(i) else -1


@program(token_count)
def tokenizer_in_dataset_and_function(folder: Path) -> Any:
    dataset = BothTokenize()
    shared = dataset.tokenizer
    return dataset, lambda i: tokenized(shared, i)


# Files.


def record_file(folder: Path) -> str:
    path = folder / "records"
    path.write_bytes(b"".join(b"%08d" % i * 512 for i in range(N)))
    return str(path)


def record(i: int) -> bytes:
    return b"%08d" % i * 2


class Reader(Numbers):
    def __init__(self, path: str) -> None:
        self.path = path
        self.file: Any = open(path, "rb")  # noqa: SIM115

    def __getitem__(self, i: int) -> Any:
        self.file.seek(i * 4096)
        return self.file.read(8) + self.file.read(8)


class LazyReader(Reader):
    def __init__(self, path: str) -> None:
        self.path = path
        self.file = None

    def __getitem__(self, i: int) -> Any:
        if self.file is None:
            self.file = open(self.path, "rb")  # noqa: SIM115
        return super().__getitem__(i)


@program(record)
def file_opened_lazily_and_used(folder: Path) -> Any:
    dataset = LazyReader(record_file(folder))
    assert dataset[3] == record(3)
    return dataset


@program(record)
def file_removed_since(folder: Path) -> Any:
    dataset = Reader(record_file(folder))
    os.unlink(dataset.path)
    return dataset


@program(record)
def readers_nested(folder: Path) -> Any:
    class Outer(Numbers):
        def __init__(self, inner: Any) -> None:
            self.parts = {"one": [inner]}

        def __getitem__(self, i: int) -> Any:
            return self.parts["one"][0][i]

    return Outer(Reader(record_file(folder)))


@program(record)
class SlotsReader:
    __slots__ = ("file",)

    def __init__(self, path: str) -> None:
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        self.file.seek(i * 4096)
        return (self.file.read(8) or b"") + (self.file.read(8) or b"")


@program(lambda i: f"{i:08d}\n")
class TextReader(Numbers):
    def __init__(self, folder: Path) -> None:
        path = folder / "lines"
        path.write_text("".join(f"{i:08d}\n" for i in range(N)))
        self.file = open(path)  # noqa: SIM115

    def __getitem__(self, i: int) -> Any:
        self.file.seek(i * 9)
        return self.file.readline()


@program(record)
class GzipReader(Reader):
    def __init__(self, path: str) -> None:
        with gzip.open(path + ".gz", "wb") as packed:
            packed.write(b"".join(b"%08d" % i * 512 for i in range(N)))
        self.file = gzip.open(path + ".gz", "rb")  # noqa: SIM115


@program(record)
class TarReader(Numbers):
    def __init__(self, folder: Path) -> None:
        with tarfile.open(folder / "all.tar", "w") as tar:
            for i in range(N):
                info = tarfile.TarInfo(f"{i}")
                info.size = 16
                tar.addfile(info, io.BytesIO(record(i)))
        self.tar = tarfile.open(folder / "all.tar")  # noqa: SIM115

    def __getitem__(self, i: int) -> Any:
        found = self.tar.extractfile(str(i))
        assert found is not None
        return found.read()


@program(record)  # it has a lock of its own
class ZipReader(Numbers):
    def __init__(self, folder: Path) -> None:
        with zipfile.ZipFile(folder / "all.zip", "w") as packed:
            for i in range(N):
                packed.writestr(f"{i}", record(i))
        self.zip = zipfile.ZipFile(folder / "all.zip")

    def __getitem__(self, i: int) -> Any:
        return self.zip.read(str(i))


@program(record)
class Database(Numbers):
    def __init__(self, folder: Path) -> None:
        self.connection = sqlite3.connect(folder / "data.db", check_same_thread=False)
        self.connection.execute("create table t (i integer, v blob)")
        self.connection.executemany(
            "insert into t values (?, ?)", [(i, record(i)) for i in range(N)]
        )
        self.connection.commit()
        self.cursor = self.connection.cursor()

    def __getitem__(self, i: int) -> Any:
        self.cursor.execute("select v from t where i = ?", (i,))
        return self.cursor.fetchone()[0]

    def __del__(self) -> None:
        self.connection.close()


@program(record)
class Lmdb(Numbers):
    def __init__(self, folder: Path) -> None:
        import lmdb

        self.env = lmdb.open(str(folder / "lmdb"), lock=False)
        with self.env.begin(write=True) as writing:
            for i in range(N):
                writing.put(b"%04d" % i, record(i))
        self.transaction = self.env.begin()
        self.cursor = self.transaction.cursor()

    def __getitem__(self, i: int) -> Any:
        self.cursor.set_key(b"%04d" % i)
        return bytes(self.cursor.value())


@program()
class Hdf(Numbers):
    def __init__(self, folder: Path) -> None:
        import h5py

        with h5py.File(folder / "data.h5", "w") as made:
            made["x"] = np.arange(N)[:, None] * 100 + np.arange(8)
        self.data = h5py.File(folder / "data.h5", "r")["x"]
        self.buf = np.zeros(8, np.int64)

    def __getitem__(self, i: int) -> Any:
        self.data.read_direct(self.buf, np.s_[i])
        return tuple(self.buf.tolist())


@program(lambda i: i % 16)
class Video(Numbers):
    def __init__(self, folder: Path) -> None:
        import av

        path = str(folder / "clip.mp4")
        with av.open(path, "w") as made:
            stream = made.add_stream("mpeg4", rate=16)
            stream.width = stream.height = 32
            stream.gop_size = 8
            for i in range(16):
                picture = np.full((32, 32, 3), i * 16, np.uint8)
                made.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
            made.mux(stream.encode())
        self.container = av.open(path)

    def __getitem__(self, i: int) -> Any:
        stream = self.container.streams.video[0]
        at = i % 16
        self.container.seek(int(at / 16 / float(stream.time_base or 1)), stream=stream)
        for frame in self.container.decode(stream):
            if round(frame.time * 16) >= at:
                return round(frame.to_ndarray(format="gray").mean() / 16)
        return -1

    def __del__(self) -> None:
        self.container.close()


@program(record)
class Mapped(Numbers):
    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __getitem__(self, i: int) -> Any:
        self.map.seek(i * 4096)
        return self.map.read(8) + self.map.read(8)


@program(record)
class BytesFile(Numbers):
    def __init__(self) -> None:
        self.file = io.BytesIO(b"".join(b"%08d" % i * 512 for i in range(N)))

    def __getitem__(self, i: int) -> Any:
        self.file.seek(i * 4096)
        return self.file.read(8) + self.file.read(8)


@program(lambda i: b"%08d" % i)
class Piped(Numbers):
    def __init__(self) -> None:
        self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __getitem__(self, i: int) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"%08d" % i)
        self.process.stdin.flush()
        return self.process.stdout.read(8)

    def __del__(self) -> None:
        self.process.communicate()


@program(lambda i: b"%08d" % i)
class Sockets(Numbers):
    def __init__(self) -> None:
        self.ends = socket.socketpair()

    def __getitem__(self, i: int) -> Any:
        self.ends[0].sendall(b"%08d" % i)
        return self.ends[1].recv(8)

    def __del__(self) -> None:
        for end in self.ends:
            end.close()


@program(lambda i: str(i % 8))
class Changing(Numbers):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for i in range(8):
            (folder / str(i)).mkdir()
            (folder / str(i) / "name").write_text(str(i))

    def __getitem__(self, i: int) -> Any:
        before = os.getcwd()
        os.chdir(self.folder / str(i % 8))
        text = Path("name").read_text()
        os.chdir(before)
        return text


# Scratch memory.


def summed(buf: Any, i: int) -> int:
    buf[:] = i
    half = len(buf) // 2
    return int(buf[0]) + int(buf[half]) + int(buf[-1])


def thrice(i: int) -> int:
    return 3 * i


class Buffered(Numbers):
    def __init__(self, buf: Any) -> None:
        self.buf = buf

    def __getitem__(self, i: int) -> Any:
        return summed(self.buf, i)


@program(thrice)
class WithView(Buffered):
    def __init__(self) -> None:
        super().__init__(np.zeros(5_000))
        self.view = self.buf[1_000:]

    def __getitem__(self, i: int) -> Any:
        self.view[:] = i
        return int(self.buf[1_000]) + int(self.buf[2_000]) + int(self.buf[-1])


class Tensors(Numbers):
    def __init__(self, size: int) -> None:
        import torch

        self.buf = torch.zeros(size)

    def __getitem__(self, i: int) -> Any:
        self.buf.fill_(i)
        return int(self.buf[0]) + int(self.buf[len(self.buf) // 2]) + int(self.buf[-1])


@program(thrice)
class TensorAndArray(Tensors):
    def __init__(self) -> None:
        super().__init__(5_000)
        self.array = self.buf.numpy()

    def __getitem__(self, i: int) -> Any:
        self.array[:] = i
        return int(self.buf[0]) + int(self.buf[2_000]) + int(self.buf[-1])


class Written(Numbers):
    """Something that a buffer is, or lies in, is filled by elements."""

    def __init__(self, buf: Any) -> None:
        self.buf = buf

    def __getitem__(self, i: int) -> Any:
        for k in range(8):
            self.buf[k] = i + k
        return tuple(self.buf[k] for k in range(8))


def short(i: int) -> tuple[int, ...]:
    return tuple(i + k for k in range(8))


# State in all the places that Python has.


@program()
class Scratch(Numbers):
    def __init__(self, scratch: Any = None) -> None:
        self.scratch = [] if scratch is None else scratch

    def __getitem__(self, i: int) -> Any:
        return fill(self.scratch, i)


class Listed(list[int]):
    pass


@program()
def closure_list(folder: Path) -> Any:
    scratch: list[int] = []
    return Numbers(), lambda i: fill(scratch, i)


@program()
def closure_nonlocal(folder: Path) -> Any:
    last = 0

    def keep(i: int) -> None:
        nonlocal last
        last = i

    def kept(i: int) -> Any:
        keep(i)
        return tuple(last * 100 + k for k in range(8))

    return Numbers(), kept


@program()
def closure_between_functions(folder: Path) -> Any:
    last: Any = None

    def first(i: int) -> Any:
        nonlocal last
        last = i
        return i

    def second(i: int) -> Any:
        first(i)
        return tuple(last * 100 + k for k in range(8))

    return Numbers(), second


SCRATCH: list[int] = []
LAST: Any = None


def by_global(i: int) -> Any:
    return fill(SCRATCH, i)


@program()
class ByGlobal(Numbers):
    def __getitem__(self, i: int) -> Any:
        return fill(SCRATCH, i)


@program()
def global_list_in_method_and_function(folder: Path) -> Any:
    class Both(Numbers):
        def __getitem__(self, i: int) -> Any:
            return i if fill(SCRATCH, i) == numbers(i) else -1

    return Both(), by_global


def sets_global(i: int) -> Any:
    global LAST
    LAST = i
    return tuple(LAST * 100 + k for k in range(8))


@program()
class SetsGlobal(Numbers):
    def __getitem__(self, i: int) -> Any:
        global LAST
        LAST = i
        return tuple(LAST * 100 + k for k in range(8))


def inner_step(i: int) -> Any:
    return fill(SCRATCH, i)


def outer_step(i: int) -> Any:
    return inner_step(i)


@program()
class Indirect(Numbers):
    def __getitem__(self, i: int) -> Any:
        return outer_step(i)


STEPS = {"one": lambda i: fill(SCRATCH, i)}


@program()
class Dispatching(Numbers):
    def __getitem__(self, i: int) -> Any:
        return STEPS["one"](i)


@program()
class ByModule(Numbers):
    def __getitem__(self, i: int) -> Any:
        return fill(OWN.SCRATCH, i)


@program()
class ClassCache(Numbers):
    cache: list[int] = []  # noqa: RUF012

    def __getitem__(self, i: int) -> Any:
        return fill(self.cache, i)


@program()
class ClassSet(Numbers):
    last = 0

    def __getitem__(self, i: int) -> Any:
        type(self).last = i
        return tuple(type(self).last * 100 + k for k in range(8))


@program()
class ClassMethod(Numbers):
    last = 0

    @classmethod
    def keep(cls, i: int) -> None:
        cls.last = i

    def __getitem__(self, i: int) -> Any:
        self.keep(i)
        return tuple(self.last * 100 + k for k in range(8))


@functools.lru_cache
def singleton() -> list[int]:
    return []


@program()
class Cached(Numbers):
    def __getitem__(self, i: int) -> Any:
        return fill(singleton(), i)


class Single:
    one: Any = None

    def __new__(cls) -> Any:
        if cls.one is None:
            cls.one = super().__new__(cls)
            cls.one.scratch = []
        return cls.one


@program()
class UsesSingle(Numbers):
    def __getitem__(self, i: int) -> Any:
        return fill(Single().scratch, i)


class OneOfEach(type):
    known: dict[Any, Any] = {}  # noqa: RUF012

    def __call__(cls, *args: Any) -> Any:
        if cls not in cls.known:
            cls.known[cls] = super().__call__(*args)
        return cls.known[cls]


class Solo(metaclass=OneOfEach):
    def __init__(self) -> None:
        self.scratch: list[int] = []


class Keeping:
    """A descriptor that keeps what is set in itself."""

    def __init__(self) -> None:
        self.value = 0

    def __get__(self, owner: Any, cls: Any = None) -> Any:
        return self.value

    def __set__(self, owner: Any, value: Any) -> None:
        self.value = value


@program()
class Described(Numbers):
    last = Keeping()

    def __getitem__(self, i: int) -> Any:
        self.last = i
        return tuple(self.last * 100 + k for k in range(8))


@program()
class Properties(Numbers):
    def __init__(self) -> None:
        self._last = 0

    @property
    def last(self) -> int:
        return self._last

    @last.setter
    def last(self, value: int) -> None:
        self._last = value

    def __getitem__(self, i: int) -> Any:
        self.last = i
        return tuple(self.last * 100 + k for k in range(8))


class CachedProperty(Numbers):
    @functools.cached_property
    def scratch(self) -> list[int]:
        return []

    def __getitem__(self, i: int) -> Any:
        return fill(self.scratch, i)


@program()
def cached_property(folder: Path) -> Any:
    dataset = CachedProperty()
    assert dataset[1] == numbers(1)
    return dataset


class Adder:
    def __init__(self) -> None:
        self.scratch: list[int] = []

    def __call__(self, i: int) -> Any:
        return fill(self.scratch, i)

    def add(self, i: int) -> Any:
        return fill(self.scratch, i)


@program(number)
def two_methods_of_one(folder: Path) -> Any:
    adder = Adder()

    def check(values: Any) -> Any:
        return values[0] // 100 if adder.add(values[0] // 100) == values else -1

    return Numbers(), adder.add, check


@program()
def builtin_method(folder: Path) -> Any:
    scratch: list[int] = []
    clear, append = scratch.clear, scratch.append

    def by_methods(i: int) -> Any:
        clear()
        for k in range(8):
            append(i * 100 + k)
        return tuple(scratch)

    return Numbers(), by_methods


def remembering(fn: Callable[..., Any]) -> Callable[..., Any]:
    last: list[Any] = []

    @functools.wraps(fn)
    def wrapped(*args: Any) -> Any:
        last.clear()
        last.append(args)
        return fn(*last[0])

    return wrapped


@remembering
def decorated(i: int) -> Any:
    return numbers(i)


@program()
class Decorated(Numbers):
    @remembering
    def __getitem__(self, i: int) -> Any:
        return numbers(i)


def by_attribute(i: int) -> Any:
    by_attribute.last = i  # type: ignore[attr-defined]
    return tuple(by_attribute.last * 100 + k for k in range(8))  # type: ignore[attr-defined]


@program()
def function_attribute(folder: Path) -> Any:
    by_attribute.last = 0  # type: ignore[attr-defined]
    return Numbers(), by_attribute


def by_default(i: int, scratch: list[int] = []) -> Any:  # noqa: B006
    return fill(scratch, i)


@program()
class ByDefault(Numbers):
    def __getitem__(self, i: int, scratch: list[int] = []) -> Any:  # noqa: B006
        return fill(scratch, i)


@program()
def class_within_function(folder: Path) -> Any:
    scratch: list[int] = []

    class Within(Numbers):
        def __getitem__(self, i: int) -> Any:
            return fill(scratch, i)

    return Within()


class Node:
    def __init__(self) -> None:
        self.scratch: list[int] = []
        self.parent: Any = None
        self.children: list[Node] = []


@program()
class Cyclic(Numbers):
    def __init__(self) -> None:
        self.root, child = Node(), Node()
        self.root.children.append(child)
        child.parent = self.root

    def __getitem__(self, i: int) -> Any:
        return fill(self.root.children[0].parent.scratch, i)


@program()
class Weak(Numbers):
    def __init__(self) -> None:
        self.node = Node()
        self.weak = weakref.ref(self.node)
        self.table = weakref.WeakValueDictionary({"one": self.node})

    def __getitem__(self, i: int) -> Any:
        node = self.weak()
        assert node is not None
        assert node is self.table["one"]
        return fill(node.scratch, i)


VARIABLE: contextvars.ContextVar[list[int]] = contextvars.ContextVar("VARIABLE", default=[])  # noqa: B039


@program()
class Contextual(Numbers):
    def __getitem__(self, i: int) -> Any:
        return fill(VARIABLE.get(), i)


PLACE: contextvars.ContextVar[int] = contextvars.ContextVar("PLACE", default=0)


@program()
class OwnContext(Numbers):
    def __getitem__(self, i: int) -> Any:
        PLACE.set(i)
        return tuple(PLACE.get() * 100 + k for k in range(8))


@program()
class Generating(Numbers):
    def __init__(self) -> None:
        self.generator = self.numbers()
        next(self.generator)

    def numbers(self) -> Any:
        i = 0
        while True:
            i = yield tuple(i * 100 + k for k in range(8))

    def __getitem__(self, i: int) -> Any:
        return self.generator.send(i)


@program(lambda i: list(numbers(i)))
class Cycling(Numbers):
    def __init__(self) -> None:
        self.cycle: Iterator[int] = itertools.cycle(range(8))

    def __getitem__(self, i: int) -> Any:
        return sorted(i * 100 + next(self.cycle) for _ in range(8))


@program()
class Defaulting(Numbers):
    def __init__(self) -> None:
        self.table: Any = collections.defaultdict(lambda: [0])

    def __getitem__(self, i: int) -> Any:
        self.table.clear()
        for k in range(8):
            self.table[k][0] = i * 100 + k
        return tuple(self.table[k][0] for k in range(8))


class Mode(enum.Enum):
    FAST = list[int]()  # noqa: RUF012


@program()
class ByMode(Numbers):
    def __init__(self) -> None:
        self.mode = Mode.FAST

    def __getitem__(self, i: int) -> Any:
        return fill(self.mode.value, i)


Pair = collections.namedtuple("Pair", ["name", "scratch"])


@program()
class Named(Numbers):
    def __init__(self) -> None:
        self.pair = Pair("a", [])

    def __getitem__(self, i: int) -> Any:
        return fill(self.pair.scratch, i)


@program()
class CopiesItself(Scratch):
    def __deepcopy__(self, memo: Any) -> Any:
        return self


@program()
class CopiesShallowly(Scratch):
    def __deepcopy__(self, memo: Any) -> Any:
        return CopiesShallowly(self.scratch)


@program()
class CopiesDeeply(Scratch):
    def __init__(self) -> None:
        super().__init__()
        self.connection = sqlite3.connect(":memory:", check_same_thread=False)

    def __deepcopy__(self, memo: Any) -> Any:
        return CopiesDeeply()

    def __del__(self) -> None:
        self.connection.close()


@program(record)
class Reopening(Reader):
    def __getstate__(self) -> Any:
        return {"path": self.path}

    def __setstate__(self, state: Any) -> None:
        self.path = state["path"]
        self.file = open(self.path, "rb")  # noqa: SIM115

    def __del__(self) -> None:
        self.file.close()


class Reduced(Scratch):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def __reduce__(self) -> Any:
        return Reduced, (self.size,)


class Table(dict[str, Any]):
    """A dict that is a dataset, too."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: Any) -> Any:
        return fill(self.setdefault("scratch", []), i) if isinstance(i, int) else super().get(i)


@program()
def dictionary_subclass(folder: Path) -> Any:
    table = Table()
    table.setdefault("scratch", [])
    return table


@dataclass
class Data:
    scratch: list[int] = field(default_factory=list)
    rate: float = math.nan

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return fill(self.scratch, i)


@dataclass(frozen=True, slots=True)
class Frozen:
    scratch: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return fill(self.scratch, i)


class LastRecord(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.args


@program(lambda i: (i,))
class Logging(Numbers):
    def __init__(self) -> None:
        self.logger = logging.Logger("thread_programs", logging.INFO)
        self.handler = LastRecord()
        self.logger.addHandler(self.handler)

    def __getitem__(self, i: int) -> Any:
        self.logger.info("%d", i)
        return self.handler.last


@program(lambda i: np.random.RandomState(i).randint(1_000, size=4).tolist())
class Seeding(Numbers):
    def __getitem__(self, i: int) -> Any:
        np.random.seed(i)
        return [int(np.random.randint(1_000)) for _ in range(4)]


def draws(i: int) -> Any:
    random.seed(i)
    return [random.randrange(1_000) for _ in range(4)]


def drawn(i: int) -> Any:
    own = random.Random(i)
    return [own.randrange(1_000) for _ in range(4)]


@program(drawn)
class OwnRandom(Numbers):
    def __init__(self) -> None:
        self.random = random.Random()

    def __getitem__(self, i: int) -> Any:
        self.random.seed(i)
        return [self.random.randrange(1_000) for _ in range(4)]


@program(lambda i: [int(each) + i for each in np.random.default_rng(0).integers(1_000, size=4)])
class OwnGenerator(Numbers):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)
        self.state = self.generator.bit_generator.state

    def __getitem__(self, i: int) -> Any:
        self.generator.bit_generator.state = self.state
        return [int(self.generator.integers(1_000)) + i for _ in range(4)]


@program(number)
class LastShard(Numbers):
    def __init__(self, folder: Path) -> None:
        for shard in range(8):
            (np.arange(8) + shard * 8).tofile(folder / f"{shard}")
        self.folder = folder
        self.number, self.shard = -1, np.zeros(0)

    def __getitem__(self, i: int) -> Any:
        if self.number != i // 8:
            self.number = i // 8
            # Not np.load: its header is parsed by ast, and Python 3.11 counts the depth of that for
            # all threads at once ("AST constructor recursion depth mismatch").
            self.shard = np.fromfile(self.folder / f"{i // 8}", np.int64)
        return int(self.shard[i % 8])


# Code of packages around the user's.


@functools.singledispatch
def dispatched(i: Any) -> Any:
    return fill(SCRATCH, i)


@program()
def single_dispatch_in_method(folder: Path) -> Any:
    class Dispatched(Numbers):
        def __getitem__(self, i: int) -> Any:
            return dispatched(i)

    return Dispatched()


@contextlib.contextmanager
def borrowed() -> Iterator[list[int]]:
    yield SCRATCH


def by_context(i: int) -> Any:
    with borrowed() as scratch:
        return fill(scratch, i)


@program()
class ByContext(Numbers):
    def __getitem__(self, i: int) -> Any:
        return by_context(i)


def without_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    decorated: Callable[..., Any] = torch.no_grad()(torch.no_grad()(fn))
    return decorated


@program()
def decorators_of_a_package_on_a_method(folder: Path) -> Any:
    class Without(Numbers):
        def get(self, i: int) -> Any:
            return fill(SCRATCH, i)

        __getitem__ = without_gradients(get)

    return Without()


@program(lambda i: numbers(i % (N // 2)))
def subset_of_torch(folder: Path) -> Any:
    from torch.utils.data import ConcatDataset, Subset

    scratch: Any = Scratch()
    both: Any = ConcatDataset([Subset(scratch, range(N // 2)), scratch])
    return both, lambda values: numbers(values[0] // 100)


@program()
def huggingface_transform(folder: Path) -> Any:
    import datasets

    scratch: list[int] = []
    dataset = datasets.Dataset.from_dict({"a": list(range(N))})
    dataset.set_transform(lambda rows: {"a": [fill(scratch, i) for i in rows["a"]]})
    return dataset, operator.itemgetter("a")


@program()
class ByLambda(Numbers):
    def __init__(self) -> None:
        self.scratch: list[int] = []
        self.steps = [lambda i: fill(self.scratch, i), self.check]

    def check(self, values: Any) -> Any:
        return values if tuple(self.scratch) == values else -1

    def __getitem__(self, i: int) -> Any:
        for step in self.steps:
            i = step(i)
        return i


@program()
class CachedMethod(Numbers):
    @functools.lru_cache  # noqa: B019
    def scratch(self) -> list[int]:
        return []

    def __getitem__(self, i: int) -> Any:
        return fill(self.scratch(), i)


@program()
class CachedStatic(Numbers):
    @staticmethod
    @functools.lru_cache
    def scratch() -> list[int]:
        return []

    def __getitem__(self, i: int) -> Any:
        return fill(self.scratch(), i)


TRANSFORMS = [Adder()]


@program()
class Transforming(Numbers):
    def __getitem__(self, i: int) -> Any:
        (made,) = [transform(i) for transform in TRANSFORMS]
        return made


BUFFER = np.zeros(8, np.int64)


@program()
class IntoGlobal(Numbers):
    def __getitem__(self, i: int) -> Any:
        np.copyto(BUFFER, np.arange(8) + i * 100)
        return tuple(int(each) for each in BUFFER)


class Delegating:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, i: int) -> Any:
        return self._inner[i]


class Worker:
    scratch: list[int] = []  # noqa: RUF012

    def work(self, i: int) -> Any:
        return fill(self.scratch, i)


@program()
class Hiring(Numbers):
    def __getitem__(self, i: int) -> Any:
        return Worker().work(i)


# State of the whole process, or of a module.


@program(lambda i: np.array2string(np.array([1 / 3]), precision=i % 4))
class PrintOptions(Numbers):
    def __getitem__(self, i: int) -> Any:
        np.set_printoptions(precision=i % 4)
        return str(np.array([1 / 3]))


@program(lambda i: "[0.33]")
def print_options_of_the_script(folder: Path) -> Any:
    np.set_printoptions(precision=2)
    return Numbers(), lambda i: str(np.array([1 / 3]))


@program(lambda i: "raised" if i % 2 else "inf")
class FloatErrors(Numbers):
    def __getitem__(self, i: int) -> Any:
        with np.errstate(divide="raise" if i % 2 else "ignore"):
            try:
                return str(float((np.ones(1) / np.zeros(1))[0]))
            except FloatingPointError:
                return "raised"


@program(lambda i: "raised" if i % 2 else "inf")
class FloatErrorsSet(Numbers):
    def __getitem__(self, i: int) -> Any:
        before = np.seterr(divide="raise" if i % 2 else "ignore")
        try:
            return str(float((np.ones(1) / np.zeros(1))[0]))
        except FloatingPointError:
            return "raised"
        finally:
            np.seterr(**before)


@program(number)
class Pyplot(Numbers):
    def __getitem__(self, i: int) -> Any:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        plt.figure(figsize=(0.16, 0.16))
        plt.gcf().set_facecolor(str(i / 255))
        plt.gcf().canvas.draw()
        picture = np.asarray(plt.gcf().canvas.buffer_rgba())  # type: ignore[attr-defined]
        plt.close()
        return int(picture[8, 8, 0])


@program(str)
class Environment(Numbers):
    def __getitem__(self, i: int) -> Any:
        os.environ["EXAMPLE_IN_HAND"] = str(i)
        return os.environ.pop("EXAMPLE_IN_HAND")


@program(lambda i: i % 12)
class TimeZone(Numbers):
    def __getitem__(self, i: int) -> Any:
        with unittest.mock.patch.dict(os.environ, TZ=f"ABC-{i % 12}"):
            time.tzset()
            hour = time.localtime(0).tm_hour
        time.tzset()
        return hour


@program(number)
class FileMask(Numbers):
    def __getitem__(self, i: int) -> Any:
        before = os.umask(i)
        return os.umask(before)


@program(number)
class RecursionLimit(Numbers):
    def __getitem__(self, i: int) -> Any:
        before = sys.getrecursionlimit()
        sys.setrecursionlimit(before + i + 1)
        found = sys.getrecursionlimit() - before - 1
        sys.setrecursionlimit(before)
        return found


@program(lambda i: [str(k) for k in numbers(i)])
class WarningsCaught(Numbers):
    def __getitem__(self, i: int) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for k in numbers(i):
                warnings.warn(str(k), stacklevel=1)
        return [str(each.message) for each in caught]


@program(str)
class WarningsRaised(Numbers):
    def __getitem__(self, i: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                warnings.warn(str(i), stacklevel=1)
            except UserWarning as error:
                return str(error)


@program(lambda i: f"0.{'3' * (i % 4 + 1)}")
class PandasOption(Numbers):
    def __getitem__(self, i: int) -> Any:
        import pandas  # type: ignore[import-untyped]

        with pandas.option_context("display.precision", i % 4 + 1):
            return pandas.Series([1 / 3]).to_string(index=False)


@program(lambda i: f"0.{'3' * (i % 5 + 1)}")
class DecimalPrecision(Numbers):
    def __getitem__(self, i: int) -> Any:
        with decimal.localcontext() as context:
            context.prec = i % 5 + 1
            return str(decimal.Decimal(1) / decimal.Decimal(3))


@program(lambda i: f"0.{'3' * (i % 5 + 1)}")
class DecimalContextSet(Numbers):
    def __getitem__(self, i: int) -> Any:
        decimal.setcontext(decimal.Context(prec=i % 5 + 1))
        return str(decimal.Decimal(1) / decimal.Decimal(3))


@program(lambda i: (f"{i * 12_345:,}", f"{i / 7:08.3f}"))
class Formatting(Numbers):
    def __getitem__(self, i: int) -> Any:
        return format(i * 12_345, ","), f"{i / 7:08.3f}"


@program(lambda i: f"{numbers(i)}\n")
class StandardOutput(Numbers):
    def __getitem__(self, i: int) -> Any:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            print(numbers(i))
        return out.getvalue()


@program(lambda i: f"{numbers(i)}\n")
class StandardOutputSet(Numbers):
    def __getitem__(self, i: int) -> Any:
        before, sys.stdout = sys.stdout, io.StringIO()
        print(numbers(i))
        out, sys.stdout = sys.stdout, before
        return out.getvalue()


@program(lambda i: str(i % 8))
class WithinDirectory(Numbers):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for i in range(8):
            (folder / str(i)).mkdir()
            (folder / str(i) / "name").write_text(str(i))

    def __getitem__(self, i: int) -> Any:
        with contextlib.chdir(self.folder / str(i % 8)):
            return Path("name").read_text()


@program(number)
class CommandLine(Numbers):
    def __init__(self) -> None:
        self.parser = argparse.ArgumentParser()
        self.parser.add_argument("--at", type=int)

    def __getitem__(self, i: int) -> Any:
        before, sys.argv = sys.argv, ["program", "--at", str(i)]
        try:
            return self.parser.parse_args().at
        finally:
            sys.argv = before


@program()
class ModuleScratchByName(Numbers):
    def __getitem__(self, i: int) -> Any:
        return fill(getattr(sys.modules[__name__], "SCR" + "ATCH"), i)


@program()
class ImportsInside(Numbers):
    def __getitem__(self, i: int) -> Any:
        from thread_programs import SCRATCH as scratch

        return fill(scratch, i)


@program()
class ImportsByName(Numbers):
    def __getitem__(self, i: int) -> Any:
        return fill(importlib.import_module(__name__).SCRATCH, i)


@program()
class GlobalsWritten(Numbers):
    def __getitem__(self, i: int) -> Any:
        globals()["LAST"] = i
        return tuple(globals()["LAST"] * 100 + k for k in range(8))


@program(number)
class Patched(Numbers):
    def __getitem__(self, i: int) -> Any:
        with unittest.mock.patch.object(OWN, "number", return_value=i):
            return number(-1)


NAMESPACE: dict[str, Any] = {}


@program()
class Executed(Numbers):
    def __getitem__(self, i: int) -> Any:
        exec(f"last = {i}", NAMESPACE)
        return eval("tuple(last * 100 + k for k in range(8))", NAMESPACE)


@program()
class FrameInspected(Numbers):
    def __getitem__(self, i: int) -> Any:
        frame = inspect.currentframe()
        assert frame is not None
        return fill(frame.f_globals["SCRATCH"], i)


SETTINGS = configparser.ConfigParser()


@program(number)
class ConfigWritten(Numbers):
    def __getitem__(self, i: int) -> Any:
        SETTINGS.read_dict({"example": {"at": str(i)}})
        return SETTINGS.getint("example", "at")


# Frozen objects, classes and functions that keep something.


@dataclass(frozen=True)
class Recipe(Numbers):
    name: str = "plain"

    def __getitem__(self, i: int) -> Any:
        return fill(SCRATCH, i)


@dataclass(frozen=True)
class Remembering(Numbers):
    last: int = -1

    def __getitem__(self, i: int) -> Any:
        object.__setattr__(self, "last", i)
        return tuple(self.last * 100 + k for k in range(8))


class Step(enum.Enum):
    FILL = "fill"

    def __call__(self, i: int) -> Any:
        return fill(SCRATCH, i)

    def keep(self, i: int) -> Any:
        self.last = i
        return tuple(self.last * 100 + k for k in range(8))


@program()
class ClassAlias(Numbers):
    last = 0

    def __getitem__(self, i: int) -> Any:
        cls = type(self)
        cls.last = i
        return tuple(cls.last * 100 + k for k in range(8))


@program()
class ClassSetattr(Numbers):
    last = 0

    def __getitem__(self, i: int) -> Any:
        setattr(type(self), "last", i)  # noqa: B010
        return tuple(self.last * 100 + k for k in range(8))


class Recording(type):
    last = 0

    def keep(cls, i: int) -> int:
        cls.last = i
        return cls.last


class Recorded(metaclass=Recording):
    pass


@program()
def metaclass_that_keeps(folder: Path) -> Any:
    def kept(i: int) -> Any:
        Recorded.keep(i)
        return tuple(Recorded.last * 100 + k for k in range(8))

    return Numbers(), kept


@program()
class CachedMethodOfFew(Numbers):
    @functools.lru_cache(maxsize=4)  # noqa: B019
    def scratch(self, name: int) -> list[int]:
        return []

    def __getitem__(self, i: int) -> Any:
        return fill(self.scratch(i % 8), i)


@functools.singledispatch
def shown(value: Any) -> Any:
    return value


@program()
class DispatchRegistered(Numbers):
    def __getitem__(self, i: int) -> Any:
        shown.register(int, lambda _: numbers(i))
        return shown(-1)


@program()
class PicklesItself(Scratch):
    def __getitem__(self, i: int) -> Any:
        fill(self.scratch, i)
        twin = pickle.loads(pickle.dumps(self))
        return tuple(twin.scratch)


@program()
class CopiesItselfInTheCall(Scratch):
    def __getitem__(self, i: int) -> Any:
        fill(self.scratch, i)
        return tuple(copy.deepcopy(self).scratch)


@program()
class WeakCallback(Numbers):
    def __init__(self) -> None:
        self.gone: list[int] = []

    def __getitem__(self, i: int) -> Any:
        node = Node()
        weakref.finalize(node, fill, self.gone, i)
        del node
        return tuple(self.gone)


@program()
class StateMachine(Numbers):
    def __init__(self) -> None:
        self.state, self.at = "idle", 0

    def move(self, before: str, after: str) -> None:
        assert self.state == before
        self.state = after

    def take(self, left: int) -> tuple[int, ...]:
        self.move("busy", "taking")
        value = self.at * 100 + 8 - left
        self.move("taking", "busy")
        return (value, *self.take(left - 1)) if left > 1 else (value,)

    def __getitem__(self, i: int) -> Any:
        self.move("idle", "busy")
        self.at = i
        try:
            return self.take(8)
        finally:
            self.move("busy", "idle")


@program()
class IteratorAsBuffer(Numbers):
    def __init__(self) -> None:
        self.rows: Iterator[int] = iter(())

    def __getitem__(self, i: int) -> Any:
        self.rows = (i * 100 + k for k in range(8))
        return tuple(next(self.rows) for _ in range(8))


@program()
class QueueKept(Numbers):
    def __init__(self) -> None:
        self.queue: queue.Queue[int] = queue.Queue()

    def __getitem__(self, i: int) -> Any:
        for k in numbers(i):
            self.queue.put(k)
        return tuple(self.queue.get() for _ in range(8))


@program()
class HeapKept(Numbers):
    def __init__(self) -> None:
        self.heap: list[int] = []

    def __getitem__(self, i: int) -> Any:
        for k in reversed(numbers(i)):
            heapq.heappush(self.heap, k)
        return tuple(heapq.heappop(self.heap) for _ in range(8))


@program()
class RecentlyUsed(Numbers):
    def __init__(self) -> None:
        self.recent: collections.OrderedDict[int, Any] = collections.OrderedDict()

    def __getitem__(self, i: int) -> Any:
        if i not in self.recent:
            self.recent[i] = numbers(i)
        self.recent.move_to_end(i)
        if len(self.recent) > 4:
            self.recent.popitem(last=False)
        return self.recent[i]


@program(lambda i: f"{i}\n")
class LogStream(Numbers):
    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.logger = logging.Logger("thread_programs.stream", logging.INFO)
        self.logger.addHandler(logging.StreamHandler(self.stream))

    def __getitem__(self, i: int) -> Any:
        self.stream.seek(0)
        self.stream.truncate()
        self.logger.info("%d", i)
        return self.stream.getvalue()


@program(lambda i: [str(k) for k in numbers(i)])
class LogBuffered(Numbers):
    def __init__(self) -> None:
        self.handler = logging.handlers.BufferingHandler(100)
        self.logger = logging.Logger("thread_programs.buffered", logging.INFO)
        self.logger.addHandler(self.handler)

    def __getitem__(self, i: int) -> Any:
        for k in numbers(i):
            self.logger.info(str(k))
        said = [each.getMessage() for each in self.handler.buffer]
        self.handler.flush()
        return said


# Raw memory.


@program(lambda i: b"%08d" % i)
class CtypesBuffer(Numbers):
    def __init__(self) -> None:
        self.buf = ctypes.create_string_buffer(9)

    def __getitem__(self, i: int) -> Any:
        ctypes.memmove(self.buf, b"%08d" % i, 8)
        return self.buf.value


@program()
class StructPacked(Numbers):
    def __init__(self) -> None:
        self.buf = bytearray(64)

    def __getitem__(self, i: int) -> Any:
        for k, value in enumerate(numbers(i)):
            struct.pack_into("q", self.buf, 8 * k, value)
        return struct.unpack_from("8q", self.buf)


@program(short)
class ScratchMapped(Numbers):
    def __init__(self, folder: Path) -> None:
        np.zeros(8, np.int64).tofile(folder / "scratch")
        self.buf = np.memmap(folder / "scratch", np.int64, mode="c")

    def __getitem__(self, i: int) -> Any:
        for k in range(8):
            self.buf[k] = i + k
        return tuple(self.buf.tolist())


@program(number)
class Drawing(Numbers):
    def __init__(self) -> None:
        from PIL import Image, ImageDraw

        self.image = Image.new("L", (8, 8))
        self.draw = ImageDraw.Draw(self.image)

    def __getitem__(self, i: int) -> Any:
        self.draw.rectangle((0, 0, 7, 7), fill=i)
        return self.image.getpixel((3, 3))


@program(lambda i: (i, i + 1))
class FrameWritten(Numbers):
    def __init__(self) -> None:
        import pandas

        self.frame = pandas.DataFrame({"a": [0], "b": [0]})

    def __getitem__(self, i: int) -> Any:
        self.frame.loc[0, "a"] = i
        self.frame["b"] = self.frame["a"] + 1
        return int(self.frame["a"][0]), int(self.frame["b"][0])


# Draws that are seeded in the call.


@program(drawn)
class RandomSeeded(Numbers):
    def __getitem__(self, i: int) -> Any:
        return draws(i)


def torch_drawn(i: int) -> Any:
    import torch

    return torch.randint(1_000, (4,), generator=torch.Generator().manual_seed(i)).tolist()


@program(torch_drawn)
class TorchSeeded(Numbers):
    def __getitem__(self, i: int) -> Any:
        import torch

        torch.default_generator.manual_seed(i)
        return torch.randint(1_000, (4,)).tolist()


@program(torch_drawn)
class TorchForked(Numbers):
    def __getitem__(self, i: int) -> Any:
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(i)
            return torch.randint(1_000, (4,)).tolist()


# Layers.


class Layered(Numbers):
    def __init__(self) -> None:
        import torch

        self.layer = torch.nn.Linear(1, 1)

    def output(self) -> float:
        import torch

        with torch.no_grad():
            return float(self.layer(torch.ones(1)))


@program(lambda i: i + 1.0)
class LayerWritten(Layered):
    def __getitem__(self, i: int) -> Any:
        import torch

        with torch.no_grad():
            self.layer.weight.fill_(i)
            self.layer.bias.fill_(1.0)
        return self.output()


@program(lambda i: i + 1.0)
class LayerLoaded(Layered):
    def __getitem__(self, i: int) -> Any:
        import torch

        weights = {"weight": torch.tensor([[float(i)]]), "bias": torch.ones(1)}
        self.layer.load_state_dict(weights)
        return self.output()


@program(lambda i: [[float(i)]])
class LayerHooked(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.layer.register_forward_pre_hook(self.keep)

    def keep(self, layer: Any, inputs: Any) -> None:
        self.seen = inputs

    def __getitem__(self, i: int) -> Any:
        import torch

        self.layer(torch.tensor([float(i)]))
        return [each.tolist() for each in self.seen]


@program(lambda i: "torch.float64" if i % 2 else "torch.float32")
class FloatDefault(Numbers):
    def __getitem__(self, i: int) -> Any:
        import torch

        torch.set_default_dtype(torch.float64 if i % 2 else torch.float32)
        try:
            return str(torch.tensor(1.5).dtype)
        finally:
            torch.set_default_dtype(torch.float32)


# Threads and loops of the program's own.


@program()
class ThreadPool(Numbers):
    def __init__(self) -> None:
        self.pool = concurrent.futures.ThreadPoolExecutor(2)

    def __getitem__(self, i: int) -> Any:
        return tuple(self.pool.map(lambda k: i * 100 + k, range(8)))


@program()
class TimeLimit(Numbers):
    def __getitem__(self, i: int) -> Any:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(numbers, i).result(timeout=60)


@program()
class ThreadStarted(Scratch):
    def __getitem__(self, i: int) -> Any:
        thread = threading.Thread(target=fill, args=(self.scratch, i))
        thread.start()
        thread.join()
        return tuple(self.scratch)


@program()
class Asynchronous(Numbers):
    def __init__(self) -> None:
        self.parts: list[int] = []

    async def part(self, k: int) -> None:
        await asyncio.sleep(0)
        self.parts.append(k)

    async def all_parts(self, i: int) -> Any:
        self.parts.clear()
        await asyncio.gather(*(self.part(k) for k in numbers(i)))
        return tuple(sorted(self.parts))

    def __getitem__(self, i: int) -> Any:
        return asyncio.run(self.all_parts(i))


@program()
class OwnLoop(Asynchronous):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()

    def __getitem__(self, i: int) -> Any:
        return self.loop.run_until_complete(self.all_parts(i))

    def __del__(self) -> None:
        self.loop.close()


# Files, opened early or in the first call.


@program(record)
class DatabaseOpenedLazily(Numbers):
    def __init__(self, folder: Path) -> None:
        self.path = folder / "data.db"
        with contextlib.closing(sqlite3.connect(self.path)) as made:
            made.execute("create table t (i integer, v blob)")
            made.executemany("insert into t values (?, ?)", [(i, record(i)) for i in range(N)])
            made.commit()
        self.connection: Any = None

    def __getitem__(self, i: int) -> Any:
        if self.connection is None:
            self.connection = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)
        return self.connection.execute("select v from t where i = ?", (i,)).fetchone()[0]

    def __del__(self) -> None:
        if self.connection is not None:
            self.connection.close()


@program(record)
class LmdbOpenedLazily(Numbers):
    def __init__(self, folder: Path) -> None:
        import lmdb

        self.path = str(folder / "lmdb")
        with lmdb.open(self.path) as made, made.begin(write=True) as writing:
            for i in range(N):
                writing.put(b"%04d" % i, record(i))
        self.env: Any = None

    def __getitem__(self, i: int) -> Any:
        import lmdb

        if self.env is None:
            self.env = lmdb.open(self.path, readonly=True, lock=False)
        with self.env.begin() as reading:
            return reading.get(b"%04d" % i)


@program()
class HdfOpenedLazily(Numbers):
    def __init__(self, folder: Path) -> None:
        import h5py

        self.path = folder / "data.h5"
        with h5py.File(self.path, "w") as made:
            made["x"] = np.arange(N)[:, None] * 100 + np.arange(8)
        self.file: Any = None

    def __getitem__(self, i: int) -> Any:
        import h5py

        if self.file is None:
            self.file = h5py.File(self.path, "r")
        return tuple(self.file["x"][i].tolist())


@program(record)
class ZipMemberOpened(Numbers):
    def __init__(self, folder: Path) -> None:
        with zipfile.ZipFile(folder / "all.zip", "w", zipfile.ZIP_DEFLATED) as packed:
            for i in range(N):
                packed.writestr(f"{i}", record(i))
        self.zip = zipfile.ZipFile(folder / "all.zip")

    def __getitem__(self, i: int) -> Any:
        with self.zip.open(f"{i}") as member:
            return member.read(8) + member.read(8)


@program(lambda i: i % 8)
class PicturesOpenedEarly(Numbers):
    def __init__(self, folder: Path) -> None:
        from PIL import Image

        self.images = []
        for i in range(8):
            Image.new("L", (8, 8), i).save(folder / f"{i}.png")
            self.images.append(Image.open(folder / f"{i}.png"))

    def __getitem__(self, i: int) -> Any:
        return self.images[i % 8].getpixel((3, 3))


@program(lambda i: [i * 100 + k for k in range(4)])
class Sound(Numbers):
    def __init__(self, folder: Path) -> None:
        import soundfile

        samples = (np.arange(N)[:, None] * 100 + np.arange(4)).astype(np.int16).ravel()
        soundfile.write(folder / "clip.wav", samples, 8_000, "PCM_16")
        self.clip = soundfile.SoundFile(folder / "clip.wav")

    def __getitem__(self, i: int) -> Any:
        self.clip.seek(i * 4)
        return self.clip.read(4, dtype="int16").tolist()


@program()
class ZarrGroup(Numbers):
    def __init__(self, folder: Path) -> None:
        import zarr

        values: Any = np.arange(N)[:, None] * 100 + np.arange(8)
        zarr.save_array(folder / "x.zarr", values)
        self.x = zarr.open_array(folder / "x.zarr", mode="r")

    def __getitem__(self, i: int) -> Any:
        return tuple(np.asarray(self.x[i]).tolist())


@program(number)
class ArrowFile(Numbers):
    def __init__(self, folder: Path) -> None:
        import pyarrow
        from pyarrow import ipc

        table = pyarrow.table({"a": list(range(N))})
        with ipc.new_file(folder / "a.arrow", table.schema) as made:
            made.write_table(table, max_chunksize=8)
        self.reader = ipc.open_file(folder / "a.arrow")

    def __getitem__(self, i: int) -> Any:
        return self.reader.get_batch(i // 8)["a"][i % 8].as_py()


@program(lambda i: b"%08d" % i)
class PipedLazily(Numbers):
    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def __getitem__(self, i: int) -> Any:
        if self.process is None:
            self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"%08d" % i)
        self.process.stdin.flush()
        return self.process.stdout.read(8)

    def __del__(self) -> None:
        if self.process is not None:
            self.process.communicate()


@program(lambda i: b"%08d" % i)
class SocketsLazily(Numbers):
    def __init__(self) -> None:
        self.ends: Any = None

    def __getitem__(self, i: int) -> Any:
        if self.ends is None:
            self.ends = socket.socketpair()
        self.ends[0].sendall(b"%08d" % i)
        return self.ends[1].recv(8)

    def __del__(self) -> None:
        for end in self.ends or ():
            end.close()


@program(record)
class FileOfTheCall(Numbers):
    def __getitem__(self, i: int) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "example"
            path.write_bytes(record(i))
            return path.read_bytes()


# What threads may share.


@program(lambda i: i % 8)
class Pictures(Numbers):
    def __init__(self, folder: Path) -> None:
        from PIL import Image

        self.paths = [str(folder / f"{i}.png") for i in range(8)]
        for i, path in enumerate(self.paths):
            Image.new("L", (8, 8), i).save(path)

    def __getitem__(self, i: int) -> Any:
        from PIL import Image

        with Image.open(self.paths[i % 8]) as image:
            return image.getpixel((3, 3))


@program(lambda i: (i, f"{i}"))
class Frame(Numbers):
    def __init__(self) -> None:
        import pandas

        self.frame = pandas.DataFrame({"a": range(N), "b": [f"{i}" for i in range(N)]})

    def __getitem__(self, i: int) -> Any:
        row = self.frame.iloc[i]
        return int(row["a"]), row["b"]


@program(number)
class Arrow(Numbers):
    def __init__(self) -> None:
        import pyarrow

        self.table = pyarrow.table({"a": list(range(N))})

    def __getitem__(self, i: int) -> Any:
        return self.table["a"][i].as_py()


@program(number)
def huggingface_dataset(folder: Path) -> Any:
    import datasets

    return datasets.Dataset.from_dict({"a": list(range(N))}), operator.itemgetter("a")


@program(number)
class MemoryMap(Numbers):
    def __init__(self, folder: Path) -> None:
        np.save(folder / "x.npy", np.arange(N))
        self.x = np.load(folder / "x.npy", mmap_mode="r")

    def __getitem__(self, i: int) -> Any:
        return int(self.x[i])


@program(number)
class Arrays(Numbers):
    def __init__(self) -> None:
        self.x = np.arange(N * 50_000).reshape(N, -1)  # 25 MB

    def __getitem__(self, i: int) -> Any:
        return int(self.x[i].min()) // 50_000


@program(number)
class Counting(Numbers):
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0

    def __getitem__(self, i: int) -> Any:
        with self.lock:
            self.count += 1
        return i


@program()
class RamCache(Numbers):
    def __init__(self) -> None:
        self.cache: dict[int, Any] = {}

    def __getitem__(self, i: int) -> Any:
        if i not in self.cache:
            self.cache[i] = numbers(i)
        return self.cache[i]


LABELS = {"cat": 0, "dog": 1}
NAMES = ["cat", "dog"]
MEAN = np.array([1.0, 2.0])
LOGGER = logging.getLogger("thread_programs")


ROWS = np.arange(N * 4).reshape(N, 4)


@program(lambda i: (i * 16 + 6, i * 4.0, tuple(range(i * 4, i * 4 + 4))))
class GlobalRows(Numbers):
    def __getitem__(self, i: int) -> Any:
        return ROWS[i].sum(), float(ROWS[i][0]), tuple(ROWS[i])


@program(lambda i: (i, i % 2, i % 2, i - 2.0, "a"))
class Constants(Numbers):
    classes = ["cat", "dog"]  # noqa: RUF012

    def __getitem__(self, i: int) -> Any:
        LOGGER.debug("example %d", i)
        name = NAMES[i % len(NAMES)]
        place = self.classes.index(name)
        return i, LABELS[name], place, float((i - MEAN)[1]), pathlib.Path("/a").name


@program()
class Local(Numbers):
    def __init__(self) -> None:
        self.local = threading.local()

    def __getitem__(self, i: int) -> Any:
        self.local.last = i
        return tuple(self.local.last * 100 + k for k in range(8))


@functools.lru_cache
def squared(i: int) -> int:
    return i * i


@program(lambda i: i * i)
class Squares(Numbers):
    def __getitem__(self, i: int) -> Any:
        return squared(i)


@program(lambda i: 2.0 * i + 1)
class Network(Numbers):
    def __init__(self) -> None:
        import torch

        self.network = torch.nn.Linear(1, 1)
        with torch.no_grad():
            self.network.weight.fill_(2.0)
            self.network.bias.fill_(1.0)

    def __getitem__(self, i: int) -> Any:
        import torch

        with torch.no_grad():
            return float(self.network(torch.tensor([float(i)])))


# Programs of a line.

LINES: list[tuple[str, Callable[[int], Any], Callable[[Path], Any]]] = [
    (
        "tokenizer_partial",
        token_count,
        lambda folder: (Numbers(), functools.partial(tokenized, tokenizer())),
    ),
    ("file_opened_early", record, lambda folder: Reader(record_file(folder))),
    ("file_opened_lazily", record, lambda folder: LazyReader(record_file(folder))),
    ("buffer_small", thrice, lambda folder: Buffered(np.zeros(5_000))),
    ("buffer_large", thrice, lambda folder: Buffered(np.zeros(250_000))),
    ("buffer_of_16_mb", thrice, lambda folder: Buffered(np.zeros(2_000_000))),
    ("tensor_small", thrice, lambda folder: Tensors(5_000)),
    ("tensor_large", thrice, lambda folder: Tensors(500_000)),
    ("tensor_of_16_mb", thrice, lambda folder: Tensors(4_000_000)),
    ("byte_array", short, lambda folder: Written(bytearray(8))),
    ("typed_array", short, lambda folder: Written(array.array("l", [0] * 8))),
    ("memory_view", short, lambda folder: Written(memoryview(bytearray(8)))),
    ("object_array", short, lambda folder: Written(np.zeros(8, object))),
    ("scratch_deque", numbers, lambda folder: Scratch(collections.deque(maxlen=8))),
    ("scratch_list_subclass", numbers, lambda folder: Scratch(Listed())),
    ("global_list_in_function", numbers, lambda folder: (Numbers(), by_global)),
    ("global_set_in_function", numbers, lambda folder: (Numbers(), sets_global)),
    (
        "module_as_state_in_function",
        numbers,
        lambda folder: (Numbers(), lambda i: fill(OWN.SCRATCH, i)),
    ),
    (
        "cached_singleton_in_function",
        numbers,
        lambda folder: (Numbers(), lambda i: fill(singleton(), i)),
    ),
    ("metaclass_singleton", numbers, lambda folder: (Numbers(), lambda i: fill(Solo().scratch, i))),
    ("callable_with_state", numbers, lambda folder: (Numbers(), Adder())),
    ("bound_method", numbers, lambda folder: (Numbers(), Adder().add)),
    ("partial_of_a_list", numbers, lambda folder: (Numbers(), functools.partial(fill, []))),
    ("decorated_function", numbers, lambda folder: (Numbers(), decorated)),
    ("default_argument", numbers, lambda folder: (Numbers(), by_default)),
    ("reduce_with_arguments", numbers, lambda folder: Reduced(8)),
    ("data_class", numbers, lambda folder: Data()),
    ("data_class_frozen_with_slots", numbers, lambda folder: Frozen()),
    ("random_seeded_in_function", drawn, lambda folder: (Numbers(), draws)),
    ("single_dispatch", numbers, lambda folder: (Numbers(), dispatched)),
    ("context_manager", numbers, lambda folder: (Numbers(), by_context)),
    ("decorators_of_a_package", numbers, lambda folder: (Numbers(), without_gradients(by_global))),
    ("delegating_object", numbers, lambda folder: Delegating(Scratch())),
    (
        "class_attribute_of_a_helper_in_function",
        numbers,
        lambda folder: (Numbers(), lambda i: Worker().work(i)),
    ),
    ("frozen_dataclass_with_a_modules_list", numbers, lambda folder: Recipe()),
    ("frozen_dataclass_that_writes", numbers, lambda folder: Remembering()),
    ("enum_member_with_a_modules_list", numbers, lambda folder: (Numbers(), Step.FILL)),
    ("enum_member_that_keeps", numbers, lambda folder: (Numbers(), Step.FILL.keep)),
    ("ctypes_array", short, lambda folder: Written((ctypes.c_long * 8)())),
    (
        "opened_for_each_example",
        token_count,
        lambda folder: (Numbers(), lambda i: tokenized(tokenizer(), i)),
    ),
]
for _name, _expected, _make in LINES:
    program(_expected, _name)(_make)
