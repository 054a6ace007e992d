"""How much do slow examples hold up, and what does it cost to repeat a run in which they did not?

1,600 examples that sleep, 4 ms in the mean, in batches of 16, shuffled, from eight workers; a step
of the consumer takes 8 ms, as long as eight workers need for a batch. Times of the shapes that the
paper of MinatoLoader (EuroSys '26) has: all equal; log-normal (sigma 1); one in five ten times as
long as the others; one example that takes 400 ms.

stoker in order, with ``late=2``, and with ``late=2`` that repeats a record of another run; torch's
``DataLoader`` in order and with ``in_order=False``, with eight worker processes, which stay for all
epochs. stoker's workers are threads. Wall time of an epoch, in turns.

Command::

    python bench/slow_examples.py

Targets: ``late=2`` at 0.9 or more of the speed of unordered delivery, for each shape.

Machine: two cores of an AMD EPYC, 24 GiB; Python 3.11.7, torch 2.13.0. Other work ran beside it.

Results::

    [results/slow_examples.json]
    times                                      epoch, s  speed over in_order=False
    ------------------------------------------------------------------------------
    equal                    stoker, in order      0.98       1.18 (0.979 .. 1.45)
    equal                      stoker, late=2      0.89        1.35 (1.09 .. 1.38)
    equal            stoker, late=2, replayed      1.11       0.87 (0.716 .. 1.31)
    equal                DataLoader, in order      1.13       1.08 (0.803 .. 1.25)
    equal          DataLoader, in_order=False      1.20                 1 (1 .. 1)
    log-normal               stoker, in order      1.07            1.13 (1 .. 1.4)
    log-normal                 stoker, late=2      0.98        1.25 (1.01 .. 1.44)
    log-normal       stoker, late=2, replayed      0.95        1.15 (1.02 .. 1.68)
    log-normal           DataLoader, in order      1.11       1.01 (0.791 .. 1.42)
    log-normal     DataLoader, in_order=False      1.17                 1 (1 .. 1)
    one in five              stoker, in order      0.99       1.14 (0.976 .. 2.01)
    one in five                stoker, late=2      0.90         1.16 (1.09 .. 2.7)
    one in five      stoker, late=2, replayed      0.94         1.1 (1.08 .. 2.43)
    one in five          DataLoader, in order      1.46      0.711 (0.568 .. 1.59)
    one in five    DataLoader, in_order=False      1.04                 1 (1 .. 1)
    one of 400 ms            stoker, in order      1.57      0.78 (0.714 .. 0.983)
    one of 400 ms              stoker, late=2      1.32      0.926 (0.873 .. 1.05)
    one of 400 ms    stoker, late=2, replayed      1.27      0.939 (0.608 .. 1.09)
    one of 400 ms        DataLoader, in order      1.52     0.838 (0.761 .. 0.912)
    one of 400 ms  DataLoader, in_order=False      1.23                 1 (1 .. 1)
    [end]

Caveats: it sleeps, so that a processor is never short. ``DataLoader`` hands out whole batches out
of order, each made by one worker. A replay waits for the examples that the recorded run had, and
the times are the same in it, so it can be as fast; where other examples are slow it is slower.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
from harness import Ratio, Report, interleaved, parser, report

import stoker

MEAN_S, STEP_S = 0.004, 0.008
COUNT, GROUP, WORKERS = 1_600, 16, 8
IN_ORDER, LATE, REPLAYED = "stoker, in order", "stoker, late=2", "stoker, late=2, replayed"
TORCH, UNORDERED = "DataLoader, in order", "DataLoader, in_order=False"


def times_s(shape: str, count: int) -> np.ndarray:
    """Return how long each example takes, float64 [count]."""
    rng = np.random.default_rng(0)
    match shape:
        case "equal":
            return np.full(count, MEAN_S)
        case "log-normal":
            return MEAN_S * rng.lognormal(-0.5, 1.0, count)
        case "one in five":
            return np.where(rng.random(count) < 0.2, 10, 1) * MEAN_S / 2.8
        case _:
            found = np.full(count, MEAN_S)
            found[count // 2] = 100 * MEAN_S
            return found


SHAPES = ("equal", "log-normal", "one in five", "one of 400 ms")


class Unequal:
    """Examples that take their time."""

    def __init__(self, seconds: np.ndarray) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return len(self._seconds)

    def __getitem__(self, index: int) -> np.ndarray:
        time.sleep(self._seconds[index])
        return np.full(8, index)


def epoch_s(batches: Iterable[object]) -> float:
    """Time an epoch with steps."""
    began = time.perf_counter()
    for _ in batches:
        time.sleep(STEP_S)
    return time.perf_counter() - began


def evaluate(found: Report) -> None:
    """Show times, and hold late delivery against unordered delivery."""
    cases: dict[tuple[str, str], list[float]] = {
        (row["shape"], row["case"]): row["epoch_s"] for row in found.rows
    }
    lines = []
    for (shape, name), each in cases.items():
        speed = Ratio.of(cases[shape, UNORDERED], each)
        lines.append((shape, name, f"{np.median(each):.2f}", speed))
    found.show(("times", "", "epoch, s", "speed over in_order=False"), lines)
    for shape in SHAPES:
        ratio = Ratio.of(cases[shape, UNORDERED], cases[shape, LATE]).median
        found.expect(f"{shape}: speed of late=2 over in_order=False", ratio, 0.9)


def main() -> None:
    arguments = parser(__doc__, evaluate).parse_args()
    from torch.utils.data import DataLoader

    warnings.filterwarnings("ignore", message="This DataLoader will create 8 worker")
    with report(__file__, arguments) as found:
        for shape in SHAPES:
            rows: Any = Unequal(times_s(shape, 160 if arguments.quick else COUNT))

            def made(late: int = 0, replay: Any = None, rows: Any = rows) -> stoker.Pipeline:
                data = stoker.from_dataset(rows, seed=0).shuffle()
                return data.batch(GROUP, late=late, replay=replay).workers(WORKERS)

            first = made(2)
            epoch_s(first)
            record = first.record()
            loader = partial(
                DataLoader,
                rows,
                batch_size=GROUP,
                shuffle=True,
                num_workers=WORKERS,
                persistent_workers=True,
            )
            in_order, unordered = loader(), loader(in_order=False)
            cases: dict[str, Callable[[], float]] = {
                IN_ORDER: lambda: epoch_s(made()),
                LATE: lambda: epoch_s(made(2)),
                REPLAYED: lambda: epoch_s(made(2, record)),  # noqa: B023
                TORCH: partial(epoch_s, in_order),
                UNORDERED: partial(epoch_s, unordered),
            }
            rounds = 1 if arguments.quick else arguments.rounds
            for case, each in interleaved(cases, rounds).items():
                found.add(shape=shape, case=case, epoch_s=each)


if __name__ == "__main__":
    main()
