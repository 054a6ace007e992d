"""``Preparation``: where a feeder's outputs come from, its own pipeline or another host's feed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from stoker.feed.feeder.log import At
from stoker.transport.shared_memory import Blocks


@dataclass(frozen=True)
class Served:
    """The description of a feed that jobs receive, as in ``messages.Welcome``."""

    batched: bool
    length: int | None
    again: bool
    outline: list[str]


@dataclass(frozen=True)
class Output:
    """One hand-over: ``count`` outputs of ``rows`` examples, as one value."""

    value: Any
    count: int
    rows: int


class Outputs(Protocol):
    """An iterator over a feed's outputs, epoch after epoch, for one thread."""

    def begin(self, at: At | None) -> At:
        """Go to a position, or with None to the beginning of an epoch; return the position."""

    def next(self) -> Output | None:
        """Return the next output, None at the end of the epoch; raises the pipeline's errors."""

    def interrupt(self) -> None:
        """Wake a waiting ``next``, from any thread: its output is no longer needed."""

    def close(self) -> None:
        """End, and free all kept resources."""


class Preparation(Protocol):
    """The origin of a feed's outputs.

    Attributes:
        about: the description that jobs receive.
        seed: the pipeline's seed.
        start: the position of the first epoch; None if another feeder decides that.
    """

    about: Served

    @property
    def seed(self) -> int: ...

    @property
    def start(self) -> At | None: ...

    def with_seed(self, seed: int) -> Preparation:
        """Return a replacement that continues a feed of that seed. Raises FeedError."""

    def outputs(self, blocks: Blocks) -> Outputs:
        """Return the outputs; large ones lie in these blocks."""

    def watch(self, lost: Callable[[], None]) -> None:
        """Begin to watch over where outputs come from, and tell when that is gone for good."""

    def close(self) -> None:
        """Stop watching."""
