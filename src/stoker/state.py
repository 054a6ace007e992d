"""Saved states: exact at the last yielded batch, small, and sure of what they belong to.

A state is JSON, with the outline of its chain and a checksum. The checksum says that nothing was
damaged, not that anything is right: ``fitting`` checks that.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker import packing
from stoker.caution import warn
from stoker.engine.filtering import FilterRecord
from stoker.engine.position import Position
from stoker.errors import StateError
from stoker.fitting import Fit, pool_sizes, position
from stoker.schedule import adaptive, fixed
from stoker.schedule.record import difference_of
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
    if handed_out is not None:
        state["handed_out"] = handed_out
    if position.owners is not None:
        state["owners"] = position.owners.saved()
    signed = {**state, "checksum": _checksum(state)}
    if position.loader_state is not None:  # the loader's own, perhaps not for JSON
        signed["loader"] = position.loader_state
    return signed


def read(state: dict[str, Any], outline: list[str], seed: int | None, fit: Fit) -> Loaded:
    """Read a state for the pipeline with this outline and, if one was given, this seed.

    Raises StateError when it does not fit or is damaged; warns when NumPy differs in version.
    """
    if not isinstance(state, dict) or "format" not in state:
        raise StateError("this is no state of a stoker pipeline (state_dict() makes one)")
    if state["format"] != FORMAT:
        known = packing.shown(state["format"])
        raise StateError(f"the state has format {known}; this version reads {FORMAT}")
    if state.get("checksum") != _checksum({k: v for k, v in state.items() if k not in _UNSIGNED}):
        raise StateError("the state is damaged: its checksum does not fit")
    try:
        lines = list(state["pipeline"])
        if lines != outline:
            difference = difference_of(lines, outline)
            raise StateError(f"the state belongs to another pipeline: {difference}")
        theirs = packing.whole(state["seed"], 0, None)
        if seed is not None and seed != theirs:
            raise StateError(
                f"the state belongs to another run: its seed is {theirs}, this pipeline's is {seed}"
            )
        before = [packing.whole(count) for count in state["before"]]
        sizes = pool_sizes(state["pool_sizes"], fit.plan)
        loaded = Loaded(
            theirs,
            packing.whole(state["epoch"]),
            position(state, fit, sizes),
            sizes,
            Clock(*before),
            packing.whole(state["handed_out"]) if "handed_out" in state else None,
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


def _pool_packed(snapshot: fixed.Snapshot | adaptive.Moment) -> dict[str, Any]:
    if isinstance(snapshot, adaptive.Moment):
        return adaptive.pack(snapshot)
    return fixed.pack(snapshot)


def _packed(record: FilterRecord) -> dict[str, Any]:
    return {
        "number": record.number,
        "survivors": record.survivors,
        "seen": record.seen,
        "total": record.total,
        "drops": packing.packed(np.array(record.drops, np.int64), record.number),
    }


def _checksum(state: dict[str, Any]) -> int:
    try:
        return zlib.crc32(json.dumps(state, sort_keys=True).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(f"the state is damaged: {error}") from error


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
