"""Which examples a batch takes when some are not ready: ``.batch(n, late=k)``.

An example's own batch is the one that it has in the epoch's order. A batch takes the first ``n``
that are left, in order, if these are ready. If not, it leaves out those that are not, and takes
as many later ones that are ready, of at most ``k`` batches on. An example that has moved on by
``k`` batches is waited for. So none is lost, none comes twice, each comes at most ``k`` batches
away from its own, and there are as many batches as ever.

A batch is in the epoch's order in itself. So the examples that it left behind say all about it:
those before its last one that had not come by then. Batches that leave none behind are not noted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stoker.basics.compact_integers import check_integer
from stoker.errors import StateError

Left = tuple[int, ...]
"""The examples that a batch left behind, ascending."""


class Choice(NamedTuple):
    """What a batch takes, or what it waits for.

    Attributes:
        taken: the numbers of its examples, ascending; None if it must wait.
        waits_for: then the examples of which one must be ready before it is worth asking again.
    """

    taken: list[int] | None
    waits_for: list[int]


class LateOrder:
    """The examples of the batches of one epoch, decided one batch after another.

    Args:
        group: the examples in a batch.
        late: how many batches an example may move on by.
        total: the examples in the batches of the epoch.

    Attributes:
        batch: the next batch to decide.
        moved: how many examples came in a later batch than their own.
    """

    def __init__(self, group: int, late: int, total: int) -> None:
        self.group, self.late, self.total = group, late, total
        self.batch = self.moved = 0
        self._left: dict[int, Left] = {}  # of decided batches, and of the one before the first
        self._known: dict[int, Left] = {}  # of batches up to a number: decided before, repeated
        self._known_to = 0

    @property
    def batches(self) -> int:
        """The number of batches in the epoch."""
        return -(-self.total // self.group)

    def start_at(self, batch: int, left: Left, known: Mapping[int, Left], known_to: int) -> None:
        """Go on at a batch, behind one that left these examples.

        Args:
            batch: the next batch.
            left: what came before it and is left.
            known: what batches from this one on left, of those before batch ``known_to``.
        """
        self.batch = batch
        self._left = {batch - 1: left} if left else {}
        self._known, self._known_to = dict(known), known_to

    def left_before(self, batch: int) -> Left:
        """Return what batches before this one left behind; all of them must be decided."""
        return self._left.get(batch - 1, ())

    def first_unread(self, batch: int) -> int:
        """Return the first example that no batch before this one has had, nor left behind."""
        return min(batch * self.group, self.total) + len(self.left_before(batch))

    def frontier(self, batch: int) -> int:
        """Return the first example that batches before this one have not had."""
        left = self.left_before(batch)
        return left[0] if left else self.first_unread(batch)

    def within_reach(self) -> int:
        """Return the end of the examples that the next batch may take."""
        return min(self.total, (self.batch + 1 + self.late) * self.group)

    def choose(self, is_ready: Callable[[int], bool], *, is_due: bool) -> Choice:
        """Decide what the next batch takes, if it can be decided now.

        Args:
            is_ready: whether an example is ready; asked of those within reach.
            is_due: whether somebody waits for the batch: otherwise it takes the first in order.
        """
        need = min(self.group, self.total - self.batch * self.group)
        left, start = self.left_before(self.batch), self.first_unread(self.batch)
        some = [*left, *range(start, self.within_reach())]
        if self.batch < self._known_to:
            behind = set(self._known.get(self.batch, ()))
            first = [each for each in some if each not in behind][:need]
            is_due = False
        else:
            first = some[:need]
        if len(first) < need:
            raise StateError(f"the state or record is damaged at batch {self.batch}")
        awaited = [each for each in first if not is_ready(each)]
        if awaited and not is_due:
            return Choice(None, awaited[:1])
        if awaited:
            last = [e for e in some if e // self.group + self.late <= self.batch]
            awaited = [each for each in last if not is_ready(each)]
            if awaited:
                return Choice(None, awaited[:1])
            ready = [each for each in some if is_ready(each)]
            if len(ready) < need:
                return Choice(None, [each for each in some if not is_ready(each)])
            must = set(last)
            others = [each for each in ready if each not in must]
            first = sorted([*last, *others[: need - len(last)]])
        return Choice(self._take(first, some), [])

    def _take(self, taken: list[int], some: Sequence[int]) -> list[int]:
        ahead, end = set(taken), max(taken[-1] + 1, self.first_unread(self.batch))
        left = tuple(each for each in some if each < end and each not in ahead)
        if self.batch < self._known_to and left != self._known.get(self.batch, ()):
            raise StateError(f"the state or record is damaged at batch {self.batch}")
        if left:
            self._left[self.batch] = left
        self.moved += sum(each // self.group < self.batch for each in taken)
        self.batch += 1
        return taken

    def examples_of(self, batch: int) -> list[int]:
        """Return the examples of a decided batch once more."""
        behind = set(self._left.get(batch, ()))
        need = min(self.group, self.total - batch * self.group)
        start = self.first_unread(batch)
        stop = start + need + len(behind)
        some = [*self.left_before(batch), *range(start, min(stop, self.total))]
        return [each for each in some if each not in behind][:need]

    def left_from(self, batch: int) -> dict[int, Left]:
        """Return what decided batches left behind, of those from one on; known ones, too."""
        found = {at: left for at, left in self._left.items() if at >= batch}
        found.update({at: left for at, left in self._known.items() if at >= max(batch, self.batch)})
        return found

    @property
    def decided(self) -> int:
        """The number of batches that are decided, or known from before."""
        return max(self.batch, self._known_to)


def check_left(saved: Any, group: int, late: int, total: int, at_least: int) -> dict[int, Left]:
    """Read what batches left behind, by number, from a state or a record; none before one.

    Raises TypeError or ValueError for what no epoch can have.
    """
    if type(saved) is not dict:
        raise TypeError("what batches left behind is no table")
    found: dict[int, Left] = {}
    for key, left in saved.items():
        batch = check_integer(int(key), at_least, -(-total // group))
        first = max(0, (batch + 1 - late) * group)
        reach = min(total, (batch + 1 + late) * group)
        if type(left) is not list or not 0 < len(left) <= late * group:
            raise ValueError(f"batch {batch} cannot leave so many behind")
        numbers = tuple(check_integer(each, first, reach - 1) for each in left)
        if list(numbers) != sorted(set(numbers)):
            raise ValueError(f"what batch {batch} left behind is not in order")
        found[batch] = numbers
    return found


@dataclass(frozen=True)
class LateRecord:
    """What batches of an epoch left behind, on record.

    Attributes:
        first: the first batch on record: 0, or where a run was resumed.
        decided: the batch after the last.
        left: what each left behind, by its number; none for most. Of batch ``first - 1``, too.
    """

    first: int
    decided: int
    left: Mapping[int, Left]

    def after(self, earlier: LateRecord | None) -> LateRecord:
        """Return this with what an earlier part of the epoch left behind before it."""
        if earlier is None or not earlier.first <= self.first <= earlier.decided:
            return self
        before = {at: left for at, left in earlier.left.items() if at < self.first}
        return LateRecord(earlier.first, self.decided, {**before, **self.left})

    def to_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "first": self.first,
            "decided": self.decided,
            "left": {str(at): list(left) for at, left in sorted(self.left.items())},
        }

    @classmethod
    def from_json(cls, saved: Any, group: int, late: int, total: int) -> LateRecord:
        """Read the result of ``to_json``, of an epoch with ``total`` examples in its batches.

        Raises TypeError, KeyError or ValueError for what no epoch can have.
        """
        first = check_integer(saved["first"], 0, -(-total // group))
        decided = check_integer(saved["decided"], first, -(-total // group))
        return cls(first, decided, check_left(saved["left"], group, late, total, first - 1))
