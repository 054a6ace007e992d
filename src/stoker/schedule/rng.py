"""Addressed randomness: a draw depends on what it is for, never on the worker or the time.

Every draw is keyed by (seed, epoch, purpose) and placed by a counter, so that the same use of
the same example sees the same numbers under any number of workers, and again after a resume.
Streams are those of NumPy's Philox generator and may differ between NumPy versions.

The purpose of a random map is its position in the chain. Its counter is (place, word): the place of
the example in the epoch over all ranks (``orders.order``), so that draws are the same for any
number of ranks. The word is the number of the use behind an echo, from 0, and 0 elsewhere: so an
echo changes nothing for first uses. Only what ranks shuffle by themselves, fixed parts and streams,
folds the rank into its key.

Each thread has one generator and places it anew for each use. It is valid during the call only.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Words of Philox' keys and counters have 64 bits.
_MASK = (1 << 64) - 1

# Purposes: the first word of a key. Random maps take MAP + their position among random maps, other
# code of the user's CALL + the place of its segment, the parts of a mixture SHUFFLE + their number.
SHUFFLE, ECHO, CALL, MAP, SPLIT, BATCHES = 0, 1 << 20, 2 << 20, 3 << 20, 4 << 20, 5 << 20


def draw_seed() -> int:
    """Draw a seed for a pipeline that was given none."""
    return int.from_bytes(os.urandom(4), "big")


def key(seed: int, epoch: int, purpose: int, part: int = 0) -> NDArray[np.uint64]:
    """Return the Philox key of one purpose in one epoch, ``uint64 [2]``.

    ``part``: of one rank, by its number; of one leg, by the steps before it.
    """
    entropy = [seed, epoch, purpose, part] if part else [seed, epoch, purpose]
    words = np.random.SeedSequence(entropy).generate_state(2, np.uint64)
    return words.astype(np.uint64, copy=False)


class AddressedGenerator(threading.local):
    """One generator for each thread, placed anew for every use.

    Placing costs a fraction of making a generator. What ``at`` returns is valid until the
    same thread's next call.
    """

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._bits)
        # Lists, not arrays: NumPy reads them number by number, in 0.6 us and not in 1.9.
        self._counter = [0, 0, 0, 0]
        self._key: NDArray[np.uint64] | None = None
        self._inner: dict[str, Any] = {"counter": self._counter, "key": None}
        self._state: Any = {
            "bit_generator": "Philox",
            "state": self._inner,
            "buffer": [0, 0, 0, 0],
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }

    def __reduce__(self) -> tuple[type[AddressedGenerator], tuple[()]]:
        return AddressedGenerator, ()

    def at(self, key: NDArray[np.uint64], ordinal: int, word: int = 0) -> np.random.Generator:
        """Return this thread's generator, placed at ``(key, ordinal, word)``."""
        counter = self._counter
        counter[1] = ordinal & _MASK  # what entered in an earlier epoch is numbered below 0
        counter[2] = word
        if key is not self._key:
            self._key, self._inner["key"] = key, key.tolist()
        self._bits.state = self._state
        return self._generator


def counters(places: Sequence[int], words: Sequence[int] | None) -> NDArray[np.uint64]:
    """Return where generators begin for each place and word; None: all words are 0.

    They are words 1 and 2 of Philox' counter, ``uint64 [places, 2]``.
    """
    found = np.zeros((len(places), 2), np.uint64)
    found[:, 0] = np.asarray(places, np.int64).view(np.uint64)
    if words is not None:
        found[:, 1] = np.asarray(words, np.uint64)
    return found


class UniformAt:
    """A random number in [0, 1) for each step of a key, drawn for many steps at once."""

    # Numbers drawn at once: placing a generator costs 0.6 us, which 64 share.
    _BLOCK = 64

    def __init__(self, key: NDArray[np.uint64]) -> None:
        self._key = key
        self._random = AddressedGenerator()
        self._block = -1
        self._drawn: list[float] = []

    def at(self, step: int) -> float:
        """Return the number of a step. One thread at a time may ask."""
        block, place = divmod(step, self._BLOCK)
        if block != self._block:
            self._drawn = self._random.at(self._key, block).random(self._BLOCK).tolist()
            self._block = block
        return self._drawn[place]


@functools.cache
def _shared() -> AddressedGenerator:
    return AddressedGenerator()  # made when it is wanted: NumPy loads its random numbers with it


def integer_at(key: NDArray[np.uint64], ordinal: int, word: int = 0) -> int:
    """Return a 63-bit integer for an address: a seed for generators that are not NumPy's."""
    return int(_shared().at(key, ordinal, word).integers(1 << 63))


def mixed(key: int, ordinal: int) -> int:
    """Return 63 well-mixed bits of a key and an ordinal (splitmix64), in about a microsecond."""
    x = (key + ordinal * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) >> 1
