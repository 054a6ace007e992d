"""Randomness with an address: what is drawn depends on where, never on who drew it or when.

Every draw is keyed by (seed, epoch, purpose) and placed by a counter, so that the same use of
the same example sees the same numbers under any number of workers, and again after a resume.
Streams are those of NumPy's Philox generator and may differ between NumPy versions.
"""

from __future__ import annotations

import secrets
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_USE_BITS = 20  # bits of a counter word that hold the use number of one echo

TRUE_PERMUTATION_LIMIT = 1 << 20
"""Up to this many examples an epoch is shuffled by a true permutation."""

FEISTEL_BLOCK = 1 << 16

# Purposes: the first word of a key. Random maps take MAP + their position among random maps.
SHUFFLE, ECHO, LEGACY, MAP = 0, 1 << 20, 2 << 20, 3 << 20


def draw_seed() -> int:
    """Draw a seed for a pipeline that was given none."""
    return secrets.randbits(32)


def key(seed: int, epoch: int, purpose: int) -> NDArray[np.uint64]:
    """Return the Philox key of one purpose in one epoch, ``uint64 [2]``."""
    words = np.random.SeedSequence([seed, epoch, purpose]).generate_state(2, np.uint64)
    return words.astype(np.uint64, copy=False)


def fold_use(word: int, use: int) -> int:
    """Add the use number at one more echo to an address word; first uses alone fold to 0."""
    return ((word << _USE_BITS) + use) & _MASK


class Rekeyed(threading.local):
    """One generator for each thread, placed anew for every use.

    Placing costs a fraction of making a generator. What ``at`` returns is valid until the
    same thread's next call.
    """

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._bits)
        self._counter = np.zeros(4, np.uint64)
        self._inner: dict[str, Any] = {"counter": self._counter, "key": None}
        self._state: Any = {
            "bit_generator": "Philox",
            "state": self._inner,
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }

    def __reduce__(self) -> tuple[type[Rekeyed], tuple[()]]:
        return Rekeyed, ()

    def at(self, key: NDArray[np.uint64], ordinal: int, word: int = 0) -> np.random.Generator:
        """Return this thread's generator, placed at ``(key, ordinal, word)``."""
        counter = self._counter
        counter[1] = ordinal
        counter[2] = word
        self._inner["key"] = key
        self._bits.state = self._state
        return self._generator


def integer_at(key: NDArray[np.uint64], ordinal: int, word: int = 0) -> int:
    """Return a 63-bit integer for an address: a seed for generators that are not NumPy's."""
    return int(_shared.at(key, ordinal, word).integers(1 << 63))


def mixed(key: int, ordinal: int) -> int:
    """Return 63 well-mixed bits of a key and an ordinal (splitmix64), in about a microsecond."""
    x = (key + ordinal * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) >> 1


_shared = Rekeyed()


class Order:
    """The order of one epoch: ordinals to indices, by a permutation or the identity."""

    def __init__(self, length: int, key: NDArray[np.uint64] | None) -> None:
        self._length = length
        self._key = key
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

    def __reduce__(self) -> tuple[type[Order], tuple[int, NDArray[np.uint64] | None]]:
        return Order, (self._length, self._key)

    def span(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the indices of ordinals ``start .. stop - 1``, ``int64``; possibly a view."""
        if self._permutation is not None:
            return self._permutation[start:stop]
        if self._feistel is None:
            return np.arange(start, stop)
        first, last = start // FEISTEL_BLOCK, (stop - 1) // FEISTEL_BLOCK
        parts = []
        for number in range(first, last + 1):
            base = number * FEISTEL_BLOCK
            block = self._block_of(number)
            parts.append(block[max(start - base, 0) : stop - base])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def index(self, ordinal: int) -> int:
        """Return the index of one ordinal."""
        if self._permutation is not None:
            return int(self._permutation[ordinal])
        if self._feistel is None:
            return ordinal
        return int(self._feistel(np.array([ordinal]))[0])

    def _block_of(self, number: int) -> NDArray[np.int64]:
        assert self._feistel is not None
        with self._lock:
            if self._block_number != number or self._block is None:
                base = number * FEISTEL_BLOCK
                stop = min(base + FEISTEL_BLOCK, self._length)
                self._block = self._feistel(np.arange(base, stop))
                self._block_number = number
            return self._block


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
        left, right = x // b, x % b
        for i in range(0, self.ROUNDS, 2):
            left = (left + _mix(right, self._round_keys[i])) % a
            right = (right + _mix(left, self._round_keys[i + 1])) % b
        return left * b + right


def _mix(x: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Finalise as splitmix64 does; the top bits, so that sums below stay clear of overflow."""
    x = x ^ key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) >> np.uint64(16)
