"""The place of ``.cache("auto")``: the one where a cache of what fits saves most time.

Some examples are made, and measured at each place where a cache may stand. What is kept there saves
the time of making it, but for reading it, and takes its bytes. Of a form that does not all fit, a
part of the examples is kept: those that come first.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.basics.warn import warn
from stoker.engine.work.segment import Segment
from stoker.engine.work.step import REJECTED, Failure
from stoker.engine.work.work import Work
from stoker.errors import CacheWarning
from stoker.frameworks.rank import hosts_of_job
from stoker.sources.origin import IndexedSource
from stoker.stages.cache import CacheStage, Forecast, ends_caching
from stoker.stages.functions.operation import Operation
from stoker.stages.stage import first_with

if TYPE_CHECKING:
    from stoker.chain.chain import Chain

# Examples that are made to choose the place: the fraction that is kept comes out within about 6 %.
# Chosen, not measured.
_SAMPLED = 64
# The longest that making them takes, as a user waits for it. Chosen, not measured.
_SAMPLED_S = 5.0


class MadeForm(NamedTuple):
    """An example at one place."""

    value: Any
    """What it is there; None if a filter has left it out."""
    made_ns: int
    """The time that making it took, from the source on."""


class Best(NamedTuple):
    """The best place for a cache."""

    place: int
    kept: float
    """The fraction of the examples that fits."""
    saved_ns: float
    """The time that it saves, of all examples of the sample together."""


def with_best_cache(chain: Chain, *, version: Any, path: Any, keep: Any) -> Chain:
    """Return a chain with a cache where it saves most; the same, and a warning, if none would.

    Raises ValueError for a chain that has a cache, or in which none can stand.
    """
    if any(stage.traits.caches for stage in chain.stages):
        raise ValueError("a pipeline has one cache: choose a place for it")

    def make(before: Chain) -> CacheStage:
        return CacheStage.of(before, "auto", version, path=path, keep=keep)

    places = _places(chain)
    made = _make_forms(chain.with_inserted({places[0]: make}), chain, places)
    if not made:
        raise ValueError(f'.cache("auto") chooses by what examples take, and {chain} made none')
    made_ns, saved_ns, sizes = _measure(made)
    limit_bytes = _limit_bytes(path)
    examples = max(1, _examples_here(chain))
    best = best_place(
        np.where(sizes > limit_bytes, 0.0, saved_ns), sizes, limit_bytes * len(made) / examples
    )
    if best is None:
        warn(
            f'.cache("auto") puts no cache into {chain.source.name}: of {len(made)} examples that '
            "were made, none would save time within the limit",
            CacheWarning,
        )
        return chain
    place = places[best.place]
    stage = first_with(chain.with_inserted({place: make}).stages, lambda t: t.caches)
    assert isinstance(stage, CacheStage)
    work_ns, scale = float(made_ns[:, best.place].sum()), examples / len(made) / 1e9
    forecast = Forecast(
        stage.cache.describes, best.kept, work_ns * scale, (work_ns - best.saved_ns) * scale
    )
    chosen = replace(stage, forecast=forecast)
    return chain.with_inserted({place: lambda _: chosen})


def best_place(
    saved_ns: NDArray[np.float64], sizes: NDArray[np.float64], room_bytes: float
) -> Best | None:
    """Return the place where keeping what fits saves most time; the first of equals, or None.

    ``saved_ns``, ``sizes``: the time that each example's form at each place saves, and the bytes
    that it takes, ``[n, places]``. ``room_bytes``: the room for the sample.
    """
    kept = np.minimum(1.0, room_bytes / np.maximum(sizes.sum(axis=0), 1.0))
    saved = kept * saved_ns.sum(axis=0)
    place = int(saved.argmax())
    return Best(place, float(kept[place]), float(saved[place])) if saved[place] > 0 else None


def _places(chain: Chain) -> list[int]:
    """Return the places for a cache: before the stages of these numbers."""
    found: list[int] = []
    for number, stage in enumerate(chain.stages):
        if ends_caching(stage.traits) or stage.traits.late:
            return found or [number]
        if stage.traits.inside:  # of a mixture, which follows
            found = [number + 1]
        elif not stage.traits.selects:
            found = [*(found or [number]), number + 1]
    return found or [len(chain.stages)]


def _limit_bytes(path: Any) -> int:
    """Return the limit of a new store, or of the one that is at a path already."""
    from stoker.cache import location, store_dir

    if path is None:
        return location.resolve_limit("auto", location.memory_folder(), in_memory=True)
    folder = location.local_folder(path)
    with store_dir.open_existing(folder) as existing:
        about = None if existing is None else store_dir.StoreMeta.read(existing)
    if about is not None:
        return about.limit_bytes
    return location.resolve_limit("auto", folder, in_memory=False)


def _examples_here(chain: Chain) -> int:
    """Return how many examples may come to this host, in all epochs as far as they are fixed."""
    source, selection = chain.source, chain.selection
    assert isinstance(source, IndexedSource)
    count = min(len(source), source.places(selection))
    share = selection.share
    hosts = 1 if share is None or share.anew else hosts_of_job()
    return -(-count // hosts)


def _make_forms(draft: Chain, chain: Chain, places: list[int]) -> list[list[MadeForm]]:
    """Make examples, evenly spaced in the first epoch; return each at all places.

    ``draft`` is the chain with a cache at the first place. Examples that fail are left out. It ends
    early after some seconds.
    """
    flow, first = draft.flow, draft.flow.segments[0]
    source = flow.indexed
    assert source is not None
    # Where the order is drawn by weights or a function, the source's own order is a fair sample.
    order = source.order(replace(draft.selection, drawing=None), chain.seed, 0)
    address = flow.address(first.at, chain.seed, 0)

    def work(operations: list[Any], reads: bool) -> Work:
        segment = Segment(source if reads else None, operations, at=first.at)
        return Work(segment, address, source, order)

    reading = work([], reads=True)
    stretches = [work(first.operations[: first.cache_at], reads=False)]
    for start, stop in itertools.pairwise(places):
        own = [stage for stage in chain.stages[start:stop] if isinstance(stage, Operation)]
        stretches.append(work(own, reads=False))
    count = min(_SAMPLED, len(order))
    ordinals = np.linspace(0, len(order) - 1, count).astype(np.int64).tolist()
    found: list[list[MadeForm]] = []
    deadline_s = time.monotonic() + _SAMPLED_S
    # The first one is made twice: imports and caches make it slow.
    for number, ordinal in enumerate([*ordinals[:1], *ordinals]):
        forms = _forms_of(reading, stretches, order, ordinal)
        if number and forms is not None:
            found.append(forms)
        if time.monotonic() > deadline_s and found:
            break
    return found


def _forms_of(
    reading: Work, stretches: list[Work], order: Any, ordinal: int
) -> list[MadeForm] | None:
    """Return an example at each place; None if it fails."""
    index = order.span(ordinal, ordinal + 1)
    place = reading.places(range(ordinal, ordinal + 1))
    began = time.perf_counter_ns()
    (value,) = reading.fetcher.fetch(index, reading.segment.counters())
    made_ns = time.perf_counter_ns() - began
    forms = []
    for work in stretches:
        values = [value]
        began = time.perf_counter_ns()
        if type(value) is not Failure:
            work.apply(values, place, None, work.segment.counters())
        made_ns += time.perf_counter_ns() - began
        (value,) = values
        if type(value) is Failure and value is not REJECTED:
            return None
        forms.append(MadeForm(None if value is REJECTED else value, made_ns))
    return forms


def _measure(made: list[list[MadeForm]]) -> tuple[NDArray[np.float64], ...]:
    """Return what making forms takes, what they save, and the room that they take.

    A kept form saves what making it takes, but for reading it; nothing if it cannot be stored.
    """
    from stoker.cache.layout import room_of
    from stoker.transport.codec import decode, encode

    shape = len(made), len(made[0])
    made_ns, saved_ns, sizes = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for number, forms in enumerate(made):
        for place, form in enumerate(forms):
            try:
                record = b"".join(encode(form.value))
            except TypeError:
                continue
            began = time.thread_time_ns()  # reading waits for nothing but a busy processor
            decode(memoryview(record))
            reading_ns = time.thread_time_ns() - began
            saved_ns[number, place] = max(0, form.made_ns - reading_ns)
            made_ns[number, place] = form.made_ns
            sizes[number, place] = room_of(len(record))
    saved_ns[:, (sizes == 0).any(axis=0)] = 0.0
    return made_ns, saved_ns, sizes
