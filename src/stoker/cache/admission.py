"""Admission to a store: refuses items that are random."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from stoker.basics.generators import GeneratorStates, global_generators
from stoker.basics.signals import pass_on
from stoker.transport.codec import encode

# Repeated readings: a random field that changes in half of the readings is missed once in 256.
_REPEATS = 8


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
    generators = global_generators()
    advanced = {each.path for each in generators}
    before = GeneratorStates(generators)
    try:
        for _ in range(_REPEATS):
            states = GeneratorStates(generators if advanced else [])
            try:
                repeated = read_again()
            except Exception as error:
                pass_on(error)
                return True, ""
            advanced &= set(states.moved())
            if b"".join(encode(repeated)) != expected:
                return False, ""
    finally:
        # In another thread, the main thread would repeat draws of its own.
        if threading.current_thread() is threading.main_thread():
            before.restore()
    return True, " and ".join(sorted(advanced))
