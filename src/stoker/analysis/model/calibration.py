"""Calibration: adjusts the separately measured rates to the job's measured speed.

The job itself is one more measurement of its limit. So only the limiting rate is scaled, until the
model gives the job's measured speed and its measured fraction of compute. All predictions start
from the calibrated rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from stoker.analysis.model.formulas import interpolate
from stoker.analysis.model.model import Measured, predict

TOLERANCE = 0.1
"""A larger relative error of the prediction makes the report's verdict uncertain.
bench/analyze_accuracy.py: nine of ten predictions are to be nearer than that."""
MOST_ALONE = 0.99
"""The largest fraction of compute without workers: preparing takes some time, of which less than a
hundredth is too short to be measured."""

Scale = Callable[[Measured, float], Measured]


def calibrate(apart: Measured, rate: float, compute: float) -> Measured:
    """Return rates with which the model runs the job as it is at ``rate`` examples/s.

    ``compute`` is the share of the time that the job computed, above 0 and at most 1.

    A rate below the job's speed was measured too low, and is raised to it. If the job is slower
    than all parts, the limiting rate is lowered. If that would be training's, which contradicts
    the measured share of compute, the slowest part of the data path is lowered instead; within
    the tolerance, the overlap of both.
    """
    if apart.workers == 0:
        return _calibrate_alone(apart, rate, compute)
    job = replace(apart, ingestion=rate / compute)
    reached = interpolate(job.efficiency, job.workers, 1.0)
    if reached < compute:
        job, reached = scale_efficiency(job, compute / reached), compute
    now = predict(job)
    prep = predict(scale_fetch(job, math.inf)).loader
    parts: list[tuple[float, Scale]] = [
        (now.fetch, scale_fetch),
        (reached * prep, _scale_prep),
        (reached * now.processors, _scale_processors),
    ]
    short = [(given, scale) for given, scale in parts if given < rate]
    given, scale = min(parts, key=lambda part: part[0])
    training = reached * job.ingestion
    if not short and rate < training:
        if training <= given and training <= (1 + TOLERANCE) * rate:
            return scale_efficiency(job, compute / reached)
        short = [(given, scale)]
    for given, scale in short:
        job = scale(job, rate / given)
    return job


def _calibrate_alone(apart: Measured, rate: float, compute: float) -> Measured:
    """Calibrate a job without workers, where training and preparation do not overlap."""
    overlaps = tuple((count, 1.0 if count == 0 else share) for count, share in apart.efficiency)
    job = replace(apart, efficiency=overlaps)
    compute = min(compute, MOST_ALONE)
    job = replace(job, ingestion=rate / compute)
    faster = rate / (1.0 - compute) / predict(job).loader
    job = _scale_prep(scale_fetch(job, faster), faster)
    return _scale_processors(job, max(1.0, rate / predict(job).processors))


def scale_fetch(job: Measured, faster: float) -> Measured:
    """Return the job with faster storage and page cache, where they are known."""
    if job.storage is None or job.cache is None:
        return job
    most = None if job.storage_most is None else faster * job.storage_most
    storage, cache = faster * job.storage, faster * job.cache
    return replace(job, storage=storage, cache=cache, storage_most=most)


def _scale_prep(job: Measured, faster: float) -> Measured:
    return replace(
        job,
        prep=tuple((count, faster * rate) for count, rate in job.prep),
        miss_s=job.miss_s / faster,
        echo_after_s=job.echo_after_s / faster,
    )


def _scale_processors(job: Measured, faster: float) -> Measured:
    return replace(
        job,
        step_cpu_s=job.step_cpu_s / faster,
        prep_cpu=tuple((count, cpu_s / faster) for count, cpu_s in job.prep_cpu),
    )


def scale_efficiency(job: Measured, share: float) -> Measured:
    """Return the job with training on data in memory by so much nearer to its limits."""
    known = job.efficiency or ((job.workers, 1.0),)
    return replace(job, efficiency=tuple((count, min(1.0, share * one)) for count, one in known))
