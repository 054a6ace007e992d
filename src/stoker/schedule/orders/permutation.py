"""Permutations of an epoch: a true one of a short epoch, a keyed network of a long one.

Nothing here takes memory that grows with the epoch above ``TRUE_PERMUTATION_LIMIT``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stoker.schedule.orders.order import Order, Places, as_array
from stoker.schedule.orders.plain import AsItLies, ListedOrder

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
