"""Legs: the stretches of an epoch, each read by one number of ranks with one batch size.

An epoch has one leg, unless a state of its middle is loaded by other ranks, or with batches of
another size. Then a new leg begins: it is a row of what is left of the epoch, which these ranks
deal among themselves as if it were the whole. A row lists *numbers*, of which each stands for a
place of the epoch; of a mixture, whose places are made by its deal, for a number in its row of
parts. So places, and all random draws, stay what they were.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics import compact_integers
from stoker.basics.compact_integers import check_integer
from stoker.schedule.numbering import Numbering
from stoker.schedule.orders.order import Order, Places, as_array, offset_places
from stoker.stats import Counts

# Ranges in a row: a rank has a few at most, and a state holds them all.
_MOST_RANGES = 1 << 20


class UnreadRanges:
    """The unread numbers of an epoch, as ranges, in the order in which they are dealt.

    Args:
        ranges: the start and the stop of each range; ascending.

    Attributes:
        ranges: as given, without empty ranges; adjacent ranges are joined.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self.ranges: list[tuple[int, int]] = []
        for start, stop in ranges:
            if self.ranges and self.ranges[-1][1] == start:
                self.ranges[-1] = self.ranges[-1][0], max(start, stop)
            elif start < stop:
                self.ranges.append((start, stop))
        self._starts = np.array([start for start, _ in self.ranges], np.int64)
        self._numbering = Numbering([stop - start for start, stop in self.ranges])

    def __len__(self) -> int:
        return self._numbering.total

    @property
    def first(self) -> int | None:
        """The first number, if there is one range; None otherwise."""
        return self.ranges[0][0] if len(self.ranges) == 1 else None

    def __contains__(self, number: int) -> bool:
        after = bisect.bisect_right(self._starts, number)
        return after > 0 and number < self.ranges[after - 1][1]

    def at(self, which: Places) -> Places:
        """Return the numbers at positions of this row, which count from 0.

        Positions after the end (padding) map to numbers after the last one.
        """
        if not self.ranges:
            return as_array(which)
        if self.first is not None:
            return offset_places(which, self.first)
        which = as_array(which)
        parts = np.minimum(self._numbering.parts(which), len(self.ranges) - 1)
        found: NDArray[np.int64] = self._starts[parts] + which - self._numbering.starts[parts]
        return found

    def cut(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the ranges of the numbers at positions ``start .. stop - 1`` of this row."""
        found, begin = [], 0
        for low, high in self.ranges:
            end = begin + high - low
            if begin < stop and start < end:
                found.append((low + max(0, start - begin), high - max(0, end - stop)))
            begin = end
        return found


@dataclass(frozen=True, eq=False)
class CarriedUses:
    """Items of pools that are dealt to the ranks of a new leg: used before, with uses left.

    All ranks get equally many items with equally many uses left, so their schedules are alike.

    Attributes:
        world: the number of those ranks, which take turns.
        places: the places of the items, ``int64 [n]``; ascending among items with equally many uses
            left.
        remaining: the uses that each item has left, descending; ``spent``: its uses so far.
    """

    world: int
    places: NDArray[np.int64]
    remaining: NDArray[np.int64]
    spent: NDArray[np.int64]

    @property
    def each(self) -> int:
        """The number of items of each rank."""
        return len(self.places) // self.world

    def of_rank(self, rank: int) -> CarriedUses:
        """Return the items of a rank."""
        mine = slice(rank, None, self.world)
        return CarriedUses(1, self.places[mine], self.remaining[mine], self.spent[mine])

    def to_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        gaps = np.diff(self.places, prepend=0)
        begins = np.flatnonzero(np.diff(self.remaining, prepend=-1))
        gaps[begins] = self.places[begins]
        return {
            "world": self.world,
            "kinds": [[int(self.remaining[at]), int(at)] for at in begins],
            "places": compact_integers.encode_small(gaps),
            "spent": compact_integers.encode_small(self.spent),
        }

    @classmethod
    def from_json(cls, saved: Any, world: int, places: int, end: int, most: int) -> CarriedUses:
        """Read the result of ``to_json``, of an epoch of so many places.

        Args:
            saved: the JSON value.
            world: the number of ranks of the state.
            places: the number of places in the epoch.
            end: the stop of the numbers in the epoch.
            most: the most uses of an item.
        """
        gaps = compact_integers.decode_small(saved["places"], places, end)
        spent = compact_integers.decode_small(saved["spent"], places, most)
        kinds = [(check_integer(r, 1, most), check_integer(at)) for r, at in saved["kinds"]]
        left = [r for r, _ in kinds]
        begins = [at for _, at in kinds]
        ends = [*begins[1:], len(gaps)][: len(begins)]  # empty if there are no items
        sound = check_integer(saved["world"], 1) == world and len(gaps) % world == 0
        sound &= begins[:1] == [0][: len(gaps)] and left == sorted({*left}, reverse=True)
        sound &= all(a < b and (b - a) % world == 0 for a, b in zip(begins, ends, strict=True))
        if not sound or len(spent) != len(gaps):
            raise ValueError("what pools held is damaged")
        remaining = np.repeat(np.array(left, np.int64), np.diff([*begins, len(gaps)]))
        found = [np.cumsum(gaps[a:b]) for a, b in zip(begins, ends, strict=True)]
        held = np.concatenate([np.empty(0, np.int64), *found])
        if len(held) and (
            held.max() >= end
            or len(np.unique(held)) < len(held)
            or spent.min() < 1
            or (spent + remaining).max() > most
        ):
            raise ValueError("what pools held is damaged")
        return cls(world, held, remaining, spent)


def deal_held(
    places: NDArray[np.int64], remaining: NDArray[np.int64], spent: NDArray[np.int64], world: int
) -> tuple[CarriedUses, int]:
    """Deal items to ranks, so that all ranks get equally many with each number of uses left.

    Items that cannot be divided lose a use, and join the items with one use less. Returns the dealt
    items and the number of lost uses: for each number of uses left, fewer than ranks.
    """
    dealt: list[tuple[NDArray[np.int64], ...]] = []
    left, lost = np.empty((2, 0), np.int64), 0
    for count in range(int(remaining.max(initial=0)), 0, -1):
        own = remaining == count
        kind = np.concatenate([left, np.stack([places[own], spent[own]])], axis=1)
        kind = kind[:, np.argsort(kind[0])]
        even = kind.shape[1] - kind.shape[1] % world
        dealt.append((kind[0, :even], np.full(even, count, np.int64), kind[1, :even]))
        left = kind[:, even:]
        lost += left.shape[1]
    none = np.empty((3, 0), np.int64)
    each = [np.concatenate(parts) for parts in zip(none, *dealt, strict=True)]
    return CarriedUses(world, *each), lost


@dataclass(frozen=True, eq=False)
class EpochRest:
    """The rest of an epoch when other ranks take it over, or the batch size changes.

    Attributes:
        begun_by: the number of ranks that began the epoch.
        rest: the unread numbers; of a stream, none: what follows those that ``before`` counts.
        before: the clock of all ranks by then; without the examples in pools, which count again.
        held: the items that the pools of a fixed factor hold at the beginning of the leg; None
            without such pools.
        returned: for a mixture, whose row does not list places: the places that come first. Their
            number is a multiple of ``world``, the ranks of this leg.
        batches: the batches of all ranks by then; the draws of maps behind ``.batch`` count on.
        sequences: the packed sequences of all ranks by then; the draws of maps behind ``.pack``
            count on.
        offsets: the unread places whose first tokens packed sequences have had, and how many.
        over: for a mixture: fewer than ``world`` places that this leg deals to nobody, because they
            cannot be divided; others that take over deal them.
    """

    begun_by: int
    rest: UnreadRanges
    before: Counts
    batches: int
    held: CarriedUses | None = None
    returned: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    world: int = 1
    over: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    sequences: int = 0
    offsets: Mapping[int, int] = field(default_factory=dict)

    @property
    def held_each(self) -> int:
        """The rows of a rank that its pool holds at the beginning; they come first."""
        return 0 if self.held is None else self.held.each

    @property
    def head_each(self) -> int:
        """The rows of a rank before those that are dealt from ``rest``."""
        return self.held_each + len(self.returned) // self.world

    def head_of(self, rank: int) -> NDArray[np.int64]:
        """Return the places of these rows of a rank."""
        returned = self.returned[rank :: self.world]
        if self.held is None:
            return returned
        return np.concatenate([self.held.of_rank(rank).places, returned])

    def to_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        bounds = np.array(self.rest.ranges, np.int64).ravel()
        gaps = np.diff(bounds, prepend=0)
        more: dict[str, Any] = {} if self.held is None else {"held": self.held.to_json()}
        if len(self.returned):
            more["returned"] = compact_integers.encode_ascending(self.returned, 0)
        if len(self.over):
            more["over"] = compact_integers.encode_ascending(self.over, 0)
        if self.sequences:
            more["sequences"] = self.sequences
        if self.offsets:
            cut = sorted(self.offsets)
            more["cut"] = compact_integers.encode_ascending(np.array(cut, np.int64), 0)
            more["offsets"] = [self.offsets[place] for place in cut]
        return {
            "begun_by": self.begun_by,
            "ranges": len(self.rest.ranges),
            "rest": compact_integers.encode_small(gaps),
            "before": [self.before.fresh_examples, self.before.uses, self.before.steps],
            "batches": self.batches,
            **more,
        }

    @classmethod
    def from_json(cls, saved: Any, world: int, places: int, end: int, most: int) -> EpochRest:
        """Read the result of ``to_json``, of an epoch of so many places.

        Args:
            saved: what it was.
            world: the ranks of the state.
            places: how many the epoch has.
            end: the number behind the last of them.
            most: how often a fixed factor uses an item at most; 1 where there is none.

        Raises KeyError, TypeError or ValueError for what cannot be.
        """
        count = check_integer(saved["ranges"], 0, min(places, _MOST_RANGES))
        gaps = compact_integers.decode_small(saved["rest"], 2 * count, places + 1)
        bounds = np.cumsum(gaps)
        if len(bounds) != 2 * count or (gaps[1:] < 1).any() or (bounds > places).any():
            raise ValueError("the rest of the epoch is damaged")
        returned = np.empty(0, np.int64)
        if "returned" in saved:
            returned = compact_integers.decode_ascending(saved["returned"], 0, places, end)
            if len(returned) % world:
                raise ValueError("the rest of the epoch is damaged")
        over = np.empty(0, np.int64)
        if "over" in saved:
            over = compact_integers.decode_ascending(saved["over"], 0, world - 1, end)
        offsets = dict[int, int]()
        if "cut" in saved:
            cut = compact_integers.decode_ascending(saved["cut"], 0, places, end).tolist()
            tokens = [check_integer(count, 1) for count in saved["offsets"]]
            offsets = dict(zip(cut, tokens, strict=True))
        held = None
        if "held" in saved:
            held = CarriedUses.from_json(saved["held"], world, places, end, most)
        fresh, uses, steps = (check_integer(n) for n in saved["before"])
        return cls(
            check_integer(saved["begun_by"], 1),
            UnreadRanges(zip(bounds[::2].tolist(), bounds[1::2].tolist(), strict=True)),
            Counts(fresh, uses, steps),
            check_integer(saved["batches"]),
            held,
            returned,
            world,
            over,
            check_integer(saved.get("sequences", 0)),
            offsets,
        )


class RestOrder:
    """The order of a leg: the numbers of its row, from 0 on."""

    def __init__(self, within: Order, rest: UnreadRanges) -> None:
        self._within, self._rest = within, rest
        self.together = within.together

    def __len__(self) -> int:
        return len(self._rest)

    def at(self, places: Places) -> NDArray[np.int64]:
        return self._within.at(self._rest.at(places))
