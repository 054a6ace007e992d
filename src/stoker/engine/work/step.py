"""The work on items: ``RowStep`` and ``Stack``, the address of their draws, and their failures."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.batching.user_collate import Collate
from stoker.engine.skip import Budget
from stoker.images.image_map import Many
from stoker.schedule.progress import Pace
from stoker.sources.origin import UserObject


class RowStep(ABC):
    """A row-wise stage: it makes one item of one, or drops it.

    Attributes:
        budget: its own ``max_errors=``, or None for the pipeline's.
        account: tells its budget from those of other stages; 0 where it has none.
        part: of a mixture, the part whose examples alone it is applied to; its ``has`` tells which
            places are of that part.
        makes_values: whether what its function returns takes the place of what it was given, so
            that None is a mistake.
        repeats_only: whether first uses pass it untouched.
        progress: whether its function is told where in training an example stands.
    """

    budget: Budget | None
    account: int
    part: Any
    makes_values = True
    repeats_only = False
    progress = False

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name, for people."""

    @property
    def only_reads(self) -> bool:
        """Whether its function is declared to change nothing that it is given."""
        return False

    @property
    def releases_gil(self) -> bool:
        """Whether its function is an image function, whose work is done without the GIL."""
        return False

    @abstractmethod
    def user_objects(self) -> list[UserObject]:
        """Return the objects of the user's that it calls."""

    def behind(self, before: Any) -> RowStep | None:
        """Return one that does what ``before`` and then this do; None if there is none."""
        return None

    @abstractmethod
    def compile(self, rejected: object) -> Callable[..., Any]:
        """Return a function of an item, and of a generator if it has a key.

        A filter's returns the item, or ``rejected``. It pickles if the user's function does.
        """

    def compile_many(self) -> Many | None:
        """Return what does the same for many items at once; None if its function does not."""
        return None

    def key(self, seed: int, epoch: int) -> NDArray[np.uint64] | None:
        """Return what keys its generator in an epoch, None if it draws nothing."""
        return None


@dataclass(frozen=True)
class Stack:
    """How examples are stacked into batches.

    Attributes:
        name: of its stage, for people.
        n: the examples in a batch; of planned batches, about as many.
        drop_last: whether a short last batch is left out.
        collate: the user's function that makes a batch, or None.
        is_planned: whether batches are planned, and so differ in size.
    """

    name: str
    n: int
    drop_last: bool
    collate: Collate | None
    is_planned: bool = False

    def user_objects(self) -> list[UserObject]:
        """Return the objects of the user's that it calls."""
        return [] if self.collate is None else [UserObject("collate of " + self.name, self.collate)]

    def count(self, items: int) -> int:
        """Return the number of batches that so many examples make."""
        return items // self.n if self.drop_last else -(-items // self.n)


class Dropped(enum.Enum):
    """The type of ``DROP``: as a member of an enumeration it stays itself under pickle and copy."""

    DROP = "DROP"

    def __repr__(self) -> str:
        return "stoker.DROP"


DROP: Final = Dropped.DROP
"""The function of ``.scan()`` returns this in place of an example to drop it."""


def returned_nothing(nothing: Any, what: str) -> TypeError:
    """Return the error of a function that gave ``None`` or ``DROP`` in place of a value.

    Perhaps it has only changed what it was given. Inside of what it returns, ``None`` is a value
    like any other.
    """
    instead = " (to leave examples out, use .filter)" if what == "example" else ""
    if what == "field":
        instead = " (None belongs into a field only if the function returns the whole example)"
    return TypeError(f"the function returned {nothing!r}: return the {what}{instead}")


class WorkAddress(NamedTuple):
    """The address of a segment's work among all works of a pipeline.

    Attributes:
        at: the segment's place among the layers of the flow.
        seed, epoch: the key of its random draws.
        rank, world: this process's rank, and the number of ranks.
        batches: the number of batches of all ranks before the epoch's leg.
        paces: how examples come over the epoch; of a mixture, those of each part; empty if no map
            asks for the time.
    """

    at: int
    seed: int
    epoch: int
    rank: int = 0
    world: int = 1
    batches: int = 0
    paces: tuple[Pace, ...] = ()

    def batch_place(self, number: int) -> int:
        """Return the place of a batch by its number on this rank."""
        return self.batches + number * self.world + self.rank

    def batch_number(self, place: int) -> int:
        """Return the number of a batch on this rank by its place."""
        return (place - self.batches) // self.world


class Failure:
    """Stands in place of an example that a stage failed on, until a batch needs it.

    Attributes:
        error: the error to raise then.
        part: the failed segment's place among the layers: only the sift behind it may skip
            the example. None if nothing may skip it.
        account: the ``max_errors=`` that it counts against (see ``Sift``).
    """

    def __init__(self, error: BaseException, part: int | None = None, account: int = 0) -> None:
        self.error = error
        self.part = part
        self.account = account


class Rejected(Exception):
    """The error of an example that a filter dropped."""


SENDING = "worker process"
"""The stage of values that did not survive the way from a process, or to it."""
REJECTED = Failure(Rejected())
ENDED = -1
"""The part of a failure that ended a stream: it is never skipped, nor left out of a batch."""
