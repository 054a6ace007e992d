"""``torch.distributed.checkpoint``, which merges what ranks save under one name."""

from __future__ import annotations

from typing import Any

from stoker.frameworks.framework import is_calling
from stoker.frameworks.rank import process_group


def wrap_state(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a pipeline's state as what it saves: one value, by a name that this rank reads alone.

    Unchanged if it is not calling.
    """
    return {_part(): (saved,)} if is_calling("torch.distributed.checkpoint.") else saved


def unwrap_state(saved: Any) -> Any:
    """Return a pipeline's state from the result of ``wrap_state``; other values unchanged."""
    own = saved.get(_part()) if isinstance(saved, dict) else None
    return own[0] if isinstance(own, tuple) else saved


def _part() -> str:
    """Name this process's part of a distributed checkpoint."""
    rank, world = process_group() or (0, 1)
    return f"rank {rank} of {world}"
