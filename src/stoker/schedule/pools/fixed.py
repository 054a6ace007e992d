"""The schedule of an echo with a fixed factor: the counted pool, on integers only.

Each fresh item enters once, with its number of uses. Each step draws a group of items without
replacement. The draws depend on the seed, the epoch and the step alone, never on time or on data,
so a schedule can be replayed from a snapshot of ordinals and counts.

Guarantees:

- Every item is drawn exactly as often as its count says, and ``uses = assigned - remaining``
  holds at every moment.
- While fresh items remain, draws are uniform. Afterwards the pool drains: most remaining uses
  first, ties by oldest use (as far back as the last snapshot knows, then by age).
- The items of one draw are distinct if ``size >= ceil(factor) * group`` and the epoch has at
  least ``group`` items. Otherwise there are as few duplicates as the pool allows.
- Groups of one never repeat the item before while the pool holds another.
- The pool grows by at most one group a step until it is full (an epoch of less than two
  groups is admitted whole).

Each item has a slot in four arrays: ordinal, uses in all, remaining uses, step of the last use.
(One-dimensional arrays: gathering rows of a table took ten times as long.) The next fresh items
fill the slots of items that are used up. In a drain, items wait in queues by remaining uses.

A snapshot is taken every ``snapshot_steps`` steps while fresh items come. At each, the slots are
sorted by ordinal, so that their order is not part of a state. A state holds the newest one at or
before its position; loading it replays the draws from there.

Not safe for threads: the engine calls this with the planning lock held.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.basics import compact_integers
from stoker.basics.compact_integers import check_integer
from stoker.schedule.factor import EvenUses
from stoker.schedule.rng import AddressedGenerator, UniformAt

# The first slots, if the number of items is unknown: some tens of KB, and more as they fill.
_FEW = 1024
# Draws beyond those that chance is expected to waste, so that most steps draw once. Chosen, not
# measured.
_SLACK = 8
# What is skipped together: no fewer steps, nor in pools of fewer groups (4 groups: 41 us a step,
# and 24 one by one; 16: 19), and no more draws, so that they stay in the processor's caches.
_FEW_STEPS = 4
_FEW_GROUPS = 16
_MANY_DRAWS = 32_768
_NO_SLOTS = np.empty(0, np.int64)


SNAPSHOT_STEPS = 64
"""Least steps between snapshots; as many as draw twice the pool's items, if more.

A restored pool replays at most as many steps, and a drain. Drawn in groups, which cost less, it
is eight times the items.
"""


def snapshot_steps(size: int, group: int) -> int:
    """Return the steps from one snapshot of a pool to the next."""
    return max(SNAPSHOT_STEPS, (2 if group == 1 else 8) * size // group)


@dataclass(frozen=True)
class Snapshot:
    """The pool before a step: enough to replay every draw from there on."""

    step: int
    admitted: int
    ordinals: NDArray[np.int64]  # ascending
    remaining: NDArray[np.int64]
    recent: NDArray[np.bool_]  # used in the step before

    @property
    def oldest(self) -> int:
        """The first item that later steps may use."""
        return int(self.ordinals[0]) if len(self.ordinals) else self.admitted


class Draw(NamedTuple):
    """One group of uses.

    Attributes:
        ordinals: the items, ``int64 [group]`` (fewer in an epoch's last draw).
        uses: which use of its item each is, from 0, ``int64 [group]``.
        last: whether it is the item's last use, ``bool [group]``.
        ages: steps since the item's use before, 0 for a first use, -1 where that is not known
            (of an item from before a resume), ``int64 [group]``.
        distance_sum: steps since the same item's use before, summed over ``repeats``.
        repeats: how many of these uses are not the first and have a known distance.
        duplicates: uses of an item that is already in this draw.
        dropped: items that left the pool with this draw, though it was not their last use.
    """

    ordinals: NDArray[np.int64]
    uses: NDArray[np.int64]
    last: NDArray[np.bool_]
    ages: NDArray[np.int64]
    distance_sum: int
    repeats: int
    duplicates: int
    dropped: NDArray[np.int64] = _NO_SLOTS


def pack(snapshot: Snapshot) -> dict[str, int | str]:
    """Write a snapshot as JSON: about half a byte to a byte for each item."""
    parts = (
        compact_integers.encode_ascending(snapshot.ordinals, 0),
        compact_integers.encode_small(snapshot.remaining),
        compact_integers.encode_bytes(np.packbits(snapshot.recent)),
    )
    return {
        "step": snapshot.step,
        "admitted": snapshot.admitted,
        "held": len(snapshot.ordinals),
        "packed": " ".join(parts),
    }


def unpack(state: Any, *, counts: EvenUses, size: int, group: int, items: int) -> Snapshot:
    """Read what ``pack`` wrote of a pool that was made with these arguments.

    Args:
        items: how many fresh items the epoch has, at most.

    Raises ValueError, TypeError or KeyError when it is damaged, or no such pool can be like that.
    """
    admitted = check_integer(state["admitted"], 0, items)
    held = check_integer(state["held"], 0, min(max(size, counts.held), admitted))
    total_uses = counts.of_first(admitted)
    step = check_integer(state["step"], 0, total_uses // group)
    ordinals_text, remaining_text, recent = str(state["packed"]).split(" ")
    ordinals = compact_integers.decode_ascending(ordinals_text, 0, held, admitted)
    remaining = compact_integers.decode_small(remaining_text, held, counts.most + 1)
    flags = compact_integers.decode_bytes(recent, -(-held // 8))
    if not len(ordinals) == len(remaining) == held or len(flags) != -(-held // 8):
        raise ValueError("the packed pool is damaged")
    if ((remaining < 1) | (remaining > counts.of(ordinals))).any():
        raise ValueError("items have other uses left than their factor gives them")
    if total_uses - int(remaining.sum()) != step * group or step % snapshot_steps(size, group):
        raise ValueError(f"no pool is like that at step {step:,}")
    was_used = np.unpackbits(flags, count=held).astype(bool)
    return Snapshot(step, admitted, ordinals, remaining, was_used)


class Pool:
    """The schedule of one echo in one epoch.

    Args:
        counts: the number of uses of each item.
        size: the items in a full pool, at least ``group``.
        group: the number of items in a step.
        key: the Philox key of this echo in this epoch.
        items: the number of fresh items in the epoch, or None where only its end will tell.
    """

    def __init__(
        self,
        counts: EvenUses,
        size: int,
        group: int,
        key: NDArray[np.uint64],
        items: int | None,
    ) -> None:
        self.counts = counts
        self.size = size
        self.group = group
        self.items = items
        self._key = key
        self._random = AddressedGenerator()
        # An item has a slot. Arrays of one dimension: NumPy gathers from them ten times as fast.
        self._slots = 0
        self._ordinal = np.zeros(0, np.int64)
        self._uses = np.zeros(0, np.int64)  # in all
        self._remaining = np.zeros(0, np.int64)
        self._after = np.zeros(0, np.int64)  # the step after the last use; 0: none, or unknown
        self._mark = np.zeros(0, np.int32)
        self._reserve(min(size, _FEW if items is None else items))
        self._places = np.arange(2 * group + _SLACK, dtype=np.int32)
        self._item_count = 0
        self._count_before = 0
        self._extent = 0  # slots in use; those of exhausted items are filled by the next fresh ones
        self._holes: Any = _NO_SLOTS
        self._fractions = UniformAt(key)
        self._previous: int | None = None  # the slot of the last draw of one; -1: its item has left
        self._snapshot_steps = snapshot_steps(size, group)
        self._levels: dict[int, deque[NDArray[np.int64]]] | None = None  # while draining
        self.step = 0
        self.admitted = 0
        self.seen = 0  # items that were drawn at least once
        self.ended = items == 0
        self.uses = 0
        self._snapshots: deque[Snapshot] = deque()
        self._take_snapshot()

    @property
    def held(self) -> int:
        """Items in the pool that have uses left."""
        return self._item_count

    @property
    def uses_left(self) -> int:
        """The uses that admitted items have left."""
        return self.counts.of_first(self.admitted) - self.uses

    @property
    def exhausted(self) -> bool:
        """Whether the epoch has no further draw."""
        return self.ended and self.uses_left == 0

    def left(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the items with uses left, the numbers of these, and of uses so far."""
        slots = self._slots_held()
        remaining = self._remaining[slots]
        return self._ordinal[slots], remaining, self._uses[slots] - remaining

    def uses_of(self, ordinal: int) -> int:
        """Return how often an item was drawn."""
        if ordinal >= self.admitted:
            return 0
        (slot,) = np.nonzero(self._ordinal[: self._extent] == ordinal)
        left = int(self._remaining[slot[0]]) if len(slot) else 0
        return int(self.counts.of(np.array([ordinal]))[0]) - left

    def held_ordinals(self) -> NDArray[np.int64]:
        """Return the ordinals of the items with uses left."""
        return self._ordinal[self._slots_held()]

    def _slots_held(self) -> NDArray[np.int64]:
        return np.flatnonzero(self._remaining[: self._extent])

    def fresh_needed(self) -> int:
        """Return how many fresh items must enter before the next draw."""
        if self.ended:
            return 0
        if self.items is not None and self.group < self.items < 2 * self.group <= self.size:
            # Admitted in two steps, so short an epoch could not always be drained distinctly.
            return self.items - self.admitted
        ramp = self.counts.held + self.group * (self.step + 1)
        missing = max(0, min(self.size, ramp) - self._item_count)
        return missing if self.items is None else min(missing, self.items - self.admitted)

    def admit(self, count: int) -> None:
        """Admit the next ``count`` fresh items, at most ``fresh_needed()``."""
        if not count:
            return
        start, stop = self.admitted, self.admitted + count
        slots: Any
        if count == 1:  # batches enter one by one, and scalars cost less than arrays
            if len(self._holes):
                slots, self._holes = int(self._holes[0]), self._holes[1:]
            else:
                slots, self._extent = self._extent, self._extent + 1
                self._reserve(self._extent)
            uses: Any = self.counts.of_first(stop) - self.counts.of_first(start)
            ordinals: Any = start
        else:
            slots, self._holes = self._holes[:count], self._holes[count:]
            new = count - len(slots)
            if new:
                new_slots = slice(self._extent, self._extent + new)
                slots = np.r_[slots, new_slots] if len(slots) else new_slots
                self._extent += new
                self._reserve(self._extent)
            ordinals = np.arange(start, stop)
            uses = self.counts.of(ordinals)
        self._ordinal[slots] = ordinals
        self._uses[slots] = self._remaining[slots] = uses
        self._after[slots] = 0
        self._item_count += count
        self.admitted = stop
        if stop == self.items:
            self.ended = True

    def _reserve(self, slots: int) -> None:
        """Have at least ``slots`` slots; doubles their number."""
        if slots <= self._slots:
            return
        slots = max(slots, min(2 * self._slots, self.size))
        for name in ("_ordinal", "_uses", "_remaining", "_after", "_mark"):
            column = getattr(self, name)
            larger = np.zeros(slots, column.dtype)
            larger[: len(column)] = column
            setattr(self, name, larger)
        self._slots = slots

    def end(self) -> None:
        """Record that the epoch has no further fresh item."""
        self.ended = True

    def draw(self) -> Draw:
        """Choose the next group of uses; call after ``admit(fresh_needed())``, or after the end."""
        if (one := self.draw_one()) is not None:
            ordinal, use, is_last, age = map(np.array, zip(one, strict=True))
            return Draw(ordinal, use, is_last, age, max(0, one[3]), int(one[3] > 0), 0)
        slots = self._drain() if self.ended else self._uniform(self.step, self._item_count)
        ordinals, remaining = self._ordinal[slots], self._remaining[slots]
        after = self._after[slots]
        uses = self._uses[slots] - remaining
        remaining -= 1
        ages = (self.step + 1 - after) * (after > 0)
        repeats, again = int(np.count_nonzero(after)), int(np.count_nonzero(uses))
        distance_sum = int(np.add.reduce(ages))
        if repeats < again:  # after a resume
            ages[(after == 0) & (uses > 0)] = -1
        self._after[slots] = self.step + 1
        duplicates = 0
        if self.ended and len(slots) > self._count_before:
            duplicates = _number_repeats(slots, uses, remaining)
            again = int(np.count_nonzero(uses))
        self.seen += len(slots) - again
        self._remaining[slots] = remaining  # of a slot that occurs twice the last value stays
        last = remaining == 0
        free = slots[last]
        self._item_count -= len(free)
        if not self.ended:
            self._holes = free
        self.uses += len(slots)
        self._advance()
        return Draw(ordinals, uses, last, ages, distance_sum, repeats, duplicates)

    def draw_one(self) -> tuple[int, int, bool, int] | None:
        """Draw a group of one without arrays, which take 3 us; None where ``draw`` makes arrays.

        Returns the item's ordinal, its use, whether that is the last one, and its age.
        """
        if len(self._holes) and not self.ended:  # it held more than its size: nothing was admitted
            self._close_holes(self._slots_held())
        if self.group > 1 or self.ended:
            return None
        held, step = self._item_count, self.step
        previous = self._find_previous() if self._previous is None else self._previous
        others = held > 1 and previous >= 0
        slot = int(self._fractions.at(step) * (held - others))
        if others and slot >= previous:
            slot += 1
        remaining = int(self._remaining[slot])
        use = int(self._uses[slot]) - remaining
        ordinal, after = int(self._ordinal[slot]), int(self._after[slot])
        self._remaining[slot] = remaining - 1
        self._after[slot] = step + 1
        self._previous = slot
        if remaining == 1:
            self._item_count = held - 1
            self._holes = [slot]
            self._previous = -1
        self.uses += 1
        self.seen += not use
        self._advance()
        return ordinal, use, remaining == 1, step + 1 - after if after else -1 if use else 0

    def _find_previous(self) -> int:
        """Return the slot that the step before drew, -1 where its item is gone."""
        if not self.step:
            return -1
        slots = np.flatnonzero(self._after[: self._item_count] == self.step)
        return int(slots[0]) if slots.size else -1

    def _advance(self) -> None:
        self.step += 1
        if self.step % self._snapshot_steps == 0 and not self.ended:
            slots = self._slots_held()  # sorted, so that their order needs no room in a state
            self._close_holes(slots[np.argsort(self._ordinal[slots])])
            self._take_snapshot()

    @property
    def replayed_steps(self) -> int:
        """The most steps replayed after a snapshot: up to the next one, or through a drain."""
        most = max(self.size, self.counts.held) * self.counts.most
        return self._snapshot_steps + -(-most // self.group) + 1

    def advance(self) -> Draw:
        """Admit the fresh items needed, and draw; for pools with a known number of items."""
        self.admit(self.fresh_needed())
        return self.draw()

    def skip(self, steps: int) -> None:
        """Do what so many calls of ``advance`` do, or as many as there are, several times as fast.

        Keeps all snapshots on the way. For pools that know their number of items.
        (bench/echo_overhead.py: 7 us a draw of 64 of 100,000 items, 27 one by one.)
        """
        stop = self.step + steps
        skip = self._skip_ones if self.group == 1 else self._skip_groups
        while self.step < stop and not self.exhausted:
            self.admit(self.fresh_needed())
            few = self._steps_alike(stop - self.step)
            if few < _FEW_STEPS:
                self.draw()
            else:
                skip(few)
        if self.group > 1:  # a group is counted at once, not in every call of ``_skip_groups``
            unseen = self._uses[: self._extent] == self._remaining[: self._extent]
            self.seen = self.admitted - int(np.count_nonzero(unseen))

    def _steps_alike(self, most: int) -> int:
        """Return how many steps from here on draw from a pool that is full before each of them, or
        grows by a group: up to the next snapshot at most, and not into the end of the epoch."""
        held = self._item_count
        if self.ended or self._extent != held or len(self._holes):
            return 0
        if held != min(self.size, self.counts.held + self.group * (self.step + 1)):
            return 0
        if self.group > 1 and held < _FEW_GROUPS * self.group:
            return 0
        assert self.items is not None
        return min(
            most,
            self._snapshot_steps - self.step % self._snapshot_steps,
            # Each step is preceded by up to two groups, and the last item is not to come in.
            (self.items - self.admitted - 1) // (2 * self.group),
            max(held, _MANY_DRAWS) if self.group == 1 else min(held, _MANY_DRAWS) // self.group,
        )

    def _sizes(self, steps: int) -> NDArray[np.int64]:
        """Return how many items the pool holds before each step, from this one on."""
        return np.minimum(self.size, self._item_count + self.group * np.arange(steps))

    def _skip_ones(self, steps: int) -> None:
        """Draw so many groups of one: what ``_draw_one`` does, without an array a step."""
        held, step, size = self._item_count, self.step, self.size
        if self._previous is None:
            self._previous = self._find_previous()
        previous, admitted = self._previous, self.admitted
        self._reserve(min(size, held + steps))
        columns = self._ordinal, self._uses, self._remaining, self._after
        ordinal, uses, remaining, after = (column[:held].tolist() for column in columns)
        coming = self.counts.of(np.arange(admitted, admitted + 2 * steps)).tolist()
        first, hole = admitted, -1
        for at in range(step, step + steps):
            if hole >= 0:
                ordinal[hole], after[hole] = admitted, 0
                uses[hole] = remaining[hole] = coming[admitted - first]
                admitted, hole = admitted + 1, -1
            if at > step and held < size:
                ordinal.append(admitted)
                uses.append(coming[admitted - first])
                remaining.append(coming[admitted - first])
                after.append(0)
                admitted, held = admitted + 1, held + 1
            others = held > 1 and previous >= 0
            slot = int(self._fractions.at(at) * (held - others))
            if others and slot >= previous:
                slot += 1
            previous = slot
            self.seen += remaining[slot] == uses[slot]
            remaining[slot] -= 1
            after[slot] = at + 1
            if not remaining[slot]:
                hole, previous = slot, -1
        for column, values in zip(columns, (ordinal, uses, remaining, after), strict=True):
            column[:held] = values
        self._previous, self._holes = previous, _NO_SLOTS if hole < 0 else [hole]
        self._extent, self._item_count = held, held - (hole >= 0)
        self.admitted, self.uses = admitted, self.uses + steps
        self.step += steps - 1
        self._advance()

    def _skip_groups(self, steps: int) -> None:
        """Draw so many groups. Where in the pool they are depends on its size alone, so they are
        drawn first. The draws of one slot are then followed all at once, by their number."""
        group, first = self.group, self.admitted
        sizes = self._sizes(steps)
        draws = self._draw_many(sizes)
        count, before = len(draws), int(sizes[0])
        slots = range(before, int(sizes[-1]))  # those that come in behind the first step
        self._reserve(slots.stop)
        (firsts, of_firsts), in_turn = _follow(draws, self._mark)
        taken = np.arange(len(slots)) // group * group + group  # draws before a slot comes in
        most, some = self.counts.most, first + count + len(slots)  # no item from ``some`` on enters
        is_even = self.counts.of_first(some) - self.counts.of_first(first) == most * (some - first)
        uses_given, coming = np.full(count, most), np.full(len(slots), most)
        while True:
            # An item's uses depend on its ordinal, that on how many were used up before. What is
            # right up to some draw is found right beyond it, so this ends; mostly at once.
            self._remaining[slots.start : slots.stop] = coming
            remaining = np.empty(count, np.int64)  # before each draw
            remaining[firsts] = self._remaining[of_firsts]
            for these, previous in in_turn:
                left = remaining[previous] - 1
                remaining[these] = np.where(left, left, uses_given[previous])
            free = np.flatnonzero(remaining == 1)  # draws that make room for an item
            ordinals = first + sizes[free // group] - before + np.arange(len(free))
            new = first + np.arange(len(slots)) + np.searchsorted(free, taken)
            if is_even:
                break
            was = uses_given.copy(), coming
            uses_given[free], coming = self.counts.of(ordinals), self.counts.of(new)
            if np.array_equal(uses_given, was[0]) and np.array_equal(coming, was[1]):
                break
        self._ordinal[slots.start : slots.stop] = new
        self._uses[slots.start : slots.stop] = coming
        self._after[slots.start : slots.stop] = 0
        refills = free[: np.searchsorted(free, count - group)]  # later ones are holes yet
        remaining -= 1
        remaining[refills] = uses_given[refills]
        after = np.repeat(np.arange(self.step + 1, self.step + steps + 1), group)
        after[refills] = 0
        # Of a slot that occurs more than once the last value stays.
        self._remaining[draws] = remaining
        self._after[draws] = after
        self._ordinal[draws[refills]] = ordinals[: len(refills)]
        self._uses[draws[refills]] = uses_given[refills]
        self._holes, self._extent = draws[free[len(refills) :]], slots.stop
        self._item_count = slots.stop - len(self._holes)
        self.admitted = first + len(refills) + len(slots)
        self.uses += count
        self.step += steps - 1
        self._advance()

    def _draw_many(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slots that steps draw, ``int64 [steps * group]``: what ``_uniform`` draws."""
        widths = self._width(sizes)
        fractions = np.empty((len(sizes), int(widths[0])))  # the first are as wide as any
        for number, row in enumerate(fractions):
            self._random.at(self._key, self.step + number).random(out=row)
        fractions *= sizes[:, None].astype(np.float64)  # else NumPy converts them piece by piece
        slots = fractions.astype(np.int32)
        in_order = np.sort(slots)
        repeats = (in_order[:, 1:] == in_order[:, :-1]).any(1) | (widths < widths[0])
        for number in np.flatnonzero(repeats).tolist():
            distinct = self._distinct(slots[number, : widths[number]])
            if len(distinct) < self.group:
                distinct = self._uniform(self.step + number, int(sizes[number]))
            slots[number, : self.group] = distinct[: self.group]
        return slots[:, : self.group].ravel().astype(np.int64)

    def snapshot(self, step: int) -> Snapshot:
        """Return the newest snapshot at or before ``step``."""
        return next(s for s in reversed(self._snapshots) if s.step <= step)

    def forget_before(self, step: int) -> None:
        """Drop the snapshots that only steps before ``step`` would need."""
        while len(self._snapshots) > 1 and self._snapshots[1].step <= step:
            self._snapshots.popleft()

    def restore(self, snapshot: Snapshot) -> None:
        """Restore a snapshot into a new pool."""
        held = len(snapshot.ordinals)
        self._reserve(held)
        self._item_count = self._extent = held
        self._ordinal[:held] = snapshot.ordinals
        self._remaining[:held] = snapshot.remaining
        self._uses[:held] = self.counts.of(snapshot.ordinals)
        self._after[:held] = np.where(snapshot.recent, snapshot.step, 0)
        self.step = snapshot.step
        self.admitted = snapshot.admitted
        self.uses = self.counts.of_first(self.admitted) - int(snapshot.remaining.sum())
        unseen = np.count_nonzero(self._uses[:held] == snapshot.remaining)
        self.seen = self.admitted - int(unseen)
        self.ended = self.ended or self.admitted == self.items
        self._snapshots.clear()
        self._snapshots.append(snapshot)

    def _uniform(self, step: int, held: int) -> NDArray[np.int64]:
        """Draw distinct slots with items uniformly, in time proportional to the group."""
        generator = self._random.at(self._key, step)
        count = self.group
        if held < 4 * count:
            return generator.permutation(held)[:count]
        # Rejecting what was drawn before leaves a uniform draw without replacement; so few more
        # are drawn that there is hardly ever a second round. (A fraction times a whole number is
        # several times as fast as bounded integers; its bias is below 2^-30 for any pool that fits
        # in memory.)
        distinct: NDArray[np.int64] = _NO_SLOTS
        while len(distinct) < count:
            slots = generator.random(self._width(held) - len(distinct))
            slots = (slots * held).astype(np.int64)
            if len(distinct):
                slots = np.concatenate([slots, distinct])
            distinct = self._distinct(slots)
        return distinct[:count]

    def _width(self, held: Any) -> Any:
        """Return how many slots are drawn so that there is a group of distinct ones, mostly."""
        return self.group + self.group * self.group // held + _SLACK

    def _distinct(self, slots: NDArray[Any]) -> NDArray[Any]:
        """Return each slot once: of one that was drawn more than once, the last place stays."""
        places = self._places[: len(slots)]
        self._mark[slots] = places
        distinct: NDArray[Any] = slots[self._mark[slots] == places]
        return distinct

    def _drain(self) -> NDArray[np.int64]:
        if self._levels is None:
            self._levels = self._begin_drain()
        levels = self._levels
        self._count_before = self._item_count
        need = min(self.group, self.uses_left)
        avoid = self.step if self.step and self.group == 1 and self._item_count > 1 else None
        picks: list[NDArray[np.int64]] = []
        while need:
            # A pass picks distinct items; another pass starts only after all items were picked.
            round_picks: list[tuple[int, NDArray[np.int64]]] = []
            for level in sorted(levels, reverse=True):
                queue = levels[level]
                while need and queue:
                    slots = queue.popleft()
                    if avoid is not None and self._after[slots[0]] == avoid:
                        queue.append(slots)  # in groups of one, all chunks have one item
                        if len(queue) == 1:
                            break
                        slots = queue.popleft()
                    if len(slots) > need:
                        queue.appendleft(slots[need:])
                        slots = slots[:need]
                    need -= len(slots)
                    round_picks.append((level, slots))
            for level, slots in round_picks:
                if level > 1:
                    levels.setdefault(level - 1, deque()).append(slots)
                picks.append(slots)
        return picks[0] if len(picks) == 1 else np.concatenate(picks)

    def _begin_drain(self) -> dict[int, deque[NDArray[np.int64]]]:
        slots = self._slots_held()
        after = self._after[slots]
        after[after < self._snapshots[-1].step] = 0  # a resumed run does not know these
        order = slots[np.lexsort((self._ordinal[slots], after))]
        remaining = self._remaining[order]
        levels: dict[int, deque[NDArray[np.int64]]] = {}
        for level in np.unique(remaining):
            slots = order[remaining == level]
            chunks = slots[:, None] if self.group == 1 else [slots]
            levels[int(level)] = deque(chunks)
        return levels

    def _close_holes(self, slots: NDArray[np.int64]) -> None:
        """Move the items in these slots, which are all items, to the first slots."""
        for column in (self._ordinal, self._uses, self._remaining, self._after):
            column[: len(slots)] = column[slots]
        self._extent = self._item_count
        self._holes = _NO_SLOTS
        self._previous = None

    def _take_snapshot(self) -> None:
        held = slice(self._extent)
        self._snapshots.append(
            Snapshot(
                self.step,
                self.admitted,
                self._ordinal[held].copy(),
                self._remaining[held].copy(),
                (self._after[held] == self.step) & (self.step > 0),
            )
        )


_Pair = tuple[NDArray[Any], NDArray[Any]]


def _follow(draws: NDArray[np.int64], mark: NDArray[np.int32]) -> tuple[_Pair, list[_Pair]]:
    """Return the draws that are the first of their slots, with these slots; then those that are the
    second, and so on, each with the draw of the same slot before it."""
    runs: list[_Pair] = []
    before: NDArray[Any] = draws
    left, slots = np.arange(len(draws), dtype=np.int32), draws
    while len(left):
        if runs:
            before = mark[slots]
        mark[slots[::-1]] = left[::-1]  # of a slot that occurs more than once the first stays
        now = mark[slots] == left
        runs.append((left[now], before[now]))
        left, slots = left[~now], slots[~now]
    return runs[0], runs[1:]


def _number_repeats(
    slots: NDArray[np.int64], uses: NDArray[np.int64], remaining: NDArray[np.int64]
) -> int:
    """Number the uses of slots that occur more than once in a draw; return the repeats."""
    counts: dict[int, int] = {}
    for i, slot in enumerate(slots.tolist()):
        before = counts.get(slot, 0)
        uses[i] += before
        remaining[i] -= before
        counts[slot] = before + 1
    return len(slots) - len(counts)
