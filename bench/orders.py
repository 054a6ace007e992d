"""What an order costs: to choose, once; to begin an epoch; and a place, beside torch's samplers.

Each case runs in a process of its own. Places are asked for in batches of 256, as the engine asks.
All times are processor time. Memory is what the process holds more than before, weights, masks and
numbers of the user's not counted (they are read-only, so stoker does not copy them); a list that
``.order(fn)`` returns is not counted either, but stoker's copy is.

Command::

    python bench/orders.py --rounds 1

Machine: two cores, 24 GiB, Linux; Python 3.11.7; others ran meanwhile (load average 30 to 35).

Results::

    [results/orders.json]
    order                     examples  once, ms  epoch, ms  place, ns       MB
    ---------------------------------------------------------------------------
    as it lies               1,000,000         0        0.2          3      0.1
    shuffle                  1,000,000         0       33.9          2      8.0
    select(mask)             1,000,000         1        0.3         35      0.1
    select(mask), shuffle    1,000,000         1       33.7        519      7.7
    shuffle(weights)         1,000,000         7       36.2        981     11.0
    order(list)              1,000,000         0        4.9          4      4.1
    mix, shuffle             1,000,000         1       33.3         37     13.0
    mix(fn), shuffle         1,000,000         0       30.8         93     15.0
    torch random             1,000,000         0       50.6         26     43.0
    torch weighted           1,000,000         6      284.2         24     60.6
    as it lies             100,000,000         0        0.2          4      0.1
    shuffle                100,000,000         0        3.9         36      1.7
    select(mask)           100,000,000        19        0.4         34     13.4
    select(mask), shuffle  100,000,000        28       45.0        453     16.9
    shuffle(weights)       100,000,000       176        5.7      1,949     32.5
    order(list)            100,000,000         0    1,181.7          4    400.1
    mix, shuffle           100,000,000         1       11.2        105      5.2
    mix(fn), shuffle       100,000,000         1       12.5        107      4.8
    torch random           100,000,000         0    9,244.8         25  4,015.8
    [end]

- ``select(mask)`` without a shuffle finds neighbours together; behind one it looks each place up.
- ``mix(fn)`` has weights that change: its 128 pieces are planned when the epoch begins.
- torch's ``WeightedRandomSampler`` refuses more than 2^24 weights, and so has no row of 10^8.
- Its draws are independent; none of torch's samplers draws evenly.
- Above 2^20 examples a permutation is computed as it is used; below, it takes 8 bytes each.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from harness import Report, parser, report

import stoker

LENGTHS = (1_000_000, 100_000_000)
QUICK_LENGTHS = (1_000, 2_000_000)
BATCH = 256
MOST_WEIGHTS = 1 << 24  # of torch.multinomial
SAMPLED = 400  # batches, after 8 to warm up
MOST_PLACE_NS = 3_000.0
MOST_SELECT_BYTES = 14_000_000.0

Order = Callable[[], Iterator[Any]]
"""Begins an epoch, and yields its numbers in batches."""


def read_only(values: Any) -> Any:
    values.flags.writeable = False
    return values


def weights(length: int) -> Any:
    random = np.random.default_rng(0)
    return read_only(random.pareto(1.5, length).astype(np.float32))


def mask(length: int) -> Any:
    return read_only(np.random.default_rng(0).random(length, np.float32) < 0.9)


def of_stoker(build: Callable[[stoker.Pipeline], stoker.Pipeline], length: int) -> Order:
    chain = build(stoker.from_dataset(range(length), seed=0)).chain

    def begin() -> Iterator[Any]:
        source = chain.plan.indexed
        assert source is not None
        order = source.order(chain.selection, 0, 0)
        return (order.span(at, at + BATCH) for at in range(0, len(order) - BATCH, BATCH))

    return begin


def mixed(data: stoker.Pipeline, length: int, weight: Any) -> stoker.Pipeline:
    first, second = data.take(length // 2).shuffle(), data.skip(length // 2).shuffle()
    return stoker.mix({first: 1, second: weight})


def of_torch(sampler: Any) -> Order:
    from torch.utils.data import BatchSampler

    return lambda: iter(BatchSampler(sampler, BATCH, drop_last=True))


def random_sampler(length: int, given: Any) -> Order:
    from torch.utils.data import RandomSampler

    return of_torch(RandomSampler(range(length)))


def weighted_sampler(length: int, given: Any) -> Order:
    from torch.utils.data import WeightedRandomSampler

    return of_torch(WeightedRandomSampler(given.copy(), length))  # it takes what can be written


CASES: dict[str, tuple[Callable[[int], Any], Callable[[int, Any], Order]]] = {
    "as it lies": (lambda n: None, lambda n, _: of_stoker(lambda p: p, n)),
    "shuffle": (lambda n: None, lambda n, _: of_stoker(lambda p: p.shuffle(), n)),
    "select(mask)": (mask, lambda n, given: of_stoker(lambda p: p.select(given), n)),
    "select(mask), shuffle": (
        mask,
        lambda n, given: of_stoker(lambda p: p.select(given).shuffle(), n),
    ),
    "shuffle(weights)": (
        weights,
        lambda n, given: of_stoker(lambda p: p.shuffle(weights=given), n),
    ),
    "order(list)": (
        lambda n: np.arange(n)[::-1],
        lambda n, given: of_stoker(lambda p: p.order(lambda epoch, rng: given), n),
    ),
    "mix, shuffle": (lambda n: None, lambda n, _: of_stoker(lambda p: mixed(p, n, 2), n)),
    "mix(fn), shuffle": (
        lambda n: None,
        lambda n, _: of_stoker(lambda p: mixed(p, n, lambda time: 2 * time.progress), n),
    ),
    "torch random": (lambda n: None, random_sampler),
    "torch weighted": (weights, weighted_sampler),
}


def held_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measured(case: str, length: int) -> dict[str, float]:
    """Measure a case in this process, which does nothing else."""
    make, build = CASES[case]
    if case.startswith("torch"):
        import torch

        torch.set_num_threads(1)
    given, batches = make(length), min(SAMPLED, length // BATCH // 2)
    build(BATCH * 4, make(BATCH * 4))()  # what is imported, and compiled
    before = held_bytes()
    began = time.process_time()
    begin = build(length, given)
    once_s = time.process_time() - began
    began = time.process_time()
    numbers = begin()
    for _ in islice(numbers, 8):
        pass
    epoch_s = time.process_time() - began
    began = time.process_time()
    count = sum(len(batch) for batch in islice(numbers, batches))
    place_ns = (time.process_time() - began) / max(1, count) * 1e9
    return {
        "once_s": once_s,
        "epoch_s": epoch_s,
        "place_ns": place_ns,
        "held_bytes": held_bytes() - before,
    }


def alone(case: str, length: int) -> dict[str, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measured, (case, length))


def evaluate(found: Report) -> None:
    """Show the medians of rounds, and hold some of them against limits."""
    rows = []
    for row in found.having("case", "length"):
        once_s, epoch_s, place_ns, nbytes = (
            float(np.median([each[key] for each in row["rounds"]]))
            for key in ("once_s", "epoch_s", "place_ns", "held_bytes")
        )
        rows.append(
            (
                row["case"],
                f"{row['length']:,}",
                f"{1e3 * once_s:,.0f}",
                f"{1e3 * epoch_s:,.1f}",
                f"{place_ns:,.0f}",
                f"{nbytes / 1e6:,.1f}",
            )
        )
        if row["case"] == "shuffle(weights)":
            what = f"even draws of {row['length']:,}, ns a place"
            found.expect(what, place_ns, MOST_PLACE_NS, at_least=False)
        if row["case"] == "select(mask)":
            what = f"select of {row['length']:,}, bytes"
            found.expect(what, nbytes, MOST_SELECT_BYTES, at_least=False)
    found.show(("order", "examples", "once, ms", "epoch, ms", "place, ns", "MB"), rows)


def main() -> None:
    arguments = parser(__doc__, evaluate).parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    with report(__file__, arguments) as found:
        for length in QUICK_LENGTHS if arguments.quick else LENGTHS:
            for case in CASES:
                if case == "torch weighted" and length > MOST_WEIGHTS:
                    continue
                each = [alone(case, length) for _ in range(rounds)]
                found.add(case=case, length=length, rounds=each)


if __name__ == "__main__":
    main()
