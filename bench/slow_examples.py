"""How much do slow examples hold up, and what does it cost to repeat a run in which they did not?

800 examples that sleep, 4 ms in the mean, in batches of 16, shuffled, from eight workers; a step
of the consumer takes 8 ms, as long as eight workers need for a batch. Times of the shapes that the
paper of MinatoLoader (EuroSys '26) has: all equal; log-normal (sigma 1); one in five ten times as
long as the others; one in a hundred 80 ms; one example 400 ms.

stoker in order, with ``late=2``, and with ``late=2`` that repeats a record of another run;
torch's ``DataLoader`` in order and with ``in_order=False``, with eight worker processes, which stay
for all epochs; SPDL, with eight threads, in order and as examples come (``output_order``). stoker's
workers are threads. Wall time of an epoch, in turns.

And what ``late=2`` and ``timeout_s=`` cost where no example is slow: the processor time of this
process for an example of 20 us, with two threads; "over" is by how much it grows.

Command::

    python bench/slow_examples.py --install --peers spdl    # once; then without --install

Targets: ``late=2`` at 0.9 or more of the speed of unordered delivery, for each shape.

Machine: two cores of an AMD EPYC, 24 GiB; Python 3.11.7, torch 2.13.0. Nothing ran beside it.

Results::

    [results/slow_examples.json]
    times                                            epoch, s  speed over in_order=False
    ------------------------------------------------------------------------------------
    equal                          stoker, in order      0.44        1.14 (1.03 .. 1.14)
    equal                            stoker, late=2      0.43        1.15 (1.15 .. 1.16)
    equal                  stoker, late=2, replayed      0.44        1.15 (1.13 .. 1.16)
    equal                      DataLoader, in order      0.50      0.997 (0.993 .. 1.01)
    equal                DataLoader, in_order=False      0.50                 1 (1 .. 1)
    equal                            SPDL, in order      0.53     0.959 (0.948 .. 0.964)
    equal                        SPDL, as they come      0.55     0.905 (0.894 .. 0.912)
    log-normal                     stoker, in order      0.49      0.98 (0.968 .. 0.993)
    log-normal                       stoker, late=2      0.45        1.08 (1.06 .. 1.09)
    log-normal             stoker, late=2, replayed      0.45        1.07 (1.06 .. 1.09)
    log-normal                 DataLoader, in order      0.54      0.89 (0.842 .. 0.948)
    log-normal           DataLoader, in_order=False      0.48                 1 (1 .. 1)
    log-normal                       SPDL, in order      1.02     0.479 (0.464 .. 0.486)
    log-normal                   SPDL, as they come      0.55     0.887 (0.858 .. 0.894)
    one in five                    stoker, in order      0.46        1.04 (1.03 .. 1.06)
    one in five                      stoker, late=2      0.43         1.12 (1.1 .. 1.12)
    one in five            stoker, late=2, replayed      0.43        1.12 (1.09 .. 1.13)
    one in five                DataLoader, in order      0.53     0.886 (0.812 .. 0.947)
    one in five          DataLoader, in_order=False      0.48                 1 (1 .. 1)
    one in five                      SPDL, in order      1.03     0.466 (0.454 .. 0.485)
    one in five                  SPDL, as they come      0.54     0.885 (0.872 .. 0.911)
    one in 100 of 80 ms            stoker, in order      0.76      0.65 (0.565 .. 0.737)
    one in 100 of 80 ms              stoker, late=2      0.51        0.97 (0.95 .. 1.11)
    one in 100 of 80 ms    stoker, late=2, replayed      0.51       0.968 (0.95 .. 1.09)
    one in 100 of 80 ms        DataLoader, in order      0.60     0.817 (0.759 .. 0.924)
    one in 100 of 80 ms  DataLoader, in_order=False      0.49                 1 (1 .. 1)
    one in 100 of 80 ms              SPDL, in order      1.05     0.466 (0.457 .. 0.621)
    one in 100 of 80 ms          SPDL, as they come      0.59     0.868 (0.833 .. 0.915)
    one of 400 ms                  stoker, in order      0.83     0.969 (0.649 .. 0.975)
    one of 400 ms                    stoker, late=2      0.81         0.994 (0.666 .. 1)
    one of 400 ms          stoker, late=2, replayed      0.81         0.996 (0.665 .. 1)
    one of 400 ms              DataLoader, in order      0.86      0.92 (0.637 .. 0.966)
    one of 400 ms        DataLoader, in_order=False      0.80                 1 (1 .. 1)
    one of 400 ms                    SPDL, in order      0.92     0.873 (0.583 .. 0.879)
    one of 400 ms                SPDL, as they come      0.62       1.25 (0.812 .. 1.33)

    20 us of work, two threads  us an example  over
    -----------------------------------------------
    neither                              22.5   0.0
    late=2                               25.0   2.5
    timeout_s=60                         46.5  24.1
    [end]

With ``timeout_s=`` threads read, map and deliver examples one by one, so that it is known which one
is stuck: 57 calls an example more, of which its stamps are six.

Caveats: it sleeps, so that a processor is never short. ``DataLoader`` hands out whole batches out
of order, each made by one worker; SPDL makes batches of the examples that are ready, each of which
is a task of its own there. A replay waits for the examples that the recorded run had, and the times
are the same in it, so it can be as fast; where other examples are slow it is slower.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import Ratio, Report, interleaved, parser, report
from peers import environment, racing

import stoker

MEAN_S, STEP_S = 0.004, 0.008
COUNT, GROUP, WORKERS = 800, 16, 8
IN_ORDER, LATE, REPLAYED = "stoker, in order", "stoker, late=2", "stoker, late=2, replayed"
TORCH, UNORDERED = "DataLoader, in order", "DataLoader, in_order=False"
SPDL = {"SPDL, in order": "input", "SPDL, as they come": "completion"}


def times_s(shape: str, count: int) -> np.ndarray:
    """Return how long each example takes, float64 [count]."""
    rng = np.random.default_rng(0)
    match shape:
        case "equal":
            return np.full(count, MEAN_S)
        case "log-normal":
            return MEAN_S * rng.lognormal(-0.5, 1.0, count)
        case "one in five":
            return np.where(rng.random(count) < 0.2, 10, 1) * MEAN_S / 2.8
        case "one in 100 of 80 ms":
            return np.where(rng.random(count) < 0.01, 0.08, MEAN_S - 0.0008)
        case _:
            found = np.full(count, MEAN_S)
            found[count // 2] = 100 * MEAN_S
            return found


PLAIN = "neither"
SHAPES = ("equal", "log-normal", "one in five", "one in 100 of 80 ms", "one of 400 ms")


class Unequal:
    """Examples that take their time."""

    def __init__(self, seconds: np.ndarray) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return len(self._seconds)

    def __getitem__(self, index: int) -> np.ndarray:
        time.sleep(self._seconds[index])
        return np.full(8, index)


def busy(row: np.ndarray) -> np.ndarray:
    """Keep a processor busy for 20 us."""
    end = time.perf_counter_ns() + 20_000
    while time.perf_counter_ns() < end:
        pass
    return row


def example_us(batches: Iterable[np.ndarray]) -> float:
    """Return the processor time of an epoch for each example."""
    began = time.process_time()
    examples = sum(map(len, batches))
    return (time.process_time() - began) / examples * 1e6


def epoch_s(batches: Iterable[object]) -> float:
    """Time an epoch with steps."""
    began = time.perf_counter()
    for _ in batches:
        time.sleep(STEP_S)
    return time.perf_counter() - began


@contextmanager
def of_spdl(seconds: np.ndarray, peers: list[str]) -> Iterator[dict[str, Callable[[], float]]]:
    """Start SPDL in a process for each order, if it is among the peers; yield their epochs."""
    started: dict[str, environment.Peer] = {}
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file, seconds)
        file.flush()
        script = Path(__file__).parent / "peers" / "spdl_slow.py"
        try:
            for name, order in SPDL.items() if "spdl" in peers else ():
                arguments = (file.name, order, GROUP, WORKERS, STEP_S)
                command = (environment.python("spdl"), "-P", script, *arguments)
                started[name] = environment.Peer(command)
            yield {
                name: lambda peer=peer: float(peer.timed(0.0)["total_s"])  # type: ignore[misc]
                for name, peer in started.items()
            }
        finally:
            for peer in started.values():
                peer.close()


def evaluate(found: Report) -> None:
    """Show times, and hold late delivery against unordered delivery."""
    cases: dict[tuple[str, str], list[float]] = {
        (row["shape"], row["case"]): row["epoch_s"] for row in found.rows if "shape" in row
    }
    lines = []
    for (shape, name), each in cases.items():
        speed = Ratio.of(cases[shape, UNORDERED], each)
        lines.append((shape, name, f"{np.median(each):.2f}", speed))
    found.show(("times", "", "epoch, s", "speed over in_order=False"), lines)
    costs = {row["case"]: row["example_us"] for row in found.rows if "example_us" in row}
    found.show(
        ("20 us of work, two threads", "us an example", "over"),
        [
            (name, f"{np.median(each):.1f}", f"{np.median(each) - np.median(costs[PLAIN]):.1f}")
            for name, each in costs.items()
        ],
    )
    for shape in SHAPES:
        ratio = Ratio.of(cases[shape, UNORDERED], cases[shape, LATE]).median
        found.expect(f"{shape}: speed of late=2 over in_order=False", ratio, 0.9)


def main() -> None:
    options = parser(__doc__, evaluate)
    racing.add_options(options, {"spdl": ("spdl",)})
    arguments = options.parse_args()
    peers = racing.chosen(arguments, {"spdl": ("spdl",)})
    from torch.utils.data import DataLoader

    warnings.filterwarnings("ignore", message="This DataLoader will create 8 worker")
    with report(__file__, arguments) as found:
        for shape in SHAPES:
            seconds = times_s(shape, 160 if arguments.quick else COUNT)
            rows: Any = Unequal(seconds)

            def made(late: int = 0, replay: Any = None, rows: Any = rows) -> stoker.Pipeline:
                data = stoker.from_dataset(rows, seed=0).shuffle()
                return data.batch(GROUP, late=late, replay=replay).workers(WORKERS)

            first = made(2)
            epoch_s(first)
            record = first.record()
            loader = partial(
                DataLoader,
                rows,
                batch_size=GROUP,
                shuffle=True,
                num_workers=WORKERS,
                persistent_workers=True,
            )
            in_order, unordered = loader(), loader(in_order=False)
            cases: dict[str, Callable[[], float]] = {
                IN_ORDER: lambda: epoch_s(made()),
                LATE: lambda: epoch_s(made(2)),
                REPLAYED: lambda: epoch_s(made(2, record)),  # noqa: B023
                TORCH: partial(epoch_s, in_order),
                UNORDERED: partial(epoch_s, unordered),
            }
            rounds = 1 if arguments.quick else arguments.rounds
            with of_spdl(seconds, peers) as others:
                times = interleaved(cases | others, rounds)
            for case, each in times.items():
                found.add(shape=shape, case=case, epoch_s=each)
        array = np.zeros((1_000 if arguments.quick else 20_000, 64), np.float32)
        data = stoker.from_arrays(array, seed=0).shuffle().map(busy)
        costs = {
            PLAIN: partial(example_us, data.batch(64).workers(2)),
            "late=2": partial(example_us, data.batch(64, late=2).workers(2)),
            "timeout_s=60": partial(example_us, data.batch(64).workers(2, timeout_s=60)),
        }
        for case, each in interleaved(costs, rounds).items():
            found.add(case=case, example_us=each)


if __name__ == "__main__":
    main()
