"""Time to the first batch: does echoing delay it?

A new pipeline each time (so that nothing is known about its speed), from ``iter()`` to the first
batch, with example echoing, with batch echoing and without; from a source that sleeps and from
one that decodes JPEGs.

Command::

    python bench/startup.py

Target: with echoing at most 1.1 times as long as without.

Machine: two cores of an Intel Xeon at 2.5 GHz, 24 GiB, no GPU; Python 3.11.7 (a plain loop
iteration takes 290 ns there, so that Python's own share weighs several times more than
usual), NumPy 2.4.6, torch 2.13.0.

Results::

    [results/startup.json]
    first batch              ms           it / no echo
    --------------------------------------------------
    sleeps, no echo        42.0             1 (1 .. 1)
    sleeps, example echo   42.5  0.995 (0.952 .. 1.05)
    sleeps, batch echo     42.9   1.02 (0.941 .. 1.05)
    decodes, no echo       60.1             1 (1 .. 1)
    decodes, example echo  59.6   1.03 (0.869 .. 1.45)
    decodes, batch echo    80.0   1.28 (0.813 .. 1.67)
    [end]

The first use of an echoed batch is a copy; with 18 MB in new memory that takes 8 ms and more.

Caveats: threads are started in the measured time, processes are not used. Closing the iterator
is not part of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from harness import Ratio, Report, interleaved, parser, report
from inputs import made_jpegs

import stoker

BATCH = 32
TRIES = 15


def first_batch_s(make: Callable[[], Any]) -> float:
    """Time a new pipeline's first batch."""
    pipeline = make()
    began = time.perf_counter()
    with iter(pipeline) as batches:
        next(batches)
        return time.perf_counter() - began


def _slept(example: Any) -> Any:
    time.sleep(0.002)
    return example


def pipelines(examples: Sequence[Any], prepare: Callable[[Any], Any]) -> dict[str, Any]:
    """Return makers of the same pipeline with and without echoing."""
    plain = stoker.from_dataset(examples, seed=0).shuffle().map(prepare).workers(2)
    return {
        "no echo": lambda: plain.batch(BATCH),
        "example echo": lambda: plain.echo(4, pool=16 * BATCH).batch(BATCH),
        "batch echo": lambda: plain.batch(BATCH).echo(4, pool=16),
    }


def evaluate(found: Report) -> None:
    """Hold echoing against none."""
    seconds = {(row["source"], row["case"]): row["first_batch_s"] for row in found.rows}
    lines = []
    for (source, case), each in seconds.items():
        ratio = Ratio.of(each, seconds[source, "no echo"])
        lines.append((f"{source}, {case}", f"{1e3 * median(each):.1f}", ratio))
        if case != "no echo":
            what = f"{source}, {case}: time of no echo"
            found.expect(what, ratio.median, 1.1, at_least=False)
    found.show(("first batch", "ms", "it / no echo"), lines)


def main() -> None:
    arguments = parser(__doc__, evaluate).parse_args()
    rounds = 2 if arguments.quick else max(TRIES, arguments.rounds)
    rows = np.zeros((32, 32, 3), np.uint8)
    images = list(made_jpegs(32))
    sources = {
        "sleeps": pipelines([rows] * 1024, _slept),
        "decodes": pipelines(images * 32, stoker.images.decode),
    }
    with report(__file__, arguments) as found:
        for source, cases in sources.items():
            samples = interleaved({n: partial(first_batch_s, m) for n, m in cases.items()}, rounds)
            for name, each in samples.items():
                found.add(source=source, case=name, first_batch_s=each)


if __name__ == "__main__":
    main()
