"""Whose part of a partitioned cache each example is, for as long as an epoch is dealt by it.

A cluster's map changes as nodes come and go. What an epoch is dealt by does not: it is taken when
the epoch begins, and saved in the state, so that each example comes once and a resumed epoch goes
on as it would have. (Reading goes by the cluster's own map: what has moved is nearer or further,
and no example is lost.)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stoker.cluster.owners import Member, OwnerMap
from stoker.packing import whole

_MOST_MEMBERS = 1 << 13
_MOST_NAME = 1 << 10


class OwnersKnown(Protocol):
    """A cluster, as far as dealing asks."""

    @property
    def node(self) -> str:
        """The name that this process's node has, or would have, among the members."""
        ...

    def owner_map(self) -> OwnerMap:
        """Return the map as it is now."""
        ...


@dataclass(frozen=True)
class PinnedOwners:
    """A map of owners, and the ranks on their nodes. Of the members names and weights count.

    Attributes:
        version: of the map.
        members: the name and the weight of each, in the order of their numbers.
        ranks: of each rank the number of its node among the members; -1 on a node that is none.
    """

    version: int
    members: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]

    @staticmethod
    def of(known: OwnerMap, ranks: tuple[int, ...]) -> PinnedOwners:
        """Pin a map for ranks on these nodes."""
        members = tuple((member.name, member.weight_bytes) for member in known.members)
        return PinnedOwners(known.version, members, ranks)

    @staticmethod
    def read(saved: Any, world: int) -> PinnedOwners:
        """Read what ``saved`` made, for so many ranks.

        Raises KeyError, TypeError or ValueError for what it cannot have made.
        """
        if type(saved["members"]) is not list or type(saved["ranks"]) is not list:
            raise TypeError("members and ranks are lists")
        if len(saved["members"]) > _MOST_MEMBERS:
            raise ValueError(f"{len(saved['members'])} members are more than {_MOST_MEMBERS}")
        members = tuple((_name(name), whole(weight, 1)) for name, weight in saved["members"])
        names = [name for name, _ in members]
        if names != sorted(set(names)):
            raise ValueError("members are not in the order of their names")
        if len(saved["ranks"]) != world:
            raise ValueError(f"{len(saved['ranks'])} ranks are not {world}")
        ranks = tuple(whole(node, -1, len(members) - 1) for node in saved["ranks"])
        return PinnedOwners(whole(saved["version"]), members, ranks)

    def saved(self) -> dict[str, Any]:
        """Return this, ready for JSON."""
        members = [list(member) for member in self.members]
        return {"version": self.version, "members": members, "ranks": list(self.ranks)}

    @property
    def digest(self) -> int:
        """What equals another's only if this does: above 0, in 56 bits."""
        text = json.dumps(self.saved(), sort_keys=True).encode()
        return 1 + int.from_bytes(blake2b(text, digest_size=7).digest(), "little")

    @cached_property
    def nodes(self) -> npt.NDArray[np.int64]:
        """``ranks`` as an array."""
        return np.array(self.ranks, np.int64)

    def owners(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Return the numbers of the members that own examples, in their order."""
        return _map_of(self.members, self.version).owners(indices)


@lru_cache(maxsize=2)
def _map_of(members: tuple[tuple[str, int], ...], version: int) -> OwnerMap:
    """Return the map; epochs that follow each other mostly have one."""
    return OwnerMap.of((Member(name, "", weight) for name, weight in members), version)


def _name(name: Any) -> str:
    if type(name) is not str or not 0 < len(name) <= _MOST_NAME:
        raise TypeError("a member has a name")
    return name
