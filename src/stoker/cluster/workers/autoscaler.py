"""Autoscaling of Ray actors: their number, decided each second from measured rates.

While the consumer hardly waits, actors work exactly as long as its batches cost. So the actors'
busy time in a span, divided by the consumer's own time, is the number of actors that it needs; a
fifth more covers late batches. For a consumer that mostly waits that number says nothing yet; then
the number of actors doubles.

If more actors did not clearly finish more rows in the same time, something else is the limit: the
additional ones are dismissed, and for a minute no more than before are requested.
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
# (bench/results/ray_workers.json, ranges).
_CLEARLY = 1.1
# After actors have joined: they have yet to open files, and import.
_SETTLING_SPANS = 1
# With too many actors, before some are sent away: starting one again takes seconds.
_CALM_SPANS = 5
# A minute: the limit may have been another job's, and trying again costs actors for a few spans.
_CEILING_SPANS = 60


class Span(NamedTuple):
    """Measurements of a span of time.

    Attributes:
        elapsed_s: its length in seconds.
        waited_s: seconds that the consumer waited in it.
        busy_s: seconds that actors worked in it, summed.
        rows: rows that they finished.
        actors: how many took part throughout.
    """

    elapsed_s: float
    waited_s: float
    busy_s: float
    rows: int
    actors: int

    @property
    def is_fed(self) -> bool:
        """True if the consumer hardly waited."""
        return self.waited_s < _OWN_FRACTION * self.elapsed_s


class ActorAutoscaler:
    """Decides the number of actors."""

    def __init__(self) -> None:
        self._before: Span | None = None  # the last one with fewer actors
        self._settling = 0
        self._ceiling = 0  # none
        self._ceiling_spans = 0
        self._too_many: list[int] = []

    def decide(self, span: Span, room: int) -> int:
        """Return the number of actors to have, at least one.

        Args:
            span: the measurements since the last decision.
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
        """Return the number of actors to have when fewer would suffice."""
        self._too_many.append(needed)
        if needed == actors:
            self._too_many.clear()
        if len(self._too_many) < _CALM_SPANS:
            return actors
        fewer = max(self._too_many)
        self._too_many.clear()
        return fewer


def actors_needed(span: Span) -> int:
    """Return how many actors a consumer needs so that it never waits; at least one."""
    own_s = span.elapsed_s - span.waited_s
    if own_s < _OWN_FRACTION * span.elapsed_s:
        return _GROWTH * span.actors
    return max(1, math.ceil(_SPARE * span.busy_s / own_s))


def _ratio(span: Span, before: Span) -> float:
    return span.elapsed_s / before.elapsed_s
