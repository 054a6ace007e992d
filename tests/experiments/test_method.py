"""The arithmetic that comparisons share, and what may be claimed of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.arms import Arm
from experiments.method import Interval, Ratios, median_or_miss, ratio_of
from experiments.report import conclusion, summaries
from experiments.runs import Evaluation, RunRecord

needs = st.one_of(st.none(), st.floats(0.1, 100))


@given(st.lists(st.tuples(needs, st.floats(100, 200), needs), min_size=1, max_size=9))
def test_no_pair_is_left_out(pairs: list[tuple[float | None, float, float | None]]) -> None:
    ratios = Ratios.of(*map(list, zip(*pairs, strict=True)))
    assert len(ratios.values) == len(pairs)
    assert ratios.values.count(0.0) == sum(arm is None for _, _, arm in pairs)
    assert ratios.are_bounds == any(base is None for base, _, _ in pairs)
    misses = sum(arm is None for _, _, arm in pairs)
    if misses * 2 > len(pairs):
        assert ratios.median is None


def test_pairs_are_kept_together() -> None:
    ratios = Ratios.of([10.0, None, 30.0], [40.0, 40.0, 40.0], [5.0, 4.0, None])
    assert ratios.values == (0.0, 2.0, 10.0)
    assert (ratios.median, ratios.are_bounds) == (2.0, True)


def test_a_median_takes_a_miss_for_the_worst() -> None:
    assert median_or_miss([1.0, None, 3.0]) == 3.0
    assert median_or_miss([None, None, 3.0]) is None


@pytest.mark.parametrize(("waited", "ratio"), [(0.0, 1.0), (0.5, 2.0), (0.75, 4.0)])
def test_r_is_of_what_training_without_echoing_waited(waited: float, ratio: float) -> None:
    assert ratio_of(waited) == ratio


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=40))
def test_an_interval_has_the_median_within(samples: list[float]) -> None:
    around = Interval.of(samples)
    ordered = sorted(samples)
    assert around.low <= ordered[len(ordered) // 2] <= around.high
    assert around.confidence >= 0.9 or len(samples) < 5
    assert math.isclose(Interval.of(samples[:1]).confidence, 0.0)


def test_an_interval_holds_the_median_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    found = [Interval.of(rng.lognormal(size=5).tolist()) for _ in range(4000)]
    held = sum(around.low <= 1.0 <= around.high for around in found) / len(found)
    assert held == pytest.approx(found[0].confidence, abs=0.02)


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


def claim(*speedups: float) -> str:
    """What the demo says of such speed-ups of its two arms, 0 being a miss, by seed."""
    runs = [
        run(Arm("none"), seed, (100, 1.0, 0.5), (200, 4.0, 0.9)) for seed in range(len(speedups))
    ]
    runs += [
        run(Arm("before", "auto"), seed, (100, 4.0 / (x or 1.0), 0.9 if x else 0.1))
        for seed, x in enumerate(speedups)
    ]
    return conclusion(summaries(runs, 0.9), 0.9)


def test_a_gain_is_claimed_only_if_the_interval_allows_it() -> None:
    assert "2.0 times as fast (1.60 to 2.50 with 94% confidence" in claim(2.0, 1.6, 2.5, 2.0, 2.2)
    assert "no gain is shown" in claim(2.0, 0.95, 2.5, 2.0, 2.2)
    assert "no gain is shown" in claim(2.0, 0.0, 2.5, 2.0, 2.2)
    assert "slower, 0.80 times the speed" in claim(0.8, 0.7, 0.9, 0.8, 0.95)
    assert "4 seeds are too few for a claim" in claim(2.0, 1.6, 2.5, 2.2)
    assert "missed 90.0% in 2 of 3 runs" in claim(0.0, 2.0, 0.0)
