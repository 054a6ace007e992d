"""``monitor``: the share of a loop's time that it waits for its loader."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from stoker.basics.warn import say
from stoker.distributed.unsharded import warn_unsharded_loader
from stoker.pipeline import Pipeline

T = TypeVar("T")

# A smaller share of waiting time counts as keeping up. As in the analyzer
# (analysis/model/model.py).
_FED = 0.05


@dataclass(frozen=True)
class EpochWait:
    """One pass over a monitored loader, or the sum of several."""

    batches: int
    """Batches that came."""
    elapsed_s: float
    """Seconds from ``iter()`` to the end of the pass."""
    first_wait_s: float
    """Seconds that the first batch took, workers' start included: part of ``wait_s``."""
    wait_s: float
    """Seconds spent inside ``next()``; an upper bound of the accelerator's loss if it works
    meanwhile."""

    @property
    def wait_fraction(self) -> float:
        """The share of the elapsed time that was spent waiting."""
        return self.wait_s / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def steady_wait_fraction(self) -> float:
        """The share of the time after the first batch that was spent waiting."""
        steady_s = self.elapsed_s - self.first_wait_s
        return (self.wait_s - self.first_wait_s) / steady_s if steady_s > 0 else 0.0

    def __str__(self) -> str:
        return (
            f"waited {self.wait_s:.2f} s of {self.elapsed_s:.2f} s ({self.wait_fraction:.0%}) "
            f"for {self.batches:,} batches: {self.first_wait_s:.2f} s for the first (start-up), "
            f"{self.wait_s - self.first_wait_s:.2f} s after it ({self.steady_wait_fraction:.0%})\n"
            f"{self.verdict}"
        )

    @property
    def verdict(self) -> str:
        """The diagnosis in a sentence or two, and the next step."""
        share, parts = self.steady_wait_fraction, []
        if share < _FED and self.wait_fraction - share < _FED:
            return "The loader keeps up: next to no time is lost to waiting for data."
        if share >= _FED:
            parts.append(
                f"Up to {share:.0%} of the time after start-up is lost to waiting for data."
            )
        if self.wait_fraction - share >= _FED:
            parts.append(
                "Starting up costs more than that: longer epochs or persistent_workers=True help."
            )
        script = sys.argv[0] if sys.argv[0].endswith(".py") else "SCRIPT"
        parts.append(f"What to do about it: stoker analyze {script}")
        return " ".join(parts)


class Monitored(Generic[T]):
    """An iterable that reports on stderr how much of its loop's time is spent waiting for it.

    It prints a line for each epoch, and the diagnosis after the first. A pass that ends after one
    batch is not reported. Length, attributes, order and errors are those of the loader.

    Attributes:
        epochs: the passes that ended, in order.
    """

    def __init__(self, loader: Iterable[T]) -> None:
        self.loader = loader
        self.epochs: list[EpochWait] = []
        self._at: tuple[int, int, float, float, float] | None = None  # in the pass under way
        self._has_told = False

    def __iter__(self) -> Iterator[T]:
        if not isinstance(self.loader, Pipeline):  # that warns by itself
            warn_unsharded_loader(self.loader)
        began = time.perf_counter()
        return _TimedBatches(self, iter(self.loader), began)  # the loader starts now, not later

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet: while it is unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def total(self) -> EpochWait:
        """The sum of all passes, with the one under way; ``print`` shows it with the diagnosis."""
        return _sum_epochs(self._passes())

    def metrics(self, prefix: str = "stoker/") -> dict[str, float]:
        """Return the waiting as one flat dict of numbers, for experiment trackers.

        Those of a monitored pipeline are its own: see ``Pipeline.metrics``.
        """
        if isinstance(self.loader, Pipeline):
            return self.loader.metrics(prefix)
        passes = self._passes()
        total = _sum_epochs(passes)
        last = passes[-1] if passes else total
        found = {
            "epoch": max(0, len(passes) - 1),
            "wait_fraction": last.wait_fraction,
            "batches_per_s": last.batches / last.elapsed_s if last.elapsed_s > 0 else 0.0,
            "steps_total": total.batches,
            "elapsed_s_total": total.elapsed_s,
            "consumer_wait_s_total": total.wait_s,
        }
        return {prefix + name: float(value) for name, value in found.items()}

    def _passes(self) -> list[EpochWait]:
        """Return all passes, with the one under way. Safe to call from any thread."""
        at, ended = self._at, list(self.epochs)  # in this order: a pass ends in the other one
        if at is not None and at[0] == len(ended):
            _, batches, began_s, first_s, wait_s = at
            elapsed_s = time.perf_counter() - began_s
            ended.append(EpochWait(batches, elapsed_s, first_s, wait_s))
        return ended

    def _end_epoch(self, epoch: EpochWait, *, whole: bool) -> None:
        self.epochs.append(epoch)
        self._at = None
        if not whole and epoch.batches <= 1:
            return  # the loop failed at once, and there is nothing to report
        told = str(epoch).splitlines()
        if self._has_told:
            del told[1:]
        self._has_told = True
        told[0] = f"epoch {len(self.epochs) - 1}: {told[0]}"
        for line in told:
            say(f"stoker.monitor: {line}")


def _sum_epochs(epochs: Sequence[EpochWait]) -> EpochWait:
    names = "batches", "elapsed_s", "first_wait_s", "wait_s"
    sums = {name: sum(getattr(epoch, name) for epoch in epochs) for name in names}
    return EpochWait(**sums)


class _TimedBatches(Iterator[T]):
    """A pass: the loader's batches, with the time that each is waited for.

    It is no generator, as an error would end that: a loop that catches one may go on.
    """

    def __init__(self, owner: Monitored[T], batches: Iterator[T], began_s: float) -> None:
        self._owner, self._batches = owner, batches
        self._number = len(owner.epochs)
        self._began_s = self._asked_s = began_s  # iter() may start workers: it is waited for, too
        self._count = 0
        self._wait_s = self._first_s = 0.0
        self._has_ended = False

    def __next__(self) -> T:
        asked_s, self._asked_s = self._asked_s or time.perf_counter(), 0.0
        is_over = False
        try:
            batch = next(self._batches)
        except StopIteration:
            is_over = True
            raise
        finally:
            self._wait_s += time.perf_counter() - asked_s
            if is_over:
                self._end(whole=True)
        if not self._count:
            self._first_s = self._wait_s
        self._count += 1
        self._owner._at = self._number, self._count, self._began_s, self._first_s, self._wait_s
        return batch

    def close(self) -> None:
        """End the pass here."""
        self._end(whole=False)

    __del__ = close

    def _end(self, *, whole: bool) -> None:
        if not self._has_ended:
            self._has_ended, self._batches = True, iter(())
            first_s = self._first_s if self._count else self._wait_s
            elapsed_s = time.perf_counter() - self._began_s
            self._owner._end_epoch(
                EpochWait(self._count, elapsed_s, first_s, self._wait_s), whole=whole
            )


def monitor(loader: Iterable[T]) -> Monitored[T]:
    """Wrap a loader, or any iterable of batches, to measure how long a loop waits for it.

    Use it in the loader's place: ``for batch in stoker.monitor(loader)``. Costs well under a
    microsecond a batch and reads nothing ahead.
    """
    if not hasattr(loader, "__iter__"):
        raise TypeError(f"monitor needs something to iterate, not {type(loader).__name__}")
    return Monitored(loader)
