"""How many actors there are: decided from what was measured, without any actor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.cluster.workers.autoscaler import ActorAutoscaler, Span, actors_needed


@dataclass
class Cluster:
    """Actors that all get as much done, for a consumer with work of its own.

    Attributes:
        row_s: the work of a row; ``own_s``: what the consumer then does with it.
        free: actors that there is room for.
        most: how many get something done at a time, whatever there are.
    """

    row_s: float
    own_s: float
    free: int
    most: int = 1_000
    actors: int = 1

    def span(self) -> Span:
        """Return what a second looks like."""
        working = min(self.actors, self.most)
        rows = min(working / self.row_s, 1 / self.own_s if self.own_s else math.inf)
        # Actors that share cores take longer for each row.
        busy_s = rows * self.row_s * self.actors / working
        return Span(1.0, 1 - rows * self.own_s, busy_s, int(rows), self.actors)

    def run(self, borrowing: ActorAutoscaler, spans: int = 30) -> list[int]:
        """Let so many seconds pass; return how many actors there were in each."""
        seen = []
        for _ in range(spans):
            wanted = borrowing.decide(self.span(), self.free - self.actors)
            assert 1 <= wanted <= max(self.actors, self.free)
            self.actors = wanted
            seen.append(wanted)
        return seen


def test_a_consumer_that_waits_gets_as_many_as_it_needs() -> None:
    cluster = Cluster(row_s=0.010, own_s=0.002, free=64)

    seen = cluster.run(ActorAutoscaler())

    assert seen[-1] == 6, "five, and a fifth more"
    assert seen == sorted(seen)


def test_never_more_than_there_is_room_for() -> None:
    assert max(Cluster(row_s=0.010, own_s=0.0, free=3).run(ActorAutoscaler())) == 3
    assert max(Cluster(row_s=0.010, own_s=0.0, free=1).run(ActorAutoscaler())) == 1


def test_a_consumer_that_does_nothing_itself_gets_all_that_help() -> None:
    assert Cluster(row_s=0.010, own_s=0.0, free=40).run(ActorAutoscaler())[-1] == 40


def test_more_that_do_not_help_are_sent_away_again() -> None:
    seen = Cluster(row_s=0.010, own_s=0.0, free=40, most=2).run(ActorAutoscaler())

    assert max(seen) == 4
    assert seen[-10:] == [2] * 10


def test_what_is_not_needed_any_more_is_given_back_slowly() -> None:
    cluster, borrowing = Cluster(row_s=0.010, own_s=0.001, free=40), ActorAutoscaler()
    cluster.run(borrowing)
    assert cluster.actors == 12
    cluster.own_s = 0.010

    seen = cluster.run(borrowing, 12)

    assert seen[:4] == [12] * 4
    assert seen[-1] == 2


def test_a_late_batch_now_and_then_sends_nobody_away() -> None:
    borrowing = ActorAutoscaler()
    for second in range(50):
        needed = 3.3 if second % 4 else 2.0
        assert borrowing.decide(Span(1.0, 0.0, needed, 100, 4), 10) == 4


@given(
    elapsed_s=st.floats(0.1, 100),
    share=st.floats(0, 1),
    busy=st.floats(0, 1),
    actors=st.integers(1, 1_000),
)
def test_there_is_always_one(elapsed_s: float, share: float, busy: float, actors: int) -> None:
    span = Span(elapsed_s, share * elapsed_s, busy * actors * elapsed_s, 10, actors)

    assert actors_needed(span) >= 1


def test_needed_is_work_over_the_time_the_consumer_has() -> None:
    assert actors_needed(Span(2.0, 1.0, 3.0, 100, 2)) == math.ceil(1.2 * 3.0 / 1.0)
    assert actors_needed(Span(2.0, 2.0, 3.0, 100, 2)) == pytest.approx(4), "not known yet: twice"
