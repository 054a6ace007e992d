"""The position in an epoch, and the nodes that its streams save in it.

A state is a list of nodes. The file of a stream writes and reads its node, and checks it against
the numbers that are possible there (``Bounds``) before anything is made of it. ``resume``
(``engine/items.py``) checks that nodes fit each other.

A loader that has a state of its own is asked for it behind every batch. A position in its epoch is
that state; there are no nodes, and pools begin empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import msgspec

from stoker.basics.compact_integers import LARGEST, check_integer
from stoker.engine.work.step import Stack
from stoker.errors import StateError
from stoker.schedule.batch_bounds import BatchBounds, FixedBatches, PlannedBounds
from stoker.schedule.epoch_rest import EpochRest

Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
"""A number in a node."""


class Node(msgspec.Struct, tag_field="kind"):
    """The part of one stream in a state: complete in itself. Its tag is the kind of its part."""

    def to_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        return as_json(self)

    def epochs_back(self, items: int) -> list[int]:
        """Return how many epochs ago its items entered; each epoch had so many items."""
        return []

    def read_so_far(self) -> ReadSoFar | None:
        """Return what other ranks must know to go on with the epoch; None: it tells nothing."""
        return None


def as_json(struct: msgspec.Struct) -> dict[str, Any]:
    """Return what JSON would give back."""
    json: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(struct))
    return json


class ReadSoFar(NamedTuple):
    """The inputs that a stream has read when an epoch is left.

    Attributes:
        rows: the number of inputs that were read whole.
        sequences: the number of full sequences made of them, 0 if none are joined.
        offsets: how many tokens of other inputs are in these, by their numbers.
        waiting: the numbers of inputs before ``rows`` of which nothing, or no more, is in these.
    """

    rows: int
    sequences: int = 0
    offsets: Mapping[int, int] = MappingProxyType({})
    waiting: Sequence[int] = ()


@dataclass
class Position:
    """The position in an epoch: enough to go on from there.

    Attributes:
        yielded, uses, fresh: outputs, examples and fresh examples that were handed out.
        parts: a node for each layer of the flow that keeps one, in the order that data meets them;
            None for a filter that could not drop anything. Empty if the counts say it all.
        spent: the skips by budget; ``filtered``: the number of examples that filters dropped.
        loaded: the batches of a loader that were handed out; ``loader_state``: the loader's own
            state there.
        order: the digest of an order that a user's function decides; else "".
        leg: the leg of the epoch, if other ranks took it over: all counts here begin with it.
    """

    yielded: int = 0
    uses: int = 0
    fresh: int = 0
    parts: list[Node | None] = field(default_factory=list)
    spent: dict[int, int] = field(default_factory=dict)
    filtered: int = 0
    loaded: int = 0
    loader_state: Any = None
    order: str = ""
    leg: EpochRest | None = None


@dataclass
class PoolSize:
    """The size of an echo's pool.

    Attributes:
        size: items; 0 while that is not known.
        item_bytes: bytes of the first item; 0 while that is not known.
    """

    size: int = 0
    item_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of a full pool; 0 while that is not known."""
        return self.size * self.item_bytes


@dataclass
class Bounds:
    """The limits of the numbers that a saved node may hold at one place of a flow.

    Made for the source's end of a flow; each layer changes it, in the order that data meets them.

    Attributes:
        most: the most items that pass here; ``exact``: their number, or None if unknown.
        least_uses, most_uses: the limits of examples in the outputs that were handed out.
        yielded: the number of those outputs.
        group: the examples in a batch.
        pool_size: the size of the echo's pool; ``pool_group``: the items in a step of it.
        epoch: the epoch's number; ``carries_pool``: whether a pool goes on from the epoch before.
        cuts: the epoch's batches, if they were planned; else None.
    """

    most: int
    yielded: int
    group: int
    pool_size: PoolSize
    pool_group: int
    epoch: int
    carries_pool: bool
    cuts: PlannedBounds | None = None

    def __post_init__(self) -> None:
        self.exact: int | None = self.most
        self.least_uses = self.most_uses = self.yielded

    def pass_batch(self, batch: Stack) -> None:
        """Change the limits to those behind a batch stage."""
        if self.cuts is not None:
            self.least_uses = self.most_uses = self.cuts.start(self.yielded)
            self.most = self.exact = self.cuts.batches
            return
        known = self.most if self.exact is None else self.exact
        self.most_uses = min(self.yielded * batch.n, known)
        self.least_uses = self.most_uses
        if self.exact is None:
            self.least_uses = self.yielded * batch.n - batch.n + 1
        else:
            self.exact = batch.count(self.exact)
        self.most = batch.count(self.most)

    def pass_pool(self, most: int, exact: int | None) -> None:
        """Change the limits to those behind a pool with so many uses."""
        self.most, self.exact = most, exact
        # Behind a batch: the short batch may have come often, or not at all.
        self.least_uses, self.most_uses = self.yielded, self.yielded * self.group

    def check(self, uses: int) -> None:
        """Check the examples that were handed out; call behind the last part. Raises ValueError."""
        check_integer(self.yielded, 0, self.most if self.exact is None else self.exact)
        check_integer(uses, self.least_uses, self.most_uses)


@dataclass(frozen=True)
class UpstreamRequest:
    """A request to a stream at a resume.

    Attributes:
        next: the number of the output to go on with.
        least: the least number of outputs before that: the last batch may have been short.
        oldest: the oldest output that ``again`` may have.
        again: the numbers of outputs before ``next`` that ``recompute`` will be called for.
        loaded: the batches of a loader, or examples of a stream, that were handed out.
    """

    next: int
    least: int
    oldest: int
    again: frozenset[int] = frozenset()
    loaded: int = 0

    def of_inputs(self, cuts: BatchBounds) -> UpstreamRequest:
        """Return the request to the inputs that these outputs are cut from."""
        if cuts == FixedBatches(1):
            return self
        start = cuts.start
        return UpstreamRequest(
            start(self.next),
            start(self.least - 1) + 1 if self.least else 0,
            start(self.oldest),
            frozenset(i for n in self.again for i in range(start(n), start(n + 1))),
            self.loaded,
        )


def damage_error(what: str) -> StateError:
    """Return the error of a state whose parts do not fit."""
    return StateError(f"the state is damaged: {what}")
