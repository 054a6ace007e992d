"""Times the parts of a training step, by hooks on PyTorch, and counts the backward passes.

The passes tell training from evaluation: some loops evaluate on the loader that they train on, and
with gradients on while they ask for a batch (Ignite's).

A part counts where the main thread begins it, and not inside another one or inside ``next()``. In
an optimizer's step, the passes of its closure count as passes. Times are the host's: a GPU may
still work on a part when its call returns.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

PARTS = "forward", "backward", "optimizer", "copies to the device", "logging and saving"
_FORWARD, _BACKWARD, _OPTIMIZER, _COPIES, _LOGGING = range(len(PARTS))
_RUN = "_engine_run_backward"  # what backward() and grad() call

_clock = time.perf_counter_ns
_main = threading.main_thread().ident
_is_inside = False  # the main thread is in a part, or in next()
_passes = 0
_step_began: tuple[int, int] | None = None  # the clock, and the time of all parts, then

spent_ns = [0] * len(PARTS)
"""The time of each part so far, in this process."""


def count_passes() -> int:
    """Return how many backward passes this process has begun."""
    return _passes


def leave_out(call: Callable[[Any], Any], argument: Any) -> Any:
    """Return ``call(argument)``; no part counts meanwhile."""
    return _run(call, (argument,), {})[0]


def _run(call: Any, args: Any, kwargs: Any) -> tuple[Any, int]:
    """Call something inside of which no part counts; return its result and its time.

    The time is 0 where it does not count itself.
    """
    global _is_inside
    if _is_inside or threading.get_ident() != _main:
        return call(*args, **kwargs), 0
    _is_inside = True
    began = _clock()
    try:
        return call(*args, **kwargs), _clock() - began
    finally:
        _is_inside = False


def _time_calls(owner: Any, name: str, part: int) -> None:
    call = getattr(owner, name)

    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if _is_inside:  # as most calls of modules are
            return call(*args, **kwargs)
        result, lasted_ns = _run(call, args, kwargs)
        spent_ns[part] += lasted_ns
        return result

    setattr(owner, name, timed)


def _watch_forward(module: ModuleType) -> None:
    _time_calls(module.Module, "__call__", _FORWARD)


def watch_backward(autograd: ModuleType) -> None:
    """Time and count the passes of this process from here on."""
    if not hasattr(autograd, _RUN):
        return
    _time_calls(autograd, _RUN, _BACKWARD)
    run = getattr(autograd, _RUN)

    @functools.wraps(run)
    def counted(*args: Any, **kwargs: Any) -> Any:
        global _passes
        _passes += 1
        return run(*args, **kwargs)

    setattr(autograd, _RUN, counted)


def _watch_optimizers(module: ModuleType) -> None:
    def begin(*_: Any) -> None:
        global _step_began
        _step_began = _clock(), sum(spent_ns)

    def end(*_: Any) -> None:
        global _step_began
        if _step_began is not None and not _is_inside and threading.get_ident() == _main:
            began_ns, others_ns = _step_began
            spent_ns[_OPTIMIZER] += _clock() - began_ns - (sum(spent_ns) - others_ns)
        _step_began = None

    module.register_optimizer_step_pre_hook(begin)
    module.register_optimizer_step_post_hook(end)


def _watch_copies(module: ModuleType) -> None:
    for name in ("to", "cuda"):
        _time_copies(module.Tensor, name, getattr(module.Tensor, name))


def _time_copies(owner: Any, name: str, move: Any) -> None:
    @functools.wraps(move)
    def timed(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_inside or not tensor.is_cpu:
            return move(tensor, *args, **kwargs)
        moved, lasted_ns = _run(move, (tensor, *args), kwargs)
        if not moved.is_cpu:
            spent_ns[_COPIES] += lasted_ns
        return moved

    setattr(owner, name, timed)


def _watch_saving(module: ModuleType) -> None:
    _time_calls(module, "save", _LOGGING)
    _time_calls(sys.modules["logging"].Logger, "handle", _LOGGING)  # torch imports it first


def _watch_tensorboard(module: ModuleType) -> None:
    for name in [name for name in vars(module.SummaryWriter) if name.startswith("add_")]:
        _time_calls(module.SummaryWriter, name, _LOGGING)


def _watch_wandb(module: ModuleType) -> None:
    _time_calls(module.Run, "log", _LOGGING)


WATCHES: dict[str, Callable[[ModuleType], None]] = {
    "torch._tensor": _watch_copies,
    "torch.nn.modules.module": _watch_forward,
    "torch.autograd": watch_backward,
    "torch.optim.optimizer": _watch_optimizers,
    "torch.serialization": _watch_saving,
    "torch.utils.tensorboard.writer": _watch_tensorboard,
    "wandb.sdk.wandb_run": _watch_wandb,
}
"""What puts the hooks on a module of this name, once it is imported."""
