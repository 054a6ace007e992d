"""The stream of an adaptive echo, decided step by step.

Three policies say how many fresh items go into a step: ``GreedyPolicy`` (what is ready now),
``Replay`` (a record), and ``AgreedPolicy`` of ``rank_sync``. On demand, a step takes what
``Stream.poll`` reports, without waiting. Only if too few items in the pool have rested long enough,
it waits for just the missing ones; a worker that plans gets ``WouldBlock`` then. Before a pool runs
that low, each step waits for an even share, or later steps would wait for many.

Early decisions are bad ones, because more items may be ready by the time of use. So the window
after such a pool is two batches. The window before it holds at least eight batches, in
tasks of an eighth of a batch: otherwise jitter alone would cause repeats. While the pool and the
window before it are both full, a step of fresh items is ``ALONE``: nothing is kept, and so nothing
is copied. Loaders and streams are read by a thread (``prefetch``), so that no planning waits for
them.

A pool may go on in the next epoch. That epoch gets the items that are still in memory (``adopt``);
the others are made again when they are used. Where examples are echoed, an item of the earlier
epoch leaves the pool before the step that might bring its example anew, so that no batch has it
twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from stoker.echoing.rank_sync import AgreedPolicy
from stoker.echoing.stream import EchoStream, PoolStart
from stoker.engine.checkpoint import UpstreamRequest, damage_error
from stoker.engine.flow import Own
from stoker.engine.items import (
    EpochCounters,
    Item,
    Lent,
    Planning,
    PolledStream,
    WouldBlock,
    done_item,
)
from stoker.engine.segments.stream import SegmentStream
from stoker.engine.workers.threads import WorkerPool
from stoker.schedule.echo_record import Decisions
from stoker.schedule.pools.adaptive import (
    ALONE,
    AdaptivePool,
    AdaptiveSnapshot,
    carry_over,
    pack,
)
from stoker.schedule.pools.fixed import Draw


class Policy(Protocol):
    """Decides how many fresh items go into the next step."""

    def code(self, pool: AdaptivePool, upstream: PolledStream) -> int | None:
        """Return the step's code; None at the end of the epoch. Raises WouldBlock as streams do."""
        ...


class GreedyPolicy:
    """Uses fresh items as soon as they are ready; waits for them only if too few may be reused."""

    def code(self, pool: AdaptivePool, upstream: PolledStream) -> int | None:
        """Return the code for the ready items; waits for items that the pool cannot do without."""
        ready, over = upstream.poll(pool.group)
        missing = max(pool.needed, pool.even_share)
        if not over and ready < missing:
            upstream.wait_for(missing)
            ready, over = upstream.poll(pool.group)
        if over and not ready:
            return None
        if ready == pool.group and pool.held >= pool.size and upstream.is_full:
            return ALONE
        return pool.code_of(ready, over=over)


class AdaptiveEcho(EchoStream[AdaptivePool]):
    """The uses by a policy's decisions.

    Args:
        policy: decides how many fresh items go into a step.
        steps: the most steps, so that the pool does not run ahead at the end; None: no limit.
    """

    total = None
    follows = True

    def __init__(
        self,
        layer: Own,
        make_pool: Callable[[AdaptiveEcho], AdaptivePool],
        upstream: PolledStream,
        tally: EpochCounters,
        worker_pool: WorkerPool,
        policy: Policy,
        steps: int | None = None,
    ) -> None:
        super().__init__(layer, make_pool, upstream, tally)
        self.blocking = False
        self._worker_pool = worker_pool
        self._policy = policy
        self.agreement = policy if isinstance(policy, AgreedPolicy) else None
        self._steps = steps
        self._leaks = layer.leaks
        self._codes_ahead: deque[int] = deque()  # of steps behind a resume, decided before it
        self.carried: AdaptiveSnapshot | None = None  # the pool when the epoch began, if not empty
        self._carried_examples: dict[int, int] = {}  # their numbers, by index
        self._empty: AdaptiveSnapshot | None = None  # the empty pool of a loader or stream
        self._last_uses = 0  # carried items of fresh examples below this have left

    def _step(self) -> bool:
        pool, upstream = self.pool, self.upstream
        if pool.ended or pool.step == self._steps:
            return False
        self._retire()
        code: int | None
        if self._codes_ahead:
            code = self._codes_ahead[0]
            upstream.wait_for(max(pool.fresh_of(code), pool.needed))
            self._codes_ahead.popleft()
        else:
            code = self._policy.code(pool, upstream)
        if code is None:
            pool.ended = True
            return False
        first = pool.admitted
        got = self._keep(upstream.pull_many(pool.fresh_of(code)), first) - first
        draw = pool.draw(code, got)
        pool.ended = got < pool.fresh_of(code)
        self._schedule(draw, 0)
        self._drop(draw)
        return True

    def _retire(self) -> None:
        """Drop carried items whose examples the next step may bring anew."""
        if not self._carried_examples:
            return
        first, self._last_uses = self._last_uses, self.pool.admitted + self.pool.group
        upstream: Any = self.upstream
        coming = self._carried_examples.keys() & set(upstream.indices(first, self._last_uses))
        gone = [self._carried_examples.pop(index) for index in coming]
        if gone:
            self.pool.discard(gone)
            self._let_go(gone)

    def decided(self, epoch: int) -> Decisions | None:
        if not self.has_started:
            return None
        carried = pack(self.carried) if self.carried else None
        return Decisions(epoch, self.pool.first_step, bytes(self.pool.codes), carried)

    def next_start(self, total: int) -> PoolStart:
        return PoolStart(carry_over(self.pool, total))

    def adopt(self, items: dict[int, Item]) -> None:
        held = set(self.pool.held_ordinals().tolist())
        self._items.update({number: item for number, item in items.items() if number in held})

    def handed_on(self, total: int) -> dict[int, Item]:
        items, upstream = {}, self.upstream
        assert isinstance(upstream, SegmentStream)
        for number, item in self._items.items():
            if item.task.done and item.task.values[item.row] is not None:
                value, there = item.task.values[item.row], number - total
                place = upstream.place_before(there)
                items[there] = carried = done_item(value, place, 0, item.rows)
                carried.lent = Lent()
        return items

    def _drop(self, draw: Draw) -> None:
        if len(draw.dropped):
            self._let_go(draw.dropped.tolist())

    def _let_go(self, numbers: list[int]) -> None:
        with self._worker_pool.lock:
            for number in numbers:
                item = self._items.pop(number, None)
                if item is not None:  # after a resume, None if it was not made again yet
                    item.settle()

    def resume(self, node: PoolStart | None, request: UpstreamRequest) -> UpstreamRequest:
        """Replay the steps; over a loader or stream begin with an empty pool."""
        if node is not None:
            return super().resume(node, request)
        items = self.upstream.items_of(request.loaded)
        step = request.next // self.layer.group
        self._empty = AdaptiveSnapshot(step, items, (), began=step)
        return UpstreamRequest(items, items, items, loaded=request.loaded)

    def catch_up(self) -> None:
        if self._empty is not None:
            self.pool.restore(self._empty)  # making the pool may need an item
        else:
            super().catch_up()

    def _replay(self, node: PoolStart, taken: int, steps: set[int]) -> set[int]:
        pool, items, moment = self.pool, node.items, node.snapshot
        self._take_up(moment)
        held: set[int] = set()
        for place, code in enumerate(moment.codes, 1):
            at = pool.step
            if at * pool.group >= taken:
                if self._leaks:
                    self._codes_ahead.extend(moment.codes[place - 1 :])
                break
            got = pool.fresh_of(code)
            if items is not None:
                got = min(got, items - pool.admitted)
            last = place == len(moment.codes) if items is None else pool.admitted + got == items
            self._retire()
            if got < pool.needed and not last:
                raise damage_error(f"at step {at:,} its pool could not draw")
            draw = pool.draw(code, got)
            skip = taken - at * pool.group if pool.step * pool.group > taken else None
            held |= self._recall(draw, at, at in steps, skip)
        pool.ended = pool.admitted == items
        return held

    def _take_up(self, moment: AdaptiveSnapshot) -> None:
        if moment.step == 0 and moment.began < 0:
            self.carried = replace(moment, codes=b"")
        if self.layer.holds_batches:
            return
        upstream: Any = self.upstream
        before = [number for number in self.pool.held_ordinals().tolist() if number < 0]
        self._carried_examples = {upstream.index_before(n): n for n in before}
        self._last_uses = moment.admitted


class Replay:
    """A policy that repeats recorded decisions.

    Args:
        decisions: the record of this echo in this epoch.
        planning: tells whether the planner may block.
    """

    def __init__(self, decisions: Decisions, planning: Planning) -> None:
        self._decisions = decisions
        self._planning = planning

    def code(self, pool: AdaptivePool, upstream: PolledStream) -> int | None:
        """Return the recorded code, once the fresh items are ready.

        Raises StateError if the record lacks this step, or the epoch has too few fresh items.
        """
        assert self._planning.is_held()
        code = self._decisions.code(pool.step)
        if code is None:
            upstream.wait_for(1)
            if upstream.poll(1) == (0, True):
                return None
            if not self._planning.may_block:
                raise WouldBlock(None)
            self._decisions.raise_ended(pool.step)
        else:
            fresh = pool.fresh_of(code)
            upstream.wait_for(max(fresh, pool.needed))
            if (
                fresh < pool.needed
            ):  # only the epoch's last step has so few; its grain may not be full
                ready, over = upstream.poll(fresh)
                if not over or pool.code_of(ready, over=True) != code:
                    self._decisions.raise_damaged(pool.step)
        return code
