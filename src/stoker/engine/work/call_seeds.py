"""Seeds the generators that a user's code may draw from, before each of its calls.

The seed is the address of the call: seed and epoch, the caller, the place of the example, and the
use. So draws are distinct, and the same for any number of workers and after a resume. These are the
generators that the user's objects hold, and those of ``random``, ``numpy.random`` and torch.

In a worker process nobody else draws from them. In the consumer's thread the trainer does: there
all states are put back after the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from stoker.basics.generators import SeededGenerator, global_generators
from stoker.engine.work.segment import Segment
from stoker.engine.work.step import WorkAddress
from stoker.schedule import rng

Place = Callable[[int, int], None]
"""Seeds generators for a call, by the place of its example and the key of its use."""


class CallSeeds:
    """Seeds generators before the calls of a segment's callers.

    Args:
        segment: its callers call the user's code.
        address: of the segment's work in the epoch.
        held: the generators that the user's objects hold, by caller.
        with_global: whether the global generators are seeded, too.
    """

    def __init__(
        self,
        segment: Segment,
        address: WorkAddress,
        held: Sequence[Sequence[SeededGenerator]],
        *,
        with_global: bool,
    ) -> None:
        self._calls_users = segment.calls_users
        self._address = address
        self._held = held
        self._with_global = with_global
        self._places: dict[int, Place | None] = {}

    def of(self, caller: int) -> Place | None:
        """Return what seeds for a caller, by its number; None if that calls no code of users."""
        if caller not in self._places:
            self._places[caller] = self._place(caller)
        return self._places[caller]

    def _place(self, caller: int) -> Place | None:
        held = self._held[caller]
        if not (held or (self._with_global and self._calls_users[caller])):
            return None
        at, seed, epoch = self._address[:3]
        key = int(rng.key(seed, epoch, rng.CALL + at, caller)[0])
        # Torch is there as soon as it is imported, even by the call before.
        generators = global_generators if self._with_global else tuple

        def place(place: int, use: int) -> None:
            seed = rng.mixed(key ^ use, place)
            for each in generators():
                each.seed(seed)
            for number, each in enumerate(held, 1):
                each.seed(rng.mixed(seed, number))

        return place


def seeding_ns() -> int:
    """Return what seeding the global generators takes, in nanoseconds; it leaves them seeded."""
    took = []
    for seed in range(4):  # the first fills caches
        began_ns = time.perf_counter_ns()
        for each in global_generators():
            each.seed(seed)
        took.append(time.perf_counter_ns() - began_ns)
    return min(took)
