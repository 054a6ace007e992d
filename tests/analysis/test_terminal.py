"""A report in the terminal has what the report has."""

from __future__ import annotations

import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from analysis.reports import PREP, REPORTS
from stoker.analysis.model.report import (
    REDRAWN,
    UNSAFE,
    Action,
    LoaderOptions,
    Rate,
    Report,
)
from stoker.analysis.reports.terminal import show_report


def shown(report: Report) -> str:
    """Return what is printed with ``--details``, with a single space between words."""
    text = io.StringIO()
    show_report(report, Console(file=text, width=250), details=True)
    return " ".join(text.getvalue().split())


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_begins_with_the_verdict_what_to_do_and_how_in_twelve_lines(name: str) -> None:
    report, text = REPORTS[name], io.StringIO()
    doubt = "predicted 900 examples/s, measured 750"
    report = replace(report, doubts=[doubt], run_s=1800.0)
    show_report(report, Console(file=text, width=300), details=False)
    verdict, *lines = text.getvalue().strip().splitlines()
    assert len(lines) < 8
    assert verdict == f"{report.verdict}."
    for action in report.actions[:1]:
        gain = action.gain
        assert lines[0].rstrip() == (
            f"{action.title}: {gain.value:.2f} times as fast ({gain.low:.2f} to {gain.high:.2f}), "
            f"which saves {30 - 30 / gain.value:.3g} of 30 minutes."
        )
        assert lines[1].rstrip() == f"  {action.code}"
    assert f"Uncertain: {doubt}." in [line.rstrip() for line in lines]
    assert "--details" in lines[-1]

    narrow = io.StringIO()
    report = replace(REPORTS[name], doubts=[doubt, "the host was busy"])
    show_report(report, Console(file=narrow, width=80), details=False)
    assert len([line for line in narrow.getvalue().splitlines() if line.strip()]) <= 12


def test_what_is_named_first_is_safe_and_worth_it_and_has_a_command() -> None:
    advice = Action("use 4 workers", "num_workers=4", Rate(1.04, 1.0, 1.1), "")
    little = str(replace(PREP, actions=[advice]))
    nothing = "Nothing in the loader will help: PIL's decode is 70% of preparing."
    assert nothing in little
    enough = replace(advice, gain=Rate(1.5, 1.4, 1.6), options=LoaderOptions(num_workers=4))
    assert nothing in str(replace(PREP, actions=[replace(enough, safety=UNSAFE)]))
    said = str(replace(PREP, actions=[replace(enough, safety=REDRAWN)]))
    assert (
        "which saves 20 of each 60 minutes. Other random draws, as with another seed.\n"
        "  stoker run train.py --epochs 90\n"
    ) in said
    assert "saves 10 of 30 seconds." in str(replace(PREP, actions=[enough], run_s=30.0))


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_told_whole(name: str) -> None:
    report = REPORTS[name]
    said = shown(report)
    assert " ".join(report.verdict.split()) in said
    split = report.split
    assert f"compute {split.compute:.0%}" in said
    assert f"prep stall {split.prep_stall:.0%}" in said
    assert f"fetch stall {split.fetch_stall:.0%}" in said
    for letter in "GPSCF":
        rate = getattr(report.rates, letter)
        if rate is not None:
            found = f"{rate.value:,.0f} {rate.low:,.0f} to {rate.high:,.0f}"
            assert f" {letter} {found} " in said
        else:
            assert report.reasons.get(letter, "not measured") in said
    for point in report.prep if len(report.prep) > 1 else []:
        trained = f"{point.trained.value:,.0f}" if point.trained else "-"
        assert f" {point.workers} {point.rate.value:,.0f} {trained} ━" in said
    assert said.count("as it is", said.find("With the data in memory")) >= (len(report.prep) > 1)
    for rank in report.ranks:
        assert rank.rates.P is not None
        waits = f"{rank.wait_fraction:.0%} {rank.others_fraction:.0%}"
        assert f" {rank.rank} {rank.rates.P.value:,.0f} {waits}" in said
    for number, action in enumerate(report.actions, 1):
        assert f" {number} {action.gain.value:.2f}x {action.condition}" in said
        assert action.title in said
        assert action.code in said
    for note in report.notes:
        assert f"· {' '.join(note.split())}" in said
    for cost in (*report.step, *report.transforms):
        share = cost.share
        figures = f"{1e3 * cost.seconds:.3g} {share.value:.0%} {100 * share.low:.0f} to"
        assert f" {cost.name} {figures} {share.high:.0%} " in said


def test_what_is_not_known_is_told_as_such() -> None:
    report = REPORTS["unknown"]
    reasons = {"S": "storage was not asked", "F": "storage was not asked"}
    said = shown(replace(report, reasons=reasons))
    assert " S, F not known: storage was not asked " in said
    assert " C not known: not measured " in said
