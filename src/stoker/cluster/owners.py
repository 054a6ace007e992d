"""Which node keeps which example: weighted rendezvous hashing (Thaler and Ravishankar 1998).

The numbers of examples are spread over ``SLOTS`` slots. In each slot every member draws a number,
which is the smaller by chance the larger its weight, and the smallest draw wins. So a member that
comes or goes moves only what it gains or had. Chance gives some members more than their weight
calls for; when such a member is full, the next in the ranking takes its items.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

# 65,536 slots: 256 KB a map, and with up to some hundred members each has hundreds of slots.
_SLOT_BITS = 16
SLOTS = 1 << _SLOT_BITS

_Words = npt.NDArray[np.uint64]

# 2**64 over the golden ratio: neighbours come far apart.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


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
        self._weights = np.array([member.weight_bytes for member in members], np.float64)
        self._owners = self._find_owners()

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
        slot = np.array([_slot(index)], np.uint64)
        ranking: list[int] = np.argsort(self._draws(slot, slice(None)), kind="stable").tolist()
        return ranking

    def _draws(self, slots: _Words, member: int | slice) -> npt.NDArray[np.float64]:
        """Return draws of a member in slots, or of all members in one: the smallest wins."""
        words = _mix_bits(slots * _SPREAD ^ self._seeds[member])
        uniform = ((words >> np.uint64(11)) + 0.5) / 2.0**53
        # Exponential, with the weight as the rate. Should a node's logarithm round otherwise, and
        # change a winner (once in 10^9 maps), an item would be stored twice.
        draws: npt.NDArray[np.float64] = -np.log(uniform) / self._weights[member]
        return draws

    def _find_owners(self) -> npt.NDArray[np.int32]:
        owners = np.zeros(SLOTS, np.int32)
        slots = np.arange(SLOTS, dtype=np.uint64)
        smallest = np.full(SLOTS, np.inf)
        for member in range(len(self)):
            draws = self._draws(slots, member)
            better = draws < smallest
            owners[better] = member
            smallest[better] = draws[better]
        return owners


def _slot(index: int) -> int:
    return (index * int(_SPREAD) & 0xFFFFFFFFFFFFFFFF) >> (64 - _SLOT_BITS)


def _mix_bits(words: _Words) -> _Words:
    """Return words whose every bit depends on every bit of the argument (SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
