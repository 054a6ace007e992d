"""The protocol of training frameworks, with the answers of a plain loop as its defaults.

A framework calls a pipeline without saying for what. A file in this room finds out for each of
them. The rest of the package asks ``queries``, and does not know frameworks by name.
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
        reads_ahead: whether it takes a batch more than it trains on, if there is no ``len()``, and
            may keep an iterator that it has left.
        repeats_first_epoch: whether all of its epochs must have the batches of the first.
    """

    framework = ""
    reads_ahead = False
    repeats_first_epoch = False

    def has_ended_epoch(self) -> bool:
        """True if it asks for no more of its epoch, though batches may be left."""
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
    """An epoch that is handed out."""

    @property
    def is_last(self) -> bool:
        """True if nothing follows the output handed out last."""
        ...

    @property
    def remainder(self) -> int:
        """How many examples the last batches of all ranks hold; 0: there is no padding in them."""
        ...

    @property
    def ends_unequally(self) -> bool:
        """True if ranks have more or fewer examples than others."""
        ...


class EpochListener(Protocol):
    """Is told when an epoch begins and ends."""

    def begin(self) -> None:
        """Take note of a batch that was handed out."""
        ...

    def end(self) -> None:
        """Take note that the epoch is over, or was left."""
        ...


class Framework:
    """A training framework. The defaults are those of one that needs nothing of a pipeline.

    Attributes:
        name: as its users call it.
        where_ranks_are_known: where a pipeline is built so that ``.shard()`` finds the ranks.
    """

    name = ""
    where_ranks_are_known = ""

    def loop(self) -> TrainingLoop | None:
        """Return its loop, if it is calling."""
        return None

    def shards_data(self) -> bool:
        """True if it is at work, and its users expect it to give each rank its part."""
        return False

    def way_to_shard(self, loader: Any) -> str | None:
        """Describe how to shard a foreign loader under it; None if it may be sharded already."""
        return None

    def keeps_one_state(self) -> bool:
        """True if it is saving or loading one rank's state for all ranks."""
        return False

    def wrap_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return a pipeline's state in the form that it saves, if it is calling; else unchanged."""
        return saved

    def unwrap_state(self, saved: Any) -> Any:
        """Return the pipeline's state from the result of ``wrap_state``; other values unchanged."""
        return saved

    def listener(self, epoch: RunningEpoch) -> EpochListener | None:
        """Return the listener of an epoch that begins, or None."""
        return None

    def mesh(self) -> Any:
        """Return the device mesh that it has set up, or None."""
        return None


def frames() -> Iterator[tuple[str, FrameType]]:
    """Yield the calling frames with the names of their modules, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield str(frame.f_globals.get("__name__", "")), frame
        frame = frame.f_back


def is_calling(module_prefix: str | tuple[str, ...]) -> bool:
    """True if code of such a module is calling."""
    return any(module.startswith(module_prefix) for module, _ in frames())
