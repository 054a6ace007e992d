"""What a segment does to its inputs: failures stand where they happened, draws have addresses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.engine.work.step import Failure
from stoker.engine.work.work import Work
from stoker.errors import StageError
from stoker.pipeline import Pipeline
from strategies import Faulty, few


def work_of(pipeline: Pipeline[Any], segment: int = 0) -> Work:
    """Return the work of a segment in the first epoch."""
    chain = pipeline.chain
    flow = chain.flow
    order = None
    if flow.indexed is not None:
        order = chain.selection.rank_order(len(flow.indexed), chain.seed, 0)
    part = flow.segments[segment]
    return Work(part, flow.address(part.at, chain.seed, 0), flow.indexed, order)


def made(work: Work, numbers: list[int], uses: list[int] | None = None) -> list[Any]:
    """Return what becomes of inputs that are the numbers themselves."""
    values: list[Any] = list(numbers)
    work.apply(values, numbers, uses, spent(work))
    return values


def spent(work: Work) -> list[int]:
    """Return where the time of each stage is counted."""
    return work.segment.counters()


def error_of(value: Any) -> StageError:
    """Return the located error of a failure."""
    assert type(value) is Failure
    assert isinstance(value.error, StageError)
    return value.error


def fail_on_three(x: int) -> int:
    if x == 3:
        raise ValueError("three")
    return x + 100


def draw(x: Any, rng: np.random.Generator) -> float:
    return float(rng.random())


class FaultyMany(Faulty):
    """Is asked for many examples at once, and fails for all of them if one is bad."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [Faulty, FaultyMany])
@few(40)
@given(bad=st.sets(st.integers(0, 19)), asked=st.lists(st.integers(0, 19), max_size=12))
def test_what_cannot_be_read_is_a_failure_in_its_place(
    kind: type[Faulty], bad: set[int], asked: list[int]
) -> None:
    data = kind(20, bad)
    work = work_of(stoker.from_dataset(data, seed=0).batch(4))
    values = work.fetcher.fetch(np.array(asked, np.int64), spent(work))
    assert len(values) == len(asked)
    for index, value in zip(asked, values, strict=True):
        if index not in bad:
            assert value["id"] == index
            continue
        error = error_of(value)
        assert (error.index, error.path, error.batch) == (index, None, None)
        assert isinstance(error.__cause__, OSError)
        assert (value.part, value.account) == (work.segment.at, 0)


numbers = st.lists(st.integers(0, 99), min_size=1, max_size=12, unique=True)


@few(40)
@given(numbers=numbers, cut=st.integers(0, 12))
def test_draws_depend_on_the_address_alone(numbers: list[int], cut: int) -> None:
    pipeline = stoker.from_dataset(range(100), seed=5).random_map(draw)
    whole = made(work_of(pipeline), numbers)
    parts = work_of(pipeline)
    rest = made(parts, numbers[cut:])  # in another order, in other chunks
    assert made(parts, numbers[:cut]) + rest == whole
    assert len(set(whole)) == len(whole)
    again = made(work_of(pipeline), numbers, [1] * len(numbers))
    assert not set(again) & set(whole)  # another use draws anew
    assert not set(made(parts, [number + 100 for number in numbers])) & set(whole)


@given(ordinal=st.integers(0, 1 << 40))
def test_draws_of_batches_depend_on_the_address_alone(ordinal: int) -> None:
    pipeline = stoker.from_dataset(range(100), seed=5).batch(2).random_map(draw)
    one, other = work_of(pipeline), work_of(pipeline)
    made = one.finish(0, ordinal, spent(one), 1)
    assert made == other.finish(0, ordinal, spent(other), 1)
    assert made != other.finish(0, ordinal + 1, spent(other), 1)


def test_only_what_is_done_in_python_is_worth_sending() -> None:
    examples = stoker.from_dataset(range(20), seed=0)
    assert work_of(examples.batch(2)).worth_sending
    assert work_of(examples.batch(2).echo(2).map(fail_on_three), segment=1).worth_sending
    assert not work_of(examples.batch(2).echo(2), segment=1).worth_sending
