"""One report says one thing: in its verdict, to what-if and on its page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given

from analysis.recordings import Parts, evaluate_on_training_data, parts, recorded
from analysis.reports import FETCH, REPORTS
from analysis.test_page import text_of
from command_line import call
from stoker.analysis.model.calibration import calibrate
from stoker.analysis.model.model import Change, predict
from stoker.analysis.model.report import Rate, Report, read_report, to_measured, write_report
from stoker.analysis.model.what_if import answer
from stoker.analysis.reports.diagnosis import make_report
from stoker.analysis.reports.page import write_page
from stoker.analysis.reports.verdict import find_doubts, write_verdict

FED = Parts(
    rate=186.0, wait=0.02, G=190.0, P={1: 210.0, 2: 400.0}, trained={1: 188.0, 2: 190.0},
    workers=2, S=900.0, C=9_000.0, prep_cpu_s=0.004,
)  # fmt: skip
"""All of it agrees."""
SLOW = replace(FED, rate=110.0, wait=0.45)
"""The job waits for its data, for a reason that its parts do not show."""
QUICK = replace(FED, rate=186.0, wait=0.3, G=300.0, P={1: 55.0, 2: 110.0})
"""The job is faster than its loader was by itself."""
ALONE = Parts(
    rate=224.0, wait=0.0, G=16.0, P={0: 6.0, 1: 5.0}, trained={0: 6.0, 1: 5.0}, workers=0,
    S=5.0, C=5.0, cached=0.0, prep_cpu_s=0.0, step_cpu_s=1 / 128,
)  # fmt: skip
"""A job without workers that never waited, and all of whose parts are slower than it was."""
EVEN = replace(
    ALONE, G=13.0, P={1: 5.0, 2: 5.0}, trained={1: 5.0, 2: 5.0}, workers=2, S=None, step_cpu_s=0.0
)
"""Its interval is its rate: one rounding lies outside."""
JOBS = {"fed": FED, "slow": SLOW, "quick": QUICK}
LIMITS = {
    "compute": "kept busy: ",
    "prep": "limited by preparing data",
    "fetch": "limited by fetching data",
    "processors": "limited by the host's processors",
}


@given(parts())
@example(ALONE)
def test_the_model_runs_the_job_as_it_is_at_the_rate_that_was_measured(job: Parts) -> None:
    report = make_report(recorded(job))
    assert report.as_it_is is not None
    outcome = answer(to_measured(report), Change()).outcomes[0].prediction
    assert outcome.rate == pytest.approx(report.as_it_is.rate.value, rel=1e-6)
    assert outcome.bound == report.bound
    assert LIMITS[report.bound] in report.verdict
    shares = (outcome.compute, outcome.prep_stall, outcome.fetch_stall)
    split = report.split
    expected = (split.compute, split.prep_stall, split.fetch_stall)
    assert shares == pytest.approx(expected, abs=1e-6)


@given(parts())
@example(ALONE)
@example(EVEN)
@example(replace(ALONE, rate=100.0, wait=0.6, G=800.0, prep_cpu_s=0.007, step_cpu_s=0.001))
def test_there_is_one_g(job: Parts) -> None:
    report = make_report(recorded(job))
    seen, g = report.as_it_is, report.rates.G
    assert seen is not None
    assert g is not None
    rounding = 1e-12 * g.value
    assert g.low - rounding <= g.value <= g.high + rounding
    assert to_measured(report).ingestion == pytest.approx(g.value)
    assert report.split.compute == pytest.approx(seen.rate.value / g.value)
    if not job.workers:  # nothing is prepared beside a step
        assert report.split.compute > min(0.99, 1.0 - seen.wait_fraction) - 1e-6
    assert report.replayed is not None
    differ = abs(report.replayed.value - g.value) > 0.1 * g.value
    assert any("on the same batches again and again" in doubt for doubt in report.doubts) == differ


@given(parts())
def test_an_evaluation_on_the_training_loader_is_no_training(job: Parts) -> None:
    record = recorded(job)
    evaluate_on_training_data(record.ranks[0], faster=10.0)
    found, expected = make_report(record), make_report(recorded(job))
    assert (found.rates.G, found.split) == (expected.rates.G, expected.split)
    assert found.as_it_is is not None
    assert expected.as_it_is is not None
    assert found.as_it_is.rate == expected.as_it_is.rate


def test_workers_may_take_more_from_training_than_their_processor_time() -> None:
    crowded = replace(
        FED, rate=107.0, wait=0.02, G=188.0, P={1: 150.0}, trained={1: 107.0}, workers=1,
        prep_cpu_s=0.004, step_cpu_s=0.0106,
    )  # fmt: skip

    def made(job: Parts) -> Report:
        record = recorded(job)
        record.cores = 2
        return make_report(record)

    report = made(crowded)
    assert report.doubts == []
    assert report.rates.G is not None
    assert report.rates.G.value == pytest.approx(188.0, rel=0.02)
    assert report.split.compute == pytest.approx(107 / 188, rel=0.02)
    idle = made(replace(crowded, prep_cpu_s=0.0))
    assert idle.split.compute > 0.9  # workers that take nothing do not explain it


def test_two_measurements_of_g_are_a_doubt(tmp_path: Path) -> None:
    report = make_report(recorded(replace(FED, rate=110.0, wait=0.1)))
    assert report.rates.G is not None
    said = "G is 122 examples/s by the job's own speed and waits, and 190 on the same batches"
    assert said in " ".join(report.doubts)
    assert "\nUncertain: predicted" in str(report)
    assert said in str(report)
    write_report(report, tmp_path / "report.json")
    told = call("what-if", str(tmp_path / "report.json")).stdout
    assert re.search(r"G  training takes +122\n", told), told
    assert "G is taken as" not in told


@given(parts())
def test_calibrating_twice_changes_nothing(job: Parts) -> None:
    report = make_report(recorded(job))
    assert report.as_it_is is not None
    once = to_measured(report)
    twice = calibrate(once, report.as_it_is.rate.value, report.split.compute)
    for change in (Change(), Change(cores=9), Change(accelerator=3.0), Change(echo=2.0)):
        assert predict(twice, change).rate == pytest.approx(predict(once, change).rate, rel=1e-4)


def test_what_agrees_is_left_alone() -> None:
    report = make_report(recorded(FED))
    apart = report.predicted
    assert apart == pytest.approx(186.0, rel=0.03)
    assert report.doubts == []
    assert to_measured(report).prep == tuple(sorted((p.workers, p.rate.value) for p in report.prep))


def test_verdict_what_if_and_page_say_the_same(tmp_path: Path) -> None:
    reports = {name: make_report(recorded(job)) for name, job in JOBS.items()} | REPORTS
    for name, report in reports.items():
        write_report(report, tmp_path / f"{name}.json")
        write_page(report, tmp_path / f"{name}.html")
        assert report.as_it_is is not None
        rate = report.as_it_is.rate.value
        said = call("what-if", str(tmp_path / f"{name}.json")).stdout
        page = text_of(tmp_path / f"{name}.html")
        for text in (" ".join(said.split()), page):
            assert f"examples/s {rate:,.0f} " in text
            assert f"what limits {report.bound} " in text
        assert f"as it is: {rate:,.0f} (" in page
        assert all(sentence in page for sentence in report.verdict.split(". ", 1))
        assert LIMITS[report.bound] in report.verdict


@pytest.mark.parametrize("name", ["slow", "quick"])
def test_what_contradicts_itself_is_said_softly(name: str, tmp_path: Path) -> None:
    report = make_report(recorded(JOBS[name]))
    assert report.bound == "prep"
    assert report.predicted is not None
    numbers = f"predicted {report.predicted:,.0f} examples/s, measured {JOBS[name].rate:,.0f}"
    assert f"\nUncertain: {numbers}.\n" in str(report)
    assert "The job seems to be limited by preparing data" in report.verdict
    write_report(report, tmp_path / "report.json")
    assert read_report(tmp_path / "report.json").doubts == report.doubts
    said = call("what-if", str(tmp_path / "report.json")).stdout
    assert said.splitlines()[0].startswith("Uncertain: predicted")


def test_an_interval_that_reaches_0_is_said_first() -> None:
    report: Report = msgspec.structs.replace(
        FETCH, rates=msgspec.structs.replace(FETCH.rates, S=Rate(900.0, 0.0, 1_800.0))
    )
    report = msgspec.structs.replace(report, doubts=find_doubts(report))
    assert report.doubts == ["the 95 % interval of S reaches 0"]
    assert write_verdict(report).startswith("The job seems to be")
    assert find_doubts(FETCH) == []
