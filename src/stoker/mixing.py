"""Where a mixture begins: several pipelines in exact proportions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from stoker.chain import Chain
from stoker.pipeline import Pipeline
from stoker.schedule.proportions import whole_weights
from stoker.sources.mixture import MixedPart, MixtureSource
from stoker.sources.source import IndexedSource
from stoker.stages.operation import OfPart, Operation
from stoker.stages.skip import RAISE, OnError, budget_of

T = TypeVar("T")


def mix(
    parts: Mapping[Pipeline[T], float],
    *,
    stop: str = "first",
    seed: int | None = None,
    on_error: OnError = "raise",
) -> Pipeline[T]:
    """Mix pipelines: of any run of examples each part has its share, as exactly as can be.

    Parts are sources whose examples have numbers, with ``.shuffle()``, ``.take()``, ``.skip()``,
    ``.map()``, ``.random_map()`` and ``.filter()`` of their own; all else stands behind the
    mixture. Each part has epochs of its own: it is gone through wholly, in its order, before it
    begins anew, and an epoch of the mixture goes on in a part where the one before ended.

    Args:
        parts: of each pipeline its weight, a number above 0. What a part's filter leaves out counts
            for its share.
        stop: an epoch ends before the ``"first"`` part would begin anew; or when ``"all"`` were
            gone through at least once.
        seed: of the parts' orders and all random draws; by default that of the parts, which is
            then the same for all that were given one; drawn if there is none.
        on_error: as in ``from_dataset``, for all parts together, whatever they say themselves.

    Raises TypeError or ValueError for wrong weights, for parts that cannot be asked for examples by
    number or have other stages, for parts that would never come, and for different seeds of parts.
    """
    if not isinstance(parts, Mapping) or not all(isinstance(part, Pipeline) for part in parts):
        raise TypeError("mix() takes a dict of pipelines and their weights: {a: 0.7, b: 0.3}")
    if not parts:
        raise ValueError("mix() takes at least one pipeline")
    if stop not in ("first", "all"):
        raise ValueError(f"stop= is 'first' or 'all', not {stop!r}")
    weights = whole_weights(list(parts.values()))
    chains = [part.chain for part in parts]
    has_budget = budget_of(on_error) != RAISE
    mixed = [_part(chain, number, has_budget=has_budget) for number, chain in enumerate(chains, 1)]
    source = MixtureSource(mixed, weights, until_all=stop == "all")
    chain = Chain.begin(source, _seed(chains) if seed is None else seed, on_error)
    first = 0
    for number, part in enumerate(chains, 1):
        assert isinstance(part.source, IndexedSource)
        behind = first + len(part.source)
        own = OfPart(number, range(first, behind))
        for stage in part.stages:
            if isinstance(stage, Operation):
                chain = chain.then(replace(stage, part=own))
        first = behind
    return Pipeline(chain)


def _part(chain: Chain, number: int, *, has_budget: bool) -> MixedPart:
    """Return a part of a mixture; raises ValueError for what cannot be one."""
    source, what = chain.source, f"mix(): part {number}, {chain.source.name},"
    if not isinstance(source, IndexedSource):
        raise ValueError(
            f"{what} has no examples that can be asked for by number: mix from_folder, "
            "from_dataset, from_tar and the like"
        )
    if source.has_own_order:
        raise ValueError(f"{what} is a mixture: give its parts to one mix()")
    for stage in chain.stages:
        traits = stage.traits
        if traits.shards or not (traits.selects or isinstance(stage, Operation)):
            raise ValueError(
                f"{what} has .{stage.name}: a part has .shuffle(), .take(), .skip(), .map(), "
                ".random_map() and .filter(); put what concerns all of them behind mix(), such "
                "as .echo(2), or .echo([2, 1, ...]) with a factor for each"
            )
    for said, is_said in (
        ("steps", chain.steps is not None),
        ("workers", chain.workers is not None),
        ("repeat", chain.flows),
    ):
        if is_said:
            raise ValueError(f"{what} has .{said}(), which belongs behind mix()")
    if chain.budget != RAISE and not has_budget:
        raise ValueError(f"{what} has a skip budget: give it to the mixture, mix(..., on_error=)")
    described = ".".join([source.name, *(stage.name for stage in chain.stages)])
    return MixedPart(source, chain.selection, described, tuple(chain.outline()))


def _seed(chains: list[Chain]) -> Any:
    """Return the seed that parts were given, None if none was."""
    seeds = sorted({chain.seed for chain in chains if not chain.is_seed_drawn})
    if len(seeds) > 1:
        raise ValueError(
            f"the parts have seeds {', '.join(map(str, seeds))}, and a mixture has one for all: "
            "mix(..., seed=)"
        )
    return seeds[0] if seeds else None
