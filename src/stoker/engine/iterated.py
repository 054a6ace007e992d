"""The examples of an iterable, in its own order or shuffled through a buffer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker import pytree
from stoker.engine.foreign import interrupt
from stoker.engine.items import HEAD, HeadStream, Item, Tally, done_item
from stoker.engine.work import ENDED, Failure
from stoker.errors import StageError
from stoker.orders import Cut, Selection
from stoker.rng import Fractions
from stoker.signals import pass_on
from stoker.sources.iterable import IterableSource


class IteratedStream(HeadStream):
    """One pass over an iterable. Read by the planner, so by one thread at a time.

    Args:
        source: the iterable; ``examples``: the pass over it.
        selection: which examples are this rank's. Even parts are handed out a round at a time, an
            example for every rank, so that all ranks get equally many.
        buffer: how many examples are shuffled among each other; 1 keeps the order.
        key: keys the shuffling.
        start: how many examples of the pass come before what the source begins with.
    """

    def __init__(
        self,
        source: IterableSource,
        examples: Iterator[Any],
        selection: Selection,
        buffer: int,
        key: NDArray[np.uint64],
        tally: Tally,
        start: int = 0,
    ) -> None:
        super().__init__()
        self._name = source.name
        self._source = source
        self._whole: Iterator[Any] | None = examples
        self._world = selection.share.world if selection.share is not None else 1
        self._examples: Iterator[Any] | None = _read_of(examples, selection, start)
        self._skipped = selection.first.start  # by the source, in front of what is counted
        handed = _handed_of(selection)
        self._to_drop = self._dropped = handed.start
        if selection.share is not None and not selection.share.anew:
            self._dropped += selection.between.start
        self._left = None if handed.stop is None else max(0, handed.stop - handed.start)
        self._drawn_count = start
        self._size = buffer
        self._tally = tally
        tally.open(HEAD, [source.name])
        self._fractions = Fractions(key)
        self._buffer: list[Item] = []
        self._read = start
        self._handed = start
        self._failure: Item | None = None
        if self._left is not None:
            self._left -= start

    @property
    def fresh(self) -> int:
        return self._handed

    def _taken(self, may_block: bool) -> Item | None:
        """Take the next example; what the iterable raises comes as a failure."""
        if self._left is not None:
            if self._left <= 0:
                return None
            self._left -= 1
        item = self._drawn()
        while self._to_drop and item is not None and type(item.task.values[0]) is not Failure:
            self._to_drop -= 1
            item = self._drawn()
        if item is not None:
            self._handed += 1
            item.fresh = self._handed
        return item

    def has_ended(self) -> bool:
        """Return True: where it is asked, its length was told beforehand."""
        return True

    def state_at(self, fresh: int, loaded: int) -> tuple[Any, int]:
        """Return the source's own state behind so many examples, None if it has none."""
        if not self._source.takes_state:
            return None, loaded
        return self._source.state(fresh and fresh + self._skipped), fresh

    def forget_before(self, fresh: int, loaded: int) -> None:
        self._source.forget_before(fresh and fresh + self._skipped)

    def leave(self, fresh: int, loaded: int, *, ended: bool) -> None:
        """Tell how much was read when the last example that was taken had been drawn.

        What a shuffle buffer held then is left out.
        """
        drawn = self._dropped + fresh + self._size - 1
        read = self._skipped + drawn * self._world if fresh else 0
        self._source.leave(None if ended else read)

    def interrupt(self) -> None:
        interrupt(self._whole)

    def clear(self) -> None:
        self._examples = self._whole = None
        self._buffer.clear()
        self._peeked = None

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
        at = int(self._fractions.at(self._drawn_count) * len(buffer))
        self._drawn_count += 1
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
        spent = time.perf_counter_ns() - began
        self._tally.add(HEAD, [spent, 1, 0, 0, 0, 0, pytree.data_bytes(example)])
        self._read += 1
        return done_item(example, self._read - 1, 0, 0, 1)


def _read_of(examples: Iterator[Any], selection: Selection, start: int) -> Iterator[Any]:
    """Return what this rank reads, before any shuffling; ``start`` were read before."""
    share, first = selection.share, selection.first
    behind = first.start + start if start else 0  # where the source begins
    stop = None if first.stop is None else max(0, first.stop - behind)
    examples = islice(examples, 0 if start else first.start, stop)
    if share is not None:
        if share.uneven:
            examples = islice(examples, share.rank, None, share.world)
        else:
            examples = _rounds(examples, share.rank, share.world)
        if not share.anew:
            examples = islice(examples, selection.between.start, selection.between.stop)
    return examples


def _handed_of(selection: Selection) -> Cut:
    """Return which of the examples that are drawn this rank hands out."""
    share, window, last = selection.share, selection.between, selection.last
    if share is not None:
        if not share.anew:
            return last
        stop = None if window.stop is None else share.count(window.stop)
        window = Cut(share.count(window.start), stop)
    if last.stop is not None:
        window = window.taken(last.stop)
    return window.skipped(last.start)


def _rounds(examples: Iterator[Any], rank: int, world: int) -> Iterator[Any]:
    while len(each := list(islice(examples, world))) == world:
        yield each[rank]
