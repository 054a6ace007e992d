"""A stream of examples: what can be iterated, but not asked for by index."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from stoker.errors import StateError
from stoker.sources.own_state import Standing, StatefulPass, StateLog, checked, has_state
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
    """A stream of examples, in its own order. One that has a state of its own is asked for it."""

    is_counted = True

    def __init__(self, examples: Any) -> None:
        self._passes = Passes(examples, "from_iterable", "examples")
        self._given = examples
        self._has_state = has_state(examples)
        self._standing = Standing(examples, self._passes.open)
        self._log: StateLog | None = None  # of the present pass
        self._first_state: Any = None  # from before any other was loaded

    @property
    def name(self) -> str:
        return self._passes.name

    @property
    def takes_state(self) -> bool:
        return self._has_state

    def count(self) -> int:
        raise TypeError("a stream has no length before it ends; .steps(n) gives it one")

    def open(self, epoch: int, saved: Any = None, number: int = 0) -> Iterator[Any]:
        """Begin a pass: at its beginning, or behind ``number`` examples in a saved state.

        A stream with ``set_epoch`` is told the epoch. With ``saved`` and no ``number``, a pass was
        left there by another process's consumer, and the next one begins.

        Raises StateError for what cannot be a state.
        """
        saved = None if saved is None else checked(saved, number)
        self.set_epoch(epoch)
        if not self._has_state:
            return self._passes.open()
        if saved is not None and not number:
            self._standing.restore(saved)
            saved = None
        before = None
        if saved is not None:
            if self._first_state is None and hasattr(self._given, "set_epoch"):
                self._first_state = self._given.state_dict()
            self._given.load_state_dict(saved["own"])
        elif self._first_state is not None:
            # Hugging Face's begins each pass over the same epoch at what was loaded last.
            self._given.load_state_dict(self._first_state)
        else:
            self._standing.put_back()
            before = self._standing.before()
        self._log = StateLog(saved, number, before)
        return StatefulPass(self._given, self._passes.open(), self._log)

    def leave(self, number: int | None) -> None:
        """Take note that the consumer left the pass behind so many examples; None: at its end."""
        log = self._log
        if log is None:
            return
        place = None if number is None else log.place(number)
        if number is None or (number and place is None):
            self._standing.end()
        elif number > log.number or not number:
            self._standing.leave(place, is_ahead=log.read > (number or 0))

    def state_between(self, *, left: bool) -> Any:
        return self._standing.place

    def state(self, number: int) -> Any:
        """Return the state in which ``number`` examples of the present pass have been read."""
        return None if self._log is None else self._log.state(number)

    def forget_before(self, number: int) -> None:
        """Drop the states in which fewer examples of the present pass have been read."""
        if self._log is not None:
            self._log.forget_before(number)

    def check_state(self, chain: Chain) -> None:
        """Refuse a state in the middle of an epoch that tells too little of what was left."""
        if not self.takes_state:
            raise StateError(
                "an epoch over a stream has no state in its middle, because its examples cannot "
                "be read again: save between epochs, or use a source with an index"
            )
        kept = chain.selection.is_kept_by_streams
        if chain.has_fixed_echo or chain.may_leave_out or not kept:
            each = [(stage.name, stage.traits) for stage in chain.stages]
            in_the_way = [
                name
                for name, t in each
                if t.filters or t.skips or t.joins or t.repeats or t.shuffles or t.shards
            ]
            raise StateError(
                f"in the middle of an epoch of {self.name}, what "
                f"{', '.join(in_the_way) or 'on_error='} holds or has left out cannot be made "
                "again: save between epochs, let the stream itself do this, or, of an echo, take "
                '.echo("auto"), whose pool may begin empty'
            )

    def extent(self, *, is_followed: bool) -> str:
        if self.takes_state:
            return "a stream with a state of its own: no length"
        return "a stream: no length, no state in the middle of an epoch"

    def lower(self, to: Lowering) -> None:
        to.take_examples(self)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._given, "set_epoch"):
            self._given.set_epoch(epoch)
