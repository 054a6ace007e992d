"""Predicts the gain of a change, with an interval."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from stoker.analysis.model.model import NOTHING, Change, Measured, predict
from stoker.analysis.model.report import Rate, Report, to_measured

WORTH = 1.02
"""Actions with a smaller gain are not listed: predictions are wrong by about as much
(bench/analyze_accuracy.py)."""


def predict_gain(
    report: Report,
    after: Change = NOTHING,
    before: Change = NOTHING,
    job: Callable[[Measured], Measured] = lambda case: case,
) -> Rate:
    """Return the predicted speed after a change, or of another job, divided by the speed before.

    The interval spans the corners of the intervals of G, P, S and C.
    """
    cases = [to_measured(report), *_list_corners(report)]
    value, *others = (predict(job(case), after).rate / predict(case, before).rate for case in cases)
    return Rate(value, min(value, *others), max(value, *others))


def _list_corners(report: Report) -> list[Measured]:
    """Return the job with each of its rates at either end of its interval."""
    rates, middle = report.rates, to_measured(report)
    own = next((p.rate for p in report.prep if p.workers == middle.workers), None)
    ends = [find_ends(rate) for rate in (rates.G, rates.P or own, rates.S, rates.C)]
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
