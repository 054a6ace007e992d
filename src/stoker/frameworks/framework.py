"""The protocol of training frameworks; its defaults are the answers of none.

A framework calls a pipeline without saying why. A module in this room finds out for each framework.
The rest of the package asks ``queries``, and knows no framework by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Protocol

SAMPLER = "DataLoader(dataset, sampler=DistributedSampler(dataset)) gives each its part"


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
