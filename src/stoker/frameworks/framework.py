"""What a pipeline has to know of a training framework: questions, and the answers of a plain loop.

Frameworks do not say what they call a pipeline for. Each has a file in this room that finds out.
The rest of the package asks ``queries`` and knows no framework's name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol

SAMPLER = "DataLoader(dataset, sampler=DistributedSampler(dataset)) gives each its part"


class TrainingLoop:
    """The loop that iterates over a pipeline. Here: one of the user's own, with nothing unsaid.

    Attributes:
        framework: the name of the framework that it belongs to.
        reads_ahead: whether it takes a batch more than is trained on, where there is no ``len()``,
            and may keep an iterator that it has left.
        repeats_first_epoch: whether each of its epochs is to have the batches of the first.
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
        """Return, once, a saved state that it loaded and does not hand on; else None.

        ``is_for`` is true for the loader that asks.
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
    """Who wants to know when an epoch begins and ends."""

    def begin(self) -> None:
        """Take note that a batch was handed out."""
        ...

    def end(self) -> None:
        """Take note that the epoch is over, or was left."""
        ...


class Framework:
    """A training framework. Here: one that leaves a pipeline alone.

    Attributes:
        name: as its users call it.
        where_ranks_are_known: where a pipeline is built so that ``.shard()`` finds the ranks.
    """

    name = ""
    where_ranks_are_known = ""

    def loop(self) -> TrainingLoop | None:
        """Return its loop, if that is calling."""
        return None

    def shards_data(self) -> bool:
        """True if it is at work, and its users expect it to give each rank its part."""
        return False

    def way_to_shard(self, loader: Any) -> str | None:
        """Say how a foreign loader is sharded under it; None if it cannot tell whether it is."""
        return None

    def keeps_one_state(self) -> bool:
        """True if it is saving or loading one rank's state for all ranks."""
        return False

    def wrap_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return a pipeline's state as it saves one, if it is calling; else as it is."""
        return saved

    def unwrap_state(self, saved: Any) -> Any:
        """Return the pipeline's state in what ``wrap_state`` returned; else what is given."""
        return saved

    def listener(self, epoch: RunningEpoch) -> EpochListener | None:
        """Return who is to be told of an epoch that begins."""
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
