"""`stoker what-if`: as people call it, and what stands behind it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.reports import ALONE, FETCH, PREP, REPORTS, UNKNOWN, about
from command_line import Called, call, python
from stoker.analysis.model.formulas import prep_rate, smallest_cache
from stoker.analysis.model.model import Change, predict
from stoker.analysis.model.report import Prepared, Rates, Report, to_measured, write_report
from stoker.analysis.model.what_if import answer
from stoker.analysis.reports.advice import advise

every_report = pytest.mark.parametrize("name", REPORTS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with all reports."""
    for name, report in REPORTS.items():
        write_report(report, tmp_path / f"{name}.json")
    return tmp_path


def what_if(*words: str | os.PathLike[str]) -> Called:
    """Call the command in this process."""
    return call("what-if", *words)


def row(out: str, name: str) -> list[str]:
    """Return the words of a line behind its name."""
    line = next(line for line in out.splitlines() if line.strip().startswith(name))
    return line.strip().removeprefix(name).split()


def test_before_and_after(folder: Path) -> None:
    words = folder / "fetch.json", "--cache", "100GiB", "--cores", "16"
    done = python("-W", "error", "-m", "stoker", "what-if", *words, PYTHONIOENCODING="utf-8")
    assert (done.returncode, done.stderr) == (0, "")
    out = done.stdout
    job = to_measured(FETCH)
    before, after = predict(job), predict(job, Change(cores=16, cache_bytes=100 << 30))
    assert out.startswith("train.py:41  ImageFolder, batches of 256, 8 workers\n")
    assert "then: 16 cores, a cache of 100.0 GiB that never evicts" in out
    assert row(out, "examples/s") == [f"{before.rate:,.0f}", f"{after.rate:,.0f}"]
    assert row(out, "of the speed as it is") == ["1.00x", f"{after.rate / before.rate:.2f}x"]
    assert row(out, "steps/s") == [f"{p.rate / 256:,.3g}" for p in (before, after)]
    assert row(out, "what limits") == [before.bound, after.bound]
    assert row(out, "time in compute") == [f"{p.compute:.1%}" for p in (before, after)]
    assert row(out, "lost to fetch") == [f"{p.fetch_stall:.1%}" for p in (before, after)]
    assert row(out, "G  training takes") == ["3,000", "3,000"]
    assert "100.0 GiB hold 73.5% of the dataset" in out
    assert "examples/s over cache" in out
    assert "examples/s over cores" in out
    assert "examples/s over storage" not in out
    assert "<- as it is" in out
    assert "<- asked" in out


@every_report
def test_without_options_it_shows_the_job_and_all_curves(folder: Path, name: str) -> None:
    code, out, errors = what_if(folder / f"{name}.json")
    assert (code, errors) == (0, "")
    assert row(out, "what limits") == [REPORTS[name].bound]
    curves = ["cores", "accelerator"]
    if name != "unknown":
        curves += ["cache", "storage"]
    assert out.count("examples/s over") == len(curves)
    assert all(f"examples/s over {curve}" in out for curve in curves)
    assert out.count("<- as it is") == len(curves)
    assert ("ranks" in out) == (name == "ranks")
    assert ("F  fetch gives" in out) == ("x* cache that is enough" in out) == (name != "unknown")


def test_echoing_says_what_a_repeat_is_worth(folder: Path) -> None:
    code, out, _ = what_if(folder / "prep.json", "--echo", "3")
    assert code == 0
    found = predict(to_measured(PREP), Change(echo=3))
    assert row(out, "uses/s")[1] == f"{found.rate:,.0f}"
    assert row(out, "fresh examples/s of these")[1] == f"{found.fresh_rate:,.0f}"
    assert "A repeat may be worth less than a fresh example" in out


def test_items_are_not_called_examples(folder: Path) -> None:
    loader = msgspec.structs.replace(FETCH.loader, unit="items")
    write_report(msgspec.structs.replace(FETCH, loader=loader), folder / "items.json")
    code, out, _ = what_if(folder / "items.json", "--cache", "20GiB", "--echo", "2")
    assert code == 0
    assert "examples" not in out.replace("ImageFolder, batches of 256", "").replace(
        "worth less than a fresh example", ""
    )
    assert "items/s over cache" in out


def test_a_cache_of_prepared_examples_is_asked_about_where_the_report_advises_one(
    folder: Path,
) -> None:
    prepared = Prepared(example_bytes=1_000_000, varies=False)
    report = msgspec.structs.replace(UNKNOWN, examples=20_000, prepared=prepared)
    (kept,) = (each for each in advise(report) if "stoker.cached" in each.code)
    write_report(report, folder / "kept.json")
    for size, at_least in (("40GiB", kept.gain.value - 0.01), ("10GiB", 1.1)):
        code, out, errors = what_if(folder / "kept.json", "--cache", size)
        assert code == 0, errors
        gain = float(row(out, "of the speed as it is")[1].removesuffix("x"))
        assert at_least <= gain <= kept.gain.value + 0.01
        assert "examples/s over cache" in out
        assert what_if(folder / "kept.json", "--cache", size, "--cores", "2")[0] == 0
    assert "10.0 GiB hold 51.1% of the dataset" in out
    code, _, errors = what_if(folder / "unknown.json", "--cache", "40GiB")
    assert code == 1
    assert "could not separate fetching" in errors


@pytest.mark.parametrize("text", ["2x", "2", "2.0"])
def test_an_accelerator_is_a_multiple(folder: Path, text: str) -> None:
    code, out, _ = what_if(folder / "compute.json", "--accelerator", text)
    assert code == 0
    assert "an accelerator 2x as fast" in out
    assert row(out, "G  training takes") == ["600", "1,200"]


def test_what_goes_wrong_is_one_line(folder: Path) -> None:
    still: Report = msgspec.structs.replace(FETCH, rates=Rates(G=about(0.0)))
    write_report(still, folder / "still.json")
    nothing = msgspec.structs.replace(FETCH, rates=Rates(), reasons={"G": "it never trained"})
    write_report(nothing, folder / "nothing.json")
    calls: list[tuple[list[str], str]] = [
        (["."], "Is a directory"),
        (["still.json"], "a rate that is not above 0"),
        (["nothing.json"], "this analysis has no G"),
        (["prep.json", "--cache", "lots"], "'lots' is not a size"),
        (["prep.json", "--accelerator", "fast"], "a multiple such as 2x"),
        (["prep.json", "--cores", "0"], "cores=0: at least 1"),
        (["unknown.json", "--cache", "1GiB"], "could not separate fetching"),
    ]
    for words, message in calls:
        words = [str(folder / word) if ".json" in word or word == "." else word for word in words]
        code, out, errors = what_if(*words)
        assert (code, out) == (1, ""), words
        assert errors.startswith("stoker what-if: "), errors
        assert errors.count("\n") == 1, errors
        assert message in errors


# What it would take


@pytest.mark.parametrize("name", ["fetch", "prep", "ranks"])
@given(data=st.data())
def test_the_cache_needed_is_enough(name: str, data: Any) -> None:
    job = to_measured(REPORTS[name])
    change = Change(
        cores=data.draw(st.none() | st.integers(1, 32)),
        storage_mbps=data.draw(st.none() | st.floats(10, 2_000)),
        accelerator=data.draw(st.floats(0.2, 4)),
        echo=data.draw(st.floats(1, 4)),
    )
    outcome = answer(job, change).outcomes[1 if change != Change() else 0]
    assert outcome.cache_needed_bytes is not None
    enough = predict(job, replace(change, cache_bytes=outcome.cache_needed_bytes))
    assert enough.fetch_stall == pytest.approx(0.0, abs=1e-6)
    if outcome.cache_needed_bytes > 10**6:
        fewer = replace(change, cache_bytes=round(0.99 * outcome.cache_needed_bytes))
        assert predict(job, fewer).fetch_stall > 0


def test_what_is_needed_is_what_the_model_says() -> None:
    job = to_measured(FETCH)
    outcome = answer(job, Change()).outcomes[0]
    enough = [n for n in range(1, 65) if prep_rate(job.prep, n) >= min(900, 3_000)]
    assert outcome.cores_needed == enough[0]
    takes = min(3_000.0, outcome.prediction.processors)
    x = smallest_cache(900, 24_000, 1_900, takes, job.miss_s / 8)
    assert outcome.cache_needed == pytest.approx(x)


def test_where_training_prepares_itself_any_waiting_counts() -> None:
    outcome = answer(to_measured(ALONE), Change()).outcomes[0]
    assert outcome.cache_needed == pytest.approx(1.0)
    # Reading as fast as preparing is hidden behind it, where both overlap.
    job = replace(to_measured(ALONE), miss_s=0.0)
    assert answer(job, Change()).outcomes[0].cache_needed == 0.0


@every_report
def test_curves_pass_through_what_was_measured_and_asked(name: str) -> None:
    job = to_measured(REPORTS[name])
    for curve in answer(job, Change()).curves:
        (point,) = [point for point in curve.points if point.mark == "as it is"]
        assert point.rate == predict(job).rate
    change = Change(cores=3, accelerator=1.7)
    for curve in answer(job, change).curves:
        (point,) = [point for point in curve.points if point.mark == "asked"]
        assert point.rate == predict(job, change).rate
        ats = [point.at for point in curve.points]
        assert ats == sorted(set(ats))


def test_no_number_of_cores_may_be_enough() -> None:
    job = replace(to_measured(UNKNOWN), ingestion=1e9)
    assert answer(job, Change()).outcomes[0].cores_needed is None
