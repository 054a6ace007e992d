"""A stream of examples: what can be iterated, but not asked for by index."""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from stoker.sources.unsharded import warn_unsharded_loader

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


class IterableSource:
    """A stream of examples."""

    fields = None

    def __init__(self, examples: Any) -> None:
        self._passes = Passes(examples, "from_iterable", "examples")
        self.name = self._passes.name
        self.open = self._passes.open

    def path(self, index: int) -> str | None:
        """Return None: there are no files."""
        return None


class Resumable(IterableSource, ABC):
    """A stream that can begin in the middle of a pass."""

    @abstractmethod
    def state(self, number: int) -> Any:
        """Return the state in which ``number`` examples of the present pass have been read."""

    @abstractmethod
    def between(self) -> Any:
        """Return the state between passes."""

    @abstractmethod
    def load(self, state: Any) -> None:
        """Have the next pass begin in a state."""


class LoaderSource:
    """Any re-iterable of ready batches, iterated as its owner set it up, one epoch a time.

    Attributes:
        stateful: whether it has a state of its own, as far as is known before it is asked.
    """

    fields = None

    def __init__(self, loader: Any) -> None:
        self._passes = Passes(loader, "from_loader", "batches")
        self.loader = loader
        self.name = self._passes.name
        self.stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")

    def state(self) -> Any:
        """Return the loader's own state; None if it has none, whatever methods it has.

        (accelerate's wrapper has them around a plain ``DataLoader`` too, and they raise
        AttributeError there.)
        """
        if self.stateful:
            try:
                return self.loader.state_dict()
            except AttributeError:
                self.stateful = False
        return None

    def warn_unsharded(self) -> None:
        """Warn where several ranks are there and nothing in the loader knows of them."""
        warn_unsharded_loader(self.loader)

    @property
    def is_counted(self) -> bool:
        """Whether its length can be relied on: an ``IterableDataset`` may tell another one.

        (And torch warns of that later, if it was asked for the length.)
        """
        torch_data: Any = sys.modules.get("torch.utils.data")
        streams = () if torch_data is None else torch_data.IterableDataset
        counted = hasattr(self.loader, "__len__")
        return counted and not isinstance(getattr(self.loader, "dataset", None), streams)

    def __len__(self) -> int:
        return len(self.loader)

    def open(self) -> Iterator[Any]:
        """Begin a pass. An iterator that can be reset is, unless it does so itself."""
        iterator = self._passes.open()
        return _Resetting(iterator) if iterator is self.loader else iterator


class _Resetting(Iterator[Any]):
    """An epoch of an iterator that starts over when it is reset (DALI's)."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            if getattr(self._iterator, "_auto_reset", "no") != "yes":
                self._iterator.reset()
            raise
