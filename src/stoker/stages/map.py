"""Maps: a user's function on an example, on one of its fields, or on a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.pytree import Field, Fields, fields_of
from stoker.engine.flow import Flow
from stoker.engine.skip import MaxErrors
from stoker.engine.work.step import DROP, returned_nothing
from stoker.errors import CombinationError
from stoker.images.image_map import Address, Many, many_of
from stoker.images.normalizing import fused
from stoker.schedule import rng
from stoker.stages.functions.operation import Operation, check_budget, names_of
from stoker.stages.functions.transforms import call_with_rng, call_without_rng
from stoker.stages.stage import ChainView, Traits, first_with, not_known


@dataclass(frozen=True)
class Map(Operation):
    """The stages ``.map(fn)`` and ``.random_map(fn)``.

    Attributes:
        fn: called as ``fn(x)``, or ``fn(x, rng)`` where ``is_random``; or a transform of another
            library (``transforms``).
        is_random: whether it is handed a generator.
        repeats_only: whether first uses pass it untouched.
        position: how many random maps stand before it in the chain: part of its address.
        progress: whether ``fn`` is told last where in training the example stands.
    """

    is_random: bool = False
    repeats_only: bool = False
    position: int = 0
    progress: bool = False

    @staticmethod
    def of(
        fn: Any,
        on: Any,
        max_errors: MaxErrors | None,
        *,
        is_random: bool,
        repeats_only: bool = False,
        progress: bool = False,
    ) -> Map:
        """Check the arguments of ``.map()`` and ``.random_map()``."""
        method = "random_map" if is_random else "map"
        if not isinstance(progress, bool):
            raise TypeError(f".{method}() takes progress=True or False, not {progress!r}")
        budget = check_budget(method, fn, on, max_errors, is_random=is_random, progress=progress)
        only = bool(repeats_only)
        return Map(
            fn, names_of(on), budget, is_random=is_random, repeats_only=only, progress=progress
        )

    @property
    def method(self) -> str:
        return "random_map" if self.is_random else "map"

    @property
    def traits(self) -> Traits:
        return Traits(
            keeps_fields=self.on is not None,
            skips=self.skips,
            is_random=self.is_random,
            changes=self.progress,
            inside=self.part is not None,
        )

    def bind(self, before: ChainView) -> Map:
        """Check its field, and that it skips examples only; number it among random maps."""
        stage = self.place_on(before)
        if self.budget is not None and before.is_batched:
            raise CombinationError(
                "max_errors= works for examples only: a stage after .batch() always raises"
            )
        last = first_with(reversed(before.stages), lambda t: t.repeats or t.batches)
        if self.repeats_only and (last is None or not last.traits.repeats):
            raise CombinationError(
                "repeats_only= needs an .echo() before it, and no .batch() in between, which mixes "
                "first and later uses"
            )
        if self.progress:
            self._check_progress(before)
        position = sum(stage.traits.is_random for stage in before.stages)
        return replace(stage, position=position)

    def _check_progress(self, before: ChainView) -> None:
        """Raise ValueError where what comes has no place in the epoch, or several."""
        call = f".{self.method}(progress=True)"
        if not before.source.is_indexed:
            raise CombinationError(
                f"{call} tells an example's place in the epoch, and a stream's length is not known"
            )
        stage = first_with(before.stages, lambda t: t.batches or t.joins)
        if stage is not None:
            raise CombinationError(
                f"{call} tells the place of a single example: put it before {stage.name}"
            )

    def add_to(self, flow: Flow) -> None:
        flow.then(self)

    def count(self, items: int) -> int:
        """Return as many; raises TypeError where it may skip some."""
        if self.skips:
            raise not_known()
        return items

    def behind(self, before: Any) -> Map | None:
        """Return what does both in one pass over the values; None if there is no such function."""
        if not isinstance(before, Map):
            return None
        is_alike = (before.on, before.part, before.budget) == (self.on, self.part, self.budget)
        if not is_alike or self.skips or self.repeats_only or before.repeats_only:
            return None
        if self.progress or before.progress:
            return None
        both = fused(before.fn, self.fn)
        return None if both is None else replace(before, fn=both)

    def compile(self, rejected: object) -> Callable[..., Any]:
        fn = self.fn
        if not self.progress:
            fn = call_with_rng(fn) if self.is_random else call_without_rng(fn)
        return fn if self.on is None else _OnField(fn, fields_of(self.on))

    def compile_many(self) -> Many | None:
        many, on = many_of(self.fn), self.on
        if many is None or self.progress or isinstance(on, tuple):
            return None
        return many if on is None else partial(_many_on, Field(on), many)

    def signature(self) -> str:
        """Return its kind, the field, and whether it leaves first uses."""
        return (
            super().signature()
            + ", repeats only" * self.repeats_only
            + ", progress" * self.progress
        )

    def key(self, seed: int, epoch: int) -> NDArray[np.uint64] | None:
        return rng.key(seed, epoch, rng.MAP + self.position) if self.is_random else None


class _OnField:
    """A function lifted from fields to the example around them; pickles if the function does."""

    def __init__(self, fn: Callable[..., Any], field: Field | Fields) -> None:
        self._fn = fn
        self._field = field

    def __call__(self, example: Any, *rng: Any) -> Any:
        field = self._field
        made = self._fn(field.get(example), *rng)
        is_nothing = made is None or (type(field) is Fields and field.is_nothing(made))
        if is_nothing or made is DROP:
            raise returned_nothing(None if is_nothing else made, "field")
        return field.replace(example, made)


def _many_on(
    field: Field, many: Many, examples: Sequence[Any], address: Address | None
) -> list[Any]:
    """Lift a function of many values of a field to examples."""
    made = many([field.get(each) for each in examples], address)
    pairs = zip(examples, made, strict=True)
    return [each if each is None else field.replace(example, each) for example, each in pairs]
