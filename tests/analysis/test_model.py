"""The analyzer's arithmetic: its formulas against the published ones, and what must hold always."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from analysis.reports import COMPUTE, FETCH, PREP, REPORTS, UNKNOWN
from stoker.analysis.model.formulas import (
    fetch_rate,
    loader_rate,
    prep_rate,
    smallest_cache,
)
from stoker.analysis.model.model import (
    MOST_CORES,
    Change,
    Measured,
    find_cores_needed,
    predict,
)
from stoker.analysis.model.report import to_measured

PLAIN = Measured(ingestion=1_000, prep=((1, 1_000.0),), workers=1, cores=1, batch_size=1.0)
rates = st.floats(1, 1e6)
fractions = st.floats(0, 1)
CLOSE = 1e-9


@st.composite
def curves(draw: st.DrawFn, rising: bool = True) -> tuple[tuple[int, float], ...]:
    """Return P by number of workers; more workers may be slower where it need not rise."""
    counts = sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=5)))
    found = draw(st.lists(rates, min_size=len(counts), max_size=len(counts)))
    return tuple(zip(counts, sorted(found) if rising else found, strict=True))


@st.composite
def jobs(draw: st.DrawFn, rising: bool = True) -> Measured:
    """Return what an analysis might find, with memory faster than storage."""
    curve = draw(curves(rising))
    workers = draw(st.sampled_from([0, *(count for count, _ in curve)]))
    if workers == 0:
        curve = ((0, draw(rates)), *curve)
    storage, cache = sorted((draw(rates), draw(rates)))
    known = draw(st.booleans())
    return Measured(
        ingestion=draw(rates),
        prep=curve,
        workers=workers,
        cores=draw(st.integers(1, 64)),
        batch_size=draw(st.floats(1, 1024)),
        storage=storage if known else None,
        cache=cache if known else None,
        storage_most=draw(st.none() | st.floats(storage, 4 * storage)) if known else None,
        miss_s=draw(st.floats(0, 1e-2)),
        efficiency=tuple((count, draw(st.floats(0.5, 1))) for count, _ in curve)
        if draw(st.booleans())
        else (),
        cached_fraction=draw(fractions),
        example_bytes=1e5,
        examples=10_000,
        step_cpu_s=draw(st.floats(0, 1e-2)),
        prep_cpu=tuple((count, draw(st.floats(0, 1e-2))) for count, _ in curve)
        if draw(st.booleans())
        else (),
        trains_on_cpu=draw(st.booleans()),
        echo_after_s=draw(st.floats(0, 2e-2)),
    )


@st.composite
def changes(draw: st.DrawFn, job: Measured) -> Change:
    """Return a change that can be asked of a job."""
    fetching = job.storage is not None
    return Change(
        cores=draw(st.none() | st.integers(1, 128)),
        cache_bytes=draw(st.none() | st.integers(0, 2 * 10**9)) if fetching else None,
        storage_mbps=draw(st.none() | st.floats(1, 1e4)) if fetching else None,
        accelerator=draw(st.floats(0.1, 10)),
        echo=draw(st.floats(1, 8)),
    )


questions = jobs().flatmap(lambda job: st.tuples(st.just(job), changes(job)))


# The formulas


@given(fractions, rates, rates)
def test_fetch_rate_is_the_mean_time_of_hits_and_misses(x: float, S: float, C: float) -> None:
    assert fetch_rate(x, S, C) == pytest.approx(1 / (x / C + (1 - x) / S), rel=CLOSE)
    assert fetch_rate(0.0, S, C) == pytest.approx(S)
    assert fetch_rate(1.0, S, C) == pytest.approx(C)


@given(rates, rates, st.floats(0, 1))
def test_workers_wait_for_their_misses(F: float, P: float, waiting_s: float) -> None:
    assert loader_rate(F, P) == pytest.approx(min(F, P), rel=CLOSE)
    expected = min(F, 1 / (1 / P + waiting_s))
    assert loader_rate(F, P, waiting_s) == pytest.approx(expected, rel=CLOSE)


@given(rates, rates, rates, rates)
def test_the_smallest_cache_is_the_published_one(S: float, C: float, P: float, G: float) -> None:
    assume(C > 1.01 * S)
    m = min(P, G)
    published = (1 / S - 1 / m) / (1 / S - 1 / C)
    expected = min(1.0, max(0.0, published))
    # The speed is reached to one part in 10^9; so many parts of the cache may that be.
    slack = 2e-9 / min(m, C) / (1 / S - 1 / C) + 1e-12
    assert smallest_cache(S, C, P, G) == pytest.approx(expected, abs=slack)


@given(rates, rates, rates, rates, fractions)
def test_the_smallest_cache_is_enough_and_a_smaller_one_is_not(
    S: float, C: float, P: float, G: float, miss_s: float
) -> None:
    assume(C > 1.01 * S)

    def speed(x: float) -> float:
        return min(G, loader_rate(fetch_rate(x, S, C), P, (1 - x) * miss_s))

    x = smallest_cache(S, C, P, G, miss_s)
    assert 0.0 <= x <= 1.0
    assert speed(x) == pytest.approx(speed(1.0), rel=1e-8)
    assert x == 0.0 or speed(x * (1 - 1e-6)) < speed(1.0)


@given(curves(rising=False))
def test_prep_rate_passes_through_what_was_measured(curve: tuple[tuple[int, float], ...]) -> None:
    for workers, rate in curve:
        assert prep_rate(curve, workers) == pytest.approx(rate)
    last, rate = curve[-1]
    assert prep_rate(curve, 3 * last) == pytest.approx(3 * rate)


def test_prep_rate_of_the_training_process() -> None:
    assert prep_rate([(0, 100.0)], 0) == 100.0
    assert prep_rate([(0, 100.0)], 2) == 200.0
    assert prep_rate([(0, 100.0), (2, 150.0)], 1) == 75.0
    assert prep_rate([(2, 150.0)], 0) == 75.0


@given(curves(rising=False), rates)
def test_cores_needed_are_enough_and_the_fewest(
    curve: tuple[tuple[int, float], ...], wanted: float
) -> None:
    last, rate = curve[-1]
    assume(wanted / rate * last < MOST_CORES)
    job = replace(PLAIN, ingestion=wanted, prep=curve)
    needed = find_cores_needed(job, Change(), predict(job))
    assert needed is not None
    assert prep_rate(curve, needed) >= wanted * (1 - 2 * CLOSE)
    assert all(prep_rate(curve, fewer) < wanted for fewer in range(1, needed))


# Predictions


@given(jobs(rising=False))
def test_the_default_change_changes_nothing(job: Measured) -> None:
    found = predict(job)
    assert found == predict(job, Change())
    assert found.rate == found.fresh_rate


@given(questions)
def test_shares_add_up(question: tuple[Measured, Change]) -> None:
    found = predict(*question)
    shares = (found.compute, found.prep_stall, found.fetch_stall)
    assert sum(shares) == pytest.approx(1.0)
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert found.rate == pytest.approx(found.compute * found.ingestion)
    assert found.steps_per_s == pytest.approx(found.rate / question[0].batch_size)


@given(questions)
def test_nothing_runs_faster_than_its_limits(question: tuple[Measured, Change]) -> None:
    job, change = question
    found = predict(job, change)
    limits = (found.fetch, found.prep, found.ingestion, found.processors, found.loader)
    assert found.rate <= min(limits) * (1 + CLOSE)
    overlaps = job.workers or change.cores
    if overlaps and not job.efficiency:
        assert found.rate == pytest.approx(min(limits))


@given(questions, st.floats(1, 4))
def test_more_is_never_slower(question: tuple[Measured, Change], more: float) -> None:
    job, change = question
    slower = predict(job, change).rate * (1 - CLOSE)

    def faster(**values: Any) -> bool:
        return predict(job, replace(change, **values)).rate >= slower

    assert faster(accelerator=change.accelerator * more)
    assert faster(echo=change.echo * more)
    if change.cores and not (job.efficiency or job.prep_cpu):
        assert faster(cores=math.ceil(change.cores * more))
    if change.cache_bytes is not None and not change.storage_mbps:
        assert faster(cache_bytes=math.ceil(change.cache_bytes * more))
    if change.storage_mbps:
        assert faster(storage_mbps=change.storage_mbps * more)


def test_with_more_readers_memory_is_no_slower_than_storage() -> None:
    job = replace(PLAIN, ingestion=1e6, prep=((1, 1e6),), example_bytes=1e5, examples=1_000)
    job = replace(job, storage=1_000.0, cache=4_000.0, storage_most=9_000.0)
    for cores, rates in ((None, (1_000.0, 4_000.0)), (2, (9_000.0, 9_000.0))):
        for cache_bytes, rate in zip((0, 10**8), rates, strict=True):
            found = predict(job, Change(cores=cores, cache_bytes=cache_bytes))
            assert found.rate == pytest.approx(rate)


@given(
    rates, rates, st.floats(1e-6, 1e-2), st.floats(1e-6, 1e-2), st.integers(1, 16), st.floats(1, 9)
)
def test_echoing_is_what_the_design_says(
    G: float, F: float, before_s: float, after_s: float, workers: int, e: float
) -> None:
    prep = ((workers, workers / (before_s + after_s)),)
    job = replace(PLAIN, ingestion=G, prep=prep, workers=workers, cores=workers)
    job = replace(job, storage=F, cache=F, echo_after_s=after_s)
    found = predict(job, Change(echo=e))
    expected = min(G, e * F, workers * e / (before_s + e * after_s))
    assert found.rate == pytest.approx(expected)
    assert found.fresh_rate == pytest.approx(expected / e)


# What limits


def test_reports_are_limited_by_what_they_say() -> None:
    found = {name: predict(to_measured(report)).bound for name, report in REPORTS.items()}
    assert found == {
        "fetch": "fetch",
        "prep": "prep",
        "compute": "compute",
        "alone": "prep",
        "unknown": "prep",
        "archive": "fetch",
        "ranks": "fetch",
        "processors": "processors",
    }


def test_a_few_misses_do_not_make_slow_preparation_a_matter_of_storage() -> None:
    # Workers read, then prepare: each miss adds a tenth to what is far too slow anyway.
    job = replace(PLAIN, prep=((4, 100.0),), workers=4, cores=4)
    job = replace(job, storage=1_000, cache=1e9, miss_s=4e-3)
    found = predict(job)
    assert found.rate == pytest.approx(1 / (1 / 100 + 1 / 1_000))
    assert found.bound == "prep"
    assert found.prep_stall > 9 * found.fetch_stall > 0
    # Where preparation alone would keep up, the misses are what is left to blame.
    assert predict(replace(job, ingestion=98.0)).bound == "fetch"


def test_the_hosts_processors_may_be_the_limit() -> None:
    job = replace(to_measured(COMPUTE), step_cpu_s=0.01, prep_cpu=((8, 0.01),), cores=4)
    assert predict(job).bound == "processors"
    assert predict(job).rate == pytest.approx(200)


# What cannot be asked


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Change(cores=0), "cores=0: at least 1"),
        (Change(cache_bytes=-1), "cache=-1: at least 0"),
        (Change(storage_mbps=0.0), "storage-mbps=0.0: above 0"),
        (Change(storage_mbps=math.nan), "storage-mbps=nan: above 0"),
        (Change(accelerator=-2.0), "accelerator=-2.0: above 0"),
        (Change(accelerator=math.inf), "accelerator=inf: above 0"),
        (Change(echo=0.5), "echo=0.5: at least 1"),
        (Change(echo=math.nan), "echo=nan: at least 1"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(change: Change, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(to_measured(FETCH), change)


@pytest.mark.parametrize("change", [Change(cache_bytes=1), Change(storage_mbps=1.0)])
def test_storage_that_was_not_told_apart_is_not_asked_about(change: Change) -> None:
    with pytest.raises(ValueError, match="the report says why"):
        predict(to_measured(UNKNOWN), change)
    assert predict(to_measured(UNKNOWN)).fetch == math.inf


def test_sizes_that_are_not_known_are_not_asked_about() -> None:
    job = replace(to_measured(PREP), example_bytes=None)
    with pytest.raises(ValueError, match="how many bytes an example takes"):
        predict(job, Change(storage_mbps=100))
    for unsized in (job, replace(to_measured(PREP), examples=None)):
        with pytest.raises(ValueError, match="how many bytes the dataset takes"):
            predict(unsized, Change(cache_bytes=100))
