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
    warm cache, 110 KB, inline         0.979 (0.938 .. 1)      0.979 (0.931 .. 1)   0.997
    warm cache, 110 KB, 2 thr.       1.02 (0.897 .. 1.09)    1.02 (0.897 .. 1.09)   0.997
    warm cache, 110 KB, 4 thr.       1.04 (0.975 .. 1.15)    1.04 (0.975 .. 1.15)       1
    warm cache, 110 KB, 8 thr.       1.04 (0.903 .. 1.09)    1.05 (0.934 .. 1.07)       1
    warm cache, arrays of 3 KB         0.972 (0.855 .. 1)       0.971 (0.86 .. 1)       1
    photographs, echo 2, crop      0.791 (0.773 .. 0.806)   0.438 (0.436 .. 0.45)     1.2
    photographs, echo 4, crop       0.993 (0.709 .. 1.05)    0.997 (0.41 .. 1.05)    1.08
    README's chain, echo 2         0.831 (0.712 .. 0.935)   0.486 (0.41 .. 0.939)    1.08
    dicts of 12 fields               1.04 (0.882 .. 1.06)    1.02 (0.881 .. 1.06)       1
    nested examples                 0.988 (0.908 .. 1.01)   0.987 (0.902 .. 1.01)    1.01
    ragged, padded                  0.993 (0.938 .. 1.08)   0.994 (0.968 .. 1.08)    1.02
    batches of 1                    0.998 (0.955 .. 1.42)   0.998 (0.956 .. 1.42)    1.01
    batches of 8                    0.998 (0.981 .. 1.04)   0.994 (0.981 .. 1.03)    1.02
    2 processes, 1 KB rows           1.05 (0.599 .. 1.13)   0.979 (0.939 .. 1.14)       1
    2 processes, 150 KB rows       0.913 (0.826 .. 0.988)  0.903 (0.854 .. 0.977)       1
    100 rows, 2 processes, by CPU    0.96 (0.931 .. 1.14)    1.04 (0.923 .. 1.21)    1.01
    random flip                     0.966 (0.661 .. 1.45)    0.965 (0.66 .. 1.46)    1.01
    windows of an array               1.07 (0.955 .. 1.3)     1.08 (0.958 .. 1.3)    0.99
    every other column               1.07 (0.962 .. 1.28)    1.08 (0.979 .. 1.27)    1.02
    JPEGs of 32 x 32, by CPU        0.957 (0.899 .. 1.09)     0.957 (0.9 .. 1.09)       1
    large PNGs, by CPU               1.01 (0.957 .. 1.03)    1.01 (0.958 .. 1.03)       1
    echo around a fast loader       0.986 (0.969 .. 1.01)   0.906 (0.812 .. 1.05)    1.01
    first batch, 100,000 files       1.11 (0.917 .. 1.74)    1.11 (0.919 .. 1.73)    1.01
    [end]

These rows are of commit 9f09e8c8 against 1b40195c, the one before the house became smaller (the row
of 100 rows is that of processes forked anew). Below 0.95 of the processor time before:

- photographs, echo 2, and README's chain: their functions are users' code, which two ``.workers()``
  call in processes since then, as threads cannot be known to be right for it. By threads, asked for
  by ``kind="thread"``, photographs are 1.05 of the limit by hand, so ``paths.py`` asks for these.
- 2 processes, 150 KB rows: 147 to 171 us an example, before 135 to 168. Why is not known.
- echo around a fast loader: 0.81 to 1.05 in five rounds; by the clock 0.99.

Five more benches, of commit 6ed33569 against 1b40195c, each by both versions in turns, three times
(images.py and sources.py twice); processor time before over after, sources.py by the clock:

- cache_hits.py: 11 of 12 rows of stoker's 0.85 (110 KB inline) to 1.09, where those by hand scatter
  from 0.83 to 1.60. The twelfth was 0.12: 3 MB by two threads. Examples of a user's dataset that
  are in the cache went through processes, in the version before in one of three runs. Since then
  they go past these.
- echo_overhead.py: 0.93 to 1.13, but for an echo before the batch, rows of 12 KB: 0.41. Rows in
  memory went past the pool then, a path of its own that has gone.
- tables.py: of the best of six, 27 of 32 rows are 0.96 or more. Five of Parquet in batches of 4,096
  and in later epochs are 0.89 to 0.94: nulls, lists, rows that are kept. pyarrow takes these rows
  now, which were copied by their addresses.
- images.py: 0.98 to 1.06 but for small images by Pillow, which are decoded in one thread or two, by
  chance and load, in both versions (0.46 to 1.35).
- sources.py: 0.90 to 1.21, but for two threads that decode 64 x 64 by Pillow: 0.5. They stayed, and
  made fewer rows than one, as a trial compared alone how busy they are. Since then it compares
  rows, too: 148 to 240 us an example, in the version before 162 to 203.

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
