"""Checkpoint and resume: the position of an epoch, and how its streams save and restore it.

The streams of an epoch form a row: each has an ``upstream``, which it takes its items from. Saving
and resuming call them one after another, from the consumer to the source:

- ``resume_point``: each returns its node, which says how to make an output again, and the number of
  the oldest input that this needs. So a pool's snapshot reaches back to the oldest item in the pool
  behind it, because that item will be made again.
- ``forget``: each drops data that only a resume at earlier outputs would need.
- ``resume``: each goes to an output by its node, and returns its request to its upstream. Some then
  make outputs again (``catch_up``), from the source to the consumer.

A state is a list of such nodes. The file of a stream writes and reads its node, and checks it
against the numbers that are possible there (``Bounds``) before anything is made of it. ``resume``
checks that nodes fit each other.

A loader that has a state of its own is asked for it behind every batch. A position in its epoch is
that state; there are no nodes, and pools begin empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol

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


class PlanningLock(Protocol):
    """The planning lock (``engine/items.py``)."""

    def is_held(self) -> bool: ...


class Resumable:
    """A stream, as an element of the row from the consumer back to the source.

    The methods here suit an element that keeps nothing and passes on each input once. They are
    called with the planning lock held, or before anything is planned.

    Attributes:
        keeps: whether it has a node in a state.
        upstream: the element that its inputs come from; None at the head.
    """

    keeps: ClassVar[bool] = False
    upstream: Resumable | None = None

    def resume_point(self, output: int) -> tuple[Node | None, int]:
        """Return its node for a resume at this output, and the oldest input that this needs.

        The node is None before it has begun.
        """
        return None, output

    def forget_before(self, output: int) -> int:
        """Drop data that only a resume at earlier outputs would need.

        Return the oldest input that this output needs.
        """
        return self.resume_point(output)[1]

    def resume(self, node: Any, request: UpstreamRequest) -> UpstreamRequest:
        """Go to the requested output by a node; return the request to the upstream.

        Raises StateError if the node does not fit the request.
        """
        return request

    def catch_up(self) -> None:
        """Make requested outputs again; everything upstream is in place by now."""

    def clear(self) -> None:
        """Drop all items; the run is over."""


def row(last: Resumable | None) -> list[Resumable]:
    """Return streams and inputs from the last one to the head."""
    found = []
    while last is not None:
        found.append(last)
        last = last.upstream
    return found


def resume_points(last: Resumable, yielded: int, planning: PlanningLock) -> list[Node | None]:
    """Return the nodes for a resume at ``yielded``: none if a pool has not begun yet."""
    assert planning.is_held()
    nodes: list[Node | None] = []
    oldest = yielded
    for each in row(last):
        node, oldest = each.resume_point(oldest)
        if each.keeps:
            if node is None:
                return []
            nodes.append(node)
    return nodes[::-1]


def forget(last: Resumable, yielded: int, planning: PlanningLock) -> None:
    """Drop data that only a resume before output ``yielded`` would need."""
    assert planning.is_held()
    oldest = yielded
    for each in row(last):
        oldest = each.forget_before(oldest)


def resume(last: Resumable, position: Position) -> None:
    """Bring new streams to a position.

    Raises StateError if its nodes do not fit each other.
    """
    done = position.yielded
    request, nodes = UpstreamRequest(done, done, done, loaded=position.loaded), list(position.parts)
    streams = row(last)
    for each in streams:
        request = each.resume(nodes.pop() if each.keeps and nodes else None, request)
    for each in reversed(streams):
        each.catch_up()


def damage_error(what: str) -> StateError:
    """Return the error of a state whose parts do not fit."""
    return StateError(f"the state is damaged: {what}")
