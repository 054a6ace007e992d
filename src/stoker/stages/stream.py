"""A stream of examples: what can be iterated, but not asked for by index."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

DEFAULT_BUFFER = 1_000
"""Examples in a shuffle buffer, unless the user says otherwise."""


class IterableSource:
    """A re-iterable object of examples, or a factory of iterators: one pass is one epoch.

    Raises TypeError for an iterator, which would be used up after one epoch.
    """

    fields = None

    def __init__(self, examples: Any) -> None:
        if isinstance(examples, Iterator):
            raise TypeError(
                f"from_iterable needs what can be iterated once every epoch; this "
                f"{type(examples).__name__} is used up after one: pass the object it came from, or "
                "a function that returns a new iterator"
            )
        if not hasattr(examples, "__iter__") and not callable(examples):
            raise TypeError(
                "from_iterable needs an iterable of examples, or a function that returns one; "
                f"{type(examples).__name__} is neither"
            )
        self.examples: Iterable[Any] | Callable[[], Iterable[Any]] = examples
        self._last: weakref.ref[Any] | None = None

    @property
    def name(self) -> str:
        """Name the source for people."""
        named = getattr(self.examples, "__name__", type(self.examples).__name__)
        return f"from_iterable({named})"

    def open(self) -> Iterator[Any]:
        """Begin a pass.

        Raises TypeError when a factory returns nothing that can be iterated, or the same iterator
        again.
        """
        if hasattr(self.examples, "__iter__") and not isinstance(self.examples, type):
            return iter(self.examples)
        made = self.examples()
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

    def path(self, index: int) -> str | None:
        """Return None: there are no files."""
        return None
