"""Epochs of batches that are planned from sizes or keys go on with other ranks, and other plans."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_elastic import mixture
from test_places import drawing, taken
from test_planned_batches import Case, cases

import stoker
from strategies import FULL, few, opened, signed, through_json

WORLDS = [1, 2, 3, 4, 8]
Drawn = dict[int, float]


class Ranks:
    """All ranks of a leg, which take their batches one after another.

    Attributes:
        steps: how many batches each rank took.
        drawn: what was drawn for each of their examples.
        state: of one of the ranks, behind the last batch.
    """

    def __init__(self, case: Case, world: int, state: Any, steps: int | None, at: int = 0) -> None:
        self.case, self.drawn = case, Drawn()
        self.ranks = [pipeline(case, rank, world) for rank in range(world)]
        taken = set()
        for number, rank in enumerate(self.ranks):
            if state is not None:
                rank.load_state_dict(state)
            taken.add(self._take(rank, steps))
            if number == at % world:
                self.state = through_json(rank.state_dict())
        (self.steps,) = taken
        assert len({rank.counts for rank in self.ranks}) == 1

    def _take(self, rank: stoker.Pipeline, steps: int | None) -> int:
        count = 0
        with iter(rank) as batches:
            for ids, draws in itertools.islice(batches, steps):
                self.case.check(ids.tolist())
                for x, draw in zip(ids.tolist(), draws.tolist(), strict=True):
                    assert self.drawn.setdefault(x, draw) is draw, "none twice"
                count += 1
        return count


def pipeline(case: Case, rank: int, world: int) -> stoker.Pipeline:
    return case.batched(case.begun(rank, world).random_map(drawing)).workers(0)


def check(found: list[Ranks], expected: Drawn) -> None:
    """Check that all legs together had every example once, with its own draw."""
    drawn = Drawn()
    for leg in found:
        assert not drawn.keys() & leg.drawn.keys()
        drawn |= leg.drawn
    assert drawn.items() <= expected.items()
    assert len(expected) - len(drawn) < len(found[-1].ranks)
    last = found[-1].ranks[0]
    assert last.counts.fresh_examples == last.counts.uses == len(drawn)
    assert last.counts.steps == sum(leg.steps for leg in found)
    assert last.epoch == 1


def drawn_of(case: Case) -> Drawn:
    """Return what is drawn for each example, whatever the batches."""
    return {x: draw for (x, _), draw in taken(case.begun().random_map(drawing).batch(8), 0)[1]}


@st.composite
def plans_of(draw: st.DrawFn, case: Case, legs: int) -> list[tuple[Case, int]]:
    """Draw other limits of batches, and a number of ranks, for each leg."""
    found = []
    for _ in range(legs):
        sizing = {**case.sizing}
        if draw(st.booleans()):
            what = "batch_size" if "batch_size" in sizing else "max_tokens"
            sizing |= {
                what: draw(st.integers(1, 12) if what == "batch_size" else st.integers(64, 300))
            }
        found.append((replace(case, sizing=sizing), draw(st.sampled_from(WORLDS))))
    return found


@settings(max_examples=120 if FULL else 2)
@given(case=cases(), data=st.data())
def test_what_no_step_had_comes_once_in_a_plan_of_its_own(case: Case, data: st.DataObject) -> None:
    plan = data.draw(plans_of(case, data.draw(st.integers(2, 4))), label="plan")
    # Ranks without an example warn; any may begin the epoch, if those before took no step.
    assume(len(case.lengths) >= max(world for _, world in plan))
    legs, state = list[Ranks](), None
    for number, (sized, world) in enumerate(plan):
        is_last = number == len(plan) - 1
        whole = Ranks(sized, world, state, None)
        steps = None if is_last else data.draw(st.integers(0, max(0, whole.steps - 1)))
        legs.append(Ranks(sized, world, state, steps, data.draw(st.integers(0, 7))))
        if not is_last and legs[-1].steps:
            state = legs[-1].state
        elif not is_last:
            legs.pop()  # nothing was handed out: the state stays as it was
    check(legs, drawn_of(case))


@few(3)
@given(case=cases(), old=st.sampled_from(WORLDS), new=st.sampled_from(WORLDS))
def test_an_epoch_goes_on_from_every_batch(case: Case, old: int, new: int) -> None:
    assume(len(case.lengths) >= old)
    expected, whole = drawn_of(case), Ranks(case, old, None, None)
    for steps in range(1, whole.steps, 1 + whole.steps // 16):
        first = Ranks(case, old, None, steps)
        check([first, Ranks(case, new, first.state, None)], expected)


@few(3)
@given(case=cases(), worlds=st.tuples(st.sampled_from(WORLDS), st.sampled_from(WORLDS)))
def test_a_leg_is_resumed_bit_for_bit(case: Case, worlds: tuple[int, int]) -> None:
    old, new = worlds
    assume(len(case.lengths) >= old)
    whole = Ranks(case, old, None, None)
    assume(whole.steps > 1)
    first = Ranks(case, old, None, whole.steps // 2)

    def build() -> stoker.Pipeline:
        return pipeline(case, new - 1, new)

    train, tail = build(), list[Any]()
    train.load_state_dict(first.state)
    states = [through_json(train.state_dict())]
    for ids, draws in train:
        tail.append((ids.tolist(), draws.tolist()))
        assert 0 < train.progress <= 1
        states.append(through_json(train.state_dict()))
    for at, state in enumerate(states[:-1]):
        again = build()
        again.load_state_dict(state)
        assert [(ids.tolist(), draws.tolist()) for ids, draws in again] == tail[at:]


@settings(max_examples=60 if FULL else 2)
@given(
    length=st.integers(60, 200),
    worlds=st.lists(st.sampled_from(WORLDS), min_size=2, max_size=4),
    data=st.data(),
)
def test_mixtures_go_on_with_what_no_step_had(
    length: int, worlds: list[int], data: st.DataObject
) -> None:
    def build(rank: int, world: int) -> stoker.Pipeline:
        train = mixture(length, "first")
        sizes = np.arange(length + 96) % 7 + 1
        return (
            train.shard(rank=rank, world_size=world)
            .random_map(drawing)
            .batch_by_tokens(30, sizes)
            .workers(0)
        )

    whole = mixture(length, "first").random_map(drawing).batch(7)
    expected = {x: draw for ids, draws in whole for x, draw in zip(ids, draws, strict=True)}
    found, state = Drawn(), None
    for number, world in enumerate(worlds):
        ranks = [build(rank, world) for rank in range(world)]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        steps = None
        if number < len(worlds) - 1:  # the epoch does not end here
            with iter(ranks[0]) as batches:
                left = len(batches)
            steps = data.draw(st.integers(0, min(3, left - 1)))
        for rank in ranks:
            with iter(rank) as batches:
                for ids, draws in itertools.islice(batches, steps):
                    for x, draw in zip(ids.tolist(), draws.tolist(), strict=True):
                        assert x not in found
                        found[x] = draw
                saved = through_json(rank.state_dict())
        state = saved
    assert found.items() <= expected.items()
    assert len(expected) - len(found) < worlds[-1]
    assert sum(part.fresh_examples for part in ranks[0].stats().parts) > 0 or not found


LENGTHS = np.arange(200) % 9 + 1
TOKENS = Case(LENGTHS, None, {"max_tokens": 40})


def test_the_log_names_the_plans(caplog: pytest.LogCaptureFixture) -> None:
    state = Ranks(TOKENS, 4, None, 2).state
    for sizing in ({"max_tokens": 30}, {"max_tokens": 40, "max_rows": 9}):
        other = replace(TOKENS, sizing=sizing)
        pipeline(other, 0, 4).load_state_dict(state)
    assert "with batches of 30 instead of 40" in caplog.messages[0]
    assert "with batches that are planned otherwise" in caplog.messages[1]


def test_orders_by_a_function_go_on_and_resume_on_ranks() -> None:
    first = 5

    def build(rank: int, world: int) -> stoker.Pipeline:
        train = stoker.from_arrays(np.arange(200), seed=1)
        train = train.order(lambda epoch, rng: np.roll(np.arange(200), first))
        train = train.shard(rank=rank, world_size=world).random_map(drawing)
        return train.batch_by_tokens(40, LENGTHS)

    train = build(0, 4)
    with iter(train) as batches:
        next(batches)
        state = through_json(train.state_dict())
        rest = [ids.tolist() for ids, _ in batches]
    same = build(0, 4)
    same.load_state_dict(state)
    assert same.counts.steps == 1
    assert [ids.tolist() for ids, _ in same] == rest
    others = [build(rank, 3) for rank in range(3)]
    for other in others:
        other.load_state_dict(state)
    left = [x for other in others for ids, _ in other for x in ids.tolist()]
    assert len({*left}) == len(left)
    first = 6
    others[0].load_state_dict(state)
    with pytest.raises(stoker.StateError, match="order of epoch 0 is another one"):
        iter(others[0])


@pytest.mark.parametrize("size", [40, [40], [40, 0], [0, 0, 0], [40, 0, 0, 0], "40", None])
def test_a_damaged_size_is_refused(size: Any) -> None:
    state = Ranks(TOKENS, 2, None, 1).state
    with pytest.raises(stoker.StateError):
        pipeline(TOKENS, 0, 2).load_state_dict(signed({**opened(state), "batch": size}))
