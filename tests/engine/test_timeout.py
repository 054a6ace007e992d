"""``.workers(timeout_s=)``: a stuck example is told, ended, and changes nothing else."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import stoker
from patience import wait_until
from stoker.engine.workers import threads
from strategies import shortened

# Time is counted in looks of a thread beside the workers, so a busy machine gives nobody up.
TIMEOUT_S = 0.16
STUCK = 7


class Numbers(stoker.Source[Any]):
    """Rows ``[index, index]``, which say from which file they come."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        return np.full(2, index)

    def path(self, index: int) -> str:
        return f"/numbers/{index}.txt"


@stoker.thread_safe
class Stuck:
    """A function that does not return from some rows, until it is let go."""

    def __init__(self, *rows: int) -> None:
        self._rows = rows or (STUCK,)
        self._lock = threading.Lock()
        self._lock.acquire()
        self.on_stuck: Callable[[], object] = lambda: None

    def __getstate__(self) -> dict[str, Any]:
        return {"_rows": self._rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["_rows"])  # type: ignore[misc]

    def let_go(self) -> None:
        self._lock.release()

    def on_example(self, row: Any) -> Any:
        if row[0] in self._rows:
            self.on_stuck()
            with self._lock:
                pass
        return row

    def on_use(self, row: Any, rng: np.random.Generator) -> Any:
        return self.on_example(row) + rng.integers(1 << 20)

    def on_batch(self, batch: Any) -> Any:
        if STUCK in batch[:, 0]:
            with self._lock:
                pass
        return batch


def fails(row: Any) -> Any:
    if row[0] == STUCK:
        raise TimeoutError
    return row


def fails_on_use(row: Any, rng: np.random.Generator) -> Any:
    return fails(row) + rng.integers(1 << 20)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    one = Stuck()
    yield one
    one.let_go()
    wait_until(lambda: not any(t.name.startswith("stoker") for t in threading.enumerate()))


@pytest.fixture
def soon_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is stuck stays until its call ends: it is not waited for."""
    monkeypatch.setattr(threads, "_JOIN_S", 0.01)


def numbers(**options: Any) -> stoker.Pipeline[Any]:
    return stoker.from_dataset(Numbers(), seed=0, **options)


def drain(
    pipeline: stoker.Pipeline[Any], batches: list[Any] | None = None
) -> tuple[list[Any], list[str]]:
    """Return an epoch's batches, and the warnings about the example that is stuck."""
    batches = [] if batches is None else batches
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in pipeline:
            batches.append(np.asarray(batch).tolist())
    return batches, [str(each.message) for each in caught]


def test_it_is_told_and_skipped_within_the_budget(stuck: Stuck) -> None:
    train = numbers().map(stuck.on_example, max_errors=1).batch(4)
    train = train.workers(2, kind="process", timeout_s=TIMEOUT_S)
    batches, told = drain(train)
    assert [row[0] for batch in batches for row in batch] == [n for n in range(22) if n != STUCK]
    (warning,) = [each for each in told if "example 7 (/numbers/7.txt)" in each]
    assert "in on_example\n" in warning
    assert "engine/segments" not in warning
    stats = train.stats()
    (skip,) = stats.skips
    assert (skip.index, skip.path) == (STUCK, "/numbers/7.txt")
    assert skip.cause.startswith("TimeoutError: no end after")
    assert stats.stuck_processes == 1
    assert "stuck in an example" in str(stats)


def test_code_that_would_run_in_the_loops_thread_is_watched_in_processes() -> None:
    stuck, hangs = Stuck(20), False

    def cheap(row: Any) -> Any:
        return stuck.on_example(row) if hangs else row

    train = numbers().map(cheap, max_errors=1).batch(2).workers(2, timeout_s=TIMEOUT_S)
    assert len(drain(train)[0]) == 11
    hangs = True
    batches, told = drain(train)
    assert [row[0] for batch in batches for row in batch] == [n for n in range(22) if n != 20]
    assert any("example 20 " in each for each in told)


def test_where_no_process_can_be_watched_that_is_an_error() -> None:
    one, other = socket.socketpair()

    def reads(row: Any, _: Any = one) -> Any:
        return row

    train = numbers().map(reads).batch(2)
    with one, other:
        asked = train.workers(2, timeout_s=TIMEOUT_S)
        with pytest.raises(stoker.StokerError, match=r"timeout_s= .*: reads.+ is open, which"):
            next(iter(asked))
        with pytest.warns(UserWarning, match=r"may take each other's answers: reads"):
            assert len(list(train.workers(2, kind="process"))) == 11


def test_two_in_one_request_are_both_skipped() -> None:
    stuck = Stuck(35, 39)
    rows = np.repeat(np.arange(96)[:, None], 2, axis=1)
    train = stoker.from_arrays(rows, seed=0).map(stuck.on_example, max_errors=2).batch(16)
    train = train.workers(1, kind="process", timeout_s=TIMEOUT_S)
    batches, _ = drain(train)
    rest = [n for n in range(96) if n not in (35, 39)]
    assert [row[0] for batch in batches for row in batch] == rest
    assert [skip.index for skip in train.stats().skips] == [35, 39]


def plus_one(row: Any) -> Any:
    return row + 1


@pytest.mark.usefixtures("soon_left")
def test_threads_beside_processes_are_watched_too(stuck: Stuck) -> None:
    rows = np.repeat(np.arange(22)[:, None], 2, axis=1)  # nothing before the echo is sent
    train = stoker.from_arrays(rows, seed=0).map(stuck.on_example).echo(2).map(plus_one).batch(4)
    with pytest.raises(stoker.StageError) as raised:
        drain(train.workers(2, timeout_s=TIMEOUT_S))
    assert raised.value.index == STUCK
    assert isinstance(raised.value.__cause__, TimeoutError)


@pytest.mark.usefixtures("soon_left")
@pytest.mark.parametrize(("kind", "budget"), [("process", 0), ("thread", 0), ("thread", 1)])
def test_without_a_budget_or_in_a_thread_it_is_an_error(
    stuck: Stuck, kind: str, budget: Any
) -> None:
    train = numbers().map(stuck.on_example, max_errors=budget).batch(4)
    train = train.workers(2, kind=kind, timeout_s=TIMEOUT_S)
    batches: list[Any] = []
    told = pytest.warns(UserWarning, match=r"example 7 \(/numbers/7.txt\) has been in map")
    with told, pytest.raises(stoker.StageError) as raised:  # noqa: PT012
        for batch in train:
            batches.append(batch.tolist())
    assert (raised.value.index, raised.value.path) == (STUCK, "/numbers/7.txt")
    assert isinstance(raised.value.__cause__, TimeoutError)
    assert batches == [[[n, n] for n in range(4)]]


CHAINS: dict[str, Callable[[Any, Any], stoker.Pipeline[Any]]] = {
    "plain": lambda each, use: numbers().shuffle().map(each, max_errors=1).random_map(use).batch(4),
    "rank": lambda each, use: (
        numbers().shard(rank=1, world_size=2).map(each, max_errors=1).batch(4).steps(2)
    ),
    "echo": lambda each, use: numbers().map(each, max_errors=1).echo(2).batch(4),
    "uses": lambda each, use: (
        numbers(max_errors="50%").echo(2).random_map(use, max_errors=4).batch(4)
    ),
    "maps behind": lambda each, use: (
        numbers().map(each, max_errors=1).batch(4).map(lambda batch: batch + 1)
    ),
    "collate": lambda each, use: numbers().map(each, max_errors=1).batch(4, collate=np.stack),
    "filter": lambda each, use: (
        numbers().map(each, max_errors=1).filter(lambda row: row[0] % 3 < 2).batch(4)
    ),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.full
def test_the_stream_is_as_if_the_stage_had_failed(stuck: Stuck, name: str) -> None:
    train = CHAINS[name](stuck.on_example, stuck.on_use)
    failing = CHAINS[name](fails, fails_on_use)
    batches, _ = drain(train.workers(3, kind="process", timeout_s=TIMEOUT_S))
    assert batches == drain(failing.workers(0))[0]


@pytest.mark.full
def test_a_resumed_run_skips_it_too(stuck: Stuck) -> None:
    def train(function: Any) -> stoker.Pipeline[Any]:
        return numbers().map(function, max_errors=1).batch(4)

    one = train(stuck.on_example).workers(2, kind="process", timeout_s=TIMEOUT_S)
    with warnings.catch_warnings(), iter(one) as batches:
        warnings.simplefilter("ignore")
        begun = [next(batches).tolist() for _ in range(3)]
        state = one.state_dict()
    other = train(stuck.on_example)  # nothing before the state is asked for again
    other.load_state_dict(state)
    rest = [batch.tolist() for batch in other]
    assert begun + rest == drain(train(fails).workers(0))[0]


@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.full
def test_a_whole_batch_is_named_by_its_number(stuck: Stuck, kind: str) -> None:
    train = numbers().batch(4).map(stuck.on_batch).workers(2, kind=kind, timeout_s=TIMEOUT_S)
    with pytest.raises(stoker.StageError) as raised:
        drain(train)
    assert (raised.value.index, raised.value.batch) == (None, 1)


@pytest.mark.interrupts
@pytest.mark.usefixtures("soon_left")
def test_ctrl_c_ends_a_run_that_is_stuck(stuck: Stuck) -> None:
    stuck.on_stuck = lambda: os.kill(os.getpid(), signal.SIGINT)
    train = numbers().map(stuck.on_example).batch(4)
    train = train.workers(2, kind="thread", timeout_s=3600)
    with pytest.raises(KeyboardInterrupt):
        list(train)


@pytest.mark.full
def test_processes_that_stay_are_replaced_for_later_epochs_too(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda *_: "forkserver")
    monkeypatch.setattr(
        multiprocessing, "get_context", lambda: multiprocessing.context.ForkServerContext()
    )
    train = numbers().map(stuck.on_example, max_errors=1).batch(4)
    train = train.workers(2, kind="process", persistent=True, timeout_s=1.2)
    expected = [n for n in range(22) if n != STUCK]
    for _ in range(2):
        batches, _ = drain(train)
        assert [row[0] for batch in batches for row in batch] == expected
        assert train.stats().stuck_processes == 1


@pytest.mark.parametrize("kind", shortened(["thread", "process"], 1))
def test_a_watched_run_is_freed_without_the_collector(kind: str) -> None:
    function = Stuck(-1)
    seen = weakref.ref(function)
    gc.collect()
    gc.disable()
    try:
        drain(numbers().map(function.on_example).batch(4).workers(2, kind=kind, timeout_s=3600))
        del function
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"n": 2, "timeout_s": 0}, ValueError, "more than 0 seconds"),
        ({"n": 2, "timeout_s": True}, TypeError, "a number of seconds"),
        ({"n": 0, "timeout_s": 30}, ValueError, "needs workers"),
    ],
)
def test_a_wrong_timeout_is_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        numbers().batch(4).workers(**arguments)


def test_it_is_shown() -> None:
    train = numbers().batch(4).workers(2, timeout_s=90)
    assert "2 workers, timeout 1.5 min" in str(train)
