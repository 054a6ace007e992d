"""What the probe of ``stoker analyze`` costs a script that it leaves alone, and ``stoker.monitor``.

Main process: a loop over a ``DataLoader`` without workers over a list, whose ``next()`` takes a few
microseconds; with the probe's hook, with ``stoker.monitor`` around it, or neither, epoch by epoch
in one process (two processes alike differ by as much as is sought here). Worker: a dataset that
computes for 1 ms an example, one worker, batches of one (so that the cost of a batch falls on one
example) and of 16: how long until an example comes, and the worker's own CPU time, with the probe,
without, and without once more.

Command::

    python bench/analyze_probe.py

Targets: under 1 us a batch in the main process, for both; under 1 % of a 1 ms example in a worker.

Machine: two cores of an Intel Xeon, 24 GiB, Linux 6.18; Python 3.11.7, PyTorch 2.13.0.

Results (five rounds)::

    [results/analyze_probe.json]
                                                                   median             range
    ---------------------------------------------------------------------------------------
    probed, ns a batch                                                907       703 .. 1067
    monitored, ns a batch                                             239        212 .. 374
    1 ms, batches of 1, probed: CPU of the worker, times as long   0.9934  0.9826 .. 1.0049
    1 ms, batches of 1, again: CPU of the worker, times as long    1.0016  0.9794 .. 1.0016
    1 ms, batches of 1, probed: until it comes, times as long      1.0113  1.0000 .. 1.0251
    1 ms, batches of 1, again: until it comes, times as long       0.9980  0.9697 .. 1.0040
    1 ms, batches of 16, probed: CPU of the worker, times as long  0.9977  0.9883 .. 1.0070
    1 ms, batches of 16, again: CPU of the worker, times as long   1.0024  0.9860 .. 1.0094
    1 ms, batches of 16, probed: until it comes, times as long     0.9992  0.9801 .. 1.0013
    1 ms, batches of 16, again: until it comes, times as long      1.0038  0.9811 .. 1.0071
    [end]

One target is missed by a tenth: batches of one example come 1.1 % later, the worker's own time is
what it was, and nothing of the probe runs in workers (they are looked at in drains alone). It is
the training process: what takes 1 us in a loop takes 27 us of its CPU time 2 ms after the batch
before, when other code fills the caches (517 us a batch without, 544 with the probe).

Caveats: on a machine whose speed changes the probe's share changes with it; in a quarter of an
hour when a loop of Python took 1.5 times as long, a batch cost 1.1 to 1.7 us. About half of it is a
function around a function and two readings of the clock. These figures, and the two before, were
taken by hand; they are not in the rows.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from harness import Ratio, Report, parser, report
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import dataloader as loading

import stoker

STARTUP = Path(stoker.__file__).parent / "analysis" / "startup"


class Busy(Dataset):
    """Computes for a millisecond of processor time."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> int:
        until = time.thread_time_ns() + 1_000_000
        while time.thread_time_ns() < until:
            pass
        return index


def main_ns(batches: int) -> dict[str, float]:
    """Return nanoseconds a batch of a loop that does nothing, of each arm, in turns."""
    iterator: Any = loading._BaseDataLoaderIter
    hooked = iterator.__next__
    plain = hooked.__wrapped__
    data: Any = [0] * batches
    loader = DataLoader(data, batch_size=None)
    arms: dict[str, tuple[Any, Any]] = {
        "plain": (plain, loader),
        "probed": (hooked, loader),
        "monitored": (plain, stoker.monitor(loader)),
    }
    best = dict.fromkeys(arms, float("inf"))
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the end
    for _ in range(5):  # with 200,000 batches all have room in the probe's rows
        for name, (step, iterated) in arms.items():
            iterator.__next__ = step
            began = time.perf_counter_ns()
            for _ in iterated:
                pass
            best[name] = min(best[name], (time.perf_counter_ns() - began) / batches)
    return best


def worker_s(examples: int, batch: int) -> tuple[float, float]:
    """Return the seconds of an example, start-up apart: as they come, and of its worker's CPU."""
    torch.set_num_threads(1)
    batches = iter(DataLoader(Busy(), batch, num_workers=1))
    for _ in range(4):
        next(batches)
    (worker,) = psutil.Process().children()
    began, cpu_began = time.perf_counter(), sum(worker.cpu_times()[:2])
    for _ in range(examples // batch):
        next(batches)
    count = examples // batch * batch
    spent = sum(worker.cpu_times()[:2]) - cpu_began
    return (time.perf_counter() - began) / count, spent / count


def one(what: str, count: int, probed: bool) -> Any:
    """Measure in a process of its own."""
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        if probed:
            environment |= {"PYTHONPATH": str(STARTUP), "STOKER_PROBE": folder}
        done = subprocess.run(
            [sys.executable, __file__, "--one", what, str(count)],
            check=True, capture_output=True, text=True, env=environment,
        )  # fmt: skip
        if probed and not list(Path(folder).glob("process-*.rows")):
            raise RuntimeError("the probe was not there")
    return json.loads(done.stdout)


def evaluate(made: Report) -> None:
    """Hold the probed and the monitored against those that are left alone, round by round."""
    shown = []
    for name in ("probed", "monitored"):
        added = [row[f"{name}_ns"] - row["plain_ns"] for row in made.rows]
        median = statistics.median(added)
        shown.append(
            (f"{name}, ns a batch", f"{median:.0f}", f"{min(added):.0f} .. {max(added):.0f}")
        )
        made.expect(f"{name}: ns added to a batch", median, 1000, at_least=False)
    for batch in (1, 16):
        for what, unit in (("CPU of the worker", "cpu_s"), ("until it comes", "s")):
            for name in ("probed", "again"):
                ratio = Ratio.of(
                    [row[f"{name}_{batch}_{unit}"] for row in made.rows],
                    [row[f"plain_{batch}_{unit}"] for row in made.rows],
                )
                title = f"1 ms, batches of {batch}, {name}: {what}, times as long"
                spread = f"{ratio.low:.4f} .. {ratio.high:.4f}"
                shown.append((title, f"{ratio.median:.4f}", spread))
                if name == "probed":
                    made.expect(title, ratio.median, 1.01, at_least=False)
    made.show(("", "median", "range"), shown)


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--one", nargs=2)
    arguments = options.parse_args()
    if arguments.one:
        what, count = arguments.one[0], int(arguments.one[1])
        if what == "main":
            print(json.dumps(main_ns(count)))
        else:
            print(json.dumps(worker_s(count, int(what))))
        return
    quick = arguments.quick
    batches, examples = (2000, 64) if quick else (200_000, 4000)
    with report(__file__, arguments) as made:
        for number in range(1 if quick else arguments.rounds):
            workers: dict[str, float] = {}
            for batch in (1, 16):
                for name in ("plain", "probed", "again"):
                    wall_s, cpu_s = one(str(batch), examples, name == "probed")
                    workers |= {f"{name}_{batch}_s": wall_s, f"{name}_{batch}_cpu_s": cpu_s}
            made.add(
                round=number,
                **{f"{name}_ns": ns for name, ns in one("main", batches, True).items()},
                **workers,
            )


if __name__ == "__main__":
    main()
