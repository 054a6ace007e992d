"""The hooks on PyTorch's data loader and on stoker's pipelines, which count and time batches.

What is iterated inside of another one's ``next()`` is a part of it, and not counted by itself.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import drain_session, pipeline_session, replay, stacks, step_parts, workers
from .builders import hook_loaders, note_builders
from .loaders import LoaderState, ProbedProcess
from .records import (
    BATCH,
    END,
    ERROR,
    LEARNED,
    REPLAYED,
    STARTED,
    SYNCHRONISED,
    TRAINS,
)

_clock = time.perf_counter_ns
# A socket's name may have 107 bytes, and multiprocessing adds 18.
_LONGEST_FOLDER = 88
_cover: Any = None  # puts hooks on a class of loaders, once attached
_current: list[ProbedProcess] = []  # of this process; a fork leaves its parent's behind


class _Thread(threading.local):
    """A thread of the script; ``is_inside`` a hooked call, ``begins`` an epoch."""

    is_inside = begins = False


_thread = _Thread()


def attach_stateful(module: ModuleType, folder: str) -> None:
    """Put the hooks on torchdata's loader, which has an ``__iter__`` of its own."""
    if _cover is not None:
        _cover(module.StatefulDataLoader)


def attach(module: ModuleType, folder: str) -> None:
    """Put the hooks on the classes of ``torch.utils.data.dataloader``."""
    global _cover
    # Workers that are ended by force leave their sockets there.
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if len(folder) < _LONGEST_FOLDER:
        config.setdefault("tempdir", folder)
    grad_enabled = sys.modules["torch"].is_grad_enabled
    advance = module._BaseDataLoaderIter.__next__
    create = module._DatasetKind.create_fetcher
    hidden: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, hook: Any) -> None:
        hidden.append((owner, name, vars(owner)[name]))
        setattr(owner, name, hook)

    def disable(where: str, error: Exception) -> None:
        for owner, name, original in hidden:
            setattr(owner, name, original)
        if config.get("tempdir") == folder:
            del config["tempdir"]
        note_failure(folder, where, error)

    def iterate(loader: Any, start: Callable[[Any], Any]) -> Any:
        is_begun = _thread.begins or drain_session.draining
        if is_begun or module.get_worker_info() is not None or _is_part():
            return start(loader)
        try:
            seen = _find_process(folder).adopt(loader)
            if seen is not None:
                seen.look_at_dataset(loader.dataset, begins=True)
            entered = _clock()
        except Exception as error:
            disable("iter", error)
            return start(loader)
        if seen is None:
            return start(loader)
        made = seen.conducted
        _thread.begins = True
        try:
            iterator = start(loader) if made is None else replay.begin_epoch(loader, made)
        finally:
            _thread.begins = False
        try:
            seen.keep_parts(loader, iterator)
            seen.note_epoch(iterator, entered, STARTED | TRAINS * grad_enabled())
        except Exception as error:
            disable("iter", error)
        return iterator

    @functools.wraps(advance)
    def __next__(self: Any) -> Any:
        seen = self.__dict__.get("_stoker")
        if seen is None or _thread.is_inside:
            return advance(self)
        if seen.count >= seen.process.recorder.header[seen.replay_at] and seen.can_begin:
            return _conduct(self, seen, advance)
        try:
            return _time(advance, self, seen, grad_enabled)
        except StopIteration:
            seen.look_at_dataset(self.__dict__["_stoker_loader"].dataset, begins=False)
            raise

    def create_fetcher(*args: Any, **kwargs: Any) -> Any:
        fetcher = create(*args, **kwargs)
        try:
            info = module.get_worker_info()
            if workers.LISTENER.tag:  # in drains; a job that is left alone has no hook there
                stacks.SAMPLER.watch(fetcher)
                workers.watch_fetcher(fetcher, info.id if info is not None else 0)
        except Exception as error:
            disable("create_fetcher", error)
        return fetcher

    _cover = functools.partial(hook_loaders, iterate=iterate, put=put)
    _cover(module.DataLoader)
    put(module._BaseDataLoaderIter, "__next__", __next__)
    put(module._DatasetKind, "create_fetcher", staticmethod(create_fetcher))


def attach_pipelines(module: ModuleType, folder: str) -> None:
    """Put hooks on pipelines (``module`` has just been imported) and on their iterators."""
    pipeline = module.Pipeline
    iterators = sys.modules["stoker.chain.iterator"].PipelineIterator  # what the module imports
    start, advance = pipeline.__iter__, iterators.__next__

    @functools.wraps(start)
    def __iter__(self: Any) -> Any:
        if _is_part():
            return start(self)
        try:
            note_builders(self)  # here, as a chain is built in many places
            seen = _find_process(folder).adopt(self)
        except Exception as error:
            note_failure(folder, "iter", error)
            return start(self)
        if seen is not None and seen.conducted is not None:
            seen.given = 0
            return pipeline_session.HandedBatches(lambda: _hand(seen))
        entered = _clock()
        _thread.is_inside = True
        try:
            iterator = start(self)
        finally:
            _thread.is_inside = False
        if seen is not None:
            seen.given, iterator.__dict__["_stoker_pipeline"] = 0, self  # a loop may hold no other
            seen.note_epoch(iterator, entered, STARTED | TRAINS * _has_gradients())
        return iterator

    @functools.wraps(advance)
    def __next__(self: Any) -> Any:
        seen = self.__dict__.get("_stoker")
        if seen is None or _thread.is_inside:
            return advance(self)
        if seen.count >= seen.process.recorder.header[seen.take_at] and seen.can_begin:
            if seen.conducted is None:
                pipeline = self.__dict__["_stoker_pipeline"]
                seen.process.takeover = pipeline_session.PipelineSession(pipeline, seen.process)
                seen.conducted = type(self)
                self.close()
                with contextlib.suppress(TypeError):
                    seen.length = len(pipeline)
            return _hand(seen)
        try:
            return _time(advance, self, seen, _has_gradients)
        finally:
            seen.given += 1

    pipeline.__iter__, iterators.__next__ = __iter__, __next__


def _hand(seen: LoaderState) -> Any:
    """Hand a batch of the analysis over. Raises StopIteration at the end of an epoch."""
    process = seen.process
    if process.told_to_end:
        process.end()
    if seen.length is not None and seen.given >= seen.length:
        raise StopIteration
    try:
        batch = process.takeover.next()
    except drain_session.Finished:
        process.end()
    seen.given += 1
    return batch


def _has_gradients() -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is None or bool(torch.is_grad_enabled())


def _is_part() -> bool:
    """True in a hooked call, in the threads of a pipeline's, and in that of an analysis."""
    if threading.current_thread().name == pipeline_session.THREAD:
        return True
    threads: Any = sys.modules.get("stoker.engine.workers.threads")
    return _thread.is_inside or (threads is not None and threads.is_worker())


def _find_process(folder: str) -> ProbedProcess:
    if not _current or _current[0].pid != os.getpid():
        _current[:] = [ProbedProcess(folder)]
    return _current[0]


def _time(
    advance: Callable[[Any], Any],
    iterator: Any,
    seen: LoaderState,
    has_gradients: Callable[[], bool],
) -> Any:
    """Return ``advance(iterator)``, and write a row of it."""
    number = seen.count
    _thread.is_inside = True
    entered = _clock()
    kind = ERROR
    try:
        batch = step_parts.leave_out(advance, iterator)
        kind = BATCH
        seen.count = number + 1
        return batch
    except StopIteration:
        kind = END
        seen.length = getattr(iterator, "_num_yielded", None)
        raise
    finally:
        left = _clock()
        _thread.is_inside = False
        if has_gradients():
            kind |= TRAINS
        kind |= LEARNED * seen.has_learned()
        seen.process.recorder.write(seen.slot, seen.epoch, number, entered, left, kind)


def _conduct(iterator: Any, seen: LoaderState, advance: Any) -> Any:
    """Do what the analyzer asks from here on: replay, then drains, then the end.

    Epochs keep their length, so values that a script computes from ``len(loader)`` stay right.
    """
    process, recorder = seen.process, seen.process.recorder
    entered, cpu = _clock(), time.process_time_ns()
    flags = TRAINS * process.torch.is_grad_enabled() | LEARNED * seen.has_learned()
    if process.told_to_end:
        process.end()
    takes = seen.count >= recorder.header[seen.take_at]
    last: list[Any] = []
    counts = True

    def note(kind: int) -> None:
        recorder.write(seen.slot, seen.epoch, seen.count, entered, _clock(), kind, cpu)

    if process.takeover is None and (takes or seen.bank is None):
        process.synchronise()
        note(SYNCHRONISED)
    if not takes and seen.bank is None:
        try:
            last = _fill_bank(iterator, seen, advance)
        except BaseException as error:  # the script's own, or its end of an epoch
            note((END if isinstance(error, StopIteration) else ERROR) | flags)
            raise
    try:
        takeover = process.takeover
        if takes and takeover is not None and not seen.trains and takeover.spare is not None:
            if replay.is_over(iterator, seen.length):
                raise StopIteration
            batch, counts = takeover.spare.next(), False
        elif takes:
            if takeover is None:
                takeover = process.takeover = drain_session.DrainSession(iterator, seen)
            batch = takeover.next(lambda: replay.is_over(iterator, seen.length))
        elif last:
            batch, counts = last[0], False
        elif replay.is_over(iterator, seen.length):
            raise StopIteration
        else:
            assert seen.bank is not None
            batch = seen.bank.next()
    except StopIteration:
        note(END | flags)
        raise
    except drain_session.Finished:
        process.end()
    except Exception as error:
        note_failure(process.folder, "replay", error)
        process.end()
    note(BATCH | flags | REPLAYED * counts)
    iterator._num_yielded += 1
    seen.count += 1
    return batch


def _fill_bank(iterator: Any, seen: LoaderState, advance: Any) -> list[Any]:
    """Fill the loader's bank from an iterator.

    If only the last batch of an epoch is left, which may be smaller, return it instead: the next
    epoch fills the bank. Raises StopIteration, and any error of the script's dataset.
    """
    given = iterator._num_yielded
    batches, ended = replay.read_some(lambda: advance(iterator))
    iterator._num_yielded = given  # none of them was handed out
    if ended:
        seen.length = given + len(batches)
        if len(batches) > 1:
            batches.pop()
        elif given:
            return batches
    seen.bank, seen.conducted = replay.Bank(batches), type(iterator)
    seen.rest = iterator._sampler_iter
    return []


def note_failure(folder: str, where: str, error: Exception) -> None:
    """Tell the analyzer that the probe gave up in this process."""
    with (
        contextlib.suppress(OSError),
        open(os.path.join(folder, f"failed-{os.getpid()}"), "w") as file,
    ):
        file.write(f"{where}: {type(error).__name__}: {error}")
