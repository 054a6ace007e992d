"""The split has intervals that hold between runs, and what cannot be told is said to be so."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given

from analysis.recordings import BATCH_SIZE, Parts, parts, recorded
from stoker.analysis.model.rates import estimate_mean, estimate_turns
from stoker.analysis.model.report import Report
from stoker.analysis.model.trace import Step, Turn
from stoker.analysis.probe.records import BATCH, REPLAYED, TRAINS, Row
from stoker.analysis.reports.diagnosis import make_report
from stoker.analysis.scripts.script_job import InterleavedPhase, split_into_turns

SHARES = ("compute", "prep_stall", "fetch_stall")
STARVED = Parts(
    rate=100.0, wait=0.5, G=200.0, P={1: 102.0}, trained={1: 100.0}, workers=1, prep_cpu_s=0.0001
)


def take_turns(shares: list[float], G: float = 200.0) -> list[Turn]:
    """Return turns in which training computes for these shares of its time."""
    turns = []
    for share in shares:
        lasted_s = BATCH_SIZE / (share * G)
        own = [Step(lasted_s, (1.0 - share) * lasted_s)] * 20
        turns.append(Turn(own, [Step(BATCH_SIZE / G, 0.0)] * 20))
    return turns


def analyzed(shares: list[float]) -> Report:
    record = recorded(STARVED)
    record.ranks[0].turns = take_turns(shares)
    return make_report(record)


@given(parts())
def test_the_intervals_hold_the_split(job: Parts) -> None:
    report = make_report(recorded(job))
    assert report.split_intervals is not None
    for name in SHARES:
        interval = getattr(report.split_intervals, name)
        assert 0.0 <= interval.low <= interval.high <= 1.0
        assert interval.low - 1e-9 <= getattr(report.split, name) <= interval.high + 1e-9


def test_turns_that_agree_leave_the_split_as_it_was() -> None:
    report = analyzed([0.5, 0.5, 0.5])
    assert report.split.compute == pytest.approx(0.5, rel=0.02)
    assert report.split_intervals is not None
    assert report.split_intervals.compute.high - report.split_intervals.compute.low < 0.05
    assert report.untold == []


def test_a_load_that_changes_from_turn_to_turn_makes_them_wide_and_analyses_overlap() -> None:
    """One job, six analyses: its share of compute is anywhere from 0.35 to 0.6 in each turn."""
    draw = random.Random(0)
    reports = [analyzed([draw.uniform(0.35, 0.6) for _ in range(3)]) for _ in range(6)]
    for name in SHARES[:2]:
        found = [getattr(report.split_intervals, name) for report in reports]
        assert max(one.low for one in found) < min(one.high for one in found)


def test_what_cannot_be_told_is_the_interval_of_the_verdict() -> None:
    report = analyzed([0.3, 0.7, 0.5])
    (compute, prep) = report.untold
    assert compute.startswith("how much of the time training computes: ")
    assert prep.startswith("how much of the time it loses to preparing: ")
    assert report.doubts == [f"cannot be told: {compute}", f"cannot be told: {prep}"]
    assert f"{prep.rpartition(': ')[2].replace('% to', ' to')}) of its time" in report.verdict


def test_stalls_that_were_not_told_apart_are_named() -> None:
    record = recorded(STARVED)
    record.ranks[0].opened = [{"kind": "mapped", "name": "x", "bytes": 9, "unread": True}]
    record.reasons["files"] = "mapped into memory"
    (untold,) = make_report(record).untold
    assert "that is lost goes to fetching: mapped into memory" in untold


def test_an_analysis_without_enough_time_says_so() -> None:
    record = recorded(STARVED)
    record.out_of_time = "while it was read and trained on (P, S)"
    report = make_report(record)
    assert report.doubts[-1] == f"the time for the analysis was up {record.out_of_time}"
    assert "\nUncertain: the time for the analysis was up" in str(report)
    assert "seems to be" in report.verdict
    assert report.rates.G is not None  # what is known is there


def test_a_single_value_has_no_spread_and_more_have_more_than_their_mean() -> None:
    assert estimate_mean([0.4]).low == estimate_mean([0.4]).high == 0.4
    found = estimate_mean([0.3, 0.5, 0.4])
    # Student's t for two degrees of freedom, of one more value.
    assert found.high - found.value == pytest.approx(4.30265 * 0.1 * (4 / 3) ** 0.5, rel=1e-3)


def test_a_turn_is_its_own_steps_and_its_prepared_ones() -> None:
    """Turns of five own batches, of which two are left out, and of four prepared ones."""
    rows = [
        Row(0, 0, n, 1000 * n, 1000 * n + 100 * (n % 9), BATCH | TRAINS | REPLAYED, 0)
        for n in range(19)
    ]
    shares = [InterleavedPhase("own", 0, 2, 3, 1e-6), InterleavedPhase("replayed", 0, 2, 2, 1e-6)]
    turns = [Turn(*turn) for turn in split_into_turns(list(itertools.pairwise(rows)), shares)]
    assert [(len(turn.own), len(turn.other)) for turn in turns] == [(3, 2), (3, 2)]
    assert turns[0].own[0].lasted_s == pytest.approx(1e-6)
    assert turns[0].own[0].waited_s == pytest.approx(2e-7)
    rank = recorded(STARVED).ranks[0]
    rank.turns = turns
    (rate, g, wait), _ = estimate_turns(rank, 10.0)
    assert rate == pytest.approx(10.0 / 1e-6)
    assert wait == pytest.approx(0.3)
    assert g > rate
