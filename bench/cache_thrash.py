"""A dataset larger than memory: what the page cache reads of it, and what a cache that keeps.

Files of 100 KiB in a random order, anew every epoch, from a disk of a given speed, by a process
whose memory is limited to a share x of the files (and what it needs itself). Once all of that is
the page cache's; once stoker's, ``.cache(x * files)``. Both arms are the same pipeline otherwise,
and have the same total memory.

Command, as root::

    python bench/cache_thrash.py --plot docs/cache_thrash.png

Targets, from the second epoch on: bytes read from the device within 2 % of (1 - x) of the files;
epochs 1.25 times as fast at x = 0.35, 1.4 times at x = 0.65.

Machine: two cores of an Intel Xeon at 2.5 GHz, 24 GiB, Linux 6.18, control groups v1; Python 3.11.7
(a plain loop iteration takes 290 ns there, several times more than usual).

Results (12,000 files, 1.23 GB, 100 MB/s; three rounds of two epochs behind the first)::

    [results/cache_thrash.json]
                               of the files read  epoch, s  first, s        times as fast
    -------------------------------------------------------------------------------------
    x = 0.35: page cache  87.3% (85.0% .. 89.2%)     10.74     12.23
    x = 0.35: stoker      65.4% (65.4% .. 65.4%)      8.05     12.25   1.34 (1.3 .. 1.36)
    x = 0.5: page cache   74.6% (69.5% .. 78.4%)      9.19     12.23
    x = 0.5: stoker       50.5% (50.5% .. 50.5%)      6.23     12.25  1.47 (1.36 .. 1.56)
    x = 0.65: page cache  56.1% (48.3% .. 61.9%)      6.90     12.23
    x = 0.65: stoker      35.7% (35.7% .. 35.7%)      4.41     12.25  1.56 (1.37 .. 1.72)
    [end]

Filling costs nothing here (first epochs), and every byte that is read has to be.

Caveats: four threads. With eight, on 2.46 GB at 200 MB/s, they compete for the interpreter: at
x = 0.65 the store was not always full after the first epoch (it was after the next), and epochs
took what processors could do, so that they were 1.09 times as fast; at x = 0.35 1.32 times.
The page cache's arm has what the process of the other needs (120 MiB), less its own. Control groups
of version 2 were not run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import throttled
from harness import Ratio, Report, parser, report
from throttled import read_bytes, write_files

import stoker

FILE_BYTES = 100 << 10
SHARES = (0.35, 0.5, 0.65)
OWN_BYTES = 120 << 20  # of the process itself, its threads, and what it is about to hand out
PACKING = 1.03  # what a store takes for a byte
EPOCHS = 3
FASTER = {0.35: 1.25, 0.65: 1.4}


def epochs(folder: str, limit_bytes: int, device_stat: str, count: int) -> list[dict[str, float]]:
    """Run epochs in this process."""
    warnings.simplefilter("ignore", stoker.CacheWarning)
    train: Any = stoker.from_folder(folder, seed=0).shuffle()
    if limit_bytes:
        train = train.cache(limit_bytes)
    train = train.batch(64, collate=_size).workers(4)
    found = []
    for _ in range(count):
        before, began = read_bytes(device_stat), time.perf_counter()
        total = sum(train)
        elapsed_s = time.perf_counter() - began
        stats = train.stats().cache
        found.append(
            {
                "epoch_s": elapsed_s,
                "read_bytes": read_bytes(device_stat) - before,
                "bytes": total,
                "hits": stats.hits if stats else 0,
                "stored_bytes": stats.payload_bytes if stats else 0,
            }
        )
    return found


def _size(examples: list[Any]) -> int:
    return sum(len(example.image) for example in examples)


def one(
    disk: throttled.Disk, share: float, cached: bool, speed: int, total: int, count: int
) -> list[dict[str, float]]:
    """Run an arm in a process of its own."""
    store = int(share * total * PACKING)
    disk.forget()
    with throttled.limited(store + OWN_BYTES, disk, speed) as before:
        stat = disk.stat
        arguments = [str(disk.folder), str(store if cached else 0), stat, str(count)]
        done = subprocess.run(
            [*before, sys.executable, __file__, "--one", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the arm ended with {done.returncode}: {done.stderr[-2000:]}")
        found: list[dict[str, float]] = json.loads(done.stdout)
        return found


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options.add_argument("--files", type=int, default=12000, help="how many (default %(default)s)")
    options.add_argument(
        "--speed", type=int, default=100, help="of the disk, in MB/s (default %(default)s)"
    )
    options.add_argument("--plot", type=Path, help="where to draw the results")
    arguments = options.parse_args()
    if arguments.one:
        folder, limit, stat, count = arguments.one
        print(json.dumps(epochs(folder, int(limit), stat, int(count))))
        return
    missing = throttled.why_not()
    if missing:
        print(f"cannot be measured here: it {missing}\na quick run: no figures")
        return
    quick = arguments.quick
    files = 300 if quick else arguments.files
    total = files * FILE_BYTES
    speed = arguments.speed * 1_000_000
    with report(__file__, arguments) as made, throttled.disk(int(total * 1.3) + (64 << 20)) as disk:
        content = np.random.default_rng(0).bytes(FILE_BYTES + files)
        write_files(disk.folder, (content[i : i + FILE_BYTES] for i in range(files)))
        shares = SHARES[:1] if quick else SHARES
        for number in range(1 if quick else arguments.rounds):
            for share in shares:
                for cached in (False, True)[:: 1 if number % 2 else -1]:
                    for epoch, row in enumerate(
                        one(disk, share, cached, speed, total, 2 if quick else EPOCHS)
                    ):
                        made.add(round=number, share=share, cached=cached, epoch=epoch, **row)
        if arguments.plot:
            plotted(made, arguments.plot)


def evaluate(made: Report) -> None:
    """Hold the cache against the page cache, and what it reads against the fewest possible."""
    rows = []
    for share in dict.fromkeys(row["share"] for row in made.rows):
        arms = {
            cached: [r for r in made.rows if r["share"] == share and r["cached"] is cached]
            for cached in (False, True)
        }
        later = {c: [r for r in rows_ if r["epoch"]] for c, rows_ in arms.items()}
        reads = {c: [r["read_bytes"] / r["bytes"] for r in rows_] for c, rows_ in later.items()}
        times = {c: [r["epoch_s"] for r in rows_] for c, rows_ in later.items()}
        faster = Ratio.of(times[False], times[True])
        for cached in (False, True):
            first = [r["epoch_s"] for r in arms[cached] if not r["epoch"]]
            rows.append(
                (
                    f"x = {share}: {'stoker' if cached else 'page cache'}",
                    f"{statistics.median(reads[cached]):.1%} "
                    f"({min(reads[cached]):.1%} .. {max(reads[cached]):.1%})",
                    f"{statistics.median(times[cached]):.2f}",
                    f"{statistics.median(first):.2f}",
                    str(faster) if cached else "",
                )
            )
        excess = statistics.median(reads[True]) - (1 - share)
        made.expect(f"x = {share}: read beyond (1 - x)", abs(excess), 0.02, at_least=False)
        if share in FASTER:
            made.expect(f"x = {share}: times as fast", faster.median, FASTER[share])
    made.show(("", "of the files read", "epoch, s", "first, s", "times as fast"), rows)


def plotted(made: Report, path: Path) -> None:
    """Draw the share of the files that each epoch read."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    shares = sorted({row["share"] for row in made.rows})
    arms = {False: ("page cache", "#b44"), True: ("stoker, .cache()", "#27a")}
    for cached, (name, colour) in arms.items():
        points = [
            [
                r["read_bytes"] / r["bytes"]
                for r in made.rows
                if r["share"] == x and r["cached"] is cached and r["epoch"]
            ]
            for x in shares
        ]
        middle = [statistics.median(each) for each in points]
        axes.plot(shares, middle, "o-", color=colour, label=name)
        axes.fill_between(
            shares, [min(p) for p in points], [max(p) for p in points], color=colour, alpha=0.2
        )
    axes.plot(shares, [1 - x for x in shares], "k:", label="fewest possible, 1 - x")
    axes.set(
        xlabel="share of the files that memory holds, x",
        ylabel="share of the files read from the disk",
        title="An epoch in random order, from the second on",
        xticks=shares,
        ylim=(0, 1),
    )
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
