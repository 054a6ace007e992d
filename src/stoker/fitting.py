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
from stoker.engine.filtering import FilterRecord
from stoker.engine.position import Position, Resolved
from stoker.engine.work import FilterPoint, Plan, Segment
from stoker.errors import StateError
from stoker.packing import whole
from stoker.schedule import adaptive, fixed
from stoker.sources.stream import IterableSource, LoaderSource, Resumable
from stoker.stages.batch import Batch
from stoker.stages.echo import DEFAULT_POOL_BATCHES, Echo
from stoker.stages.filter import Filter


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


def pool_sizes(sizes: Any, plan: Plan) -> dict[int, Resolved]:
    """Read the sizes of pools.

    Raises KeyError, ValueError or TypeError where there are no such pools.
    """
    echoes = {part.position: part for part in plan.parts if isinstance(part, Echo)}
    found = {}
    for at, size in sizes.items():
        echo = echoes[int(at)]
        group = plan.group_of(echo)
        least, most = group, DEFAULT_POOL_BATCHES * group
        if echo.follows:  # another pool= makes no other pipeline
            least, most = 1, packing.LARGEST
        elif echo.pool is not None:
            least = most = echo.pool
        elif echo.pool_bytes is not None:
            most = max(most, echo.pool_bytes)
        found[echo.position] = Resolved(whole(size, least, most))
    return found


def position(state: dict[str, Any], fit: Fit, sizes: dict[int, Resolved]) -> Position | None:
    """Read where in its epoch a pipeline is; None at the beginning.

    Raises StateError, KeyError, ValueError or TypeError where the pipeline cannot be.
    """
    yielded, nested = whole(state["yielded"]), "loader" in state
    if not yielded and not nested:
        return None
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
    )
    course = _Course(fit.plan, found, sizes)
    pools, items, records = (_list(state[name]) for name in ("pools", "pool_items", "left_out"))
    if iterated:
        if pools or items or records:
            raise ValueError("pools are in it that cannot be made again")
        course.check_iterated(nested)
    elif nested:
        raise StateError("a loader's state is in it, and this pipeline has no loader")
    else:
        course.read(fit.examples or 0, pools, items, records)
    return found


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"{packing.shown(value)} is no list")
    return list(value)


class _Course:
    """Goes through a plan in the order that data meets it.

    Attributes:
        most: how many items come by at the place at hand, at most.
        exact: how many do, where that is known.
    """

    most: int
    exact: int | None

    def __init__(self, plan: Plan, found: Position, sizes: dict[int, Resolved]) -> None:
        self._plan = plan
        self._found = found
        self._sizes = sizes
        self._left_out = any(isinstance(part, FilterPoint) for part in plan.parts)

    def check_iterated(self, nested: bool) -> None:
        """Check a position over a loader or a stream: its own state is all there is."""
        source, plan = self._plan.source, self._plan
        loader = isinstance(source, LoaderSource)
        if nested and not (source.stateful if loader else isinstance(source, Resumable)):
            raise StateError("a loader's state is in it, and this pipeline's source takes none")
        if not self._found.yielded:
            return
        fixed = any(isinstance(part, Echo) and not part.follows for part in plan.parts)
        stream = isinstance(source, IterableSource)
        drawn = stream and (self._left_out or plan.buffer > 1 or plan.share is not None)
        if not nested or fixed or drawn:
            raise StateError(
                "the state is in the middle of an epoch that this pipeline cannot make again"
            )

    def read(self, examples: int, pools: list[Any], items: list[Any], records: list[Any]) -> None:
        """Read what pools held and what was left out."""
        found, parts = self._found, self._plan.parts
        echoes = sum(isinstance(part, Echo) for part in parts)
        if not len(pools) == len(items) == echoes:
            raise ValueError(f"{len(pools)} pools and {len(items)} items for {echoes} echoes")
        sifts = sum(isinstance(part, FilterPoint) for part in parts)
        if (records or self._filters()) and len(records) != sifts:
            raise StateError(
                "the state was saved with other skip budgets: examples it left out cannot be told"
            )
        self.most, self.exact = examples, examples
        uses = [found.yielded, found.yielded]
        for part in parts:
            if isinstance(part, FilterPoint):
                self.exact = None
                if records:
                    self._record(records.pop(0))
            elif isinstance(part, Echo):
                self._pool(part, pools.pop(0), items.pop(0))
                # Behind a batch: the short one may have come often, or not at all.
                uses = [found.yielded, found.yielded * self._plan.group]
            elif isinstance(part, Segment) and part.batch is not None:
                uses = self._batch(part.batch)
        whole(found.yielded, 0, self.most if self.exact is None else self.exact)
        whole(found.uses, *uses)

    def _filters(self) -> bool:
        segments = [part for part in self._plan.parts if isinstance(part, Segment)]
        return any(isinstance(stage, Filter) for part in segments for stage in part.maps)

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

    def _pool(self, echo: Echo, said: Any, items: Any) -> None:
        group = self._plan.group_of(echo)
        size = echo.record.size(echo.position, echo.name, group) if echo.record else None
        size = size or self._sizes[echo.position].size
        fits = {"size": size, "group": group, "items": self.most}
        read: Any
        if echo.factor is None:
            read = adaptive.unpack(said, max_factor=echo.max_factor, **fits)
        else:
            read = fixed.unpack(said, factor=echo.factor, **fits)
        self._found.snapshots.append(read)
        if items is not None:
            least, most = (0, self.most) if self.exact is None else (self.exact, self.exact)
            items = whole(items, max(least, read.admitted), most)
        self._found.items.append(items)
        uses = echo.uses(self.most)
        self.most = echo.max_factor * self.most if uses is None else uses
        self.exact = None if self.exact is None else echo.uses(self.exact)

    def _batch(self, batch: Batch) -> list[int]:
        """Return how many uses there are at least, and at most, in the batches handed out."""
        yielded, n = self._found.yielded, batch.n
        most = min(yielded * n, self.most if self.exact is None else self.exact)
        least = yielded * n - n + 1 if self.exact is None else most
        self.most = batch.count(self.most)
        self.exact = None if self.exact is None else batch.count(self.exact)
        return [least, most]
