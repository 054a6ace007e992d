"""``StreamStage``: a stage that makes a stream of its own.

Such a stage is whole in one file: it checks its place in a chain, makes the stream of an epoch, and
reads that stream's node of a state. The engine knows no one of them.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from stoker.engine.checkpoint import Bounds, Node
from stoker.engine.flow import Flow
from stoker.engine.items import Stream
from stoker.engine.setup import StreamContext
from stoker.stages.stage import ChainStage


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

    @property
    def repeats(self) -> bool:
        """Whether it hands out each item several times."""
        return self.traits.repeats

    @property
    def moves(self) -> bool:
        """Whether its outputs are on a device."""
        return self.traits.moves

    def add_to(self, flow: Flow) -> None:
        flow.put(self)

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
