"""The way back: what is needed of pools and sifts brings new streams to the same place."""

from __future__ import annotations

import dataclasses
from array import array
from fractions import Fraction
from itertools import islice
from typing import Any

from epochs import epoch
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.engine.checkpoint import Node
from stoker.engine.items import forget, resume, resume_points
from stoker.engine.survivors import FilterRecord
from strategies import Spec, built, few, frozen, small_pools_allowed, specs


def plain(value: Any) -> Any:
    """Return something that compares by what is in it."""
    if isinstance(value, array):
        return value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Node):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return frozen(value)


# An echo and two filters: what one needs is asked of the one before it.
chains = specs(max_examples=60, max_filters=2)


@few(50)
@given(spec=chains, stops=st.lists(st.integers(0, 12), min_size=1, max_size=6))
def test_to_forget_loses_nothing_that_is_still_asked_for(spec: Spec, stops: list[int]) -> None:
    with small_pools_allowed(), epoch(built(spec)) as whole, epoch(built(spec)) as pruned:
        for stop in stops:
            assert len(list(islice(whole, stop))) == len(list(islice(pruned, stop)))
            with pruned.planning.lock:
                forget(pruned.last, pruned.yielded, pruned.planning)
            assert plain(pruned.position) == plain(whole.position)


@few(50)
@given(spec=specs(max_examples=60, max_filters=2, min_filters=1), stops=st.lists(st.integers(0, 9)))
def test_what_is_needed_moves_on_only(spec: Spec, stops: list[int]) -> None:
    before: list[FilterRecord] = []
    with small_pools_allowed(), epoch(built(spec)) as taken:
        for stop in stops:
            list(islice(taken, stop))
            with taken.planning.lock:
                asked = resume_points(taken.last, taken.yielded, taken.planning)
                again = resume_points(taken.last, taken.yielded, taken.planning)
            assert plain(again) == plain(asked)  # to ask changes nothing
            records = [node for node in asked if isinstance(node, FilterRecord)]
            for older, record in zip(before, records, strict=False):
                assert record.number >= older.number
                assert record.survivors >= older.survivors
                assert record.seen >= older.seen
            before = records


def test_long_epochs_forget_snapshots_and_records() -> None:
    spec = Spec(
        examples=3_000,
        batch=2,
        echoes=(("before", Fraction(2), 4),),
        filters=(("first", 3, 0),),
        source="tuples",
    )
    with small_pools_allowed():
        with epoch(built(spec)) as taken:
            list(islice(taken, 900))
            (stream,) = taken.filtered
            kept = len(stream.record.drops)
            with taken.planning.lock:
                forget(taken.last, 800, taken.planning)
            assert len(stream.record.drops) < kept / 2
            assert stream.record.number > 1_000
            position = taken.position
            rest = [frozen(output) for output in taken]
        assert rest
        with epoch(built(spec), 0, position, taken.pool_size) as again:
            resume(again.last, position)
            assert [frozen(output) for output in again] == rest


def test_a_pool_that_was_not_begun_needs_nothing() -> None:
    chain = stoker.from_dataset(list(range(20)), seed=0).filter(bool).echo(2).batch(2)
    with small_pools_allowed(), epoch(chain) as taken, taken.planning.lock:
        assert resume_points(taken.last, 0, taken.planning) == []


def test_what_was_decided_is_not_decided_again() -> None:
    asked: list[int] = []

    def even(number: int) -> bool:
        asked.append(number)
        return number % 2 == 0

    chain = stoker.from_dataset(list(range(40)), seed=0).filter(even).batch(2)
    with epoch(chain) as taken:
        list(islice(taken, 3))
        position = taken.position
        (record,) = position.parts
        assert isinstance(record, FilterRecord)
        assert record.survivors == 6
        assert record.number == 11
    asked.clear()
    with epoch(chain, 0, position) as again:
        resume(again.last, position)
        assert next(again).tolist() == [12, 14]
    assert min(asked) == 11  # what came before is not even read
