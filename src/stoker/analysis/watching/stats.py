"""The figures of a watched run so far."""

from __future__ import annotations

import msgspec

from stoker.basics.resources import format_rounded


class WatchStats(msgspec.Struct, frozen=True, kw_only=True):
    """A run so far, as one of its processes sees it.

    The shares are of the time since its first loader was iterated, and add up to 1.
    """

    rank: int
    elapsed_s: float
    batches: int
    compute_fraction: float
    """All but waiting: training, evaluation, checkpoints."""
    stall_fraction: float
    """In ``next()`` of a loader, or in its start."""
    prep_stall_fraction: float | None
    """The part of the stall in which workers computed; None until that is known."""
    fetch_stall_fraction: float | None
    """The part in which they waited too: for storage, or for a network."""
    wait_p50_s: float
    """Percentiles of the waits for a batch, the first of each epoch left out; within 3 %."""
    wait_p95_s: float
    wait_p99_s: float
    warnings: list[str]

    def __str__(self) -> str:
        parts = f"stall {self.stall_fraction:.1%}"
        if self.prep_stall_fraction is not None and self.fetch_stall_fraction is not None:
            parts = (
                f"prep stall {self.prep_stall_fraction:.1%}, "
                f"fetch stall {self.fetch_stall_fraction:.1%}"
            )
        waits = self.wait_p50_s, self.wait_p95_s, self.wait_p99_s
        p50, p95, p99 = (format_rounded(wait_s * 1e3) for wait_s in waits)
        return (
            f"{self.elapsed_s:,.0f} s, {self.batches:,} batches: compute "
            f"{self.compute_fraction:.1%}, {parts}; waits p50 {p50}, p95 {p95}, p99 {p99} ms"
        )
