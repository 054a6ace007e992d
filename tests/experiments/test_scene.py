"""The scene: what is said and drawn of it, on rows made by hand; and storage that changes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from experiments.calibration import Calibration
from experiments.clock import StoppableClock
from experiments.scene import Scene, SceneRow, Stretch
from experiments.scene_view import plot
from experiments.screen import Screen
from experiments.storage import EmulatedSource, Limits


def speed(ratio: float) -> Calibration:
    return Calibration(ratio, ratio, Limits(ratio / 100, 8), ratio / 50, 0.02)


def row(seconds: float, ratio: float, factor: float, waited: float = 0.0) -> SceneRow:
    return SceneRow(seconds, ratio / 100, ratio, factor, waited, 0.02)


STRETCHES = [Stretch(speed(1.0), 2.0), Stretch(speed(3.4), 2.0), Stretch(speed(1.0), 2.0)]
ROWS = [
    row(0.5, 1.0, 2.0), row(1.0, 1.0, 1.5), row(1.5, 1.0, 1.1), row(1.9, 1.0, 1.1),
    row(2.5, 3.4, 1.5), row(3.0, 3.4, 2.5, 0.5), row(3.5, 3.4, 3.4, 0.04), row(3.9, 3.4, 3.4, 0.04),
    row(4.5, 1.0, 2.9), row(5.0, 1.0, 1.2), row(5.5, 1.0, 1.2), row(5.9, 1.0, 1.2),
]  # fmt: skip


def test_the_conclusion_is_of_the_settled_half_of_each_stretch() -> None:
    assert Scene(20, STRETCHES, ROWS).conclusion == (
        "As the storage went to R = 1.0, then 3.4, then 1.0, the factor went to 1.1, then 3.4, "
        "then 1.2 by itself, and training waited for 0%, then 4%, then 0% of the time."
    )


def test_a_scene_that_was_too_fast_says_so() -> None:
    assert "nothing to see" in Scene(20, STRETCHES, ROWS[:5]).conclusion
    assert "nothing to see" in Scene(20, STRETCHES, []).conclusion


def test_the_factor_is_drawn_over_the_time_of_the_whole_scene() -> None:
    *units, ratios = plot(ROWS, seconds=6.0, width=69)
    bars = [line[9:] for line in units]
    assert bars[3] == " " * 5 + "█" * 55, "nothing before the first window; at least 1 from there"
    assert bars[0] == bars[0].replace("█", "").ljust(len(bars[0])), "4 was never reached"
    assert bars[2][5] == "█"
    assert bars[1][35] == "█"
    assert bars[0][35] == "▃"
    assert [ratios.index("3.4"), ratios.rindex("1.0")] == [9 + 25, 9 + 45]


@pytest.mark.parametrize("width", [5, 40, 400])
def test_a_drawing_fits(width: int) -> None:
    rows = [row(number / 10, 1.0, 9.0) for number in range(70)]  # beyond what is to be drawn
    lines = plot(rows, seconds=6.0, width=width)
    assert len(lines) == 5
    assert max(map(len, lines)) <= max(19, min(99, width))
    assert plot([], seconds=6.0, width=width)[0].split() == ["factor", "4"]


@pytest.mark.parametrize("terminal", [False, True])
def test_the_last_moment_stays(terminal: bool) -> None:
    text = io.StringIO()
    shown = Screen(Console(file=text, force_terminal=terminal, width=100))
    with shown.scene(6.0) as view:
        for each in ROWS:
            view.moved(each)
    assert "5.9 s: 10.0 ms a read, R = 1.0; factor 1.2, 0% waited" in text.getvalue()


class _Images(NamedTuple):
    train_paths: list[str]
    train_labels: list[int]


def test_the_latency_changes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"a")
    latencies_s: list[float] = []
    monkeypatch.setattr(StoppableClock, "sleep", lambda clock, s: latencies_s.append(s))
    images: Any = _Images([str(tmp_path / "a")] * 200, [0] * 200)
    source = EmulatedSource(images, Limits(0.25, 2))
    pipeline = source(0).batch(2)
    with iter(pipeline) as batches:
        next(batches)
        source.set_latency(0.5)
        assert len(list(batches)) == 99
    assert latencies_s[0] == 0.25
    assert latencies_s[-1] == 0.5
    assert set(latencies_s) == {0.25, 0.5}
