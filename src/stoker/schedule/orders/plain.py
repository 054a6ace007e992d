"""Plain orders: by a list, as the examples lie, cut, or repeated at the end."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stoker.schedule.orders.order import Order, Places, as_array, offset_places


class ListedOrder:
    """An order by a list.

    Args:
        numbers: at each place; not copied.
        digest: tells a drawn order from others, ``DrawnOrder``.
    """

    together = 0

    def __init__(self, numbers: NDArray[np.integer], digest: str = "") -> None:
        self._numbers, self.digest = numbers, digest

    def __len__(self) -> int:
        return len(self._numbers)

    def at(self, places: Places) -> NDArray[np.int64]:
        if isinstance(places, range):
            stop = max(places.start, places.stop)
            return self._numbers[places.start : stop : places.step].astype(np.int64, copy=False)
        return self._numbers[places].astype(np.int64, copy=False)


class AsItLies:
    """Examples in the order of the source."""

    together = 0

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def at(self, places: Places) -> NDArray[np.int64]:
        return as_array(places)


class CutOrder:
    """Part of an order, of numbers that begin later.

    Args:
        within: the order.
        start: where in it this begins.
        first: what is added to its numbers.
    """

    def __init__(self, within: Order, start: int, first: int = 0) -> None:
        self._within, self._start, self._first = within, start, first
        self.together = within.together

    def __len__(self) -> int:
        return max(0, len(self._within) - self._start)

    def at(self, places: Places) -> NDArray[np.int64]:
        numbers = self._within.at(offset_places(places, self._start))
        return numbers + self._first if self._first else numbers


class RepeatedEnd:
    """An order whose last example also stands at all places behind it."""

    def __init__(self, within: Order) -> None:
        self._within = within
        self.together = within.together

    def __len__(self) -> int:
        return len(self._within)

    def at(self, places: Places) -> NDArray[np.int64]:
        return self._within.at(np.minimum(as_array(places), len(self._within) - 1))


class FixedPart:
    """One rank's part of the source, the same in every epoch but for what is left over.

    Ranks take turns at the places; ``.shard()`` before ``.shuffle()`` gives each an order of its
    own, so this alone of all orders knows its rank, and has only that rank's places.

    Args:
        within: the order of the part, over the rank's rows.
        world: how many ranks take turns.
        first, step: the part: examples ``first``, ``first + step``, ...
        left_out: the place in the part of the one example that this epoch leaves out, or None.
    """

    def __init__(
        self, within: Order, world: int, first: int, step: int, left_out: int | None
    ) -> None:
        self._within, self._world = within, world
        self._first, self._step = first, step
        self._left_out = left_out
        self.together = within.together

    def __len__(self) -> int:
        return len(self._within) * self._world

    def at(self, places: Places) -> NDArray[np.int64]:
        rows: Places
        if isinstance(places, range) and places.step == self._world:
            first = places.start // self._world
            rows = range(first, first + len(places))
        else:
            rows = as_array(places) // self._world
        found = self._within.at(rows)
        if self._left_out is not None:
            found = found + (found >= self._left_out)
        if self._step > 1:
            found = found * self._step
        return found + self._first if self._first else found


class FixedParts:
    """The parts of all ranks, where these are fixed and not shuffled: of ``FixedPart`` all ranks'.

    What the parts leave out comes behind them: other ranks that take the epoch over deal it, too.

    Args:
        length: how many examples there are.
        world: how many ranks take turns.
        epoch: says which of its examples a part that has one too many leaves out.
        first: what is added to the numbers.
    """

    together = 0

    def __init__(self, length: int, world: int, epoch: int, first: int = 0) -> None:
        self._each, self._over = divmod(length, world)
        self._world, self._first = world, first
        self._left_out = self._each - epoch % (self._each + 1)

    def __len__(self) -> int:
        return self._each * self._world + self._over

    def at(self, places: Places) -> NDArray[np.int64]:
        places = as_array(places)
        rows, ranks = np.divmod(places, self._world)
        is_behind = (ranks < self._over) & (rows >= self._left_out)
        found: NDArray[np.int64] = places + self._world * is_behind
        found = np.where(rows == self._each, ranks + self._world * self._left_out, found)
        return found + self._first
