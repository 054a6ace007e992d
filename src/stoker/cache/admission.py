"""Admission: items that are worth their bytes enter a store, random ones are refused."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from stoker.basics import global_generators
from stoker.basics.signals import pass_on
from stoker.transport import codec

# Items whose worth is remembered; enough to see how they spread, and few to sort. Chosen, not
# measured.
_SEEN = 4096
# So many must have been seen before any is turned away, and between two bars: fewer do not show how
# worths spread. Chosen, not measured.
_JUDGED = 64
# A field that chance leaves alone every other time passes once in 256.
_AGAIN = 8


class Worth:
    """Admits items that save most time per byte. (Without it all enter until the store is full.)

    Recently seen items stand for all items that are not in the store. The bar is the worth at which
    just so many of them would fill the free room. So the bar falls while there is much room, and
    rises as the store fills.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=_SEEN)
        self._lock = threading.Lock()
        self._bar = 0.0
        self._since = 0

    def admits(self, cost_ns: int, size_bytes: int, free_bytes: int, left: int) -> bool:
        """True if an item may enter; False for the first few, which only set the bar.

        ``cost_ns`` is the time that making it took, ``free_bytes`` the store's free room, ``left``
        the number of an epoch's items that are not in the store.
        """
        worth = cost_ns / max(1, size_bytes)
        with self._lock:
            self._seen.append((worth, size_bytes))
            self._since += 1
            if len(self._seen) < min(_JUDGED, left):
                return False
            if self._since >= min(_JUDGED, len(self._seen)) or not self._bar:
                self._bar = self._compute_bar(free_bytes, left)
                self._since = 0
            return worth >= self._bar

    def _compute_bar(self, free_bytes: int, left: int) -> float:
        """Return the worth above which the remaining items would fill the remaining room."""
        room = free_bytes * len(self._seen) / max(1, left)
        for worth, size in sorted(self._seen, reverse=True):
            room -= size
            if room < 0:
                return worth
        return 0.0


class RandomCheck:
    """Makes an item again, a few times, and compares: a cache would freeze random draws.

    It tries one item, before any enters; other threads wait meanwhile.

    Attributes:
        has_passed: whether an item was the same each time.
    """

    def __init__(self) -> None:
        self.has_passed = False
        self._lock = threading.Lock()

    def run(self, what: str, value: Any, again: Callable[[], Any]) -> None:
        """Make an item again and compare.

        In the main thread the global generators are set back afterwards; in other threads they have
        advanced further than without this check, and no draw is repeated.

        Errors of ``again`` are ignored: some items can be made only once. ``what`` names it.

        Raises ValueError when they differ, TypeError for values that cannot be stored, and a signal
        handler's errors.
        """
        with self._lock:
            same, drew = (True, "") if self.has_passed else _tried(value, again)
            if drew:
                raise ValueError(
                    f"{what} is read with draws from {drew}, each time: a cache would repeat the "
                    "same draws in every epoch, be they seen or rare. Cache what comes before the "
                    "random part: a dataset without it, augmented in collate_fn or in a pipeline "
                    "(from_dataset(...).cache(...).random_map(...)). What is drawn for nothing "
                    "else than the example, draw from a generator of its own"
                )
            if not same:
                raise ValueError(
                    f"{what} is another one each time it is read: a cache would repeat the same "
                    "random draws in every epoch. Cache what comes before the random part: a "
                    "dataset without it, augmented in collate_fn or in a pipeline "
                    "(from_dataset(...).cache(...).random_map(...)). If nothing is random in it, "
                    "a time stamp, a counter or the last digits of floats differ, and a cache "
                    "would keep those of the first reading: leave that field out or round it, or "
                    "cache in front of what makes it"
                )
            self.has_passed = True


def _tried(value: Any, again: Callable[[], Any]) -> tuple[bool, str]:
    """Return whether an item is the same each time, and which generators it advanced each time.

    Generators that moved only sometimes are left out: another thread may have advanced them.
    """
    expected = b"".join(codec.encode(value))
    drew = {*global_generators.states()}
    with _kept_draws():
        for _ in range(_AGAIN):
            before = global_generators.states() if drew else {}
            try:
                other = again()
            except Exception as error:
                pass_on(error)
                return True, ""
            drew &= global_generators.moved(before) if drew else drew
            if b"".join(codec.encode(other)) != expected:
                return False, ""
    return True, " and ".join(sorted(drew))


@contextlib.contextmanager
def _kept_draws() -> Iterator[None]:
    """Restore the global generators afterwards, as if nothing had been drawn.

    In the main thread only: restored by another thread, they would repeat training's draws.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numpy_state, python_state = np.random.get_state(), random.getstate()
    torch = sys.modules.get("torch")
    torch_state = torch.get_rng_state() if torch is not None else None
    try:
        yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        if torch is not None:
            torch.set_rng_state(torch_state)
