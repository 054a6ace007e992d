"""Actors of Ray on this host against as many worker processes: what does the socket cost?

JPEGs in memory are decoded with Pillow, cropped at random and resized to 224, in batches of 16 (2.4
MB) and of 256 (38.5 MB), by two workers of each kind. The actors and the trainer share the host, so
that all bytes cross its loopback, and the trainer's share of the work is paid for by the same
cores.

Command::

    python bench/ray_workers.py

Target: at least 0.75 of worker processes at 2.4 MB, whole epochs, the start of processes and the
connections of actors included.

Machine: two cores of an AMD EPYC, 24 GiB, no GPU; Python 3.11.7, NumPy 2.4.6, Ray 2.60.0.

Results (five rounds), while other programs kept the cores busy (load average 10.9 at the start), so
that rates are a fraction of what the machine can do, and ratios differ from round to round::

    [results/ray_workers.json]
    batches of 2.4 MB  examples/s        it / processes  trainer's CPU / processes'
    -------------------------------------------------------------------------------
    processes                 125            1 (1 .. 1)                  1 (1 .. 1)
    actors                    131  1.06 (0.521 .. 1.29)          1.2 (1.05 .. 1.57)

    batches of 38.5 MB  examples/s        it / processes  trainer's CPU / processes'
    --------------------------------------------------------------------------------
    processes                  252            1 (1 .. 1)                  1 (1 .. 1)
    actors                     241  0.908 (0.79 .. 1.21)         1.32 (1.04 .. 1.59)
    [end]

Actors of Ray run at niceness 15 unless ``RAY_worker_niceness`` says otherwise; here it is 0, as
that of processes.
"""

from __future__ import annotations

import os
import secrets
import time
import warnings
from functools import partial
from statistics import median
from typing import Any

from gil import Files, crop, made_jpegs
from harness import Ratio, Report, interleaved, parser, report

import stoker

BATCHES = {"2.4 MB": 16, "38.5 MB": 256}
WORKERS = 2


def timed(pipeline: Any) -> dict[str, float]:
    """Return the examples a second of an epoch, and the processor time of the trainer for each."""
    cpu_s, began = time.process_time(), time.perf_counter()
    examples = sum(len(labels) for _, labels in pipeline)
    elapsed_s = time.perf_counter() - began
    return {
        "examples_per_s": examples / elapsed_s,
        "trainer_cpu_s": (time.process_time() - cpu_s) / examples,
    }


def evaluate(found: Report) -> None:
    """Hold actors against processes."""
    for size in dict.fromkeys(row["batch"] for row in found.rows):
        samples = {row["case"]: row["samples"] for row in found.rows if row["batch"] == size}
        rates = {c: [each["examples_per_s"] for each in s] for c, s in samples.items()}
        cpu = {c: [each["trainer_cpu_s"] for each in s] for c, s in samples.items()}
        found.show(
            (f"batches of {size}", "examples/s", "it / processes", "trainer's CPU / processes'"),
            [
                (
                    case,
                    f"{median(rates[case]):,.0f}",
                    Ratio.of(rates[case], rates["processes"]),
                    Ratio.of(cpu[case], cpu["processes"]),
                )
                for case in samples
            ],
        )
        if size == "2.4 MB":
            ratio = Ratio.of(rates["actors"], rates["processes"]).median
            found.expect(f"actors of processes, batches of {size}", ratio, 0.75)


def main() -> None:
    arguments = parser(__doc__, evaluate).parse_args()
    # Ray reads these when it is imported: a token that does not stay in the user's home, and actors
    # that have as much of a core as anybody else.
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_worker_niceness": "0",
    }
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    import ray

    ray.init(
        address="local",
        num_cpus=WORKERS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    rounds = 1 if arguments.quick else arguments.rounds
    files = list(made_jpegs(64 if arguments.quick else 512))
    files *= 1 if arguments.quick else 4
    crops = stoker.from_dataset(Files(files), seed=0).shuffle().random_map(crop, on=0)
    try:
        with report(__file__, arguments) as found:
            for size, batch in BATCHES.items():
                kinds = {"processes": "process", "actors": "ray"}
                cases = {
                    name: partial(timed, crops.batch(batch).workers(WORKERS, kind=kind))
                    for name, kind in kinds.items()
                }
                for case, samples in interleaved(cases, rounds).items():
                    found.add(batch=size, case=case, samples=samples)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
