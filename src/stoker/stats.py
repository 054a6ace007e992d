"""Statistics of an epoch: counts, times and memory, and their drawing."""

from __future__ import annotations

import math
import operator
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.resources import format_bytes
from stoker.errors import Skip

# Of each thread's share that all of them have to do: less than a fifth gained by a second thread.
# Chosen, not measured.
_SCALES = 0.6
# A smaller share of waiting time: the consumer limits. As in the analyzer
# (analysis/model/model.py).
_FED = 0.05
# Shares of less are noise: 30 samples of work of 16 ms.
_SAMPLED_S = 0.5
# With name and percentage beside it, a bar fits into 80 columns.
_BAR = 24
# In a narrow terminal: shorter ones could not tell an eighth.
_SHORT_BAR = 8


@dataclass(frozen=True)
class StageStats:
    """One stage's share of the work."""

    name: str
    """The stage as ``print(pipeline)`` names it."""
    seconds: float
    """Time spent in the stage, summed over all workers, in seconds."""
    examples: int
    """Examples that went through it: uses behind an echo, full sequences behind ``.pack()``; where
    it works on batches, those in them. What a filter or a cache kept from it does not count."""

    @property
    def rate(self) -> float:
        """Examples per second of work in this stage, on one worker. Batches are never counted."""
        return self.examples / self.seconds if self.seconds > 0 else float("inf")


@dataclass(frozen=True)
class ThreadTrial:
    """The result of trials of all threads against a single one, for threads that compute.

    The median of up to three last trials.
    """

    threads: int
    """The number of threads tried."""
    cores: int
    """The number of cores for them."""
    speedup: float
    """Their speed, as a multiple of one thread's."""

    @property
    def processes(self) -> int:
        """How many processes could do the work side by side."""
        return min(self.threads, self.cores)

    @property
    def wait_for_each_other(self) -> bool:
        """Whether much of their speed was lost to waiting: for the GIL, or another lock."""
        return self.processes > 1 and self.speedup < _SCALES * self.processes


@dataclass(frozen=True)
class WorkerTime:
    """Workers' time at work, by samples of about 6 % of it or more.

    Shares of that time, from 0 to 1. Threads and processes alike, but not actors of Ray. The
    consumer's own work is not included.
    """

    sampled_s: float
    """Seconds of workers that were sampled. Of n samples a share is off by some 1 / sqrt(n)."""
    computing_fraction: float
    """They had a processor."""
    queued_fraction: float
    """They could have gone on, but no processor was free. 0 where the system does not tell (no
    Linux): that is then in the next one."""
    blocked_fraction: float
    """They slept, or waited for the GIL or another lock: the rest."""
    asleep_fraction: float | None
    """Of the blocked share what a thread alone has, too: reads, latency, ``sleep``. By the trials
    that the engine makes of one thread against all (``thread_trial``); what a thread alone waits
    for the consumer counts as sleep, and where examples differ much, so does the error. All of it,
    in processes and where half a processor would do the work. None where nothing tells."""

    @property
    def contended_fraction(self) -> float | None:
        """The rest of the blocked share: threads waited for each other, for the GIL as a rule."""
        asleep = self.asleep_fraction
        return None if asleep is None else max(0.0, self.blocked_fraction - asleep)

    @property
    def is_enough(self) -> bool:
        """Whether enough was sampled to say it in words."""
        return self.sampled_s >= _SAMPLED_S

    def __str__(self) -> str:
        shares = (
            f"{self.computing_fraction:.0%} computing, {self.queued_fraction:.0%} waiting for a "
        )
        if self.asleep_fraction is None:
            return f"{shares}processor, {self.blocked_fraction:.0%} asleep or waiting for the GIL"
        return (
            f"{shares}processor, {self.asleep_fraction:.0%} asleep, "
            f"{self.contended_fraction:.0%} waiting for the GIL or another lock"
        )


@dataclass(frozen=True)
class PoolStats:
    """One pool of an echo."""

    name: str
    """The echo as ``print(pipeline)`` names it."""
    held: int
    """Items in the pool now: examples or batches."""
    size: int
    """Items the pool holds when full; 0 while that is not known."""
    bytes: int
    """Bytes of a full pool, by its first item; 0 while that is not known."""


@dataclass(frozen=True)
class PartStats:
    """One part of a mixture."""

    name: str
    """The part's source, as ``print(pipeline)`` names it."""
    weight: float
    """Its share of the examples, from 0 to 1."""
    fresh_examples: int
    """Of the epoch's fresh examples those that are of this part."""
    epochs: float
    """How often the part was gone through so far, in all epochs of the mixture."""


@dataclass(frozen=True)
class Clock:
    """A pipeline's outputs since it was made, over all epochs: clocks for schedules."""

    fresh_examples: int = 0
    """Examples that were handed out at least once, or left out on the way (loader: rows); not what
    waits in a pool."""
    uses: int = 0
    """Examples handed out, echoed ones included."""
    steps: int = 0
    """Batches (or single examples, in a pipeline without batches) handed out."""

    def __add__(self, other: Clock) -> Clock:
        """Return both together."""
        return Clock(*map(operator.add, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class Totals:
    """A pipeline's totals in this process, over all epochs: counters that never fall."""

    elapsed_s: float = 0.0
    """Seconds in which an epoch was iterated."""
    consumer_wait_s: float = 0.0
    """Of these, seconds that the consumer spent inside ``next()``."""
    read_bytes: int = 0
    """Bytes read from the source."""
    cache_hits: int = 0
    """Examples that a cache had."""
    cache_misses: int = 0
    """Examples that came from the source, behind a cache."""

    def __add__(self, other: Totals) -> Totals:
        """Return both together."""
        return Totals(*map(operator.add, vars(self).values(), vars(other).values()))


@dataclass(frozen=True, eq=False)
class Uses:
    """For each example of one batch, which use of its item it is. The caller owns the arrays."""

    number: NDArray[np.int64]
    """Which use of its example each is, ``[n]``: 1 is a fresh one. Of the last echo there is."""
    age_steps: NDArray[np.int64]
    """Steps since the use before, ``[n]``: 0 for a fresh one; -1 where a resume forgot it."""
    valid: NDArray[np.bool_]
    """Whether each is an example rather than padding (``.shard(pad=True)``), ``[n]``."""


@dataclass(frozen=True)
class CacheCounts:
    """Counts of a cache's users and their store, over all their processes."""

    hits: int = 0
    """Examples that were found in the store, or in another node's."""
    misses: int = 0
    """Examples that were not, and came from the source."""
    admitted: int = 0
    """Of the misses, those that entered the store."""
    admitted_bytes: int = 0
    """Their bytes."""
    refused: int = 0
    """Of the misses, those that did not enter: no room, not worth it, or no time to write them."""
    refused_bytes: int = 0
    """Their bytes, as far as measured: once the store is full they are not."""
    saved_bytes: int = 0
    """Bytes that were not read from storage: the files behind the hits, or else their values."""
    damaged: int = 0
    """Examples that were found in the store, but not as they had been written."""
    peer_hits: int = 0
    """Of the hits, those that were found in another node's store."""
    peer_bytes: int = 0
    """Their bytes."""
    peer_timeouts: int = 0
    """Of the misses, those for which other nodes were waited for in vain, for 5 s."""

    def __add__(self, other: CacheCounts) -> CacheCounts:
        """Return both together."""
        return CacheCounts(*(a + b for a, b in zip(self.all(), other.all(), strict=True)))

    def __sub__(self, other: CacheCounts) -> CacheCounts:
        """Return what came after ``other``."""
        return CacheCounts(*(a - b for a, b in zip(self.all(), other.all(), strict=True)))

    def all(self) -> list[int]:
        """Return the counts in order."""
        return [getattr(self, name) for name in (f.name for f in fields(CacheCounts))]

    @property
    def local_hits(self) -> int:
        """Of the hits, those that were found in this host's store."""
        return self.hits - self.peer_hits

    @property
    def hit_fraction(self) -> float:
        """Hits, of all examples that were asked for."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


@dataclass(frozen=True, repr=False)
class CacheStats(CacheCounts):
    """A cache's counts (in a pipeline: of this epoch), and its store's contents."""

    folder: str = ""
    """Where the store is; "" where there is no room for any."""
    items: int = 0
    """Items in the store, of all its users."""
    payload_bytes: int = 0
    """Their bytes."""
    used_bytes: int = 0
    """Bytes that the store takes, in whole pages."""
    limit_bytes: int = 0
    """The store's limit in bytes."""
    full: bool = False
    """Whether the store takes no more items."""
    members: int = 0
    """Nodes that the cache is spread over; 0: it is this host's alone."""
    members_alive: int = 0
    """Of these, those that answer, with this one."""
    map_version: int = 0
    """Of the map of who keeps what: it grows whenever members change."""

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
        if self.members:
            lines.append(
                f"by place: {self.local_hits:,} here, {self.peer_hits:,} from other nodes "
                f"({format_bytes(self.peer_bytes)}), {self.misses:,} from storage; "
                f"{self.members_alive} of {self.members} nodes answer, map {self.map_version}"
            )
        if self.peer_timeouts:
            lines.append(
                f"{self.peer_timeouts:,} were waited for in vain, for 5 s: the network or the "
                "other nodes are slower than storage"
            )
        if self.damaged:
            lines.append(f"{self.damaged:,} were found damaged, and read from the source")
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class Stats:
    """Statistics of the epoch being run, or of the last one.

    Under ``.repeat().steps(n)`` that is one of ``n`` batches, whatever passes it goes over; counts
    begin where it does, or at the state that was loaded in its middle.
    """

    epoch: int
    """The epoch, from 0."""
    fresh_examples: int
    """Examples read from the source for the batches yielded so far (loader: rows)."""
    uses: int
    """Examples yielded so far, echoed ones included; behind ``.pack()``, full sequences."""
    batches: int
    """Batches (or single examples, in a pipeline without batches) yielded so far."""
    realised_factor: float
    """Uses per fresh example so far: 1 without echoing, 0 before anything was yielded. Behind a
    filter, a skip budget or ``.pack()``: uses per item, of what pools have drawn."""
    dropped_uses: int
    """Uses that ``drop_last`` leaves out at the epoch's end; 0 where not known."""
    repeats_in_batches: int
    """Uses that shared a batch with another use of the same example."""
    copy_distance: float
    """Mean steps between two uses of one item; 0 without echoing."""
    elapsed_s: float
    """Seconds since the iteration of this epoch began."""
    consumer_wait_s: float
    """Seconds that the consumer spent inside ``next()``."""
    production_s_per_example: float
    """Worker seconds spent for each fresh example, over all stages."""
    stages: tuple[StageStats, ...]
    """Time in each stage."""
    workers: int
    """Threads or processes that take part; 0: the consumer does the work itself."""
    window_ready: int
    """Outputs that are ready and wait for the consumer."""
    window_size: int
    """Outputs that may wait for the consumer."""
    window_bytes: int
    """Bytes of a full window and of recycled batch arrays, by the last batch."""
    pools: tuple[PoolStats, ...]
    """The pools, in the order that data meets them."""
    filtered_examples: int = 0
    """Examples that filters left out so far, of those that were read."""
    skipped_examples: int = 0
    """Examples that were skipped so far because a stage failed on them."""
    cache: CacheStats | None = None
    """The cache, if there is one."""
    skips: tuple[Skip, ...] = ()
    """Those skipped since the epoch began or was resumed (of very many, the first thousand)."""
    parts: tuple[PartStats, ...] = ()
    """The parts of a mixture, in order."""
    read_bytes: int = 0
    """Bytes of what the source gave: arrays, tensors, bytes and text. A cache's hits do not count;
    of a feed or a loader these are the bytes that it handed out."""
    feed_lag_outputs: int | None = None
    """Outputs that a feed had ready beyond this job's last one: 0 where the job waits for the feed,
    many where others wait for the job. None without a feed."""
    thread_trial: ThreadTrial | None = None
    """The trial of threads; None where no trial was needed."""
    worker_time: WorkerTime | None = None
    """Workers' time; None without samples. Of a pass, under ``.repeat()``."""
    totals: Totals = Totals()
    """The totals since the pipeline was made, in this process."""

    @property
    def wait_fraction(self) -> float:
        """The share of the elapsed time that the consumer waited."""
        return self.consumer_wait_s / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def fresh_examples_per_s(self) -> float:
        """Fresh examples per second of the epoch so far."""
        return self.fresh_examples / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools when full."""
        return sum(pool.bytes for pool in self.pools)

    @property
    def bottleneck(self) -> str | None:
        """The stage that most work goes into, or ``consumer`` when the consumer hardly waits.

        None while that is not known: before a run, and before anything was measured in it.
        """
        if self.batches and self.wait_fraction < _FED:
            return "consumer"
        slowest = self._slowest()
        return None if slowest is None else self.stages[slowest].name

    def _slowest(self) -> int | None:
        """The place among the stages of the one that most work goes into."""
        times = [stage.seconds for stage in self.stages]
        return times.index(max(times)) if any(times) else None

    def as_dict(self) -> dict[str, Any]:
        """Return all of this, ready for JSON: fields and what is derived from them, nested alike.

        A rate that is not known, for nothing was measured, is None.
        """
        found: dict[str, Any] = _plain(self)
        return found

    def spent(self) -> Totals:
        """Return what this epoch alone has spent so far."""
        cache = self.cache or CacheCounts()
        return Totals(
            self.elapsed_s, self.consumer_wait_s, self.read_bytes, cache.hits, cache.misses
        )

    def __add__(self, later: Stats) -> Stats:
        """Return the statistics of two stretches of one pipeline."""
        return _joined(later, self, later, 1)

    def __sub__(self, earlier: Stats) -> Stats:
        """Return the statistics of what came behind an earlier moment of one run."""
        return _joined(self, earlier, self, -1)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return self.drawn()

    def drawn(self, width: int | None = None) -> str:
        """Return the drawing that ``print`` shows, in lines of at most ``width`` (60 or more)."""
        text = (
            f"epoch {self.epoch}: {self.batches:,} batches, {self.uses:,} uses of "
            f"{self.fresh_examples:,} fresh examples (factor {self.realised_factor:.2f})"
        )
        lines = _wrapped(text, width, 4)
        bottleneck = self.bottleneck
        mark = "  <- bottleneck"
        rates = [f"{stage.rate:,.0f}/s" if stage.seconds else "-" for stage in self.stages]
        times = [f"{stage.seconds:8.2f} s" for stage in self.stages]
        rate_width = max([14 if width is None else 8, *map(len, rates)])
        names = [stage.name for stage in self.stages] + [pool.name for pool in self.pools]
        longest = max(map(len, [*names, "consumer"]))
        bar_width = _BAR
        if width is not None:  # names give way, then bars; the mark never does
            left = width - max(map(len, times), default=0) - rate_width - len(mark) - len("  " * 4)
            longest = min(longest, max(len("consumer"), left - _SHORT_BAR))
            bar_width = max(1, min(_BAR, left - longest))
        most = max((stage.seconds for stage in self.stages), default=0.0)

        def begun(name: str) -> str:
            return f"  {_shortened(name, longest):<{longest}}  "

        slowest = None if bottleneck == "consumer" else self._slowest()
        for at, (stage, spent, rate) in enumerate(zip(self.stages, times, rates, strict=True)):
            bar = "█" * round(bar_width * stage.seconds / most) if most else ""
            end = mark if at == slowest else ""
            line = f"{begun(stage.name)}{spent}  {rate:>{rate_width}}  {bar}{end}"
            lines.append(line.rstrip())
        beside = [
            (
                pool.name,
                f"pool {pool.held:,} of {pool.size:,} "
                f"({format_bytes(pool.bytes) if pool.bytes else 'size not known yet'})",
            )
            for pool in self.pools
        ]
        beside += [
            (
                f"part {number}",
                f"{part.fresh_examples:,} fresh examples of {part.name}, epoch {part.epochs:.2f} "
                "of its own",
            )
            for number, part in enumerate(self.parts, 1)
        ]
        if self.cache is not None:
            beside += [("cache", line) for line in str(self.cache).splitlines()]
        waited = (
            f"waited {self.consumer_wait_s:.2f} s of {self.elapsed_s:.2f} s "
            f"({self.wait_fraction:.0%})"
        )
        beside.append(("consumer", waited + (mark if bottleneck == "consumer" else "")))
        for name, text in beside:
            lines += _wrapped(begun(name) + text, width, longest + 4)
        texts = [
            f"workers taking part: {self.workers}; window {self.window_ready} of "
            f"{self.window_size} ready ({format_bytes(self.window_bytes)})"
        ]
        if self.worker_time is not None and self.worker_time.is_enough and bottleneck != "consumer":
            texts.append(f"their time: {self.worker_time}")
        trial = self.thread_trial
        if trial is not None and trial.wait_for_each_other and bottleneck != "consumer":
            texts.append(
                f"threads wait for each other: {trial.threads} are {trial.speedup:.1f} times as "
                "fast as one. Where it is for the GIL, processes are faster: "
                f'.workers({trial.processes}, kind="process")'
            )
        if self.filtered_examples or self.skipped_examples:
            texts.append(
                f"left out: {self.filtered_examples:,} by filters and scans, "
                f"{self.skipped_examples:,} that failed"
            )
        if self.copy_distance:
            texts.append(
                f"copies {self.copy_distance:.1f} steps apart, "
                f"{self.repeats_in_batches:,} repeats inside batches"
            )
        return "\n".join([*lines, *(part for t in texts for part in _wrapped("  " + t, width, 4))])


_SUMS = (
    "fresh_examples", "uses", "batches", "dropped_uses", "repeats_in_batches", "elapsed_s",
    "consumer_wait_s", "filtered_examples", "skipped_examples", "read_bytes",
)  # fmt: skip


def _joined(one: Stats, other: Stats, latest: Stats, sign: int) -> Stats:
    """Return ``one`` with ``other`` added or taken away; what is of a moment is the latest's."""

    def mean(name: str, weight: Callable[[Stats], int]) -> float:
        weights = weight(one), sign * weight(other)
        values = float(getattr(one, name)), float(getattr(other, name))
        whole = sum(weights)
        return sum(map(operator.mul, values, weights)) / whole if whole > 0 else 0.0

    found: dict[str, Any] = {
        name: getattr(one, name) + sign * getattr(other, name) for name in _SUMS
    }
    found["stages"] = stages = tuple(
        StageStats(a.name, a.seconds + sign * b.seconds, a.examples + sign * b.examples)
        for a, b in zip(one.stages, other.stages, strict=True)
    )
    found["parts"] = tuple(
        replace(end, fresh_examples=a.fresh_examples + sign * b.fresh_examples)
        for end, a, b in zip(latest.parts, one.parts, other.parts, strict=True)
    )
    found["skips"] = other.skips + one.skips if sign > 0 else one.skips[len(other.skips) :]
    if one.cache is not None and other.cache is not None and latest.cache is not None:
        counts = one.cache + other.cache if sign > 0 else one.cache - other.cache
        found["cache"] = replace(latest.cache, **vars(counts))
    fresh = found["fresh_examples"]
    worked_s = sum(stage.seconds for stage in stages)
    found["production_s_per_example"] = worked_s / fresh if fresh else 0.0
    found["realised_factor"] = mean("realised_factor", lambda stats: stats.fresh_examples)
    copies = lambda stats: max(0, stats.uses - stats.fresh_examples)  # noqa: E731
    found["copy_distance"] = mean("copy_distance", copies)
    return replace(latest, **found)


def _shortened(name: str, width: int) -> str:
    if len(name) <= width:
        return name
    tail = (width - 1) // 3
    return f"{name[: width - 1 - tail]}…{name[len(name) - tail :]}"


def _wrapped(text: str, width: int | None, indent: int) -> list[str]:
    if width is None or len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, subsequent_indent=" " * indent)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        kind = type(value)
        names = [f.name for f in fields(value)]
        names += [n for n in dir(kind) if isinstance(getattr(kind, n), property)]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
