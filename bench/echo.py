"""Echo: does the rate follow the formulas?

Example echoing before batching, with an upstream that sleeps (latency) and one that burns CPU
without the GIL (decoding); two worker threads; R = t_upstream / t_downstream in 1, 2, 4, 6 and
e in 1, 2, 4. The consumer sleeps for its step, as a host thread does while an accelerator works.
In a second part a random map behind the echo costs a quarter of what is before it.

Expected, in uses a second, from rates measured in the same round::

    min(G, e * P_before)                               nothing behind the echo
    min(G, W * e / (t_before + e * t_after))           both parts share the W workers

with G the step alone on ready batches, ``P_before = W / t_before`` the pipeline without echo
and without a step, ``t_after`` likewise of the part behind the echo alone.

Command::

    python bench/echo.py

Target: at least 0.95 of what is expected, for every R and e, from the full pool (step
pool / batch) to the last fresh example. Whole epochs are beside it: they include the ramp (the
pool grows by one batch a step) and the drain.

Machine: two cores of an Intel Xeon at 2.5 GHz, 24 GiB, no GPU; Python 3.11.7 (a plain loop
iteration takes 290 ns there, so that Python's own share weighs several times more than
usual), NumPy 2.4.6, torch 2.13.0.

Results (five rounds)::

    [results/echo.json]
    upstream                          expected/s            plateau / it        whole epoch / it
    --------------------------------------------------------------------------------------------
    sleeps, R = 1, e = 1                   3,125   0.998 (0.976 .. 1.01)  0.978 (0.958 .. 0.986)
    sleeps, R = 1, e = 2                   3,950      0.997 (0.995 .. 1)   0.935 (0.932 .. 0.94)
    sleeps, R = 1, e = 4                   3,950  0.996 (0.993 .. 0.998)   0.958 (0.943 .. 0.96)
    sleeps, R = 2, e = 1                   1,744   0.995 (0.971 .. 1.03)   0.986 (0.963 .. 1.02)
    sleeps, R = 2, e = 2                   3,488   0.989 (0.969 .. 1.01)  0.898 (0.881 .. 0.919)
    sleeps, R = 2, e = 4                   3,955      0.996 (0.994 .. 1)  0.917 (0.912 .. 0.923)
    sleeps, R = 4, e = 1                     923      0.996 (0.995 .. 1)  0.991 (0.989 .. 0.996)
    sleeps, R = 4, e = 2                   1,846       1 (0.992 .. 1.02)  0.943 (0.932 .. 0.959)
    sleeps, R = 4, e = 4                   3,692       1 (0.993 .. 1.02)  0.855 (0.845 .. 0.877)
    sleeps, R = 6, e = 1                     628   0.999 (0.982 .. 1.02)   0.995 (0.978 .. 1.01)
    sleeps, R = 6, e = 2                   1,256        1.02 (1 .. 1.05)  0.962 (0.947 .. 0.991)
    sleeps, R = 6, e = 4                   2,513    1.03 (0.992 .. 1.03)  0.906 (0.877 .. 0.913)
    burns, R = 1, e = 1                    3,936  0.937 (0.922 .. 0.991)  0.908 (0.893 .. 0.955)
    burns, R = 1, e = 2                    3,936       0.99 (0.977 .. 1)  0.926 (0.916 .. 0.937)
    burns, R = 1, e = 4                    3,936  0.996 (0.991 .. 0.999)  0.947 (0.922 .. 0.954)
    burns, R = 2, e = 1                    1,868    1.12 (0.917 .. 1.23)      1.1 (0.893 .. 1.2)
    burns, R = 2, e = 2                    3,737       1 (0.864 .. 1.16)   0.879 (0.776 .. 1.03)
    burns, R = 2, e = 4                    3,940  0.992 (0.987 .. 0.996)  0.898 (0.892 .. 0.902)
    burns, R = 4, e = 1                    1,136    1.04 (0.976 .. 1.61)     1.02 (0.94 .. 1.58)
    burns, R = 4, e = 2                    2,273       1 (0.956 .. 1.14)   0.922 (0.894 .. 1.05)
    burns, R = 4, e = 4                    3,944   0.989 (0.98 .. 0.991)  0.854 (0.845 .. 0.856)
    burns, R = 6, e = 1                      754   0.993 (0.977 .. 1.12)    0.981 (0.965 .. 1.1)
    burns, R = 6, e = 2                    1,509    1.02 (0.942 .. 1.18)     0.95 (0.872 .. 1.1)
    burns, R = 6, e = 4                    3,018    1.01 (0.966 .. 1.16)    0.859 (0.83 .. 0.99)
    sleeps, 1/4 behind, R = 4, e = 1         711        1.02 (1 .. 1.03)        1.02 (1 .. 1.02)
    sleeps, 1/4 behind, R = 4, e = 2       1,152       1 (0.984 .. 1.01)   0.981 (0.962 .. 0.99)
    sleeps, 1/4 behind, R = 4, e = 4       1,671   0.995 (0.981 .. 1.01)  0.968 (0.953 .. 0.978)
    burns, 1/4 behind, R = 4, e = 1          931       1 (0.956 .. 1.03)   0.993 (0.949 .. 1.02)
    burns, 1/4 behind, R = 4, e = 2        1,530   0.977 (0.958 .. 1.04)      0.943 (0.925 .. 1)
    burns, 1/4 behind, R = 4, e = 4        2,255   0.965 (0.953 .. 1.05)  0.921 (0.893 .. 0.994)
    [end]

Only burning at R = 1 without echoing misses the 0.95, by little: there two workers and the consumer
want two cores.

Caveats: R is nominal: upstream times are set for two workers that share nothing.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from harness import Ratio, Report, interleaved, parser, report

import stoker
from stoker.schedule import rng
from stoker.schedule.factor import EvenUses
from stoker.schedule.pools.fixed import Pool

BATCH = 32
POOL_BATCHES = 4
WORKERS = 2
SEED = 0
FACTORS = (1, 2, 4)
_BLOCK = b"\0" * (1 << 16)

Cost = Callable[[float], None]


class Row:
    """A data set of one array."""

    def __init__(self, examples: int) -> None:
        self._examples = examples
        self._row = np.zeros((32, 32, 3), np.uint8)

    def __len__(self) -> int:
        return self._examples

    def __getitem__(self, index: int) -> Any:
        return self._row


def burner() -> Cost:
    """Return what burns CPU for so many seconds: hashing, which lets go of the GIL."""
    tries = []
    for _ in range(50):
        began = time.perf_counter()
        hashlib.sha256(_BLOCK).digest()
        tries.append(time.perf_counter() - began)
    block_s = min(tries)

    def burn(seconds: float) -> None:
        blocks, rest = divmod(seconds, block_s)
        for _ in range(int(blocks)):
            hashlib.sha256(_BLOCK).digest()
        hashlib.sha256(_BLOCK[: int(rest / block_s * len(_BLOCK))]).digest()

    return burn


@dataclass(frozen=True)
class Setting:
    """An upstream: the nominal R, its cost per example, and the share behind the echo."""

    kind: str
    cost: Cost
    ratio: float
    step_s: float
    after: float = 0.0

    def pipeline(self, fresh: int, factor: int, *, before: bool = True, after: bool = True) -> Any:
        """Build it; ``before`` and ``after`` say which parts cost something."""
        cost, each_s = self.cost, self.ratio * self.step_s * WORKERS / BATCH

        def first(x: Any) -> Any:
            cost(each_s)
            return x

        def second(x: Any, rng: Any) -> Any:
            cost(self.after * each_s)
            return x

        made = stoker.from_dataset(Row(fresh), seed=SEED).shuffle().workers(WORKERS)
        if before:
            made = made.map(first)
        made = made.echo(factor, pool=POOL_BATCHES * BATCH)
        if self.after and after:
            made = made.random_map(second)
        return made.batch(BATCH)


@dataclass(frozen=True)
class Speed:
    """Uses per second."""

    plateau: float
    whole: float


def last_fresh_step(fresh: int, factor: int) -> int:
    """Return the number of the batch that the last fresh example was admitted for, from 1."""
    if factor == 1:
        return fresh // BATCH
    key = rng.key(SEED, 0, rng.ECHO)
    pool = Pool(EvenUses(Fraction(factor)), POOL_BATCHES * BATCH, BATCH, key, fresh)
    while not pool.ended:
        pool.advance()
    return pool.step


def consume(pipeline: Any, stop: int, step_s: float) -> Speed:
    """Run an epoch; the plateau is from the full pool to step ``stop``."""
    times = [time.perf_counter()]
    for _ in pipeline:
        if step_s:
            time.sleep(step_s)
        times.append(time.perf_counter())
    plateau = (stop - POOL_BATCHES) * BATCH / (times[stop] - times[POOL_BATCHES])
    return Speed(plateau, (len(times) - 1) * BATCH / (times[-1] - times[0]))


def step_alone(ready: Iterable[Any], step_s: float) -> Speed:
    """Return G: the consumer on batches that are there."""
    began = time.perf_counter()
    count = 0
    for _ in ready:
        time.sleep(step_s)
        count += 1
    rate = count * BATCH / (time.perf_counter() - began)
    return Speed(rate, rate)


def run(found: Report, setting: Setting, steps: int, rounds: int) -> None:
    """Measure one upstream under all factors, and the rates that the formulas need."""
    step_s = setting.step_s
    drained = max(12, round(2 * steps / max(setting.ratio, 1.0)))
    cases: dict[str, Callable[[], Speed]] = {
        "G": lambda: step_alone([None] * steps, step_s),
        "before": lambda: consume(setting.pipeline(drained * BATCH, 1, after=False), drained, 0),
    }
    if setting.after:
        cases["after"] = lambda: consume(
            setting.pipeline(drained * BATCH, 1, before=False), drained, 0
        )
    for factor in FACTORS:
        fresh = BATCH * (steps // factor + POOL_BATCHES)

        def echoed(factor: int = factor, fresh: int = fresh) -> Speed:
            stop = last_fresh_step(fresh, factor)
            return consume(setting.pipeline(fresh, factor), stop, step_s)

        cases[f"e = {factor}"] = echoed
    samples = interleaved(cases, rounds)
    for factor in FACTORS:
        expected = []
        for i in range(rounds):
            t_before = WORKERS / samples["before"][i].plateau
            t_after = WORKERS / samples["after"][i].plateau if setting.after else 0.0
            produced = WORKERS * factor / (t_before + factor * t_after)
            expected.append(min(samples["G"][i].plateau, produced))
        each = samples[f"e = {factor}"]
        name = f"{setting.kind}, R = {setting.ratio:g}, e = {factor}"
        found.add(
            case=name,
            step_s=step_s,
            expected=expected,
            plateau=[s.plateau for s in each],
            whole=[s.whole for s in each],
            rates={n: [s.plateau for s in samples[n]] for n in cases if not n.startswith("e")},
        )


def evaluate(found: Report) -> None:
    """Hold each case against what the formulas say."""
    lines = []
    for row in found.rows:
        expected = row["expected"]
        plateau, whole = (Ratio.of(row[key], expected) for key in ("plateau", "whole"))
        lines.append((row["case"], f"{statistics.median(expected):,.0f}", plateau, whole))
        found.expect(row["case"], plateau.median, 0.95)
    found.show(("upstream", "expected/s", "plateau / it", "whole epoch / it"), lines)


def main() -> None:
    arguments = parser(__doc__, evaluate).parse_args()
    if arguments.quick:
        ratios, steps, step_s, rounds = [2], 12, 0.001, 1
    else:
        ratios, steps, step_s, rounds = [1, 2, 4, 6], 60, 0.008, arguments.rounds
    burn = burner()
    settings = [
        Setting(kind, cost, ratio, step_s)
        for kind, cost in (("sleeps", time.sleep), ("burns", burn))
        for ratio in ratios
    ] + [
        Setting(f"{kind}, 1/4 behind", cost, 4, step_s, after=0.25)
        for kind, cost in (("sleeps", time.sleep), ("burns", burn))
    ]
    with report(__file__, arguments) as found:
        for setting in settings:
            run(found, setting, steps, rounds)


if __name__ == "__main__":
    main()
