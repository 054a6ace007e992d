"""Statistics of an epoch: counts, times and memory; ``print`` shows them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.resources import format_bytes
from stoker.errors import Skip

# Below this fraction of ideal scaling, threads wait for each other: two threads then gain less than
# a fifth. Chosen, not measured.
_SCALING_FRACTION = 0.6
# Of the time: if all threads together hold the GIL less, they hardly wait for it. Chosen, not
# measured.
_GIL_FRACTION = 0.7
# As a multiple of the speed of processes: less is not clearly faster. Chosen, not measured.
_CLEARLY = 1.1
# If the consumer waits for a smaller fraction of the time, it is the bottleneck. The same value as
# in the analyzer (analysis/model/model.py).
_FED_FRACTION = 0.05
# Fractions of less sampled time are noise: 0.5 s are 30 samples of work of 16 ms.
_MIN_SAMPLED_S = 0.5
# The longest bar: with its name and percentage, a line fits into 80 columns.
_BAR_CHARACTERS = 24
_MARK = "  <- bottleneck"


@dataclass(frozen=True)
class StageStats:
    """One stage's share of the work."""

    name: str
    """The stage as ``print(pipeline)`` names it."""
    seconds: float
    """Time spent in the stage, summed over all workers, in seconds."""
    examples: int
    """Examples that went through the stage: uses behind an echo, full sequences behind ``.pack()``,
    the examples of the batches if it works on batches. Examples that a filter left out, or that
    came from a cache, do not count."""

    @property
    def rate(self) -> float:
        """Examples per second of one worker's work in this stage. It never counts batches."""
        return self.examples / self.seconds if self.seconds > 0 else float("inf")


@dataclass(frozen=True)
class ThreadTrial:
    """How much faster all threads are than one, by the last trial of both.

    The engine makes such trials while threads compute.
    """

    threads: int
    """The number of threads tried."""
    cores: int
    """The number of cores that they may use."""
    speedup: float
    """Their speed as a multiple of one thread's speed."""

    @property
    def processes(self) -> int:
        """How many processes could work at the same time."""
        return min(self.threads, self.cores)

    @property
    def wait_for_each_other(self) -> bool:
        """Whether threads lose much of their speed by waiting for the GIL or another lock."""
        return self.processes > 1 and self.speedup < _SCALING_FRACTION * self.processes


@dataclass(frozen=True)
class ProcessTrial:
    """How the user's Python code ran in the first worker process, and whether threads would do."""

    processes: int
    """The number of processes that take part."""
    threads: int
    """The number of threads that would: more than processes where the code mostly waits."""
    cores: int
    """The number of cores that they may use."""
    gil_free_fraction: float
    """The share of the code's time in which other threads of its process could run Python code:
    near 1 for code that waits, high for NumPy and Pillow on large arrays, 0 for pure Python."""
    handing_fraction: float
    """The time that the loop's thread took to hand rows over, as a fraction of the work for them.
    Threads would spare it."""

    @property
    def speedup(self) -> float:
        """The speed of threads as a multiple of that of the processes, where no GIL holds them."""
        return self.threads / self.processes * (1.0 + self.handing_fraction)

    @property
    def threads_are_faster(self) -> bool:
        """Whether as many threads would clearly be faster: no GIL holds them up."""
        held = (1.0 - self.gil_free_fraction) * min(self.processes, self.cores)
        return held < _GIL_FRACTION and self.speedup > _CLEARLY


@dataclass(frozen=True)
class WorkerTime:
    """How workers spent their time at work, from samples of about 6 % of it or more.

    The fractions add up to 1. They cover threads and processes, but not Ray actors, and not the
    work of the consumer itself.
    """

    sampled_s: float
    """Sampled seconds, over all workers. With n samples, a fraction is off by about 1 / sqrt(n)."""
    computing_fraction: float
    """Workers had a processor."""
    queued_fraction: float
    """Workers were ready, but no processor was free. Where the kernel does not tell, it is 0,
    and part of ``blocked_fraction``."""
    blocked_fraction: float
    """Workers slept, or waited for the GIL or another lock: the rest."""
    asleep_fraction: float | None
    """The part of ``blocked_fraction`` that a single thread has, too: reads, latency, ``sleep``.
    It comes from trials of one thread against all (``thread_trial``). A single thread's wait for
    the consumer counts as sleep, and examples of very different cost make it less exact. For
    processes, and if half a processor is enough, it is all of the blocked time. None if it is
    unknown."""

    @property
    def contended_fraction(self) -> float | None:
        """The rest of the blocked time: threads waited for each other, usually for the GIL."""
        asleep = self.asleep_fraction
        return None if asleep is None else max(0.0, self.blocked_fraction - asleep)

    @property
    def is_enough(self) -> bool:
        """Whether there are enough samples to print the fractions."""
        return self.sampled_s >= _MIN_SAMPLED_S

    def __str__(self) -> str:
        busy, queued = f"{self.computing_fraction:.0%}", f"{self.queued_fraction:.0%}"
        shares = f"{busy} computing, {queued} waiting for a processor"
        if self.asleep_fraction is None:
            return f"{shares}, {self.blocked_fraction:.0%} asleep or waiting for the GIL"
        return (
            f"{shares}, {self.asleep_fraction:.0%} asleep, "
            f"{self.contended_fraction:.0%} waiting for the GIL or another lock"
        )


@dataclass(frozen=True)
class PoolStats:
    """The pool of an echo."""

    name: str
    """The echo as ``print(pipeline)`` names it."""
    held: int
    """Items in the pool now: examples or batches."""
    size: int
    """Items in the pool when it is full; 0 while that is unknown."""
    bytes: int
    """Bytes of a full pool, estimated from its first item; 0 while that is unknown."""


@dataclass(frozen=True)
class PartStats:
    """One source of a mixture."""

    name: str
    """The source, as ``print(pipeline)`` names it."""
    weight: float
    """Its share of the examples, from 0 to 1."""
    fresh_examples: int
    """The epoch's fresh examples that come from this source."""
    epochs: float
    """How many times the source was read so far, over all epochs of the mixture."""


@dataclass(frozen=True)
class Counts:
    """The counts of a pipeline since it was made, over all epochs: for schedules.

    Of several ranks, examples and uses are those of all, as many on each as on this one.
    """

    fresh_examples: int = 0
    """Examples that were yielded at least once, or left out on the way (over a loader: rows).
    Examples that wait in a pool do not count."""
    uses: int = 0
    """Yielded examples, echoed ones included."""
    steps: int = 0
    """Yielded batches (or examples, in a pipeline without batches)."""

    def __add__(self, second: Counts) -> Counts:
        return Counts(*map(operator.add, vars(self).values(), vars(second).values()))


@dataclass(frozen=True)
class Totals:
    """A pipeline's totals in this process, over all epochs: counters that never fall."""

    elapsed_s: float = 0.0
    """Seconds in which an epoch was iterated."""
    consumer_wait_s: float = 0.0
    """Seconds of these that the consumer spent inside ``next()``."""
    read_bytes: int = 0
    """Bytes read from the source."""
    cache_hits: int = 0
    """Examples found in a cache."""
    cache_misses: int = 0
    """Examples that a cache did not have, and that came from the source."""

    def __add__(self, second: Totals) -> Totals:
        return Totals(*map(operator.add, vars(self).values(), vars(second).values()))


@dataclass(frozen=True, eq=False)
class Uses:
    """Which use of its item each example of a batch is. The caller owns the arrays."""

    number: NDArray[np.int64]
    """The number of the use, ``[n]``: 1 is a fresh example."""
    age_steps: NDArray[np.int64]
    """Steps since the previous use, ``[n]``: 0 for a fresh example, -1 if a resume lost it."""
    valid: NDArray[np.bool_]
    """True for an example, False for padding (``.shard(remainder="pad")``), ``[n]``."""


@dataclass(frozen=True)
class CacheCounts:
    """The counts of a cache, over all processes that use it."""

    hits: int = 0
    """Examples found in this host's store, or in another node's."""
    misses: int = 0
    """Examples that were not found, and came from the source."""
    admitted: int = 0
    """Misses that then entered the store."""
    admitted_bytes: int = 0
    """The bytes of ``admitted``."""
    refused: int = 0
    """Misses that did not enter: no room, not worth their bytes, or the writer was too slow."""
    refused_bytes: int = 0
    """The bytes of ``refused``; not measured once the store is full."""
    saved_bytes: int = 0
    """Bytes not read from storage: the sizes of the hits' files, or of their values."""
    damaged: int = 0
    """Examples in the store that had changed since they were written."""
    peer_hits: int = 0
    """Hits that came from another node's store."""
    peer_bytes: int = 0
    """The bytes of ``peer_hits``."""
    peer_timeouts: int = 0
    """Misses for which another node did not answer within 5 s."""

    def __add__(self, second: CacheCounts) -> CacheCounts:
        return CacheCounts(*map(operator.add, self.all(), second.all()))

    def __sub__(self, second: CacheCounts) -> CacheCounts:
        return CacheCounts(*map(operator.sub, self.all(), second.all()))

    def all(self) -> list[int]:
        """Return the counts, in the order of the fields."""
        return [getattr(self, each.name) for each in fields(CacheCounts)]

    @property
    def local_hits(self) -> int:
        """Hits that came from this host's store."""
        return self.hits - self.peer_hits

    @property
    def hit_fraction(self) -> float:
        """Hits as a fraction of all lookups, from 0 to 1."""
        requested = self.hits + self.misses
        return self.hits / requested if requested else 0.0


@dataclass(frozen=True, repr=False)
class CacheStats(CacheCounts):
    """A cache's counts (in a pipeline: of this epoch), and the contents of its store."""

    folder: str = ""
    """The store's folder; "" if there is no room for a store."""
    items: int = 0
    """Items in the store, from all its users."""
    payload_bytes: int = 0
    """The bytes of ``items``."""
    used_bytes: int = 0
    """Bytes that the store takes, in whole pages."""
    limit_bytes: int = 0
    """The store's limit in bytes."""
    full: bool = False
    """Whether the store takes no more items."""
    own_items: int = 0
    """Of ``items``, those of this cache's chain; the others are of caches that share the store."""
    own_bytes: int = 0
    """The bytes of ``own_items``."""
    members: int = 0
    """Nodes over which the cache is spread; 0 for a cache of this host alone."""
    members_alive: int = 0
    """The nodes that answer, with this one."""
    map_version: int = 0
    """The version of the map from examples to nodes; it grows whenever the nodes change."""

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        used, limit = format_bytes(self.used_bytes), format_bytes(self.limit_bytes)
        lines = [
            f"{self.hits:,} hits and {self.misses:,} misses ({self.hit_fraction:.0%} hits), "
            f"{format_bytes(self.saved_bytes)} not read from storage",
            f"{self.admitted:,} admitted ({format_bytes(self.admitted_bytes)}), "
            f"{self.refused:,} refused; store: {self.items:,} items, {used} of {limit}"
            f"{', full' if self.full else ''}",
        ]
        if self.own_items < self.items and not self.members:
            lines.append(
                f"of these, {self.own_items:,} ({format_bytes(self.own_bytes)}) are its own"
            )
        if self.members:
            lines.append(
                f"by place: {self.local_hits:,} here, {self.peer_hits:,} from other nodes "
                f"({format_bytes(self.peer_bytes)}), {self.misses:,} from storage; "
                f"{self.members_alive} of {self.members} nodes answer, map {self.map_version}"
            )
        if self.peer_timeouts:
            lines.append(
                f"{self.peer_timeouts:,} timed out after 5 s: the network or the other nodes are "
                "slower than storage"
            )
        if self.damaged:
            lines.append(f"{self.damaged:,} were damaged, and came from the source")
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class Stats:
    """Statistics of the current epoch, or of the last one.

    Under ``.repeat().steps(n)`` an epoch is ``n`` batches. Counts begin with the epoch, or at a
    state that was loaded in its middle.
    """

    epoch: int
    """The epoch, from 0."""
    fresh_examples: int
    """Examples read from the source for the batches yielded so far (over a loader: rows)."""
    uses: int
    """Examples yielded so far, echoed ones included; behind ``.pack()``, full sequences."""
    batches: int
    """Batches (or single examples, in a pipeline without batches) yielded so far."""
    realised_factor: float
    """Uses per fresh example so far: 1 without echoes, 0 before the first batch. Behind a filter,
    ``max_errors=`` or ``.pack()``, uses per item that the pools have taken in."""
    dropped_uses: int
    """Uses that ``drop_last`` leaves out at the end of the epoch; 0 if unknown."""
    repeats_in_batches: int
    """Uses that shared a batch with another use of the same example."""
    copy_distance: float
    """The mean number of steps between two uses of an item; 0 without echoes."""
    elapsed_s: float
    """Seconds since the iteration of this epoch began."""
    consumer_wait_s: float
    """Seconds that the consumer spent inside ``next()``."""
    production_s_per_example: float
    """Workers' seconds per fresh example, over all stages."""
    stages: tuple[StageStats, ...]
    """Each stage's share of the work."""
    workers: int
    """Threads or processes at work; 0 if the consumer does the work itself."""
    window_ready: int
    """Outputs that are ready and wait for the consumer."""
    window_size: int
    """Outputs that may wait for the consumer."""
    window_bytes: int
    """Bytes of a full window and of recycled batch arrays, estimated from the last batch."""
    pool: PoolStats | None
    """The pool of the echo, if there is one."""
    filtered_examples: int = 0
    """Examples that filters and scans have left out so far."""
    skipped_examples: int = 0
    """Examples that were skipped so far because a stage failed on them; all those of a batch whose
    error ``next()`` raised."""
    cache: CacheStats | None = None
    """The cache, if there is one."""
    skips: tuple[Skip, ...] = ()
    """The skipped examples since the epoch began or was resumed (the first thousand)."""
    parts: tuple[PartStats, ...] = ()
    """The sources of a mixture, in order."""
    read_bytes: int = 0
    """Bytes of the arrays, tensors, bytes and texts that the source returned; a cache's hits do not
    count. Over a feed or a loader, the bytes of its outputs."""
    feed_lag_outputs: int | None = None
    """Outputs that a feed had ready beyond this job's last one. 0 means that the job waits for the
    feed; many mean that other jobs wait for this one. None without a feed."""
    thread_trial: ThreadTrial | None = None
    """The trial of threads; None if there was none."""
    process_trial: ProcessTrial | None = None
    """What the first worker process showed of the user's code; None if there was no such trial."""
    worker_time: WorkerTime | None = None
    """How workers spent their time; None without samples. Under ``.repeat()``, of the current pass
    over the data."""
    late_examples: int = 0
    """Examples that have moved on to a later batch so far (``.late().batch(n)``)."""
    stuck_processes: int = 0
    """Worker processes that were ended and replaced in this epoch because they were stuck in an
    example (``.workers(timeout_s=)``)."""
    totals: Totals = Totals()
    """The totals since the pipeline was made, in this process."""

    @property
    def wait_fraction(self) -> float:
        """The fraction of the elapsed time in which the consumer waited."""
        return self.consumer_wait_s / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def fresh_examples_per_s(self) -> float:
        """Fresh examples per second so far in this epoch."""
        return self.fresh_examples / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool when full."""
        return 0 if self.pool is None else self.pool.bytes

    @property
    def bottleneck(self) -> str | None:
        """The stage with most of the work, or ``consumer`` if the consumer hardly waits.

        None while it is unknown: before the first epoch, and before the first measurement.
        """
        if self.batches and self.wait_fraction < _FED_FRACTION:
            return "consumer"
        slowest = self._slowest()
        return None if slowest is None else self.stages[slowest].name

    def _slowest(self) -> int | None:
        """The index of the stage with most of the work; None if nothing was measured."""
        times = [stage.seconds for stage in self.stages]
        return times.index(max(times)) if any(times) else None

    def epoch_totals(self) -> Totals:
        """Return the totals of this epoch alone."""
        cache = self.cache or CacheCounts()
        return Totals(
            self.elapsed_s, self.consumer_wait_s, self.read_bytes, cache.hits, cache.misses
        )

    def __add__(self, later: Stats) -> Stats:
        """Return the statistics of two parts of a pipeline's run together."""
        return _combine(later, self, later, 1)

    def __sub__(self, earlier: Stats) -> Stats:
        """Return the statistics since an earlier moment of the same run."""
        return _combine(self, earlier, self, -1)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        bottleneck = self.bottleneck
        slowest = None if bottleneck == "consumer" else self._slowest()
        waits = bottleneck != "consumer"
        names = [stage.name for stage in self.stages]
        names += [] if self.pool is None else [self.pool.name]
        width = max(map(len, [*names, "consumer"]))
        longest_s = max((stage.seconds for stage in self.stages), default=0.0)
        lines = [
            f"epoch {self.epoch}: {self.batches:,} batches, {self.uses:,} uses of "
            f"{self.fresh_examples:,} fresh examples (factor {self.realised_factor:.2f})"
        ]

        def add(name: str, text: str) -> None:
            lines.append(f"  {name:<{width}}  {text}".rstrip())

        for at, stage in enumerate(self.stages):
            rate = f"{stage.rate:,.0f}/s" if stage.seconds else "-"
            bar = "█" * round(_BAR_CHARACTERS * stage.seconds / longest_s) if longest_s else ""
            mark = _MARK if at == slowest else ""
            add(stage.name, f"{stage.seconds:8.2f} s  {rate:>14}  {bar}{mark}")
        if (pool := self.pool) is not None:
            size = format_bytes(pool.bytes) if pool.bytes else "size not known yet"
            add(pool.name, f"pool {pool.held:,} of {pool.size:,} ({size})")
        for number, part in enumerate(self.parts, 1):
            text = f"{part.fresh_examples:,} fresh examples of {part.name}"
            add(f"part {number}", f"{text}, epoch {part.epochs:.2f} of its own")
        for line in str(self.cache).splitlines() if self.cache is not None else ():
            add("cache", line)
        times = f"{self.consumer_wait_s:.2f} s of {self.elapsed_s:.2f} s"
        add("consumer", f"waited {times} ({self.wait_fraction:.0%}){'' if waits else _MARK}")
        return "\n".join([*lines, *(f"  {note}" for note in self._notes(waits=waits))])

    def _notes(self, *, waits: bool) -> list[str]:
        """Return the lines below the table; those on workers if the consumer waits for them."""
        notes = [
            f"workers taking part: {self.workers}; window {self.window_ready} of "
            f"{self.window_size} ready ({format_bytes(self.window_bytes)})"
        ]
        if waits and self.worker_time is not None and self.worker_time.is_enough:
            notes.append(f"their time: {self.worker_time}")
        trial = self.thread_trial
        if waits and trial is not None and trial.wait_for_each_other:
            notes.append(
                f"threads wait for each other: {trial.threads} are {trial.speedup:.1f} times as "
                "fast as one. If they wait for the GIL, processes are faster: "
                f'.workers({trial.processes}, kind="process")'
            )
        found = self.process_trial
        if waits and found is not None and found.threads_are_faster:
            notes.append(
                f"your Python code leaves the GIL free {found.gil_free_fraction:.0%} of its time: "
                f"threads would be {found.speedup:.1f} times as fast as processes. If several may "
                "call it at once, declare it stoker.thread_safe"
            )
        if self.filtered_examples or self.skipped_examples:
            notes.append(
                f"left out: {self.filtered_examples:,} by filters and scans, "
                f"{self.skipped_examples:,} that failed"
            )
        if self.late_examples:
            share = self.late_examples / max(1, self.fresh_examples)
            notes.append(f"late: {self.late_examples:,} examples ({share:.1%}) moved on")
        if self.stuck_processes:
            notes.append(f"replaced {self.stuck_processes} processes that were stuck in an example")
        if self.copy_distance:
            notes.append(
                f"copies {self.copy_distance:.1f} steps apart, "
                f"{self.repeats_in_batches:,} repeats inside batches"
            )
        return notes


# The names that `metrics` takes over, of statistics and of a cache.
_METRICS = (
    "epoch", "wait_fraction", "fresh_examples_per_s", "realised_factor", "copy_distance",
    "workers", "window_ready", "skipped_examples", "feed_lag_outputs",
)  # fmt: skip
_CACHE_METRICS = "hit_fraction", "used_bytes", "limit_bytes"


def as_metrics(stats: Stats, counts: Counts, prefix: str) -> dict[str, float]:
    """Return the numbers that change as one flat dict; those that do not apply are left out."""
    totals = {**vars(stats.totals), **vars(counts)}
    found = {name: getattr(stats, name) for name in _METRICS}
    found |= {f"{name}_total": count for name, count in totals.items()}
    if stats.cache is not None:
        found |= {f"cache_{name}": getattr(stats.cache, name) for name in _CACHE_METRICS}
    else:
        del found["cache_hits_total"], found["cache_misses_total"]
    return {prefix + name: float(value) for name, value in found.items() if value is not None}


_SUMS = (
    "fresh_examples", "uses", "batches", "dropped_uses", "repeats_in_batches", "elapsed_s",
    "consumer_wait_s", "filtered_examples", "skipped_examples", "read_bytes",
    "stuck_processes", "late_examples",
)  # fmt: skip


def _combine(first: Stats, second: Stats, latest: Stats, sign: int) -> Stats:
    """Return ``first`` plus or minus ``second``; values of a moment are those of ``latest``."""

    def mean(name: str, weight: Callable[[Stats], int]) -> float:
        weights = weight(first), sign * weight(second)
        values = float(getattr(first, name)), float(getattr(second, name))
        whole = sum(weights)
        return sum(map(operator.mul, values, weights)) / whole if whole > 0 else 0.0

    combined: dict[str, Any] = {
        name: getattr(first, name) + sign * getattr(second, name) for name in _SUMS
    }
    combined["stages"] = stages = tuple(
        StageStats(a.name, a.seconds + sign * b.seconds, a.examples + sign * b.examples)
        for a, b in zip(first.stages, second.stages, strict=True)
    )
    combined["parts"] = tuple(
        replace(end, fresh_examples=a.fresh_examples + sign * b.fresh_examples)
        for end, a, b in zip(latest.parts, first.parts, second.parts, strict=True)
    )
    combined["skips"] = second.skips + first.skips if sign > 0 else first.skips[len(second.skips) :]
    if first.cache is not None and second.cache is not None and latest.cache is not None:
        counts = first.cache + second.cache if sign > 0 else first.cache - second.cache
        combined["cache"] = replace(latest.cache, **vars(counts))
    fresh = combined["fresh_examples"]
    worked_s = sum(stage.seconds for stage in stages)
    combined["production_s_per_example"] = worked_s / fresh if fresh else 0.0
    combined["realised_factor"] = mean("realised_factor", lambda stats: stats.fresh_examples)
    copies = lambda stats: max(0, stats.uses - stats.fresh_examples)  # noqa: E731
    combined["copy_distance"] = mean("copy_distance", copies)
    return replace(latest, **combined)
