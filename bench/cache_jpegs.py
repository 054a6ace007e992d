"""A real pipeline on a slow disk: JPEGs read, decoded, cropped; page cache, stoker, and DALI.

Photographs in class folders, from a disk of a given speed, by a process of limited memory: that of
stoker's process with a store of x of the files. Three arms, all with the same memory: stoker's
pipeline without a cache; with ``.cache()`` of raw bytes; and DALI on the CPU
(``device_id=None``), if ``.peers/dali`` is there.

Command, as root::

    python bench/arrays.py --install dali       # makes .peers/dali; once
    python bench/cache_jpegs.py --jpegs imagenet-sample.tar

Target: fewer bytes read and shorter epochs than each of the others, from the second epoch on.

Machine: two cores of an Intel Xeon at 2.5 GHz, 24 GiB, Linux 6.18, control groups v1; Python 3.11.7
(a plain loop iteration takes 290 ns there, several times more than usual).

Results (3,600 files of 500 photographs; 15 MB/s; x = 0.35; one round, five epochs behind the first;
DALI 2.4.0)::

    [results/cache_jpegs.json]
                        MB read  epoch, s  first, s   .cache() is faster
    --------------------------------------------------------------------
    stoker, page cache      309      20.5      26.6  1.19 (1.15 .. 1.25)
    stoker, .cache()        258      17.2      26.6
    DALI, page cache        372      24.8      26.8  1.44 (1.44 .. 1.52)
    [end]

All have the memory of the store and 240 MiB; what of that a process does not need for itself is
left for its pages, which is why stoker's without a cache reads less here than in cache_thrash.py.

Caveats: DALI has no cache of its own here: its decoder's cache is in GPU memory. Photographs are
repeated; the page cache does not know that files are alike.
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
from gil import jpegs
from harness import Ratio, Report, parser, report
from peers import environment
from throttled import read_bytes, write_files

import stoker

SHARE = 0.35
OWN_BYTES = 240 << 20
CROP = 224
BATCH = 32
EPOCHS = 6


def cropped(image: Any, rng: np.random.Generator) -> Any:
    """Cut a square out of an image, padded where it is smaller."""
    high, wide = image.shape[:2]
    if min(high, wide) < CROP:
        pad = ((0, max(0, CROP - high)), (0, max(0, CROP - wide)), (0, 0))
        image = np.pad(image, pad)
        high, wide = image.shape[:2]
    top, left = rng.integers(high - CROP + 1), rng.integers(wide - CROP + 1)
    return image[top : top + CROP, left : left + CROP]


def epochs(folder: str, limit_bytes: int, device_stat: str, count: int) -> list[dict[str, float]]:
    """Run epochs of stoker in this process."""
    warnings.simplefilter("ignore", stoker.CacheWarning)
    train: Any = stoker.from_folder(folder, seed=0).shuffle()
    if limit_bytes:
        train = train.cache(limit_bytes)
    train = train.map(stoker.images.decode, on="image").random_map(cropped, on="image")
    train = train.batch(BATCH).workers(4)
    found = []
    for _ in range(count):
        before, began = read_bytes(device_stat), time.perf_counter()
        for batch in train:
            assert batch.image.shape[1:] == (CROP, CROP, 3)
        elapsed_s = time.perf_counter() - began
        found.append({"epoch_s": elapsed_s, "read_bytes": read_bytes(device_stat) - before})
    return found


def evaluate(made: Report) -> None:
    """Hold the cache against the others, from the second epoch on."""
    rows = []
    names = list(dict.fromkeys(row["arm"] for row in made.rows))
    later = {n: [r for r in made.rows if r["arm"] == n and r["epoch"]] for n in names}
    best = later["stoker, .cache()"]
    for name, found in later.items():
        first = [r["epoch_s"] for r in made.rows if r["arm"] == name and not r["epoch"]]
        faster = Ratio.of([r["epoch_s"] for r in found], [r["epoch_s"] for r in best])
        rows.append(
            (
                name,
                f"{statistics.median(r['read_bytes'] for r in found) / 1e6:.0f}",
                f"{statistics.median(r['epoch_s'] for r in found):.1f}",
                f"{statistics.median(first):.1f}",
                str(faster) if found is not best else "",
            )
        )
        if found is not best:
            made.expect(f".cache(), times as fast as {name}", faster.median, 1.0)
    made.show(("", "MB read", "epoch, s", "first, s", ".cache() is faster"), rows)


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options.add_argument("--jpegs", help="a folder or a tar of JPEGs; made without")
    options.add_argument("--files", type=int, default=3600, help="how many (default %(default)s)")
    options.add_argument(
        "--speed", type=int, default=15, help="of the disk, in MB/s (default %(default)s)"
    )
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
    photographs = jpegs(arguments.jpegs, 40 if quick else 500)
    files = 80 if quick else arguments.files
    count = 2 if quick else EPOCHS
    total = sum(len(photographs[i % len(photographs)]) for i in range(files))
    store = int(total * SHARE * 1.03)
    speed = (100 if quick else arguments.speed) * 1_000_000
    with report(__file__, arguments) as made, throttled.disk(int(total * 1.4) + (64 << 20)) as disk:
        write_files(disk.folder, (photographs[i % len(photographs)] for i in range(files)))
        stat = disk.stat
        own = [sys.executable, __file__, "--one", str(disk.folder)]
        arms = {
            "stoker, page cache": [*own, "0", stat, str(count)],
            "stoker, .cache()": [*own, str(store), stat, str(count)],
        }
        if environment.python("dali").exists() and not quick:
            script = Path(__file__).parent / "peers" / "dali_jpegs.py"
            given = [str(disk.folder), stat, *(str(n) for n in (count, CROP, BATCH, 2))]
            arms["DALI, page cache"] = [str(environment.python("dali")), "-P", str(script), *given]
        names = list(arms)
        for number in range(1 if quick else arguments.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                disk.forget()
                with throttled.limited(store + OWN_BYTES, disk, speed) as before:
                    done = subprocess.run(
                        [*before, *arms[name]], capture_output=True, text=True, check=False
                    )
                if done.returncode:
                    raise RuntimeError(
                        f"{name} ended with {done.returncode}: {done.stderr[-2000:]}"
                    )
                answer = json.loads(done.stdout.strip().splitlines()[-1])
                for epoch, row in enumerate(answer):
                    made.add(round=number, arm=name, epoch=epoch, **row)


if __name__ == "__main__":
    main()
