"""Changes of a measured job beyond those of what-if, the gain of each, and choices of workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from stoker.analysis.model.calibration import scale_fetch
from stoker.analysis.model.formulas import interpolate, prep_rate
from stoker.analysis.model.model import (
    NOTHING,
    Change,
    Measured,
    cache_rate,
    predict,
    storage_rate,
)
from stoker.analysis.model.report import Rate, Report, find_efficiency, find_prep, to_measured

Points = tuple[tuple[int, float], ...]
"""Values by number of workers, ascending."""

WORTH = 1.02
"""Actions with a smaller gain are not listed: predictions are wrong by about as much
(bench/analyze_accuracy.py)."""
# The fraction of the host's memory for a cache: as with ``limit="auto"`` (cache/location.py).
MEMORY_FRACTION = 0.5
# What an example in a cache takes beside its arrays: head, names and dtypes.
_KEPT_BYTES = 512
# The rate of a process as a fraction of a thread's: measured 0.77 to 0.96 with small JPEGs.
CROSSING = 0.8


def plan_keeping(report: Report) -> tuple[int, float] | None:
    """Return the bytes of a cache for prepared examples, and the fraction that it holds.

    None if they are random, change, or are of an unknown number, or if a cache of them was not
    measured.
    """
    prepared, loader = report.prepared, report.loader
    if prepared is None or prepared.varies or loader.changes or loader.moves:
        return None
    if prepared.example_bytes is None or not report.examples or report.kept is None:
        return None
    # 5 % more: only some examples were measured, and others differ.
    whole = report.examples * (1.05 * prepared.example_bytes + _KEPT_BYTES)
    size = int(min(whole, MEMORY_FRACTION * report.memory_bytes))
    return size, size / whole


def find_kept(report: Report) -> Measured:
    """Return the job with all examples in a cache, as its loader and training were measured so."""
    point = report.kept
    assert point is not None
    found = replace(
        to_measured(report),
        prep=((point.workers, point.rate.value),),
        prep_cpu=((point.workers, point.cpu_s),),
        miss_s=0.0,
    )
    return replace(found, efficiency=find_efficiency(found, [point]))


def with_workers(case: Measured, count: int) -> Measured:
    """Return the job with another number of workers, on the same processors."""
    readers = Change(cores=count)
    storage, cache = storage_rate(case, readers), cache_rate(case, readers)
    return replace(case, workers=count, storage=storage, cache=cache)


def with_processes(case: Measured, count: int) -> Measured:
    """Return the job with worker processes, which do not wait for each other."""
    many = with_workers(case, count)
    cpu_s = interpolate(case.prep_cpu, 1)
    rate = CROSSING * count * prep_rate(case.prep, 1)
    return replace(many, prep=((count, rate),), prep_cpu=((count, cpu_s / CROSSING),))


def with_faster_prep(case: Measured, faster: float) -> Measured:
    prep = tuple((count, rate * faster) for count, rate in case.prep)
    cpu = tuple((count, seconds / faster) for count, seconds in case.prep_cpu)
    return replace(case, prep=prep, prep_cpu=cpu)


def with_kept(case: Measured, held: float, kept: Measured) -> Measured:
    """Return the job with a fraction of its examples in a cache, and the others as they are.

    Args:
        case: the job.
        held: the fraction that is in the cache, from 0 to 1.
        kept: the job with all of them there.
    """
    counts = sorted({count for count, _ in (*case.prep, *kept.prep)})

    def mix(one: float, other: float) -> float:
        return (1.0 - held) * one + held * other

    def mix_points(one: Points, other: Points, empty: float = 0.0) -> Points:
        return tuple(
            (count, mix(interpolate(one, count, empty), interpolate(other, count, empty)))
            for count in counts
        )

    # Not 0 if everything is kept: it is a divisor.
    faster = 1.0 / max(1.0 - held, 1e-9)
    return replace(
        scale_fetch(case, faster),
        miss_s=case.miss_s * (1.0 - held),
        prep=tuple(
            (count, 1.0 / mix(1.0 / prep_rate(case.prep, count), 1.0 / prep_rate(kept.prep, count)))
            for count in counts
        ),
        prep_cpu=mix_points(case.prep_cpu, kept.prep_cpu),
        efficiency=mix_points(case.efficiency, kept.efficiency, 1.0),
    )


def without_work(case: Measured, later_s: float) -> Measured:
    """Return a pipeline that has no more than ``later_s`` of work for an example.

    What workers take from training, beyond processor time, is assumed to shrink with their time:
    memory bandwidth, shared cores, late batches.
    """
    takes_s = {count: max(1, count) / rate for count, rate in case.prep}
    # Not 0 where nothing is left to do: it is a divisor.
    left_s = {count: max(1e-9, min(takes, later_s)) for count, takes in takes_s.items()}
    return replace(
        case,
        prep=tuple((count, max(1, count) / left) for count, left in left_s.items()),
        prep_cpu=tuple((count, min(cpu_s, later_s)) for count, cpu_s in case.prep_cpu),
        efficiency=tuple(
            (count, 1.0 - (1.0 - one) * left_s[count] / takes_s[count])
            for count, one in case.efficiency
        ),
    )


def with_work_on_device(case: Measured, share: float, step_s: float) -> Measured:
    """Return the job with a share of preparing in its steps, by ``step_s`` an example longer."""
    return replace(
        with_faster_prep(case, 1.0 / max(0.01, 1.0 - share)),
        ingestion=1.0 / (1.0 / case.ingestion + step_s),
        step_cpu_s=case.step_cpu_s + step_s * case.trains_on_cpu,
    )


def predict_gain(
    report: Report,
    after: Change = NOTHING,
    job: Callable[[Measured], Measured] = lambda case: case,
) -> Rate:
    """Return the predicted speed after a change, or of another job, divided by the speed before.

    The interval spans the corners of the intervals of G, P, S and C.
    """
    cases = [to_measured(report), *_list_corners(report)]
    value, *others = (predict(job(case), after).rate / predict(case).rate for case in cases)
    return Rate(value, min(value, *others), max(value, *others))


def _list_corners(report: Report) -> list[Measured]:
    """Return the job with each of its rates at either end of its interval."""
    rates, middle = report.rates, to_measured(report)
    ends = [find_ends(rate) for rate in (rates.G, rates.P or find_prep(report), rates.S, rates.C)]
    return [
        replace(
            middle,
            ingestion=middle.ingestion * g,
            prep=tuple((count, rate * p) for count, rate in middle.prep),
            storage=middle.storage * s if middle.storage else None,
            cache=middle.cache * c if middle.cache else None,
        )
        for g, p, s, c in itertools.product(*ends)
    ]


def find_ends(rate: Rate | None) -> tuple[float, float]:
    """Return the ends of an interval over its middle; 1 for a rate that is not known."""
    if rate is None:
        return 1.0, 1.0
    # The model divides by rates.
    return max(rate.low / rate.value, 0.01), rate.high / rate.value


def choose_workers(own: int, counts: Iterable[int], rate: Callable[[int], float]) -> int:
    """Return the best of these numbers of workers, the fewest first: each must bring WORTH more.

    ``own`` are those of the job as it is; ``rate`` predicts the speed with a number of them.
    """
    best, most = own, rate(own)
    for count in counts:
        found = rate(count)
        if found > most * WORTH:
            best, most = count, found
    return best


@dataclass(frozen=True)
class KeptCache:
    """A cache of prepared examples, of any size."""

    job: Measured
    whole: Measured
    """The job with all examples in it."""
    whole_bytes: float
    """The size that holds them all."""

    def apply(self, change: Change) -> tuple[Measured, Change]:
        """Return the job with the cache of a change, and what else the change asks for."""
        if change.cache_bytes is None:
            return self.job, change
        held = min(1.0, change.cache_bytes / self.whole_bytes)
        return with_kept(self.job, held, self.whole), replace(change, cache_bytes=None)


def find_kept_cache(report: Report) -> KeptCache | None:
    """Return the cache for what-if where files are unknown; None where it is one of files."""
    kept = None if report.rates.S is not None else plan_keeping(report)
    if kept is None or not report.prep or report.rates.G is None:
        return None
    return KeptCache(to_measured(report), find_kept(report), kept[0] / kept[1])


def predict_kept_gain(report: Report) -> float | None:
    """Return the gain of a cache for prepared examples; None if it is unknown, or there is none."""
    kept = plan_keeping(report)
    if kept is None:
        return None
    whole, (_, held) = find_kept(report), kept
    return predict_gain(report, job=lambda case: with_kept(case, held, whole)).value
