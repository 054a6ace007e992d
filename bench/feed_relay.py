"""What jobs on another host get of a feed through a relay, beside jobs on the feeder's own host.

Both are on one machine here, over the loopback interface: feeder, relay and jobs share its cores,
which hosts do not. So a relay's ratio is a lower bound where the network is not the limit.

Batches of 2.4 MB and of 38 MB (float32) that are all ready, and batches of 64 examples that take
2 ms of CPU each, to one and to four jobs that only consume: batches/s of each job, and the CPU time
of all processes for a batch of each job.

Command::

    python bench/feed_relay.py

Target: where preparation is the limit, jobs at a relay at least 0.85 times as fast as jobs beside
the feeder.

Machine: two cores of an Intel Xeon, 24 GiB, Linux 6.18; Python 3.11.7.

Results (three rounds, beside other work: load averages of 8 to 12 on the two cores; the relay then
still looked at the free memory for every batch, which it does not any more)::

    [results/feed_relay.json]
    batches/s a job         direct  relay            relay / direct         its CPU time
    ------------------------------------------------------------------------------------
    2.4 MB, ready, 1 job     982.2  109.2    0.111 (0.0862 .. 0.22)  10.3 (7.64 .. 10.8)
    2.4 MB, ready, 4 jobs    541.1   88.7    0.163 (0.155 .. 0.177)  6.05 (5.53 .. 6.23)
    38 MB, ready, 1 job      182.6   16.5   0.0812 (0.0786 .. 0.12)  11.2 (9.56 .. 11.7)
    38 MB, ready, 4 jobs     176.6   16.7  0.0947 (0.0646 .. 0.166)  7.36 (6.58 .. 11.6)
    prepared, 2 ms, 1 job      3.2    4.8      1.04 (0.995 .. 1.49)  1.04 (1.03 .. 1.04)
    prepared, 2 ms, 4 jobs     4.3    4.3     0.986 (0.529 .. 1.33)     1.03 (1 .. 1.09)
    [end]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from harness import Ratio, Report, interleaved, parser, report

import stoker

LIMIT_S = 120.0
CASES = {
    "ready_small": "2.4 MB, ready",
    "ready_large": "38 MB, ready",
    "prepared": "prepared, 2 ms",
}


class Ready:
    """Examples that are one array again and again."""

    def __init__(self, size: int) -> None:
        self._array = np.ones(size, np.float32)

    def __len__(self) -> int:
        return 64 * 100_000

    def __getitem__(self, index: int) -> Any:
        return self._array


class Costly(Ready):
    """Examples that take 2 ms of CPU each."""

    def __getitem__(self, index: int) -> Any:
        until_s = time.thread_time() + 0.002
        while time.thread_time() < until_s:
            pass
        return self._array


def ready_small() -> stoker.Pipeline:
    return stoker.from_dataset(Ready(9_408), seed=0).batch(64)


def ready_large() -> stoker.Pipeline:
    return stoker.from_dataset(Ready(150_528), seed=0).batch(64)


def prepared() -> stoker.Pipeline:
    return stoker.from_dataset(Costly(9_408), seed=0).batch(64)


JOB = """
import json, sys, time
import stoker

name = sys.argv[1]
batches = iter(stoker.from_feed(name, insecure=name.startswith("tcp://")))
for _ in range(3):
    next(batches)
print("ready", flush=True)
until = time.monotonic() + float(sys.stdin.readline())
came = [time.monotonic()]
while came[-1] < until:
    next(batches)
    came.append(time.monotonic())
print(json.dumps((len(came) - 1) / (came[-1] - came[0])), flush=True)
"""


@contextlib.contextmanager
def feeding(case: str, jobs: int) -> Any:
    """Serve a pipeline of this script; yield its name, its port and the feeder."""
    held = socket.socket()  # bound while the feeder listens: nobody else is given the port
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    name = f"bench-{os.getpid()}"
    command = ["feed", f"{__file__}:{case}", "--name", name, "--listen", f"127.0.0.1:{port}"]
    command += ["--insecure"]  # bench/encryption.py has the cost of encryption
    feeder = subprocess.Popen(
        [sys.executable, "-c", "from stoker.cli import main; main()", *command, f"--jobs={jobs}"],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield name, port, feeder
    finally:
        feeder.kill()
        feeder.wait()
        held.close()


def cpu_s(roots: list[int]) -> float:
    """Return the CPU time of these processes and of relays."""
    spent = 0.0
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or ()
        if process.pid in roots or any("stoker.feed.autostart" in part for part in line):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                spent += times.user + times.system
    return spent


def run(case: str, arm: str, jobs: int, window_s: float) -> dict[str, float]:
    """Return batches/s of a job, and CPU time for a batch of each job."""
    with contextlib.ExitStack() as undo:
        name, port, feeder = undo.enter_context(feeding(case, jobs if arm == "direct" else 1))
        feed = name if arm == "direct" else f"tcp://127.0.0.1:{port}/{name}"
        running = [
            subprocess.Popen(
                [sys.executable, "-c", JOB, feed],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(jobs)
        ]
        for job in running:
            undo.callback(job.communicate)
            undo.callback(job.kill)

        def give_up() -> None:
            for job in running:
                job.kill()

        watchdog = threading.Timer(LIMIT_S, give_up)
        watchdog.start()
        undo.callback(watchdog.cancel)
        for job in running:
            assert job.stdout is not None
            if not job.stdout.readline():
                raise RuntimeError(f"a job ended with code {job.wait()}")
        roots = [feeder.pid, *(job.pid for job in running)]
        before_s = cpu_s(roots)
        for job in running:
            assert job.stdin is not None
            print(window_s, file=job.stdin, flush=True)
        time.sleep(window_s)
        spent_s = cpu_s(roots) - before_s
        rates = [json.loads(job.stdout.readline()) for job in running if job.stdout is not None]
    rate = statistics.mean(rates)
    return {"rate": rate, "cpu_ms": 1e3 * spent_s / (rate * window_s)}


def main() -> None:
    arguments = parser(__doc__, evaluate).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["STOKER_TOKEN_FILE"] = str(Path(folder) / "token")
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    quick = arguments.quick
    window_s, rounds = (0.3, 1) if quick else (4.0, arguments.rounds)
    cases = ["ready_small"] if quick else list(CASES)
    with report(__file__, arguments) as made:
        trials = {
            f"{case} {arm} {jobs}": lambda c=case, a=arm, j=jobs: run(c, a, j, window_s)
            for case in cases
            for jobs in ((1,) if quick else (1, 4))
            for arm in ("direct", "relay")
        }
        for key, rows in interleaved(trials, rounds).items():
            case, arm, jobs = key.split()
            for number, row in enumerate(rows):
                made.add(case=case, arm=arm, jobs=int(jobs), round=number, **row)


def evaluate(made: Report) -> None:
    found: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in made.having("arm"):
        found.setdefault((row["case"], row["jobs"], row["arm"]), []).append(row)
    rows = []
    for case, jobs in dict.fromkeys((case, jobs) for case, jobs, _ in found):
        direct, relay = found[case, jobs, "direct"], found[case, jobs, "relay"]
        ratio, cpu = (
            Ratio.of([row[what] for row in relay], [row[what] for row in direct])
            for what in ("rate", "cpu_ms")
        )
        rates = [statistics.median(row["rate"] for row in each) for each in (direct, relay)]
        jobs_text = f"{jobs} job{'s' * (jobs > 1)}"
        rows.append((f"{CASES[case]}, {jobs_text}", *(f"{r:,.1f}" for r in rates), ratio, cpu))
        if case == "prepared":
            made.expect(f"relay over direct, {jobs_text}", ratio.median, 0.85)
    made.show(("batches/s a job", "direct", "relay", "relay / direct", "its CPU time"), rows)


if __name__ == "__main__":
    main()
