"""The order of one epoch, and which part of it is a rank's.

Ordinals count what this process reads in an epoch, from 0; an order maps them to indices of the
source. Nothing here takes memory that grows with the epoch above ``TRUE_PERMUTATION_LIMIT``: up to
it an order is a permutation, above it a keyed Feistel network.

With ``.shuffle().shard()`` a rank reads every ``world``-th place of a permutation of all examples.
With ``.shard().shuffle()`` it reads a permutation of its own, fixed part. With
``.shuffle().shard(near=...)`` it reads what ``dealing`` gives it of each ``world * batch`` places.
With ``.shard(pad=True)`` it reads a run of these, and the last example again where there are none.
Where a permutation is by blocks, a rank's part is a run of it, so that ranks read different blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.schedule import rng
from stoker.schedule.block_order import WINDOW, BlockOrder, cut_to
from stoker.schedule.dealing import Dealer, DealtOrder, Order

TRUE_PERMUTATION_LIMIT = 1 << 20
"""Up to this many examples an epoch is shuffled by a true permutation: 14 ns an index and 8 MB,
where a Feistel network takes 35 ns."""

# Indices computed at once: 35 ns each; in blocks of 256, 164 to 265 ns.
FEISTEL_BLOCK = 1 << 16


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
class PaddedDeal:
    """A deal: which places of a global batch are a rank's rows. Here neighbours, padded at the end.

    A global batch, what all ranks have in a step, is dealt in equal runs, rank by rank. So what
    they gather is in the epoch's order. In the last one the runs are as short as holds all that is
    left, or as long as ever; places behind the epoch's end are padding, and come last.

    Attributes:
        rank, world: this rank among so many.
        each: its rows of a global batch.
        fills: whether they are as many in the last one.
    """

    rank: int
    world: int
    each: int = 1
    fills: bool = False

    def rows(self, length: int) -> int:
        """Return the rows that each rank has of an epoch of so many places."""
        if self.fills:
            return -(-length // (self.world * self.each)) * self.each
        return -(-length // self.world)

    def remainder(self, length: int) -> int:
        """Return how many places the last global batch holds; 0 if it is full."""
        return length % (self.world * self.each)

    def places(self, rows: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Return the places of this rank's rows, ``int64``; from ``length`` on they are padding."""
        batch, row = np.divmod(rows, self.each)
        run = np.minimum(self.each, self.rows(length) - batch * self.each)
        places: NDArray[np.int64] = batch * (self.each * self.world) + self.rank * run + row
        return places


class PaddedOrder:
    """The order of an epoch that is dealt with padding: examples as they lie, the last one again.

    Args:
        deal: whose rows are which places.
        length: how many examples there are, over all ranks; ``first``: the first of them.
    """

    def __init__(self, deal: PaddedDeal, length: int, first: int) -> None:
        self._deal, self._length, self._first = deal, length, first

    def __len__(self) -> int:
        return self._deal.rows(self._length)

    def span(self, start: int, stop: int) -> NDArray[np.int64]:
        return self._first + np.minimum(self._places(start, stop), self._length - 1)

    def index(self, ordinal: int) -> int:
        return int(self.span(ordinal, ordinal + 1)[0])

    def valid(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return which of the ordinals ``start .. stop - 1`` are not padding."""
        return self._places(start, stop) < self._length

    @property
    def remainder(self) -> int:
        """How many examples the last global batch holds; 0 if it is full."""
        return self._deal.remainder(self._length)

    def _places(self, start: int, stop: int) -> NDArray[np.int64]:
        return self._deal.places(np.arange(start, stop), self._length)


@dataclass(frozen=True)
class Share:
    """Which part of an epoch is this process's.

    Attributes:
        rank, world: this process among so many.
        uneven: whether all examples are kept, so that parts may differ by one in length.
        anew: whether parts are drawn anew every epoch, rather than fixed.
        is_dealt: whether they are dealt inside the global batch, by who keeps what.
        padded: how they are dealt with padding, so that equal parts hold all examples.
    """

    rank: int
    world: int
    uneven: bool
    anew: bool
    is_dealt: bool = False
    padded: PaddedDeal | None = None

    def count(self, length: int) -> int:
        """Return how many of so many examples are this rank's in an epoch, with padding."""
        if self.padded is not None:
            return self.padded.rows(length)
        if self.uneven:
            return len(range(self.rank, length, self.world))
        return length // self.world

    def run(self, length: int, *, whole: bool) -> int:
        """Return where a rank's run of so many begins, all of them shared out or equal runs."""
        each, over = divmod(length, self.world)
        return self.rank * each + (min(self.rank, over) if whole else 0)


class Rest:
    """An order without its first ``start`` indices."""

    def __init__(self, whole: Order, start: int) -> None:
        self._whole, self._start = whole, start

    def __len__(self) -> int:
        return max(0, len(self._whole) - self._start)

    def span(self, start: int, stop: int) -> NDArray[np.int64]:
        return self._whole.span(self._start + start, self._start + stop)

    def index(self, ordinal: int) -> int:
        return self._whole.index(self._start + ordinal)


@dataclass(frozen=True)
class Cut:
    """Those of a row that ``.take()`` and ``.skip()`` leave.

    Attributes:
        start: how many come before them.
        stop: where they end at the latest, None for the row's end.
    """

    start: int = 0
    stop: int | None = None

    def taken(self, count: int) -> Cut:
        """Return the first ``count`` of these."""
        return Cut(self.start, _least(self.stop, self.start + count))

    def skipped(self, count: int) -> Cut:
        """Return these without the first ``count``."""
        return Cut(self.start + count, self.stop)

    def count(self, length: int) -> int:
        """Return how many they are in a row of so many."""
        return max(0, _least(self.stop, length) - self.start)


@dataclass(frozen=True)
class Selection:
    """Which examples an epoch has on this rank, and in what order: shuffled, shared out, cut short.

    Attributes:
        is_shuffled: whether the order is drawn anew every epoch.
        share: which part of the epoch is this rank's, None for all of it.
        first: which examples of the source there are, before all else.
        between: which of them behind the first of shuffling and sharing out.
        last: which of them behind both.
        blocks: where the order is drawn by blocks, their ends in the source.
    """

    is_shuffled: bool = False
    share: Share | None = None
    first: Cut = Cut()
    between: Cut = Cut()
    last: Cut = Cut()
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

    def padded(self, *, fills: bool) -> Selection:
        """Return this with padding, up to the size of batches that ``in_batches`` says."""
        assert self.share is not None
        deal = PaddedDeal(self.share.rank, self.share.world, fills=fills)
        return replace(self, share=replace(self.share, padded=deal))

    def in_batches(self, group: int) -> Selection:
        """Return this where a rank's batches have so many examples."""
        if self.share is None or self.share.padded is None:
            return self
        deal = replace(self.share.padded, each=group)
        return replace(self, share=replace(self.share, padded=deal))

    def taken(self, count: int) -> Selection:
        """Return the first ``count`` examples of this."""
        return self._cut(lambda cut: cut.taken(count))

    def skipped(self, count: int) -> Selection:
        """Return this without the first ``count`` examples."""
        return self._cut(lambda cut: cut.skipped(count))

    def _cut(self, change: Callable[[Cut], Cut]) -> Selection:
        """Return this with a change of the last of its cuts."""
        if self.share is not None and self.is_shuffled:
            return replace(self, last=change(self.last))
        if self.share is not None or self.is_shuffled:
            return replace(self, between=change(self.between))
        return replace(self, first=change(self.first))

    def count(self, length: int) -> int:
        """Return the examples of an epoch over a source of ``length``."""
        share, count = self.share, self.first.count(length)
        if share is not None and not share.anew:
            count = share.count(count)
        count = self.between.count(count)
        if share is not None and share.anew:
            count = share.count(count)
        return self.last.count(count)

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
        if self.last.start:
            whole = replace(self, last=Cut(0, self.last.stop))
            return Rest(whole.order(length, seed, epoch, dealer, group, purpose), self.last.start)
        share, count = self.share, self.count(length)
        begins, length = self.first.start, self.first.count(length)
        if share is not None and share.padded is not None:
            return PaddedOrder(share.padded, length, begins)
        if begins:
            blocks = None if self.blocks is None else cut_to(self.blocks, begins, length)
            behind = replace(self, first=Cut(), blocks=blocks)
            order = behind.order(length, seed, epoch, dealer, group, purpose)
            return FixedPart(order, begins, 1)
        before = self.between.start

        def key(rank: int) -> NDArray[np.uint64] | None:
            return rng.key(seed, epoch, purpose, rank) if self.is_shuffled else None

        if share is None:
            return self._permuted(length, key(0), count, before)
        rank, world = share.rank, share.world
        if share.is_dealt:
            assert dealer is not None
            dealt = self._permuted(length, key(0), count * world, before)
            return DealtOrder(dealt, dealer, rank, group)
        if share.anew and self.blocks is None:
            return Permuted(length, key(0), before + rank, world, count)
        if share.anew:
            first = share.run(self.between.count(length), whole=share.uneven)
            return self._permuted(length, key(0), count, before + first)
        own = self.between.count(share.count(length))
        most = len(range(rank, length, world)) - before
        is_to_the_end = before + own == share.count(length)
        left_out = epoch % most if is_to_the_end and most > own else None
        if self.blocks is None:
            first = rank + before * world
            return FixedPart(Permuted(own, key(rank), count=count), first, world, left_out)
        first = share.run(length, whole=True) + before
        return FixedPart(self._permuted(own, key(rank), count, begins=first), first, 1, left_out)

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

    # Six rounds were still biased for five examples; even, as rounds come in pairs.
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
