"""A loader that gives what a script says, and goes on behind its errors."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from stoker.engine.items import Item

LONG_S = 60.0


class Broken(Exception):
    """What a loader of a test raises."""


class Loader:
    """Gives batches ``[[number], ...]``, and raises in between; may have to be let.

    Args:
        script: what comes: numbers are batches, None is an error.
        gate: is waited for before each, if there is one.

    Attributes:
        at: how much of the script was asked for.
        closed: set when its iterator is let go of.
    """

    rows = 1

    def __init__(self, script: list[int | None], gate: threading.Semaphore | None = None) -> None:
        self.script = script
        self.gate = gate
        self.at = 0
        self.closed = threading.Event()

    def batch(self, number: int) -> Any:
        return np.full((self.rows, 1), number)

    def __iter__(self) -> LoaderIterator:
        return LoaderIterator(self)


class LoaderIterator:
    """Goes on behind an error, and can be interrupted, as a feed's iterator can."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._interrupted = False

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        loader = self._loader
        if loader.gate is not None:
            assert loader.gate.acquire(timeout=LONG_S)
        if self._interrupted or loader.at >= len(loader.script):
            raise StopIteration
        number, loader.at = loader.script[loader.at], loader.at + 1
        if number is None:
            raise Broken(loader.at - 1)
        return loader.batch(number)

    def interrupt(self) -> None:
        self._interrupted = True
        if self._loader.gate is not None:
            self._loader.gate.release()

    def __del__(self) -> None:
        self._loader.closed.set()


def value(item: Item | None) -> Any:
    """Return what stands in an item."""
    assert item is not None
    return item.task.values[item.row]
