"""Worker specification for other hosts: the pipeline's work once, then a few numbers an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.engine.plan import Segment
from stoker.engine.work import UndeclaredRng, Work, WorkAddress
from stoker.schedule.orders import Selection
from stoker.sources.origin import IndexedSource


@dataclass(frozen=True)
class WorkerSpec:
    """A pipeline's work: everything that stays the same in all epochs."""

    segments: Sequence[Segment]
    selection: Selection
    source: IndexedSource | None

    def works(self, addresses: Sequence[WorkAddress]) -> list[Work]:
        """Return the work of an epoch, by depth."""
        misdrawn: list[UndeclaredRng] = []
        segments = {segment.at: segment for segment in self.segments}
        works = []
        for address in addresses:
            _, seed, epoch, rank = address
            order = None
            if self.source is not None:
                order = self.source.order(self.selection, seed, epoch)
            segment = segments[address.at]
            works.append(
                Work(segment, seed, epoch, self.source, order, rank=rank, misdrawn=misdrawn)
            )
        return works
