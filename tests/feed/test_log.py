"""A lane owes each member everything from where it joined on, once and in order."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stoker.feed.log import Broken, EpochEnd, Member, OutputLog, StagedItem
from stoker.feed.staging import Staging

OUTPUTS = (0, 1, 7, 12)  # of an epoch, by its number


def outputs_of(epoch: int) -> int:
    return OUTPUTS[epoch % len(OUTPUTS)]


class Lanes(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.lane = OutputLog((1, 0))
        self.got: dict[Member, list[tuple[int, int]]] = {}
        self.start: dict[Member, tuple[int, int]] = {}
        self.held: dict[Member, deque[StagedItem]] = {}
        self.dropped: list[StagedItem] = []

    @rule(back=st.integers(0, 6))
    def joins(self, back: int) -> None:
        epoch, number = self.lane.made
        at = (epoch, max(0, number - back))
        if self.lane.reaches(at):
            member = self.lane.join(None, at)
            self.got[member], self.start[member] = [], at
            self.held[member] = deque()

    @rule(count=st.integers(1, 3))
    def makes(self, count: int) -> None:
        epoch, number = self.lane.made
        left = outputs_of(epoch) - number
        if not left:
            self.lane.end_epoch()
        else:
            item = StagedItem(epoch, number, min(count, left), 1, 1, None)
            self.lane.add(item)

    @precondition(lambda self: self.got)
    @rule(data=st.data(), most=st.integers(1, 3))
    def takes(self, data: st.DataObject, most: int) -> None:
        members: list[Member | None] = list(self.lane.members)
        member = data.draw(st.sampled_from(members or [None]))
        while member is not None and member.sent < most:
            due = self.lane.due(member)
            if due is None:
                break
            assert not isinstance(due, Broken)
            at = member.at
            self.lane.hand_over(member, due)
            if isinstance(due, EpochEnd):
                assert due == EpochEnd(at[0], outputs_of(at[0]))
            else:
                assert due not in self.dropped
                numbers = range(at[1], due.number + due.count)
                self.got[member] += [(due.epoch, number) for number in numbers]
                self.held[member].append(due)

    @rule(data=st.data())
    def asks(self, data: st.DataObject) -> None:
        for member in self.lane.members:
            member.asked = member.asked or data.draw(st.booleans())

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def is_done(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from([m for m, held in self.held.items() if held]))
        item = self.held[member].popleft()
        if self.lane.done(member, item):
            assert not item.owed
            self.dropped.append(item)

    @precondition(lambda self: self.lane.members)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(self.lane.members))
        self.dropped += self.lane.leave(member)

    @invariant()
    def everything_came_once_and_in_order(self) -> None:
        for member, got in self.got.items():
            epoch, number = self.start[member]
            for one in got:
                while number == outputs_of(epoch):
                    epoch, number = epoch + 1, 0
                assert one == (epoch, number)
                number += 1

    @invariant()
    def what_stands_is_owed(self) -> None:
        assert all(item.owed for item in self.lane.items)
        for member in self.lane.members:
            missing = [i for i in self.lane.items if member in i.owed and i.begin >= member.at]
            assert missing == [i for i in self.lane.items if i.begin >= member.at]


TestLanes = Lanes.TestCase
TestLanes.settings = settings(stateful_step_count=60)


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=4), st.integers(4, 12)
)
def test_lanes_together_stay_within_the_staging_area(order: list[list[int]], slots: int) -> None:
    staging = Staging(slots, batched=True)
    lanes = [OutputLog((0, 0)) for _ in order][: staging.lanes()]
    members = [lane.join(None, (0, 0)) for lane in lanes]
    for turn in range(5):
        for lane, member, moves in zip(lanes, members, order, strict=False):
            for move in moves:
                if move and staging.room(lanes, lane):
                    lane.add(StagedItem(*lane.made, 1, 1, 1, None))
                elif not move and lane.items:
                    lane.hand_over(member, lane.items[0])
                    lane.done(member, lane.items[0])
                assert sum(len(each.items) for each in lanes) <= slots, turn
    while any(lane.items for lane in lanes):
        for lane, member in zip(lanes, members, strict=True):
            while lane.items:
                lane.done(member, lane.items[0])
    assert all(staging.room(lanes, lane) for lane in lanes)
