"""How often `stoker run` leaves a change that pays, on a busy machine, and keeps one that does not.

The batches of a training loop are recorded for some minutes, while another process takes a
processor for some seconds now and then (as in gate_noise.py). Runs are made of this record: the job
is analyzed for 1.2 s somewhere in it, as `stoker run` does, and 40 s later twenty epochs begin.
With a change, batches come ``gain`` times as fast as recorded. ``EpochPace`` decides on these
epochs as in `stoker run`. A trial of two epochs is the one of three without its third.

Command::

    python bench/run_pace.py

Target: a change that brings 1.3 times is left in less than 5 % of the runs.

Machine: two cores of an AMD EPYC, 24 GiB, no GPU, shared with other work at a load of 16 to 20,
beside the disturbance of this script; Python 3.11.7, torch 2.13.0. The figures are the shares of
some 350 runs that leave the change.

Results::

    [results/run_pace.json]
    gain  epochs of a trial  20 batches  50 batches  100 batches  300 batches
    -------------------------------------------------------------------------
    0.6                 two       98.6%       98.0%        96.8%        93.0%
    0.6               three       98.0%       95.7%        93.3%        83.7%
    0.8                 two       87.7%       86.4%        78.9%        85.0%
    0.8               three       73.9%       74.7%        65.9%        59.6%
    1.0                 two       27.2%       34.5%        31.5%        33.0%
    1.0               three        7.6%       11.9%         7.7%         2.2%
    1.1                 two        9.0%        9.0%        17.4%        12.2%
    1.1               three        1.7%        2.0%         2.6%         0.0%
    1.3                 two        0.3%        0.8%         4.6%         0.0%
    1.3               three        0.0%        0.0%         0.0%         0.0%
    [end]

Caveats: one record of one job; runs that begin a second apart share most of it, and those near its
end have less than twenty epochs. A change that makes no difference is not missed if it is left. One
that makes training slower is kept where the analysis fell into a slow time, or the trial did: it is
tried once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gate_noise import disturbed
from harness import Report, parser, report
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from stoker.running.loaders import LoaderChoice, LoaderSettings
from stoker.running.outcome import EpochPace

GAINS = 0.6, 0.8, 1.0, 1.1, 1.3
LENGTHS = 20, 50, 100, 300
LOOK_S, GAP_S, EPOCHS = 1.2, 40.0, 20
CHOICE = LoaderChoice(LoaderSettings(1, 2, False), LoaderSettings(2, 2, True))


class Work(Dataset[Any]):
    """Examples that take a millisecond of a processor."""

    def __getitem__(self, index: int) -> Any:
        until_s = time.process_time() + 0.001
        while time.process_time() < until_s:
            pass
        return torch.full((4,), float(index))

    def __len__(self) -> int:
        return 10_000_000


@dataclass(frozen=True)
class Record:
    """A recorded loop: the end of each batch, in seconds since its begin, ``float64 [batches]``."""

    ends_s: NDArray[np.float64]

    def count(self, at_s: float) -> float:
        """Return how many batches there were by a time."""
        return float(np.interp(at_s, self.ends_s, np.arange(1.0, len(self.ends_s) + 1)))

    def end_s(self, batches: float) -> float:
        """Return when so many batches were over; the last one's end, if there were less."""
        return float(np.interp(batches, np.arange(1.0, len(self.ends_s) + 1), self.ends_s))


def record(seconds: float) -> Record:
    """Train for some seconds."""
    weight, ends = torch.zeros(1, requires_grad=True), list[float]()
    began_s = time.perf_counter()
    for batch in DataLoader(Work(), 8, num_workers=1):
        (weight * batch.sum()).backward()
        time.sleep(0.008)
        ends.append(time.perf_counter() - began_s)
        if ends[-1] > seconds:
            break
    return Record(np.array(ends))


def decide(course: Record, start_s: float, batches: int, gain: float) -> tuple[bool, bool] | None:
    """Return whether a run leaves the change: by two epochs of a trial, and by three.

    None if the record ends before a second epoch.
    """
    seen = course.count(start_s + LOOK_S) - course.count(start_s)
    pace = EpochPace(CHOICE, seen / LOOK_S, lambda _: None)
    now_s, last_s = start_s + LOOK_S + GAP_S, float(course.ends_s[-1])
    for number in range(EPOCHS):
        own = batches / (gain if pace.settings == CHOICE.new else 1.0)
        end_s = course.end_s(course.count(now_s) + own)
        if end_s >= last_s:
            break
        pace.end_epoch(batches, end_s - now_s, counts=number > 0)
        now_s = end_s
    if number < 2:
        return None
    trial = pace._trial
    by_two = len(trial) > 1 and trial[0] < 0.95 * trial[1]
    return by_two, len(trial) == 3 and pace.settings == CHOICE.own


def evaluate(found: Report) -> None:
    """Show the share of runs that leave the change."""
    rows = []
    for gain in GAINS:
        for key, name in (("by_two", "two"), ("by_three", "three")):
            shares = [row[key] / max(1, row["runs"]) for row in found.rows if row["gain"] == gain]
            rows.append((f"{gain:.1f}", name, *(f"{share:.1%}" for share in shares)))
    found.show(("gain", "epochs of a trial", *(f"{n} batches" for n in LENGTHS)), rows)
    worst = max(
        row["by_three"] / max(1, row["runs"]) for row in found.rows if row["gain"] == max(GAINS)
    )
    found.expect("runs that leave a change that pays", worst, 0.05, at_least=False)


def main() -> None:
    arguments = parser(__doc__, evaluate).parse_args()
    seconds = GAP_S / 20 if arguments.quick else 400.0
    torch.set_num_threads(1)
    with report(__file__, arguments) as found:
        with disturbed():
            course = record(seconds)
        if arguments.quick:  # the same, again and again: there is no time for more
            course = Record(
                np.concatenate([course.ends_s + at * course.ends_s[-1] for at in range(60)])
            )
        for gain in GAINS:
            for batches in LENGTHS:
                starts = np.arange(0.0, course.ends_s[-1] - GAP_S - LOOK_S, 1.0)
                made = [decide(course, start, batches, gain) for start in starts]
                runs = [each for each in made if each is not None]
                found.add(
                    gain=gain,
                    batches=batches,
                    runs=len(runs),
                    by_two=sum(two for two, _ in runs),
                    by_three=sum(three for _, three in runs),
                )


if __name__ == "__main__":
    main()
