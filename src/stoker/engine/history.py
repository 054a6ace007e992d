"""The latest outputs of a run: the counts after each, and which of them training has finished with.

A trainer may acknowledge outputs late, so the last 64 are remembered.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from stoker.errors import StateError

_REMEMBERED = 64  # the most outputs that a wrapper may read ahead of its trainer
FORGOTTEN = (
    f"more than {_REMEMBERED - 1} batches were handed out since the last that was acknowledged: "
    "acknowledge batches when training has finished with them"
)


class HandedOut(NamedTuple):
    """The counts of an epoch after an output was handed out."""

    yielded: int
    uses: int
    fresh: int
    loaded: int


class History:
    """The counts after the latest outputs; ``add`` takes those after one more.

    Attributes:
        finished: the outputs that the trainer has acknowledged; None if it never did.
    """

    def __init__(self, began: HandedOut) -> None:
        self._began_at = began.yielded
        # Plain tuples, read as HandedOut: one is made for each output, and they cost less.
        self._counts = deque[tuple[int, int, int, int]]([began], _REMEMBERED)
        self.add = self._counts.append
        self.finished: int | None = None

    @property
    def oldest(self) -> HandedOut:
        """The oldest counts that are remembered."""
        return HandedOut(*self._counts[0])

    @property
    def late(self) -> int:
        """The number of outputs not yet acknowledged; 0 if ``acknowledge`` was never called."""
        return 0 if self.finished is None else self.before(0).yielded - self.finished

    def acknowledge(self, outputs: int) -> None:
        """Record that the trainer has finished with ``outputs`` more outputs.

        Raises ValueError when that is more than were handed out.
        """
        finished = (self._began_at if self.finished is None else self.finished) + outputs
        yielded = self.before(0).yielded
        if finished > yielded:
            raise ValueError(
                f"{finished - self._began_at} batches cannot be finished: "
                f"{yielded - self._began_at} were handed out"
            )
        self.finished = finished
        while len(self._counts) > self.late + 1:
            self._counts.popleft()

    def lose(self, at: HandedOut) -> None:
        """Take the counts after one more output, whose error was raised: nobody acknowledges it."""
        self._counts[-1] = at
        self._began_at += 1
        if self.finished is not None:
            self.finished += 1

    def pending(self) -> list[HandedOut | None]:
        """Return the counts before each output not yet acknowledged, oldest first.

        None stands for those that are forgotten.
        """
        if self.finished is None:
            return []
        late = self.late
        found = [HandedOut(*at) for at in self._counts][-1 - late : -1]
        return [*[None] * (late - len(found)), *found]

    def before(self, late: int) -> HandedOut:
        """Return the counts before the last ``late`` outputs. Raises StateError if forgotten."""
        if late >= len(self._counts):
            raise StateError(FORGOTTEN)
        return HandedOut(*self._counts[-1 - late])
