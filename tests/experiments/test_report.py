"""The report's arithmetic, on rows made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.arms import Arm
from experiments.grids import next_point
from experiments.method import Interval
from experiments.report import conclusion, measured_ratios, summaries, target_of, to_target
from experiments.runs import Evaluation, RunRecord

PLAIN = Arm("none")
ECHO = Arm("before", 4)
AUTO = Arm("before", "auto")


def run(arm: Arm, seed: int, *rows: tuple[int, float, float]) -> RunRecord:
    """A run of (grid point, seconds, accuracy), the batches 10 examples, half the time waited."""
    return RunRecord(
        arm,
        seed,
        [
            Evaluation(fresh, fresh + 1, fresh, fresh // 10, seconds, seconds / 2, accuracy)
            for fresh, seconds, accuracy in rows
        ],
    )


def plain(seed: int, seconds: float) -> RunRecord:
    """Reaches 0.9 at 200 fresh examples, after `seconds`."""
    return run(PLAIN, seed, (100, 1.0, 0.5), (200, seconds, 0.9), (300, 6.0, 0.95))


def test_the_target_is_reached_at_the_first_evaluation_that_does() -> None:
    record = run(ECHO, 0, (100, 1.0, 0.5), (300, 3.0, 0.91), (400, 4.0, 0.99))
    hit = to_target(record, 0.9)
    assert hit is not None
    assert hit.grid == 300
    assert to_target(record, 1.0) is None


def test_speed_ups_are_paired_by_seed() -> None:
    runs = [
        plain(0, 4.0), plain(1, 5.0), plain(2, 3.0),
        run(ECHO, 0, (100, 2.0, 0.9), (300, 6.0, 0.97)),
        run(ECHO, 1, (100, 1.0, 0.9), (300, 6.0, 0.98)),
        run(ECHO, 2, (100, 1.0, 0.9), (300, 7.0, 0.99)),
    ]  # fmt: skip
    base, echo = summaries(runs, 0.9)
    assert base.speedups == (1.0, 1.0, 1.0)
    assert (base.fresh, base.seconds, base.misses) == (201, 4.0, 0)
    assert echo.speedups == (2.0, 3.0, 5.0)
    assert echo.speedup == 3.0
    assert (echo.steps, echo.waited_fraction) == (10, 0.5)


def test_a_miss_is_the_worst_value_and_counted() -> None:
    hit = [(100, 2.0, 0.9), (300, 6.0, 0.9)]
    miss = [(100, 2.0, 0.6), (300, 6.0, 0.8)]
    runs = [plain(0, 4.0), plain(1, 4.0), plain(2, 4.0)]
    runs += [run(ECHO, 0, *hit), run(ECHO, 1, *hit), run(ECHO, 2, *miss)]
    _, echo = summaries(runs, 0.9)
    assert echo.misses == 1
    assert echo.speedups == (0.0, 2.0, 2.0)
    assert (echo.seconds, echo.speedup) == (2.0, 2.0)

    runs[4] = run(ECHO, 1, *miss)
    _, echo = summaries(runs, 0.9)
    assert echo.misses == 2
    assert (echo.seconds, echo.fresh, echo.steps, echo.speedup) == (None, None, None, None)


def test_a_miss_without_echoing_makes_the_speed_up_a_lower_bound() -> None:
    runs = [run(PLAIN, 0, (100, 1.0, 0.3), (300, 6.0, 0.5)), run(ECHO, 0, (100, 2.0, 0.9))]
    base, echo = summaries(runs, 0.9)
    assert base.misses == 1
    assert echo.speedups == (3.0,)
    assert echo.speedups_are_bounds


def test_arms_are_held_to_the_arm_without_echoing_at_their_own_r() -> None:
    slow, even = plain(0, 4.0), run(Arm("none", slowness=1.0), 0, (200, 1.0, 0.9))
    echo = run(Arm("before", "auto", slowness=1.0), 0, (100, 2.0, 0.9))
    found = summaries([slow, even, echo], 0.9)
    assert found[2].speedup == 0.5
    assert measured_ratios(found) == {4.0: 2.0, 1.0: 2.0}, "of what was waited, not of a setting"
    assert (
        conclusion(found, 0.9).count("With R = 2.0 (without echoing, training waited for 50%") == 1
    )


@pytest.mark.parametrize(
    ("n", "left_out", "confidence"),
    [(1, 0, 0.0), (2, 0, 0.5), (4, 0, 0.875), (5, 0, 0.9375), (7, 0, 0.984), (8, 1, 0.930)],
)
def test_an_interval_is_of_the_order_of_the_samples(
    n: int, left_out: int, confidence: float
) -> None:
    around = Interval.of(list(range(n, 0, -1)))
    assert (around.low, around.high) == (1 + left_out, n - left_out)
    assert around.confidence == pytest.approx(confidence, abs=0.001)


def test_an_interval_holds_the_median_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    found = [Interval.of(rng.lognormal(size=5).tolist()) for _ in range(4000)]
    held = sum(around.low <= 1.0 <= around.high for around in found) / len(found)
    assert held == pytest.approx(found[0].confidence, abs=0.02)


def claim(*speedups: float) -> str:
    """What is said of such speed-ups of the two arms, 0 being a miss, by seed."""
    runs = [plain(seed, 4.0) for seed in range(len(speedups))]
    runs += [
        run(AUTO, seed, (100, 4.0 / (x or 1.0), 0.9 if x else 0.1))
        for seed, x in enumerate(speedups)
    ]
    return conclusion(summaries(runs, 0.9), 0.9)


def test_a_gain_is_claimed_only_if_the_interval_allows_it() -> None:
    assert "2.0 times as fast (1.60 to 2.50 with 94% confidence" in claim(2.0, 1.6, 2.5, 2.0, 2.2)
    assert "no gain is shown" in claim(2.0, 0.95, 2.5, 2.0, 2.2)
    assert "no gain is shown" in claim(2.0, 0.0, 2.5, 2.0, 2.2)
    assert "slower, 0.80 times the speed" in claim(0.8, 0.7, 0.9, 0.8, 0.95)
    assert "4 seeds are too few for a claim" in claim(2.0, 1.6, 2.5, 2.2)
    assert "1 seed is too few" in claim(2.0)
    assert "missed 90.0% in 2 of 3 runs" in claim(0.0, 2.0, 0.0)
    for text in (claim(0.8, 0.7, 0.9, 0.8, 0.95), claim(2.0, 0.95, 2.5, 2.0, 2.2), claim(2.0, 1.6)):
        assert "times as fast" not in text


def test_a_miss_without_echoing_is_a_lower_bound_in_the_claim() -> None:
    runs = [run(PLAIN, seed, (300, 6.0, 0.5)) for seed in range(5)]
    runs += [run(AUTO, seed, (100, 2.0, 0.9)) for seed in range(5)]
    text = conclusion(summaries(runs, 0.9), 0.9)
    assert "at least 3.0 times as fast" in text
    assert "mostly missed" in text


def test_a_target_is_what_memory_reaches_around_so_many_examples() -> None:
    rows = [(100, 1.0, 0.5), (200, 2.0, 0.7), (300, 3.0, 0.9), (400, 4.0, 0.8), (500, 5.0, 1.0)]
    memory = [run(Arm("memory"), 0, *rows)]
    assert target_of(memory, 400) == pytest.approx(0.8)
    assert target_of(memory, 50) == 0.5, "of a run that was evaluated later"
    assert target_of([*memory, run(Arm("memory"), 1, (400, 1.0, 0.6))], 400) == pytest.approx(0.7)


def test_the_grid_is_fine_first_and_meets_its_ends() -> None:
    grid = ((100, 30), (200, 50), (1000, 400))
    points = [0]
    while points[-1] < 1000:
        points.append(next_point(points[-1], grid))
    assert points == [0, 30, 60, 90, 100, 150, 200, 600, 1000]
    assert next_point(31, grid) == 60
    with pytest.raises(ValueError, match="1000"):
        next_point(1000, grid)
