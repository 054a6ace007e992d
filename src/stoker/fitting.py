"""Reading the position in a state: field by field, against the pipeline that is to go there.

What no run of that pipeline could have saved is refused before anything is made of it, so that
nothing that a state says takes more memory, or more time, than the pipeline itself. What only the
replay of its pools can tell is refused there (``engine/checkpoint.py``).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from stoker import packing
from stoker.cluster.pinned import PinnedOwners
from stoker.engine.filtering import FilterRecord
from stoker.engine.lower import DevicePoint, EchoPoint, FilterPoint, PackPoint, Plan, Segment
from stoker.engine.packed import PackStart
from stoker.engine.position import Position
from stoker.errors import StateError
from stoker.packing import whole
from stoker.schedule import adaptive, fixed
from stoker.stages.batch import Batch
from stoker.stages.echo import DEFAULT_POOL_BATCHES, Echo
from stoker.stages.stage import PoolSize


@dataclass(frozen=True)
class Fit:
    """What a state is to fit.

    Attributes:
        plan: of the pipeline.
        examples: how many an epoch has (this rank's), None over what can only be iterated.
        accounts: the largest number of a skip budget.
        steps: with how many outputs an epoch ends, if that was said.
    """

    plan: Plan
    examples: int | None
    accounts: int
    steps: int | None


def pool_sizes(sizes: Any, plan: Plan) -> dict[int, PoolSize]:
    """Read the sizes of pools.

    Raises KeyError, ValueError or TypeError where there are no such pools.
    """
    points = {point.echo.position: point for point in plan.echoes}
    found = {}
    for at, size in sizes.items():
        echo, group = points[int(at)].echo, points[int(at)].group
        least, most = group, DEFAULT_POOL_BATCHES * group
        if echo.is_adaptive:  # another pool= makes no other pipeline
            least, most = 1, packing.LARGEST
        elif echo.pool is not None:
            least = most = echo.pool
        elif echo.pool_bytes is not None:
            most = max(most, echo.pool_bytes)
        found[echo.position] = PoolSize(whole(size, least, most))
    return found


def position(state: dict[str, Any], fit: Fit, sizes: dict[int, PoolSize]) -> Position | None:
    """Read where in its epoch a pipeline is; None at the beginning.

    Raises StateError, KeyError, ValueError or TypeError where the pipeline cannot be.
    """
    yielded, nested = whole(state["yielded"]), "loader" in state
    owners = _owners(state, fit)
    if not yielded and not nested and not (fit.plan.carries_pool and state["pools"]):
        return None if owners is None else Position(owners=owners)
    if fit.steps is not None and yielded > fit.steps:
        raise StateError(f"the state is at batch {yielded:,}, where .steps({fit.steps}) never is")
    iterated = fit.examples is None
    found = Position(
        yielded,
        whole(state["uses"]),
        spent={whole(int(a), 0, fit.accounts): whole(n) for a, n in state["spent"].items()},
        filtered=whole(state["filtered"]),
        fresh=whole(state["fresh"], 0, packing.LARGEST if iterated else fit.examples),
        loaded=whole(state["loaded"], 0, packing.LARGEST if iterated else 0),
        loader_state=state.get("loader"),
        owners=owners,
    )
    walk = _Walk(fit.plan, found, sizes, whole(state["epoch"]))
    pools, items, records = (_list(state[name]) for name in ("pools", "pool_items", "left_out"))
    if iterated:
        if pools or items or records:
            raise ValueError("pools are in it that cannot be made again")
        walk.check_iterated(nested)
    elif nested:
        raise StateError("a loader's state is in it, and this pipeline has no loader")
    else:
        walk.read(fit.examples or 0, pools, items, records, _list(state.get("packs", [])))
    return found


def _owners(state: dict[str, Any], fit: Fit) -> PinnedOwners | None:
    share = fit.plan.selection.share
    if share is None or not share.is_dealt:
        if "owners" in state:
            raise StateError("it says how examples were dealt, and this pipeline deals none")
        return None
    if "owners" not in state and state["yielded"]:
        raise StateError("it does not say how examples were dealt")
    return PinnedOwners.read(state["owners"], share.world) if "owners" in state else None


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"{packing.shown(value)} is no list")
    return list(value)


class _Walk:
    """Goes through a plan in the order that data meets it.

    Attributes:
        most: how many items come by at the place at hand, at most.
        exact: how many do, where that is known.
    """

    most: int
    exact: int | None

    def __init__(self, plan: Plan, found: Position, sizes: dict[int, PoolSize], epoch: int) -> None:
        self._plan = plan
        self._epoch = epoch
        self._found = found
        self._sizes = sizes
        self._uses = [found.yielded, found.yielded]

    def check_iterated(self, nested: bool) -> None:
        """Check a position over a loader or a stream: its own state is all there is."""
        plan = self._plan
        if nested and not plan.source.takes_state:
            raise StateError("a loader's state is in it, and this pipeline's source takes none")
        if not self._found.yielded:
            return
        fixed = any(not point.echo.is_adaptive for point in plan.echoes)
        left_out = plan.filters or plan.packs
        if not nested or fixed or left_out or not plan.selection.is_kept_by_streams:
            raise StateError(
                "the state is in the middle of an epoch that this pipeline cannot make again"
            )

    def read(
        self,
        examples: int,
        pools: list[Any],
        items: list[Any],
        records: list[Any],
        packs: list[Any],
    ) -> None:
        """Read what pools held, what was left out, and where a packed sequence begins."""
        found, plan = self._found, self._plan
        echoes = len(plan.echoes)
        if not len(pools) == len(items) == echoes:
            raise ValueError(f"{len(pools)} pools and {len(items)} items for {echoes} echoes")
        if (records or plan.has_filter) and len(records) != plan.filters:
            raise StateError(
                "the state was saved with other skip budgets: examples it left out cannot be told"
            )
        if len(packs) != (plan.packs and bool(found.yielded)):
            raise ValueError(f"{len(packs)} packed sequences begin in it")
        self.most, self.exact = examples, examples
        for part in plan.parts:
            match part:
                case Segment():
                    if part.batch is not None:
                        self._uses = self._batch(part.batch)
                case FilterPoint():
                    self.exact = None
                    if records:
                        self._record(records.pop(0))
                case PackPoint():
                    for said in packs:
                        self._start(*_list(said))
                    self.most, self.exact = packing.LARGEST, None
                case EchoPoint():
                    self._pool(part.echo, part.group, pools.pop(0), items.pop(0))
                    # Behind a batch: the short one may have come often, or not at all.
                    self._uses = [found.yielded, found.yielded * plan.group]
                case DevicePoint():  # nothing changes on the way
                    pass
        whole(found.yielded, 0, self.most if self.exact is None else self.exact)
        whole(found.uses, *self._uses)

    def _start(self, number: Any, at: Any, offset: Any) -> None:
        start = PackStart(whole(number), whole(at, 0, self.most), whole(offset))
        self._found.packs.append(start)

    def _record(self, said: Any) -> None:
        number = whole(said["number"], 0, self.most)
        seen = whole(said["seen"], number, self.most)
        drops = packing.unpacked(said["drops"], number, seen - number, seen)
        total = said["total"]
        behind = total is not None and number == seen  # of a short last batch, behind the end
        survivors = whole(said["survivors"], 0, number + behind * self._plan.group)
        if total is not None:
            decided = survivors + seen - number - len(drops)
            total = self.exact = whole(total, 0 if behind else decided, min(decided, seen))
        record = FilterRecord(number, survivors, seen, array("q", drops.tobytes()), total)
        self._found.records.append(record)

    def _pool(self, echo: Echo, group: int, said: Any, items: Any) -> None:
        size = echo.record.size(echo.position, echo.name, group) if echo.record else None
        size = size or self._sizes[echo.position].size
        fits = {"size": size, "group": group, "items": self.most}
        read: Any
        if echo.counts is None:
            earlier = self._epoch * self.most if self._plan.carries_pool else 0
            read = adaptive.unpack(said, max_factor=echo.max_factor, earlier=earlier, **fits)
        else:
            read = fixed.unpack(said, counts=echo.counts, **fits)
        self._found.snapshots.append(read)
        if items is not None:
            least, most = (0, self.most) if self.exact is None else (self.exact, self.exact)
            items = whole(items, max(least, read.admitted), most)
        self._found.items.append(items)
        if echo.is_adaptive:
            before = size if self._plan.carries_pool else 0
            self.most, self.exact = echo.max_factor * (self.most + before), None
        else:
            self.most = echo.count(self.most)
            self.exact = None if self.exact is None else echo.count(self.exact)

    def _batch(self, batch: Batch) -> list[int]:
        """Return how many uses there are at least, and at most, in the batches handed out."""
        yielded, n = self._found.yielded, batch.n
        most = min(yielded * n, self.most if self.exact is None else self.exact)
        least = yielded * n - n + 1 if self.exact is None else most
        self.most = batch.count(self.most)
        self.exact = None if self.exact is None else batch.count(self.exact)
        return [least, most]
