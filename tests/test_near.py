"""`.shard(near="cache")` on real ranks: exactly once, resumable, and alike on all."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker
from scripts import REAL_WORLDS
from stoker.schedule.owners import Member, OwnerMap
from stoker.stages.cache import CacheStage
from test_crafted_states import signed
from test_ranks import told_by

CLUSTER = """
    from dataclasses import replace
    from stoker import testing
    from stoker.schedule.owners import Member, OwnerMap
    from stoker.schedule.owners import OwnerSnapshot
    from stoker.pipeline import Pipeline
    from stoker.stages.cache import CacheStage


    class Nodes:
        \"\"\"A cluster whose members change with every look, and of which ranks hear late.\"\"\"

        def __init__(self, at=0, *, moves=False):
            self.node, self.at, self.moves = f"n{RANK}", at + 5 * RANK, moves

        def owner_map(self):
            self.at += self.moves
            members = [Member(f"n{i}", "", 1 + (i + self.at) % 3) for i in range(WORLD)]
            return OwnerMap.of(members, self.at)


    def clustered(pipeline, cluster):
        stages = [
            replace(stage, cluster=cluster) if isinstance(stage, CacheStage) else stage
            for stage in pipeline.chain.stages
        ]
        return Pipeline(replace(pipeline.chain, stages=tuple(stages)))


    def begun(cluster, examples=100, **kw):
        data = stoker.from_dataset(Slow(examples), seed=3).shuffle().shard(near="cache")
        return clustered(data.cache("4MB", version="x"), cluster)


    def ids(pipeline):
        return [batch["id"].tolist() for batch in pipeline]
"""

TRAINED = (
    CLUSTER
    + """
    told = {"epochs": [], "kinds": {}}
    train = begun(Nodes(moves=True)).random_map(jitter, on="x").batch(8)
    told["printed"], told["signature"] = str(train), train.chain.signature()[2]
    for epoch in range(3):
        told["epochs"].append(ids(train))
    undealt = stoker.from_dataset(Slow(100), seed=3).shuffle().shard().batch(8)
    told["undealt"] = ids(undealt)
    told["lengths"] = len(train), len(undealt)

    built = {
        "plain": lambda cluster: begun(cluster).batch(8),
        "echo": lambda cluster: begun(cluster, 40).echo(2, pool=20).random_map(
            jitter, on="x").batch(4, drop_last=True),
        "batches": lambda cluster: begun(cluster, 40).batch(4).echo(1.5, pool=3),
        "steps": lambda cluster: begun(cluster).batch(8).steps(4),
        "processes": lambda cluster: begun(cluster, 40).batch(8).workers(2, kind="process"),
        "auto": lambda cluster: begun(cluster, 40).echo().batch(4),
    }
    for name, build in built.items():
        pipeline = build(Nodes())
        told["kinds"][name] = ids(pipeline)
        if name != "auto":
            told[name] = testing.check_resume(lambda: build(Nodes(moves=True)), every=3)
"""
)


@pytest.mark.full  # in short: test_dealing.py
@pytest.mark.parametrize("world", REAL_WORLDS)
def test_ranks_deal_exactly_once_and_resume(tmp_path: Path, world: int) -> None:
    told = told_by(tmp_path, world, TRAINED)
    each = 100 // world
    for rank in told:
        assert rank["lengths"][0] == rank["lengths"][1] == -(-each // 8)
        assert rank["signature"] == f"shard(world={world}, near=cache)"
        assert f"dealt inside each {8 * world} examples to where the cache" in rank["printed"]
        assert "BatchNorm" in rank["printed"]
    for epoch in range(3):
        seen = [rank["epochs"][epoch] for rank in told]
        assert {len(list(chain(*part))) for part in seen} == {each}
        assert len(set(chain(*chain(*seen)))) == each * world
    for number in range(told[0]["lengths"][0]):  # each global batch is the one that it was
        dealt = chain(*(rank["epochs"][0][number] for rank in told))
        assert sorted(dealt) == sorted(chain(*(rank["undealt"][number] for rank in told)))
    for name in ("plain", "processes"):
        seen = [list(chain(*rank["kinds"][name])) for rank in told]
        assert len(set(chain(*seen))) == len(list(chain(*seen))) == len(seen[0]) * world
    echoed = [np.array(rank["kinds"]["echo"]).ravel() for rank in told]
    assert not set(echoed[0]) & set(echoed[1])
    assert {len(rank["kinds"]["steps"]) for rank in told} == {4}
    assert len({len(rank["kinds"]["auto"]) for rank in told}) == 1
    assert all(rank[name] > 1 for rank in told for name in ("plain", "echo", "batches", "steps"))


OTHERS = (
    CLUSTER
    + """
    told = {"said": []}
    first, second = (begun(Nodes(at)).batch(4) for at in (0, 1))
    states = []
    for pipeline in (first, second):
        with iter(pipeline) as batches:
            next(batches)
            states.append(pipeline.state_dict())
    told["owners"] = [state["owners"] for state in states]

    # Ranks that go on from different maps; one that goes on alone.
    for state in (states[RANK], states[0] if RANK else None):
        pipeline = begun(Nodes()).batch(4)
        if state is not None:
            pipeline.load_state_dict(state)
        try:
            iter(pipeline)
        except stoker.StateError as error:
            told["said"].append(str(error))

    # Another number of ranks on one of them; an undealt pipeline, and the other way round.
    data = stoker.from_dataset(Slow(100), seed=3).shuffle()
    wide = data.shard(rank=RANK, world=WORLD + RANK, near="cache").cache("4MB", version="x")
    try:
        iter(clustered(wide, Nodes()).batch(4))
    except stoker.StokerError as error:
        told["said"].append(str(error))
    undealt = data.shard().batch(4)
    try:
        undealt.load_state_dict(states[0])
    except stoker.StateError as error:
        told["said"].append(str(error))
    try:
        iter(data.shard(near="cache").batch(4))
    except ValueError as error:
        told["said"].append(str(error))

    # A state at the beginning of an epoch keeps the map; the next epoch takes the one of then.
    pipeline = begun(Nodes(moves=True)).batch(4)
    with iter(pipeline):
        state = pipeline.state_dict()
    told["kept"] = state["owners"]["version"]
    pipeline = begun(Nodes(7)).batch(4)
    pipeline.load_state_dict(state)
    for epoch in range(2):
        with iter(pipeline) as batches:
            for batch in batches:
                told[f"epoch {epoch}"] = pipeline.state_dict().get("owners", {}).get("version")
                break
            list(batches)
"""
)


@pytest.mark.full
def test_ranks_compare_what_they_deal_by(tmp_path: Path) -> None:
    told = told_by(tmp_path, 2, OTHERS)
    assert told[0]["owners"] == told[1]["owners"]  # rank 0's, though each knew another
    assert [owners["version"] for owners in told[0]["owners"]] == [0, 1]
    assert told[0]["owners"][0]["ranks"] == [0, 1]
    for rank in told:
        different, alone, wide, undealt, nothing = rank["said"]
        assert "ranks differ in position" in alone  # before the maps are compared
        assert "dealt by different maps" in different
        assert "deal to 2 and to 3 ranks" in wide
        assert "near=cache" in undealt
        assert ".cache(cluster=...)" in nothing
        assert rank["kept"] == rank["epoch 0"] == 1
        assert rank["epoch 1"] == 7


def test_what_cannot_be_dealt_is_refused() -> None:
    data = stoker.from_arrays(np.arange(40), seed=0)
    with pytest.raises(ValueError, match="near='cache' or nothing, not 'disk'"):
        data.shuffle().shard(near="disk")
    with pytest.raises(ValueError, match="deals equal parts"):
        data.shuffle().shard(near="cache", uneven=True)
    with pytest.raises(ValueError, match=r"put \.shuffle\(\) before it"):
        data.shard(near="cache")
    with pytest.raises(ValueError, match="a stream has none"):
        stoker.from_iterable(lambda: iter(range(9)), seed=0).shuffle().shard(near="cache")
    sharded = data.shuffle().shard(rank=0, world=2, near="cache")
    with pytest.raises(ValueError, match=r"add \.cache\(cluster=\.\.\.\)"):
        iter(sharded.batch(4))


class OneNode:
    """A cluster of two nodes, on one of which this is the only rank."""

    node = "b"

    def owner_map(self) -> OwnerMap:
        return OwnerMap.of([Member("a", "", 1), Member("b", "", 3)], 5)


TWO = OneNode()


def alone() -> stoker.Pipeline:
    data = stoker.from_arrays(np.arange(40), seed=0).shuffle().shard(rank=0, world=1, near="cache")
    built = data.cache("1MiB", version="x").batch(4).chain
    stages = [replace(s, cluster=TWO) if isinstance(s, CacheStage) else s for s in built.stages]
    return stoker.Pipeline(replace(built, stages=tuple(stages)))


def test_a_position_that_nobody_reached_is_saved_without_owners() -> None:
    def build() -> stoker.Pipeline:
        return alone().repeat().steps(3)

    train, other = build(), build()
    train.set_epoch(4)
    other.load_state_dict(json.loads(json.dumps(train.state_dict())))
    assert [batch.tolist() for batch in other] == [batch.tolist() for batch in train]
    assert train.clock == other.clock


WRONG: list[tuple[str, Any]] = [
    ("members", [["b", 1], ["a", 3]]),
    ("members", [["a", 1], ["a", 3]]),
    ("members", [["a", 0], ["b", 3]]),
    ("members", [["a", 1.5], ["b", 3]]),
    ("members", [["a"], ["b", 3]]),
    ("members", [["a" * 5000, 1], ["b", 3]]),
    ("members", [[f"{i:08}", 1] for i in range(20_000)]),
    ("members", {"a": 1}),
    ("ranks", [2]),
    ("ranks", [-2]),
    ("ranks", [0, 1]),
    ("ranks", []),
    ("ranks", "0"),
    ("version", None),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_state_with_what_cannot_be_a_map_is_refused(field: str, value: Any) -> None:
    pipeline = alone()
    batches = iter(pipeline)
    next(batches)
    state = pipeline.state_dict()
    assert state["owners"] == {"version": 5, "members": [["a", 1], ["b", 3]], "ranks": [1]}
    crafted = copy.deepcopy(state)
    crafted["owners"][field] = value
    with pytest.raises(stoker.StateError):
        alone().load_state_dict(signed(crafted))
    without = {name: value for name, value in state.items() if name != "owners"}
    with pytest.raises(stoker.StateError, match="does not say how examples were dealt"):
        alone().load_state_dict(signed(without))
    again = alone()
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in batches]
