"""Makes the pool of a run: its size, and the policy of an adaptive one."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree, resources
from stoker.basics.warn import warn
from stoker.engine.echo.adaptive_inputs import AdaptiveInputs, OnDemandPolicy, Policy, Replay
from stoker.engine.echo.pool_inputs import EchoInputs, PooledInputs
from stoker.engine.echo.rank_sync import UNIT, AgreedPolicy, Ranks
from stoker.engine.items import EpochCounters, Planning, Stream
from stoker.engine.plan.plan import Plan
from stoker.engine.plan.points import EchoPoint
from stoker.engine.survivors import SkipLog
from stoker.engine.work.failure import Failure
from stoker.engine.workers.threads import WorkerPool
from stoker.engine.workers.tuning import Autotuner
from stoker.schedule import rng
from stoker.schedule.echo_record import RunRecord
from stoker.schedule.leg import Leg
from stoker.schedule.pools.adaptive import AdaptivePool
from stoker.schedule.pools.fixed import Pool
from stoker.stages.echo import DEFAULT_POOL_BATCHES, DEFAULT_POOL_MEMORY_FRACTION, Echo
from stoker.stages.stage import PoolSize

# The share of memory that stays free, however large a pool the user asks for. Chosen, not measured.
_KEPT_FREE_FRACTION = 0.05
_log = logging.getLogger("stoker")


@dataclass(eq=False)
class PoolMaker:
    """Makes the inputs behind an epoch's echo, and their pool at the first use.

    Attributes:
        plan: the plan.
        seed, epoch: they key the draws.
        pool_size: filled in here, unless it is known.
        autotuner: keeps the factor that ranks agreed on last.
        ranks: the ranks that agree on a factor, or None.
        skip_log: has the number of examples in the epoch.
        steps: the most outputs, or None.
        record: the decisions of an earlier run that are repeated, or None.
        worker_pool: makes the items; ``planning``: the lock of those who plan them.
    """

    plan: Plan
    seed: int
    epoch: int
    pool_size: PoolSize
    autotuner: Autotuner
    ranks: Ranks | None
    skip_log: SkipLog
    steps: int | None
    record: RunRecord | None
    worker_pool: WorkerPool
    planning: Planning

    def inputs(self, point: EchoPoint, stream: Stream, tally: EpochCounters) -> EchoInputs[Any]:
        """Return the inputs of the segment behind an echo of ``stream``."""
        if not point.echo.is_adaptive:
            return PooledInputs(point, self._make, stream, tally)
        policy = self._policy(point, stream)
        carries = self.plan.carries_pool and self.ranks is None
        steps = self.steps if carries else None
        return AdaptiveInputs(point, self._make, stream, tally, self.worker_pool, policy, steps)

    def _policy(self, point: EchoPoint, stream: Stream) -> Policy:
        if self.record is not None:
            return Replay(self.record.of(self.epoch), self.planning)
        if self.ranks is None:
            return OnDemandPolicy()
        return self._agree_policy(point, stream, self.ranks)

    def _agree_policy(self, point: EchoPoint, stream: Stream, ranks: Ranks) -> AgreedPolicy:
        """Return the policy that ranks agree on. Raises ValueError if they cannot agree."""
        plan, echo = self.plan, point.echo
        total = stream.total
        if stream.leaves_out:
            total = self.skip_log.examples
        if plan.source.yields_batches:
            with contextlib.suppress(TypeError):
                total = plan.source.count()
        if (total is None or plan.has_filter) and self.steps is None:
            raise ValueError(
                f"{echo.name} across ranks: how many steps an epoch has cannot be known before "
                "its end here; .steps(n) says how many all ranks take"
            )
        share = plan.selection.share
        uneven = plan.source.yields_batches or (share is not None and share.uneven)
        if plan.has_filter or (uneven and self.steps is not None):  # .steps() ends epochs
            total = None
        return AgreedPolicy(
            ranks,
            echo.max_factor,
            point.group,
            total,
            self.autotuner.factor or UNIT,
            self.planning,
            leaky=point.leaks,
        )

    def _make(self, feed: EchoInputs[Any]) -> Any:
        echo, known, group = feed.echo, self.pool_size, feed.point.group
        if self.record is not None and self.record.echo is not None and echo.is_adaptive:
            known.size = self.record.echo.size
        if not known.size:
            self._choose_size(feed, group)
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
        key = pool_key(self.seed, self.epoch, self.plan.selection.leg)
        # The pool takes a whole epoch of less than two groups at once.
        return Pool(counts, known.size, group, key, feed.count(2 * group if group > 1 else 0))

    def _choose_size(self, feed: EchoInputs[Any], group: int) -> None:
        """Choose the pool's size; a size in bytes needs its first item."""
        echo, known = feed.echo, self.pool_size
        # Of a loader, and on a device, the first batch is looked at to say what the pool may take.
        looks = self.plan.source.yields_batches or feed.point.on_device
        if echo.pool is not None and not looks:
            known.size = echo.pool
            return
        value = feed.first_value(self.worker_pool)
        if value is None:
            known.size = echo.pool or DEFAULT_POOL_BATCHES * group
            return
        if type(value) is Failure:
            raise value.error
        each = max(1, pytree.nbytes(value))
        device = next((d for d in map(pytree.device_of, pytree.leaves(value)) if d), None)
        usable = feed.upstream.usable_bytes
        if device:
            usable = functools.partial(resources.usable_device_bytes, device)
        known.size, known.item_bytes = _size(echo, each, group, usable), each
        if device:
            _log.warning(
                "%s: the pool may hold %d batches, %s of the memory of %s (pool= sets it)",
                echo.name, known.size, resources.format_bytes(known.bytes), device,
            )  # fmt: skip


def pool_key(seed: int, epoch: int, leg: Leg | None) -> NDArray[np.uint64]:
    """Return the key of a pool's draws; each leg of an epoch has another one."""
    steps = 0 if leg is None else leg.before.steps
    return rng.key(seed, epoch, rng.ECHO, steps)


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
