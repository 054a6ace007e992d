"""Time to target, for real: a small task read from an HTTP server, with and without echoing.

The task is `SMALL` of experiments/settings.py. A local server in a process of its own has a
latency of 20 ms; 32 requests are in flight, and its bandwidth is set such that R, the time of a
fresh batch over that of a training step, is 4. Arms: no echoing, example echoing before
augmentation with e = 2 and 4, and no storage at all (decoded images in memory), each over three
seeds; all in turns. Beside it the same on emulated storage (files behind a sleep) with the same R,
whose reads need no CPU.

Figures: medians over the seeds of what 90 % test accuracy took; the speed-up over no echoing of the
same seed; and the share of R reclaimed, which is speed-up / R.

Command::

    python bench/remote_target.py

Target: with e = 4, training from the server reaches the accuracy sooner than without echoing, with
every seed.

Machine: two cores of an Intel Xeon at 2.5 GHz, 24 GiB, no GPU; Python 3.11.7, NumPy 2.4.6,
torch 2.13.0, aiohttp 3.14.5, fsspec 2026.9.0.

Results::

    [results/remote_target.json]
                                         R  fresh  steps  seconds  waited             speed-up  of R
    ------------------------------------------------------------------------------------------------
    HTTP server, no echoing           3.98  2,816     88     4.37     57%  1.00 (1.00 .. 1.00)   25%
    HTTP server, before augm., e = 2  3.98  1,809    102     3.14      7%  1.47 (1.39 .. 1.57)   37%
    HTTP server, before augm., e = 4  3.98    902     94     2.10      3%  2.08 (2.00 .. 2.44)   52%
    HTTP server, in memory (bound)    3.98  2,816     88     1.24      1%  3.78 (3.51 .. 3.84)   95%
    emulated, no echoing              3.98  2,816     88     4.39     71%  1.00 (1.00 .. 1.00)   25%
    emulated, before augm., e = 2     3.98  1,809    102     2.86     49%  1.55 (1.52 .. 1.60)   39%
    emulated, before augm., e = 4     3.98    902     94     1.55      5%  2.81 (2.58 .. 3.12)   71%
    emulated, in memory (bound)       3.98  2,816     88     1.25      1%  3.82 (3.48 .. 3.84)   96%
    [end]

With e = 4 a step takes 22 to 24 ms beside the server's requests, 14 to 19 ms beside emulated
storage and 14 ms from memory (time not waited, per step; in the raw rows): requests are Python, and
hold the GIL that training needs, too. So R within the run is lower than the one measured.

Caveats: other work ran on the machine (load average 1.1 before). Server, reading, preparation and
training share two cores. In these rows R was measured with reading alone and training alone; by now
calibration looks at training without echoing. The images are PNG files of half a kilobyte, so that
the cost of a request weighs as much as it ever does. The network is small, and its learning rate is
the same for all arms.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness import Report, parser, report

from experiments.arms import Arm
from experiments.calibration import Calibration, calibrate, step_seconds
from experiments.digits import DigitSpec
from experiments.images import ImageSet, composed_digits
from experiments.runs import Evaluation, RunRecord, run_arm
from experiments.settings import SMALL, Settings
from experiments.storage import RemoteStorage, in_memory, storage_of
from experiments.workloads import one_thread

ARMS = (Arm("none"), Arm("before", 2), Arm("before", 4), Arm("memory"))
COLUMNS = {"fresh": ",.0f", "steps": ",.0f", "seconds": ".2f"}
TARGET_ACCURACY = 0.9
QUICK = Settings(
    digits=DigitSpec(train=400, test=40),
    batch_size=8,
    widths=(4, 4, 8),
    pool_batches=4,
    largest_pool_fraction=0.2,
    target_accuracy=0.05,
    budget_fresh=160,
    grid=((160, 40), (1 << 40, 320)),
    step_samples=9,
    drain_batches=6,
)


def compare(found: Report, settings: Settings, images: ImageSet) -> None:
    """Train all arms from both kinds of storage."""
    runs: dict[str, list[RunRecord]] = {}
    calibrations: dict[str, Calibration] = {}
    target = settings.target_accuracy
    assert target is not None

    def is_over(evaluation: Evaluation) -> bool:
        return evaluation.accuracy >= target or evaluation.seconds >= settings.longest_s

    step_s = step_seconds(images, settings)
    with ExitStack() as stack:
        sources = {}
        for remote in (True, False):
            storage = stack.enter_context(storage_of(images, settings, remote=remote))
            known = calibrate(images, settings, storage, settings.slowness, step_s)
            calibrations[storage.name] = known
            sources[storage.name] = stack.enter_context(storage.opened(known.limits))
        memory = in_memory(images, settings)
        for seed in range(settings.seeds):
            for arm in ARMS:
                for name, source in sources.items():
                    chosen = memory if arm.place == "memory" else source
                    record = run_arm(arm, seed, images, chosen, settings, is_over)
                    runs.setdefault(name, []).append(record)
    for name, records in runs.items():
        found.add(
            storage=name,
            calibration=asdict(calibrations[name]),
            runs=[asdict(record) for record in records],
        )


def evaluate(found: Report) -> None:
    """Hold each arm against no echoing, seed by seed."""
    target = QUICK.target_accuracy if found.quick else TARGET_ACCURACY
    lines: list[list[object]] = []
    for row in found.rows:
        storage, ratio = row["storage"].removeprefix("a local "), row["calibration"]["ratio"]
        runs = {arm: [r["evaluations"] for r in row["runs"] if _is_of(r, arm)] for arm in ARMS}
        plain = [_reached(run, target) or run[-1] for run in runs[ARMS[0]]]
        for arm, each in runs.items():
            hits = [_reached(run, target) for run in each]
            speedups = sorted(
                other["seconds"] / hit["seconds"] if hit else 0.0
                for other, hit in zip(plain, hits, strict=True)
            )
            waited = statistics.median(run[-1]["waited_s"] / run[-1]["seconds"] for run in each)
            lines.append(
                [
                    f"{storage}, {arm.label}".replace("augmentation", "augm."),
                    f"{ratio:.2f}",
                    *(_middle(hits, key, form) for key, form in COLUMNS.items()),
                    f"{waited:.0%}",
                    f"{statistics.median(speedups):.2f} ({speedups[0]:.2f} .. {speedups[-1]:.2f})",
                    f"{statistics.median(speedups) / ratio:.0%}",
                ]
            )
            if row["storage"] == RemoteStorage.name and arm == Arm("before", 4):
                found.expect("speed-up with e = 4, the lowest", speedups[0], 1.0)
    found.show(["", "R", *COLUMNS, "waited", "speed-up", "of R"], lines)


def _is_of(run: dict[str, Any], arm: Arm) -> bool:
    return (run["arm"]["place"], run["arm"]["factor"]) == (arm.place, arm.factor)


def _reached(run: list[dict[str, Any]], target: float | None) -> dict[str, Any] | None:
    """Return the first evaluation at the target, or None."""
    return next((e for e in run if target is not None and e["accuracy"] >= target), None)


def _middle(hits: list[dict[str, Any] | None], key: str, form: str) -> str:
    """Return the median; one that missed the target is worse than all others."""
    middle = statistics.median(hit[key] if hit else math.inf for hit in hits)
    return "missed" if math.isinf(middle) else f"{middle:{form}}"


def run(arguments: Namespace, found: Report) -> None:
    """Compose the images and compare."""
    settings = QUICK if arguments.quick else replace(SMALL, target_accuracy=TARGET_ACCURACY)
    settings = replace(settings, seeds=1 if arguments.quick else arguments.rounds)
    with tempfile.TemporaryDirectory() as folder, one_thread():
        images = composed_digits(settings.digits, Path(folder), lambda done, total: None)
        compare(found, settings, images)


def main() -> None:
    """Run the comparison and report."""
    made = parser(__doc__, evaluate)
    made.set_defaults(rounds=3)
    arguments = made.parse_args()
    with report(__file__, arguments) as found:
        run(arguments, found)


if __name__ == "__main__":
    main()
