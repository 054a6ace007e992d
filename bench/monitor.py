"""What ``stoker.monitor`` costs a batch.

A loop over a list of batches that are there, with and without ``stoker.monitor`` around it.

Command::

    python bench/monitor.py

Target: less than 1 us a batch.

Machine: two cores of an Intel Xeon at 2.5 GHz, 24 GiB, no GPU; Python 3.11.7 (a plain loop
iteration takes 290 ns there, so that Python's own share weighs several times more than
usual), NumPy 2.4.6, torch 2.13.0.

Results::

    [results/monitor.json]
    added by monitor  ns a batch
    ----------------------------
    789 .. 844               839
    [end]

Caveats: what it prints at the end of a pass is part of the time, spread over a million batches.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from harness import Report, interleaved, parser, report

import stoker


def ns_per_batch(batches: Iterable[Any], count: int) -> float:
    """Loop over them."""
    began = time.perf_counter_ns()
    for _ in batches:
        pass
    return (time.perf_counter_ns() - began) / count


def evaluate(found: Report) -> None:
    """Take the difference, round by round."""
    ns = {row["case"]: row["ns_per_batch"] for row in found.rows}
    pairs = zip(ns["monitored"], ns["plain"], strict=True)
    cost_ns = sorted(with_it - without for with_it, without in pairs)
    found.expect("ns a batch", median(cost_ns), 1000, at_least=False)
    spread = f"{cost_ns[0]:.0f} .. {cost_ns[-1]:.0f}"
    found.show(("added by monitor", "ns a batch"), [(spread, f"{median(cost_ns):.0f}")])


def main() -> None:
    arguments = parser(__doc__, evaluate).parse_args()
    count, rounds = (1_000, 1) if arguments.quick else (1_000_000, arguments.rounds)
    ready = [None] * count
    monitored = stoker.monitor(ready)
    # Runs before what stoker.monitor tells at the end: nobody asks for its verdict here.
    atexit.register(setattr, sys, "stderr", io.StringIO())
    cases: dict[str, Callable[[], float]] = {
        "plain": lambda: ns_per_batch(ready, count),
        "monitored": lambda: ns_per_batch(monitored, count),
    }
    with report(__file__, arguments) as found:
        with contextlib.redirect_stderr(io.StringIO()):  # its lines about each pass
            samples = interleaved(cases, rounds)
        for name, each in samples.items():
            found.add(case=name, ns_per_batch=each)


if __name__ == "__main__":
    main()
