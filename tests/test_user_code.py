"""Datasets and functions that are no good for several threads at once come right: threads have
copies of their own, or take turns."""

from __future__ import annotations

import gc
import os
import re
import signal
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker
from descriptors import open_descriptors
from scripts import run
from stoker.testing import check_resume
from strategies import stream

pytestmark = pytest.mark.filterwarnings(  # files that are not closed, as users' are not
    "ignore::pytest.PytestUnraisableExceptionWarning"
)

LENGTH = 104
RECORD = 64


def wait() -> None:
    """Let others run, and make the work worth threads: it takes twice what stays inline."""
    time.sleep(0.002)


class Scratch:
    """Writes into a buffer of its own before it returns a copy of that."""

    def __init__(self) -> None:
        self.buffer = np.zeros(4)
        self.scale = 1

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        self.buffer[:] = index * self.scale
        wait()
        return self.buffer.copy()


class Tokenizer:
    """Truncates to what it was told last, as fast tokenizers do."""

    def __init__(self) -> None:
        self.limit = 0

    def __call__(self, text: Any, limit: int) -> Any:
        self.limit = limit
        wait()
        return text[: self.limit].copy()


class Texts:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        long = self.tokenizer(np.arange(index, index + 12), 12)
        return {"long": long, "short": self.tokenizer(long, 5)}


class Records:
    """Reads records of a file that it opens when it is first asked, or at once."""

    def __init__(self, path: Path, *, at_once: bool) -> None:
        self.path = path
        self.file: Any = open(path, "rb") if at_once else None  # noqa: SIM115

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = open(self.path, "rb")  # noqa: SIM115
        self.file.seek(index * RECORD)
        wait()
        return np.frombuffer(self.file.read(RECORD), np.uint8)


def records(folder: Path) -> Path:
    path = folder / "records"
    path.write_bytes(b"".join(bytes([index]) * RECORD for index in range(LENGTH)))
    return path


class Numbers:
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return np.full(4, float(index))


class Buffered:
    """A function with a buffer of its own: of an example, a batch, a list of examples."""

    def __init__(self, result: Callable[[Any], Any] = np.copy) -> None:
        self.kept: Any = None
        self.result = result

    def __call__(self, given: Any, rng: Any = None) -> Any:
        self.kept = given + int(rng.integers(100)) if rng is not None else given
        wait()
        return self.result(self.kept)


def is_even(value: Any) -> bool:
    return bool(value[0] % 2 == 0)


def buffered_lambda() -> Callable[[Any], Any]:
    kept: list[Any] = []

    def fn(given: Any) -> Any:
        kept.append(given)
        wait()
        return kept.pop()

    return fn


Program = Callable[[Path], stoker.Pipeline[Any]]


def numbers(seed: int = 0) -> stoker.Pipeline[Any]:
    return stoker.from_dataset(Numbers(), seed=seed).shuffle()


def two_uses_of_one_tokenizer(path: Path) -> stoker.Pipeline[Any]:
    tokenizer = Tokenizer()
    p = stoker.from_dataset(Texts(tokenizer), seed=0).shuffle()
    return p.map(lambda x: {**x, "shorter": tokenizer(x["short"], 2)}).batch(4)


def mixed(path: Path) -> stoker.Pipeline[Any]:
    one = stoker.from_dataset(Scratch(), seed=0).shuffle().map(Buffered())
    return stoker.mix({one: 2, numbers().random_map(Buffered()): 1}).batch(4)


PROGRAMS: dict[str, Program] = {
    "scratch buffer": lambda path: stoker.from_dataset(Scratch(), seed=0).shuffle().batch(4),
    "one tokenizer": two_uses_of_one_tokenizer,
    "file": lambda path: stoker.from_dataset(Records(records(path), at_once=True)).batch(4),
    "file, lazily": lambda path: stoker.from_dataset(Records(records(path), at_once=False)).batch(
        4
    ),
    "map": lambda path: numbers().map(Buffered()).batch(4),
    "closure": lambda path: numbers().map(buffered_lambda()).batch(4),
    "random map": lambda path: numbers().random_map(Buffered()).batch(4),
    "filter": lambda path: numbers().filter(Buffered(is_even)).batch(4),
    "collate": lambda path: numbers().batch(4, collate=Buffered(np.stack)),
    "batch map": lambda path: numbers().batch(4).map(Buffered()),
    "random batch map": lambda path: numbers().batch(4).random_map(Buffered()),
    "echo": lambda path: numbers().map(Buffered()).echo(2).random_map(Buffered()).batch(4),
    "echo, batches": lambda path: numbers().batch(4).echo(2).random_map(Buffered()),
    "cache": lambda path: (
        stoker.from_dataset(Scratch(), seed=0)
        .map(Buffered())
        .cache("1MiB")
        .map(Buffered())
        .batch(4)
    ),
    "cached": lambda path: (
        stoker.from_dataset(stoker.cached(Scratch(), "1MiB"), seed=0).shuffle().batch(4)
    ),
    "mixture": mixed,
    "stream": lambda path: (
        stoker.from_iterable(lambda: iter(np.arange(LENGTH).reshape(-1, 1)), seed=0)
        .map(Buffered())
        .batch(4)
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_wrong_when_shared_comes_right(name: str, tmp_path: Path) -> None:
    inline = PROGRAMS[name](tmp_path).workers(0)
    threads = PROGRAMS[name](tmp_path).workers(8, patience="1h")  # then all take part at once
    for _ in range(2):
        expected = stream(inline)
        assert len(expected) >= 10
        assert stream(threads) == expected
    assert threads.stats().workers == 8


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("looked", [False, True])
def test_a_file_that_was_open_before_a_fork(tmp_path: Path, at_once: bool, looked: bool) -> None:
    data = Records(records(tmp_path), at_once=at_once)
    if looked:
        assert data[3][0] == 3
    p = stoker.from_dataset(data, seed=0).shuffle()
    expected = stream(stoker.from_dataset(data, seed=0).shuffle().batch(4).workers(0))
    assert stream(p.batch(4).workers(2, kind="process")) == expected
    assert stream(p.batch(4).workers(8)) == expected


# -- what is copied, and when

calls: list[str] = []


class Tells:
    """Takes note of each copy that is made of it."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return index

    def __getstate__(self) -> Any:
        calls.append("copied")
        return self.__dict__.copy()


@pytest.fixture(autouse=True)
def _none_yet() -> None:
    calls.clear()


@pytest.mark.parametrize("workers", [0, 8])
def test_inline_nothing_is_copied(workers: int) -> None:
    p = (
        stoker.from_dataset(Tells(), seed=0)
        .shuffle()
        .map(lambda x: x + 1)
        .batch(4)
        .workers(workers)
    )
    for _ in range(3):
        assert sum(int(batch.sum()) for batch in p) == sum(range(1, LENGTH + 1))
    assert calls == []


class Counts:
    """Counts its calls, and tells of it."""

    def __init__(self) -> None:
        self.calls = 0
        self.scale = 1

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        wait()
        self.calls += 1
        return index * self.scale, self.calls


def test_copies_are_kept_for_the_next_epoch_until_something_changes() -> None:
    def epoch() -> tuple[int, int]:
        batches = list(p)
        return sum(int(x.sum()) for x, _ in batches), max(int(calls.max()) for _, calls in batches)

    data = Counts()
    p = stoker.from_dataset(data, seed=0).shuffle().batch(4).workers(1)
    total = sum(range(LENGTH))
    assert [epoch() for _ in range(3)] == [(total, number * LENGTH) for number in (1, 2, 3)]
    assert 0 < data.calls < LENGTH  # the consumer's, before there was a thread
    data.scale = 10
    assert epoch() == (10 * total, data.calls + LENGTH)
    assert epoch() == (10 * total, data.calls + 2 * LENGTH)


def test_a_large_buffer_is_written_to_by_each_thread_for_itself() -> None:
    class Large(Scratch):
        def __init__(self) -> None:
            super().__init__()
            self.buffer = np.zeros(1 << 18)

        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)[:: 1 << 16]

    data = Large()
    p = stoker.from_dataset(data, seed=0).batch(4)
    for _ in range(2):
        assert stream(p.workers(8)) == stream(p.workers(0))


def test_files_that_copies_hold_open_stay_open_and_go_with_the_pipeline(tmp_path: Path) -> None:
    data = Records(records(tmp_path), at_once=False)
    gc.collect()
    before = open_descriptors()
    p = stoker.from_dataset(data, seed=0).shuffle().batch(4).workers(3)
    opened = []
    for _ in range(3):
        list(p)
        gc.collect()
        opened.append(len(open_descriptors() - before))
    assert 0 < opened[0] <= 4  # the consumer's may be one of them
    assert opened == opened[:1] * 3
    if data.file is not None:
        data.file.close()
    del p
    gc.collect()
    assert open_descriptors() <= before


# Python 3.13 and later say it of what threads opened, which no other thread may close.
@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")
def test_what_belongs_to_its_thread_is_opened_anew_in_the_next_epoch(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "db") as made:
        made.execute("create table t (x integer)")
        made.executemany("insert into t values (?)", [(i,) for i in range(LENGTH)])
    made.close()

    class Table:
        def __init__(self) -> None:
            self.connection: Any = None

        def __len__(self) -> int:
            return LENGTH

        def __getitem__(self, index: int) -> int:
            if self.connection is None:
                self.connection = sqlite3.connect(tmp_path / "db")
            wait()
            found = self.connection.execute("select x from t where rowid = ?", (index + 1,))
            return int(found.fetchone()[0])

    data = Table()
    p = stoker.from_dataset(data, seed=0).shuffle().batch(4).workers(4)
    for _ in range(3):
        assert sum(int(batch.sum()) for batch in p) == sum(range(LENGTH))
    del p, data
    gc.collect()


# -- what cannot be copied


class Alone:
    """Cannot be copied, and no two calls of it may go on at once."""

    def __init__(self) -> None:
        self.inside = 0
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return self(index)

    def __call__(self, index: Any, rng: Any = None) -> Any:
        self.inside += 1
        wait()
        assert self.inside == 1, "two at once"
        self.inside -= 1
        self.threads.add(threading.current_thread().name)
        return index

    def __reduce__(self) -> Any:
        raise TypeError("no copies of this")


ALONE: dict[str, Callable[[Alone], stoker.Pipeline[Any]]] = {
    "dataset": lambda fn: stoker.from_dataset(fn, seed=0).batch(4),
    "map": lambda fn: stoker.from_dataset(range(LENGTH), seed=0).map(fn).batch(4),
    "random map": lambda fn: stoker.from_dataset(range(LENGTH), seed=0).random_map(fn).batch(4),
    "batch map": lambda fn: stoker.from_dataset(range(LENGTH), seed=0).batch(4).map(fn),
    "both": lambda fn: stoker.from_dataset(fn, seed=0).map(fn).batch(4).map(fn),
    "echo": lambda fn: stoker.from_dataset(fn, seed=0).echo(2).random_map(fn).batch(4),
    "mixture": lambda fn: stoker.mix({stoker.from_dataset(fn, seed=0).map(fn): 1}).batch(4),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_cannot_be_copied_is_called_by_one_thread_at_a_time(name: str) -> None:
    fn = Alone()
    p = ALONE[name](fn).workers(8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            list(p)
    said = [str(each.message) for each in caught]
    assert len(said) == {"both": 3, "echo": 2, "mixture": 2}.get(name, 1)
    for each in said:
        assert re.search(r"Alone\)( of part 1)? runs one call at a time: ", each)
        assert "no copies of this" in each
        assert 'kind="process"' in each
        assert "stoker.thread_safe" in each
    assert any("stoker-worker" in thread for thread in fn.threads)


def test_two_pipelines_take_turns_at_one_object() -> None:
    fn = Alone()
    slow = stoker.from_dataset(fn, seed=0).batch(4).workers(4)
    inline = stoker.from_dataset(range(LENGTH), seed=0).map(fn).batch(4).workers(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*one call at a time")
        for batch in slow:
            assert len(batch) == 4
            with iter(inline) as iterator:
                next(iterator)


def test_a_declared_object_is_shared_and_called_at_once() -> None:
    class Meets:
        """Two threads have to be in it at once."""

        def __init__(self) -> None:
            self.barrier = threading.Barrier(2)
            self.workers: set[str] = set()

        def __len__(self) -> int:
            return 60

        def __getitem__(self, index: int) -> int:
            wait()
            if len(self.workers) < 2:
                name = threading.current_thread().name
                if name.startswith("stoker-worker"):
                    self.barrier.wait(60)
                    self.workers.add(name)
            return index

    data = stoker.thread_safe(Meets())
    assert sum(map(sum, stoker.from_dataset(data, seed=0).batch(4).workers(2))) == sum(range(60))
    assert len(data.workers) == 2


# -- errors


class Fragile:
    """Its copies do not work."""

    def __init__(self) -> None:
        self.is_copy = False

    def __reduce__(self) -> Any:
        return _fragile_copy, ()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return {"id": self(index), "text": f"{index}"}

    def __call__(self, given: Any, rng: Any = None) -> Any:
        wait()
        if isinstance(given, dict):
            given["read"] = int(given.pop("text"))  # before it fails
        if self.is_copy:
            raise KeyError("a copy")
        return given


def _fragile_copy() -> Fragile:
    copy = Fragile()
    copy.is_copy = True
    return copy


def dicts() -> stoker.Pipeline[Any]:
    p = stoker.from_dataset(range(LENGTH), seed=0)
    return p.map(lambda index: {"id": index, "text": f"{index}"})


FRAGILE: dict[str, Callable[[Fragile], stoker.Pipeline[Any]]] = {
    "dataset": lambda fn: stoker.from_dataset(fn, seed=0).batch(4),
    "map": lambda fn: dicts().map(fn).batch(4),
    "cache": lambda fn: dicts().cache("1MiB").map(fn).batch(4),
    "random map": lambda fn: dicts().random_map(fn).batch(4),
    "batch map": lambda fn: dicts().batch(4).map(lambda x: x["id"]).map(fn),
    "echo": lambda fn: dicts().echo(2).random_map(fn).batch(4),
    "collate": lambda fn: dicts().batch(4, collate=lambda xs: [fn(x) for x in xs]),
    "stream": lambda fn: stoker.from_iterable(lambda: iter(list(range(99)))).map(fn).batch(4),
}


@pytest.mark.parametrize("name", FRAGILE)
def test_a_copy_that_fails_is_replaced_by_the_original(name: str) -> None:
    inline = FRAGILE[name](Fragile()).workers(0)
    threads = FRAGILE[name](Fragile()).workers(4, patience="1h")  # then all take part at once
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert stream(threads) == stream(inline)
    said = [str(each.message) for each in caught]
    assert len(said) == 1
    assert "runs one call at a time: a copy of it raised KeyError: 'a copy'" in said[0]


class Fault:
    """Raises once: at the call that ``calls_left`` counts down to."""

    def __init__(self) -> None:
        self.calls_left = -1
        self.lock = threading.Lock()

    def __call__(self) -> None:
        with self.lock:
            self.calls_left -= 1
            if self.calls_left == 0:
                raise OSError("a file is away for a moment")


class LastShard:
    """Keeps a shard; where that cannot be read, it says it has the new one and has the old one."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.number = -1
        self.shard = range(0)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        if self.number != index // 8:
            self.number = index // 8
            self.fault()
            self.shard = range(self.number * 8, self.number * 8 + 8)
        return self.shard[index % 8]


# Where the copy that raised was new, its original does not raise, and is called in its place from
# then on. A thread that makes copies before the epoch ends has the user warned of that.
@pytest.mark.filterwarnings("ignore:.* runs one call at a time. a copy of it raised OSError")
@pytest.mark.parametrize("point", ["dataset", "map"])
def test_a_copy_that_an_error_left_half_changed_is_not_called_again(point: str) -> None:
    expected = list(range(LENGTH))
    for calls in range(3, 10):  # some within what one thread does at a time
        fault = stoker.thread_safe(Fault())
        data: Any = LastShard(fault) if point == "dataset" else expected
        p = stoker.from_dataset(data, seed=0)
        if point == "map":
            p = p.map(LastShard(fault).__getitem__)
        p = p.batch(8).workers(2)
        p._cursor._autotuner.settle(2)  # from the first example on
        assert [i for batch in p for i in batch.tolist()] == expected
        fault.calls_left = calls
        assert [i for batch in p for i in batch.tolist()] == expected
        assert fault.calls_left < 0


def test_a_dataset_is_not_asked_again_for_what_it_raised_on() -> None:
    fault = Fault()
    p = stoker.from_dataset(LastShard(fault), seed=0).batch(52).workers(0)
    fault.calls_left = 3
    with pytest.raises(stoker.StageError, match="away for a moment") as raised:
        list(p)
    assert raised.value.index == 16


@pytest.mark.parametrize("point", ["dataset", "map", "echo", "batch map", "collate"])
def test_what_fails_alone_as_well_is_the_users_error(point: str) -> None:
    def fail(value: Any, rng: Any = None) -> Any:
        wait()
        if np.any(np.asarray(value) == 70):
            raise ZeroDivisionError("seventy")
        return value

    class Fails(Numbers):
        def __getitem__(self, index: int) -> Any:
            return fail(index)

    p = stoker.from_dataset(Fails() if point == "dataset" else range(LENGTH), seed=0)
    p = {
        "dataset": lambda: p.batch(4),
        "map": lambda: p.map(fail).batch(4),
        "echo": lambda: p.echo(2).random_map(fail).batch(4),
        "batch map": lambda: p.batch(4).map(fail),
        "collate": lambda: p.batch(4, collate=fail),
    }[point]()
    with pytest.raises(stoker.StageError, match="ZeroDivisionError: seventy") as raised:
        list(p.workers(8))
    if point in ("dataset", "map"):
        assert raised.value.index == 70


def test_bad_examples_are_skipped_as_ever() -> None:
    def fail(value: int) -> int:
        wait()
        if value % 10 == 0:
            raise ZeroDivisionError(value)
        return value

    p = stoker.from_dataset(range(LENGTH), seed=0).map(fail, on_error=99).batch(4).workers(8)
    for _ in range(2):
        found = sorted(x for batch in p for x in batch.tolist())
        assert found == [i for i in range(LENGTH) if i % 10]
        assert p.stats().skipped_examples == len(range(0, LENGTH, 10))


# -- pipelines within functions, forks, Ctrl-C


@pytest.mark.parametrize("can_be_copied", [True, False])
@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.timeout(120)
def test_a_pipeline_within_a_dataset_ends(can_be_copied: bool, is_new: bool) -> None:
    def inner() -> stoker.Pipeline[Any]:
        return stoker.from_dataset(Scratch(), seed=0).take(12).batch(4).workers(2)

    class Nested:
        def __init__(self) -> None:
            self.numbers: Any = None

        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> Any:
            if is_new or self.numbers is None:
                self.numbers = iter(inner().repeat())
            for _ in range(3):
                found = next(self.numbers)
            wait()
            return index, int(found.sum())

        def __reduce__(self) -> Any:
            if not can_be_copied:
                raise TypeError("no")
            return Nested, ()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*one call at a time")
        batches = list(stoker.from_dataset(Nested(), seed=0).batch(4).workers(4))
    assert [i for numbers, _ in batches for i in numbers] == list(range(24))
    assert {int(total) for _, totals in batches for total in totals} == {4 * (8 + 9 + 10 + 11)}


def test_a_child_that_is_forked_meanwhile_makes_copies_of_its_own(tmp_path: Path) -> None:
    body = """
    class Alone:
        def __len__(self): return 80
        def __getitem__(self, index):
            time.sleep(0.002)
            return index
        def __reduce__(self): raise TypeError("no")

    if __name__ == "__main__":
        faulthandler.cancel_dump_traceback_later()  # its thread is not there in a child
        warnings.simplefilter("ignore")
        codes = []
        pipeline = stoker.from_dataset(Alone(), seed=0).batch(4).workers(4)
        list(pipeline)
        for batch in pipeline:
            child = os.fork()
            if not child:
                other = stoker.from_dataset(Alone(), seed=0).map(lambda x: x).batch(4).workers(4)
                assert sum(int(each.sum()) for each in other) == sum(range(80))
                assert sum(int(each.sum()) for each in pipeline) == sum(range(80))
                os._exit(0)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            if len(codes) == 4:
                break
        say(json.dumps(codes))
    """
    assert run(tmp_path, body) == [[0] * 4]


def test_ctrl_c_leaves_no_lock_held() -> None:
    class Interrupts(Alone):
        def __call__(self, index: Any, rng: Any = None) -> Any:
            if index == 100:
                os.kill(os.getpid(), signal.SIGINT)
            return super().__call__(index)

    p = stoker.from_dataset(range(LENGTH), seed=0).map(Interrupts()).batch(4).workers(4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*one call at a time")
        with pytest.raises(KeyboardInterrupt):
            list(p)
        del p
        gc.collect()
        other = stoker.from_dataset(Alone(), seed=0).batch(4).workers(4)
        assert sum(map(sum, other)) == sum(range(LENGTH))


def test_a_resumed_stream_is_the_same_with_any_number_of_threads() -> None:
    def build(workers: int = 8) -> stoker.Pipeline[Any]:
        tokenizer = Tokenizer()
        p = stoker.from_dataset(Texts(tokenizer), seed=0).shuffle().take(40)
        p = p.map(lambda x: tokenizer(x["long"], 7)).echo(2).random_map(Buffered()).batch(8)
        return p.workers(workers)

    check_resume(build)
    whole = stream(build(0))
    assert stream(build(1)) == stream(build(8)) == whole


def test_a_tensor_that_is_given_other_memory_between_epochs_is_copied_anew(tmp_path: Path) -> None:
    """In a program of its own: memory that was freed must not be read."""
    body = """
        import torch

        class Held:
            def __init__(self):
                self.weights = torch.zeros(1_000_000)

            def __len__(self):
                return 200

            def __getitem__(self, index):
                return float(self.weights[index])

        held = Held()
        pipeline = stoker.from_dataset(held, seed=0).batch(4).workers(2)
        pipeline._cursor._autotuner.settle(2)
        found = [sum(float(batch.sum()) for batch in pipeline)]
        held.weights.data = torch.ones(1_000_000)
        found.append(sum(float(batch.sum()) for batch in pipeline))
        storage = torch.full((1_000_000,), 2.0).untyped_storage()
        held.weights.set_(storage, 0, (1_000_000,))
        del storage
        found.append(sum(float(batch.sum()) for batch in pipeline))
        say(json.dumps(found))
    """
    assert run(tmp_path, body) == [[0.0, 200.0, 400.0]]
