"""The numbers of a segment's inputs on this rank: their places in the epoch, and in errors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stoker.engine.plan.address import WorkAddress
from stoker.engine.work.failure import SENDING, Failure
from stoker.errors import StageError, UnlikeError
from stoker.schedule.dealing import RankOrder, Stride
from stoker.schedule.orders.order import as_array
from stoker.sources.origin import IndexedSource
from stoker.stages.batching.user_collate import RowError


class InputAddresses:
    """Maps inputs to places (``schedule.orders.order``), and names them in failures.

    Each rank has other places. Without an order (streams and batches), ranks take turns.

    Args:
        address: the segment's address, with rank and world.
        source: the pipeline's source, if it is indexed: with ``order`` it names an example that
            failed.
        order: the epoch's order; None without an indexed source, where inputs are numbered anew,
            and in another process.
        are_batches: whether the inputs are batches.

    Attributes:
        index_before: returns the index of a fresh example of an earlier epoch that a pool holds,
            by its number, which is below 0; None if no pool holds any.
    """

    def __init__(
        self,
        address: WorkAddress,
        source: IndexedSource | None,
        order: RankOrder | None,
        *,
        are_batches: bool,
    ) -> None:
        self.index_before: Callable[[int], int] | None = None
        self._address = address
        self._source = source
        self._order = order
        self._are_batches = are_batches
        first = address.rank + (address.batches if are_batches else address.inputs)
        self._stride = Stride(first, address.world) if order is None else order.stride

    def without_order(self) -> InputAddresses:
        """Return the same without the order, which may be large, or be the user's."""
        twin = copy.copy(self)
        twin._order = twin.index_before = None
        return twin

    def places(self, ordinals: range | list[int]) -> Sequence[int]:
        """Return the places of inputs by their ordinals in this process.

        Inputs of an earlier epoch have ordinals, and places, below 0.
        """
        stride = self._stride
        if stride is not None:
            first, step = stride.first, stride.step
            if step == 1 and not first:
                return ordinals
            if isinstance(ordinals, range):
                return range(first + ordinals.start * step, first + ordinals.stop * step, step)
            if step == self._address.world:
                return [first + step * each for each in ordinals]
        assert self._order is not None
        rows = ordinals if isinstance(ordinals, range) else np.array(ordinals, np.int64)
        if isinstance(rows, range) or not len(rows) or rows.min() >= 0:
            found = self._order.places(rows)
        else:
            there = as_array(self._order.places(np.maximum(rows, 0)))
            found = np.where(rows < 0, self.batch_place(rows), there)
        places: list[int] = as_array(found).tolist()
        return places

    def batch_place(self, number: Any) -> Any:
        """Return the place of a batch, or of several, by its number on this rank."""
        return self._address.batches + number * self._address.world + self._address.rank

    def index_at(self, place: int) -> int:
        """Return the index of the example at a place."""
        assert self._order is not None
        return int(self._order.at(np.array([place], np.int64))[0])

    def error(
        self, stage: str, error: BaseException, place: int, batch: int | None = None
    ) -> StageError:
        """Return an error of a stage that names the input at a place."""
        address = self._address
        if self._are_batches:
            return StageError(stage, error, batch=(place - address.batches) // address.world)
        if self._order is None:
            return StageError(stage, error, number=place, batch=batch)
        if place >= 0:
            index = self.index_at(place)
        elif self.index_before is not None:
            index = self.index_before(place // address.world)
        else:
            return StageError(stage, error, batch=batch)
        assert self._source is not None
        return StageError(stage, error, index=index, path=self._source.path(index), batch=batch)

    def failure(self, stage: str, error: BaseException, place: int, account: int = 0) -> Failure:
        """Return an error of a stage as the failure of the input at a place."""
        return Failure(self.error(stage, error, place), self._address.at, account)

    def failure_behind(self, stage: str, error: Exception, ordinal: int) -> Failure:
        """Return an error in using a value after this segment as that value's failure."""
        (place,) = self.places([ordinal])
        return self.failure(stage, error, place)

    def copy_failure(self, error: Exception, place: int) -> Failure:
        """Return an error in copying a stored item for one of its uses as that use's failure."""
        return self.failure("echo (copying an item)", error, place)

    def send_failure(self, error: Exception, place: int) -> Failure:
        """Return an error in sending back a worker process's result as an example's failure."""
        return self.failure(SENDING, error, place)

    def batch_failure(
        self, stage: str, error: Exception, number: int, places: Sequence[int] = ()
    ) -> Failure:
        """Return an error in putting batch ``number`` together as its failure.

        ``places`` are those of its rows: a single one is to blame, else the error may name one.
        """
        row = 0 if len(places) == 1 else None
        if isinstance(error, (UnlikeError, RowError)):
            row = error.row
        if isinstance(error, RowError):
            error = error.error
        if row is not None and row < len(places):
            return Failure(self.error(stage, error, places[row], batch=number))
        return Failure(StageError(stage, error, batch=number))

    def add_index(self, failure: Failure) -> Failure:
        """Add the example's index to a failure from another process, which knew only its place."""
        error = failure.error
        if not isinstance(error, StageError) or error.number is None or self._order is None:
            return failure
        cause = error.__cause__
        assert cause is not None
        located = self.error(error.stage, cause, error.number, error.batch)
        return Failure(located, failure.part, failure.account)
