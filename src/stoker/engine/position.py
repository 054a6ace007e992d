"""Where an epoch is: enough to save it, and to go on from there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stoker.cluster.pinned import PinnedOwners
from stoker.engine.filtering import FilterRecord
from stoker.engine.packed import PackStart
from stoker.schedule.adaptive import Moment
from stoker.schedule.fixed import Snapshot


@dataclass
class Position:
    """Where an epoch is: enough to go on from there.

    Attributes:
        yielded, uses, fresh: outputs, examples and fresh examples that were handed out.
        owners: by whose parts the epoch is dealt, if it is.
        loaded: batches of a loader that were handed out; ``loader_state``: its own state there.
        snapshots: one of each pool, in the order that data meets them.
        items: how many fresh items each pool had in the epoch, where its end has told.
        records: of each filtered stream, which examples it left out.
        packs: of a packed stream, where the next full sequence begins; at most one.
        spent: how much of each skip budget is spent; ``filtered``: what filters left out.
    """

    yielded: int = 0
    uses: int = 0
    snapshots: list[Snapshot | Moment] = field(default_factory=list)
    items: list[int | None] = field(default_factory=list)
    records: list[FilterRecord] = field(default_factory=list)
    spent: dict[int, int] = field(default_factory=dict)
    filtered: int = 0
    fresh: int = 0
    loaded: int = 0
    loader_state: Any = None
    owners: PinnedOwners | None = None
    packs: list[PackStart] = field(default_factory=list)
