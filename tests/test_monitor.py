"""`stoker.monitor`: where the waiting was, and what it means; by a clock that the test advances."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
    monkeypatch.setattr(monitored, "_accounts", [])  # the tests' own end is not theirs
    return made


class Loader:
    """Gives batches, each after its own time."""

    def __init__(self, clock: Clock, waits_s: list[float], num_workers: int = 0) -> None:
        self.clock, self.waits_s, self.num_workers = clock, waits_s, num_workers

    def __iter__(self) -> Iterator[int]:
        for number, wait_s in enumerate(self.waits_s):
            self.clock.passes(wait_s)
            yield number

    def __len__(self) -> int:
        return len(self.waits_s)


def passed(clock: Clock, loader: Loader, step_s: float) -> stoker.Monitored[int]:
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
    assert epoch.worker_wait_s == ()
    assert "Up to 43% of the time after start-up" in epoch.verdict
    assert "stoker analyze" in epoch.verdict


@pytest.mark.full
def test_waiting_is_told_apart_by_worker(clock: Clock) -> None:
    seen = passed(clock, Loader(clock, [2.0, 0.0, 5.0, 0.0, 5.0, 0.1], num_workers=2), step_s=1.0)
    assert seen.total.worker_wait_s == pytest.approx((10.0, 0.1))
    assert "Worker 0 makes the others' batches wait" in seen.total.verdict
    report = seen.report()
    assert "by worker, after the first batch: 0: 10.00 s, 1: 0.10 s" in report
    assert seen.total.verdict in report


def test_workers_that_take_no_turns_are_not_told_apart(clock: Clock) -> None:
    loader = Loader(clock, [1.0, 1.0], num_workers=2)
    loader.in_order = False  # type: ignore[attr-defined]
    assert passed(clock, loader, 1.0).total.worker_wait_s == ()


@pytest.mark.full
def test_a_loader_that_keeps_up_needs_nothing(clock: Clock) -> None:
    seen = passed(clock, Loader(clock, [0.01] * 20), step_s=1.0)
    assert seen.total.verdict.startswith("The loader keeps up")
    assert "analyze" not in seen.total.verdict


@pytest.mark.full
def test_short_epochs_lose_time_by_starting_up(clock: Clock) -> None:
    seen = passed(clock, Loader(clock, [5.0, 0.0, 0.0]), step_s=1.0)
    assert "persistent_workers=True" in seen.total.verdict
    assert "after start-up is lost" not in seen.total.verdict


@pytest.mark.full
def test_passes_are_added_up_and_may_be_broken_off(
    clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    monitored = stoker.monitor(Loader(clock, [1.0, 2.0, 3.0], num_workers=1))
    for _ in monitored:
        break
    for _ in monitored:
        clock.passes(1.0)
    assert [epoch.batches for epoch in monitored.epochs] == [1, 3]
    assert monitored.total.wait_s == pytest.approx(7.0)
    assert monitored.total.worker_wait_s == pytest.approx((5.0,))
    assert len(monitored) == 3
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(":")[1] for line in lines] == [" epoch 1"]  # one batch tells nothing


PROGRAM = """
import os
import sys
import stoker


class Loader:
    def __iter__(self):
        yield from range(5)


def local():
    loader = stoker.monitor(Loader())
    for epoch in range(2):
        for batch in loader:
            pass


def anew():
    for epoch in range(3):
        for batch in stoker.monitor(Loader()):
            pass


def two():
    one, other = (stoker.monitor(Loader()) for _ in range(2))
    for loader in (one, other):
        for batch in loader:
            pass


def forks():
    local()
    child = os.fork()
    if not child:
        sys.exit(0)
    os.waitpid(child, 0)


def fails(at):
    for batch in stoker.monitor(Loader()):
        if batch == at:
            raise SystemExit(3)


eval(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("call", "passes", "sums", "verdicts"),
    one_in(
        3,
        [
            ("local()", 2, ["2 epochs"], 1),
            ("anew()", 3, ["3 epochs"], 1),
            ("two()", 2, [], 2),  # one epoch each, which its own line has told
            ("forks()", 2, ["2 epochs"], 1),
            ("fails(0)", 0, [], 0),
            ("fails(3)", 1, [], 1),
        ],
    ),
)
def test_a_program_that_ends_is_told_what_its_loaders_cost(
    call: str, passes: int, sums: list[str], verdicts: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-W", "error", str(tmp_path / "train.py"), call]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == (3 if "fails" in call else 0)
    words = [line.removeprefix("stoker.monitor: ") for line in done.stderr.splitlines()]
    assert len([line for line in words if line.startswith("epoch ")]) == passes
    assert [line.split(":")[0] for line in words if line[0].isdigit()] == sums
    assert len(words) == passes + len(sums) + verdicts


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
