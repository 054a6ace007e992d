"""Makes the pools of a run: their sizes, and the policies of adaptive ones."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree, resources
from stoker.basics.warn import warn
from stoker.engine.echo.adaptive_inputs import AdaptiveInputs, OnDemandPolicy, Policy, Replay
from stoker.engine.echo.pool_inputs import EchoInputs, PooledInputs
from stoker.engine.echo.rank_sync import UNIT, AgreedPolicy, Ranks
from stoker.engine.echo.row_inputs import RowInputs
from stoker.engine.items import EpochCounters, Planning, Stream
from stoker.engine.plan.plan import Plan
from stoker.engine.plan.points import EchoPoint
from stoker.engine.survivors import SkipLog
from stoker.engine.work.failure import Failure
from stoker.engine.workers.threads import WorkerPool
from stoker.engine.workers.tuning import Autotuner
from stoker.schedule import rng
from stoker.schedule.dealing import RankOrder
from stoker.schedule.echo_record import RunRecord
from stoker.schedule.leg import Leg
from stoker.schedule.pools.adaptive import AdaptivePool
from stoker.schedule.pools.fixed import Pool
from stoker.sources.origin import IndexedSource
from stoker.stages.echo import DEFAULT_POOL_BATCHES, DEFAULT_POOL_MEMORY_FRACTION, Echo
from stoker.stages.stage import PoolSize
from stoker.stages.to import usable_bytes

# The share of memory that stays free, however large a pool the user asks for. Chosen, not measured.
_KEPT_FREE_FRACTION = 0.05
_log = logging.getLogger("stoker")


@dataclass(eq=False)
class Pools:
    """Makes the inputs behind an epoch's echoes, and their pools at the first use.

    Attributes:
        plan: the plan.
        seed, epoch: they key the draws.
        sizes: the known sizes, by the echo's position; filled in here.
        autotuner: keeps the factor that ranks agreed on last.
        ranks: the ranks that agree on a factor, or None.
        skip_log: has the number of examples in the epoch.
        steps: the most outputs, or None.
        record: the decisions of an earlier run that are repeated, or None.
        feeds: the inputs made so far; ``following``: the adaptive ones among them.
        planned: the policy that ranks agree on, or None.
    """

    plan: Plan
    seed: int
    epoch: int
    sizes: dict[int, PoolSize]
    autotuner: Autotuner
    ranks: Ranks | None
    skip_log: SkipLog
    steps: int | None
    record: RunRecord | None
    planned: AgreedPolicy | None = None
    following: list[AdaptiveInputs] = field(default_factory=list)
    feeds: list[EchoInputs[Any]] = field(default_factory=list)

    def feed(
        self,
        point: EchoPoint,
        stream: Stream,
        tally: EpochCounters,
        worker_pool: WorkerPool,
        planning: Planning,
    ) -> EchoInputs[Any]:
        """Return the inputs of the segment behind an echo of ``stream``."""

        def make(feed: EchoInputs[Any]) -> Any:
            return self._make(feed, worker_pool)

        feed: EchoInputs[Any]
        if point.echo.is_adaptive:
            policy = self._policy(point, stream, planning)
            carries = self.plan.carries_pool and self.ranks is None
            steps = self.steps if carries else None
            feed = AdaptiveInputs(point, make, stream, tally, worker_pool, policy, steps)
            self.following.append(feed)
        else:
            feed = PooledInputs(point, make, stream, tally)
        self.feeds.append(feed)
        return feed

    def feed_of_rows(
        self,
        point: EchoPoint,
        source: IndexedSource,
        order: RankOrder,
        tally: EpochCounters,
        worker_pool: WorkerPool,
    ) -> RowInputs:
        """Return the inputs of the segment behind an echo of rows in memory."""
        feed = RowInputs(point, lambda feed: self._make(feed, worker_pool), source, order, tally)
        self.feeds.append(feed)
        return feed

    def _policy(self, point: EchoPoint, stream: Stream, planning: Planning) -> Policy:
        if self.record is not None:
            return Replay(self.record.of(point.echo.position, self.epoch), planning)
        if self.ranks is None:
            return OnDemandPolicy()
        self.planned = self._agree_policy(point, stream, self.ranks, planning)
        return self.planned

    def _agree_policy(
        self, point: EchoPoint, stream: Stream, ranks: Ranks, planning: Planning
    ) -> AgreedPolicy:
        """Return the policy that ranks agree on. Raises ValueError if they cannot agree."""
        plan, echo = self.plan, point.echo
        if self.planned is not None:
            raise ValueError(f"{echo.name} across ranks: no second echo may follow the stall")
        total = stream.total
        if stream.leaves_out:
            total = self.skip_log.examples
        if plan.loader is not None and hasattr(plan.loader.loader, "__len__"):
            total = plan.loader.count()
        if (total is None or plan.has_filter) and self.steps is None:
            raise ValueError(
                f"{echo.name} across ranks: how many steps an epoch has cannot be known before "
                "its end here; .steps(n) says how many all ranks take"
            )
        share = plan.selection.share
        uneven = plan.loader is not None or (share is not None and share.uneven)
        if plan.has_filter or (uneven and self.steps is not None):  # .steps() ends epochs
            total = None
        return AgreedPolicy(
            ranks,
            echo.max_factor,
            point.group,
            total,
            self.autotuner.factor or UNIT,
            planning,
            leaky=point.leaks,
        )

    def _make(self, feed: EchoInputs[Any], worker_pool: WorkerPool) -> Any:
        echo = feed.echo
        group = feed.point.group
        known = self.sizes.get(echo.position)
        if self.record is not None and echo.is_adaptive:
            size = self.record.echoes[echo.position].size
            known = self.sizes[echo.position] = PoolSize(size)
        if known is None:
            known = self.sizes[echo.position] = self._choose_size(feed, group, worker_pool)
        if known.size < echo.smallest_distinct(group):
            what = "repeat a batch at once" if group == 1 else "hold an example twice"
            what = "find nothing to use again" if echo.is_adaptive else what
            warn(
                f"{echo.name}: with a pool of {known.size} a batch may {what}; "
                f"at least {echo.smallest_distinct(group)} keep uses apart"
            )
        counts = echo.counts
        if counts is None:
            return AdaptivePool(echo.max_factor, echo.min_distance, known.size, group)
        assert isinstance(feed, PooledInputs)
        key = pool_key(self.seed, self.epoch, echo, self.plan.selection.leg)
        # The pool takes a whole epoch of less than two groups at once.
        return Pool(counts, known.size, group, key, feed.count(2 * group if group > 1 else 0))

    def _choose_size(self, feed: EchoInputs[Any], group: int, worker_pool: WorkerPool) -> PoolSize:
        """Return a pool's size; a size in bytes needs its first item."""
        echo = feed.echo
        # Of a loader, and on a device, the first batch is looked at to say what the pool may take.
        looks = self.plan.loader is not None or feed.point.on_device
        if echo.pool is not None and not looks:
            return PoolSize(echo.pool)
        value = feed.first_value(worker_pool)
        if value is None:
            return PoolSize(echo.pool or DEFAULT_POOL_BATCHES * group)
        if type(value) is Failure:
            raise value.error
        each = max(1, pytree.nbytes(value))
        device = next((d for d in map(pytree.device_of, pytree.leaves(value)) if d), None)
        if feed.upstream is None:
            return PoolSize(_size(echo, each, group, resources.usable_memory_bytes))
        usable = functools.partial(usable_bytes, device) if device else feed.upstream.usable_bytes
        known = PoolSize(_size(echo, each, group, usable), each)
        if device:
            _log.warning(
                "%s: the pool may hold %d batches, %s of the memory of %s (pool= sets it)",
                echo.name, known.size, resources.format_bytes(known.size * each), device,
            )  # fmt: skip
        return known


def pool_key(seed: int, epoch: int, echo: Echo, leg: Leg | None) -> NDArray[np.uint64]:
    """Return the key of a pool's draws; each leg of an epoch has another one."""
    steps = 0 if leg is None else leg.before.steps
    return rng.key(seed, epoch, rng.ECHO + echo.position, steps)


def _size(echo: Echo, each: int, group: int, usable: Callable[[], int]) -> int:
    """Return how many items of ``each`` bytes a pool holds.

    If memory is short, fewer than the user's bytes allow, with a warning. Raises ValueError if that
    is less than a batch.
    """
    if echo.pool is not None:
        return echo.pool
    if echo.pool_bytes is None:
        allowed = int(usable() * DEFAULT_POOL_MEMORY_FRACTION)
        return max(group, min(DEFAULT_POOL_BATCHES * group, allowed // each))
    room = int(usable() * (1 - _KEPT_FREE_FRACTION))
    allowed = min(echo.pool_bytes, room)
    size = allowed // each
    if size < group:
        raise ValueError(
            f"{echo.name}: a pool of {resources.format_bytes(allowed)} holds {size} "
            f"items of {resources.format_bytes(each)}, less than a batch of {group}; "
            "give the pool more, or make batches smaller"
        )
    if allowed < echo.pool_bytes:
        warn(
            f"{echo.name}: the pool takes {resources.format_bytes(allowed)} instead of "
            f"{resources.format_bytes(echo.pool_bytes)}: there is no more memory"
        )
    return size
