"""The report page, in a real browser."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from analysis.browser import needs_chromium, opened
from analysis.reports import FETCH, PREP, REPORTS, about
from stoker.analysis.model.formulas import page_cache_misses
from stoker.analysis.model.model import (
    Change,
    Measured,
    check_change,
    find_cache_needed,
    find_cores_needed,
    predict,
    predict_with_page_cache,
)
from stoker.analysis.model.report import (
    Action,
    Interval,
    Loader,
    Preparing,
    PrepWork,
    Rate,
    Rates,
    Report,
    StackFrame,
    to_measured,
)
from stoker.analysis.reports.page import write_page
from stoker.analysis.reports.verdict import find_doubts, write_verdict
from strategies import shortened

LIMIT_BYTES = 1_000_000
CLOSE = 1e-9


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """The page of a job that waits for storage."""
    write_page(FETCH, tmp_path / "page.html")
    return tmp_path / "page.html"


def data_of(page: Path) -> str:
    """Return what a page holds of its report, as JSON."""
    text = page.read_text("utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return found[1]


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_is_one_small_file(name: str, tmp_path: Path) -> None:
    write_page(REPORTS[name], tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < LIMIT_BYTES
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "default-src 'none'" in text, "the browser loads nothing, whatever the page asks for"
    assert 'name="viewport"' in text
    assert "{{" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    content = json.loads(data_of(tmp_path / "page.html"))
    assert msgspec.convert(content["report"], Report) == REPORTS[name]
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


SHOW_EACH = """
const text = (id) => document.getElementById(id).textContent;
return reports.map((data) => {
    show(data);
    const wide = document.documentElement;
    return {
        verdict: text("verdict"),
        bars: document.querySelectorAll("#split .bar span").length,
        charts: [...document.querySelectorAll(".chart")].filter((chart) =>
            chart.querySelector("svg")).map((chart) => chart.id),
        silent: [...document.querySelectorAll(".chart")].filter((chart) =>
            chart.querySelector("svg") && !chart.getAttribute("aria-label")).length,
        unlabelled: [...document.querySelectorAll("input, select")].filter((field) =>
            !field.labels.length && !field.getAttribute("aria-label")).length,
        rate: Number(document.getElementById("rate").dataset.value),
        disabled: [...document.querySelectorAll("input:disabled")].map((field) => field.id),
        actions: document.querySelectorAll("#actions li").length,
        code: [...document.querySelectorAll("#actions code")].map((code) => code.textContent),
        waits: document.querySelectorAll("#waits-chart .wait").length,
        notes: text("notes"),
        rates: text("rates-table"),
        ranks: document.querySelectorAll("#ranks tbody tr").length,
        overflow: wide.scrollWidth - wide.clientWidth,
    };
});
"""


@needs_chromium
def test_every_report_is_shown(page: Path, tmp_path: Path) -> None:
    for name, report in REPORTS.items():
        write_page(report, tmp_path / f"{name}.html")
    datas = ", ".join(data_of(tmp_path / f"{name}.html") for name in REPORTS)
    shown = opened(page, f"const reports = [{datas}];" + SHOW_EACH, width=500)
    assert shown.console == []
    for report, found in zip(REPORTS.values(), shown.found, strict=True):
        now = predict(to_measured(report))
        assert report.verdict.startswith(found["verdict"])
        assert found["rate"] == pytest.approx(now.rate, rel=CLOSE)
        shares = (report.split.compute, report.split.prep_stall, report.split.fetch_stall)
        assert found["bars"] == sum(share > 0 for share in shares)
        charts = {"rates-chart", "waits-chart", "curve-cores", "curve-accelerator"}
        if report.rates.S is not None:
            charts |= {"curve-cache", "curve-storage"}
        assert set(found["charts"]) == charts
        assert found["silent"] == found["unlabelled"] == 0
        fetching = ["slider-cache", "slider-storage", "slider-hosts"]
        assert found["disabled"] == ([] if report.rates.S is not None else fetching)
        assert found["actions"] == len(report.actions)
        assert found["code"] == [action.code for action in report.actions]
        assert report.as_it_is
        assert found["waits"] == len(report.as_it_is.waits)
        assert report.notes[0] in found["notes"]
        assert all(reason in found["notes"] for reason in report.reasons.values())
        assert all(reason in found["rates"] for reason in report.reasons.values())
        assert found["ranks"] == len(report.ranks)
        assert found["overflow"] <= 0, "nobody scrolls sideways on a phone"


SLIDE = """
const at = (id) => document.getElementById(id);
const seen = () => ({
    rate: Number(at("rate").dataset.value),
    shown: at("rate").textContent,
    says: at("compared").textContent,
    remarks: at("remarks").textContent,
    unit: at("rate-unit").textContent,
    cache: at("slider-cache-value").textContent,
});
const slide = (name, value) => {
    at(`slider-${name}`).value = value;
    at(`slider-${name}`).dispatchEvent(new Event("input", { bubbles: true }));
    return seen();
};
const found = [seen(), slide("cache", 0.5), slide("cores", 12), slide("storage", 2),
    slide("accelerator", 1), slide("jobs", 3)];
at("sharing").click();
found.push(seen(), slide("echo", 2.5));
at("echo-at").value = "before-augmentation";
at("echo-at").dispatchEvent(new Event("change"));
found.push(seen(), slide("hosts", 4));
at("reset").click();
found.push(seen());
whatIf.draw();
const paths = document.querySelectorAll("#curve-cache .series").length;
return { found, paths };
"""


@needs_chromium
def test_sliders_change_the_prediction(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(PREP, path)
    shown = opened(path, SLIDE)
    assert shown.console == []
    job = to_measured(PREP)
    assert job.storage
    assert job.example_bytes
    size = job.example_bytes * (job.examples or 0)
    asked = [Change()]
    for step in (
        {"cache_bytes": round(0.5 * size)},
        {"cores": 12},
        {"storage_mbps": 4 * job.storage * job.example_bytes / 1e6},
        {"accelerator": 2.0},
        {"jobs": 3},
        {"sharing": True},
        {"echo": 2.5},
        {"echo_at": "before-augmentation"},
        {"hosts": 4},
    ):
        asked.append(replace(asked[-1], **step))  # type: ignore[arg-type]
    asked.append(Change())
    found = shown.found["found"]
    for change, seen in zip(asked, found, strict=True):
        expected = predict(job, change)
        assert seen["rate"] == pytest.approx(expected.rate, rel=CLOSE)
        assert seen["shown"] == f"{expected.rate:,.0f}"
        assert f"What limits: {expected.bound}." in seen["says"]
    misses = page_cache_misses(0.5)
    assert found[1]["cache"].startswith("50 % = 68.0 GiB")
    assert f"a page cache of that size misses {100 * misses:.1f} %" in found[1]["remarks"]
    assert "for each of 3 jobs" in found[5]["unit"]
    assert "A repeat may be worth less than a fresh example" in found[7]["remarks"]
    assert "4 hosts with a partitioned cache hold 100.0 %" in found[9]["remarks"]
    assert "over 1,250 MB/s (assumed)" in found[9]["remarks"]
    assert shown.found["paths"] == 5, "three lines, and two points: measured, and as set"


def grid(job: Measured) -> list[Change]:
    """Return all changes of a grid that can be asked of a job."""
    echoes = [
        (1.0, "batch"),
        (2.0, "batch"),
        (3.5, "after-augmentation"),
        (7, "before-augmentation"),
    ]
    found = []
    for cores, cache, mbps, speed, (jobs, sharing), (echo, place), more in itertools.product(
        (None, 3, 16),
        (None, 0, 30 * 10**9, 10**12),
        (None, 512.3),
        (1.0, 2.7),
        ((1, False), (5, False), (5, True)),
        echoes,
        ((1, 1250.0, ""), (4, 80.5, ""), (1, 1250.0, "by offset"), (4, 1250.0, "in runs")),
    ):
        change = Change(cores, cache, mbps, speed, jobs, sharing, echo, place, *more)
        try:
            check_change(job, change)
        except ValueError:
            continue
        found.append(change)
    return found


COMPUTE_GRID = """
return jobs.map(([job, changes]) => changes.map(([change, needs]) => {
    const measured = fromJson(job);
    const found = predict(measured, change);
    return [found, predictWithPageCache(measured, change).rate,
        needs ? findCacheNeeded(measured, change, found) : null,
        needs ? findCoresNeeded(measured, change, found) : null];
}));
"""


def agrees(found: Any, expected: Any) -> bool:
    """Compare a value of the page with Python's; JSON has no infinity, but null."""
    if isinstance(expected, float):
        if math.isinf(expected):
            return found is None
        return math.isclose(found, expected, rel_tol=CLOSE, abs_tol=1e-12)
    return bool(found == expected)


@pytest.mark.full
@needs_chromium
def test_the_page_predicts_what_python_predicts(page: Path) -> None:
    jobs = [to_measured(report) for report in REPORTS.values()]
    jobs += [
        replace(jobs[1], trains_on_cpu=True, step_cpu_s=0.004, miss_s=0.01),
        replace(jobs[1], efficiency=((2, 0.95), (8, 0.7))),
        replace(jobs[0], prep=((2, 900.0), (5, 700.0), (7, 2_000.0)), workers=6, cores=2),
        replace(jobs[3], prep=((0, 240.0), (4, 800.0)), storage_most=2_000.0),
        replace(jobs[3], prep=((1, 9e3), (8, 9e4)), storage_most=10 * (jobs[3].cache or 0.0)),
    ]
    asked = [
        (job, [(change, number % 9 == 0) for number, change in enumerate(grid(job))])
        for job in jobs
    ]
    assert sum(len(changes) for _, changes in asked) > 3_000
    script = f"const jobs = {msgspec.json.encode(asked).decode()};" + COMPUTE_GRID
    shown = opened(page, script)
    assert shown.console == []
    for (job, changes), answers in zip(asked, shown.found, strict=True):
        for (change, needs), (found, page_cache, cache, cores) in zip(
            changes, answers, strict=True
        ):
            expected = predict(job, change)
            wrong = {
                name: (found[name], value)
                for name, value in asdict(expected).items()
                if not agrees(found[name], value)
            }
            assert not wrong, change
            assert agrees(page_cache, predict_with_page_cache(job, change).rate)
            if needs:
                assert cores == find_cores_needed(job, change, expected)
                needed = find_cache_needed(job, change, expected)
                assert agrees(cache, needed) or cache == pytest.approx(needed, abs=1e-9)


HOSTILE = (
    "</script><script>window.taken = 1</script><img src=x onerror='window.taken = 2'>"
    "<!--<script>{{css}}</style><a href='javascript:window.taken = 3'>&lt;b&gt;'\"`${1}\u2028"
)

LOOK_FOR_IT = """
const one = (id) => document.getElementById(id).textContent;
return {
    taken: window.taken === undefined ? null : window.taken,
    made: document.querySelectorAll("header, main, footer").values().reduce((count, part) =>
        count + part.querySelectorAll("img, a, script").length, 0),
    texts: ["verdict", "about", "job", "notes", "actions", "phases", "facts", "stages-table",
        "made", "rates-table"].map(one),
    places: [...document.querySelectorAll("#echo-at option")].map((place) => place.textContent),
    title: document.title,
};
"""


FLAME = """
const cells = () => [...document.querySelectorAll("#flame button")].map((cell) => ({
    text: cell.textContent,
    kind: cell.className,
    left: cell.offsetLeft,
    width: cell.offsetWidth,
    top: cell.offsetTop,
}));
const flame = document.getElementById("flame");
const whole = cells();
flame.querySelector("button.library").click();
const widened = cells();
const chosen = document.getElementById("flame-chosen").textContent;
const focused = document.activeElement.textContent;
flame.firstChild.click();
return {
    whole, widened, chosen, focused, back: cells(),
    width: flame.clientWidth,
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    hidden: document.getElementById("preparing-section").hidden,
    text: document.getElementById("preparing-text").textContent,
    table: document.getElementById("preparing-table").textContent,
};
"""


@needs_chromium
@pytest.mark.parametrize("width", [400, 1200])
def test_the_flame_graph_is_as_wide_as_the_time_and_widens(width: int, tmp_path: Path) -> None:
    write_page(PREP, tmp_path / "page.html")
    shown = opened(tmp_path / "page.html", FLAME, width=width)
    assert shown.console == []
    found = shown.found
    assert found["overflow"] == 0
    assert not found["hidden"]
    assert PREP.preparing is not None
    assert PREP.preparing.text in found["text"]
    assert "ColorJitter30.0 % 26 to 34 %" in found["table"]
    item, convert, decode, jitter = found["whole"]
    assert [cell["kind"] for cell in found["whole"]] == ["own", "library", "native", "own"]
    assert item["text"] == "Photographs.__getitem__ 100.0 %"
    for cell, share in ((item, 1.0), (convert, 0.7), (decode, 0.5), (jitter, 0.3)):
        assert cell["width"] == pytest.approx(share * found["width"], abs=1.5)
    assert convert["top"] == jitter["top"] > item["top"]
    assert decode["top"] > convert["top"]
    assert jitter["left"] >= convert["left"] + convert["width"] - 1
    item, convert, decode = found["widened"]
    assert item["width"] == convert["width"] == found["width"]
    assert decode["width"] == pytest.approx(5 / 7 * found["width"], abs=1.5)
    assert found["focused"] == convert["text"] == "Image.convert 70.0 %"
    assert found["chosen"].startswith("Image.convert, 70.0 % of the time: /env/lib/")
    assert found["back"] == found["whole"]


@needs_chromium
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
        actions=[Action(HOSTILE, HOSTILE, Rate(2.0, 1.0, 3.0), HOSTILE)],
        notes=[HOSTILE],
        after_s={HOSTILE: 0.0},
        stages={HOSTILE: about(3.0)},
        phases=[{HOSTILE: HOSTILE}],
        preparing=Preparing(
            9,
            1,
            HOSTILE,
            [PrepWork(HOSTILE, 1.0, Interval(1.0, 1.0))],
            [StackFrame(HOSTILE, HOSTILE, 1.0, [])],
        ),
    )
    write_page(report, tmp_path / "page.html")
    shown = opened(tmp_path / "page.html", LOOK_FOR_IT)
    assert shown.console == []
    assert shown.found["taken"] is None
    assert shown.found["made"] == 0
    assert "taken" not in shown.found["title"]
    phases = 5
    for number, text in enumerate(shown.found["texts"]):
        assert (HOSTILE in text) or (number == phases and "window.taken = 1" in text)
    assert shown.found["places"] == ["whole batches", HOSTILE]


ON_PAPER = """
const width = () => document.querySelector("#rates-chart svg").getAttribute("width");
const ink = () => getComputedStyle(document.querySelector("#rates-chart .xtick text")).fill;
const before = [width(), ink(), getComputedStyle(document.body).backgroundColor];
window.dispatchEvent(new Event("beforeprint"));
const paper = [width(), ink(), getComputedStyle(document.body).backgroundColor];
window.dispatchEvent(new Event("afterprint"));
return { before, paper, after: [width(), ink(), getComputedStyle(document.body).backgroundColor] };
"""


@needs_chromium
def test_it_is_dark_where_that_is_preferred_and_light_on_paper(page: Path) -> None:
    shown = opened(page, ON_PAPER, dark=True)
    assert shown.console == []
    before, paper, after = (shown.found[when] for when in ("before", "paper", "after"))
    assert before == after
    assert paper[0] == "660"
    assert paper[1] != before[1], "the charts' words have the paper's colour"
    assert paper[2] == "rgb(255, 255, 255)"
    assert before[2] == "rgb(20, 23, 27)"


@needs_chromium
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
    script = """
    const at = (id) => document.getElementById(id);
    return { model: at("model").hidden, why: at("no-model").textContent,
        waits: at("waits-section").hidden, actions: at("no-actions").hidden,
        chart: Boolean(at("rates-chart").querySelector("svg")) };
    """
    shown = opened(tmp_path / "page.html", script)
    assert shown.console == []
    assert "this analysis has no G" in shown.found["why"]
    assert "training was never seen" in shown.found["why"]
    assert shown.found["model"]
    assert shown.found["waits"]
    assert not shown.found["actions"]
    assert shown.found["chart"]


POINT_AT = """
whatIf.set("cores", 12);
whatIf.draw();
const at = (id, x, y) => {
    const chart = document.getElementById(id);
    const svg = chart.querySelector("svg");
    const box = svg.getBoundingClientRect();
    const point = { clientX: box.left + x * box.width, clientY: box.top + y * box.height };
    svg.dispatchEvent(new PointerEvent("pointermove", point));
    const tip = chart.querySelector(".tip");
    const shown = tip.getBoundingClientRect();
    const inside = shown.left >= box.left && shown.right <= document.documentElement.clientWidth;
    return { text: tip.innerText, shown: !tip.hidden && inside };
};
const found = { rates: at("rates-chart", 0.5, 0.05), left: at("curve-accelerator", 0, 0.5),
    right: at("curve-accelerator", 1, 0.5), cache: at("curve-cache", 1, 0.5),
    waits: at("waits-chart", 0, 0.1) };
const svg = document.querySelector("#waits-chart svg");
svg.dispatchEvent(new PointerEvent("pointerleave"));
found.left_again = document.querySelector("#waits-chart .tip").hidden;
const axis = (id) => [...document.querySelectorAll(`#${id} .xtick`)].map((tick) =>
    tick.textContent);
found.axes = ["rates-chart", "curve-cores", "curve-cache", "curve-storage", "curve-accelerator",
    "waits-chart"].map(axis);
found.titles = [...document.querySelectorAll("#curve-storage .title")].map((t) => t.textContent);
return found;
"""


@needs_chromium
@pytest.mark.parametrize("width", shortened([500, 1280], 1))
def test_values_are_shown_under_the_pointer(page: Path, width: int) -> None:
    shown = opened(page, POINT_AT, width=width)
    assert shown.console == []
    found = shown.found
    job = to_measured(FETCH)
    assert found["rates"]["text"].split("\n")[0] == "S, storage gives"
    assert "900 examples/s" in found["rates"]["text"]
    assert "95 %: 810 to 990" in found["rates"]["text"]
    for side, speed in (("left", 0.25), ("right", 16.0)):
        text = found[side]["text"]
        assert text.split("\n")[0] == f"{speed:g}× as fast"
        now = predict(job, Change(accelerator=speed)).rate
        then = predict(job, Change(accelerator=speed, cores=12)).rate
        assert f"{now:,.0f} examples/s, all else as it is" in text
        assert f"{then:,.0f} examples/s, all else as set" in text
    assert "a page cache" in found["cache"]["text"]
    assert found["waits"]["text"].startswith("waited ")
    assert "worker 0" in found["waits"]["text"]
    for chart in ("rates", "left", "right", "cache", "waits"):
        assert found[chart]["shown"], chart
    assert found["left_again"]
    assert all(len(set(words)) == len(words) >= 3 for words in found["axes"])
    assert "0 %" in found["axes"][2]
    assert "100 %" in found["axes"][2]
    assert found["titles"] == ["MB/s (logarithmic)", "examples/s"]


HEADLINES = """
return verdicts.map((verdict) => {
    report.verdict = verdict;
    showHead();
    const head = document.getElementById("verdict");
    const one = parseFloat(getComputedStyle(head).lineHeight);
    return [head.textContent, Math.round(head.getBoundingClientRect().height / one)];
});
"""


@needs_chromium
@pytest.mark.parametrize("width", shortened([500, 1280], 1))
def test_the_headline_has_two_lines_at_most(page: Path, width: int) -> None:
    assert FETCH.as_it_is is not None
    speed = msgspec.structs.replace(FETCH.as_it_is, rate=about(98_765.0))
    verdicts = [report.verdict for report in REPORTS.values()]
    for more in (
        {"as_it_is": None},
        {"rates": Rates()},
        {"trains_on_cpu": True, "bound": "compute"},
        {"as_it_is": speed},
        {"rates": Rates(*(Rate(9.0, 0.0, 18.0) for _ in "GPSCF"))},
    ):
        found: Report = msgspec.structs.replace(FETCH, **more)
        found = msgspec.structs.replace(found, doubts=find_doubts(found))
        verdicts.append(write_verdict(found))
    script = f"const verdicts = {json.dumps(verdicts)};" + HEADLINES
    shown = opened(page, script, width=width)
    assert shown.console == []
    for (headline, lines), text in zip(shown.found, verdicts, strict=True):
        assert 0 < lines <= 2, headline
        assert text.startswith(headline)
