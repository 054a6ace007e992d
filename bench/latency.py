"""How many threads take part where examples are waited for, and what does a user have to set?

1,200 examples, each of which takes 4 ms that no processor is needed for, as a read over the network
or from a file system of many hosts does. Batches of 16, shuffled. stoker with its defaults in the
first epoch, in which it finds out how many threads help, and in a later one; with the number named;
torch's ``DataLoader`` with as many workers as there are cores, and with 16.

Wall time of an epoch, in turns. DataLoader's workers are started anew for each, as by default.

Command::

    python bench/latency.py

Targets: a later epoch by the defaults within 1.3 of the best number that was named.

Machine: two cores of an AMD EPYC, 24 GiB; Python 3.11.7, torch 2.13.0. Other work ran beside it.

Results::

    [results/latency.json]
    an epoch of 1,200          s    over the best named
    ---------------------------------------------------
    stoker, first epoch     0.31    1.59 (1.26 .. 1.83)
    stoker, later epoch     0.17  0.887 (0.562 .. 1.27)
    workers(2)              2.64    13.3 (12.2 .. 15.7)
    workers(16)             0.36    1.91 (1.54 .. 2.53)
    workers(32)             0.19             1 (1 .. 1)
    workers(64)             0.19  0.966 (0.617 .. 2.16)
    DataLoader, 2 workers   2.61    13.5 (12.4 .. 15.2)
    DataLoader, 16 workers  0.95    5.05 (3.52 .. 10.2)
    [end]

Caveats: it sleeps, so that storage serves any number at once. Where more threads do not help, as on
one disk, no more of them take part (``tests/engine/test_autotune.py`` has the cases).
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

WAIT_S = 0.004
FIRST, LATER = "stoker, first epoch", "stoker, later epoch"
NAMED = (2, 16, 32, 64)


class Awaited:
    """Examples that take their time."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> np.ndarray:
        time.sleep(WAIT_S)
        return np.full(8, index)


def epoch_s(batches: Iterable[object]) -> float:
    """Time an epoch."""
    began = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - began


def evaluate(found: Report) -> None:
    """Show times, and hold the default against the best."""
    cases = {row["case"]: row["epoch_s"] for row in found.rows}
    best = min((f"workers({n})" for n in NAMED), key=lambda name: float(np.median(cases[name])))
    lines = [
        (name, f"{np.median(each):.2f}", Ratio.of(each, cases[best]))
        for name, each in cases.items()
    ]
    found.show(("an epoch of 1,200", "s", "over the best named"), lines)
    ratio = Ratio.of(cases[LATER], cases[best]).median
    found.expect("a later epoch, over the best number named", ratio, 1.3, at_least=False)


def main() -> None:
    arguments = parser(__doc__, evaluate).parse_args()
    from torch.utils.data import DataLoader

    warnings.filterwarnings("ignore", message="This DataLoader will create 16 worker")
    dataset = Awaited(64 if arguments.quick else 1_200)

    def made() -> stoker.Pipeline:
        return stoker.from_dataset(dataset, seed=0).shuffle().batch(16)

    later = made()
    for _ in range(4):
        epoch_s(later)
    rows: Any = dataset
    loader = partial(DataLoader, rows, batch_size=16, shuffle=True)
    cases: dict[str, Callable[[], float]] = {
        FIRST: lambda: epoch_s(made()),
        LATER: lambda: epoch_s(later),
        **{f"workers({n})": partial(epoch_s, made().workers(n)) for n in NAMED},
        "DataLoader, 2 workers": lambda: epoch_s(loader(num_workers=2)),
        "DataLoader, 16 workers": lambda: epoch_s(loader(num_workers=16)),
    }
    with report(__file__, arguments) as found:
        for case, each in interleaved(cases, 1 if arguments.quick else arguments.rounds).items():
            found.add(case=case, epoch_s=each)


if __name__ == "__main__":
    main()
