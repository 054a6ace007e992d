"""What the pool itself costs: against a plain repeat, and per choice.

1. Both sides fast: batches gathered from arrays in memory, echoed with e = 2, against a loop over
   the same pipeline that hands out a copy of each batch and then the batch itself, which gives
   the same isolation. (Without copies a consumer that writes into its batch harms the next use;
   that loop is shown for scale.)
2. Choosing alone: ``Pool.advance`` with 65,536 items and draws of 256, while fresh items come
   and while it drains.
3. Rows of 12 KB in memory, each used four times, batches of 64: the echo before the batch and
   behind it, at the defaults and inline. By hand rows are stacked, or a batch is copied.
   Processor time of all threads.
4. ``resume_at`` at 60 % of an epoch of three uses each, against choosing alone up to there.

Command::

    python bench/echo_overhead.py

Targets: less than 3 % of the rate; less than 0.4 us for each example chosen; 0.1 s to
60 % of the epoch; rows of 12 KB 1.0 of by hand before the batch, 0.5 behind it, and the defaults
0.95 of inline.

Machine: two cores of an AMD EPYC, 24 GiB, no GPU; Python 3.11.7, NumPy 2.4.6, torch 2.13.0. Nothing
ran beside it.

Results::

    [results/echo_overhead.json]
    batches                                us a batch             stoker / it
    -------------------------------------------------------------------------
    64x224x224x3: stoker                        481.3              1 (1 .. 1)
    64x224x224x3: repeat, copying               382.7  0.786 (0.775 .. 0.895)
    64x224x224x3: repeat, copying, 8 held       375.1  0.784 (0.693 .. 0.838)
    64x224x224x3: repeat, no copies             228.4   0.47 (0.425 .. 0.506)
    256x32x32x3: stoker                          64.3              1 (1 .. 1)
    256x32x32x3: repeat, copying                 34.3   0.524 (0.47 .. 0.563)
    256x32x32x3: repeat, copying, 8 held         36.1   0.563 (0.47 .. 0.642)
    256x32x32x3: repeat, no copies               25.9  0.427 (0.353 .. 0.512)

    choosing                us an example
    -------------------------------------
    while fresh items come          0.076
    draining                        0.039

    rows of 12 KB, four uses       uses a second of CPU              of by hand
    ---------------------------------------------------------------------------
    rows stacked by hand                        706,056              1 (1 .. 1)
    echo before the batch                       736,288    1.04 (0.999 .. 1.06)
    echo before the batch, inline               760,776     1.08 (1.03 .. 1.12)
    batches copied by hand                    2,310,148              1 (1 .. 1)
    echo behind the batch                     1,230,090  0.527 (0.514 .. 0.542)
    echo behind the batch, inline             1,302,978  0.563 (0.557 .. 0.567)

    to 60 % of an epoch      s      drawing / it
    --------------------------------------------
    resume_at            0.126  3 (2.93 .. 3.02)
    [end]

Whole batches: a use takes the engine some 16 us inline (of rows of 16 bytes), which is half of what
the repeat takes in all at 32x32. The rest is memory: the repeat copies into the same memory again
and again, the pool does not; and its batches are gathered by threads meanwhile.

To 60 %: a third is NumPy's generator, which is placed and asked anew for each of the 31,251 draws
(a tenth of them twice: once for the position, once from the snapshot before it). The permutation of
10^6 examples takes some 0.015 s. The rest is some twenty passes over arrays of all draws.

Before the batch: each row is an item of the pool, of which batches are stacked. The table is older:
then rows in memory went past the pool, which took no more than by hand. Since then the goal is
missed: 0.42 as many uses of rows of 12 KB for the same processor time, 0.22 of 64 B (under load).

Behind the batch, two thirds of a use are copies: of a batch of the pool, whose 12 MB the second
level of the caches does not hold (by hand the same batch is copied four times), and of gathering.
The pool's memory stays for the next epoch, as it is less than 32 MiB.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from harness import Ratio, Report, interleaved, parser, report

import stoker
from stoker.schedule import rng
from stoker.schedule.factor import EvenUses
from stoker.schedule.pools.fixed import Pool

Batches = Iterable[Any]
POOL = 8
BEFORE, BEHIND = "echo before the batch", "echo behind the batch"
BEFORE_HAND, BEHIND_HAND = "rows stacked by hand", "batches copied by hand"


def repeated(batches: Batches) -> Iterator[Any]:
    """Hand out a copy, then the batch."""
    for images, labels in batches:
        yield images.copy(), labels.copy()
        yield images, labels


def repeated_later(batches: Batches) -> Iterator[Any]:
    """The same, with as many batches held as the pool holds: a copy is made of cold memory."""
    held: deque[Any] = deque()
    for batch in batches:
        held.append(batch)
        if len(held) == POOL:
            yield from repeated([held.popleft()])
    yield from repeated(held)


def aliased(batches: Batches) -> Iterator[Any]:
    """Hand out the same batch twice."""
    for batch in batches:
        yield batch
        yield batch


def batches_per_s(batches: Batches, count: int) -> float:
    """Take all, and time those in the middle: from the full pool to the start of the drain."""
    first, last = count // 4, count - 2 * POOL
    began_s = ended_s = 0.0
    for number, _ in enumerate(batches):
        if number == first:
            began_s = time.perf_counter()
        elif number == last:
            ended_s = time.perf_counter()
    return (last - first) / (ended_s - began_s)


def handing_out(
    found: Report, what: str, side: int, batch: int, examples: int, rounds: int
) -> None:
    """Compare the ways of handing out every batch twice."""
    images = np.random.default_rng(0).integers(0, 256, (examples, side, side, 3), np.uint8)
    pipeline = stoker.from_arrays(images, np.arange(examples), seed=0).shuffle().batch(batch)
    echoed = pipeline.echo(2, pool=POOL)
    plain, later, other = (pipeline.workers(2) for _ in range(3))
    count = len(echoed)
    cases: dict[str, Callable[[], float]] = {
        "stoker": lambda: batches_per_s(echoed, count),
        "repeat, copying": lambda: batches_per_s(repeated(plain), count),
        "repeat, copying, 8 held": lambda: batches_per_s(repeated_later(later), count),
        "repeat, no copies": lambda: batches_per_s(aliased(other), count),
    }
    for name, rates in interleaved(cases, rounds).items():
        found.add(batches=what, case=name, batches_per_s=rates)


def evaluate(found: Report) -> None:
    """Hold stoker against the repeats, and the time to choose against its limit."""
    rates = {(row["batches"], row["case"]): row["batches_per_s"] for row in found.having("case")}
    lines = []
    for (what, case), each in rates.items():
        ratio = Ratio.of(rates[what, "stoker"], each)
        lines.append((f"{what}: {case}", f"{1e6 / median(each):.1f}", ratio))
        if case == "repeat, copying":
            found.expect(f"{what}: share of the copying repeat's rate", ratio.median, 0.97)
    found.show(("batches", "us a batch", "stoker / it"), lines)
    (chosen,) = found.having("pool")
    names = ("while fresh items come", "draining")
    medians = [median(column) for column in zip(*chosen["us_per_example"], strict=True)]
    for name, us in zip(names, medians, strict=True):
        found.expect(f"us to choose an example, {name}", us, 0.4, at_least=False)
    rows = [(name, f"{us:.3f}") for name, us in zip(names, medians, strict=True)]
    found.show(("choosing", "us an example"), rows)
    (going,) = found.having("skip_cpu_s", "draw_cpu_s")
    skip, draw = going["skip_cpu_s"], going["draw_cpu_s"]
    found.expect("seconds to 60 % of the epoch", median(skip), 0.1, at_least=False)
    show_rows(found)
    over = Ratio.of(draw, skip)
    found.show(
        ("to 60 % of an epoch", "s", "drawing / it"), [("resume_at", f"{median(skip):.3f}", over)]
    )


def choosing(size: int, steps: int) -> tuple[float, float]:
    """Return microseconds per example: while fresh items come, and draining."""
    factor, group = Fraction(2), 256
    items = size + steps * group // 2
    pool = Pool(EvenUses(factor), size, group, rng.key(0, 0, rng.ECHO), items)
    while pool.held < size - group:
        pool.advance()
    uniform_ns, uniform = _advance(pool, lambda: not pool.ended)
    drain_ns, drain = _advance(pool, lambda: not pool.exhausted)
    return uniform_ns / uniform / 1e3, drain_ns / drain / 1e3


def _advance(pool: Pool, more: Callable[[], bool]) -> tuple[int, int]:
    uses = pool.uses
    began = time.perf_counter_ns()
    while more():
        pool.advance()
    return time.perf_counter_ns() - began, pool.uses - uses


def uses_per_cpu_s(batches: Callable[[], Batches]) -> float:
    """Return how many rows come for a second of processor time, of all threads."""
    began, rows = time.process_time(), 0
    for batch in batches():
        rows += len(batch)
    return rows / (time.process_time() - began)


def rows_in_memory(count: int) -> dict[str, Callable[[], float]]:
    """Return the ways to use rows of 12 KB four times."""
    rows = np.random.default_rng(0).integers(0, 256, (count, 12_288), np.uint8)
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(count), 4)).tolist()
    items = list(rows)

    def stacked() -> Iterator[Any]:
        for start in range(0, len(order), 64):
            yield np.stack([items[index] for index in order[start : start + 64]])

    def copied() -> Iterator[Any]:
        for start in range(0, count, 64):
            batch = rows[order[start : start + 64]]
            for _ in range(4):
                yield batch.copy()

    train = stoker.from_arrays(rows, seed=0).shuffle()
    cases: dict[str, Callable[[], Batches]] = {BEFORE_HAND: stacked, BEHIND_HAND: copied}
    for where, each in {BEFORE: train.echo(4).batch(64), BEHIND: train.batch(64).echo(4)}.items():
        cases[where] = partial(iter, each)
        cases[f"{where}, inline"] = partial(iter, each.workers(0))
    return {name: partial(uses_per_cpu_s, batches) for name, batches in cases.items()}


def to_the_middle(items: int, *, by_drawing: bool) -> float:
    """Return the seconds of processor time to 60 % of an epoch of three uses of each item."""
    batch, pool = 64, items // 10
    batches = items * 3 * 6 // 10 // batch
    train = stoker.from_arrays(np.arange(items), seed=0).shuffle().echo(3, pool=pool).batch(batch)
    train = train.workers(0)
    began = time.process_time()
    if by_drawing:
        schedule = Pool(EvenUses(Fraction(3)), pool, batch, rng.key(0, 0, rng.ECHO), items)
        for _ in range(batches):
            schedule.advance()
    else:
        train.resume_at(batches)
        next(iter(train))
    return time.process_time() - began


def show_rows(found: Report) -> None:
    """Hold rows in memory against by hand, and the defaults against inline."""
    (each,) = found.having(BEFORE_HAND)
    lines = []
    for where, hand, goal in ((BEFORE, BEFORE_HAND, 1.0), (BEHIND, BEHIND_HAND, 0.5)):
        inline = f"{where}, inline"
        for name in (hand, where, inline):
            ratio = Ratio.of(each[name], each[hand])
            lines.append((name, f"{median(each[name]):,.0f}", ratio))
        found.expect(f"{where}, of by hand", Ratio.of(each[where], each[hand]).median, goal)
        over = Ratio.of(each[where], each[inline]).median
        found.expect(f"{where}, defaults of inline", over, 0.95)
    found.show(("rows of 12 KB, four uses", "uses a second of CPU", "of by hand"), lines)


def main() -> None:
    arguments = parser(__doc__, evaluate).parse_args()
    quick = arguments.quick
    rounds = 1 if quick else arguments.rounds
    with report(__file__, arguments) as found:
        handing_out(found, "64x224x224x3", 224, 64, 640 if quick else 6_400, rounds)
        handing_out(found, "256x32x32x3", 32, 256, 2_560 if quick else 51_200, rounds)
        size, steps = (4_096, 50) if quick else (65_536, 2_000)
        choosing(size, steps)
        times = [choosing(size, steps) for _ in range(rounds)]
        found.add(pool=size, us_per_example=times)
        items = 20_000 if quick else 1_000_000
        going = interleaved(
            {
                "skip_cpu_s": lambda: to_the_middle(items, by_drawing=False),
                "draw_cpu_s": lambda: to_the_middle(items, by_drawing=True),
            },
            rounds,
        )
        found.add(**going)
        found.add(**interleaved(rows_in_memory(512 if quick else 8_192), rounds))


if __name__ == "__main__":
    main()
