"""How fast do shuffled batches of an array in memory come?

The case of https://github.com/pytorch/pytorch/issues/154318: 200,000 rows of 100 floats, shuffled,
in batches of 20,000, as torch's tensors. Whole epochs, in turns.

- direct indexing: ``rows[order[i : i + 20_000]]`` over torch's ``randperm``.
- DataLoader: over a ``TensorDataset``, without workers and with two, which are kept; and with a
  ``BatchSampler`` as its sampler, so that the dataset is asked for a whole batch.

Command::

    python bench/in_memory.py

Target: at least as fast as direct indexing.

Machine: two cores, 24 GiB; Python 3.11.7, NumPy 2.4.6, torch 2.13.0.

Results::

    [results/in_memory.json]
    an epoch of 200,000 rows      ms          it / stoker
    -----------------------------------------------------
    stoker                      14.5           1 (1 .. 1)
    direct indexing             26.7  1.83 (0.643 .. 1.9)
    DataLoader                1022.8  69.6 (23.1 .. 71.7)
    DataLoader, 2 workers      583.5  40.5 (13.9 .. 41.5)
    DataLoader, BatchSampler    68.2  4.66 (1.69 .. 4.92)
    [end]

Caveats: in one of the five rounds stoker was slow (the low ends). Nothing else ran.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
from harness import Ratio, Report, interleaved, parser, report

import stoker

BATCH = 20_000
EPOCHS = 5


def evaluate(found: Report) -> None:
    """Show times, and hold stoker against direct indexing."""
    cases = {row["case"]: row["epoch_s"] for row in found.rows}
    lines = [
        (name, f"{1e3 * np.median(each):.1f}", Ratio.of(each, cases["stoker"]))
        for name, each in cases.items()
    ]
    found.show(("an epoch of 200,000 rows", "ms", "it / stoker"), lines)
    ratio = Ratio.of(cases["direct indexing"], cases["stoker"]).median
    found.expect("direct indexing, over stoker", ratio, 1.0)


def main() -> None:
    arguments = parser(__doc__, evaluate).parse_args()
    import torch
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

    draws = np.random.default_rng(0).random((BATCH if arguments.quick else 200_000, 100))
    rows = torch.from_numpy(draws.astype(np.float32))
    dataset = TensorDataset(rows)
    batches = BatchSampler(RandomSampler(dataset), BATCH, drop_last=False)

    def indexed() -> Iterable[Any]:
        order = torch.randperm(len(rows))
        return (rows[order[i : i + BATCH]] for i in range(0, len(rows), BATCH))

    ours = stoker.from_arrays(rows.numpy(), seed=0).shuffle().batch(BATCH).to_torch()
    loader: dict[str, Iterable[Any]] = {
        "DataLoader": DataLoader(dataset, BATCH, shuffle=True),
        "DataLoader, 2 workers": DataLoader(
            dataset, BATCH, shuffle=True, num_workers=2, persistent_workers=True
        ),
        "DataLoader, BatchSampler": DataLoader(dataset, None, sampler=batches),
    }

    def epoch_s(made: Callable[[], Iterable[Any]]) -> float:
        began = time.perf_counter()
        for _ in range(EPOCHS):
            for _ in made():
                pass
        return (time.perf_counter() - began) / EPOCHS

    cases = {"stoker": partial(epoch_s, lambda: ours), "direct indexing": partial(epoch_s, indexed)}
    cases |= {name: partial(epoch_s, each.__iter__) for name, each in loader.items()}
    with report(__file__, arguments) as found:
        for case, each in interleaved(cases, 1 if arguments.quick else arguments.rounds).items():
            found.add(case=case, epoch_s=each)


if __name__ == "__main__":
    main()
