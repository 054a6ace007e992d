"""``RowStep`` and ``Stack``: what the engine asks of the stages that a segment is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.batching.user_collate import Collate
from stoker.engine.skip import Budget
from stoker.images.image_map import Many
from stoker.sources.origin import UserObject


class OwnPlaces(Protocol):
    """A part of a mixture, to whose examples alone a step applies."""

    def has(self, places: Sequence[int]) -> list[bool]:
        """Tell which places of the epoch are of this part."""
        ...


class RowStep(Protocol):
    """One row-wise stage: it makes one item of one, or drops it.

    Attributes:
        name: for people.
        budget: its own skip budget, or None for the pipeline's; ``account`` tells that budget from
            others, and is 0 where it has none.
        part: the part of a mixture whose examples alone it applies to, or None.
        makes_values: whether it makes values; a filter only drops them.
        repeats_only: whether first uses pass it untouched.
        clock: whether its function is told where in training an example stands.
        only_reads: whether it changes nothing that it is given; ``releases_gil``: whether it works
            without the GIL.
    """

    @property
    def name(self) -> str: ...
    @property
    def budget(self) -> Budget | None: ...
    @property
    def account(self) -> int: ...
    @property
    def part(self) -> OwnPlaces | None: ...
    @property
    def makes_values(self) -> bool: ...
    @property
    def repeats_only(self) -> bool: ...
    @property
    def clock(self) -> bool: ...
    @property
    def only_reads(self) -> bool: ...
    @property
    def releases_gil(self) -> bool: ...
    def user_objects(self) -> list[UserObject]: ...
    def behind(self, before: Any) -> RowStep | None:
        """Return one step that does what ``before`` and then this do; None if there is none."""
        ...

    def compile(self, rejected: object) -> Callable[..., Any]:
        """Return a function of an item, and of a generator if there is a key.

        It may return ``rejected`` to drop the item. It pickles if the user's function does.
        """
        ...

    def compile_many(self) -> Many | None:
        """Return what does the same for many items in one call, if there is such a function."""
        ...

    def key(self, seed: int, epoch: int) -> NDArray[np.uint64] | None:
        """Return what keys its generator in an epoch, None if it draws nothing."""
        ...


class Stack(Protocol):
    """The stage that stacks examples into batches.

    Attributes:
        name: for people.
        n: the examples in a batch; of planned batches, about as many.
        is_planned: whether batches are planned, and so differ in size.
        drop_last: whether a short last batch is left out.
        collate: the user's function that makes a batch, or None.
    """

    @property
    def name(self) -> str: ...
    @property
    def n(self) -> int: ...
    @property
    def is_planned(self) -> bool: ...
    @property
    def drop_last(self) -> bool: ...
    @property
    def collate(self) -> Collate | None: ...
    def user_objects(self) -> list[UserObject]: ...
    def count(self, items: int) -> int:
        """Return how many batches so many examples make."""
        ...


def returned_nothing(what: str) -> TypeError:
    """Return the error of a function that may only have changed what it was given.

    ``None`` inside of what it returns is a value like any other.
    """
    instead = " (to leave examples out, use .filter)" if what == "example" else ""
    if what == "field":
        instead = " (None belongs into a field only if the function returns the whole example)"
    return TypeError(f"the function returned None: return the {what}{instead}")
