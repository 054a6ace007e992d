"""When a watched run counts as slow, and why: windows and percentiles, without running anything."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.browser import needs_chromium, opened
from stoker.analysis.watching.histogram import DurationHistogram
from stoker.analysis.watching.page import write_watch_page
from stoker.analysis.watching.slowdown import SlowdownDetector, WatchWindow, explain, summarize
from stoker.analysis.watching.stats import WatchStats

USUAL = WatchWindow(
    seconds=10.0,
    batches=500,
    wait_s=0.002,
    step_s=0.018,
    cpu_s=0.015,
    read_bytes=100_000.0,
    available_bytes=8 << 30,
)


@given(st.lists(st.integers(0, 1 << 50), min_size=1), st.floats(0.0, 1.0))
def test_percentiles_are_right_within_a_bucket(times: list[int], fraction: float) -> None:
    durations = DurationHistogram()
    for ns in times:
        durations.add(ns)
    exact = sorted(times)[math.floor(fraction * (len(times) - 1))] / 1e9
    found = durations.quantile(fraction)
    assert abs(found - exact) <= exact / 30
    assert (durations.count, durations.total_ns) == (len(times), sum(times))


def test_no_durations_have_no_percentiles() -> None:
    assert DurationHistogram().quantile(0.5) == 0.0


@given(st.lists(st.floats(0.85, 1.15), min_size=1, max_size=60))
def test_a_steady_run_is_never_called_slow(factors: list[float]) -> None:
    detector = SlowdownDetector()
    for factor in factors:
        window = replace(USUAL, wait_s=factor * USUAL.wait_s, step_s=factor * USUAL.step_s)
        assert detector.add(window) is None


@given(st.floats(1.6, 1e4), st.integers(2, 9), st.integers(3, 40))
def test_a_slow_run_is_told_once_and_its_end_too(factor: float, slow: int, before: int) -> None:
    detector = SlowdownDetector()
    said = [detector.add(USUAL) for _ in range(before)]
    worse = replace(USUAL, wait_s=factor * USUAL.cycle_s)
    said += [detector.add(worse) for _ in range(slow)]
    said += [detector.add(USUAL) for _ in range(3)]
    assert [at for at, text in enumerate(said) if text] == [before + 1, before + slow]
    told, over = said[before + 1], said[before + slow]
    assert told is not None
    assert told.startswith("slower: a batch takes ")
    assert over == "as fast as before again"


def test_one_slow_window_and_windows_without_batches_are_not_told() -> None:
    detector = SlowdownDetector()
    slow = replace(USUAL, wait_s=1.0)
    nothing = WatchWindow(seconds=10.0, batches=0, wait_s=0.0, step_s=0.0)
    windows = [USUAL, USUAL, USUAL, slow, USUAL, nothing, nothing, nothing, slow, USUAL]
    assert [detector.add(window) for window in windows] == [None] * len(windows)


@given(st.lists(st.floats(0.0, 8.0), min_size=3, max_size=30))
def test_a_batch_that_takes_longer_than_a_window_is_not_slow_when_it_comes(
    waits: list[float],
) -> None:
    detector = SlowdownDetector()
    whole = replace(USUAL, batches=1, wait_s=8.0, step_s=4.0)
    for wait_s in waits:
        begun = replace(USUAL, batches=0, wait_s=wait_s, step_s=0.0)
        assert [detector.add(window) for window in (begun, whole)] == [None, None]


def test_a_stopped_worker_is_told_at_once_and_once() -> None:
    detector = SlowdownDetector()
    stopped = replace(USUAL, batches=0, stopped=("process 12",))
    said = [detector.add(window) for window in (stopped, stopped, USUAL, stopped)]
    assert [text is not None for text in said] == [True, False, False, True]
    assert "process 12" in str(said[0])


READS = {"read_bytes": 5e6, "blocked_fraction": 0.8, "disk_fraction": 0.9}
QUEUES = {"queued_s": 0.04, "others_cores": 1.6}


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"wait_s": 0.05, "memory_fraction": 0.4, "available_bytes": 50 << 20}, "memory is short"),
        ({"wait_s": 0.05} | READS, "the page cache no longer"),
        # What little is read is not what the workers wait for.
        ({"wait_s": 0.05} | READS | {"disk_fraction": 0.1}, "storage or the network is slow"),
        ({"wait_s": 0.05, "blocked_fraction": 0.9}, "storage or the network is slow"),
        ({"wait_s": 0.05} | QUEUES, "the run waits for processors; other processes take 1.6, 0.0"),
        ({"step_s": 0.05} | QUEUES, "the run waits for processors; other processes take 1.6, 0.0"),
        ({"step_s": 0.05}, "not by its data: the step takes 50 ms, 18 ms before"),
        ({"wait_s": 0.05, "cpu_s": 0.08}, "a batch takes 80 ms of processor time, 15 ms before"),
        # Of many workers that compute more, each waits for the others.
        ({"wait_s": 0.05, "cpu_s": 0.08} | QUEUES, "a batch takes 80 ms of processor time"),
        ({"wait_s": 0.05}, "the workers wait for processors"),
        # With memory to spare, waiting for it is reading files.
        ({"wait_s": 0.05, "memory_fraction": 0.4}, "the workers wait for processors"),
        # What was so before is no cause.
        ({"wait_s": 0.05, "read_bytes": 110_000.0}, "the workers wait for processors"),
        # A loop that does not wait is not slowed by its storage, nor by a process beside it.
        ({"step_s": 0.05} | READS, "not by its data"),
        ({"step_s": 0.05, "others_cores": 1.6}, "not by its data"),
    ],
)
def test_the_cause_is_what_changed(changes: dict[str, float], cause: str) -> None:
    now = replace(USUAL, **changes)  # type: ignore[arg-type]
    assert cause in explain(USUAL, now)


def test_on_a_busy_host_a_step_that_computes_more_is_the_cause_of_its_queue() -> None:
    usual = replace(USUAL, queued_s=0.01, others_cores=1.7)
    now = replace(usual, step_s=0.1, cpu_s=0.045, queued_s=0.06)
    assert "not by its data" in explain(usual, now)
    assert "the run waits for processors" in explain(usual, replace(now, cpu_s=0.015))


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=9))
def test_a_summary_has_medians(waits: list[float]) -> None:
    found = summarize([replace(USUAL, wait_s=wait_s) for wait_s in waits])
    assert found.wait_s == statistics.median(waits)
    assert found.step_s == USUAL.step_s


STATS = WatchStats(
    rank=3,
    elapsed_s=100.0,
    batches=1234,
    compute_fraction=0.7,
    stall_fraction=0.3,
    prep_stall_fraction=0.2,
    fetch_stall_fraction=0.1,
    wait_p50_s=0.001,
    wait_p95_s=0.02,
    wait_p99_s=0.03,
    warnings=["10:00 <slower>"],
)
COURSE = [USUAL, replace(USUAL, wait_s=0.01), USUAL]


def test_the_page_has_the_shares_the_waits_and_the_warnings() -> None:
    page = write_watch_page("<a>.py", STATS, COURSE)
    for part in ("&lt;a&gt;.py, rank 3", "70.0%", "20.0%", "10.0%", "1,234", "30 ms", "&lt;slower"):
        assert part in page
    assert page.count("<polyline") == 2
    assert "The last 30 s." in page
    assert "none" in write_watch_page("a.py", msgspec.structs.replace(STATS, warnings=[]), [])


@pytest.mark.full
@needs_chromium
@pytest.mark.parametrize("width", [400, 1200])
def test_nobody_scrolls_sideways(tmp_path: Path, width: int) -> None:
    explained = explain(USUAL, replace(USUAL, wait_s=0.05, blocked_fraction=0.9))
    stats = msgspec.structs.replace(STATS, warnings=[explained] * 3)
    (tmp_path / "page.html").write_text(write_watch_page("long_name_" * 20 + ".py", stats, COURSE))
    script = "const page = document.documentElement; return page.scrollWidth - page.clientWidth;"
    shown = opened(tmp_path / "page.html", script, width=width)
    assert (shown.console, shown.found) == ([], 0)
