"""Reclaimed time: what does an echo that follows the stall give back, at any R?

Example echoing before batching. The upstream sleeps, as storage with latency does, on two workers;
the consumer sleeps for its step, as a host thread does while an accelerator works. R = t_upstream /
t_downstream in 1, 1.5, 2, 3, 4, 6, under no echo, e = 2, e = 4 and ``.echo("auto")`` with its
default ``max_factor`` of 4; all with the same pool.

The ideal, in batches a second, from rates measured in the same round::

    min(G, max_factor * P)        which is min(R, max_factor) * P where R >= 1

with G the step alone on ready batches, and P the pipeline without echo and without a step. *Busy*
is the share of the time that the step takes: an accelerator's, if there was one. Both from the full
pool (under auto: the step by which as many examples came as the pool holds, and the ramp of the
distance is over) to the step that the last fresh examples came for; whole epochs, with start-up,
ramp and drain, are beside it.

In a second part R goes from 1 to 3.4 and back while a pipeline runs. The factor is that of ten
batches, uses over fresh examples by ``pipeline.record()``, and held against R as measured (at
least 1); batches are counted from the change of latency to the end of the first ten within 10 %.

Command::

    python bench/auto.py

Targets: auto at least 0.95 of the ideal at every R; a change of R followed within 20 batches to
within 10 %.

Machine: two cores of an Intel Xeon at 2.5 GHz, 24 GiB, no GPU; Python 3.11.7 (a plain loop
iteration takes 290 ns there, so that Python's own share weighs several times more than
usual), NumPy 2.4.6, torch 2.13.0.

Results (five rounds; other work ran beside, at a lower priority)::

    [results/auto.json]
                      R as measured  batches/s  factor  busy            of the ideal  whole epoch
    ---------------------------------------------------------------------------------------------
    R = 1, no echo             1.07      117.8    1.00   94%  0.945 (0.915 .. 0.948)        0.930
    R = 1, e = 2               1.07      123.8    2.02   99%  0.992 (0.987 .. 0.993)        0.962
    R = 1, e = 4               1.07      123.0    4.20   98%  0.986 (0.976 .. 0.995)        0.969
    R = 1, auto                1.07      124.2    1.07   99%  0.996 (0.995 .. 0.997)        0.982
    R = 1.5, no echo           1.55       79.7    1.00   64%  0.639 (0.635 .. 0.644)        0.631
    R = 1.5, e = 2             1.55      124.2    2.02   99%  0.997 (0.994 .. 0.998)        0.931
    R = 1.5, e = 4             1.55      124.1    4.20   99%   0.995 (0.99 .. 0.996)        0.955
    R = 1.5, auto              1.55      124.2    1.59   99%  0.996 (0.995 .. 0.999)        0.975
    R = 2, no echo             2.09       59.7    1.00   48%  0.479 (0.477 .. 0.484)        0.474
    R = 2, e = 2               2.09      117.8    2.02   94%  0.945 (0.927 .. 0.958)        0.861
    R = 2, e = 4               2.09      123.7    4.20   99%   0.993 (0.99 .. 0.993)        0.929
    R = 2, auto                2.09      124.2    2.12   99%  0.996 (0.995 .. 0.997)        0.971
    R = 3, no echo             3.10       39.6    1.00   32%  0.318 (0.315 .. 0.325)        0.314
    R = 3, e = 2               3.10       78.9    2.03   63%   0.634 (0.626 .. 0.65)        0.581
    R = 3, e = 4               3.10      123.7    4.20   99%  0.993 (0.979 .. 0.993)        0.883
    R = 3, auto                3.10      124.0    3.22   99%  0.995 (0.994 .. 0.996)        0.957
    R = 4, no echo             4.11       30.3    1.00   24%  0.249 (0.246 .. 0.251)        0.246
    R = 4, e = 2               4.11       62.1    2.04   50%  0.507 (0.503 .. 0.512)        0.460
    R = 4, e = 4               4.11      122.2    4.20   98%    1.01 (0.976 .. 1.02)        0.860
    R = 4, auto                4.11      118.5    3.91   95%  0.976 (0.942 .. 0.989)        0.886
    R = 6, no echo             6.17       20.2    1.00   16%   0.25 (0.249 .. 0.253)        0.248
    R = 6, e = 2               6.17       41.3    2.06   33%  0.511 (0.508 .. 0.516)        0.467
    R = 6, e = 4               6.17       84.5    4.35   68%     1.04 (1.04 .. 1.06)        0.880
    R = 6, auto                6.17       78.1    3.85   62%  0.964 (0.961 .. 0.979)        0.872

    change of R  R as measured  factor  batches to within 10 %  within from there
    -----------------------------------------------------------------------------
    1 -> 3.4              3.53    3.59           13 (13 .. 13)               100%
    back                  1.09    1.10           12 (11 .. 12)               100%
    [end]

Caveats: sleeps overshoot; here the next one makes up for it, or R = 1 would be 1.4. What sleeps
takes no core from what echoes. R is nominal: the library's own time is in P, and so in the ideal.
A fixed factor may pass the ideal a little: a full pool holds uses that are still to come.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from echo import Row
from harness import Ratio, Report, interleaved, parser, report
from numpy.typing import NDArray

import stoker
from stoker.schedule import rng
from stoker.schedule.echo_record import decode
from stoker.schedule.factor import EvenUses, exact_factor
from stoker.schedule.pools.adaptive import RAMP_STEPS
from stoker.schedule.pools.fixed import Pool

BATCH = 32
POOL_BATCHES = 8
WORKERS = 2
SEED = 0
MAX_FACTOR = 4
FACTORS: tuple[int | str, ...] = (1, 2, 4, "auto")
NAMES = {1: "no echo", 2: "e = 2", 4: "e = 4", "auto": "auto"}
PACE_WINDOW = 10  # batches
SLOW = 3.4


class Sleeper:
    """Sleeps so many seconds on average: what one sleep overshoots, the thread's next makes up."""

    def __init__(self) -> None:
        self._local = threading.local()

    def __call__(self, seconds: float) -> float:
        """Sleep; return the seconds it took."""
        due = seconds - getattr(self._local, "over", 0.0)
        began = time.perf_counter()
        if due > 0:
            time.sleep(due)
        took = time.perf_counter() - began
        self._local.over = took - due
        return took


@dataclass
class Upstream:
    """Examples that sleep; R may be changed while a pipeline runs."""

    ratio: float
    step_s: float

    def pipeline(self, batches: int, factor: int | str) -> Any:
        """Build it."""
        sleep = Sleeper()

        def prepared(x: Any) -> Any:
            sleep(self.ratio * self.step_s * WORKERS / BATCH)
            return x

        made = stoker.from_dataset(Row(batches * BATCH), seed=SEED).shuffle().workers(WORKERS)
        return made.map(prepared).echo(factor, pool=POOL_BATCHES * BATCH).batch(BATCH)


@dataclass(frozen=True)
class Speed:
    """Batches per second, and the share of the time that the step took."""

    plateau: float
    busy: float
    whole: float
    factor: float
    """Uses per fresh example on the plateau."""


def fresh_of_steps(pipeline: Any, factor: int | str, batches: int) -> NDArray[np.int64]:
    """Return how many fresh examples each batch of the epoch brought."""
    if factor == "auto":
        decisions = decode(pipeline.record(), batches * BATCH).of(0, 0)
        grain = -(-BATCH // 255)
        codes = np.frombuffer(decisions.codes, np.uint8).astype(np.int64)
        return np.minimum(codes * grain, BATCH)  # 255 stands for a whole step
    if factor == 1:
        return np.full(batches, BATCH, np.int64)
    key = rng.key(SEED, 0, rng.ECHO)
    pool = Pool(EvenUses(exact_factor(factor)), POOL_BATCHES * BATCH, BATCH, key, batches * BATCH)
    fresh = []
    while not pool.exhausted:
        before = pool.admitted
        pool.advance()
        fresh.append(pool.admitted - before)
    return np.array(fresh, np.int64)


def consume(pipeline: Any, factor: int | str, batches: int, step_s: float) -> Speed:
    """Run an epoch of so many fresh batches."""
    sleep = Sleeper()
    busy_s = [0.0]
    times = [time.perf_counter()]
    for _ in pipeline:
        busy_s.append(sleep(step_s) if step_s else 0.0)
        times.append(time.perf_counter())
    fresh = np.concatenate([[0], fresh_of_steps(pipeline, factor, batches)])
    assert len(fresh) == len(times), (len(fresh), len(times))
    first = POOL_BATCHES
    if factor == "auto":
        first = int(np.searchsorted(np.cumsum(fresh), POOL_BATCHES * BATCH))
    last = int(np.flatnonzero(fresh)[-1])
    if factor == "auto":
        first = min(max(first, RAMP_STEPS), last // 2)
    elapsed_s, steps = times[last] - times[first], last - first
    return Speed(
        plateau=steps / elapsed_s,
        busy=sum(busy_s[first + 1 : last + 1]) / elapsed_s,
        whole=(len(times) - 1) / (times[-1] - times[0]),
        factor=steps * BATCH / int(fresh[first + 1 : last + 1].sum()),
    )


def step_alone(steps: int, step_s: float) -> Speed:
    """Return G: the consumer on batches that are there."""
    sleep = Sleeper()
    began = time.perf_counter()
    for _ in range(steps):
        sleep(step_s)
    rate = steps / (time.perf_counter() - began)
    return Speed(rate, 1.0, rate, 1.0)


def reclaimed(found: Report, ratio: float, steps: int, step_s: float, rounds: int) -> None:
    """Measure one R under all factors."""
    upstream = Upstream(ratio, step_s)
    drained = POOL_BATCHES + max(4, round(steps / ratio))
    cases: dict[str, Callable[[], Speed]] = {
        "G": lambda: step_alone(steps // 2, step_s),
        "P": lambda: consume(upstream.pipeline(drained, 1), 1, drained, 0.0),
    }
    for factor in FACTORS:
        most = MAX_FACTOR if factor == "auto" else int(factor)
        realised = min(most, ratio) if factor == "auto" else most
        batches = POOL_BATCHES + max(2, round(steps * min(1, most / ratio) / realised))

        def run(factor: int | str = factor, batches: int = batches) -> Speed:
            return consume(upstream.pipeline(batches, factor), factor, batches, step_s)

        cases[NAMES[factor]] = run
    samples = interleaved(cases, rounds)
    ideal = [
        min(g.plateau, MAX_FACTOR * p.plateau)
        for g, p in zip(samples["G"], samples["P"], strict=True)
    ]
    measured = Ratio.of([s.plateau for s in samples["G"]], [s.plateau for s in samples["P"]])
    found.add(r=ratio, measured_r=asdict(measured), step_s=step_s, ideal=ideal)
    for name in NAMES.values():
        found.add(r=ratio, case=name, samples=[asdict(s) for s in samples[name]])


def show_reclaimed(found: Report) -> None:
    """Hold the rates under each R against the ideal."""
    of_ratio = {row["r"]: row for row in found.having("ideal")}
    lines = []
    for row in found.having("case"):
        ideal, measured = of_ratio[row["r"]]["ideal"], of_ratio[row["r"]]["measured_r"]
        columns = {key: [s[key] for s in row["samples"]] for key in row["samples"][0]}
        middle = {key: statistics.median(each) for key, each in columns.items()}
        plateau = Ratio.of(columns["plateau"], ideal)
        name = f"R = {row['r']:g}, {row['case']}"
        lines.append(
            (
                name,
                f"{measured['median']:.2f}",
                f"{middle['plateau']:.1f}",
                f"{middle['factor']:.2f}",
                f"{middle['busy']:.0%}",
                plateau,
                f"{Ratio.of(columns['whole'], ideal).median:.3f}",
            )
        )
        if row["case"] == "auto":
            found.expect(f"{name}, of the ideal", plateau.median, 0.95)
    head = ("", "R as measured", "batches/s", "factor", "busy", "of the ideal", "whole epoch")
    found.show(head, lines)


@dataclass(frozen=True)
class Followed:
    """How a change of R was followed."""

    reached: int
    """Batches to the end of the first ten whose factor was within 10 % of R."""
    within: float
    """The share of later tens, up to the next change, that were."""
    factor: float
    """The mean of those later batches."""


def track(lengths: list[int], step_s: float) -> list[list[int]]:
    """Change R while a pipeline runs; return fresh examples of each step, by stretch."""
    ratios = [1.0, SLOW, 1.0]
    changes = {sum(lengths[:i]): ratio for i, ratio in enumerate(ratios)}
    upstream = Upstream(1.0, step_s)
    enough = sum(lengths) + 2 * POOL_BATCHES
    pipeline = upstream.pipeline(enough, "auto").steps(sum(lengths))
    sleep = Sleeper()
    with iter(pipeline) as batches:
        for step, _ in enumerate(batches):
            upstream.ratio = changes.get(step, upstream.ratio)
            sleep(step_s)
    fresh = fresh_of_steps(pipeline, "auto", enough).tolist()
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [fresh[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def followed(fresh: list[int], ratio: float) -> Followed:
    """Hold the factor after a change against R."""
    sums = np.convolve(fresh, np.ones(PACE_WINDOW), "valid")
    factors = PACE_WINDOW * BATCH / np.maximum(sums, 1)
    good = np.abs(factors / max(1.0, ratio) - 1) <= 0.1
    first = int(np.argmax(good)) if good.any() else 0
    reached = first + PACE_WINDOW if good.any() else len(fresh)
    mean = len(fresh[first:]) * BATCH / max(1, sum(fresh[first:]))
    return Followed(reached, float(good[first:].mean()), mean)


def tracking(found: Report, lengths: list[int], step_s: float, rounds: int) -> None:
    """Follow R from 1 to 3.4 and back."""
    drained = POOL_BATCHES + lengths[0]

    def produced(ratio: float) -> float:
        made = Upstream(ratio, step_s).pipeline(drained, 1)
        return consume(made, 1, drained, 0.0).plateau

    cases: dict[str, Callable[[], Any]] = {
        "G": lambda: step_alone(lengths[0], step_s).plateau,
        "fast": lambda: produced(1.0),
        "slow": lambda: produced(SLOW),
        "track": lambda: track(lengths, step_s),
    }
    samples = interleaved(cases, rounds)
    for at, (name, speed) in enumerate((("start", "fast"), ("1 -> 3.4", "slow"), ("back", "fast"))):
        pairs = zip(samples["G"], samples[speed], strict=True)
        ratios = [g / p for g, p in pairs]
        each = [
            followed(stretches[at], ratio)
            for stretches, ratio in zip(samples["track"], ratios, strict=True)
        ]
        fresh = [stretches[at] for stretches in samples["track"]]
        found.add(change=name, r=ratios, followed=[asdict(f) for f in each], fresh_by_step=fresh)


def show_tracking(found: Report) -> None:
    """Hold the changes of R against the target; the start is none."""
    lines = []
    for row in found.having("change"):
        name, each = row["change"], row["followed"]
        if name == "start":
            continue
        reached = sorted(f["reached"] for f in each)
        found.expect(
            f"{name}: batches to within 10 %", statistics.median(reached), 20, at_least=False
        )
        lines.append(
            (
                name,
                f"{statistics.median(row['r']):.2f}",
                f"{statistics.median(f['factor'] for f in each):.2f}",
                f"{statistics.median(reached):g} ({reached[0]} .. {reached[-1]})",
                f"{statistics.median(f['within'] for f in each):.0%}",
            )
        )
    head = ("change of R", "R as measured", "factor", "batches to within 10 %")
    found.show((*head, "within from there"), lines)


def evaluate(found: Report) -> None:
    """Show both parts."""
    show_reclaimed(found)
    show_tracking(found)


def main() -> None:
    """Run both parts and report."""
    arguments = parser(__doc__, evaluate).parse_args()
    if arguments.quick:
        ratios, steps, step_s, lengths, rounds = [2.0], 12, 0.001, [12, 12, 12], 1
    else:
        ratios, steps, step_s = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0], 120, 0.008
        lengths, rounds = [60, 120, 120], arguments.rounds
    with report(__file__, arguments) as found:
        for ratio in ratios:
            reclaimed(found, ratio, steps, step_s, rounds)
        tracking(found, lengths, step_s, rounds)


if __name__ == "__main__":
    main()
