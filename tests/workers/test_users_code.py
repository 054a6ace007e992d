"""Users' Python code at the defaults: inline where it is cheap, in worker processes where not."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker
from scripts import run, script
from stoker.basics.resources import usable_cores
from strategies import one_in, shortened

LENGTH = 60

cheap = pytest.mark.no_cover  # which makes cheap code several times as slow


def spin(seconds: float) -> None:
    """Compute, as Python code does; by the thread's own clock, so that others do not count."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Scratch:
    """Is wrong where threads share it. An example says which process made it."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.kept = [0]
        self.calls = 0

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        self.kept[0] = index
        self.calls += 1
        spin(self.seconds)
        return {"x": self.kept[0], "pid": os.getpid()}


class Buffered:
    """A function that writes to a buffer of its own; costs two milliseconds."""

    def __init__(self, seconds: float = 0.002) -> None:
        self.seconds = seconds
        self.buffer: list[Any] = [None]

    def __call__(self, value: Any, *rng: np.random.Generator) -> Any:
        self.buffer[0] = value
        spin(self.seconds)
        made = np.asarray(self.buffer[0])
        return made + rng[0].random() if rng else made


def makers(pipeline: stoker.Pipeline[Any]) -> set[int]:
    """Return the processes that made an epoch, behind a check of what they made."""
    found, pids = [], set()
    for batch in pipeline:
        found += batch["x"].tolist()
        pids |= set(batch["pid"].tolist())
    assert found == list(range(LENGTH))
    return pids


def decided_once(attempt: Callable[[], bool]) -> bool:
    """Whether one of three attempts decides so: other programs may slow the row that is timed."""
    return any(attempt() for _ in range(3))


def test_costly_code_never_runs_in_the_training_process() -> None:
    data = Scratch(0.001)
    p = stoker.from_dataset(data).batch(4)
    for _ in range(2):
        pids = makers(p)
        assert os.getpid() not in pids
        assert 1 <= len(pids) <= p.stats().workers
        assert multiprocessing.active_children() == []
    assert data.calls == 0


def test_cheap_code_runs_in_the_training_process_from_then_on() -> None:
    data = Scratch()
    p = stoker.from_dataset(data).batch(4)
    assert os.getpid() in makers(p)
    assert p.stats().workers == 0
    calls = data.calls
    assert calls > 0
    data.seconds = 0.001  # what was decided stays
    assert makers(p) == {os.getpid()}
    assert data.calls == calls + LENGTH
    assert multiprocessing.active_children() == []


@cheap
def test_seeds_before_each_call_make_no_code_costly() -> None:
    """In processes they take longer than a cheap example, inline they are not needed."""

    class Pairs:
        def __len__(self) -> int:
            return 4096

        def __getitem__(self, index: int) -> Any:
            return index, index % 10

    def stays_inline() -> bool:
        p = stoker.from_dataset(Pairs()).batch(128)
        assert np.concatenate([numbers for numbers, _ in p]).tolist() == list(range(4096))
        return p.stats().workers == 0

    assert decided_once(stays_inline)


def test_each_epoch_sees_what_the_program_holds_then() -> None:
    scales = [1]

    def scaled(value: Any) -> Any:
        spin(0.002)
        return value * scales[0]

    p = stoker.from_arrays(np.arange(20)).map(scaled).batch(4)
    for scale in (1, 3, 10):
        scales[0] = scale
        assert np.concatenate(list(p)).tolist() == [scale * i for i in range(20)]
    assert p.stats().workers > 0


def test_a_loop_that_computes_has_a_core_until_it_waits() -> None:
    p = stoker.from_dataset(Scratch(0.002)).batch(4)
    all_of_them = usable_cores()
    one_fewer = max(1, all_of_them - 1)
    for computes_s, workers in [(0.05, all_of_them), (0.05, one_fewer), (0, one_fewer)]:
        for _ in p:
            spin(computes_s)
        assert p.stats().workers == workers
    for _ in p:
        spin(0.05)
    assert p.stats().workers == all_of_them


def test_an_epoch_of_one_batch_is_enough_for_no_decision_and_right() -> None:
    p = stoker.from_dataset(Scratch(0.001)).batch(LENGTH)
    for _ in range(4):
        assert os.getpid() not in makers(p)


def test_a_run_that_is_left_early_leaves_nobody() -> None:
    p = stoker.from_dataset(Scratch(0.001)).batch(2)
    for count in (0, 1, 7):
        with iter(p) as batches:
            for _ in range(count):
                next(batches)
        assert multiprocessing.active_children() == []


@pytest.mark.full
def test_waiting_examples_have_more_processes_than_cores_but_for_a_number_of_the_users() -> None:
    def waiting(value: Any) -> Any:
        time.sleep(0.004)
        return value

    p = stoker.from_arrays(np.arange(200)).map(waiting).batch(10)
    assert np.concatenate(list(p)).tolist() == list(range(200))
    assert p.stats().workers == 16
    two = p.workers(2)
    assert np.concatenate(list(two)).tolist() == list(range(200))
    assert two.stats().workers == 2


class Texts:
    """Of 60 KB each: a request with some of them is larger than a pipe."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> str:
        return f"{index:04}" * 15_000


def longer(text: str) -> str:
    time.sleep(0.004)
    return text + "a"


@stoker.thread_safe
def as_they_are(examples: list[Any]) -> list[Any]:
    return examples


@pytest.mark.timeout(120)
def test_large_values_that_go_both_ways_at_once_arrive() -> None:
    """A process reads no request while it waits for a thread to read its answer."""
    p = stoker.from_dataset(Texts(), seed=0).echo(2, pool=32).map(longer)
    for _ in range(3):
        texts = [
            text
            for batch in p.batch(16, collate=as_they_are).workers(1, kind="process")
            for text in batch
        ]
        assert sorted(texts) == sorted(longer(Texts()[n]) for n in range(64) for _ in range(2))


def numbers() -> stoker.Pipeline[Any]:
    return stoker.from_arrays(np.arange(float(LENGTH)), seed=0).shuffle()


def by_closure() -> Callable[[Any], Any]:
    buffered = Buffered()
    return lambda x: buffered(x)


CHAINS: dict[str, Callable[[], stoker.Pipeline[Any]]] = {
    "map": lambda: numbers().map(Buffered()).batch(4),
    "closure": lambda: numbers().map(by_closure()).batch(4),
    "random map": lambda: numbers().random_map(Buffered()).batch(4),
    "filter": lambda: numbers().filter(lambda x: Buffered()(x) % 3 == 0).batch(4),
    "collate": lambda: numbers().batch(4, collate=Buffered(0.008)),
    "batch map": lambda: numbers().batch(4).random_map(Buffered(0.008)),
    "echo": lambda: numbers().map(Buffered()).echo(2).random_map(Buffered()).batch(4),
    "echo, batches": lambda: numbers().batch(4).echo(2).random_map(Buffered(0.008)),
    "ours before an echo": lambda: numbers().echo(2).random_map(Buffered()).batch(4),
    "cache": lambda: numbers().map(Buffered()).cache("1MiB").map(Buffered()).batch(4),
    "mixture": lambda: stoker.mix([numbers().map(Buffered()), numbers()], weights=[2, 1]).batch(4),
    "stream": lambda: (
        stoker.from_iterable(lambda: iter(np.arange(float(LENGTH))), seed=0)
        .shuffle(buffer=8)
        .map(Buffered())
        .batch(4)
    ),
}


@pytest.mark.parametrize("name", one_in(4, CHAINS))
def test_the_stream_is_that_of_the_training_process_alone(name: str) -> None:
    def has_workers() -> bool:
        inline, p = CHAINS[name]().workers(0), CHAINS[name]()
        for _ in range(2):
            found, expected = list(p), list(inline)
            assert [batch.tolist() for batch in found] == [batch.tolist() for batch in expected]
            assert len(found) >= 5
        return p.stats().workers > 0

    assert decided_once(has_workers)


@pytest.mark.full
def test_it_resumes_whatever_made_it() -> None:
    def build(workers: int | None) -> stoker.Pipeline[Any]:
        p = numbers().map(Buffered()).echo(2).random_map(Buffered()).batch(4)
        return p if workers is None else p.workers(workers)

    expected = [batch.tolist() for batch in build(0)]
    for first, second in ((None, 0), (0, None), (None, None)):
        p, rest = build(first), build(second)
        with iter(p) as batches:
            begun = [next(batches).tolist() for _ in range(11)]
            rest.load_state_dict(json.loads(json.dumps(p.state_dict())))
        assert begun + [batch.tolist() for batch in rest] == expected


@cheap
def test_within_a_worker_process_it_stays_inline_and_says_so_where_it_is_costly() -> None:
    def inner(value: Any) -> Any:
        assert decided_once(lambda: told(0.0) == 0)
        assert decided_once(lambda: told(0.001) == 1)
        return value

    def told(seconds: float) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert makers(stoker.from_dataset(Scratch(seconds)).batch(4)) == {os.getpid()}
        return sum("worker process" in str(each.message) for each in caught)

    p = stoker.from_arrays(np.arange(2)).map(inner).batch(1).workers(1, kind="process")
    assert np.concatenate(list(p)).tolist() == [0, 1]


IMPORTING = """
def costly(x):
    end = time.thread_time() + 0.001
    while time.thread_time() < end:
        pass
    return x + os.getpid() * 1000


def pids(**options):
    p = stoker.from_arrays(np.arange(60)).map(options.get("fn", costly)).batch(4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = np.concatenate(list(p))
    assert (found % 1000).tolist() == list(range(60))
    inline = set((found // 1000).tolist()) == {os.getpid()}
    return inline, [str(each.message) for each in caught]
"""


@pytest.mark.parametrize("method", shortened(["spawn", "forkserver"], 1))
def test_where_processes_import_the_program(tmp_path: Path, method: str) -> None:
    body = f"""
    if __name__ == "__main__":
        multiprocessing.set_start_method({method!r})
        say(json.dumps([pids(), pids(fn=lambda x: costly(x))]))
    """
    ((guarded, by_lambda),) = run(tmp_path, IMPORTING + textwrap.dedent(body))
    assert guarded == [False, []]
    inline, (told,) = by_lambda
    assert inline
    assert "map(<lambda>)" in told
    assert "set_start_method('fork')" in told
    assert "stoker.thread_safe" in told


@pytest.mark.parametrize("method", shortened(["spawn", "forkserver"], 1))
def test_a_script_without_a_guard_runs_as_it_would_without_workers(
    tmp_path: Path, method: str
) -> None:
    body = f"""
    multiprocessing.set_start_method({method!r})
    say(json.dumps(pids()))
    """
    ((inline, (told,)),) = run(tmp_path, IMPORTING + textwrap.dedent(body))
    assert inline
    assert 'if __name__ == "__main__"' in told
    assert "script.py" in told


@pytest.mark.parametrize("method", shortened(["forkserver", "spawn"], 1))
def test_asked_for_processes_it_is_an_error_of_a_few_lines(tmp_path: Path, method: str) -> None:
    body = f"""
    multiprocessing.set_start_method({method!r})
    list(stoker.from_arrays(np.arange(60)).map(costly).batch(4).workers(2, kind="process"))
    """
    with script(tmp_path, IMPORTING + textwrap.dedent(body)) as running:
        code, _, errors = running.finish()
    assert code == 1
    lines = errors.splitlines()
    assert 'if __name__ == "__main__"' in lines[-1]
    assert len(lines) < 12


@pytest.mark.parametrize("method", ["fork", *shortened(["spawn", "forkserver"], 0)])
def test_a_sigterm_to_the_group_is_the_programs_own_affair(tmp_path: Path, method: str) -> None:
    body = f"""
    if __name__ == "__main__":
        multiprocessing.set_start_method({method!r})
        heard = []
        signal.signal(signal.SIGTERM, lambda *_: heard.append(os.getpid()))
        p = stoker.from_dataset(Examples(24)).map(costly, on="id").batch(4)
        with iter(p.workers(2, kind="process")) as batches:
            first = next(batches)
            os.killpg(0, signal.SIGTERM)
            made = [first, *batches]
        assert sum(len(batch["id"]) for batch in made) == 24
        say(json.dumps(heard == [os.getpid()]))
        unfinished = iter(p.workers(2, kind="process"))
        next(unfinished)  # the program ends at once all the same
    """
    assert run(tmp_path, IMPORTING + textwrap.dedent(body)) == [True]


def test_a_process_that_the_program_forked_does_without_a_forkserver(tmp_path: Path) -> None:
    body = """
    if __name__ == "__main__":
        multiprocessing.set_start_method("forkserver")
        say(json.dumps(pids()))
        if child := os.fork():
            os.waitpid(child, 0)
        else:
            say(json.dumps(pids()))
            os._exit(0)
    """
    parents, (inline, (told,)) = run(tmp_path, IMPORTING + textwrap.dedent(body))
    assert parents == [False, []]
    assert inline
    assert "worker process 1 of 1 cannot be started" in told


def test_where_no_second_process_starts_the_first_goes_on(tmp_path: Path) -> None:
    body = """
    import tempfile

    def slow(value):
        time.sleep(0.01)
        return value

    if __name__ == "__main__":
        p = stoker.from_arrays(np.arange(60)).map(slow).batch(4).workers(2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batches = iter(p)  # this starts the first
            multiprocessing.set_start_method("forkserver", force=True)
            tempfile.tempdir = "/nowhere"  # where a forkserver would make its socket
            count = len(list(batches))
        told = [str(each.message) for each in caught if each.category is UserWarning]
        say(json.dumps([count, told, p.stats().workers]))
    """
    ((count, (told,), workers),) = run(tmp_path, textwrap.dedent(body))
    assert (count, workers) == (15, 1)
    assert told.startswith("one worker process runs your Python code: ")
    assert "/nowhere" in told


def test_a_fork_that_would_hang_polars_is_not_made(tmp_path: Path) -> None:
    body = """
    import polars

    multiprocessing.set_start_method("fork")

    table = polars.DataFrame({"n": list(range(100_000))})
    table.group_by("n").len()  # by threads, which a forked process lacks

    def counted(x):
        return costly(x) + 0 * len(table.group_by("n").len())

    say(json.dumps(pids(fn=counted)))
    """
    ((inline, (told,)),) = run(tmp_path, IMPORTING + textwrap.dedent(body))
    assert inline
    assert "map(counted) is defined where Polars is imported" in told
    assert "set_start_method('forkserver')" in told


def test_what_remembers_is_told_by_its_name() -> None:
    class Counts:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, value: Any) -> Any:
            self.calls += 1
            return value + self.calls

    p = stoker.from_arrays(np.arange(60)).map(Counts()).batch(4)
    with pytest.warns(UserWarning, match=r"map\(Counts\): an example comes out different behind"):
        list(p)


@cheap
def test_what_only_draws_is_not() -> None:
    class Draws:
        def __init__(self) -> None:
            self.rng = np.random.default_rng(0)
            self.kept: dict[int, Any] = {}

        def __call__(self, value: Any) -> Any:
            self.kept[int(value)] = self.kept.get(int(value), value)
            return self.kept[int(value)] + self.rng.random() + random.random()

    def build() -> stoker.Pipeline[Any]:
        return stoker.from_arrays(np.arange(60), seed=0).map(Draws()).batch(4)

    expected = [batch.tolist() for batch in build().workers(0)]
    assert [batch.tolist() for batch in build()] == expected


@cheap
def test_nor_is_it_behind_an_epoch_that_was_left() -> None:
    """The comparison is then the first that a new process is asked for."""

    def draws(value: Any) -> Any:
        until = time.process_time() + 0.001
        while time.process_time() < until:
            pass
        return value + random.random()

    p = stoker.from_arrays(np.arange(256), seed=0).map(draws).batch(16)
    next(iter(p))
    assert len(list(p)) == 16  # a warning would be an error


def held(value: Any) -> Any:
    return value, threading.Lock()


def on_device(value: Any, parent: int = os.getpid()) -> Any:
    """A forked process cannot use CUDA once its parent has: torch raises this in any function."""
    if os.getpid() != parent:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")
    return value, None


@cheap
@pytest.mark.parametrize("seconds", [0.0, 0.001])
@pytest.mark.parametrize(
    ("fn", "why"), [(held, "cannot be sent from a process"), (on_device, "it uses CUDA")]
)
def test_what_no_process_can_do_stays(fn: Any, why: str, seconds: float) -> None:
    def timed(value: Any) -> Any:
        spin(seconds)
        return fn(value)

    def says_so() -> list[bool]:
        p = stoker.from_arrays(np.arange(60)).map(timed).batch(4, collate=list)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert [int(x) for batch in p for x, _ in batch] == list(range(60))
        # Python itself says, from 3.12 on, that a fork loses threads.
        told = [str(each.message) for each in caught if each.category is not DeprecationWarning]
        return [why in each for each in told]

    assert decided_once(lambda: says_so() == [True] * bool(seconds))


class Meeting:
    """The first example of each of two batches waits for the other's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index % 4 == 0:
            (self.folder / str(index)).touch()
            end = time.monotonic() + 10
            while len(list(self.folder.iterdir())) < 2:
                if time.monotonic() > end:
                    raise TimeoutError("the other batch has not begun")
                time.sleep(0.01)
        return index


def test_no_process_waits_for_the_first_batch_of_another(tmp_path: Path) -> None:
    """Now and then both batches are one process's: of its two requests one waits."""
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        p = stoker.from_dataset(Meeting(folder)).batch(4).workers(2, kind="process")
        with contextlib.suppress(stoker.StageError):
            assert np.concatenate(list(p)).tolist() == list(range(8))
            return
    pytest.fail("the other batch has not begun")


@pytest.mark.parametrize("kind", [None, "process"])
def test_examples_that_the_cache_has_come_from_there_and_all_others_from_processes(
    tmp_path: Path, kind: Any
) -> None:
    """Also where it has some of them. Nobody calls users' code in the training process."""
    data = Scratch(0.002)
    names = [f"{n}" for n in range(LENGTH)]
    for name in names:
        (tmp_path / name).write_text(name)

    def read(item: Any) -> Any:
        return {"x": np.full(3_000, data[int(item.data)]["x"]), "pid": os.getpid()}

    plain = stoker.from_arrays(np.arange(LENGTH), seed=0).shuffle().batch(4)
    orders = [np.concatenate(list(plain)).tolist() for _ in range(3)]
    numbered = stoker.from_dataset(data, seed=0)
    files = stoker.from_files([tmp_path / name for name in names], seed=0).map(read)
    for source, room in ((numbered, "8MiB"), (files, "8MiB"), (files, "1MiB")):
        p = source.cache(room).shuffle().batch(4).workers(2, kind=kind)
        counts = []
        for epoch in range(3):
            p.set_epoch(epoch)
            found = list(p)
            numbers = np.concatenate([np.reshape(each["x"], (4, -1))[:, 0] for each in found])
            assert numbers.tolist() == orders[epoch]
            assert os.getpid() not in np.concatenate([each["pid"] for each in found])
            cache = p.stats().cache
            assert cache is not None
            counts.append((cache.hits, cache.misses))
        assert all(hits + misses == LENGTH for hits, misses in counts)
        if room == "8MiB":
            assert counts == [(0, LENGTH), (LENGTH, 0), (LENGTH, 0)]
            with iter(p) as batches:  # nobody asks the processes
                next(batches)
                for process in multiprocessing.active_children():
                    process.kill()
                    process.join()
                assert len(list(batches)) == LENGTH // 4 - 1
    assert data.calls == 0
