"""How many outputs of a segment are made at once, and how many wait for the consumer.

What outputs cost decides (``workers.cost``). The window holds:

- in general ``max(2 * group, 8 * workers * chunk)`` examples, fewer large ones;
- few batches where they are gathered from arrays or tables (``Rows.together``);
- at least twice as many as a source that reads ahead has requests;
- around an adaptive echo, see ``echoing/adaptive``;
- nothing inline, except the rest of a few outputs that were made at once: small outputs of at most
  0.2 ms together, if there may be workers (otherwise single ones, of at most 1 ms, are made without
  a task); gathered batches of at most 1 ms together;
- nothing after inputs that block in the consumer's thread (a loader, a device).

A use that takes less than a millisecond to copy is copied by the consumer when it asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker.basics import pytree
from stoker.engine.items import Item, Stream
from stoker.engine.segments.runner import SegmentRunner
from stoker.engine.workers.cost import IMAGE_ROW_NS, INLINE_BATCH_NS
from stoker.engine.workers.make import Ahead
from stoker.engine.workers.threads import CHUNK_NS

FOLLOWED_BATCHES = 8
"""Batches in front of a pool whose factor follows the stall. Simulated (R = 0.95, lognormal
times, sigma 1): 8 give a factor of 1.000, 2 give 1.05, for jitter alone."""
# Outputs made at once inline share the engine's own cost for one: some 30 us
# (bench/echo_overhead.py).
_HERE_OUTPUTS = 8
# Examples made at once inline for a filter, a scan or packing, which ask for a few: fetching some
# costs as much as 20 cheap ones. Chosen, not measured.
_HERE_EXAMPLES = 32
# A fifth of `INLINE_BATCH_NS`: as late as the first output may come for the sake of the others.
_HERE_NS = 200_000
# More than two batches ahead only if they take less memory: pages of which new memory is made. With
# eight of 24 MB ahead, epochs of eight took 1.5 times the processor time (bench/cache_hits.py).
# Their size is known from the epoch before: of an epoch's first one it would be known too late.
_AHEAD_BYTES = 32 << 20
# Batches of one task that gathers. Two threads, of the bare gather's rate: 1.84 by four, 1.39 to
# 1.46 by one; inline 10.2 us a small batch, not 15.4.
_GATHERED = 4
# Or as many as take no longer than one chunk: later ones would keep the first waiting.
_GATHERED_NS = 1_000_000


class Granularity:
    """How many outputs of a segment are made at once, and how many wait for the consumer.

    Args:
        runner: does the work, and has its cost.
        upstream: the stream of inputs; None for fresh examples.
        group: the number of examples in a batch.
        read_ahead: the number of examples that a source wants to hear of before they are fetched.
        most_ahead: how far workers may be ahead of the consumer; None for no limit but the window.

    Attributes:
        gathers: whether outputs are batches that are gathered straight from arrays.
        joins: whether outputs are batches that packed sequences are joined to.
        last_ns: the time of the last output that the consumer made itself; 0 if a task made it.
    """

    def __init__(
        self,
        runner: SegmentRunner,
        upstream: Stream | None,
        group: int,
        read_ahead: int,
        most_ahead: Ahead | None,
    ) -> None:
        self._pool, self._cost, self._segment = runner.worker_pool, runner.cost, runner.segment
        self._upstream, self._group = upstream, group
        self._read_ahead, self._most_ahead = read_ahead, most_ahead
        segment, cost, rows = runner.segment, runner.cost, runner.rows
        self._batches = segment.batch is not None or segment.batches_in
        self._gathers_alone = rows is not None and not segment.batch_maps
        self.gathers = self._gathers_alone and not segment.behind.into_pool
        self.joins = segment.joins_batches and not segment.batch_maps
        self._passes = upstream is not None and segment.batches_in and segment.is_plain
        if upstream is not None and segment.is_plain and not segment.batch_maps:
            cost.light = True
        if self._passes or (rows is not None and self._gathers_alone and rows.releases_gil):
            cost.releases_gil = True
        elif segment.releases_gil:
            cost.releases_gil, cost.gil_row_ns = True, IMAGE_ROW_NS
        self._together = 1  # the most batches that are gathered at once
        if rows is not None and self.gathers:
            self._together = rows.together(group)
            cost.chunk_rows = self._together * group
        cost.whole |= rows is not None and not rows.releases_gil
        fetcher = runner.work.fetcher
        is_read_ahead = fetcher.reader is not None or fetcher.lookups is not None
        self._is_read = upstream is None and not is_read_ahead and not segment.behind.into_pool
        self.last_ns = 0

    @property
    def passes_here(self) -> bool:
        """Whether the consumer copies uses itself, because a task would cost more than the copy."""
        is_cheap = self._cost.batch_ns() < INLINE_BATCH_NS
        return self._passes and (is_cheap or self._pool.inline)

    def here(self, at_most: int | None) -> int:
        """Return how many outputs the consumer makes itself, as a task would cost more; or 0."""
        pool, cost = self._pool, self._cost
        if (
            not pool.inline
            or pool.is_trying
            or not (self._gathers_alone or self._is_read or self.joins)
        ):
            return 0
        if at_most is not None and not self._gathers_alone:
            if self._batches or (pool.limit and not 0 < cost.batch_ns() < _HERE_NS):
                return 0
            if not pool.limit or not cost.row_ns:
                return at_most  # single examples
            return max(at_most, min(_HERE_EXAMPLES, int(_HERE_NS / cost.row_ns)))
        each_ns = max(cost.batch_ns(), self.last_ns)
        # A batch made here has all its examples in memory at once: few bytes in so little time.
        inline_ns = _HERE_NS if pool.limit and not self._gathers_alone else INLINE_BATCH_NS
        if not 0 < each_ns < inline_ns and (pool.limit or not self._gathers_alone):
            return 0
        if self.joins:
            assert self._upstream is not None
            is_exact = not pool.limit or self._upstream.is_fed
            return 1 if is_exact else max(1, min(_HERE_OUTPUTS, int(_GATHERED_NS / each_ns)))
        if not self._gathers_alone:
            return max(1, min(_HERE_OUTPUTS if pool.limit else 1, int(_HERE_NS / each_ns)))
        if cost.whole:
            return self._together
        quickly = int(_GATHERED_NS / each_ns) if each_ns else 1
        return max(1, min(self._together, quickly))

    def in_task(self, at_most: int | None) -> int:
        """Return how many outputs the next task makes."""
        if self._batches:
            return 1 if self._pool.inline and not self._cost.whole else self._at_once()
        # Items share tasks, which cost the consumer time, but wait for no more than an eighth of a
        # batch. (At first costs are unknown, and the consumer waits for a whole batch anyway.)
        group, cost = self._group, self._cost
        chunk = cost.chunk(self._pool.target_ns) if cost.row_ns else group
        count = min(max(chunk, group // 8), group)
        if self._segment.behind.is_followed:
            count = max(1, group // 8)
        if not self._segment.behind.in_turn:  # a slow one keeps those in its task
            count = min(group, cost.chunk(CHUNK_NS)) if cost.row_ns else 1
        return count if at_most is None else min(count, at_most)

    def ahead(self, window: Iterable[Item]) -> int:
        """Return how many outputs the window holds besides the requested one."""
        most = self._most_ahead
        if self._cost.output_bytes is None or (most is not None and most.size_bytes):
            for item in tuple(window):
                if item.task.done:
                    self._cost.output_bytes = pytree.data_bytes(item.task.values[item.row])
                    break
        outputs = self._wanted_ahead()
        if most is None or not outputs:
            return outputs
        if most.batches is not None:
            return min(outputs, most.batches * (1 if self._batches else self._group))
        if self._cost.output_bytes is None or most.size_bytes is None:
            return 1  # until the size of outputs is known
        return min(outputs, max(1, most.size_bytes // max(1, self._cost.output_bytes)))

    def _wanted_ahead(self) -> int:
        pool = self._pool
        if pool.inline or (self._upstream is not None and self._upstream.blocking):
            return 0
        if self.gathers:
            return 2 * self._at_once()
        many = 8 * pool.workers * self._cost.chunk(pool.target_ns)
        each = self._cost.output_bytes or 0
        if many * each > _AHEAD_BYTES * (self._group if self._batches else 1):
            many = 8 * pool.workers
        examples = max(2 * self._group, many, self._read_ahead)
        if self._segment.behind.is_followed:  # otherwise jitter alone would cause repeats
            examples = max(FOLLOWED_BATCHES * self._group, examples)
        elif self._upstream is not None and self._upstream.follows:
            # Early decisions see few ready items.
            examples = 2 * self._group
        return -(-examples // self._group) if self._batches else examples

    def _at_once(self) -> int:
        """Return how many batches a task gathers: many if gathering is fast or holds the GIL."""
        if self._cost.whole:
            return self._together
        each_ns = self._cost.batch_ns()
        quickly = int(_GATHERED_NS / each_ns) if each_ns else 0
        return min(self._together, max(quickly, _GATHERED))
