"""What do a user's own random draws cost: seeding generators before each call, and looking at them?

Seeding one generator, by kind, in nanoseconds a call. Then 4,096 examples of a few numbers each,
in batches of 64, in the loop's own thread: code that draws nothing, whose global generators are
looked at around each piece of work; the same, declared ``stoker.thread_safe``, where nothing is
looked at; code that draws from ``random``, and from a generator of its own, which are seeded before
each call; and the same loop by hand. All in processor time.

Command::

    python bench/draws.py

Targets: code that draws nothing at least 0.75 of what is not looked at.

Machine: two cores of an AMD EPYC, 24 GiB; Python 3.11.7, NumPy 2.4.6, torch 2.13.0. Other work ran
beside it.

Results::

    [results/draws.json]
    a call                           ns
    -----------------------------------
    seeding random.Random         4,072
    seeding Generator, PCG64      2,053
    seeding Generator, Philox     1,787
    seeding Generator, SFC64     11,977
    seeding Generator, MT19937  197,437
    seeding RandomState           2,164
    seeding torch.Generator       1,230
    looking at the global ones    4,873

    code of the user's, inline    examples/s        of not looked at
    ----------------------------------------------------------------
    draws nothing                    300,395  0.765 (0.643 .. 0.792)
    draws nothing, not looked at     415,669              1 (1 .. 1)
    draws from random                 50,341   0.121 (0.111 .. 0.14)
    draws from its own PCG64          77,443    0.188 (0.17 .. 0.34)
    by hand, draws nothing           517,085     1.23 (1.03 .. 1.37)
    [end]

Caveats: examples of a microsecond show the cost of looking at its largest, some 20 us a batch; in a
millisecond of work it is lost. Putting back a ``RandomState`` takes 70 us a batch.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from harness import Ratio, Report, interleaved, parser, report

import stoker
from stoker.basics.generators import GeneratorStates, generator_of, global_generators

EXAMPLES, BATCH, SEEDS = 4096, 64, 2000
NOTHING, UNSEEN = "draws nothing", "draws nothing, not looked at"
GLOBAL, OWN = "draws from random", "draws from its own PCG64"
KINDS: dict[str, Callable[[], Any]] = {
    "random.Random": lambda: random.Random(0),
    "Generator, PCG64": lambda: np.random.default_rng(0),
    "Generator, Philox": lambda: np.random.Generator(np.random.Philox(0)),
    "Generator, SFC64": lambda: np.random.Generator(np.random.SFC64(0)),
    "Generator, MT19937": lambda: np.random.Generator(np.random.MT19937(0)),
    "RandomState": lambda: np.random.RandomState(0),
    "torch.Generator": torch.Generator,
}


class Plain:
    """Examples without draws."""

    def __init__(self, count: int) -> None:
        self._rows = np.arange(count * 8.0).reshape(count, 8)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._rows[index] + 1.0


@stoker.thread_safe
class Declared(Plain):
    """The same, which is not looked at."""


class Global(Plain):
    """Draws from ``random``."""

    def __getitem__(self, index: int) -> np.ndarray:
        return self._rows[index] + random.random()


class Own(Plain):
    """Draws from a generator of its own."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._rows[index] + self._rng.random()


def epoch_s(batches: Iterable[object]) -> float:
    """Take the processor time of an epoch."""
    began = time.thread_time()
    for _ in batches:
        pass
    return time.thread_time() - began


def by_hand(data: Any) -> Iterable[np.ndarray]:
    """Yield batches as a loop of one's own would make them."""
    for start in range(0, len(data), BATCH):
        yield np.stack([data[i] for i in range(start, start + BATCH)])


def each_ns(call: Callable[[], object], count: int) -> float:
    """Take the processor time of a call."""
    began = time.thread_time()
    for _ in range(count):
        call()
    return (time.thread_time() - began) / count * 1e9


def evaluate(found: Report) -> None:
    """Show times, and hold what draws nothing against what is not looked at."""
    calls = {row["call"]: row["ns"] for row in found.rows if "call" in row}
    lines: list[Any] = [(name, f"{np.median(ns):,.0f}") for name, ns in calls.items()]
    found.show(("a call", "ns"), lines)
    epochs = {row["case"]: row["epoch_s"] for row in found.rows if "case" in row}
    lines = [
        (name, f"{EXAMPLES / np.median(each):,.0f}", Ratio.of(epochs[UNSEEN], each))
        for name, each in epochs.items()
    ]
    found.show(("code of the user's, inline", "examples/s", "of not looked at"), lines)
    ratio = Ratio.of(epochs[UNSEEN], epochs[NOTHING]).median
    found.expect("code that draws nothing, of what is not looked at", ratio, 0.75)


def main() -> None:
    """Measure."""
    arguments = parser(__doc__, evaluate).parse_args()
    count, rounds, seeds = EXAMPLES, arguments.rounds, SEEDS
    if arguments.quick:
        count, rounds, seeds = 256, 1, 10
    calls: dict[str, Callable[[], float]] = {}
    for name, make in KINDS.items():
        generator = generator_of(make(), name)
        assert generator is not None
        calls[f"seeding {name}"] = partial(each_ns, partial(generator.seed, 1 << 61), seeds)
    states = GeneratorStates(global_generators())
    calls["looking at the global ones"] = partial(each_ns, states.have_moved, seeds)
    cases: dict[str, Callable[[], float]] = {}
    for name, kind in {NOTHING: Plain, UNSEEN: Declared, GLOBAL: Global, OWN: Own}.items():
        pipeline = stoker.from_dataset(kind(count), seed=0).batch(BATCH).workers(0)
        epoch_s(pipeline)
        cases[name] = partial(epoch_s, pipeline)
    plain = Plain(count)
    cases["by hand, draws nothing"] = lambda: epoch_s(by_hand(plain))
    with report(__file__, arguments) as found:
        for call, ns in interleaved(calls, rounds).items():
            found.add(call=call, ns=ns)
        for case, seconds in interleaved(cases, rounds).items():
            found.add(case=case, epoch_s=seconds)


if __name__ == "__main__":
    main()
