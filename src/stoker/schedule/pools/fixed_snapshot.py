"""The counted pool at one step, from which its draws can be replayed: taken, written and read.

A state holds the newest snapshot at or before its position: ordinals, remaining uses, and which
items were used in the step before. Loading it replays the draws from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics import compact_integers
from stoker.basics.compact_integers import check_integer
from stoker.schedule.factor import EvenUses

SNAPSHOT_STEPS = 64
"""Least steps between snapshots; as many as draw twice the pool's items, if more.

A restored pool replays at most as many steps, and a drain. Drawn in groups, which cost less, it
is eight times the items.
"""


def snapshot_steps(size: int, group: int) -> int:
    """Return the steps from one snapshot of a pool to the next."""
    return max(SNAPSHOT_STEPS, (2 if group == 1 else 8) * size // group)


@dataclass(frozen=True)
class Snapshot:
    """The pool before a step: enough to replay every draw from there on."""

    step: int
    admitted: int
    ordinals: NDArray[np.int64]  # ascending
    remaining: NDArray[np.int64]
    recent: NDArray[np.bool_]  # used in the step before

    @property
    def oldest(self) -> int:
        """The first item that later steps may use."""
        return int(self.ordinals[0]) if len(self.ordinals) else self.admitted


def pack(snapshot: Snapshot) -> dict[str, int | str]:
    """Write a snapshot as JSON: about half a byte to a byte for each item."""
    parts = (
        compact_integers.encode_ascending(snapshot.ordinals, 0),
        compact_integers.encode_small(snapshot.remaining),
        compact_integers.encode_bytes(np.packbits(snapshot.recent)),
    )
    return {
        "step": snapshot.step,
        "admitted": snapshot.admitted,
        "held": len(snapshot.ordinals),
        "packed": " ".join(parts),
    }


def unpack(state: Any, *, counts: EvenUses, size: int, group: int, items: int) -> Snapshot:
    """Read what ``pack`` wrote of a pool that was made with these arguments.

    Args:
        items: how many fresh items the epoch has, at most.

    Raises ValueError, TypeError or KeyError when it is damaged, or no such pool can be like that.
    """
    admitted = check_integer(state["admitted"], 0, items)
    held = check_integer(state["held"], 0, min(max(size, counts.held), admitted))
    total_uses = counts.of_first(admitted)
    step = check_integer(state["step"], 0, total_uses // group)
    ordinals_text, remaining_text, recent = str(state["packed"]).split(" ")
    ordinals = compact_integers.decode_ascending(ordinals_text, 0, held, admitted)
    remaining = compact_integers.decode_small(remaining_text, held, counts.most + 1)
    flags = compact_integers.decode_bytes(recent, -(-held // 8))
    if not len(ordinals) == len(remaining) == held or len(flags) != -(-held // 8):
        raise ValueError("the packed pool is damaged")
    if ((remaining < 1) | (remaining > counts.of(ordinals))).any():
        raise ValueError("items have other uses left than their factor gives them")
    if total_uses - int(remaining.sum()) != step * group or step % snapshot_steps(size, group):
        raise ValueError(f"no pool is like that at step {step:,}")
    was_used = np.unpackbits(flags, count=held).astype(bool)
    return Snapshot(step, admitted, ordinals, remaining, was_used)
