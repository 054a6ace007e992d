"""The course of an analysis as a trace of events, as Perfetto and Chrome read it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from analysis.analyses import analyze, write_files, write_script
from analysis.recordings import Parts, recorded
from stoker.analysis.model.trace import Fetched
from stoker.analysis.probe.records import Row
from stoker.analysis.reports.timeline import write_timeline

Lanes = dict[tuple[str, str], list[dict[str, Any]]]


class Event(msgspec.Struct):
    """A complete event, or a name ("Trace Event Format", Google)."""

    ph: str
    pid: int
    tid: int
    name: str
    args: dict[str, Any]
    ts: float = 0.0
    dur: float = 0.0


def read_lanes(path: Path) -> Lanes:
    """Return the slices of each (process, lane), in the order of time; check all events."""
    content = json.loads(path.read_text())
    assert content["displayTimeUnit"] == "ms"
    events = msgspec.convert(content["traceEvents"], list[Event])
    names = {
        (event.name, event.pid, event.tid): event.args["name"]
        for event in events
        if event.ph == "M"
    }
    lanes: Lanes = defaultdict(list)
    for event in events:
        assert event.ph in ("M", "X")
        assert event.ts >= 0.0
        assert event.dur >= 0.0
        if event.ph == "X":
            process = names["process_name", event.pid, 0]
            lane = names["thread_name", event.pid, event.tid]
            lanes[process, lane].append(msgspec.to_builtins(event))
    numbers = [event.tid for event in events if event.name == "thread_name"]
    assert len(set(numbers)) == len(numbers)
    for slices in lanes.values():
        # In ns, as Perfetto rounds. Its SliceTracker drops a slice that reaches out of another.
        ends: list[int] = []
        for one in slices:
            began_ns, took_ns = (round(1e3 * one[key]) for key in ("ts", "dur"))
            while ends and ends[-1] <= began_ns:
                ends.pop()
            assert not ends or began_ns + took_ns <= ends[-1]
            ends.append(began_ns + took_ns)
    return lanes


JOB = Parts(
    rate=100.0, wait=0.25, G=200.0, P={1: 120.0}, trained={1: 110.0}, workers=1,
    S=300.0, C=3000.0, cached=0.5, prep_cpu_s=0.0, step_cpu_s=0.0,
)  # fmt: skip


def test_waits_and_steps_take_turns_in_their_lane(tmp_path: Path) -> None:
    trace = recorded(JOB)
    (rank,) = trace.ranks
    rank.pid = 4711
    rank.course = [Row(*row[:3], row[3] + 1000, row[4] + 1000, *row[5:]) for row in rank.rows]
    trace.said = [(0, "as it is"), (2000, "G"), (3000, "")]
    trace.fetched = [Fetched(False, 5000, 2, [(10, 1e-3), (10, 2e-3)])]
    write_timeline(trace, tmp_path / "course.json")
    lanes = read_lanes(tmp_path / "course.json")
    steps = lanes["rank 0", "step"]
    waits = [one for one in steps if one["name"] == "wait for a batch"]
    trained = [one for one in steps if one["name"] == "step"]
    assert len(waits) == len(trained) + 1 == 200
    # Batches of 10 at 100 examples/s.
    assert all(one["dur"] == pytest.approx(25_000, abs=1) for one in waits)
    assert all(one["dur"] == pytest.approx(75_000, abs=1) for one in trained)
    assert waits[0]["args"] == {"loader": "train.py:41", "epoch": 0, "batch": 0}
    phases = lanes["analysis", "phases"]
    assert [(one["name"], one["ts"], one["dur"]) for one in phases] == [
        ("as it is", 0.0, 2.0),
        ("G", 2.0, 1.0),
    ]
    fetched = lanes["analysis", "fetch"]
    assert [(one["ts"], one["dur"]) for one in fetched] == [(5.0, 1000.0), (1005.0, 2000.0)]
    drains = {one["name"] for one in lanes["rank 0", "drains"]}
    assert drains == {"drain: warm-1", "drain: cold"}


SCRIPT = """
if __name__ == "__main__":
    train(DataLoader(Files(0.002), 4, num_workers=2, shuffle=True), 0.002)
"""


@pytest.mark.full
def test_the_course_of_an_analysis_has_steps_workers_and_fetching(tmp_path: Path) -> None:
    write_files(tmp_path, 400)
    script = write_script(tmp_path, SCRIPT)
    done = analyze(tmp_path, "--trace", tmp_path / "course.json", script, minutes=0.5)
    assert done.code == 0, done.errors
    lanes = read_lanes(tmp_path / "course.json")
    assert {("rank 0", "step"), ("rank 0", "worker  0"), ("rank 0", "worker  1")} <= set(lanes)
    names = {one["name"] for one in lanes["rank 0", "step"]}
    assert {"wait for a batch", "step", "step on a prepared batch"} <= names
    assert any("G: " in one["name"] for one in lanes["analysis", "phases"])
    made = lanes["rank 0", "worker  0"]
    assert all(one["args"]["examples"] == 4 for one in made)


def test_a_folder_that_is_not_there_is_told_first(tmp_path: Path) -> None:
    script = write_script(tmp_path, "raise RuntimeError")
    done = analyze(tmp_path, "--trace", tmp_path / "no" / "course.json", script)
    assert done.code == 1
    assert "there is no folder" in done.errors
    assert "RuntimeError" not in done.errors
