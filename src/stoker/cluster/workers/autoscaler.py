"""How many actors keep the consumer fed: decided from measured rates, a second at a time.

While the consumer is fed, actors are at work for as long as what it takes costs. So their work in a
span of time, over the time that the consumer spent on its own, is the number that it needs; a fifth
more keeps it fed when a batch is late. Of a consumer that does little but wait that number says
nothing yet; then there are to be twice as many.

If more actors did not get clearly more done in the same time, something else is the limit: those
are sent away again, and for a minute no more than before are asked for.
"""

from __future__ import annotations

import math
from typing import NamedTuple

# Long beside a request of tens of milliseconds, short beside an epoch. Chosen, not measured.
SPAN_S = 1.0
# A fifth more keeps the consumer fed when a batch is late. Chosen, not measured.
_SPARE = 1.2
# At a time: a number of which nothing is known yet is found within a few spans.
_GROWTH = 2
# Of the time: less says nothing of what the consumer could take.
_OWN_FRACTION = 0.05
# Of the rows in the same time: what counts as more. Smaller differences are noise
# (bench/ray_workers.py, ranges).
_CLEARLY = 1.1
# After actors have joined: they have yet to open files, and import.
_SETTLING_SPANS = 1
# With too many actors, before some are sent away: starting one again takes seconds.
_CALM_SPANS = 5
# A minute: the limit may have been another job's, and trying again costs actors for a few spans.
_CEILING_SPANS = 60


class Span(NamedTuple):
    """What was measured in a span of time.

    Attributes:
        elapsed_s: how long it was.
        waited_s: how long the consumer waited in it.
        busy_s: how long actors worked in it, all together.
        rows: what they got done.
        actors: how many took part, all the while.
    """

    elapsed_s: float
    waited_s: float
    busy_s: float
    rows: int
    actors: int

    @property
    def is_fed(self) -> bool:
        """Whether the consumer hardly waited."""
        return self.waited_s < _OWN_FRACTION * self.elapsed_s


class ActorAutoscaler:
    """Decides how many actors there are to be."""

    def __init__(self) -> None:
        self._before: Span | None = None  # the last one with fewer actors
        self._settling = 0
        self._ceiling = 0  # none
        self._ceiling_spans = 0
        self._too_many: list[int] = []

    def decide(self, span: Span, room: int) -> int:
        """Return how many actors there are to be, at least one.

        Args:
            span: what was measured since the last decision.
            room: how many more the cluster has room for.
        """
        actors = span.actors
        before = self._before
        if before is not None and actors > before.actors:
            if self._settling:
                self._settling -= 1
                return actors
            self._before = None
            if not span.is_fed and span.rows < _CLEARLY * before.rows * _ratio(span, before):
                self._ceiling, self._ceiling_spans = before.actors, _CEILING_SPANS
                return before.actors
        needed = actors_needed(span)
        if self._ceiling_spans:
            self._ceiling_spans -= 1
            needed = min(needed, self._ceiling)
        if needed > actors:
            self._too_many.clear()
            more = max(0, min(needed - actors, (_GROWTH - 1) * actors, room))
            if more:
                self._before, self._settling = span, _SETTLING_SPANS
            return actors + more
        return self._calmly(needed, actors)

    def _calmly(self, needed: int, actors: int) -> int:
        """Return how many there are to be where fewer would do."""
        self._too_many.append(needed)
        if needed == actors:
            self._too_many.clear()
        if len(self._too_many) < _CALM_SPANS:
            return actors
        fewer = max(self._too_many)
        self._too_many.clear()
        return fewer


def actors_needed(span: Span) -> int:
    """Return how many actors keep a consumer fed that would never wait; at least one."""
    own_s = span.elapsed_s - span.waited_s
    if own_s < _OWN_FRACTION * span.elapsed_s:
        return _GROWTH * span.actors
    return max(1, math.ceil(_SPARE * span.busy_s / own_s))


def _ratio(span: Span, before: Span) -> float:
    return span.elapsed_s / before.elapsed_s
