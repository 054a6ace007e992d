"""The loaders that a process iterates, and the probe's state of each.

A loader's parts are kept on its iterator, not on the loader: the loader may be gone, and with
persistent workers the two would keep each other alive. A loader is named by the line that built
it; if that is taken, also by its caller's line.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import time
import traceback
import weakref
from multiprocessing import util
from typing import Any, NoReturn

from . import replay, step_parts
from .builders import name_loader
from .records import SLOTS, Recorder, find_places, read_json, write_json
from .state import find_changes, read_state

_clock = time.perf_counter_ns
# Of prctl(2), which Python does not name.
_PR_SET_PDEATHSIG = 1
_RANKS = "RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"
_SIZES = "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"
_LOCAL_SIZES = "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"
# Epochs without a backward pass, one after the other, behind which the script trains without any.
# A loop evaluates once or twice on the data that it trains on. Chosen, not measured.
_MOST_BARREN = 4
# Of a loader.
_TOLD = (
    "slot", "site", "built", "place", "describes", "batch_size", "sampled", "workers", "changes",
    "is_pipeline",
)  # fmt: skip
# Of a traceback's end, where the error stands: a report shows no more.
_MOST_LINES = 20
# Of looking at a dataset between two epochs: training waits. Chosen, not measured.
_LONGEST_LOOK_S = 0.2


def _read_number(names: tuple[str, ...], default: int) -> int:
    """Return the first of these environment variables that is a number."""
    found = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in found if text.isdigit()), default)


class EndOfAnalysis(SystemExit):
    """Ends the script when the analysis has what it needs; like ``sys.exit()``."""


class LoaderState:
    """The probe's state of one loader, which it does not keep alive."""

    def __init__(
        self, process: ProbedProcess, slot: int, site: str, built: tuple[str, ...], loader: Any
    ) -> None:
        self.process = process
        self.slot = slot
        self.site = site  # its name: no other loader of the process has it
        self.built = built
        self.loader = weakref.ref(loader)
        self.describes = _describe_loader(loader)
        self.batch_size = _read_batch_size(loader)
        # Of Accelerate's loaders and the Trainer's, which have batch samplers of their own.
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        self.sampled = size if isinstance(size, int) else None
        self.workers = getattr(loader, "num_workers", 0)  # a pipeline has none
        self.is_pipeline = hasattr(loader, "chain")
        self.given = 0  # batches of a pipeline's epoch
        self.place = loader.__dict__.get("_stoker_place")
        self.epoch = -1
        self.count = 0
        self._passes = self._before = 0  # backward passes at the last row, and before the epoch
        self._barren = 0  # epochs without any, one after the other
        self.replay_at, self.take_at = find_places(slot)  # places in the header
        self.length: int | None = None  # batches of an epoch that ended by itself
        self.bank: replay.Bank | None = None
        self.rest: Any = None  # of its epoch's indices, once the bank is full
        self.conducted: type | None = None  # of its iterators, once they read nothing any more
        # What the script changed of the dataset between epochs; None if that was not seen.
        self.changes: list[str] | None = None
        self._has_looked_enough = False
        self._state: dict[str, str] | None = None  # of the dataset, since which nothing read it

    def look_at_dataset(self, dataset: Any, *, begins: bool) -> None:
        """Look for changes of a dataset between epochs, where one ``begins`` or ends.

        Where the script's process reads the examples, the end of an epoch counts.
        """
        if self._has_looked_enough or not (begins or self.workers == 0):
            return
        entered, before = _clock(), self._state
        try:
            now = read_state(dataset)
        except Exception:  # whatever the dataset's own code raises
            self._has_looked_enough = True
            return
        reads = self.workers == 0 and self.conducted is None
        self._state = None if begins and reads else now
        if begins and before is not None:
            found, known = find_changes(before, now), self.changes
            self.changes = sorted({*found, *(known or ())})
            if self.changes != known:
                self.process.register()
        self._has_looked_enough = bool(self.changes) or _clock() - entered > _LONGEST_LOOK_S * 1e9

    def keep_parts(self, loader: Any, iterator: Any) -> None:
        """Keep what replay and drains need of a loader."""
        iterator.__dict__["_stoker_loader"] = replay.take_parts(loader)
        self.process.iterators.add(iterator)

    def note_epoch(self, iterator: Any, entered: int, kind: int) -> None:
        """Note that an iterator was made."""
        self.epoch += 1
        passes = step_parts.count_passes()
        self._barren = self._barren + 1 if passes == self._before else 0
        self._passes = self._before = passes
        iterator.__dict__["_stoker"] = self
        recorder = self.process.recorder
        recorder.write(self.slot, self.epoch, self.count, entered, _clock(), kind)

    def has_learned(self) -> bool:
        """Return whether a backward pass began since this was asked last, or the epoch began."""
        before, self._passes = self._passes, step_parts.count_passes()
        return self._passes != before

    @property
    def trains(self) -> bool:
        """Whether this epoch is known to be no evaluation.

        At its first batch that is not known, unless epochs have one.
        """
        passes = step_parts.count_passes()
        always = not passes or self.length == 1 or self._barren >= _MOST_BARREN
        return always or passes > self._before

    @property
    def can_begin(self) -> bool:
        """Whether what the analyzer asks may begin here, or has begun."""
        return self.trains or self.bank is not None or self.conducted is not None


class ProbedProcess:
    """The probe in one process that iterates loaders."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.pid = os.getpid()
        self.recorder = Recorder(folder)
        self.told_to_end = False
        self.takeover: Any = None  # a session, once there is one
        self.seen: list[LoaderState] = []
        self.iterators: weakref.WeakSet[Any] = weakref.WeakSet()
        # A rank must not outlive the launcher that the analyzer's own end takes down.
        with contextlib.suppress(Exception):
            import ctypes

            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _watch_end(self.recorder)

    @property
    def torch(self) -> Any:
        """PyTorch, which a script with a loader has imported."""
        return sys.modules["torch"]

    def adopt(self, loader: Any) -> LoaderState | None:
        """Give a loader a slot; None if none is left."""
        known: tuple[int, int] | None = loader.__dict__.get("_stoker_slot")
        if known is not None and known[0] == self.pid:
            seen = self.seen[known[1]]
            if seen.loader() is loader:  # and no copy of it
                return seen
        built = loader.__dict__.get("_stoker_built", ("somewhere",))
        for seen in self.seen:
            if seen.built == built and seen.loader() is None:  # made anew, for every epoch
                seen.loader = weakref.ref(loader)
                loader.__dict__["_stoker_slot"] = (self.pid, seen.slot)
                return seen
        if len(self.seen) == SLOTS:
            return None
        site = name_loader(built, {seen.site: seen.built for seen in self.seen})
        seen = LoaderState(self, len(self.seen), site, built, loader)
        loader.__dict__["_stoker_slot"] = (self.pid, seen.slot)
        self.seen.append(seen)
        plan = read_json(os.path.join(self.folder, "plan.json")) or {}
        if site in plan.get("trains", ()):
            self.recorder.header[seen.replay_at] = plan["replay_at"]
        if plan.get("site") == site:
            self.recorder.header[seen.take_at] = plan["take_at"]
        self.register()
        return seen

    def register(self) -> None:
        """Tell the analyzer this process's rank and its loaders."""
        environ = os.environ
        about = {
            "pid": self.pid,
            "rank": _read_number(_RANKS, 0),
            "world_size": _read_number(_SIZES, 1),
            "on_this_host": _read_number(_LOCAL_SIZES, 1),
            "master": f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}",
            "parent": os.getppid(),
            "generation": _read_number(("TORCHELASTIC_RESTART_COUNT",), 0),
            "daemon": multiprocessing.current_process().daemon,
            "loaders": [{name: getattr(seen, name) for name in _TOLD} for seen in self.seen],
        }
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            about["rank"] = distributed.get_rank()
            about["world_size"] = distributed.get_world_size()
        write_json(self.recorder.base + ".json", about)

    def end(self) -> NoReturn:
        """End the script. Raises EndOfAnalysis, and again if the script caught it."""
        self.told_to_end = True
        raise EndOfAnalysis(0) from None

    def synchronise(self) -> None:
        """Wait for the device, if the script uses one."""
        cuda = self.torch.cuda
        if cuda.is_initialized():
            cuda.synchronize()


def _read_batch_size(loader: Any) -> int | None:
    """Return the number of examples in a batch; None where batches differ, or there are none."""
    chain = getattr(loader, "chain", None)
    if chain is None:
        size = loader.batch_size
    elif chain.source.yields_batches:
        size = getattr(getattr(chain.source, "loader", None), "batch_size", None)
    else:
        size = chain.batch_size if chain.is_batched and not chain.plans_batches else None
    return size if isinstance(size, int) else None


def _describe_loader(loader: Any) -> str:
    if hasattr(loader, "chain"):  # a pipeline
        return type(loader.chain.source).__name__
    size = "no automatic batches" if loader.batch_size is None else f"batch {loader.batch_size}"
    if loader.batch_size is None and loader.batch_sampler is not None:
        size = f"batches by {type(loader.batch_sampler).__name__}"
    workers = f"{loader.num_workers} worker{'s' * (loader.num_workers != 1)}"
    return f"{type(loader.dataset).__name__}, {size}, {workers}"


def _watch_end(recorder: Recorder) -> None:
    """Record the end of this process in ``process-PID.ended``, when the interpreter exits.

    There is no file for a process that is killed, that calls ``os._exit`` with an error, or that is
    a daemonic child which its parent ends.
    """
    # Not atexit, which children of multiprocessing leave out.
    path = recorder.base + ".ended"
    util.Finalize(None, _write_end, (path,), exitpriority=0)
    leave = os._exit

    @functools.wraps(leave)
    def _exit(status: int) -> NoReturn:
        # Forked children inherit this. A process that ended as Python does has already recorded it.
        if status == 0 and os.getpid() == recorder.pid and not os.path.exists(path):
            _write_end(path)
        leave(status)

    os._exit = _exit


def _write_end(path: str) -> None:
    # In a child of multiprocessing it is on its way; else the interpreter has shown it.
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit) and not error.code:
        error = None
    text = None
    if error is not None:
        lines = "".join(traceback.format_exception(error)).splitlines()
        text = "\n".join(lines[-_MOST_LINES:])
    with contextlib.suppress(OSError):
        write_json(path, {"error": text, "at_ns": time.monotonic_ns()})
