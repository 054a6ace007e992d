"""Which documents a full sequence has, decided by their lengths alone.

``BestFit`` packs documents as they come, among a window of those that wait. A ``PackRule`` does so
ahead of an epoch, where the lengths are known: for all ranks together, so that each sequence has a
number of its own, whatever the number of ranks. ``PackedSharding`` deals the sequences, and with
them the rows that a rank reads: a row for each piece of a document.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.schedule.batch_bounds import PlannedBounds
from stoker.schedule.batch_plan import Planned
from stoker.schedule.costs import Costs
from stoker.schedule.orders.order import Places, as_array
from stoker.schedule.sharding import EpochIndices, balanced

Numbers = NDArray[np.int64]
Piece = tuple[int, int, int]
"""A part of a document: the document's number, the first token, and the one behind the last."""


class BestFit:
    """Packs documents by best fit within a window.

    A sequence begins with the oldest document of the window. Then come those that fit best, the
    largest first, of equal ones the oldest. So none waits for more than ``window`` sequences. Only
    what is longer than a sequence is split: sequences of its own, and a rest.

    Args:
        length: of a sequence, in tokens.
        window: the number of documents that wait before a sequence is made.

    Attributes:
        waiting: the sizes of those that wait, by number; the oldest first.
        skip: how many tokens of the oldest are in sequences.
    """

    def __init__(self, length: int, window: int) -> None:
        self._length, self._window = length, window
        self.waiting: OrderedDict[int, int] = OrderedDict()
        self.skip = 0
        self._by_size: list[tuple[int, int]] = []  # and by number, the newest first

    def add(self, number: int, size: int) -> None:
        """Add a document behind all others; an empty one is left out."""
        if size:
            self.waiting[number] = size
            if size <= self._length:
                bisect.insort(self._by_size, (size, -number))

    def packs(self, *, ended: bool = False) -> Iterator[list[Piece]]:
        """Yield the sequences that are due, each in the order of its documents' numbers."""
        while len(self.waiting) >= (1 if ended else self._window):
            yield self._pack()

    def _pack(self) -> list[Piece]:
        (number, size), by_size = next(iter(self.waiting.items())), self._by_size
        start, stop = self.skip, min(size, self.skip + self._length)
        pieces, room = [(number, start, stop)], self._length - (stop - start)
        if stop < size:
            self.skip = stop
            return pieces
        del self.waiting[number]
        self.skip = 0
        if size <= self._length:
            del by_size[bisect.bisect_left(by_size, (size, -number))]
        while (at := bisect.bisect_right(by_size, (room, 0)) - 1) >= 0:
            size, minus = by_size.pop(at)
            del self.waiting[-minus]
            pieces.append((-minus, 0, size))
            room -= size
        return sorted(pieces)


@dataclass(frozen=True)
class PackRule:
    """The arguments of ``.pack(length, sizes=)``.

    Attributes:
        length: of a sequence, in tokens.
        sizes: of the source's examples, in tokens.
        window: as in ``BestFit``; 0: documents are split where a sequence is full.
        costs: what a document of each size from 0 to ``length`` costs: by these, ranks get equal
            work of each global batch. None where ranks take turns.
    """

    length: int
    sizes: Costs
    window: int
    costs: Costs | None = None

    def pieces(self, sizes: Numbers) -> tuple[Numbers, Numbers]:
        """Return the pieces ``[n, 3]`` of sequences, and where each sequence begins.

        ``sizes``: of the documents, in the order of the epoch.
        """
        if not self.window:
            return self._split(sizes)
        fit, found, begins = BestFit(self.length, self.window), list[Piece](), [0]
        for number, size in enumerate(sizes.tolist()):
            fit.add(number, size)
            for pack in fit.packs():
                found += pack
                begins.append(len(found))
        for pack in fit.packs(ended=True):
            found += pack
            begins.append(len(found))
        return np.array(found, np.int64).reshape(-1, 3), np.array(begins, np.int64)

    def _split(self, sizes: Numbers) -> tuple[Numbers, Numbers]:
        ends = np.cumsum(sizes)
        total = int(ends[-1]) // self.length * self.length if len(ends) else 0
        cuts = np.arange(0, total + 1, self.length)
        bounds = np.union1d(cuts, ends[ends < total])
        rows = np.searchsorted(ends, bounds[:-1], "right")
        before = ends[rows] - sizes[rows]
        pieces = np.stack([rows, bounds[:-1] - before, bounds[1:] - before], axis=1)
        return pieces, np.searchsorted(bounds, cuts)


class PackedSharding(Planned):
    """The rows of one rank: the pieces of its sequences, one sequence after another.

    A global batch is a run of the epoch's sequences. Ranks take turns at these, or get equally many
    of about equal cost.

    Args:
        whole: the epoch as a single process reads it.
        rule: how it is packed.
        rank, world: this process among so many.
        group: the sequences that a rank has of a global batch.
        parts: how many parts the source is mixed of, 1 for none.
        first: how many sequences earlier ranks have had.

    Attributes:
        numbers: of the rank's sequences, among those of all ranks.
        cuts: where each of them begins.
        pieces: ``[n, 3]``, by row; the number is that of the document's row in the whole epoch.
        sizes: of the whole document, by row.
    """

    def __init__(
        self,
        whole: EpochIndices,
        rule: PackRule,
        rank: int,
        world: int,
        group: int,
        parts: int,
        first: int,
    ) -> None:
        self.whole, self._parts = whole, parts
        every = rule.sizes.at(whole.span(0, len(whole)))
        pieces, begins = rule.pieces(every)
        each = max(0, len(begins) - 1 - first) // world
        self.numbers = first + rank + world * np.arange(each)
        if rule.costs is not None:
            work = rule.costs.at(pieces[:, 2] - pieces[:, 1])
            costs = np.diff(np.concatenate([begins[:1], np.cumsum(work)])[begins])
            for at in range(0, each, group):
                these = slice(first + at * world, first + min(at + group, each) * world)
                # Ranks take turns at being the first, or the largest were always rank 0's.
                mine = balanced(costs[these], (rank + at // group) % world, world)
                self.numbers[at : at + group] = these.start + mine
        sizes = np.diff(begins)
        of_all = sizes[first : first + each * world].reshape(each, world).sum(axis=1)
        self.cuts = PlannedBounds(sizes[self.numbers], of_all)
        own = [np.arange(begins[n], begins[n + 1]) for n in self.numbers.tolist()]
        self.pieces = pieces[np.concatenate([np.empty(0, np.int64), *own])]
        self.sizes = every[self.pieces[:, 0]]

    def places(self, rows: Places) -> Places:
        return self.whole.places(self.pieces[as_array(rows), 0])
