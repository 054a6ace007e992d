"""The hooks on PyTorch's data loader and on pipelines: they time each ``next()`` of an iterator.

A hook does nothing to the iterators that a loader makes inside of another one's ``next()``, or in a
thread of a pipeline's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import time
from typing import Any

from stoker.analysis.watching.watch import RunWatch
from stoker.basics.warn import say
from stoker.engine.workers.threads import is_worker
from stoker.pipeline import Pipeline

_LOADERS = {
    "torch.utils.data.dataloader": "DataLoader",
    "torchdata.stateful_dataloader.stateful_dataloader": "StatefulDataLoader",
}
# Of this process; a fork leaves its parent's behind.
_current: list[RunWatch] = []
_hooked: set[type] = set()
# Of `stoker run --watch`: a process is watched from its first loader on.
_on_start: list[int | None] = []


def start_watch(port: int | None) -> RunWatch:
    """Watch this process, and all loaders that it iterates from now on."""
    with contextlib.suppress(ImportError):  # a pipeline needs no PyTorch
        importlib.import_module("torch.utils.data.dataloader")
    return _start(port)


def _start(port: int | None) -> RunWatch:
    local = os.environ.get("LOCAL_RANK", "")
    if port and local.isdigit():
        port += int(local)
        if port >= 1 << 16:
            raise ValueError(f"port {port - int(local)} plus the local rank {local} is no port")
    watch_class(Pipeline)
    for module, name in _LOADERS.items():
        if module in sys.modules:
            watch_class(getattr(sys.modules[module], name))
    before = _find_watch()
    if before is not None:
        before.close()
    _current[:] = [RunWatch(port)]
    return _current[0]


def watch_on_start(loader_class: Any, port: str) -> None:
    """Watch the loaders of a class in this process, and in those that it forks to train.

    ``port``: a number; "-" for none.
    """
    _on_start[:] = [None if port == "-" else int(port)]
    watch_class(loader_class)


def watch_class(loader_class: Any) -> None:
    """Put the hook on a class of loaders, once."""
    if loader_class in _hooked:
        return
    _hooked.add(loader_class)
    _hook(loader_class, "__iter__")
    if hasattr(loader_class, "_get_iterator"):  # loaders with an ``__iter__`` of their own call it
        _hook(loader_class, "_get_iterator")


def _hook(loader_class: Any, name: str) -> None:
    start = getattr(loader_class, name)

    @functools.wraps(start)
    def begin(self: Any) -> Any:
        watch = _find_watch()
        if watch is None and _on_start and _is_trainer():
            watch = _start_unasked(_on_start[0])
        if watch is None or is_worker() or watch.reader().entered_ns:  # a loader inside of another
            return start(self)
        epoch, reader = watch.begin(_name(self)), watch.reader()
        reader.entered_ns = time.perf_counter_ns()
        try:
            iterator = start(self)
        finally:
            reader.leave()
        if hasattr(iterator, "__dict__"):
            _time_class(type(iterator))
            iterator.__dict__["_stoker_watch"] = epoch
        return iterator

    setattr(loader_class, name, begin)


def _name(loader: Any) -> str:
    size = "no automatic batches" if loader.batch_size is None else f"batch {loader.batch_size}"
    data = loader.chain.source if isinstance(loader, Pipeline) else loader.dataset
    return f"{type(data).__name__}, {size}"


def _find_watch() -> RunWatch | None:
    if _current and _current[0].pid == os.getpid() and not _current[0].is_closed:
        return _current[0]
    return None


def _is_trainer() -> bool:
    """True unless this is a worker of a loader, or has been watched before."""
    is_closed = bool(_current) and _current[0].pid == os.getpid()
    data: Any = sys.modules.get("torch.utils.data")
    return (data is None or data.get_worker_info() is None) and not is_closed


def _start_unasked(port: int | None) -> RunWatch:
    """Watch a script that does not know of it: without a page, if that cannot be served."""
    try:
        return _start(port)
    except (ImportError, OSError, ValueError) as error:
        say(f"stoker watch: no page: {error}")
        return _start(None)


def _time_class(kind: type) -> None:
    """Have the iterators of a class time their calls, once; those without a mark do not."""
    owner: Any = next(base for base in kind.__mro__ if "__next__" in vars(base))
    if owner in _hooked:
        return
    _hooked.add(owner)
    advance = owner.__next__

    @functools.wraps(advance)
    def __next__(self: Any) -> Any:
        epoch = self.__dict__.get("_stoker_watch")
        return advance(self) if epoch is None else epoch.next(advance, self)

    owner.__next__ = __next__
