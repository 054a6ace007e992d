"""An echo of rows in memory keeps only their numbers: nobody can tell, but by memory and time."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

import stoker
from stoker.basics import pytree

Chain = Callable[[stoker.Pipeline], stoker.Pipeline]
ROWS, NUMBERS = np.arange(480).reshape(120, 4), np.arange(120)


def in_memory() -> stoker.Pipeline:
    return stoker.from_arrays(ROWS, NUMBERS, seed=3)


def in_pool() -> stoker.Pipeline:
    return stoker.from_dataset(list(zip(ROWS, NUMBERS, strict=True)), seed=3)


CHAINS: dict[str, Chain] = {
    "batches": lambda data: data.shuffle().echo(3).batch(8),
    "a part of a use, and a small pool": lambda data: (
        data.shuffle().echo(2.5, pool=24).batch(8, drop_last=True)
    ),
    "a pool in bytes": lambda data: data.echo(3, pool="2KiB").batch(8),
    "a rank": lambda data: data.shuffle().shard(rank=1, world=3).echo(3).batch(8),
    "batches of one": lambda data: data.shuffle().echo(3).batch(1),
    "few examples": lambda data: data.take(5).echo(3).batch(8),
    "an echo behind": lambda data: data.shuffle().echo(2).batch(8).echo(2),
    "a map of batches": lambda data: (
        data.echo(3).batch(8).random_map(lambda batch, rng: (batch[0] + rng.integers(9), batch[1]))
    ),
}


def told(pipeline: stoker.Pipeline) -> list[tuple[object, ...]]:
    """Return what is known of each batch: its rows, uses, ages, and fresh examples so far."""
    found: list[tuple[object, ...]] = []
    for batch in pipeline:
        uses, stats = pipeline.last, pipeline.stats()
        at = stats.fresh_examples, stats.uses, stats.repeats_in_batches
        found.append((pytree.deep_copy(batch), uses.number.tolist(), uses.age_steps.tolist(), at))
    return found


@pytest.mark.parametrize("name", CHAINS)
def test_the_stream_is_that_of_a_pool(name: str) -> None:
    chain = CHAINS[name]
    wanted = told(chain(in_pool()).workers(0))
    assert wanted
    for workers in (0, 2):
        assert pytree.equal(told(chain(in_memory()).workers(workers)), wanted)


@pytest.mark.parametrize("name", CHAINS)
def test_states_of_one_are_states_of_the_other(name: str) -> None:
    chain = CHAINS[name]
    whole = chain(in_memory()).workers(0)
    batches, states = [], []
    for batch in whole:
        batches.append(pytree.deep_copy(batch))
        states.append(json.loads(json.dumps(whole.state_dict())))
    for at in range(0, len(batches) - 1, 1 + len(batches) // 5):
        resumed = chain(in_memory()).workers(2)
        resumed.load_state_dict(states[at])
        assert pytree.equal(list(resumed), batches[at + 1 :])


def test_the_pool_has_no_copies_and_a_batch_is_the_consumers_own() -> None:
    rows = ROWS.copy()
    train = stoker.from_arrays(rows, seed=0).echo(3).batch(8)
    for batch in train:
        batch[:] = -1
    assert (rows == ROWS).all()
    assert train.stats().pool_bytes == 0
    mapped = stoker.from_dataset(list(rows), seed=0).echo(3).batch(8)
    assert len(list(mapped)) == len(train)
    assert mapped.stats().pool_bytes > 0
