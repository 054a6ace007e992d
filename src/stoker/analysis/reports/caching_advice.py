"""Advice about caches: of prepared examples, or of files."""

from __future__ import annotations

import math
from collections.abc import Iterator

from stoker.analysis.model.changes import (
    MEMORY_FRACTION,
    WORTH,
    find_kept,
    plan_keeping,
    predict_gain,
    with_kept,
    with_less_work,
)
from stoker.analysis.model.formulas import smallest_cache
from stoker.analysis.model.model import Change, predict
from stoker.analysis.model.report import Action, Report, to_measured
from stoker.basics.resources import format_bytes


def advise_caches(report: Report) -> Iterator[Action]:
    """Advise caches of prepared examples and of files; in a pipeline, the best place too."""
    yield from _advise_keeping(report)
    files = [*_advise_files(report)]
    yield from files
    best = max((action.gain.value for action in files), default=1.0)
    yield from (each for each in _advise_place(report) if each.gain.value >= WORTH * best)


def _advise_keeping(report: Report) -> Iterator[Action]:
    """Advise a cache around the dataset, if its examples are the same in each epoch."""
    kept = plan_keeping(report)
    if kept is None:
        return
    size, held = kept
    whole = find_kept(report)
    yield Action(
        f"keep prepared examples ({held:.0%} of the dataset) in a cache that never evicts",
        f'DataLoader(stoker.cached(dataset, "{round_up_to_mib(size)}"), ...)',
        predict_gain(report, job=lambda case: with_kept(case, held, whole)),
        "from the second epoch on. An example was the same in each reading, so nothing is random"
        + warn_of_changes(report),
    )


def _advise_files(report: Report) -> Iterator[Action]:
    """Advise a cache of files that never evicts, as large as needed or as memory allows.

    Only where prepared examples cannot be kept, or not all of them.
    """
    if report.rates.S is None or not report.example_bytes or not report.examples:
        return
    kept = plan_keeping(report)
    if kept is not None and kept[1] >= 1.0:
        return
    job = to_measured(report)
    whole = report.examples * report.example_bytes
    assert job.storage is not None
    assert job.cache is not None
    miss_s = job.miss_s / max(1, job.workers)
    enough = smallest_cache(job.storage, job.cache, predict(job).prep, job.ingestion, miss_s)
    # 2 % more than is predicted to be enough. Chosen, not measured.
    wanted = min(1.0, enough * 1.02) * whole
    room = MEMORY_FRACTION * report.memory_bytes
    size = int(min(wanted, room))
    what = "the files"
    code = "stoker.from_files(...).cache(...)  # in front of .random_map(...)"
    otherwise = "may be random"
    if kept is not None:
        otherwise = f"would take {format_bytes(kept[0] / kept[1])}"
    why = f": the files' contents, not the prepared examples, which {otherwise}"
    if report.stages:
        what, code, why = format_bytes(size), f'.cache("{round_up_to_mib(size)}")', ""
    if size / whole <= (report.cached_fraction or 0.0):
        return
    fits = "; the page cache would hold it too, from the second epoch on" if whole < room else ""
    yield Action(
        f"keep {what} ({size / whole:.0%} of the dataset) in a cache that never evicts",
        code,
        predict_gain(report, Change(cache_bytes=size)),
        f"from the second epoch on{why}, against the {report.cached_fraction or 0.0:.0%} that "
        f"were in the page cache{fits}",
    )


def _advise_place(report: Report) -> Iterator[Action]:
    """Advise the place that ``.cache("auto")`` chooses for a pipeline."""
    keeping = report.keeping
    if keeping is None:
        return
    # What is random, and behind the cache, is made anew for each use.
    later_s = report.after_s.get("before-augmentation", 0.0)
    yield Action(
        f"keep {keeping.kept_fraction:.0%} of the examples as {keeping.name} makes them",
        f"{keeping.name}.cache()",
        predict_gain(
            report, job=lambda case: with_less_work(case, 1 - keeping.left_fraction, later_s)
        ),
        f"from the second epoch on: {keeping.left_fraction:.0%} of the work up to there is left, "
        'less than with a cache at any other place (.cache("auto") chooses it)',
        "these examples are the same in every epoch; a cache refuses others",
    )


def warn_of_changes(report: Report) -> str:
    """Return what advice assumes that keeps something from epoch to epoch."""
    if report.loader.changes is not None:
        return ""
    return ". Not where the script changes its dataset between epochs: no two of them were seen"


def round_up_to_mib(size: int) -> str:
    return format_bytes(math.ceil(size / 2**20) * 2**20)
