"""Maps: a user's function on an example, on one of its fields, or on a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stoker.pytree import Field
from stoker.stages.global_draws import GlobalDraws
from stoker.stages.skip import Budget


@dataclass(frozen=True)
class Map:
    """The stages ``.map(fn)`` and ``.random_map(fn)``.

    Attributes:
        fn: called as ``fn(x)``, or ``fn(x, rng)`` where ``random``.
        on: the field it works on, or None for the whole example or batch.
        random: whether it is handed a generator.
        position: how many random maps stand before it in the chain: part of its address.
        budget: its own skip budget, or None for the pipeline's.
        account: tells its budget from those of other stages; 0 where it has none.
        draws: looks at where it draws from; shared by all pipelines that this stage is in.
    """

    fn: Callable[..., Any]
    on: str | int | None
    random: bool
    position: int = 0
    budget: Budget | None = None
    account: int = 0
    draws: GlobalDraws = field(default_factory=GlobalDraws, compare=False, repr=False)

    @property
    def name(self) -> str:
        """Name the stage for people."""
        called = getattr(self.fn, "__name__", type(self.fn).__name__)
        field = "" if self.on is None else f", on={self.on!r}"
        return f"{'random_map' if self.random else 'map'}({called}{field})"

    def compiled(self) -> Callable[..., Any]:
        """Return ``fn`` lifted to whole examples."""
        if self.on is None:
            return self.fn
        return _OnField(self.fn, Field(self.on))


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
