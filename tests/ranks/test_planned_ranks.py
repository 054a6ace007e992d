"""Planned batches and balance on real ranks, which agree on sizes and a seed, and echo alike."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from scripts import REAL_WORLDS, told_by

EPOCHS = """
    lengths = np.minimum(np.random.default_rng(2).lognormal(3, 0.8, 301), 200).astype(int) + 1
    data = stoker.from_arrays(np.arange(301)).shuffle()
    told, planned = {}, data.shard().batch_by_tokens(400, lengths)
    try:
        len(planned)
    except TypeError as error:
        told["before"] = str(error)
    told["epochs"] = [[ids.tolist() for ids in planned] for _ in range(2)]
    told["length"], told["progress"] = len(planned), planned.progress
    told["auto"] = len([ids for ids in data.shard().batch_by_tokens(400, lengths).echo()])
    told["balanced"] = [ids.tolist() for ids in data.shard().balance(lengths).batch(8)]
    others = stoker.from_arrays(np.arange(301), seed=1).shuffle().shard()
    try:
        iter(others.batch_by_tokens(400, lengths + RANK))
    except ValueError as error:
        told["differ"] = str(error)
    fixed = stoker.from_arrays(np.arange(301), seed=1)
    for name, train in (
        ("order", fixed.order(lambda epoch, rng: np.roll(np.arange(301), RANK)).shard()),
        ("later", fixed.order(lambda epoch, rng: np.roll(np.arange(301), epoch * RANK)).shard()
            .batch(50).repeat().steps(9)),
    ):
        try:
            list(train)
        except ValueError as error:
            told[name] = str(error)
"""


@pytest.mark.full
@pytest.mark.parametrize("world", REAL_WORLDS)
def test_ranks_take_equal_steps_of_one_plan(tmp_path: Path, world: int) -> None:
    told = told_by(tmp_path, world, EPOCHS)
    assert all("give seed=" in rank["before"] for rank in told)
    for name in ("length", "progress", "auto"):
        assert len({rank[name] for rank in told}) == 1
    for epoch in range(2):
        every = [x for rank in told for x in chain.from_iterable(rank["epochs"][epoch])]
        assert len({*every}) == len(every) > 301 - world
        assert len({len(rank["epochs"][epoch]) for rank in told}) == 1
    steps = list(zip(*(rank["balanced"] for rank in told), strict=True))
    assert all(len({len(batch) for batch in step}) == 1 for step in steps)
    every = [x for step in steps for batch in step for x in batch]
    assert len({*every}) == len(every)
    work = np.array([[len(batch) for batch in step] for step in steps])
    assert work.sum() == 301 // world * world
    assert all("ranks differ in chain" in rank["differ"] for rank in told)
    assert all(
        "ranks differ in the order of the epoch" in rank[name]
        for rank in told
        for name in ("order", "later")
    )
