"""Files behind a latency and a bandwidth: does stoker use all that a server gives?

A local HTTP server in a process of its own answers after 20 ms and sends 50 MB/s over all
connections. Whole shuffled epochs of files of about 100 KB (random bytes), batches of 64:

1. ``stoker.from_files(urls, requests=n)`` for n of 1, 8, 32 and 64, against the lower of two
   limits: the bandwidth's, and the concurrency's: n requests, each as long as the latency and the
   transfer of a file.
2. The best of these against torch's DataLoader at its best number of workers (1 to 32), whose
   dataset reads the same files, each worker on a connection that stays open (``http.client``).

Command::

    python bench/remote.py

Targets: at least 0.9 of the limit for every n; at least 1.0 of DataLoader.

Machine: two cores of an Intel Xeon at 2.5 GHz, 24 GiB, no GPU; Python 3.11.7, NumPy 2.4.6,
torch 2.13.0, aiohttp 3.14.5, fsspec 2026.9.0.

Results::

    [results/remote.json]
    case                 examples/s  limit              it / limit           it / best torch
    ----------------------------------------------------------------------------------------
    stoker, 1 requests         42.7   45.4    0.94 (0.93 .. 0.947)  0.0895 (0.088 .. 0.0903)
    stoker, 8 requests        341.0  363.3  0.939 (0.932 .. 0.945)     0.712 (0.709 .. 0.72)
    stoker, 32 requests       485.9  494.7  0.982 (0.965 .. 0.984)          1.02 (1 .. 1.02)
    stoker, 64 requests       482.4  494.7  0.975 (0.939 .. 0.978)      1.01 (0.969 .. 1.02)
    torch, 1 workers           43.5                                 0.0912 (0.091 .. 0.0913)
    torch, 2 workers           86.5                                    0.181 (0.18 .. 0.182)
    torch, 4 workers          172.5                                   0.362 (0.359 .. 0.363)
    torch, 8 workers          342.1                                   0.718 (0.714 .. 0.718)
    torch, 16 workers         477.2                                               1 (1 .. 1)
    torch, 32 workers         461.6                                   0.967 (0.951 .. 0.977)
    [end]

Caveats: the machine was not quiet throughout. At 8 requests both limits are near, and requests
wait for the bandwidth behind each other, whoever makes them: those of DataLoader's 8 workers too.
The server uses a third of one of the two cores; with 32 torch workers the other is shared by 33
processes. stoker opens its connections anew every epoch, DataLoader keeps its workers and their
connections. Epochs of one request at a time have fewer files, so that they end.
"""

from __future__ import annotations

import http.client
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from harness import Ratio, Report, interleaved, parser, report
from peers.serve import Epochs, timed, whole_rates

import stoker
from experiments.server import Server, serving

LATENCY_S = 0.02
BANDWIDTH_BYTES_PER_S = 50e6
MEAN_BYTES = 100_000
BATCH = 64
REQUESTS = (1, 8, 32, 64)
WORKERS = (1, 2, 4, 8, 16, 32)


class Files:
    """The files of a server, for DataLoader: one connection a worker."""

    _connection: http.client.HTTPConnection | None = None

    def __init__(self, host: str, paths: list[str]) -> None:
        self._host, self._paths = host, paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._host)
        self._connection.request("GET", self._paths[index])
        answer = self._connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"HTTP {answer.status}")
        return data, index


def columns(examples: list[tuple[bytes, int]]) -> tuple[list[bytes], Any]:
    """Put examples together as stoker does."""
    return [data for data, _ in examples], np.array([label for _, label in examples])


def fill(folder: Path, count: int) -> int:
    """Make files of 60 to 140 KB in ten classes; return how many bytes in all."""
    generator = np.random.default_rng(0)
    total = 0
    for number, size in enumerate(generator.integers(6, 15, count) * (MEAN_BYTES // 10)):
        place = folder / f"{number % 10}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:05}.jpg").write_bytes(generator.bytes(int(size)))
        total += int(size)
    return total


def stoker_cases(server: Server, folder: Path, limits: dict[int, float]) -> dict[str, Epochs]:
    """Return an epoch for each number of requests."""
    made: dict[str, Epochs] = {}
    for n in limits:
        place = folder / ("few" if n == 1 else "many")
        urls = [f"{server.url}/{path.relative_to(folder)}" for path in sorted(place.rglob("*.jpg"))]
        pipeline = stoker.from_files(urls, requests=n, seed=0).shuffle().batch(BATCH)
        made[f"stoker, {n} requests"] = partial(iter, pipeline)
    return made


def torch_cases(server: Server, folder: Path, workers: tuple[int, ...]) -> dict[str, Epochs]:
    """Return an epoch for each number of workers."""
    from torch.utils.data import DataLoader

    made: dict[str, Epochs] = {}
    for n in workers:
        place = folder / ("few" if n == 1 else "many")
        paths = [f"/{path.relative_to(folder)}" for path in sorted(place.rglob("*.jpg"))]
        loader: Any = DataLoader(
            Files(server.url.partition("://")[2], paths),  # type: ignore[arg-type]
            batch_size=BATCH,
            shuffle=True,
            num_workers=n,
            collate_fn=columns,
            persistent_workers=True,
        )
        made[f"torch, {n} workers"] = partial(iter, loader)
    return made


def evaluate(found: Report) -> None:
    """Hold stoker against the limits, and the best against the best."""
    rates = {row["case"]: whole_rates(row["samples"]) for row in found.rows}
    limits = {row["case"]: row["limit"] for row in found.rows if row["limit"] is not None}
    middle = {case: median(each) for case, each in rates.items()}
    ours = max((n for n in middle if n.startswith("stoker")), key=middle.__getitem__)
    theirs = max((n for n in middle if n.startswith("torch")), key=middle.__getitem__)
    of_limit = {n: Ratio.of(rates[n], [limit] * len(rates[n])) for n, limit in limits.items()}
    found.show(
        ("case", "examples/s", "limit", "it / limit", "it / best torch"),
        [
            (
                case,
                f"{middle[case]:,.1f}",
                f"{limits[case]:,.1f}" if case in limits else "",
                of_limit.get(case, ""),
                Ratio.of(rates[case], rates[theirs]),
            )
            for case in rates
        ],
    )
    for case, ratio in of_limit.items():
        found.expect(f"{case}: of the limit", ratio.median, 0.9)
    best = Ratio.of(rates[ours], rates[theirs]).median
    found.expect(f"{ours} of {theirs}", best, 1.0)


def main() -> None:
    arguments = parser(__doc__, evaluate).parse_args()
    warnings.filterwarnings("ignore", "This DataLoader will create")
    few, many, rounds = (16, 64, 1) if arguments.quick else (128, 2048, arguments.rounds)
    workers = WORKERS[:2] if arguments.quick else WORKERS
    with report(__file__, arguments) as found, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fill(folder / "few", few)
        mean_bytes = fill(folder / "many", many) / many
        transfer_s = mean_bytes / BANDWIDTH_BYTES_PER_S
        limits = {n: min(1 / transfer_s, n / (LATENCY_S + transfer_s)) for n in REQUESTS}
        limited = {f"stoker, {n} requests": limit for n, limit in limits.items()}
        with serving(
            folder, latency_s=LATENCY_S, bandwidth_bytes_per_s=BANDWIDTH_BYTES_PER_S
        ) as server:
            epochs = {
                **stoker_cases(server, folder, limits),
                **torch_cases(server, folder, workers),
            }
            cases: dict[str, Callable[[], dict[str, float]]] = {
                case: partial(timed, epoch) for case, epoch in epochs.items()
            }
            samples = interleaved(cases, rounds)
            del epochs, cases  # torch's workers end here
        for case, each in samples.items():
            found.add(case=case, limit=limited.get(case), samples=each)


if __name__ == "__main__":
    main()
