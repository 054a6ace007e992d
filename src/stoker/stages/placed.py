"""The caches of one chain that share a budget: each example is kept at one place at most.

Examples are looked up at the last place first, which saves most. Where one is not kept, it is made
from the source, and its forms at all places are weighed against each other (``choice``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.basics.fingerprint import Fingerprint
from stoker.cache.layout import room_of
from stoker.cache.places.arrangement import SPARED
from stoker.cache.places.choice import Forms, PlaceChoice, Room
from stoker.cache.places.model import NOWHERE
from stoker.cache.store import MISSING
from stoker.stats import CacheCounts, CacheStats, PlaceStats
from stoker.transport.codec.encoder import encode
from stoker.transport.codec.record import LeftOut

if TYPE_CHECKING:
    from stoker.cache.example_cache import ExampleCache


class Form(NamedTuple):
    """What an example is at one place, encoded: maps behind it may change the value."""

    place: int
    record: list[bytes]
    size_bytes: int
    saved_ns: int
    """The time that making it took."""


class PlacedCaches:
    """Caches at several places of a chain, in memory and on a disk behind it. Picklable.

    Args:
        caches: one for each place, in the order of the chain; all of one budget.
        examples: the number of examples.
        sample: forms that were measured before.

    Attributes:
        places: how many places there are.
        tiers: the caches of each place, in memory, then on the disk behind it if there is one.
        holdings: the same caches in one row; the last is looked up first.
    """

    def __init__(
        self,
        caches: Sequence[ExampleCache],
        examples: int,
        sample: Sequence[Forms] = (),
    ) -> None:
        self.places = len(caches)
        slow = [cache.behind for cache in caches if cache.behind is not None]
        self.tiers = (tuple(caches), tuple(slow)) if slow else (tuple(caches),)
        self.holdings = (*slow, *caches)
        self._examples = examples
        self._sample = tuple(sample)
        self._begin()

    def _begin(self) -> None:
        self._choices = [PlaceChoice(self._sample), PlaceChoice()]
        # Which holding has each example, by its number, as far as this process knows.
        self._where = np.zeros(0, np.int8)

    def __getstate__(self) -> dict[str, Any]:
        per_process = ("_choices", "_where")
        return {name: value for name, value in vars(self).items() if name not in per_process}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def found_at(self, holding: int, found: Any) -> tuple[int, Any]:
        """Return the place of what was found in a holding, and its value."""
        return holding % self.places, found

    def form(self, place: int, value: Any, saved_ns: int) -> Form:
        """Encode a value. Raises TypeError for what cannot be stored."""
        return _form(place, encode(value), saved_ns)

    def _cache_of(self, tier: tuple[ExampleCache, ...], place: int) -> ExampleCache:
        return tier[place]

    def read_ahead(self, indices: NDArray[np.int64]) -> None:
        """Have what is on a disk read, without waiting, as far as this process knows where."""
        if self.holdings[0].in_memory:  # and so all of them
            return
        where = self.where(indices)
        for number, cache in enumerate(self.holdings):
            cache.read_ahead(indices[where == number])

    def where(self, indices: NDArray[np.int64]) -> NDArray[np.int8]:
        """Return the holdings where examples were found before; the last for the others."""
        try:
            found: NDArray[np.int8] = self._where[indices]
        except IndexError:  # the first ones, or the dataset has grown
            more = int(indices.max()) + 1 + len(self._where) // 2
            where = np.full(max(more, self._examples), len(self.holdings) - 1, np.int8)
            where[: len(self._where)] = self._where
            self._where = where
            found = where[indices]
        return found

    def note_where(self, index: int, holding: int) -> None:
        """Remember where an example was found."""
        where = self._where
        if index < len(where):
            where[index] = holding

    def open(self, examples: int) -> None:
        """Open the stores for all places, whose counts are asked for in this process."""
        self._examples = examples
        for cache in self.holdings:
            cache.open()

    @property
    def others(self) -> list[tuple[int, ExampleCache]]:
        """All holdings but the last, which is looked up first; in the order of looking them up."""
        return [*enumerate(self.holdings[:-1])][::-1]

    @property
    def takes(self) -> bool:
        """True if a store has room for more examples."""
        return any(tier[-1].takes for tier in self.tiers)

    def note(self) -> str:
        """Say where examples are kept."""
        shared = "or at a place before it, " if self.places > 1 else ""
        if len(self.tiers) > 1:
            shared += "in memory or on the disk behind it, "
        return f"{shared}wherever each example saves most for its bytes"

    def offer(
        self, fingerprint: Fingerprint, index: int, forms: Sequence[Form], file: str | None
    ) -> None:
        """Let one form of an example in, or none.

        Args:
            fingerprint, index: of the example.
            forms: what it is at each place, or at some of them.
            file: its local file, which the page cache may drop then.
        """
        saved_ns, sizes = ([0.0] * self.places for _ in range(2))
        for form in forms:
            saved_ns[form.place], sizes[form.place] = form.saved_ns, room_of(form.size_bytes)
        for tier, choice in zip(self.tiers, self._choices, strict=False):
            if not tier[-1].takes:
                continue
            at = choice.choose(index, saved_ns, sizes, functools.partial(self._room, tier[-1]))
            if at != NOWHERE:
                form = next(form for form in forms if form.place == at)
                cache = self._cache_of(tier, at)
                key = cache.key(fingerprint, index)
                return cache.enter(key, form.record, form.size_bytes, file)
        self.tiers[0][-1].count(refused=1, refused_bytes=forms[-1].size_bytes)

    def _room(self, store: ExampleCache) -> Room:
        """Return the room of a tier's store, for all examples that no tier has."""
        held = sum(cache.own_items for cache in self.holdings)
        held += sum(tier[-1].queued_items for tier in self.tiers)
        return self._room_beside(held, store.free_bytes, store.limit_bytes)

    def _room_beside(self, held: float, free_bytes: float, limit_bytes: float) -> Room:
        """Return the room for the examples that are not held."""
        examples, counts = max(1, self._examples), self.counts()
        left = max(1, examples - int(held))
        # What does not fit at the end is read again in every epoch, and costs more than larger
        # forms save. So they get less than all, the less the more examples are yet to come.
        free_bytes -= limit_bytes * SPARED * left / examples
        return Room.of(max(0.0, free_bytes), left, counts.admitted, counts.misses)

    def flush(self) -> None:
        """Wait until what this process has offered is written; not for long."""
        for tier in self.tiers:
            tier[-1].flush()

    def counts(self) -> CacheCounts:
        """Return the counts of all places; an example is missed if no place has it."""
        return _together([cache.counts() for cache in self.holdings])

    def stats(self, since: CacheCounts | None = None) -> CacheStats:
        """Return the counts after ``since``, the state of the stores, and what each place keeps."""
        each = [cache.stats() for cache in self.holdings]
        places = tuple(
            PlaceStats(
                cache.describes, stats.own_items, stats.own_bytes, stats.hits, cache.in_memory
            )
            for cache, stats in zip(self.holdings, each, strict=True)
        )
        counts = _together(each) - (since or CacheCounts())
        stores = [tier[-1].stats() for tier in self.tiers]
        return replace(
            stores[0],
            **vars(counts),
            items=sum(store.items for store in stores),
            payload_bytes=sum(store.payload_bytes for store in stores),
            used_bytes=sum(store.used_bytes for store in stores),
            limit_bytes=sum(store.limit_bytes for store in stores),
            full=all(store.full for store in stores),
            own_items=sum(place.items for place in places),
            own_bytes=sum(place.size_bytes for place in places),
            places=places,
        )


class PlacedOverNodes(PlacedCaches):
    """Places of a chain over the nodes of a cluster: one item for each example, with its place.

    So one request finds an example, at whatever place it is kept. Each process that makes an
    example chooses its place, by the costs that it measures and the room on its own host; the
    item's owner stores it.

    Args:
        cache: over the nodes, for what comes out of the last place.
        places: how many there are.
    """

    def __init__(self, cache: ExampleCache, places: int) -> None:
        super().__init__([cache], cache.examples)
        self.places = places

    def found_at(self, holding: int, found: Any) -> tuple[int, Any]:
        if type(found) is LeftOut:
            return self.places - 1, found
        match found:
            case int(place), value if type(place) is int and 0 <= place < self.places:
                return place, value
        return self.places - 1, MISSING  # no such item was stored by this chain

    def form(self, place: int, value: Any, saved_ns: int) -> Form:
        record = encode(value if type(value) is LeftOut else (place, value))
        return _form(place, record, saved_ns)

    def _cache_of(self, tier: tuple[ExampleCache, ...], place: int) -> ExampleCache:
        return tier[-1]

    def _room(self, store: ExampleCache) -> Room:
        """Return the room of all stores, by that of this host: each owns in proportion to it."""
        part = store.part_here * store.examples / max(1, self._examples)
        if not part:  # no store here: the owners refuse what does not fit
            return Room(math.inf, 1, 1)
        held = (store.own_items + store.queued_items) / part
        return self._room_beside(held, store.free_bytes / part, store.limit_bytes / part)

    def stats(self, since: CacheCounts | None = None) -> CacheStats:
        return self.holdings[0].stats(since)


def _form(place: int, record: list[bytes], saved_ns: int) -> Form:
    return Form(place, record, sum(map(len, record)), saved_ns)


def _together(each: Sequence[CacheCounts]) -> CacheCounts:
    """Return the counts of places together; the first is asked last, for what the others miss."""
    whole = CacheCounts()
    for counts in each:
        whole = whole + counts
    return replace(whole, misses=each[0].misses)
