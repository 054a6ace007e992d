"""Times a peer on rows: windows of tokens, packed documents, tables; orders as in ``../serve.py``.

``python serve_rows.py PEER TASK VARIANT FOLDER``. A peer's file has a function for each task that
it does, ``TASK(folder, variant)``, which returns a function that starts an epoch, and
``write(task, folder)`` where it reads files of its own; writing is done before the clock starts.
Batches:

- ``windows``: inputs and targets ``int64 [64, 1024]``. The token at place p of ``tokens.bin``
  (``uint16``) is p // 1024, so that each window tells where it is from.
- ``packed``: tokens ``int64 [8, 2049]`` first, whatever else behind them. All tokens of document n
  are n + 1, and 0 is padding; ``Documents`` reads them.
- ``parquet`` and ``table``: dicts of columns ``[1024]``, one of which, ``n``, numbers the rows.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))  # behind packages of the same names as peers

from serve import serve

WORKERS = 2
BATCHES = {"windows": 64, "packed": 8, "parquet": 1_024, "table": 1_024}
LENGTH = 1_024
PACKED = 2_049


def tokens_of(folder: str) -> Any:
    """Return the file's tokens, mapped: ``uint16 [n]``."""
    return np.memmap(f"{folder}/tokens.bin", np.uint16, "r")


def windows_of(folder: str) -> Any:
    """Return all windows, mapped: ``uint16 [n, LENGTH + 1]``."""
    return np.lib.stride_tricks.sliding_window_view(tokens_of(folder), LENGTH + 1)[::LENGTH]


def columns_of(folder: str) -> dict[str, Any]:
    """Return the table's columns, in memory."""
    return {path.stem: np.load(path) for path in sorted(Path(folder).glob("*.npy"))}


class Documents:
    """Documents of 50 to 3,000 tokens in one file."""

    def __init__(self, folder: str) -> None:
        self._tokens = tokens_of(folder)
        self.ends = np.load(f"{folder}/ends.npy").tolist()

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Any:
        begin = self.ends[index - 1] if index else 0
        return self._tokens[begin : self.ends[index]].astype(np.int64)


def check(task: str, folder: str, batches: Iterator[Any]) -> None:
    """See that an epoch has everything once, shuffled, but for what no batch is filled with."""
    size = BATCHES[task]
    if task == "packed":
        each = [np.asarray(batch[0]) for batch in batches]
        assert {(a.shape, a.dtype) for a in each[:-1]} == {((size, PACKED), np.dtype(np.int64))}
        ends = np.load(f"{folder}/ends.npy")
        lengths = np.diff(ends, prepend=0)
        missing = lengths - np.bincount(np.concatenate([a.ravel() for a in each]))[1:]
        assert missing.min() >= 0, "a token came twice"
        lost, most, order = missing.sum(), 2 * WORKERS * size * PACKED, each[0][:, 0]
    else:
        found = []
        for batch in batches:
            if task == "windows":
                inputs, targets = (np.asarray(each) for each in batch)
                assert inputs.dtype == targets.dtype == np.int64
                assert inputs.shape[1:] == targets.shape[1:] == (LENGTH,)
                assert (inputs[:, 1:] == targets[:, :-1]).all()
                found.append(inputs[:, 0])
            else:
                found.append(np.asarray(batch["n"]))
        order = np.concatenate(found)
        rows = len(windows_of(folder)) if task == "windows" else len(columns_of(folder)["n"])
        assert len(np.unique(order)) == len(order), "a row came twice"
        lost, most = rows - len(order), 2 * WORKERS * size + rows // 500
    assert 0 <= lost <= most, f"{lost} rows or tokens did not come"
    assert (np.diff(order.astype(np.int64)) < 0).any(), "nothing is shuffled"


def written(name: str, task: str, folder: str) -> None:
    """Write what a peer reads, in a process of its own: the clock finds nothing imported."""

    def write() -> None:
        peer: Any = importlib.import_module(name)
        if hasattr(peer, "write"):
            peer.write(task, folder)

    child = multiprocessing.get_context("fork").Process(target=write)
    child.start()
    child.join()
    if child.exitcode:
        raise SystemExit(f"{name}: nothing could be written")


def main() -> None:
    name, task, variant, folder = sys.argv[1:5]
    written(name, task, folder)
    began = time.perf_counter()
    start: Callable[..., Any] = getattr(importlib.import_module(name), task)
    epoch = start(folder, variant)
    batches = iter(epoch())
    first = next(batches)
    first_s = time.perf_counter() - began

    def all_batches() -> Iterator[Any]:
        yield first
        yield from batches

    check(task, folder, all_batches())
    serve({"first_s": first_s}, epoch)


if __name__ == "__main__":
    main()
