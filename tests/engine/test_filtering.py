"""Survivors: numbered both ways, decided in order, skipped within budgets."""

from __future__ import annotations

import threading
from array import array
from typing import Any

import pytest
from epochs import Epoch, epoch
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.engine.items import WouldBlock
from stoker.engine.survivors import FilteredStream, FilterRecord
from strategies import few

LONG_S = 60.0

outcomes = st.lists(st.booleans(), max_size=40)


def recorded(kept: list[bool], begin: int, seen: int) -> FilterRecord:
    """Return the record of an epoch from number ``begin`` on, decided up to ``seen``."""
    drops = [number for number in range(begin, seen) if not kept[number]]
    total = sum(kept) if seen == len(kept) else None
    return FilterRecord(begin, sum(kept[:begin]), seen, array("q", drops), total)


@st.composite
def records(draw: st.DrawFn) -> tuple[list[bool], FilterRecord]:
    """Return which items survive in an epoch, and a record of a part of it."""
    kept = draw(outcomes)
    seen = draw(st.integers(0, len(kept)))
    return kept, recorded(kept, draw(st.integers(0, seen)), seen)


@few(200)
@given(records())
def test_survivors_are_numbered_both_ways(drawn: tuple[list[bool], FilterRecord]) -> None:
    kept, record = drawn
    numbers = [number for number, survives in enumerate(kept) if survives]
    decided = sum(kept[: record.seen])
    for survivor in range(record.survivors, decided):
        assert record.number_of(survivor) == numbers[survivor]
    assert record.number_of(decided) == record.seen  # the next one: nothing before it is open
    if record.total is not None:
        assert record.number_of(record.total + 3) == len(kept)  # there are no more


@few(200)
@given(records(), st.sets(st.integers(0, 45), max_size=4))
def test_a_record_covers_what_it_can_number(
    drawn: tuple[list[bool], FilterRecord], asked: set[int]
) -> None:
    kept, record = drawn
    decided = sum(kept[: record.seen])
    known = set(range(record.survivors, decided + 1))
    assert record.covers(asked) == (asked <= known)
    assert record.covers(known)
    assert record.covers(set())


@few(200)
@given(records(), st.data())
def test_a_later_record_is_that_of_an_epoch_looked_at_from_there(
    drawn: tuple[list[bool], FilterRecord], data: st.DataObject
) -> None:
    kept, record = drawn
    decided = sum(kept[: record.seen])
    survivor = data.draw(st.integers(record.survivors, decided))
    later = record.since(survivor)
    assert later == recorded(kept, record.number_of(survivor), record.seen)
    if survivor < decided:
        assert later.since(decided - 1) == record.since(decided - 1)


def sifted(taken: Epoch) -> FilteredStream:
    """Return the stream of those that survive."""
    (stream,) = taken.filtered
    return stream


def values(taken: Epoch, count: int) -> list[Any]:
    """Return the next survivors."""
    with taken.planning.lock:
        return [item.task.values[item.row] for item in sifted(taken).pull_many(count)]


@pytest.mark.parametrize("workers", [0, 2])
@few(20)
@given(kept=outcomes, counts=st.lists(st.integers(1, 7), max_size=12))
def test_survivors_come_in_order(workers: int, kept: list[bool], counts: list[int]) -> None:
    examples = stoker.from_dataset(list(range(len(kept))), seed=0)
    numbers = [number for number, survives in enumerate(kept) if survives]
    with epoch(examples.filter(lambda number: kept[number]), workers) as taken:
        at = 0
        for count in counts:
            assert values(taken, count) == numbers[at : at + count]
            at = min(at + count, len(numbers))
            if at:
                assert sifted(taken).fresh == numbers[at - 1] + 1
        assert values(taken, len(kept) + 1) == numbers[at:]
        assert sifted(taken).record == recorded(kept, 0, len(kept))
        assert taken.skip_log.filtered == kept.count(False)
        with taken.planning.lock:
            assert sifted(taken).end == len(numbers)
            assert sifted(taken).peek() is None
            assert sifted(taken).poll(1) == (0, True)


def test_who_must_not_wait_is_told_what_it_depends_on() -> None:
    opened = threading.Event()

    @stoker.thread_safe
    def slow(number: int) -> bool:
        assert opened.wait(LONG_S)
        return number > 0

    with epoch(stoker.from_dataset([0, 1], seed=0).filter(slow), workers=1) as taken:
        stream = sifted(taken)
        with taken.planning.lock:
            assert stream.poll(1) == (0, False)
            assert taken.planning.may_block
            taken.planning.may_block = False
            with pytest.raises(WouldBlock) as blocked:
                next(stream.pull_many(1))
            taken.planning.may_block = True
            assert blocked.value.task is not None
            opened.set()
            taken.streams.worker_pool.wait(blocked.value.task)
            stream.wait_for(1)
            assert stream.poll(2)[0] == 1
            assert stream.left_to(1, 0) == 0
            assert stream.left_to(2, 0) == 1
            peeked = stream.peek()
            assert peeked is not None
            assert [item is peeked for item in stream.pull_many(1)] == [True]


def test_to_clear_lets_go_of_what_waits() -> None:
    with epoch(stoker.from_dataset([1, 2, 3], seed=0).filter(bool)) as taken:
        with taken.planning.lock:
            assert sifted(taken).peek() is not None
        assert sifted(taken).ready_since()[0] > 0
        sifted(taken).clear()
        assert sifted(taken).ready_since()[0] == 0
