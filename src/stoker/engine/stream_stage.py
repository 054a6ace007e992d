"""``StreamStage``: a stage that puts a stream of its own on top of those before it.

Such a stage is whole in one file: it checks its place in a chain, makes the stream of an epoch, and
reads that stream's node of a state. The engine knows no one of them.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from stoker.engine.checkpoint import Bounds, Node
from stoker.engine.items import EpochCounters, Stream
from stoker.engine.plan.address import WorkAddress
from stoker.engine.workers.threads import WorkerPool
from stoker.schedule.echo_record import RunRecord
from stoker.schedule.leg import Leg
from stoker.stages.padding_mask import PaddingMask
from stoker.stages.stage import ChainStage, EnginePlan


@dataclass(frozen=True)
class StreamContext:
    """What a stream may know of the epoch that it is made for.

    Attributes:
        address: the stage's own, with the epoch, the rank and the number of ranks.
        leg: the leg of the epoch, if other ranks took it over; else None.
        tally: counts time.
        record: the decisions of an earlier run that are repeated, or None.
        worker_pool: the pool of the segments before it.
        mask: marks padding in outputs, or None. A stream to a device marks its own.
    """

    address: WorkAddress
    leg: Leg | None
    tally: EpochCounters
    record: RunRecord | None
    worker_pool: WorkerPool
    mask: PaddingMask | None


@dataclass(frozen=True)
class StreamStage(ChainStage):
    """A stage with a stream of its own.

    A segment of work comes before it, and one behind; neither if it moves batches to a device.

    Attributes:
        kind: that of its node in a state; None if it has none, since numbers tell all.
        is_decided: whether values decide how many items come out.
        in_turn: whether it takes its inputs one after another, rather than those that are ready.
    """

    kind: ClassVar[str | None]
    is_decided: ClassVar[bool] = True
    in_turn: ClassVar[bool] = True

    def lower(self, to: EnginePlan) -> None:
        to.own(self)

    @abstractmethod
    def stream(self, upstream: Any, context: StreamContext) -> Stream:
        """Return the stream of an epoch over that of its inputs.

        That is a ``SegmentStream``; if it moves batches, a ``PulledStream``, as it returns.
        """

    def read_node(self, saved: Any, bounds: Bounds) -> Node:
        """Read the node of its stream from a state, before there are streams.

        Stages with a ``kind`` define it. Change ``bounds`` to those behind the stage.

        Raises TypeError, LookupError, ValueError or msgspec.ValidationError for what no run could
        have saved, or StateError.
        """
        raise NotImplementedError
