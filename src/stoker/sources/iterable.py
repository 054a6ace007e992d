"""A stream of examples: what can be iterated, but not asked for by index."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from stoker.errors import StateError
from stoker.sources.source import Source

if TYPE_CHECKING:
    from stoker.chain import Chain
    from stoker.engine.lower import Lowering

DEFAULT_BUFFER = 1_000
"""Examples in a shuffle buffer, unless the user says otherwise."""


class Passes:
    """A re-iterable object, or a factory of iterators: one pass is one epoch.

    ``name`` is the function it was given to, ``what`` comes out of it.

    Raises TypeError for an iterator, which would be used up after one epoch.
    """

    def __init__(self, given: Any, name: str, what: str) -> None:
        if isinstance(given, Iterator) and not hasattr(given, "reset"):  # DALI's start over
            raise TypeError(
                f"{name} needs what can be iterated once every epoch; this {type(given).__name__} "
                "is used up after one: pass the object it came from, or a function that returns a "
                "new iterator"
            )
        if not hasattr(given, "__iter__") and not callable(given):
            raise TypeError(
                f"{name} needs an iterable of {what}, or a function that returns one; "
                f"{type(given).__name__} is neither"
            )
        self.given: Iterable[Any] | Callable[[], Iterable[Any]] = given
        self.name = f"{name}({getattr(given, '__name__', type(given).__name__)})"
        self._last: weakref.ref[Any] | None = None

    def open(self) -> Iterator[Any]:
        """Begin a pass.

        Raises TypeError when a factory returns nothing that can be iterated, or the same iterator
        again.
        """
        if hasattr(self.given, "__iter__") and not isinstance(self.given, type):
            return iter(self.given)
        made = self.given()
        if not hasattr(made, "__iter__"):
            raise TypeError(f"{self.name}: the function returned a {type(made).__name__}")
        if isinstance(made, Generator):
            if self._last is not None and self._last() is made:
                raise TypeError(
                    f"{self.name}: the function returned the same generator again, which is used "
                    "up: it must make a new one every epoch"
                )
            self._last = weakref.ref(made)
        return iter(made)


class IterableSource(Source):
    """A stream of examples, in its own order."""

    is_counted = True

    def __init__(self, examples: Any) -> None:
        self._passes = Passes(examples, "from_iterable", "examples")

    @property
    def name(self) -> str:
        return self._passes.name

    def count(self) -> int:
        raise TypeError("a stream has no length before it ends; .steps(n) gives it one")

    def open(self) -> Iterator[Any]:
        """Begin a pass."""
        return self._passes.open()

    def state(self, number: int) -> Any:
        """Return the state in which ``number`` examples of the present pass have been read."""
        return None

    def load(self, state: Any) -> None:
        """Have the next pass begin in a state."""
        raise AssertionError("a stream begins at its beginning")

    def check_state(self, chain: Chain) -> None:
        raise StateError(
            "an epoch over a stream has no state in its middle, for its examples cannot be "
            "asked for again: save between epochs, or use a source with an index"
        )

    def extent(self, *, is_followed: bool) -> str:
        return "a stream: no length, no state in the middle of an epoch"

    def lower(self, to: Lowering) -> None:
        to.take_examples(self)
