"""Which documents a full sequence has, decided by their lengths alone.

``BestFit`` packs documents as they come, among a window of them. A ``PackRule`` does so
ahead of an epoch, where the lengths are known: for all ranks together, so that each sequence has a
number of its own, whatever the number of ranks. ``PackedSharding`` deals the sequences, and with
them the rows that a rank reads: a row for each piece of a document.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from stoker.schedule.batch_bounds import PlannedBounds
from stoker.schedule.batch_plan import Planned
from stoker.schedule.costs import Costs
from stoker.schedule.orders.order import Places, as_array
from stoker.schedule.sharding import EpochIndices, balanced

# The age in windows at which a document waits no longer: it bounds what a resume reads again, and
# costs 0.1 % of padding at most (bench/padding.py, 1,024 documents).
_OLD = 3
_ALL = 1 << 60

Numbers = NDArray[np.int64]
Piece = tuple[int, int, int]
"""A part of a document: the document's number, the first token, and the one behind the last."""


class BestFit:
    """Packs documents by best fit decreasing, among a window of those that wait.

    Once ``window`` documents wait, all are packed, the largest first, each where it leaves the
    least room. Then the fuller half of the sequences is due; the documents of the others wait for
    the next ones. Those that are three windows old, or the oldest, are due as well, and last; the
    other sequences come in the order of their longest documents. What is longer than a sequence is
    split into full ones, which come first, and a rest.

    Whole sequences that are taken out change nothing of how the other documents are packed. So
    these documents, and the number of sequences that are due, tell the rest.

    Args:
        length: of a sequence, in tokens.
        window: the number of documents.

    Attributes:
        waiting: the sizes of documents that were packed, and wait, by number; the oldest first.
        begun: how many tokens of these are in sequences that were taken, if any are.
        end: the number of the first document behind all that were packed.
    """

    def __init__(self, length: int, window: int) -> None:
        self._length, self._window = length, window
        self.waiting, self.begun, self.end = dict[int, int](), dict[int, int](), 0
        self._fresh: dict[int, int] = {}  # not packed yet
        self._behind = 0  # the number of the next document
        self._due: list[list[Piece]] = []  # the next one is last
        self._pace = 0.0  # as fresh ones come, so that these are not all handed out at once
        self._taken = 0

    @property
    def due(self) -> int:
        """How many sequences are due."""
        return len(self._due)

    @property
    def untouched(self) -> int:
        """How many documents wait of which nothing was taken."""
        return len(self.waiting) + len(self._fresh) - len(self.begun)

    @property
    def is_ready(self) -> bool:
        """True if a sequence is due now, though further documents may come."""
        if self._due:
            return len(self._fresh) >= self._pace * self._taken
        return len(self.waiting) + len(self._fresh) >= self._window

    def lacking(self, count: int) -> int:
        """Return about how many documents are to be added before so many sequences are due."""
        if not self._due:
            return self._window - self.untouched
        return ceil(self._pace * (self._taken + min(count, self.due) - 1)) - len(self._fresh)

    def add(self, number: int, size: int) -> None:
        """Add a document behind all others; an empty one is left out."""
        if size:
            self._behind = number + 1
            self._fresh[number] = size

    def restore(self, waiting: Mapping[int, int], begun: Mapping[int, int], due: int) -> None:
        """Go on with documents that wait, of which so many sequences are due."""
        self.waiting, self.begun = dict(waiting), dict(begun)
        if due:
            self._pack(due)

    def packs(self, *, ended: bool = False) -> Iterator[list[Piece]]:
        """Yield the sequences that are due now, each in the order of its documents' numbers.

        ``ended``: whether no further document comes.
        """
        while self.is_ready or (ended and (self.waiting or self._fresh)):
            if not self._due:
                self.waiting |= self._fresh
                self._fresh, self.end = {}, self._behind
                self._pack(_ALL if ended else 0)
            self._taken += 1
            pack = self._due.pop()
            for number, _, stop in pack:
                self.begun[number] = stop
                if stop == self.waiting[number]:
                    del self.waiting[number], self.begun[number]
            yield pack

    def _pack(self, due: int) -> None:
        """Pack what waits; so many sequences are due, or with 0 half of them."""
        packs: list[list[Piece]] = []
        rooms: list[tuple[int, int]] = []  # that is left, and in which one; ascending
        for less, number, start, stop in sorted(self._pieces()):
            at = bisect.bisect_left(rooms, (-less, -1))
            room, which = rooms.pop(at) if at < len(rooms) else (self._length, len(packs))
            if which == len(packs):
                packs.append([])
            packs[which].append((number, start, stop))
            bisect.insort(rooms, (room + less, which))
        oldest = max(next(iter(self.waiting)) + 1, self.end - _OLD * self._window)
        whole, others, old = list[list[Piece]](), list[list[Piece]](), list[list[Piece]]()
        for _, which in rooms:  # the fullest first
            pack = packs[which]
            number, _, stop = min(pack)
            is_whole = stop < self.waiting[number]  # before the rest of the same document
            (whole if is_whole else old if number < oldest else others).append(pack)
        count = max(0, (due or len(packs) // 2) - len(whole) - len(old))
        # By the longest document of each: in a batch are long and short ones, as they come.
        chosen = [*whole, *sorted(others[:count], key=itemgetter(0)), *old]
        left = {number for pack in others[count:] for number, _, _ in pack}
        self._due, self._taken = [sorted(pack) for pack in reversed(chosen)], 0
        self._pace = (self._window - len(left)) / len(chosen)

    def _pieces(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield pieces, each with its negated size before it: sorted, the largest come first."""
        begun, length = self.begun, self._length
        for number, size in self.waiting.items():
            start = begun.get(number, 0)
            while size - start > length:
                yield -length, number, start, start + length
                start += length
            yield start - size, number, start, size


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
