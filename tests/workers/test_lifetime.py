"""Nothing outlives its owner, and no error arrives as a hang: real signals to real processes."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest

import stoker
from descriptors import open_descriptors
from scripts import Watch, script, shared_files
from strategies import Examples, Spec, built, frozen, jitter, one_in, shortened, stream

KINDS = [(0, "thread"), (2, "thread"), (2, "process")]
# For tests that start a program: where there is something to be left.
OF_THEIR_OWN = [pytest.param(0, "thread", marks=pytest.mark.full), *KINDS[1:]]


def left() -> tuple[list[str], list[int]]:
    threads = [t.name for t in threading.enumerate() if t.name.startswith("stoker")]
    return threads, [p.pid for p in multiprocessing.active_children() if p.pid is not None]


class Costly(Examples):
    """Takes long enough that threads are used."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        zlib.compress(bytes(100_000))
        return super().__getitem__(index)


def endless(workers: int, kind: str) -> stoker.Pipeline:
    chain = stoker.from_dataset(Costly(10**6), seed=0).shuffle().echo(2)
    return chain.random_map(jitter, on="x").batch(4).workers(workers, kind=kind)


# -- leaving early


def breaks(pipeline: stoker.Pipeline) -> None:
    for number, _ in enumerate(pipeline):
        if number == 10:
            break


def closes(pipeline: stoker.Pipeline) -> None:
    iterator = iter(pipeline)
    next(iterator)
    iterator.close()
    assert left() == ([], [])
    assert next(iterator, None) is None
    iterator.close()


def leaves_a_with(pipeline: stoker.Pipeline) -> None:
    with iter(pipeline) as iterator:
        next(iterator)


def fails_within_a_with(pipeline: stoker.Pipeline) -> None:
    with contextlib.suppress(KeyError), iter(pipeline) as iterator:
        next(iterator)
        raise KeyError


def never_asks(pipeline: stoker.Pipeline) -> None:
    iterator = iter(pipeline)
    del iterator


def never_asks_and_closes(pipeline: stoker.Pipeline) -> None:
    iter(pipeline).close()


LEAVING = [
    breaks, closes, leaves_a_with, fails_within_a_with, never_asks, never_asks_and_closes
]  # fmt: skip


@pytest.mark.parametrize(("workers", "kind"), KINDS)
@pytest.mark.parametrize("leave", LEAVING)
def test_a_loop_that_is_left_leaves_nothing(leave: Any, workers: int, kind: str) -> None:
    leave(endless(workers, kind))
    assert left() == ([], [])


@pytest.mark.parametrize(("workers", "kind"), KINDS)
def test_a_second_iterator_closes_the_first_which_says_so(workers: int, kind: str) -> None:
    pipeline = endless(workers, kind)
    first = iter(pipeline)
    next(first)
    second = iter(pipeline)
    with pytest.raises(RuntimeError, match="a second iterator over its pipeline has begun"):
        next(first)
    assert next(second, None) is not None
    assert pipeline.epoch == 1
    second.close()
    assert left() == ([], [])


@pytest.mark.parametrize(("workers", "kind"), one_in(3, KINDS))
def test_descriptors_do_not_add_up(workers: int, kind: str) -> None:
    def leave_early() -> None:
        for number, _ in enumerate(endless(workers, kind)):
            if number == 3:
                break

    leave_early()  # what is opened once and for all
    gc.collect()
    gc.disable()  # it must not take the collector to close them
    try:
        before = open_descriptors()
        for _ in range(4):
            leave_early()
        assert open_descriptors() <= before
    finally:
        gc.enable()


@pytest.mark.parametrize(("workers", "kind"), KINDS)
def test_runs_are_freed_without_the_collector(workers: int, kind: str) -> None:
    import weakref

    class Seen(list[Any]):
        pass

    data = Seen(range(40))
    alive = weakref.ref(data)
    gc.collect()
    gc.disable()
    try:
        pipeline = stoker.from_dataset(data, seed=0).echo(2).batch(4).workers(workers, kind=kind)
        for _ in pipeline:
            pass
        for _ in pipeline:
            break
        del pipeline, data, _
        assert alive() is None
    finally:
        gc.enable()


# -- errors


def fail_at(index: int) -> Any:
    def fn(x: Any) -> Any:
        if x["id"] == index:
            raise ArithmeticError("no good")
        return x

    return fn


@pytest.mark.parametrize(("workers", "kind"), KINDS)
@pytest.mark.parametrize("echoed", [False, True])
def test_an_exception_in_fn_is_raised_at_its_batch(workers: int, kind: str, echoed: bool) -> None:
    chain = stoker.from_dataset(Examples(40), seed=0)
    bad = chain.map(fail_at(17))
    good = chain.map(fail_at(-1))
    bad, good = [p.echo(2, pool=8) if echoed else p for p in (bad, good)]
    bad = bad.batch(4).workers(workers, kind=kind)
    whole = stream(good.batch(4).workers(0))
    ordinal = next(n for n, batch in enumerate(good.batch(4).workers(0)) if 17 in batch["id"])

    iterator = iter(bad)
    found = [frozen(next(iterator)) for _ in range(ordinal)]
    assert found == whole[:ordinal]
    with pytest.raises(stoker.StageError) as caught:
        next(iterator)
    state = bad.state_dict()
    del iterator
    assert left() == ([], [])  # the error does not keep it
    error = caught.value
    assert (error.stage, error.index, error.path, error.batch) == ("map(fn)", 17, None, None)
    assert type(error.__cause__) is ArithmeticError
    assert str(error) == "map(fn) failed on example 17: ArithmeticError: no good"
    if kind == "process":
        assert 'raise ArithmeticError("no good")' in error.__cause__.__notes__[0]

    # That state resumes behind that batch: here with the fault mended.
    mended = good.batch(4).workers(0)
    mended.load_state_dict(state)
    assert stream(mended) == whole[ordinal + 1 :]


@pytest.mark.parametrize(("workers", "kind"), KINDS)
@pytest.mark.parametrize("where", ["dataset", "random_map", "batch map", "collate", "one field"])
def test_errors_name_the_stage_and_what_failed(where: str, workers: int, kind: str) -> None:
    def fail(x: Any, rng: Any = None) -> Any:
        if where in ("batch map", "collate"):
            ids = x["id"] if where == "batch map" else [e["id"] for e in x]
            if 9 in ids:
                raise ArithmeticError("nine")
        elif (x if where == "one field" else x["id"]) == 9:
            raise ArithmeticError("nine")
        return x

    class Failing(Examples):
        def __getitem__(self, index: int) -> Any:
            if where == "dataset" and index == 9:
                raise ArithmeticError("nine")
            return super().__getitem__(index)

    chain = stoker.from_dataset(Failing(16), seed=0)
    expected = {
        "dataset": ("from_dataset(Failing)", 9, None),
        "random_map": ("random_map(fail)", 9, None),
        "one field": ("map(fail, on='id')", 9, None),
        "batch map": ("map(fail)", None, 2),
        "collate": ("batch(4)", 9, 2),
    }[where]
    if where == "random_map":
        chain = chain.random_map(fail)
    if where == "one field":
        chain = chain.map(fail, on="id")
    chain = chain.batch(4, collate=fail if where == "collate" else None)
    if where == "batch map":
        chain = chain.map(fail)
    iterator = iter(chain.workers(workers, kind=kind))
    next(iterator), next(iterator)
    with pytest.raises(stoker.StageError, match="ArithmeticError: nine") as caught:
        next(iterator)
    error = caught.value
    assert (error.stage, error.index, error.batch) == expected
    assert type(error.__cause__) is ArithmeticError
    assert "\n" not in str(error)
    assert next(iterator, None) is not None
    assert next(iterator, None) is None
    assert left() == ([], [])


@pytest.mark.parametrize(("workers", "kind"), KINDS)
@pytest.mark.parametrize("stop", [StopIteration, GeneratorExit, SystemExit, KeyboardInterrupt])
def test_no_exception_of_fn_ends_an_epoch_silently(workers: int, kind: str, stop: Any) -> None:
    def fn(x: Any) -> Any:
        if x["id"] == 9:
            raise stop
        return x

    pipeline = stoker.from_dataset(Examples(16), seed=0).map(fn).batch(4)
    iterator = iter(pipeline.workers(workers, kind=kind))
    with pytest.raises((stop, stoker.StokerError)) as caught:
        for _ in iterator:
            pass
    assert caught.type is not StopIteration
    goes_on = issubclass(caught.type, stoker.StageError)
    assert (next(iterator, None) is not None) == goes_on
    del caught, iterator
    assert left() == ([], [])


@pytest.mark.parametrize(("workers", "kind"), KINDS)
def test_exceptions_that_cannot_be_pickled_or_rebuilt_are_told(workers: int, kind: str) -> None:
    class Awkward(Exception):
        def __init__(self, one: int, two: Any) -> None:
            super().__init__(f"{one} and a function")
            self.two = two

    def fn(x: Any) -> Any:
        raise Awkward(1, lambda: 2)

    pipeline = stoker.from_dataset(Examples(4), seed=0).map(fn).batch(2)
    with pytest.raises(stoker.StageError, match="1 and a function") as caught:
        list(pipeline.workers(workers, kind=kind))
    assert caught.value.index == 0


def test_errors_behind_the_device_are_named() -> None:
    def fail(x: Any) -> Any:
        raise ArithmeticError("no good")

    for chain in (
        stoker.from_dataset(Examples(8)).batch(4).to_torch().map(fail),
        stoker.from_dataset(Examples(8)).batch(4).echo(2).map(fail),
        stoker.from_dataset(Examples(8)).map(fail).batch(4).to_torch().echo(2),
    ):
        with pytest.raises(stoker.StageError, match=r"map\(fail\) failed on .*: no good"):
            list(chain)
        assert left() == ([], [])


# -- dying workers


@pytest.mark.parametrize("busy", [False, True])
def test_a_killed_worker_is_told_and_leaves_nothing(busy: bool) -> None:
    armed, started = multiprocessing.Event(), multiprocessing.Event()

    def stuck(x: Any) -> Any:
        if armed.is_set():
            started.set()
            threading.Event().wait()
        return x

    def kill() -> None:
        assert not busy or started.wait(60)
        for victim in victims:
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)

    # A window of two batches at least: ask for as many as surely are there.
    chain = stoker.from_dataset(Examples(10**6), seed=0).map(stuck)
    pipeline = chain.batch(4).workers(2, kind="process")
    iterator = iter(pipeline)
    next(iterator)
    if busy:
        armed.set()
    victims = multiprocessing.active_children()
    assert len(victims) == 2
    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(stoker.WorkerDied, match=r"killed by signal SIGKILL.*memory") as caught:
        for _ in iterator:
            pass
    killer.join()
    assert str(caught.value).count("\n") == 0
    assert next(iterator, None) is None
    del caught
    assert left() == ([], [])
    if not busy:  # and the pipeline can go on from where it was
        state = pipeline.state_dict()
        pipeline.load_state_dict(state)
        assert int(next(iter(pipeline))["id"][0]) == 4 * state["step"]


def test_a_worker_that_exits_is_told() -> None:
    def leave(x: Any) -> Any:
        os._exit(3)

    pipeline = stoker.from_dataset(Examples(40)).map(leave).batch(4).workers(1, kind="process")
    with pytest.raises(stoker.WorkerDied, match="exit code 3"):
        list(pipeline)
    assert left() == ([], [])


# -- Ctrl-C and SIGKILL, in processes of their own

LOOP = """
def augment(x, rng):
    return x + rng.random()


if __name__ == "__main__":
    for _ in stoker.from_dataset(Examples(8)).batch(4).workers({workers}, kind={kind!r}):
        pass
    gc.collect()
    before = left()
    chain = stoker.from_dataset(Examples(seconds={seconds}), seed=0).shuffle().echo(2)
    pipeline = chain.random_map(augment, on="x").batch(16).workers({workers}, kind={kind!r})
"""


def loop(workers: int, kind: str, seconds: float = 0.0) -> str:
    return LOOP.format(workers=workers, kind=kind, seconds=seconds)


@pytest.mark.interrupts
@pytest.mark.parametrize(("workers", "kind"), one_in(3, KINDS))
@pytest.mark.parametrize("seconds", shortened([0.0, 0.01], 1))
def test_ctrl_c_ends_the_iteration_and_leaves_nothing(
    tmp_path: Path, workers: int, kind: str, seconds: float
) -> None:
    rest = """
    try:
        for number, batch in enumerate(pipeline):
            if number == 3:
                say("READY")
    except KeyboardInterrupt:
        pass
    else:
        say("no interrupt")
    del batch
    yielded = pipeline.state_dict()["step"]
    for _ in pipeline:
        break
    del _
    after = left()
    gc.collect()
    say(json.dumps([before, after, yielded]))
    """
    with script(tmp_path, loop(workers, kind, seconds) + rest) as running:
        assert running.line() == "READY"
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to the workers, too
        code, out, errors = running.finish()
    assert (code, errors) == (0, "")
    before, after, yielded = json.loads(out)
    assert after == before
    assert yielded >= 4


@pytest.mark.interrupts
@pytest.mark.parametrize(("workers", "kind"), OF_THEIR_OWN)
def test_ctrl_c_that_nobody_catches_ends_the_program_quietly(
    tmp_path: Path, workers: int, kind: str
) -> None:
    rest = """
    for number, _ in enumerate(pipeline):
        if number == 3:
            say(json.dumps([p.pid for p in multiprocessing.active_children()]))
    """
    with script(tmp_path, loop(workers, kind) + rest) as running:
        pids = json.loads(running.line())
        assert len(pids) == (workers if kind == "process" else 0)
        with Watch(pids) as watch:
            os.killpg(running.pid, signal.SIGINT)
            code, _, errors = running.finish()
            assert watch.gone()
    assert code == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert errors.count("Traceback") == 1
    assert "Exception ignored" not in errors


@pytest.mark.interrupts
@pytest.mark.parametrize(("workers", "kind"), KINDS[1:])
def test_ctrl_c_within_slow_work_does_not_wait_for_it(
    tmp_path: Path, workers: int, kind: str
) -> None:
    body = """
    def stuck(x):
        if x["id"] == 20:
            say("READY")
            time.sleep(1000)
        return x


    if __name__ == "__main__":
        chain = stoker.from_dataset(Examples()).map(stuck).batch(4)
        try:
            for _ in chain.workers(WORKERS, kind='KIND'):
                pass
        except KeyboardInterrupt:
            say("interrupted")
    """.replace("WORKERS", str(workers)).replace("KIND", kind)
    with script(tmp_path, body) as running:
        assert running.line() == "READY"
        os.killpg(running.pid, signal.SIGINT)
        code, out, errors = running.finish()
    assert (code, out, errors) == (0, "interrupted\n", "")


STUCK = """
def stuck(x):
    if {busy} and x["id"] >= 100:
        say("STUCK")
        time.sleep(1000)
    return x
"""


@pytest.mark.parametrize("method", shortened(["fork", "spawn", "forkserver"], 1))
@pytest.mark.parametrize("busy", [False, True])
def test_sigkill_of_the_program_takes_its_workers_along(
    tmp_path: Path, method: str, busy: bool
) -> None:
    rest = """

if __name__ == "__main__":
    multiprocessing.set_start_method("METHOD")
    pipeline = stoker.from_dataset(Examples()).map(stuck).batch(50).workers(2, kind="process")
    iterator = iter(pipeline)
    say(json.dumps([p.pid for p in multiprocessing.active_children()]))
    next(iterator)
    say("READY")
    if not BUSY:
        signal.pause()
    for _ in iterator:
        pass
""".replace("METHOD", method).replace("BUSY", str(busy))
    with script(tmp_path, STUCK.format(busy=busy) + rest) as running:
        pids = json.loads(running.line())
        assert len(pids) == 2
        said = {running.line() for _ in range(3 if busy else 1)}
        assert said == ({"READY", "STUCK"} if busy else {"READY"})
        own = set().union(*map(shared_files, [running.pid, *pids]))
        with Watch(pids) as watch:
            os.kill(running.pid, signal.SIGKILL)
            assert watch.gone()
        running.process.wait()
    assert not any(os.path.exists(path) for path in own)


def test_sigkill_of_the_program_takes_workers_of_two_pipelines_along(tmp_path: Path) -> None:
    body = """
    if __name__ == "__main__":
        pipelines = [
            stoker.from_dataset(Examples()).batch(16).workers(2, kind="process") for _ in range(2)
        ]
        iterators = [iter(pipeline) for pipeline in pipelines]
        for iterator in iterators:
            next(iterator)
        say(json.dumps([p.pid for p in multiprocessing.active_children()]))
        signal.pause()
    """
    with script(tmp_path, body) as running:
        pids = json.loads(running.line())
        assert len(pids) == 4
        with Watch(pids) as watch:
            os.kill(running.pid, signal.SIGKILL)
            assert watch.gone()


@pytest.mark.parametrize("busy", [False, True])
def test_workers_started_in_a_thread_outlive_neither_it_nor_the_program(
    tmp_path: Path, busy: bool
) -> None:
    rest = """

def work():
    global iterator
    chain = stoker.from_dataset(Examples()).map(stuck).batch(25)
    iterator = iter(chain.workers(2, kind="process"))
    next(iterator)


if __name__ == "__main__":
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    pids = [p.pid for p in multiprocessing.active_children()]
    next(iterator)  # the workers do not die with the thread that started them
    next(iterator)
    say(json.dumps(pids))
    signal.pause()
"""
    with script(tmp_path, STUCK.format(busy=busy) + rest) as running:
        said = [running.line() for _ in range(3 if busy else 1)]
        (pids,) = [json.loads(line) for line in said if line != "STUCK"]
        assert len(pids) == 2
        with Watch(pids) as watch:
            os.kill(running.pid, signal.SIGKILL)
            assert watch.gone()


@pytest.mark.parametrize(("workers", "kind"), OF_THEIR_OWN)
def test_a_program_may_end_in_the_middle_of_an_epoch(
    tmp_path: Path, workers: int, kind: str
) -> None:
    watched = tmp_path / "watched"
    rest = f"""
    iterator = iter(pipeline)
    next(iterator)
    say(json.dumps([p.pid for p in multiprocessing.active_children()]))
    while not os.path.exists({str(watched)!r}):
        time.sleep(0.01)
    """
    with script(tmp_path, loop(workers, kind, 0.001) + rest) as running:
        pids = json.loads(running.line())
        with Watch(pids) as watch:
            watched.touch()
            assert running.finish() == (0, "", "")
            assert watch.gone()


@pytest.mark.parametrize(("workers", "kind"), OF_THEIR_OWN)
def test_an_error_in_the_loop_that_nobody_catches_ends_the_program(
    tmp_path: Path, workers: int, kind: str
) -> None:
    rest = """
    for number, batch in enumerate(pipeline):
        if number == 3:
            raise LookupError("in the training step")
    """
    with script(tmp_path, loop(workers, kind, 0.001) + rest) as running:
        code, _, errors = running.finish()
    assert code == 1
    assert errors.rstrip().endswith("LookupError: in the training step")
    assert errors.count("Traceback") == 1


def test_built_pipelines_hold_nothing(tmp_path: Path) -> None:
    before = open_descriptors()
    pipelines = [built(Spec(20, 4), 2, "process") for _ in range(20)]
    assert open_descriptors() <= before
    assert left() == ([], [])
    assert len(pipelines) == 20
