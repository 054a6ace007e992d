"""Distances: how far apart does ``.echo("auto")`` keep copies, and what does that cost?

``AdaptivePool`` and ``OnDemandPolicy`` as they are, on integers, against a supply and a consumer
that are simulated: nothing sleeps, so the figures depend on no machine. A step takes one unit of
time. Fresh items come in chunks of an eighth of a batch (examples), or as whole batches; R units of
time for a batch on average, no more than 8 batches ahead of their use. Pools hold 16 batches,
``max_factor`` is 4. The rule ``min_distance=8``, the default, against ``min_distance=2``: no item
in two steps that follow each other.

*Supply*: constant; Poisson (each chunk takes exponential time); a step (R is 1, then R, then 1
again, a third of the steps each; the middle third counts). *Waited* is the consumer's time. *Of the
ideal* is the share of the time that steps take, over what was possible: ``min(1, max_factor / R)``.
*Distance* is the mean number of steps between two uses of an item, *closest* the smallest in the
part that counts, the ramp of the first 48 steps left out, and so is the last batch of an epoch.

Epochs: each begins with an empty window; and with an empty pool (as over loaders and streams), or
with what the pool held when the epoch before was over. The figures are means of five, behind a
first one.

Near R = 1: the least factor that any rule can have that never waits and does not know what is to
come. Whoever takes all that is ready, at every step, has taken at least as many fresh items by then
as anybody else: by induction over steps, as an item's making begins no later where more have been
taken. So that is the bound, computed by taking all that is ready with no pool at all. Where the
supply is slower (R > 1), and where the window stands full while it is ahead by chance (R near 1,
Poisson), the bound is above 1; only a larger window would lower it.

Command::

    python bench/auto_distance.py

Targets: no distance below 8 under ``min_distance=8``; at least 0.97 of the time in steps that
``min_distance=2`` has in long epochs; 0.97 of the ideal in short epochs with a pool that goes on;
near R = 1 a factor within 0.5 % of the bound.

Results (simulated; five seeds where chance has a part)::

    [results/auto_distance.json]
    long epochs                  distance at 2  at 8  factor at 2  at 8  of the ideal at 2   at 8
    ---------------------------------------------------------------------------------------------
    examples, constant, R = 0.5              -     -         1.00  1.00              1.000  1.000
    examples, constant, R = 1                -     -         1.00  1.00              1.000  1.000
    examples, constant, R = 1.5           24.0  24.0         1.50  1.50              1.000  1.000
    examples, constant, R = 2             21.0  21.0         2.00  2.00              1.000  1.000
    examples, constant, R = 3             18.0  18.0         3.00  3.00              1.000  1.000
    examples, constant, R = 4              4.0   8.8         4.00  4.00              1.000  1.000
    examples, constant, R = 5              2.8   8.8         4.00  4.00              1.000  1.000
    examples, constant, R = 6              2.8   8.8         4.00  4.00              1.000  1.000
    examples, constant, R = 8              2.8   8.8         4.00  4.00              1.000  1.000
    examples, Poisson, R = 0.5               -     -         1.00  1.00              1.000  1.000
    examples, Poisson, R = 1              17.2  17.2         1.01  1.01              1.000  1.000
    examples, Poisson, R = 1.5            24.0  24.0         1.50  1.50              1.000  1.000
    examples, Poisson, R = 2              23.7  23.7         1.99  1.99              1.000  1.000
    examples, Poisson, R = 3              20.0  20.0         2.98  2.98              1.000  1.000
    examples, Poisson, R = 4              12.5  15.2         3.97  3.95              0.994  0.990
    examples, Poisson, R = 5               3.2   9.2         4.00  4.00              1.005  1.005
    examples, Poisson, R = 6               2.9   8.9         4.00  4.00              1.005  1.004
    examples, Poisson, R = 8               2.7   8.7         4.00  4.00              1.005  1.004
    examples, step, R = 0.5                  -     -         1.00  1.00              1.000  1.000
    examples, step, R = 1                    -     -         1.00  1.00              1.000  1.000
    examples, step, R = 1.5               24.0  24.0         1.50  1.50              1.000  1.000
    examples, step, R = 2                 32.0  32.0         2.00  2.00              1.000  1.000
    examples, step, R = 3                 21.5  21.5         3.00  3.00              1.000  1.000
    examples, step, R = 4                 19.3  19.3         4.00  4.00              1.000  1.000
    examples, step, R = 5                  3.1   8.8         4.04  4.02              1.011  1.006
    examples, step, R = 6                  2.9   8.7         4.03  4.01              1.008  1.003
    examples, step, R = 8                  2.8   8.8         4.02  4.00              1.005  1.000
    batches, constant, R = 0.5               -     -         1.00  1.00              1.000  1.000
    batches, constant, R = 1                 -     -         1.00  1.00              1.000  1.000
    batches, constant, R = 1.5            23.0  23.0         1.50  1.50              1.000  1.000
    batches, constant, R = 2              19.0  19.0         2.00  2.00              1.000  1.000
    batches, constant, R = 3              18.0  18.0         3.00  3.00              1.000  1.000
    batches, constant, R = 4               3.0   9.7         4.00  4.00              1.000  1.000
    batches, constant, R = 5               2.0   9.7         4.00  4.00              1.000  1.000
    batches, constant, R = 6               2.0   9.7         4.00  4.00              1.000  1.000
    batches, constant, R = 8               2.0   9.7         4.00  4.00              1.000  1.000
    batches, Poisson, R = 0.5                -     -         1.00  1.00              1.000  1.000
    batches, Poisson, R = 1               18.1  18.1         1.06  1.06              1.000  1.000
    batches, Poisson, R = 1.5             21.2  21.2         1.49  1.49              1.000  1.000
    batches, Poisson, R = 2               21.0  21.0         1.97  1.97              1.000  1.000
    batches, Poisson, R = 3               18.3  18.6         2.97  2.96              0.999  0.994
    batches, Poisson, R = 4               12.8  15.4         3.80  3.73              0.950  0.927
    batches, Poisson, R = 5                6.9  12.3         3.99  3.96              0.985  0.980
    batches, Poisson, R = 6                4.2  10.9         4.00  4.00              0.986  0.988
    batches, Poisson, R = 8                3.1  10.8         4.00  4.00              0.987  0.987
    batches, step, R = 0.5                   -     -         1.00  1.00              1.000  1.000
    batches, step, R = 1                     -     -         1.00  1.00              1.000  1.000
    batches, step, R = 1.5                23.0  23.0         1.50  1.50              1.000  1.000
    batches, step, R = 2                  31.0  31.0         2.00  2.00              1.000  1.000
    batches, step, R = 3                  21.0  21.0         3.00  3.00              1.000  1.000
    batches, step, R = 4                  19.0  19.0         4.00  4.00              1.000  1.000
    batches, step, R = 5                   2.8   8.3         4.04  4.02              1.010  1.006
    batches, step, R = 6                   2.2   9.7         4.03  4.01              1.008  1.002
    batches, step, R = 8                   3.7   9.0         4.01  4.00              1.004  1.000

    epochs                waited at 2  at 8  carried  ideal   at 8  carried  apart  at 8  carried
    ---------------------------------------------------------------------------------------------
    examples, 20, R = 2             3     3        0  0.927  0.927    1.000   11.0  11.0     17.8
    examples, 20, R = 4             7    14        1  0.914  0.827    0.988    3.9   6.0      8.8
    examples, 20, R = 6            45    54       41  0.942  0.831    0.992    2.8   5.9      8.8
    examples, 50, R = 2             3     3        0  0.970  0.970    1.000   17.2  17.2     17.4
    examples, 50, R = 4             7    14        1  0.965  0.930    0.995    4.0   7.8      8.8
    examples, 50, R = 6           105   114      101  0.977  0.932    0.997    2.8   7.8      8.8
    examples, 200, R = 2            3     3        0  0.993  0.993    1.000   20.1  20.1     17.4
    examples, 200, R = 4            7    14        1  0.991  0.983    0.999    4.0   8.6      8.8
    examples, 200, R = 6          405   414      401  0.994  0.983    0.999    2.8   8.5      8.8
    batches, 20, R = 2              3     3        0  0.927  0.927    1.000   10.2  10.2     17.3
    batches, 20, R = 4              7    17        1  0.914  0.790    0.988    3.0   5.7      9.7
    batches, 20, R = 6             46    57       41  0.930  0.793    0.992    2.0   5.6      9.7
    batches, 50, R = 2              3     3        0  0.970  0.970    1.000   15.7  15.7     16.9
    batches, 50, R = 4              7    17        1  0.965  0.915    0.995    3.0   8.4      9.7
    batches, 50, R = 6            106   117      101  0.972  0.917    0.997    2.0   8.3      9.7
    batches, 200, R = 2             3     3        0  0.993  0.993    1.000   18.2  18.2     17.0
    batches, 200, R = 4             7    17        1  0.991  0.979    0.999    3.0   9.4      9.7
    batches, 200, R = 6           406   417      401  0.993  0.979    0.999    2.0   9.4      9.7

    near R = 1                    least factor  factor   ratio
    ----------------------------------------------------------
    examples, constant, R = 0.8          1.000   1.000  1.0000
    examples, constant, R = 0.9          1.000   1.000  1.0000
    examples, constant, R = 0.95         1.000   1.000  1.0000
    examples, constant, R = 1            1.000   1.000  1.0000
    examples, constant, R = 1.05         1.050   1.050  1.0000
    examples, constant, R = 1.1          1.100   1.100  1.0000
    examples, constant, R = 1.2          1.200   1.200  1.0000
    examples, Poisson, R = 0.8           1.000   1.000  1.0000
    examples, Poisson, R = 0.9           1.000   1.000  1.0000
    examples, Poisson, R = 0.95          1.000   1.000  1.0000
    examples, Poisson, R = 1             1.010   1.010  1.0000
    examples, Poisson, R = 1.05          1.054   1.054  1.0001
    examples, Poisson, R = 1.1           1.104   1.104  1.0000
    examples, Poisson, R = 1.2           1.204   1.204  0.9999
    batches, constant, R = 0.8           1.000   1.000  1.0000
    batches, constant, R = 0.9           1.000   1.000  1.0000
    batches, constant, R = 0.95          1.000   1.000  1.0000
    batches, constant, R = 1             1.000   1.000  1.0000
    batches, constant, R = 1.05          1.050   1.050  1.0000
    batches, constant, R = 1.1           1.100   1.100  1.0000
    batches, constant, R = 1.2           1.200   1.200  1.0000
    batches, Poisson, R = 0.8            1.005   1.005  1.0000
    batches, Poisson, R = 0.9            1.018   1.018  1.0000
    batches, Poisson, R = 0.95           1.033   1.033  1.0000
    batches, Poisson, R = 1              1.056   1.056  1.0000
    batches, Poisson, R = 1.05           1.084   1.084  1.0000
    batches, Poisson, R = 1.1            1.121   1.121  1.0000
    batches, Poisson, R = 1.2            1.212   1.212  1.0000
    [end]
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from harness import Report, parser, report

from experiments.suite.exact_clock import Supply
from stoker.engine.echo.adaptive_inputs import OnDemandPolicy
from stoker.schedule.pools.adaptive import RAMP_STEPS, AdaptivePool, carry_over

MAX_FACTOR = 4
POOL_BATCHES = 16
WINDOW_BATCHES = 8
RULES = (2, 8)
RATIOS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
NEAR_ONE = (0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2)
EPOCHS = (20, 50, 200)
CASES = {"at 2": (2, False), "at 8": (8, False), "carried": (8, True)}
"""The distance, and whether the pool goes on in the next epoch."""
EPOCH_RATIOS = (2.0, 4.0, 6.0)
SUPPLIES = ("constant", "Poisson", "step")
UNITS = {"examples": 32, "batches": 1}
"""The items in a step, by what is echoed."""


@dataclass(frozen=True)
class Ran:
    """What came of some steps.

    Attributes:
        steps: how many there were; ``waited``: the time between them; ``fresh``: fresh batches.
        distance: the mean between uses; ``closest``: the smallest, behind the ramp.
    """

    steps: int
    waited: float
    fresh: float
    distance: float
    closest: float

    @property
    def factor(self) -> float:
        """Uses of a fresh item."""
        return self.steps / self.fresh

    def of_ideal(self, ratio: float) -> float:
        """Return the share of time in steps over the most that was possible."""
        return self.steps / (self.steps + self.waited) / min(1.0, MAX_FACTOR / ratio)


def times(kind: str, mean: Callable[[], float], seed: int) -> Callable[[], float]:
    """Return what tells the time of a chunk."""
    generator = np.random.default_rng(seed)
    if kind == "Poisson":
        return lambda: mean() * float(generator.exponential())
    return mean


def new_pool(unit: str, min_distance: int) -> AdaptivePool:
    """Return an empty pool."""
    group = UNITS[unit]
    return AdaptivePool(MAX_FACTOR, min_distance, POOL_BATCHES * group, group)


def epoch(
    pool: AdaptivePool, supply: Supply, most_steps: float = math.inf
) -> Iterator[tuple[float, int, int, int, int]]:
    """Yield of each step: the time waited, fresh items, distances' sum and number, the smallest."""
    policy = OnDemandPolicy()
    upstream: Any = supply
    last = {n: s.after - 1 for level in pool.levels for s in level for n in s.ordinals.tolist()}
    while pool.step < most_steps:
        asked = supply.now
        code = policy.code(pool, upstream)
        if code is None:
            return
        waited = supply.now - asked
        fresh = min(pool.fresh_of(code), supply.made - supply.taken)
        supply.take(fresh)
        step, draw = pool.step, pool.draw(code, fresh)
        drawn = draw.ordinals.tolist()
        closest = min((step - last[n] for n in drawn if n in last), default=10**9)
        last |= dict.fromkeys(drawn, step)
        supply.now += 1.0
        yield waited, fresh, draw.distance_sum, draw.repeats, closest


def made_by(unit: str, cost: Callable[[], float], batches: float, now: float = 0.0) -> Supply:
    """Return a supply of so many batches."""
    group = UNITS[unit]
    chunk = max(1, group // 8)
    items = 10**12 if math.isinf(batches) else int(batches) * group
    return Supply(lambda: cost() * chunk / group, chunk, WINDOW_BATCHES * group, items, now)


def summed(steps: list[tuple[float, int, int, int, int]], group: int, ramp: int) -> Ran:
    """Sum steps up; distances are told from ``ramp`` on, and not of the last."""
    return Ran(
        len(steps),
        sum(s[0] for s in steps),
        sum(s[1] for s in steps) / group,
        sum(s[2] for s in steps) / max(1, sum(s[3] for s in steps)),
        min((s[4] for s in steps[ramp:-1]), default=10**9),
    )


def long_run(unit: str, kind: str, ratio: float, min_distance: int, steps: int, seed: int) -> Ran:
    """Run one long epoch; return its later half, or the middle third of a step of R."""
    first, last = (steps // 3, 2 * steps // 3) if kind == "step" else (steps // 2, steps)
    number = 0

    def mean() -> float:
        return 1.0 if kind == "step" and not first <= number < last else ratio

    supply = made_by(unit, times(kind, mean, seed), math.inf)
    ran = []
    for each in epoch(new_pool(unit, min_distance), supply, steps):
        ran.append(each)
        number += 1
    if kind == "step":  # behind the stock of copies that the first third has left
        first = min(last - 2, first + POOL_BATCHES * (MAX_FACTOR - 1) + WINDOW_BATCHES)
    return summed(ran[first:last], UNITS[unit], 0)


def short_epochs(unit: str, ratio: float, case: str, batches: int, epochs: int) -> Ran:
    """Run epochs of so many fresh batches; return the mean one behind the first."""
    min_distance, carries = CASES[case]
    now, all_of_them = 0.0, []
    pool = new_pool(unit, min_distance)
    for number in range(epochs + 1):
        supply = made_by(unit, lambda: ratio, batches, now)
        ran = list(epoch(pool, supply))
        if number:
            all_of_them.append(summed(ran, UNITS[unit], 0 if carries else RAMP_STEPS))
        now = supply.now
        over, pool = pool, new_pool(unit, min_distance)
        if carries:
            pool.restore(carry_over(over, over.admitted))
    columns = {key: [asdict(ran)[key] for ran in all_of_them] for key in asdict(all_of_them[0])}
    mean = {key: statistics.fmean(values) for key, values in columns.items()}
    return Ran(**mean | {"steps": round(mean["steps"]), "closest": min(columns["closest"])})


def least_factor(unit: str, kind: str, ratio: float, steps: int, seed: int) -> float:
    """Return the factor of taking all that is ready, without a pool; of the later half."""
    group = UNITS[unit]
    supply = made_by(unit, times(kind, lambda: ratio, seed), math.inf)
    supply.wait_for(group)
    taken: deque[int] = deque()
    for _ in range(steps):
        ready, _ = supply.poll(group)
        supply.take(ready)
        supply.now += 1.0
        taken.append(ready)
    later = list(taken)[steps // 2 :]
    return len(later) * group / max(1, sum(later))


def show_long(found: Report) -> None:
    """Hold both rules side by side, by R and supply."""
    lines = []
    for row in found.having("long"):
        by_rule = {rule: [Ran(**s) for s in row["long"][str(rule)]] for rule in RULES}
        ratio = row["r"]
        apart, factor, ideal = {}, {}, {}
        for rule, runs in by_rule.items():
            apart[rule] = statistics.fmean(ran.distance for ran in runs)
            factor[rule] = statistics.fmean(ran.factor for ran in runs)
            ideal[rule] = statistics.fmean(ran.of_ideal(ratio) for ran in runs)
        copied = factor[8] > 1.001
        closest = min(ran.closest for ran in by_rule[8])
        name = f"{row['unit']}, {row['supply']}, R = {ratio:g}"
        lines.append(
            (
                name,
                *(f"{apart[rule]:.1f}" if copied else "-" for rule in RULES),
                *(f"{factor[rule]:.2f}" for rule in RULES),
                *(f"{ideal[rule]:.3f}" for rule in RULES),
            )
        )
        found.expect(f"{name}: closest", min(closest, 99), 8)
        found.expect(f"{name}: time in steps, at 8 over at 2", ideal[8] / ideal[2], 0.97)
    head = ("long epochs", "distance at 2", "at 8", "factor at 2", "at 8", "of the ideal at 2")
    found.show((*head, "at 8"), lines)


def show_epochs(found: Report) -> None:
    """Say what each epoch pays."""
    lines = []
    for row in found.having("short"):
        two, eight, going_on = (Ran(**row["short"][case]) for case in CASES)
        ratio = row["r"]
        name = f"{row['unit']}, {row['batches']}, R = {ratio:g}"
        lines.append(
            (
                name,
                *(f"{ran.waited:.0f}" for ran in (two, eight, going_on)),
                *(f"{ran.of_ideal(ratio):.3f}" for ran in (two, eight, going_on)),
                *(f"{ran.distance:.1f}" for ran in (two, eight, going_on)),
            )
        )
        found.expect(f"{name}: closest", min(eight.closest, going_on.closest, 99), 8)
        found.expect(f"{name}: carried, of the ideal", going_on.of_ideal(ratio), 0.97)
    head = ("epochs", "waited at 2", "at 8", "carried", "ideal", "at 8", "carried")
    found.show((*head, "apart", "at 8", "carried"), lines)


def show_near_one(found: Report) -> None:
    """Hold factors near R = 1 against the least there can be."""
    lines = []
    for row in found.having("least"):
        least, got = statistics.fmean(row["least"]), statistics.fmean(row["factor"])
        name = f"{row['unit']}, {row['supply']}, R = {row['r']:g}"
        lines.append((name, f"{least:.3f}", f"{got:.3f}", f"{got / least:.4f}"))
        found.expect(f"{name}: factor over the least", got / least, 1.005, at_least=False)
    found.show(("near R = 1", "least factor", "factor", "ratio"), lines)


def evaluate(found: Report) -> None:
    """Show all parts."""
    show_long(found)
    show_epochs(found)
    show_near_one(found)


def main() -> None:
    """Simulate and report."""
    arguments = parser(__doc__, evaluate).parse_args()
    quick = arguments.quick
    steps, seeds = (600, 1) if quick else (6000, arguments.rounds)
    with report(__file__, arguments) as found:
        for unit in UNITS:
            for kind in SUPPLIES:
                chances = seeds if kind == "Poisson" else 1
                for ratio in RATIOS[::4] if quick else RATIOS:
                    ran = {
                        str(rule): [
                            asdict(long_run(unit, kind, ratio, rule, steps, seed))
                            for seed in range(chances)
                        ]
                        for rule in RULES
                    }
                    found.add(unit=unit, supply=kind, r=ratio, long=ran)
        for unit in UNITS:
            for batches in EPOCHS[:1] if quick else EPOCHS:
                for ratio in EPOCH_RATIOS:
                    short = {
                        case: asdict(short_epochs(unit, ratio, case, batches, 5)) for case in CASES
                    }
                    found.add(unit=unit, batches=batches, r=ratio, short=short)
        for unit in UNITS:
            for kind in SUPPLIES[:2]:
                chances = seeds if kind == "Poisson" else 1
                for ratio in NEAR_ONE[::3] if quick else NEAR_ONE:
                    near = [
                        (
                            least_factor(unit, kind, ratio, steps, seed),
                            long_run(unit, kind, ratio, 8, steps, seed).factor,
                        )
                        for seed in range(chances)
                    ]
                    least, factor = ([pair[at] for pair in near] for at in (0, 1))
                    found.add(unit=unit, supply=kind, r=ratio, least=least, factor=factor)


if __name__ == "__main__":
    main()
