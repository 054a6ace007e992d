"""How well one analysis of a job predicts what it does with other caches, workers and storage.

Three training scripts in plain PyTorch (``jobs/``: photographs, recordings, arrays), files on a
disk whose reading speed a control group limits. In each round, one script after the other:
``stoker analyze`` analyzes it at one point: one worker, the slower disk, a share of 0.35 of its
files in the page cache. From that report alone, ``model.predict`` predicts examples/s at that
point and all others: cached share 0.35, 0.65, 1; 1 and 2 workers; two disks. They are written to
``results/`` before anything is measured. Then each point is measured: the page cache is brought to
that share, the script trains one epoch, and logs the time of each step; start-up and the batches
that are prefetched first do not count. So five rounds are five analyses of each script, and errors
are over all of them: what somebody meets who runs the analysis once.

Command, as root::

    python bench/analyze_accuracy.py --data ../shared/data

Targets: at least 24 points, 8 bound by fetch, 8 by prep, 4 within 15 % of a knee (where two limits
are that close); median error under 4 %, nine of ten under 10 %.

Machine: two cores of an Intel Xeon, 24 GiB, Linux 6.18, control groups v1; Python 3.11.7, PyTorch
2.13.0. An analysis took 105 to 115 s, all of it 54 minutes.

Results (five rounds; photographs of imagenet-sample, recordings of fsdd, arrays of random words;
the errors are the median and the range of five analyses)::

    [results/analyze_accuracy.json]
    job, cached, workers, disk  predicted  measured  error                              bound
    -----------------------------------------------------------------------------------------
    images, 0.35, 1, 20 MB/s          276       278  -1.0%   -1.3% .. +3.0%             fetch
    images, 0.35, 1, 36 MB/s          374       380  -2.5%  -5.5% .. +11.2%        prep, knee
    images, 0.35, 2, 20 MB/s          276       276  -0.4%   -0.5% .. +0.9%             fetch
    images, 0.35, 2, 36 MB/s          490       500  -1.9%   -2.2% .. +0.8%             fetch
    images, 0.65, 1, 20 MB/s          398       414  -0.6%   -5.9% .. +5.4%        prep, knee
    images, 0.65, 1, 36 MB/s          400       404  -1.2%   -3.7% .. +7.3%              prep
    images, 0.65, 2, 20 MB/s          495       506  -1.6%   -3.6% .. -0.8%             fetch
    images, 0.65, 2, 36 MB/s          672       689  -0.0%   -3.3% .. +1.1%  processors, knee
    images, 1.00, 1, 20 MB/s          438       421  +3.4%   +3.1% .. +5.8%              prep
    images, 1.00, 2, 20 MB/s          707       717  -1.5%   -3.5% .. +3.8%  processors, knee
    audio, 0.35, 1, 12 MB/s           263       261  +0.7%   -0.8% .. +1.6%             fetch
    audio, 0.35, 1, 22 MB/s           405       424  -1.6%   -7.2% .. -1.1%       fetch, knee
    audio, 0.35, 2, 12 MB/s           263       259  +1.2%   -0.3% .. +3.3%             fetch
    audio, 0.35, 2, 22 MB/s           476       479  -0.5%   -2.6% .. +0.6%             fetch
    audio, 0.65, 1, 12 MB/s           436       450  -4.1%   -5.1% .. +3.4%       fetch, knee
    audio, 0.65, 1, 22 MB/s           438       451  -3.8%   -5.0% .. +1.3%              prep
    audio, 0.65, 2, 12 MB/s           473       478  -3.0%   -4.6% .. +1.3%             fetch
    audio, 0.65, 2, 22 MB/s           658       678  -2.5%   -3.7% .. -1.3%     compute, knee
    audio, 1.00, 1, 12 MB/s           486       477  +0.8%   -4.0% .. +2.5%              prep
    audio, 1.00, 2, 12 MB/s           658       670  -1.8%   -3.0% .. +1.5%           compute
    arrays, 0.35, 1, 12 MB/s          302       299  +1.6%   +0.9% .. +2.1%             fetch
    arrays, 0.35, 1, 20 MB/s          498       498  -0.3%   -5.4% .. +0.6%             fetch
    arrays, 0.35, 2, 12 MB/s          302       297  +1.8%   +1.3% .. +2.6%             fetch
    arrays, 0.35, 2, 20 MB/s          499       498  +0.2%   -0.8% .. +2.0%             fetch
    arrays, 0.65, 1, 12 MB/s          542       531  +0.4%   -2.1% .. +7.6%             fetch
    arrays, 0.65, 1, 20 MB/s          576       577  -0.6%   -5.0% .. +1.3%              prep
    arrays, 0.65, 2, 12 MB/s          543       547  -0.5%   -2.8% .. +0.1%             fetch
    arrays, 0.65, 2, 20 MB/s          879       916  -4.0%   -7.3% .. -2.1%             fetch
    arrays, 1.00, 1, 12 MB/s          630       654  -0.8%   -5.0% .. +2.3%              prep
    arrays, 1.00, 2, 12 MB/s         1061      1085  -1.4%   -5.4% .. +0.1%        prep, knee
    [end]

Over the 150 predictions: median error 1.7 %, nine of ten under 5.0 %, the furthest 11.2 %; all
targets met. Without the point that was analyzed, 135: 1.9 and 5.1 %.

The misses, explained: 24 of 150 are over 4 %, five over 7 %. Four of the five, and most of the
others, lie where one worker prepares about as fast as storage delivers. There the wait for a miss
counts most, and it is the least certain of what an analysis finds: the difference of two drains of
five seconds, and a bucket of a control group makes it depend on how the reads before it went. The
five analyses had it at 0.44 to 0.69 ms (photographs), 0.56 to 0.83 (recordings), 0.39 to 0.75
(arrays); the smallest of photographs and of arrays made the two predictions that are furthest too
high, the largest two of recordings those that are furthest too low. The fifth, ``arrays, 0.65, 2,
20 MB/s``, is low in all five, by 2 to 7 %; why was not looked into. Without three corrections (what
a miss makes a worker wait, the processors' limit, what training reaches with all data in memory),
min(F, P, G) missed these same points by 8 to 21 %.

Caveats: the accelerator is a sleep beside a small network on the host. The same disk, and minutes
between an analysis and what it predicts: an analysis of another day differs by what the machine
differs. Predicted once and measured for an hour after, on a day when the machine became 1.5 times
as slow in between, the same points had a median error of 6.7 %, nine of ten under 16 %.
"""

from __future__ import annotations

import io
import json
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import throttled
from harness import RESULTS, Report, parser, report
from inputs import jpegs

from stoker.analysis.model.model import Change, Prediction, predict
from stoker.analysis.model.report import read_report, to_measured

SHARES = 0.35, 0.65, 1.0
WORKERS = 1, 2
MEMORY = 8 << 30
KNEE = 0.15
JOBS = Path(__file__).parent / "jobs"
TOLD = RESULTS / "analyze_accuracy_predicted.json"


@dataclass(frozen=True)
class Job:
    """A script, its files, and the two speeds of the disk, in MB/s."""

    name: str
    suffix: str
    files: int
    speeds: tuple[float, float]
    device_ms: float


ALL = (
    Job("images", ".jpg", 3000, (20.0, 36.0), 14.0),
    Job("audio", ".wav", 3000, (12.0, 22.0), 18.0),
    Job("arrays", ".npy", 4000, (12.0, 20.0), 10.5),
)


@dataclass(frozen=True)
class Point:
    """Where a job is predicted and measured."""

    job: Job
    share: float
    workers: int
    speed: float


def contents(job: Job, data: Path | None) -> Iterator[bytes]:
    """Make a job's files: of the datasets in ``data``, or of noise."""
    rng = np.random.default_rng(0)
    if job.name == "images":
        photographs = jpegs(str(data / "imagenet-sample.tar") if data else None, 40)
        for number in range(job.files):
            yield photographs[number % len(photographs)]
    elif job.name == "audio":
        sounds = _recordings(data / "fsdd.tar") if data else [rng.bytes(60_000)]
        for number in range(job.files):
            parts = b"".join(sounds[(number * 7 + part) % len(sounds)] for part in range(16))
            file = io.BytesIO()
            with wave.open(file, "wb") as recording:
                recording.setnchannels(1)
                recording.setsampwidth(2)
                recording.setframerate(8000)
                recording.writeframes(parts[: 60_000 + number % 16 * 1000])
            yield file.getvalue()
    else:
        tokens = rng.zipf(1.3, 40_000_000 if data else 400_000).astype(np.uint32) % 30_000
        for number in range(job.files):
            length = 10_000 + number % 32 * 300
            start = number * 9_973 % (len(tokens) - length)
            file = io.BytesIO()
            np.save(file, tokens[start : start + length])
            yield file.getvalue()


def _recordings(path: Path) -> list[bytes]:
    found: list[bytes] = []
    with tarfile.open(path) as archive:
        for member in archive:
            if member.name.endswith(".wav") and len(found) < 600:
                inside = archive.extractfile(member)
                assert inside is not None
                with wave.open(io.BytesIO(inside.read())) as recording:
                    found.append(recording.readframes(recording.getnframes()))
    return found


def write(job: Job, folder: Path, data: Path | None) -> None:
    """Write a job's files."""
    folder.mkdir()
    for number, content in enumerate(contents(job, data)):
        (folder / f"{number:05}{job.suffix}").write_bytes(content)


def bring(disk: throttled.Disk, folder: Path, share: float) -> None:
    """Bring a share of a job's files into the page cache, and no other."""
    disk.forget()
    paths = sorted(folder.iterdir())
    for path in random.Random(1).sample(paths, round(share * len(paths))):
        path.read_bytes()


def run(command: list[str]) -> None:
    """Run a command. Raises RuntimeError with what it said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:8])} ...: {(done.stdout + done.stderr)[-2000:]}")


def script(job: Job, folder: Path, workers: int) -> list[str]:
    """Return a job's command line."""
    where = [str(JOBS / f"{job.name}.py"), str(folder)]
    return [*where, "--workers", str(workers), "--device-ms", str(job.device_ms)]


def analyzed(job: Job, disk: throttled.Disk, folder: Path, max_seconds: float, out: Path) -> Any:
    """Analyze a job at its one point."""
    bring(disk, folder, SHARES[0])
    call = [
        "-c",
        "from stoker.cli import main; main()",
        "analyze",
        "--max-seconds",
        str(max_seconds),
    ]
    with throttled.limited(MEMORY, disk, int(job.speeds[0] * 1e6)) as before:
        run([*before, sys.executable, *call, "--json", str(out), *script(job, folder, WORKERS[0])])
    return read_report(out)


def measure(point: Point, disk: throttled.Disk, folder: Path, batch: int = 16) -> float:
    """Return examples/s of an epoch, without its start."""
    bring(disk, folder, point.share)
    with tempfile.TemporaryDirectory() as home:
        log = Path(home) / "log"
        command = [sys.executable, *script(point.job, folder, point.workers), "--log", str(log)]
        with throttled.limited(MEMORY, disk, int(point.speed * 1e6)) as before:
            run([*before, *command])
        times = json.loads(log.read_text())
    skip = min(4 * point.workers, len(times) // 3)
    whole = (len(times) - 1 - skip) // point.workers * point.workers
    return batch * whole / float(times[skip + whole] - times[skip])


def predicted(point: Point, found: Any) -> Prediction:
    """Predict a point from the job's one report."""
    job = to_measured(found)
    total = found.example_bytes * found.examples
    if job.storage is None:
        raise ValueError("it cannot tell fetching apart: " + "; ".join(found.notes))
    speed = job.storage * found.example_bytes / 1e6 * point.speed / point.job.speeds[0]
    change = Change(cores=point.workers, cache_bytes=int(point.share * total), storage_mbps=speed)
    return predict(job, change)


def near_knee(found: Prediction) -> bool:
    """Whether the two lowest limits are within 15 % of each other."""
    limits = sorted([found.fetch, found.prep, found.ingestion, found.processors])
    return limits[1] / limits[0] - 1 < KNEE


def named(row: dict[str, Any]) -> str:
    """Return a row's point in words."""
    return f"{row['job']}, {row['share']:.2f}, {row['workers']}, {row['speed']:g} MB/s"


def foretold(job: Job, expected: dict[Point, Prediction], found: Any) -> dict[str, Any]:
    """Return what one report predicts, and from what."""
    rows = [
        {"share": p.share, "workers": p.workers, "speed": p.speed}
        | {"predicted": e.rate, "bound": e.bound, "near_knee": near_knee(e)}
        for p, e in expected.items()
    ]
    return {"job": job.name, "predictions": rows, "report": _rates(found)}


def evaluate(made: Report) -> None:
    """Hold the predictions against what was measured, point by point and over all."""
    seen: dict[str, list[dict[str, Any]]] = {}
    for row in made.rows:
        seen.setdefault(named(row), []).append(row)
    lines = []
    bounds, knees = [], 0
    for point, rows in seen.items():
        off = [row["predicted"] / row["rate"] - 1 for row in rows]
        bound = statistics.mode(row["bound"] for row in rows)
        knee = statistics.mode(row["near_knee"] for row in rows)
        bounds.append(bound)
        knees += knee
        lines.append((
            point,
            f"{statistics.median(row['predicted'] for row in rows):.0f}",
            f"{statistics.median(row['rate'] for row in rows):.0f}",
            f"{statistics.median(off):+.1%}", f"{min(off):+.1%} .. {max(off):+.1%}",
            bound + (", knee" if knee else ""),
        ))  # fmt: skip
    made.show(("job, cached, workers, disk", "predicted", "measured", "error", "", "bound"), lines)
    errors = sorted(abs(row["predicted"] / row["rate"] - 1) for row in made.rows)
    made.expect("points", len(seen), 24)
    made.expect("bound by fetch", bounds.count("fetch"), 8)
    made.expect("bound by prep", bounds.count("prep"), 8)
    made.expect("near a knee", knees, 4)
    made.expect("median error", statistics.median(errors), 0.04, at_least=False)
    made.expect("error of nine in ten", errors[int(0.9 * len(errors))], 0.1, at_least=False)


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--data", type=Path, help="folder of datasets; noise without")
    options.add_argument("--only", help="one job")
    arguments = options.parse_args()
    missing = throttled.why_not()
    if missing:
        print(f"cannot be measured here: it {missing}\na quick run: no figures")
        return
    quick = arguments.quick
    jobs = [job for job in ALL if arguments.only in (None, job.name)]
    if quick:
        jobs = [Job("arrays", ".npy", 96, (50.0, 80.0), 1.0)]
    points = [
        Point(job, share, workers, speed)
        for job in jobs
        for share in SHARES
        for workers in WORKERS
        for speed in (job.speeds if share < 1 else job.speeds[:1])
    ][: 1 if quick else None]
    with report(__file__, arguments) as made, throttled.disk(1 << 30) as disk:
        for job in jobs:
            write(job, disk.folder / job.name, arguments.data)
        told: list[dict[str, Any]] = []
        for number in range(1 if quick else arguments.rounds):
            for job in jobs:
                folder = disk.folder / job.name
                with tempfile.TemporaryDirectory() as home:
                    found = analyzed(
                        job, disk, folder, 30 if quick else 240, Path(home) / "report.json"
                    )
                own = [point for point in points if point.job is job]
                try:
                    expected = {point: predicted(point, found) for point in own}
                except ValueError as why:
                    if not quick:
                        raise
                    print(f"too short for this machine: {why}\na quick run: no figures")
                    sys.exit(0)
                told.append({"round": number} | foretold(job, expected, found))
                if not quick:
                    TOLD.write_text(json.dumps(told, indent=1) + "\n")
                turn = number % len(own)
                for point in own[turn:] + own[:turn]:
                    rate = measure(point, disk, folder)
                    made.add(
                        round=number, job=job.name, share=point.share, workers=point.workers,
                        speed=point.speed, predicted=expected[point].rate, rate=rate,
                        bound=expected[point].bound, near_knee=near_knee(expected[point]),
                    )  # fmt: skip
                    print(f"{number} {named(made.rows[-1])}: {rate:.1f}", flush=True)


def _rates(found: Any) -> dict[str, Any]:
    """Return what the predictions were made from."""
    import msgspec

    names = ("rates", "prep", "cold", "miss_s", "storage_most",
             "cached_fraction", "example_bytes",
             "step_cpu_s", "notes", "as_it_is", "verdict", "split")  # fmt: skip
    content = msgspec.to_builtins(found)
    return {name: content[name] for name in names}


if __name__ == "__main__":
    main()
