"""What a feeder serves: a pipeline that it prepares, or a feed of another host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from stoker.feed.feeder.log import At
from stoker.transport.shared_memory import Blocks


@dataclass(frozen=True)
class Served:
    """What jobs are told of what they are served: as in ``messages.Welcome``."""

    batched: bool
    length: int | None
    again: bool
    outline: list[str]


@dataclass(frozen=True)
class Output:
    """What is handed over at once: ``count`` outputs of ``rows`` examples, as one value."""

    value: Any
    count: int
    rows: int


class Outputs(Protocol):
    """The outputs of a feed, one epoch after another, for one thread."""

    def begin(self, at: At | None) -> At:
        """Go to a position, or with None to where an epoch begins; return which that is."""

    def next(self) -> Output | None:
        """Return what comes next, None at the end of the epoch; raises what the pipeline does."""

    def interrupt(self) -> None:
        """From any thread, once nothing is wanted any more: what waits here need not."""

    def close(self) -> None:
        """End: frees what is kept."""


class Preparation(Protocol):
    """Where outputs come from.

    Attributes:
        about: what jobs are told.
        seed: of the pipeline.
        start: where the first epoch begins, None where somebody else decides that.
    """

    about: Served

    @property
    def seed(self) -> int: ...

    @property
    def start(self) -> At | None: ...

    def seeded(self, seed: int) -> Preparation:
        """Return what goes on for a feed of that seed, in place of this; or raise FeedError."""

    def outputs(self, blocks: Blocks) -> Outputs:
        """Return the outputs, in these blocks where they are large."""

    def watch(self, lost: Callable[[], None]) -> None:
        """Begin to watch over where outputs come from, and tell when that is gone for good."""

    def close(self) -> None:
        """End what was begun by ``watch``."""
