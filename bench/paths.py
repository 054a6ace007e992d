"""Every path that data takes through stoker, beside the best there is: nothing, a limit, a peer.

Each row is one kind of work, done by stoker, by whatever bounds it (a loop by hand, LMDB alone,
copies alone) and by torch's ``DataLoader`` where it does that work. Rates are of a steady state:
epochs are gone through once before, and a loader's workers are kept. What a row is held to stands
beside it. ``python bench/scoreboard.py`` shows the newest rows.

- warm cache: 110 KB of bytes an item, 16 a batch, by the consumer alone, by 4, 2 and 8 threads;
  decoded images of 3 KB, by the consumer; the limit is LMDB with a copy of each item.
- echo: photographs, decoded, used 2 and 4 times, cropped at random, 32 a batch; by hand: two
  threads decode ahead, the loop draws from a list, copies crops into a batch. Whole epochs, in
  which both fill their pools, use every image as often, and empty them. README's chain is the same
  at the defaults: ``from_folder``, decoded by stoker, used twice, cropped by a function of the
  user's; DataLoader has two processes, which decode for each use.
- collating: dicts of 12 fields, nested examples, ragged ones padded; batches of 1 and 8.
- worker processes: rows of 1 KB and of 150 KB; epochs of 100 rows of 1 KB, in examples a second of
  processor time, that of the workers included: both fork anew, or both keep their processes. In
  the other rows DataLoader keeps its own; stoker's fork anew, and see what has changed.
- a random flip of an example; windows and columns of arrays that are not contiguous; ``.echo()``
  around a loader that is fast enough; the first batch of a folder of many files.
- JPEGs of 32 x 32 pixels from files, cropped at random and resized: by hand a loop that calls
  stoker-native; PNGs of 1,600 x 1,200 pixels, beside Pillow alone. Both in examples a second of
  processor time.

Command::

    python bench/paths.py --jpegs imagenet-sample.tar

Machine: two cores of an Intel Xeon, 24 GiB, Linux 6.18; Python 3.11.7, NumPy 2.4.6, PyTorch 2.13.0.

Results::

    [results/paths.json]
    a second                        limit            peers     stoker                   ratio  goal
    -----------------------------------------------------------------------------------------------
    warm cache, 110 KB, inline     27,533                      17,382    0.63 (0.56 .. 0.673)  0.90
    warm cache, 110 KB, 2 thr.    183,745   inline 117,593    116,489   0.997 (0.972 .. 1.03)  1.00
    warm cache, 110 KB, 4 thr.    176,448   inline 111,541    112,343        1 (0.973 .. 1.1)  1.00
    warm cache, 110 KB, 8 thr.    180,373   inline 110,141    109,160   0.992 (0.897 .. 1.01)  1.00
    warm cache, arrays of 3 KB     88,312     files 18,079    145,817     7.47 (6.28 .. 8.44)  2.00
    photographs, echo 2, crop       2,988                       2,991   0.995 (0.984 .. 1.02)  0.90
    photographs, echo 4, crop       5,884                       5,529  0.953 (0.919 .. 0.984)  0.90
    dicts of 12 fields            784,536     torch 77,690    190,638     2.44 (2.39 .. 2.54)  1.50
    nested examples                          torch 147,366    342,100     2.33 (2.28 .. 2.39)  1.50
    ragged, padded                         torch 1,039,824  1,116,770    1.07 (0.822 .. 1.14)  1.00
    batches of 1                              torch 62,449    125,683        2.02 (2 .. 2.13)  1.00
    batches of 8                             torch 267,457    523,942     1.97 (1.75 .. 2.07)  1.00
    2 processes, 1 KB rows                    torch 25,368     60,461       2.4 (1.79 .. 2.7)  1.00
    2 processes, 150 KB rows                   torch 7,007      8,363     1.25 (1.12 .. 1.34)  1.00
    random flip                              torch 151,332    160,079    1.05 (0.995 .. 1.07)  1.00
    windows of an array         9,698,339    torch 417,758  6,385,907  0.599 (0.549 .. 0.748)  0.90
    every other column          1,319,835    torch 367,511  1,229,113      0.97 (0.7 .. 1.06)  0.90
    JPEGs of 32 x 32, by CPU       34,310                      17,851   0.528 (0.487 .. 0.53)  0.60
    large PNGs, by CPU                 17                          20      1.18 (1.17 .. 1.2)  1.00
    echo around a fast loader      25,554                      27,243     1.07 (1.04 .. 1.13)  0.98
    first batch, 100,000 files          9                          12      1.3 (1.27 .. 1.51)  0.67
    README's chain, echo 2          2,572      torch 1,191      1,075  0.463 (0.396 .. 0.489)  0.90
    100 rows, forked, by CPU                   torch 1,206      1,592     1.32 (1.13 .. 1.41)  1.00
    100 rows, kept, by CPU                    torch 10,207     10,697    1.04 (0.955 .. 1.24)  0.90
    [end]

Where it is behind, and why:

- warm cache, 110 KB: by processor time an item takes 18 us, and 12 by hand. Finding the items and
  copying them takes 15 of these: by hand each batch is freed before the next, whose copies go to
  the same memory, which the processor's caches still hold. The engine takes 3. Threads are not
  used here: a batch takes less than 1 ms.
- echo 2: these maps are the bench's own, so nothing is known of them but trials. Where other
  programs leave no second core, a trial finds that a second thread is of no use.
- README's chain: photographs go from the decoding threads to worker processes, and their crops
  back, as users' code runs in processes unless it is declared ``stoker.thread_safe``; the limit has
  no processes. New ones are forked for each epoch of half a second, DataLoader's are kept.
- windows of an array: a batch takes the loop by hand 8 us. Here it takes the engine 4 us, and the
  order 2 to 3 us, which of more than a million examples is computed as it is used; by hand it is
  there beforehand. Copying the rows takes less than by hand.
- JPEGs of 32 x 32: of 56 us an image, decoding and resizing in C take 25 (by hand as much), reading
  the file 7. The rest is Python for single images: drawing a box 4, the size and the call 6, fields
  of the example 4, the engine.
- ragged: three quarters of a batch's time are the user's own collate function, for both.

Caveats: between two runs on this machine ratios of single rows moved by up to a quarter. The rows
by CPU, and those of the cache inline, were measured later, on two cores of an AMD EPYC beside other
work: of these only the ratios tell something.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import resource
import secrets
import statistics
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from harness import Ratio, Report, interleaved, parser, report
from inputs import jpegs
from PIL import Image
from torch.utils.data import DataLoader

import stoker

Arms = Mapping[str, Callable[[], float]]
"""What does the work, each returning examples/s: "stoker" always; "limit" and "DataLoader"."""

WINDOW_S = 1.0


@dataclass(frozen=True)
class Row:
    """One kind of work.

    Attributes:
        goal: stoker's rate over that of ``against``, at least.
    """

    name: str
    goal: float
    against: str
    arms: Callable[[bool, ExitStack], Arms]


class Listed:
    """Examples in a list."""

    def __init__(self, examples: Any) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Any:
        return self.examples[index]


def rate(batches: Callable[[], Iterable[Any]], size: int, quick: bool) -> Callable[[], float]:
    """Return what goes through epochs for a while, and returns examples/s."""
    window_s = 0.05 if quick else WINDOW_S

    def measured() -> float:
        count, began = 0, time.perf_counter()
        while True:
            with closing(iter_of(batches())) as epoch:
                for _ in epoch:
                    count += size
                    if time.perf_counter() - began > window_s:
                        return count / (time.perf_counter() - began)

    return measured


def whole_rate(batches: Callable[[], Iterable[Any]], size: int, quick: bool) -> Callable[[], float]:
    """Return what goes through whole epochs, for a while at least, and returns examples/s.

    For loops with a pool: it is filled at the beginning, and empties at the end.
    """
    window_s = 0.05 if quick else 2 * WINDOW_S

    def measured() -> float:
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < window_s:
            count += size * sum(1 for _ in batches())
        return count / (time.perf_counter() - began)

    return measured


def iter_of(batches: Iterable[Any]) -> Generator[Any, None, None]:
    """Return a generator over batches: it can be closed."""
    yield from batches


def loader_of(examples: Any, quick: bool, size: int, **settings: Any) -> Callable[[], float]:
    loader: Any = DataLoader(examples, batch_size=size, shuffle=True, **settings)
    return rate(lambda: loader, size, quick)


def pipeline_of(pipeline: Any, size: int, quick: bool) -> Callable[[], float]:
    is_warm = False
    while not is_warm:
        for _ in pipeline:
            pass
        cache = pipeline.stats().cache
        is_warm = cache is None or not cache.misses  # what came too fast to be written comes again
    return rate(lambda: pipeline, size, quick)


# -- a warm cache


def lmdb_of(items: list[bytes], folder: str) -> lmdb.Environment:
    total = sum(map(len, items))
    env = lmdb.open(folder, map_size=2 * total + (64 << 20), sync=False, readahead=False)
    with env.begin(write=True) as txn:
        for number, item in enumerate(items):
            txn.put(number.to_bytes(8, "big"), item)
    return env


def looked_up(env: lmdb.Environment, count: int, size: int, made: Callable[[bytes], Any]) -> Any:
    order = [int(i).to_bytes(8, "big") for i in np.random.default_rng(0).permutation(count)]

    def epoch() -> Iterator[Any]:
        for start in range(0, count - size + 1, size):
            with env.begin() as txn:
                batch = [made(txn.get(key) or b"") for key in order[start : start + size]]
            yield batch

    return epoch


def warm(threads: int) -> Callable[[bool, ExitStack], Arms]:
    def arms(quick: bool, within: ExitStack) -> Arms:
        count = 64 if quick else 2_000
        items = [np.random.default_rng(i).bytes(110_000) for i in range(count)]
        env = within.enter_context(closing(lmdb_of(items, temporary(within))))

        def cached(workers: int) -> Any:
            p = stoker.from_dataset(Listed(items), seed=0).shuffle()
            limit = 2 * count * 110_000 + (8 << 20)
            p = p.cache(limit, version=secrets.token_hex(8)).batch(16, collate=list)
            return pipeline_of(p.workers(workers), 16, quick)

        arms: dict[str, Callable[[], float]] = {
            "limit": rate(looked_up(env, count, 16, bytes), 16, quick),
            "stoker": cached(threads),
        }
        return arms | ({"inline": cached(0)} if threads else {})

    return arms


def warm_arrays(quick: bool, within: ExitStack) -> Arms:
    count = 256 if quick else 20_000
    images = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    items = [image.tobytes() for image in images]
    env = within.enter_context(closing(lmdb_of(items, temporary(within))))
    folder = temporary(within)
    for number, item in enumerate(items):
        Path(folder, str(number)).write_bytes(item)

    def decoded(data: bytes) -> Any:
        return np.frombuffer(data, np.uint8).reshape(32, 32, 3).copy()

    def files() -> Iterator[Any]:
        order = np.random.default_rng(0).permutation(count)
        for start in range(0, count - 63, 64):
            paths = [f"{folder}/{number}" for number in order[start : start + 64]]
            yield np.stack([decoded(Path(path).read_bytes()) for path in paths])

    def stacked() -> Iterator[Any]:
        for batch in looked_up(env, count, 64, decoded)():
            yield np.stack(batch)

    p: Any = stoker.from_dataset(Listed(items), seed=0).shuffle().map(decoded)
    p = p.cache(4 * count * 3_072 + (8 << 20), version=secrets.token_hex(8)).batch(64).workers(0)
    return {
        "limit": rate(stacked, 64, quick),
        "files": rate(files, 64, quick),
        "stoker": pipeline_of(p, 64, quick),
    }


def temporary(within: ExitStack) -> str:
    return within.enter_context(tempfile.TemporaryDirectory())


# -- an echo of photographs

SIDE = 224


@stoker.reads_only
def crop(image: Any, rng: np.random.Generator) -> Any:
    height, width = image.shape[:2]
    top = int(rng.integers(max(1, height - SIDE + 1)))
    left = int(rng.integers(max(1, width - SIDE + 1)))
    out = np.zeros((SIDE, SIDE, 3), np.uint8)
    found = image[top : top + SIDE, left : left + SIDE]
    out[: found.shape[0], : found.shape[1]] = found
    return out


def decode(data: bytes) -> Any:
    return stoker.images.decode(data)


def photographs(factor: int, place: str | None) -> Callable[[bool, ExitStack], Arms]:
    def arms(quick: bool, within: ExitStack) -> Arms:
        files = photographs_of(quick, place)
        pool = min(8 * 32, len(files))
        limit = within.enter_context(closing(EchoByHand(files, factor, pool)))
        p: Any = stoker.from_dataset(Listed(files), seed=0).shuffle().map(decode)
        p = p.echo(factor, pool=pool).random_map(crop).batch(32, drop_last=True)
        p = p.workers(2, kind="thread")  # as the limit has: of users' code, two are processes
        return {"limit": whole_rate(limit, 32, quick), "stoker": whole_rate(lambda: p, 32, quick)}

    return arms


def photographs_of(quick: bool, place: str | None) -> list[bytes]:
    return jpegs(None, 8) * 16 if quick else jpegs(place, 512)


class EchoByHand:
    """Epochs of batches of crops of images, which two threads decode ahead."""

    def __init__(self, files: list[bytes], factor: int, pool: int) -> None:
        self._files, self._factor, self._pool = files, factor, pool
        self._executor = ThreadPoolExecutor(2)

    def close(self) -> None:
        self._executor.shutdown()

    def __call__(self) -> Iterator[Any]:
        files, rng = self._files, np.random.default_rng(0)
        order = iter(rng.permutation(len(files)).tolist())
        ahead: deque[Future[Any]] = deque(
            self._executor.submit(decode, files[i]) for i in islice(order, 64)
        )
        held: list[list[Any]] = []
        batch, row = np.empty((32, SIDE, SIDE, 3), np.uint8), 0
        while ahead or held:
            while ahead and len(held) < self._pool:
                held.append([ahead.popleft().result(), self._factor])
                for i in islice(order, 1):
                    ahead.append(self._executor.submit(decode, files[i]))
            at = int(rng.integers(len(held)))
            held[at], held[-1] = held[-1], held[at]
            image, uses = held[-1]
            held[-1][1] = uses - 1
            if uses == 1:
                held.pop()
            batch[row] = crop(image, rng)
            row += 1
            if row == 32:
                yield batch
                batch, row = np.empty((32, SIDE, SIDE, 3), np.uint8), 0


def augmented(image: Any, rng: np.random.Generator) -> Any:
    return crop(image, rng)  # as users write it: nothing is declared


class Augmented(Listed):
    """The same for ``DataLoader``, which decodes for each use."""

    def __getitem__(self, index: int) -> Any:
        return augmented(decode(self.examples[index]), np.random.default_rng(index))


def readme_chain(place: str | None) -> Callable[[bool, ExitStack], Arms]:
    def arms(quick: bool, within: ExitStack) -> Arms:
        files, folder = photographs_of(quick, place), temporary(within)
        for label in range(2):
            os.mkdir(f"{folder}/{label}")
        for number, data in enumerate(files):
            Path(folder, str(number % 2), f"{number:05}.jpg").write_bytes(data)
        pool = min(8 * 32, len(files))
        limit = within.enter_context(closing(EchoByHand(files, 2, pool)))
        p: Any = stoker.from_folder(folder, seed=0).shuffle()
        p = p.map(stoker.images.decode, on="image").echo(2, pool=pool)
        p = p.random_map(augmented, on="image").batch(32, drop_last=True)
        kept: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "drop_last": True}
        examples: Any = Augmented(files)
        loader: Any = DataLoader(examples, batch_size=32, shuffle=True, **kept)
        return {
            "limit": whole_rate(limit, 32, quick),
            "DataLoader": whole_rate(lambda: loader, 32, quick),
            "stoker": whole_rate(lambda: p, 32, quick),
        }

    return arms


# -- collating


def dicts(quick: bool, within: ExitStack) -> Arms:
    count = 640 if quick else 20_000
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {f"a{i}": rng.random((count, 8), np.float32) for i in range(6)}
    columns |= {f"n{i}": rng.integers(0, 9, count).tolist() for i in range(6)}
    examples = [{k: column[i] for k, column in columns.items()} for i in range(count)]

    def by_hand() -> Iterator[Any]:
        for start in range(0, count, 32):
            some = examples[start : start + 32]
            yield {key: np.array([each[key] for each in some]) for key in some[0]}

    return {"limit": rate(by_hand, 32, quick), **against_torch(examples, 32, quick)}


def nested(quick: bool, within: ExitStack) -> Arms:
    rows = np.random.default_rng(0).random((640 if quick else 20_000, 8), np.float32)
    examples = [{"x": (r, r), "y": {"z": i, "w": [r, i]}} for i, r in enumerate(rows)]
    return against_torch(examples, 32, quick)


def ragged(quick: bool, within: ExitStack) -> Arms:
    rng = np.random.default_rng(0)
    count = 640 if quick else 20_000
    examples = [np.arange(n) for n in rng.integers(8, 64, count)]

    def padded(some: list[Any]) -> Any:
        out = np.zeros((len(some), max(map(len, some))), np.int64)
        for row, each in zip(out, some, strict=True):
            row[: len(each)] = each
        return out

    p = stoker.from_dataset(Listed(examples), seed=0).shuffle().batch(32, collate=padded)
    return {
        "DataLoader": loader_of(Listed(examples), quick, 32, collate_fn=padded),
        "stoker": pipeline_of(p, 32, quick),
    }


def against_torch(examples: Any, size: int, quick: bool, **settings: Any) -> Arms:
    p = stoker.from_dataset(Listed(examples), seed=0).shuffle().batch(size)
    return {
        "DataLoader": loader_of(Listed(examples), quick, size),
        "stoker": pipeline_of(p, size, quick),
    }


def small(size: int) -> Callable[[bool, ExitStack], Arms]:
    def arms(quick: bool, within: ExitStack) -> Arms:
        rows = np.random.default_rng(0).random((200 if quick else 20_000, 8), np.float32)
        return against_torch([(row, i) for i, row in enumerate(rows)], size, quick)

    return arms


def processes(row_bytes: int) -> Callable[[bool, ExitStack], Arms]:
    def arms(quick: bool, within: ExitStack) -> Arms:
        count = 256 if quick else 20_000 if row_bytes < 10_000 else 2_000
        rows = np.random.default_rng(0).integers(0, 256, (count, row_bytes), dtype=np.uint8)
        examples = Listed([(row, i) for i, row in enumerate(rows)])
        p = stoker.from_dataset(examples, seed=0).shuffle().batch(32).workers(2, kind="process")
        return {
            "DataLoader": loader_of(examples, quick, 32, num_workers=2, persistent_workers=True),
            "stoker": pipeline_of(p, 32, quick),
        }

    return arms


def processor_s() -> float:
    """Return the processor time of this process and of its children, those that live included."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    living = [
        int(Path(f"/proc/{child.pid}/schedstat").read_text().split()[0])
        for child in multiprocessing.active_children()
    ]
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(living) / 1e9


def short_epochs(*, keeps: bool) -> Callable[[bool, ExitStack], Arms]:
    def arms(quick: bool, within: ExitStack) -> Arms:
        rows = np.random.default_rng(0).integers(0, 256, (100, 1_000), dtype=np.uint8)
        examples: Any = Listed([(row, i) for i, row in enumerate(rows)])
        p = stoker.from_dataset(examples, seed=0).shuffle().batch(10)
        p = p.workers(2, kind="process", persistent=keeps)
        kept: dict[str, Any] = {"num_workers": 2, "persistent_workers": keeps}
        loader: Any = DataLoader(examples, batch_size=10, shuffle=True, **kept)

        def measured(batches: Iterable[Any]) -> Callable[[], float]:
            def rate() -> float:
                began, epochs = processor_s(), 1 if quick else 20
                for _ in range(epochs):
                    deque(batches, 0)
                return len(examples) * epochs / (processor_s() - began)

            deque(batches, 0)  # their processes start
            return rate

        return {"DataLoader": measured(loader), "stoker": measured(p)}

    return arms


def flip(image: Any, rng: np.random.Generator) -> Any:
    return image[:, ::-1] if rng.random() < 0.5 else image


class Flipped(Listed):
    """Flips in ``__getitem__``, for DataLoader."""

    rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return flip(self.examples[index], self.rng).copy()


def flips(quick: bool, within: ExitStack) -> Arms:
    count = 640 if quick else 20_000
    images = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    p = stoker.from_dataset(Listed(images), seed=0).shuffle().random_map(flip).batch(32)
    return {
        "DataLoader": loader_of(Flipped(images), quick, 32),
        "stoker": pipeline_of(p, 32, quick),
    }


# -- arrays that are not contiguous


def gathered(array: Any) -> Callable[[bool, ExitStack], Arms]:
    def arms(quick: bool, within: ExitStack) -> Arms:
        rows = array()
        order = np.random.default_rng(0).permutation(len(rows))

        def by_hand() -> Iterator[Any]:
            for start in range(0, len(order) - 63, 64):
                yield rows[order[start : start + 64]]

        p = stoker.from_arrays(rows, seed=0).shuffle().batch(64)
        return {
            "limit": rate(by_hand, 64, quick),
            "DataLoader": loader_of(Listed(rows), quick, 64),
            "stoker": rate(lambda: p, 64, quick),
        }

    return arms


def windows() -> Any:
    signal = np.random.default_rng(0).random(4_000_000, np.float32)
    return np.lib.stride_tricks.sliding_window_view(signal, 256, writeable=True)


def columns() -> Any:
    return np.random.default_rng(0).random((20_000, 1_024), np.float32)[:, ::2]


# -- around a loader, and the beginning


def echoed_loader(quick: bool, within: ExitStack) -> Arms:
    rows = np.random.default_rng(0).random((64 * 64, 150_528 // 64), np.float32)
    examples: Any = Listed(rows)
    loader: Any = DataLoader(examples, batch_size=64)
    train = stoker.echo(loader)
    step_s = 0.002

    def stepped(batches: Any) -> Callable[[], float]:
        def measured() -> float:
            count, began = 0, time.perf_counter()
            for _ in islice(batches, 8 if quick else 400):
                time.sleep(step_s)
                count += 64
            return count / (time.perf_counter() - began)

        return measured

    def endless(batches: Any) -> Iterator[Any]:
        while True:
            yield from batches

    return {"limit": stepped(endless(loader)), "stoker": stepped(endless(train))}


def first_batch(quick: bool, within: ExitStack) -> Arms:
    folder = temporary(within)
    for name in range(4 if quick else 100):
        os.mkdir(f"{folder}/{name:03}")
        for number in range(10 if quick else 1_000):
            Path(folder, f"{name:03}", f"{number:06}.jpg").write_bytes(b"no image")

    def walked() -> float:
        began = time.perf_counter()
        sorted(os.path.join(at, name) for at, _, names in os.walk(folder) for name in names)
        return 1 / (time.perf_counter() - began)

    def began_training() -> float:
        began = time.perf_counter()
        with closing(iter(stoker.from_folder(folder, seed=0).shuffle().batch(32))) as batches:
            next(batches)
        return 1 / (time.perf_counter() - began)

    return {"limit": walked, "stoker": began_training}


# -- images that cost little, or that Pillow decodes


def encoded(kind: str, height: int, width: int, **how: Any) -> bytes:
    few = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(few).resize((width, height)).save(stream, kind, **how)
    return stream.getvalue()


def by_processor(batches: Callable[[], Iterable[Any]], count: int) -> Callable[[], float]:
    """Return what goes through epochs, and returns examples a second of processor time."""

    def measured() -> float:
        began = processor_s()
        deque(batches(), 0)
        return count / (processor_s() - began)

    return measured


def small_jpegs(quick: bool, within: ExitStack) -> Arms:
    import stoker_native

    folder, count = temporary(within), 128 if quick else 6_400
    for label in range(2):
        os.mkdir(f"{folder}/{label}")
    paths = [f"{folder}/{number % 2}/{number}.jpg" for number in range(count)]
    data = encoded("JPEG", 32, 32, quality=90)
    for path in paths:
        Path(path).write_bytes(data)

    def by_hand() -> Iterator[Any]:
        rng = np.random.default_rng(0)
        for start in range(0, count, 64):
            out = np.empty((64, 32, 32, 3), np.uint8)
            for row, path in enumerate(paths[start : start + 64]):
                with open(path, "rb", 0) as file:
                    read = file.read()
                x, y = (int(8 * each) for each in rng.random(2))
                box = stoker_native.Crop(x, y, 24, 24, 32, 32, rng.random() < 0.5, 1, 0, 0)
                limits = {"max_pixels": 1 << 26, "max_scan_pixels": 1 << 30}
                out[row] = stoker_native.jpeg_crop(read, box, **limits)
            yield out

    crop = stoker.images.random_resized_crop(32, flip_p=0.5)
    p = stoker.from_folder(folder, seed=0).shuffle().random_map(crop, on="image").batch(64)
    p = p.workers(0)
    return {"limit": by_processor(by_hand, count), "stoker": by_processor(lambda: p, count)}


def large_pngs(quick: bool, within: ExitStack) -> Arms:
    data = encoded("PNG", 1_200, 1_600, compress_level=1)
    count = 1 if quick else 12

    def by_pillow() -> Iterator[Any]:
        for _ in range(count):
            yield np.array(Image.open(io.BytesIO(data)).convert("RGB"))

    def by_stoker() -> Iterator[Any]:
        for _ in range(count):
            yield stoker.images.decode(data)

    return {"limit": by_processor(by_pillow, count), "stoker": by_processor(by_stoker, count)}


def rows_of(place: str | None) -> list[Row]:
    """Return all paths."""
    return [
        Row("warm cache, 110 KB, inline", 0.9, "limit", warm(0)),
        *(Row(f"warm cache, 110 KB, {n} thr.", 1.0, "inline", warm(n)) for n in (2, 4, 8)),
        Row("warm cache, arrays of 3 KB", 2.0, "files", warm_arrays),
        Row("photographs, echo 2, crop", 0.9, "limit", photographs(2, place)),
        Row("photographs, echo 4, crop", 0.9, "limit", photographs(4, place)),
        Row("README's chain, echo 2", 0.9, "limit", readme_chain(place)),
        Row("dicts of 12 fields", 1.5, "DataLoader", dicts),
        Row("nested examples", 1.5, "DataLoader", nested),
        Row("ragged, padded", 1.0, "DataLoader", ragged),
        Row("batches of 1", 1.0, "DataLoader", small(1)),
        Row("batches of 8", 1.0, "DataLoader", small(8)),
        Row("2 processes, 1 KB rows", 1.0, "DataLoader", processes(1_000)),
        Row("2 processes, 150 KB rows", 1.0, "DataLoader", processes(150_000)),
        Row("100 rows, forked, by CPU", 1.0, "DataLoader", short_epochs(keeps=False)),
        Row("100 rows, kept, by CPU", 0.9, "DataLoader", short_epochs(keeps=True)),
        Row("random flip", 1.0, "DataLoader", flips),
        Row("windows of an array", 0.9, "limit", gathered(windows)),
        Row("every other column", 0.9, "limit", gathered(columns)),
        Row("JPEGs of 32 x 32, by CPU", 0.6, "limit", small_jpegs),
        Row("large PNGs, by CPU", 1.0, "limit", large_pngs),
        Row("echo around a fast loader", 0.98, "limit", echoed_loader),
        Row("first batch, 100,000 files", 1 / 1.5, "limit", first_batch),
    ]


def evaluate(made: Report) -> None:
    """Show each path with its limit and its best peer."""
    lines = []
    for name in dict.fromkeys(row["path"] for row in made.rows):
        rows = [row for row in made.rows if row["path"] == name]
        rates: dict[str, list[float]] = {}
        for row in rows:
            rates.setdefault(row["arm"], []).append(row["per_s"])
        goal, against = rows[0]["goal"], rows[0]["against"]
        ratio = Ratio.of(rates["stoker"], rates[against])
        shown = {arm: f"{statistics.median(found):,.0f}" for arm, found in rates.items()}
        named = {arm: arm.replace("DataLoader", "torch") for arm in rates}
        peers = [f"{named[arm]} {shown[arm]}" for arm in rates if arm not in ("stoker", "limit")]
        lines.append(
            (name, shown.get("limit", ""), ", ".join(peers), shown["stoker"], ratio, f"{goal:.2f}")
        )
        made.expect(f"{name}: over {against}", ratio.median, goal)
    made.show(("a second", "limit", "peers", "stoker", "ratio", "goal"), lines)


def main() -> None:
    made_by = parser(__doc__, evaluate)
    made_by.add_argument("--jpegs", help="folder or tar of photographs; by default some are made")
    made_by.add_argument("--only", default="", help="rows whose names have this in them")
    arguments = made_by.parse_args()
    warnings.simplefilter("ignore", stoker.CacheWarning)
    with report(__file__, arguments) as made:
        for row in rows_of(arguments.jpegs):
            if arguments.only not in row.name:
                continue
            with ExitStack() as within:
                arms = row.arms(arguments.quick, within)
                for arm, found in interleaved(
                    arms, 1 if arguments.quick else arguments.rounds
                ).items():
                    for number, value in enumerate(found):
                        made.add(
                            path=row.name,
                            arm=arm,
                            round=number,
                            per_s=value,
                            goal=row.goal,
                            against=row.against,
                        )
            print(row.name, flush=True)


if __name__ == "__main__":
    main()
