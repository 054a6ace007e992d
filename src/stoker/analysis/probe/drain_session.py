"""Runs the analyzer's drains inside a ``next()`` of the script that never returns.

A drain reads the script's own dataset through a loader made like the script's, with no training
step in between. The script does not go on after it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sized
from typing import Any

from . import device_trial, example, stacks, workers
from .records import read_json, write_json
from .replay import list_tensors

draining = False  # loaders made and iterated now are the probe's own

# The script stands still meanwhile: short beside a batch, long beside a look.
_POLL_S = 0.005
# For workers to prepare what they may ahead; slower ones take processors from the next steps.
_FILLING_S = 5.0
_clock = time.perf_counter_ns


class Finished(Exception):
    """The analysis needs no more of the script."""


class DrainSession:
    """Replaces ``next()`` once the analyzer takes over, and carries out its commands.

    Drains run inside ``next()``. Between drains it may hand batches to the script again, for a
    given number of steps: made by a given number of workers, from data that was drained before.

    Attributes:
        spare: batches for an evaluation on the loader; None if none are at hand.
    """

    def __init__(self, iterator: Any, seen: Any) -> None:
        process = seen.process
        self._process = process
        self._bank = self.spare = seen.bank
        self._replayed = seen.bank.next() if seen.bank is not None else None
        rest = seen.rest or iterator.__dict__.get("_sampler_iter")
        self._drains = LoaderDrains(iterator.__dict__["_stoker_loader"], process, rest)
        self._number = 0
        self._batches: Iterator[Any] | None = None
        self._left = 0
        seen.bank, seen.conducted = None, type(iterator)
        for started in list(process.iterators):
            if started.__dict__["_stoker"].conducted is not None:  # it is not read any more
                _stop(started)

    def next(self, over: Callable[[], bool]) -> Any:
        """Return a batch to train on. Raises StopIteration at the end of an epoch.

        Raises Finished when the analyzer asks for the end, or is gone.
        """
        while True:
            if self._batches is not None:
                answer = {}
                if self._left > 0:
                    if over():
                        raise StopIteration
                    self._left -= 1
                    try:
                        with _mark_own_loaders():
                            return next(self._batches)
                    except Exception as error:
                        answer = {"error": f"{type(error).__name__}: {error}"}
                _stop(self._batches)
                self._batches = None
                self._answer(answer)
            base = self._process.recorder.base
            command = wait_for_command(f"{base}.command.{self._number}", self._process.folder)
            if command is None or command["do"] == "end":
                raise Finished
            try:
                with _mark_own_loaders():
                    if command["do"] == "describe":
                        self._answer(self._drains.describe(self._replayed))
                    elif command["do"] == "drain":
                        self._answer(self._drains.drain(command))
                    elif command["do"] == "look":
                        self._answer(self._drains.look_at_example())
                    elif command["do"] == "move":
                        torch, names = self._process.torch, command["names"]
                        self._answer(device_trial.try_on_device(self._replayed, names, torch))
                    elif command["do"] == "keep":
                        self._answer(self._drains.keep_examples(command))
                    elif command["do"] == "alternate":
                        self._batches = self._drains.alternate(self._bank, command)
                        self._left = command["steps"] + 1
                        self._bank = None
                    else:
                        self._batches = self._drains.iterate(command["workers"])
                        self._left = command["steps"] + 1
            except Exception as error:
                self._answer({"error": f"{type(error).__name__}: {error}"})

    def _answer(self, answer: dict[str, Any]) -> None:
        write_json(f"{self._process.recorder.base}.answer.{self._number}", answer)
        self._number += 1


@contextlib.contextmanager
def _mark_own_loaders() -> Iterator[None]:
    """Mark loaders that are made and iterated inside the block as the probe's own."""
    global draining
    draining = True
    try:
        yield
    finally:
        draining = False


class LoaderDrains:
    """Drains the script's dataset, through loaders made like the script's.

    ``rest`` holds the indices of the script's present epoch that none of its workers was given.
    """

    def __init__(self, loader: Any, process: Any, rest: Iterator[Any] | None = None) -> None:
        self._loader = loader
        self._rest = iter(()) if rest is None else rest
        self._process = process
        self._torch = process.torch
        self._module = sys.modules["torch.utils.data.dataloader"]
        self._iterable = loader._dataset_kind == self._module._DatasetKind.Iterable
        self._indices: list[Any] = []
        self._batches = 0  # that the first drain delivered
        self._kept: Any = None  # the dataset with some examples in memory
        self._kept_indices: list[Any] = []

    def describe(self, batch: Any) -> dict[str, Any]:
        loader = self._loader
        examples = None
        if not self._iterable:
            with contextlib.suppress(Exception):
                examples = len(loader.sampler) if loader.sampler is not None else None
        return {
            "examples": examples,
            "iterable": self._iterable,
            "automatic": loader._auto_collation,
            "prefetch": loader.prefetch_factor or 0,
            # Workers also stay where a sampler goes on into the next epoch.
            "persistent": loader.persistent_workers
            or not (self._iterable or isinstance(loader._index_sampler, Sized)),
            "cuda": self._torch.cuda.is_initialized(),
            "copy_s": self._measure_copy_s(batch),
        }

    def look_at_example(self) -> dict[str, Any]:
        """Describe examples, read in another process, so that this one's files stay as they are.

        It answers as a worker does, if the script has any, and else as the script's own process.
        """
        loader = self._loader
        if self._iterable:
            return {}
        alone = loader.num_workers == 0
        (found,) = self._module.DataLoader(
            loader.dataset,
            None,
            sampler=[0],
            num_workers=1,
            collate_fn=functools.partial(_describe, alone),
            multiprocessing_context="fork" if alone else loader.multiprocessing_context,
            worker_init_fn=None if alone else loader.worker_init_fn,
            generator=self._torch.Generator(),
        )
        return dict(found)

    def keep_examples(self, command: dict[str, Any]) -> dict[str, Any]:
        """Keep examples of the first drain in memory, in place of a cache around the dataset.

        They are those of the first ``batches``, or of as many as are read in ``seconds``. Raises
        what the dataset raises.
        """
        loader, groups = self._loader, self._indices[: command["batches"]]
        if not loader._auto_collation:
            groups = [[index] for index in groups]
        with _many_workers_are_meant():
            reader = self._module.DataLoader(
                loader.dataset,
                None,
                sampler=[index for group in groups for index in group],
                num_workers=loader.num_workers,
                collate_fn=example.write_example,
                multiprocessing_context=loader.multiprocessing_context,
                worker_init_fn=loader.worker_init_fn,
                generator=self._torch.Generator(),
            )
        until = _clock() + int(command["seconds"] * 1e9)
        records: dict[Any, bytes] = {}
        filled = 0
        examples = _begin(reader)
        try:
            for group in groups:
                for index in group:
                    records[example.name_index(index)] = next(examples)
                filled += 1
                if _clock() > until:
                    break
        finally:
            _stop(examples)
        self._kept = example.PickledExamples(loader.dataset, records)
        self._kept_indices = self._indices[:filled]
        return {"batches": filled}

    def _measure_copy_s(self, batch: Any) -> float | None:
        cuda = self._torch.cuda
        if batch is None or not cuda.is_initialized():
            return None
        tensors = [tensor for tensor in list_tensors(batch) if not tensor.is_cuda]
        times = []
        # Nine copies, of which the middle one counts: the first ones allocate.
        for _ in range(9):
            cuda.synchronize()
            began = _clock()
            for tensor in tensors:
                tensor.to("cuda", non_blocking=tensor.is_pinned())
            cuda.synchronize()
            times.append((_clock() - began) / 1e9)
        return sorted(times)[len(times) // 2]

    def drain(self, command: dict[str, Any]) -> dict[str, Any]:
        """Read batches for some seconds. ``fresh``: new ones, remembered; else these again.

        ``samples``: also look at the stacks of the code that makes them. ``kept``: examples that
        are kept in memory.

        New ones are those that the script would read next: what is in the page cache of these is
        what it will meet. If the epoch ends too soon, the next one follows, which the script may
        have read already.
        """
        fresh, once, count = command["fresh"], command["once"], command["workers"]
        tag = f"{command['tag']}-{self._process.pid}"
        handed: list[Any] = []

        def record(indices: Iterator[Any]) -> Iterator[Any]:
            for index in indices:
                handed.append(index)
                yield index

        def make_fresh(ahead: bool) -> Any:
            indices = iter(self._loader._index_sampler)
            if ahead:
                indices = itertools.islice(self._rest, command["skip"], None)
            hears = workers.UNREAD if ahead and self._is_unread(command["skip"]) else workers.READ
            return self._make_loader(record(indices), count, tag, hears)

        ahead = fresh and not self._iterable
        if fresh:
            loader = make_fresh(ahead)
        else:
            kept = command["kept"]
            again = self._kept_indices if kept else self._indices
            loader = self._make_loader(
                again if once else itertools.cycle(again),
                count,
                tag,
                "",
                samples=command["samples"],
                kept=kept,
            )
        most = self._batches if self._iterable and not fresh else None
        arrivals: list[int] = []
        error = None
        began, cpu = _clock(), 0
        until = began + int(command["seconds"] * 1e9)
        longest = began + int(command["longest"] * 1e9)
        iterator = _begin(loader)
        try:
            while len(arrivals) != most:
                try:
                    next(iterator)
                except StopIteration:
                    if ahead and len(arrivals) < command["least"]:
                        ahead = False
                        loader = make_fresh(ahead)
                        iterator = _begin(loader)
                        continue
                    if not arrivals or once or fresh or not self._iterable:
                        break
                    iterator = _begin(loader)
                    continue
                except Exception as problem:
                    error = f"{type(problem).__name__}: {problem}"
                    break
                arrivals.append(_clock())
                if len(arrivals) == 1:  # the time of start-up is not that of batches
                    cpu = time.process_time_ns()
                    longest += arrivals[0] - began
                enough = len(arrivals) >= command["least"] and arrivals[-1] >= until
                if (enough and not once) or arrivals[-1] >= longest:
                    break
        finally:
            cpu = time.process_time_ns() - cpu if cpu else 0
            workers.LISTENER.end()
            stacks.SAMPLER.end()
            _stop(iterator)
        if fresh:
            self._batches, self._indices = len(arrivals), handed[: len(arrivals)]
        return {"began_ns": began, "arrivals_ns": arrivals, "error": error, "cpu_s": cpu / 1e9}

    def _is_unread(self, skip: int) -> bool:
        """True if the script has not read what follows in its epoch, after ``skip`` batches.

        These an earlier start of the script has read, if it read in the same order.
        """
        sampler = self._loader._index_sampler
        order = type(getattr(sampler, "sampler", sampler)).__name__
        return skip == 0 or order in ("SequentialSampler", "DistributedSampler")

    def iterate(self, workers: int) -> Iterator[Any]:
        """Yield batches of the examples of the first drain, without end."""
        loader = self._make_loader(itertools.cycle(self._indices), workers, "", "")
        if self._iterable:
            return itertools.chain.from_iterable(map(_begin, itertools.repeat(loader)))
        return _begin(loader)

    def alternate(self, bank: Any, command: dict[str, Any]) -> Iterator[Any]:
        """Yield some batches of each of the command's shares by turns.

        A share is its kind, workers, and number of batches. ``own`` ones are those that the script
        would read next (``again``: in further epochs, too), ``kept`` ones are in memory, and
        ``replayed`` ones were prepared. The workers of a share are idle while it is not its turn.

        Raises LookupError if there are no prepared batches.
        """
        shares = command["shares"]
        if bank is None and any(kind == "replayed" for kind, _, _ in shares):
            raise LookupError("no batches were prepared in this start of the script")
        loaders = [
            None if kind == "replayed" else self._make_share(kind, count, command["again"])
            for kind, count, _ in shares
        ]
        prepared = (bank.next() for _ in itertools.count())
        iterators = [prepared if each is None else _begin(each) for each in loaders]
        try:
            while True:
                for at, (_, _, batches) in enumerate(shares):
                    for waiting in iterators:
                        _wait_until_full(waiting)
                    for _ in range(batches):
                        batch = next(iterators[at], None)
                        if batch is None and self._iterable:  # a stream begins anew
                            iterators[at] = _begin(loaders[at])
                            batch = next(iterators[at], None)
                        if batch is None:
                            return
                        yield batch
        finally:
            for iterator in iterators:
                _stop(iterator)

    def _make_share(self, kind: str, count: int, again: bool) -> Any:
        indices = itertools.cycle(self._kept_indices) if kind == "kept" else self._read_on(again)
        return self._make_loader(indices, count, "", "", kept=kind == "kept")

    def _read_on(self, again: bool) -> Iterator[Any]:
        """Yield the indices that the script would read next; with ``again``, without end."""
        yield from self._rest
        while again:
            yield from self._loader._index_sampler

    def _make_loader(
        self,
        indices: Any,
        count: int,
        tag: str,
        hears: str,
        samples: bool = False,
        kept: bool = False,
    ) -> Any:
        """Make a loader like the script's, on other indices; it is iterated once."""
        if count == 0 and tag:
            _watch(tag, hears, samples)
        loader, torch = self._loader, self._torch
        made: dict[str, Any] = {"collate_fn": loader.collate_fn, "pin_memory": loader.pin_memory}
        if self._iterable:
            made |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        elif loader._auto_collation:
            made["batch_sampler"] = indices
        else:
            made |= {"batch_size": None, "sampler": indices}
        if count > 0:
            made |= {
                "num_workers": count,
                "prefetch_factor": loader.prefetch_factor or 2,
                "multiprocessing_context": loader.multiprocessing_context,
                "timeout": loader.timeout,
                "worker_init_fn": functools.partial(
                    _init, tag, hears, samples, loader.worker_init_fn
                ),
            }
        with _many_workers_are_meant():
            dataset = self._kept if kept else loader.dataset
            return self._module.DataLoader(dataset, generator=torch.Generator(), **made)


@contextlib.contextmanager
def _many_workers_are_meant() -> Iterator[None]:
    """Silence torch's warning of more workers than processors, as warnings may be errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield


def _begin(loader: Any) -> Iterator[Any]:
    with _many_workers_are_meant():
        return iter(loader)


def _describe(alone: bool, _: Any) -> dict[str, Any]:
    worker = sys.modules["torch"].utils.data._utils.worker
    dataset = worker.get_worker_info().dataset
    if alone:
        worker._worker_info = None
    return example.describe_example(dataset)


def _watch(tag: str, hears: str, samples: bool) -> None:
    """Begin to watch this process, which is to make the batches of a drain."""
    workers.LISTENER.begin(tag, hears)
    stacks.SAMPLER.begin(tag if samples else "")


def _init(
    tag: str, hears: str, samples: bool, init: Callable[[int], None] | None, worker: int
) -> None:
    _watch(tag, hears, samples)
    if init is not None:
        init(worker)


def _stop(iterator: Any) -> None:
    shut = getattr(iterator, "_shutdown_workers", None)
    if shut is not None:
        shut()


def _wait_until_full(iterator: Any) -> None:
    """Wait until workers have prepared all that they may prepare ahead, so that they are idle."""
    until = time.monotonic() + _FILLING_S
    queue = getattr(iterator, "_data_queue", None)
    while queue is not None and time.monotonic() < until:
        if queue.qsize() >= iterator._tasks_outstanding:
            return
        time.sleep(_POLL_S)


def wait_for_command(path: str, folder: str) -> Any:
    """Wait for a command; None if the analyzer is gone."""
    looked = time.monotonic()
    while True:
        command = read_json(path)
        if command is not None:
            return command
        time.sleep(_POLL_S)
        if time.monotonic() - looked > 0.5:
            looked = time.monotonic()
            if not is_analyzer_alive(folder):
                return None


def is_analyzer_alive(folder: str) -> bool:
    """True if the analyzer that made the folder still runs: it holds a lock on a file."""
    try:
        with open(os.path.join(folder, "alive"), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False
