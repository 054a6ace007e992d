"""Arrays in memory: is stoker as fast as indexing with NumPy, and ahead of every peer?

50,000 images uint8 32x32x3 with int64 labels, shuffled anew every epoch, batches of 256, two
workers, no map. Against a bare NumPy loop (a permutation, then ``X[perm[i : i + 256]]``), and
against peers at their best documented settings, each in an environment of its own.

Command::

    python bench/arrays.py                                   # NumPy, and torch where installed
    python bench/arrays.py --peers all --install             # makes .peers/NAME, then runs them

Targets: whole epochs at least 1.0 of the NumPy loop; whole epochs, and batches behind the
first, above 1.0 of every peer.

Machine: two cores of an Intel Xeon at 2.5 GHz, 24 GiB, no GPU; Python 3.11.7 (a plain loop
iteration takes 290 ns there, so that Python's own share weighs several times more than
usual), NumPy 2.4.6, torch 2.13.0.

Results::

    [results/arrays.json]
    case                             examples/s    stoker / it, whole     behind the first  first ms
    ------------------------------------------------------------------------------------------------
    stoker                            1,532,294            1 (1 .. 1)           1 (1 .. 1)      5.43
    numpy                             1,453,231  1.12 (0.964 .. 1.22)  1.28 (1.08 .. 1.39)      2.23
    torch, 0 workers                     58,605     25 (17.9 .. 29.8)  29.7 (21.3 .. 36.1)     10.66
    torch, 2 workers                     41,440   35.6 (35.3 .. 43.4)  42.4 (41.7 .. 52.5)     22.70
    torch, 0 workers, whole batches     207,363    7.4 (7.06 .. 8.84)  8.82 (8.32 .. 10.4)      6.27
    torch, 2 workers, whole batches      63,673       25 (23 .. 27.2)  30.1 (27.3 .. 32.1)     14.93
    dali                                122,339   12.6 (11.9 .. 13.7)    15 (14.1 .. 16.6)      6.31
    ffcv                                730,729   2.17 (1.96 .. 2.25)   2.48 (2.2 .. 2.58)      4.47
    grain                                22,137     67.9 (59 .. 75.1)  81.6 (69.6 .. 91.5)     21.87
    spdl                                154,600    10.1 (9.1 .. 13.8)  8.15 (7.22 .. 12.6)      7.69
    tensorflow                          126,563     13 (11.9 .. 18.2)   8.52 (7.3 .. 9.93)    164.94
    [end]

Caveats: a sample is as many epochs as fit in 0.3 s, one at least; processes and threads that a
peer keeps between epochs are started before (``start_s`` in the rows). The check before the
first round sees that every row comes once in an epoch. DALI, Grain and SPDL gather
whole batches with NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from harness import Ratio, Report, interleaved, parser, report
from peers import environment
from peers.serve import Epochs, arrays, check, steady_rates, timed, whole_rates

import stoker

BATCH = 256
WORKERS = 2


def numpy_loop(images: Any, labels: Any) -> Epochs:
    """Index with a permutation: the least that anybody can do."""
    generator = np.random.default_rng(0)

    def epoch() -> Iterator[tuple[Any, Any]]:
        order = generator.permutation(len(labels))
        for i in range(0, len(order), BATCH):
            indices = order[i : i + BATCH]
            yield images[indices], labels[indices]

    return epoch


def torch_loaders(images: Any, labels: Any) -> dict[str, Epochs]:
    """Return DataLoaders: with 0 and 2 workers, and fetching whole batches by a BatchSampler."""
    try:
        import torch
        from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
    except ImportError:
        return {}
    data = TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))

    def loader(workers: int, **settings: Any) -> Epochs:
        made: Iterable[Any] = DataLoader(
            data, num_workers=workers, persistent_workers=workers > 0, **settings
        )
        return lambda: made

    whole = BatchSampler(RandomSampler(data), BATCH, drop_last=False)
    return {
        "torch, 0 workers": loader(0, batch_size=BATCH, shuffle=True),
        "torch, 2 workers": loader(WORKERS, batch_size=BATCH, shuffle=True),
        "torch, 0 workers, whole batches": loader(0, batch_size=None, sampler=whole),
        "torch, 2 workers, whole batches": loader(WORKERS, batch_size=None, sampler=whole),
    }


def evaluate(found: Report) -> None:
    """Compare stoker with each case."""
    samples = {row["case"]: row["samples"] for row in found.having("case")}
    whole = {name: whole_rates(each) for name, each in samples.items()}
    steady = {name: steady_rates(each) for name, each in samples.items()}
    lines = []
    for name, each in samples.items():
        whole_ratio = Ratio.of(whole["stoker"], whole[name])
        steady_ratio = Ratio.of(steady["stoker"], steady[name])
        first_ms = 1e3 * median(s["first_s"] / s["epochs"] for s in each)
        rate = f"{median(whole[name]):,.0f}"
        lines.append((name, rate, whole_ratio, steady_ratio, f"{first_ms:.2f}"))
        if name == "numpy":
            found.expect("whole epochs of the NumPy loop", whole_ratio.median, 1.0)
        elif name != "stoker":
            found.expect(f"whole epochs of {name}", whole_ratio.median, 1.0)
            found.expect(f"behind the first batch, of {name}", steady_ratio.median, 1.0)
    head = ("case", "examples/s", "stoker / it, whole", "behind the first", "first ms")
    found.show(head, lines)


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument(
        "--peers", default="", help=f"'all', or some of: {', '.join(environment.known())}"
    )
    options.add_argument("--install", action="store_true", help="make the peers' environments")
    arguments = options.parse_args()
    names = environment.known() if arguments.peers == "all" else arguments.peers.split(",")
    rows, least_s, rounds = (2_000, 0.0, 1) if arguments.quick else (50_000, 0.3, arguments.rounds)
    images, labels = arrays(rows)
    pipeline = stoker.from_arrays(images, labels).shuffle().workers(WORKERS).batch(BATCH)
    own: dict[str, Epochs] = {
        "stoker": lambda: pipeline,
        "numpy": numpy_loop(images, labels),
        **torch_loaders(images, labels),
    }
    with report(__file__, arguments) as found, ExitStack() as stack:
        cases: dict[str, Callable[[], dict[str, float]]] = {}
        for name, epoch in own.items():
            check(epoch, rows)
            cases[name] = partial(timed, epoch, least_s)
        for name in filter(None, names):
            if arguments.install:
                environment.install(name)
            if not environment.python(name).exists():
                raise SystemExit(f".peers/{name} is not there: add --install")
            here = environment.HERE
            program = ["-P", here / "serve.py", here / f"{name}.py", rows, BATCH, WORKERS]
            peer = environment.Peer([environment.python(name), *program])
            stack.callback(peer.close)
            cases[name] = partial(peer.timed, least_s)
            found.add(peer=name, **peer.about)
        for name, each in interleaved(cases, rounds).items():
            found.add(case=name, samples=each)


if __name__ == "__main__":
    main()
