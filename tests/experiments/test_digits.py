"""The composed digits: deterministic, disjoint, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import digits
from experiments.digits import DigitSpec, compose, split_digits, write_digits

SMALL = DigitSpec(train=60, test=30)


def handwritten() -> Any:
    """What each of the digits is that scikit-learn ships."""
    from sklearn.datasets import load_digits  # takes seconds

    return load_digits().target


@pytest.mark.full
def test_the_same_specification_gives_the_same_images() -> None:
    once = list(compose(SMALL, "train"))
    again = list(compose(SMALL, "train"))
    assert len(once) == 60
    for (image, label), (image_again, label_again) in zip(once, again, strict=True):
        assert image.shape == (32, 32)
        assert image.dtype == np.uint8
        assert label == label_again
        np.testing.assert_array_equal(image, image_again)


def test_training_and_test_digits_are_disjoint() -> None:
    labels = handwritten()
    train, test = split_digits(labels, seed=0)
    assert not set(train) & set(test)
    assert len(train) + len(test) == len(labels)
    assert set(labels[test]) == set(range(10))


def test_images_use_only_digits_of_their_own_split(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[np.ndarray] = []
    resized = digits._resized

    def watched(chosen: np.ndarray) -> dict[int, np.ndarray]:
        seen.append(chosen)
        return resized(chosen)

    monkeypatch.setattr(digits, "_resized", watched)
    next(compose(SMALL, "train"))
    next(compose(SMALL, "test"))
    train, test = split_digits(handwritten(), SMALL.seed)
    assert [len(bank) for bank in seen] == [len(train), len(test)]


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_digits(SMALL, tmp_path, stop)
    assert os.listdir(tmp_path) == []


def test_a_folder_without_its_stamp_is_not_trusted(tmp_path: Path) -> None:
    half = tmp_path / SMALL.folder_name
    half.mkdir()
    (half / "rubbish").write_text("")
    folder = write_digits(SMALL, tmp_path)
    assert not (folder / "rubbish").exists()
    assert len(list((folder / "train").rglob("*.png"))) == 60
