"""What a script can see of PyTorch's data loader, as JSON: run with and without the probe.

A program of its own, for workers that are spawned import it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import inspect
import itertools
import json
import multiprocessing
import os
import pickle
import random
import re
import signal
import sys
import threading
import time
import warnings
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

torch.set_num_threads(1)


def descriptors() -> list[str]:
    """Return the kinds of what is open."""
    kinds = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            kinds.append(re.sub(r"[\d_]+", "", target.partition(":")[0]))
    return kinds


class Mapped(Dataset):  # type: ignore[type-arg]
    extra = 0

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> Any:
        draws = (random.random(), float(np.random.rand()), float(torch.rand(())))
        info = get_worker_info()
        seed = info.seed if info is not None else 0
        return index + self.extra, torch.tensor(draws, dtype=torch.float64), seed


class Whole(Mapped):
    def __getitems__(self, indices: list[int]) -> Any:
        return [(index, -1.0) for index in indices]


class Repeated(DataLoader):  # type: ignore[type-arg]
    """Has workers that go on from one epoch to the next, as Ultralytics' and timm's loaders."""

    batches: Any = None

    def __iter__(self) -> Any:
        self.batches = self.batches or self._get_iterator()
        for _ in range(2):
            yield next(self.batches)


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 5  # it yields more: PyTorch warns, once somebody asked for the length

    def __iter__(self) -> Any:
        for number in range(10):
            yield number, float(torch.rand(()))


class Broken(Mapped):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise KeyError("five")
        return index


class Short(Mapped):
    def __getitem__(self, index: int) -> Any:
        if index == 9:
            raise StopIteration
        return index


class Fatal(Mapped):
    def __init__(self) -> None:
        self.first_came = multiprocessing.Event()

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            self.first_came.wait()  # what the worker's queue has not sent dies with it
            time.sleep(0.5)  # the script is in next() again: PyTorch raises wherever it is
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class Stuck(Mapped):
    def __init__(self) -> None:
        self.over = multiprocessing.Event()

    def __getitem__(self, index: int) -> Any:
        self.over.wait()
        return index


def add_a_hundred(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    dataset.extra = 100 + worker


def digest(*values: Any) -> str:
    return hashlib.sha1(repr(values).encode()).hexdigest()[:12]


def states() -> str:
    return digest(
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
    )


def left() -> list[int]:
    gc.collect()  # loaders that ended with an error are in the cycles of its traceback
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:  # threads of queues take their time
        if not multiprocessing.active_children() and threading.active_count() == 1:
            break
        time.sleep(0.01)
    return [len(multiprocessing.active_children()), threading.active_count()]


def epochs(make: Any, count: int = 3) -> list[Any]:
    """Return what three epochs give, and what they leave of the random state."""
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    loader = make()
    seen: list[Any] = []
    iterators = []
    for _ in range(count):
        iterator = iter(loader)
        iterators.append(id(iterator) if loader.persistent_workers else 0)
        sent = getattr(iterator, "_send_idx", None)
        batches = [repr(batch) for batch in iterator]
        seen.append([digest(batches), len(batches), sent, states()])
    return [seen, len(set(iterators))]


def resumed(workers: int, taken: int) -> list[str]:
    """Return what a stateful loader gives after a resume, behind so many batches."""
    torch.manual_seed(3)
    first = StatefulDataLoader(Mapped(), 4, shuffle=True, num_workers=workers)
    batches = iter(first)
    for _ in range(taken):
        next(batches)
    saved = first.state_dict()
    del batches
    second = StatefulDataLoader(Mapped(), 4, shuffle=True, num_workers=workers)
    second.load_state_dict(saved)
    return [repr(batch) for batch in second]


def outcome(make: Any, first_came: Any = None, over: Any = None) -> list[Any]:
    """Return what a loader with faults gives: batches, errors, and what comes after them.

    ``first_came`` is set with the first batch, ``over`` behind all.
    """
    seen: list[Any] = []
    iterator = iter(make())
    for _ in range(12):
        try:
            seen.append(repr(next(iterator)))
            if first_came is not None:
                first_came.set()
        except StopIteration:
            seen.append("end")
            break
        except Exception as error:
            text = str(error).splitlines()
            first = text[0] if text else ""
            first = first.replace(str(os.getpid()), "pid")
            seen.append([type(error).__name__, "".join(c for c in first if not c.isdigit())])
            if isinstance(error, RuntimeError):
                break
    if over is not None:
        over.set()
    del iterator
    return seen


def main() -> None:
    warnings.simplefilter("always")
    found: dict[str, Any] = {}
    full = os.environ.get("STOKER_TEST_PROFILE") == "full"
    grid = itertools.product(
        (0, 2), ("fork", "spawn", "forkserver"), (False, True), (Mapped, Stream)
    )
    for workers, method, persistent, kind in grid:
        if workers == 0 and (method != "fork" or persistent):
            continue
        if method != "fork" and not full and (not persistent or kind is Stream):
            continue
        make = functools.partial(
            DataLoader,
            kind(),
            4,
            shuffle=kind is Mapped or None,
            num_workers=workers,
            persistent_workers=persistent,
            multiprocessing_context=method if workers else None,
        )
        found[f"{kind.__name__} {workers} {method} {persistent}"] = epochs(make)
    found["repeated"] = epochs(lambda: Repeated(Mapped(), 3))
    # Without order, one worker has an order all the same.
    found["unordered"] = epochs(lambda: DataLoader(Mapped(), 4, num_workers=1, in_order=False))
    found["whole batches"] = epochs(lambda: DataLoader(Whole(), 4, num_workers=2))
    found["generator"] = epochs(
        lambda: DataLoader(Mapped(), 4, shuffle=True, generator=torch.Generator().manual_seed(1))
    )
    found["init"] = epochs(
        lambda: DataLoader(Mapped(), 4, num_workers=2, worker_init_fn=add_a_hundred)
    )
    for workers in (0, 1):
        for kind in (Broken, Short):
            make = functools.partial(DataLoader, kind(), 4, num_workers=workers)
            found[f"{kind.__name__} {workers}"] = outcome(make)
    fatal = Fatal()
    make = functools.partial(DataLoader, fatal, 4, num_workers=1)
    # One of two messages: PyTorch notices by a signal, or as it waits.
    found["killed"] = [
        seen if isinstance(seen, str) else seen[0] for seen in outcome(make, fatal.first_came)
    ]
    stuck = Stuck()
    make = functools.partial(DataLoader, stuck, 1, num_workers=1, timeout=0.3)
    found["timeout"] = outcome(make, over=stuck.over)
    found["left"] = left()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(DataLoader(Stream(), 4))
        quiet = len(caught)
        loader: Any = DataLoader(Stream(), 1)
        len(loader)
        list(loader)
    found["warnings"] = [quiet, len(caught)]
    for _ in DataLoader(Mapped(), 4, num_workers=2):
        break
    found["left after break"] = left()
    found["descriptors"] = descriptors()
    for workers in (0, 2):
        found[f"stateful {workers}"] = [resumed(workers, taken) for taken in (0, 1, 3, 6)]
    loader = DataLoader(Mapped(), 4)
    found["pickled"] = type(pickle.loads(pickle.dumps(loader))).__name__
    found["signatures"] = [
        str(inspect.signature(DataLoader)),
        str(inspect.signature(DataLoader.__init__)),
        str(inspect.signature(DataLoader.__iter__)),
    ]
    found["guarded"] = []
    for name in ("dataset", "batch_size", "sampler"):
        try:
            setattr(loader, name, None)
        except ValueError as error:
            found["guarded"].append(str(error))
    found["names"] = [
        hasattr(loader, name) for name in ("_dataset_kind", "_index_sampler", "_iterator")
    ]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
