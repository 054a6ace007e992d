"""``HeadSource``: a source that is iterated, so that its stream is the head of an epoch's."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.basics.buffers import Recycler
from stoker.engine.checkpoint import Position
from stoker.engine.items import EpochCounters, HeadStream
from stoker.schedule.selection import Selection
from stoker.sources.origin import Origin


@dataclass(frozen=True)
class Opening:
    """What a head may know of the epoch that it is opened for.

    Attributes:
        epoch: the epoch's number.
        position: where to begin.
        selection: this rank's examples.
        key: keys the shuffling.
        tally: counts time.
        keep: makes copies of what is handed out, as a pool keeps it; None if none are needed.
    """

    epoch: int
    position: Position
    selection: Selection
    key: NDArray[np.uint64]
    tally: EpochCounters
    keep: Recycler | None


class HeadSource(Origin):
    """A source that is iterated: of examples, or of ready batches."""

    @abstractmethod
    def head(self, opening: Opening) -> HeadStream:
        """Begin a pass. Raises StateError if it cannot begin where it should."""
