"""When things happen, by an exact clock: storage and training of one constant speed, no sleeping.

A batch of fresh examples takes R steps' time to be produced, an eighth of it at a time, one after
another; a training step takes 1. How many fresh examples each step takes, and waits for, is decided
on integers by stoker's own schedule of an echo that follows the stall: `AdaptivePool` and
`GreedyPolicy`. So no arm can be faster than its fresh examples arrive, and a run on another
machine takes the same time.

Storage goes on into the next epoch without a pause. Examples that `drop_last` leaves out of an
epoch are not produced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import stoker
from stoker.echoing.adaptive import GreedyPolicy
from stoker.echoing.stage import DEFAULT_MIN_DISTANCE
from stoker.schedule.pools.adaptive import AdaptivePool, AdaptiveSnapshot, carry_over

WINDOW_BATCHES = 8
"""Fresh batches that may be ready in front of the echo, or in the making."""
# As the engine cuts the work in front of an adaptive echo.
_CHUNKS = 8


@dataclass
class Supply:
    """Makes chunks of items one after another; a stream as far as a policy asks.

    Attributes:
        cost: the time of a chunk.
        chunk: items in it.
        room: items that may be ready or in the making.
        items: how many there are in all, up to the end of the epoch. More than these are made.
        now: the time of who asks; waiting moves it.
    """

    cost: float
    chunk: int
    room: int
    items: int = 0
    now: float = 0.0
    made: int = 0
    taken: int = 0
    _due: float | None = None
    _free_at: float = 0.0
    is_full: bool = False

    def advance(self) -> None:
        """Make what is made by now."""
        while True:
            if self._due is None:
                self.is_full = self.made - self.taken + self.chunk > self.room
                if self.is_full:
                    return
                self._due = self._free_at + self.cost
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
    ordinals: NDArray[np.int64]
    """The items, by their number in the epoch; those of earlier epochs are below 0."""
    uses: NDArray[np.int64]
    """Which use of its item each is, from 0."""


class ExactClock:
    """The steps of a training at one R, epoch after epoch, each taken when it is asked for.

    Args:
        examples: how many an epoch has.
        batch_size: of a step.
        ratio: R.
        max_factor: the most uses of an item; 1: there is no echo.
        pool_batches: what the echo holds, in batches.
        of_examples: whether the echo's items are examples; else they are whole batches.
        seed: keys the order of the examples.
    """

    def __init__(
        self,
        examples: int,
        batch_size: int,
        *,
        ratio: float,
        max_factor: int,
        pool_batches: int,
        of_examples: bool,
        seed: int,
    ) -> None:
        self._examples, self._seed = examples, seed
        self._max_factor, self._of_examples = max_factor, of_examples
        self._group = batch_size if of_examples else 1  # items of a step
        self._each = 1 if of_examples else batch_size  # examples of an item
        self._items = examples if of_examples else examples // batch_size
        self._size = pool_batches * self._group
        chunk = max(1, self._group // _CHUNKS)
        room = WINDOW_BATCHES * self._group
        self.supply = Supply(ratio * chunk / self._group, chunk, room)
        self.epoch = 0
        """That of the latest step."""
        self.codes: dict[int, bytes] = {}
        """What the echo decided at each step, by epoch."""
        self.carried: dict[int, AdaptiveSnapshot | None] = {}
        """What its pool held when an epoch began."""

    def steps(self) -> Iterator[Step]:
        """Yield the steps without end; `supply.now` is when one ends."""
        carried: AdaptiveSnapshot | None = None
        while True:
            self.supply.items += self._items
            if self._max_factor == 1:
                yield from self._plain()
            else:
                pool = AdaptivePool(self._max_factor, DEFAULT_MIN_DISTANCE, self._size, self._group)
                if carried is not None:
                    pool.restore(carried)
                self.carried[self.epoch] = carried
                yield from self._echoed(pool)
                carried = carry_over(pool, self._items) if self._of_examples else None
            self.supply.taken = self.supply.items
            self.epoch += 1

    def _plain(self) -> Iterator[Step]:
        uses = np.zeros(self._group, np.int64)
        for first in range(0, self._items - self._group + 1, self._group):
            self._take(self._group)
            yield Step(self._group * self._each, np.arange(first, first + self._group), uses)

    def _echoed(self, pool: AdaptivePool) -> Iterator[Step]:
        policy, codes, ids, last = GreedyPolicy(), bytearray(), self._carried_ids(pool), 0
        upstream: Any = self.supply
        while not pool.ended:
            if ids:
                first, last = last, pool.admitted + self._group
                comes = order(self._examples, self._seed, self.epoch)[first:last].tolist()
                coming = ids.keys() & set(comes)
                pool.discard([ids.pop(index) for index in coming])
            code = policy.code(pool, upstream)
            if code is None:
                return
            got = min(pool.fresh_of(code), self.supply.items - self.supply.taken)
            codes.append(code)
            self.codes[self.epoch] = bytes(codes)
            self.supply.wait_for(got)
            self.supply.take(got)
            draw = pool.draw(code, got)
            pool.ended = self.supply.taken == self.supply.items
            if len(draw.ordinals) < self._group:  # drop_last
                return
            self.supply.now += 1
            yield Step(got * self._each, draw.ordinals, draw.uses)

    def _take(self, items: int) -> None:
        """Wait for items, and train on them."""
        self.supply.wait_for(items)
        self.supply.take(items)
        self.supply.now += 1

    def _carried_ids(self, pool: AdaptivePool) -> dict[int, int]:
        """Return the ordinals of carried examples, which are below 0, by example."""
        held = [n for n in pool.held_ordinals().tolist() if n < 0]
        back = [self.epoch + n // self._items for n in held]
        return {
            int(order(self._examples, self._seed, at)[n % self._items]): n
            for at, n in zip(back, held, strict=True)
        }


@lru_cache(maxsize=256)
def order(examples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the examples of an epoch, by number, as stoker's shuffle gives them."""
    pipeline = _shuffled(examples, seed)
    pipeline.set_epoch(epoch)
    return np.asarray(list(pipeline), np.int64)


@lru_cache(maxsize=256)
def _shuffled(examples: int, seed: int) -> stoker.Pipeline:
    return stoker.from_dataset(range(examples), seed=seed).shuffle()
