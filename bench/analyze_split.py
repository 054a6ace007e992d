"""Whether the analyzer's split recovers sleeps that were put into fetch, prep and the step.

A script in plain PyTorch with one worker: reading a file that is not in the page cache sleeps
(``preadv2`` with RWF_NOWAIT tells), preparing an example sleeps, a training step sleeps. So the
time of a step is known: the longer of the step's own sleep and the worker's for a batch; and with
it what is compute, prep stall and fetch stall. Before each analysis all files leave the page cache,
so that the job as it is reads everything for the first time.

Command::

    python bench/analyze_split.py

Target: each of the three shares within 0.05 of an epoch's time.

Machine: two cores of an Intel Xeon, 24 GiB, Linux 6.18; Python 3.11.7, PyTorch 2.13.0.

Results (five rounds, three and two in two runs; medians; what the sleeps make, behind "for")::

    [results/analyze_split.json]
    sleeps most in          compute       prep stall      fetch stall
    -----------------------------------------------------------------
    fetch           0.383 for 0.392  0.015 for 0.000  0.602 for 0.608
    prep            0.215 for 0.218  0.656 for 0.661  0.129 for 0.121
    step            0.968 for 1.000  0.032 for 0.000  0.000 for 0.000
    all             0.350 for 0.366  0.281 for 0.255  0.369 for 0.379
    [end]

The furthest of all twenty analyses is off by 0.037: a loader that keeps up still costs the step a
few hundred microseconds of handing over, which the split counts as prep stall.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from harness import Report, parser, report
from torch.utils.data import DataLoader, Dataset

from stoker.analysis.model.report import Split, read_report
from stoker.analysis.probe.residency import drop

BATCH = 8
FILES = 3000
SLEEPS_MS = {
    "fetch": (4.0, 1.0, 16.0),
    "prep": (0.5, 4.0, 8.0),
    "step": (0.5, 1.0, 40.0),
    "all": (1.5, 2.5, 12.0),
}


class Slow(Dataset):
    """Files; sleeps where a real one would wait for a disk and decode."""

    def __init__(self, folder: str, fetch_s: float, prep_s: float) -> None:
        self.paths = sorted(str(path) for path in Path(folder).iterdir())
        self.fetch_s, self.prep_s = fetch_s, prep_s

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        content = bytearray(4096)
        with open(self.paths[index], "rb", buffering=0) as file:
            try:
                os.preadv(file.fileno(), [content], 0, os.RWF_NOWAIT)
            except BlockingIOError:
                time.sleep(self.fetch_s)
                file.readinto(content)
        time.sleep(self.prep_s)
        return torch.zeros(4)


def job(folder: str, fetch_ms: float, prep_ms: float, step_ms: float) -> None:
    """Train."""
    torch.set_num_threads(1)
    weight = torch.zeros(1, requires_grad=True)
    dataset = Slow(folder, fetch_ms / 1e3, prep_ms / 1e3)
    for _ in range(1000):
        for batch in DataLoader(dataset, BATCH, shuffle=True, num_workers=1):
            (weight * batch.sum()).backward()
            time.sleep(step_ms / 1e3)


def known(fetch_ms: float, prep_ms: float, step_ms: float) -> Split:
    """Return the split that these sleeps make, every file being read for the first time."""
    lag = 0.06  # a sleep is a little longer than was asked for
    prep = BATCH * (prep_ms + lag)
    worker = prep + BATCH * (fetch_ms + lag)
    step = step_ms + lag
    whole, warm = max(step, worker), max(step, prep)
    return Split(step / whole, (warm - step) / whole, (whole - warm) / whole)


def evaluate(made: Report) -> None:
    """Hold each share against what the sleeps make."""
    shown = []
    for name in dict.fromkeys(row["sleeps"] for row in made.rows):
        rows = [row for row in made.rows if row["sleeps"] == name]
        cells = []
        for share in Split.__struct_fields__:
            found = statistics.median(row[f"found_{share}"] for row in rows)
            truth = rows[0][f"known_{share}"]
            cells.append(f"{found:.3f} for {truth:.3f}")
            off = max(abs(row[f"found_{share}"] - truth) for row in rows)
            made.expect(f"{name}: {share}, furthest off", off, 0.05, at_least=False)
        shown.append((name, *cells))
    made.show(("sleeps most in", "compute", "prep stall", "fetch stall"), shown)


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--job", nargs=4)
    arguments = options.parse_args()
    if arguments.job:
        folder, *sleeps = arguments.job
        job(folder, *(float(sleep) for sleep in sleeps))
        return
    quick = arguments.quick
    with report(__file__, arguments) as made, tempfile.TemporaryDirectory() as home:
        files = Path(home) / "files"
        files.mkdir()
        for number in range(200 if quick else FILES):
            (files / f"{number:05}").write_bytes(os.urandom(4096))
        names = list(SLEEPS_MS)[: 1 if quick else None]
        for number in range(1 if quick else arguments.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                for path in files.iterdir():
                    drop(str(path))
                out = Path(home) / "report.json"
                call = ["-c", "from stoker.cli import main; main()", "analyze"]
                call += ["--budget", "1" if quick else "4", "--json", str(out), __file__]
                sleeps = [str(sleep) for sleep in SLEEPS_MS[name]]
                subprocess.run(
                    [sys.executable, *call, "--job", str(files), *sleeps],
                    check=True, capture_output=True,
                )  # fmt: skip
                split, truth = read_report(out).split, known(*SLEEPS_MS[name])
                made.add(
                    round=number, sleeps=name,
                    **{f"found_{n}": getattr(split, n) for n in split.__struct_fields__},
                    **{f"known_{n}": getattr(truth, n) for n in split.__struct_fields__},
                )  # fmt: skip


if __name__ == "__main__":
    main()
