"""Streams that have a state of their own: Hugging Face's, torchdata's, or any with the protocol.

The protocol is ``state_dict()`` and ``load_state_dict(state)`` of what is iterated, as torchdata
has it. A stream is read ahead of the consumer, so what it says of itself is kept until nobody can
ask for it any more. It is not asked behind each example, as that may cost as much as reading one;
what lies between is read again.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator
from typing import Any

from stoker.checks import is_whole_number
from stoker.errors import StateError

_EVERY = 16  # examples


def has_state(given: Any) -> bool:
    """Whether something has a state of its own that needs nobody else to count for it."""
    methods = (getattr(given, name, None) for name in ("state_dict", "load_state_dict"))
    ask, load = methods
    if isinstance(given, type) or not callable(ask) or not callable(load):
        return False
    try:
        inspect.signature(ask).bind()
        inspect.signature(load).bind({})
    except (TypeError, ValueError):  # MosaicML's and LitData's data sets: their loaders have one
        return False
    return True


class StateLog:
    """What a stream said of itself in one pass. Noted by one thread, asked by another alone.

    Args:
        saved: what ``state`` returned where the pass goes on; None at the beginning.
        number: how many examples of the pass come before.
    """

    def __init__(self, saved: dict[str, Any] | None, number: int) -> None:
        self.number = number
        self.skip = 0 if saved is None else int(saved["skip"])
        self._states: deque[tuple[int, Any]] = deque()
        if saved is not None:
            self._states.append((number - self.skip, saved["own"]))

    def note(self, number: int, given: Any) -> None:
        """Ask the stream, behind so many examples, if that is due."""
        if number == self.number + 1 or number % _EVERY == 0:
            self._states.append((number, given.state_dict()))

    def state(self, number: int) -> dict[str, Any] | None:
        """Return the state behind so many examples of the pass; None at its beginning.

        What was forgotten cannot be asked for.
        """
        found = None
        for at in range(len(self._states)):  # only the caller takes any away
            if self._states[at][0] > number:
                break
            found = self._states[at]
        return None if found is None else {"own": found[1], "skip": number - found[0]}

    def forget_before(self, number: int) -> None:
        """Drop what only states behind fewer examples need."""
        while len(self._states) > 1 and self._states[1][0] <= number:
            self._states.popleft()


class StatefulPass(Iterator[Any]):
    """One pass over a stream that was told where to begin; notes its states."""

    def __init__(self, given: Any, examples: Iterator[Any], log: StateLog) -> None:
        self._given = given
        self._examples = examples
        self._log = log
        self._number, self._skip = log.number, log.skip

    def __next__(self) -> Any:
        while self._skip:
            self._skip -= 1
            next(self._examples)
        example = next(self._examples)
        self._number += 1
        self._log.note(self._number, self._given)
        return example

    def interrupt(self) -> None:
        """Interrupt another thread that waits in ``next()``, if that can be done."""
        tell = getattr(self._examples, "interrupt", None)
        if tell is not None:
            tell()


def checked(saved: Any, number: int) -> dict[str, Any]:
    """Return a saved state if it may be one behind so many examples, else raise StateError."""
    if isinstance(saved, dict) and saved.keys() == {"own", "skip"}:
        skip = saved["skip"]
        if is_whole_number(skip) and 0 <= skip < min(_EVERY, number):
            return saved
    raise StateError("the state is damaged: what it says of the stream's own state cannot be")
