"""Looks at a loader's examples in a forked process, before the loader is iterated.

The script's own process reads none of them: a file that a dataset opens at its first example must
not be shared with workers, and no generator may move.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing import util
from multiprocessing.reduction import ForkingPickler
from typing import Any

import msgspec

from stoker.analysis.probe.example import (
    RandomExamples,
    read_again,
    read_first,
    read_generators,
)
from stoker.analysis.probe.state import digest_state, find_changes, read_state
from stoker.basics import pytree
from stoker.running.examples.kept_examples import find_record, identify_examples
from stoker.transport.codec.decoder import decode

# Of prctl(2), which Python does not name.
_PR_SET_PDEATHSIG = 1
# Examples that are read, two to a batch: random ones draw from a generator in each, as a rule.
_EXAMPLES = 16
# Training waits for the trial. Slow examples are read in a smaller number. Chosen, not measured.
_ENOUGH_S, _LONGEST_S = 5.0, 30.0
# Finding an example in a store, without its decoding: more than was measured (7 us,
# bench/results/dataset.json), so that a cache which could make the loader slower is left out.
_LOOKUP_S = 5e-5
is_same = functools.partial(pytree.equal, layout=True)


class ExampleTrial(msgspec.Struct, frozen=True):
    """What reading some examples, each of them twice, showed."""

    random: bool = False
    """True if batches draw from a generator of Python, NumPy or torch, or differ when read
    again."""
    moves: list[str] = []
    """What reading changes of the dataset and its collation, by name; left out where random."""
    problem: str = ""
    """Why examples cannot be read in another process; empty if they can."""
    not_kept: str = ""
    """Why examples are not to be kept in a cache; empty if they can be."""
    example_bytes: float = 0.0
    """The mean size of an example in a cache."""
    identity: str = ""
    """Of the examples, as the processes of a run name them."""


def try_examples(
    loader: Any, create_fetcher: Any, *, sends: bool, keeps: bool = False
) -> ExampleTrial:
    """Read some of a loader's examples twice in a forked process.

    With ``sends``, also try whether batches can be sent to another process, as workers must; with
    ``keeps``, whether examples alone can be kept in a cache.
    """
    return _look_in_fork(lambda: _try_all(loader, create_fetcher, sends, keeps))


def _look_in_fork(look: Callable[[], dict[str, Any]]) -> ExampleTrial:
    read, write = os.pipe()
    with warnings.catch_warnings():
        # From Python 3.12 on, for processes with threads. PyTorch forks its workers likewise.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _run_child(read, write, look)
    os.close(write)
    try:
        text = _read_answer(read)
    finally:
        os.close(read)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
    if text is None:
        return ExampleTrial(problem=f"reading some examples took more than {_LONGEST_S:.0f} s")
    if not text:
        return ExampleTrial(problem="a process that read some examples was killed")
    return msgspec.json.decode(text, type=ExampleTrial)


def _read_answer(read: int) -> bytes | None:
    until = time.monotonic() + _LONGEST_S
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([read], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return None
        part = os.read(read, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _run_child(read: int, write: int, look: Callable[[], dict[str, Any]]) -> None:
    """Do the trial, and end this process. Nothing of the script's runs at its end."""
    try:
        os.close(read)
        gc.disable()  # finalizers of the script's objects belong to its own process
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.modules["torch"].set_num_threads(1)  # as in workers; after a fork, others would hang
        try:
            found = look()
        except BaseException as error:
            found = {"problem": f"{type(error).__name__}: {error}"}
        os.write(write, json.dumps(found).encode())
        # Of this process alone: to send a tensor, it has made a folder for a socket.
        util._run_finalizers()  # type: ignore[attr-defined]
    finally:
        os._exit(0)


def _try_all(loader: Any, create_fetcher: Any, sends: bool, keeps: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if keeps:
        try:
            found = _try_keeping(loader)
        except RandomExamples:
            found = {"not_kept": "its examples are random"}
        except Exception as error:
            found = {"not_kept": f"{type(error).__name__}: {error}"}
    try:
        return found | _try_batches(loader, create_fetcher, sends)
    except RandomExamples:
        return found | {"random": True}


def _list_indices(loader: Any) -> list[int]:
    count = len(loader.dataset)
    return list(dict.fromkeys(at * count // _EXAMPLES for at in range(_EXAMPLES) if count))


def _try_keeping(loader: Any) -> dict[str, Any]:
    """Read examples without their collation, which stays as it is. Raises RandomExamples."""
    read = _make_reader(loader)
    first, records = [], []
    read_s = kept_s = 0.0

    def timed(index: int) -> Any:
        nonlocal read_s
        start = time.perf_counter()
        try:
            return read(index)
        finally:
            read_s += time.perf_counter() - start

    for index, value in read_first(timed, _list_indices(loader), _ENOUGH_S):
        record = find_record(value)
        if record is None:
            return {"not_kept": f"its examples ({type(value).__name__}) cannot be kept as they are"}
        # Its processor time: it waits for nothing, and on a busy host a pause would refuse a cache.
        start = time.thread_time()
        again = decode(memoryview(record))
        kept_s += time.thread_time() - start
        if not is_same(again, value) and not _collates_alike(loader, value, again):
            return {"not_kept": "tensors of its examples have strides that a cache would change"}
        records.append(len(record))
        first.append((index, value))
    if not first:
        return {"not_kept": "it has no examples"}
    own = _OwnState(loader)
    read_again(read, first, is_same, _ENOUGH_S)
    read(first[-1][0])
    own.check_draws()
    if read_s < kept_s + _LOOKUP_S * len(first):
        return {"not_kept": f"reading an example takes {1e3 * read_s / len(first):.2g} ms only"}
    mean = sum(records) / len(records)
    return {"example_bytes": mean, "identity": identify_examples(loader.dataset)}


def _collates_alike(loader: Any, a: Any, b: Any) -> bool:
    """True if examples that differ in their strides make the same batch."""
    before = read_generators()
    same = loader._auto_collation and is_same(loader.collate_fn([a, a]), loader.collate_fn([b, b]))
    return bool(same and read_generators() == before)


def _make_reader(loader: Any) -> Callable[[int], Any]:
    dataset = loader.dataset
    # As PyTorch's fetcher asks.
    many = getattr(dataset, "__getitems__", None) if loader._auto_collation else None
    if not many:
        return lambda index: dataset[index]

    def read(index: int) -> Any:
        values = many([index])
        if type(values) is not list or len(values) != 1:
            raise TypeError("its __getitems__ gives no list of examples")
        return values[0]

    return read


def _try_batches(loader: Any, create_fetcher: Any, sends: bool) -> dict[str, Any]:
    indices = _list_indices(loader)
    many = loader._auto_collation
    groups = [indices[at : at + 2] for at in range(0, len(indices), 2)] if many else indices
    fetcher = create_fetcher(
        loader._dataset_kind, loader.dataset, many, loader.collate_fn, loader.drop_last
    )
    first = [*read_first(fetcher.fetch, groups, _ENOUGH_S)]
    if not first:
        return {}
    if sends:
        ForkingPickler.dumps(first[0][1])
    # From here on examples are read again: a file that is opened, or an example that is remembered,
    # at the first time, shows no more. Each state is one behind the last group: its index may stay.
    last: Any = first[-1][0]
    own = _OwnState(loader)
    _make_reader(loader)(last[-1] if many else last)
    own.look()
    read_again(fetcher.fetch, first, is_same, _ENOUGH_S)
    fetcher.fetch(last)
    own.check_draws()
    return {"moves": sorted(own.moved)}


class _OwnState:
    """What a dataset and its collation hold when this is made, generators included or left out.

    Generators of their own are those of MONAI and Albumentations: a rare augmentation may leave all
    examples of a trial as they are, but it draws. What seeds its generator by the index, and is not
    random, leaves the same state after the same example.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._state, self._drawn = self._read(draws=False), self._read(draws=True)
        self.moved: set[str] = set()

    def _read(self, *, draws: bool) -> dict[str, str]:
        loader = self._loader
        own = read_state(loader.dataset, draws=draws)
        return own | {"collate_fn": digest_state(loader.collate_fn, draws=draws)}

    def look(self) -> None:
        """Add what reading has changed since to ``moved``; generators are left out."""
        self.moved.update(find_changes(self._state, self._read(draws=False)))

    def check_draws(self) -> None:
        """Raise RandomExamples if generators are not as they were; behind the same example."""
        self.look()
        if {*find_changes(self._drawn, self._read(draws=True))} - self.moved:
            raise RandomExamples
