"""Changes of a measured job beyond those of what-if: its workers, and examples that are kept."""

from __future__ import annotations

from dataclasses import replace

from stoker.analysis.model.formulas import interpolate, prep_rate
from stoker.analysis.model.model import Change, Measured, cache_rate, storage_rate
from stoker.analysis.model.report import Report, to_measured, to_measured_apart

# The fraction of the host's memory for a cache: as with ``limit="auto"`` (cache/location.py).
MEMORY_FRACTION = 0.5
# Copies of an example on its way from a cache into a batch. Each is assumed to cost as much as
# collating.
_COPIES = 2
# What an example in a cache takes beside its arrays: head, names and dtypes.
_KEPT_BYTES = 512
# The rate of a process as a fraction of a thread's: measured 0.77 to 0.96 with small JPEGs.
CROSSING = 0.8
# Finding an example: measured 7 us (bench/dataset.py); more where training uses the processors
# too (bench/public_scripts.py: mnist, mnist_rnn, vae).
_OVERHEAD_S = 1e-5


def plan_keeping(report: Report) -> tuple[int, float] | None:
    """Return the bytes of a cache for prepared examples, and the fraction that it holds.

    None if they are random, or of an unknown number.
    """
    prepared = report.prepared
    if prepared is None or prepared.varies or not report.examples:
        return None
    # 5 % more: only some examples were measured, and others differ.
    whole = report.examples * (1.05 * prepared.example_bytes + _KEPT_BYTES)
    size = int(min(whole, MEMORY_FRACTION * report.memory_bytes))
    return size, size / whole


def find_kept_s(report: Report) -> float:
    """Return worker seconds for an example from a cache, until it is in a batch.

    If the job prepares more slowly than its loader alone, finding takes longer, too. Measured
    behind a step, which leaves the processor's caches cold: 8 to 64 pictures take 110 to 330 us
    more, and as many from a cache 60 to 230 us.
    """
    apart, job = to_measured_apart(report), to_measured(report)
    slower = prep_rate(apart.prep, apart.workers) / prep_rate(job.prep, job.workers)
    alone_s = _COPIES * report.after_s.get("after-augmentation", 0.0) + _OVERHEAD_S
    return max(1.0, slower) * alone_s


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


def with_efficiency(case: Measured, faster: float) -> Measured:
    """Return the job with training on data in memory by so much nearer to its limits."""
    return replace(
        case, efficiency=tuple((count, min(1.0, faster * one)) for count, one in case.efficiency)
    )


def without_workers(case: Measured) -> Measured:
    """Return the job with its examples prepared by the training process."""
    return replace(case, workers=0, efficiency=((0, 1.0),))


def with_kept(case: Measured, held: float, kept_s: float) -> Measured:
    """Return the job with a fraction of its examples decoded in memory.

    What workers that decode take from training, beyond processor time, shrinks with their time:
    memory bandwidth, shared cores, late batches.

    Args:
        case: the job.
        held: the fraction that is in memory, from 0 to 1.
        kept_s: worker seconds for each example from memory.
    """

    def mixed(takes_s: float) -> float:
        return (1.0 - held) * takes_s + held * min(takes_s, kept_s)

    # Not 0 if everything is kept: it is a divisor below.
    left = max(1.0 - held, 1e-9)
    many = [(max(1, count), count, rate) for count, rate in case.prep]
    return replace(
        case,
        prep=tuple((count, width / mixed(width / rate)) for width, count, rate in many),
        prep_cpu=tuple((count, mixed(cpu_s)) for count, cpu_s in case.prep_cpu),
        efficiency=tuple(
            (count, 1.0 - (1.0 - one) * mixed(takes_s) / takes_s)
            for count, one in case.efficiency
            for takes_s in [max(1, count) / prep_rate(case.prep, count)]
        ),
        storage=case.storage / left if case.storage else None,
        cache=case.cache / left if case.cache else None,
        miss_s=case.miss_s * (1.0 - held),
    )
