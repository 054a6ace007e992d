"""Did a change make anything slower? The rows of ``paths.py``, by two versions of stoker.

Each row is run by both versions, in turns, each in a process of its own for each round: the median
of the ratios of each round, of what the clock says (examples/s, after over before) and of processor
time an example (before over after), so above 1 is better in both columns. The version before is a
commit, checked out beside; the version after is the working tree. Each runs its own ``paths.py``.

Command::

    python bench/versions.py --before COMMIT --jpegs imagenet-sample.tar

Machine: two cores of an AMD EPYC, 24 GiB, Linux 6.18; Python 3.11.7, NumPy 2.4.6, PyTorch 2.13.0.

Results::

    [results/versions.json]
    after over before                          examples/s          processor time  memory
    -------------------------------------------------------------------------------------
    warm cache, 110 KB, inline      0.921 (0.833 .. 1.03)   0.921 (0.831 .. 1.04)   0.998
    warm cache, 110 KB, 2 thr.       1.01 (0.874 .. 1.01)    1.01 (0.875 .. 1.01)   0.998
    warm cache, 110 KB, 4 thr.      0.964 (0.843 .. 1.02)   0.962 (0.843 .. 1.02)    1.55
    warm cache, 110 KB, 8 thr.     0.925 (0.889 .. 0.977)  0.928 (0.887 .. 0.979)    1.56
    warm cache, arrays of 3 KB      0.976 (0.931 .. 0.99)  0.976 (0.931 .. 0.989)   0.992
    photographs, echo 2, crop        1.02 (0.997 .. 1.04)        1.03 (1 .. 1.03)    1.04
    photographs, echo 4, crop       0.997 (0.961 .. 1.02)   0.997 (0.978 .. 1.01)   0.996
    dicts of 12 fields              0.949 (0.824 .. 1.09)   0.948 (0.824 .. 1.09)       1
    nested examples                  1.02 (0.992 .. 1.04)    1.02 (0.991 .. 1.04)   0.999
    ragged, padded                  0.947 (0.893 .. 1.15)   0.947 (0.895 .. 1.15)       1
    batches of 1                        1 (0.923 .. 1.29)       1 (0.924 .. 1.29)       1
    batches of 8                    0.961 (0.797 .. 1.06)    0.96 (0.797 .. 1.06)       1
    2 processes, 1 KB rows            1.01 (0.984 .. 1.1)   0.995 (0.979 .. 1.07)   0.993
    2 processes, 150 KB rows          1.16 (1.11 .. 1.26)     1.25 (1.24 .. 1.36)    0.96
    100 rows, 2 processes, by CPU     1.04 (1.01 .. 1.05)        1.03 (1 .. 1.06)   0.991
    random flip                        0.983 (0.978 .. 1)      0.983 (0.973 .. 1)       1
    windows of an array            0.975 (0.942 .. 0.991)  0.975 (0.942 .. 0.991)    1.02
    every other column             0.749 (0.732 .. 0.761)     1.22 (1.19 .. 1.24)   0.974
    JPEGs of 32 x 32, by CPU       0.973 (0.966 .. 0.987)   0.982 (0.97 .. 0.988)       1
    large PNGs, by CPU                1.65 (1.64 .. 1.72)     1.65 (1.64 .. 1.72)   0.979
    echo around a fast loader           1 (0.988 .. 1.01)     1.03 (0.933 .. 1.1)    1.01
    first batch, 100,000 files     0.994 (0.898 .. 0.996)  0.994 (0.898 .. 0.997)   0.999
    [end]

These rows are of commit 7a7d349 against 010c37c, with nothing beside them, by one process of each
version for all rounds; but the warm cache inline and batches of 1 and 8, which are of a later
commit, by seven rounds of processes of their own. Such a cache scatters: an item takes a process
6.9 to 8.6 us, much the same in all its rounds, and the median of eight processes is 8.1 for both
versions (on a busy machine). Copies by hand from a file in memory scatter alike, from 4.4 to 6.0
us; that it is by where a process got its pages is a guess. Seven rounds cannot tell 0.92 from 1.
Memory of 1.55 was the row's other arm, which Python had not collected; now it is.

Rows of small batches inline (*batches of 1*, *of 8*, *windows*) had become dearer by 0.6 us a
batch: 30 of 1,700 bytecodes, a lock, and a test for an abstract class. Half of it is gone since.
Dicts and ragged examples moved by a tenth from round to round. By the clock alone *every other
column* is at 0.75: such batches take less than a millisecond, and are no longer gathered by two
threads, unless the consumer does something else for longer than that.

Caveats: on shared cores the clock says little, and processor time of single rows still moves by a
few hundredths from run to run. Both versions use the same stoker-native, that of the environment.
Both rows of a round run within seconds of each other; pages and frequencies are as they come.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
# The least that every row of a change is held to: what repeats of one version scatter by.
FLOOR = 0.97


def processor_s() -> float:
    """Return the processor time of this process and of its children, in seconds."""
    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return total + ended.ru_utime + ended.ru_stime


def own_bytes() -> int:
    """Return the memory that this process and its children share with no other process."""
    me = psutil.Process()
    total = 0
    for process in [me, *me.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().uss
    return total


def serve(name: str, jpegs: str | None, quick: bool) -> None:
    """Run stoker's arm of one row each time that a line comes in; write what it took."""
    import paths  # of the version whose folder is first on the path

    import stoker

    warnings.simplefilter("ignore", stoker.CacheWarning)
    [row] = [row for row in paths.rows_of(jpegs) if row.name == name]
    with ExitStack() as within:
        arm = row.arms(quick, within)["stoker"]
        gc.collect()  # the other arms, and what they hold
        arm()
        print("ready", flush=True)
        for _ in sys.stdin:
            cpu_s, began = processor_s(), time.perf_counter()
            rate = arm()
            took_s, used_s = time.perf_counter() - began, processor_s() - cpu_s
            print(json.dumps([rate, used_s / (rate * took_s), own_bytes()]), flush=True)


@contextmanager
def checkout(commit: str, quick: bool) -> Iterator[Path]:
    """Check a commit out into a folder of its own, for a while; quick: take the working tree."""
    if quick:
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "-C", ROOT, "archive", commit], check=True, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-x", "-C", folder], check=True, input=archive.stdout)
        yield Path(folder)


def started(tree: Path, row: str, arguments: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--serve", row, "--before", "-"]
    command += ["--jpegs", arguments.jpegs] if arguments.jpegs else []
    command += ["--quick"] if arguments.quick else []
    path = os.pathsep.join([str(tree / "src"), str(tree / "bench")])
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def measured(process: subprocess.Popen[str]) -> tuple[float, float, int]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    rate, cpu_s, nbytes = json.loads(process.stdout.readline())
    return rate, cpu_s, nbytes


def evaluate(made: Any) -> None:
    from harness import Ratio

    shown = []
    for name in dict.fromkeys(row["path"] for row in made.rows):
        of = {
            version: [r for r in made.rows if r["path"] == name and r["version"] == version]
            for version in ("before", "after")
        }
        rates = {version: [r["per_s"] for r in rows] for version, rows in of.items()}
        costs = {version: [r["processor_s_each"] for r in rows] for version, rows in of.items()}
        clock = Ratio.of(rates["after"], rates["before"])
        processor = Ratio.of(costs["before"], costs["after"])
        memory = Ratio.of(*([r["own_bytes"] for r in of[v]] for v in ("after", "before")))
        shown.append([name, str(clock), str(processor), f"{memory.median:.3g}"])
        made.expect(f"{name}, processor time", processor.median, FLOOR)
    made.show(["after over before", "examples/s", "processor time", "memory"], shown)


def main() -> None:
    from harness import parser, report

    made_by = parser(__doc__, evaluate)
    made_by.add_argument("--before", default="HEAD", help="the commit to compare with")
    made_by.add_argument("--jpegs", help="folder or tar of photographs; by default some are made")
    made_by.add_argument("--only", default="", help="rows whose names have this in them")
    made_by.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = made_by.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.jpegs, arguments.quick)
        return
    from paths import rows_of

    with report(__file__, arguments) as made, checkout(arguments.before, made.quick) as before:
        trees = {"before": before, "after": ROOT}
        rows = [row for row in rows_of(arguments.jpegs) if arguments.only in row.name]
        for row in rows[: 2 if arguments.quick else None]:  # paths.py --quick runs each of them
            for number in range(1 if arguments.quick else arguments.rounds):
                processes = {v: started(tree, row.name, arguments) for v, tree in trees.items()}
                try:
                    for process in processes.values():
                        assert process.stdout is not None
                        if process.stdout.readline() != "ready\n":
                            raise SystemExit(f"{row.name}: a version does not run this row")
                    for version in list(processes)[:: 1 if number % 2 else -1]:
                        rate, cpu_s, nbytes = measured(processes[version])
                        made.add(
                            path=row.name,
                            version=version,
                            round=number,
                            per_s=rate,
                            processor_s_each=cpu_s,
                            own_bytes=nbytes,
                        )
                finally:
                    for process in processes.values():
                        process.__exit__(None, None, None)  # closes its pipes, and waits
            print(row.name, flush=True)


if __name__ == "__main__":
    main()
