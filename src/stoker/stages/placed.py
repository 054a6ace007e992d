"""The caches of one chain that share a budget: each example is kept at one place at most.

Examples are looked up at the last place first, which saves most. Where one is not kept, it is made
from the source, and its forms at all places are weighed against each other (``choice``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from stoker.basics.resources import format_seconds
from stoker.cache.layout import room_of
from stoker.cache.places.choice import Forms, PlaceChoice
from stoker.cache.places.model import NOWHERE
from stoker.replicas.thread_safety import thread_safe
from stoker.stats import CacheCounts, CacheStats, PlaceStats
from stoker.transport.codec.encoder import encode

if TYPE_CHECKING:
    from stoker.cache.example_cache import ExampleCache


class Forecast(NamedTuple):
    """What a plan of several places promises of an epoch, once the store is full."""

    kept: tuple[float, ...]
    """The fraction of the examples that each place keeps."""
    work_s: float
    """Seconds of work up to the last place, without any cache."""
    predicted_s: float
    """Seconds of work up to the last place that are left."""


class Form(NamedTuple):
    """What an example is at one place, encoded: maps behind it may change the value."""

    place: int
    record: list[bytes]
    size_bytes: int
    saved_ns: int
    """The time that making it took."""

    @classmethod
    def of(cls, place: int, value: Any, saved_ns: int) -> Form:
        """Encode a value. Raises TypeError for what cannot be stored."""
        record = encode(value)
        return cls(place, record, sum(map(len, record)), saved_ns)


@thread_safe
class PlacedCaches:
    """Caches at several places of a chain. Picklable, as they are.

    Args:
        caches: one for each place, in the order of the chain; all of one budget.
        examples: the number of examples.
        sample: forms that were measured before.
        forecast: what was planned from these.
    """

    def __init__(
        self,
        caches: Sequence[ExampleCache],
        examples: int,
        sample: Sequence[Forms] = (),
        forecast: Forecast | None = None,
    ) -> None:
        self.caches = tuple(caches)
        self.forecast = forecast
        self._examples = examples
        self._sample = tuple(sample)
        self._choice = PlaceChoice(self._sample)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_choice"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._choice = PlaceChoice(self._sample)

    def open(self, examples: int) -> None:
        """Open the store for all places, whose counts are asked for in this process."""
        self._examples = examples
        for cache in self.caches:
            cache.open()

    @property
    def earlier(self) -> list[tuple[int, ExampleCache]]:
        """All places but the last, which is looked up first: the later ones first."""
        return [*enumerate(self.caches[:-1])][::-1]

    def note(self) -> str:
        """Say what is kept where, as far as it is planned."""
        shared = "or at a place before it, " if self.earlier else ""
        chosen = f"  {shared}wherever each example saves most for its bytes"
        if self.forecast is None:
            return chosen
        parts = [
            f"{part:.0%} as {cache.describes}"
            for part, cache in zip(self.forecast.kept, self.caches, strict=True)
        ]
        work, left = map(format_seconds, (self.forecast.work_s, self.forecast.predicted_s))
        return f"{chosen}: {', '.join(parts)}; an epoch takes {left} of work up to here, not {work}"

    def offer(self, keys: Sequence[bytes], forms: Sequence[Form], file: str | None) -> None:
        """Let one form of an example in, or none.

        Args:
            keys: the example's key at each place.
            forms: what it is at these places, or at some of them.
            file: its local file, which the page cache may drop then.
        """
        last = self.caches[-1]
        held = sum(cache.own_items for cache in self.caches) + last.queued_items
        saved_ns, sizes = [0.0] * len(keys), [0.0] * len(keys)
        for form in forms:
            saved_ns[form.place], sizes[form.place] = form.saved_ns, room_of(form.size_bytes)
        at = self._choice.choose(saved_ns, sizes, last.free_bytes, max(1, self._examples - held))
        if at == NOWHERE:
            last.count(refused=1, refused_bytes=forms[-1].size_bytes)
            return
        form = next(form for form in forms if form.place == at)
        self.caches[at].enter(keys[at], form.record, form.size_bytes, file)

    def counts(self) -> CacheCounts:
        """Return the counts of all places; an example is missed if no place has it."""
        each = [cache.counts() for cache in self.caches]
        return _together(each)

    def stats(self, since: CacheCounts | None = None) -> CacheStats:
        """Return the counts after ``since``, the state of the store, and what each place keeps."""
        each = [cache.stats() for cache in self.caches]
        places = tuple(
            PlaceStats(cache.describes, stats.own_items, stats.own_bytes, stats.hits)
            for cache, stats in zip(self.caches, each, strict=True)
        )
        counts = _together(each) - (since or CacheCounts())
        return replace(
            each[-1],
            **vars(counts),
            own_items=sum(place.items for place in places),
            own_bytes=sum(place.size_bytes for place in places),
            places=places,
            predicted_s=None if self.forecast is None else self.forecast.predicted_s,
        )


def _together(each: Sequence[CacheCounts]) -> CacheCounts:
    """Return the counts of places together; the first is asked last, for what the others miss."""
    whole = CacheCounts()
    for counts in each:
        whole = whole + counts
    return replace(whole, misses=each[0].misses)
