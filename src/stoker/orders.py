"""The order of one epoch, and which part of it is a rank's.

Ordinals count what this process reads in an epoch, from 0; an order maps them to indices of the
source. Nothing here takes memory that grows with the epoch above ``TRUE_PERMUTATION_LIMIT``: up to
it an order is a permutation, above it a keyed Feistel network.

With ``.shuffle().shard()`` a rank reads every ``world``-th place of a permutation of all examples.
With ``.shard().shuffle()`` it reads a permutation of its own, fixed part. With
``.shuffle().shard(near=...)`` it reads what ``dealing`` gives it of each ``world * batch`` places.
Where a permutation is by blocks, a rank's part is a run of it, so that ranks read different blocks.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker import rng
from stoker.block_order import WINDOW, BlockOrder, cut_to
from stoker.dealing import Dealer, DealtOrder

TRUE_PERMUTATION_LIMIT = 1 << 20
"""Up to this many examples an epoch is shuffled by a true permutation."""

FEISTEL_BLOCK = 1 << 13
"""So many are mapped at a time: fewer cost more each, and more do not stay in the CPU's caches."""


class Order(Protocol):
    """Maps ordinals to indices. Pickles; safe to use from any thread."""

    def __len__(self) -> int: ...

    def span(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the indices of ordinals ``start .. stop - 1``, ``int64``; possibly a view."""
        ...

    def index(self, ordinal: int) -> int:
        """Return the index of one ordinal."""
        ...


class Permuted:
    """An order by a permutation, or as the source has it; or every ``stride``-th place of that.

    Args:
        length: how many indices there are.
        key: keys the permutation; None for none.
        first, stride: the places: ``first``, ``first + stride``, ...
        count: how many of them; by default all.
    """

    def __init__(
        self,
        length: int,
        key: NDArray[np.uint64] | None,
        first: int = 0,
        stride: int = 1,
        count: int | None = None,
    ) -> None:
        self._made_of = length, key, first, stride, count
        self._first, self._stride = first, stride
        self._count = len(range(first, length, stride)) if count is None else count
        self._permutation: NDArray[np.int64] | None = None
        self._feistel: _Feistel | None = None
        self._block: NDArray[np.int64] | None = None
        self._block_number = -1
        self._lock = threading.Lock()
        if key is None:
            return
        if length <= TRUE_PERMUTATION_LIMIT:
            generator = np.random.Generator(np.random.Philox(key=key))
            self._permutation = generator.permutation(length)
        else:
            self._feistel = _Feistel(length, key)

    def __reduce__(self) -> tuple[Any, ...]:
        return Permuted, self._made_of

    def __len__(self) -> int:
        return self._count

    def span(self, start: int, stop: int) -> NDArray[np.int64]:
        first, stride = self._first, self._stride
        low, high = first + start * stride, first + (stop - 1) * stride + 1
        if self._permutation is not None:
            return self._permutation[low : max(low, high) : stride]
        if self._feistel is None:
            return np.arange(low, high, stride)
        numbers = range(start // FEISTEL_BLOCK, (stop - 1) // FEISTEL_BLOCK + 1)
        parts = []
        for number in numbers:
            base = number * FEISTEL_BLOCK
            block = self._block_of(number)
            parts.append(block[max(start - base, 0) : stop - base])
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])

    def index(self, ordinal: int) -> int:
        place = self._first + ordinal * self._stride
        if self._permutation is not None:
            return int(self._permutation[place])
        if self._feistel is None:
            return place
        return int(self._feistel(np.array([place]))[0])

    def _block_of(self, number: int) -> NDArray[np.int64]:
        assert self._feistel is not None
        with self._lock:
            if self._block_number != number or self._block is None:
                base = number * FEISTEL_BLOCK
                numbers = np.arange(base, min(base + FEISTEL_BLOCK, self._count))
                self._block = self._feistel(self._first + numbers * self._stride)
                self._block_number = number
            return self._block


class FixedPart:
    """A rank's own part, the same in every epoch but for what is left over, in some order.

    The part is ``first``, ``first + stride``, ...; ``left_out`` is the place in it of the one
    example that this epoch leaves out, or None.
    """

    def __init__(self, within: Order, first: int, stride: int, left_out: int | None = None) -> None:
        self._within = within
        self._first, self._stride = first, stride
        self._left_out = left_out

    def __len__(self) -> int:
        return len(self._within)

    def span(self, start: int, stop: int) -> NDArray[np.int64]:
        places = self._within.span(start, stop)
        if self._left_out is not None:
            places = places + (places >= self._left_out)
        return places * self._stride + self._first

    def index(self, ordinal: int) -> int:
        return int(self.span(ordinal, ordinal + 1)[0])


@dataclass(frozen=True)
class Share:
    """Which part of an epoch is this process's.

    Attributes:
        rank, world: this process among so many.
        uneven: whether all examples are kept, so that parts may differ by one in length.
        anew: whether parts are drawn anew every epoch, rather than fixed.
        is_dealt: whether they are dealt inside the global batch, by who keeps what.
    """

    rank: int
    world: int
    uneven: bool
    anew: bool
    is_dealt: bool = False

    def count(self, length: int) -> int:
        """Return how many of so many examples are this rank's in an epoch."""
        if self.uneven:
            return len(range(self.rank, length, self.world))
        return length // self.world

    def run(self, length: int, *, whole: bool) -> int:
        """Return where a rank's run of so many begins, all of them shared out or equal runs."""
        each, over = divmod(length, self.world)
        return self.rank * each + (min(self.rank, over) if whole else 0)


@dataclass(frozen=True)
class Selection:
    """Which examples an epoch has on this rank, and in what order: shuffled, shared out, cut short.

    Attributes:
        is_shuffled: whether the order is drawn anew every epoch.
        share: which part of the epoch is this rank's, None for all of it.
        first: how many examples of the source there are at most, before all else.
        between: how many there are at most behind the first of shuffling and sharing out.
        last: how many there are at most behind both.
        blocks: where the order is drawn by blocks, their ends in the source.
    """

    is_shuffled: bool = False
    share: Share | None = None
    first: int | None = None
    between: int | None = None
    last: int | None = None
    blocks: NDArray[np.int64] | None = field(default=None, compare=False)

    @property
    def is_kept_by_streams(self) -> bool:
        """Whether the examples of a stream are handed out as they are read."""
        return not self.is_shuffled and self.share is None

    def shuffled(self, blocks: NDArray[np.int64] | None = None) -> Selection:
        """Return this, drawn anew every epoch; by blocks with these ends, or as a whole."""
        return replace(self, is_shuffled=True, blocks=blocks)

    @property
    def is_dealt(self) -> bool:
        """Whether ranks' parts are dealt by who keeps what."""
        return self.share is not None and self.share.is_dealt

    def goes_through(self, ends: NDArray[np.int64]) -> bool:
        """Whether examples come block by block, or few blocks at a time, of blocks with these ends.

        Otherwise those of any block come at any time.
        """
        if self.is_shuffled:
            by_these = self.blocks is not None and np.array_equal(self.blocks, ends)
            return by_these and not self.is_dealt
        return self.share is None

    def shared(self, rank: int, world: int, *, uneven: bool, dealt: bool = False) -> Selection:
        """Return a rank's part of this."""
        return replace(self, share=Share(rank, world, uneven, self.is_shuffled, dealt))

    def taken(self, count: int) -> Selection:
        """Return the first ``count`` examples of this."""
        if self.share is not None and self.is_shuffled:
            return replace(self, last=_least(self.last, count))
        if self.share is not None or self.is_shuffled:
            return replace(self, between=_least(self.between, count))
        return replace(self, first=_least(self.first, count))

    def count(self, length: int) -> int:
        """Return the examples of an epoch over a source of ``length``."""
        share, count = self.share, _least(self.first, length)
        if share is not None and not share.anew:
            count = share.count(count)
        count = _least(self.between, count)
        if share is not None and share.anew:
            count = share.count(count)
        return _least(self.last, count)

    def order(
        self,
        length: int,
        seed: int,
        epoch: int,
        dealer: Dealer | None = None,
        group: int = 1,
        purpose: int = rng.SHUFFLE,
    ) -> Order:
        """Return the order of one epoch over a source of ``length``.

        What is dealt is so by the owners of ``dealer``, ``group`` examples to a rank at a time.
        ``purpose`` tells the draws of the parts of a mixture apart.
        """
        share, count = self.share, self.count(length)
        length = _least(self.first, length)

        def key(rank: int) -> NDArray[np.uint64] | None:
            return rng.key(seed, epoch, purpose, rank) if self.is_shuffled else None

        if share is None:
            return self._permuted(length, key(0), count)
        rank, world = share.rank, share.world
        if share.is_dealt:
            assert dealer is not None
            return DealtOrder(self._permuted(length, key(0), count * world), dealer, rank, group)
        if share.anew and self.blocks is None:
            return Permuted(length, key(0), rank, world, count)
        if share.anew:
            first = share.run(_least(self.between, length), whole=share.uneven)
            return self._permuted(length, key(0), count, first)
        own = _least(self.between, share.count(length))
        all_of_it = len(range(rank, length, world))
        is_whole = own == share.count(length)
        left_out = epoch % all_of_it if is_whole and all_of_it > own else None
        if self.blocks is None:
            return FixedPart(Permuted(own, key(rank), count=count), rank, world, left_out)
        begins = share.run(length, whole=True)
        return FixedPart(self._permuted(own, key(rank), count, begins=begins), begins, 1, left_out)

    def _permuted(
        self,
        length: int,
        key: NDArray[np.uint64] | None,
        count: int,
        first: int = 0,
        begins: int = 0,
    ) -> Permuted | BlockOrder:
        """Return places of a permutation of examples ``begins ...``, by blocks if there are some.

        No more blocks than are drawn from at a time need no order of their own.
        """
        if self.blocks is not None and key is not None:
            ends = cut_to(self.blocks, begins, length)
            if len(ends) > WINDOW:
                return BlockOrder(ends, key, first, count)
        return Permuted(length, key, first, count=count)


def _least(limit: int | None, count: int) -> int:
    return count if limit is None else min(limit, count)


class _Feistel:
    """A keyed permutation of ``range(n)`` in O(1) memory.

    A mixed-radix Feistel network over ``a * b >= n`` cells, walked until it lands below n.
    With a and b near the square root, less than one cell in a hundred is walked twice.
    """

    ROUNDS = 8

    def __init__(self, n: int, key: NDArray[np.uint64]) -> None:
        self._n = n
        self._a = int(np.ceil(np.sqrt(n)))
        self._b = -(-n // self._a)
        generator = np.random.Generator(np.random.Philox(key=key))
        self._round_keys = generator.integers(0, 1 << 64, self.ROUNDS, dtype=np.uint64)

    def __call__(self, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        out = self._once(ordinals.astype(np.uint64))
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
