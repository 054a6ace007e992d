"""Admission to a store: refuses random items, and can prefer items that are worth their bytes."""

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
from stoker.transport.codec.encoder import encode

# Recent items whose worth is kept: enough to estimate the distribution, few enough to sort. Chosen,
# not measured.
_MAX_SEEN = 4096
# Items that must be seen before the first decision, and before each new bar: fewer do not show the
# distribution. Chosen, not measured.
_MIN_SEEN = 64
# Repeated readings: a random field that changes in half of the readings is missed once in 256.
_REPEATS = 8


class WorthAdmission:
    """Admits the items that save most time per byte (``admit="worth"``).

    It takes recently seen items as a sample of all items that are not in the store. The bar is the
    worth above which these items would just fill the free room. So the bar is low while there is
    much room, and rises as the store fills.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=_MAX_SEEN)
        self._lock = threading.Lock()
        self._bar = 0.0
        self._since = 0

    def admits(self, cost_ns: int, size_bytes: int, free_bytes: int, left: int) -> bool:
        """True if an item may enter; False for the first few, which only set the bar.

        Args:
            cost_ns: the time that making the item took.
            size_bytes: its size in the store.
            free_bytes: the store's free room.
            left: the number of an epoch's items that are not in the store.
        """
        worth_ns = cost_ns / max(1, size_bytes)
        with self._lock:
            self._seen.append((worth_ns, size_bytes))
            self._since += 1
            if len(self._seen) < min(_MIN_SEEN, left):
                return False
            if self._since >= min(_MIN_SEEN, len(self._seen)) or not self._bar:
                self._bar = self._compute_bar(free_bytes, left)
                self._since = 0
            return worth_ns >= self._bar

    def _compute_bar(self, free_bytes: int, left: int) -> float:
        """Return the worth above which the missing items would just fill the free room."""
        room = free_bytes * len(self._seen) / max(1, left)
        for worth_ns, size in sorted(self._seen, reverse=True):
            room -= size
            if room < 0:
                return worth_ns
        return 0.0


class RandomCheck:
    """Reads an item several times and compares: a cache would repeat random draws for ever.

    It checks one item, before the first one enters the store; other threads wait meanwhile.

    Attributes:
        has_passed: whether an item was the same each time.
    """

    def __init__(self) -> None:
        self.has_passed = False
        self._lock = threading.Lock()

    def run(self, what: str, value: Any, read_again: Callable[[], Any]) -> None:
        """Read an item again and compare.

        In the main thread, the global generators are restored afterwards. In other threads they
        stay advanced, as restoring them could repeat draws of the main thread.

        Args:
            what: names the item in messages.
            value: its first reading.
            read_again: reads it again. Its errors are ignored: some items can be read only once.

        Raises ValueError if the readings differ, TypeError for values that cannot be stored, and
        exceptions of signal handlers.
        """
        with self._lock:
            is_same, advanced = (True, "") if self.has_passed else _read_again(value, read_again)
            if advanced:
                raise ValueError(
                    f"reading {what} draws random numbers from {advanced}, and a cache would "
                    "repeat the same draws in every epoch. Cache the examples before the random "
                    "part: leave the augmentation out of the dataset, and put it into collate_fn "
                    "or into the pipeline (from_dataset(...).cache(...).random_map(...)). If the "
                    "draws do not change the example, use a generator of your own for them"
                )
            if not is_same:
                raise ValueError(
                    f"{what} is different each time it is read, and a cache would repeat the first "
                    "reading in every epoch. Cache the examples before the random part: leave the "
                    "augmentation out of the dataset, and put it into collate_fn or into the "
                    "pipeline (from_dataset(...).cache(...).random_map(...)). If nothing in it is "
                    "random, a time stamp, a counter or the last digits of floats differ: leave "
                    "that field out, round it, or put .cache() before the stage that makes it"
                )
            self.has_passed = True


def _read_again(value: Any, read_again: Callable[[], Any]) -> tuple[bool, str]:
    """True if all readings are the same, and the generators that every reading advanced.

    A generator that only some readings advanced is left out: another thread may have used it.
    """
    expected = b"".join(encode(value))
    advanced = {*global_generators.states()}
    with _restoring_generators():
        for _ in range(_REPEATS):
            states_before = global_generators.states() if advanced else {}
            try:
                repeated = read_again()
            except Exception as error:
                pass_on(error)
                return True, ""
            advanced &= global_generators.changed_since(states_before) if advanced else advanced
            if b"".join(encode(repeated)) != expected:
                return False, ""
    return True, " and ".join(sorted(advanced))


@contextlib.contextmanager
def _restoring_generators() -> Iterator[None]:
    """Restore the global generators afterwards, as if nothing had been drawn.

    Only in the main thread: if another thread restored them, the main thread would repeat draws.
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
