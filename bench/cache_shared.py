"""Four processes on one store: what they read from storage, and what memory they take together.

Four jobs train on the same folder, each with ``.cache()`` and a seed of its own: one begins, the
three others begin together when it has read its first epoch. Each counts the bytes that it read
from files itself (``rchar`` of the kernel); memory is the store's blocks on tmpfs, and what each
process has for itself beside (unique set size).

Command::

    python bench/cache_shared.py

Targets: the second to fourth read nothing from files that the first has stored; one store, not
four: at most 1.05 of the files.

Machine: two cores of an Intel Xeon at 2.5 GHz, 24 GiB, Linux 6.18, control groups v1; Python 3.11.7
(a plain loop iteration takes 290 ns there, several times more than usual).

Results (five rounds, 4,000 files, 410 MB)::

    [results/cache_shared.json]
            hits  misses  read, of the files  memory of its own, MiB
    ----------------------------------------------------------------
    job 1      0   4,000               1.000                      41
    job 2  4,000       0               0.000                      27
    job 3  4,000       0               0.000                      44
    job 4  4,000       0               0.000                      27

    the store takes 1.042 of the files, once
    [end]

Caveats: ``rchar`` counts what was asked of the kernel, from the page cache too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from harness import Report, parser, report
from throttled import write_files

import stoker
from stoker.cache import inventory

FILE_BYTES = 100 << 10
JOBS = 4


def job(folder: str, limit_bytes: int, seed: int) -> dict[str, Any]:
    """Run an epoch in this process."""
    warnings.simplefilter("ignore", stoker.CacheWarning)
    train: Any = stoker.from_folder(folder, seed=seed).shuffle().cache(limit_bytes)
    train = train.batch(64, collate=_size).workers(2)
    before = _read()
    total = sum(train)
    cache = train.stats().cache
    assert cache is not None
    memory = psutil.Process().memory_full_info()
    print(
        json.dumps(
            {
                "bytes": total,
                "read_bytes": _read() - before,
                "hits": cache.hits,
                "misses": cache.misses,
                "own_bytes": memory.uss,
            }
        ),
        flush=True,
    )
    sys.stdin.readline()  # stay, so that the store does
    return {}


def _size(examples: list[Any]) -> int:
    return sum(len(example.image) for example in examples)


def _read() -> int:
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found["rchar"])


def evaluate(made: Report) -> None:
    """Show each job's median round, and hold the others and the store against the targets."""
    rows = []
    total = made.rows[0]["bytes"]
    for seed in range(JOBS):
        mine = [row for row in made.rows if row["job"] == seed]
        middle = mine[len(mine) // 2]
        rows.append(
            (
                f"job {seed + 1}",
                f"{middle['hits']:,}",
                f"{middle['misses']:,}",
                f"{middle['read_bytes'] / total:.3f}",
                f"{middle['own_bytes'] / 2**20:.0f}",
            )
        )
    made.show(("", "hits", "misses", "read, of the files", "memory of its own, MiB"), rows)
    others = [row for row in made.rows if row["job"]]
    stores = max(row["store_bytes"] for row in made.rows) / total
    worst = max(row["read_bytes"] for row in others) / total
    made.say(f"the store takes {stores:.3f} of the files, once")
    made.expect("misses of the others", max(row["misses"] for row in others), 0, at_least=False)
    made.expect("bytes that the others read, of the files", worst, 0.01, at_least=False)
    made.expect("the store, of the files", stores, 1.05, at_least=False)


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.one:
        folder, limit, seed = arguments.one
        job(folder, int(limit), int(seed))
        return
    files = 200 if arguments.quick else 4000
    total = files * FILE_BYTES
    with report(__file__, arguments) as made, tempfile.TemporaryDirectory() as home:
        content = np.random.default_rng(0).bytes(FILE_BYTES + files)
        write_files(Path(home), (content[i : i + FILE_BYTES] for i in range(files)))
        for number in range(1 if arguments.quick else arguments.rounds):
            answers, store_bytes = _jobs(home, total)
            for seed, answer in enumerate(answers):
                made.add(round=number, job=seed, store_bytes=store_bytes, **answer)


def _jobs(home: str, total: int) -> tuple[list[dict[str, Any]], int]:
    running: list[subprocess.Popen[str]] = []
    try:
        answers: list[dict[str, Any]] = []
        for group in ([0], range(1, JOBS)):
            for seed in group:
                command = [
                    sys.executable,
                    __file__,
                    "--one",
                    home,
                    str(int(total * 1.2)),
                    str(seed),
                ]
                running.append(
                    subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                    )
                )
            for process in running[len(answers) :]:
                assert process.stdout is not None
                answers.append(json.loads(process.stdout.readline()))
        blocks = 0
        for folder in inventory.find_stores():
            summary = inventory.read_summary(folder)
            if summary is not None and home in summary.about.describes:
                blocks += sum(os.stat(file).st_blocks * 512 for file in Path(folder).iterdir())
        return answers, blocks
    finally:
        for process in running:
            process.communicate("\n")


if __name__ == "__main__":
    main()
