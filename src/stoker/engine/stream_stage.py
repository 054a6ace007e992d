"""``StreamStage`` and ``HeadSource``: a stage or a source that makes a stream of its own.

Such a stage is whole in one file: it checks its place in a chain, makes the stream of an epoch, and
reads that stream's node of a state. The engine knows no one of them.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from stoker.basics.buffers import Recycler
from stoker.engine.checkpoint import Bounds, Node, Position
from stoker.engine.echo.rank_sync import Ranks
from stoker.engine.items import EpochCounters, HeadStream, Item, Planning, Stream
from stoker.engine.plan.address import WorkAddress
from stoker.engine.plan.plan import Plan
from stoker.engine.plan.points import OwnPoint
from stoker.engine.survivors import SkipLog
from stoker.engine.workers.make import KeptWorkers, Workers
from stoker.engine.workers.threads import WorkerPool
from stoker.engine.workers.tuning import Autotuner
from stoker.schedule.echo_record import RunRecord
from stoker.schedule.epoch_rest import EpochRest
from stoker.sources.origin import SourceBase
from stoker.stages.padding_mask import PaddingMask
from stoker.stages.stage import ChainStage, EnginePlan, PoolSize


@dataclass(frozen=True)
class EpochSetup:
    """The settings of an epoch.

    Attributes:
        plan: the plan.
        seed, epoch: they decide the order and every random draw.
        autotuner: the measured speeds of the pipeline.
        workers: the number and kind of workers.
        pool_size: the size of the echo's pool; filled in when it becomes known.
        position: where to begin.
        steps: the most outputs, or None.
        ranks: the ranks that adaptive echoes agree with, or None.
        recycler: the owner of the batches' memory.
        length: the number of outputs in the epoch, or None if unknown.
        carried: the items of the epoch before that its pool hands on, by their numbers.
        kept_workers: the workers that the pipeline keeps from epoch to epoch.
        record: the decisions of an earlier run that are repeated, or None.
    """

    plan: Plan
    seed: int
    epoch: int
    autotuner: Autotuner
    workers: Workers
    pool_size: PoolSize
    position: Position
    steps: int | None = None
    ranks: Ranks | None = None
    recycler: Recycler = field(default_factory=Recycler)
    length: int | None = None
    carried: dict[int, Item] = field(default_factory=dict)
    kept_workers: KeptWorkers = field(default_factory=KeptWorkers)
    record: RunRecord | None = None


@dataclass(frozen=True)
class StreamContext:
    """What a stream may know of the epoch that it is made for.

    Attributes:
        point: the point of its stage in the plan.
        setup: the settings of the epoch.
        tally: counts time; ``skip_log``: records skips.
        worker_pool: the pool of the segments before it; ``planning``: the lock of who plans them.
        mask: marks padding in outputs, or None. A stream to a device marks its own.
    """

    point: OwnPoint
    setup: EpochSetup
    tally: EpochCounters
    skip_log: SkipLog
    worker_pool: WorkerPool
    planning: Planning
    mask: PaddingMask | None

    @property
    def address(self) -> WorkAddress:
        """The stage's own address, with the epoch, the rank and the number of ranks."""
        setup = self.setup
        return setup.plan.address(self.point.at, setup.seed, setup.epoch)

    @property
    def leg(self) -> EpochRest | None:
        """The leg of the epoch, if other ranks took it over; else None."""
        return self.setup.plan.selection.leg


class HeadSource(SourceBase):
    """A source that is iterated: of examples, or of ready batches."""

    @abstractmethod
    def head(self, setup: EpochSetup, tally: EpochCounters) -> HeadStream:
        """Begin a pass of an epoch; ``tally`` counts time.

        Raises StateError if it cannot begin where it should.
        """


@dataclass(frozen=True)
class StreamStage(ChainStage):
    """A stage with a stream of its own.

    A segment of work comes right before it, unless it moves batches to a device or repeats items.
    One comes right behind it, unless it moves batches.

    Attributes:
        kind: that of its node in a state; None if it has none, since numbers tell all.
        is_decided: whether values decide how many items come out.
        in_turn: whether it takes its inputs one after another, rather than those that are ready.
        is_adaptive: whether it decides how many inputs to take by how many are ready.
    """

    kind: ClassVar[str | None]
    is_decided: ClassVar[bool] = True
    in_turn: ClassVar[bool] = True

    @property
    def is_adaptive(self) -> bool:
        return False

    def lower(self, to: EnginePlan) -> None:
        to.own(self)

    @abstractmethod
    def stream(self, upstream: Any, context: StreamContext) -> Stream:
        """Return the stream of an epoch over that of its inputs.

        That is a ``SegmentStream``. If it repeats items, it is any ``PolledStream``; if it moves
        batches, a ``PulledStream``, as it returns.
        """

    def read_node(self, saved: Any, bounds: Bounds) -> Node:
        """Read the node of its stream from a state, before there are streams.

        Stages with a ``kind`` define it. Change ``bounds`` to those behind the stage.

        Raises TypeError, LookupError, ValueError or msgspec.ValidationError for what no run could
        have saved, or StateError.
        """
        raise NotImplementedError
