"""Streams of examples: iterables without access by index, and their passes as heads of an epoch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from copy import deepcopy
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree
from stoker.basics.signals import pass_on
from stoker.engine.heads import HeadSource, SequentialStream
from stoker.engine.items import HEAD, EpochCounters, Item, done_item
from stoker.engine.setup import EpochSetup
from stoker.engine.work.step import ENDED, Failure
from stoker.errors import StageError, StateError
from stoker.schedule import rng
from stoker.schedule.rng import UniformAt
from stoker.schedule.selection import Cut, Selection
from stoker.sources.passes import (
    ReiterableStream,
    StatefulPass,
    StateLog,
    StreamState,
    has_state,
    interrupt,
    validate_state,
)
from stoker.stages.stage import ChainView


class IterableSource(HeadSource):
    """A stream of examples, in its own order. Saves its state if it, or its iterator, has one."""

    is_counted = False  # it may end earlier or later than its ``len()``

    def __init__(self, examples: Any) -> None:
        self._passes = ReiterableStream(examples, "from_iterable", "examples")
        self._given = examples
        # One that is its own iterator gets its state as an iterator does, once it is begun.
        self._has_state = has_state(examples) and not isinstance(examples, Iterator)
        self._iterators_have: bool | None = None  # the first pass tells
        self._stream_state = StreamState(examples, self._passes.open)
        self._log: StateLog | None = None  # of the present pass
        self._first_state: Any = None  # from before any other was loaded

    @property
    def name(self) -> str:
        return self._passes.name

    @property
    def takes_state(self) -> bool:
        return self._has_state or self._iterators_have is not False

    def count(self) -> int:
        """Return the ``len()`` of the iterable, which nobody checks. Raises TypeError without."""
        try:
            return len(self._given)
        except Exception as error:  # it has none, or does not know it
            raise TypeError(
                "a stream has no length before it ends; .steps(n) gives it one"
            ) from error

    def open(self, epoch: int, saved: Any = None, number: int = 0) -> Iterator[Any]:
        """Begin a pass: at its beginning, or after ``number`` examples in a saved state.

        With ``saved`` and no ``number``, the consumer of another process left its pass there, and
        the next pass begins. Raises StateError for an invalid state.
        """
        saved = None if saved is None else validate_state(saved, number)
        self.set_epoch(epoch)
        if not self._has_state:
            return self._open_iterator(saved, number)
        if saved is not None and not number:
            self._stream_state.restore(saved)
            saved = None
        before = None
        if saved is not None:
            if self._first_state is None and hasattr(self._given, "set_epoch"):
                self._first_state = self._given.state_dict()
            self._given.load_state_dict(saved["own"])
        elif self._first_state is not None:
            # Hugging Face's begins each pass over the same epoch at what was loaded last.
            self._given.load_state_dict(self._first_state)
        else:
            self._stream_state.put_back()
            before = self._stream_state.before()
        self._log = StateLog(saved, number, before)
        return StatefulPass(self._given, self._passes.open(), self._log)

    def _open_iterator(self, saved: Any, number: int) -> Iterator[Any]:
        """Begin a pass; where its iterator has a state, as datasets of torchdata do, at that."""
        examples = self._passes.open()
        self._iterators_have = has_state(examples)
        if not self._iterators_have:
            if saved is not None:
                raise StateError(f"a stream's state is in it, and {self.name} has none")
            return examples
        own: Any = examples
        if saved is not None:
            own.load_state_dict(saved["own"])
        self._log = StateLog(saved or {"own": deepcopy(own.state_dict()), "skip": 0}, number)
        return StatefulPass(own, examples, self._log)

    def leave(self, number: int | None) -> None:
        """Record that the consumer left the pass after this many examples; None: at its end."""
        log = self._log
        if log is None or not self._has_state:
            return
        place = log.end() if number is None else log.place(number)
        if number is None:  # a stream that is told the epoch needs no more
            self._stream_state.end(None if hasattr(self._given, "set_epoch") else place)
        elif number and place is None:
            self._stream_state.end()
        elif number > log.number or not number:
            self._stream_state.leave(place, is_ahead=log.read > (number or 0))

    def state_between(self, *, left: bool) -> Any:
        return self._stream_state.place

    def state(self, number: int) -> Any:
        return None if self._log is None else self._log.state(number)

    def forget_before(self, number: int) -> None:
        if self._log is not None:
            self._log.forget_before(number)

    def check_state(self, chain: ChainView) -> None:
        """Refuse to save in the middle of an epoch if left-out examples could not be restored."""
        if not self.takes_state:
            raise StateError(
                "an epoch over a stream has no state in its middle, because its examples cannot "
                "be read again: save between epochs, or use a source with an index"
            )
        kept = chain.selection.is_kept_by_streams
        if chain.has_fixed_echo or chain.may_leave_out or not kept:
            in_the_way = [
                stage.name for stage in chain.stages if (t := stage.traits).filters or t.skips
                or t.joins or t.repeats or t.shuffles or (t.shards and not kept)
            ]  # fmt: skip
            raise StateError(
                f"in the middle of an epoch of {self.name}, what "
                f"{', '.join(in_the_way) or 'max_errors='} holds or has left out cannot be made "
                "again: save between epochs, let the stream itself do this, or, of an echo, take "
                '.echo("auto"), whose pool may begin empty'
            )

    def check_leg(self, selection: Selection) -> None:
        """Accept a stream that all ranks read to the same place, at which its state was taken."""
        if not self.takes_state:
            super().check_leg(selection)

    def extent(self) -> str:
        length = "no length"
        with contextlib.suppress(TypeError):
            length = f"{self.count():,} examples, as it says"
        if self._has_state or self._iterators_have:
            return f"a stream with a state of its own: {length}"
        return f"a stream: {length}, no state in the middle of an epoch"

    def head(self, setup: EpochSetup, tally: EpochCounters) -> IterableHead:
        position, selection = setup.position, setup.flow.orders.selection
        rank = 0 if selection.share is None else selection.share.rank
        read = selection.read_of_stream(position.fresh)
        examples = self.open(setup.epoch, position.loader_state, read)
        key = rng.key(setup.seed, setup.epoch, rng.SHUFFLE, rank)
        return IterableHead(self, examples, selection, selection.buffer, key, tally, position.fresh)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._given, "set_epoch"):
            self._given.set_epoch(epoch)


class IterableHead(SequentialStream):
    """One pass over an iterable. Read by the planner, so by one thread at a time.

    Even parts are handed out a round at a time, an example for every rank, so that all ranks get
    equally many. ``buffer`` examples are shuffled among each other, by ``key``. This rank has drawn
    ``start`` examples before: those of all ranks, and of earlier legs, come before ``examples``.
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
        self._fractions = UniformAt(key)
        self._buffer: list[Item] = []
        self._read = start
        self._outputs = start
        self._failure: Item | None = None
        share, leg = selection.share, selection.leg
        self._rank, self._world = (0, 1) if share is None else (share.rank, share.world)
        self._before = 0 if leg is None else leg.before.fresh_examples  # of all ranks
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
        """Tell the source how much was read; examples that a shuffle buffer held are lost."""
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
            self._failure = done_item(failure, self._place(self._read), 0, 1)
            return None
        spent = time.perf_counter_ns() - began
        self._tally.add(HEAD, [spent, 1, 0, 0, 0, 0, pytree.data_bytes(example)])
        self._read += 1
        return done_item(example, self._place(self._read - 1), 0, 1)

    def _place(self, number: int) -> int:
        return self._before + number * self._world + self._rank


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
