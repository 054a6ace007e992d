"""Tries transforms of the script's dataset on a whole batch, where training computes."""

from __future__ import annotations

import statistics
import time
import types
from collections import deque
from collections.abc import Callable
from typing import Any

from .replay import list_tensors

# Of an object with its parts, as of a state (``state.py``), and of timing a transform: the first
# time is left out. Chosen, not measured.
_MOST_PARTS, _TIMES = 4096, 5
# Images of a batch: examples, channels, height, width.
_DIMENSIONS = 4

_clock = time.perf_counter


def try_on_device(dataset: Any, batch: Any, names: list[str], torch: Any) -> dict[str, Any]:
    """Return the seconds that each of these transforms takes for a batch, and the device.

    Without a device that training uses, a thread of a processor stands for it, and the device is
    None. Transforms that choose a size stay with the examples, as these have one size by them
    alone. What else takes no batch of images, or changes its shape, is left out, too.
    """
    cuda = torch.cuda
    device = f"cuda:{cuda.current_device()}" if cuda.is_initialized() else None
    images = [tensor for tensor in list_tensors(batch) if tensor.dim() == _DIMENSIONS]
    seconds: dict[str, float] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for transform in _find(dataset, names):
            if images and not hasattr(transform, "size"):
                moved = images[0].to(device or "cpu")
                taken_s = _time(transform, moved, cuda.synchronize if device else _do_nothing)
                if taken_s is not None:
                    seconds[type(transform).__name__] = taken_s
    finally:
        torch.set_num_threads(threads)
    return {"seconds": seconds, "device": device}


def _do_nothing() -> None:
    pass


def _time(transform: Any, images: Any, synchronize: Callable[[], None]) -> float | None:
    """Return the seconds of a transform; None if it does not take images of a batch."""
    times = []
    try:
        for _ in range(1 + _TIMES):
            given = images.clone()  # it may write there
            synchronize()
            began = _clock()
            made = transform(given)
            synchronize()
            times.append(_clock() - began)
            if made.shape != images.shape:
                return None
    except Exception:  # whatever the transform's own code raises
        return None
    return statistics.median(times[1:])


def _find(dataset: Any, names: list[str]) -> list[Any]:
    """Return the first object of each of these classes that a dataset holds."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    queue = deque([dataset])
    while queue and len(seen) < _MOST_PARTS:
        value = queue.popleft()
        if id(value) in seen or isinstance(value, (type, types.ModuleType)):
            continue
        seen.add(id(value))
        if callable(value) and type(value).__name__ in names:
            found.setdefault(type(value).__name__, value)
        if isinstance(value, dict):
            queue.extend(list(value.values())[:_MOST_PARTS])
        elif isinstance(value, (list, tuple)):
            queue.extend(value[:_MOST_PARTS])
        else:
            queue.extend(getattr(value, "__dict__", {}).values())
    return list(found.values())
