"""``Preparation``: the origin of a feeder's outputs, its own pipeline or a feed of another host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from stoker.feed.feeder.log import FeedPosition
from stoker.transport.shared_memory import Blocks


@dataclass(frozen=True)
class FeedSpec:
    """The description of a feed's outputs; its fields are those of ``messages.Welcome``."""

    batched: bool
    length: int | None
    is_repeatable: bool
    signature: list[str]


@dataclass(frozen=True)
class Output:
    """A value that holds ``count`` outputs with ``rows`` examples."""

    value: Any
    count: int
    rows: int


class Outputs(Protocol):
    """An iterator over a feed's outputs, epoch after epoch, for one thread."""

    def begin(self, position: FeedPosition | None) -> FeedPosition:
        """Go to a position, or with None to the beginning of an epoch; return the position."""

    def next(self) -> Output | None:
        """Return the next output; None at the end of the epoch. Raises the pipeline's errors."""

    def interrupt(self) -> None:
        """Wake a thread that waits in ``next``; nobody needs its output. Any thread may call it."""

    def close(self) -> None:
        """End the iteration, and free all resources."""


class Preparation(Protocol):
    """The origin of a feed's outputs.

    Attributes:
        about: the description that jobs receive.
        seed: the pipeline's seed.
        start: the position of the first epoch; None if another feeder decides that.
    """

    about: FeedSpec

    @property
    def seed(self) -> int: ...

    @property
    def start(self) -> FeedPosition | None: ...

    def with_seed(self, seed: int) -> Preparation:
        """Return a preparation that continues a feed with that seed. Raises FeedError."""

    def outputs(self, blocks: Blocks) -> Outputs:
        """Return the outputs; large ones lie in these blocks."""

    def watch(self, lost: Callable[[], None]) -> None:
        """Begin to watch the origin; ``lost`` is called when it is gone for good."""

    def close(self) -> None:
        """Stop watching."""
