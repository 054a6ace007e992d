"""Which node keeps which example.

The method is weighted rendezvous hashing over slots with a bounded load.

The numbers of examples are spread over ``SLOTS`` slots. For each slot every member draws a number
whose smallness is by chance and grows with the member's weight, and the smallest wins. So a member
that comes or goes moves only what it gains or had. No member has more than ``21/20`` of the slots
that its weight calls for: where more would win, those of its slots in which it won by the largest
number go to the next in their own order. (Slots propose, members hold on to the best: the outcome
depends on no order, and changes little when members change.)

Everything is computed in integers, so that all nodes that know the same members make the same map,
whatever their processors and libraries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

# 65,536 slots: 256 KB a map, and with up to some hundred members each has hundreds of slots.
_SLOT_BITS = 16
SLOTS = 1 << _SLOT_BITS
# 5 % more than fair. Simulated, 1,000 members: chance alone gives one 10.8 % more.
_MOST_OF_FAIR = (21, 20)

_Words = npt.NDArray[np.uint64]

# 2**64 over the golden ratio: neighbours come far apart.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
# Fractional bits of a logarithm: with six before the point, half of a 64-bit word is left for a
# member's divisor.
_LOG_BITS = 26
# Of a logarithm's table: 8 KB; a line between entries is exact to 2**-22 or better.
_TABLE_BITS = 10


@dataclass(frozen=True)
class Member:
    """A node that keeps a part of the cache.

    Attributes:
        name: what the node is called for as long as it keeps its part; unique in the cluster.
        address: where its cache server listens, ``"host:port"``.
        weight_bytes: how much it may keep, at least 1: its part is in proportion.
        joined_ns: when it joined, in ns since 1970; 0 if all joined together. It is later than that
            of each member that had joined before. It plays no part in the map.
    """

    name: str
    address: str
    weight_bytes: int
    joined_ns: int = 0


class OwnerMap:
    """The owner of every example, and the members that own it after the owner has left.

    Members are numbered in the order of their names.

    Attributes:
        members: the members that own examples, by number.
        version: grows whenever the members change. Maps of equal version are equal.
    """

    def __init__(self, members: tuple[Member, ...], version: int) -> None:
        self.members = members
        self.version = version
        names = (blake2b(member.name.encode(), digest_size=8).digest() for member in members)
        self._seeds: _Words = np.array([int.from_bytes(n, "little") for n in names], np.uint64)
        most = max((member.weight_bytes for member in members), default=1)
        # The draws are divided by the weights: 16 bits behind the point, ratios to 2**15.
        self._divisors: _Words = np.array(
            [min((most << 16) // member.weight_bytes, (1 << 31)) for member in members], np.uint64
        )
        self._owners = self._bound_loads()

    @staticmethod
    def of(members: Iterable[Member], version: int) -> OwnerMap:
        """Return the map of these members.

        Raises ValueError if two have the same name, or a weight is less than 1.
        """
        ordered = tuple(sorted(members, key=lambda member: member.name))
        names = {member.name for member in ordered}
        if len(names) < len(ordered):
            raise ValueError(f"two members have one name: {[m.name for m in ordered]}")
        for member in ordered:
            if member.weight_bytes < 1:
                raise ValueError(f"{member.name} may keep {member.weight_bytes} bytes: nothing")
        return OwnerMap(ordered, version)

    def __len__(self) -> int:
        return len(self.members)

    def owners(self, indices: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """Return the numbers of the members that own these examples."""
        spread = indices.astype(np.uint64) * _SPREAD
        found: npt.NDArray[np.int32] = self._owners[spread >> np.uint64(64 - _SLOT_BITS)]
        return found

    def ranking(self, index: int) -> Sequence[int]:
        """Return all members by number: the owner of an example, then its successors."""
        slot = _slot(index)
        owner = int(self._owners[slot])
        order = np.argsort(self._draws_for(np.array([slot], np.uint64))[0], kind="stable")
        return [owner, *(int(member) for member in order if member != owner)]

    def _draw(self, slots: _Words, member: int) -> _Words:
        """Return a member's draws in slots: the smallest draw of all members wins; none is 0."""
        words = _mix_bits(slots * _SPREAD ^ self._seeds[member])
        draws: _Words = _minus_log2(words) * self._divisors[member]
        return draws

    def _draws_for(self, slots: _Words) -> _Words:
        """Return the draws of all members in slots, of shape [slots, members]."""
        return np.stack([self._draw(slots, m) for m in range(len(self))], axis=1)

    def _bound_loads(self) -> npt.NDArray[np.int32]:
        owners = np.zeros(SLOTS, np.int32)
        if len(self) < 2:
            return owners
        slots = np.arange(SLOTS, dtype=np.uint64)
        smallest = self._draw(slots, 0)
        for member in range(1, len(self)):
            draw = self._draw(slots, member)
            better = draw < smallest
            owners[better] = member
            smallest[better] = draw[better]
        limits = self._limits()
        while True:
            counts = np.bincount(owners, minlength=len(self))
            if (counts <= limits).all():
                return owners
            order = np.lexsort((smallest, owners))
            place = np.arange(SLOTS) - (np.cumsum(counts) - counts)[owners[order]]
            refused = np.sort(order[place >= limits[owners[order]]])
            # Each slot goes to its next member. Equal draws of two members do no harm.
            draws = self._draws_for(refused.astype(np.uint64))
            draws[draws <= smallest[refused, None]] = np.iinfo(np.uint64).max
            owners[refused] = draws.argmin(axis=1)
            smallest[refused] = draws.min(axis=1)

    def _limits(self) -> npt.NDArray[np.int64]:
        over, under = _MOST_OF_FAIR
        total = sum(member.weight_bytes for member in self.members)
        most = [-(-SLOTS * m.weight_bytes * over // (total * under)) for m in self.members]
        return np.array(most, np.int64)


def _slot(index: int) -> int:
    return (index * int(_SPREAD) & 0xFFFFFFFFFFFFFFFF) >> (64 - _SLOT_BITS)


def _mix_bits(words: _Words) -> _Words:
    """Return words whose every bit depends on every bit of the argument (SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _minus_log2(words: _Words) -> _Words:
    """-log2 of words as fractions of 2**64, with ``_LOG_BITS`` bits behind the point; at least 1.

    52 bits of a word, which a float holds exactly, have their exponent in the float; a table with
    a line between its entries gives the rest.
    """
    bits = ((words >> np.uint64(12)) | np.uint64(1)).astype(np.float64).view(np.uint64)
    exponent = (bits >> np.uint64(52)) - np.uint64(1023)
    entry = (bits >> np.uint64(52 - _TABLE_BITS)) & np.uint64((1 << _TABLE_BITS) - 1)
    beyond = (bits >> np.uint64(52 - _TABLE_BITS - 16)) & np.uint64((1 << 16) - 1)
    table = _logarithms()
    low = table[entry]
    fraction = low + ((table[entry + np.uint64(1)] - low) * beyond >> np.uint64(16))
    logarithm = (exponent << np.uint64(_LOG_BITS)) + fraction
    drawn: _Words = np.uint64(52 << _LOG_BITS) - logarithm + np.uint64(1)
    return drawn


@cache
def _logarithms() -> _Words:
    """log2(1 + i / 2**_TABLE_BITS), with ``_LOG_BITS`` bits behind the point: bit by bit."""
    entries = 1 << _TABLE_BITS
    x = np.arange(entries, 2 * entries, dtype=np.uint64) << np.uint64(31 - _TABLE_BITS)
    logarithm = np.zeros(entries, np.uint64)
    for _ in range(_LOG_BITS):
        x = x * x >> np.uint64(31)
        over = x >> np.uint64(32)
        x >>= over
        logarithm = logarithm << np.uint64(1) | over
    return np.append(logarithm, np.uint64(1 << _LOG_BITS))
