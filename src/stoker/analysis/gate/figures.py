"""The figures of one run of a script, from the rows of the probe."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from stoker.analysis.model import rates
from stoker.analysis.model.trace import RankTrace
from stoker.analysis.probe import records

# Fewer say nothing about a share of time. Chosen, not measured.
FEWEST_BATCHES = 10
"""Batches in steady state that a run must have."""


class RunFigures(msgspec.Struct, frozen=True):
    """One run. Of several ranks, the one that is worst by each figure."""

    stall: float
    """Share of the steady state spent inside ``next()``: prep and fetch stall together, as an upper
    bound where the accelerator works on meanwhile."""
    rate: float
    """Examples/s in steady state; batches/s where neither the loader nor its batch sampler has a
    batch size."""
    wait_p50: float
    """Percentiles of the waits for a batch, in seconds, the first of each epoch left out."""
    wait_p95: float
    wait_p99: float
    startup: float
    """Seconds from ``iter()`` to the first batch; of several epochs, the median from the second
    on."""
    batches: int
    """Batches of a rank; the fewest."""


def measure_run(ranks: Sequence[RankTrace]) -> RunFigures:
    """Return the figures of the ranks of a job. Raises ValueError if they have too few batches."""
    each = [_measure_rank(rank) for rank in ranks]
    return RunFigures(
        stall=max(one.stall for one in each),
        rate=min(one.rate for one in each),
        wait_p50=max(one.wait_p50 for one in each),
        wait_p95=max(one.wait_p95 for one in each),
        wait_p99=max(one.wait_p99 for one in each),
        startup=max(one.startup for one in each),
        batches=min(one.batches for one in each),
    )


def _measure_rank(rank: RankTrace) -> RunFigures:
    seen, _ = rates.estimate_steady(rank, rates.estimate_batch_size(rank))
    waits_s = list_waits_s(rank)
    if seen is None or len(waits_s) < FEWEST_BATCHES:
        raise ValueError(
            f"only {len(waits_s)} batches came after the first ones of each epoch: at least "
            f"{FEWEST_BATCHES} are needed; let the script train longer, or give a larger --seconds"
        )
    cuts = statistics.quantiles(waits_s, n=100, method="inclusive")
    return RunFigures(
        stall=seen.wait_fraction,
        rate=seen.rate.value,
        wait_p50=cuts[49],
        wait_p95=cuts[94],
        wait_p99=cuts[98],
        startup=rates.estimate_startup_s(rank),
        batches=len(waits_s),
    )


def list_waits_s(rank: RankTrace) -> list[float]:
    """Return the waits for batches of the training loader, the first of each epoch left out."""
    waits, started = [], set()
    for row in rank.rows:
        if row.slot != rank.slot or row.event != records.BATCH:
            continue
        if row.epoch in started:
            waits.append((row.left_ns - row.entered_ns) / 1e9)
        started.add(row.epoch)
    return waits
