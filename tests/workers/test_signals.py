"""What a signal handler raises is the program's: no stage's failure, no skip, not delayed."""

from __future__ import annotations

import ctypes
import functools
import gc
import operator
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker
from stoker.basics.signals import raise_interrupt
from stoker.feeds.shared_memory import Blocks
from stoker.sources.files import OpenFile


class TooLate(Exception):
    pass


def plain(number: int, frame: Any) -> None:
    raise TooLate


def wrapped(*given: Any) -> None:
    plain(*given)


def nested(extra: str, number: int, frame: Any) -> None:
    raise TooLate(extra)


class Handler:
    def __call__(self, number: int, frame: Any) -> None:
        raise TooLate

    def method(self, number: int, frame: Any) -> None:
        raise TooLate


def by_name(signum: int, frame: Any) -> None:
    by_keyword(frame=frame, signum=signum)


def by_keyword(*, frame: Any, signum: int) -> None:
    raise TooLate


HANDLERS: dict[str, Callable[..., Any]] = {
    "function": plain,
    "stars": wrapped,
    "partial": functools.partial(nested, "late"),
    "object": Handler(),
    "method": Handler().method,
    "inner": by_name,
}


@pytest.fixture
def handled(request: pytest.FixtureRequest) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, getattr(request, "param", plain))
    yield
    signal.signal(signal.SIGUSR1, before)


def come(value: Any = None) -> Any:
    """A signal comes in the middle of a stage's work."""
    signal.raise_signal(signal.SIGUSR1)
    return value


class Once:
    """Its fifth example is interrupted the first time it is read."""

    def __init__(self, interrupt: Callable[[], Any] = come) -> None:
        self.interrupt = interrupt
        self.done = False

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == 5 and not self.done:
            self.done = True
            self.interrupt()
        return np.array(index)


def swallowing() -> None:
    try:
        come()
    except Exception as error:
        raise ValueError("cannot decode") from error


def sleeping() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(60)


def read(pipeline: stoker.Pipeline) -> list[int]:
    return [int(x) for batch in pipeline for x in np.atleast_1d(batch)]


@pytest.mark.parametrize("handled", HANDLERS.values(), ids=HANDLERS, indirect=True)
@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize("max_errors", [0, 3, "100%"])
def test_an_exception_of_a_handler_is_raised_as_it_is(max_errors: Any) -> None:
    pipeline = stoker.from_dataset(Once(), seed=0, max_errors=max_errors).batch(4).workers(0)
    with pytest.raises(TooLate):
        list(pipeline)
    assert pipeline.stats().skipped_examples == 0
    resumed = stoker.from_dataset(Once(int), seed=0, max_errors=max_errors).batch(4).workers(0)
    resumed.load_state_dict(pipeline.state_dict())
    assert read(resumed) == list(range(4, 12))


@pytest.mark.usefixtures("handled")
def test_what_is_raised_for_it_is_raised_too() -> None:
    with pytest.raises(ValueError, match="cannot decode"):
        list(stoker.from_dataset(Once(swallowing), max_errors="100%").workers(0))


@pytest.mark.interrupts
def test_a_timeout_within_a_sleep_is_raised() -> None:
    before = signal.signal(signal.SIGALRM, plain)
    try:
        with pytest.raises(TooLate):
            list(stoker.from_dataset(Once(sleeping), max_errors="100%").workers(0))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def once(interrupted: list[bool]) -> Callable[..., Any]:
    """A function that is interrupted the first time it is called."""

    def fn(value: Any, rng: Any = None) -> Any:
        if not interrupted:
            interrupted.append(True)
            come()
        return value

    return fn


def collated(fn: Any) -> stoker.Pipeline:
    return numbers().batch(4, collate=lambda examples: fn(np.stack(examples)))


def numbers() -> stoker.Pipeline:
    return stoker.from_arrays(np.arange(12), seed=0)


def streamed(fn: Any) -> stoker.Pipeline:
    return stoker.from_iterable(lambda: map(fn, range(12)), max_errors="100%")


PLACES: dict[str, Callable[[Any], stoker.Pipeline]] = {
    "map": lambda fn: numbers().map(fn, max_errors="100%").batch(4),
    "random_map": lambda fn: numbers().echo(2).random_map(fn, max_errors="100%").batch(4),
    "filter": lambda fn: numbers().filter(lambda x: fn(x) is not None, max_errors="100%"),
    "collate": collated,
    "batch map": lambda fn: numbers().batch(4).map(fn),
    "stream": streamed,
    "behind a device": lambda fn: numbers().batch(4).to_torch().map(fn),
    "loader": lambda fn: stoker.from_loader([np.arange(4)] * 3).map(fn),
}


@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize("place", PLACES)
def test_wherever_it_comes_it_is_raised_as_it_is(place: str) -> None:
    pipeline = PLACES[place](once([]))
    if place != "loader":
        pipeline = pipeline.workers(0)
    with pytest.raises(TooLate):
        list(pipeline)


@pytest.mark.usefixtures("handled")
def test_in_front_of_a_cache_it_is_not_kept_as_a_failure(tmp_path: Path) -> None:
    chain = stoker.from_dataset(Once(), seed=0, max_errors="100%")
    pipeline = chain.cache("1MiB", path=tmp_path / "store", version="1").batch(4).workers(0)
    with pytest.raises(TooLate):
        list(pipeline)
    assert sorted(read(pipeline)) == list(range(12))


def test_an_error_that_only_looks_like_it_is_the_example_s() -> None:
    def fails(number: int, frame: Any) -> None:
        raise TooLate

    def fn(value: Any) -> Any:
        import inspect

        if int(value) == 5:
            fails("not a signal", inspect.currentframe())  # type: ignore[arg-type]
        return value

    assert len(read(numbers().map(fn, max_errors=1).workers(0))) == 11


def batch(_: Path) -> Any:
    return next(iter(stoker.from_arrays(np.zeros((4, 1 << 17), np.uint8)).batch(4).workers(0)))


def iterator(_: Path) -> Any:
    found = iter(numbers().batch(4).workers(1))
    next(found)
    return found


def step_epoch(_: Path) -> Any:
    found = iter(numbers().repeat().batch(4).steps(2).workers(0))
    next(found)
    return found


def cache(path: Path) -> Any:
    found = numbers().cache("1MiB", path=path / "store", version="1").batch(4).workers(0)
    assert len(read(found)) == 12
    return found


def open_file(path: Path) -> Any:
    (path / "file").write_bytes(b"x")
    return OpenFile(str(path / "file"))


def shared_block(_: Path) -> Any:
    return Blocks().allocate(1 << 16)


@pytest.mark.interrupts
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("in_cycle", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("make", [batch, iterator, step_epoch, cache, open_file, shared_block])
def test_a_ctrl_c_that_comes_while_an_object_is_freed_is_raised(
    tmp_path: Path, make: Callable[[Path], Any], in_cycle: bool
) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    held = [make(tmp_path)]
    if in_cycle:
        held[0] = [held[0]]
        held[0].append(held[0])
    come: Any = functools.partial(getattr(ctypes.CDLL(None), "raise"), int(signal.SIGINT))
    calls: list[Any] = [come, held.clear, gc.collect]
    call: Any = operator.call

    def free() -> None:
        # In C code alone: the first Python code behind the signal is that of a finalizer, if any.
        list(map(call, calls))
        for _ in range(1000):  # one long sleep is not broken off by what comes just before it
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        free()


def test_a_ctrl_c_that_another_exception_hides_is_raised() -> None:
    def end() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("DataLoader worker (pid 7) exited unexpectedly")

    with pytest.raises(RuntimeError) as ended:
        end()
    with pytest.raises(KeyboardInterrupt):
        raise_interrupt(ended.value)
    raise_interrupt(RuntimeError("DataLoader worker (pid 7) is killed"))
