"""What is decided from what was seen, and files read again, without running any script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.recordings import MadeUpJob, Parts
from stoker.analysis.cold_reads import find_files, read_files
from stoker.analysis.model.trace import RankTrace, Trace
from stoker.analysis.phases import run_phases
from stoker.analysis.probe.records import BATCH, TRAINS, Row
from stoker.analysis.reports.diagnosis import make_report
from stoker.analysis.reports.verdict import explain_nothing_seen
from stoker.analysis.scripts.script_process import find_crash
from stoker.analysis.scripts.script_run import choose_slot, find_latest


def rank(pid: int, number: int = 0, world: int = 1, parent: int = 1, generation: int = 0) -> Any:
    about = {"world_size": world, "parent": parent, "generation": generation}
    return RankTrace(pid, number, about)


def file(name: str, size: int, kind: str = "file") -> dict[str, Any]:
    return {"kind": kind, "name": name, "bytes": size}


SOCKET = {"kind": "socket", "name": "10.0.0.1"}


@pytest.mark.parametrize(
    ("opened", "read_bytes", "names", "why"),
    [
        ([file("a", 100), file("b", 100)], 200, ["a", "b"], ""),
        ([file("a", 100), file("a", 100)], 100, ["a"], ""),  # opened twice, by two workers
        ([], 0, [], "no file was seen"),
        ([SOCKET], 0, [], "over the network (10.0.0.1)"),
        ([file("a", 10_000)], 500, ["a"], "parts of few large files"),
        ([file("a", 10_000, "mapped")], 0, ["a"], "mapped into memory"),
    ],
)
def test_files_that_can_be_read_again(
    opened: list[dict[str, Any]], read_bytes: int, names: list[str], why: str
) -> None:
    found, said = find_files(opened, 2, read_bytes)
    assert found == names
    assert why in said
    assert bool(why) == bool(said)


def test_all_files_are_read_in_blocks(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}") for number in range(20)]
    for path in paths:
        Path(path).write_bytes(b"x" * 5000)
    for readers in (0, 1, 3):
        reads = read_files(paths, readers, 60.0)
        assert sum(count for count, _ in reads) == 20
        assert all(seconds > 0 for _, seconds in reads)
    assert len(read_files(paths, 2, 0.0)) == 1  # the time is up behind a block
    with pytest.raises(FileNotFoundError, match="gone"):
        read_files([paths[0], str(tmp_path / "gone"), *paths[:2]], 2, 60.0)


def test_of_a_rank_that_was_started_again_the_latest_counts() -> None:
    first, again = rank(11, 0, 2), rank(21, 0, 2, generation=1)
    other, elsewhere = rank(12, 1, 2), rank(31, 0, 2, parent=2)
    assert find_latest([first, other, again, elsewhere]) == [other, again, elsewhere]
    # It did well: nobody failed, and what was started ended well.
    assert find_crash(0, ["the network is away for once"], "in P", []) is None


def test_how_a_script_crashed() -> None:
    launched = [
        "first words",
        "W torch/distributed/elastic/multiprocessing/api.py:874] failed",
        "Root Cause (first observed failure):",
        "  rank      : 1 (local_rank: 1)",
        "  exitcode  : -11 (pid: 5)",
    ]
    crash = find_crash(1, launched, "in G", [])
    assert crash is not None
    assert (crash.how, crash.rank, crash.output) == ("killed by SIGSEGV", 1, "first words")
    crash = find_crash(0, ["all done"], "in G", [(rank(11), "Traceback\nOSError: no")])
    assert crash is not None
    assert (crash.how, crash.rank) == ("OSError: no", None)
    crash = find_crash(None, [], "in G", [(rank(11, 1, 2), "")])
    assert crash is not None
    assert (crash.how, crash.rank) == ("its process was killed, or left behind", 1)
    crash = find_crash(3, ["last words"], "in G", [(rank(11), "said by itself")])
    assert crash is not None
    assert (crash.how, crash.output) == ("exit code 3", "last words")


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        ({"batch": "the script ended by itself"}, "pipelines of stoker, in Python processes"),
        ({"as-it-is": "no loader was built at 'x.py:3'"}, "no loader was built at"),
        ({}, "it ended"),
        ({"batch": "crashed", "output": "EOFError: EOF"}, "standard input is empty"),
        ({"batch": "crashed", "output": "OSError: no"}, "Its last lines:\nOSError: no"),
    ],
)
def test_why_nothing_was_seen(reasons: dict[str, str], said: str) -> None:
    text = explain_nothing_seen(Trace(["train.py"], reasons=reasons))
    assert text.startswith("the script never used a loader")
    assert said in text
    assert ("standard input" in text) == ("EOFError" in str(reasons))


def built(slot: int, site: str, *callers: str) -> dict[str, Any]:
    return {"slot": slot, "site": site, "built": (site, *callers), "workers": 0}


@pytest.mark.parametrize(
    ("wanted", "slot"),
    [
        (None, 1),  # fewer batches than the other one, but gradients are on
        ("train.py:3", 0),
        ("folder/train.py:3", 0),
        ("train.py:9", 1),  # what calls the function that builds it
        ("train.py:77", None),
    ],
)
def test_the_training_loader_is_chosen(wanted: str | None, slot: int | None) -> None:
    loaders = [built(0, "train.py:3"), built(1, "train.py:5", "train.py:9")]
    rows = [Row(0, 0, n, n, n, BATCH, 0) for n in range(9)]
    rows += [Row(1, 0, n, n, n, BATCH | TRAINS, 0) for n in range(4)]
    rank = RankTrace(1, 0, {"loaders": loaders})
    assert choose_slot(rank, rows, wanted) == slot
    assert choose_slot(rank, [], wanted) is None


def test_more_workers_than_cores_are_tried_where_preparing_waits() -> None:
    parts = Parts(
        rate=195.0, wait=0.96, G=4_000.0, P={1: 200.0}, trained={1: 195.0}, workers=1,
        prep_cpu_s=0.0001,
    )  # fmt: skip
    job = MadeUpJob(parts)
    run_phases(job)
    job.trace.host_loads = []
    report = make_report(job.trace)
    assert max(point.workers for point in report.prep) > report.cores
    (more,) = (action for action in report.actions if "num_workers=" in action.code)
    assert "was measured" in more.why
    assert "preparing mostly waits" in more.why
    assert more.gain.value > 1.5
