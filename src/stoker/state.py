"""Saved states: exact at the last yielded batch, small, and sure of what they belong to."""

from __future__ import annotations

import json
import zlib
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker import packing
from stoker.caution import warn
from stoker.echoing import following, pool
from stoker.engine.position import Position, Resolved
from stoker.engine.sieve import Record
from stoker.errors import StateError
from stoker.stats import Clock

FORMAT = 1
_UNSIGNED = ("checksum", "loader")


@dataclass(frozen=True)
class Loaded:
    """What a state says."""

    seed: int
    epoch: int
    position: Position | None
    resolved: dict[int, Resolved]
    before: Clock


def saved(
    outline: list[str],
    seed: int,
    epoch: int,
    position: Position,
    resolved: dict[int, Resolved],
    before: Clock,
) -> dict[str, Any]:
    """Write a state; everything in it goes into JSON."""
    state: dict[str, Any] = {
        "format": FORMAT,
        "numpy": np.__version__,
        "pipeline": outline,
        "seed": seed,
        "epoch": epoch,
        "yielded": position.yielded,
        "uses": position.uses,
        "pool_sizes": {str(at): r.size for at, r in resolved.items()},
        "pools": [_pool_packed(snapshot) for snapshot in position.snapshots],
        "pool_items": position.items,
        "left_out": [_packed(record) for record in position.records],
        "spent": {str(account): n for account, n in position.spent.items()},
        "filtered": position.filtered,
        "fresh": position.fresh,
        "loaded": position.loaded,
        "before": [before.fresh_examples, before.uses, before.steps],
    }
    signed = {**state, "checksum": _checksum(state)}
    if position.loader_state is not None:  # the loader's own, perhaps not for JSON
        signed["loader"] = position.loader_state
    return signed


def read(state: dict[str, Any], outline: list[str], seed: int | None) -> Loaded:
    """Read a state for the pipeline with this outline and, if one was given, this seed.

    Raises StateError when it does not fit or is damaged; warns when NumPy differs in version.
    """
    if not isinstance(state, dict) or "format" not in state:
        raise StateError("this is no state of a stoker pipeline (state_dict() makes one)")
    if state["format"] != FORMAT:
        raise StateError(f"the state has format {state['format']}; this version reads {FORMAT}")
    if state.get("checksum") != _checksum({k: v for k, v in state.items() if k not in _UNSIGNED}):
        raise StateError("the state is damaged: its checksum does not fit")
    try:
        theirs, pools = list(state["pipeline"]), state["pools"]
        if theirs != outline:
            difference = difference_of(theirs, outline)
            raise StateError(f"the state belongs to another pipeline: {difference}")
        if seed is not None and seed != state["seed"]:
            raise StateError(
                f"the state belongs to another run: its seed is {state['seed']}, this pipeline's "
                f"is {seed}"
            )
        position = None
        if state["yielded"] or "loader" in state:
            position = Position(
                state["yielded"],
                state["uses"],
                [_pool_unpacked(p) for p in pools],
                list(state["pool_items"]),
                [_unpacked(r) for r in state["left_out"]],
                {int(account): n for account, n in state["spent"].items()},
                state["filtered"],
                state["fresh"],
                state["loaded"],
                state.get("loader"),
            )
        loaded = Loaded(
            int(state["seed"]),
            int(state["epoch"]),
            position,
            {int(at): Resolved(size) for at, size in state["pool_sizes"].items()},
            Clock(*map(int, state["before"])),
        )
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise StateError(f"the state is damaged: {type(error).__name__}: {error}") from error
    if _minor(state["numpy"]) != _minor(np.__version__):
        warn(
            f"the state was saved under NumPy {state['numpy']}, this is {np.__version__}: its "
            "random streams may differ, and then so does the rest of the epoch",
        )
    return loaded


def _pool_packed(snapshot: pool.Snapshot | following.Moment) -> dict[str, Any]:
    if isinstance(snapshot, following.Moment):
        return following.pack(snapshot)
    return pool.pack(snapshot)


def _pool_unpacked(state: dict[str, Any]) -> pool.Snapshot | following.Moment:
    return following.unpack(state) if "levels" in state else pool.unpack(state)


def _packed(record: Record) -> dict[str, Any]:
    return {
        "number": record.number,
        "survivors": record.survivors,
        "seen": record.seen,
        "total": record.total,
        "drops": packing.packed(np.array(record.drops, np.int64), record.number),
    }


def _unpacked(state: dict[str, Any]) -> Record:
    drops = array("q", packing.unpacked(state["drops"], state["number"]).tolist())
    return Record(state["number"], state["survivors"], state["seen"], drops, state["total"])


def _checksum(state: dict[str, Any]) -> int:
    try:
        return zlib.crc32(json.dumps(state, sort_keys=True).encode())
    except TypeError as error:
        raise StateError(f"the state is damaged: {error}") from error


def difference_of(theirs: list[str], ours: list[str]) -> str:
    """Say where two outlines differ."""
    for a, b in zip(theirs, ours, strict=False):
        if a != b:
            return f"it has {a} where this one has {b}"
    return f"it has {len(theirs)} stages, this one {len(ours)}"


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
