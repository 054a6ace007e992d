"""A stream of examples: what can be iterated, but not asked for by index."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from stoker.errors import StateError
from stoker.sources.source import Source
from stoker.sources.unsharded import warn_unsharded

if TYPE_CHECKING:
    from stoker.chain import Chain
    from stoker.engine.lower import Lowering

DEFAULT_BUFFER = 1_000
"""Examples in a shuffle buffer, unless the user says otherwise."""


class Passes:
    """A re-iterable object, or a factory of iterators: one pass is one epoch.

    Args:
        given: what the user gave.
        name: the function it was given to.
        what: what comes out of it, in the plural.

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

    fields = None
    is_counted = True
    takes_state = False

    def __init__(self, examples: Any) -> None:
        self._passes = Passes(examples, "from_iterable", "examples")

    @property
    def name(self) -> str:
        """Name the source for people."""
        return self._passes.name

    def count(self) -> int:
        """Raise TypeError: only the end tells."""
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

    def state_between(self) -> Any:
        """Return None: it has none."""
        return None

    def check_state(self, chain: Chain) -> None:
        """Refuse: its examples cannot be made again."""
        raise StateError(
            "an epoch over a stream has no state in its middle, for its examples cannot be "
            "asked for again: save between epochs, or use a source with an index"
        )

    def outline(self) -> str:
        """Return its kind: nothing else is known."""
        return type(self).__name__

    def extent(self, *, is_followed: bool) -> str:
        """Say that the length is not known."""
        return "a stream: no length, no state in the middle of an epoch"

    def lower(self, to: Lowering) -> None:
        """Have its examples taken one after another."""
        to.take_examples(self)

    def warn_unsharded(self, *, is_sharded: bool) -> None:
        """Warn where each of several ranks would be given all examples."""
        if not is_sharded:
            warn_unsharded()

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: a stream is not told."""
