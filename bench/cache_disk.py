"""A cache on a disk, with little memory: what is read, and does reading ahead in order help?

100 MB of examples of 25 KB in ``.cache(path=)`` on a disk of 500 MB/s, in a process that may use
160 MiB, so that the page cache keeps a part of them. Shuffled, batches of 32, two workers, no step.
In the first epoch they are stored; in the second LMDB finds them, and from then on the process
knows where they are: these epochs are measured. Three ways to read: as the kernel likes, which
reads 128 KB around each page that is missed; each record as a whole; and, as stoker does, also
ahead of its use, in the order of the epoch, when a worker's task is given out (NoPFS: Dryden et
al., SC 2021).

Command, as root::

    python bench/cache_disk.py

Targets: no more bytes than the examples have; reading ahead in order 1.05 times as fast as each
record as a whole.

Machine: two cores of an AMD EPYC, 24 GiB, Linux 6.18, control groups v1; Python 3.11.7.

Results::

    [results/cache_disk.json]
                         MB read  epoch, s  times as fast as each as a whole
    ------------------------------------------------------------------------
    as the kernel likes      777      1.44            0.145 (0.0229 .. 1.13)
    each as a whole           44      0.12                        1 (1 .. 1)
    ahead, in order           38      0.08              1.47 (0.282 .. 3.09)
    [end]

Caveats: a loop device, whose requests wait for a busy host; where its bytes per second are the
limit, reading ahead cannot help. Process workers do not read ahead.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
import throttled
from harness import Ratio, Report, parser, report
from throttled import read_bytes

import stoker

SIZE = 25_000
KERNEL, WHOLE, AHEAD = "as the kernel likes", "each as a whole", "ahead, in order"
ARMS = (KERNEL, WHOLE, AHEAD)
DATA_BYTES, MEMORY_BYTES, BYTES_PER_S = 100_000_000, 160 << 20, 500_000_000
EPOCHS, MEASURED = 5, 3


class Made:
    """Arrays of one size."""

    def __len__(self) -> int:
        return DATA_BYTES // SIZE

    def __getitem__(self, index: int) -> Any:
        return np.full(SIZE, index % 251, np.uint8)


def change(arm: str) -> None:
    """Read in another way than stoker does, in this process."""
    from stoker.cache.store import Store
    from stoker.stages.cache import CacheStage

    if arm != AHEAD:
        CacheStage.read_ahead = lambda *_: None  # type: ignore[method-assign]
    if arm == KERNEL:
        mmap.MADV_RANDOM = mmap.MADV_NORMAL  # type: ignore[misc]
        Store.ask_for = lambda *_: None  # type: ignore[method-assign]


def epochs(folder: str, stat: str, arm: str) -> list[dict[str, float]]:
    """Run epochs in this process."""
    change(arm)
    train: Any = stoker.from_dataset(Made(), seed=0).shuffle()
    train = train.cache(int(1.3 * DATA_BYTES), path=f"{folder}/store", keep=False)
    train = train.batch(32).workers(2)
    found = []
    for _ in range(EPOCHS):
        before, began = read_bytes(stat), time.perf_counter()
        for _ in train:
            pass
        seconds = time.perf_counter() - began
        found.append({"epoch_s": seconds, "read_bytes": read_bytes(stat) - before})
        os.sync()
    return found


def evaluate(made: Report) -> None:
    """Hold the ways to read against each other."""
    found = {arm: [r for r in made.rows if r["arm"] == arm] for arm in ARMS}
    read = {arm: statistics.median(r["read_bytes"] for r in each) for arm, each in found.items()}
    times = {arm: [r["epoch_s"] for r in each] for arm, each in found.items()}
    faster = {arm: Ratio.of(times[WHOLE], times[arm]) for arm in ARMS}
    rows = [
        (arm, f"{read[arm] / 1e6:.0f}", f"{statistics.median(times[arm]):.2f}", faster[arm])
        for arm in ARMS
    ]
    made.show(("", "MB read", "epoch, s", f"times as fast as {WHOLE}"), rows)
    made.expect("read, of all bytes", read[AHEAD] / DATA_BYTES, 1, at_least=False)
    made.expect("reading ahead in order, times as fast", faster[AHEAD].median, 1.05)


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.one:
        folder, stat, arm = arguments.one
        print(json.dumps(epochs(folder, stat, arm)))
        return
    missing = throttled.why_not()
    if missing:
        print(f"cannot be measured here: it {missing}\na quick run: no figures")
        return
    with report(__file__, arguments) as made, throttled.disk(1 << 28) as disk:
        for number in range(1 if arguments.quick else arguments.rounds):
            for arm in ARMS[number % 3 :] + ARMS[: number % 3]:
                own = [sys.executable, __file__, "--one", str(disk.folder), disk.stat, arm]
                with throttled.limited(MEMORY_BYTES, disk, BYTES_PER_S) as before:
                    done = subprocess.run(
                        [*before, *own], capture_output=True, text=True, check=False
                    )
                if done.returncode:
                    raise RuntimeError(f"{arm}: {done.stderr[-2000:]}")
                later = json.loads(done.stdout.splitlines()[-1])[-MEASURED:]
                for epoch, row in enumerate(later):
                    made.add(round=number, arm=arm, epoch=epoch, **row)


if __name__ == "__main__":
    main()
