"""Every job, every epoch, every output exactly once, bit-identical, whoever is killed when."""

from __future__ import annotations

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
    fresh_name,
    joining,
    log_of,
    play_out,
    plays,
    sharing,
    start,
    wait_for_the_end,
)

from patience import wait_until
from strategies import FULL, shortened


@settings(max_examples=200 if FULL else 4)
@given(plays(), st.sampled_from(served.KINDS), st.sampled_from((0.1, 20.0)))
def test_every_job_gets_every_output_once(cast: list[Play], kind: str, timeout_s: float) -> None:
    name = fresh_name()
    make: Callable[[], Any] = getattr(served, kind)
    with feeding(make, name, timeout_s=timeout_s):
        play_out([joining(name)] * len(cast), cast, kind, [], continue_after_s=0.2)


# Behind every kill there is the start of a feeder, which takes most of a second.
@settings(max_examples=200 if FULL else 3)
@given(plays(), st.sampled_from(served.KINDS), st.lists(st.integers(1, 60), max_size=3))
def test_a_feeder_that_is_killed_is_replaced(cast: list[Play], kind: str, kills: list[int]) -> None:
    name = fresh_name()
    make = sharing(kind, name, jobs=len(cast), timeout_s=2.0)
    play_out([make] * len(cast), cast, kind, [(behind, name) for behind in kills])
    wait_until(lambda: feeder_of(name) is None)


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
