"""The batches' indices, in the order and at the times that the script's own settings would draw."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any


class BatchOrder:
    """The batches' indices: drawn ahead for workers, the end only when the script would draw it.

    A sampler with a generator draws once more at its end. A loop that breaks before it, or that
    uses the generator, must not find that drawn.
    """

    def __init__(self, sampler: Any, lead: int = 0, *, holds: bool = False) -> None:
        """``lead``: batches that the script's own settings draw ahead; ``holds``: whether the last
        batch, which may bring the sampler to its end, waits for its turn."""
        self._whole = iter(sampler)
        self._holds = holds
        try:
            self._length: int | None = len(sampler)
        except TypeError:
            self._length = None
        self._lead = lead
        self._drawn = self._passed = 0  # of the sampler, its end included; handed over
        self.copies: deque[Any] | None = None  # of what is given, for a second loader
        self._ahead: deque[Any] = deque()  # drawn, and not given to workers yet
        self._given: deque[Any] = deque()  # to workers, and not handed over yet
        self._source: BatchOrder | None = None
        # Of several iterators over this order, the one that is given batches; None: whoever asks.
        self.reader: Any = None

    def follow(self, other: BatchOrder) -> None:
        """Give the batches of another order from now on."""
        self._source = other

    def __iter__(self) -> Iterator[Any]:
        # PyTorch asks twice, and uses the second one.
        return _IndicesOfWorkers(self._source or self)

    def draw(self) -> Any:
        """Return the next batch's indices. Raises StopIteration."""
        if not self._ahead and self._drawn != self._length and not self._is_held():
            self._draw_one()
        if not self._ahead:
            raise StopIteration
        self._given.append(self._ahead.popleft())
        if self.copies is not None:
            self.copies.append(self._given[-1])
        return self._given[-1]

    def _is_held(self) -> bool:
        if not self._holds or self._length is None or self._drawn + 1 < self._length:
            return False
        return self._passed + max(1, self._lead) < self._length

    def has_starved(self) -> bool:
        """True if the workers have nothing to do, and a batch's turn has come."""
        if self._given or self._length is None:
            return False
        return bool(self._ahead) or self._drawn < self._length

    @property
    def has_given_none(self) -> bool:
        """True if all that was given has been handed over."""
        return not self._given

    @property
    def left(self) -> int:
        """The number of batches that are still to be handed over; 0 if it is unknown."""
        return 0 if self._length is None else self._length - self._passed

    @property
    def is_at_last(self) -> bool:
        """True if the batch whose turn it is is the last one."""
        return self._passed + 1 == self._length

    def pass_batch(self) -> None:
        """Note that a batch was handed over, or failed."""
        self._passed += 1
        self._given.popleft()
        self.keep_up()

    def keep_up(self) -> None:
        """Draw what would be drawn by now with the script's own settings."""
        if self._length is not None and self._lead:
            while self._drawn < min(self._length + 1, self._passed + self._lead):
                self._draw_one()

    def _draw_one(self) -> None:
        # By ``next()`` alone: ``iter()`` of Lightning's iterator for predictions starts it anew.
        self._drawn += 1
        with contextlib.suppress(StopIteration):
            self._ahead.append(next(self._whole))

    def has_more(self) -> bool:
        """Draw the end of the sampler; True if it gives more batches than it said."""
        if self._drawn == self._length:
            self._draw_one()
        return bool(self._ahead)

    def rest(self) -> BatchOrder:
        """Return the order of the batches that were not handed over."""
        whole = map(next, itertools.repeat(self._whole))
        return BatchOrder(itertools.chain(self._given, self._ahead, whole))


class _IndicesOfWorkers:
    def __init__(self, order: BatchOrder) -> None:
        self._order = order

    def __iter__(self) -> _IndicesOfWorkers:
        return self

    def __next__(self) -> Any:
        if self._order.reader not in (None, self):
            raise StopIteration
        return self._order.draw()
