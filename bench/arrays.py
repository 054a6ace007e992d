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

    case                             examples/s   stoker / it, whole     behind the first  first ms
    -----------------------------------------------------------------------------------------------
    stoker                            1,794,379           1 (1 .. 1)           1 (1 .. 1)      5.31
    numpy                             1,669,181  1.06 (1.01 .. 1.33)   1.24 (1.17 .. 1.6)      2.24
    torch, 0 workers                     65,175  27.5 (25.8 .. 31.2)    33.8 (32 .. 38.5)     10.53
    torch, 2 workers                     56,166  31.7 (29.9 .. 41.5)    38.6 (36.9 .. 51)     19.44
    torch, 0 workers, whole batches     232,757  7.72 (7.21 .. 7.77)  9.37 (8.84 .. 9.56)      6.15
    torch, 2 workers, whole batches      82,138  21.5 (20.8 .. 22.2)  26.8 (25.5 .. 27.3)     16.81
    dali                                142,693  12.6 (11.7 .. 13.1)  15.4 (14.5 .. 16.5)      5.52
    grain                                26,506  67.5 (63.2 .. 69.3)  85.1 (78.9 .. 85.3)     21.64
    spdl                                169,951  10.5 (9.71 .. 11.9)   8.2 (7.64 .. 9.93)      6.86
    tensorflow                           80,200  22.2 (12.8 .. 22.8)  9.46 (8.66 .. 9.95)    160.59

Caveats: a sample is as many epochs as fit in 0.3 s, one at least; processes and threads that a
peer keeps between epochs are started before (``start_s`` in the rows). The check before the
first round sees that every row comes once in an epoch. DALI, Grain and SPDL gather
whole batches with NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from harness import Ratio, interleaved, parser, report
from peers import environment
from peers.serve import Epochs, arrays, check, timed

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


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--peers", default="", help=f"'all', or some of: {', '.join(environment.known())}"
    )
    options.add_argument("--install", action="store_true", help="make the peers' environments")
    arguments = options.parse_args()
    names = environment.known() if arguments.peers == "all" else arguments.peers.split(",")
    rows, least_s, rounds = (2_000, 0.0, 1) if arguments.quick else (50_000, 0.3, arguments.rounds)
    images, labels = arrays(rows)
    pipeline = stoker.from_arrays(images, labels).shuffle().workers(WORKERS).batch(BATCH)
    here: dict[str, Epochs] = {
        "stoker": lambda: pipeline,
        "numpy": numpy_loop(images, labels),
        **torch_loaders(images, labels),
    }
    with report(__file__, arguments) as found, ExitStack() as stack:
        cases: dict[str, Callable[[], dict[str, float]]] = {}
        for name, epoch in here.items():
            check(epoch, rows)
            cases[name] = partial(timed, epoch, least_s)
        for name in filter(None, names):
            if arguments.install:
                environment.install(name)
            if not environment.python(name).exists():
                raise SystemExit(f".peers/{name} is not there: add --install")
            peer = environment.Peer(name, rows, BATCH, WORKERS)
            stack.callback(peer.close)
            cases[name] = partial(peer.timed, least_s)
            found.add(peer=name, **peer.about)
        samples = interleaved(cases, rounds)
        lines = []
        whole = {n: [s["examples"] / s["total_s"] for s in each] for n, each in samples.items()}
        steady = {
            n: [s["steady_examples"] / s["steady_s"] for s in each] for n, each in samples.items()
        }
        for name, each in samples.items():
            whole_ratio = Ratio.of(whole["stoker"], whole[name])
            steady_ratio = Ratio.of(steady["stoker"], steady[name])
            first_ms = 1e3 * sorted(s["first_s"] / s["epochs"] for s in each)[rounds // 2]
            rate = sorted(whole[name])[rounds // 2]
            lines.append((name, f"{rate:,.0f}", whole_ratio, steady_ratio, f"{first_ms:.2f}"))
            found.add(case=name, samples=each)
            if name == "numpy":
                found.expect("whole epochs of the NumPy loop", whole_ratio.median, 1.0)
            elif name != "stoker":
                found.expect(f"whole epochs of {name}", whole_ratio.median, 1.0)
                found.expect(f"behind the first batch, of {name}", steady_ratio.median, 1.0)
        head = ("case", "examples/s", "stoker / it, whole", "behind the first", "first ms")
        found.show(head, lines)


if __name__ == "__main__":
    main()
