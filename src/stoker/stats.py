"""What happened in an epoch: counts, times and memory, and how they are drawn."""

from __future__ import annotations

from dataclasses import dataclass, fields

from stoker.errors import Skip
from stoker.machine import format_bytes

_BAR = 24


@dataclass(frozen=True)
class StageStats:
    """One stage's share of the work."""

    name: str
    """The stage as ``print(pipeline)`` names it."""
    seconds: float
    """Time spent in the stage, summed over all workers, in seconds."""
    examples: int
    """Examples (uses, behind an echo) that went through it; batches where it works on batches."""

    @property
    def rate(self) -> float:
        """Examples per second of work in this stage, on one worker."""
        return self.examples / self.seconds if self.seconds > 0 else float("inf")


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
class Clock:
    """What a pipeline handed out since it was made, over all epochs: clocks for schedules."""

    fresh_examples: int = 0
    """Examples read from the source for what was handed out (loader: rows)."""
    uses: int = 0
    """Examples handed out, echoed ones included."""
    steps: int = 0
    """Batches (or single examples, in a pipeline without batches) handed out."""

    def __add__(self, other: Clock) -> Clock:
        """Return both together."""
        return Clock(
            self.fresh_examples + other.fresh_examples,
            self.uses + other.uses,
            self.steps + other.steps,
        )


@dataclass(frozen=True)
class CacheCounts:
    """What happened between users of a cache and their store, in all of their processes."""

    hits: int = 0
    """Examples that were found in the store."""
    misses: int = 0
    """Examples that were not, and came from the source."""
    admitted: int = 0
    """Of the misses, those that entered the store."""
    admitted_bytes: int = 0
    """Their bytes."""
    refused: int = 0
    """Of the misses, those that did not enter: no room, not worth it, or no time to write them."""
    refused_bytes: int = 0
    """Their bytes, as far as they were measured: once the store is full nobody does."""
    saved_bytes: int = 0
    """Bytes that were not read from storage: the files behind the hits, or else their values."""
    damaged: int = 0
    """Examples that were found in the store, but not as they had been written."""

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
    def hit_fraction(self) -> float:
        """Hits, of all examples that were asked for."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


@dataclass(frozen=True)
class CacheStats(CacheCounts):
    """What a cache did (in a pipeline: in this epoch), and what is in its store."""

    folder: str = ""
    """Where the store is; "" where there is no room for any."""
    items: int = 0
    """Items in the store, whoever put them there."""
    payload_bytes: int = 0
    """Their bytes."""
    used_bytes: int = 0
    """What the store takes, whole pages."""
    limit_bytes: int = 0
    """What it may take."""
    full: bool = False
    """Whether nothing enters any more."""

    def __str__(self) -> str:
        used, limit = format_bytes(self.used_bytes), format_bytes(self.limit_bytes)
        lines = [
            f"{self.hits:,} hits and {self.misses:,} misses ({self.hit_fraction:.0%} hits), "
            f"{format_bytes(self.saved_bytes)} not read from storage",
            f"{self.admitted:,} admitted ({format_bytes(self.admitted_bytes)}), "
            f"{self.refused:,} refused; store: {self.items:,} items, {used} of {limit}"
            f"{', full' if self.full else ''}",
        ]
        if self.damaged:
            lines.append(f"{self.damaged:,} were found damaged, and read from the source")
        return "\n".join(lines)


@dataclass(frozen=True)
class Stats:
    """Statistics of the epoch being run, or of the last one."""

    epoch: int
    """The epoch, from 0."""
    fresh_examples: int
    """Examples read from the source for the batches yielded so far (loader: rows)."""
    uses: int
    """Examples yielded so far, echoed ones included."""
    batches: int
    """Batches (or single examples, in a pipeline without batches) yielded so far."""
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

    @property
    def realised_factor(self) -> float:
        """Uses per fresh example so far."""
        return self.uses / self.fresh_examples if self.fresh_examples else 0.0

    @property
    def wait_fraction(self) -> float:
        """The share of the elapsed time that the consumer waited."""
        return self.consumer_wait_s / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools when full."""
        return sum(pool.bytes for pool in self.pools)

    @property
    def bottleneck(self) -> str:
        """The stage that most work goes into, or ``consumer`` when the consumer hardly waits."""
        if not self.stages or (self.batches and self.wait_fraction < 0.05):
            return "consumer"
        return max(self.stages, key=lambda stage: stage.seconds).name

    def __str__(self) -> str:
        lines = [
            f"epoch {self.epoch}: {self.batches:,} batches, {self.uses:,} uses of "
            f"{self.fresh_examples:,} fresh examples (factor {self.realised_factor:.2f})"
        ]
        most = max((stage.seconds for stage in self.stages), default=0.0)
        width = max((len(stage.name) for stage in self.stages), default=8)
        width = max(width, len("consumer"))
        bottleneck = self.bottleneck
        for stage in self.stages:
            bar = "█" * round(_BAR * stage.seconds / most) if most else ""
            mark = "  <- bottleneck" if stage.name == bottleneck else ""
            rate = f"{stage.rate:,.0f}/s" if stage.seconds else "-"
            lines.append(
                f"  {stage.name:<{width}}  {stage.seconds:8.2f} s  {rate:>14}  {bar}{mark}"
            )
        for pool in self.pools:
            size = format_bytes(pool.bytes) if pool.bytes else "size not known yet"
            lines.append(f"  {pool.name:<{width}}  pool {pool.held:,} of {pool.size:,} ({size})")
        if self.cache is not None:
            lines += [f"  {'cache':<{width}}  {line}" for line in str(self.cache).splitlines()]
        mark = "  <- bottleneck" if bottleneck == "consumer" else ""
        lines.append(
            f"  {'consumer':<{width}}  waited {self.consumer_wait_s:.2f} s of "
            f"{self.elapsed_s:.2f} s ({self.wait_fraction:.0%}){mark}"
        )
        lines.append(
            f"  workers taking part: {self.workers}; window {self.window_ready} of "
            f"{self.window_size} ready ({format_bytes(self.window_bytes)})"
        )
        if self.filtered_examples or self.skipped_examples:
            lines.append(
                f"  left out: {self.filtered_examples:,} by filters, {self.skipped_examples:,} "
                "that failed"
            )
        if self.copy_distance:
            lines.append(
                f"  copies {self.copy_distance:.1f} steps apart, "
                f"{self.repeats_in_batches:,} repeats inside batches"
            )
        return "\n".join(lines)
