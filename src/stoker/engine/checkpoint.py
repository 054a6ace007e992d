"""Checkpoint and resume: where an epoch is, and how its streams save it and come back to it.

The streams of an epoch, and the inputs between them, form a row: each knows what it takes its items
from (``upstream``). All that concerns states goes along this row, from the consumer to the source:

- ``resume_point``: each returns its node, which says how to make an output again, and the number of
  the oldest input that this takes. So a pool's snapshot reaches back to the oldest item that the
  pool behind it still holds, because that item will be made again.
- ``forget``: each drops what only a resume at earlier outputs would need.
- ``resume``: each goes to an output by its node, and says what it asks of the one before it. Some
  then make again what is asked for once more; the source's side comes first.

A state is a list of such nodes. Each is written and read in the file of its stream, which checks it
against how much can have come by (``Bounds``), before anything is made of it. That nodes fit each
other is found by ``resume``.

A loader that has a state of its own is asked for it behind every batch. A position in its epoch is
that state; there are no nodes, and pools begin empty.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from stoker.basics.compact_integers import check_integer
from stoker.errors import StateError
from stoker.schedule.leg import Leg
from stoker.schedule.owners import OwnerSnapshot
from stoker.schedule.sizing.cuts import Cuts, EvenCuts, PlannedCuts
from stoker.stages.batching.batch import Batch
from stoker.stages.stage import PoolSize


class Node(ABC):
    """What one stream keeps in a state: complete in itself."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return it for JSON, with its kind: that of its part in the plan."""

    def epochs_back(self, items: int) -> list[int]:
        """Return how many epochs ago that entered which it holds; each epoch had ``items``."""
        return []


@dataclass
class Position:
    """Where an epoch is: enough to go on from there.

    Attributes:
        yielded, uses, fresh: outputs, examples and fresh examples that were handed out.
        parts: a node for each part of the plan that keeps one, in the order that data meets them;
            None for a filter that had left out nothing, because nothing could be left out then.
            Empty where the outputs alone say it all.
        spent: how much of each skip budget is spent; ``filtered``: what filters left out.
        loaded: batches of a loader that were handed out; ``loader_state``: its own state there.
        owners: by whose parts the epoch is dealt, if it is.
        order: the digest of the epoch's order, where a user's function decides it; else "".
        leg: what was left of the epoch when other ranks took it over, if they did: then all that
            is counted here counts from there.
    """

    yielded: int = 0
    uses: int = 0
    fresh: int = 0
    parts: list[Node | None] = field(default_factory=list)
    spent: dict[int, int] = field(default_factory=dict)
    filtered: int = 0
    loaded: int = 0
    loader_state: Any = None
    owners: OwnerSnapshot | None = None
    order: str = ""
    leg: Leg | None = None


@dataclass
class Bounds:
    """How much can have come by at one place of a plan: a saved node says no more than this.

    Made for the source's side of a plan, and moved on by each part, in the order that data meets
    them.

    Attributes:
        most: how many items come by at most; ``exact``: how many do, where that is known.
        least_uses, most_uses: examples in the outputs that were handed out.
        yielded: those outputs.
        group: the examples in a batch.
        sizes: those of pools, by the position of their echo.
        epoch: its number; ``carries_pool``: whether a pool goes on from the epoch before.
        cuts: its batches, where these were planned.
    """

    most: int
    yielded: int
    group: int
    sizes: Mapping[int, PoolSize]
    epoch: int
    carries_pool: bool
    cuts: PlannedCuts | None = None

    def __post_init__(self) -> None:
        self.exact: int | None = self.most
        self.least_uses = self.most_uses = self.yielded

    def pass_batch(self, batch: Batch) -> None:
        """Go on behind a stage that makes batches."""
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
        """Go on behind a pool that gives so many uses."""
        self.most, self.exact = most, exact
        # Behind a batch: the short one may have come often, or not at all.
        self.least_uses, self.most_uses = self.yielded, self.yielded * self.group

    def check(self, uses: int) -> None:
        """Check what was handed out, behind the last part. Raises ValueError."""
        check_integer(self.yielded, 0, self.most if self.exact is None else self.exact)
        check_integer(uses, self.least_uses, self.most_uses)


@dataclass(frozen=True)
class Asked:
    """What is asked of a stream at a resume.

    Attributes:
        next: the number of the output that it goes on with.
        least: how many outputs came before that, at least: the last batch may have been short.
        oldest: the oldest output that its node allows for.
        again: the numbers of outputs before ``next`` that ``recompute`` will be asked for.
        loaded: how many batches of a loader, or examples of a stream, were handed out.
    """

    next: int
    least: int
    oldest: int
    again: frozenset[int] = frozenset()
    loaded: int = 0

    def of_inputs(self, cuts: Cuts) -> Asked:
        """Return what is asked of the inputs, where outputs are cut out of these."""
        if cuts == EvenCuts(1):
            return self
        start = cuts.start
        return Asked(
            start(self.next),
            start(self.least - 1) + 1 if self.least else 0,
            start(self.oldest),
            frozenset(i for n in self.again for i in range(start(n), start(n + 1))),
            self.loaded,
        )


class PlanningLock(Protocol):
    """What tells whether the caller may look at what is planned (``engine/items.py``)."""

    def is_held(self) -> bool: ...


class Resumable:
    """One in the row of streams and inputs from the consumer back to the source.

    What is written here is right for one that keeps nothing and hands on each input once. All is
    called with the planning lock held, or before anything is planned.

    Attributes:
        keeps: whether it has a node in a state.
        upstream: where its inputs come from; None at the head.
    """

    keeps: ClassVar[bool] = False
    upstream: Resumable | None = None

    def resume_point(self, output: int) -> tuple[Node | None, int]:
        """Return its node for a resume that asks for this output and later ones, and the oldest
        input that this takes. No node where it has not begun."""
        return None, output

    def forget_before(self, output: int) -> int:
        """Drop what only a resume would need that asks for earlier outputs.

        Return the oldest input that this output takes.
        """
        return self.resume_point(output)[1]

    def resume(self, node: Any, asked: Asked) -> Asked:
        """Go on where the run was, by its node; return what this asks of its upstream.

        Raises StateError where the node does not fit what is asked.
        """
        return asked

    def catch_up(self) -> None:
        """Make again what was asked for, now that all upstream are where they were."""

    def clear(self) -> None:
        """Drop what will not be used any more."""


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
    """Drop what only a resume before ``yielded`` would need."""
    assert planning.is_held()
    oldest = yielded
    for each in row(last):
        oldest = each.forget_before(oldest)


def resume(last: Resumable, position: Position) -> None:
    """Bring new streams to a position that was read for this pipeline.

    Raises StateError where its nodes do not fit each other.
    """
    done = position.yielded
    asked, nodes = Asked(done, done, done, loaded=position.loaded), list(position.parts)
    streams = row(last)
    for each in streams:
        asked = each.resume(nodes.pop() if each.keeps and nodes else None, asked)
    for each in reversed(streams):
        each.catch_up()


def damage_error(what: str) -> StateError:
    """Return the error of a state whose parts do not fit."""
    return StateError(f"the state is damaged: {what}")
