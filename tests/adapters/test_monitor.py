"""`stoker.monitor`: where the waiting was, and what it means; by a clock that the test advances."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import stoker
from stoker.adapters import monitored
from strategies import one_in


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def passes(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(monitored.time, "perf_counter", made)
    return made


class Loader:
    """Gives batches, each after its own time."""

    def __init__(self, clock: Clock, waits_s: list[float]) -> None:
        self.clock, self.waits_s = clock, waits_s

    def __iter__(self) -> Iterator[int]:
        for number, wait_s in enumerate(self.waits_s):
            self.clock.passes(wait_s)
            yield number

    def __len__(self) -> int:
        return len(self.waits_s)


def passed(clock: Clock, loader: Loader, step_s: float) -> stoker.types.Monitored[int]:
    monitored = stoker.monitor(loader)
    for _ in monitored:
        clock.passes(step_s)
    return monitored


@pytest.mark.full
def test_start_up_and_steady_state_are_told_apart(clock: Clock) -> None:
    seen = passed(clock, Loader(clock, [4.0, 1.0, 1.0, 1.0]), step_s=1.0)
    (epoch,) = seen.epochs
    assert epoch.batches == 4
    assert epoch.elapsed_s == pytest.approx(11.0)
    assert epoch.wait_s == pytest.approx(7.0)
    assert epoch.first_wait_s == pytest.approx(4.0)
    assert epoch.wait_fraction == pytest.approx(7 / 11)
    assert epoch.steady_wait_fraction == pytest.approx(3 / 7)
    assert "Up to 43% of the time after start-up" in epoch.verdict
    assert "stoker analyze" in epoch.verdict


@pytest.mark.full
@pytest.mark.parametrize(
    ("waits_s", "said", "not_said"),
    [
        ([0.01] * 20, "The loader keeps up", "analyze"),
        ([5.0, 0.0, 0.0], "persistent_workers=True", "after start-up is lost"),
    ],
)
def test_the_verdict_is_on_what_takes_the_time(
    clock: Clock, waits_s: list[float], said: str, not_said: str
) -> None:
    seen = passed(clock, Loader(clock, waits_s), step_s=1.0)
    assert said in seen.total.verdict
    assert not_said not in seen.total.verdict


@pytest.mark.full
def test_passes_are_added_up_and_may_be_broken_off(
    clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    monitored = stoker.monitor(Loader(clock, [1.0, 2.0, 3.0]))
    for _ in monitored:
        break
    for _ in monitored:
        clock.passes(1.0)
    assert [epoch.batches for epoch in monitored.epochs] == [1, 3]
    assert monitored.total.wait_s == pytest.approx(7.0)
    assert len(monitored) == 3
    for _ in monitored:
        clock.passes(1.0)
    told = [line.removeprefix("stoker.monitor: ") for line in capfd.readouterr().err.splitlines()]
    words = [line.split()[0] for line in told]
    assert words == ["epoch", "Up", "epoch"]  # the diagnosis once; one batch tells nothing


def test_a_loop_that_catches_an_error_goes_on_in_the_same_pass() -> None:
    def fails_once(x: Any) -> Any:
        if x == 5:
            raise OSError(x)
        return x

    train = stoker.from_arrays(np.arange(20), seed=0).map(fails_once).batch(4).workers(0)
    monitored = stoker.monitor(train)
    batches, found = iter(monitored), []
    while True:
        try:
            found.append(next(batches).tolist())
        except StopIteration:
            break
        except OSError:
            assert not monitored.epochs
    assert [batch[0] for batch in found] == [0, 8, 12, 16]
    assert [epoch.batches for epoch in monitored.epochs] == [4]


def test_metrics_tell_of_the_pass_under_way(clock: Clock) -> None:
    loader = stoker.monitor(Loader(clock, [1.0] * 4))
    assert loader.metrics()["stoker/steps_total"] == 0
    for epoch in range(2):
        for number in loader:
            clock.passes(3.0)
            found = loader.metrics()
            assert found["stoker/epoch"] == epoch
            assert found["stoker/steps_total"] == loader.total.batches == 4 * epoch + number + 1
            assert found["stoker/wait_fraction"] == 0.25
            assert found["stoker/batches_per_s"] == 0.25
        assert loader.metrics("val/")["val/consumer_wait_s_total"] == 4 * (epoch + 1)


def test_the_metrics_of_a_monitored_pipeline_are_its_own() -> None:
    train = stoker.from_arrays(np.arange(20), seed=0).batch(4)
    loader = stoker.monitor(train)
    assert len(list(loader)) == 5
    assert loader.metrics() == train.metrics()
    assert loader.metrics()["stoker/fresh_examples_total"] == 20


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("stderr", one_in(3, ["none", "closed", "broken"]))
def test_a_loop_goes_on_whatever_became_of_stderr(
    clock: Clock, stderr: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", {"none": None, "closed": closed, "broken": Broken()}[stderr])
    passed(clock, Loader(clock, [1.0, 2.0]), 1.0)
