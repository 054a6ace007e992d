"""Memory: does the process stay within the bound that the pipeline states?

JPEGs of 160x160 are decoded (75 KiB each); example echoing with a pool of 16 batches of 64, batch
echoing with a pool of 16 batches, and none; e = 4; threads, processes. Each in a fresh process,
whose resident memory before the pipeline was built is subtracted from its peak while an epoch
runs (looked at behind every batch).

Command::

    python bench/memory.py

Target: growth at most 1.1 of pool + windows + recycled arrays + one batch in use.

Machine: two cores of an Intel Xeon at 2.5 GHz, 24 GiB, no GPU; Python 3.11.7 (a plain loop
iteration takes 290 ns there, so that Python's own share weighs several times more than
usual), NumPy 2.4.6, torch 2.13.0.

Results::

    [results/memory.json]
    configuration          growth MiB  bound  pool  window  in front  growth / bound  worst
    ---------------------------------------------------------------------------------------
    no echo, thread                16     23     0      19         0            0.70   0.70
    example echo, thread          100    122    75      33         9            0.82   0.83
    batch echo, thread            102    127    75      38         9            0.80   0.81
    no echo, process               14     38     0      33         0            0.36   0.43
    example echo, process         138    216    75      97        39            0.64   0.66
    batch echo, process           100    155    75      52        23            0.65   0.67
    [end]

Caveats: pool and window as ``stats()`` states them, at their largest; the fresh items that may
wait in front of an example pool are at most the larger of 2 batches and 8 chunks a worker, here
taken from the engine. Worker processes are not counted, only the process that trains.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

import numpy as np
import psutil
from harness import Report, parser, report

import stoker

BATCH = 64
POOL_BATCHES = 16
SIDE = 160
KINDS = ("no echo", "example echo", "batch echo")


def _flipped(image: Any, rng: np.random.Generator) -> Any:
    return image[:, ::-1] if rng.random() < 0.5 else image


def pipeline(kind: str, workers: str, examples: int) -> Any:
    """Build one of the configurations."""
    from inputs import made_jpegs

    files = list(made_jpegs(32, (SIDE, SIDE)))
    made: Any = stoker.from_dataset(files * (examples // len(files)), seed=0).shuffle()
    made = made.map(stoker.images.decode).workers(2, kind=workers)
    if kind == "example echo":
        made = made.echo(4, pool=POOL_BATCHES * BATCH)
    made = made.random_map(_flipped).batch(BATCH)
    return made.echo(4, pool=POOL_BATCHES) if kind == "batch echo" else made


def growth(kind: str, workers: str, examples: int) -> dict[str, float]:
    """Run an epoch in this process; return bytes."""
    stoker.images.decode(_tiny())  # what is imported late is not the pipeline's
    train = pipeline(kind, workers, examples)
    process = psutil.Process()
    before = process.memory_info().rss
    peak = window = pool = upstream = batch_bytes = 0
    for batch in train:
        peak = max(peak, process.memory_info().rss)
        stats = train.stats()
        window, pool = max(window, stats.window_bytes), max(pool, stats.pool_bytes)
        batch_bytes = max(batch_bytes, batch.nbytes)
        upstream = max(upstream, _upstream_bytes(train, batch_bytes))
    bound = pool + window + upstream + batch_bytes
    return {
        "growth_bytes": peak - before,
        "bound_bytes": bound,
        "pool_bytes": pool,
        "window_bytes": window,
        "upstream_bytes": upstream,
    }


def _upstream_bytes(train: Any, batch_bytes: int) -> int:
    """Return the bytes of full windows in front of pools, which ``stats()`` does not tell."""
    run = train._cursor._run
    waiting = 0
    for stream in run._segments[:-1]:
        each = batch_bytes if stream.segment.batch is not None else batch_bytes // BATCH
        waiting += stream.ahead() * each
    return waiting


def _tiny() -> bytes:
    from inputs import made_jpegs

    return next(made_jpegs(1, (8, 8)))


def evaluate(found: Report) -> None:
    """Hold growth against its bound."""
    lines = []
    for row in found.rows:
        name, each = f"{row['echo']}, {row['workers']}", row["samples"]
        shares = [e["growth_bytes"] / e["bound_bytes"] for e in each]
        share = statistics.median(shares)
        mib = [f"{size / 2**20:.0f}" for size in each[0].values()]
        lines.append((name, *mib, f"{share:.2f}", f"{max(shares):.2f}"))
        found.expect(f"{name}: growth of the bound", share, 1.1, at_least=False)
    parts = ("growth MiB", "bound", "pool", "window", "in front")
    found.show(("configuration", *parts, "growth / bound", "worst"), lines)


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.one:
        kind, workers, examples = arguments.one
        print(json.dumps(growth(kind, workers, int(examples))))
        return
    examples = BATCH * (4 if arguments.quick else 3 * POOL_BATCHES)
    rounds = 1 if arguments.quick else arguments.rounds
    with report(__file__, arguments) as found:
        for workers in ("thread", "process"):
            for kind in KINDS:
                each = []
                for _ in range(rounds):
                    command = [sys.executable, __file__, "--one", kind, workers, str(examples)]
                    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                    each.append(json.loads(done.stdout))
                found.add(echo=kind, workers=workers, samples=each)


if __name__ == "__main__":
    main()
