"""Everything together: four jobs, data twice as large as memory, a slow disk, and real training.

The network and digits of experiments/, the digits enlarged to photographs of 512 x 512 with
noise, which are decoded and reduced again: 3 ms of CPU an example. The files end with zeros that
make them 300 KB each, as raw data does that a decoder skips. Four jobs train at a time, with four
learning rates, in the same order, on two cores. Arms, each with what the one before it has:

- plain: a pipeline in every job;
- cache: ``.cache()`` of half of the files, which all four share;
- sharing: one job's preparation for all four (``stoker.share``), behind that cache; each job
  augments and batches by itself;
- echo: ``.echo("auto")`` in every job, before its augmentation.

All in a control group whose memory limit follows what the processes take for themselves, so that
half of the files, and 48 MiB, are left for the page cache and the cache; the disk gives so many
MB/s. Figures: seconds of an epoch of fresh examples, from the second one on; and seconds until a
job classifies so much of the test images rightly, medians over the jobs. Evaluations are not
counted.

Command, as root::

    python bench/combined.py

Target: each arm is there sooner than the one before it, and but for echo, which trains more, has
the shorter epochs.

Machine: two cores of an Intel Xeon, 24 GiB, Linux 6.18, control groups v1; Python 3.11.7, PyTorch
2.13.0.

Results (five rounds; 1,920 photographs, 549 MiB; 30 MB/s; three epochs, 80 % right)::

    [results/combined.json]
             epoch, s                  faster  to target, s                 faster
    ------------------------------------------------------------------------------
    plain        16.4                                  24.4
    cache        14.5    1.09 (0.963 .. 1.22)          24.9  0.946 (0.941 .. 1.02)
    sharing       9.5      1.53 (1.42 .. 1.8)          22.7    1.09 (1.06 .. 1.16)
    echo          9.6  0.989 (0.984 .. 0.995)           7.6    3.01 (2.96 .. 3.49)
    [end]

Missed: with the cache alone jobs are not at the target sooner. The first epoch, in which all is
read once, takes 18 to 19 s in every arm; the target comes in the second one, which two cores cannot
prepare for four jobs in less than 13 s, whatever the disk does. Jobs in the same order share the
page cache's files, too: what one has read the others find. So the cache's epochs are a little
shorter only, until sharing leaves one reader, and time on the processors.

Caveats: a cache that had the page cache forget each file when it was read, rather than when it is
in the cache, took 37 s for the first epoch, which is how that was found.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import throttled
from harness import Ratio, Report, parser, report
from PIL import Image

import stoker
from experiments.digits import DigitSpec
from experiments.images import composed_digits
from experiments.workloads import Learner, augment_one

ARMS = ("plain", "cache", "sharing", "echo")
RATES = (0.001, 0.002, 0.003, 0.005)
BATCH = 64
WIDTHS = (16, 32, 64)
SIDE = 512
SMALL = 32
EVALUATED_EVERY = 5  # batches
FILE_BYTES = 300_000
SPEED_MBPS = 30


def reduced(content: bytes) -> Any:
    """Decode a photograph and reduce it to the digits' size."""
    image = Image.fromarray(stoker.images.decode(content))
    return np.asarray(image.resize((SMALL, SMALL), Image.Resampling.BOX))


def prepared() -> stoker.Pipeline:
    """Return what is read and decoded, from what the environment says."""
    source = stoker.from_folder(os.environ["COMBINED_FOLDER"], seed=0).shuffle()
    limit = int(os.environ["COMBINED_CACHE"])
    if limit:
        source = source.cache(limit)
    return source.map(reduced, on="image")


def pipeline(arm: str) -> stoker.Pipeline:
    """Return a job's pipeline."""
    if arm in ("plain", "cache"):
        train = prepared()
    else:
        target = f"{__file__}:prepared"
        count = int(os.environ["COMBINED_JOBS"])
        train = stoker.share(target, name="bench-combined", jobs=count, seed=1)
    if arm == "echo":
        train = train.echo("auto", max_factor=4)
    return train.random_map(augment_one, on="image").batch(BATCH)


def job(arm: str, rate: float, test: str, epochs: int, target: float) -> None:
    """Train; print the seconds of each epoch, and those until the target."""
    import torch

    torch.set_num_threads(1)
    images, labels = (np.load(Path(test) / f"{what}.npy") for what in ("images", "labels"))
    learner = Learner(10, WIDTHS, rate, seed=0)
    train = pipeline(arm)
    spent, epoch_s, target_s = 0.0, [], None
    for _ in range(epochs):
        before = spent
        for number, (began, batch) in enumerate(timed(train)):
            learner.step(*batch)
            spent += time.perf_counter() - began
            if target_s is None and number % EVALUATED_EVERY == EVALUATED_EVERY - 1:
                target_s = spent if learner.accuracy(images, labels) >= target else None
        epoch_s.append(spent - before)
    print(json.dumps({"epoch_s": epoch_s, "target_s": target_s}))


def timed(batches: Any) -> Iterator[tuple[float, Any]]:
    """Yield batches, each with the time when it was asked for."""
    iterator = iter(batches)
    while True:
        began = time.perf_counter()
        batch = next(iterator, None)
        if batch is None:
            return
        yield began, batch


def jobs(arm: str, test: str, epochs: int, target: float) -> None:
    """Run the four jobs of an arm; print what each printed."""
    call = [sys.executable, __file__, "--job", arm]
    running = [
        subprocess.Popen(
            [*call, str(rate), test, str(epochs), str(target)], stdout=subprocess.PIPE, text=True
        )
        for rate in RATES[: int(os.environ["COMBINED_JOBS"])]
    ]
    print(json.dumps([json.loads(each.communicate()[0].splitlines()[-1]) for each in running]))


def write(folder: Path, test: Path, count: int) -> int:
    """Write photographs of digits; return their bytes."""
    spec = DigitSpec(train=count, test=300)
    total = 0
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as home:
        digits = composed_digits(spec, Path(home), lambda done, of: None)
        for number, (pixels, label) in enumerate(
            zip(digits.train_images, digits.train_labels, strict=True)
        ):
            large = Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
            noise = generator.integers(-24, 25, (SIDE, SIDE, 1))
            noisy = np.clip(np.asarray(large).astype(np.int16) + noise, 0, 255).astype(np.uint8)
            file = folder / f"{label}" / f"{number:05}.jpg"
            file.parent.mkdir(exist_ok=True)
            Image.fromarray(noisy).save(file, quality=80)
            with open(file, "ab") as end:
                end.write(bytes(max(0, FILE_BYTES - end.tell())))
            total += file.stat().st_size
        np.save(test / "images.npy", digits.test_images)
        np.save(test / "labels.npy", digits.test_labels)
    return total


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--job", nargs=5)
    options.add_argument("--jobs", nargs=4)
    options.add_argument("--examples", type=int, default=1920)
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--accuracy", type=float, default=0.8)
    arguments = options.parse_args()
    if arguments.job:
        arm, rate, test, epochs, target = arguments.job
        return job(arm, float(rate), test, int(epochs), float(target))
    if arguments.jobs:
        arm, test, epochs, target = arguments.jobs
        return jobs(arm, test, int(epochs), float(target))
    missing = throttled.why_not()
    if missing:
        print(f"cannot be measured here: it {missing}\na quick run: no figures")
        return None
    quick = arguments.quick
    count = BATCH if quick else arguments.examples
    epochs = 1 if quick else arguments.epochs
    with (
        report(__file__, arguments) as made,
        tempfile.TemporaryDirectory() as test,
        throttled.disk(count * 2 * FILE_BYTES + (64 << 20)) as disk,
    ):
        total = write(disk.folder, Path(test), count)
        store = int(total * 0.5)
        most = []

        def run(arm: str) -> Any:
            disk.forget()
            cache = store if arm != "plain" else 0
            given = {
                "COMBINED_FOLDER": str(disk.folder),
                "COMBINED_CACHE": str(cache),
                "COMBINED_JOBS": "2" if quick else str(len(RATES)),
            }
            call = [sys.executable, __file__, "--jobs", arm, test, str(epochs)]
            with throttled.roomy(store, cache, disk, SPEED_MBPS * 1_000_000) as room:
                done = subprocess.run(
                    [*room.before, *call, str(arguments.accuracy)],
                    env={**os.environ, **given}, capture_output=True, text=True, check=False,
                )  # fmt: skip
            if done.returncode:
                raise RuntimeError(f"{arm} ended with {done.returncode}: {done.stderr[-2000:]}")
            most.append(room.most_bytes)
            return json.loads(done.stdout.splitlines()[-1])

        rounds = 1 if quick else arguments.rounds
        for number in range(rounds):
            for arm in ARMS[number % 4 :] + ARMS[: number % 4]:
                for rate, found in zip(RATES, run(arm), strict=False):
                    made.add(round=number, arm=arm, rate=rate, **found)
                if not quick:
                    print(number, arm, made.rows[-1], file=sys.stderr)
        if not quick:
            print(
                f"{total / 2**20:,.0f} MiB of files, memory for half of them; "
                f"at most {max(most) / 2**20:,.0f} MiB for the processes themselves"
            )
    return None


def evaluate(made: Report) -> None:
    """Hold each arm against the one before it."""
    rounds = range(1 + max(row["round"] for row in made.rows))

    def of(arm: str, number: int, what: str) -> float:
        rows = [row for row in made.rows if row["arm"] == arm and row["round"] == number]
        if what == "epoch_s":
            return statistics.median(
                s for row in rows for s in row["epoch_s"][1:] or row["epoch_s"]
            )
        reached = [row["target_s"] or float("inf") for row in rows]
        return statistics.median(reached)

    rows = []
    for before, arm in zip(("", *ARMS), ARMS, strict=False):
        cells = []
        for what in ("epoch_s", "target_s"):
            each = [of(arm, number, what) for number in rounds]
            cells.append(f"{statistics.median(each):.1f}")
            if before:
                ratio = Ratio.of([of(before, n, what) for n in rounds], each)
                cells.append(str(ratio))
                if (arm, what) != ("echo", "epoch_s"):
                    made.expect(f"{arm} over {before}: {what}, times as fast", ratio.median, 1.0)
            else:
                cells.append("")
        rows.append((arm, *cells))
    made.show(("", "epoch, s", "faster", "to target, s", "faster"), rows)


if __name__ == "__main__":
    main()
