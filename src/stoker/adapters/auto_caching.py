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
from stoker.cache.places.budget import CacheBudget
from stoker.cache.places.model import plan
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
# A place at which less than this fraction of the examples is kept is left out: two maps without a
# cache between them may run as one. Chosen, not measured.
_LEAST_KEPT = 0.02


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
    or batch. The places at which a plan keeps examples get a cache each, of one ``stoker.budget``;
    ``print(pipeline)`` shows the plan, ``stats()`` the predicted and the measured time of an epoch.
    Each example is kept at one of them, where it saves most for its bytes (docs/caching.md).

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
    from stoker.stages.placed import Forecast, PlacedCaches

    chain = pipeline.chain
    if any(stage.traits.caches for stage in chain.stages):
        raise ValueError("auto_cache puts caches into a pipeline that has none: leave them out")
    places = _places(chain)
    # Its caches are never opened: they say where the places are among maps that run as one.
    draft, _ = _with_caches(chain, places, CacheBudget("1MiB", None, None, "rebuild"), None)
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
    budget = CacheBudget(limit_bytes, path, keep, "rebuild")
    full, stages = _with_caches(chain, places, budget, version)
    examples = examples_here(full)
    room_bytes = limit_bytes * len(made) / max(1, examples)
    parts = plan(saved_ns, sizes, room_bytes).kept
    kept = [at for at, part in enumerate(parts.tolist()) if part >= min(_LEAST_KEPT, parts.max())]
    if not parts.any():
        warn(
            f"auto_cache puts no cache into {chain.source.name}: of {len(made)} examples that were "
            "made, none would save time within the limit",
            CacheWarning,
        )
        return pipeline
    saved_ns, sizes = saved_ns[:, kept], sizes[:, kept]
    best = plan(saved_ns, sizes, room_bytes)
    whole_ns, scale = float(made_ns[:, kept[-1]].sum()), examples / len(made) / 1e9
    forecast = Forecast(
        tuple(best.kept.tolist()), whole_ns * scale, (whole_ns - best.saved_ns) * scale
    )
    sample = [*zip(saved_ns.tolist(), sizes.tolist(), strict=True)]
    caches = [stages[at].cache for at in kept]
    placed = PlacedCaches(caches, examples, sample, forecast)
    chosen = [replace(stages[at], placed=placed if at == kept[-1] else None) for at in kept]
    return Pipeline(
        chain.with_inserted({places[at]: _given(one) for at, one in zip(kept, chosen, strict=True)})
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
    chain: Chain, places: list[int], budget: CacheBudget, version: str | None
) -> tuple[Chain, list[CacheStage]]:
    """Return a chain with a cache at each place, and these caches."""
    rest = {"path": None, "keep": None, "admit": "first", "on_damage": "rebuild"}

    def make(before: Chain) -> CacheStage:
        return CacheStage.of(before, budget, version, False, None, False, **rest)

    full = chain.with_inserted(dict.fromkeys(places, make))
    return full, [stage for stage in full.stages if isinstance(stage, CacheStage)]


def _resolve(limit: Any, path: str | os.PathLike[str] | None) -> int:
    """Return a limit in bytes; that of the store, if there is one already."""
    from stoker.cache import inventory, location

    limit = location.parse_limit(limit)
    if path is None:
        size = location.resolve_limit(limit, location.memory_folder(), in_memory=True)
    else:
        folder = os.path.realpath(os.path.expanduser(path))
        existing = inventory.read_summary(folder)
        if existing is not None:
            return existing.about.limit_bytes
        size = location.resolve_limit(limit, folder, in_memory=False)
    return size


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
            began = time.perf_counter_ns()
            decode(memoryview(record))
            reading_ns = time.perf_counter_ns() - began
            saved_ns[number, place] = max(0, form.made_ns - reading_ns)
            made_ns[number, place] = form.made_ns
            sizes[number, place] = room_of(len(record))
    saved_ns[:, (sizes == 0).any(axis=0)] = 0.0
    return made_ns, saved_ns, sizes


def _pool_bytes(chain: Chain, made: list[list[MadeForm]]) -> int:
    """Return about what the echoes' pools take: of examples as the last place has them."""
    each_bytes = float(np.mean([nbytes(forms[-1].value) for forms in made]))
    total = 0
    for point in chain.plan.echoes:
        echo = point.echo
        if point.on_device:
            continue
        if echo.pool_bytes is not None:
            total += echo.pool_bytes
        else:
            batches = echo.pool or DEFAULT_POOL_BATCHES
            is_counted_in_examples = echo.pool is not None and not point.holds_batches
            total += int(batches * each_bytes * (1 if is_counted_in_examples else chain.batch_size))
    return total
