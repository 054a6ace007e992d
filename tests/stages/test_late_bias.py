"""What is told of late examples: labels by what they explain, numbers by their correlation."""

from __future__ import annotations

import numpy as np
import pytest

from stoker.stages.late import LateBias


def noted(labels: list[object], late: list[int]) -> dict[str, float]:
    bias = LateBias()
    for label, each in zip(labels, late, strict=True):
        bias.note({"label": label}, each)
    return bias.correlations()


def test_a_label_that_decides_explains_all() -> None:
    assert noted(["cat", "dog"] * 20, [0, 2] * 20)["label"] == pytest.approx(1)
    assert noted([0, 1] * 20, [1, 0] * 20)["label"] == pytest.approx(1)


def test_labels_explain_nothing_by_chance() -> None:
    rng = np.random.default_rng(0)
    labels = [int(each) for each in rng.integers(400, size=1_000)]
    assert noted(list(labels), [int(each) for each in rng.integers(3, size=1_000)])["label"] < 0.2


def test_numbers_are_correlated_as_numpy_does() -> None:
    rng = np.random.default_rng(0)
    values, late = rng.normal(size=50), rng.integers(-1, 3, size=50)
    expected = np.corrcoef(values, late)[0, 1]
    assert noted(list(values), late.tolist())["label"] == pytest.approx(expected)
    sizes = rng.permutation(50)  # each another: no labels
    expected = np.corrcoef(sizes, late)[0, 1]
    assert noted(list(sizes), late.tolist())["label"] == pytest.approx(expected)


def test_bytes_count_if_they_differ() -> None:
    bias = LateBias()
    for size in range(1, 20):
        bias.note((np.zeros(size), np.array(3), float("inf")), size // 5)
    assert bias.correlations()["bytes"] > 0.9
    assert bias.correlations().keys() == {"bytes"}
