"""What the probe of ``stoker analyze`` costs a script that it leaves alone, and ``stoker.monitor``.

Main process: a loop over a ``DataLoader`` without workers over a list, whose ``next()`` takes a few
microseconds; with the probe attached, with ``stoker.monitor`` around it, or neither: each in a
process of its own, in turns. Worker: a dataset that computes for 1 ms an example, one worker,
batches of one (so that the cost of a batch falls on one example) and of 16: how long until an
example comes, and the worker's own CPU time, with the probe, without, and without once more.

Command::

    python bench/analyze_probe.py

Targets: under 1 us a batch in the main process, for both; under 1 % of a 1 ms example in a worker.

Machine: two cores of an Intel Xeon, 24 GiB, Linux 6.18; Python 3.11.7, PyTorch 2.13.0.

Results (five rounds; load average 1.2 when it began)::

                                                 median             range
    ---------------------------------------------------------------------
    probed, ns a batch                              990       848 .. 1360
    monitored, ns a batch                           301        214 .. 384
    1 ms examples, batches of 1, times as long   1.0336  1.0321 .. 1.0416
    1 ms examples, batches of 16, times as long  1.0048  1.0029 .. 1.0054

The rows of the workers' CPU time, and of the second run without, were not taken yet. Those shown
are of a probe that still timed every batch in workers. It does not any more: they are looked at in
drains alone. Yet batches of one went on being slower by 2 % (six
rounds beside a second plain arm, which differed by 0.9 %; a batch takes 2 ms there, half of it
torch's own hand-over), in eight other rounds by 1 %. It is the training process: what takes 1 us in
a loop takes 27 us of its CPU time 2 ms after the batch before, when other code fills the caches
(517 us a batch without, 544 with the probe). Against an example of 1 ms the target is missed.
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
from harness import Ratio, parser, report
from torch.utils.data import DataLoader, Dataset

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


def main_ns(batches: int, monitored: bool) -> float:
    """Return nanoseconds a batch of a loop that does nothing."""
    loader = DataLoader([0] * batches, batch_size=None)
    if monitored:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the end
        loader = stoker.monitor(loader)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter_ns()
        for _ in loader:
            pass
        best = min(best, (time.perf_counter_ns() - began) / batches)
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


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--one", nargs=2)
    arguments = options.parse_args()
    if arguments.one:
        what, count = arguments.one[0], int(arguments.one[1])
        if what in ("main", "monitor"):
            print(json.dumps(main_ns(count, what == "monitor")))
        else:
            print(json.dumps(worker_s(count, int(what))))
        return
    quick = arguments.quick
    batches, examples = (2000, 64) if quick else (200_000, 4000)
    with report(__file__, arguments) as made:
        for number in range(1 if quick else arguments.rounds):
            workers = {}
            for batch in (1, 16):
                for name in ("plain", "probed", "again"):
                    wall_s, cpu_s = one(str(batch), examples, name == "probed")
                    workers |= {f"{name}_{batch}_s": wall_s, f"{name}_{batch}_cpu_s": cpu_s}
            made.add(
                round=number,
                plain_ns=one("main", batches, False),
                probed_ns=one("main", batches, True),
                monitored_ns=one("monitor", batches, False),
                **workers,
            )
        shown = []
        for name in ("probed", "monitored"):
            added = [row[f"{name}_ns"] - row["plain_ns"] for row in made.rows]
            shown.append(
                (
                    f"{name}, ns a batch",
                    f"{statistics.median(added):.0f}",
                    f"{min(added):.0f} .. {max(added):.0f}",
                )
            )
            made.expect(
                f"{name}: ns added to a batch", statistics.median(added), 1000, at_least=False
            )
        for batch in (1, 16):
            for what, unit in (("CPU of the worker", "cpu_s"), ("until it comes", "s")):
                for name in ("probed", "again"):
                    ratio = Ratio.of(
                        [row[f"{name}_{batch}_{unit}"] for row in made.rows],
                        [row[f"plain_{batch}_{unit}"] for row in made.rows],
                    )
                    title = f"1 ms examples, batches of {batch}, {name}: {what}, times as long"
                    spread = f"{ratio.low:.4f} .. {ratio.high:.4f}"
                    shown.append((title, f"{ratio.median:.4f}", spread))
                    if name == "probed":
                        made.expect(title, ratio.median, 1.01, at_least=False)
        made.show(("", "median", "range"), shown)


if __name__ == "__main__":
    main()
