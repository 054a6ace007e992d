"""A billion examples: what do building a pipeline, the first batch and a state cost?

A dataset that says it has 10^9 examples (each an integer), shuffled, with and without sharding
(rank 3 of 8) and example echoing (e = 2, a pool of 16 batches); batches of 256. In a process of
its own each: from the chain to the first batch; 300 batches; ``state_dict``; the same chain built
again, ``load_state_dict`` and the next batch. Time, and growth of the resident memory.

Command::

    python bench/long_epochs.py

Targets: less than 50 ms and 50 MB for each.

Machine: two cores of an Intel Xeon at 2.5 GHz, 24 GiB, no GPU; Python 3.11.7 (a plain loop
iteration takes 290 ns there), NumPy 2.4.6.

Results::

    [results/long_epochs.json]
    pipeline      first batch      state_dict  load and next batch
    --------------------------------------------------------------
    plain     19.2 ms, 1.1 MB  0.2 ms, 2.6 MB      17.3 ms, 3.7 MB
    sharded   19.5 ms, 1.0 MB  0.2 ms, 2.6 MB      18.1 ms, 3.6 MB
    echoed    24.7 ms, 1.0 MB  8.4 ms, 5.1 MB      43.8 ms, 6.9 MB
    both      22.1 ms, 1.1 MB  8.4 ms, 5.0 MB      41.4 ms, 6.8 MB
    [end]

Caveats: a position in the middle is reached by iterating 300 batches; what lies before it plays no
part in the cost of a state.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import psutil
from harness import Report, parser, report

import stoker

CASES = ("plain", "sharded", "echoed", "both")
BATCH, BATCHES = 256, 300
MEASURED = ("first", "state", "resumed")


class Numbers:
    """A billion integers that take no memory."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> int:
        return index


def chain(case: str) -> Any:
    """Build one of the pipelines."""
    made = stoker.from_dataset(Numbers(), seed=0).shuffle()
    if case in ("sharded", "both"):
        made = made.shard(rank=3, world_size=8)
    if case in ("echoed", "both"):
        made = made.echo(2, pool=16 * BATCH)
    return made.batch(BATCH)


def measured(case: str, batches: int) -> dict[str, float]:
    """Run one case in this process."""
    list(stoker.from_dataset(range(1000), seed=0).shuffle().echo(2).batch(BATCH))  # late imports
    process, found = psutil.Process(), {}
    before = process.memory_info().rss

    def note(name: str, began: float) -> None:
        found[f"{name}_ms"] = 1e3 * (time.perf_counter() - began)
        found[f"{name}_mb"] = (process.memory_info().rss - before) / 1e6

    began = time.perf_counter()
    train = chain(case)
    iterator = iter(train)
    next(iterator)
    note("first", began)
    for _ in range(batches):
        next(iterator)
    began = time.perf_counter()
    state = train.state_dict()
    note("state", began)
    expected = next(iterator)
    iterator.close()
    began = time.perf_counter()
    again = chain(case)
    again.load_state_dict(state)
    iterator = iter(again)
    resumed = next(iterator)
    note("resumed", began)
    iterator.close()
    if (resumed != expected).any():
        raise AssertionError("the resumed run went on with another batch")
    return found


def evaluate(found: Report) -> None:
    """Take medians."""
    lines = []
    for row in found.rows:
        line = [row["case"]]
        for name in MEASURED:
            ms = statistics.median(each[f"{name}_ms"] for each in row["samples"])
            mb = statistics.median(each[f"{name}_mb"] for each in row["samples"])
            line.append(f"{ms:.1f} ms, {mb:.1f} MB")
            found.expect(f"{row['case']}, {name}: ms", ms, 50, at_least=False)
            found.expect(f"{row['case']}, {name}: MB", mb, 50, at_least=False)
        lines.append(line)
    found.show(("pipeline", "first batch", "state_dict", "load and next batch"), lines)


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--one", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.one:
        print(json.dumps(measured(arguments.one, 3 if arguments.quick else BATCHES)))
        return
    rounds = 1 if arguments.quick else arguments.rounds
    with report(__file__, arguments) as found:
        for case in CASES:
            command = [sys.executable, __file__, "--one", case]
            command += ["--quick"] if arguments.quick else []
            each = []
            for _ in range(rounds):
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                each.append(json.loads(done.stdout))
            found.add(case=case, samples=each)


if __name__ == "__main__":
    main()
