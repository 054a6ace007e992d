"""Epochs without a batch, though there were examples."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import stoker


def none(state: int, number: int) -> tuple[int, object]:
    return state, stoker.DROP


EMPTY: dict[str, tuple[Callable[[], stoker.Pipeline], str]] = {
    "drop_last": (
        lambda: stoker.from_dataset(range(3), seed=0).batch(8, drop_last=True),
        "drop_last left out 3 examples, and a batch has 8",
    ),
    "take": (
        lambda: stoker.from_dataset(range(99), seed=0).take(3).batch(8, drop_last=True),
        "drop_last left out 3 examples",
    ),
    "a stream": (
        lambda: stoker.from_iterable(lambda: range(3), seed=0).batch(8, drop_last=True),
        "drop_last left out 3 examples",
    ),
    "a scan": (
        lambda: stoker.from_dataset(range(3), seed=0).scan(none, 0).batch(2),
        "left out 3 examples",
    ),
    "a filter": (
        lambda: stoker.from_dataset(range(3), seed=0).filter(lambda n: n > 3).batch(2),
        "left out 3 examples",
    ),
}


@pytest.mark.parametrize("case", EMPTY)
def test_an_epoch_of_no_batch_says_why(case: str) -> None:
    build, why = EMPTY[case]
    with pytest.warns(UserWarning, match=f"the epoch had no batch: .*{why}"):
        assert list(build()) == []


@pytest.mark.parametrize("case", EMPTY)
def test_under_repeat_it_is_an_error(case: str) -> None:
    build, why = EMPTY[case]
    with pytest.raises(stoker.StokerError, match=f"would not end: .*{why}"):
        list(build().repeat().steps(4))


def test_no_data_have_no_batch() -> None:
    empty: list[int] = []
    assert list(stoker.from_dataset(empty, seed=0).batch(2)) == []
