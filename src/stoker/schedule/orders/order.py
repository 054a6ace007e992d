"""Orders map the places of an epoch to numbers of the source: the protocol, and the plain ones.

A place is the number of a fresh example in the epoch over all ranks: 0, 1, 2, ... It is the address
of all random draws for that example. (In a mixture it stands for a part, and a number in the part:
``orders.mixed``.) An order is the same on every rank and knows no batches; which places are a
rank's is decided by a deal (``schedule.sharding``).

A short epoch is shuffled by a true permutation, a longer one than ``TRUE_PERMUTATION_LIMIT`` by a
keyed network, which takes no memory that grows with it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Places = range | NDArray[np.int64]
"""Places, or rows of a rank: a range costs nothing, however long."""


class Order(Protocol):
    """Maps places to numbers of the source. Safe to use from any thread.

    Attributes:
        together: how many places should be asked for at once, so that a call's own cost does not
            count; 0 where any number will do.
    """

    together: int

    def __len__(self) -> int:
        """Return how many places there are."""
        ...

    def at(self, places: Places) -> NDArray[np.int64]:
        """Return the numbers of the examples at these places, ``int64``; possibly a view."""
        ...


def as_array(places: Places) -> NDArray[np.int64]:
    """Return places as an array, ``int64``."""
    if isinstance(places, range):  # NumPy would go through it number by number
        return np.arange(places.start, places.stop, places.step, dtype=np.int64)
    return places


def offset_places(places: Places, by: int) -> Places:
    """Return places with a number added to each."""
    if isinstance(places, range):
        return range(places.start + by, places.stop + by, places.step)
    return places + by


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
        self.digest: str = getattr(within, "digest", "")

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


TRUE_PERMUTATION_LIMIT = 1 << 20
"""Up to this many examples an epoch is shuffled by a true permutation, which takes 8 MB."""


def permutation(length: int, key: NDArray[np.uint64] | None) -> Order:
    """Return a permutation by a key; without one, examples as they lie."""
    if key is None:
        return AsItLies(length)
    if length > TRUE_PERMUTATION_LIMIT:
        return Feistel(length, key)
    return ListedOrder(np.random.Generator(np.random.Philox(key=key)).permutation(length))


class Feistel:
    """A keyed permutation of ``range(n)`` in O(1) memory.

    A mixed-radix Feistel network over ``a * b >= n`` cells, walked until it lands below n.
    With a and b near the square root, less than one cell in a hundred is walked twice.
    """

    # Six rounds were still biased for five examples; even, as rounds come in pairs.
    ROUNDS = 8

    # 18 ns each; in blocks of 65,536, which leave the processor's caches, 41; in blocks of 256,
    # some 200; one alone takes 277 us.
    together = 1 << 14

    def __init__(self, n: int, key: NDArray[np.uint64]) -> None:
        self._n = n
        self._a = int(np.ceil(np.sqrt(n)))
        self._b = -(-n // self._a)
        generator = np.random.Generator(np.random.Philox(key=key))
        self._round_keys = generator.integers(0, 1 << 64, self.ROUNDS, dtype=np.uint64)

    def __len__(self) -> int:
        return self._n

    def at(self, places: Places) -> NDArray[np.int64]:
        out = self._once(as_array(places).astype(np.uint64))
        outside = np.flatnonzero(out >= self._n)
        while outside.size:
            out[outside] = self._once(out[outside])
            outside = outside[out[outside] >= self._n]
        return out.astype(np.int64)

    def _once(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        a, b = np.uint64(self._a), np.uint64(self._b)
        left = x // b
        right = x - left * b
        mixed, scratch = np.empty_like(x), np.empty_like(x)
        for number in range(0, self.ROUNDS, 2):
            first, second = self._round_keys[number : number + 2]
            _mix(right, first, mixed, scratch)
            _add(left, mixed, a, scratch)
            _mix(left, second, mixed, scratch)
            _add(right, mixed, b, scratch)
        left *= b
        left += right
        return left


Words = NDArray[np.uint64]


def _mix(x: Words, key: np.uint64, out: Words, scratch: Words) -> None:
    """Finalise as splitmix64 does; the top bits, so that sums stay clear of overflow."""
    np.bitwise_xor(x, key, out=out)
    np.right_shift(out, np.uint64(30), out=scratch)
    out ^= scratch
    out *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(out, np.uint64(27), out=scratch)
    out ^= scratch
    out *= np.uint64(0x94D049BB133111EB)
    np.right_shift(out, np.uint64(31), out=scratch)
    out ^= scratch
    out >>= np.uint64(16)


def _add(to: Words, what: Words, modulus: np.uint64, scratch: Words) -> None:
    """Add modulo a number, in place. NumPy divides ten times as fast as it takes a remainder."""
    to += what
    np.floor_divide(to, modulus, out=scratch)
    scratch *= modulus
    to -= scratch
