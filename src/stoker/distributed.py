"""What torch tells of the other processes of a training job, where torch is in use."""

from __future__ import annotations

import sys
from typing import Any


def process_group() -> tuple[int, int] | None:
    """Return rank and world size of torch's process group, or None where none is initialised.

    Does not import torch: who has a process group has imported it.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()
