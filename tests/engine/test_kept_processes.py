"""Worker processes stay over epochs, see what new ones would see, and end with their pipeline."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import ImageFile
from torch.utils.data import SequentialSampler

import stoker
import strategies
from scripts import Watch, run, script
from strategies import few, shortened

OTHERS: set[int] = set()
FACTOR = 2
TABLE = {"a": [1]}
LOCAL = threading.local()
SETTINGS = types.ModuleType("settings_of_a_test")
SETTINGS.step = 1  # type: ignore[attr-defined]
sys.modules[SETTINGS.__name__] = SETTINGS


def added(x: float, table: dict[str, float] = {"a": 3.0}) -> float:  # noqa: B006
    return x + table["a"]


@functools.lru_cache
def read(name: str) -> int:
    return int(Path(name).read_text())


def write_anew(name: str) -> None:
    Path(name).write_text("18")
    read.cache_clear()


class Batches(SequentialSampler):
    """Has an attribute of a package's class."""

    batch_size: int

    def __init__(self) -> None:
        super().__init__([])


class Base:
    offsets: ClassVar[list[int]] = [1]
    late: int

    def __len__(self) -> int:
        return 12


SequentialSampler.batch_size = 1  # type: ignore[attr-defined]


class Dataset(Base):
    scale = 1

    def __init__(self, folder: Path) -> None:
        self.file = str(folder / "number")
        Path(self.file).write_text("1")
        self.numbers = {"of": [1, 2, 3]}
        self.array = np.zeros(100)
        self.large = np.zeros(3 << 20)  # threads share it
        self.tensor = torch.zeros(10)
        self.left_out = 1
        self.loader = Batches()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "left_out"}

    def __getitem__(self, index: int) -> list[float]:
        import settings_of_a_test as settings  # type: ignore[import-not-found]

        return [
            os.getpid(),
            index,
            self.scale,
            self.offsets[-1],
            getattr(self, "late", 0),
            self.numbers["of"][-1],
            self.array[7],
            self.large[7],
            float(self.tensor[3]),
            self.left_out,
            FACTOR,
            TABLE["a"][0],
            settings.step,
            added(0),
            read(self.file),
            bool(ImageFile.LOAD_TRUNCATED_IMAGES),
            int(os.environ.get("OF_A_TEST", "0")),
            len(os.getcwd()),
            torch.zeros(1).element_size(),
            getattr(LOCAL, "number", 0),
            self.loader.batch_size,
        ]


def close_over(held: list[int]) -> Callable[[list[float]], list[float]]:
    def put_on(example: list[float]) -> list[float]:
        return [*example, held[0]]

    return put_on


def epoch_of(pipeline: stoker.Pipeline) -> tuple[set[float], list[list[float]]]:
    """Return the processes that did it, and the examples that they made."""
    examples = [example for batch in pipeline for example in np.array(batch).T.tolist()]
    return {example[0] for example in examples}, [example[1:] for example in examples]


@pytest.fixture(autouse=True)
def others() -> None:
    """Take note of processes that there are, of a test that failed perhaps."""
    OTHERS.clear()
    OTHERS.update(resting())


def resting() -> list[int]:
    pids = {p.pid for p in multiprocessing.active_children() if p.pid is not None}
    return sorted(pids - OTHERS)


def plain(count: int = 12, seconds: float = 0.0) -> stoker.Pipeline:
    def slow(index: Any) -> Any:
        time.sleep(seconds)
        return [os.getpid(), index]

    data = stoker.from_arrays(np.arange(count), seed=0)
    return data.map(slow).batch(2).workers(2, kind="process")


# -- they stay


def test_they_stay_over_epochs_and_end_with_their_pipeline() -> None:
    pipeline = plain()
    epoch_of(pipeline)
    first = resting()
    assert len(first) == 2
    for _ in range(3):
        processes, examples = epoch_of(pipeline)
        assert processes <= set(first)
        assert examples == [[i] for i in range(12)]
        assert resting() == first
        assert pipeline.stats().new_processes is None
    gc.collect()
    gc.disable()  # it must not take the collector to end them
    try:
        del pipeline
        assert resting() == []
    finally:
        gc.enable()


def test_they_stay_under_repeat() -> None:
    pipeline = plain().repeat()
    iterator = iter(pipeline)
    seen: set[int] = set()
    for _ in range(20):  # more than three passes
        next(iterator)
        seen |= set(resting())
    assert len(seen) == 2
    iterator.close()
    assert resting() == []


def test_they_stay_behind_a_cut_of_steps() -> None:
    pipeline = plain(1000).steps(3)
    epoch_of(pipeline)
    first = resting()
    assert len(first) == 2
    assert epoch_of(pipeline)[0] <= set(first)
    assert resting() == first


def test_other_epochs_draw_as_new_processes_do() -> None:
    def draw(x: Any, rng: np.random.Generator) -> Any:
        return x + rng.random()

    def build(workers: int, kind: str) -> stoker.Pipeline:
        data = stoker.from_arrays(np.arange(30.0), seed=3).shuffle().echo(2)
        return data.random_map(draw).batch(4).workers(workers, kind=kind)

    kept, alone = build(2, "process"), build(0, "thread")
    for _ in range(3):
        of_kept = np.concatenate(list(kept)).tolist()
        assert of_kept == np.concatenate(list(alone)).tolist()
    assert kept.stats().new_processes is None


def test_an_epoch_that_is_left_early_ends_them_and_hands_nothing_on() -> None:
    pipeline = plain(200, 0.01)
    for _ in pipeline:
        break
    assert resting() == []
    assert epoch_of(pipeline)[1] == [[i] for i in range(200)]


def descriptors() -> list[str]:
    """Return what this process has open, and not what waits for the collector."""
    gc.collect()
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}").partition(":")[0])
    return sorted(found)


def test_descriptors_do_not_add_up_over_epochs() -> None:
    pipeline = plain()
    list(pipeline)
    before = descriptors()
    for _ in range(5):
        list(pipeline)
    after = descriptors()
    memory = "/memfd"  # of each request under way, once there was one: open, and mapped
    assert [each for each in after if each != memory] == [each for each in before if each != memory]
    assert after.count(memory) <= 2 * 2 * 4


def test_what_one_has_offered_to_a_cache_all_have_in_the_next_epoch(tmp_path: Path) -> None:
    log = tmp_path / "log"

    class Noting:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            with log.open("a") as file:
                file.write(f"{index}\n")
            return np.full(100, index)

    pipeline = stoker.from_dataset(Noting(), seed=0).shuffle().cache("16MiB").batch(4)
    pipeline = pipeline.workers(2, kind="process")
    reads: list[str] = []
    for epoch in range(4):
        assert sorted(int(row[0]) for batch in pipeline for row in batch) == [*range(40)]
        assert len(resting()) == 2
        assert not epoch or log.read_text().split() == reads
        reads = log.read_text().split()


# -- what they see

CHANGES: dict[str, Callable[[Dataset, list[int], pytest.MonkeyPatch], object]] = {
    "attribute": lambda d, held, m: setattr(d, "scale", 5),
    "class": lambda d, held, m: m.setattr(Dataset, "scale", 6),
    "class attribute that was not there": lambda d, held, m: m.setattr(
        Base, "late", 7, raising=False
    ),
    "list of a class": lambda d, held, m: m.setattr(Base, "offsets", [*Base.offsets, 9]),
    "in a list of a class": lambda d, held, m: Base.offsets.append(Base.offsets[-1] + 1),
    "in a list in a dict": lambda d, held, m: d.numbers["of"].append(9),
    "array": lambda d, held, m: d.array.fill(4),
    "large array": lambda d, held, m: d.large.fill(4),
    "tensor": lambda d, held, m: d.tensor.add_(1),
    "what pickling leaves out": lambda d, held, m: setattr(d, "left_out", 8),
    "global": lambda d, held, m: m.setitem(globals(), "FACTOR", 11),
    "in a global": lambda d, held, m: m.setitem(TABLE, "a", [12]),
    "in a global's list": lambda d, held, m: TABLE["a"].__setitem__(0, 13),
    "module": lambda d, held, m: m.setattr(SETTINGS, "step", 14),
    "function": lambda d, held, m: m.setitem(globals(), "added", lambda x: x + 15),
    "default": lambda d, held, m: m.setitem(added.__defaults__[0], "a", 16.0),  # type: ignore[index]
    "closure": lambda d, held, m: held.__setitem__(0, 17),
    "cached function": lambda d, held, m: write_anew(d.file),
    "package": lambda d, held, m: m.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True),
    "class of a package": lambda d, held, m: m.setattr(SequentialSampler, "batch_size", 20),
    "thread": lambda d, held, m: m.setattr(LOCAL, "number", 21, raising=False),
    "environment": lambda d, held, m: m.setenv("OF_A_TEST", "19"),
    "folder": lambda d, held, m: m.chdir("/"),
    "default type": lambda d, held, m: torch.set_default_dtype(torch.float64),
}


@pytest.mark.parametrize("change", CHANGES)
def test_they_see_a_change(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read.cache_clear()
    dataset, held = Dataset(tmp_path), [1]
    read(dataset.file)
    chain = stoker.from_dataset(dataset, seed=0).map(close_over(held)).batch(4)
    kept, alone = chain.workers(2, kind="process"), chain.workers(0)
    try:
        assert epoch_of(kept)[1] == epoch_of(chain.workers(1, kind="process"))[1]
        before = resting()
        first = epoch_of(kept)[1]
        assert resting() == before
        assert kept.stats().new_processes is None
        CHANGES[change](dataset, held, monkeypatch)
        seen = epoch_of(kept)[1]
        assert seen != first
        assert set(resting()).isdisjoint(before)
        assert "has changed" in str(kept.stats())
        assert seen == epoch_of(alone)[1]
    finally:
        torch.set_default_dtype(torch.float32)
        del Base.offsets[1:]
        TABLE["a"][0] = 1


def test_a_dataset_that_grows_is_seen() -> None:
    rows = list(range(8))
    pipeline = stoker.from_dataset(rows, seed=0).batch(4).workers(2, kind="process")
    for _ in range(3):
        assert np.concatenate(list(pipeline)).tolist() == rows
        rows.append(len(rows))


def look_anywhere(x: Any) -> Any:
    return x + globals()["FACTOR"]


def hand_on(x: Any) -> Any:
    return x + getattr(strategies, "F" + "EW", 0)


class Numbering:
    """Holds what has no copy."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return index


UNKNOWN: dict[str, tuple[Callable[[], stoker.Pipeline], str]] = {
    "globals": (lambda: stoker.from_arrays(np.arange(8)).map(look_anywhere), "globals"),
    "module": (lambda: stoker.from_arrays(np.arange(8)).map(hand_on), "the module strategies"),
    "generator": (lambda: stoker.from_dataset(Numbering(x for x in "ab")), "cannot be copied"),
    "parameter": (
        lambda: stoker.from_dataset(Numbering(torch.nn.Linear(2, 2))),
        "a torch parameter changes",
    ),
    "declared": (
        lambda: stoker.from_dataset(stoker.thread_safe(Numbering(1))),
        "declared with stoker.thread_safe",
    ),
    "large": (lambda: stoker.from_arrays(np.zeros((8, 20 << 20), np.uint8)), "too large"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_where_it_cannot_be_told_each_epoch_has_new_ones(what: str) -> None:
    build, says = UNKNOWN[what]
    pipeline = build().batch(4).workers(2, kind="process")
    for _ in range(2):
        assert sum(1 for _ in pipeline) == 2
        assert resting() == []
        assert says in (pipeline.stats().new_processes or "")


@few(4)
@given(st.lists(st.sampled_from(["", "add", "multiply", "grow"]), min_size=1, max_size=3))
def test_streams_are_equal_with_changes_in_between(changes: list[str]) -> None:
    class Growing:
        def __init__(self) -> None:
            self.rows = [np.arange(3) + i for i in range(9)]
            self.by = 1

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> Any:
            return self.rows[index] * self.by

    dataset = Growing()
    chain = stoker.from_dataset(dataset, seed=1).shuffle().echo(2).batch(4)
    pipelines = [chain.workers(0), chain.workers(2), chain.workers(2, kind="process")]
    for change in [*changes, ""]:
        inline, threads, processes = ([b.tolist() for b in each] for each in pipelines)
        assert inline == threads == processes
        if change == "add":
            dataset.rows[3] += 10
        elif change == "multiply":
            dataset.by += 1
        elif change == "grow":
            dataset.rows.append(np.arange(3) - 50)


# -- their end


@pytest.mark.parametrize("when", ["at rest", "at work"])
def test_after_a_kill_the_next_epoch_has_others(when: str) -> None:
    pipeline = plain(100, 0.01 if when == "at work" else 0.0)
    epoch_of(pipeline)
    killed, other = resting()
    with Watch([killed]) as watch:
        if when == "at rest":
            os.kill(killed, signal.SIGKILL)
        else:
            iterator = iter(pipeline)
            next(iterator)
            os.kill(killed, signal.SIGKILL)
            with pytest.raises(stoker.WorkerDied):
                list(iterator)
        assert watch.gone()
    assert epoch_of(pipeline)[1] == [[i] for i in range(100)]
    assert {killed, other}.isdisjoint(resting())


RESTING = """
    if __name__ == "__main__":
        pipeline = stoker.from_dataset(Examples(20), seed=0).batch(4).workers(2, kind="process")
        list(pipeline)
        pids = [p.pid for p in multiprocessing.active_children()]
        assert len(pids) == 2
"""


def test_sigkill_of_the_program_ends_them(tmp_path: Path) -> None:
    body = (
        RESTING
        + """
        say(json.dumps(pids))
        signal.pause()
    """
    )
    with script(tmp_path, body) as running, Watch(json.loads(running.line())) as watch:
        os.kill(running.pid, signal.SIGKILL)
        assert watch.gone()


def test_they_end_with_the_program(tmp_path: Path) -> None:
    body = (
        RESTING
        + """
        say(json.dumps(pids))
        while not os.path.exists(WATCHED):
            time.sleep(0.01)
    """
    )
    watched = tmp_path / "watched"
    body = body.replace("WATCHED", repr(str(watched)))
    with script(tmp_path, body) as running, Watch(json.loads(running.line())) as watch:
        watched.touch()
        assert running.finish() == (0, "", "")
        assert watch.gone()


def test_ctrl_c_between_two_epochs_does_not_end_them(tmp_path: Path) -> None:
    body = (
        RESTING
        + """
        for _ in range(2):
            try:
                os.killpg(0, signal.SIGINT)
                time.sleep(60)
            except KeyboardInterrupt:
                list(pipeline)
            assert pids == [p.pid for p in multiprocessing.active_children()]
        del pipeline
        say(json.dumps(left()["processes"]))
    """
    )
    assert run(tmp_path, body) == [[]]


@pytest.mark.parametrize("does", ["pass", "del pipeline", "assert len(list(pipeline)) == 5"])
def test_a_forked_child_leaves_them_to_its_parent(tmp_path: Path, does: str) -> None:
    body = (
        RESTING
        + f"""
        faulthandler.cancel_dump_traceback_later()  # its thread is not there in a child
        child = os.fork()
        if not child:
            {does}
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        list(pipeline)
        assert pids == [p.pid for p in multiprocessing.active_children()]
        assert pipeline.stats().new_processes is None
        say("0")
    """
    )
    assert run(tmp_path, body) == [0]


IMPORTING = """
class Scaled(Examples):
    scale = 1

    def __getitem__(self, index):
        return index * self.scale


class Locked(Scaled):
    def __init__(self):
        super().__init__(8)
        self.lock = multiprocessing.Lock()


if __name__ == "__main__":
    multiprocessing.set_start_method(METHOD)
    dataset = Scaled(8)
    pipeline = stoker.from_dataset(dataset).batch(4).workers(2, kind="process")

    def epoch(pipeline=pipeline):
        rows = [int(x) for batch in pipeline for x in batch]
        return rows, sorted(p.pid for p in multiprocessing.active_children())

    first, again = epoch(), epoch()
    assert first == again, (first, again)
    assert len(first[1]) == 2
    dataset.scale = 10
    changed = epoch()
    assert changed[0] == [10 * x for x in first[0]]
    assert set(changed[1]).isdisjoint(first[1])
    assert epoch() == changed
    del pipeline, epoch.__defaults__
    assert not left()["processes"]
    locked = stoker.from_dataset(Locked()).batch(4).workers(1, kind="process")
    list(locked)
    assert not left()["processes"]
    say(json.dumps(locked.stats().new_processes))
"""


@pytest.mark.parametrize("method", shortened(["forkserver", "spawn"], 1))
def test_those_that_import_the_program_stay_too(tmp_path: Path, method: str) -> None:
    (why,) = run(tmp_path, IMPORTING.replace("METHOD", repr(method)))
    assert "RuntimeError" in why
