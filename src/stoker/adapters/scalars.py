"""``metrics``: statistics as one flat mapping of numbers, for experiment trackers."""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

from stoker.adapters.cached_dataset import CachedDataset
from stoker.adapters.monitored import EpochWait, Monitored
from stoker.pipeline import Pipeline
from stoker.stats import CacheStats, Stats

# Loaders that wrap loaders; a cycle of them ends there. Chosen, not measured.
_DEPTH = 4


@runtime_checkable
class HasMetrics(Protocol):
    """An object with numbers of its own."""

    def metrics(self) -> dict[str, float]:
        """Return them, with units in their names, without a prefix."""


def metrics(source: Any, prefix: str = "stoker/") -> dict[str, float]:
    """Return the statistics of a pipeline or loader as numbers, with units in their names.

    One line for each: ``wandb.log(stoker.metrics(train), step=step)``,
    ``mlflow.log_metrics(stoker.metrics(train), step=step)``; ``docs/tracking.md`` has the others.
    Shares, rates and means are of the epoch so far. Names that end in ``_total`` never fall: they
    count since the pipeline was made (or its state loaded), over all epochs. Metrics of absent
    parts, such as a cache or a feed, are left out. May be called from any thread, while another one
    iterates.

    Args:
        source: a pipeline (also ``stoker.echo(loader)`` or ``stoker.from_feed(name)``), the result
            of ``stoker.monitor`` or ``stoker.watch``, a dataset of ``stoker.cached``, or a loader
            over one.
        prefix: put before each name.

    Raises TypeError for an object without metrics.
    """
    found: dict[str, float] = {}
    cache: CacheStats | None = None
    inside = source
    if isinstance(source, Monitored):
        inside = source.loader
        found = _of_waits(source.passes())
    if isinstance(inside, Pipeline):
        stats = inside.stats()
        clock = inside.clock
        counts = {
            "fresh_examples_total": clock.fresh_examples,
            "uses_total": clock.uses,
            "batches_total": clock.steps,
        }
        found = {**_of_stats(stats), **counts, **found}
        cache = stats.cache
        inside = inside.chain.source
    if cache is None:
        cache = _cache_in(inside)
        if cache is not None:
            found |= {"cache_hits_total": cache.hits, "cache_misses_total": cache.misses}
    if cache is not None:
        found |= _of_cache(cache)
    if not found and isinstance(source, HasMetrics):
        found = source.metrics()
    if not found:
        raise TypeError(
            f"stoker.metrics takes a pipeline, a stoker.monitor or a stoker.cached, not "
            f"{type(source).__name__}: wrap it, stoker.monitor(loader)"
        )
    return {
        f"{prefix}{name}": float(value) for name, value in found.items() if math.isfinite(value)
    }


def _of_stats(stats: Stats) -> dict[str, float]:
    totals = stats.totals
    found: dict[str, float] = {
        "epoch": stats.epoch,
        "stall_fraction": stats.wait_fraction,
        "fresh_examples_per_s": stats.fresh_examples_per_s,
        "uses_per_s": _rate(stats.uses, stats.elapsed_s),
        "factor": stats.realised_factor,
        "read_bytes_per_s": _rate(stats.read_bytes, stats.elapsed_s),
        "workers": stats.workers,
        "window_ready": stats.window_ready,
        "skipped_examples": stats.skipped_examples,
        "elapsed_s_total": totals.elapsed_s,
        "wait_s_total": totals.consumer_wait_s,
        "read_bytes_total": totals.read_bytes,
    }
    if stats.copy_distance:
        found["copy_distance_steps"] = stats.copy_distance
    if stats.cache is not None:
        found |= {"cache_hits_total": totals.cache_hits, "cache_misses_total": totals.cache_misses}
    if stats.feed_lag_outputs is not None:
        found["feed_lag_outputs"] = stats.feed_lag_outputs
    return found


def _of_waits(passes: list[EpochWait]) -> dict[str, float]:
    last = passes[-1] if passes else EpochWait(0, 0.0, 0.0, 0.0)
    return {
        "epoch": max(0, len(passes) - 1),
        "stall_fraction": last.wait_fraction,
        "batches_per_s": _rate(last.batches, last.elapsed_s),
        "batches_total": sum(each.batches for each in passes),
        "elapsed_s_total": sum(each.elapsed_s for each in passes),
        "wait_s_total": sum(each.wait_s for each in passes),
    }


def _of_cache(cache: CacheStats) -> dict[str, float]:
    return {
        "cache_hit_fraction": cache.hit_fraction,
        "cache_used_bytes": cache.used_bytes,
        "cache_limit_bytes": cache.limit_bytes,
    }


def _cache_in(thing: Any) -> CacheStats | None:
    """Return the cache statistics of the dataset behind a loader or a source."""
    for _ in range(_DEPTH):
        if isinstance(thing, CachedDataset):
            return thing.cache_stats()
        inside = getattr(thing, "loader", None)
        thing = inside if inside is not None else getattr(thing, "dataset", None)
    return None


def _rate(count: float, elapsed_s: float) -> float:
    return count / elapsed_s if elapsed_s > 0 else 0.0
