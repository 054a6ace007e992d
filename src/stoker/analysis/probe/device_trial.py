"""Tries transforms of the script on a whole batch, where training computes."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from typing import Any

from .replay import list_tensors

# Of a transform; the first time, which may compile or allocate, is left out. Chosen, not measured.
_TIMES = 6
_clock = time.perf_counter


def try_on_device(batch: Any, names: list[str], torch: Any) -> dict[str, Any]:
    """Return the seconds that an object of each of these classes takes for a batch, and the device.

    Without a device that training uses, a thread of a processor stands for it, and the device is
    None. Transforms that choose a size are left out, as examples have one size by them alone; and
    what takes no batch of images [examples, channels, height, width], or changes its shape.
    """
    cuda, threads = torch.cuda, torch.get_num_threads()
    device = f"cuda:{cuda.current_device()}" if cuda.is_initialized() else None
    synchronize = cuda.synchronize if device else lambda: None
    images = [tensor for tensor in list_tensors(batch) if tensor.dim() == 4][:1]
    found = {type(each).__name__: each for each in gc.get_objects() if _is_of(each, names)}
    seconds: dict[str, float] = {}
    torch.set_num_threads(1)
    try:
        for name, transform in found.items():
            times: list[float] = []
            with contextlib.suppress(Exception):  # whatever the transform's own code raises
                while len(times) < _TIMES:
                    given = images[0].to(device or "cpu", copy=True)  # it may write there
                    synchronize()
                    began = _clock()
                    shape = transform(given).shape
                    synchronize()
                    times.append(_clock() - began)
                if shape == given.shape:
                    seconds[name] = statistics.median(times[1:])
    finally:
        torch.set_num_threads(threads)
    return {"seconds": seconds, "device": device}


def _is_of(value: Any, names: list[str]) -> bool:
    kind = type(value)
    return kind.__name__ in names and callable(value) and not hasattr(value, "size")
