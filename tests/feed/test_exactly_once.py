"""Every job, every epoch, every output exactly once, bit-identical, whoever is killed when."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import served
from hypothesis import given, settings
from hypothesis import strategies as st
from playing import (
    Play,
    check_outputs,
    feeder_of,
    feeding,
    is_stopped,
    joining,
    log_of,
    sharing,
    start,
    wait_for_the_end,
    wait_until,
)

from strategies import FULL, shortened

FATES = ("none", "none", "killed", "stopped", "skips", "resumes")
_names = itertools.count()


def plays() -> st.SearchStrategy[list[Play]]:
    play = st.builds(
        Play,
        epochs=st.integers(1, 3),
        step_s=st.sampled_from((0.0, 0.0, 0.001, 0.004)),
        fate=st.sampled_from(FATES),
        at=st.integers(1, 12),
        keeps=st.sampled_from((0, 0, 1, 5)),
        delay_s=st.sampled_from((0.0, 0.0, 0.02, 0.1)),
    )
    return st.lists(play, min_size=1, max_size=5)


def fresh_name() -> str:
    return f"test-{os.getpid()}-{next(_names)}"


@settings(max_examples=200 if FULL else 4)
@given(plays(), st.sampled_from(served.KINDS), st.sampled_from((0.1, 20.0)))
def test_every_job_gets_every_output_once(cast: list[Play], kind: str, timeout_s: float) -> None:
    name = fresh_name()
    with tempfile.TemporaryDirectory() as home:
        logs = [Path(home) / f"{number}" for number in range(len(cast))]
        make: Callable[[], Any] = getattr(served, kind)
        with feeding(make, name, timeout_s=timeout_s):
            jobs = [start(joining(name), play, log) for play, log in zip(cast, logs, strict=True)]
            wait_for_the_end(jobs, continue_after_s=0.2)
        for play, log in zip(cast, logs, strict=True):
            check_outputs(log_of(log), kind, play)


# Behind every kill there is the start of a feeder, which takes most of a second.
@settings(max_examples=200 if FULL else 3)
@given(plays(), st.sampled_from(served.KINDS), st.lists(st.integers(1, 60), max_size=3))
def test_a_feeder_that_is_killed_is_replaced(cast: list[Play], kind: str, kills: list[int]) -> None:
    name = fresh_name()
    with tempfile.TemporaryDirectory() as home:
        logs = [Path(home) / f"{number}" for number in range(len(cast))]
        make = sharing(kind, name, jobs=len(cast), timeout_s=2.0)
        jobs = [start(make, play, log) for play, log in zip(cast, logs, strict=True)]

        def ended() -> bool:
            return not any(job.is_alive() for job in jobs)

        def outputs() -> int:
            return sum(len(log_of(log).outputs) for log in logs)

        def stopped() -> bool:
            return any(is_stopped(job.pid) for job in jobs)

        for kill in sorted(kills):
            while outputs() < kill and not ended() and not stopped():
                time.sleep(0.002)
            pid = None if ended() or outputs() < kill else feeder_of(name)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        wait_for_the_end(jobs, continue_after_s=0.1)
        for play, log in zip(cast, logs, strict=True):
            check_outputs(log_of(log), kind, play)
    wait_until(lambda: feeder_of(name) is None, "the feeder ends with its last job")


@pytest.mark.parametrize(
    "kind",
    shortened(
        ("batches", "examples", "rows", "echoed", "filtered", "mixed", "packed", "scanned"), 2
    ),
)
def test_eight_jobs_prepare_once(kind: str, tmp_path: Path) -> None:
    name = fresh_name()
    cast = [Play(step_s=0.002 * (number % 3)) for number in range(8)]
    logs = [tmp_path / f"{number}" for number in range(8)]
    with feeding(getattr(served, kind), name, jobs=8):
        jobs = [start(joining(name), play, log) for play, log in zip(cast, logs, strict=True)]
        wait_for_the_end(jobs)
    for play, log in zip(cast, logs, strict=True):
        found = log_of(log)
        check_outputs(found, kind, play)
        assert {epoch for epoch, _, _ in found.outputs} == {0, 1}
