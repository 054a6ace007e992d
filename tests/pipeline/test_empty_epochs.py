"""Epochs without a batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
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
    "packed": (
        lambda: stoker.from_arrays(np.ones((3, 4), np.int64), seed=0).pack(64).batch(2),
        "do not fill one packed sequence",
    ),
    "no data": (lambda: stoker.from_dataset([], seed=0).batch(2), "there are no examples"),
    "all skipped": (
        lambda: stoker.from_dataset(range(3), seed=0).shuffle().skip(3).batch(2),
        "there are no examples",
    ),
    "an empty stream": (
        lambda: stoker.from_iterable(lambda: iter(()), seed=0).shuffle(buffer=4).batch(2),
        "there are no examples",
    ),
    "an empty loader": (lambda: stoker.from_loader([], seed=0).echo(2, pool=2), "gave none"),
}


@pytest.mark.parametrize("case", EMPTY)
def test_an_epoch_of_no_batch_says_why(case: str) -> None:
    build, why = EMPTY[case]
    with pytest.warns(UserWarning, match=f"the epoch had no batch: .*{why}"):
        assert list(build()) == []


@pytest.mark.parametrize("case", EMPTY)
def test_under_repeat_it_is_an_error(case: str) -> None:
    build, why = EMPTY[case]
    says = f"a whole pass over the data has no batch, .*would not end: .*{why}"
    with pytest.raises(stoker.StokerError, match=says):
        list(build().repeat().steps(4))
