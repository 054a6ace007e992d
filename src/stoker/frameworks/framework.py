"""The protocol of training frameworks; its defaults are the answers of a plain loop.

A framework calls a pipeline without saying why. A module in this room finds out for each framework.
The rest of the package asks ``queries``, and knows no framework by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol

SAMPLER = "DataLoader(dataset, sampler=DistributedSampler(dataset)) gives each its part"


class TrainingLoop:
    """The loop that iterates over a pipeline. The defaults are those of a user's own loop.

    Attributes:
        framework: the name of its framework.
        reads_ahead: whether it takes one batch more than it trains on if there is no ``len()``.
        begins_later: whether it asks for an iterator before it loads a state that it will go on at.
        repeats_first_epoch: whether all of its epochs must have the batches of the first.
    """

    framework = ""
    reads_ahead = False
    begins_later = False
    repeats_first_epoch = False

    def has_ended_epoch(self) -> bool:
        """True if it requests no more batches of its epoch, although there may be some."""
        return False

    def untrained_batches(self) -> int:
        """Return how many batches it has received and not finished training on."""
        return 0

    def take_state(self, is_for: Callable[[Any], bool]) -> Any:
        """Return, once, a saved state that it loaded and did not pass to the loader; else None.

        ``is_for`` returns True for the loader that asks.
        """
        return None


class RunningEpoch(Protocol):
    """An epoch whose batches are being handed out."""

    @property
    def is_last(self) -> bool:
        """True if nothing follows the output handed out last."""
        ...

    @property
    def remainder(self) -> int:
        """How many examples the last batches of all ranks hold; 0 if they have no padding."""
        ...

    @property
    def ends_unequally(self) -> bool:
        """True if ranks have more or fewer examples than others."""
        ...


class EpochListener(Protocol):
    """Is called when an epoch begins and ends."""

    def begin(self) -> None:
        """Record that a batch was handed out."""
        ...

    def end(self) -> None:
        """Record that the epoch has ended, or was left."""
        ...


class Framework:
    """A training framework, which may give ranks their data. By default it does nothing of it.

    Attributes:
        name: the name that its users know.
        where_ranks_are_known: where to build a pipeline so that ``.shard()`` finds the ranks.
    """

    name = ""
    where_ranks_are_known = ""

    def shards_data(self) -> bool:
        """True if it is running, and its users expect it to give each rank its part."""
        return False

    def way_to_shard(self, loader: Any) -> str | None:
        """Describe how to shard a foreign loader under it; None if it may be sharded already."""
        return None

    def keeps_one_state(self) -> bool:
        """True if it is saving or loading one rank's state for all ranks."""
        return False


def frames() -> Iterator[tuple[str, FrameType]]:
    """Yield the calling frames with the names of their modules, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield str(frame.f_globals.get("__name__", "")), frame
        frame = frame.f_back


def is_calling(module_prefix: str | tuple[str, ...]) -> bool:
    """True if code of such a module is calling."""
    return any(module.startswith(module_prefix) for module, _ in frames())
