"""How much of a loop's time is spent waiting for its loader."""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class EpochWait:
    """One pass over a monitored loader."""

    batches: int
    """Batches that came."""
    elapsed_s: float
    """Seconds from ``iter()`` to the end of the pass."""
    first_wait_s: float
    """Seconds that the first batch took, workers' start included: part of ``wait_s``."""
    wait_s: float
    """Seconds spent inside ``next()``; where an accelerator works on meanwhile, an upper bound
    of what it lost."""

    @property
    def wait_fraction(self) -> float:
        """The share of the elapsed time that was spent waiting."""
        return self.wait_s / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def __str__(self) -> str:
        return (
            f"waited {self.wait_s:.2f} s of {self.elapsed_s:.2f} s ({self.wait_fraction:.0%}) "
            f"for {self.batches:,} batches, {self.first_wait_s:.2f} s of it for the first"
        )


class Monitored(Generic[T]):
    """An iterable that tells, on stderr, what share of the time was spent waiting for it.

    A line an epoch, and a sum when the program ends or ``report()`` is called. Everything
    else is the loader's: its length, attributes, order and errors.

    Attributes:
        epochs: the passes that ended, in order.
    """

    def __init__(self, loader: Iterable[T]) -> None:
        self.loader = loader
        self.epochs: list[EpochWait] = []
        self._told = 0
        _watch_exit(self)

    def __iter__(self) -> Iterator[T]:
        began = time.perf_counter()
        return _passing(self, iter(self.loader), began)  # the loader starts now, not later

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet: while it is unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def total(self) -> EpochWait:
        """The sum of all passes."""
        return EpochWait(
            sum(e.batches for e in self.epochs),
            sum(e.elapsed_s for e in self.epochs),
            sum(e.first_wait_s for e in self.epochs),
            sum(e.wait_s for e in self.epochs),
        )

    def report(self) -> str:
        """Return the sum of all passes in words."""
        return f"stoker.monitor: {len(self.epochs)} epochs: {self.total}"

    def _ended(self, epoch: EpochWait) -> None:
        self.epochs.append(epoch)
        print(f"stoker.monitor: epoch {len(self.epochs) - 1}: {epoch}", file=sys.stderr)

    def _at_exit(self) -> None:
        if len(self.epochs) > 1:
            print(self.report(), file=sys.stderr)


def _watch_exit(monitored: Monitored[Any]) -> None:
    reference = weakref.ref(monitored)

    def tell() -> None:
        alive = reference()
        if alive is not None:
            alive._at_exit()

    atexit.register(tell)
    weakref.finalize(monitored, atexit.unregister, tell).atexit = False


def _passing(owner: Monitored[T], iterator: Iterator[T], began_s: float) -> Iterator[T]:
    """Pass batches on; a generator, for its local variables are the cheapest place to count."""
    clock = time.perf_counter
    batches, wait_s = 0, 0.0
    first_s = None
    asked_s = began_s  # iter() may start workers
    try:
        for batch in iterator:
            wait_s += clock() - asked_s
            batches += 1
            yield batch
            if first_s is None:
                first_s = wait_s
            asked_s = clock()
        wait_s += clock() - asked_s
    finally:
        elapsed_s = clock() - began_s
        owner._ended(EpochWait(batches, elapsed_s, wait_s if first_s is None else first_s, wait_s))


def monitor(loader: Iterable[T]) -> Monitored[T]:
    """Wrap a loader, or any iterable of batches, to see how long a loop waits for it.

    Use it in the loader's place: ``for batch in stoker.monitor(loader)``. Costs well under a
    microsecond a batch and reads nothing ahead.
    """
    if not hasattr(loader, "__iter__"):
        raise TypeError(f"monitor needs something to iterate, not {type(loader).__name__}")
    return Monitored(loader)
