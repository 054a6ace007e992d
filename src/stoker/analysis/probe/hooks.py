"""The hooks on PyTorch's data loader, and what they count."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
import weakref
from types import FrameType, ModuleType
from typing import Any

from . import replay, takeover, workers
from .records import (
    BATCH,
    END,
    ERROR,
    REPLAYED,
    SLOTS,
    STARTED,
    SYNCHRONISED,
    TRAINS,
    Recorder,
    read_json,
    write_json,
)

_clock = time.perf_counter_ns
_PR_SET_PDEATHSIG = 1


class EndOfAnalysis(SystemExit):
    """Ends the script when the analysis has what it needs; like ``sys.exit()``."""


class Seen:
    """What the probe knows of one loader; it does not keep it alive."""

    def __init__(self, process: Process, slot: int, site: str, loader: Any) -> None:
        self.process = process
        self.slot = slot
        self.site = site
        self.loader = weakref.ref(loader)
        self.describes = _described(loader)
        self.batch_size = loader.batch_size
        self.workers = loader.num_workers
        self.built = loader.__dict__.get("_stoker_built")
        self.epoch = -1
        self.count = 0
        self.replay_at, self.take_at = 8 + 2 * slot, 9 + 2 * slot  # places in the header
        self.bank: replay.Bank | None = None
        self.replaying: Any = None  # the iterator that has no end any more; epochs after it are it

    def started(self, loader: Any, iterator: Any, entered: int, kind: int) -> None:
        """Take note of a new epoch."""
        self.epoch += 1
        iterator.__dict__["_stoker"] = self
        iterator.__dict__["_stoker_loader"] = takeover.parts_of(loader)
        self.process.iterators.add(iterator)
        recorder = self.process.recorder
        recorder.write(self.slot, self.epoch, self.count, entered, _clock(), kind)


class Process:
    """The probe in one process that iterates loaders."""

    def __init__(self, folder: str, torch: ModuleType) -> None:
        self.folder = folder
        self.pid = os.getpid()
        self.torch = torch
        self.recorder = Recorder(folder)
        self.ended = False
        self.takeover: takeover.Takeover | None = None
        self.seen: list[Seen] = []
        self.iterators: weakref.WeakSet[Any] = weakref.WeakSet()
        self._end_with_parent()

    def _end_with_parent(self) -> None:
        # A rank must not outlive the launcher that the analyzer's own end takes down.
        with contextlib.suppress(Exception):
            import ctypes

            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def adopt(self, loader: Any) -> Seen | None:
        """Give a loader a slot; None where there is none left."""
        known: tuple[int, int] | None = loader.__dict__.get("_stoker_slot")
        if known is not None and known[0] == self.pid:
            return self.seen[known[1]]
        site = loader.__dict__.get("_stoker_site", "somewhere")
        for seen in self.seen:
            if seen.site == site and seen.loader() is None:  # made anew, for every epoch
                seen.loader = weakref.ref(loader)
                loader.__dict__["_stoker_slot"] = (self.pid, seen.slot)
                return seen
        if len(self.seen) == SLOTS:
            return None
        seen = Seen(self, len(self.seen), site, loader)
        loader.__dict__["_stoker_slot"] = (self.pid, seen.slot)
        self.seen.append(seen)
        plan = read_json(os.path.join(self.folder, "plan.json")) or {}
        if plan.get("site") == site:
            self.recorder.header[seen.replay_at] = plan["replay_at"]
            self.recorder.header[seen.take_at] = plan["take_at"]
        self.register()
        return seen

    def register(self) -> None:
        """Tell the analyzer who this process is and which loaders it has."""
        environ = os.environ
        about = {
            "pid": self.pid,
            "rank": int(environ.get("RANK", environ.get("LOCAL_RANK", "0")) or 0),
            "world_size": int(environ.get("WORLD_SIZE", "1") or 1),
            "loaders": [
                {
                    "slot": seen.slot,
                    "site": seen.site,
                    "describes": seen.describes,
                    "batch_size": seen.batch_size,
                    "workers": seen.workers,
                    "built": seen.built,
                }
                for seen in self.seen
            ],
        }
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            about["rank"] = distributed.get_rank()
            about["world_size"] = distributed.get_world_size()
        write_json(self.recorder.base + ".json", about)

    def synchronise(self) -> None:
        """Wait for the device, if the script uses one."""
        cuda = self.torch.cuda
        if cuda.is_initialized():
            cuda.synchronize()


_cover: Any = None  # puts hooks on a class of loaders, once attached


def attach_subclass(loader_class: Any) -> None:
    """Put the hooks on a class of loaders that has an ``__iter__`` of its own."""
    if _cover is not None:
        _cover(loader_class)


def attach(module: ModuleType, folder: str) -> None:
    """Put the hooks on the classes of ``torch.utils.data.dataloader``."""
    global _cover
    torch = sys.modules["torch"]
    grad_enabled = torch.is_grad_enabled
    advance = module._BaseDataLoaderIter.__next__
    create = module._DatasetKind.create_fetcher
    current: list[Process] = []  # of this process; a fork leaves its parent's behind
    hidden: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, hook: Any) -> None:
        hidden.append((owner, name, vars(owner)[name]))
        setattr(owner, name, hook)

    def disable(where: str, error: Exception) -> None:
        for owner, name, original in hidden:
            setattr(owner, name, original)
        failed(folder, where, error)

    def process() -> Process:
        if not current or current[0].pid != os.getpid():
            current[:] = [Process(folder, torch)]
        return current[0]

    def cover(loader_class: Any) -> None:
        make, start = loader_class.__init__, loader_class.__iter__

        @functools.wraps(make)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            if "_stoker_site" not in self.__dict__:
                self.__dict__["_stoker_built"] = built = _built()
                self.__dict__["_stoker_site"] = f"{os.path.basename(built[0])}:{built[1]}"

        @functools.wraps(start)
        def __iter__(self: Any) -> Any:
            if takeover.draining or module.get_worker_info() is not None:
                return start(self)
            try:
                seen = process().adopt(self)
                entered = _clock()
            except Exception as error:
                disable("iter", error)
                return start(self)
            if seen is None:
                return start(self)
            if seen.replaying is not None:
                return seen.replaying
            iterator = start(self)
            try:
                seen.started(self, iterator, entered, STARTED | TRAINS * grad_enabled())
            except Exception as error:
                disable("iter", error)
            return iterator

        put(loader_class, "__init__", __init__)
        put(loader_class, "__iter__", __iter__)

    @functools.wraps(advance)
    def __next__(self: Any) -> Any:
        seen = self.__dict__.get("_stoker")
        if seen is None:
            return advance(self)
        number = seen.count
        if number >= seen.process.recorder.header[seen.replay_at]:
            return _conducted(self, seen, advance)
        entered = _clock()
        kind = ERROR
        try:
            batch = advance(self)
            kind = BATCH
            seen.count = number + 1
            return batch
        except StopIteration:
            kind = END
            raise
        finally:
            if grad_enabled():
                kind |= TRAINS
            seen.process.recorder.write(seen.slot, seen.epoch, number, entered, _clock(), kind)

    def create_fetcher(*args: Any, **kwargs: Any) -> Any:
        fetcher = create(*args, **kwargs)
        try:
            info = module.get_worker_info()
            if workers.LISTENER.tag:  # in drains; a job that is left alone has no hook there
                workers.watch(fetcher, info.id if info is not None else 0)
        except Exception as error:
            disable("create_fetcher", error)
        return fetcher

    _cover = cover
    cover(module.DataLoader)
    put(module._BaseDataLoaderIter, "__next__", __next__)
    put(module._DatasetKind, "create_fetcher", staticmethod(create_fetcher))


def _conducted(iterator: Any, seen: Seen, advance: Any) -> Any:
    """Do what the analyzer wants from here on: replay, then drains, then the end."""
    process, recorder = seen.process, seen.process.recorder
    entered, cpu = _clock(), time.process_time_ns()
    if process.ended:  # the script went on after the end
        raise EndOfAnalysis(0)
    try:
        if process.takeover is None and (
            seen.bank is None or seen.count >= recorder.header[seen.take_at]
        ):
            process.synchronise()
            recorder.write(seen.slot, seen.epoch, seen.count, entered, _clock(), SYNCHRONISED, cpu)
        if seen.count >= recorder.header[seen.take_at]:
            if process.takeover is None:
                process.takeover = takeover.Takeover(iterator, seen)
            batch = process.takeover.next()
            if batch is None:
                process.ended = True
                raise EndOfAnalysis(0)
            seen.count += 1
            return batch
        if seen.bank is None:
            bank = replay.filled(lambda: advance(iterator))  # StopIteration: the next epoch does
            seen.bank, seen.replaying = bank, iterator
        batch = seen.bank.next()
    except StopIteration:
        raise
    except Exception as error:
        process.ended = True
        failed(process.folder, "replay", error)
        raise EndOfAnalysis(0) from None
    kind = BATCH | REPLAYED | (TRAINS if process.torch.is_grad_enabled() else 0)
    number, seen.count = seen.count, seen.count + 1
    recorder.write(seen.slot, seen.epoch, number, entered, _clock(), kind, cpu)
    return batch


def failed(folder: str, where: str, error: Exception) -> None:
    """Tell the analyzer that the probe gave up in this process."""
    with (
        contextlib.suppress(OSError),
        open(os.path.join(folder, f"failed-{os.getpid()}"), "w") as file,
    ):
        file.write(f"{where}: {type(error).__name__}: {error}")


def _built() -> tuple[str, int]:
    """Return file and line of the caller that built a loader: the nearest outside of packages."""
    nearest = sys._getframe(2)
    frame: FrameType | None = nearest
    while frame is not None:
        name = frame.f_code.co_filename
        if "site-packages" not in name and "dist-packages" not in name and name[:1] != "<":
            nearest = frame
            break
        frame = frame.f_back
    return os.path.abspath(nearest.f_code.co_filename), nearest.f_lineno


def _described(loader: Any) -> str:
    size = "no automatic batches" if loader.batch_size is None else f"batch {loader.batch_size}"
    if loader.batch_size is None and loader.batch_sampler is not None:
        size = f"batches by {type(loader.batch_sampler).__name__}"
    workers = f"{loader.num_workers} worker{'s' * (loader.num_workers != 1)}"
    return f"{type(loader.dataset).__name__}, {size}, {workers}"
