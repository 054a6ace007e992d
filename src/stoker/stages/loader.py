"""A user's loader: ready batches, in its own order, and its passes as heads of an epoch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from stoker.basics import pytree
from stoker.basics.buffers import Recycler
from stoker.distributed.unsharded import warn_unsharded_loader
from stoker.engine.heads import HeadSource, SequentialStream
from stoker.engine.items import HEAD, EpochCounters, Item, WouldBlock, done_item
from stoker.engine.setup import EpochSetup
from stoker.errors import StateError
from stoker.sources.passes import ReiterableStream, StreamState, interrupt, is_iterable_dataset
from stoker.stages.stage import ChainView


class LoaderSource(HeadSource):
    """Any re-iterable of ready batches, with the user's settings, one epoch at a time.

    ``before`` is its own state before the present pass, None where it is unknown.
    """

    yields_batches = True

    def __init__(self, loader: Any) -> None:
        self._passes = ReiterableStream(loader, "from_loader", "batches")
        self._stream_state = StreamState(loader, self._passes.open)
        self.loader = loader
        self.before: Any = None
        self._has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")

    @property
    def name(self) -> str:
        return self._passes.name

    @property
    def takes_state(self) -> bool:
        """True if it seems to have its own state; only taking one shows it for certain."""
        return self._has_state

    @property
    def is_counted(self) -> bool:
        """True if its length is reliable: an ``IterableDataset`` may report a wrong one."""
        counted = hasattr(self.loader, "__len__")
        return counted and not is_iterable_dataset(getattr(self.loader, "dataset", None))

    def count(self) -> int:
        return len(self.loader)

    def open(self) -> Iterator[Any]:
        """Begin a pass. Resets an iterator that has ``reset`` and does not reset itself."""
        if self._has_state:
            self._stream_state.put_back()
            self.before = self._stream_state.before()
        iterator = self._passes.open()
        return _Resetting(iterator) if iterator is self.loader else iterator

    def state(self) -> Any:
        """Return the loader's own state; None if it has none, whatever methods it has.

        (accelerate's wrapper has them around a plain ``DataLoader`` too, and they raise
        AttributeError there.)
        """
        if self._has_state:
            try:
                return self.loader.state_dict()
            except AttributeError:
                self._has_state = False
        return None

    def state_between(self, *, left: bool) -> Any:
        return None if left else self.state()

    def leave(self, place: dict[str, Any] | None, *, is_ahead: bool) -> None:
        self._stream_state.leave(place, is_ahead=is_ahead)

    def end(self) -> None:
        self._stream_state.end()

    def load(self, state: Any) -> None:
        self._stream_state.end()
        self.loader.load_state_dict(state)

    def check_state(self, chain: ChainView) -> None:
        if not self._has_state:
            what = "a pass" if chain.flows else "an epoch"
            when = "after the last batch of an epoch" if chain.flows else "between epochs"
            raise StateError(
                f"{what} over a loader has no state in its middle, because its batches cannot be "
                f"made again: save {when}, use torchdata's StatefulDataLoader, or build on "
                "from_dataset(loader.dataset)"
            )
        if chain.has_fixed_echo:
            raise StateError(
                "in the middle of a pass over a loader, the pool of a fixed factor cannot be made "
                f"again: {'leave .repeat() out and ' if chain.flows else ''}save between epochs, "
                'or take .echo("auto"), whose pool may begin empty'
            )

    def attribute(self, name: str) -> Any:
        return super().attribute(name) if name == "class_names" else getattr(self.loader, name)

    def extent(self) -> str:
        return "read as its owner set it up"

    def head(self, setup: EpochSetup, tally: EpochCounters) -> LoaderHead:
        position, keep = setup.position, setup.recycler if setup.flow.echo else None
        if position.loader_state is not None:
            self.load(position.loader_state)
        return LoaderHead(self, tally, keep, loaded=position.loaded, fresh=position.fresh)

    def warn_unsharded(self, *, is_sharded: bool) -> None:
        """Warn if there are several ranks and the loader is not sharded."""
        warn_unsharded_loader(self.loader)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(epoch)
            return
        within = getattr(self.loader, "batch_sampler", None)
        samplers = getattr(self.loader, "sampler", None), getattr(within, "sampler", None)
        for sampler in {id(each): each for each in samplers}.values():
            tell = getattr(sampler, "set_epoch", None)  # DistributedSampler's
            if tell is not None:
                tell(epoch)


class _Resetting(Iterator[Any]):
    """An epoch of an iterator that starts over when it is reset (DALI's)."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            # DALI's iterators; those that reset themselves would skip an epoch.
            if getattr(self._iterator, "_auto_reset", "no") != "yes":
                self._iterator.reset()
            raise


class LoaderHead(SequentialStream):
    """The batches of a foreign loader, in its own order, pulled in the consumer's thread.

    If a pool keeps them they are copied first (``keep``): the loader may refill its arrays, keep
    them, or share their memory with its workers. It begins after ``loaded`` batches, ``fresh``
    rows.
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
        rows = pytree.batch_rows(batch)
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
        return max(loaded, item.place + 1)

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
