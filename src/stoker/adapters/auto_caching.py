"""``stoker.auto_cache(pipeline, limit)``: caches where they save most, within one limit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.basics.pytree import nbytes
from stoker.basics.resources import format_bytes
from stoker.basics.warn import warn
from stoker.cache.places.arrangement import Forecast, arrange
from stoker.cache.places.budget import CacheBudget
from stoker.chain.chain import Chain
from stoker.chain.inspection.forms import MadeForm, make_forms
from stoker.errors import CacheWarning
from stoker.pipeline import Pipeline
from stoker.stages.cache import CacheStage, ends_caching, examples_here
from stoker.stages.echo import DEFAULT_POOL_BATCHES

T = TypeVar("T")

# Examples that are made to choose the places: the fractions that are kept come out within about
# 6 %. While an epoch runs, its own examples take their place. Chosen, not measured.
_SAMPLED = 64
# The longest that making them takes, as a user waits for it. Chosen, not measured.
_SAMPLED_S = 5.0


def auto_cache(
    pipeline: Pipeline[T],
    limit: int | float | str = "auto",
    *,
    version: str | None = None,
    path: str | os.PathLike[str] | None = None,
    keep: bool | None = None,
) -> Pipeline[T]:
    """Put caches into a pipeline where they save most time, within one limit.

    It makes up to 64 examples, for at most about 5 s, and measures the time and the size of their
    forms: as the source has them, and after each map and filter up to the first random stage, echo
    or batch. Where one place promises about as much as several, it gets a ``.cache``, with
    ``admit="worth"`` where that promises clearly more. Otherwise the places get a cache each, of
    one ``stoker.budget``, and each example is kept at one of them, where it saves most for its
    bytes (docs/caching.md). ``print(pipeline)`` shows the plan, ``stats()`` the predicted and the
    measured time of an epoch.

    Args:
        pipeline: without a cache. It is not changed.
        limit: of all caches and of the pools of its echoes in this process together: bytes
            (``"64GiB"``), a share of usable memory (``0.5``; with ``path`` of the free disk), or
            ``"auto"``: half (four fifths).
        version, path, keep: as in ``Pipeline.cache``.

    Returns the pipeline with caches; without any, and with a warning, if none would save anything.

    Raises ValueError for a pipeline that has a cache, or in which none can stand; if echoes' pools
    leave no room; ValueError or TypeError for wrong arguments.
    """
    # Not at the top: they import packages, which `import stoker` leaves alone.
    from stoker.cache.location import LEAST_BYTES
    from stoker.stages.placed import PlacedCaches

    if not isinstance(pipeline, Pipeline):
        raise TypeError(
            f"auto_cache() takes a pipeline, not {type(pipeline).__name__}: stoker.cached is "
            "for a dataset"
        )
    chain = pipeline.chain
    if any(stage.traits.caches for stage in chain.stages):
        raise ValueError("auto_cache puts caches into a pipeline that has none: leave them out")
    places = _places(chain)
    # Its caches are never opened: they say where the places are among maps that run as one.
    draft, drafts = _with_caches(chain, places, CacheBudget("1MiB", None, None, "rebuild"), None)
    made = make_forms(draft, _SAMPLED, _SAMPLED_S)
    if not made:
        raise ValueError(f"auto_cache chooses by what examples take, and {chain} made none")
    made_ns, saved_ns, sizes = _measure(made)
    pool_bytes = _pool_bytes(chain, made) if path is None else 0
    limit_bytes = _resolve(limit, path) - pool_bytes
    if pool_bytes and limit_bytes < LEAST_BYTES:
        raise ValueError(
            f"limit={limit!r}: the pools of echoes take about {format_bytes(pool_bytes)} of it, "
            f"and a cache needs at least {format_bytes(LEAST_BYTES)} beside them"
        )
    saved_ns[sizes > limit_bytes] = 0.0
    examples = examples_here(chain)
    room_bytes = limit_bytes * len(made) / max(1, examples)
    found = arrange(float(made_ns[:, -1].sum()), saved_ns, sizes, room_bytes)
    if not found.places:
        warn(
            f"auto_cache puts no cache into {chain.source.name}: of {len(made)} examples that were "
            "made, none would save time within the limit",
            CacheWarning,
        )
        return pipeline
    here = [*found.places]
    # Maps behind the last cache run as before.
    last_ns, made_last_ns = float(made_ns[:, here[-1]].sum()), float(made_ns[:, -1].sum())
    names = [drafts[place].cache.describes for place in here]
    scale = examples / len(made) / 1e9
    forecast = Forecast(
        tuple(zip(names, found.kept, strict=True)),
        last_ns * scale,
        (found.left_ns - made_last_ns + last_ns) * scale,
    )
    numbers = [places[place] for place in here]
    if len(here) == 1:
        admit = "worth" if found.by_worth else "first"
        given = {"path": path, "keep": keep, "admit": admit}
        _, stages = _with_caches(chain, numbers, limit_bytes, version, **given)
        placed = None
    else:
        budget = CacheBudget(limit_bytes, path, keep, "rebuild")
        _, stages = _with_caches(chain, numbers, budget, version)
        sample = [*zip(saved_ns[:, here].tolist(), sizes[:, here].tolist(), strict=True)]
        placed = PlacedCaches([stage.cache for stage in stages], examples, sample)
    stages[-1] = replace(stages[-1], placed=placed, forecast=forecast)
    return Pipeline(
        chain.with_inserted(
            {number: _given(stage) for number, stage in zip(numbers, stages, strict=True)}
        )
    )


def _given(stage: CacheStage) -> Callable[[Chain], CacheStage]:
    return lambda _: stage


def _places(chain: Chain) -> list[int]:
    """Return the places for caches: before the stages of these numbers."""
    found: list[int] = []
    for number, stage in enumerate(chain.stages):
        if ends_caching(stage.traits):
            return found or [number]
        if stage.traits.inside:  # of a mixture, which follows
            found = [number + 1]
        elif not stage.traits.selects:
            found = [*(found or [number]), number + 1]
    return found or [len(chain.stages)]


def _with_caches(
    chain: Chain, places: list[int], limit: int | CacheBudget, version: str | None, **given: Any
) -> tuple[Chain, list[CacheStage]]:
    """Return a chain with a cache at each place, and these caches."""
    rest = {"path": None, "keep": None, "admit": "first", "on_damage": "rebuild"} | given

    def make(before: Chain) -> CacheStage:
        return CacheStage.of(before, limit, version, False, None, False, **rest)

    full = chain.with_inserted(dict.fromkeys(places, make))
    return full, [stage for stage in full.stages if isinstance(stage, CacheStage)]


def _resolve(limit: Any, path: str | os.PathLike[str] | None) -> int:
    """Return a limit in bytes; that of the store, if there is one already."""
    from stoker.cache import inventory, location

    limit = location.parse_limit(limit)
    if path is None:
        return location.resolve_limit(limit, location.memory_folder(), in_memory=True)
    folder = location.local_folder(path)
    existing = inventory.read_summary(folder)
    if existing is not None:
        return existing.about.limit_bytes
    return location.resolve_limit(limit, folder, in_memory=False)


def _measure(made: list[list[MadeForm]]) -> tuple[NDArray[np.float64], ...]:
    """Return what making forms takes, what they save, and the room that they take.

    A kept form saves what making it takes, but for reading it; nothing if it cannot be stored.
    """
    from stoker.cache.layout import room_of
    from stoker.transport.codec.decoder import decode
    from stoker.transport.codec.encoder import encode

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


def _pool_bytes(chain: Chain, made: list[list[MadeForm]]) -> int:
    """Return about what the echo's pool takes: of examples as the last place has them."""
    point = chain.plan.pool
    if point is None or point.on_device:
        return 0
    if point.echo.pool_bytes is not None:
        return point.echo.pool_bytes
    each_bytes = float(np.mean([nbytes(forms[-1].value) for forms in made]))
    is_counted_in_examples = point.echo.pool is not None and not point.holds_batches
    examples = 1 if is_counted_in_examples else chain.batch_size
    return int((point.echo.pool or DEFAULT_POOL_BATCHES) * each_bytes * examples)
