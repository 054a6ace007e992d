"""Worker specification for other hosts: the pipeline's work once, then a few numbers an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.engine.plan.address import WorkAddress
from stoker.engine.plan.segment import Segment
from stoker.engine.work.work import Work
from stoker.sources.origin import IndexedSource


@dataclass(frozen=True)
class WorkerSpec:
    """A pipeline's work: everything that stays the same in all epochs."""

    segments: Sequence[Segment]
    source: IndexedSource | None

    def works(self, addresses: Sequence[WorkAddress]) -> list[Work]:
        """Return the work of an epoch, by depth."""
        segments = {segment.at: segment for segment in self.segments}
        return [Work(segments[each.at], each, self.source, None) for each in addresses]
