"""What reading from a store costs beside LMDB itself, and what filling it costs an epoch.

1. Items of 110 KB in memory, one thread, every byte summed by the reader: the store (a checksum
   verified on the first read of each item, a copy that is the reader's own) against a bare loop
   of LMDB's ``get``. Warm: each item was read once before; first: by a store just opened.
2. An epoch from storage of 200 MB/s (emulated: all reads together take the bytes' time), eight
   threads, with a cache that is being filled against none.

Command::

    python bench/cache_store.py

Targets: warm, 16 items a call as a pipeline takes them, at least 0.8 of bare LMDB that keeps as
many; filling costs less than 10 % of an epoch.

Machine: two cores of an Intel Xeon at 2.5 GHz, 24 GiB, Linux 6.18, control groups v1; Python 3.11.7
(a plain loop iteration takes 290 ns there, several times more than usual).

Results (seven rounds)::

    [results/cache_store.json]
    reading 110 KB                    items/s            of bare LMDB
    -----------------------------------------------------------------
    bare LMDB, copies                 107,823              1 (1 .. 1)
    bare LMDB, 16 copies at a time    107,123      0.987 (0.953 .. 1)
    bare LMDB, views                  130,798     1.19 (1.17 .. 1.24)
    store, 16 a call                   93,873   0.868 (0.84 .. 0.899)
    store, one a call                  90,808  0.845 (0.806 .. 0.967)
    store, 16 a call, first read       83,941  0.782 (0.694 .. 0.911)
    store, 16 a call, (image, label)   85,683  0.797 (0.737 .. 0.929)

    cache   epoch, s  of an epoch without
    -------------------------------------
    none       2.764           1 (1 .. 1)
    filled     2.775        1 (1 .. 1.01)
    [end]

Where each value is dropped before the next, it is copied into the processor's nearest caches. Of 16
at a time bare LMDB makes less as well.

Caveats: a named tuple of image and label takes 8 us more to make. Python takes several times
longer here than usual, which weighs on the store more than on a bare loop.
"""

from __future__ import annotations

import secrets
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lmdb
import numpy as np
from harness import Ratio, Report, interleaved, parser, report

import stoker
from stoker.cache import location, store_dir
from stoker.cache.handles import Handle
from stoker.cache.layout import StoredItem
from stoker.sources.folder import LabeledImage
from stoker.transport.codec.decoder import decode
from stoker.transport.codec.encoder import encode

ITEM_BYTES = 110_000 // 8 * 8
SPEED_BYTES_PER_S = 200_000_000


def summed(data: Any) -> int:
    """Look at every byte."""
    return int(np.frombuffer(data, np.int64).sum())


@contextmanager
def opened(limit_bytes: int) -> Iterator[Handle]:
    """Make a store in memory."""
    folder = f"{location.make_memory_folder()}/bench-{secrets.token_hex(4)}"
    found = store_dir.join(folder, limit_bytes=limit_bytes, describes="bench", temporary=True)
    assert found is not None
    handle = Handle(found)
    try:
        yield handle
    finally:
        handle.close()


def reading(made: Report, count: int, rounds: int) -> None:
    """Question 1."""
    rng = np.random.default_rng(0)
    items = [rng.bytes(ITEM_BYTES) for _ in range(64)]
    keys = [number.to_bytes(16, "big") for number in range(count)]
    limit = int(count * ITEM_BYTES * 1.2) + (8 << 20)
    shuffled = rng.permutation(count)
    order = [keys[i] for i in shuffled]
    chunks = [order[i : i + 16] for i in range(0, count, 16)]
    memory = "/dev/shm" if location.memory_folder().startswith("/dev/shm") else None
    with (
        opened(limit) as handle,
        opened(limit) as nested,
        tempfile.TemporaryDirectory(dir=memory) as bare,
    ):
        env = lmdb.open(bare, map_size=limit, sync=False, writemap=False, readahead=False)
        for at in range(0, count, 64):
            batch = [(keys[i], items[i % 64]) for i in range(at, min(at + 64, count))]
            with env.begin(write=True) as txn:
                for key, item in batch:
                    txn.put(key, item)
            for store, value in ((handle.store, bytes), (nested.store, _labelled)):
                records = [(key, encode(value(item))) for key, item in batch]
                store.add([StoredItem(k, r, sum(map(len, r)), (1, 1)) for k, r in records])

        def bare_loop() -> float:
            began = time.perf_counter()
            with env.begin() as txn:
                for key in order:
                    summed(txn.get(key))
            return count / (time.perf_counter() - began)

        def kept() -> float:
            began = time.perf_counter()
            with env.begin() as txn:
                for chunk in chunks:
                    for value in [txn.get(key) for key in chunk]:
                        summed(value)
            return count / (time.perf_counter() - began)

        def views() -> float:
            began = time.perf_counter()
            with env.begin(buffers=True) as txn:
                for key in order:
                    summed(txn.get(key))
            return count / (time.perf_counter() - began)

        def several(these: Sequence[Sequence[bytes]]) -> float:
            began = time.perf_counter()
            for chunk in these:
                for value in handle.store.get_many(chunk, decode, _fail):
                    summed(value)
            return count / (time.perf_counter() - began)

        def labelled() -> float:
            began = time.perf_counter()
            for chunk in chunks:
                values: list[Any] = nested.store.get_many(chunk, decode, _fail)
                for value in values:
                    summed(value.image)
            return count / (time.perf_counter() - began)

        def first() -> float:
            handle.store._verified = bytearray()
            return several(chunks)

        cases: dict[str, Callable[[], float]] = {
            "bare LMDB, copies": bare_loop,
            "bare LMDB, 16 copies at a time": kept,
            "bare LMDB, views": views,
            "store, 16 a call": lambda: several(chunks),
            "store, one a call": lambda: several([[key] for key in order]),
            "store, 16 a call, first read": first,
            "store, 16 a call, (image, label)": labelled,
        }
        found = interleaved(cases, rounds)
        env.close()
    for name, rates in found.items():
        for number, rate in enumerate(rates):
            made.add(question="reading", case=name, round=number, items_per_s=rate)


def _labelled(data: bytes) -> LabeledImage:
    return LabeledImage(data, 3)


def _fail(what: str) -> None:
    raise AssertionError(what)


class Slow:
    """Files on storage of a given speed, which all readers share."""

    def __init__(self, count: int) -> None:
        rng = np.random.default_rng(0)
        self._contents = [rng.bytes(ITEM_BYTES) for _ in range(64)]
        self._count = count
        self._lock = threading.Lock()
        self._free_s = 0.0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> bytes:
        took_s = ITEM_BYTES / SPEED_BYTES_PER_S
        with self._lock:
            self._free_s = max(self._free_s, time.perf_counter()) + took_s
            until_s = self._free_s
        time.sleep(max(0.0, until_s - time.perf_counter()))
        return bytes(memoryview(self._contents[index % 64]))


def filling(made: Report, count: int, rounds: int) -> None:
    """Question 2."""

    def epoch(cached: bool) -> float:
        train: Any = stoker.from_dataset(Slow(count), seed=0).shuffle()
        if cached:
            train = train.cache(int(count * ITEM_BYTES * 1.2) + (8 << 20))
        train = train.batch(64, collate=len).workers(8)
        began = time.perf_counter()
        for _ in train:
            pass
        elapsed_s = time.perf_counter() - began
        if cached:
            assert train.stats().cache.admitted == count, train.stats().cache
        return elapsed_s

    found = interleaved({"none": lambda: epoch(False), "filled": lambda: epoch(True)}, rounds)
    for name, each in found.items():
        for number, elapsed_s in enumerate(each):
            made.add(question="filling", case=name, round=number, epoch_s=elapsed_s)


def evaluate(made: Report) -> None:
    """Hold the store against bare LMDB, and an epoch that fills against one without a cache."""
    rates = _by_case(made, "reading", "items_per_s")
    base = rates["bare LMDB, copies"]
    rows = [
        (name, f"{statistics.median(each):,.0f}", Ratio.of(each, base))
        for name, each in rates.items()
    ]
    made.show(("reading 110 KB", "items/s", "of bare LMDB"), rows)
    alike = Ratio.of(rates["store, 16 a call"], rates["bare LMDB, 16 copies at a time"])
    made.expect("warm reads, of bare LMDB that keeps 16", alike.median, 0.8)
    epochs = _by_case(made, "filling", "epoch_s")
    rows = [
        (name, f"{statistics.median(each):.3f}", Ratio.of(each, epochs["none"]))
        for name, each in epochs.items()
    ]
    made.show(("cache", "epoch, s", "of an epoch without"), rows)
    cost = Ratio.of(epochs["filled"], epochs["none"])
    made.expect("an epoch that fills, of one without", cost.median, 1.1, at_least=False)


def _by_case(made: Report, question: str, key: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in made.rows:
        if row["question"] == question:
            found.setdefault(row["case"], []).append(row[key])
    return found


def main() -> None:
    arguments = parser(__doc__, evaluate).parse_args()
    warnings.simplefilter("ignore", stoker.CacheWarning)
    quick = arguments.quick
    rounds = 1 if quick else max(arguments.rounds, 7)
    with report(__file__, arguments) as made:
        reading(made, 128 if quick else 5000, rounds)
        filling(made, 128 if quick else 5000, rounds)


if __name__ == "__main__":
    main()
