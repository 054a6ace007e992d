"""Dealing inside the global batch: each rank gets what its own node keeps, as far as that goes.

The global batch, what all ranks read in a step, stays as the permutation has it. Inside it the
examples are dealt anew: a rank gets those that its node owns; where a node owns more than its ranks
have room for, the surplus goes to ranks whose nodes own too few. All of it is decided on integers,
so that every rank deals alike without a word to the others, from the same owners.

With ``B`` examples a rank and equal nodes, about ``0.4 / sqrt(B)`` of them come from other nodes,
however many nodes there are: what a node owns of a global batch varies by ``sqrt(B)``.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

_REMEMBERED = 64
"""Global batches whose dealing is remembered: as many as a resumed pool may reach back for."""


class Order(Protocol):
    """Maps ordinals to indices. Pickles; safe to use from any thread."""

    def __len__(self) -> int: ...

    def span(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the indices of ordinals ``start .. stop - 1``, ``int64``; possibly a view."""
        ...

    def index(self, ordinal: int) -> int:
        """Return the index of one ordinal."""
        ...


class Dealer(Protocol):
    """Says who owns what, and which rank is on which node. Pickles; never changes."""

    @property
    def nodes(self) -> NDArray[np.int64]:
        """Of each rank the number of its node among the owners; below 0 for one that owns nothing.

        ``int64``, shape [world].
        """
        ...

    def owners(self, indices: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the numbers of the nodes that own examples, in their order."""
        ...


def dealt_to(
    rank: int, nodes: NDArray[np.int64], owners: NDArray[np.integer[Any]]
) -> NDArray[np.int64]:
    """Return the places in a global batch that one rank gets, ascending.

    Over all ranks every place comes once, and each rank gets equally many.

    Args:
        rank: the rank.
        nodes: of each rank its node, below 0 for one that owns nothing; shape [world].
        owners: of each place the node that owns what is there; shape [world * each].
    """
    size = len(owners)
    groups, counts = np.unique(nodes, return_counts=True)  # the ranks of one node are a group
    room = np.append(counts * (size // len(nodes)), 0)  # and none where a node has no rank
    members = 1 + max(int(groups[-1]), int(owners.max(initial=-1)))
    group_of = np.full(members, len(groups), np.min_scalar_type(len(groups)))
    group_of[groups[groups >= 0]] = np.flatnonzero(groups >= 0)

    wanted = group_of[owners]
    by_group = np.argsort(wanted, kind="stable")  # of so small integers: a radix sort
    owned = np.bincount(wanted, minlength=len(room))
    within = np.arange(size) - np.repeat(np.cumsum(owned) - owned, owned)
    is_surplus = within >= np.repeat(room, owned)

    group = int(np.searchsorted(groups, nodes[rank]))
    short = room - np.minimum(owned, room)
    filled = int(short[:group].sum())
    surplus = np.sort(by_group[is_surplus])[filled : filled + short[group]]
    start = int(owned[:group].sum())
    own = by_group[start : start + min(owned[group], room[group])]
    places = np.sort(np.concatenate([own, surplus]))
    mates = np.flatnonzero(nodes == nodes[rank])
    return places[int(np.searchsorted(mates, rank)) :: len(mates)]


class DealtOrder:
    """An order by a dealing: of each global batch what it gives this rank.

    Args:
        within: the order of all ranks' examples, a multiple of ``world`` of them.
        dealer: by whose owners it is dealt.
        rank: this process.
        group: the examples that a rank has of a global batch; of the last one, fewer.
    """

    def __init__(self, within: Order, dealer: Dealer, rank: int, group: int) -> None:
        self._made_of = within, dealer, rank, group
        self._within, self._dealer = within, dealer
        self._rank, self._group = rank, group
        self._world = len(dealer.nodes)
        self._count = len(within) // self._world
        self._dealt: OrderedDict[int, NDArray[np.int64]] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return DealtOrder, self._made_of

    def __len__(self) -> int:
        return self._count

    def span(self, start: int, stop: int) -> NDArray[np.int64]:
        group = self._group
        parts = [
            self._part(number)[max(start - number * group, 0) : stop - number * group]
            for number in range(start // group, -(-stop // group))
        ]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])

    def index(self, ordinal: int) -> int:
        return int(self._part(ordinal // self._group)[ordinal % self._group])

    def _part(self, number: int) -> NDArray[np.int64]:
        """Return what this rank has of one global batch."""
        with self._lock:
            part = self._dealt.pop(number, None)
            if part is None:
                first = number * self._group
                last = min(first + self._group, self._count)
                indices = self._within.span(first * self._world, last * self._world)
                owners = self._dealer.owners(indices)
                part = indices[dealt_to(self._rank, self._dealer.nodes, owners)]
                if len(self._dealt) == _REMEMBERED:
                    self._dealt.popitem(last=False)
            self._dealt[number] = part
            return part
