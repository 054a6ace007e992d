"""``torch.distributed.checkpoint``, which merges what ranks save under one name."""

from __future__ import annotations

from typing import Any

from stoker.frameworks.framework import Framework, is_calling
from stoker.frameworks.rank import process_group


class TorchCheckpoint(Framework):
    """Stores each rank's state as one value, under a name that only this rank reads."""

    name = "torch.distributed.checkpoint"

    def wrap_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        return {_part(): (saved,)} if is_calling(f"{self.name}.") else saved

    def unwrap_state(self, saved: Any) -> Any:
        own = saved.get(_part()) if isinstance(saved, dict) else None
        return own[0] if isinstance(own, tuple) else saved


def _part() -> str:
    """Name this process's part of a distributed checkpoint."""
    rank, world = process_group() or (0, 1)
    return f"rank {rank} of {world}"
