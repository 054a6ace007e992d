"""Examples of different lengths: how much is padding, and how long do ranks wait for one another?

Lengths of real examples: the words of each paragraph of WikiText-2, and the 10 ms frames of each
recording of the Free Spoken Digit Dataset (``--data``: a folder with both); and log-normal lengths.
Nothing is read or computed but lengths: a way of batching says which examples each of 1 or 8 ranks
has in each step of two epochs. Rows of a batch are as long as its longest.

- fixed: ``DataLoader`` with a ``DistributedSampler`` and fixed batches.
- balanced: stoker's ``.shard(balance=lengths)`` and the same batches.
- pooled: the usual bucketing sampler. Of its shuffled part each rank sorts pools of 100 batches by
  length, cuts them into fixed batches, and shuffles these.
- transformers: ``LengthGroupedSampler``, on several ranks ``DistributedLengthGroupedSampler``.
- lhotse: ``DynamicBucketingSampler`` of the same budget, a buffer of 20,000, 10 buckets.
- tokens: stoker's ``.batch(tokens=..., size=lengths)``.

The budget is as many tokens as a fixed batch has on average, padded, or as the longest example has.
"real" is the share of padded batches that is no padding. "padded wait" is what ranks spend with
padded batches: the padded tokens of each step's largest batch for each of them, per real token; 1
is perfect. "packed wait" is the same without padding, where work goes by each example's own length.
"largest" is the largest padded batch, by the mean one: memory that is needed for it alone.
"unequal" are steps that some rank has more than another; "left out" and "again" are examples that
the first epoch lacks, or has more than once. The last column is processor time for each rank.

Command::

    python bench/balance.py [--data FOLDER]

Targets: ``tokens`` has at least 0.9 of real tokens, none left out, and with 8 ranks the least
padded wait of all; ``balanced`` has at least 1.1 times less packed wait than ``fixed``. A plan of a
million log-normal lengths takes less than 1 us of processor time an example.

Results::

    [results/balance.json]
    WikiText-2: 16,560 examples, 24 a batch or 7,125 tokens, 1 rank

    way           real  padded wait  packed wait  largest  steps  unequal  left out  again  us each
    -----------------------------------------------------------------------------------------------
    fixed         0.41         2.46         1.00      2.3    690        0         0      0      0.5
    balanced      0.41         2.45         1.00      2.4    690        0         0      0      1.1
    pooled        0.97         1.03         1.00      5.6    690        0         0      0      0.3
    transformers  0.95         1.05         1.00      5.5    690        0         0      0      0.4
    lhotse        0.84         1.19         1.00      1.5    342        0         0      0     21.3
    tokens        0.95         1.05         1.00      1.0    306        0         0      0      2.3

    WikiText-2: 16,560 examples, 24 a batch or 7,125 tokens, 8 ranks

    way           real  padded wait  packed wait  largest  steps  unequal  left out  again  us each
    -----------------------------------------------------------------------------------------------
    fixed         0.41         3.41         1.18      2.4     87        0         0      0      0.1
    balanced      0.38         3.38         1.00      2.2     87        0         0      0      0.5
    pooled        0.98         1.05         1.03      3.5     87        0         0      0      0.1
    transformers  0.69         1.62         1.02      4.0     87        0         0      0      0.3
    lhotse        0.84         1.23         1.06      1.4     43        0         0      0     14.8
    tokens        0.98         1.05         1.04      1.0     37        0         0      0      0.7

    spoken digits: 3,000 examples, 24 a batch or 1,958 tokens, 1 rank

    way           real  padded wait  packed wait  largest  steps  unequal  left out  again  us each
    -----------------------------------------------------------------------------------------------
    fixed         0.53         1.87         1.00      2.8    125        0         0      0      0.6
    balanced      0.54         1.87         1.00      2.8    125        0         0      0      1.2
    pooled        0.95         1.05         1.00      5.0    125        0         0      0      0.5
    transformers  0.92         1.09         1.00      4.8    125        0         0      0      0.4
    lhotse        0.90         1.11         1.00      1.7     80        0         0      0     12.8
    tokens        0.94         1.06         1.00      1.0     73        0         0      0      3.7

    spoken digits: 3,000 examples, 24 a batch or 1,958 tokens, 8 ranks

    way           real  padded wait  packed wait  largest  steps  unequal  left out  again  us each
    -----------------------------------------------------------------------------------------------
    fixed         0.54         2.82         1.12      2.9     16        0         0      0      0.1
    balanced      0.51         2.83         1.01      2.8     16        0         0      0      0.9
    pooled        0.92         1.21         1.05      3.1     16        0         0      0      0.1
    transformers  0.66         1.92         1.03      3.5     16        0         0      0      0.2
    lhotse        0.91         1.18         1.11      1.1     10        0         0      0     11.6
    tokens        0.96         1.08         1.07      1.0      9        0         0      0      1.7

    log-normal: 60,000 examples, 24 a batch or 11,067 tokens, 1 rank

    way           real  padded wait  packed wait  largest  steps  unequal  left out  again  us each
    -----------------------------------------------------------------------------------------------
    fixed         0.27         3.73         1.00      4.4  2,500        0         0      0      0.7
    balanced      0.27         3.72         1.00      4.5  2,500        0         0      0      0.8
    pooled        0.93         1.07         1.00     15.4  2,500        0         0      0      0.6
    transformers  0.88         1.13         1.00     14.6  2,500        0         0      0      0.7
    lhotse        0.82         1.22         1.00      1.8    828        0         0      0     25.9
    tokens        0.92         1.08         1.00      1.0    750        0         0      0      1.9

    log-normal: 60,000 examples, 24 a batch or 11,067 tokens, 8 ranks

    way           real  padded wait  packed wait  largest  steps  unequal  left out  again  us each
    -----------------------------------------------------------------------------------------------
    fixed         0.27         6.66         1.29      4.4    313        0         0      0      0.3
    balanced      0.24         6.64         1.01      4.1    313        0         0      0      0.5
    pooled        0.93         1.17         1.05     15.4    313        0         0      0      0.3
    transformers  0.52         2.45         1.04      8.6    313        0         0      0      0.5
    lhotse        0.82         1.28         1.05      2.3    104        0         0      0     16.4
    tokens        0.98         1.04         1.02      1.0     87        0         0      0      0.5

    A plan of a million lengths, 1 rank: 0.23 us of processor time each.

    A plan of a million lengths, 8 ranks: 0.19 us of processor time each.
    [end]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import tarfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Report, parser, report
from torch.utils.data import DataLoader, DistributedSampler

import stoker

Batches = list[list[int]]
Way = Callable[[np.ndarray, int, int, int, int], list[Batches]]
"""Of lengths, examples a batch, tokens a batch, world and epoch: the batches of each rank."""

SEED, EPOCHS, WORLDS = 7, 2, (1, 8)
ROWS = {"WikiText-2": 24, "spoken digits": 24, "log-normal": 24}
POOL_BATCHES = 100
FRAME_SAMPLES = 80  # 10 ms at 8 kHz


def wikitext(folder: Path) -> np.ndarray:
    """Return the number of words in each paragraph."""
    lines = (folder / "wikitext-2" / "train.block-shuffled.txt").read_text().splitlines()
    counts = [len(line.split()) for line in lines]
    return np.array([count for count in counts if count > 10])  # no headings


def digits(folder: Path) -> np.ndarray:
    """Return the number of frames in each recording, of 16 bits a sample behind a header of 44."""
    with tarfile.open(folder / "fsdd.tar") as archive:
        sizes = [each.size for each in archive if each.name.endswith(".wav")]
    return np.maximum(1, (np.array(sizes) - 44) // 2 // FRAME_SAMPLES)


def made(examples: int) -> np.ndarray:
    """Return log-normal lengths of up to 2,048."""
    drawn = np.random.default_rng(SEED).lognormal(4.5, 0.8, examples)
    return np.minimum(drawn, 2_048).astype(int) + 1


def sampled(lengths: np.ndarray, rank: int, world: int, epoch: int) -> Any:
    """Return torch's sampler of a rank, and what it samples from."""
    numbers: Any = range(len(lengths))
    sampler: Any = DistributedSampler(numbers, num_replicas=world, rank=rank, seed=SEED)
    sampler.set_epoch(epoch)
    return numbers, sampler


def fixed(lengths: np.ndarray, rows: int, tokens: int, world: int, epoch: int) -> list[Batches]:
    """Batch as a DataLoader does."""
    found = []
    for rank in range(world):
        numbers, sampler = sampled(lengths, rank, world, epoch)
        loader: Any = DataLoader(numbers, rows, sampler=sampler, collate_fn=list)
        found.append(list(loader))
    return found


def pooled(lengths: np.ndarray, rows: int, tokens: int, world: int, epoch: int) -> list[Batches]:
    """Sort pools of each rank's examples by length."""
    found = []
    for rank in range(world):
        _, sampler = sampled(lengths, rank, world, epoch)
        order, batches = list(sampler), []
        for start in range(0, len(order), rows * POOL_BATCHES):
            pool = sorted(order[start : start + rows * POOL_BATCHES], key=lengths.__getitem__)
            batches += [pool[at : at + rows] for at in range(0, len(pool), rows)]
        turn = np.random.default_rng([SEED, epoch]).permutation(len(batches))
        found.append([batches[at] for at in turn])
    return found


def transformers(
    lengths: np.ndarray, rows: int, tokens: int, world: int, epoch: int
) -> list[Batches]:
    """Batch as the Trainer does with group_by_length."""
    utils = importlib.import_module("transformers.trainer_pt_utils")
    found = []
    for rank in range(world):
        if world == 1:
            generator = torch.Generator().manual_seed(SEED + epoch)
            sampler = utils.LengthGroupedSampler(
                rows, lengths=lengths.tolist(), generator=generator
            )
        else:
            sampler = utils.DistributedLengthGroupedSampler(
                rows, num_replicas=world, rank=rank, seed=SEED, lengths=lengths.tolist()
            )
            sampler.set_epoch(epoch)
        order = [int(at) for at in sampler]
        found.append([order[at : at + rows] for at in range(0, len(order), rows)])
    return found


def lhotse(lengths: np.ndarray, rows: int, tokens: int, world: int, epoch: int) -> list[Batches]:
    """Batch recordings of as many seconds as examples have tokens."""
    package = importlib.import_module("lhotse")
    sampling = importlib.import_module("lhotse.dataset.sampling")
    cuts = package.CutSet.from_cuts(
        package.MonoCut(id=str(at), start=0, duration=float(n), channel=0)
        for at, n in enumerate(lengths)
    )
    found = []
    for rank in range(world):
        sampler = sampling.DynamicBucketingSampler(
            cuts,
            max_duration=float(tokens),
            shuffle=True,
            num_buckets=10,
            world_size=world,
            rank=rank,
            seed=SEED,
        )
        sampler.set_epoch(epoch)
        found.append([[int(cut.id) for cut in batch] for batch in sampler])
    return found


def of_stoker(lengths: np.ndarray, world: int, epoch: int, **batch: Any) -> list[Batches]:
    """Batch with stoker, balanced where that is asked for."""
    found, balance = [], batch.pop("balance", None)
    for rank in range(world):
        train = stoker.from_arrays(np.arange(len(lengths)), seed=SEED).shuffle()
        train = train.shard(rank=rank, world=world, balance=balance).batch(**batch).workers(0)
        train.set_epoch(epoch)
        found.append([ids.tolist() for ids in train])
    return found


WAYS: dict[str, Way] = {
    "fixed": fixed,
    "balanced": lambda lengths, rows, _, world, epoch: of_stoker(
        lengths, world, epoch, n=rows, balance=lengths
    ),
    "pooled": pooled,
    "transformers": transformers,
    "lhotse": lhotse,
    "tokens": lambda lengths, _, tokens, world, epoch: of_stoker(
        lengths, world, epoch, tokens=tokens, size=lengths
    ),
}


def figures(lengths: np.ndarray, ranks: list[Batches]) -> dict[str, float]:
    """Return what batches of an epoch come to; ranks that have fewer wait for the others."""
    steps = max(map(len, ranks))
    work, own = np.zeros((2, steps, len(ranks)))
    for rank, batches in enumerate(ranks):
        for step, batch in enumerate(batches):
            work[step, rank] = len(batch) * lengths[batch].max()
            own[step, rank] = lengths[batch].sum()
    seen = np.concatenate([np.concatenate(batches) for batches in ranks if batches])
    real = float(lengths[seen].sum())
    return {
        "real": real / work.sum(),
        "padded_wait": work.max(axis=1).sum() * len(ranks) / real,
        "packed_wait": own.max(axis=1).sum() * len(ranks) / real,
        "largest": float(work.max() / work.mean()),
        "steps": steps,
        "unequal": max(map(len, ranks)) - min(map(len, ranks)),
        "left_out": len(lengths) - len(np.unique(seen)),
        "again": len(seen) - len(np.unique(seen)),
    }


def measure(found: Report, data: str, lengths: np.ndarray) -> None:
    """Add the rows of one data set."""
    rows = ROWS[data]
    padded = figures(lengths, fixed(lengths, rows, 0, 1, 0))
    tokens = int(lengths.sum() / padded["real"] / padded["steps"])
    tokens = max(tokens, int(lengths.max()))
    for world in WORLDS:
        for name, way in WAYS.items():
            if name in ("transformers", "lhotse") and not _is_there(name):
                continue
            epochs = []
            for epoch in range(EPOCHS):
                began = time.process_time()
                ranks = way(lengths, rows, tokens, world, epoch)
                spent_us = 1e6 * (time.process_time() - began) / world / len(lengths)
                epochs.append(figures(lengths, ranks) | {"spent_us": spent_us})
            mean = {key: float(np.mean([each[key] for each in epochs])) for key in epochs[0]}
            counted = {key: epochs[0][key] for key in ("left_out", "again", "unequal")}
            found.add(data=data, world=world, way=name, examples=len(lengths), tokens=tokens,
                      **(mean | counted))  # fmt: skip


def _is_there(name: str) -> bool:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
        return True
    return False


def measure_plans(found: Report, examples: int) -> None:
    """Add what plans cost."""
    lengths = made(examples)
    for world in WORLDS:
        spent = []
        for _ in range(3):
            train = stoker.from_arrays(np.arange(examples), seed=SEED).shuffle()
            train = train.shard(rank=0, world=world).batch(tokens=8_192, size=lengths)
            began = time.process_time()
            steps = len(train)
            spent.append(1e6 * (time.process_time() - began) / examples)
        found.add(plan_world=world, plan_us=float(np.median(spent)), steps=steps)


def evaluate(found: Report) -> None:
    """Make tables and targets of the rows."""
    rows = found.having("way")
    for data in {row["data"]: None for row in rows}:
        for world in WORLDS:
            these = [row for row in rows if (row["data"], row["world"]) == (data, world)]
            if not these:
                continue
            first = these[0]
            found.say(
                f"{data}: {first['examples']:,} examples, {ROWS[data]} a batch or "
                f"{first['tokens']:,} tokens, {world} rank{'s' * (world > 1)}"
            )
            found.show(
                [
                    "way", "real", "padded wait", "packed wait", "largest", "steps", "unequal",
                    "left out", "again", "us each",
                ],
                [
                    [
                        row["way"], f"{row['real']:.2f}", f"{row['padded_wait']:.2f}",
                        f"{row['packed_wait']:.2f}", f"{row['largest']:.1f}",
                        f"{row['steps']:,.0f}", f"{row['unequal']:.0f}", f"{row['left_out']:.0f}",
                        f"{row['again']:.0f}", f"{row['spent_us']:.1f}",
                    ]
                    for row in these
                ],
            )  # fmt: skip
            by, where = {row["way"]: row for row in these}, f"{data}, {world}"
            found.expect(f"{where}: real tokens", by["tokens"]["real"], 0.9)
            found.expect(
                f"{where}: examples left out or repeated",
                by["tokens"]["left_out"] + by["tokens"]["again"], 0, at_least=False,
            )  # fmt: skip
            if world > 1:
                others = min(row["padded_wait"] for row in these if row["way"] != "tokens")
                gained = others / by["tokens"]["padded_wait"]
                found.expect(f"{where}: padded wait of the best other over tokens", gained, 1)
                gained = by["fixed"]["packed_wait"] / by["balanced"]["packed_wait"]
                found.expect(f"{where}: packed wait of fixed over balanced", gained, 1.1)
    for row in found.having("plan_us"):
        found.say(
            f"A plan of a million lengths, {row['plan_world']} rank"
            f"{'s' * (row['plan_world'] > 1)}: {row['plan_us']:.2f} us of processor time each."
        )
        found.expect(f"plan, {row['plan_world']}: us an example", row["plan_us"], 1, at_least=False)


def data_sets(arguments: argparse.Namespace) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the names and lengths of what is there."""
    if arguments.data is not None and not arguments.quick:
        yield "WikiText-2", wikitext(arguments.data)
        yield "spoken digits", digits(arguments.data)
    yield "log-normal", made(2_000 if arguments.quick else 60_000)


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--data", type=Path, help="a folder with wikitext-2/ and fsdd.tar")
    arguments = options.parse_args()
    logging.disable(logging.WARNING)
    with report(__file__, arguments) as found, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for data, lengths in data_sets(arguments):
            measure(found, data, lengths)
        measure_plans(found, 20_000 if arguments.quick else 1_000_000)


if __name__ == "__main__":
    main()
