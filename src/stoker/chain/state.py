"""Saved states: exact at the last yielded batch, small, and checked field by field against the
pipeline that loads them.

A state is JSON, with the outline of its chain and a checksum. The checksum says that nothing was
damaged, not that anything is right: ``StateSchema`` checks that.

What no run of that pipeline could have saved is refused before anything is made of it, so that
nothing that a state says takes more memory, or more time, than the pipeline itself. What only the
replay of its pools can tell is refused there (``engine/checkpoint.py``).
"""

from __future__ import annotations

import json
import zlib
from array import array
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker.basics import compact_integers
from stoker.basics.compact_integers import whole
from stoker.basics.warn import warn
from stoker.engine.checkpoint import Position
from stoker.engine.packed import PackStart
from stoker.engine.plan import (
    DevicePoint,
    EchoPoint,
    FilterPoint,
    PackPoint,
    Plan,
    ScanPoint,
    Segment,
)
from stoker.engine.scanned import ScanStart
from stoker.engine.survivors import FilterRecord
from stoker.errors import StateError
from stoker.schedule import adaptive, fixed
from stoker.schedule.echo_record import difference_of
from stoker.schedule.owners import OwnerSnapshot
from stoker.stages.batching.batch import Batch
from stoker.stages.echo import DEFAULT_POOL_BATCHES, Echo
from stoker.stages.scan import Scan
from stoker.stages.stage import PoolSize
from stoker.stats import Clock

FORMAT = 1
_UNSIGNED = ("checksum", "loader")


@dataclass(frozen=True)
class Loaded:
    """What a state says."""

    seed: int
    epoch: int
    position: Position | None
    sizes: dict[int, PoolSize]
    before: Clock
    handed_out: int | None


def saved(
    outline: list[str],
    seed: int,
    epoch: int,
    position: Position,
    sizes: dict[int, PoolSize],
    before: Clock,
    handed_out: int | None = None,
) -> dict[str, Any]:
    """Write a state; everything in it goes into JSON.

    ``handed_out``: outputs in all epochs, where passes over the data flow on beneath them.
    """
    state: dict[str, Any] = {
        "format": FORMAT,
        "numpy": np.__version__,
        "pipeline": outline,
        "seed": seed,
        "epoch": epoch,
        "yielded": position.yielded,
        "uses": position.uses,
        "pool_sizes": {str(at): r.size for at, r in sizes.items()},
        "pools": [_pool_packed(snapshot) for snapshot in position.snapshots],
        "pool_items": position.items,
        "left_out": [_packed(record) for record in position.records],
        "spent": {str(account): n for account, n in position.spent.items()},
        "filtered": position.filtered,
        "fresh": position.fresh,
        "loaded": position.loaded,
        "before": [before.fresh_examples, before.uses, before.steps],
    }
    if position.packs:
        state["packs"] = [list(start) for start in position.packs]
    if position.scans:
        state["scans"] = [_scan_packed(start) for start in position.scans]
    if handed_out is not None:
        state["handed_out"] = handed_out
    if position.owners is not None:
        state["owners"] = position.owners.saved()
    signed = {**state, "checksum": _checksum(state)}
    if position.loader_state is not None:  # the loader's own, perhaps not for JSON
        signed["loader"] = position.loader_state
    return signed


def read(state: dict[str, Any], outline: list[str], seed: int | None, fit: StateSchema) -> Loaded:
    """Read a state for the pipeline with this outline and, if one was given, this seed.

    Raises StateError when it does not fit or is damaged; warns when NumPy differs in version.
    """
    if not isinstance(state, dict) or "format" not in state:
        raise StateError("this is no state of a stoker pipeline (state_dict() makes one)")
    if state["format"] != FORMAT:
        known = compact_integers.shown(state["format"])
        raise StateError(f"the state has format {known}; this version reads {FORMAT}")
    if state.get("checksum") != _checksum({k: v for k, v in state.items() if k not in _UNSIGNED}):
        raise StateError("the state is damaged: its checksum does not fit")
    try:
        lines = list(state["pipeline"])
        if lines != outline:
            difference = difference_of(lines, outline)
            raise StateError(f"the state belongs to another pipeline: {difference}")
        theirs = compact_integers.whole(state["seed"], 0, None)
        if seed is not None and seed != theirs:
            raise StateError(
                f"the state belongs to another run: its seed is {theirs}, this pipeline's is {seed}"
            )
        before = [compact_integers.whole(count) for count in state["before"]]
        sizes = pool_sizes(state["pool_sizes"], fit.plan)
        loaded = Loaded(
            theirs,
            compact_integers.whole(state["epoch"]),
            position(state, fit, sizes),
            sizes,
            Clock(*before),
            compact_integers.whole(state["handed_out"]) if "handed_out" in state else None,
        )
        version = _minor(state["numpy"][:80])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise StateError(f"the state is damaged: {type(error).__name__}: {error}") from error
    if version != _minor(np.__version__):
        warn(
            f"the state was saved under NumPy {state['numpy'][:80]}, this is {np.__version__}: its "
            "random streams may differ, and then so does the rest of the epoch",
        )
    return loaded


def _pool_packed(snapshot: fixed.Snapshot | adaptive.AdaptiveSnapshot) -> dict[str, Any]:
    if isinstance(snapshot, adaptive.AdaptiveSnapshot):
        return adaptive.pack(snapshot)
    return fixed.pack(snapshot)


def _packed(record: FilterRecord) -> dict[str, Any]:
    return {
        "number": record.number,
        "survivors": record.survivors,
        "seen": record.seen,
        "total": record.total,
        "drops": compact_integers.packed(np.array(record.drops, np.int64), record.number),
    }


def _scan_packed(start: ScanStart) -> dict[str, Any]:
    # As text, not as JSON in JSON: who writes the state with sorted keys keeps the state's order.
    state = start.state
    dumped = {"json": state} if isinstance(state, str) else {"bytes": b64encode(state).decode()}
    return {"input": start.input, "output": start.output, **dumped}


def _checksum(state: dict[str, Any]) -> int:
    try:
        return zlib.crc32(json.dumps(state, sort_keys=True).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(f"the state is damaged: {error}") from error


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


@dataclass(frozen=True)
class StateSchema:
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
            least, most = 1, compact_integers.LARGEST
        elif echo.pool is not None:
            least = most = echo.pool
        elif echo.pool_bytes is not None:
            most = max(most, echo.pool_bytes)
        found[echo.position] = PoolSize(whole(size, least, most))
    return found


def position(
    state: dict[str, Any], fit: StateSchema, sizes: dict[int, PoolSize]
) -> Position | None:
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
        fresh=whole(state["fresh"], 0, compact_integers.LARGEST if iterated else fit.examples),
        loaded=whole(state["loaded"], 0, compact_integers.LARGEST if iterated else 0),
        loader_state=state.get("loader"),
        owners=owners,
    )
    walk = _FieldReader(fit.plan, found, sizes, whole(state["epoch"]))
    pools, items, records = (_list(state[name]) for name in ("pools", "pool_items", "left_out"))
    if iterated:
        if pools or items or records:
            raise ValueError("pools are in it that cannot be made again")
        walk.check_iterated(nested)
    elif nested:
        raise StateError("a loader's state is in it, and this pipeline has no loader")
    else:
        packs, scans = (_list(state.get(name, [])) for name in ("packs", "scans"))
        walk.read(fit.examples or 0, pools, items, records, packs, scans)
    return found


def _owners(state: dict[str, Any], fit: StateSchema) -> OwnerSnapshot | None:
    share = fit.plan.selection.share
    if share is None or not share.is_dealt:
        if "owners" in state:
            raise StateError("it says how examples were dealt, and this pipeline deals none")
        return None
    if "owners" not in state and state["yielded"]:
        raise StateError("it does not say how examples were dealt")
    return OwnerSnapshot.read(state["owners"], share.world) if "owners" in state else None


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"{compact_integers.shown(value)} is no list")
    return list(value)


class _FieldReader:
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
        left_out = plan.filters or plan.packs or plan.scans
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
        scans: list[Any],
    ) -> None:
        """Read what pools held, what was left out, where packed sequences and scans go on."""
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
        if len(scans) != (plan.scans if found.yielded else 0):
            raise ValueError(f"{len(scans)} scans are in it, not {plan.scans}")
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
                    self.most, self.exact = compact_integers.LARGEST, None
                case ScanPoint():
                    self.exact = None
                    for said in scans[:1]:
                        self._scan(part.scan, said)
                    del scans[:1]
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

    def _scan(self, scan: Scan, said: Any) -> None:
        number = whole(said["input"], 0, self.most)
        output = whole(said["output"], 0, number)
        text = said["json"] if "json" in said else said["bytes"]
        if type(text) is not str:
            raise TypeError(f"{compact_integers.shown(text)} is no text")
        state = text if "json" in said else b64decode(text, validate=True)
        scan.check(state)
        self._found.scans.append(ScanStart(number, output, state))

    def _record(self, said: Any) -> None:
        number = whole(said["number"], 0, self.most)
        seen = whole(said["seen"], number, self.most)
        drops = compact_integers.unpacked(said["drops"], number, seen - number, seen)
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
