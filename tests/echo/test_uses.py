"""``train.last``: which use each example is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker

N = 64


def batches_of(size: int, examples: int) -> Any:
    numbers: Any = torch.arange(examples)
    return torch.utils.data.DataLoader(numbers, size)


def pipelines() -> dict[str, Any]:
    def begin() -> Any:
        return stoker.from_arrays(np.arange(N), seed=3).shuffle()

    return {
        "none": begin().batch(8),
        "fixed": begin().echo(3).batch(8),
        "auto": begin().echo().batch(8),
        "fraction": begin().echo(2.5, pool=30).batch(4),
        "mapped": begin().echo(2).map(lambda x: x).batch(8),
        "filtered": begin().echo(2).filter(lambda x: x % 3 > 0).batch(8),
        "processes": begin().echo(3).map(abs).batch(8).workers(1, kind="process"),
        "batches": begin().batch(8).echo(3, pool=4),
        "batches, changed": begin().batch(8).echo("auto").random_map(lambda b, rng: b),
        "loader": stoker.echo(batches_of(8, N), 3),
        "examples": begin().echo(3),
        "on a device": begin().echo(3).batch(8).to_torch(),
        "batches on a device": begin().batch(8).to_torch().echo(3),
    }


@pytest.mark.parametrize("name", pipelines())
def test_each_use_has_its_number_and_its_distance(name: str) -> None:
    train = pipelines()[name]
    assert len(train.last.number) == 0
    number: dict[Any, int] = {}
    at: dict[Any, int] = {}
    step, carries = 0, name == "auto"
    for _ in range(1 if name == "batches, changed" else 2):  # then batches of two epochs overlap
        seen: set[Any] = set()
        if not carries:
            number.clear()
            at.clear()
        for batch in train:
            step += 1
            values = np.atleast_1d(np.asarray(batch)).tolist()
            last = train.last
            assert last.number.dtype == last.age_steps.dtype == np.int64
            for row, value in enumerate(values):
                number[value] = number.get(value, 0) + 1
                if last.number[row] == 1 and value not in seen:  # anew, in a new epoch
                    seen.add(value)
                    number[value] = 1
                    at.pop(value, None)
                assert last.number[row] == number[value]
                if name != "filtered":  # there a batch is of several draws
                    assert last.age_steps[row] == (step - at[value] if value in at else 0)
                at[value] = step
            assert len(last.number) == len(values)
            if name != "filtered":  # there what was left out counts as read
                assert train.counts.fresh_examples % N == len(seen) % N


def test_where_examples_are_left_out_the_clock_goes_on_evenly() -> None:
    train = pipelines()["filtered"]
    before, seen = 0, set()
    for batch in train:
        seen |= set(batch.tolist())
        assert before <= train.counts.fresh_examples
        before = train.counts.fresh_examples
        assert before <= N
    assert before == N
    assert len(seen) == 42


@given(stop=st.integers(1, 20), factor=st.sampled_from([2, 3, "auto"]), data=st.data())
@settings(deadline=None)
def test_behind_a_resume_numbers_are_the_same_and_ages_are_true_or_unknown(
    stop: int, factor: Any, data: st.DataObject
) -> None:
    def build() -> Any:
        return stoker.from_arrays(np.arange(N), seed=3).shuffle().echo(factor, pool=32).batch(4)

    train, seen, saved = build(), [], None
    with iter(train) as batches:
        for step, _ in enumerate(batches, 1):
            last = train.last
            seen.append((last.number.tolist(), last.age_steps.tolist(), train.counts))
            if step == stop:
                saved = train.state_dict()
    if saved is None:
        return
    record = train.record() if factor == "auto" else None
    again = build()
    if record is not None:
        again = again.replay(record)
    again.load_state_dict(saved)
    for (numbers, ages, clock), _ in zip(seen[stop:], again, strict=True):
        last = again.last
        assert again.counts == clock
        assert last.number.tolist() == numbers
        for age, known in zip(ages, last.age_steps.tolist(), strict=True):
            assert known in ((age,) if age == 0 or factor == "auto" else (age, -1))
