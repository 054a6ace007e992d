"""Programs as users write them: correct in one thread, and most of them wrong where threads share.

Each makes a dataset and functions that are mapped over it, and says what example ``i`` is.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import mmap
import operator
import os
import socket
import sqlite3
import subprocess
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

N = 64
"""How many examples each has."""


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


@program(token_count)
class OwnTokenizer(Numbers):
    def __init__(self) -> None:
        self.tokenizer = tokenizer()

    def __getitem__(self, i: int) -> Any:
        return tokenized(self.tokenizer, i)


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


@program(record)
class Mapped(Numbers):
    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __getitem__(self, i: int) -> Any:
        self.map.seek(i * 4096)
        return self.map.read(8) + self.map.read(8)


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


# State in all the places that Python has.


class Scratch(Numbers):
    def __init__(self, scratch: Any = None) -> None:
        self.scratch = [] if scratch is None else scratch

    def __getitem__(self, i: int) -> Any:
        return fill(self.scratch, i)


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


@program(lambda i: np.random.RandomState(i).randint(1_000, size=4).tolist())
class Seeding(Numbers):
    def __getitem__(self, i: int) -> Any:
        np.random.seed(i)
        return [int(np.random.randint(1_000)) for _ in range(4)]


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


# State of the whole process.


@program(lambda i: np.array2string(np.array([1 / 3]), precision=i % 4))
class PrintOptions(Numbers):
    def __getitem__(self, i: int) -> Any:
        np.set_printoptions(precision=i % 4)
        return str(np.array([1 / 3]))


# Draws that are seeded in the call.


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


# Threads and loops of the program's own.


@program()
class ThreadPool(Numbers):
    def __init__(self) -> None:
        self.pool = concurrent.futures.ThreadPoolExecutor(2)

    def __getitem__(self, i: int) -> Any:
        return tuple(self.pool.map(lambda k: i * 100 + k, range(8)))


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


# What is opened early or in the first call.


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


@program(lambda i: b"%08d" % i)
class PipedLazily(Numbers):
    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __getitem__(self, i: int) -> Any:
        if self.process is None:
            self.start()
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"%08d" % i)
        self.process.stdin.flush()
        return self.process.stdout.read(8)

    def __del__(self) -> None:
        if self.process is not None:
            self.process.communicate()


@program(lambda i: b"%08d" % i)
class Piped(PipedLazily):
    def __init__(self) -> None:
        self.start()


# What threads may share.


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
    (
        "opened_for_each_example",
        token_count,
        lambda folder: (Numbers(), lambda i: tokenized(tokenizer(), i)),
    ),
]
for _name, _expected, _make in LINES:
    program(_expected, _name)(_make)
