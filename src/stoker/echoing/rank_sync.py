"""Ranks agree on an echoing factor.

If each rank used whatever items are ready, ranks would take different numbers of steps, and the
next collective operation would hang. So the factor is fixed for a window of steps. It is the
largest ratio of production time to consumption time that any rank has measured. In each step, every
rank waits for the number of fresh items that the factor implies.

The consumer agrees with the other ranks before steps 0, 8, 16, 32 and every 64th, on a gloo group
of their own. The agreed factor holds from four steps later on, so that planning ahead may go on
meanwhile. Consumption is the median time between leaving ``next()`` and entering it again.
Production is the time in which the window had room, for the items that came in that time.

Ranks agree on the ratio, not on the two times: a rank that waits in its step for another rank's
data seems to consume slowly, and any factor would then look right.

A rank takes more than its quota of fresh items if too few items in the pool have rested. The pools
of all ranks then need the same number, because they got the same. With the last fresh item the
epoch ends on all ranks.

Quotas are counted in numbers of the source, so examples that are skipped do not change the number
of steps. Where stages after the pool may skip uses, the pool draws on until the steps are full.

The group belongs to torch and ends with ``destroy_process_group()``. Only weak references to it are
kept.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from stoker.engine.items import Planning, PolledStream, WouldBlock
from stoker.errors import StokerError
from stoker.schedule.pools.adaptive import AdaptivePool

UNIT = 64
"""Factors are whole multiples of 1/64, so that every rank computes the same."""

WINDOW_STEPS = 64
"""Every so many batches ranks agree on the factor of an adaptive echo. Simulated (lognormal
times, sigma 0.5): windows of 64 miss 10 % in at most 7 % of cases, of 20 in up to 26 %."""

# The ends of the first windows: they are short, because the first factor is a guess.
_EARLY = (0, 8, 16, 32)
# Steps from an agreement to its use: as many may be planned ahead meanwhile.
_LEAD = 4


class Ranks:
    """The ranks of torch's process group, on a gloo group of their own.

    Used from the consumer's thread alone, and never on an accelerator's stream. It does not keep
    the group alive: that ends with ``destroy_process_group()``, not as the interpreter does, when
    the group's threads may be in the way.
    """

    def __init__(self, distributed: Any) -> None:
        self._distributed = distributed
        self._group = weakref.ref(_group_of(distributed))

    def largest(self, values: list[int]) -> list[int]:
        """Return the largest of each value among all ranks.

        Raises StokerError when a rank is gone, or does not answer within the group's timeout.
        """
        import torch

        tensor = torch.tensor(values, dtype=torch.int64)
        with self._together() as group:
            maximum = self._distributed.ReduceOp.MAX
            self._distributed.all_reduce(tensor, op=maximum, group=group)
        return [int(value) for value in tensor.tolist()]

    @contextlib.contextmanager
    def _together(self) -> Iterator[Any]:
        group = self._group()
        if group is None:
            raise StokerError(
                "ranks could not agree on an echoing factor: the process group is gone"
            )
        try:
            yield group
        except RuntimeError as error:
            raise StokerError(
                "ranks could not agree on an echoing factor: one of them has ended, or takes no "
                "more batches"
            ) from error


_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The gloo group of each default group, as weak references: torch owns both."""


def _group_of(distributed: Any) -> Any:
    world = distributed.group.WORLD
    group = _groups[world]() if world in _groups else None
    if group is None:
        group = distributed.new_group(backend="gloo", timeout=_timeout(world))
        _groups[world] = weakref.ref(group)
    return group


def _timeout(world: Any) -> Any:
    """Return the timeout of a process group; None if it does not say."""
    import torch

    try:
        return world._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return None


def ranks() -> Ranks:
    """Return the ranks of the initialised process group."""
    return Ranks(sys.modules["torch.distributed"])


class AgreedPolicy:
    """A policy by a factor that all ranks agree on.

    Args:
        ranks: the ranks.
        max_factor: the largest factor.
        group: uses in a step.
        total: fresh items of this rank's epoch; None if only ``.steps()`` ends it.
        factor: the first factor, in units.
        planning: held while plans change.
        leaky: whether uses may be dropped after the pool, so that it draws more often than the
            consumer takes batches.
    """

    def __init__(
        self,
        ranks: Ranks,
        max_factor: int,
        group: int,
        total: int | None,
        factor: int,
        planning: Planning,
        leaky: bool,
    ) -> None:
        self._leaky = leaky
        self.alike = not leaky  # whether all ranks' epochs end at the same step
        self._ranks = ranks
        self._most = max_factor * UNIT
        self._group = group
        self._total = total
        self._planning = planning
        self._legs: list[tuple[int, int, int]] = []  # first step, fresh items by then, factor
        self._until = 0  # the first step without an agreed factor
        self._began = False
        self._consumed: list[int] = []
        self._producing_ns = self._produced = 0
        self._seen: tuple[int, int] | None = None  # when last measured, and the items by then
        self.factor = factor

    def due(self, step: int) -> bool:
        """True if ranks agree before this step."""
        return not self._began or step in _EARLY or step % WINDOW_STEPS == 0

    def note_consumed(self, ns: int) -> None:
        """Record how long the consumer was busy with a step, in nanoseconds."""
        self._consumed.append(ns)

    def agree(self, step: int, taken: int) -> None:
        """Agree on the factor of the next window, with all ranks.

        Args:
            step: the consumer's next step.
            taken: the number of fresh items up to it.

        Raises:
            ValueError: the ranks' parts differ in length.
            StokerError: a rank is gone.
        """
        with self._planning.lock:
            mine = self.pop_ratio() if self._began else self.factor
        total = -1 if self._total is None else self._total
        factor, longest, shortest = self._ranks.largest([mine, total, -total])
        if longest != -shortest:
            raise ValueError(
                f"ranks have between {-shortest} and {longest} fresh items, and would take unequal "
                "numbers of steps: .shard(), or a loader's DistributedSampler, makes equal parts; "
                ".steps(n) ends all epochs after n"
            )
        with self._planning.lock:
            start = step + _LEAD if self._began else step
            fresh = self._target(start - 1) if self._began else taken
            self._legs = [leg for leg in self._legs[-1:] if leg[0] < start]
            self._legs.append((start, fresh, factor))
            self.factor = factor
            self._began = True
            self._until = next(n for n in range(step + 1, sys.maxsize) if self.due(n)) + _LEAD

    def over(self, step: int) -> bool:
        """True if the epoch has no such step, on any rank."""
        return self._total is not None and self._target(step - 1) >= self._total

    def code(self, pool: AdaptivePool, upstream: PolledStream) -> int | None:
        """Return the step's quota, once it is there. Raises WouldBlock as streams do."""
        assert self._planning.is_held()
        step = pool.step
        if step >= self._until and not self._planning.may_block:
            raise WouldBlock(None)
        self._watch(pool, upstream)
        if self.over(step) and not self._leaky:
            return None
        target = self._target(step)
        last = self._total is not None and target >= self._total
        if last:
            target = self._total or 0
        if upstream.leaves_out:  # other items take the place of dropped ones
            self.alike = False
        count = upstream.left_to(target, pool.admitted)
        # In whole grains, rounded up: otherwise a rest would be left over at the end.
        count = pool.fresh_of(-(-max(count, pool.needed) // pool.grain))
        upstream.wait_for(count)
        ready, over = upstream.poll(count)
        if over and not ready:  # if alike, all ranks end here
            ends_alike = self.alike and pool.admitted == self._total
            if ends_alike or self._total is None or not pool.left_over:
                return None
        return pool.code_of(ready, over=last or over)

    def _target(self, step: int) -> int:
        """Return the number of fresh items up to a step, that step included."""
        start, fresh, factor = next(leg for leg in reversed(self._legs) if leg[0] <= step + 1)
        return fresh + (step + 1 - start) * self._group * UNIT // factor

    def _watch(self, pool: AdaptivePool, upstream: PolledStream) -> None:
        """Measure production, except while a full window holds it up."""
        now = time.perf_counter_ns()
        ready, full_ns = upstream.ready_since()
        there = pool.admitted + ready
        if self._seen is not None and there > self._seen[1]:
            busy_until = now if full_ns is None else min(now, full_ns)
            self._producing_ns += max(0, busy_until - self._seen[0])
            self._produced += there - self._seen[1]
        elif self._seen is not None and full_ns is None:
            self._producing_ns += now - self._seen[0]
        self._seen = now, there

    def pop_ratio(self) -> int:
        """Return this rank's ratio of production to consumption time since the last call.

        Ranks exchange this ratio, not the two times: a rank that waits in its step for another
        rank's data would report a step time that is too large.
        """
        busy_ns = int(np.median(self._consumed)) if self._consumed else 0
        ratio = UNIT
        if self._producing_ns and not self._produced:
            ratio = self._most
        elif self._produced and busy_ns:
            produced_ns = self._producing_ns * self._group
            ratio = -(-UNIT * produced_ns // (self._produced * busy_ns))
        self._consumed.clear()
        self._producing_ns = self._produced = 0
        return max(UNIT, min(self._most, ratio))
