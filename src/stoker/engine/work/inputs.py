"""The places of a segment's inputs in the epoch, and their names in errors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np

from stoker.engine.plan.address import WorkAddress
from stoker.engine.work.failure import SENDING, Failure
from stoker.errors import StageError, UnlikeError
from stoker.schedule.dealing import RankOrder
from stoker.sources.origin import IndexedSource
from stoker.stages.batching.user_collate import RowError


class InputAddresses:
    """Tells the places of fresh examples (``schedule.orders.order``), and names inputs in failures.

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

    def without_order(self) -> InputAddresses:
        """Return the same without the order, which may be large, or be the user's."""
        twin = copy.copy(self)
        twin._order = twin.index_before = None
        return twin

    def places(self, rows: range) -> Sequence[int]:
        """Return the places of fresh examples by their numbers on this rank."""
        assert self._order is not None
        found = self._order.places(rows)
        return found if isinstance(found, range) else found.tolist()

    def index_at(self, place: int) -> int:
        """Return the index of the example at a place."""
        assert self._order is not None
        return int(self._order.at(np.array([place], np.int64))[0])

    def error(
        self, stage: str, error: BaseException, place: int, batch: int | None = None
    ) -> StageError:
        """Return an error of a stage that names the input at a place."""
        if self._are_batches:
            return StageError(stage, error, batch=self._address.batch_number(place))
        if self._order is None:
            return StageError(stage, error, number=place, batch=batch)
        if place >= 0:
            index = self.index_at(place)
        elif self.index_before is not None:
            index = self.index_before(self._address.batch_number(place))
        else:
            return StageError(stage, error, batch=batch)
        assert self._source is not None
        return StageError(stage, error, index=index, path=self._source.path(index), batch=batch)

    def failure(self, stage: str, error: BaseException, place: int, account: int = 0) -> Failure:
        """Return an error of a stage as the failure of the input at a place."""
        return Failure(self.error(stage, error, place), self._address.at, account)

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
