"""The report's arithmetic, on rows made by hand."""

from __future__ import annotations

import pytest

from experiments.arms import Arm
from experiments.report import (
    at_fresh,
    at_seconds,
    conclusion,
    summaries,
    target_of,
    to_target,
)
from experiments.runs import Budget, Evaluation, RunRecord, next_grid
from experiments.settings import Settings

PLAIN = Arm("none")
ECHO = Arm("before", 4)
BUDGETS = {4.0: Budget(fresh=300, seconds=6.0), 1.0: Budget(fresh=300, seconds=6.0)}


def run(arm: Arm, seed: int, *rows: tuple[int, float, float]) -> RunRecord:
    """A run of (grid point, seconds, accuracy), the batches 10 examples, half the time waited."""
    return RunRecord(
        arm,
        seed,
        [
            Evaluation(fresh + 1, fresh, fresh // 10, seconds, seconds / 2, accuracy, fresh)
            for fresh, seconds, accuracy in rows
        ],
    )


def plain(seed: int, seconds: float) -> RunRecord:
    """Reaches 0.9 at 200 fresh examples, after `seconds`."""
    return run(PLAIN, seed, (100, 1.0, 0.5), (200, seconds, 0.9), (300, 6.0, 0.95))


def test_the_target_is_reached_at_the_first_evaluation_on_the_grid() -> None:
    record = run(ECHO, 0, (100, 1.0, 0.5), (300, 3.0, 0.91), (400, 4.0, 0.99))
    record.evaluations.insert(1, Evaluation(150, 150, 15, 1.5, 0.0, 0.95, None))
    hit = to_target(record, 0.9)
    assert hit is not None
    assert hit.grid == 300
    assert to_target(record, 1.0) is None


def test_accuracy_at_equal_budgets_is_the_last_at_or_before() -> None:
    record = run(ECHO, 0, (100, 1.0, 0.5), (200, 2.0, 0.7), (400, 4.0, 0.9))
    at = at_fresh(record, 300)
    assert at is not None
    assert at.accuracy == 0.7
    assert at_fresh(record, 500) is None, "the run ended before"
    second = at_seconds(record, 3.9)
    assert second is not None
    assert second.accuracy == 0.7
    assert at_seconds(record, 0.5) is None


def test_speed_ups_are_paired_by_seed() -> None:
    runs = [
        plain(0, 4.0), plain(1, 5.0), plain(2, 3.0),
        run(ECHO, 0, (100, 2.0, 0.9), (300, 6.0, 0.97)),
        run(ECHO, 1, (100, 1.0, 0.9), (300, 6.0, 0.98)),
        run(ECHO, 2, (100, 1.0, 0.9), (300, 7.0, 0.99)),
    ]  # fmt: skip
    base, echo = summaries(runs, 0.9, BUDGETS)
    assert base.speedups == (1.0, 1.0, 1.0)
    assert (base.fresh, base.seconds, base.misses) == (201, 4.0, 0)
    assert echo.speedups == (2.0, 3.0, 5.0)
    assert echo.speedup == 3.0
    assert (echo.steps, echo.waited_fraction) == (10, 0.5)
    assert echo.accuracy_at_fresh == 0.98
    assert echo.accuracy_at_seconds == 0.97


def test_a_miss_is_the_worst_value_and_counted() -> None:
    hit = [(100, 2.0, 0.9), (300, 6.0, 0.9)]
    miss = [(100, 2.0, 0.6), (300, 6.0, 0.8)]
    runs = [plain(0, 4.0), plain(1, 4.0), plain(2, 4.0)]
    runs += [run(ECHO, 0, *hit), run(ECHO, 1, *hit), run(ECHO, 2, *miss)]
    _, echo = summaries(runs, 0.9, BUDGETS)
    assert echo.misses == 1
    assert echo.speedups == (0.0, 2.0, 2.0)
    assert (echo.seconds, echo.speedup) == (2.0, 2.0)

    runs[4] = run(ECHO, 1, *miss)
    _, echo = summaries(runs, 0.9, BUDGETS)
    assert echo.misses == 2
    assert (echo.seconds, echo.fresh, echo.steps, echo.speedup) == (None, None, None, None)


def test_a_miss_without_echoing_makes_the_speed_up_a_lower_bound() -> None:
    runs = [run(PLAIN, 0, (100, 1.0, 0.3), (300, 6.0, 0.5)), run(ECHO, 0, (100, 2.0, 0.9))]
    base, echo = summaries(runs, 0.9, BUDGETS)
    assert base.misses == 1
    assert echo.speedups == (3.0,)
    assert echo.speedups_are_bounds
    assert echo.accuracy_at_fresh is None
    assert "at least 3.0 times" in conclusion([base, echo], 0.9)


def test_arms_are_held_to_the_arm_without_echoing_at_their_own_r() -> None:
    slow, even = plain(0, 4.0), run(Arm("none", slowness=1.0), 0, (200, 1.0, 0.9))
    echo = run(Arm("before", 4, slowness=1.0), 0, (100, 2.0, 0.9))
    found = summaries([slow, even, echo], 0.9, BUDGETS)
    assert found[2].speedup == 0.5
    assert "0.50 times the speed" in conclusion(found, 0.9)


def test_the_conclusion_says_when_echoing_did_not_help() -> None:
    worse = summaries([plain(0, 4.0), run(ECHO, 0, (100, 5.0, 0.9))], 0.9, BUDGETS)
    assert "did not help" in conclusion(worse, 0.9)
    missed = summaries([plain(0, 4.0), run(ECHO, 0, (100, 5.0, 0.1))], 0.9, BUDGETS)
    assert "did not help" in conclusion(missed, 0.9)
    better = summaries([plain(0, 4.0), run(ECHO, 0, (100, 2.0, 0.9))], 0.9, BUDGETS)
    assert "2.0 times as fast" in conclusion(better, 0.9)


def test_a_chosen_target_is_a_share_of_what_memory_reaches() -> None:
    memory = [run(Arm("memory"), seed, (300, 1.0, 0.8 + seed / 10)) for seed in range(3)]
    assert target_of(memory, 300, 0.5) == pytest.approx(0.45)


def test_the_grid_is_fine_first_and_meets_its_ends() -> None:
    settings = Settings(grid=((100, 30), (200, 50), (1000, 400)))
    points = [0]
    while points[-1] < 1000:
        points.append(next_grid(points[-1], settings))
    assert points == [0, 30, 60, 90, 100, 150, 200, 600, 1000]
    assert next_grid(31, settings) == 60
    with pytest.raises(ValueError, match="1000"):
        next_grid(1000, settings)
