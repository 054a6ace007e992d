"""Pipelines of pipelines: mixed, one after another, or paired."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from operator import truediv
from typing import Any, TypeVar, overload

from stoker.chain.chain import Chain
from stoker.engine.skip import RAISE, MaxErrors, budget_of
from stoker.foreign import explain_calls
from stoker.pipeline import Pipeline
from stoker.schedule.costs import Costs
from stoker.schedule.orders.drawing import by_user
from stoker.schedule.progress import Progress
from stoker.schedule.proportions import ChangingWeights, whole_weights
from stoker.sources.mixture import MixedPart, MixtureSource
from stoker.sources.origin import IndexedSource, numbers_of
from stoker.sources.over import ConcatSource, PairedSource
from stoker.stages.functions.operation import OfPart, Operation

T = TypeVar("T")
U = TypeVar("U")


def mix(
    pipelines: Sequence[Pipeline[T]],
    weights: Sequence[float | Callable[[Progress], float]] | None = None,
    *,
    by: Any = None,
    stop: str = "first",
    seed: int | None = None,
    max_errors: MaxErrors = 0,
) -> Pipeline[T]:
    """Mix pipelines in exact proportions.

    In the first n examples each part has its share, within two. A part is a source of numbered
    examples, with its own ``.shuffle()``, ``.take()``, ``.skip()``, ``.map()``, ``.random_map()``
    and ``.filter()``; put all other stages after ``mix``. Each part has its own epochs: it is read
    to its end, in its own order, before it begins again. An epoch of the mixture continues in each
    part where the previous one ended.

    Example: ``stoker.mix([web, books], weights=[0.7, 0.3])``

    Args:
        pipelines: the parts.
        weights: a number above 0 for each part; by default all are equal. Examples that a part's
            filter drops count towards its share. Or ``fn(progress)``: returns the weight, from 0
            on, at that point of training (a ``stoker.types.Progress``); it is asked 128 times an
            epoch. An epoch then has as many examples as all parts together, and ``stop=`` has no
            meaning.
        by: how many tokens an example has; weights are then shares of tokens, exact over each pass
            of a part. A field, a function for ``sizes()``, such as ``len``, or numbers ``[n]``; or
            a list with one of these for each part.
        stop: an epoch ends before the ``"first"`` part would begin again, or when ``"all"`` parts
            were read at least once.
        seed: of the parts' orders and all random draws; by default the seed of the parts, which
            must not differ; a random one if no part has one.
        max_errors: as in ``from_dataset``, for all parts together; it replaces theirs.

    Raises TypeError or ValueError for invalid weights, for parts whose examples have no numbers,
    for other stages in a part, for a weight too small to occur in an epoch, and for parts with
    different seeds.
    """
    parts = _pipelines(pipelines, "mix([a, b], weights=[0.7, 0.3])")
    given = [1] * len(parts) if weights is None else list(weights)
    if len(given) != len(parts):
        raise ValueError(f"mix(): {len(given)} weights for {len(parts)} pipelines: give one each")
    if stop not in ("first", "all"):
        raise ValueError(f"stop= is 'first' or 'all', not {stop!r}")
    chains = [part.chain for part in parts]
    has_budget = budget_of(max_errors) != RAISE
    mixed = [_part(chain, number, has_budget=has_budget) for number, chain in enumerate(chains, 1)]
    sizes = list(by) if isinstance(by, (list, tuple)) else [by] * len(parts)
    if len(sizes) != len(parts):
        raise ValueError(f"mix(by=): {len(sizes)} sizes for {len(parts)} pipelines: give one each")
    each = _weights(given, stop, list(map(_mean_size, parts, mixed, sizes)))
    source = MixtureSource(mixed, each, until_all=stop == "all")
    chain = Chain.begin(source, _seed(chains, "mix") if seed is None else seed, max_errors)
    for number, part in enumerate(chains, 1):
        own = OfPart(number, len(chains))
        for stage in part.stages:
            if isinstance(stage, Operation):
                chain = chain.then(replace(stage, part=own))
    return Pipeline(chain)


def concat(
    pipelines: Sequence[Pipeline[T]], *, seed: int | None = None, max_errors: MaxErrors = 0
) -> Pipeline[T]:
    """Read the examples of several sources one after another; ``.shuffle()`` shuffles all as one.

    Example: ``stoker.concat([stoker.from_folder("a"), stoker.from_folder("b")]).shuffle()``

    Args:
        pipelines: sources of numbered examples, without stages: put these behind ``concat``.
        seed: of shuffling, echoing and random maps; by default the seed of the parts, which must
            not differ; a random one if no part has one.
        max_errors: as in ``from_dataset``.

    Raises TypeError or ValueError for other parts, and for parts with different seeds.
    """
    parts = _pipelines(pipelines, "concat([a, b])")
    sources = [_bare(part.chain, number, "concat") for number, part in enumerate(parts, 1)]
    return _over("concat", ConcatSource(sources), parts, seed, max_errors)


@overload
def zip(
    first: Pipeline[T],
    second: Pipeline[U],
    /,
    *,
    seed: int | None = None,
    max_errors: MaxErrors = 0,
) -> Pipeline[tuple[T, U]]: ...


@overload
def zip(
    *pipelines: Pipeline[Any], seed: int | None = None, max_errors: MaxErrors = 0
) -> Pipeline[tuple[Any, ...]]: ...


def zip(
    *pipelines: Pipeline[Any], seed: int | None = None, max_errors: MaxErrors = 0
) -> Pipeline[Any]:
    """Pair the examples of sources of one length by their numbers: examples are tuples.

    Example: ``stoker.zip(stoker.from_files("images/*.jpg"), stoker.from_files("masks/*.png"))``

    Args:
        pipelines: sources of numbered examples, without stages: put these behind ``zip``.
        seed, max_errors: as in ``concat``.

    Raises TypeError or ValueError for other parts, for sources of different lengths, and for parts
    with different seeds.
    """
    parts = _pipelines(pipelines, "zip(images, masks)")
    sources = [_bare(part.chain, number, "zip") for number, part in enumerate(parts, 1)]
    return _over("zip", PairedSource(sources), parts, seed, max_errors)


def _pipelines(given: Any, usage: str) -> list[Pipeline[Any]]:
    """Return the user's pipelines. Raises TypeError or ValueError."""
    name = usage.partition("(")[0]
    if not isinstance(given, (list, tuple)) or not all(isinstance(p, Pipeline) for p in given):
        raise TypeError(f"{name}() takes pipelines, as in {usage}")
    if not given:
        raise ValueError(f"{name}() takes at least one pipeline")
    return list(given)


def _over(
    caller: str,
    source: IndexedSource,
    parts: list[Pipeline[Any]],
    seed: int | None,
    max_errors: MaxErrors,
) -> Pipeline[Any]:
    """Return the pipeline of a source over the parts."""
    seed = _seed([part.chain for part in parts], caller) if seed is None else seed
    return Pipeline(Chain.begin(source, seed, max_errors))


def _bare(chain: Chain, number: int, caller: str) -> IndexedSource:
    """Return the source of a part without stages. Raises ValueError if it has some."""
    source = _numbered(chain, f"{caller}(): part {number}, {chain.source.name},")
    names = [stage.name for stage in chain.stages] or _settings(chain)
    if names or chain.budget != RAISE:
        what = f".{names[0]}" if names else "max_errors="
        raise ValueError(
            f"{caller}(): part {number}, {source.name}, has {what}, which belongs behind {caller}()"
        )
    return source


def _mean_size(pipeline: Pipeline[Any], part: MixedPart, by: Any) -> Fraction:
    """Return the mean size of the examples that a part draws; 1 where they are all alike.

    So weights of tokens become weights of examples, and are as exact: in whole epochs of a part its
    tokens have the share that was asked for.
    """
    if by is None:
        return Fraction(1)
    length, selection = len(part.source), part.selection
    given = pipeline.sizes(by) if callable(by) else by
    sizes = Costs.of(numbers_of(part.source, given, "mix(by=)"), "mix(by=)", scaled=False)
    drawn: Any = selection.candidates(length)
    if selection.drawing is not None:  # by weights, which give as many of each in every epoch
        drawn = selection.order(length, 0, 0)
    total = int(sizes.at(drawn.at(range(len(drawn)))).sum())
    if not total:
        raise ValueError(f"mix(by=): part {part.described} has no tokens")
    return Fraction(total, len(drawn))


def _weights(
    given: list[Any], stop: str, sizes: list[Fraction]
) -> tuple[int, ...] | ChangingWeights:
    """Return weights of examples that stay, as whole numbers, or what says those that change.

    Raises TypeError, ValueError or StageError for what are none.
    """
    if not any(map(callable, given)):
        return whole_weights(list(map(truediv, whole_weights(given), sizes)))
    if stop != "first":
        raise ValueError(
            "mix(): with weights that change, an epoch has as many examples as all parts together: "
            "leave stop= out (.repeat().steps(n) ends one where you want)"
        )
    whole_weights([weight for weight in given if not callable(weight)] or [1])

    def weights(time: Progress) -> list[float]:
        with by_user("mix()"):
            found = [weight(time) if callable(weight) else weight for weight in given]
            for weight in found:
                if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
                    raise TypeError(f"a weight is a number from 0, not {weight!r}, for {time}")
            if not all(math.isfinite(weight) and weight >= 0 for weight in found):
                raise ValueError(f"weights are finite numbers from 0, not {found}, for {time}")
            if not any(found):
                raise ValueError(f"all weights are 0 for {time}: one part at least has to come")
            return [float(each) for each in map(truediv, found, sizes)]

    weights(Progress(0, 0.0))
    return ChangingWeights(weights, len(given))


def _part(chain: Chain, number: int, *, has_budget: bool) -> MixedPart:
    """Return a part of a mixture; raises ValueError if the pipeline cannot be one."""
    what = f"mix(): part {number}, {chain.source.name},"
    source = _numbered(chain, what)
    for stage in chain.stages:
        traits = stage.traits
        if traits.shards or not (traits.selects or isinstance(stage, Operation)):
            raise ValueError(
                f"{what} has .{stage.name}: a part has .shuffle(), .take(), .skip(), .map(), "
                ".random_map() and .filter(); put stages for all parts after mix(), as .echo(2)"
            )
    if chain.selection.calls_user:
        raise ValueError(
            f"{what} is ordered by a function, but a part's epochs differ from those of the "
            "mixture: give it constant weights, .sample(w), or .select()"
        )
    for stage_name in _settings(chain):
        raise ValueError(f"{what} has .{stage_name}(), which belongs after mix()")
    if chain.budget != RAISE and not has_budget:
        raise ValueError(f"{what} has max_errors=: give it to the mixture, mix(..., max_errors=)")
    described = ".".join([source.name, *(stage.name for stage in chain.stages)])
    return MixedPart(source, chain.selection, described, tuple(chain.signature()))


def _numbered(chain: Chain, what: str) -> IndexedSource:
    """Return the source of a part; raises ValueError if its examples have no numbers of its own."""
    source = chain.source
    if not isinstance(source, IndexedSource):
        raise ValueError(
            f"{what} has no examples with numbers: take from_folder, from_dataset, from_tar and "
            "the like"
        )
    if source.has_own_order:
        raise ValueError(f"{what} is a mixture: give its parts to one mix(), which comes last")
    return source


def _settings(chain: Chain) -> list[str]:
    """Return the stages of a part that set something for the whole pipeline."""
    given = {"steps": chain.steps, "workers": chain.workers, "repeat": chain.flows or None}
    return [name for name, value in given.items() if value is not None]


def _seed(chains: list[Chain], caller: str) -> Any:
    """Return the seed of the parts; None if the user gave none."""
    seeds = sorted({chain.seed for chain in chains if not chain.is_seed_drawn})
    if len(seeds) > 1:
        raise ValueError(
            f"the parts have seeds {', '.join(map(str, seeds))}, and what {caller}() makes has one "
            f"for all: {caller}(..., seed=)"
        )
    return seeds[0] if seeds else None


explain_calls(sys.modules[__name__])
