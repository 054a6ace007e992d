"""Refuses items that are others each time they are made: a cache would freeze their random part."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from stoker.cache import codec
from stoker.signals import pass_on

_TIMES = 8  # what chance leaves as it is every other time passes once in 256


class Repeats:
    """Makes the first item that would enter a cache again, a few times, and compares.

    One is tried in each process, before anything enters; others wait for it meanwhile.

    Attributes:
        known: whether one was found to be the same each time.
    """

    def __init__(self) -> None:
        self.known = False
        self._lock = threading.Lock()

    def check(self, what: str, value: Any, again: Callable[[], Any]) -> None:
        """Compare an item with what it is when it is made again.

        In the main thread the global generators are set back behind it; elsewhere they have drawn
        more than without it, and nothing is drawn twice.

        Args:
            what: the item, for people.
            value: what it is.
            again: makes it again. What it raises is no answer: it may be made once only.

        Raises ValueError when they differ, TypeError for values that cannot be stored, and what a
        signal handler raises meanwhile.
        """
        with self._lock:
            if not self.known and not _same(value, again):
                raise ValueError(
                    f"{what} is another one each time it is read: a cache would repeat the same "
                    "random draws in every epoch. Cache what comes before the random part: a "
                    "dataset without it, augmented in collate_fn or in a pipeline "
                    "(from_dataset(...).cache(...).random_map(...)). If nothing is random in it, "
                    "a time stamp, a counter or the last digits of floats differ, and a cache "
                    "would keep those of the first reading: leave that field out or round it, or "
                    "cache in front of what makes it"
                )
            self.known = True


def _same(value: Any, again: Callable[[], Any]) -> bool:
    expected = b"".join(codec.encoded(value))
    with _draws_kept():
        for _ in range(_TIMES):
            try:
                other = again()
            except Exception as error:
                pass_on(error)
                return True
            if b"".join(codec.encoded(other)) != expected:
                return False
    return True


@contextlib.contextmanager
def _draws_kept() -> Iterator[None]:
    """Have the global generators go on as if nothing had been drawn meanwhile.

    In the main thread only: set back by another, they would give training the same draws again.
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
