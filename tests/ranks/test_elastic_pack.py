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
from test_elastic import KINDS, Faulty, batches_of, mixture, rows
from test_places import leave

import stoker
from strategies import FULL, few, opened, shortened, signed, through_json

WORLDS = [1, 2, 3, 4, 8]
LENGTH = 16
COUNTS = np.array([0, 3, 40, 7, 1, 16, 12])
FITS: dict[str, Any] = {"split": {}, "best": {"fit": "best", "window": 5}}
Build = Callable[[int, int, int], stoker.Pipeline]


@stoker.thread_safe
def document(x: Any, rng: np.random.Generator) -> Any:
    """Make tokens that tell which they are, and what was drawn for their document."""
    count = COUNTS[int(x) % 7]
    return (int(x) * 100 + np.arange(count)) * 1_000 + rng.integers(1_000)


def with_even_start(packed: Any) -> bool:
    return bool(packed.tokens[0] // 1_000 % 2 == 0)


@stoker.thread_safe
def shifted(packed: Any, rng: np.random.Generator) -> Any:
    return np.where(packed.segments < 0, -1, packed.tokens), rng.integers(1 << 60)


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


def of_kind(kind: str, length: int, workers: int = 0, fit: str = "split") -> Build:
    def build(rank: int, world: int, each: int) -> stoker.Pipeline:
        train = documents(kind, length, rank, world)
        train = train.pack(LENGTH, **FITS[fit]).random_map(shifted).batch(each)
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
                    self.tokens += tokens[tokens >= 0].tolist()
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


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("kind", shortened(BEGUN, 2))
@settings(max_examples=50 if FULL else 2)
@given(data=st.data(), length=st.integers(30, 160), workers=st.sampled_from([0, 0, 0, 2]))
def test_each_token_that_was_not_handed_out_comes_once(
    kind: str, fit: str, data: st.DataObject, length: int, workers: int
) -> None:
    build = of_kind(kind, length, workers, fit)
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


@pytest.mark.parametrize("fit", FITS)
@settings(max_examples=20 if FULL else 1)
@given(length=st.integers(30, 90), worlds=st.tuples(*[st.sampled_from(WORLDS)] * 2))
def test_an_epoch_goes_on_from_every_batch(fit: str, length: int, worlds: tuple[int, int]) -> None:
    build = of_kind("shuffled", length, fit=fit)
    expected, (old, new) = expected_of("shuffled", length), worlds
    for steps in range(1, Packs(build).most(old, 2)):
        found = Packs(build)
        found.take(old, 2, steps)
        found.take(new, 1, min(2, max(0, found.most(new, 1) - 1)))
        found.take(1, 3, None)
        check(found, expected)


@few(1)
@given(
    data=st.data(),
    kind=st.sampled_from([*BEGUN]),
    fit=st.sampled_from([*FITS]),
    workers=st.sampled_from([0, 2]),
)
def test_a_leg_is_resumed_bit_for_bit(
    data: st.DataObject, kind: str, fit: str, workers: int
) -> None:
    build = of_kind(kind, 120, workers, fit)
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
    other.load_state_dict(leave(train, 1))
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
    state = opened(leave(train, 1))
    assert state["leg"]["offsets"]
    crafted = signed({**state, "leg": {**state["leg"], **change}})
    with pytest.raises(stoker.StateError, match="damaged"):
        build(0, 1, 2).load_state_dict(crafted)


def sizes_of(kind: str, length: int) -> Any:
    """Return the number of tokens of each example of a source."""
    count = {"mixture": length + 96, "selected": 2 * length}.get(kind, length)
    return COUNTS[np.arange(count) % 7]


def planned(kind: str, length: int, fit: str, *, balanced: bool = False) -> Build:
    sizes = sizes_of(kind, length)

    def build(rank: int, world: int, each: int) -> stoker.Pipeline:
        train = documents(kind, length, rank, world).pack(LENGTH, **FITS[fit], sizes=sizes)
        return (train.balance() if balanced else train).random_map(shifted).batch(each)

    return build


def global_batches(build: Build, legs: list[tuple[int, int]], total: int) -> list[Any]:
    """Return the sequences of each step of all ranks, with their draws, leg by leg."""
    plan = [(world, total // world, steps) for world, steps in legs]
    of_ranks, found = iter(batches_of(build, plan)), []
    for world, _ in legs:
        for step in zip(*itertools.islice(of_ranks, world), strict=True):
            rows = [
                (*row.tolist(), int(draw))
                for batch in step
                for row, draw in zip(*batch, strict=True)
            ]
            found.append(sorted(rows))
    return found


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("kind", ["shuffled", "blocks", "selected", "mixture"])
def test_global_batches_are_the_same_for_any_ranks_where_lengths_are_known(
    kind: str, fit: str, balanced: bool
) -> None:
    build = planned(kind, 150, fit, balanced=balanced)
    alone = global_batches(planned(kind, 150, fit), [(1, -1)], 12)
    found = global_batches(build, [(4, 2), (2, 1), (3, 3), (6, -1)], 12)
    whole = [batch for batch in alone if len(batch) == 12]
    assert found[: len(whole)] == whole
    assert len(whole) > 6
    rest = {row for batch in found[len(whole) :] for row in batch}
    assert rest <= {*alone[-1]}  # of a short last step, equally many for each rank


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: p.pack(LENGTH).echo(2, pool=8), "joins before or behind the pool"),
        (
            lambda p: p.pack(LENGTH, sizes=sizes_of("shuffled", 90)).filter(with_even_start),
            "leave sizes= out",
        ),
    ],
)
def test_what_ranks_have_of_their_own_is_refused(change: Any, says: str) -> None:
    def build(rank: int, world: int) -> Any:
        return change(documents("shuffled", 90, rank, world)).batch(2).steps(20)

    state = leave(build(0, 2), 1)
    with pytest.raises(stoker.StateError, match=says):
        build(0, 3).load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        {"window": "no"}, {"window": None, "due": 1, "begun": {"1": 3}}, {"begun": {"x": 1}},
        {"due": -1},
    ],
)  # fmt: skip
def test_damaged_windows_are_refused(change: dict[str, Any]) -> None:
    def build() -> stoker.Pipeline:
        return documents("shuffled", 90).pack(LENGTH, **FITS["best"]).batch(2)

    fields = opened(leave(build(), 1))
    (node,) = fields["parts"]
    with pytest.raises(stoker.StateError, match="damaged"):
        build().load_state_dict(signed({**fields, "parts": [{**node, **change}]}))
