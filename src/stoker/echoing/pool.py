"""What is used next: the counted pool, on integers only.

Each fresh item enters once, with its number of uses; every step draws a group of items
without replacement. The draws depend on the seed, the epoch and the step alone, never on
time or on data, so a schedule can be replayed from a snapshot of ordinals and counts.

Guarantees:

- Every item is drawn exactly as often as its count says, and ``uses = assigned - remaining``
  holds at every moment.
- While fresh items remain, draws are uniform; afterwards, draining, most remaining uses come
  first, ties by oldest use (as far back as the last snapshot knows, then by age).
- The items of one draw are distinct if ``size >= ceil(factor) * group`` and the epoch has at
  least ``group`` items; elsewhere there are as few duplicates as the pool allows.
- Groups of one never repeat the item before while the pool holds another.
- The pool grows by at most one group a step until it is full (an epoch of less than two
  groups is admitted whole).
"""

from __future__ import annotations

import base64
import zlib
from collections import deque
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from stoker.echoing.factor import counts, counts_of, uses_of_first
from stoker.randomness import Rekeyed

SNAPSHOT_STEPS = 64
"""Least steps between snapshots; one of twice as many draws as the pool has items, if more.

A restored pool replays at most as many steps, and a drain.
"""

_ORDINAL, _REMAINING, _USED, _LAST = range(4)  # the columns of an item's row
_NEVER = -2  # the step of the last use of an item that was not used, or nobody knows when


@dataclass(frozen=True)
class Draw:
    """One group of uses.

    Attributes:
        ordinals: the items, ``int64 [group]`` (fewer in an epoch's last draw).
        uses: which use of its item each is, from 0, ``int64 [group]``.
        last: whether it is the item's last use, ``bool [group]``.
        distance_sum: steps since the same item's use before, summed over ``repeats``.
        repeats: how many of these uses are not the first and have a known distance.
        duplicates: uses of an item that is already in this draw.
    """

    ordinals: NDArray[np.int64]
    uses: NDArray[np.int64]
    last: NDArray[np.bool_]
    distance_sum: int
    repeats: int
    duplicates: int


@dataclass(frozen=True)
class Snapshot:
    """The pool before a step: enough to replay every draw from there on."""

    step: int
    admitted: int
    ordinals: NDArray[np.int64]  # ascending
    remaining: NDArray[np.int64]
    recent: NDArray[np.bool_]  # used in the step before


class Pool:
    """The schedule of one echo in one epoch.

    Args:
        factor: the exact echoing factor, above 1.
        size: how many items the pool holds when it is full, at least ``group``.
        group: how many items are drawn in a step.
        key: the Philox key of this echo in this epoch.
        items: the number of fresh items in the epoch, or None where only its end will tell.
    """

    def __init__(
        self,
        factor: Fraction,
        size: int,
        group: int,
        key: NDArray[np.uint64],
        items: int | None,
    ) -> None:
        self.factor = factor
        self.size = size
        self.group = group
        self.items = items
        self._key = key
        self._random = Rekeyed()
        rows = size if items is None else min(size, items)
        self._items = np.zeros((rows, 4), np.int64)  # a row an item: one cache line in a draw
        self._held = 0
        self._held_before = 0
        self._previous: int | None = None  # the slot of the last draw of one; -1: it is gone
        self._extent = 0  # the rows in use while draining
        self._snapshot_steps = max(SNAPSHOT_STEPS, 2 * rows // group)
        self._levels: dict[int, deque[NDArray[np.int64]]] | None = None  # while draining
        self.step = 0
        self.admitted = 0
        self.ended = items == 0
        self.uses = 0
        self._snapshots: deque[Snapshot] = deque()
        self._take_snapshot()

    @property
    def held(self) -> int:
        """Items in the pool that have uses left."""
        return self._held

    @property
    def uses_left(self) -> int:
        """Uses that admitted items still have."""
        return uses_of_first(self.factor, self.admitted) - self.uses

    @property
    def exhausted(self) -> bool:
        """Whether the epoch has no further draw."""
        return self.ended and self.uses_left == 0

    def held_ordinals(self) -> NDArray[np.int64]:
        """Return the items that have uses left."""
        rows = self._items[: self._extent if self._levels is not None else self._held]
        ordinals: NDArray[np.int64] = rows[rows[:, _REMAINING] > 0, _ORDINAL]
        return ordinals

    def wanted(self) -> int:
        """Return how many fresh items the next draw is to be preceded by."""
        if self.ended:
            return 0
        if self.items is not None and self.group < self.items < 2 * self.group <= self.size:
            # Admitted in two steps, so short an epoch could not always be drained distinctly.
            return self.items - self.admitted
        wanted = max(0, min(self.size, self.group * (self.step + 1)) - self._held)
        return wanted if self.items is None else min(wanted, self.items - self.admitted)

    def admit(self, count: int) -> None:
        """Let the next ``count`` fresh items in, at most as many as are wanted."""
        low, high = self._held, self._held + count
        start, stop = self.admitted, self.admitted + count
        rows = self._items[low:high]
        rows[:, _ORDINAL] = np.arange(start, stop)
        rows[:, _REMAINING] = counts(self.factor, start, stop)
        rows[:, _USED] = 0
        rows[:, _LAST] = _NEVER
        self._held = high
        self.admitted = stop
        if stop == self.items:
            self.ended = True

    def end(self) -> None:
        """Note that no further fresh item comes in this epoch."""
        self.ended = True

    def draw(self) -> Draw:
        """Choose the next group of uses. What is wanted must have been admitted, or ended."""
        if self.group == 1 and not self.ended:
            return self._draw_one()
        slots = self._drained() if self.ended else self._uniform()
        rows = self._items[slots]
        ordinals, uses, before = rows[:, _ORDINAL], rows[:, _USED].copy(), rows[:, _LAST].copy()
        known = before >= 0
        repeats = int(np.count_nonzero(known))
        distance_sum = int((self.step - before[known]).sum()) if repeats else 0
        rows[:, _LAST] = self.step
        duplicates = 0
        if self.ended and len(slots) > self._held_before:
            duplicates = _number_repeats(slots, uses)
        rows[:, _REMAINING] -= uses + 1 - rows[:, _USED]
        rows[:, _USED] = uses + 1
        self._items[slots] = rows  # of a slot that occurs more than once the last row stays
        last = rows[:, _REMAINING] == 0
        if self._levels is None:
            self._remove(slots[last])
        else:
            self._held -= int(last.sum())
        self.uses += len(slots)
        self._advance()
        return Draw(ordinals, uses, last, distance_sum, repeats, duplicates)

    def _draw_one(self) -> Draw:
        """Draw a group of one: what ``draw`` does, without arrays."""
        items, held, step = self._items, self._held, self.step
        previous = self._previous
        if previous is None:
            found = np.flatnonzero(items[:held, _LAST] == step - 1)
            previous = int(found[0]) if found.size else -1
        others = held > 1 and previous >= 0
        slot = int(self._random.at(self._key, step).integers(held - others))
        if others and slot >= previous:
            slot += 1
        ordinal, remaining, used, before = items[slot].tolist()
        items[slot] = ordinal, remaining - 1, used + 1, step
        self._previous = slot
        if remaining == 1:
            self._held = held - 1
            items[slot] = items[held - 1]
            self._previous = -1
        self.uses += 1
        self._advance()
        known = before >= 0
        return Draw(
            np.array([ordinal]),
            np.array([used]),
            np.array([remaining == 1]),
            step - before if known else 0,
            int(known),
            0,
        )

    def _advance(self) -> None:
        self.step += 1
        if self.step % self._snapshot_steps == 0 and not self.ended:
            self._canonicalise()
            self._take_snapshot()

    def advance(self) -> Draw:
        """Admit what is wanted and draw; for pools that know their number of items."""
        self.admit(self.wanted())
        return self.draw()

    def snapshot(self, step: int) -> Snapshot:
        """Return the newest kept snapshot taken at or before ``step``."""
        return next(s for s in reversed(self._snapshots) if s.step <= step)

    def forget_before(self, step: int) -> None:
        """Drop the snapshots that only steps before ``step`` would need."""
        while len(self._snapshots) > 1 and self._snapshots[1].step <= step:
            self._snapshots.popleft()

    def restore(self, snapshot: Snapshot) -> None:
        """Go to where a snapshot was taken; the pool must be new."""
        held = len(snapshot.ordinals)
        self._held = held
        rows = self._items[:held]
        rows[:, _ORDINAL] = snapshot.ordinals
        rows[:, _REMAINING] = snapshot.remaining
        rows[:, _USED] = counts_of(self.factor, snapshot.ordinals) - snapshot.remaining
        rows[:, _LAST] = np.where(snapshot.recent, snapshot.step - 1, _NEVER)
        self.step = snapshot.step
        self.admitted = snapshot.admitted
        self.uses = uses_of_first(self.factor, self.admitted) - int(snapshot.remaining.sum())
        self._snapshots.clear()
        self._snapshots.append(snapshot)

    def _uniform(self) -> NDArray[np.int64]:
        return _distinct(self._random.at(self._key, self.step), self._held, self.group)

    def _drained(self) -> NDArray[np.int64]:
        if self._levels is None:
            self._levels = self._begin_drain()
        levels = self._levels
        self._held_before = self._held
        need = min(self.group, self.uses_left)
        avoid = self.step - 1 if self.group == 1 and self._held > 1 else None
        picked: list[NDArray[np.int64]] = []
        while need:
            # One pass picks distinct items; only when all of them are picked does another start.
            passed: list[tuple[int, NDArray[np.int64]]] = []
            for level in sorted(levels, reverse=True):
                queue = levels[level]
                while need and queue:
                    slots = queue.popleft()
                    if avoid is not None and self._items[slots[0], _LAST] == avoid:
                        queue.append(slots)  # groups of one: chunks behind it are of one, too
                        if len(queue) == 1:
                            break
                        slots = queue.popleft()
                    if len(slots) > need:
                        queue.appendleft(slots[need:])
                        slots = slots[:need]
                    need -= len(slots)
                    passed.append((level, slots))
            for level, slots in passed:
                if level > 1:
                    levels.setdefault(level - 1, deque()).append(slots)
                picked.append(slots)
        return picked[0] if len(picked) == 1 else np.concatenate(picked)

    def _begin_drain(self) -> dict[int, deque[NDArray[np.int64]]]:
        held = self._extent = self._held
        base = self._snapshots[-1].step
        last = self._items[:held, _LAST]
        oldest = np.where(last >= base - 1, last, base - 2)
        order = np.lexsort((np.arange(held), oldest))
        remaining = self._items[order, _REMAINING]
        levels: dict[int, deque[NDArray[np.int64]]] = {}
        for level in np.unique(remaining):
            slots = order[remaining == level]
            chunks = slots[:, None] if self.group == 1 else [slots]
            levels[int(level)] = deque(chunks)
        return levels

    def _remove(self, slots: NDArray[np.int64]) -> None:
        """Close the gaps that exhausted items leave with items from the end."""
        if not slots.size:
            return
        held = self._held - slots.size
        moved = np.ones(slots.size, bool)
        moved[slots[slots >= held] - held] = False
        sources = np.flatnonzero(moved) + held
        targets = np.sort(slots[slots < held])
        self._items[targets] = self._items[sources]
        self._held = held

    def _canonicalise(self) -> None:
        """Sort by ordinal, so that the order of slots needs no room in a state."""
        rows = self._items[: self._held]
        self._items[: self._held] = rows[np.argsort(rows[:, _ORDINAL])]
        self._previous = None

    def _take_snapshot(self) -> None:
        rows = self._items[: self._held]
        self._snapshots.append(
            Snapshot(
                self.step,
                self.admitted,
                rows[:, _ORDINAL].copy(),
                rows[:, _REMAINING].copy(),
                rows[:, _LAST] == self.step - 1,
            )
        )


def _distinct(generator: np.random.Generator, held: int, count: int) -> NDArray[np.int64]:
    """Draw ``count`` distinct slots of ``held``, uniformly, in time that ``count`` alone sets."""
    if held < 4 * count:
        return generator.permutation(held)[:count]
    if held > count * count // 2:  # then a draw with replacement is often distinct by itself
        while True:
            drawn = (generator.random(count) * held).astype(np.int64)
            ascending = np.sort(drawn)
            if (ascending[1:] != ascending[:-1]).all():
                return drawn
    # Rejecting what was drawn before leaves a uniform draw without replacement.
    # (A fraction times a whole number is several times as fast as bounded integers, and its
    # bias is below 2^-30 for any pool that fits in memory.)
    drawn = np.empty(0, np.int64)
    while True:
        more = generator.random(count + count // 4 + 8) * held
        drawn = np.concatenate([drawn, more.astype(np.int64)])
        values, first = np.unique(drawn, return_index=True)
        if len(values) >= count:
            return drawn[np.sort(first)[:count]]


def _number_repeats(slots: NDArray[np.int64], uses: NDArray[np.int64]) -> int:
    """Number the uses of slots that occur more than once in a draw; return the repeats."""
    seen: dict[int, int] = {}
    for i, slot in enumerate(slots.tolist()):
        before = seen.get(slot, 0)
        uses[i] += before
        seen[slot] = before + 1
    return len(slots) - len(seen)


def pack(snapshot: Snapshot) -> dict[str, int | str]:
    """Write a snapshot as JSON: about half a byte to a byte for each item."""
    gaps = np.diff(snapshot.ordinals, prepend=-1) - 1
    far = gaps >= 255
    parts = (
        np.where(far, 255, gaps).astype(np.uint8).tobytes(),
        gaps[far].astype("<u8").tobytes(),
        np.minimum(snapshot.remaining, 255).astype(np.uint8).tobytes(),
        snapshot.remaining[snapshot.remaining >= 255].astype("<u8").tobytes(),
        np.packbits(snapshot.recent).tobytes(),
    )
    packed = [base64.b85encode(zlib.compress(part, 9)).decode() for part in parts]
    return {
        "step": snapshot.step,
        "admitted": snapshot.admitted,
        "held": len(snapshot.ordinals),
        "packed": " ".join(packed),
    }


def unpack(state: dict[str, int | str]) -> Snapshot:
    """Read what ``pack`` wrote. Raises ValueError or KeyError when it is damaged."""
    near, far, counts8, counts64, recent = (
        zlib.decompress(base64.b85decode(part)) for part in str(state["packed"]).split(" ")
    )
    held = int(state["held"])
    gaps = np.frombuffer(near, np.uint8).astype(np.int64)
    gaps[gaps == 255] = np.frombuffer(far, "<u8").astype(np.int64)
    remaining = np.frombuffer(counts8, np.uint8).astype(np.int64)
    remaining[remaining == 255] = np.frombuffer(counts64, "<u8").astype(np.int64)
    flags = np.unpackbits(np.frombuffer(recent, np.uint8), count=held).astype(bool)
    if not len(gaps) == len(remaining) == held:
        raise ValueError("the packed pool is damaged")
    ordinals = np.cumsum(gaps + 1) - 1
    return Snapshot(int(state["step"]), int(state["admitted"]), ordinals, remaining, flags)
