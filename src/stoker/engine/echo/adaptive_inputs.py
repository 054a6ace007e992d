"""The uses of an adaptive echo, decided step by step: by what is ready, a record, or ranks.

Three policies say how many fresh items go into a step: ``OnDemandPolicy`` (what is ready now),
``Replay`` (a record), and ``AgreedPolicy`` of ``rank_sync``. On demand, a step takes what
``Stream.poll`` reports, without waiting. Only if the pool has too little that has rested long
enough, it waits for just the missing items; a worker that plans gets ``WouldBlock`` then. If the
pool comes near to that, each step waits for an even share, or later ones would wait for many.

Decisions that are made early are made badly, because more items may be ready by the time of use. So
the window after such a pool is two batches. The window before it holds at least eight batches, in
tasks of an eighth of a batch: otherwise jitter alone would cause repeats. While the pool and the
window before it are both full, a step of fresh items is ``ALONE``: nothing is kept, and so nothing
is copied. Loaders and streams are read by a thread (``prefetch``), so that no planning waits for
them.

A pool that was carried from the epoch before is taken up with what it held, as far as that is still
there (``adopt``); the rest is made again when it is used. Where examples are echoed, a carried one
leaves the pool before the step that might bring it anew, so that no batch has it twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from stoker.engine.checkpoint import Asked, damage_error
from stoker.engine.echo.pool_inputs import EchoInputs, PoolStart
from stoker.engine.items import EpochCounters, Item, Planning, Stream, WouldBlock, done_item
from stoker.engine.plan.points import EchoPoint
from stoker.engine.workers.threads import WorkerPool
from stoker.schedule.adaptive import ALONE, AdaptivePool, AdaptiveSnapshot
from stoker.schedule.echo_record import Decisions
from stoker.schedule.fixed import Draw


class Policy(Protocol):
    """Says how many fresh items go into the next step."""

    def code(self, pool: AdaptivePool, upstream: Stream) -> int | None:
        """Return the step's code, None where the epoch is over. Raises WouldBlock as streams do."""
        ...


class OnDemandPolicy:
    """A fresh item is used as soon as it is ready, and waited for only if too few may be reused."""

    def code(self, pool: AdaptivePool, upstream: Stream) -> int | None:
        """Return what is ready, or as much of it as the pool cannot do without."""
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


class AdaptiveInputs(EchoInputs[AdaptivePool]):
    """Feeds a segment by a policy's decisions, one step at a time.

    Args:
        leaks: whether stages after it may drop uses. A state then lists drops beyond its own
            position, so a resume must replay the steps that they belong to.
        steps: how many there are at most, so that the pool is not ahead at the end; None: no limit.
    """

    total = None
    follows = True

    def __init__(
        self,
        point: EchoPoint,
        make_pool: Callable[[AdaptiveInputs], AdaptivePool],
        upstream: Stream,
        tally: EpochCounters,
        worker_pool: WorkerPool,
        decides: Policy,
        steps: int | None = None,
    ) -> None:
        super().__init__(point, make_pool, upstream, tally)
        self.blocking = False
        self._worker_pool = worker_pool
        self._decides = decides
        self._steps = steps
        self._leaks = point.leaks
        self._decided: deque[int] = deque()  # before a resume, about steps behind it
        self.carried: AdaptiveSnapshot | None = (
            None  # what the epoch began with, if not with nothing
        )
        self._carried_examples: dict[int, int] = {}  # numbers by index
        self._empty: AdaptiveSnapshot | None = None  # what it begins with over a loader or stream
        self._retired = 0  # up to this fresh example carried ones have left

    def _step(self) -> bool:
        pool, upstream = self.pool, self.upstream
        if pool.ended or pool.step == self._steps:
            return False
        self._retire()
        code: int | None
        if self._decided:
            code = self._decided[0]
            upstream.wait_for(max(pool.fresh_of(code), pool.needed))
            self._decided.popleft()
        else:
            code = self._decides.code(pool, upstream)
        if code is None:
            pool.ended = True
            return False
        first, got = pool.admitted, 0
        for item in upstream.pull_many(pool.fresh_of(code)):
            self._items[first + got] = item
            self._fresh = item.fresh
            got += 1
        draw = pool.draw(code, got)
        pool.ended = got < pool.fresh_of(code)
        self._schedule(draw, 0)
        self._drop(draw)
        return True

    def _retire(self) -> None:
        """Let go of carried examples that the next step may bring anew."""
        if not self._carried_examples:
            return
        first, self._retired = self._retired, self.pool.admitted + self.pool.group
        upstream: Any = self.upstream
        coming = self._carried_examples.keys() & set(upstream.indices(first, self._retired))
        gone = [self._carried_examples.pop(index) for index in coming]
        if gone:
            self.pool.discard(gone)
            self._let_go(gone)

    @property
    def taken_of_source(self) -> int:
        """How many of the source's items were taken, those in between that were left out too."""
        if not self.started:
            return 0
        return self.fresh if self.upstream.leaves_out else self.pool.admitted

    def adopt(self, items: dict[int, Item]) -> None:
        """Take up what the pool held when the epoch before was over."""
        held = set(self.pool.held_ordinals().tolist())
        self._items.update({number: item for number, item in items.items() if number in held})

    def handed_on(self, total: int) -> dict[int, Item]:
        """Return what the pool holds by the numbers of the next epoch; ``total`` are in this."""
        items = {}
        for number, item in self._items.items():
            if item.task.done and item.task.values[item.row] is not None:
                value, there = item.task.values[item.row], number - total
                items[there] = done_item(value, there, item.use_key, 0, item.rows)
        return items

    def _drop(self, draw: Draw) -> None:
        if len(draw.dropped):
            self._let_go(draw.dropped.tolist())

    def _let_go(self, numbers: list[int]) -> None:
        with self._worker_pool.lock:
            for number in numbers:
                item = self._items.pop(number, None)
                if item is not None:  # after a resume it may never have been made again
                    item.settled = True
                    if not item.scheduled:
                        item.task.values[item.row] = None

    def resume(self, node: PoolStart | None, asked: Asked) -> Asked:
        """Replay, or begin empty behind what a loader or a stream has handed out."""
        if node is not None:
            return super().resume(node, asked)
        items = self.upstream.items_of(asked.loaded)
        step = asked.next // self.point.group
        self._empty = AdaptiveSnapshot(step, items, (), began=step)
        return Asked(items, items, items, loaded=asked.loaded)

    def catch_up(self) -> None:
        if self._empty is not None:
            self.pool.restore(self._empty)  # the first item may be looked at for the pool's size
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
                    self._decided.extend(moment.codes[place - 1 :])
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
        if self.point.holds_batches:
            return
        upstream: Any = self.upstream
        before = [number for number in self.pool.held_ordinals().tolist() if number < 0]
        self._carried_examples = {upstream.index_before(n): n for n in before}
        self._retired = moment.admitted


class Replay:
    """A policy that repeats recorded decisions.

    Args:
        decisions: those of this echo in this epoch.
        planning: tells whether the planner may block.
    """

    def __init__(self, decisions: Decisions, planning: Planning) -> None:
        self._decisions = decisions
        self._planning = planning

    def code(self, pool: AdaptivePool, upstream: Stream) -> int | None:
        """Return what was decided, once the fresh items are there.

        Raises StateError where the record has nothing of this step, or too few fresh items.
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
            if fresh < pool.needed and upstream.poll(fresh) != (fresh, True):
                self._decisions.raise_damaged(pool.step)
        return code
