"""Streams that the consumer's own thread drives: a loader, an iterable, a device copy."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree
from stoker.basics.buffers import Recycler
from stoker.basics.signals import pass_on
from stoker.engine.items import (
    HEAD,
    EpochCounters,
    HeadStream,
    Inputs,
    Item,
    ItemUses,
    Stream,
    WouldBlock,
    done_item,
)
from stoker.engine.work.failure import ENDED, Failure
from stoker.errors import StageError
from stoker.schedule.rng import Fractions
from stoker.schedule.selection import Cut, Selection
from stoker.sources.iterable import IterableSource
from stoker.sources.loader import LoaderSource


class IterableHead(HeadStream):
    """One pass over an iterable. Read by the planner, so by one thread at a time.

    Args:
        source: the iterable; ``examples``: the pass over it.
        selection: this rank's examples. Even parts are handed out a round at a time, an example for
            every rank, so that all ranks get equally many.
        buffer: how many examples are shuffled among each other; 1 keeps the order.
        key: keys the shuffling.
        start: how many examples this rank has drawn of the pass before; those of all ranks, and of
            earlier legs, come before the first of ``examples`` then.
    """

    def __init__(
        self,
        source: IterableSource,
        examples: Iterator[Any],
        selection: Selection,
        buffer: int,
        key: NDArray[np.uint64],
        tally: EpochCounters,
        start: int = 0,
    ) -> None:
        super().__init__()
        self._name = source.name
        self._source = source
        self._whole: Iterator[Any] | None = examples
        self._selection = selection
        self._examples: Iterator[Any] | None = _read_selection(examples, selection, start)
        cut = _handed_selection(selection)
        self._to_drop = self._drop_count = cut.start
        self._left = None if cut.stop is None else max(0, cut.stop - cut.start)
        self._drawn_count = start
        self._size = buffer
        self._tally = tally
        tally.open(HEAD, [source.name])
        self._fractions = Fractions(key)
        self._buffer: list[Item] = []
        self._read = start
        self._outputs = start
        self._failure: Item | None = None
        if self._left is not None:
            self._left -= start

    @property
    def fresh(self) -> int:
        return self._outputs

    def _take(self, may_block: bool) -> Item | None:
        """Return the next example; an error of the iterable becomes a failure."""
        if self._left is not None:
            if self._left <= 0:
                return None
            self._left -= 1
        item = self._draw()
        while self._to_drop and item is not None and type(item.task.values[0]) is not Failure:
            self._to_drop -= 1
            item = self._draw()
        if item is not None:
            self._outputs += 1
            item.fresh = self._outputs
        return item

    def has_ended(self) -> bool:
        """Return True: callers ask only if the length is known beforehand."""
        return True

    def state_at(self, fresh: int, loaded: int) -> tuple[Any, int]:
        """Return the source's own state after so many examples; None if it has none."""
        if not self._source.takes_state:
            return None, loaded
        return self._source.state(self._read_count(fresh)), fresh

    def forget_states(self, fresh: int, loaded: int) -> None:
        self._source.forget_before(self._read_count(fresh))

    def leave(self, fresh: int, loaded: int, *, ended: bool) -> None:
        """Tell the source how much was read when the consumer's last example was drawn.

        Examples that a shuffle buffer held then are lost.
        """
        self._source.leave(None if ended else self._read_count(fresh))

    def _read_count(self, fresh: int) -> int:
        """Return how many examples of the source are read when so many are handed out."""
        drawn = fresh and fresh + self._drop_count
        return self._selection.read_of_stream(drawn, self._size)

    def interrupt(self) -> None:
        interrupt(self._whole)

    def clear(self) -> None:
        self._examples = self._whole = None
        self._buffer.clear()
        self._next_item = None

    def _draw(self) -> Item | None:
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
        if not buffer:  # an error of the iterable comes after all examples before it
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
            number = self._selection.read_of_stream(self._read)
            number -= self._selection.first.start if number else 0  # as other stages count them
            failure = Failure(StageError(self._name, error, number=number), ENDED)
            self._failure = done_item(failure, self._read, 0, 1)
            return None
        spent = time.perf_counter_ns() - began
        self._tally.add(HEAD, [spent, 1, 0, 0, 0, 0, pytree.data_bytes(example)])
        self._read += 1
        return done_item(example, self._read - 1, 0, 1)


def _read_selection(examples: Iterator[Any], selection: Selection, start: int) -> Iterator[Any]:
    """Return the cut that this rank reads, before any shuffling; it has drawn ``start`` before."""
    share, first = selection.share, selection.first
    behind = selection.read_of_stream(start)  # where the source starts
    stop = None if first.stop is None else max(0, first.stop - behind)
    examples = islice(examples, 0 if behind else first.start, stop)
    if share is not None:
        if share.uneven:
            examples = islice(examples, share.rank, None, share.world)
        else:
            examples = _rounds(examples, share.rank, share.world)
        if not share.anew:
            rows = selection.between.skip(start)
            gone = rows.start if start else 0  # before the first of ``examples``
            stop = None if rows.stop is None else max(0, rows.stop - gone)
            examples = islice(examples, rows.start - gone, stop)
    return examples


def _handed_selection(selection: Selection) -> Cut:
    """Return the cut of the drawn examples that this rank hands out."""
    share, window, last = selection.share, selection.between, selection.last
    if share is not None:
        if not share.anew:
            return last
        stop = None if window.stop is None else share.count(window.stop)
        window = Cut(share.count(window.start), stop)
    if last.stop is not None:
        window = window.take(last.stop)
    return window.skip(last.start)


def _rounds(examples: Iterator[Any], rank: int, world: int) -> Iterator[Any]:
    while len(each := list(islice(examples, world))) == world:
        yield each[rank]


class Direct(Inputs):
    """The items of a stream as the inputs of a segment, each once."""

    in_order = True
    follows = False

    def __init__(self, stream: Stream) -> None:
        self.upstream: Stream = stream
        self.total = stream.total
        self.blocking = stream.blocking

    @property
    def fresh(self) -> int:
        return self.upstream.fresh

    def together(self, count: int) -> int:
        return count

    def take(self, count: int) -> ItemUses:
        return _only_uses(self.upstream.pull_many(count))

    def recompute_uses(self, start: int, count: int) -> ItemUses:
        stop = start + count
        if self.upstream.end is not None:
            stop = min(stop, self.upstream.end)
        return _only_uses(map(self.upstream.recompute, range(start, stop)))


def _only_uses(found: Iterable[Item]) -> ItemUses:
    items = list(found)
    for item in items:
        item.scheduled, item.settled = 1, True
    return ItemUses(
        items,
        [item.ordinal for item in items],
        [item.use for item in items],
        [item.age for item in items],
    )


class LoaderHead(HeadStream):
    """The batches of a foreign loader, in its own order, pulled in the consumer's thread.

    If a pool keeps them they are copied first: the loader may refill its arrays, keep them, or
    share their memory with its workers.

    Args:
        source: the loader.
        keep: makes the copies; None if none are needed.
        loaded, fresh: batches and rows before a resume: the loader begins after them.
    """

    blocking = True

    def __init__(
        self,
        source: LoaderSource,
        tally: EpochCounters,
        keep: Recycler | None,
        *,
        loaded: int = 0,
        fresh: int = 0,
    ) -> None:
        super().__init__()
        self._keep = keep
        self._iterator: Iterator[Any] | None = None
        self._name = source.name
        self._tally = tally
        tally.open(HEAD, [source.name])
        self._has_pulled = self._has_begun = loaded
        self._fresh = fresh
        self._has_failed: Exception | None = None  # raised while it was asked for its end
        self._errors: list[BaseException] = []
        self._source = source
        self._states: deque[tuple[int, Any]] = deque()  # the loader's, by the number of batches
        self._iterator = source.open()
        self._earlier: tuple[int, Any] = (loaded, source.before)  # the state before all of these

    @property
    def fresh(self) -> int:
        return self._fresh

    def _take(self, may_block: bool) -> Item | None:
        """Return the loader's next batch. Its errors pass unchanged, and it may be asked again."""
        if not may_block:
            raise WouldBlock(None)
        if self._has_failed is not None:
            failed, self._has_failed = self._has_failed, None
            raise failed
        if self._iterator is None:
            return None
        began = time.perf_counter_ns()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._iterator = None
            return None
        except Exception as error:
            self._errors.append(error)
            raise
        if self._keep is not None:
            batch = self._keep.copy(batch)
        rows = batch_rows(batch)
        spent = time.perf_counter_ns() - began
        self._tally.add(HEAD, [spent, rows, 0, 0, 0, 0, pytree.data_bytes(batch)])
        self._fresh += rows
        self._has_pulled += 1
        if self._source.takes_state:
            self._states.append((self._has_pulled, self._source.state()))
        return done_item(batch, self._has_pulled - 1, self._fresh, rows)

    def poll(self, count: int) -> tuple[int, bool]:
        """Return whether a batch was peeked at already. The loader is not asked."""
        return super().poll(count)[0], self._iterator is None

    def loaded_with(self, item: Item, loaded: int) -> int:
        return max(loaded, item.ordinal + 1)

    def has_ended(self) -> bool:
        """True if the loader is exhausted. A batch or error that this reads comes next."""
        if self._has_failed is not None:
            return False
        try:
            return self.peek() is None
        except Exception as error:
            self._has_failed = error
            return False

    def state_at(self, fresh: int, loaded: int) -> tuple[Any, int]:
        self.forget_states(fresh, loaded)
        return self._states[0][1] if self._states else None, loaded

    def forget_states(self, fresh: int, loaded: int) -> None:
        while self._states and self._states[0][0] < loaded:
            self._earlier = self._states.popleft()

    def leave(self, fresh: int, loaded: int, *, ended: bool) -> None:
        if ended:
            self._source.end()
        if ended or not self._source.takes_state or (loaded and loaded == self._has_begun):
            return
        self.forget_states(fresh, loaded)
        number, own = self._earlier
        place = None if own is None or not loaded else {"own": own, "skip": loaded - number}
        if loaded and place is None:
            self._source.end()
        else:
            self._source.leave(place, is_ahead=self._has_pulled > loaded)

    def has_raised(self, error: BaseException) -> bool:
        for at, own in enumerate(self._errors):
            if own is error:
                del self._errors[at]  # in place: the reading thread may add another
                return True
        return False

    def interrupt(self) -> None:
        interrupt(self._iterator)

    def clear(self) -> None:
        """Drop the loader's iterator, which ends its workers."""
        self._iterator = self._next_item = None


def interrupt(iterator: Iterator[Any] | None) -> None:
    """Interrupt another thread that waits in ``next()`` of an iterator, if possible."""
    tell = getattr(iterator, "interrupt", None)
    if tell is not None:
        tell()


def batch_rows(batch: Any) -> int:
    """Return the number of examples in a batch: the length of its first array, or else list."""
    for leaf in pytree.leaves(batch):
        is_array = isinstance(leaf, np.ndarray) or pytree.is_tensor(leaf)
        if is_array or pytree.is_jax_array(leaf):
            return int(leaf.shape[0]) if leaf.ndim else 1
    return _list_rows(batch) or 1


def _list_rows(value: Any) -> int:
    parts = pytree.children(value)
    if parts is None:
        return 0
    if isinstance(value, list) and all(pytree.children(child) is None for _, child in parts):
        return len(value)
    return next((rows for rows in (_list_rows(child) for _, child in parts) if rows), 0)
