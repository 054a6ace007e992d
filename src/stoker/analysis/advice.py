"""What to do about a stall: each action with what the model says that it brings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

from stoker.analysis.model import Change, Measured, predict, smallest_cache
from stoker.analysis.report import Action, Rate, Report, measured
from stoker.machine import format_bytes

_WORTH = 1.02  # an action that brings less is not named
_MOST_ECHO = 8
_JOBS = 4  # that sharing is predicted for
_MEMORY = 0.5  # of the host's, that a cache may take

Judge = Callable[[Measured], float]


def actions(report: Report) -> list[Action]:
    """Return what would help, most first; behind that what helps where several jobs run, and last
    echoing, for a repeat is not a fresh example.

    Raises ValueError for a report without G or P.
    """
    found = [
        *_workers(report),
        *_cache(report),
        *_storage(report),
        *_stages(report),
        *_accelerator(report),
    ]
    found.sort(key=lambda action: -action.gain.value)
    found += _sharing(report) + _echo(report)
    return [action for action in found if action.gain.value >= _WORTH]


def gain(report: Report, change: Change) -> Rate:
    """Return the predicted speed after a change over the speed before, with its interval.

    The interval spans the corners of the intervals of G, P, S and C.
    """

    def judge(case: Measured) -> float:
        return predict(case, change).rate / predict(case).rate

    answers = [judge(case) for case in _corners(report)]
    return Rate(judge(measured(report)), min(answers), max(answers))


def _corners(report: Report) -> list[Measured]:
    rates, middle = report.rates, measured(report)
    cases = []
    for g, p, s, c in itertools.product((0, 1), repeat=4):
        scale = _end(rates.P, p) / rates.P.value if rates.P else 1.0
        cases.append(
            replace(
                middle,
                ingestion=_end(rates.G, g),
                prep=tuple((count, rate * scale) for count, rate in middle.prep),
                storage=_end(rates.S, s) if rates.S else None,
                cache=_end(rates.C, c) if rates.C else middle.cache,
            )
        )
    return cases


def _end(rate: Rate | None, high: int) -> float:
    assert rate is not None
    return rate.high if high else max(rate.low, rate.value / 100)


def _workers(report: Report) -> list[Action]:
    """The number of workers that does best, up to the host's processors."""
    now = report.loader.workers
    best, rate = now, predict(measured(report)).rate
    for count in range(1, report.cores + 1):
        found = predict(measured(report), Change(cores=count)).rate
        if found > rate * _WORTH:
            best, rate = count, found
    if best == now:
        return []
    seen = any(point.workers == best for point in report.prep)
    return [
        Action(
            f"use {best} worker{'s' * (best > 1)} instead of {now}",
            f".workers({best})" if report.stages else f"DataLoader(..., num_workers={best})",
            gain(report, Change(cores=best)),
            "P at that number of workers was "
            + ("measured" if seen else "drawn between measured points"),
        )
    ]


def _cache(report: Report) -> list[Action]:
    """A cache that never evicts, as large as it must be or as memory allows."""
    if report.rates.S is None or not report.example_bytes or not report.examples:
        return []
    job = measured(report)
    whole = report.examples * report.example_bytes
    assert job.storage is not None
    assert job.cache is not None
    miss_s = job.miss_s / max(1, job.workers)
    enough = smallest_cache(job.storage, job.cache, predict(job).prep, job.ingestion, miss_s)
    wanted = min(1.0, enough * 1.02) * whole
    room = _MEMORY * report.memory_bytes
    size = int(min(wanted, room))
    if size / whole <= (report.cached_fraction or 0.0):
        return []
    share = f"{size / whole:.0%} of the dataset"
    text = format_bytes(math.ceil(size / 2**20) * 2**20)
    fits = "; the page cache would hold it too, from the second epoch on" if whole < room else ""
    return [
        Action(
            f"keep {format_bytes(size)} ({share}) in a cache that never evicts",
            f'.cache("{text}")' if report.stages else f'dataset = stoker.cached(dataset, "{text}")',
            gain(report, Change(cache_bytes=size)),
            f"from the second epoch on, against the {report.cached_fraction or 0.0:.0%} that were "
            f"in the page cache{fits}",
        )
    ]


def _storage(report: Report) -> list[Action]:
    """Faster storage."""
    if report.rates.S is None or not report.example_bytes:
        return []
    now = report.rates.S.value * report.example_bytes / 1e6
    return [
        Action(
            "move the data to storage twice as fast",
            f"stoker what-if REPORT.json --storage-mbps {2 * now:.0f}",
            gain(report, Change(storage_mbps=2 * now)),
            f"the loader's files were read at {now:,.0f} MB/s",
        )
    ]


def _stages(report: Report) -> list[Action]:
    """What only a pipeline tells: a cache behind the costly part, and a faster stage."""
    costs = {name: 1.0 / rate.value for name, rate in report.stages.items()}
    prepared = list(costs)[1:]
    if not prepared:
        return []
    found = []
    behind_s = report.after_s.get("before-augmentation", 0.0)
    total_s = sum(costs[name] for name in prepared)
    if total_s > behind_s > 0.0:
        found.append(
            Action(
                "cache what is the same in every epoch, decoded",
                ".cache(...) behind the last .map in front of the first .random_map",
                _gain_of_prep(report, total_s / behind_s),
                "from the second epoch on, if all of it fits; decoded examples are larger than "
                "files",
            )
        )
    slowest = max(prepared, key=lambda name: costs[name])
    found.append(
        Action(
            f"make {slowest} twice as fast (a faster codec, fewer pixels, compiled code)",
            slowest,
            _gain_of_prep(report, total_s / (total_s - costs[slowest] / 2)),
            f"it takes {costs[slowest] / total_s:.0%} of preparing; on one worker it gives "
            f"{1 / costs[slowest]:,.0f} examples/s",
        )
    )
    return found


def _gain_of_prep(report: Report, faster: float) -> Rate:
    """Return the gain of preparing ``faster`` times as fast, with its interval."""

    def judge(case: Measured) -> float:
        prep = tuple((count, rate * faster) for count, rate in case.prep)
        cpu = tuple((count, seconds / faster) for count, seconds in case.prep_cpu)
        changed = replace(case, prep=prep, prep_cpu=cpu)
        return predict(changed).rate / predict(case).rate

    answers = [judge(case) for case in _corners(report)]
    return Rate(judge(measured(report)), min(answers), max(answers))


def _accelerator(report: Report) -> list[Action]:
    """A faster accelerator: only where compute is what limits."""
    if report.bound != "compute":
        return []
    return [
        Action(
            "the data path keeps up: an accelerator twice as fast",
            "stoker what-if REPORT.json --accelerator 2x",
            gain(report, Change(accelerator=2.0)),
            "the step's time is taken to halve, which must be measured for a new accelerator",
        )
    ]


def _sharing(report: Report) -> list[Action]:
    """One preparation for several jobs, where one alone waits for its data."""
    if report.bound == "compute":
        return []
    shared, apart = Change(jobs=_JOBS, sharing=True), Change(jobs=_JOBS)

    def judge(case: Measured) -> float:
        return predict(case, shared).rate / predict(case, apart).rate

    answers = [judge(case) for case in _corners(report)]
    return [
        Action(
            f"where {_JOBS} jobs train on this data at a time: prepare it once for all of them",
            "stoker feed FILE.py:FUNCTION --name NAME; in each job stoker.from_feed(NAME)",
            Rate(judge(measured(report)), min(answers), max(answers)),
            f"a job of {_JOBS} that share, over a job of {_JOBS} that do not",
        )
    ]


def _echo(report: Report) -> list[Action]:
    """Echoing, by the factor that fills the accelerator."""
    job = measured(report)
    before = predict(job)
    place = "before-augmentation" if "before-augmentation" in report.after_s else "batch"
    factor, best = 1, before.rate
    for echo in range(2, _MOST_ECHO + 1):
        rate = predict(job, Change(echo=echo, echo_at=place)).rate
        if rate < best * _WORTH:
            break
        factor, best = echo, rate
    if factor == 1:
        return []
    code = f"for batch in stoker.echo(loader, {factor}): ..."
    if place != "batch":
        code = f".echo({factor})  # before the first random_map"
    return [
        Action(
            f"use every {'batch' if place == 'batch' else 'example'} {factor} times (echoing)",
            code,
            gain(report, Change(echo=factor, echo_at=place)),
            "in steps; a repeat may be worth less than a fresh example, so compare time to target",
        )
    ]
