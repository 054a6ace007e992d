"""Draws and global batches follow from places: other ranks and batch sizes do not change them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.schedule.orders.order import TRUE_PERMUTATION_LIMIT
from strategies import few, one_in, through_json

PLANS = [(4, 8), (2, 16), (8, 4), (1, 32)]
"""Worlds, and rows of a rank, of the same global batch."""
STEPS = 31

Drawn = list[tuple[tuple[int, int], float]]
"""Examples, the numbers of their uses, and what was drawn for them."""


@stoker.thread_safe
def drawing(x: Any, rng: np.random.Generator) -> Any:
    return x, rng.random()


def mixture(length: int) -> stoker.Pipeline:
    a = stoker.from_arrays(np.arange(length)).shuffle()
    b = stoker.from_arrays(np.arange(length, 2 * length)).random_map(shifted)
    c = stoker.from_arrays(np.arange(2 * length, 2 * length + 300)).shuffle()
    return stoker.mix([a, b, c], weights=[0.55, 0.3, 0.15], stop="all", seed=7)


@stoker.thread_safe
def shifted(x: Any, rng: np.random.Generator) -> Any:
    return x + rng.integers(0, 2) * 100_000


def weights(n: int) -> Any:
    """A few of them are heavy, so that examples come twice."""
    return np.arange(n) % 7 + 40.0 * (np.arange(n) % 50 == 0)


def backwards(n: int) -> Any:
    return lambda epoch, rng: np.roll(np.arange(n)[::-1], epoch)


KINDS: dict[str, Any] = {
    "plain": lambda n: stoker.from_arrays(np.arange(n), seed=7),
    "cut": lambda n: stoker.from_arrays(np.arange(n), seed=7).skip(5).shuffle().skip(3).take(n),
    "shuffled": lambda n: stoker.from_arrays(np.arange(n), seed=7).shuffle(),
    "large": lambda n: stoker.from_dataset(range(TRUE_PERMUTATION_LIMIT + n), seed=7).shuffle(),
    "mixture": mixture,
    "weighted": lambda n: stoker.from_arrays(np.arange(n), seed=7).sample(weights(n)),
    "drawn": lambda n: stoker.from_arrays(np.arange(n), seed=7).sample(
        weights(n), num_samples=n - 3
    ),
    "own": lambda n: stoker.from_arrays(np.arange(n), seed=7).order(backwards(n), length=n),
    "selected": lambda n: (
        stoker.from_arrays(np.arange(2 * n), seed=7).select(np.arange(2 * n) % 2 == 0).shuffle()
    ),
}


def of_rank(kind: str, length: int, rank: int, world: int) -> stoker.Pipeline:
    return KINDS[kind](length).shard(rank=rank, world_size=world)


def taken(train: stoker.Pipeline, epoch: int) -> tuple[list[list[int]], Drawn]:
    """Return the examples of each batch of an epoch, and what was drawn for each of their uses."""
    train.set_epoch(epoch)
    batches: list[list[int]] = []
    drawn: Drawn = []
    for ids, draws in train:
        batches.append(ids.tolist())
        uses = train.last.number.tolist()
        drawn += zip(zip(ids.tolist(), uses, strict=True), draws.tolist(), strict=True)
    return batches, drawn


def leave(train: stoker.Pipeline, steps: int) -> dict[str, Any]:
    """Take so many batches and return the state there."""
    with iter(train) as batches:
        for _ in itertools.islice(batches, steps):
            pass
        state: dict[str, Any] = through_json(train.state_dict())
    return state


def of_all(ranks: list[stoker.Pipeline], epoch: int) -> tuple[list[list[int]], Drawn]:
    """Return the global batches of ranks, sorted, and what was drawn for the uses in them."""
    each = [taken(rank, epoch) for rank in ranks]
    together = sorted(one for _, drawn in each for one in drawn)
    steps = zip(*(batches for batches, _ in each), strict=True)
    return [sorted(x for batch in step for x in batch) for step in steps], together


@pytest.mark.parametrize("kind", one_in(3, KINDS))
@few(3)
@given(length=st.integers(1_000, 1_050), epoch=st.integers(0, 2))
def test_global_batches_and_draws_are_the_same_for_any_ranks(
    kind: str, length: int, epoch: int
) -> None:
    if kind == "plain":
        length -= length % 8  # what ranks leave out of parts that are fixed depends on their number
    found = []
    for world, each in PLANS:
        ranks = [
            of_rank(kind, length, rank, world).random_map(drawing).batch(each).steps(STEPS)
            for rank in range(world)
        ]
        found.append(of_all(ranks, epoch))
    batches, drawn = found[0]
    assert len(batches) == STEPS
    assert all(len(batch) == 32 for batch in batches)
    assert all(other == (batches, drawn) for other in found)
    assert len({draw for _, draw in drawn}) == len(drawn)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("weighted", "drawn")])  # repeats
def test_uses_of_an_echo_draw_the_same_for_any_ranks(kind: str) -> None:
    found: dict[tuple[int, int], float] = {}
    for world, each in PLANS:
        for rank in range(world):
            train = of_rank(kind, 1_000, rank, world).echo(2, pool=64).random_map(drawing)
            _, drawn = taken(train.batch(each).steps(STEPS), 0)
            assert all(found.setdefault(use, draw) == draw for use, draw in drawn)
    assert {use for _, use in found} == {1, 2}
    assert len(set(found.values())) == len(found)


@few(6)
@given(length=st.integers(200, 300), epoch=st.integers(0, 2), world=st.integers(2, 5))
def test_blocks_are_a_rank_s_own_and_draw_the_same(length: int, epoch: int, world: int) -> None:
    def build(rank: int, world: int) -> stoker.Pipeline:
        train = stoker.from_arrays(np.arange(length), seed=3).shuffle(block=4)
        return (
            train.shard(rank=rank, world_size=world, remainder="uneven")
            .random_map(drawing)
            .batch(8)
        )

    whole = taken(build(0, 1), epoch)[1]
    together = [one for rank in range(world) for one in taken(build(rank, world), epoch)[1]]
    assert sorted(together) == sorted(whole)


def test_ranks_of_fixed_parts_and_of_batches_draw_apart() -> None:
    def build(rank: int) -> list[stoker.Pipeline]:
        fixed = stoker.from_arrays(np.arange(101), seed=3).shard(rank=rank, world_size=3).shuffle()
        batches = stoker.from_arrays(np.arange(96), seed=3).shuffle().shard(rank=rank, world_size=3)
        return [fixed.random_map(drawing), batches.batch(4).random_map(drawing)]

    for each in zip(*(build(rank) for rank in range(3)), strict=True):
        drawn = [draw for train in each for _, draw in train]
        assert len(set(drawn)) == len(drawn)


class OldDataset:
    """Draws from the global generators, as many do."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, random.random() + float(np.random.random())


def test_old_datasets_in_processes_draw_the_same_for_any_ranks() -> None:
    found: dict[tuple[int, int], float] = {}
    for world, each in [(1, 8), (2, 4)]:
        for rank in range(world):
            train = stoker.from_dataset(OldDataset(), seed=3).shuffle()
            train = train.shard(rank=rank, world_size=world).batch(each)
            _, drawn = taken(train.workers(1, kind="process"), 0)
            assert all(found.setdefault(use, draw) == draw for use, draw in drawn)
    assert len(found) == 96
    assert len(set(found.values())) == 96


def failing(x: Any) -> Any:
    if int(x) % 10 == 7:
        raise ValueError("a seven")
    return x


@pytest.mark.parametrize("kind", ["plain", "shuffled", "mixture"])
@pytest.mark.parametrize("behind", [False, True])
def test_processes_name_the_example_that_failed(kind: str, behind: bool) -> None:
    train = of_rank(kind, 100, 1, 2)
    train = (train.echo(2, pool=8).map(failing) if behind else train.map(failing)).batch(4)
    with pytest.raises(stoker.StageError) as here:
        list(train.workers(0))
    with pytest.raises(stoker.StageError) as there:
        list(train.workers(1, kind="process"))
    assert here.value.index == there.value.index
    assert there.value.number is None
    assert there.value.index is not None
    assert there.value.index % 10 == 7
