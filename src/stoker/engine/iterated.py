"""The examples of an iterable, in its own order or shuffled through a buffer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker import machine
from stoker.engine.foreign import interrupt
from stoker.engine.items import Item, Tally, done_item
from stoker.engine.work import ENDED, Failure
from stoker.errors import StageError
from stoker.orders import Share
from stoker.rng import Fractions
from stoker.signals import pass_on
from stoker.sources.stream import IterableSource


class IteratedStream:
    """One pass over an iterable, by whoever plans, one thread at a time.

    Args:
        source: the iterable.
        share: which examples are this rank's, None for all. Even parts are handed out a round at
            a time, an example for every rank, so that all ranks get equally many.
        buffer: how many examples are shuffled among each other; 1 keeps the order.
        key: keys the shuffling.
        start: how many examples of the pass come before what the source begins with.
    """

    total = None
    blocking = False

    def __init__(
        self,
        source: IterableSource,
        share: Share | None,
        buffer: int,
        key: NDArray[np.uint64],
        tally: Tally,
        start: int = 0,
    ) -> None:
        self._name = source.name
        self._whole: Iterator[Any] | None = source.open()
        self._examples: Iterator[Any] | None = _share_of(self._whole, share)
        self._size = buffer
        self._tally = tally
        self._fractions = Fractions(key)
        self._buffer: list[Item] = []
        self._peeked: deque[Item] = deque()
        self._read = start
        self._handed = start
        self._failure: Item | None = None

    usable_bytes = staticmethod(machine.usable_memory_bytes)

    @property
    def fresh(self) -> int:
        """Examples that were handed out."""
        return self._handed

    def pull(self) -> Item | None:
        """Return the next example, None at the end; what the iterable raises comes as a failure."""
        if self._peeked:
            return self._peeked.popleft()
        item = self._drawn()
        if item is not None:
            self._handed += 1
            item.fresh = self._handed
        return item

    def pull_many(self, count: int) -> Iterator[Item]:
        """Yield the next ``count`` examples, fewer only at the end."""
        for _ in range(count):
            item = self.pull()
            if item is None:
                return
            yield item

    def peek(self) -> Item | None:
        """Return the next example without taking it."""
        item = self.pull()
        if item is not None:
            self._peeked.append(item)
        return item

    def recompute(self, number: int) -> Item:
        """Refuse: states that would need this are refused before."""
        raise AssertionError("a stream's examples cannot be made again")

    def interrupt(self) -> None:
        """Have who waits for a feed, in another thread, wait no more."""
        interrupt(self._whole)

    def clear(self) -> None:
        """Let go of the iterator, which ends a generator."""
        self._examples = self._whole = None
        self._buffer.clear()
        self._peeked.clear()

    def _drawn(self) -> Item | None:
        if self._size == 1:
            item = self._next()
            if item is None:
                item, self._failure = self._failure, None
            return item
        buffer = self._buffer
        while self._examples is not None and len(buffer) < self._size:
            item = self._next()
            if item is not None:
                buffer.append(item)
        if not buffer:  # what the iterable raised comes behind all that it gave
            item, self._failure = self._failure, None
            return item
        at = int(self._fractions.at(self._handed) * len(buffer))
        buffer[at], buffer[-1] = buffer[-1], buffer[at]
        return buffer.pop()

    def _next(self) -> Item | None:
        if self._examples is None:
            return None
        began = time.perf_counter_ns()
        try:
            example = next(self._examples)
        except StopIteration:
            self._examples = None
            return None
        except Exception as error:
            pass_on(error)
            self._examples = None
            failure = Failure(StageError(self._name, error, number=self._read), ENDED)
            self._failure = done_item(failure, self._read, 0, 0, 1)
            return None
        self._tally.add([self._name], [time.perf_counter_ns() - began], 1)
        self._read += 1
        return done_item(example, self._read - 1, 0, 0, 1)


def _share_of(examples: Iterator[Any], share: Share | None) -> Iterator[Any]:
    if share is None:
        return examples
    if share.uneven:
        return islice(examples, share.rank, None, share.world)
    return _rounds(examples, share.rank, share.world)


def _rounds(examples: Iterator[Any], rank: int, world: int) -> Iterator[Any]:
    while len(each := list(islice(examples, world))) == world:
        yield each[rank]
