"""Maps: a user's function on an example, on one of its fields, or on a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker import rng
from stoker.pytree import Field
from stoker.sources.source import check_fields
from stoker.stages.global_draws import GlobalDraws
from stoker.stages.skip import RAISE, Budget, OnError, budget_of
from stoker.stages.stage import Before, Lowering, PoolSize, Stage, Traits, not_known


@dataclass(frozen=True)
class Map:
    """The stages ``.map(fn)`` and ``.random_map(fn)``, and their ``Operation``.

    Attributes:
        fn: called as ``fn(x)``, or ``fn(x, rng)`` where ``is_random``.
        on: the field it works on, or None for the whole example or batch.
        is_random: whether it is handed a generator.
        position: how many random maps stand before it in the chain: part of its address.
        budget: its own skip budget, or None for the pipeline's.
        account: tells its budget from those of other stages; 0 where it has none.
        draws: looks at where it draws from; shared by all pipelines that this stage is in.
    """

    fn: Callable[..., Any]
    on: str | int | None
    is_random: bool
    position: int = 0
    budget: Budget | None = None
    account: int = 0
    draws: GlobalDraws = field(default_factory=GlobalDraws, compare=False, repr=False)

    makes_values = True

    @classmethod
    def of(cls, fn: Any, on: Any, on_error: OnError | None, *, is_random: bool) -> Map:
        """Check the arguments of ``.map()`` and ``.random_map()``."""
        check_function(fn, random=is_random, stage="random_map" if is_random else "map")
        check_on(on)
        return cls(fn, on, is_random, budget=None if on_error is None else budget_of(on_error))

    @property
    def name(self) -> str:
        """Name the stage for people."""
        called = getattr(self.fn, "__name__", type(self.fn).__name__)
        field = "" if self.on is None else f", on={self.on!r}"
        return f"{'random_map' if self.is_random else 'map'}({called}{field})"

    @property
    def traits(self) -> Traits:
        """What it does, as far as others ask."""
        skips = self.budget is not None and self.budget != RAISE
        return Traits(keeps_fields=self.on is not None, skips=skips, is_random=self.is_random)

    def placed(self, before: Before) -> Map:
        """Check its field, and that it skips examples only; number it among random maps."""
        if fields_reach(before.stages):
            check_fields(before.source, self.on)
        if self.budget is not None and before.is_batched:
            raise ValueError("on_error= is for examples: a stage behind .batch() raises")
        position = sum(stage.traits.is_random for stage in before.stages)
        account = 0 if self.budget is None else account_behind(before)
        return replace(self, position=position, account=account)

    def begin(self, chain: Before) -> None:
        """Do nothing."""

    def lower(self, to: Lowering) -> None:
        """Have it called with each item."""
        to.map(self)

    def count(self, items: int) -> int:
        """Return as many; raises TypeError where it may skip some."""
        if self.traits.skips:
            raise not_known()
        return items

    def outline(self) -> str:
        """Return its kind, and where it works."""
        kind = "random_map" if self.is_random else "map"
        return kind + ("" if self.on is None else f" on {self.on!r}")

    def note(self, chain: Before, sizes: Mapping[int, PoolSize]) -> str:
        """Say what it skips."""
        return skip_note(self.budget)

    def compile(self, rejected: object) -> Callable[..., Any]:
        """Return ``fn`` lifted to whole examples."""
        if self.on is None:
            return self.fn
        return _OnField(self.fn, Field(self.on))

    def key(self, seed: int, epoch: int, rank: int) -> NDArray[np.uint64] | None:
        """Return what keys its generator in an epoch, None if it draws nothing."""
        return rng.key(seed, epoch, rng.MAP + self.position, rank) if self.is_random else None

    def watched(
        self, fn: Callable[..., Any], tell: Callable[[int, str], None]
    ) -> Callable[..., Any]:
        """Return ``fn``, looked at in its first calls if it is random."""
        if not self.is_random or not self.draws.looks:
            return fn
        return self.draws.watched(fn, lambda names: tell(self.position, names))


class _OnField:
    """A function lifted from a field to the example around it; pickles if the function does."""

    def __init__(self, fn: Callable[..., Any], field: Field) -> None:
        self._fn = fn
        self._field = field

    def __call__(self, example: Any, *rng: Any) -> Any:
        field = self._field
        made = self._fn(field.get(example), *rng)
        if made is None:
            raise returned_nothing("field")
        return field.replace(example, made)


def returned_nothing(what: str) -> TypeError:
    """Return the error of a function that may only have changed what it was given.

    ``None`` inside of what it returns is a value like any other.
    """
    instead = " (to leave examples out, use .filter)" if what == "example" else ""
    if what == "field":
        instead = " (None belongs into a field only if the function returns the whole example)"
    return TypeError(f"the function returned None: return the {what}{instead}")


def fields_reach(stages: Iterable[Stage]) -> bool:
    """Whether the source's fields are still there behind these stages."""
    return all(stage.traits.keeps_fields for stage in stages)


def account_behind(before: Before) -> int:
    """Return the number of the account of a stage with a budget of its own.

    A cache changes no state, and so does not count.
    """
    return 1 + sum(not stage.traits.caches for stage in before.stages)


def skip_note(budget: Budget | None) -> str:
    """Say what a stage's own budget lets it skip."""
    if budget is None:
        return ""
    return "  raises" if budget == RAISE else f"  skips what fails, at most {budget}"


def check_function(fn: Any, *, random: bool, stage: str) -> None:
    """Refuse what cannot be called as the stage will call it.

    Raises TypeError with what to do, at the place where the chain is written.
    """
    if not callable(fn):
        raise TypeError(f".{stage}() needs a function, not {type(fn).__name__}")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # built-ins without a signature
    name = getattr(fn, "__name__", type(fn).__name__)
    try:
        signature.bind(*([None] * (2 if random else 1)))
    except TypeError:
        if random:
            raise TypeError(
                f".random_map() calls fn(x, rng), which {name}{signature} does not take: give it "
                "a second parameter, rng, or use .map() if it draws nothing"
            ) from None
        raise TypeError(
            f".{stage}() calls fn(x), which {name}{signature} does not take: give it one "
            "parameter" + ("" if stage == "filter" else ", or use .random_map() for fn(x, rng)")
        ) from None


def check_on(on: Any) -> None:
    """Refuse anything but a name, a key or a position. Raises TypeError."""
    if on is not None and (isinstance(on, bool) or not isinstance(on, (str, int))):
        raise TypeError(f"on= takes a field's name, key or position, not {on!r}")
