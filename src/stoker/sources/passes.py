"""Passes over what can only be iterated, and its states: of streams, and of users' loaders.

Some streams have a state of their own: Hugging Face's, torchdata's, or any with the protocol. The
protocol is ``state_dict()`` and ``load_state_dict(state)`` of the iterable, as in torchdata. A
stream is read ahead of the consumer, so its states are kept until no consumer can need them any
more. A state is not taken after each example, as that may cost as much as reading one; examples in
between are read again.

A pass that is left in its middle was also read ahead of its consumer. Some streams begin the next
pass at their position, others at their beginning, and nothing tells which. So before the next pass
the stream is put back: an earlier state is loaded, the examples up to the consumer's position are
read, and that pass is dropped. Then the stream is as if nothing had been read ahead, and its next
pass begins where the stream decides. One trial finds out whether a stream begins every later pass
at the loaded state.

A pass that came to its end is read to its end again in another process: what a stream counts or
draws over its passes is then as it was.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from copy import deepcopy
from itertools import islice
from typing import Any

from stoker.basics.validate import is_whole_number
from stoker.errors import StateError

# Examples from one state of a stream to the next: a resume reads at most 15 again, and a state may
# be as dear as an example.
_EVERY = 16


class ReiterableStream:
    """A re-iterable object, or a function that returns iterators: one pass is one epoch.

    Raises TypeError for an iterator, which would be used up after one epoch.
    """

    def __init__(self, given: Any, name: str, what: str) -> None:
        # DALI's start over, and datasets may; a pipeline has __next__ only to say that it is none.
        begins_anew = hasattr(given, "reset") or hasattr(given, "set_epoch") or has_state(given)
        if isinstance(given, Iterator) and not (begins_anew or is_iterable_dataset(given)):
            raise TypeError(
                f"{name} needs an object that can be iterated in every epoch; this "
                f"{type(given).__name__} is used up after one: pass the object it came from, or a "
                "function that returns a new iterator"
            )
        if isinstance(given, (str, bytes)):
            raise TypeError(
                f"{name} needs an iterable of {what}, not {given!r:.80}: a file's lines are read "
                "by from_text, from_jsonl or from_csv"
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
        """Begin a pass. Raises TypeError if the function's result cannot be iterated, or again."""
        if hasattr(self.given, "__iter__") and not isinstance(self.given, type):
            return iter(self.given)
        try:
            made = self.given()
        except StopIteration as error:  # it would look like the end of the pass
            raise RuntimeError(f"{self.name}: the function raised StopIteration") from error
        if not hasattr(made, "__iter__"):
            raise TypeError(f"{self.name}: the function returned a {type(made).__name__}")
        if isinstance(made, Generator):
            if self._last is not None and self._last() is made:
                raise TypeError(
                    f"{self.name}: the function returned the same generator again, which is used "
                    "up: it must make a new one in every epoch"
                )
            self._last = weakref.ref(made)
        return iter(made)


def is_iterable_dataset(given: Any) -> bool:
    """True for an ``IterableDataset`` of torch."""
    torch_data: Any = sys.modules.get("torch.utils.data")
    return torch_data is not None and isinstance(given, torch_data.IterableDataset)


def has_state(given: Any) -> bool:
    """True if an object has its own state that includes its position."""
    ask, load = (getattr(given, name, None) for name in ("state_dict", "load_state_dict"))
    if isinstance(given, type) or not callable(ask) or not callable(load):
        return False
    try:
        inspect.signature(ask).bind()
        inspect.signature(load).bind({})
    except (TypeError, ValueError):  # MosaicML's and LitData's datasets: their loaders have one
        return False
    return True


def _begins_anew(given: Any) -> bool:
    """True if an object is known to begin each pass at its beginning.

    A ``StatefulDataLoader`` does, except over a stream that it iterates in this process.
    """
    package = type(given).__module__.partition(".")[0]
    if package == "torchdata" and hasattr(given, "dataset"):
        return bool(given.num_workers) or not hasattr(given.dataset, "__iter__")
    return package in ("datasets", "torchdata", "stoker")


class StreamState:
    """The position, between passes, of an object with its own state."""

    def __init__(self, given: Any, open_pass: Callable[[], Iterator[Any]]) -> None:
        self._given = given
        self._open = open_pass
        self._is_anew = _begins_anew(given)
        self._first: Any = None  # its state before the first pass, if it could be asked then
        self._was_asked = False
        self._is_ahead = False  # whether more was read than the consumer took
        self.place: dict[str, Any] | None = None
        """The place where the consumer left the last pass, or where it ended; None if that is not
        known, or makes no difference."""
        self._is_tried = False

    def before(self) -> Any:
        """Return its state before a pass, None where it is unknown."""
        if self._is_anew or hasattr(self._given, "set_epoch"):
            return None
        try:
            state = self._given.state_dict()
        except Exception:  # some have one only once they are iterated
            state = None
        if not self._was_asked:
            self._first, self._was_asked = state, True
        return state

    def leave(self, place: dict[str, Any] | None, *, is_ahead: bool) -> None:
        """Take note that a pass was left at ``place``: a state, and how many examples follow it.

        None at the pass's beginning. ``is_ahead``: whether more was read than the consumer took.
        """
        if not self._is_anew:
            if place is not None:
                self.place = place
            elif self.place is None and self._first is not None:
                self.place = {"own": self._first, "skip": 0}
            self._is_ahead = is_ahead

    def end(self, place: dict[str, Any] | None = None) -> None:
        """Take note that a pass came to its end, which is at this place."""
        self.place, self._is_ahead = place, False

    def restore(self, place: dict[str, Any]) -> None:
        """Go to the place at which a pass was left, or ended, in another process."""
        self.place, self._is_ahead = place, True

    def put_back(self) -> None:
        """Go back to the place at which the consumer left the last pass, if more was read."""
        place = self.place
        if place is None or not self._is_ahead or (self._is_anew and "is_over" not in place):
            return
        if not self._was_asked:  # another process left the pass
            self.before()
        behind = self._read_up_to(place)
        if place["skip"] and not self._is_tried and not self._is_anew:
            next(self._open(), None)
            self._is_anew = _are_alike(self._given.state_dict(), behind)
            self._is_tried = True
            if not self._is_anew:
                self._read_up_to(place)
            elif self._first is not None:
                self._given.load_state_dict(self._first)

    def _read_up_to(self, place: dict[str, Any]) -> Any:
        """Load a state, and read the examples to skip, and to the end if the place is there.

        Returns the state after the first.
        """
        self._given.load_state_dict(place["own"])
        behind = None
        if place["skip"]:
            examples = self._open()
            next(examples, None)
            behind = self._given.state_dict()
            for _ in examples if "is_over" in place else islice(examples, place["skip"] - 1):
                pass
        return behind


def _are_alike(state: Any, other: Any) -> bool:
    try:
        return bool(state == other)
    except Exception:  # of arrays, say
        return False


class StateLog:
    """The states of a stream in one pass. One thread writes, another one reads.

    ``saved`` is the result of ``state`` at which the pass continues, ``number`` the examples of the
    pass before it, and ``before`` the state before the pass, if it is known.
    """

    def __init__(self, saved: dict[str, Any] | None, number: int, before: Any = None) -> None:
        self.number = self.read = number
        self.is_over = False  # whether the stream has no more
        self._before = before
        self.skip = 0 if saved is None else int(saved["skip"])
        self._states: deque[tuple[int, Any]] = deque()
        if saved is not None:
            self._states.append((number - self.skip, saved["own"]))

    def note(self, number: int, given: Any) -> None:
        """Take the stream's state after this many examples, if one is due."""
        self.read = number
        if number == self.number + 1 or number % _EVERY == 0:
            self._states.append((number, deepcopy(given.state_dict())))  # it may be what changes

    def state(self, number: int) -> dict[str, Any] | None:
        """Return the state after this many examples of the pass; None at its beginning."""
        found = self._last_up_to(number, None)
        return None if found is None else {"own": found[1], "skip": number - found[0]}

    def place(self, number: int) -> dict[str, Any] | None:
        """Return a state and a skip that lead to this many examples; None if unknown.

        The skip is at least one, as some streams return the loaded state until an example is read.
        """
        before = None if self._before is None else (0, self._before)
        found = self._last_up_to(number - 1, before)
        if found is not None and number > found[0]:
            return {"own": found[1], "skip": number - found[0]}
        return None

    def end(self) -> dict[str, Any] | None:
        """Return the place of the last example read; None if unknown.

        If the stream has no more, ``is_over`` is in it.
        """
        place = self.place(self.read)
        return place if place is None or not self.is_over else {**place, "is_over": True}

    def _last_up_to(self, number: int, found: tuple[int, Any] | None) -> tuple[int, Any] | None:
        """Return the last entry after at most this many examples, or else ``found``."""
        for at in range(len(self._states)):  # only the caller takes any away
            if self._states[at][0] > number:
                break
            found = self._states[at]
        return found

    def forget_before(self, number: int) -> None:
        """Drop entries that only states after fewer examples need."""
        while len(self._states) > 1 and self._states[1][0] < number:
            self._states.popleft()


class StatefulPass(Iterator[Any]):
    """One pass over a stream from a given start; notes its states."""

    def __init__(self, given: Any, examples: Iterator[Any], log: StateLog) -> None:
        self._given = given
        self._examples = examples
        self._log = log
        self._number, self._skip = log.number, log.skip

    def __next__(self) -> Any:
        try:
            while self._skip:
                self._skip -= 1
                next(self._examples)
            example = next(self._examples)
        except StopIteration:
            self._log.is_over = True
            raise
        self._number += 1
        self._log.note(self._number, self._given)
        return example

    def interrupt(self) -> None:
        """Interrupt another thread that waits in ``next()``, if possible."""
        interrupt(self._examples)


def interrupt(iterator: Iterator[Any] | None) -> None:
    """Interrupt another thread that waits in ``next()`` of an iterator, if possible."""
    tell = getattr(iterator, "interrupt", None)
    if tell is not None:
        tell()


def validate_state(saved: Any, number: int) -> dict[str, Any]:
    """Return a saved state if it can be valid after so many examples, else raise StateError.

    After 0 examples it is the place where a pass was left, or ended.
    """
    most = min(_EVERY, number) if number else _EVERY + 1
    is_known = isinstance(saved, dict) and (
        saved.keys() == {"own", "skip"} or _is_end(saved, number)
    )
    if is_known and is_whole_number(saved["skip"]) and 0 <= saved["skip"] < most:
        return dict(saved)
    raise StateError("the state is damaged: what it says of the stream's own state cannot be")


def _is_end(saved: dict[str, Any], number: int) -> bool:
    return not number and saved.keys() == {"own", "skip", "is_over"} and saved["is_over"] is True
