"""Batches that cost less than a millisecond, beside a step: is it hidden what they cost?

Images of 8x8 and 32x32 in memory are turned upside down and made floats, 64 in a batch: a fifth to
a half of a millisecond. The loop does nothing else, sleeps as one does that waits for an
accelerator, or multiplies matrices on one core. stoker chooses the threads, at most two, and is
held against itself without threads.

Command::

    python bench/step.py

Targets: at least 0.95 of the rate without threads where the loop does nothing else, 1.0 of it
beside a step, 1.1 of it where it sleeps for a millisecond.

Machine: two cores of an AMD EPYC, 23 GiB, no GPU; Python 3.11.7, NumPy 2.4.6.

Results::

    [results/step.json]
    images          step    ms  without threads        stoker / without
    -------------------------------------------------------------------
    8 x 8           none  0.32             0.32  0.976 (0.953 .. 0.986)
    8 x 8    sleeps 1 ms  1.18             1.46     1.21 (1.13 .. 1.35)
    8 x 8    sleeps 5 ms  5.18             5.63     1.09 (1.07 .. 1.15)
    8 x 8       computes  0.80             0.95      1.2 (1.16 .. 1.22)
    32 x 32         none  0.43             0.43      0.989 (0.981 .. 1)
    32 x 32  sleeps 1 ms  1.14             1.60      1.4 (1.39 .. 1.44)
    32 x 32  sleeps 5 ms  5.18             5.69      1.1 (1.09 .. 1.14)
    32 x 32     computes  0.81             1.07     1.35 (1.29 .. 1.36)
    [end]

Caveats: a step that holds the GIL all the time, of Python alone, is slower beside threads, and
stoker does not always notice; it is not measured here. A loop that computes on both cores leaves
nothing to hide anything behind.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy

import numpy as np
from harness import Ratio, Report, interleaved, parser, report

import stoker

SIDES = (8, 32)
TARGETS = {"none": 0.95, "sleeps 1 ms": 1.1, "sleeps 5 ms": 1.0, "computes": 1.0}
MATRIX = np.ones((256, 256))


def steps() -> dict[str, Callable[[], Any]]:
    return {
        "none": lambda: None,
        "sleeps 1 ms": partial(time.sleep, 0.001),
        "sleeps 5 ms": partial(time.sleep, 0.005),
        "computes": lambda: MATRIX @ MATRIX,
    }


def turned(image: Any) -> Any:
    return image[::-1].astype(np.float32) / 255 - 0.5


def images(side: int, count: int) -> Any:
    pixels = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), np.uint8)
    return stoker.from_arrays(pixels, np.arange(count), seed=0).shuffle().map(turned, on=0)


def steps_per_s(train: Any, step: Callable[[], Any], least_s: float) -> float:
    """Return the rate of whole epochs."""
    began, done = time.perf_counter(), 0
    while not done or time.perf_counter() - began < least_s:
        for _ in train:
            step()
            done += 1
    return done / (time.perf_counter() - began)


def evaluate(found: Report) -> None:
    lines: list[Any] = []
    for row in found.rows:
        ratio = Ratio.of(row["stoker"], row["without"])
        each = [f"{1e3 / median(row[case]):.2f}" for case in ("stoker", "without")]
        lines.append((f"{row['side']} x {row['side']}", row["step"], *each, ratio))
        what = f"{row['side']} x {row['side']}, {row['step']}: steps/s of those without threads"
        found.expect(what, ratio.median, TARGETS[row["step"]])
    found.show(("images", "step", "ms", "without threads", "stoker / without"), lines)


def main() -> None:
    arguments = parser(__doc__, evaluate).parse_args()
    count, least_s, rounds = (128, 0.0, 1) if arguments.quick else (6_400, 1.5, arguments.rounds)
    with report(__file__, arguments) as found:
        for side in SIDES:
            for name, step in steps().items():
                examples = images(side, count)
                cases = {
                    "stoker": partial(steps_per_s, examples.batch(64), step, least_s),
                    "without": partial(steps_per_s, examples.batch(64).workers(0), step, least_s),
                }
                found.add(side=side, step=name, **interleaved(cases, rounds))


if __name__ == "__main__":
    main()
