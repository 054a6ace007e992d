"""What an action brings, by the model: speed after it over speed before."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from stoker.analysis.model import Change, Measured, cache_rate, predict, storage_rate
from stoker.analysis.report import Rate, Report, measured

Judge = Callable[[Measured], float]
"""Examples/s after something was done."""


def gain(report: Report, after: Judge, before: Judge | None = None) -> Rate:
    """Return the predicted speed after something over the speed before, with its interval.

    The interval spans the corners of the intervals of G, P, S and C.
    """

    def judge(case: Measured) -> float:
        return after(case) / (before or _now)(case)

    value, *answers = (judge(case) for case in [measured(report), *_corners(report)])
    return Rate(value, min(value, *answers), max(value, *answers))


def _now(case: Measured) -> float:
    return predict(case).rate


def changed(change: Change) -> Judge:
    """Change something that can be asked about."""
    return lambda case: predict(case, change).rate


def _corners(report: Report) -> list[Measured]:
    """Return the job with each of its rates at either end of its interval."""
    rates, middle = report.rates, measured(report)
    own = next((p.rate for p in report.prep if p.workers == middle.workers), None)
    ends = [_ends(rate) for rate in (rates.G, rates.P or own, rates.S, rates.C)]
    cases = []
    for g, p, s, c in itertools.product(*ends):
        cases.append(
            replace(
                middle,
                ingestion=middle.ingestion * g,
                prep=tuple((count, rate * p) for count, rate in middle.prep),
                storage=middle.storage * s if middle.storage else None,
                cache=middle.cache * c if middle.cache else None,
            )
        )
    return cases


def _ends(rate: Rate | None) -> tuple[float, float]:
    """Return the ends of an interval over its middle."""
    if rate is None:
        return 1.0, 1.0
    return max(rate.low / rate.value, 0.01), rate.high / rate.value


def of_workers(count: int) -> Judge:
    """Have that many workers, on the processors that there are."""

    def judge(case: Measured) -> float:
        readers = Change(cores=count)
        storage, cache = storage_rate(case, readers), cache_rate(case, readers)
        return predict(replace(case, workers=count, storage=storage, cache=cache)).rate

    return judge


def prepared(faster: float) -> Judge:
    """Prepare that many times as fast."""

    def judge(case: Measured) -> float:
        prep = tuple((count, rate * faster) for count, rate in case.prep)
        cpu = tuple((count, seconds / faster) for count, seconds in case.prep_cpu)
        return predict(replace(case, prep=prep, prep_cpu=cpu)).rate

    return judge


def kept(held: float, kept_s: float) -> Judge:
    """Take that share of the examples out of memory, decoded, for so many worker seconds each."""

    def judge(case: Measured) -> float:
        def mixed(takes_s: float) -> float:
            return (1.0 - held) * takes_s + held * min(takes_s, kept_s)

        left = max(1.0 - held, 1e-9)
        job = replace(
            case,
            prep=tuple(
                (count, max(1, count) / mixed(max(1, count) / rate)) for count, rate in case.prep
            ),
            prep_cpu=tuple((count, mixed(cpu_s)) for count, cpu_s in case.prep_cpu),
            storage=case.storage / left if case.storage else None,
            cache=case.cache / left if case.cache else None,
            miss_s=case.miss_s * (1.0 - held),
        )
        return predict(job).rate

    return judge
