"""A host that is busy with other work is told apart from a script that waits."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from msgspec.structs import replace

from analysis.reports import about, job
from stoker.analysis.host_load import join_loads, watch_host
from stoker.analysis.model.report import HostLoad, PrepPoint, Report
from stoker.analysis.reports.advice import advise
from stoker.analysis.reports.verdict import find_doubts

CORES = len(os.sched_getaffinity(0))


def load(others: float, idle: float, steal: float = 0.0, cores: int = 2) -> HostLoad:
    return HostLoad(
        seconds=10.0,
        cores=cores,
        own_cores=cores - others - idle - steal,
        others_cores=others,
        steal_cores=steal,
        idle_cores=idle,
    )


def test_the_time_of_a_process_and_of_its_ended_child_is_its_own() -> None:
    found: list[HostLoad] = []
    with watch_host(found):
        burn = "import time\nwhile time.process_time() < 0.2: pass"
        subprocess.run([sys.executable, "-c", burn], check=True)
        until = time.process_time() + 0.1
        while time.process_time() < until:
            pass
    (seen,) = found
    # Two processes, each counted in ticks of 10 ms.
    assert seen.own_cores * seen.seconds > 0.3 - 0.04
    assert seen.cores == CORES


def test_a_load_over_several_phases_is_their_mean() -> None:
    joined = join_loads([load(1.0, 0.5), replace(load(2.0, 0.0), seconds=30.0)])
    assert joined is not None
    assert joined.seconds == 40.0
    assert joined.others_cores == pytest.approx(1.75)
    assert join_loads([]) is None


@pytest.mark.parametrize(
    ("seen", "busy"),
    [
        (load(1.6, 0.0), True),
        (load(0.1, 0.0), False),  # the job's own processes took the rest
        (load(0.5, 1.2), False),  # a processor is left
        (load(0.0, 0.1, steal=0.8), True),
        (load(30.0, 10.0, cores=64), False),
    ],
)
def test_a_busy_host_is_a_doubt(seen: HostLoad, busy: bool) -> None:
    assert seen.is_busy == busy
    report = replace(job(G=3_000, P={1: 180}, workers=1), host=seen)
    said = [doubt for doubt in find_doubts(report) if "the host was busy" in doubt]
    assert bool(said) == busy
    if seen.others_cores == 1.6:
        assert said == ["the host was busy: other processes used 1.6 of 2 cores"]


def prepared(host: HostLoad | None) -> Report:
    """Return a job of one worker that takes 5 ms for an example, 0.2 ms of them on a processor."""
    points = [PrepPoint(n, about(200.0 * n), cpu_s=0.0002) for n in (1, 2)]
    report = job(G=3_000, P={1: 200, 2: 400}, workers=1, S=None, C=None, cores=2)
    return replace(report, prep=points, host=host)


def find_workers(report: Report) -> int:
    """Return the number of workers that is advised."""
    codes = [action.code for action in advise(report)]
    (code,) = (code for code in codes if "num_workers=" in code)
    return int(code.split("=")[1].rstrip(")"))


def test_on_a_busy_host_workers_seem_to_wait_and_are_not_to_be_more_than_processors() -> None:
    assert find_workers(prepared(None)) > 2
    assert find_workers(prepared(load(0.1, 1.5))) > 2
    assert find_workers(prepared(load(1.6, 0.0))) == 2
