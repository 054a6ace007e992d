"""At which numbers of fresh examples networks are evaluated: the same for all arms."""

from __future__ import annotations

from collections.abc import Sequence

Grid = Sequence[tuple[int, int]]
"""Up to the first number of fresh examples a point every second number, ascending."""


def next_point(fresh: int, grid: Grid) -> int:
    """Return the first point behind `fresh` examples. Raises ValueError where the grid ended."""
    start = 0
    for end, spacing in grid:
        if fresh < end:
            return min(end, start + ((fresh - start) // spacing + 1) * spacing)
        start = end
    raise ValueError(f"the evaluation grid ends before {fresh} fresh examples")
