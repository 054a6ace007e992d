"""Functions of users that are applied to single items: what maps and filters have in common."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from stoker.basics.buffers import only_reads
from stoker.engine.checkpoint import PoolSize
from stoker.engine.skip import RAISE, Budget, MaxErrors, budget_of
from stoker.engine.work.step import RowStep
from stoker.images.image_map import releases_gil
from stoker.schedule.orders.mixed import part_bits
from stoker.sources.origin import UserObject, check_fields
from stoker.stages.functions.transforms import takes_seed
from stoker.stages.stage import ChainStage, ChainView

AnyOperation = TypeVar("AnyOperation", bound="Operation")


class OfPart(NamedTuple):
    """A part of a mixture; its examples have places of their own (``schedule.orders.mixed``)."""

    number: int
    """Among its parts, from 1."""
    parts: int
    """How many there are."""

    def has(self, places: Sequence[int]) -> list[bool]:
        """Tell which places of the mixture are of this part."""
        of, own = (1 << part_bits(self.parts)) - 1, self.number - 1
        return [place & of == own for place in places]


@dataclass(frozen=True)
class Operation(ChainStage, RowStep):
    """A stage that calls a function of the user's with each item: a map, or a filter.

    Attributes:
        fn: the user's function.
        on: the field that it is given, the fields, or None for the whole example or batch.
        budget: its own ``max_errors=``, or None for the pipeline's.
        account: tells its budget from those of other stages; 0 where it has none.
        part: of a mixture, the part whose examples alone it is applied to.
    """

    fn: Callable[..., Any]
    on: str | int | tuple[str | int, ...] | None
    budget: Budget | None = None
    account: int = 0
    part: OfPart | None = None

    @property
    @abstractmethod
    def method(self) -> str:
        """The method of ``Pipeline`` that makes it."""

    @property
    def call(self) -> str:
        called = getattr(self.fn, "__name__", type(self.fn).__name__)
        fields = list(self.on) if isinstance(self.on, tuple) else self.on
        on = "" if fields is None else f", on={fields!r}"
        return f"{self.method}({called}{on})" + self._of_part

    @property
    def _of_part(self) -> str:
        return "" if self.part is None else f" of part {self.part.number}"

    @property
    def only_reads(self) -> bool:
        return only_reads(self.fn)

    @property
    def releases_gil(self) -> bool:
        return releases_gil(self.fn)

    @property
    def skips(self) -> bool:
        """Whether it may leave out examples on which it fails, by a budget of its own."""
        return self.budget is not None and self.budget != RAISE

    def place_on(self: AnyOperation, before: ChainView) -> AnyOperation:
        """Return it behind ``before``, after a check of its field."""
        if all(stage.traits.keeps_fields for stage in before.stages):
            for field in self.on if isinstance(self.on, tuple) else (self.on,):
                check_fields(before.source, field)
        # A cache changes no state, and so does not count.
        account = 1 + sum(not stage.traits.caches for stage in before.stages)
        return replace(self, account=0 if self.budget is None else account)

    def signature(self) -> str:
        """Return its kind, and the field."""
        return self.method + ("" if self.on is None else f" on {self.on!r}") + self._of_part

    def note(self, chain: ChainView, pool_size: PoolSize) -> str:
        """Say what its own budget lets it skip."""
        if self.budget is None:
            return ""
        return "  raises" if self.budget == RAISE else f"  skips what fails, at most {self.budget}"

    def user_objects(self) -> list[UserObject]:
        return [UserObject(self.name, self.fn)]


_ANSWERS_LATER = {
    "an async function": inspect.iscoroutinefunction,
    "an async generator function": inspect.isasyncgenfunction,
    "a generator function (it has a yield)": inspect.isgeneratorfunction,
}


def check_budget(
    method: str,
    fn: Any,
    on: Any,
    max_errors: MaxErrors | None,
    *,
    is_random: bool = False,
    progress: bool = False,
) -> Budget | None:
    """Check the arguments of an operation; return its own budget, None for the pipeline's.

    Raises TypeError with what to do, at the place where the chain is written, where ``fn`` cannot
    be called as the stage will call it, or ``on`` is no name, key or position.
    """
    if not callable(fn):
        raise TypeError(f".{method}() needs a function, not {type(fn).__name__}")
    for kind, is_of_it in _ANSWERS_LATER.items():
        if is_of_it(fn):
            raise TypeError(f".{method}() needs a function that returns the value, not {kind}")
    if progress or method == "filter" or not takes_seed(fn):
        _check_signature(method, fn, is_random, progress)
    fields = on if isinstance(on, (list, tuple)) else [] if on is None else [on]
    if on == [] or on == () or len(set(map(str, fields))) < len(fields):
        raise ValueError(f"on= takes a field, or different fields in a list, not {on!r}")
    if any(isinstance(each, bool) or not isinstance(each, (str, int)) for each in fields):
        raise TypeError(f"on= takes a field's name, key or position, or a list of them, not {on!r}")
    return None if max_errors is None else budget_of(max_errors)


def names_of(on: Any) -> Any:
    """Return the argument ``on=`` as ``Operation`` keeps it: several fields in a tuple."""
    return tuple(on) if isinstance(on, list) else on


def _check_signature(method: str, fn: Callable[..., Any], is_random: bool, progress: bool) -> None:
    unfit = unfit_signature(fn, 1 + is_random + progress)
    if unfit is None:
        return
    if progress:
        takes = "x, rng, progress" if is_random else "x, progress"
        raise TypeError(f".{method}(progress=True) calls fn({takes}), which {unfit} does not take")
    if is_random:
        raise TypeError(
            f".random_map() calls fn(x, rng), which {unfit} does not take: give it a second "
            "parameter, rng, or use .map() if it draws nothing"
        )
    raise TypeError(
        f".{method}() calls fn(x), which {unfit} does not take: give it one parameter"
        + ("" if method == "filter" else ", or use .random_map() for fn(x, rng)")
    )


def unfit_signature(fn: Callable[..., Any], arguments: int) -> str | None:
    """Return a function's name and signature if it cannot take so many arguments, else None."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return None  # built-ins without a signature
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        names = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        shown = signature.replace(parameters=names, return_annotation=signature.empty)
        return f"{getattr(fn, '__name__', type(fn).__name__)}{shown}"
    return None
