"""The report page: one static file with all that the terminal shows."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from analysis.reports import FETCH, PREP, REPORTS, about
from stoker.analysis.model.model import NOTHING
from stoker.analysis.model.report import (
    Action,
    Cost,
    Loader,
    Rate,
    Rates,
    to_measured,
)
from stoker.analysis.model.what_if import answer
from stoker.analysis.reports.page import write_page

LIMIT_BYTES = 100_000


class PageReader(HTMLParser):
    """Collects the text and the elements of a page; each element that is opened is closed."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.text = ""
        self.elements: set[str] = set()
        self._open: list[str] = []
        self.feed(page.read_text("utf-8"))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        if tag != "meta":
            self._open.append(tag)
        if tag in ("td", "th", "p", "h1", "h2", "pre"):
            self.text += " "

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if self._open[-1:] != ["style"] else ""


def text_of(page: Path) -> str:
    """Return the text of a page, with a single space between words."""
    return " ".join(PageReader(page).text.split())


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_is_one_small_file_with_all_that_a_report_says(name: str, tmp_path: Path) -> None:
    report, page = REPORTS[name], tmp_path / "page.html"
    write_page(report, page)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert page.stat().st_size < LIMIT_BYTES
    source = page.read_text("utf-8")
    assert "default-src 'none'" in source, "the browser loads nothing, whatever the page asks for"
    assert 'name="viewport"' in source
    assert not {"script", "link", "img"} & PageReader(page).elements
    said = text_of(page)
    told = [*report.verdict.split(". ", 1), *report.doubts, *report.notes, *report.reasons.values()]
    told += [text for action in report.actions for text in (action.title, action.code, action.why)]
    told += [f"{rate.value:,.0f}" for rate in (report.rates.G, report.rates.S) if rate]
    assert [text for text in told if " ".join(text.split()) not in said] == []
    for curve in answer(to_measured(report), NOTHING).curves:
        for point in curve.points:
            assert f" {point.rate:,.0f} {point.bound} " in said or point.rate < 100


HOSTILE = (
    "</script><script>window.taken = 1</script><img src=x onerror='window.taken = 2'>"
    "<!--<script>{css}</style><a href='javascript:window.taken = 3'>&lt;b&gt;'\"`${1}\u2028"
)


def test_names_do_nothing(tmp_path: Path) -> None:
    loader = Loader(HOSTILE, HOSTILE, 2, 8.0, HOSTILE, 9, True)
    report = msgspec.structs.replace(
        FETCH,
        stoker=HOSTILE,
        made=HOSTILE,
        command=[HOSTILE],
        loader=loader,
        loaders=[loader],
        rates=msgspec.structs.replace(FETCH.rates, F=None),
        reasons={"F": HOSTILE, HOSTILE: HOSTILE},
        verdict=HOSTILE,
        actions=[Action(HOSTILE, HOSTILE, Rate(2.0, 1.0, 3.0), HOSTILE, HOSTILE)],
        notes=[HOSTILE],
        transforms=[Cost(HOSTILE, Rate(1.0, 1.0, 1.0), 0.001)],
    )
    write_page(PREP, tmp_path / "page.html")
    write_page(report, tmp_path / "hostile.html")
    plain, hostile = (PageReader(tmp_path / f"{name}.html") for name in ("page", "hostile"))
    assert hostile.elements <= plain.elements
    assert hostile.text.count(HOSTILE) > 10


def test_a_report_without_predictions_says_why(tmp_path: Path) -> None:
    nothing = msgspec.structs.replace(
        FETCH,
        rates=Rates(S=about(100.0)),
        reasons={"G": "training was never seen"},
        as_it_is=None,
        actions=[],
        prep=[],
    )
    write_page(nothing, tmp_path / "page.html")
    said = text_of(tmp_path / "page.html")
    assert "this analysis has no G, so nothing can be predicted: training was never seen" in said
