"""Times a peer in an environment of its own: orders on stdin, answers on stdout, JSON lines.

``environment.Peer`` is the other end. Nothing but NumPy is needed here.

``arrays.py`` starts ``python -P serve.py PEER.py ROWS BATCH WORKERS`` once (start-up is told
apart), and asks for some seconds in every round. A peer's file has ``PACKAGE`` (whose version is
told) and ``epochs(images, labels, batch, workers)``, which returns a function that starts an epoch:
an iterable of (images, labels).
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

Epochs = Callable[[], Iterable[Any]]


def arrays(rows: int) -> tuple[Any, Any]:
    """Return the same images ``uint8 [rows, 32, 32, 3]`` and labels ``int64 [rows]`` for all."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (rows, 32, 32, 3), dtype=np.uint8)
    return images, np.arange(rows, dtype=np.int64)


def timed(epoch: Epochs, least_s: float = 0.0) -> dict[str, float]:
    """Run whole epochs, one at least, until so many seconds are over.

    Returns ``epochs`` and ``examples``; ``total_s``, everything included; ``first_s``, until the
    first batches were there; ``steady_examples`` and ``steady_s``, from there to the last ones.
    """
    examples = first_examples = 0
    epochs = total_ns = first_ns = steady_ns = 0
    while not epochs or total_ns < 1e9 * least_s:
        began = time.perf_counter_ns()
        first = last = 0
        for batch in epoch():
            last = time.perf_counter_ns()
            size = len(next(iter(batch.values())) if isinstance(batch, dict) else batch[1])
            examples += size
            if not first:
                first = last
                first_examples += size
        total_ns += time.perf_counter_ns() - began
        first_ns += first - began
        steady_ns += last - first
        epochs += 1
    return {
        "epochs": epochs,
        "examples": examples,
        "total_s": total_ns / 1e9,
        "first_s": first_ns / 1e9,
        "steady_examples": examples - first_examples,
        "steady_s": steady_ns / 1e9,
    }


def whole_rates(samples: list[dict[str, float]]) -> list[float]:
    """Return examples/s of what ``timed`` found, everything included."""
    return [each["examples"] / each["total_s"] for each in samples]


def steady_rates(samples: list[dict[str, float]]) -> list[float]:
    """Return examples/s of what ``timed`` found, behind the first batches."""
    return [each["steady_examples"] / each["steady_s"] for each in samples]


def check(epoch: Epochs, rows: int) -> None:
    """See that every row comes once in an epoch, and that two epochs differ.

    Labels are copied: a peer may use its arrays again.
    """
    orders = [np.concatenate([np.asarray(batch[1]).flatten() for batch in epoch()]) for _ in "ab"]
    for order in orders:
        if not np.array_equal(np.sort(order), np.arange(rows)):
            raise AssertionError(f"an epoch of {len(order)} rows is not each of {rows} rows once")
    if np.array_equal(orders[0], orders[1]):
        raise AssertionError("two epochs came in one order: nothing is shuffled")


def serve(about: dict[str, Any], epoch: Epochs) -> None:
    """Tell what is known, then time epochs for as many seconds as each line of input says."""
    out = os.fdopen(os.dup(1), "w")
    sys.stdout = sys.stderr  # what peers print is no answer
    answer: dict[str, Any] = about
    while True:
        print(json.dumps(answer), file=out, flush=True)
        order = sys.stdin.readline().strip()
        if order in ("", "end"):
            return
        answer = timed(epoch, float(order))


def main() -> None:
    path, rows, batch, workers = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    began = time.perf_counter()
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    peer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peer)
    epoch = peer.epochs(*arrays(rows), batch, workers)
    check(epoch, rows)
    about = {"start_s": time.perf_counter() - began, "version": metadata.version(peer.PACKAGE)}
    serve(about, epoch)


if __name__ == "__main__":
    main()
