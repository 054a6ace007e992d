"""``torch.distributed.checkpoint``, which merges what ranks save under one name."""

from __future__ import annotations

import sys
from typing import Any

from stoker.frameworks.framework import is_calling
from stoker.frameworks.rank import process_group

_NAME = "pipeline"


def wrap_state(saved: dict[str, Any], rank: int | None) -> dict[str, Any]:
    """Return a pipeline's state as what it saves: one value, by a name that any ranks look for.

    Unchanged if it is not calling. Where ranks' states differ, ``rank`` is this process's part, and
    the value is the list of all ranks' states: all of them call this.
    """
    if not is_calling("torch.distributed.checkpoint."):
        return saved
    if rank is None:
        return {_NAME: (saved,)}
    states = [(rank, saved)]
    if (group := process_group()) is not None:
        states *= group[1]
        sys.modules["torch.distributed"].all_gather_object(states, (rank, saved))
    return {_NAME: ([state for _, state in sorted(dict(states).items())],)}


def unwrap_state(saved: Any) -> Any:
    """Return what ``wrap_state`` was given, or the list of all ranks' states; others unchanged."""
    own = saved.get(_NAME) if isinstance(saved, dict) else None
    return own[0] if isinstance(own, tuple) else saved
