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

from stoker.analysis.probe.example import look_at_draws, read_generators
from stoker.analysis.probe.state import digest_state, read_state
from stoker.basics import pytree
from stoker.running.examples.kept_examples import find_record, identify_examples
from stoker.transport.codec import decode

# Of prctl(2), which Python does not name.
_PR_SET_PDEATHSIG = 1
# Examples that are read, two to a batch: random ones draw from a generator in each, as a rule.
_EXAMPLES = 16
# Training waits for the trial. Slow examples are read in a smaller number. Chosen, not measured.
_ENOUGH_S, _LONGEST_S = 2.5, 30.0
# Finding an example in a store, without its decoding: more than was measured (7 us,
# bench/results/dataset.json), so that a cache which could make the loader slower is left out.
_LOOKUP_S = 5e-5
is_same = functools.partial(pytree.equal, layout=True)


class ExampleTrial(msgspec.Struct, frozen=True):
    """What reading some examples, each of them several times, showed."""

    random: bool = False
    """True if batches draw from a generator of Python, NumPy or torch, or differ when read
    again."""
    moves: list[str] = []
    """What reading changes of the dataset and its collation beyond its draws, by name."""
    opens: bool = False
    """True if reading leaves a file open, which forks of the process would share."""
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
    """Read some of a loader's examples several times in a forked process.

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
        except Exception as error:
            found = {"not_kept": f"{type(error).__name__}: {error}"}
    return found | _try_batches(loader, create_fetcher, sends)


def _list_indices(loader: Any) -> list[int]:
    count = len(loader.dataset)
    return list(dict.fromkeys(at * count // _EXAMPLES for at in range(_EXAMPLES) if count))


def _try_keeping(loader: Any) -> dict[str, Any]:
    """Read examples without their collation, which stays as it is."""
    read, dataset = _make_reader(loader), loader.dataset
    indices, records = list[int](), list[int]()
    read_s = kept_s = 0.0
    for index in _list_indices(loader):
        start = time.perf_counter()
        value = read(index)
        read_s += time.perf_counter() - start
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
        indices.append(index)
        if read_s > _ENOUGH_S:
            break
    if not indices:
        return {"not_kept": "it has no examples"}
    draws = look_at_draws(read, indices, lambda: read_state(dataset), [dataset], is_same, _ENOUGH_S)
    if draws.random:
        return {"not_kept": "its examples are random"}
    if read_s < kept_s + _LOOKUP_S * len(indices):
        return {"not_kept": "its examples are read as fast as they would be found in a cache"}
    mean = sum(records) / len(records)
    return {"example_bytes": mean, "identity": identify_examples(dataset)}


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
    indices, files = _list_indices(loader), _count_files()
    if not indices:
        return {}
    many, dataset, collate = loader._auto_collation, loader.dataset, loader.collate_fn
    fetcher = create_fetcher(loader._dataset_kind, dataset, many, collate, loader.drop_last)
    keys: list[Any] = [*indices]
    if many:  # the last one alone: an odd number shows what is switched to and fro
        keys = [indices[at : at + 2] for at in range(0, len(indices), 2)] + [indices[-1:]]
    draws = look_at_draws(
        fetcher.fetch,
        keys,
        lambda: read_state(dataset) | {"collate_fn": digest_state(collate)},
        [dataset, collate],
        is_same,
        _ENOUGH_S,
    )
    opens = _count_files() > files
    if sends:
        ForkingPickler.dumps(draws.first[0][1])
    return {"random": draws.random, "moves": draws.moves, "opens": opens}


def _count_files() -> int:
    return len(os.listdir("/proc/self/fd"))
