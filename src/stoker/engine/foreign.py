"""Streams that the consumer's own thread drives: a foreign loader, and a device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from stoker import pytree
from stoker.buffers import Recycler
from stoker.engine.filtering import FilteredStream
from stoker.engine.items import (
    HEAD,
    DrivenStream,
    HeadStream,
    Item,
    PulledStream,
    Ready,
    Stream,
    Tally,
    Use,
    WouldBlock,
    done_item,
    like,
)
from stoker.engine.padding_mask import PaddingMask
from stoker.engine.pool.threads import WorkerPool
from stoker.engine.work import Failure
from stoker.errors import StageError
from stoker.signals import pass_on
from stoker.sources.loader import LoaderSource
from stoker.stages.to import Mover
from stoker.stages.to_jax import JaxMover


class Direct:
    """Feeds a segment with each item of a stream once."""

    in_order = True
    follows = False

    def __init__(self, stream: Stream) -> None:
        self.upstream = stream
        self.total = stream.total
        self.blocking = stream.blocking

    @property
    def fresh(self) -> int:
        return self.upstream.fresh

    def together(self, count: int) -> int:
        return count

    def take(self, count: int) -> list[Use]:
        return [_only_use(item) for item in self.upstream.pull_many(count)]

    def recompute_uses(self, start: int, count: int) -> list[Use]:
        stop = start + count
        if isinstance(self.upstream, FilteredStream) and self.upstream.end is not None:
            stop = min(stop, self.upstream.end)
        return [_only_use(self.upstream.recompute(number)) for number in range(start, stop)]


def _only_use(item: Item) -> Use:
    item.scheduled, item.settled = 1, True
    return item, item.use_key, item.age


class LoaderStream(HeadStream):
    """The batches of a foreign loader, in its own order, pulled in the consumer's thread.

    Where a pool keeps them they are copied out first: the loader may refill its arrays, keep them
    for itself, or have them in memory that it shares with its workers.

    Args:
        source: the loader.
        keep: makes the copies, or None where none are needed.
        loaded, fresh: batches and rows before a resume: the loader begins behind them.
    """

    blocking = True

    def __init__(
        self,
        source: LoaderSource,
        tally: Tally,
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
        self._pulled = self._begun = loaded
        self._fresh = fresh
        self._failed: Exception | None = None  # while it was asked whether that is all
        self._errors: list[BaseException] = []
        self._source = source
        self._states: deque[tuple[int, Any]] = deque()  # the loader's, behind so many batches
        self._iterator = source.open()
        self._earlier: tuple[int, Any] = (loaded, source.before)  # from before those

    @property
    def fresh(self) -> int:
        return self._fresh

    def _taken(self, may_block: bool) -> Item | None:
        """Ask the loader; what it raises passes as it is, and it may be asked again."""
        if not may_block:
            raise WouldBlock(None)
        if self._failed is not None:
            failed, self._failed = self._failed, None
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
            batch = self._keep.copied(batch)
        rows = batch_rows(batch)
        spent = time.perf_counter_ns() - began
        self._tally.add(HEAD, [spent, rows, 0, 0, 0, 0, pytree.data_bytes(batch)])
        self._fresh += rows
        self._pulled += 1
        if self._source.takes_state:
            self._states.append((self._pulled, self._source.state()))
        return done_item(batch, self._pulled - 1, 0, self._fresh, rows)

    def poll(self, count: int) -> tuple[int, bool]:
        """Return whether a batch was looked at already: the loader is not asked."""
        return super().poll(count)[0], self._iterator is None

    def loaded_with(self, item: Item, loaded: int) -> int:
        return max(loaded, item.ordinal + 1)

    def has_ended(self) -> bool:
        """Return whether the loader is exhausted. A batch or error that this reads comes next."""
        if self._failed is not None:
            return False
        try:
            return self.peek() is None
        except Exception as error:
            self._failed = error
            return False

    def state_at(self, fresh: int, loaded: int) -> tuple[Any, int]:
        self.forget_before(fresh, loaded)
        return self._states[0][1] if self._states else None, loaded

    def forget_before(self, fresh: int, loaded: int) -> None:
        while self._states and self._states[0][0] < loaded:
            self._earlier = self._states.popleft()

    def leave(self, fresh: int, loaded: int, *, ended: bool) -> None:
        if ended:
            self._source.end()
        if ended or not self._source.takes_state or (loaded and loaded == self._begun):
            return
        self.forget_before(fresh, loaded)
        number, own = self._earlier
        place = None if own is None or not loaded else {"own": own, "skip": loaded - number}
        if loaded and place is None:
            self._source.end()
        else:
            self._source.leave(place, is_ahead=self._pulled > loaded)

    def has_raised(self, error: BaseException) -> bool:
        for at, own in enumerate(self._errors):
            if own is error:
                del self._errors[at]  # in place: the reading thread may add another
                return True
        return False

    def interrupt(self) -> None:
        interrupt(self._iterator)

    def clear(self) -> None:
        """Let go of the loader's iterator, which ends its workers."""
        self._iterator = self._peeked = None


class DeviceStream(DrivenStream):
    """Batches on a device, one of them under way while another is used."""

    blocking = True

    def __init__(
        self,
        upstream: PulledStream,
        mover: Mover | JaxMover,
        worker_pool: WorkerPool,
        mask: PaddingMask | None = None,
    ) -> None:
        super().__init__()
        self._upstream = upstream
        self._mask = mask
        self._mover = mover
        self._worker_pool = worker_pool
        self._under_way: deque[tuple[Item, Any]] = deque()
        self._next: Item | None = None
        self._over = False
        self._raised: Exception | None = None
        self.total = upstream.total

    @property
    def fresh(self) -> int:
        return self._upstream.fresh

    def poll(self, count: int) -> tuple[int, bool]:
        """Return whether a batch is on its way to the device (0 or 1), and whether none is left."""
        if self._peeked is None and not self._under_way:
            self._begin_early()
        ready = self._peeked is not None or bool(self._under_way) or self._raised is not None
        return int(ready), self._over and not ready

    def wait_for(self, count: int) -> None:
        """Return when a batch is on its way to the device, or none is left."""
        if self._peeked is None and not self._under_way and self._raised is None:
            self._begin(wait=True)

    @property
    def is_full(self) -> bool:
        """Whether there is no room for more on the host."""
        return self._upstream.is_full

    def ready_since(self) -> tuple[int, int | None]:
        """Return how many batches wait, on the host too, and since when there is no room there."""
        ready, since = self._upstream.ready_since()
        return ready + len(self._under_way), since

    def _taken(self, may_block: bool) -> Item | None:
        """Take the next batch on the device, and begin to move the one after it.

        The consumer alone asks, and may always wait.
        """
        if not self._under_way and not self._begin(wait=True):
            return None
        item, move = self._under_way.popleft()
        self._begin_early()
        value = move if type(move) is Failure else self._tried(move, item)
        return like(item, Ready(value), item.use_key, item.fresh)

    def usable_bytes(self) -> int:
        return self._mover.usable_bytes()

    def recompute(self, number: int) -> Item:
        item = self._upstream.recompute(number)
        self._worker_pool.wait(item.task)
        value = item.task.values[item.row]
        if type(value) is not Failure:
            value = self._tried(lambda: self._mover.start(value)(), item)
        return like(item, Ready(value), item.use_key, item.fresh)

    def _begin_early(self) -> None:
        """Start to move the next batch if the host has it; what that raises is raised in turn."""
        if self._raised is None:
            try:
                self._begin(wait=False)
            except Exception as error:
                pass_on(error)
                self._raised = error

    def _begin(self, *, wait: bool) -> bool:
        """Start to move the next batch; without ``wait`` only if the host has it ready."""
        if self._raised is not None:
            error, self._raised = self._raised, None
            raise error
        if self._next is None:
            try:
                self._next = self._upstream.pull(may_block=wait)
            except WouldBlock:
                return False
            self._over = self._next is None
        item = self._next
        if item is None or not (wait or item.task.done):
            return False
        self._worker_pool.wait(item.task)
        self._next = None
        value, item.task.values[item.row] = item.task.values[item.row], None
        if type(value) is not Failure:
            value = self._tried(lambda: self._mover.start(self._marked(value, item)), item)
        self._under_way.append((item, value))
        return True

    def _marked(self, value: Any, item: Item) -> Any:
        return value if self._mask is None else self._mask.added(value, item)

    def _tried(self, move: Callable[[], Any], item: Item) -> Any:
        try:
            return move()
        except StageError as error:
            return Failure(error)
        except Exception as error:
            pass_on(error)
            return Failure(StageError(self._mover.name, error, batch=item.ordinal))

    def clear(self) -> None:
        self._under_way.clear()
        self._next = self._peeked = None


def interrupt(iterator: Iterator[Any] | None) -> None:
    """Interrupt another thread that waits in ``next()`` of an iterator, if that can be done."""
    tell = getattr(iterator, "interrupt", None)
    if tell is not None:
        tell()


def batch_rows(batch: Any) -> int:
    """Return how many examples a batch holds: the length of its first array, or else list."""
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
