"""Epochs of packed sequences go on with other ranks: each token comes once, with its own draws."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_elastic import KINDS, Faulty, mixture, rows

import stoker
from strategies import FULL, few, opened, shortened, signed, through_json

WORLDS = [1, 2, 3, 4, 8]
LENGTH = 16
Build = Callable[[int, int, int], stoker.Pipeline]


@stoker.thread_safe
def document(x: Any, rng: np.random.Generator) -> Any:
    """Make tokens that tell which they are, and what was drawn for their document."""
    count = [0, 3, 40, 7, 1, 16, 12][int(x) % 7]
    return (int(x) * 100 + np.arange(count)) * 1_000 + rng.integers(1_000)


def with_even_start(packed: Any) -> bool:
    return bool(packed.tokens[0] // 1_000 % 2 == 0)


@stoker.thread_safe
def shifted(packed: Any, rng: np.random.Generator) -> Any:
    return packed.tokens, rng.integers(1 << 60)


def wanted(x: Any) -> bool:
    return bool(x % 3)


BEGUN: dict[str, Callable[[int], stoker.Pipeline]] = {
    "shuffled": KINDS["shuffled"],
    "filtered mixture": lambda n: mixture(n, "first"),
    **{kind: KINDS[kind] for kind in ("blocks", "balanced", "selected")},
    "mixture": lambda n: mixture(n, "first"),
    "budget": lambda n: stoker.from_dataset(Faulty(n), seed=7, max_errors="100%").shuffle(),
    "filtered": lambda n: rows(n).shuffle(),
}


def documents(kind: str, length: int, rank: int = 0, world: int = 1) -> stoker.Pipeline:
    sizes = np.arange(length) % 7 + 1 if kind == "balanced" else None
    train = BEGUN[kind](length).shard(rank=rank, world_size=world)
    train = train if sizes is None else train.balance(sizes)
    train = train.filter(wanted) if kind.startswith("filtered") else train
    return train.random_map(document)


def of_kind(kind: str, length: int, workers: int = 0) -> Build:
    def build(rank: int, world: int, each: int) -> stoker.Pipeline:
        train = documents(kind, length, rank, world)
        train = train.pack(LENGTH).random_map(shifted).batch(each)
        return (train.steps(10_000) if world > 1 else train).workers(workers)

    return build


class Packs:
    """What was handed out in an epoch, leg by leg, and the states behind it.

    Attributes:
        tokens: all of them.
        draws: of each packed sequence.
        states: of all ranks behind the last leg; None before one has taken a step.
    """

    def __init__(self, build: Build) -> None:
        self._build = build
        self.tokens, self.draws = list[int](), list[int]()
        self.steps = 0
        self.states: list[Any] | None = None

    def ranks(self, world: int, each: int) -> list[stoker.Pipeline]:
        """Return the ranks of a leg."""
        made = [self._build(rank, world, each) for rank in range(world)]
        for train in made:
            if self.states is not None:
                train.load_state_dict(self.states)
        return made

    def most(self, world: int, each: int) -> int:
        """Return how many steps all ranks of a leg can take."""
        counts = []
        for train in self.ranks(world, each):
            count = 0
            with contextlib.suppress(stoker.StokerError):  # fewer than .steps() asks for
                for _ in train:
                    count += 1
            counts.append(count)
        return min(counts)

    def take(self, world: int, each: int, steps: int | None) -> list[stoker.Pipeline]:
        """Take steps on all ranks."""
        made, states = self.ranks(world, each), []
        for train in made:
            taken = 0
            with iter(train) as batches:
                for tokens, draws in itertools.islice(batches, steps):
                    self.tokens += tokens.ravel().tolist()
                    self.draws += draws.tolist()
                    taken += 1
                states.append(through_json(train.state_dict()))
        self.steps += taken
        if taken:
            self.states = states
        return made


def expected_of(kind: str, length: int) -> set[int]:
    """Return all tokens of an epoch."""
    return {token for tokens in documents(kind, length) for token in tokens.tolist()}


def check(found: Packs, expected: set[int]) -> None:
    assert len({*found.tokens}) == len(found.tokens), "no token comes twice"
    assert len({*found.draws}) == len(found.draws), "no draw comes twice"
    assert {*found.tokens} <= expected
    assert len(expected) - len(found.tokens) < LENGTH, "only what does not fill the last sequence"


@pytest.mark.parametrize("kind", shortened(BEGUN, 2))
@settings(max_examples=50 if FULL else 2)
@given(data=st.data(), length=st.integers(30, 160), workers=st.sampled_from([0, 0, 0, 2]))
def test_each_token_that_was_not_handed_out_comes_once(
    kind: str, data: st.DataObject, length: int, workers: int
) -> None:
    build = of_kind(kind, length, workers)
    expected, found = expected_of(kind, length), Packs(build)
    for _ in range(data.draw(st.integers(1, 3))):
        world, each = data.draw(st.sampled_from(WORLDS)), data.draw(st.integers(1, 5))
        most = max(0, found.most(world, each) - 1)  # the epoch does not end here
        found.take(world, each, data.draw(st.integers(0, most)))
    (last,) = found.take(1, data.draw(st.integers(1, 5)), None)
    check(found, expected)
    assert last.counts.steps == found.steps
    assert last.counts.uses == len(found.draws)
    assert last.epoch == 1


@settings(max_examples=20 if FULL else 1)
@given(length=st.integers(30, 90), worlds=st.tuples(*[st.sampled_from(WORLDS)] * 2))
def test_an_epoch_goes_on_from_every_batch(length: int, worlds: tuple[int, int]) -> None:
    build = of_kind("shuffled", length)
    expected, (old, new) = expected_of("shuffled", length), worlds
    for steps in range(1, Packs(build).most(old, 2)):
        found = Packs(build)
        found.take(old, 2, steps)
        found.take(new, 1, min(2, max(0, found.most(new, 1) - 1)))
        found.take(1, 3, None)
        check(found, expected)


@few(1)
@given(data=st.data(), kind=st.sampled_from([*BEGUN]), workers=st.sampled_from([0, 2]))
def test_a_leg_is_resumed_bit_for_bit(data: st.DataObject, kind: str, workers: int) -> None:
    build = of_kind(kind, 120, workers)
    found, world = Packs(build), data.draw(st.sampled_from(WORLDS))
    found.take(4, 1, data.draw(st.integers(1, 4)))
    rank = data.draw(st.integers(0, world - 1))
    train, states, tail = found.ranks(world, 2)[rank], list[Any](), list[Any]()
    with iter(train) as batches:
        for _ in range(3):
            states.append(through_json(train.state_dict()))
            tail.append([leaf.tolist() for leaf in next(batches)])
    for at, state in enumerate(states):
        again = build(rank, world, 2)
        again.load_state_dict(state)
        with iter(again) as batches:
            rest = [[leaf.tolist() for leaf in next(batches)] for _ in range(3 - at)]
        assert rest == tail[at:]


def test_what_stands_behind_may_leave_sequences_out() -> None:
    def build(rank: int, world: int, each: int) -> stoker.Pipeline:
        train = rows(150).shuffle().shard(rank=rank, world_size=world).random_map(document)
        train = train.pack(LENGTH).filter(with_even_start).random_map(shifted).batch(each)
        return (train.steps(10_000) if world > 1 else train).workers(0)

    found = Packs(build)
    for world, steps in ((4, 2), (3, 2), (2, 1)):
        found.take(world, 1, steps)
    found.take(1, 3, None)
    assert len({*found.tokens}) == len(found.tokens)
    assert len({*found.draws}) == len(found.draws)


def states_of(world: int, steps: int) -> tuple[Build, list[Any]]:
    build = of_kind("shuffled", 150)
    found = Packs(build)
    found.take(world, 2, steps)
    assert found.states is not None
    return build, found.states


def test_the_states_of_all_ranks_are_needed() -> None:
    build, states = states_of(4, 2)
    with pytest.raises(stoker.StateError, match="the states of all are needed, in a list"):
        build(0, 3, 2).load_state_dict(states[0])
    with pytest.raises(stoker.StateError, match="the state is rank 1's"):
        build(0, 4, 2).load_state_dict(states[1])


def test_a_document_that_became_shorter_is_noticed() -> None:
    def build(count: int) -> stoker.Pipeline:
        train = stoker.from_arrays(np.arange(20), seed=1)
        return train.map(lambda x: np.arange(count)).pack(LENGTH)

    train, other = build(40).batch(1), build(10).batch(2)
    with iter(train) as batches:
        next(batches)
        other.load_state_dict(train.state_dict())
    with pytest.raises(stoker.StateError, match="has become shorter"):
        list(other)


@pytest.mark.parametrize(
    "change",
    [
        {"cut": "no"}, {"offsets": [1] * 99}, {"offsets": [0]}, {"offsets": [-1]},
        {"sequences": -1}, {"sequences": "1"}, {"offsets": None},
    ],
)  # fmt: skip
def test_damaged_starts_are_refused(change: dict[str, Any]) -> None:
    build, states = states_of(4, 2)
    train = build(0, 1, 2)
    train.load_state_dict(states)
    with iter(train) as batches:
        next(batches)
        state = opened(train.state_dict())
    assert state["leg"]["offsets"]
    crafted = signed({**state, "leg": {**state["leg"], **change}})
    with pytest.raises(stoker.StateError, match="damaged"):
        build(0, 1, 2).load_state_dict(crafted)
