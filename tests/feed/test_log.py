"""A log owes each reader everything from where it joined on, once and in order."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stoker.feeds.feeder.log import (
    EpochEnd,
    LogReader,
    MemoryBudget,
    OutputLog,
    PipelineFailed,
    StagedItem,
)

OUTPUTS = (0, 1, 7, 12)  # of an epoch, by its number


def outputs_of(epoch: int) -> int:
    return OUTPUTS[epoch % len(OUTPUTS)]


class Logs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.log = OutputLog((1, 0))
        self.got: dict[LogReader, list[tuple[int, int]]] = {}
        self.start: dict[LogReader, tuple[int, int]] = {}
        self.held: dict[LogReader, deque[StagedItem]] = {}
        self.dropped: list[StagedItem] = []

    @rule(back=st.integers(0, 6))
    def joins(self, back: int) -> None:
        epoch, number = self.log.end
        at = (epoch, max(0, number - back))
        if self.log.has_all_from(at):
            reader = self.log.join(None, at)
            self.got[reader], self.start[reader] = [], at
            self.held[reader] = deque()

    @rule(count=st.integers(1, 3))
    def makes(self, count: int) -> None:
        epoch, number = self.log.end
        left = outputs_of(epoch) - number
        if not left:
            self.log.end_epoch()
        else:
            item = StagedItem(epoch, number, min(count, left), 1, None)
            self.log.append(item)

    @precondition(lambda self: self.got)
    @rule(data=st.data(), most=st.integers(1, 3))
    def takes(self, data: st.DataObject, most: int) -> None:
        readers: list[LogReader | None] = list(self.log.readers)
        reader = data.draw(st.sampled_from(readers or [None]))
        while reader is not None and reader.sent < most:
            due = self.log.next_for(reader)
            if due is None:
                break
            assert not isinstance(due, PipelineFailed)
            at = reader.position
            self.log.advance(reader, due)
            if isinstance(due, EpochEnd):
                assert due == EpochEnd(at[0], outputs_of(at[0]))
            else:
                assert due not in self.dropped
                numbers = range(at[1], due.number + due.count)
                self.got[reader] += [(due.epoch, number) for number in numbers]
                self.held[reader].append(due)

    @rule(data=st.data())
    def asks(self, data: st.DataObject) -> None:
        for reader in self.log.readers:
            reader.has_requested = reader.has_requested or data.draw(st.booleans())

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def is_done(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from([m for m, held in self.held.items() if held]))
        item = self.held[reader].popleft()
        if self.log.finish(reader, item):
            assert not item.pending_readers
            self.dropped.append(item)

    @precondition(lambda self: self.log.readers)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(self.log.readers))
        self.dropped += self.log.leave(reader)

    @invariant()
    def everything_came_once_and_in_order(self) -> None:
        for reader, got in self.got.items():
            epoch, number = self.start[reader]
            for one in got:
                while number == outputs_of(epoch):
                    epoch, number = epoch + 1, 0
                assert one == (epoch, number)
                number += 1

    @invariant()
    def what_stands_is_owed(self) -> None:
        assert all(item.pending_readers for item in self.log.items)
        for reader in self.log.readers:
            missing = [
                i
                for i in self.log.items
                if reader in i.pending_readers and i.begin >= reader.position
            ]
            assert missing == [i for i in self.log.items if i.begin >= reader.position]


TestLogs = Logs.TestCase
TestLogs.settings = settings(stateful_step_count=60)


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=4), st.integers(4, 12)
)
def test_logs_together_stay_within_the_staging_area(order: list[list[int]], slots: int) -> None:
    staging = MemoryBudget(slots, batched=True)
    logs = [OutputLog((0, 0)) for _ in order][: staging.max_logs()]
    readers = [log.join(None, (0, 0)) for log in logs]
    for turn in range(5):
        for log, reader, moves in zip(logs, readers, order, strict=False):
            for move in moves:
                if move and staging.room(logs, log):
                    log.append(StagedItem(*log.end, 1, 1, None))
                elif not move and log.items:
                    log.advance(reader, log.items[0])
                    log.finish(reader, log.items[0])
                assert sum(len(each.items) for each in logs) <= slots, turn
    while any(log.items for log in logs):
        for log, reader in zip(logs, readers, strict=True):
            while log.items:
                log.finish(reader, log.items[0])
    assert all(staging.room(logs, log) for log in logs)
