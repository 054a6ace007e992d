"""Orders of an epoch that are no permutation: by weights, or by a user's function."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.basics.signals import pass_on
from stoker.errors import StageError
from stoker.schedule import rng
from stoker.schedule.orders.order import ListedOrder, Order, Places, as_array
from stoker.schedule.orders.subset import EligibleIndices

# Numbers that are checked at once, of a list: 8 MB. Chosen, not measured.
_CHECKED_AT_ONCE = 1 << 20
# Places of an order without a list that its digest is made of. Chosen, not measured.
_SAMPLED = 1 << 16
# Places that such an order is asked for at once, so that its own cost of a call does not count.
_TOGETHER = 1 << 10


class DrawnOrder(Order, Protocol):
    """The order of an epoch, over numbers of the source.

    Attributes:
        digest: the same for the same order, eight digits.
    """

    digest: str


@contextlib.contextmanager
def by_user(stage: str) -> Iterator[None]:
    """Have what a user's function raises, and what is wrong with its result, name a stage."""
    try:
        yield
    except StageError:
        raise
    except Exception as error:
        pass_on(error)
        raise StageError(stage, error) from error


class OwnDrawing:
    """Has a user's function say the order of each epoch. Any thread may ask.

    Args:
        fn: called as ``fn(epoch, rng)``.
        length: the places of an epoch, None for as many as there are candidates.
        name: of the stage, for errors.

    Attributes:
        calls_user: whether a user's function decides, so that an order may not be made again.
    """

    calls_user = True

    def __init__(
        self,
        fn: Callable[[int, np.random.Generator], Any],
        length: int | None,
        name: str,
    ) -> None:
        self._fn, self._length, self._name = fn, length, name

    def count(self, candidates: int) -> int:
        """Return how many places an epoch has, of so many candidates."""
        return candidates if self._length is None else self._length

    def order(
        self, candidates: EligibleIndices, length: int, seed: int, epoch: int, purpose: int
    ) -> DrawnOrder:
        """Return the order of an epoch, of candidates among ``length`` examples.

        Raises StageError where the function fails, or returns no order.
        """
        key, count = rng.key(seed, epoch, purpose), self.count(len(candidates))
        with by_user(self._name):
            made = self._fn(epoch, np.random.Generator(np.random.Philox(key=key)))
            is_lazy = callable(getattr(made, "at", None)) and hasattr(made, "__len__")
            numbers = made if is_lazy else np.asarray(made)
            if not is_lazy and numbers.ndim != 1:
                raise TypeError(
                    f"it returned {_shown(made)}: return an array [n] of numbers of the source, or "
                    "an object with __len__ and at(places)"
                )
            if len(numbers) != count:
                raise ValueError(
                    f"it returned {len(numbers):,} numbers, and an epoch has {count:,} examples: "
                    f"say .order(fn, length={len(numbers)}), if each epoch has as many"
                )
            checks = _Checks(candidates, length)
            if is_lazy:
                return LazyOrder(made, checks, self._name)
            for start in range(0, max(1, len(numbers)), _CHECKED_AT_ONCE):
                checks.check(numbers[start : start + _CHECKED_AT_ONCE])
            kept = numbers.astype(checks.kind)  # a copy: it may be written to in the epoch
            return ListedOrder(kept, _digest(kept))


class _Checks:
    """Checks numbers that a user's function has returned."""

    def __init__(self, candidates: EligibleIndices, length: int) -> None:
        self._candidates, self._length = candidates, length

    def check(self, numbers: Any) -> None:
        """Raise TypeError or ValueError for what are no numbers of candidates, ``[n]``."""
        if numbers.dtype.kind not in "iu":
            raise TypeError(f"it returned {numbers.dtype}: return whole numbers, of the source")
        if not len(numbers):
            return
        for number in (int(numbers.min()), int(numbers.max())):
            if not 0 <= number < self._length:
                raise ValueError(
                    f"it returned example {number}, and the source has examples 0 to "
                    f"{self._length - 1}"
                )
        if len(self._candidates) == self._length:
            return
        lacks = ~self._candidates.has(numbers.astype(np.int64, copy=False))
        if lacks.any():
            raise ValueError(
                f"it returned example {int(numbers[lacks.argmax()])}, which is not among those "
                "that .select(), .split(), .take() or .skip() before it leave"
            )

    @property
    def kind(self) -> type[np.integer[Any]]:
        """The type of numbers that are kept."""
        return np.uint32 if self._length <= 1 << 32 else np.int64


class LazyOrder:
    """An order by a user's object, which is asked for places."""

    together = _TOGETHER

    def __init__(self, made: Any, checks: _Checks, name: str) -> None:
        self._made, self._checks, self._name = made, checks, name
        self._count = len(made)
        step = -(-self._count // _SAMPLED) or 1
        self.digest = _digest(self.at(range(0, self._count, step)))

    def __len__(self) -> int:
        return self._count

    def at(self, places: Places) -> NDArray[np.int64]:
        with by_user(self._name):
            numbers = np.asarray(self._made.at(as_array(places)))
            if numbers.shape != (len(places),):
                raise TypeError(
                    f"at() returned {_shown(numbers)} for {len(places)} places: return an array "
                    "with a number for each"
                )
            self._checks.check(numbers)
            return numbers.astype(np.int64)


def _digest(numbers: NDArray[Any]) -> str:
    return f"{zlib.crc32(numbers.data):08x}"


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"an array of shape {shape}"
