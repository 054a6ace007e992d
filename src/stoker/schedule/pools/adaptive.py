"""The schedule of an adaptive echo, whose factor follows the stall: on integers only.

Each step takes a given number of fresh items, and fills up with the least recently used ones. A
policy decides how many are fresh (by the items that are ready, by a record, or by agreement of
ranks). These numbers, a byte per step, are all that a record needs: the schedule follows from them.

Guarantees:

- Every fresh item is used in the step that it enters, and at most ``max_factor`` times in all.
- No item is used twice in a step.
- An item is used again at the earliest ``distance`` steps after its last use. If too few items have
  rested, the step waits for fresh ones. The distance grows from 2, in a pool's first step, to
  ``min_distance``, by 1 a step at most: over ``RAMP_STEPS`` steps, or as many as that takes. It is
  at most the number of steps that a full pool holds items for, so a full pool always has a step of
  copies to give.
- After the last fresh item, the last batch is filled up with items that were used more recently,
  but with none of the step before.
- A full pool drops the most used items, of these the oldest. A step of fresh items alone may leave
  the pool as it is: while there are plenty, no item need be copied to be kept.

The byte of a step counts grains: a grain is one item, or several in groups above 254. ``ALONE``
stands for a step of fresh items that the pool does not keep. Ties between items that were last used
in the same step go to the one with fewest uses.

Items stand in queues, one for each number of uses. In each queue the order of entering is the order
of last uses, and a full pool drops from the front of the queue with the most uses. The last batch
of an epoch is filled up with uses from the pool. The epoch ends after its last fresh item, without
a drain. A pool may go on in the next epoch (``carry_over``). Its items are then numbered below 0,
by how far before that epoch they entered; so are the steps of their last uses.

Not safe for threads: the engine calls this with the planning lock held.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.basics import compact_integers
from stoker.basics.compact_integers import check_integer
from stoker.schedule.pools.fixed import Draw

# Between snapshots; a resumed pool replays as many, at 0.4 us an example (bench/echo_overhead.py):
# 6 ms at batches of 256.
SNAPSHOT_STEPS = 64
MOST_FACTOR = 1 << 16
"""The largest ``max_factor``: each has a queue of its own. Few enough that a damaged state calls
for little memory."""
MOST_DISTANCE = 1 << 16
"""The largest ``min_distance``: each of these steps has a counter of its own. Bounded as
``MOST_FACTOR`` is."""
RAMP_STEPS = 48
"""Steps over which the distance grows, unless each of them adds more than 1. Trained on images
and on text at R = 5: with this ramp to 8 the loop had waited for 29 steps by step 60, without a
ramp for 32; speed-ups were 3.07 and 3.17, without a distance 1.82 and 2.30."""
# No item in two steps that follow each other. Simulated without that, at R = 6 and a factor of 4:
# three quarters of a batch came in the next one, too.
_LEAST_DISTANCE = 2
# A byte says how many grains of fresh items a step has: 0 to 254, as 255 is ``ALONE``.
_CODES = 254
ALONE = 255
"""The code of a step of fresh items that the pool does not keep: no number of grains has it."""

_NONE = np.empty(0, np.int64)


class RunLength(NamedTuple):
    """Items that were last used in the same step, and equally often by then."""

    ordinals: NDArray[np.int64]  # ascending
    after: int  # the step after that one


@dataclass(frozen=True)
class AdaptiveSnapshot:
    """The pool before a step, and the codes of the steps since.

    Attributes:
        step, admitted: the steps drawn, and the fresh items that entered by then.
        levels: the items in the pool by their number of uses; the first level has one use.
        codes: a byte for each step since.
        began: the step from which the distance grows; below 0 where the pool was carried.
    """

    step: int
    admitted: int
    levels: tuple[tuple[RunLength, ...], ...]
    codes: bytes = b""
    began: int = 0

    @property
    def oldest(self) -> int:
        """The first item that later steps may use."""
        firsts = (int(level[0].ordinals[0]) for level in self.levels if level)
        return min(firsts, default=self.admitted)

    def epochs_back(self, items: int) -> list[int]:
        """Return the ages, in epochs, of carried items; each epoch had ``items``."""
        if self.oldest >= 0:
            return []
        numbers = np.concatenate([s.ordinals for level in self.levels for s in level])
        return [int(back) for back in np.unique(-(numbers[numbers < 0] // items))]


def longest_distance(min_distance: int, size: int, group: int) -> int:
    """Return the distance that a full pool of ``size`` items allows, ``group`` in each step."""
    return max(_LEAST_DISTANCE, min(min_distance, size // group))


def carry_over(pool: AdaptivePool, items: int) -> AdaptiveSnapshot:
    """Return how a pool begins the next epoch, at the end of one that had so many items."""
    levels = tuple(
        tuple(RunLength(s.ordinals - items, s.after - pool.step) for s in level)
        for level in pool.levels
    )
    return AdaptiveSnapshot(0, 0, levels, began=pool.began - pool.step)


class AdaptivePool:
    """The schedule of one echo in one epoch.

    Args:
        max_factor: the most uses of an item; at least 2.
        min_distance: the least number of steps between two uses of an item; at least 2.
        size: the most items in the pool.
        group: the number of items in a step.
    """

    def __init__(self, max_factor: int, min_distance: int, size: int, group: int) -> None:
        self.max_factor = max_factor
        self.min_distance = min_distance
        self.size = size
        self.group = group
        self._longest = longest_distance(min_distance, size, group)
        self.grain = -(-group // _CODES)
        # In a level, items stand in the order in which they entered. That is the order of their
        # last uses, too, as items are drawn in it. So levels are queues.
        self._levels: list[deque[RunLength]] = [deque() for _ in range(max_factor - 1)]
        # The number of items that were used in each of the latest steps, and must rest; oldest
        # first, keyed by the step after the use.
        self._resting: dict[int, int] = {}
        self.reusable = 0  # items that the next step may use again: those not resting
        self.held = 0
        self.copies_left = 0  # uses that the items in the pool have left
        self.began = 0  # the step in which the pool was empty
        self.step = 0
        self.admitted = 0
        self.uses = 0
        self.ended = False
        self.first_step = 0
        self.codes = bytearray()  # of the steps from first_step on
        self._moments: deque[AdaptiveSnapshot] = deque()
        self._take_moment()

    @property
    def levels(self) -> tuple[tuple[RunLength, ...], ...]:
        """The items by their number of uses; the first level has one use."""
        return tuple(tuple(level) for level in self._levels)

    @property
    def distance(self) -> int:
        """The least number of steps since the last use of an item that the next step uses again."""
        more = self._longest - _LEAST_DISTANCE
        ramp = max(RAMP_STEPS, more)
        return _LEAST_DISTANCE + more * min(self.step - self.began, ramp) // ramp

    @property
    def left_over(self) -> int:
        """Items for a step after the last fresh item: all but those of the step before."""
        return self.held - self._resting.get(self.step, 0)

    @property
    def seen(self) -> int:
        """Items that were drawn at least once: every item that entered."""
        return self.admitted

    @property
    def exhausted(self) -> bool:
        """Whether the epoch has no further step."""
        return self.ended

    @property
    def needed(self) -> int:
        """The least fresh items of the next step, in whole grains."""
        missing = max(0, self.group - self.reusable)
        return min(self.group, -(-missing // self.grain) * self.grain)

    @property
    def even_share(self) -> int:
        """Fresh items that the next step should wait for, in whole grains, to avoid swings.

        It is an equal share of fresh items at the highest factor. Without it, a step that had to
        take many fresh items at once would get all of them back at once later, and use them up at
        once. It is 0 while enough copies are left for that factor: ``d * (max_factor - 1) / 2``
        steps of them at distance d, and one to spare.
        """
        most, group = self.max_factor, self.group
        if 2 * self.copies_left > (self.distance * (most - 1) + 2) * group:
            return 0
        share = (self.step + 1) * group // most - self.step * group // most
        return min(group, -(-share // self.grain) * self.grain)

    def fresh_of(self, code: int) -> int:
        """Return the number of fresh items of a code; the epoch's last step may have fewer."""
        return self.group if code == ALONE else min(code * self.grain, self.group)

    def code_of(self, ready: int, *, over: bool) -> int:
        """Return the code of a step with ``ready`` fresh items.

        Args:
            ready: at most ``group``.
            over: whether these are the epoch's last, so that an incomplete grain counts, too.
        """
        whole = over or ready == self.group
        return -(-ready // self.grain) if whole else ready // self.grain

    def draw(self, code: int, fresh: int) -> Draw:
        """Choose a step's uses: ``fresh`` new items first, then others.

        Fewer than ``group`` only where the pool has no more to give.
        """
        now = self.step + 1
        entering = np.arange(self.admitted, self.admitted + fresh)
        again = self.reusable if fresh + self.reusable >= self.group else self.left_over
        self.admitted += fresh
        if code == ALONE:
            firsts = np.zeros(fresh, np.int64)
            draw = Draw(entering, firsts, np.ones(fresh, bool), firsts, 0, 0, 0)
        else:
            draw = self._mix_draw(now, entering, min(self.group - fresh, again))
        self.step = now
        self._rest()
        self.uses += len(draw.ordinals)
        self.codes.append(code)
        if now % SNAPSHOT_STEPS == 0:
            self._take_moment()
        return draw

    def _mix_draw(self, now: int, entering: NDArray[np.int64], need: int) -> Draw:
        levels = self._levels
        parts, numbers, ages, distance_sum, repeats = [entering], [0], [0], 0, 0
        arrivals: list[list[NDArray[np.int64]]] = [[] for _ in range(len(levels) + 1)]
        arrivals[0].append(entering)
        while need:
            at = min((level[0].after, number) for number, level in enumerate(levels) if level)[1]
            stretch = levels[at].popleft()
            if len(stretch.ordinals) > need:
                levels[at].appendleft(RunLength(stretch.ordinals[need:], stretch.after))
                stretch = RunLength(stretch.ordinals[:need], stretch.after)
            count = len(stretch.ordinals)
            self._leave(count, stretch.after)
            need -= count
            repeats += count
            distance_sum += count * (now - stretch.after)
            parts.append(stretch.ordinals)
            numbers.append(at + 1)
            ages.append(now - stretch.after)
            arrivals[at + 1].append(stretch.ordinals)
        arrival_count = 0
        for level, came in zip(levels, arrivals, strict=False):
            items = came[0] if len(came) == 1 else np.concatenate(came) if came else _NONE
            if len(items):
                level.append(RunLength(items, now))
                arrival_count += len(items)
        self.held += arrival_count
        self.copies_left += len(entering) * len(levels) - repeats
        self._resting[now] = arrival_count
        surplus = self._drop_surplus() if self.held > self.size else _NONE
        if self.group == 1:  # one part is empty, or there is none: scalars cost less
            which = 0 if len(entering) else -1
            ordinals, count = parts[which], len(parts[which])
            uses, since = np.array(numbers[which:][:count]), np.array(ages[which:][:count])
        else:
            ordinals, lengths = np.concatenate(parts), [len(part) for part in parts]
            uses, since = np.repeat(np.array([numbers, ages]), lengths, axis=1)
        last = uses == len(levels)
        return Draw(ordinals, uses, last, since, distance_sum, repeats, 0, surplus)

    def _drop_surplus(self) -> NDArray[np.int64]:
        """Drop surplus items: the most used first, of these the oldest."""
        excess = self.held - self.size
        surplus: list[NDArray[np.int64]] = []
        for uses, level in reversed([*enumerate(self._levels, 1)]):
            while excess > 0 and level:
                stretch = level.popleft()
                if len(stretch.ordinals) > excess:
                    level.appendleft(RunLength(stretch.ordinals[excess:], stretch.after))
                    stretch = RunLength(stretch.ordinals[:excess], stretch.after)
                count = len(stretch.ordinals)
                self._leave(count, stretch.after)
                self.copies_left -= count * (self.max_factor - uses)
                excess -= count
                surplus.append(stretch.ordinals)
        return np.concatenate(surplus) if surplus else _NONE

    def _leave(self, count: int, after: int) -> None:
        """Subtract items that leave; they were last used in the step before ``after``."""
        self.held -= count
        if after in self._resting:
            self._resting[after] -= count
        else:
            self.reusable -= count

    def _rest(self) -> None:
        """Count items as reusable that will have rested long enough by the next step."""
        latest = self.step + 1 - self.distance
        while self._resting and (first := next(iter(self._resting))) <= latest:
            self.reusable += self._resting.pop(first)

    def discard(self, ordinals: Collection[int]) -> None:
        """Remove items, before a step."""
        for uses, level in enumerate(self._levels, 1):
            for at, stretch in enumerate(level):
                rest = stretch.ordinals[~np.isin(stretch.ordinals, list(ordinals))]
                count = len(stretch.ordinals) - len(rest)
                if count:
                    level[at] = RunLength(rest, stretch.after)
                    self._leave(count, stretch.after)
                    self.copies_left -= count * (self.max_factor - uses)
            rest_of_level = [stretch for stretch in level if len(stretch.ordinals)]
            level.clear()
            level.extend(rest_of_level)

    def held_ordinals(self) -> NDArray[np.int64]:
        """Return the items in the pool."""
        stretches = [stretch.ordinals for level in self._levels for stretch in level]
        return np.concatenate(stretches) if stretches else _NONE

    # -- going back

    @property
    def replayed_steps(self) -> int:
        """The most steps that are replayed after a snapshot."""
        return SNAPSHOT_STEPS

    def snapshot(self, step: int) -> AdaptiveSnapshot:
        """Return the snapshot for a resume at ``step``."""
        moment = next(m for m in reversed(self._moments) if m.step <= step)
        codes = self.codes[moment.step - self.first_step :]
        return replace(moment, codes=bytes(codes))

    def forget_before(self, step: int) -> None:
        """Drop snapshots that only steps before ``step`` need. The record of codes is kept."""
        while len(self._moments) > 1 and self._moments[1].step <= step:
            self._moments.popleft()

    def restore(self, moment: AdaptiveSnapshot) -> None:
        """Restore a snapshot into a new pool."""
        self.step = self.first_step = moment.step
        self.admitted = moment.admitted
        for level, stretches in zip(self._levels, moment.levels, strict=False):
            level.extend(stretches)
        self.began = moment.began
        counts: Counter[int] = Counter()
        for uses, level in enumerate(self._levels, 1):
            for stretch in level:
                counts[stretch.after] += len(stretch.ordinals)
                self.copies_left += len(stretch.ordinals) * (self.max_factor - uses)
        self._resting = dict(sorted(counts.items()))
        self.held = sum(counts.values())
        self._rest()
        self.uses = moment.step * self.group
        self._moments.clear()
        self._take_moment()

    def _take_moment(self) -> None:
        self._moments.append(
            AdaptiveSnapshot(self.step, self.admitted, self.levels, began=self.began)
        )


def pack(moment: AdaptiveSnapshot) -> dict[str, Any]:
    """Write a moment as JSON: about half a byte for each item, and a byte for each step since."""
    levels = []
    first = min(0, moment.oldest)
    for level in moment.levels:
        ordinals = np.concatenate([_NONE, *(s.ordinals for s in level)])
        lengths = np.array([len(s.ordinals) for s in level], np.int64)
        ages = np.array([moment.step - s.after for s in level], np.int64)
        parts = (
            compact_integers.encode_ascending(ordinals, first),
            compact_integers.encode_small(lengths),
            compact_integers.encode_small(ages),
        )
        levels.append(" ".join(parts))
    codes = compact_integers.encode_bytes(np.frombuffer(moment.codes, np.uint8))
    return {
        "step": moment.step,
        "admitted": moment.admitted,
        "levels": levels,
        "codes": codes,
        "first": first,
        "began": moment.began,
    }


def unpack(
    state: Any, *, max_factor: int, size: int, group: int, items: int, earlier: int
) -> AdaptiveSnapshot:
    """Read what ``pack`` wrote of a pool that was made with these arguments.

    Args:
        items: how many fresh items the epoch has, at most.
        earlier: how many all epochs before it had that it may have been carried from.

    Raises ValueError, TypeError or KeyError when it is damaged, or no such pool can be like that.
    """
    admitted = check_integer(state["admitted"], 0, items)
    began = check_integer(state["began"], -compact_integers.LARGEST if earlier else 0, 0)
    first = check_integer(state["first"], -earlier if began else 0, 0)
    before = max_factor * size if began else 0  # uses of what was there at the beginning, at most
    step = check_integer(state["step"], 0, (max_factor * admitted + before) // group + 1)
    if len(state["levels"]) != max_factor - 1:
        raise ValueError("the packed pool has other levels than its factor")
    item_count, levels, all_ordinals = 0, [], []
    for text in state["levels"]:
        ordinals_text, lengths_text, ages_text = str(text).split(" ")
        ordinals = compact_integers.decode_ascending(
            ordinals_text, first, size - item_count, admitted
        )
        lengths = compact_integers.decode_small(lengths_text, len(ordinals), len(ordinals) + 1)
        ages = compact_integers.decode_small(ages_text, len(lengths), step - began)
        sound = len(lengths) == len(ages) and int(lengths.sum()) == len(ordinals)
        if not sound or (lengths < 1).any() or (np.diff(ages) > 0).any():
            raise ValueError("the packed pool is damaged")
        pieces = np.split(ordinals, np.cumsum(lengths)[:-1]) if len(lengths) else []
        levels.append(tuple(RunLength(p, step - int(a)) for p, a in zip(pieces, ages, strict=True)))
        item_count += len(ordinals)
        all_ordinals.append(ordinals)
    if len(np.unique(np.concatenate(all_ordinals))) != item_count:
        raise ValueError("an item is in the packed pool twice")
    steps = (max_factor * items + before) // group + 1  # in the epoch
    codes = compact_integers.decode_bytes(state["codes"], max(0, steps - step)).tobytes()
    return AdaptiveSnapshot(step, admitted, tuple(levels), codes, began)
