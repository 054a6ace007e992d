"""What ``stoker.watch`` costs a run, in processor time.

Two parts. A batch: a loader without workers over numbers, with and without the hook on its
iterators, by turns. The thread: a loop that waits for a loader with eight workers, so that the
thread looks at all of them four times a second and reads all counters every ten seconds.

Command::

    python bench/watch.py

Target: less than 1 % of a processor for a loop of 10 ms a batch, both parts together.

Machine: two cores of an AMD EPYC, 24 GiB, no GPU; Python 3.11.7, torch 2.13.0. Nothing
ran beside it.

Results::

    [results/watch.json]
                                            added  of a processor at 10 ms a batch
    ------------------------------------------------------------------------------
    each batch             1153 ns (1008 .. 1188)                           0.012%
    the thread, 8 workers        (0.19% .. 0.23%)                            0.20%
    together                                                                 0.21%
    [end]

Caveats: a loop of 100 us a batch pays the same for a batch, which is then more of it. The thread's
share is bounded by its own pauses (0.5 %), however many workers and processes there are.
"""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from statistics import median
from typing import Any

import torch
from harness import Report, interleaved, parser, report
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

import stoker
from stoker.analysis.watching.watch import RunWatch

STEP_S = 0.010
WORKERS = 8


class Slow(torch.utils.data.Dataset[int]):
    """Examples for which the loop always waits."""

    def __getitem__(self, index: int) -> int:
        time.sleep(0.02)
        return index

    def __len__(self) -> int:
        return 1_000_000


def hook(is_on: bool, plain: Any, hooked: Any) -> None:
    """Put PyTorch's own ``__next__`` in place, or the one with the hook."""
    _BaseDataLoaderIter.__next__ = hooked if is_on else plain  # type: ignore[method-assign]


def ns_per_batch(count: int) -> float:
    """Loop over a loader; return the processor time of this thread for a batch."""
    loader: DataLoader[int] = DataLoader(range(count), batch_size=None)  # type: ignore[arg-type]
    batches = iter(loader)
    began_ns = time.thread_time_ns()
    for _ in batches:
        pass
    return (time.thread_time_ns() - began_ns) / count


def thread_share(watch: RunWatch, seconds: float) -> float:
    """Wait for workers for some seconds; return the share of a processor that the thread took."""
    ident = watch._thread.ident
    assert ident is not None
    clock = time.pthread_getcpuclockid(ident)
    began_s, began_ns = time.monotonic(), time.clock_gettime_ns(clock)
    for _ in DataLoader(Slow(), 8, num_workers=WORKERS):
        if time.monotonic() - began_s > seconds:
            break
    taken_ns = time.clock_gettime_ns(clock) - began_ns
    return taken_ns / 1e9 / (time.monotonic() - began_s)


def evaluate(found: Report) -> None:
    """Add both parts up for a loop of 10 ms a batch."""
    ns = {row["case"]: row["ns_per_batch"] for row in found.having("ns_per_batch")}
    pairs = zip(ns["watched"], ns["plain"], strict=True)
    costs_ns = sorted(watched - plain for watched, plain in pairs)
    (shares,) = (row["shares"] for row in found.having("shares"))
    batch, thread = median(costs_ns) / 1e9 / STEP_S, median(shares)
    rows = [
        (
            "each batch",
            f"{median(costs_ns):.0f} ns ({costs_ns[0]:.0f} .. {costs_ns[-1]:.0f})",
            f"{batch:.3%}",
        ),
        ("the thread, 8 workers", f"({min(shares):.2%} .. {max(shares):.2%})", f"{thread:.2%}"),
        ("together", "", f"{batch + thread:.2%}"),
    ]
    found.show(("", "added", "of a processor at 10 ms a batch"), rows)
    found.expect("share of a processor", batch + thread, 0.01, at_least=False)


def main() -> None:
    arguments = parser(__doc__, evaluate).parse_args()
    count, seconds, rounds = (500, 0.5, 1) if arguments.quick else (50_000, 21.0, arguments.rounds)
    plain = _BaseDataLoaderIter.__next__
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # there are two cores
    silent = contextlib.redirect_stderr(io.StringIO())  # what the watch says
    with report(__file__, arguments) as found, silent:
        watch = stoker.watch()
        ns_per_batch(1)  # the hook is put on iterators with the first
        hooked = _BaseDataLoaderIter.__next__

        def case(is_on: bool) -> float:
            hook(is_on, plain, hooked)
            return ns_per_batch(count)

        cases = {"plain": lambda: case(False), "watched": lambda: case(True)}
        for name, each in interleaved(cases, rounds).items():
            found.add(case=name, ns_per_batch=each)
        hook(True, plain, hooked)
        found.add(workers=WORKERS, shares=[thread_share(watch, seconds) for _ in range(rounds)])
        watch.close()


if __name__ == "__main__":
    main()
