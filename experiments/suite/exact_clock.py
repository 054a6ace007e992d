"""When things happen, by an exact clock: storage and training of one constant speed, no sleeping.

A batch of fresh examples takes R steps' time to be produced, an eighth of it at a time, one after
another; a training step takes `Recipe.step_s`. How many fresh examples each step takes, and waits
for, is decided by stoker's own schedules on integers: `AdaptivePool` and `OnDemandPolicy`, or the
`Pool` of a fixed factor. So no arm can be faster than its fresh examples arrive, and a run on
another machine has the same seconds. `threads` holds the clock against the real pipeline.

Storage goes on into the next epoch without a pause. Examples that `drop_last` leaves out of an
epoch are not produced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import stoker
from experiments.arms import Arm
from experiments.suite.feeds import Counts, feed, pool_batches
from experiments.suite.workload import Workload
from stoker.engine.echo.adaptive_inputs import OnDemandPolicy
from stoker.schedule import rng
from stoker.schedule.echo_record import Decisions, EchoRecord, decode, encode
from stoker.schedule.factor import EvenUses, exact_factor
from stoker.schedule.pools import adaptive
from stoker.schedule.pools.adaptive import AdaptivePool, carry_over
from stoker.schedule.pools.fixed import Pool
from stoker.stages.echo import DEFAULT_MAX_FACTOR, DEFAULT_MIN_DISTANCE

WINDOW_BATCHES = 8
"""Fresh batches that may be ready in front of the echo, or in the making."""
# As the engine cuts the work in front of an adaptive echo.
_CHUNKS = 8


@dataclass
class Supply:
    """Makes chunks of items one after another; a stream as far as a policy asks.

    Attributes:
        cost: the time of a chunk, asked for when it is begun.
        chunk: items in it.
        room: items that may be ready or in the making.
        items: how many there are in all, up to the end of the epoch.
        endless: whether later epochs' items are made, too.
        now: the time of who asks; waiting moves it.
    """

    cost: Callable[[], float]
    chunk: int
    room: int
    items: int
    now: float = 0.0
    made: int = 0
    taken: int = 0
    endless: bool = False
    _due: float | None = None
    _free_at: float = 0.0
    is_full: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._free_at = self.now

    def advance(self) -> None:
        """Make what is made by now."""
        while True:
            if self._due is None:
                self.is_full = self.made - self.taken + self.chunk > self.room
                if self.is_full or (self.made >= self.items and not self.endless):
                    return
                self._due = self._free_at + self.cost()
            if self._due > self.now:
                return
            self.made += self.chunk
            self._free_at, self._due = self._due, None

    def poll(self, count: int) -> tuple[int, bool]:
        """Return how many of so many items are ready, and whether these are the last."""
        self.advance()
        ready = min(count, self.made - self.taken, self.items - self.taken)
        return ready, self.taken + ready >= self.items

    def wait_for(self, count: int) -> None:
        """Let time pass until so many are ready, or all that are left."""
        count = min(count, self.items - self.taken)
        self.advance()
        while self.made - self.taken < count and self._due is not None:
            self.now = max(self.now, self._due)
            self.advance()

    def take(self, count: int) -> None:
        """Take what is ready."""
        was_full = self._due is None
        self.taken += count
        if was_full and count:
            self._free_at = max(self._free_at, self.now)
        self.advance()


class Step(NamedTuple):
    """One training step."""

    fresh: int
    """Examples that are used for the first time."""
    waited_s: float
    distance_sum: int
    """Steps since the use before, over the items that were used before: `repeats`."""
    repeats: int
    ordinals: NDArray[np.int64]
    """The items, by their number in the epoch; those of earlier epochs are below 0."""
    uses: NDArray[np.int64]
    """Which use of its item each is, from 0."""


class ExactClock:
    """The steps of an arm at one R, epoch after epoch, each taken when it is asked for.

    Args:
        arm: its `slowness` is R.
        seed: keys what a fixed factor draws.
        decided: what an adaptive echo decided in another run; None: it decides here.
        max_factor: the most uses of an item of an adaptive echo.
    """

    def __init__(
        self,
        workload: Workload,
        arm: Arm,
        seed: int,
        decided: dict[str, Any] | None = None,
        max_factor: int = DEFAULT_MAX_FACTOR,
    ) -> None:
        recipe = workload.recipe
        batch, examples = recipe.batch_size, len(workload.train)
        self._workload, self._arm, self._seed, self._decided = workload, arm, seed, decided
        self._step_s = recipe.step_s
        self._max_factor = max_factor
        self._of_examples = arm.place in ("before", "after")
        # Items are what the echo holds: examples, or batches.
        self._group = batch if self._of_examples else 1
        self._each = 1 if self._of_examples else batch
        self._items = examples if self._of_examples else examples // batch
        self._size = pool_batches(workload, arm) * self._group
        chunk = max(1, self._group // _CHUNKS)
        cost = arm.slowness * recipe.step_s * chunk * self._each / batch
        room = WINDOW_BATCHES * self._group
        self.supply = Supply(lambda: cost, chunk, room, 0, endless=True)
        self.epoch = 0
        """That of the latest step."""
        self._epochs: dict[int, Decisions] = {}
        self._orders: list[NDArray[np.int64]] = []
        self._shuffled: stoker.Pipeline | None = None

    def steps(self) -> Iterator[Step]:
        """Yield the steps without end; `supply.now` is when one ends."""
        epoch = 0
        carried: adaptive.AdaptiveSnapshot | None = None
        while True:
            self.epoch = epoch
            self.supply.items += self._items
            if not self._arm.follows:
                yield from self._fixed(epoch)
            else:
                pool = AdaptivePool(self._max_factor, DEFAULT_MIN_DISTANCE, self._size, self._group)
                if carried is not None:
                    pool.restore(carried)
                yield from self._adaptive(pool, epoch, carried)
                carried = carry_over(pool, self._items) if self._of_examples else None
            self.supply.taken = self.supply.items
            epoch += 1

    def record(self) -> dict[str, Any] | None:
        """Return what `pipeline.record()` would say of these steps; None for a fixed factor."""
        if not self._arm.follows:
            return None
        empty = feed(self._workload, self._arm, self._seed).record()
        return encode(empty["seed"], empty["pipeline"], {0: EchoRecord(self._size, self._epochs)})

    def _fixed(self, epoch: int) -> Iterator[Step]:
        if not self._arm.echoes:
            for item in range(self._items):
                waited_s = self._wait(1)
                self.supply.now += self._step_s
                yield Step(self._each, waited_s, 0, 0, np.array([item]), np.array([0]))
            return
        counts = EvenUses(exact_factor(self._arm.factor))
        key = rng.key(self._seed, epoch, rng.ECHO, 0)
        pool = Pool(counts, self._size, self._group, key, self._items)
        while not pool.exhausted:
            needed, seen = pool.fresh_needed(), pool.seen
            waited_s = self._wait(needed)
            pool.admit(needed)
            draw = pool.draw()
            if len(draw.ordinals) < self._group:  # drop_last
                return
            self.supply.now += self._step_s
            fresh = (pool.seen - seen) * self._each
            yield Step(fresh, waited_s, draw.distance_sum, draw.repeats, draw.ordinals, draw.uses)

    def _adaptive(
        self, pool: AdaptivePool, epoch: int, carried: adaptive.AdaptiveSnapshot | None
    ) -> Iterator[Step]:
        policy, codes = OnDemandPolicy(), bytearray()
        upstream: Any = self.supply
        ids, last = self._carried_ids(pool, epoch), 0
        packed = None if carried is None else adaptive.pack(carried)
        before = self._codes_before(epoch)
        while not pool.ended:
            if ids:
                first, last = last, pool.admitted + self._group
                coming = ids.keys() & set(self._order(epoch)[first:last].tolist())
                pool.discard([ids.pop(index) for index in coming])
            asked = self.supply.now
            if before is None:
                code = policy.code(pool, upstream)
            else:
                code = before[pool.step] if pool.step < len(before) else None
            if code is None:
                return
            got = min(pool.fresh_of(code), self.supply.items - self.supply.taken)
            self.supply.wait_for(got)
            self.supply.take(got)
            codes.append(code)
            self._epochs[epoch] = Decisions(epoch, 0, bytes(codes), packed)
            draw = pool.draw(code, got)
            pool.ended = self.supply.taken == self.supply.items
            if len(draw.ordinals) < self._group:  # drop_last
                return
            waited_s = self.supply.now - asked
            self.supply.now += self._step_s
            fresh = got * self._each
            yield Step(fresh, waited_s, draw.distance_sum, draw.repeats, draw.ordinals, draw.uses)

    def _wait(self, items: int) -> float:
        """Take items, waiting for them; return for how long."""
        asked = self.supply.now
        self.supply.wait_for(items)
        self.supply.take(items)
        return self.supply.now - asked

    def _codes_before(self, epoch: int) -> bytes | None:
        """Return the decisions of the run that is repeated."""
        if self._decided is None:
            return None
        return decode(self._decided, self._items).of(0, epoch).codes

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """Return the examples of an epoch, by number, as they are read."""
        if self._shuffled is None:
            numbers = range(len(self._workload.train))
            self._shuffled = stoker.from_dataset(numbers, seed=self._seed).shuffle()
        while len(self._orders) <= epoch:
            self._orders.append(np.asarray(list(self._shuffled), np.int64))
        return self._orders[epoch]

    def _carried_ids(self, pool: AdaptivePool, epoch: int) -> dict[int, int]:
        """Return the ordinals of carried examples, which are below 0, by example."""
        held = [n for n in pool.held_ordinals().tolist() if n < 0]
        if not held:
            return {}
        back = [epoch + n // self._items for n in held]
        return {int(self._order(at)[n % self._items]): n for at, n in zip(back, held, strict=True)}


def exact_run(
    workload: Workload, arm: Arm, seed: int, decided: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Go through a whole run by the exact clock; return when it was where.

    `points` has a row at each point of the grid: steps, fresh examples, uses, and seconds from the
    beginning to the end of that step. `waited_fraction` leaves out the first batch's wait.

    Args:
        decided: what an adaptive echo decided in another run, which is repeated; None: it decides
            by this clock.
    """
    clock = ExactClock(workload, arm, seed, decided)
    counts = Counts(workload.recipe)
    points: list[list[float]] = []
    waited_s, first_s, distance_sum, repeats, fresh, uses = 0.0, None, 0, 0, 0, 0
    for number, step in enumerate(clock.steps(), 1):
        if first_s is None:
            first_s = step.waited_s
        waited_s += step.waited_s
        distance_sum += step.distance_sum
        repeats += step.repeats
        fresh += step.fresh
        uses += workload.recipe.batch_size
        if counts.add(number, fresh, uses):
            points.append([number, fresh, uses, round(clock.supply.now, 6)])
        if counts.is_over:
            break
    assert first_s is not None
    return {
        "clock": "exact",
        "points": points,
        "waited_fraction": round((waited_s - first_s) / (clock.supply.now - first_s), 4),
        "copy_distance": round(distance_sum / max(1, repeats), 1),
        "digest": counts.digest,
        "record": clock.record(),
    }
