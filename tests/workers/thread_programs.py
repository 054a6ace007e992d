"""Programs as users write them: correct in one thread, and most of them wrong where threads share.

Each makes a dataset and functions that are mapped over it, and says what example ``i`` is.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import contextvars
import ctypes
import decimal
import functools
import gzip
import inspect
import io
import logging
import logging.handlers
import mmap
import operator
import os
import random
import socket
import sqlite3
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
from collections.abc import Callable
from dataclasses import dataclass
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


def tokenize(i: int) -> Any:
    return tokenized(TOKENIZER, i)


@program(token_count)
def tokenizer_global_in_function(folder: Path) -> Any:
    OWN.TOKENIZER = tokenizer()  # type: ignore[attr-defined]
    return Numbers(), tokenize


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


SCRATCH: list[int] = []


class Scratch(Numbers):
    def __init__(self, scratch: Any = None) -> None:
        self.scratch = [] if scratch is None else scratch

    def __getitem__(self, i: int) -> Any:
        return fill(self.scratch, i)


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


LAST: Any = None


@program()
class SetsGlobal(Numbers):
    def __getitem__(self, i: int) -> Any:
        global LAST
        LAST = i
        return tuple(LAST * 100 + k for k in range(8))


@program()
class ClassCache(Numbers):
    cache: list[int] = []  # noqa: RUF012

    def __getitem__(self, i: int) -> Any:
        return fill(self.cache, i)


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


@program(record)
class Reopening(Reader):
    def __getstate__(self) -> Any:
        return {"path": self.path}

    def __setstate__(self, state: Any) -> None:
        self.path = state["path"]
        self.file = open(self.path, "rb")  # noqa: SIM115

    def __del__(self) -> None:
        self.file.close()


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


@program(lambda i: [int(each) + i for each in np.random.default_rng(0).integers(1_000, size=4)])
class OwnGenerator(Numbers):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)
        self.state = self.generator.bit_generator.state

    def __getitem__(self, i: int) -> Any:
        self.generator.bit_generator.state = self.state
        return [int(self.generator.integers(1_000)) + i for _ in range(4)]


# Code of packages around the user's.


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
class CachedMethod(Numbers):
    @functools.lru_cache  # noqa: B019
    def scratch(self) -> list[int]:
        return []

    def __getitem__(self, i: int) -> Any:
        return fill(self.scratch(), i)


# State of the whole process, or of a module.


@program(lambda i: np.array2string(np.array([1 / 3]), precision=i % 4))
class PrintOptions(Numbers):
    def __getitem__(self, i: int) -> Any:
        np.set_printoptions(precision=i % 4)
        return str(np.array([1 / 3]))


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


@program(lambda i: [str(k) for k in numbers(i)])
class WarningsCaught(Numbers):
    def __getitem__(self, i: int) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for k in numbers(i):
                warnings.warn(str(k), stacklevel=1)
        return [str(each.message) for each in caught]


@program(lambda i: f"0.{'3' * (i % 4 + 1)}")
class PandasOption(Numbers):
    def __getitem__(self, i: int) -> Any:
        import pandas  # type: ignore[import-untyped]

        with pandas.option_context("display.precision", i % 4 + 1):
            return pandas.Series([1 / 3]).to_string(index=False)


@program(lambda i: f"0.{'3' * (i % 5 + 1)}")
class DecimalContextSet(Numbers):
    def __getitem__(self, i: int) -> Any:
        decimal.setcontext(decimal.Context(prec=i % 5 + 1))
        return str(decimal.Decimal(1) / decimal.Decimal(3))


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
class ImportsInside(Numbers):
    def __getitem__(self, i: int) -> Any:
        from thread_programs import SCRATCH as scratch

        return fill(scratch, i)


@program(number)
class Patched(Numbers):
    def __getitem__(self, i: int) -> Any:
        with unittest.mock.patch.object(OWN, "number", return_value=i):
            return number(-1)


# Raw memory.


@program(lambda i: b"%08d" % i)
class CtypesBuffer(Numbers):
    def __init__(self) -> None:
        self.buf = ctypes.create_string_buffer(9)

    def __getitem__(self, i: int) -> Any:
        ctypes.memmove(self.buf, b"%08d" % i, 8)
        return self.buf.value


@program(short)
class ScratchMapped(Numbers):
    def __init__(self, folder: Path) -> None:
        np.zeros(8, np.int64).tofile(folder / "scratch")
        self.buf = np.memmap(folder / "scratch", np.int64, mode="c")

    def __getitem__(self, i: int) -> Any:
        for k in range(8):
            self.buf[k] = i + k
        return tuple(self.buf.tolist())


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
    ("file_opened_early", record, lambda folder: Reader(record_file(folder))),
    ("file_opened_lazily", record, lambda folder: LazyReader(record_file(folder))),
    ("buffer_large", thrice, lambda folder: Buffered(np.zeros(250_000))),
    ("memory_view", short, lambda folder: Written(memoryview(bytearray(8)))),
    (
        "opened_for_each_example",
        token_count,
        lambda folder: (Numbers(), lambda i: tokenized(tokenizer(), i)),
    ),
]
for _name, _expected, _make in LINES:
    program(_expected, _name)(_make)
