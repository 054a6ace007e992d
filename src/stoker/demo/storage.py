"""Where images come from: storage with an emulated latency, or an in-memory copy.

Both stop delivering while the clock is stopped for an evaluation, so that no arm gets
ahead meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Example(NamedTuple):
    """One training example."""

    image: Any
    """A whole image file as bytes, or decoded: uint8 [height, width, 3]."""
    label: int


class Source(Protocol):
    """What an experiment asks of a source, beyond being a dataset."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Example: ...
    def paused(self) -> Any: ...


class _Gate:
    """Lets readers pass, unless the experiment's clock is stopped."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hold back whoever reads, until the block ends."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def _pass(self) -> None:
        self._open.wait()


class EmulatedStorage(_Gate):
    """Image files behind a latency of `latency_s` seconds for every read.

    Reads of several threads overlap, as requests to remote storage do. Thread-safe.
    """

    def __init__(self, paths: Sequence[str], labels: Sequence[int], latency_s: float) -> None:
        super().__init__()
        self._paths = paths
        self._labels = labels
        self._latency_s = latency_s

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Example:
        self._pass()
        if self._latency_s > 0:
            time.sleep(self._latency_s)
        with open(self._paths[index], "rb") as file:
            return Example(file.read(), self._labels[index])


class InMemory(_Gate):
    """Decoded images in memory, uint8 [images, height, width, 3]: views, not copies."""

    def __init__(self, images: NDArray[np.uint8], labels: Sequence[int]) -> None:
        super().__init__()
        self._images = images
        self._labels = labels

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Example:
        self._pass()
        return Example(self._images[index], self._labels[index])
