"""Time to target, for real: does an echo that follows the stall train as fast as the best factor?

The task is `SMALL` of experiments/settings.py, read from emulated storage: files behind a
sleep, whose length sets R, the time of a fresh batch over that of a training step, to 2, 4 and 6.
Example echoing before augmentation; the same pool of eight batches in all arms. Arms: no echoing,
fixed factors around R, and ``.echo("auto")`` with a ``max_factor`` of 4; at R = 6 also
with 6. Each over the same seeds, in turns.

Figures: what 90 % test accuracy took, medians over the seeds and the range; the speed-up over no
echoing of the same seed; and the share of R reclaimed, which is speed-up / R.

Command::

    python bench/auto_target.py

Target: at every R, and with every seed, auto is there sooner than no echoing.

Machine: two cores of an Intel Xeon at 2.5 GHz, 24 GiB, no GPU; Python 3.11.7 (a plain loop
iteration takes 290 ns there, so that Python's own share weighs several times more than
usual), NumPy 2.4.6, torch 2.13.0.

Results (five seeds; speed-ups: median and range)::

    [results/auto_target.json]
                                    R  fresh  steps  seconds  waited             speed-up  of R
    -------------------------------------------------------------------------------------------
    R = 2, no echoing            2.02  2,944     92     1.91     55%  1.00 (1.00 .. 1.00)   50%
    R = 2, e = 2                 2.02  1,665    100     1.25     17%  1.36 (1.17 .. 1.57)   67%
    R = 2, e = 3                 2.02  1,093     95     1.09     14%  1.62 (1.33 .. 1.84)   80%
    R = 2, e = 4                 2.02    769     84     0.97     16%  1.94 (1.61 .. 2.18)   96%
    R = 2, auto                  2.02  1,032     77     0.89      9%  1.92 (1.63 .. 3.06)   95%
    R = 4, no echoing            3.72  2,944     92     2.70     72%  1.00 (1.00 .. 1.00)   27%
    R = 4, e = 2                 3.72  1,665    100     1.62     54%  1.54 (1.40 .. 1.69)   41%
    R = 4, e = 4                 3.72    769     84     0.97     23%  2.79 (1.94 .. 3.02)   75%
    R = 4, e = 6                 3.72    644    101     1.01     23%  2.60 (1.96 .. 2.98)   70%
    R = 4, auto                  3.72    772     84     0.82     27%  3.06 (2.48 .. 3.38)   82%
    R = 6, no echoing            5.42  2,944     92     3.29     78%  1.00 (1.00 .. 1.00)   18%
    R = 6, e = 4                 5.42    769     84     1.10     38%  3.00 (2.20 .. 3.36)   55%
    R = 6, e = 6                 5.42    644    101     1.14     28%  2.97 (2.11 .. 3.80)   55%
    R = 6, auto                  5.42    640     67     0.86     31%  3.11 (2.69 .. 4.59)   57%
    R = 6, auto, max_factor = 6  5.42    576     80     0.86     24%  3.97 (2.05 .. 5.08)   73%

           best fixed  its seconds / auto's
    ---------------------------------------
    R = 2       e = 4   1.01 (0.88 .. 1.56)
    R = 4       e = 4   1.18 (0.98 .. 1.28)
    R = 6       e = 4   1.28 (0.93 .. 1.40)
    [end]

Caveats: storage, preparation and training share the cores, here with other work at a lower
priority, too. What auto does depends on time: a seed fixes weights, order and augmentation, but not
its schedule. A run with echoing ends at the seconds that its seed took without, or at 6,144 /
min(e, R, 4) fresh examples; if it is not there by then, its speed-up counts as 0. Accuracy is
measured every 64 fresh examples (every 128 from 1,536 on), a step of up to 10 % for the arms that
need the fewest.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness import Report, parser, report
from peers.echoed import Reached, Uses, train

from experiments.calibration import calibrate, step_seconds
from experiments.digits import DigitSpec
from experiments.grids import next_point
from experiments.images import ImageSet, composed_digits
from experiments.settings import SMALL, Settings
from experiments.storage import Source, storage_of
from experiments.workloads import Learner, augment, one_thread

PLAIN, AUTO = "no echoing", "auto"
_PLAIN: dict[str, dict[str, Any]] = {PLAIN: {"factor": 1}}
_AUTO: dict[str, dict[str, Any]] = {AUTO: {"factor": "auto", "max_factor": 4}}
ARMS = {
    2.0: {
        **_PLAIN,
        "e = 2": {"factor": 2},
        "e = 3": {"factor": 3},
        "e = 4": {"factor": 4},
        **_AUTO,
    },
    4.0: {
        **_PLAIN,
        "e = 2": {"factor": 2},
        "e = 4": {"factor": 4},
        "e = 6": {"factor": 6},
        **_AUTO,
    },
    6.0: {
        **_PLAIN,
        "e = 4": {"factor": 4},
        "e = 6": {"factor": 6},
        **_AUTO,
        "auto, max_factor = 6": {"factor": "auto", "max_factor": 6},
    },
}
GRID = ((1_536, 64), (1 << 40, 128))
QUICK = Settings(
    digits=DigitSpec(train=400, test=40),
    batch_size=8,
    widths=(4, 4, 8),
    pool_batches=8,
    target_accuracy=0.05,
    budget_fresh=160,
    grid=((1 << 40, 40),),
    step_samples=9,
    drain_batches=6,
)


def uses_of(source: Source, images: ImageSet, seed: int, settings: Settings, echo: Any) -> Uses:
    """Read, decode, echo, batch and augment."""
    pool = settings.pool_batches * settings.batch_size
    pipeline = source(seed).shuffle().map(images.decode, on="image").echo(**echo, pool=pool)
    pipeline = pipeline.batch(settings.batch_size, drop_last=True).random_map(augment, on="image")
    with iter(pipeline) as batches:
        for image_batch, labels in batches:
            yield image_batch, labels, pipeline.clock.fresh_examples


def compare(
    found: Report, ratio: float, images: ImageSet, settings: Settings, step_s: float
) -> None:
    """Train all arms at one R."""
    arms = ARMS[ratio]
    runs: dict[str, list[Reached | None]] = {label: [] for label in arms}
    with storage_of(images, settings, remote=False) as storage:
        known = calibrate(images, settings, storage, ratio, step_s)
        with storage.opened(known.limits) as source:
            for seed in range(settings.seeds):
                limit_s = math.inf
                others = list(arms)[1:]
                for label in (PLAIN, *others[seed % len(others) :], *others[: seed % len(others)]):
                    uses = uses_of(source, images, seed, settings, arms[label])
                    budget = budget_of(arms[label], ratio, settings)
                    runs[label].append(trained(uses, images, settings, seed, budget, limit_s))
                    limit_s = min(limit_s, seconds_of(runs[PLAIN][-1]))
    for label, each in runs.items():
        raw = [asdict(run) if run is not None else None for run in each]
        found.add(r=ratio, arm=label, calibration=asdict(known), reached=raw)


def evaluate(found: Report) -> None:
    """Hold each arm against no echoing, and the best fixed factor against auto."""
    lines: list[list[object]] = []
    bests: list[list[object]] = []
    for ratio in dict.fromkeys(row["r"] for row in found.rows):
        rows = {row["arm"]: row for row in found.rows if row["r"] == ratio}
        runs = {arm: [_reached(run) for run in row["reached"]] for arm, row in rows.items()}
        for arm, each in runs.items():
            speedups = _speedups(runs[PLAIN], each)
            measured = rows[arm]["calibration"]["ratio"]
            lines.append([f"R = {ratio:g}, {arm}", *_line(each, speedups, measured)])
        slowest = _speedups(runs[PLAIN], runs[AUTO])[0]
        found.expect(f"R = {ratio:g}: speed-up under auto, the lowest", slowest, 1.0)
        fixed = [arm for arm in runs if not arm.startswith(AUTO)]
        best = min(fixed, key=lambda arm: statistics.median(map(seconds_of, runs[arm])))
        bests.append([f"R = {ratio:g}", best, _spread(_speedups(runs[best], runs[AUTO]))])
    found.show(["", "R", "fresh", "steps", "seconds", "waited", "speed-up", "of R"], lines)
    found.show(["", "best fixed", "its seconds / auto's"], bests)


def _reached(run: dict[str, Any] | None) -> Reached | None:
    return None if run is None else Reached(**run)


def budget_of(echo: dict[str, Any], ratio: float, settings: Settings) -> float:
    """Return how many fresh examples an arm has: fewer the more it uses each, but never too few."""
    assert settings.budget_fresh is not None
    factor = ratio if echo["factor"] == "auto" else echo["factor"]
    share = 1.0 if factor == 1 else 1.5 / min(factor, ratio, 4)
    return share * settings.budget_fresh


def trained(
    uses: Uses, images: ImageSet, settings: Settings, seed: int, budget: float, limit_s: float
) -> Reached | None:
    """Train one arm from one seed, on at most so many fresh examples, for at most so long."""
    assert settings.target_accuracy is not None
    learner = Learner(len(images.classes), settings.widths, settings.learning_rate, seed)
    return train(
        uses,
        learner,
        (images.test_images, images.test_labels),
        settings.target_accuracy,
        lambda fresh: next_point(fresh, settings.grid),
        lambda fresh, seconds: fresh >= budget or seconds > limit_s,
    )


def seconds_of(run: Reached | None) -> float:
    """Return what a run took to the target; infinity if it missed it."""
    return math.inf if run is None else run.seconds


def _speedups(these: list[Reached | None], those: list[Reached | None]) -> list[float]:
    """Return the seconds of these over the seconds of those, seed by seed, ascending."""
    pairs = zip(these, those, strict=True)
    return sorted(0.0 if b is None else seconds_of(a) / b.seconds for a, b in pairs)


def _line(each: list[Reached | None], speedups: list[float], ratio: float) -> list[object]:
    there = [run for run in each if run is not None]
    if 2 * len(there) <= len(each):
        return [f"{ratio:.2f}", *["missed"] * 6]
    return [
        f"{ratio:.2f}",
        f"{statistics.median_high(run.fresh for run in there):,.0f}",
        f"{statistics.median_high(run.steps for run in there):,.0f}",
        f"{statistics.median(map(seconds_of, each)):.2f}",
        f"{statistics.median(run.waited_s / run.seconds for run in there):.0%}",
        _spread(speedups),
        f"{statistics.median(speedups) / ratio:.0%}",
    ]


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({values[0]:.2f} .. {values[-1]:.2f})"


def run(arguments: Namespace, found: Report) -> None:
    """Compose the images and compare."""
    settings = QUICK if arguments.quick else replace(SMALL, grid=GRID)
    settings = replace(settings, seeds=1 if arguments.quick else arguments.rounds)
    with tempfile.TemporaryDirectory() as folder, one_thread():
        images = composed_digits(settings.digits, Path(folder), lambda done, total: None)
        step_s = step_seconds(images, settings)
        for ratio in [4.0] if arguments.quick else ARMS:
            compare(found, ratio, images, settings, step_s)


def main() -> None:
    """Run the comparison and report."""
    arguments = parser(__doc__, evaluate).parse_args()
    with report(__file__, arguments) as found:
        run(arguments, found)


if __name__ == "__main__":
    main()
