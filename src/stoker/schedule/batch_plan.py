"""Batches of about equal size, planned ahead of an epoch from the sizes of its examples.

The epoch is cut into windows of places. The examples of a window are sorted by key and size, and
cut into batches that fill the budget: the longest first, so that a batch is as long as its first
example. (Batches that are not padded stay in the epoch's order.) ``world`` neighbours among the
batches are a step, one for each rank; so all ranks have equally many steps, of about equal work.
Steps come in random order, and ranks get the batches of a step at random.

What does not fit goes on into the next window: of each key the newest examples, as many as the last
batch has if that is not full; and batches that are too few for a step, a random run of them, or
examples of one length would always wait. In the last window batches are halved until they fit.
Fewer than ``world`` examples of an epoch are left out, and only where that is not enough.

A plan is a function of order, sizes, seed, epoch and world, on whole numbers. So all ranks make
the same one, and nothing of it is in a state. Only where windows begin is kept in memory. It is
made as an epoch begins, in about 0.2 us of processor time an example (bench/results/balance.json).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.schedule import rng
from stoker.schedule.batch_bounds import PlannedBounds
from stoker.schedule.costs import Costs
from stoker.schedule.orders.mixed import parts_and_numbers
from stoker.schedule.orders.order import Places, as_array
from stoker.schedule.sharding import EpochIndices

# Windows whose batches are remembered: workers read ahead, and a resumed pool reaches back.
_REMEMBERED = 8
# Rows that are counted at once: 1 MB. Chosen, not measured.
_COUNTED = 1 << 16

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class BatchRule:
    """The arguments of ``.batch_by_tokens()`` and ``.bucket(n, key)``, with all examples' sizes.

    Attributes:
        budget: what a batch holds at most: of its rows times the longest, if padded, else the sum.
        sizes: of the source's examples; None: each counts one.
        keys: examples of one batch have the same; None: any.
        is_padded: whether each row is as long as the longest.
        multiple_of: the longest is rounded up to a multiple of it.
        max_rows: how many examples a batch has at most, None for as many as fit.
        window: how many places are planned together.
    """

    budget: int
    sizes: Costs | None
    keys: Costs | None
    is_padded: bool
    multiple_of: int
    max_rows: int | None
    window: int

    def sizes_of(self, numbers: Numbers) -> Numbers:
        """Return what examples take of the budget, at least 1 each.

        Raises ValueError, with the example, where one is larger than the budget.
        """
        if self.sizes is None:
            return np.ones(len(numbers), np.int64)
        sizes = np.maximum(self.sizes.at(numbers), 1)
        sizes += -sizes % self.multiple_of
        if len(sizes) and sizes.max() > self.budget:
            at = int(sizes.argmax())
            raise ValueError(
                f"example {numbers[at]:,} has size {self.sizes.values[numbers[at]]:,}, and a batch "
                f"holds {self.budget:,}: raise max_tokens=, or .select() the others"
            )
        return sizes


class _Window(NamedTuple):
    """A window's examples, by their rows in the whole epoch, and the batches of this rank.

    Attributes:
        rows: those of this rank's batches, one batch after another.
        sizes: how many each batch has; ``of_all``: in each step, those of all ranks.
        carried: what goes on into the next window.
    """

    rows: Numbers
    sizes: Numbers
    of_all: Numbers
    carried: Numbers


class Planned(ABC):
    """The rows of one rank, batch by batch.

    Attributes:
        whole: the epoch as a single process reads it.
        cuts: the batches.
        first: how much of the row of parts earlier ranks have dealt.
    """

    together: ClassVar[int] = 0
    whole: EpochIndices
    cuts: PlannedBounds
    first = 0
    _parts: int

    @abstractmethod
    def places(self, rows: Places) -> Places:
        """Return the places of these rows."""

    def counts(self, rows: int) -> list[int]:
        """Return how many of the first so many rows are of each part of a mixture."""
        found = np.zeros(self._parts, np.int64)
        for start in range(0, rows, _COUNTED):
            places = as_array(self.places(range(start, min(rows, start + _COUNTED))))
            parts, _ = parts_and_numbers(places, self._parts)
            found += np.bincount(parts, minlength=self._parts)
        counts: list[int] = found.tolist()
        return counts


class PlannedSharding(Planned):
    """The rows of one rank, in batches of about equal size.

    Args:
        whole: the epoch as a single process reads it.
        rule: how it is cut.
        seed, epoch: what draws are keyed by.
        rank, world: this process among so many.
        parts: how many parts the source is mixed of, 1 for none.
        first: how much of the row of parts earlier ranks have dealt.

    Raises ValueError where an example is larger than a batch may be.
    """

    def __init__(
        self,
        whole: EpochIndices,
        rule: BatchRule,
        seed: int,
        epoch: int,
        rank: int,
        world: int,
        parts: int,
        first: int = 0,
    ) -> None:
        self.whole, self.first, self._rule = whole, first, rule
        self._key = rng.key(seed, epoch, rng.BATCHES)
        self._rank, self._world, self._parts = rank, world, parts
        self._windows = max(1, -(-len(whole) // rule.window))
        self._window = functools.lru_cache(_REMEMBERED)(self._planned)
        self._carried = [np.empty(0, np.int64)]  # into each window
        sizes, of_all = [], []
        for number in range(self._windows):
            window = self._planned(number)
            self._carried.append(window.carried)
            sizes.append(window.sizes)
            of_all.append(window.of_all)
        zero = np.zeros(1, np.int64)
        self._starts = np.concatenate([zero, np.cumsum([each.sum() for each in sizes])])
        self._first_steps = np.concatenate([zero, np.cumsum([len(each) for each in sizes])])
        self.cuts = PlannedBounds(np.concatenate(sizes), np.concatenate(of_all))

    def places(self, rows: Places) -> Places:
        return self.whole.places(self._in_epoch(as_array(rows)))

    def unread(self, steps: int) -> tuple[Numbers, int]:
        """Return the rows of the epoch that no rank has after so many steps.

        These are the returned ones, ascending, and all from the returned number on.
        """
        after = int(np.searchsorted(self._first_steps, steps, "right")) - 1
        window = min(after, self._windows - 1)  # behind the last step some may be left over
        every, cutting = self._examples(window)
        starts, batches, _ = self._steps(window, cutting)
        own = batches[: steps - int(self._first_steps[window])].ravel()
        taken = [cutting.rows[starts[each] : starts[each + 1]] for each in own]
        left = np.setdiff1d(every, np.concatenate([every[:0], *taken]))
        return left, min((window + 1) * self._rule.window, len(self.whole))

    def _in_epoch(self, rows: Numbers) -> Numbers:
        """Return the rows of the whole epoch at these of this rank."""
        if not len(rows):
            return rows
        windows = np.searchsorted(self._starts, rows, "right") - 1
        first, last = int(windows.min()), int(windows.max())
        found = np.empty(len(rows), np.int64)
        for number in range(first, last + 1):
            its = windows == number
            if its.any():
                found[its] = self._window(number).rows[rows[its] - self._starts[number]]
        return found

    def _planned(self, number: int) -> _Window:
        """Return the batches of a window, once those before it were planned."""
        _, cutting = self._examples(number)
        starts, batches, left = self._steps(number, cutting)
        mine = batches[:, self._rank]
        every = np.diff(starts)
        sizes, of_all = every[mine], every[batches].sum(axis=1)
        at = np.repeat(starts[mine] - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())
        return _Window(cutting.rows[at], sizes, of_all, np.sort(left))

    def _examples(self, number: int) -> tuple[Numbers, _Cutting]:
        """Return the rows of a window's examples, and what cuts them into batches."""
        start = number * self._rule.window
        fresh = range(start, min(start + self._rule.window, len(self.whole)))
        carried = self._carried[number]
        rows = np.concatenate([carried, as_array(fresh)])
        numbers = self.whole.span(fresh.start, fresh.stop)
        if len(carried):
            there = self.whole.at(as_array(self.whole.places(carried)))
            numbers = np.concatenate([there, numbers])
        return rows, _Cutting(self._rule, rows, numbers)

    def _steps(self, number: int, cutting: _Cutting) -> tuple[Numbers, Numbers, Numbers]:
        """Cut a window into steps: where its batches begin, which are of each step, what is left.

        The batches of a step stand in the order of their ranks, ``[steps, world]``; the rows that
        are left go on into the next window.
        """
        world = self._world
        counter = np.array([0, number, 0, 0], np.uint64)
        draws = np.random.Generator(np.random.Philox(key=self._key, counter=counter))
        if number + 1 < self._windows:
            starts, left = cutting.full()
            over = (len(starts) - 1) % world
            if over:
                first = int(draws.integers(len(starts) - over))
                starts, out = cutting.take_out(starts, first, over)
                left = np.concatenate([left, out])
        else:
            starts, left = cutting.all_of(world), np.empty(0, np.int64)
        steps = (len(starts) - 1) // world
        batches = np.arange(steps * world).reshape(steps, world)[draws.permutation(steps)]
        return starts, draws.permuted(batches, axis=1), left


class _Cutting:
    """The examples of one window, sorted by key and size.

    Attributes:
        rows: of the examples in the whole epoch.
    """

    def __init__(self, rule: BatchRule, rows: Numbers, numbers: Numbers) -> None:
        self._rule = rule
        sizes = rule.sizes_of(numbers)
        keys = np.zeros(len(rows), np.int64) if rule.keys is None else rule.keys.at(numbers)
        # The longest of each key first; what is not padded stays in its order.
        is_by_size = rule.is_padded and rule.sizes is not None
        turn = np.lexsort((-sizes, keys)) if is_by_size else np.argsort(keys, kind="stable")
        self.rows, self._sizes, self._keys = rows[turn], sizes[turn], keys[turn]

    def full(self) -> tuple[Numbers, Numbers]:
        """Return where batches begin, and the rows that are left for the next window.

        Of each key the newest are left, as many as its last batch has, unless that is full.
        """
        starts = self._cut()
        ends = self._ends()
        last = starts[np.searchsorted(starts, ends) - 1]  # where the last batch of each key begins
        left = np.zeros(len(self.rows), bool)
        for begin, at, end in zip(
            [0, *ends[:-1].tolist()], last.tolist(), ends.tolist(), strict=True
        ):
            if at < end and not self._is_full(at, end):
                newest = np.argsort(self.rows[begin:end])[-(end - at) :]
                left[begin + newest] = True
        if not left.any():
            return starts, np.empty(0, np.int64)
        over = self.rows[left]
        kept = ~left
        self.rows, self._sizes, self._keys = self.rows[kept], self._sizes[kept], self._keys[kept]
        return self._cut(), over

    def all_of(self, world: int) -> Numbers:
        """Return where batches begin that are a multiple of ``world``, of all that can be in them.

        Batches are halved, the largest first; where even single examples are too few, fewer than
        ``world`` of the newest are left out.
        """
        starts = self._cut()
        wanted = -(-(len(starts) - 1) // world) * world
        if wanted > len(self.rows):
            whole = len(self.rows) // world * world
            kept = np.sort(np.argsort(self.rows, kind="stable")[:whole])
            self.rows = self.rows[kept]
            return np.arange(whole + 1)
        cuts = starts.tolist()
        for _ in range(wanted + 1 - len(cuts)):
            sizes = np.diff(cuts)
            at = int(sizes.argmax())
            cuts.insert(at + 1, cuts[at] + int(sizes[at]) // 2)
        return np.array(cuts, np.int64)

    def take_out(self, starts: Numbers, first: int, count: int) -> tuple[Numbers, Numbers]:
        """Leave out a run of batches; return where the others begin, and the rows of the run."""
        begin, end = int(starts[first]), int(starts[first + count])
        out, self.rows = self.rows[begin:end], np.delete(self.rows, slice(begin, end))
        behind = starts[first + count + 1 :] - (end - begin)
        return np.concatenate([starts[: first + 1], behind]), out

    def _ends(self) -> Numbers:
        """Return where the examples of each key end."""
        if not len(self._keys):
            return np.zeros(0, np.int64)
        return np.append(np.flatnonzero(np.diff(self._keys)) + 1, len(self._keys))

    def _is_full(self, begin: int, end: int) -> bool:
        """Whether no example as large as its largest fits into a batch any more."""
        rule, rows = self._rule, end - begin
        if rule.max_rows is not None and rows == rule.max_rows:
            return True
        largest = int(self._sizes[begin:end].max())
        used = rows * largest if rule.is_padded else int(self._sizes[begin:end].sum())
        return used + largest > rule.budget

    def _cut(self) -> Numbers:
        """Return where batches begin, and where the last one ends."""
        rule, starts, begin = self._rule, [0], 0
        most = rule.max_rows or len(self.rows)
        sums = None if rule.is_padded else np.cumsum(self._sizes)
        for end in self._ends().tolist():
            sizes = self._sizes[begin:end].tolist()
            at = 0
            while at < len(sizes):
                if sums is None:  # as long as the first
                    rows = rule.budget // sizes[at]
                else:
                    before = int(sums[begin + at]) - sizes[at]
                    rows = int(sums.searchsorted(before + rule.budget, "right")) - begin - at
                at = min(at + min(rows, most), len(sizes))
                starts.append(begin + at)
            begin = end
        return np.array(starts, np.int64)
