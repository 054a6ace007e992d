"""What K jobs gain that share one preparation, beside K pipelines and beside TensorSocket.

Photographs, decoded and cropped to 224 x 224 (uint8, batches of 64: about 2 ms of CPU an example);
jobs that only consume. Six arms: every job with a torch ``DataLoader`` (two workers, persistent),
with a stoker pipeline, with a DALI pipeline on the CPU (two threads) of its own; all jobs on one
feed (``stoker.feed``), whose pipeline has two threads, or two worker processes; and all on one
TensorSocket 0.0.5 producer around that ``DataLoader``.

A run is K processes that are let go at once after a few batches, for some seconds. The rate of a
job is that of its batches between the first and the last one in that time; CPU time is that of all
processes of the run, over the examples that were handed out in it. Arms and K in turns.

Then a hand-over by itself: batches of 64 x 3 x 224 x 224 float32 (38 MB) that are all ready, to
four jobs with steps of 5 ms, and of 200 ms: how long ``next()`` takes. Then what is prepared: eight
jobs take three epochs, and each crop's random numbers, which seed, epoch and example determine, are
written down. And memory: resident, shared pages counted once, of the feeder and eight jobs, beside
that of one job with a pipeline of its own, the staging area, and eight processes that have imported
what a job does.

Command::

    python bench/share.py --install               # makes .peers/dali and .peers/tensorsocket; once
    python bench/share.py --jpegs imagenet-sample.tar

Targets: a job of K that share at least 0.9 K times as fast as a job of K that do not; one job on a
feed at least 0.95 times as fast as in process; not behind TensorSocket within the spread at K = 1,
ahead from K = 2, with less CPU time an example at every K; a hand-over under 200 us; an example
prepared once an epoch; memory at most one pipeline, the staging area and eight bare processes.

Machine: two cores of an Intel Xeon, 24 GiB, Linux 6.18; Python 3.11.7, PyTorch 2.13.0, DALI 2.4.0.

Results (five rounds; 2,048 photographs)::

    [results/share.json]
    examples/s a job; CPU, ms  1 job  2 jobs  4 jobs  8 jobs  1 job  2 jobs  4 jobs  8 jobs
    ---------------------------------------------------------------------------------------
    DataLoader each            1,038     495     238     109   1.90    2.05    2.09    2.44
    stoker each                  955     532     255     112   1.93    1.89    1.95    2.28
    DALI each                  1,356     675     335     168   1.44    1.50    1.53    1.55
    stoker.feed                  949     945     884     911   1.94    0.98    0.52    0.25
    stoker.feed, processes       978     973     956     953   2.02    1.03    0.52    0.26
    TensorSocket                 695     529     254      78   2.82    1.81    1.91    3.59

    rate over that of                   stoker.feed  stoker.feed, processes
    -----------------------------------------------------------------------
    DataLoader each, 1 job   0.923 (0.528 .. 0.969)  0.932 (0.921 .. 0.998)
    DataLoader each, 2 jobs     1.86 (1.83 .. 1.91)     1.93 (1.87 .. 2.02)
    DataLoader each, 4 jobs     3.86 (3.24 .. 3.91)     3.92 (3.72 .. 4.18)
    DataLoader each, 8 jobs     8.12 (7.87 .. 8.43)      8.61 (8.1 .. 8.82)
    stoker each, 1 job        0.997 (0.571 .. 1.03)    1.03 (0.997 .. 1.06)
    stoker each, 2 jobs         1.77 (1.71 .. 1.82)     1.83 (1.82 .. 1.87)
    stoker each, 4 jobs         3.62 (3.21 .. 3.82)     3.79 (3.46 .. 4.12)
    stoker each, 8 jobs          8.14 (7.81 .. 8.3)      8.5 (8.04 .. 9.01)
    DALI each, 1 job         0.699 (0.414 .. 0.711)  0.723 (0.684 .. 0.749)
    DALI each, 2 jobs            1.37 (1.35 .. 1.4)     1.43 (1.38 .. 1.45)
    DALI each, 4 jobs            2.71 (2.6 .. 2.82)     2.85 (2.64 .. 3.13)
    DALI each, 8 jobs           5.44 (5.26 .. 5.65)      5.6 (5.53 .. 6.01)
    TensorSocket, 1 job        1.37 (0.789 .. 1.47)     1.41 (1.38 .. 1.47)
    TensorSocket, 2 jobs        1.77 (1.62 .. 1.79)      1.84 (1.63 .. 1.9)
    TensorSocket, 4 jobs        3.53 (3.02 .. 3.79)     3.68 (3.63 .. 3.87)
    TensorSocket, 8 jobs        11.8 (11.2 .. 12.4)     12.2 (11.8 .. 12.7)

    TensorSocket: 15 runs hung, and were ended after 45 s

    hand-over of 38 MB to four jobs, us  median  nine of ten  longest
    -----------------------------------------------------------------
    steps of 5 ms                           161          265      463
    steps of 200 ms                         710         1701     3301

    examples, of 3 epochs
    ------------------------------------------------
    each job took                     6,144 .. 6,144
    prepared                                   6,144
    prepared again in the same epoch               0

    resident memory, MiB
    -----------------------------------
    one job, a pipeline of its own  109
    the staging area                 74
    8 bare processes                171
    a feeder and 8 jobs             285
    [end]

Sharing beside not sharing: met, but for 1.77 of 1.8 at two jobs if the feed's workers are threads.
Two processes use two cores to 99 %; one process with two threads uses 92 %, since a thread waits
for the interpreter while the other packs pixels for NumPy (0.25 ms of the 2 ms; a wait costs some
0.1 ms more until the processor is awake again). A third thread changes nothing, nor does an
allocator that keeps its memory (1.5 % more, for 60 MiB). With worker processes a feed does not have
this, and jobs that share do not pay for more of them as jobs of their own do (477 examples/s a job
at two jobs, beside 544 with threads, in three rounds apart). DALI's decoder is faster by itself: a
feed may serve its loader (``from_loader``), but cannot make its batches again.

Caveats: in one round one job on a feed with threads came to half of its rate (something else ran).
TensorSocket with a producer batch of one loader batch fails, so it joins two of 32. It hung in 10
of 12 runs with eight jobs and in 5 of 9 with four, which were ended after 45 s: what is shown are
the two rounds and the four in which one ran. After
200 ms of other work the code of a hand-over is no longer in the processor's caches; a loop of 140
empty calls takes 10 times as long then, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from harness import Ratio, Report, parser, report
from inputs import jpegs
from peers import environment

from stoker.feeds.feeder.log import BATCHES

Found = dict[tuple[str, int], list[dict[str, Any]]]  # arm, jobs: a row for each round

HERE = Path(__file__).resolve().parent
PEERS = HERE / "peers"
CROP = 224
BATCH = 64
WORKERS = 2
KS = (1, 2, 4, 8)
FEED = f"bench-share-{os.getpid()}"
WINDOW_S = 4.0
WARM_BATCHES = 4
LIMIT_S = 45.0  # a run that takes longer hangs, and is tried again
ATTEMPTS = 3
EPOCHS = 3
ARMS = ("torch", "stoker", "dali", "shared", "processes", "tensorsocket")
NAMES = {
    "torch": "DataLoader each",
    "stoker": "stoker each",
    "dali": "DALI each",
    "shared": "stoker.feed",
    "processes": "stoker.feed, processes",
    "tensorsocket": "TensorSocket",
}


def command(arm: str, folder: str, jobs: int) -> list[str]:
    """Return how a job of an arm is started."""
    numbers = [str(n) for n in (BATCH, CROP, WARM_BATCHES, WORKERS)]
    if arm in ("stoker", "shared", "processes"):
        return stokers("own" if arm == "stoker" else "share", jobs, WARM_BATCHES)
    if arm == "torch":
        return [sys.executable, str(PEERS / "torch_share.py"), folder, *numbers]
    if arm == "dali":
        return [str(environment.python("dali")), str(PEERS / "dali_share.py"), folder, *numbers]
    return [*tensorsocket("consumer", folder)]


def stokers(role: str, jobs: int, number: int) -> list[str]:
    return [sys.executable, str(PEERS / "stoker_share.py"), role, str(jobs), str(number)]


def tensorsocket(role: str, folder: str) -> list[str]:
    numbers = [str(n) for n in (BATCH, CROP, WARM_BATCHES, WORKERS)]
    script = str(PEERS / "tensorsocket_share.py")
    return [str(environment.python("tensorsocket")), script, role, folder, *numbers]


def started(call: list[str], folder: str, **more: str) -> subprocess.Popen[str]:
    variables = {
        "SHARE_FEED": FEED,
        "SHARE_FOLDER": folder,
        "SHARE_BATCH": str(BATCH),
        "SHARE_CROP": str(CROP),
        "SHARE_WORKERS": str(WORKERS),
        "SHARE_KIND": "thread",
    }
    return subprocess.Popen(
        call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env={**os.environ, **variables, **more},
    )  # fmt: skip


def until(process: subprocess.Popen[str], start: str) -> str:
    """Return the next line of a job that begins so."""
    assert process.stdout is not None
    while line := process.stdout.readline():
        if line.startswith(start):
            return line
    raise RuntimeError(f"a job ended with code {process.wait()}")


def members(roots: list[subprocess.Popen[str]]) -> list[psutil.Process]:
    """Return the processes of a run: the jobs, what they started, and the feeder."""
    found = []
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            first = psutil.Process(root.pid)
            found += [first, *first.children(recursive=True)]
    for process in psutil.process_iter(["cmdline"]):
        if any(f'"{FEED}"' in part for part in process.info["cmdline"] or ()):
            found.append(process)
    return found


def cpu_s(processes: list[psutil.Process]) -> float:
    """Return the CPU time that processes have spent so far, with their children that ended."""
    spent = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            spent += times.user + times.system + times.children_user + times.children_system
    return spent


def pss_bytes(processes: list[psutil.Process]) -> int:
    """Return resident memory, pages that are shared counted once."""
    found = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.memory_full_info().pss
    return found


def run(arm: str, folder: str, jobs: int, window_s: float) -> dict[str, Any]:
    """Run the jobs of an arm; return rates, CPU time and memory."""
    processes: list[subprocess.Popen[str]] = []
    producers: list[subprocess.Popen[str]] = []
    kind = "process" if arm == "processes" else "thread"

    def kill() -> None:
        for process in (*processes, *producers):
            process.kill()

    watchdog = threading.Timer(LIMIT_S, kill)
    watchdog.start()
    try:
        if arm == "tensorsocket":
            producers.append(started(tensorsocket("producer", folder), folder))
            until(producers[0], "ready")
        call = command(arm, folder, jobs)
        processes += [started(call, folder, SHARE_KIND=kind) for _ in range(jobs)]
        for process in processes:
            until(process, "ready")
        everybody = members([*processes, *producers])
        before = cpu_s(everybody)
        for process in processes:
            assert process.stdin is not None
            print(window_s, file=process.stdin, flush=True)
        time.sleep(window_s)
        everybody = members([*processes, *producers])
        spent = cpu_s(everybody) - before
        pss = pss_bytes(everybody)
        came = [json.loads(until(process, "[")) for process in processes]
    finally:
        watchdog.cancel()
        for process in [*processes, *producers]:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
            process.communicate()
        while any(member.is_running() for member in members([])):  # the feeder ends by itself
            time.sleep(0.01)
    rates = [(len(each) - 1) * BATCH / (each[-1] - each[0]) for each in came]
    inside = sum(sum(at <= window_s for at in each) for each in came) * BATCH
    return {
        "rate": statistics.mean(rates),
        "slowest": min(rates),
        "cpu_ms": 1e3 * spent / max(1, inside),
        "pss_bytes": pss,
    }


def tried(arm: str, folder: str, jobs: int, window_s: float) -> dict[str, Any]:
    """Run an arm, again if it hangs; count how often it did. Without a rate if it always did."""
    for hung in range(ATTEMPTS):
        try:
            return {**run(arm, folder, jobs, window_s), "hung": hung}
        except RuntimeError as error:
            print(f"{arm} {jobs}: {error}", file=sys.stderr)
    return {"hung": ATTEMPTS}


def bare_bytes(folder: str, jobs: int) -> int:
    """Return the resident memory of so many processes that have imported what a job does."""
    processes = [started(stokers("bare", jobs, 0), folder) for _ in range(jobs)]
    for process in processes:
        until(process, "ready")
    pss = pss_bytes(members(processes))
    for process in processes:
        process.communicate("\n")
    return pss


def prepared(folder: str, jobs: int, epochs: int) -> dict[str, int]:
    """Let jobs take some epochs; return what each took, what was prepared, and what of it twice."""
    with tempfile.NamedTemporaryFile() as log:
        call = stokers("count", jobs, epochs)
        processes = [started(call, folder, SHARE_LOG=log.name) for _ in range(jobs)]
        taken = [int(process.communicate()[0]) * BATCH for process in processes]
        while any(member.is_running() for member in members([])):
            time.sleep(0.01)
        lines = log.read().split()
    return {
        "least_taken": min(taken),
        "most_taken": max(taken),
        "prepared": len(lines),
        "twice": len(lines) - len(set(lines)),
    }


HAND_OVER = """
import json, time
import numpy as np
import stoker

NAME, BATCHES, STEPS_S = "", 0, 0.0

class Ready:
    def __len__(self):
        return 64 * BATCHES
    def __getitem__(self, index):
        return IMAGE

IMAGE = np.ones((3, 224, 224), np.float32)

def make():
    return stoker.from_dataset(Ready(), seed=0).batch(64)

if __name__ == "__main__":
    feed = stoker.feed(make, name=NAME, jobs=4, staging=2 * BATCHES)
    spent = []
    batches = iter(feed)
    next(batches)
    time.sleep(0.15 * BATCHES)  # by then all are made
    for _ in range(BATCHES - 1):
        time.sleep(STEPS_S)
        began = time.perf_counter_ns()
        batch = next(batches)
        spent.append((time.perf_counter_ns() - began) / 1e3)
        assert not batch.flags.owndata
    print(json.dumps(spent[4:]))
"""


def hand_over(batches: int, steps_s: float) -> list[float]:
    """Return how long each hand-over of a ready batch took, in us."""
    with tempfile.TemporaryDirectory() as home:
        script = Path(home) / "hand_over.py"
        settings = f'"{FEED}-hand-over", {batches}, {steps_s}'
        script.write_text(HAND_OVER.replace('"", 0, 0.0', settings, 1))
        call = [sys.executable, str(script)]
        jobs = [subprocess.Popen(call, stdout=subprocess.PIPE, text=True) for _ in range(4)]
        return [us for job in jobs for us in json.loads(job.communicate()[0])]


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--jpegs", type=Path, help="a folder or tar of photographs")
    options.add_argument("--install", action="store_true", help="make the peers' environments")
    arguments = options.parse_args()
    if arguments.install:
        environment.install("dali")
        environment.install("tensorsocket")
    arms = [arm for arm in ARMS if there(arm)]
    ks = (2,) if arguments.quick else KS
    window_s = 0.5 if arguments.quick else WINDOW_S
    with report(__file__, arguments) as made, tempfile.TemporaryDirectory() as folder:
        write(Path(folder), arguments)
        for number in range(1 if arguments.quick else arguments.rounds):
            for k in ks:
                for arm in arms[number % len(arms) :] + arms[: number % len(arms)]:
                    row = tried(arm, folder, k, window_s)
                    made.add(round=number, arm=arm, jobs=k, **row)
                    if not arguments.quick:
                        print(f"{number} {arm} {k}: {row.get('rate', 0):,.0f}/s", file=sys.stderr)
        batches = 8 if arguments.quick else 25
        us = {steps_s: hand_over(batches, steps_s) for steps_s in (0.005, 0.2)}
        made.add(hand_over_us={str(steps_s): each for steps_s, each in us.items()})
        made.add(bare_bytes=bare_bytes(folder, max(ks)))
        counts = prepared(folder, max(ks), EPOCHS)
        made.add(**counts)
        wanted = EPOCHS * count_of(arguments)
        made.expect("examples that each job took", counts["least_taken"], wanted)
        ahead = BATCHES * BATCH  # of an epoch that nobody asked for
        made.expect("prepared", counts["prepared"], wanted + ahead, at_least=False)


def evaluate(made: Report) -> None:
    """Hold jobs that share against jobs that do not, and the rest against its targets."""
    found: Found = {}
    for row in made.having("arm"):
        found.setdefault((row["arm"], row["jobs"]), []).append(row)
    show_rates(made, found)
    show_hand_over(made)
    show_counts(made)
    show_memory(made, found)


def there(arm: str) -> bool:
    return arm not in ("dali", "tensorsocket") or environment.python(arm).exists()


def count_of(arguments: argparse.Namespace) -> int:
    return 2 * BATCH if arguments.quick else 32 * BATCH


def write(folder: Path, arguments: argparse.Namespace) -> None:
    """Write the photographs in class folders."""
    images = jpegs(str(arguments.jpegs) if arguments.jpegs else None, 64)
    for number in range(count_of(arguments)):
        file = folder / f"{number % 10}" / f"{number:05}.jpg"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(images[number % len(images)])


def show_rates(made: Report, found: Found) -> None:
    """Show what a job gets, in every arm and beside every other one."""
    arms = list(dict.fromkeys(arm for arm, _ in found))
    ks = sorted({k for _, k in found})

    def of(arm: str, k: int, what: str) -> list[float]:
        return [row[what] for row in found[arm, k] if what in row]

    def over(ours: str, arm: str, k: int, what: str) -> Ratio | None:
        pairs = [
            (one[what], other[what])
            for one, other in zip(found[ours, k], found[arm, k], strict=True)
            if what in other
        ]
        return Ratio.of(*zip(*pairs, strict=True)) if pairs else None

    rows = []
    for arm in arms:
        rates, cpu = (
            [text.format(statistics.median(each)) if each else "-" for each in columns]
            for text, columns in (
                ("{:,.0f}", [of(arm, k, "rate") for k in ks]),
                ("{:.2f}", [of(arm, k, "cpu_ms") for k in ks]),
            )
        )
        rows.append((NAMES[arm], *rates, *cpu))
    heads = [f"{k} job{'s' * (k > 1)}" for k in ks]
    made.show(("examples/s a job; CPU, ms", *heads, *heads), rows)
    if "shared" not in arms:
        return
    shared = ("shared", "processes")
    ratios = []
    for arm in arms:
        for k in ks:
            if arm in shared:
                continue
            cells = []
            for ours in shared:
                ratio, cpu_ratio = (over(ours, arm, k, what) for what in ("rate", "cpu_ms"))
                cells.append(str(ratio or "-"))
                if ratio is None or cpu_ratio is None:
                    continue
                what = f"{NAMES[ours]} over {NAMES[arm]}, jobs: {k}"
                if arm == "tensorsocket":
                    made.expect(what, ratio.high if k == 1 else ratio.median, 1.0)
                    made.expect(f"{what}: CPU an example", cpu_ratio.median, 1.0, at_least=False)
                elif k > 1 or arm == "stoker":
                    made.expect(what, ratio.median, 0.9 * k if k > 1 else 0.95)
            ratios.append((f"{NAMES[arm]}, {k} job{'s' * (k > 1)}", *cells))
    made.show(("rate over that of", *(NAMES[ours] for ours in shared)), ratios)
    for arm in arms:
        hangs = sum(row["hung"] for k in ks for row in found[arm, k])
        if hangs:
            made.say(f"{NAMES[arm]}: {hangs} runs hung, and were ended after {LIMIT_S:.0f} s")


def show_hand_over(made: Report) -> None:
    """Show how long a batch that is ready takes."""
    us = made.having("hand_over_us")[0]["hand_over_us"]
    made.show(
        ("hand-over of 38 MB to four jobs, us", "median", "nine of ten", "longest"),
        [
            (
                f"steps of {1e3 * float(steps_s):.0f} ms",
                *(f"{value:.0f}" for value in quantiles(each)),
            )
            for steps_s, each in us.items()
        ],
    )
    made.expect("hand-over, us", statistics.median(us["0.005"]), 200, at_least=False)


def show_counts(made: Report) -> None:
    """Say what was prepared, beside what was taken."""
    (counts,) = made.having("least_taken")
    made.show(
        (f"examples, of {EPOCHS} epochs", ""),
        [
            ("each job took", f"{counts['least_taken']:,} .. {counts['most_taken']:,}"),
            ("prepared", f"{counts['prepared']:,}"),
            ("prepared again in the same epoch", f"{counts['twice']:,}"),
        ],
    )
    made.expect("prepared twice", counts["twice"], 0, at_least=False)


def show_memory(made: Report, found: Found) -> None:
    """Hold the memory of a feeder and its jobs against what it may be."""
    if ("stoker", 1) not in found:
        return
    jobs = max(k for _, k in found)
    own, shared = (
        statistics.median(row["pss_bytes"] for row in found[case])
        for case in (("stoker", 1), ("shared", jobs))
    )
    staging = BATCHES * BATCH * CROP * CROP * 3
    bare = made.having("bare_bytes")[0]["bare_bytes"]
    rows = [
        ("one job, a pipeline of its own", own),
        ("the staging area", staging),
        (f"{jobs} bare processes", bare),
        (f"a feeder and {jobs} jobs", shared),
    ]
    made.show(("resident memory, MiB", ""), [(what, f"{size / 2**20:,.0f}") for what, size in rows])
    made.expect("resident, of the bound", shared / (own + staging + bare), 1.0, at_least=False)


def quantiles(us: list[float]) -> tuple[float, float, float]:
    ordered = sorted(us)
    return statistics.median(us), ordered[int(0.9 * len(ordered))], ordered[-1]


if __name__ == "__main__":
    main()
