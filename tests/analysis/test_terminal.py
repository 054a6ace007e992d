"""A report in the terminal has what the report has."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from analysis.reports import REPORTS
from stoker.analysis.model.report import Report
from stoker.analysis.reports.terminal import show_report


def shown(report: Report) -> str:
    """Return what is printed, with a single space between words."""
    text = io.StringIO()
    show_report(report, Console(file=text, width=250))
    assert " ".join(report.verdict.split()) in " ".join(str(report).split())
    return " ".join(text.getvalue().split())


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
        found = "-" if rate is None else f"{rate.value:,.0f} {rate.low:,.0f} to {rate.high:,.0f}"
        assert f" {letter} {found} " in said
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
    for cost in report.transforms:
        share = cost.share
        figures = f"{1e3 * cost.seconds:.3g} {share.value:.0%} {100 * share.low:.0f} to"
        assert f" {cost.name} {figures} {share.high:.0%} " in said


def test_what_is_not_known_is_told_as_such() -> None:
    report = REPORTS["unknown"]
    reasons = {"S": "storage was not asked", "F": "storage was not asked"}
    said = shown(msgspec.structs.replace(report, reasons=reasons))
    assert " S - storage was not asked " in said
    assert " F - as S " in said  # once is enough
